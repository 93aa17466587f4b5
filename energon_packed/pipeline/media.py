"""Images of a record in, StoredImages with a Locator out: `pack --media reference`.

| image of the record | located in |
|---|---|
| a file | that file, auxiliary dataset `files` |
| a member of a tar | the tar, auxiliary dataset of its folder |
| bytes: cells of tables, base64 in JSON, images of a sample_loader | not yet |

`MediaLocator.locate` runs in the write stage, which reads each image once for its digest, as a copy would.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from energon_packed.encoding.vision.images import read_header, sniff_extension
from energon_packed.errors import ConfigError
from energon_packed.formats import StoredImage
from energon_packed.formats.references import Locator, media_digest
from energon_packed.records import MediaReference
from energon_packed.sources import Source
from energon_packed.storage import absolute_name, as_path, is_remote

Media = Literal["copy", "reference"]
MEDIA: tuple[Media, ...] = get_args(Media)
MediaCheck = Literal["digest", "time"]
MEDIA_CHECKS: tuple[MediaCheck, ...] = get_args(MediaCheck)
FILES = "files"
"""Auxiliary dataset of files that are not members of a tar: the root folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaLocator:
    """Function of the write stage: makes the stored form of an image without its bytes.

    Attributes:
        check: value that readers compare: `digest` of the bytes, or size and `time` of change of the file.
        folders: name of the auxiliary dataset of each folder with tars.
    """

    check: MediaCheck
    folders: Mapping[str, str]

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
        file = absolute_name(reference.file or "")
        is_member = reference.member is not None
        source: str | None = self.folders[os.path.dirname(file)] if is_member else FILES
        member = reference.member if is_member else file.lstrip("/")
        if is_remote(file) and not is_member:  # Energon's folder of files, the root of the disk, has no URLs
            source = member = None
        if self.check == "digest":
            data = reference.read()
            extension, size, digest, changed = sniff_extension(data), len(data), media_digest(data), None
        else:
            header, status = read_header(reference), as_path(file).stat()
            extension, size, digest = header.extension, header.num_bytes, None
            changed = (status.st_size, status.st_mtime_ns)
        locator = Locator(file, reference.offset or 0, size, digest, changed, source, member)
        return StoredImage(extension, b"", locator=locator)


def auxiliary_names(sources: Iterable[Source]) -> dict[str, str]:
    """Return a name for each folder with a tar of the input: `tars0`, `tars1`, ... in the order of the paths."""
    tars = (as_path(absolute_name(source.path)) for source in sources if source.path.suffix == ".tar")
    folders = sorted({str(tar.parent) for tar in tars})
    return {folder: f"tars{index}" for index, folder in enumerate(folders)}
