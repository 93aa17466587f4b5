"""The output folder, its lock and the restart state in it.

Input: `output_dir` and the fingerprints of a run. Output: the paths of all files that the stages write, and a
ConfigError if the folder belongs to another run, is locked, or its disk is too small.
"""

import contextlib
import hashlib
import logging
import os
import secrets
import shutil
import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import orjson
from filelock import BaseFileLock, FileLock, Timeout

from energon_packed.errors import ConfigError
from energon_packed.files import (
    atomic_write,
    error_of_path,
    format_bytes,
    move,
    open_regular,
    remove_if_possible,
    remove_tree,
)
from energon_packed.shards.media_yaml import remove_media_yaml
from energon_packed.storage import RemotePath, StorageError, is_remote

_log = logging.getLogger(__name__)
ENCODER = "encoder (tokenizer, template or image settings)"
"""Name of the digest of the encoder in the settings of a run."""
_LOCK = "lock"
_OWNER = "owner.json"
_TOKEN = "token"
_LOCK_TIMEOUT = 1.0  # seconds; after a run was killed, its forked workers keep the lock until they have ended


def work_folder(output_dir: Path, work_dir: Path | None = None) -> Path:
    """Return the local folder of the restart state: `.work` of a local output folder.

    Args:
        output_dir: the output folder.
        work_dir: folder of the state of all outputs in object stores; by default in the user's cache folder.

    Raises:
        ConfigError: `work_dir` is set for a local output folder, or is missing for a user without a home.
    """
    if not is_remote(output_dir):
        if work_dir is not None:
            raise ConfigError(
                f"`work_dir` must be omitted for a local `output_dir`, got {work_dir}. Its restart state is in "
                f"{output_dir / '.work'}"
            )
        return output_dir / ".work"
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if work_dir is None and cache.startswith("~"):
        raise ConfigError(f"`work_dir` must be set for `output_dir` {output_dir}: the home folder is not known")
    digest = hashlib.sha256(str(output_dir).encode()).hexdigest()
    return (work_dir or Path(cache, "energon-packed")).absolute() / digest[:16]


class FolderLock:
    """Context manager that locks an output folder, by the file `lock` in the folder of its restart state.

    The operating system releases the lock when the process ends, however it ends. `owner.json` beside the lock names
    the process, for the error message of another run. In an object store, the object `.work/owner.json` also keeps
    other machines away: it has the token of the restart state, so that a run that was killed continues.

    Args:
        folder: the output folder.
        work: local folder of the restart state.
        overwrite: claim an object store from the run that owns it.
    """

    def __init__(self, folder: Path, work: Path, *, overwrite: bool = False) -> None:
        self.folder = folder
        self._work = work
        self._lock = _file_lock(self._work / _LOCK)
        self._owner = orjson.dumps({"host": socket.gethostname(), "pid": os.getpid()})
        self._overwrite = overwrite
        self._claimed: bytes | None = None  # content of the object
        self._created: list[Path] = []

    def __enter__(self) -> "FolderLock":
        """Acquire the lock.

        Raises:
            ConfigError: the folder is a file, or another run has the lock; the message names its host and process.
            StorageError: the object store cannot be read or written.
        """
        if self.folder.exists() and not self.folder.is_dir():
            raise ConfigError(f"`output_dir` {self.folder} is a file; pass a folder")
        folders = (self._work,) if is_remote(self.folder) else (self._work, self.folder)
        self._created = [folder for folder in folders if not folder.exists()]
        try:
            self._work.mkdir(parents=True, exist_ok=True)
            self._acquire()
            atomic_write(self._work / _OWNER, self._owner)  # replaces a link or FIFO
            if isinstance(self.folder, RemotePath):
                self._claim(self.folder)
        except BaseException as error:
            self.__exit__(type(error), error, None)
            if isinstance(error, OSError) and (named := error_of_path(error, self._work / _OWNER)) is not error:
                raise named from error
            raise
        return self

    def _claim(self, folder: RemotePath) -> None:
        """Make this run the owner of a folder in an object store."""
        file = self._work / _TOKEN
        if not file.is_file():
            atomic_write(file, secrets.token_hex(16).encode())
        owner = {**orjson.loads(self._owner), "token": file.read_text()}
        content, target = orjson.dumps(owner), folder / ".work" / _OWNER
        self._claimed = content  # before the request: its answer may be lost
        if not target.create(content):
            other = _read_object(target)
            if not self._overwrite and other and other.get("token") != owner["token"]:
                self._claimed = None
                raise ConfigError(
                    f"{folder} belongs to {_named(other)}, which writes there or was killed; wait for it to end, run "
                    "its command again on that host, or set `overwrite` if it was killed"
                )
            target.write_bytes(content)
        try:
            for name in ("webdataset", "media", "media-index"):  # other folders below may belong to other runs
                (folder / name).abort_uploads()
        except StorageError as error:  # a separate permission, which packing does not need
            _log.info("uploads of killed runs are not aborted: %s", error)

    def _is_claimed(self) -> bool:
        """Whether the object still names this process."""
        try:
            return (self.folder / ".work" / _OWNER).read_bytes() == self._claimed
        except FileNotFoundError:
            return False

    def _acquire(self) -> None:
        try:
            self._lock.acquire(timeout=_LOCK_TIMEOUT)
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
        """Check that the folder is still the locked folder: it may have been removed, and created by another run.

        Raises:
            ConfigError: the folder was removed or replaced, or another run has claimed it.
        """
        try:
            is_same = (self._work / _OWNER).read_bytes() == self._owner
        except FileNotFoundError:
            is_same = False
        if is_same and self._claimed is not None and not self._is_claimed():
            raise ConfigError(
                f"{self.folder} was taken over by another run, with `overwrite`. Stop one of them, and run the other "
                "again with `overwrite`"
            )
        if is_same:
            return
        raise ConfigError(
            f"`output_dir` {self.folder} was removed or replaced during the run. Delete the rest of it and run again"
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._free()
        except KeyboardInterrupt:  # raised once: the second attempt completes
            self._free()
            raise

    def _free(self) -> None:
        own = {_LOCK} if self._lock.is_locked else set()
        with contextlib.suppress(OSError):  # the object stays if the store fails, and the token, by which it is reused
            if self._claimed is not None and self._is_claimed():
                (self.folder / ".work" / _OWNER).unlink()
            own |= {_TOKEN} if own else set()
        if own:
            with contextlib.suppress(OSError):
                (self._work / _OWNER).unlink()  # before the release: the next run writes its own file
        with contextlib.suppress(OSError):
            self._lock.release()
        # A run that wrote no files removes the folders that it created; rmdir fails if they contain other files.
        with contextlib.suppress(OSError):
            if self._work in self._created and {path.name for path in self._work.iterdir()} <= own:
                for name in own:
                    (self._work / name).unlink(missing_ok=True)
            for folder in self._created:
                folder.rmdir()


def lock_holder(folder: Path, work: Path | None = None) -> str | None:
    """Name the process that writes in a folder, as `process 12 on host`; None if the folder is not locked.

    Args:
        folder: the output folder.
        work: local folder of its restart state; by default `work_folder`.
    """
    work = work or work_folder(folder)
    if is_remote(folder):
        with contextlib.suppress(StorageError):
            owner = _read_object(folder / ".work" / _OWNER)
            if owner.get("host", socket.gethostname()) != socket.gethostname():  # whether it was killed is not known
                return _named(owner)
    if not (work / _LOCK).is_file():
        return None
    lock = _file_lock(work / _LOCK)
    try:
        with lock.acquire(timeout=0):
            return None
    except Timeout:
        return _holder(work)
    except (NotImplementedError, OSError):  # no locks in this file system, or a folder of another user
        return None


def _file_lock(path: Path) -> BaseFileLock:
    """Make a lock of the operating system; a soft lock (the existence of a file) would survive a killed run."""
    return FileLock(path, thread_local=False, fallback_to_soft=False)


def _holder(work: Path) -> str:
    return _named(_read_object(work / _OWNER))


def _read_object(file: Path) -> dict[str, Any]:
    """Content of a JSON file of the restart state; {} if it is missing or damaged."""
    try:
        with open_regular(file) as stream:
            value = orjson.loads(stream.read())
    except StorageError:
        raise
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _named(owner: dict[str, Any]) -> str:
    known = {"pid", "host"} <= owner.keys()
    return f"process {owner['pid']} on {owner['host']}" if known else "another process"


class Workspace:
    """Paths in the output folder of a run.

    out/webdataset/              the dataset
    out/media/                   images that are in no file, of datasets with references
    out/lengths.parquet          one row per record
    out/rejects.jsonl            every rejected record
    out/media.yaml, media-index/ the dataset for Energon's own loaders, if it references media
    out/.work/run.json           which run the shards belong to
    WORK/measure-{digest}/       lengths of chunks of the input
    WORK/write-{digest}/         index rows of finished shards, and unfinished shards of an object store
    WORK/media/                  index rows of finished tars of out/media, and the index of its images

    WORK is `out/.work`, or a local folder if `out` is in an object store: `work_folder`.
    """

    def __init__(self, root: Path, work: Path | None = None) -> None:
        self.root = root
        self.work = work or work_folder(root)
        self.shards = root / "webdataset"
        self.media = root / "media"
        self.media_work = self.work / "media"
        self.settings: dict[str, str] = {}  # JSON of the settings of the run, by name
        # Names the settings in which its encoder differs from the encoder of the shards; empty if they are unknown.
        self.encoder_differences: Callable[[], list[str]] = list
        self._reports = root

    @property
    def lengths(self) -> Path:
        """Report with a table row per record, in `.work` while the output folder contains a dataset of another run."""
        return self._reports / "lengths.parquet"

    @property
    def rejects(self) -> Path:
        """Report of the rejected records, beside `lengths`."""
        return self._reports / "rejects.jsonl"

    def measure_folder(self, fingerprint: str) -> Path:
        """Folder of measured chunks."""
        return self.work / f"measure-{fingerprint[:16]}"

    def write_folder(self, fingerprint: str) -> Path:
        """Folder of index rows of finished shards."""
        return self.work / f"write-{fingerprint[:16]}"

    def check_inputs(self, files: Iterable[Path]) -> None:
        """Refuse an input that the run would replace, such as a dataset that is packed again into its own folder.

        Raises:
            ConfigError: an input is in the output folder.
        """
        own = [
            Path(os.path.realpath(path))
            for path in (self.root / ".work", self.shards, self.work, self.lengths, self.rejects)
        ]
        for file in files:
            real = Path(os.path.realpath(file))
            if any(path == real or path in real.parents for path in own):
                raise ConfigError(f"{file} is an input, and the run would replace it; use another `output_dir`")

    def check_other_run(self, key: str, *, overwrite: bool) -> None:
        """Refuse an output folder with shards of another run.

        Raises:
            ConfigError: there are such shards and `overwrite` is off.
        """
        if not overwrite and not self._is_owner(key) and any(self.shards.glob("*.tar")):
            raise ConfigError(
                f"{self.shards} contains shards of another run ({self._difference()}). Set `overwrite` to replace "
                "them, or use another `output_dir`"
            )

    def check_space(self, needed: int, key: str | None, unfinished: int) -> None:
        """Refuse a disk that is too small for the tars.

        Args:
            needed: bytes that are still to be written.
            key: fingerprint of the run; None if it deletes no shard of another run before.
            unfinished: maximum bytes of shards that are written at the same time; object stores have the others.

        Raises:
            ConfigError: the disk is too small; the message has both sizes.
        """
        free = self.free_bytes(key)
        space = f"has {format_bytes(free)} free"
        if is_remote(self.root) and min(needed, unfinished) > free:
            raise ConfigError(
                f"unfinished shards need about {format_bytes(min(needed, unfinished))}, but the file system of "
                f"{self.work} {space}. Use another `work_dir`, fewer `workers` or a smaller `max_shard_bytes`."
            )
        if not is_remote(self.root) and needed > free:
            raise ConfigError(
                f"the tars need about {format_bytes(needed)}, but the file system of {self.root} {space}. "
                "Free some space, or use another `output_dir`."
            )

    def free_bytes(self, key: str | None) -> int:
        """Free bytes for the run with this key, including the shards of another run that it would replace."""
        root = self.work if is_remote(self.root) else self.root
        folder = next(folder for folder in (root, *root.absolute().parents) if folder.exists())
        free = shutil.disk_usage(folder).free
        if key is None or is_remote(self.root) or self._is_owner(key):
            return free
        return free + sum(tar.stat().st_size for tar in self.shards.glob("*.tar"))

    def open_for(self, key: str, *, overwrite: bool) -> None:
        """Create the folder of the restart state and choose the folder of the reports.

        Raises:
            ConfigError: the folder has shards of another run, as in `check_other_run`.
        """
        self.check_other_run(key, overwrite=overwrite)
        self.work.mkdir(parents=True, exist_ok=True)
        self.remove_leftovers()
        # The reports of another run stay beside its shards until this run replaces both: its limits may still stop it.
        self._reports = self.work if not self._is_owner(key) and any(self.shards.glob("*.tar")) else self.root

    def delete_other_run(self, key: str) -> None:
        """Delete the shards of another run, move the reports into place, and record `key` as the run of the shards.

        Call it before the first shard is written.
        """
        # run.json is written last: a run that is killed before that point starts here again.
        if not self._is_owner(key):
            self.remove_index()
            self.remove_strays(set())
        for file in (self.lengths, self.rejects):
            if file != self.root / file.name:
                move(file, self.root / file.name)
        self._reports = self.root
        self.shards.mkdir(parents=True, exist_ok=True)
        atomic_write(self.root / ".work" / "run.json", orjson.dumps({"key": key, "settings": self.settings}))

    def remove_index(self) -> None:
        """Remove `.nv-meta` and media.yaml before a shard is written: no reader may open an incomplete dataset."""
        remove_tree(self.shards / ".nv-meta")
        remove_media_yaml(self.root)

    def remove_strays(self, names: set[str]) -> None:
        """Remove shards that are not in the plan, and temporary files of lost workers."""
        self.remove_leftovers()
        for tar in self.shards.glob("*.tar"):
            if tar.name not in names:
                tar.unlink()
                tar.with_suffix(".tar.idx").unlink(missing_ok=True)

    def remove_leftovers(self) -> None:
        """Remove temporary files of a killed run or killed workers; files with other names are not touched."""
        patterns = [(self.work, "**/.*.tmp")]
        if not is_remote(self.root):  # its temporary files are local
            patterns += [
                (self.shards / ".nv-meta", ".*.tmp"),
                (self.shards, ".*.tar.*tmp"),
                (self.media, ".media-*.tmp"),
                (self.media / ".nv-meta", ".*.tmp"),
                (self.root, ".lengths.parquet.*.tmp"),
                (self.root, ".rejects.jsonl.*.tmp"),
                (self.root, ".media.yaml.*.tmp"),
                (self.root / "media-index" / ".nv-meta", ".*.tmp"),
            ]
        for folder, pattern in patterns:
            with contextlib.suppress(FileNotFoundError):  # another process removes the folder: its error is reported
                for leftover in list(folder.glob(pattern)):
                    remove_if_possible(leftover)

    def forget(self, *fingerprints: str) -> None:
        """Delete the restart state of these fingerprints and of `out/media`."""
        for fingerprint in fingerprints:
            for folder in (self.measure_folder(fingerprint), self.write_folder(fingerprint)):
                shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(self.media_work, ignore_errors=True)

    def _is_owner(self, key: str) -> bool:
        """Whether the shards were written by the run with this key."""
        return bool(self._run_of_shards().get("key") == key)

    def _run_of_shards(self) -> dict[str, Any]:
        """Content of run.json."""
        return _read_object(self.root / ".work" / "run.json")

    def _difference(self) -> str:
        """Name the settings in which the run of the shards differs."""
        saved = self._run_of_shards().get("settings")
        if not isinstance(saved, dict):
            return "input, options or image root differ, or its .work is gone"
        shown: list[str] = []
        for name, value in self.settings.items():
            if saved.get(name) == value:
                continue
            if name == ENCODER and (named := self.encoder_differences()):
                shown += named
            else:  # options have values to read; the others are digests
                shown.append(f"{name} was {saved.get(name)}, now {value}" if name[0] == "`" else f"the {name} differs")
        return ", ".join(shown) or "another release, or an encoder without a fingerprint"
