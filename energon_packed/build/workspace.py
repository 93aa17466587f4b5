"""Workspace: the output folder and the restart state in it."""

import shutil
from pathlib import Path

import orjson

from energon_packed.errors import ConfigError, FormatError
from energon_packed.shards import PackingManifest
from energon_packed.shards.files import write_whole


class Workspace:
    """Paths of one build.

    out/webdataset/                the data set
    out/lengths.parquet            one row per record
    out/rejects.jsonl              every record left out
    out/.work/measure-{digest}/    lengths of chunks of the input
    out/.work/write-{digest}/      index rows of finished shards
    out/.work/run.json             which build the shards belong to
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.work = root / ".work"
        self.shards = root / "webdataset"
        self.lengths = root / "lengths.parquet"
        self.rejects = root / "rejects.jsonl"

    def measure_folder(self, fingerprint: str) -> Path:
        """Folder of measured chunks."""
        return self.work / f"measure-{fingerprint[:16]}"

    def write_folder(self, fingerprint: str) -> Path:
        """Folder of index rows of finished shards."""
        return self.work / f"write-{fingerprint[:16]}"

    def claim(self, fingerprint: str, *, overwrite: bool) -> None:
        """Make the shard folder ours: leftovers of a killed run go, shards of another build are refused.

        Raises:
            ConfigError: there are shards of another build and `overwrite` is off.
        """
        owner = self._owner()
        if owner != fingerprint and any(self.shards.glob("*.tar")):
            if not overwrite:
                raise ConfigError(
                    f"{self.shards} holds shards of another build (input or options differ); "
                    "use --overwrite to replace them, or another --output-dir"
                )
            shutil.rmtree(self.shards)
        self.shards.mkdir(parents=True, exist_ok=True)
        self.work.mkdir(parents=True, exist_ok=True)
        for folder in (self.root, self.shards, self.shards / ".nv-meta", self.work):
            for leftover in folder.glob(".*.tmp"):
                leftover.unlink()
        write_whole(self.work / "run.json", orjson.dumps({"fingerprint": fingerprint}))

    def forget(self, *fingerprints: str) -> None:
        """Drop the restart state of these fingerprints."""
        for fingerprint in fingerprints:
            for folder in (self.measure_folder(fingerprint), self.write_folder(fingerprint)):
                shutil.rmtree(folder, ignore_errors=True)

    def _owner(self) -> str | None:
        """Fingerprint of the build that the shards belong to."""
        try:
            return PackingManifest.load(self.shards).fingerprint
        except FormatError:
            pass
        try:
            return str(orjson.loads((self.work / "run.json").read_bytes())["fingerprint"])
        except (OSError, orjson.JSONDecodeError, KeyError):
            return None
