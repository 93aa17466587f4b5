"""Position in an epoch to the steps of a rank, and back to a loader state.

| class | data | parts of the position |
|---|---|---|
| Steps | base class | |
| PlannedSteps | items with a global order | segments, the same on all ranks |
| StreamSteps | a stream | the state of every shard of this rank |

An epoch of a stream has a shard for each worker of each rank, and each shard has its own buffer of items:

    2 ranks x 2 workers    shard 0 | shard 1      shard 2 | shard 3
    then 1 rank x 3        shards 0 and 3 | shard 1 | shard 2       until the epoch ends

With other ranks or workers, the shards of the current epoch stay as they are, and the new workers finish them, one
after the other: no item is lost or repeated. From the next epoch on, there is a shard for each new worker.
"""

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf
from typing import Any, NamedTuple

from energon_packed.encoding import EncodedRow, EncodedSample
from energon_packed.errors import BatchError
from energon_packed.loading.dataflow.worker_stream import LoaderParts, Step, WorkerStream, failures_of
from energon_packed.loading.distributors.base import LoaderLayout
from energon_packed.loading.distributors.schedule import Mark
from energon_packed.loading.epoch_end import check_rest
from energon_packed.loading.even_ranks import EvenRanks, without_targets
from energon_packed.loading.order import Segment
from energon_packed.loading.process import encode_items
from energon_packed.loading.ranks import ShardSpec
from energon_packed.loading.state import Position, check_identity, check_numbers, damaged
from energon_packed.system import no_collecting

_log = logging.getLogger(__name__)


class Steps(ABC):
    """The steps of a rank, in the main process and in its workers.

    Args:
        roles: of the loader.
        layout: ranks and workers.
        seed: of the loader.

    Attributes:
        place: (rank, world size) of a state; None if a state is the same on all ranks.
        log_workers: workers of a rank that decide the samples of a step; 0 if the order decides them.
    """

    place: tuple[int, int] | None = None
    log_workers = 0

    def __init__(self, roles: LoaderParts, layout: LoaderLayout, seed: int) -> None:
        self.roles, self.layout, self.seed = roles, layout, seed
        self.rank, self.num_workers = layout.rank, layout.num_workers

    @staticmethod
    def of(roles: LoaderParts, layout: LoaderLayout, seed: int) -> "Steps":
        """Return the steps of a loader: planned if rows need no packing at run time, and the items have an order."""
        planned = roles.distributor.order is not None and layout.rows is not None
        return PlannedSteps(roles, layout, seed) if planned else StreamSteps(roles, layout, seed)

    @abstractmethod
    def begin(self, epoch: int) -> Position:
        """Return the position before the first step of an epoch."""

    @abstractmethod
    def after(self, position: Position, step: Step) -> Position:
        """Return the position after a step."""

    @abstractmethod
    def steps(self, position: Position, turn: int) -> Iterator[Step]:
        """Yield the steps of one worker from a position on.

        Args:
            position: start position of all workers.
            turn: index of the worker in the rank, counted from the worker that makes the first step.
        """

    @abstractmethod
    def length(self) -> int:
        """Return the number of steps of this rank in one epoch.

        Raises:
            TypeError: it is not known in advance.
        """

    @abstractmethod
    def check_rest(self, position: Position, *, warns: bool) -> None:
        """Report the items that do not fill the last step of the epoch.

        Args:
            position: in the epoch.
            warns: log the warning of `drop`.

        Raises:
            ConfigError: `epoch_end` is `error`, and there are such items.
        """

    def to_plain(self, position: Position) -> dict[str, Any]:
        """Return the entries of a state.

        Raises:
            BatchError: a packer buffers samples that the distributor cannot read again.
        """
        return {"epoch": position.epoch, "step": position.step, **self.plain_parts(position)}

    def from_plain(
        self, states: Sequence[dict[str, Any]], identity: dict[str, Any], *, allow_changed_weights: bool
    ) -> Position:
        """Return the position of a state.

        Args:
            states: of all ranks, or of this rank if ranks and workers are as before.
            identity: of the loader.
            allow_changed_weights: weights of a mixture or blend may differ.

        Raises:
            BatchError: the state is of other data or settings, or as `restored`.
        """
        for state in states:
            check_identity(state["identity"], identity, allow_changed_weights=allow_changed_weights)
        return self.restored(states, changed_weights=states[0]["identity"] != identity)

    @abstractmethod
    def plain_parts(self, position: Position) -> dict[str, Any]:
        """Return the entries of a state for the parts of a position; raises as `to_plain`."""

    @abstractmethod
    def restored(self, states: Sequence[dict[str, Any]], *, changed_weights: bool) -> Position:
        """Return the position of a state of the same data and settings.

        Args:
            states: of all ranks, or of this rank if ranks and workers are as before.
            changed_weights: weights of a mixture or blend differ.

        Raises:
            BatchError: the state is damaged, not of all ranks that are needed, or cannot be continued by other ranks
                or workers.
        """

    @abstractmethod
    def log_entries(self, position: Position, step: Step) -> dict[str, Any]:
        """Return the entries of the order log for a step, as arguments of `OrderLog.add`."""

    @abstractmethod
    def log_facts(self) -> dict[str, Any]:
        """Return entries of the header of an order log."""

    def identity(self) -> dict[str, Any]:
        """Return data and settings that decide the batches."""
        return {f"distributor_{name}": value for name, value in self.roles.distributor.identity().items()}

    def even(self, position: Position, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of this rank until all ranks end the epoch together; see `epoch_end`."""
        return batches

    def detached(self, position: Position) -> Position:
        """Return a position for worker processes, without parts that only the main process needs."""
        return position

    def first_worker(self, position: Position) -> int:
        """Return the index of the worker that makes the next step, in worker processes that start at a position."""
        return 0

    def is_started(self, position: Position) -> bool:
        """Return whether items of the epoch may have been read."""
        return position.step > 0


class PlannedSteps(Steps):
    """Compute the items of each step by arithmetic, and read them.

    The parts of a position are the segments of the epoch so far, the current segment last.
    """

    def __init__(self, roles: LoaderParts, layout: LoaderLayout, seed: int) -> None:
        super().__init__(roles, layout, seed)
        assert roles.distributor.order is not None
        assert layout.rows is not None
        self.order = roles.distributor.order
        self.segment = self.order.segment(layout.world_size, layout.rows)
        self._drops = roles.epoch_end == "drop"

    def check_rest(self, position: Position, *, warns: bool) -> None:
        """Report the items that do not fill the last step of the epoch."""
        segment = position.parts[-1]
        rest = 0 if self.order.repeat else (len(self.order) - segment.item) % segment.width
        check_rest(self.roles.epoch_end, rest, len(self.order), warns=warns)

    def begin(self, epoch: int) -> Position:
        """Return the position before the first step of an epoch."""
        return Position(epoch, 0, (self.segment,))

    def after(self, position: Position, step: Step) -> Position:
        """Return the position after a step, which may have no batch."""
        return replace(position, step=position.step + 1) if not step.ended else position

    def length(self) -> int:
        """Return the number of steps of one epoch, the same on all ranks.

        Raises:
            TypeError: the data repeats without end.
        """
        return self.order.steps(self.segment, drop=self._drops)

    def plain_parts(self, position: Position) -> dict[str, Any]:
        """Return the segments."""
        return {"segments": [segment.to_plain() for segment in position.parts]}

    def restored(self, states: Sequence[dict[str, Any]], *, changed_weights: bool) -> Position:
        """Return the position of a state; other ranks, rows or weights add a segment. All states are equal."""
        state = states[0]
        check_numbers(state, "epoch", "step")
        segments = [Segment.from_plain(plain) for plain in state["segments"]]
        last = segments[-1]
        if segments[0].item or state["step"] < last.step or min(last.width, last.item + 1) < 1:
            raise damaged(f"step {state['step']} and segments {state['segments']!r}"[:200])
        if not last.has_layout_of(self.segment):
            changed = last.continued(state["step"], self.segment)
            if not self.order.repeat:  # the last step may be short
                changed = replace(changed, item=min(changed.item, len(self.order)))
            # A segment in which no step was made has no item, and is replaced.
            segments = [segment for segment in segments if segment.item < changed.item] + [changed]
        return Position(state["epoch"], state["step"], tuple(segments))

    def log_entries(self, position: Position, step: Step) -> dict[str, Any]:
        """Return the places of a step in the order."""
        return {"items": step.items, "dropped": step.dropped}

    def log_facts(self) -> dict[str, Any]:
        """Return the size of the order."""
        return {"size": len(self.order), "endless": self.order.repeat}

    def steps(self, position: Position, turn: int) -> Iterator[Step]:
        """Yield the steps of a worker: every `num_workers`-th step."""
        segment = position.parts[-1]
        step, stop = position.step + turn, inf if self.order.repeat else self.order.steps(segment, drop=self._drops)
        while step < stop:
            if self.order.data.read_ahead:
                self._request(position, step, stop)
            yield self._step(position, step, turn)
            step += self.num_workers
        dropped = self._dropped_at_the_end(segment) if turn == 0 else []
        yield Step(turn, None, None, [], dropped, ended=True)

    def _request(self, position: Position, step: int, stop: float) -> None:
        """Request the items of this step and of the next steps of the worker."""
        places = list[int]()
        while len(places) < self.order.data.read_ahead and step < stop:
            places += self.order.places(position.parts[-1], step, self.rank)
            step += self.num_workers
        self.order.data.request(self.order.numbers(places, position.epoch, self.seed, position.parts))

    def _step(self, position: Position, step: int, turn: int) -> Step:
        """Make the batch of this rank; if none of its items can be used, a row of another rank without targets.

        That row is part of collective operations, but not of the loss.
        """
        segment = position.parts[-1]
        batch, used, dropped = self._row(position, self.order.places(segment, step, self.rank))
        for rank in range(segment.ranks):
            if batch is not None or rank == self.rank:
                continue
            other, _, _ = self._row(position, self.order.places(segment, step, rank), is_counted=False)
            batch = None if other is None else without_targets(other)
        return Step(turn, batch, None, used, dropped)

    def _row(
        self, position: Position, places: Sequence[int], *, is_counted: bool = True
    ) -> tuple[Any, list[int], list[int]]:
        """Read, encode and collate the items at these places of the order.

        Args:
            position: epoch and segments.
            places: of the items.
            is_counted: count failures and used items.

        Returns:
            the batch, None if no item can be used; the places of used items, and of dropped items.
        """
        roles = self.roles
        indices = self.order.numbers(places, position.epoch, self.seed, position.parts)
        values = [self.order.item_or_error(index) for index in indices]
        with no_collecting():
            encoded = encode_items(values, roles.processor, check_lengths=roles.check_lengths)
        rows: list[Sequence[EncodedSample]] = []
        used, dropped = list[int](), list[int]()
        for place, value, result in zip(places, values, encoded, strict=True):
            if is_counted:
                roles.failures.count(failures_of(result, value, place))
            if result.samples:
                rows.append(result.samples)
                used.append(place)
            else:
                dropped.append(place)
        if is_counted:
            roles.failures.use(len(used))
        samples = EncodedRow.joined(rows)
        return roles.collator.collate(samples) if samples else None, used, dropped

    def _dropped_at_the_end(self, segment: Segment) -> list[int]:
        """Return the positions of the items of this rank in the last, short step, if it is left out."""
        if not self._drops:
            return []
        dropped = list(self.order.places(segment, self.order.steps(segment, drop=True), self.rank))
        for _ in dropped:
            self.roles.failures.drop("epoch_end")
        return dropped


class Shards(NamedTuple):
    """Parts of the position of a stream.

    Attributes:
        num_shards: shards of the epoch.
        next_worker: index of the worker that makes the next step.
        states: (shard, JSON state of its WorkerStream) of each started shard of this rank.
        regrouped: ranks or workers changed in this epoch, so that they no longer have a known number of steps.
        mark: of the weights of a mixture; None for other data.
    """

    num_shards: int
    next_worker: int = 0
    states: tuple[tuple[int, str], ...] = ()
    regrouped: bool = False
    mark: Mark | None = None


class StreamSteps(Steps):
    """Read the shards of this rank. The parts of a position are Shards.

    Raises:
        ConfigError: `epoch_end` needs to know the steps of the ranks, or a process group; or as `steps_of_epoch`.
    """

    def __init__(self, roles: LoaderParts, layout: LoaderLayout, seed: int) -> None:
        super().__init__(roles, layout, seed)
        self.count = layout.world_size * self.num_workers
        self.place: tuple[int, int] = (self.rank, layout.world_size)
        self.log_workers = self.num_workers
        distributor = roles.distributor
        self._repeats = distributor.infinite or distributor.complete_epochs
        self._known = None if self._repeats else distributor.steps_of_epoch(layout, roles.epoch_end)
        self.ranks = None if self._repeats or self._known is not None else self._even_ranks()

    def _even_ranks(self) -> EvenRanks | None:
        return EvenRanks.of(self.roles.epoch_end, self.place)

    def even(self, position: Position, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of this rank, and rows without targets, until all ranks end together.

        The ranks of a stream exchange whether they have a batch, if the number of steps is not known.
        """
        if self._known is not None and not position.parts.regrouped:
            # A single rank waits for no other rank, so items that fail need no row in their place.
            return self._up_to(self._known, position, batches) if self.place[1] > 1 else batches
        ranks = self._even_ranks() if self._known is not None else self.ranks
        return batches if ranks is None else ranks.even(batches)

    def _up_to(self, last: int, position: Position, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches up to step `last` of the epoch; a rank with fewer batches has a row without targets."""
        step = position.step
        while step < last or self.roles.epoch_end == "repeat":
            if (batch := next(batches, None)) is None:
                break
            step += 1
            yield batch
        row = self._any_row(position.epoch) if step < last else None
        while step < last and row is not None:
            step += 1
            yield without_targets(row)

    def _any_row(self, epoch: int) -> Any:
        """Return the first item of this rank in an epoch as a batch; None if it has no item."""
        roles, first = self.roles, self.rank * self.num_workers
        for index in range(first, first + self.num_workers):
            for item in roles.distributor.read(self._shard(index, self.count, epoch)):
                (result,) = encode_items([item.value], roles.processor, check_lengths=roles.check_lengths)
                if result.samples:
                    return roles.collator.collate(result.samples)
        return None

    def _shard(self, index: int, count: int, epoch: int) -> ShardSpec:
        return ShardSpec(index=index, num_shards=count, epoch=epoch, seed=self.seed)

    def check_rest(self, position: Position, *, warns: bool) -> None:
        """Warn that short batches are left out; their number is not known in advance."""
        if warns and self._known is None and self.roles.epoch_end == "drop" and (self.roles.packer.rows or 1) > 1:
            _log.warning(
                "`epoch_end='drop'` leaves out the last items of each worker that do not fill a batch in each epoch."
            )

    def begin(self, epoch: int) -> Position:
        """Return the position before the first step of an epoch."""
        return Position(epoch, 0, Shards(self.count, mark=self._mark()))

    def after(self, position: Position, step: Step) -> Position:
        """Return the position after a step."""
        parts = position.parts
        states = parts.states
        if step.state is not None:
            states = (*(shard for shard in states if shard[0] != step.state[0]), step.state)
        parts = parts._replace(next_worker=(step.worker + 1) % self.num_workers, states=states, mark=self._mark())
        return replace(position, step=position.step + (step.batch is not None), parts=parts)

    def detached(self, position: Position) -> Position:
        """Return a position without its mark, which would keep every later update of a mixture in memory."""
        return replace(position, parts=position.parts._replace(mark=None))

    def first_worker(self, position: Position) -> int:
        """Return the index of the worker that makes the next step."""
        return int(position.parts.next_worker)

    def is_started(self, position: Position) -> bool:
        """Return whether items of the epoch may have been read."""
        return bool(position.step or position.parts.states)

    def log_entries(self, position: Position, step: Step) -> dict[str, Any]:
        """Return the items of a step in its shard, or its packs; the last step of a shard has no batch."""
        if self.roles.distributor.has_packs and self.layout.rows is not None:
            return {"packs": step.packs, "dropped": step.dropped}
        more: dict[str, Any] = {"items": step.items, "dropped": step.dropped}
        if step.state is not None:
            more |= {"shard": step.state[0], "num_shards": position.parts.num_shards, "end": step.batch is None}
        return more

    def log_facts(self) -> dict[str, Any]:
        """Return the known number of steps, and whether the epoch leaves out other items."""
        if self._known is None or self.place[1] == 1:
            return {}
        return {"steps": self._known} | ({"drops": True} if self.roles.epoch_end == "drop" else {})

    def length(self) -> int:
        """Return the number of steps of this rank in one epoch.

        Raises:
            TypeError: distributor or packer do not know it.
        """
        if self._repeats:
            raise TypeError(
                "the data repeats, so the number of batches is not known. Count steps, or set `epochs=1` or "
                "`repeat=False`. A Trainer needs TrainerStream(loader) as `train_dataset`."
            )
        if self._known is not None:
            return self._known
        if self.ranks is None:
            return self._steps_of(self.rank)
        steps = map(self._steps_of, range(self.layout.world_size))
        return min(steps) if self.roles.epoch_end == "drop" else max(steps)

    def _steps_of(self, rank: int) -> int:
        """Return the steps of the own items of a rank in one epoch."""
        total = 0
        for worker in range(self.num_workers):
            shard = self._shard(rank * self.num_workers + worker, self.count, 0)
            count, rows = self.roles.distributor.count(shard), self.roles.packer.rows
            if count is None or rows is None:
                raise TypeError("the number of batches is not known in advance. Count steps, or plan the packs.")
            total += count // rows if self.roles.epoch_end == "drop" else -(-count // rows)
        return total

    def identity(self) -> dict[str, Any]:
        """Return data and settings that decide the batches."""
        return super().identity() | {f"packer_{name}": value for name, value in self.roles.packer.identity().items()}

    def plain_parts(self, position: Position) -> dict[str, Any]:
        """Return the states of the shards."""
        parts, shards = position.parts, []
        for shard, text in sorted(parts.states):
            state = json.loads(text)
            if isinstance(state, str):
                raise BatchError(state)
            shards.append([shard, state])
        plain: dict[str, Any] = {
            "num_workers": self.num_workers,
            "next_worker": parts.next_worker,
            "num_shards": parts.num_shards,
            "regrouped": parts.regrouped,
            "shards": shards,
        }
        if parts.mark is not None:
            plain["schedule"] = self._schedule.state_dict(parts.mark)
        return plain

    def restored(self, states: Sequence[dict[str, Any]], *, changed_weights: bool) -> Position:
        """Return the position of a state, and restore the weights of a mixture."""
        for state in states:
            _check_damage(state)
        before = (states[0]["world_size"] * states[0]["num_workers"], states[0]["num_workers"])
        if before == (self.count, self.num_workers):
            state = self._own(states)
        else:
            states = in_one_epoch(states)
            self._check_elastic(states, is_started=any(saved_state["shards"] for saved_state in states))
            state = regrouped(states, self._indices, self.count)
        if self._schedule is not None and "schedule" in state and not changed_weights:
            self._schedule.load_state_dict(state["schedule"])
        shards = state["shards"]
        if changed_weights:  # learned weights start again from the new weights
            shards = [[n, {k: v for k, v in inner.items() if k != "schedule"}] for n, inner in shards]
        parts = Shards(
            state["num_shards"],
            state["next_worker"],
            tuple((int(index), json.dumps(inner)) for index, inner in shards),
            bool(state["regrouped"]),
            self._mark(),
        )
        return Position(state["epoch"], state["step"], parts)

    def steps(self, position: Position, turn: int) -> Iterator[Step]:
        """Yield the steps of a worker, from every `count`-th shard."""
        parts = position.parts
        worker = (turn + parts.next_worker) % self.num_workers
        states = dict(parts.states)
        # With as many workers as shards, each worker has the shard of its index.
        for index in range(self.rank * self.num_workers + worker, parts.num_shards, self.count):
            state = json.loads(states[index]) if index in states else None
            if state is None or not state["ended"]:
                yield from WorkerStream(
                    self.roles, self._shard(index, parts.num_shards, position.epoch), state, worker
                )
        yield Step(worker, None, None, [], [], ended=True)

    @property
    def _indices(self) -> range:
        """Indices of the workers of this rank among the workers of all ranks."""
        return range(self.rank * self.num_workers, (self.rank + 1) * self.num_workers)

    @property
    def _schedule(self) -> Any:
        return self.roles.distributor.schedule

    def _mark(self) -> Mark | None:
        return None if self._schedule is None else self._schedule.mark()

    def _own(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the state of this rank; the number of ranks and workers is unchanged."""
        own = next((state for state in states if state["rank"] == self.rank), None)
        if own is None:
            raise BatchError(
                f"the state must be of rank {self.rank}, got rank {states[0]['rank']}. Load the state of the same "
                "rank, or the result of gather_state(loader), which has the states of all ranks."
            )
        return dict(own)

    def _check_elastic(self, states: Sequence[dict[str, Any]], *, is_started: bool) -> None:
        """Refuse states that other ranks or workers cannot continue; a started epoch has more conditions."""
        first, distributor = states[0], self.roles.distributor
        saved = f"{first['world_size']} ranks x {first['num_workers']} workers saved"
        now = f"{self.count // self.num_workers} x {self.num_workers} now"
        if len(states) != first["world_size"]:
            raise BatchError(
                f"The state has only rank {first['rank']} of {first['world_size']}, and another number of ranks or "
                f"workers needs the states of all ranks ({saved}, {now}). Load the result of gather_state(loader), or "
                "run `energon-packed state redist`."
            )
        if not is_started:
            return
        if len({(state["epoch"], state["num_shards"]) for state in states}) > 1:
            raise BatchError(
                f"the ranks are in different epochs, and cannot continue as other ranks ({saved}, {now}). Save while "
                "all ranks are in one epoch, or continue with the same ranks and workers."
            )
        if any(state.get("schedule", {}).get("learner", {}).get("updates") for state in states):
            raise BatchError(
                f"The weights of the mixture changed during this epoch, so it cannot be resumed with other ranks or "
                f"workers ({saved}, {now}). Finish the epoch with the same ranks and workers."
            )
        if not distributor.can_seek:
            raise BatchError(
                f"{type(distributor).__name__} over a one-shot iterator cannot continue with another number of "
                f"ranks or workers ({saved}, {now}). Pass a function that returns a new iterator, or keep the number."
            )
        if distributor.infinite and self.count > first["num_shards"]:
            raise BatchError(
                f"a stream without end with {first['num_shards']} shards must have at most as many workers, got "
                f"{self.count} ({saved}, {now}). Use fewer workers or ranks."
            )


def regrouped(states: Sequence[dict[str, Any]], workers: range, count: int) -> dict[str, Any]:
    """Return the state of a rank that continues the shards of other ranks or workers.

    Args:
        states: of all ranks, in one epoch.
        workers: indices of the workers of the rank among the workers of all ranks.
        count: workers of all ranks.
    """
    shards = [shard for state in states for shard in state["shards"]]
    more = {
        "step": max(state["step"] for state in states),
        "num_workers": len(workers),
        "next_worker": 0,
        "regrouped": bool(shards),
        "shards": [shard for shard in shards if shard[0] % count in workers],
    }
    # If no rank has started the epoch, it has the shards of the new workers.
    return states[0] | more | ({} if shards else {"num_shards": count})


def in_one_epoch(states: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the states in one epoch, if some ranks have finished it and other ranks have a batch left.

    A rank that has finished is at the start of the next epoch: its shards are marked as ended in the earlier epoch.
    """
    first = min(states, key=lambda state: int(state["epoch"]))
    in_epoch = []
    for state in states:
        if state["epoch"] == first["epoch"] + 1 and not state["shards"] and not state["step"]:
            workers = state["num_workers"]
            own = range(state["rank"] * workers, (state["rank"] + 1) * workers)
            count = state["world_size"] * workers
            ended = [[n, {"ended": True}] for n in range(first["num_shards"]) if n % count in own]
            state = state | {"epoch": first["epoch"], "num_shards": first["num_shards"], "shards": ended}
        in_epoch.append(state)
    return in_epoch


def _check_damage(state: dict[str, Any]) -> None:
    """Refuse a position that a loader cannot have.

    Raises:
        BatchError: the message names the value.
    """
    if not isinstance(state["regrouped"], bool):
        raise damaged(f"`regrouped` is {state['regrouped']!r}"[:200])
    check_numbers(state, "rank", "world_size", "epoch", "step", "num_workers", "next_worker", "num_shards")
    numbers, workers = [number for number, _ in state["shards"]], state["world_size"] * state["num_workers"]
    # The last condition: a started epoch of the same workers has the state of at least one shard.
    if (
        state["next_worker"] >= state["num_workers"]
        or len(set(numbers)) < len(numbers)
        or not all(0 <= number < state["num_shards"] for number in numbers)
        or (state["step"] and not numbers and not state["regrouped"] and state["num_shards"] == workers)
    ):
        raise damaged(f"step {state['step']}, next worker {state['next_worker']}, shards {numbers!r}"[:200])
