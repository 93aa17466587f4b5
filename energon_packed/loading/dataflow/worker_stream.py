"""WorkerStream: the four roles of one share, from any point of its epoch on.

    Distributor ──items──► Processor ──samples──► PackBuffer ──groups──► Collator ──► Step(batch, state behind it)

A state names what the packer holds by the keys of its items, and where the distributor continues. Items that were
read and encoded ahead are in neither: they are read again.
"""

import gc
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

from energon_packed.encoding import Processor
from energon_packed.errors import REQUESTED_REJECTS, BatchError, EnergonPackedError, RecordError, Reject
from energon_packed.loading.collator import Collator
from energon_packed.loading.distributors.base import Distributor, Item
from energon_packed.loading.failures import FailureLog
from energon_packed.loading.packers.base import Packer, unfit
from energon_packed.loading.packers.buffer import BufferedItem, PackBuffer
from energon_packed.loading.process import Encoded, RecordAt, WithSource, encode_items
from energon_packed.loading.ranks import ShardSpec


class LoaderParts(NamedTuple):
    """What a dataflow is made of."""

    distributor: Distributor
    processor: Processor
    packer: Packer
    collator: Collator
    failures: FailureLog


class Step(NamedTuple):
    """A batch on its way from a worker to the main process.

    Attributes:
        worker: number of the worker in its rank.
        batch: of the collator; None if no item of the step could be used, and at the end.
        state: (shard, JSON) of a stream after this batch, or a text that says why it cannot be saved; None for items
            with a global order.
        items: numbers of the items in the batch: in their shard, or places in the global order.
        dropped: numbers of the items that were used up without a batch since the last step.
        ended: the worker has no more steps in this epoch.
    """

    worker: int
    batch: Any
    state: tuple[int, str] | None
    items: list[int]
    dropped: list[int]
    ended: bool = False


class _Encoded(NamedTuple):
    """An item without its value.

    Attributes:
        number, cursor: of the item.
        held: its samples; None where there are none.
        error: why not, or None where it stands for no sample.
        name: of the item, where there is an error.
        at: where its record is, if it is one of an input file, and its dataset.
    """

    number: int
    resume_state: Any
    held: BufferedItem | None
    error: EnergonPackedError | None
    name: str
    at: tuple[RecordAt, str] | None = None


class WorkerStream:
    """The steps of one share.

    Args:
        roles: of the dataflow.
        share: part, epoch and seed.
        state: of an earlier stream of the same share; None begins the epoch.
        worker: number of the worker that makes the steps.
    """

    def __init__(
        self, roles: LoaderParts, share: ShardSpec, state: dict[str, Any] | None = None, worker: int = 0
    ) -> None:
        self.roles = roles
        self.share = share
        self.worker = worker
        state = state or {"cursor": 0, "number": 0, "last": -1, "ended": False, "ready": [], "waiting": []}
        self._cursor: Any = state["cursor"]
        self._number = int(state["number"])
        self._last = int(state["last"])  # the highest number in a batch
        self._ended = bool(state["ended"])
        self._dropped: list[int] = []
        self._rest: Iterator[Item] | None = None
        self._buffer = PackBuffer(roles.packer, self._drop)
        self._saved = state

    def __iter__(self) -> Iterator[Step]:
        schedule, steps = self.roles.distributor.schedule, self._steps()
        if schedule is not None:
            schedule.start(self._saved.get("schedule"))
        while True:
            if schedule is not None:
                schedule.before_step(self._number)
            try:
                yield next(steps)
            except StopIteration:
                return

    def _steps(self) -> Iterator[Step]:
        self._restore_buffer()
        while True:
            while (group := self._buffer.pop()) is not None:
                yield self._step(group)
            if self._ended:
                break
            for item in self._items():
                self._cursor, self._number = item.resume_state, item.number + 1
                if item.held is None:
                    self._failed(item)
                else:
                    self._buffer.push(item.held)
                while (group := self._buffer.pop()) is not None:
                    yield self._step(group)
            self._ended = True
            self._buffer.flush()
            if not self._buffer.ready:
                break
        yield self._step([])

    def state(self) -> str:
        """Where a new stream continues, as JSON.

        Raises:
            BatchError: samples are held out of order, and the distributor cannot read them again.
        """
        if not self.roles.distributor.can_seek and any(one.number < self._last for one in self._buffer.held()):
            raise BatchError(
                f"the state cannot be saved: {type(self.roles.packer).__name__} holds samples out of order, and "
                f"{type(self.roles.distributor).__name__} cannot read them again; use SequentialPacker or "
                "SimpleBatcher, or a source that can be read again (a function that returns an iterator, a dataset)"
            )
        place = {"cursor": self._cursor, "number": self._number, "last": self._last, "ended": self._ended}
        if self.roles.distributor.schedule is not None:
            place["schedule"] = self.roles.distributor.schedule.stream_state()
        return f"{json.dumps(place)[:-1]}, {self._buffer.state()}}}"

    def _step(self, group: list[BufferedItem]) -> Step:
        """A batch of a group; without a group, the items that the end of the epoch dropped."""
        samples = [sample for held in group for sample in held.samples]
        batch = self.roles.collator.collate(samples) if group else None
        self.roles.failures.use(len(group))
        numbers = [held.number for held in group]
        self._last = max([self._last, *numbers])
        dropped, self._dropped = self._dropped, []
        try:
            state = self.state()
        except BatchError as error:  # raised where the state is asked for
            state = json.dumps(str(error))
        return Step(self.worker, batch, (self.share.index, state), numbers, dropped)

    def _items(self) -> Iterator["_Encoded"]:
        """Items with what they were encoded to, `read_ahead` of them together."""
        stream = self._rest or self.roles.distributor.read(self.share, self._cursor, self._number)
        while True:
            found = self._encoded(stream)
            if not found:
                return
            yield from found

    def _encoded(self, stream: Iterator[Item]) -> list["_Encoded"]:
        with no_collecting():  # records are gone before it ends
            items = list(islice(stream, self.roles.distributor.read_ahead))
            found = self._encode([item.value for item in items])
        return [
            _Encoded(
                item.number, item.resume_state, None, one, item_name(item.value, item.number), record_of(item.value)
            )
            if isinstance(one, EnergonPackedError)
            else _Encoded(
                item.number, item.resume_state, BufferedItem(item.key, item.number, one, at) if one else None, None, ""
            )
            for item, (one, at) in zip(items, found, strict=True)
        ]

    def _encode(self, values: list[Any]) -> list[tuple[Encoded, RecordAt | None]]:
        """The samples of each value, truncated if the packer asks for it, or an error; and where its record is."""
        packer = self.roles.packer
        found = encode_items(values, self.roles.processor)
        if packer.overlong == "truncate" and packer.longest is not None:
            found = [_truncated(one, packer.longest) for one in found]
        return [
            (one, value.at if isinstance(value, WithSource) else None)
            for one, value in zip(found, values, strict=True)
        ]

    def _failed(self, item: "_Encoded") -> None:
        if item.error is not None:
            count_failure(self.roles.failures, item.error, item.name, item.at)
        self._dropped.append(item.number)

    def _drop(self, held: BufferedItem, excess: Reject | None) -> None:
        """A sample that fits no row, or is part of a dropped last batch."""
        failures, packer, source = self.roles.failures, self.roles.packer, held.samples[0].source
        if excess is None:
            failures.drop("drop_last")
        elif held.at is not None and source is not None:
            failures.reject(held.at, source.dataset, excess, overlong=packer.overlong)
        elif packer.overlong == "error":
            raise unfit(excess)
        else:
            failures.drop(excess.reason.value)
        self._dropped.append(held.number)

    def _restore_buffer(self) -> None:
        """Read and encode again what the packer held."""
        saved = [*self._saved["ready"], self._saved["waiting"]]
        refs = [ref for group in saved for ref in group]
        if not refs:
            return
        distributor, numbers = self.roles.distributor, [number for number, _ in refs]
        if distributor.can_seek:
            values = distributor.read_many(self.share, [key for _, key in refs])
            self._fill(saved, dict(zip(numbers, values, strict=True)))
            return
        first = min(numbers)  # nothing behind it is in a batch: the stream begins there
        stream = distributor.read(self.share, first, first)
        items = list(islice(stream, self._number - first))
        if len(items) < self._number - first:
            raise BatchError(f"the stream ended before item {self._number - 1}, which the saved state names")
        self._fill(saved, {item.number: item.value for item in items if item.number in set(numbers)})
        self._rest = stream

    def _fill(self, saved: list[Any], values: dict[int, Any]) -> None:
        keys = {number: key for group in saved for number, key in group}
        held = {}
        for number, (one, at) in zip(values, self._encode(list(values.values())), strict=True):
            if isinstance(one, EnergonPackedError):
                raise BatchError(f"item {number} of the saved state cannot be encoded any more: {one}")
            held[number] = BufferedItem(keys[number], number, one, at)
        groups = [[held[number] for number, _ in group] for group in saved]
        self._buffer.waiting = groups.pop()
        self._buffer.ready.extend(groups)


@contextmanager
def no_collecting() -> Iterator[None]:
    """Pause Python's garbage collector: records make many objects and no cycles, and each search walks them all."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def encoded(values: Sequence[Any], processor: Processor) -> list[Encoded]:
    """As `encode_items`, without searches for garbage in between."""
    with no_collecting():
        return encode_items(values, processor)


def count_failure(failures: FailureLog, error: EnergonPackedError, name: str, at: tuple[RecordAt, str] | None) -> None:
    """Count an item that cannot be used, or raise, as the limits say.

    Args:
        failures: of the loader.
        error: why it cannot be used.
        name: of the item.
        at: where its record is, and its dataset; None for items that are not records of an input file.
    """
    if isinstance(error, RecordError) and at is not None:
        failures.reject(*at, error.reject)
    elif isinstance(error, RecordError) and error.reason in REQUESTED_REJECTS:
        failures.drop(error.reason.value)
    else:
        failures.handle(error, {"__key__": name})


def record_of(value: Any) -> tuple[RecordAt, str] | None:
    """Where the record of an item is, and its dataset."""
    if isinstance(value, WithSource) and value.at is not None:
        return value.at, value.source.dataset
    return None


def _truncated(encoded: Encoded, max_length: int) -> Encoded:
    """A sample of at most `max_length` tokens, or why it cannot be truncated; a pack of several stays as it is."""
    if isinstance(encoded, EnergonPackedError) or len(encoded) != 1:
        return encoded
    try:
        return [encoded[0].truncated(max_length)]
    except RecordError as error:
        return error


def item_name(value: Any, number: int) -> str:
    """The name of an item in messages: its id, its dataset, or its number."""
    value, of = (value.value, f" of {value.source.dataset}") if isinstance(value, WithSource) else (value, "")
    ident = (
        value.get("id") if isinstance(value, dict) else getattr(value, "id", None) or getattr(value, "__key__", None)
    )
    return f"{ident or f'item {number}'}{of}"
