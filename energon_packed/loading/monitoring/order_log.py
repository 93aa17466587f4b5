"""OrderLog: the batches that a loader hands to the training in, a line for each in the file of its rank out.

`order_lines.py` documents the lines. A line is written when the batch is consumed: when the loader yields it, or,
under a trainer that reads ahead, when the trainer uses it (`hold`, `release`). A loader state contains the past of the
log, so that the next run of the same training continues it.
"""

import os
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

from energon_packed.errors import ConfigError
from energon_packed.loading.monitoring.order_lines import (
    FORMAT,
    Point,
    file_of,
    first_header,
    saved_marker,
    saved_worlds,
)
from energon_packed.storage import as_path, is_remote
from energon_packed.system import raise_resource_error

_BLOCK = 1 << 16  # bytes
KEY = "order_log"
"""Entry of a loader state."""


class OrderLog:
    """Append a line for each consumed batch of a rank to `order-RANK.jsonl`.

    Each line is one system call, so that a kill loses at most the line that is being written. The first line of a
    process is a header.

    Args:
        folder: folder of the files of all ranks.
        place: data-parallel (rank, world size).
        workers: worker processes of a rank, if they decide the samples of a step; otherwise 0.
        facts: returns entries of the header, when the first line is written: `loader`, `identity` (digest of data and
            settings), `repeats` (samples are drawn by weight or repeated), `learns` (weights change in the run), and
            `size` and `endless`, the items of an epoch in a global order, `steps`, the batches of an epoch, or
            `last_step`, the batch that ends an epoch without an `end`.

    Raises:
        ConfigError: `folder` is a file, or in an object store; when the first line is written, the folder has the log
            of another run that saved a state; a sample id or a dataset name is not UTF-8.
        FormatError: the file of this rank has another format.
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
        self.file = file_of(self.folder, place[0])
        self._place, self._facts, self._workers = place, facts, workers
        self._run = secrets.token_hex(4)
        self._past: list[Any] = []  # starts of the earlier processes, as in a header
        self._after: list[Point] = [(0, 0)]
        self._at: Point = (0, 0)
        self._lines = 0  # of this process
        self._ended: dict[str, Any] = {}
        self._start: str | None = None  # of this process
        self._held: deque[tuple[Point, bytes]] | None = None
        self._is_saved = False
        self._descriptor: int | None = None

    def state(self, at: Point) -> dict[str, Any]:
        """Return the entry of a loader state after the batch at (epoch, step)."""
        if self._descriptor is not None and not self._is_saved and at > (0, 0):
            with _disk_errors(self.folder):
                saved_marker(self.folder, self._place[1]).touch()
            self._is_saved = True
        return {KEY: {"run": self._run, "past": self._starts(), "at": [list(at)]}}

    def restore(self, states: Sequence[dict[str, Any]], at: Point, ended: Sequence[int] = ()) -> None:
        """Continue after the batches at which these states were saved.

        Args:
            states: of all ranks, or of this rank.
            at: (epoch, step) of the loader after it restored them.
            ended: shards of the epoch that this rank does not read again, as they had no more items.
        """
        if saved := merged(states).get(KEY):
            self._run, self._past = saved["run"], saved["past"]
            points = [(epoch, step) for epoch, step in saved["at"]]
            self._after = points if len(set(points)) > 1 else points[:1]
        else:  # the earlier batches have no log
            self._run, self._past, self._after = secrets.token_hex(4), [], [at]
        self._at = at
        self._ended = {"ended": [at[0], *ended]} if ended else {}
        self._start = None
        if self._held is not None:
            self._held.clear()

    def add(
        self,
        at: Point,
        batch: Any,
        *,
        items: Sequence[int | str] = (),
        dropped: Sequence[int | str] = (),
        **more: Any,
    ) -> None:
        """Add the line of a batch, or of items that were used up without a batch.

        Args:
            at: (epoch, step) of the loader after the batch; steps count from 1 in an epoch.
            batch: the batch; None writes a line without a step.
            items: items of the batch.
            dropped: items that were read, and are in no batch.
            more: further entries that are not empty, such as `packs` and `shard`.
        """
        used = batch if getattr(batch, "has_targets", True) else None  # not a row that repeats samples of another rank
        names = [None if source is None else source.dataset for source in getattr(used, "sources", ())]
        line: dict[str, Any] = {
            "epoch": at[0],
            "step": at[1] if batch is not None else None,
            "rank": self._place[0],
            "world_size": self._place[1],
            "start": self._start_of_process(),
            "line": self._lines + 1,
            "ids": getattr(used, "ids", ()),
            "sources": names[:1] if len(set(names)) == 1 else names,
        }
        if used is None and batch is not None:
            more.pop("packs", None)
        given = {"items": list(items), "dropped": list(dropped), **more}
        line |= {name: value for name, value in given.items() if value or (value == 0 and value is not False)}
        if batch is None:
            line["after"] = at[1]
        try:
            text = orjson.dumps(line, default=list) + b"\n"
        except orjson.JSONEncodeError:
            texts = (name for name in (*line["ids"], *line["sources"]) if isinstance(name, str))
            if (bad := next((name for name in texts if not _is_utf8(name)), None)) is None:
                raise
            raise ConfigError(
                f"`order_log` needs sample ids and dataset names in UTF-8, got {bad!r}. Rename the dataset, or remove "
                "`order_log`."
            ) from None
        self._lines += 1
        if self._held is None:
            self._write(text)
        else:
            self._held.append((at, text))

    def hold(self) -> None:
        """Write the lines only when `release` is called: the trainer reads ahead of the batches that it uses."""
        self._held = self._held or deque()

    def release(self, at: Point) -> None:
        """Write the lines of the batches up to (epoch, step), which are consumed."""
        while self._held and self._held[0][0] <= at:
            self._write(self._held.popleft()[1])

    def _starts(self) -> list[Any]:
        """Starts of all processes up to this process, see `Start`."""
        return [*self._past, [self._place[1], [list(point) for point in self._after], list(self._at), self._workers]]

    def _start_of_process(self) -> str:
        """Name of the lines of this process; the first call writes the header."""
        if self._start is None:
            is_again = self._check_earlier_lines()
            if self._descriptor is None:
                self._open()
            self._start, self._lines = secrets.token_hex(4), 0
            rank, world_size = self._place
            header = {"order_log": FORMAT, "start": self._start, "run": self._run, "rank": rank}
            header |= {"world_size": world_size, "starts": self._starts(), **self._ended, **self._facts()}
            header |= {"again": True} if is_again else {}
            self._write(orjson.dumps(header | {"time": datetime.now(UTC).isoformat(timespec="milliseconds")}) + b"\n")
        return self._start

    def _check_earlier_lines(self) -> bool:
        """Return whether this run replaces a run that saved no state.

        All ranks refuse the folder together: otherwise the other ranks would wait for a rank that has ended.
        """
        header = first_header(self.file)
        if self._past:  # a state of the run was loaded
            return False
        markers = saved_worlds(self.folder)
        is_later = self._after != [(0, 0)]
        is_new_rank = any(self._place[0] >= ranks for ranks in markers)
        if is_new_rank or (header is not None and (markers or is_later)):
            raise ConfigError(
                f"`order_log` must be a folder without the log of another run, got {self.folder}"
                + (f", whose run started at {header.get('time')}" if header else "")
                + ". Load a state of that run to continue it; otherwise pass another folder, or remove this folder."
            )
        return header is not None

    def _open(self) -> None:
        with _disk_errors(self.file):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self.file, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        end = os.fstat(self._descriptor).st_size
        while end:  # a kill may have cut the last line
            start = max(0, end - _BLOCK)
            if found := os.pread(self._descriptor, end - start, start).rfind(b"\n") + 1:
                end = start + found
                break
            end = start
        os.ftruncate(self._descriptor, end)

    def _write(self, text: bytes) -> None:
        assert self._descriptor is not None
        written = 0
        with _disk_errors(self.file):
            try:
                while written < len(text):  # a disk that is almost full writes a part
                    written += os.write(self._descriptor, text[written:])
            except OSError:
                os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size - written)
                raise

    def __del__(self) -> None:
        if getattr(self, "_descriptor", None) is not None:
            os.close(self._descriptor)  # type: ignore[arg-type]


@contextmanager
def _disk_errors(place: Path) -> Iterator[None]:
    """Raise errors of the disk as ResourceError, with the place and the remedy."""
    try:
        yield
    except OSError as error:
        raise_resource_error(error, place)
        raise


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


def order_logs(loader: Any, position: Any = None) -> Iterator[tuple[OrderLog, Any]]:
    """Yield the order logs of a loader, or of the loaders of a JointLoader, each with its part of a position."""
    if (inner := getattr(loader, "loaders", None)) is not None:
        for name, of_name in inner.items():
            yield from order_logs(of_name, None if position is None else position.parts[name][0])
    elif (log := getattr(loader, "order_log", None)) is not None:
        yield log, position


def log_order(loader: Any, folder: str | Path | None) -> None:
    """Open the order log of a loader; None opens no log.

    Raises:
        ConfigError: the loader has no order log, or has one already.
    """
    if folder is None:
        return
    if not hasattr(loader, "log_order"):
        raise ConfigError(
            f"`order_log` needs a loader of energon-packed, got a {type(loader).__name__}. Remove it, or pass the "
            "loader of get_packed_loader, a DataflowLoader or a JointLoader."
        )
    if any(order_logs(loader)):
        raise ConfigError(f"`order_log` must be set once, got {folder} for a loader with a log. Remove one of them.")
    loader.log_order(folder)
