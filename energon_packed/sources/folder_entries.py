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

_KINDS = {
    "hidden": re.compile(r"\..*", re.DOTALL),
    "cache of datasets.map": re.compile(r"cache-[0-9a-f]{16}(_\d+_of_\d+)?\.arrow"),
}
_KINDS_OF_OTHER_FILES = {
    "marker of Spark": re.compile(r"_SUCCESS|_(committed|started)_\d+|_metadata|_common_metadata"),
    "checksum": re.compile(r".*\.(crc|md5|sha\d+|sig|asc)|(md5|sha\d+)sums?(\.txt)?", re.IGNORECASE | re.DOTALL),
    "documentation": re.compile(
        r"(readme|licen[cs]e|notice|changelog|citation|authors)([-_.][-\w.]*)?|.*\.(md|rst|pdf|html|bib)",
        re.IGNORECASE | re.DOTALL,
    ),
    "metadata": re.compile(
        r"(dataset_infos?|state|dataset_dict|config)\.json|.*\.(ya?ml|toml|ini|cfg|idx)", re.IGNORECASE | re.DOTALL
    ),
    "code": re.compile(r".*\.(py|pyc|ipynb|sh)|Makefile|Dockerfile", re.IGNORECASE | re.DOTALL),
    "media": re.compile(
        r".*\.(jpe?g|png|webp|gif|bmp|tiff?|ppm|pgm|ico|svg|avif|heic|jxl|jp2|npy"
        r"|mp4|m4v|mkv|webm|avi|mov|wav|mp3|flac|ogg|m4a|opus)",
        re.IGNORECASE | re.DOTALL,
    ),
}
EXPECTED_KINDS = frozenset((*_KINDS, *_KINDS_OF_OTHER_FILES))
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
            shown = visible(str(folder / name), keep="")
            # The type of most files is known without a system call.
            if entry.name.startswith(".") or entry.is_file(follow_symlinks=False):
                yield name, stat.S_IFREG
                continue
            try:
                status = os.stat(entry.path)
            except OSError as error:
                raise SourceError(
                    f"{shown} is a link that cannot be followed: {error.strerror}. Restore its target, or remove it."
                ) from error
            if not stat.S_ISDIR(status.st_mode):
                yield name, status.st_mode
                continue
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


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def ignored_kind(name: str, *, is_data: bool) -> str | None:
    """Name the kind of a file that contains no records, such as `media`; None if it may contain records.

    Args:
        name: file name.
        is_data: the name is the name of a data file.
    """
    kinds = _KINDS if is_data else _KINDS | _KINDS_OF_OTHER_FILES
    return next((kind for kind, pattern in kinds.items() if pattern.fullmatch(name)), None)


def conversion_command(name: str) -> str | None:
    """Command that converts a compressed or archived file that may contain records; None for other files."""
    stem, suffix = os.path.splitext(name.lower())
    if suffix in _UNPACK or suffix in _COMPRESSED_TARS or (suffix in _DECOMPRESS and _MAY_BE_DATA.fullmatch(stem)):
        return (_UNPACK | _DECOMPRESS)[suffix]
    return None
