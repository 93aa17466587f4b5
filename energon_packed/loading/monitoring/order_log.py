"""OrderLog: the batches that a loader yields to the training in, a line for each batch in the file of the process out.

`order_lines.py` documents the lines. A line is written when the batch is consumed: when the loader yields it, or,
under a trainer that reads ahead, when the trainer uses it (`hold`, `release`). A loader state contains the past of the
log, so that the next run of the same training continues it.
"""

import os
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple
from weakref import finalize

import orjson

from energon_packed.encoding import SampleSource
from energon_packed.errors import ConfigError
from energon_packed.loading.collation.batch import PackedBatch
from energon_packed.loading.monitoring.order_lines import FORMAT, file_of, files_of, header_of
from energon_packed.loading.state import Position
from energon_packed.storage import as_path, is_remote
from energon_packed.system import raise_resource_error

KEY = "order_log"
"""Entry of a loader state."""


class LoggedSamples(NamedTuple):
    """The samples of a batch that a log records.

    Attributes:
        ids: of each sample; None for a sample without an id.
        sources: of each sample.
    """

    ids: Sequence[str | None] = ()
    sources: Sequence[SampleSource | None] = ()

    @classmethod
    def of(cls, batch: Any) -> "LoggedSamples":
        """Return the samples of a batch: none of a row that repeats samples of another rank, or of an unknown type."""
        known = isinstance(batch, PackedBatch) and batch.has_targets
        return cls(batch.ids, batch.sources) if known else cls()


class OrderLog:
    """Append a line for each consumed batch of a rank to a file of this process.

    Each line is one system call, so that a kill loses at most the line that is being written. The first line of a file
    is a header.

    Args:
        folder: folder of the files of all ranks.
        place: data-parallel (rank, world size).
        workers: worker processes of a rank, if they decide the samples of a step; otherwise 0.
        facts: returns entries of the header, when the first line is written: `loader`, `identity` (digest of data and
            settings), `repeats` (samples are drawn by weight or repeated), `learns` (weights change in the run),
            `size` and `endless`, the items of an epoch in a global order, and `steps`, the batches of an epoch.

    Raises:
        ConfigError: `folder` is a file, or in an object store; when the first line is written, the folder has the log
            of another run that saved a state; a sample id or a dataset name is not UTF-8.
        FormatError: the earlier file of this rank has another format.
        ResourceError: the disk is full, or fails.
    """

    def __init__(
        self, folder: str | Path, place: tuple[int, int], facts: Callable[[], dict[str, Any]], *, workers: int = 0
    ) -> None:
        if is_remote(as_path(folder)):
            raise ConfigError(f"`order_log` must be a local folder, got {folder}. Object stores append no lines.")
        self.folder = Path(folder)
        if self.folder.exists() and not self.folder.is_dir():
            raise ConfigError(f"`order_log` must be a folder, got the file {folder}. Pass another path.")
        self._place, self._facts, self._workers = place, facts, workers
        self._run = secrets.token_hex(4)
        self._past: list[Any] = []  # starts of the earlier processes, as in a header
        self._after = [Position(0, 0)]  # of the ranks of the earlier process
        self._at = Position(0, 0)
        self._lines = 0  # of the file, the header included
        self._file = self.folder  # of this process, when it is open
        self._descriptor: int | None = None
        self._held: deque[tuple[Position, bytes]] | None = None
        self._is_saved = False

    def state(self, at: Position) -> dict[str, Any]:
        """Return the entry of a loader state after the batch at a position."""
        if self._descriptor is not None and not self._is_saved and at > Position(0, 0):
            with _disk_errors(self.folder):
                (self.folder / f"saved-{self._place[1]}").touch()
            self._is_saved = True
        return {KEY: {"run": self._run, "past": self._starts(), "at": [_plain(at)]}}

    def restore(self, states: Sequence[dict[str, Any]], at: Position) -> None:
        """Continue after the batches at which these states were saved, in another file.

        Args:
            states: of all ranks, or of this rank.
            at: position of the loader after it restored them.
        """
        if saved := merged(states).get(KEY):
            self._run, self._past = saved["run"], saved["past"]
            points = [Position(epoch, step) for epoch, step in saved["at"]]
            self._after = points if min(points) < max(points) else points[:1]
        else:  # the earlier batches have no log
            self._run, self._past, self._after = secrets.token_hex(4), [], [at]
        self._at = at
        if self._descriptor is not None:
            self._close()
            self._descriptor = None
        if self._held is not None:
            self._held.clear()

    def add(
        self,
        at: Position,
        samples: LoggedSamples | None,
        *,
        items: Sequence[int | str] = (),
        dropped: Sequence[int | str] = (),
        end: bool = False,
        **more: Any,
    ) -> None:
        """Add the line of a batch, or of items that were used up without a batch.

        Args:
            at: position of the loader after the batch; steps count from 1 in an epoch.
            samples: of the batch; None if there is no batch.
            items: items of the batch.
            dropped: items that were read, and are in no batch.
            end: the epoch of this rank ended, or the shard.
            more: further entries, such as `packs` and `shard`.
        """
        if self._descriptor is None:
            self._open()
        self._lines += 1
        line: dict[str, Any] = {"epoch": at.epoch, "step": at.step, "line": self._lines}
        if samples is not None:
            names = [None if source is None else source.dataset for source in samples.sources]
            line |= {"ids": samples.ids, "sources": names[:1] if len(set(names)) == 1 else names}
        given = {"items": items, "dropped": dropped, "end": end}
        text = _text(line | {name: value for name, value in given.items() if value} | more)
        if self._held is None:
            self._write(text)
        else:
            self._held.append((at, text))

    def hold(self) -> None:
        """Write the lines only when `release` is called: the trainer reads ahead of the batches that it uses."""
        self._held = self._held or deque()

    def release(self, at: Position) -> None:
        """Write the lines of the batches up to a position, which are consumed."""
        while self._held and self._held[0][0] <= at:
            self._write(self._held.popleft()[1])

    def _starts(self) -> list[Any]:
        """Starts of all processes up to this process, see `Start`."""
        return [*self._past, [self._place[1], [_plain(at) for at in self._after], _plain(self._at), self._workers]]

    def _open(self) -> None:
        """Open a file of this process, and write its header."""
        rank, world_size = self._place
        earlier = files_of(self.folder, rank)
        if not self._past:  # no state of the run was loaded
            self._check_other_run(earlier)
        header = {"order_log": FORMAT, "run": self._run, "rank": rank, "world_size": world_size}
        header |= {"starts": self._starts(), **self._facts()}
        if earlier:
            header_of(earlier[-1])  # refuses another format
            header["earlier"] = [earlier[-1].name, earlier[-1].stat().st_size]
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with _disk_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            for self._file in (file_of(self.folder, rank, number) for number in count(len(earlier))):
                with suppress(FileExistsError):  # of a process that starts at the same time
                    self._descriptor = os.open(self._file, flags, 0o644)
                    break
        assert self._descriptor is not None
        self._close = finalize(self, os.close, self._descriptor)
        self._lines = 1
        self._write(_text(header | {"time": datetime.now(UTC).isoformat(timespec="milliseconds")}))

    def _check_other_run(self, earlier: Sequence[Path]) -> None:
        """Refuse the folder of a run that saved a state; a run that saved no state may start again.

        All ranks refuse it together: otherwise the other ranks would wait for a rank that has ended.
        """
        sizes = [file.name.removeprefix("saved-") for file in self.folder.glob("saved-*")]
        is_new_rank = any(self._place[0] >= int(size) for size in sizes if size.isdecimal())
        if is_new_rank or (earlier and (sizes or self._after != [Position(0, 0)])):
            header = header_of(earlier[-1]) if earlier else None
            raise ConfigError(
                f"`order_log` must be a folder without the log of another run, got {self.folder}"
                + (f", whose run started at {header.get('time')}" if header else "")
                + ". Load a state of that run to continue it; otherwise pass another folder, or remove this folder."
            )

    def _write(self, text: bytes) -> None:
        assert self._descriptor is not None
        written = 0
        with _disk_errors(self._file):
            try:
                while written < len(text):  # a disk that is almost full writes a part
                    written += os.write(self._descriptor, text[written:])
            except OSError:
                os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size - written)
                raise


@contextmanager
def _disk_errors(place: Path) -> Iterator[None]:
    """Raise errors of the disk as ResourceError, with the place and the remedy."""
    try:
        yield
    except OSError as error:
        raise_resource_error(error, place)
        raise


def _plain(position: Position) -> list[int]:
    return [position.epoch, position.step]


def _text(line: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(line, default=list, option=orjson.OPT_APPEND_NEWLINE)
    except orjson.JSONEncodeError:
        names = (name for name in (*line.get("ids", ()), *line.get("sources", ())) if isinstance(name, str))
        if (bad := next((name for name in names if not _is_utf8(name)), None)) is None:
            raise
        raise ConfigError(
            f"`order_log` needs sample ids and dataset names in UTF-8, got {bad!r}. Rename the dataset, or remove "
            "`order_log`."
        ) from None


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def merged(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the entry of a state that is made of the states of all ranks, in their order; {} without a log."""
    saved = [state[KEY] for state in states if KEY in state]
    return {KEY: saved[0] | {"at": [point for of_rank in saved for point in of_rank["at"]]}} if saved else {}
