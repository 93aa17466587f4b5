"""Workspace: the output folder and the restart state in it."""

import contextlib
import os
import shutil
import socket
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

import orjson
from filelock import BaseFileLock, FileLock, Timeout

from energon_packed.errors import ConfigError
from energon_packed.files import atomic_write, error_of_path, open_regular, remove_if_possible

_LOCK = "lock"
_OWNER = "owner.json"
_PATIENCE = 1.0  # seconds: workers of a run that was killed just now hold the lock until they have ended


class FolderLock:
    """Holds `folder/.work/lock` while its block runs.

    The operating system releases the lock when its process ends, however it ends. `owner.json` beside it names the
    holder, for the message of whoever finds the folder locked.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._work = folder / ".work"
        self._lock = _file_lock(self._work / _LOCK)
        self._ours = orjson.dumps({"host": socket.gethostname(), "pid": os.getpid()})
        self._made: list[Path] = []

    def __enter__(self) -> "FolderLock":
        """Take the lock.

        Raises:
            ConfigError: it is a file, or another run holds it; the message names its host and process.
        """
        if self.folder.exists() and not self.folder.is_dir():
            raise ConfigError(f"`output_dir` {self.folder} is a file; pass a folder")
        self._made = [folder for folder in (self._work, self.folder) if not folder.exists()]
        try:
            self._work.mkdir(parents=True, exist_ok=True)
            self._acquire()
            if not (self._work / _OWNER).is_file():  # writing to a FIFO would wait for a reader
                (self._work / _OWNER).unlink(missing_ok=True)
            (self._work / _OWNER).write_bytes(self._ours)
        except BaseException as error:
            self.__exit__(type(error), error, None)
            if isinstance(error, OSError):
                raise error_of_path(error, self._work / _OWNER) from error
            raise
        return self

    def _acquire(self) -> None:
        try:
            self._lock.acquire(timeout=_PATIENCE)
        except Timeout as error:
            raise ConfigError(
                f"{self.folder} is being written by {_holder(self._work)}; wait for it to end, or use another "
                "`output_dir`"
            ) from error
        except (NotImplementedError, OSError) as error:
            if isinstance(error, OSError) and error.filename is not None:  # the file cannot be opened
                raise
            raise ConfigError(
                f"the file system of {self.folder} has no file locks: {error}; use another `output_dir`"
            ) from error

    def check(self) -> None:
        """Refuse to continue where the folder was removed, or removed and made again by another run.

        Raises:
            ConfigError: it is not the one that was locked.
        """
        try:
            if (self._work / _OWNER).read_bytes() == self._ours:
                return
        except FileNotFoundError:
            pass
        raise ConfigError(
            f"`output_dir` {self.folder} was removed or replaced while the run wrote there; nothing else of it may be "
            "used: remove what is left of it, and run again"
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._free()
        except KeyboardInterrupt:  # it comes once: nothing may be left
            self._free()
            raise

    def _free(self) -> None:
        own = {_LOCK} if self._lock.is_locked else set()
        if own:
            with contextlib.suppress(OSError):
                (self._work / _OWNER).unlink()
        with contextlib.suppress(OSError):
            self._lock.release()
        # A run that wrote nothing leaves no folder behind.
        with contextlib.suppress(OSError):
            if self._work in self._made and {path.name for path in self._work.iterdir()} <= own:
                (self._work / _LOCK).unlink(missing_ok=True)
            for folder in self._made:
                folder.rmdir()


def lock_holder(folder: Path) -> str | None:
    """`process 12 on host` that writes in a folder, or None. Nothing is written."""
    work = folder / ".work"
    if not (work / _LOCK).is_file():
        return None
    lock = _file_lock(work / _LOCK)
    try:
        with lock.acquire(timeout=0):
            return None
    except Timeout:
        return _holder(work)
    except (NotImplementedError, OSError):  # no locks here, or a folder of someone else
        return None


def _file_lock(path: Path) -> BaseFileLock:
    """A lock of the operating system, never a file that a killed run would leave behind as its lock."""
    return FileLock(path, thread_local=False, fallback_to_soft=False)


def _holder(work: Path) -> str:
    try:
        with open_regular(work / _OWNER) as stream:
            value = orjson.loads(stream.read())
        return f"process {value['pid']} on {value['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


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
        atomic_write(self.work / "run.json", orjson.dumps({"key": key}))

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
            remove_if_possible(leftover)

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
