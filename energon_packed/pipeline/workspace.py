"""Workspace: the output folder and the restart state in it."""

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import orjson

from energon_packed.errors import ConfigError
from energon_packed.files import remove, write_whole
from energon_packed.foreign import open_regular


class Workspace:
    """Paths of one run.

    out/webdataset/                the dataset
    out/lengths.parquet            one row per record
    out/rejects.jsonl              every rejected record
    out/.work/measure-{digest}/    lengths of chunks of the input
    out/.work/write-{digest}/      index rows of finished shards
    out/.work/run.json             which run the shards belong to
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.work = root / ".work"
        self.shards = root / "webdataset"
        self._ledger = root

    @property
    def lengths(self) -> Path:
        """One row per record: in the output folder, or in `.work` while that holds another run's data."""
        return self._ledger / "lengths.parquet"

    @property
    def rejects(self) -> Path:
        """Every rejected record: where `lengths` is."""
        return self._ledger / "rejects.jsonl"

    def measure_folder(self, fingerprint: str) -> Path:
        """Folder of measured chunks."""
        return self.work / f"measure-{fingerprint[:16]}"

    def write_folder(self, fingerprint: str) -> Path:
        """Folder of index rows of finished shards."""
        return self.work / f"write-{fingerprint[:16]}"

    def check_inputs(self, files: Iterable[Path]) -> None:
        """Refuse an input that the run would replace, as data that is packed again into its own folder.

        Raises:
            ConfigError: there is one.
        """
        own = [Path(os.path.realpath(path)) for path in (self.shards, self.work, self.lengths, self.rejects)]
        for file in files:
            real = Path(os.path.realpath(file))
            if any(path == real or path in real.parents for path in own):
                raise ConfigError(f"{file} is an input, and the run would replace it; use another `output_dir`")

    def check_other_run(self, key: str, *, overwrite: bool) -> None:
        """Refuse an output folder that holds shards of another run.

        Raises:
            ConfigError: there are such shards and `overwrite` is off.
        """
        if not overwrite and not self._is_owner(key) and any(self.shards.glob("*.tar")):
            raise ConfigError(
                f"{self.shards} holds shards of another run (input, options or image root differ, or its .work is "
                "gone); set `overwrite` to replace them, or use another `output_dir`"
            )

    def check_space(self, needed: int, key: str) -> None:
        """Refuse a disk that cannot hold the tars.

        Args:
            needed: bytes that are still to be written.
            key: of the run.

        Raises:
            ConfigError: the message has both sizes.
        """
        free = self.free_bytes(key)
        if needed > free:
            raise ConfigError(
                f"the tars need about {_gib(needed)}, but the file system of {self.root} has {_gib(free)} free; free "
                "some space, or use another `output_dir`"
            )

    def free_bytes(self, key: str) -> int:
        """Free bytes for the run with this key: shards of another run are removed before it writes."""
        folder = next(folder for folder in (self.root, *self.root.absolute().parents) if folder.exists())
        replaced = 0 if self._is_owner(key) else sum(tar.stat().st_size for tar in self.shards.glob("*.tar"))
        return shutil.disk_usage(folder).free + replaced

    def open_for(self, key: str, *, overwrite: bool) -> None:
        """Make the restart state ready for a run.

        Raises:
            ConfigError: as `check_other_run`.
        """
        self.check_other_run(key, overwrite=overwrite)
        self.work.mkdir(parents=True, exist_ok=True)
        self.remove_leftovers()
        # The files beside the shards are kept until this run is sure to replace them.
        self._ledger = self.work if not self._is_owner(key) and any(self.shards.glob("*.tar")) else self.root

    def claim(self, key: str) -> None:
        """Make the shard folder ours before the first shard is written; shards of another run are removed."""
        if not self._is_owner(key):
            self.open_shards()
            self.remove_strays(set())
        for file in (self.lengths, self.rejects):
            file.replace(self.root / file.name)
        self._ledger = self.root
        self.shards.mkdir(parents=True, exist_ok=True)
        write_whole(self.work / "run.json", orjson.dumps({"key": key}))

    def open_shards(self) -> None:
        """Before a shard is written or rewritten: without `.nv-meta` no reader opens a half-written folder."""
        shutil.rmtree(self.shards / ".nv-meta", ignore_errors=True)

    def remove_strays(self, names: set[str]) -> None:
        """Remove shards that are not in the plan, left by an earlier run, and what a lost worker was writing."""
        self.remove_leftovers()
        for tar in self.shards.glob("*.tar"):
            if tar.name not in names:
                tar.unlink()
                tar.with_suffix(".tar.idx").unlink(missing_ok=True)

    def remove_leftovers(self) -> None:
        """Temporary files of a killed run, or of killed workers: only those with names that we give."""
        own = [
            *self.work.rglob(".*.tmp"),
            *(self.shards / ".nv-meta").glob(".*.tmp"),
            *self.shards.glob(".*.tar.*tmp"),
            *self.root.glob(".lengths.parquet.*.tmp"),
            *self.root.glob(".rejects.jsonl.*.tmp"),
        ]
        for leftover in own:
            remove(leftover)

    def forget(self, *fingerprints: str) -> None:
        """Drop the restart state of these fingerprints."""
        for fingerprint in fingerprints:
            for folder in (self.measure_folder(fingerprint), self.write_folder(fingerprint)):
                shutil.rmtree(folder, ignore_errors=True)

    def _is_owner(self, key: str) -> bool:
        """Whether the shards were written by the run with this key."""
        try:
            with open_regular(self.work / "run.json") as stream:
                return bool(orjson.loads(stream.read())["key"] == key)
        except (OSError, ValueError, KeyError, TypeError):  # of another version, or damaged
            return False


def _gib(count: int) -> str:
    return f"{count / 2**30:,.2f} GiB"
