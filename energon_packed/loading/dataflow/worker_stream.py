"""Items of a worker shard to batches, from any point of its epoch on, with the state after each batch.

    Distributor ──items──► Processor ──samples──► PackBuffer ──groups──► Collator ──► Step(batch, state after it)

| name | content |
|---|---|
| LoaderParts | the four roles and the log of failures |
| Step | a batch on its way to the main process |
| WorkerStream | the steps of one shard |
| BufferedItem, PackBuffer | the samples without a row, and the rows without a batch |

A state lists the buffered items by their keys, and the position of the distributor. Items that were read and encoded
ahead are not part of the state: they are read again.
"""

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import orjson

from energon_packed.encoding import EncodedRow, EncodedSample, Processor
from energon_packed.encoding.fragments import fragment_of, split_sample
from energon_packed.errors import BatchError, ConfigError, RecordError, Reject
from energon_packed.flavors import PackSample
from energon_packed.loading.collation.batch import PackedBatch
from energon_packed.loading.collation.collator import Collator
from energon_packed.loading.costs.model import RowSizes
from energon_packed.loading.distributors.base import Distributor, Item
from energon_packed.loading.epoch_end import EpochEnd
from energon_packed.loading.failures import FailureLog
from energon_packed.loading.packers.base import Packer, Sizes, kind_of, unfit
from energon_packed.loading.process import (
    Encoded,
    Failure,
    PackAt,
    Packs,
    RecordAt,
    WithSource,
    encode_items,
    is_divisible,
)
from energon_packed.loading.ranks import ShardSpec
from energon_packed.pipeline.batches import batches
from energon_packed.records import Conversation, MediaReference
from energon_packed.records.media.reference import urls_of
from energon_packed.storage import MOST_TOGETHER, request_objects
from energon_packed.system import no_collecting


class LoaderParts(NamedTuple):
    """The four roles of a dataflow, its log of failures, and its options `epoch_end` and `check_lengths`."""

    distributor: Distributor
    processor: Processor
    packer: Packer
    collator: Collator
    failures: FailureLog
    epoch_end: EpochEnd = "repeat"
    check_lengths: bool = True


class Step(NamedTuple):
    """A batch on its way from a worker to the main process.

    Attributes:
        worker: index of the worker in its rank.
        batch: result of the collator; None if no item of the step could be used, and at the end.
        state: (shard, JSON) of a stream after this batch, or a JSON string that says why it cannot be saved; None for
            items with a global order.
        items: indices of the items in the batch: in their shard, or positions in the global order. Fragment K of an
            item that was split into N is `"INDEX#K/N"`.
        dropped: indices of the items that were used up without a batch since the last step.
        ended: the worker has no more steps in this epoch.
        packs: keys of the packs in the batch, if the items are packs.
    """

    worker: int
    batch: Any
    state: tuple[int, str] | None
    items: Sequence[int | str]
    dropped: Sequence[int | str]
    ended: bool = False
    packs: Sequence[str] = ()


class BufferedItem:
    """An encoded item, or a fragment of it, that waits for its row.

    Attributes:
        number: index of the item in its shard.
        samples: the samples of the item: EncodedSamples, or what a custom processor returns.
        size: (tokens, images, patches); zeros if the packer makes rows by the number of items alone.
        squares: sum of the squared sample lengths.
        kind: 0 for text, 1 with images, 2 with videos, 3 with audio alone.
        at: position of its record, if it is a record of an input file.
        ref: number and key of the item (and index of the fragment) as JSON: the state after every step lists them, so
            they are made once.
        name: the number; for a fragment, `"NUMBER#K/N"`.
        pack: key of the pack that the item is, or None.
    """

    __slots__ = ("at", "kind", "name", "number", "pack", "ref", "samples", "size", "squares")

    def __init__(
        self,
        key: Any,
        number: int,
        samples: Sequence[EncodedSample],
        packer: Packer,
        at: RecordAt | None = None,
        fragment: tuple[int, int] | None = None,
        pack: str | None = None,
    ) -> None:
        """Wrap the samples of an item.

        Args:
            key, number, samples, at, pack: of the item.
            packer: has the size of other samples than EncodedSamples.
            fragment: index of the fragment, and number of fragments; None for a complete item.
        """
        self.number = number
        self.at = at
        self.pack = pack
        self.samples = samples
        self.ref = _as_json([number, key] if fragment is None else [number, key, fragment[0]])
        self.name: int | str = number if fragment is None else f"{number}#{fragment[0]}/{fragment[1]}"
        self.size, self.squares, self.kind = (0, 0, 0), 0, 0
        if packer.rows is None:
            self._measure(packer)

    def _measure(self, packer: Packer) -> None:
        tokens = images = patches = videos = audios = 0
        for sample in self.samples:  # a loop needs two thirds of the time of a comprehension for each sum
            is_encoded = isinstance(sample, EncodedSample)
            length = len(sample.input_ids) if is_encoded and not packer.size_fn else packer.sample_size(sample)
            tokens += length
            self.squares += length**2
            if not is_encoded:
                images += isinstance(sample, Mapping) and "pixel_values" in sample
                videos += isinstance(sample, Mapping) and "pixel_values_videos" in sample
                continue
            images += sample.num_images
            videos += sample.num_videos
            audios += sample.num_audios
            if sample.image_grid_thw is not None or sample.video_grid_thw is not None:
                patches += sample.num_patches
        self.size = tokens, images, patches
        self.kind = kind_of(images, videos, audios)


class PackBuffer:
    """Buffer of encoded items from which a packer makes rows.

    Args:
        packer: groups the samples.
        on_drop: called with an item that fits no row (and the reason), or that is part of a dropped last group (and
            None).

    Attributes:
        waiting: items without a row.
        ready: rows without a batch.
    """

    def __init__(
        self, packer: Packer, on_drop: Callable[[BufferedItem, Reject | None], None], epoch_end: EpochEnd = "repeat"
    ) -> None:
        self.packer = packer
        self.epoch_end = epoch_end
        self.waiting: list[BufferedItem] = []
        self.ready: deque[list[BufferedItem]] = deque()
        self._on_drop = on_drop

    def push(self, item: BufferedItem) -> None:
        """Add an item; a full buffer makes rows.

        Raises:
            EnergonPackedError: the item fits no row, and `on_drop` raises.
        """
        if self.packer.rows is not None:
            self.waiting.append(item)
            if len(self.waiting) == self.packer.rows:
                self.ready.append(self.waiting)
                self.waiting = []
            return
        if (reject := self.packer.reject_reason(*item.size)) is not None:
            self._on_drop(item, reject)
            return
        self.waiting.append(item)
        if len(self.waiting) >= self.packer.buffer_size and self.packer.should_flush(len(self.waiting)):
            self._form(final=False)

    def flush(self) -> None:
        """Make rows of all waiting items, at the end of the epoch.

        Raises:
            ConfigError: `epoch_end` is `error`, and they do not fill a batch.
        """
        if len(self.waiting) < (self.packer.rows or 0) and self.epoch_end != "repeat":
            if self.epoch_end == "error" and self.waiting:
                raise ConfigError(
                    f"`epoch_end='error'` needs batches of {self.packer.rows} items, got a last batch of "
                    f"{len(self.waiting)} items. Set 'repeat' or 'drop'."
                )
            for item in self.waiting:
                self._on_drop(item, None)
            self.waiting = []
        if self.waiting and self.packer.rows is not None:
            self.ready.append(self.waiting)
            self.waiting = []
        elif self.waiting:
            self._form(final=True)

    def state(self) -> str:
        """Return numbers and keys of the buffered items: the JSON entries `"ready"` and `"waiting"`."""
        return f'"ready": [{", ".join(map(_refs, self.ready))}], "waiting": {_refs(self.waiting)}'

    def items(self) -> list[BufferedItem]:
        """Return all buffered items."""
        return [item for group in self.ready for item in group] + self.waiting

    def _form(self, *, final: bool) -> None:
        waiting, self.waiting = self.waiting, []
        for part in self.packer.parts(np.array([item.kind for item in waiting])):
            self._form_part([waiting[i] for i in part.tolist()], final=final)

    def _form_part(self, waiting: list[BufferedItem], *, final: bool) -> None:
        sizes = Sizes(*np.array([item.size for item in waiting], dtype=np.int64).T)
        squares = np.array([item.squares for item in waiting], dtype=np.int64)
        groups = self.packer.groups(sizes)
        # The patches of single images are not known here: the images of a sample count as equal.
        columns = (sizes.lengths, squares, sizes.patches, sizes.patches**2 // np.maximum(sizes.images, 1))
        sums = [np.array([int(column[group].sum()) for group in groups], dtype=np.int64) for column in columns]
        rows = RowSizes(tokens=sums[0], squares=sums[1], patches=sums[2], patch_squares=sums[3])
        ready, later = self.packer.pop_ready(groups, rows, final=final)
        self.ready += [[waiting[i] for i in group] for group in ready]
        self.waiting += [waiting[i] for group in later for i in group]


def _refs(group: Iterable[BufferedItem]) -> str:
    return f"[{', '.join([item.ref for item in group])}]"


class _EncodedItem(NamedTuple):
    """An item of a shard, encoded; without its value, which is large.

    Attributes:
        number, position: of the item.
        entries: an entry for each fragment of its samples, none if it cannot be used, or has no samples.
        failures: its samples that cannot be used, each with its place.
    """

    number: int
    position: Any
    entries: Sequence[BufferedItem]
    failures: Sequence[Failure]


class WorkerStream:
    """Iterator over the steps of one shard.

    Args:
        roles: of the dataflow.
        shard: index, epoch and seed.
        state: of an earlier stream of the same shard; None starts the epoch.
        worker: index of the worker that makes the steps.
    """

    def __init__(
        self, roles: LoaderParts, shard: ShardSpec, state: dict[str, Any] | None = None, worker: int = 0
    ) -> None:
        self.roles = roles
        self.shard = shard
        self.worker = worker
        state = state or {"position": 0, "number": 0, "ready": [], "waiting": []}
        self._position: Any = state["position"]
        self._number = int(state["number"])
        # The highest item index in a batch; not in the state, as all items after the state of an iterator are higher.
        self._last = -1
        self._ended = False  # a shard that ended is not read again
        self._dropped: list[int | str] = []
        self._rest: Iterator[Item] | None = None
        self._buffer = PackBuffer(roles.packer, self._drop, roles.epoch_end)
        self._saved = state

    def __iter__(self) -> Iterator[Step]:
        schedule, steps = self.roles.distributor.schedule, self._steps()
        if schedule is not None:
            schedule.start(self._saved.get("schedule"))
        while True:
            # Before the step, not after it: new weights of a mixture apply to the items that this step reads.
            if schedule is not None:
                schedule.before_step(self._number)
            try:
                yield next(steps)
            except StopIteration:
                return

    def _steps(self) -> Iterator[Step]:
        self._restore_buffer()
        ready = self._buffer.ready
        while ready:
            yield self._step(ready.popleft())
        for number, position, entries, failures in self._items():
            # Before a row is yielded, so that the state of the row continues after the item that completed it.
            self._position, self._number = position, number + 1
            self.roles.failures.count(failures)
            if not entries:
                self._dropped.append(number)
            dropped = len(self._dropped)
            for entry in entries:  # all of them, because the state continues after the item
                self._buffer.push(entry)
            if entries and len(self._dropped) == dropped:
                self.roles.failures.use(1)
            while ready:
                yield self._step(ready.popleft())
        self._buffer.flush()
        while ready:
            yield self._step(ready.popleft())
        # A step without a batch is a turn of the worker, too: a resumed worker makes it only if it was not made.
        self._ended = True
        yield self._step([])

    def state(self) -> str:
        """Return the position at which a new stream continues, as JSON.

        Raises:
            BatchError: samples are buffered out of order, and the distributor cannot read them again.
        """
        distributor = self.roles.distributor
        if not distributor.can_seek and any(item.number < self._last for item in self._buffer.items()):
            raise BatchError(
                f"Cannot save the state: {type(self.roles.packer).__name__} buffers samples out of order, and "
                f"{type(distributor).__name__} reads a one-shot iterator. Use SequentialPacker or SimpleBatcher, or "
                "pass data that can be read again (a dataset, or a function that returns an iterator)."
            )
        state = {"position": self._position, "number": self._number, "ended": self._ended}
        if distributor.schedule is not None:
            state["schedule"] = distributor.schedule.stream_state()
        # Joined as text: the buffer has its items as JSON already, and a pool has hundreds of them in every state.
        return f"{_as_json(state)[:-1]}, {self._buffer.state()}}}"

    def _step(self, group: list[BufferedItem]) -> Step:
        """Make a batch of a group; without a group, report the items that the end of the epoch dropped."""
        batch = self.roles.collator.collate(EncodedRow.joined([item.samples for item in group])) if group else None
        packs = [item.pack for item in group if item.pack is not None]
        if packs and isinstance(batch, PackedBatch):
            batch.__key__ = packs
        self._last = max([self._last, *[item.number for item in group]])
        dropped, self._dropped = self._dropped, []
        try:
            state = self.state()
        except BatchError as error:  # training may never save: the error is raised by `state_dict`
            state = orjson.dumps(str(error)).decode()
        items = [item.name for item in group]
        return Step(self.worker, batch, (self.shard.index, state), items, dropped, packs=packs)

    def _items(self) -> Iterator[_EncodedItem]:
        """Yield the encoded items of the shard, `read_ahead` of them encoded together."""
        stream = self._rest or self.roles.distributor.read(self.shard, self._position, self._number)
        while chunk := self._next_chunk(stream):
            yield from chunk

    def _next_chunk(self, stream: Iterator[Item]) -> list[_EncodedItem]:
        with no_collecting():  # records are gone before it ends
            items = list(islice(stream, self.roles.distributor.read_ahead))
            return self._encode(items)

    def _encode(self, items: Sequence[Item]) -> list[_EncodedItem]:
        """Encode items; their samples are truncated or split if the packer requests it."""
        roles = self.roles
        results: list[Encoded] = []
        for values in batches([item.value for item in items], max(1, len(items)), _remote_files, MOST_TOGETHER):
            request_objects([url for value in values for url in urls_of(_files(value))])
            results += encode_items(values, roles.processor, check_lengths=roles.check_lengths)
        encoded = []
        for item, result in zip(items, results, strict=True):
            try:
                entries = _fitted(result.samples, item.value, roles.packer) if result.samples else []
            except RecordError as error:
                entries, result = [], Encoded.failed(error)
            failures = failures_of(result, item.value, item.number)
            encoded.append(_EncodedItem(item.number, item.position, _buffered(item, entries, roles.packer), failures))
        return encoded

    def _drop(self, item: BufferedItem, reject: Reject | None) -> None:
        """Count an item that fits no row, or that is part of a dropped last batch."""
        failures, packer = self.roles.failures, self.roles.packer
        if reject is None:
            failures.drop("epoch_end")
        elif item.at is not None:
            failures.reject(item.at, reject)
        elif packer.overlong == "error":
            raise unfit(reject)
        else:
            failures.drop(reject.reason.value)
        self._dropped.append(item.name)

    def _restore_buffer(self) -> None:
        """Read and encode again the items that were buffered when the state was saved."""
        saved = [*self._saved["ready"], self._saved["waiting"]]
        refs = [ref for group in saved for ref in group]
        if not refs:
            return
        distributor, keys = self.roles.distributor, {number: key for number, key, *_ in refs}
        if distributor.can_seek:
            values = distributor.read_many(self.shard, list(keys.values()))
            self._fill(saved, [Item(n, value, key) for (n, key), value in zip(keys.items(), values, strict=True)])
            return
        # A one-shot iterator can be saved only if no later item is in a batch: it is read from the first buffered
        # item on, and `_items` continues with the same iterator.
        first = min(keys)
        stream = distributor.read(self.shard, first, first)
        items = list(islice(stream, self._number - first))
        if len(items) < self._number - first:
            raise BatchError(
                f"the stream must have {self._number} items, as when the state was saved, got {first + len(items)}. "
                "Pass the same data."
            )
        self._fill(saved, [item for item in items if item.number in keys])
        self._rest = stream

    def _fill(self, saved: list[Any], items: Sequence[Item]) -> None:
        buffered: dict[int, Sequence[BufferedItem]] = {}
        for number, _, entries, failures in self._encode(items):
            if not entries:
                reason = failures[0].error if failures else "it has no samples"
                raise BatchError(f"item {number} of the saved state cannot be encoded any more: {reason}")
            buffered[number] = entries
        groups = [[buffered[number][fragment[0] if fragment else 0] for number, _, *fragment in g] for g in saved]
        self._buffer.waiting = groups.pop()
        self._buffer.ready.extend(groups)


def _files(value: Any) -> Sequence[MediaReference]:
    """Media files of an item that is a conversation."""
    value = value.value if isinstance(value, WithSource) else value
    return value.files if isinstance(value, Conversation) else ()


def _remote_files(value: Any) -> int:
    return sum([file.is_remote for file in _files(value)])


def failures_of(result: Encoded, value: Any, number: int) -> Sequence[Failure]:
    """Return the samples of an item that cannot be used, each with its place."""
    if not result.failures:  # as almost always
        return ()
    record, item = record_of(value), PackAt(item_name(value, number))
    return [Failure(error, pack if pack.key else item, record) for error, pack, _ in result.failures]


def record_of(value: Any) -> RecordAt | None:
    """Return the position of an item's record, if it is a record of an input file."""
    return value.at if isinstance(value, WithSource) else None


def item_name(value: Any, number: int) -> str:
    """Return the name of an item in messages: its id or index, and its dataset."""
    value, dataset = (value.value, f" of {value.source.dataset}") if isinstance(value, WithSource) else (value, "")
    ident = (
        value.get("id") if isinstance(value, dict) else getattr(value, "id", None) or getattr(value, "__key__", None)
    )
    return f"{ident or f'item {number}'}{dataset}"


def _buffered(item: Item, entries: Sequence[Sequence[EncodedSample]], packer: Packer) -> list[BufferedItem]:
    """Return the entries of an item, one for each fragment."""
    at, count = record_of(item.value), len(entries)
    pack = pack_name(item.value)
    return [
        BufferedItem(item.key, item.number, entry, packer, at, (index, count) if count > 1 else None, pack)
        for index, entry in enumerate(entries)
    ]


def pack_name(value: Any) -> str | None:
    """Return the key of an item that is a pack, or a row of packs; None for other items."""
    if isinstance(value, Packs):
        value = value[0]
    return str(value.__key__) if isinstance(value, PackSample) else None


def _fitted(samples: Sequence[EncodedSample], value: Any, packer: Packer) -> list[Sequence[EncodedSample]]:
    """Truncate or split the sample of an item, if the packer requests it; a pack of several samples stays as it is.

    Raises:
        RecordError: the sample cannot be truncated or split.
    """
    longest = packer.longest
    if longest is None or packer.overlong not in ("truncate", "split") or len(samples) != 1:
        return [samples]
    sample = samples[0]
    if not isinstance(sample, EncodedSample) or len(sample) <= longest:
        return [samples]
    if packer.overlong == "truncate":
        return [[sample.truncated(longest)]]
    if not is_divisible(value):
        return [samples]  # `PackBuffer` drops it
    return [[fragment_of(sample, fragment)] for fragment in split_sample(sample, longest, packer.split_overlap)]


def _as_json(value: Any) -> str:
    try:
        return orjson.dumps(value).decode()
    except TypeError:  # integers of more than 64 bits, as in the states of NumPy's generators
        return json.dumps(value)
