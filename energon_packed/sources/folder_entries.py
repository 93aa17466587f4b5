"""The entries of a folder: a folder in; the name and mode of every entry below it, and the kinds of entries, out.

`walk` lists the entries, `ignored_kind` names the kinds that contain no records, and `conversion_command` the command
that converts compressed and archived data, which are not read.
"""

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from energon_packed.errors import SourceError
from energon_packed.files import visible
from energon_packed.records.media.kinds import AUDIO, MEDIA_KINDS, VIDEO
from energon_packed.storage import RemotePath

CAPTION_FILES = (".txt", ".caption", ".text")
"""Suffixes of files with the caption of a media file of the same name, as in tars."""
CAPTIONED_FILES = tuple([suffix for kind in MEDIA_KINDS.values() for suffix in kind.suffixes])
"""Suffixes of images, videos and audio files that such a file may describe."""
_DATASETS_CACHE = re.compile(r"cache-[0-9a-f]{16}(_\d+_of_\d+)?\.arrow")
_METADATA = ("dataset_info.json", "dataset_infos.json", "state.json", "dataset_dict.json", "config.json")
_SUFFIXES = {
    "checksum": ".crc .md5 .sha1 .sha256 .sha512 .sig .asc",
    "documentation": ".md .rst .pdf .html .bib",
    "metadata": ".yaml .yml .toml .ini .cfg .idx",
    "code": ".py .pyc .ipynb .sh",
    "media": ".jpg .jpeg .png .webp .gif .bmp .tif .tiff .ppm .pgm .ico .svg .avif .heic .heif .jxl .jp2 .npy "
    f"{' '.join((*VIDEO.suffixes, *AUDIO.suffixes))}",
}
_KIND_OF_SUFFIX = {suffix: kind for kind, suffixes in _SUFFIXES.items() for suffix in suffixes.split()}
_NAMES = {
    "marker of Spark": re.compile(r"_SUCCESS|_(committed|started)_\d+|_metadata|_common_metadata"),
    "checksum": re.compile(r"(md5|sha\d+)sums?(\.txt)?", re.IGNORECASE),
    "documentation": re.compile(
        r"(readme|licen[cs]e|notice|changelog|citation|authors)([-_.][-\w.]*)?", re.IGNORECASE
    ),
    "code": re.compile(r"Makefile|Dockerfile"),
}
EXPECTED_KINDS = frozenset(("hidden", "cache of datasets.map", *_SUFFIXES, *_NAMES))
"""The kinds that `ignored_kind` returns."""
_COMPRESSED_TARS = (".tgz", ".tbz", ".tbz2", ".txz", ".tzst")
_DECOMPRESS = {
    **dict.fromkeys((".gz", ".tgz"), "gunzip"),
    **dict.fromkeys((".bz2", ".tbz", ".tbz2"), "bunzip2"),
    **dict.fromkeys((".xz", ".txz"), "unxz"),
    **dict.fromkeys((".zst", ".tzst"), "zstd -d --rm"),
    **{".lzma": "unlzma", ".lz4": "lz4 -d --rm", ".lzo": "lzop -dU", ".br": "brotli -dj", ".z": "uncompress"},
}
_UNPACK = {".zip": "unzip", ".7z": "7z x", ".rar": "unrar x"}
# Without the suffix of the compression: a name without a suffix, or with the suffix of data.
_MAY_BE_DATA = re.compile(r"[^.]+|.*\.(jsonl?|ndjson|csv|tsv|parquet|arrow|feather|tar)", re.DOTALL)
_WITHOUT_DATA = {
    "_temporary": "the output of a job that has not finished. Let the job finish, or remove the folder.",
    "_delta_log": "the log of a Delta table, which decides which of its files are valid. Export the table as Parquet.",
}
_MOST_REPEATS = 10_000  # folders that links list again: nested links multiply


def walk(folder: Path) -> Iterator[tuple[str, int]]:
    """Yield the relative name and `st_mode` of every entry below a folder that is not a folder, in any order.

    Links are followed. A hidden folder is one entry.

    Raises:
        SourceError: a folder cannot be listed, a link cannot be followed or leads to a folder that contains it, or the
            folder belongs to a format that its files alone do not define.
    """
    if isinstance(folder, RemotePath):
        yield from _walk_objects(folder)
        return
    root = _identity(os.stat(folder))
    pending: list[tuple[str, tuple[tuple[int, int], ...]]] = [("", (root,))]
    seen, repeats = {root}, 0
    while pending:
        base, parents = pending.pop()
        try:
            with os.scandir(folder / base) as listed:
                entries = list(listed)
        except OSError as error:
            raise SourceError(
                f"{visible(str(folder / base), keep='')} cannot be listed: {error.strerror}. Make it readable, remove "
                "it, or pass the data files by name."
            ) from error
        for entry in entries:
            name = f"{base}/{entry.name}" if base else entry.name
            try:
                # The type of most files is known without a system call.
                is_plain = entry.name.startswith(".") or entry.is_file(follow_symlinks=False)
                status = None if is_plain else os.stat(entry.path)
            except OSError as error:
                fault = "is a link that cannot be followed" if entry.is_symlink() else "cannot be read"
                raise SourceError(
                    f"{visible(str(folder / name), keep='')} {fault}: {error.strerror}. Restore it, or remove it."
                ) from error
            if status is None:
                yield name, stat.S_IFREG
                continue
            if not stat.S_ISDIR(status.st_mode):
                yield name, status.st_mode
                continue
            shown = visible(str(folder / name), keep="")
            if entry.name in _WITHOUT_DATA:
                raise SourceError(f"{shown} is {_WITHOUT_DATA[entry.name]}")
            if (identity := _identity(status)) in parents:
                raise SourceError(f"{shown} is a link to a folder that contains it. Remove the link.")
            repeats += identity in seen
            if repeats > _MOST_REPEATS:
                raise SourceError(
                    f"links in {folder} lead to the same folders more than {_MOST_REPEATS:,} times. Remove the links, "
                    "or pass the data files by name."
                )
            seen.add(identity)
            pending.append((name, (*parents, identity)))


def _walk_objects(folder: RemotePath) -> Iterator[tuple[str, int]]:
    hidden: set[tuple[str, ...]] = set()
    for path in folder.objects():
        names = path.parts[len(folder.parts) :]
        for count, name in enumerate(names[:-1], start=1):
            if name in _WITHOUT_DATA:
                raise SourceError(f"{visible(str(folder.joinpath(*names[:count])), keep='')} is {_WITHOUT_DATA[name]}")
            if name.startswith("."):
                names = names[:count]
                break
        if names not in hidden:
            if len(names) < len(path.parts) - len(folder.parts):
                hidden.add(names)
            yield "/".join(names), stat.S_IFREG


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def ignored_kind(name: str, *, is_data: bool) -> str | None:
    """Name the kind of a file that contains no records, such as `media`; None if it may contain records.

    Args:
        name: file name.
        is_data: the name is the name of a data file.
    """
    if name.startswith("."):
        return "hidden"
    if name in _METADATA:
        return "metadata"
    if _DATASETS_CACHE.fullmatch(name):
        return "cache of datasets.map"
    if is_data:
        return None
    if kind := _KIND_OF_SUFFIX.get(os.path.splitext(name)[1].lower()):
        return kind
    return next((kind for kind, pattern in _NAMES.items() if pattern.fullmatch(name)), None)


def is_caption(name: str) -> bool:
    """Whether a file of this name may have the caption of an image or video: text, but not a README."""
    return name.lower().endswith(CAPTION_FILES) and ignored_kind(name, is_data=False) is None


def conversion_command(name: str) -> str | None:
    """Command that converts a compressed or archived file that may contain records; None for other files."""
    stem, suffix = os.path.splitext(name.lower())
    if suffix in _UNPACK or suffix in _COMPRESSED_TARS or (suffix in _DECOMPRESS and _MAY_BE_DATA.fullmatch(stem)):
        return (_UNPACK | _DECOMPRESS)[suffix]
    return None
