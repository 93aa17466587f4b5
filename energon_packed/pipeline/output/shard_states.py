"""State files of finished tars: a run that was killed continues after them.

Input: a finished tar and its index rows. Output: its state file, and, in a later run, its ShardSummary if the tar and
its task are unchanged.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

import orjson

from energon_packed.files import atomic_write, of_type
from energon_packed.shards.index import write_tar_index
from energon_packed.shards.tar import ShardRows, ShardSummary
from energon_packed.sources.base import changed_at
from energon_packed.storage import RemotePath, StorageError, is_remote


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TarTask(ABC):
    """Tar to write.

    Attributes:
        tar: final path.
        state: file for the index rows; it appears when the tar is done.
    """

    tar: Path
    state: Path

    @property
    def label(self) -> str:
        """Description for messages."""
        return f"writing {self.tar.name}"

    @abstractmethod
    def digest(self) -> str:
        """Compute the hex digest of the content: only a finished tar with the same digest is kept."""


def finish_shard(task: TarTask, rows: ShardRows) -> ShardSummary:
    """Write the index of a tar, and its state file."""
    # The state file is written last: it marks the shard as finished.
    write_tar_index(task.tar, rows)
    state = {"task": task.digest(), "mtime_ns": _changed_at(task.tar), "rows": rows.as_dict()}
    atomic_write(task.state, orjson.dumps(state))
    return rows.summary


def finished_shard(task: TarTask) -> ShardSummary | None:
    """Return the summary of a shard that an earlier run has finished, if it is unchanged; else None."""
    tar = task.tar
    try:
        value = of_type(orjson.loads(task.state.read_bytes()), dict)
        if value["task"] != task.digest():
            return None
        rows = ShardRows.from_dict(value["rows"])
        unchanged = is_stored(tar, rows.summary) and _changed_at(tar) == value["mtime_ns"]
        return rows.summary if unchanged and tar.with_suffix(".tar.idx").is_file() else None
    except StorageError:
        raise
    except (OSError, ValueError, KeyError):
        return None


def _changed_at(tar: Path) -> int | None:
    """Time of the last change, by which a replaced file is recognized; None for objects, which have a hash."""
    return None if is_remote(tar) else changed_at(tar)


def is_stored(tar: Path, shard: ShardSummary) -> bool:
    """Whether a tar has the size of the shard, and an object also its hash.

    Raises:
        FileNotFoundError: there is no such tar.
    """
    if isinstance(tar, RemotePath):
        return tar.stored() == (shard.size, shard.sha256)
    return tar.stat().st_size == shard.size


def shard_rows(state: Path) -> ShardRows:
    """Read the index rows of a finished shard."""
    return ShardRows.from_dict(orjson.loads(state.read_bytes())["rows"])


def state_file(folder: Path, shard: str) -> Path:
    """Path of the index rows of a finished shard."""
    return folder / Path(shard).with_suffix(".json").name
