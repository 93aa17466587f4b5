"""Images of a record in, StoredImages with a Locator out: `pack --media reference`.

| image of the record | located in |
|---|---|
| a file | that file, auxiliary dataset `files` |
| a member of a tar | the tar, auxiliary dataset `tars` |
| bytes: cells of tables, base64 in JSON, images of a sample_loader | not yet |

`MediaLocator.locate` runs in the write stage, which reads each image once for its digest, as a copy would.
"""

import os
import time
from dataclasses import dataclass
from typing import Literal, get_args

from energon_packed.encoding.vision.images import read_header, sniff_extension
from energon_packed.errors import ConfigError
from energon_packed.formats import StoredImage
from energon_packed.formats.references import FILES, TARS, Locator, media_digest
from energon_packed.records import MediaReference

Media = Literal["copy", "reference"]
MEDIA: tuple[Media, ...] = get_args(Media)
MediaCheck = Literal["digest", "time"]
MEDIA_CHECKS: tuple[MediaCheck, ...] = get_args(MediaCheck)


@dataclass(slots=True, kw_only=True)
class MediaLocator:
    """Function of the write stage: makes the stored form of an image without its bytes.

    Attributes:
        check: value that readers compare: `digest` of the bytes, or size and `time` of change of the file.
        seconds: time for reading and hashing images so far.
    """

    check: MediaCheck
    seconds: float = 0.0

    def locate(self, reference: MediaReference) -> StoredImage:
        """Return the location of an image, with the value that readers compare.

        Raises:
            RecordError: the image cannot be read.
            ConfigError: the image has no file.
        """
        if reference.path is None:
            raise ConfigError(
                "`media` must be 'copy' for images that are not files or members of tars, got 'reference'. Write the "
                "images to files, or omit `media`"
            )
        file = os.path.abspath(reference.file or "")
        if self.check == "digest":
            start = time.perf_counter()
            data = reference.read()
            extension, size, digest, changed = sniff_extension(data), len(data), media_digest(data), None
            self.seconds += time.perf_counter() - start
        else:
            header, status = read_header(reference), os.stat(file)
            extension, size, digest = header.extension, header.num_bytes, None
            changed = (status.st_size, status.st_mtime_ns)
        path, offset = file.lstrip("/"), reference.offset or 0
        # Not by the name of the member: names repeat in a tar, and Energon needs an extension to decode an image.
        source, member = (FILES, path) if reference.member is None else (TARS, f"{path}/{offset}.{extension}")
        locator = Locator(file, offset, size, digest, changed, source, member)
        return StoredImage(extension, b"", locator=locator)
