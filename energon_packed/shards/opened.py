"""OpenedFiles: whether the files of a dataset are those that a loader opened.

Loaders open tars one by one, by name, hours after they read what the dataset holds. A tar that was packed again
meanwhile has other packs at the same places: without this, a run would read old and new data in one epoch.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from energon_packed.errors import DataChangedError, FormatError
from energon_packed.shards.manifest import PackingManifest

_REMEDY = "open the dataset again; states that were saved before belong to what it held then"
_Stamp = tuple[int, int]


class OpenedFiles:
    """Size and time of the last change of every file, as they were when this was made.

    A tar of another time, such as a copy of itself, still counts as the same where packing.json lists the same bytes.

    Args:
        files: tars of a dataset, or inputs.
        digests: SHA-256 of the tars that packing.json lists.

    Raises:
        FormatError: a file is missing.
    """

    def __init__(self, files: Iterable[Path], digests: Mapping[Path, str] | None = None) -> None:
        self._digests = dict(digests or {})
        self._stamps: dict[Path, _Stamp] = {}
        for file in files:
            try:
                self._stamps[file] = _stamp(os.stat(file))
            except OSError as error:
                raise FormatError(f"{file}: {error.strerror}; copy the complete folder, or pack it again") from error

    def __contains__(self, file: Path) -> bool:
        return file in self._stamps

    def check(self, file: Path, found: os.stat_result | None = None) -> None:
        """Refuse a file that is not the one of before.

        Args:
            file: one of `files`.
            found: of the open file; by default of what has that name now.

        Raises:
            DataChangedError: it was replaced, changed or removed.
        """
        try:
            stamp = _stamp(os.stat(file) if found is None else found)
        except OSError as error:
            raise DataChangedError(
                f"{file} cannot be read any more ({error.strerror}): it was removed or replaced while it was in use; "
                f"{_REMEDY}"
            ) from error
        before = self._stamps[file]
        if stamp == before:
            return
        if stamp[0] != before[0] or not self._is_listed(file):
            sizes = f"{before[0]} bytes before, {stamp[0]} now" if stamp[0] != before[0] else "by its time"
            raise DataChangedError(f"{file} was replaced or changed while it was in use ({sizes}); {_REMEDY}")
        self._stamps[file] = stamp

    def check_all(self) -> None:
        """`check` for every file.

        Raises:
            DataChangedError: as `check`.
        """
        for file in self._stamps:
            self.check(file)

    def _is_listed(self, tar: Path) -> bool:
        """Whether packing.json still lists the bytes that this tar had."""
        if tar not in self._digests:
            return False
        try:
            manifest = PackingManifest.load_if_there(tar.parent)
        except FormatError:
            return False
        shards = manifest.shards if manifest is not None else ()
        return any(shard.name == tar.name and shard.sha256 == self._digests[tar] for shard in shards)


def _stamp(found: os.stat_result) -> _Stamp:
    return found.st_size, found.st_mtime_ns
