"""Position in an epoch to the steps of a rank, and back to a loader state.

| class | data | position |
|---|---|---|
| PlannedSteps | items with a global order | (epoch, step), the same on all ranks |
| StreamSteps | a stream | the state of every shard of this rank |

An epoch of a stream has a shard for each worker of each rank, and each shard has its own buffer of items:

    2 ranks x 2 workers    shard 0 | shard 1      shard 2 | shard 3
    then 1 rank x 3        shards 0 and 3 | shard 1 | shard 2       until the epoch ends

With other ranks or workers, the shards of the current epoch stay as they are, and the new workers finish them, one
after the other: no item is lost or repeated. From the next epoch on, there is a shard for each new worker.
"""

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from energon_packed.encoding import EncodedSample
from energon_packed.errors import BatchError, EnergonPackedError
from energon_packed.loading.dataflow.worker_stream import (
    LoaderParts,
    Step,
    WorkerStream,
    count_failure,
    item_name,
    record_of,
)
from energon_packed.loading.distributors.datasets import MapDistributor
from energon_packed.loading.distributors.schedule import Mark
from energon_packed.loading.epoch_end import check_rest
from energon_packed.loading.even_ranks import EvenRanks, without_targets
from energon_packed.loading.order import Segment
from energon_packed.loading.process import encode_items
from energon_packed.loading.ranks import ShardSpec
from energon_packed.loading.state import check_identity, check_numbers, damaged
from energon_packed.system import no_collecting

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PlannedPosition:
    """A position in the order, the same on all ranks.

    Attributes:
        epoch: from 0.
        step: index of the next step in the epoch.
        segments: layouts of the epoch so far, the current layout last.
    """

    epoch: int
    step: int
    segments: tuple[Segment, ...]


class PlannedSteps:
    """Compute the items of each step by arithmetic, and read them.

    Args:
        roles: of the loader; the distributor is a MapDistributor, the packer has `rows`.
        rank, world_size: data-parallel rank and world size.
        num_workers: worker processes, at least 1.
        seed: of the loader.
    """

    def __init__(self, roles: LoaderParts, rank: int, world_size: int, num_workers: int, seed: int) -> None:
        assert isinstance(roles.distributor, MapDistributor)
        assert roles.packer.rows is not None
        self.distributor = roles.distributor
        self.roles, self.rank, self.num_workers, self.seed = roles, rank, num_workers, seed
        self.order = roles.distributor.order
        self.layout = self.order.segment(world_size, roles.packer.rows)
        self._drops = roles.epoch_end == "drop"

    place = None  # a state is the same on all ranks

    def check_rest(self, position: PlannedPosition, *, warns: bool) -> None:
        """Report the items that do not fill the last step of the epoch.

        Args:
            position: in the epoch.
            warns: log the warning of `drop`.

        Raises:
            ConfigError: `epoch_end` is `error`.
        """
        segment = position.segments[-1]
        rest = 0 if self.order.repeat else (len(self.order) - segment.item) % segment.width
        check_rest(self.roles.epoch_end, rest, len(self.order), warns=warns)

    def begin(self, epoch: int) -> PlannedPosition:
        """Return the position before the first step of an epoch."""
        return PlannedPosition(epoch, 0, (self.layout,))

    def after(self, position: PlannedPosition, step: Step) -> PlannedPosition:
        """Return the position after a step."""
        return replace(position, step=position.step + 1) if not step.ended else position

    def length(self) -> int:
        """Return the number of steps of one epoch, the same on all ranks.

        Raises:
            TypeError: the data repeats without end.
        """
        return self.order.steps(self.layout, drop=self._drops)

    def identity(self) -> dict[str, Any]:
        """Return data and settings that decide the order."""
        return {f"distributor_{name}": value for name, value in self.roles.distributor.identity().items()}

    def to_plain(self, position: PlannedPosition) -> dict[str, Any]:
        """Return the entries of a state."""
        segments = [segment.to_plain() for segment in position.segments]
        return {"epoch": position.epoch, "step": position.step, "segments": segments}

    def from_plain(
        self, states: Sequence[dict[str, Any]], identity: dict[str, Any], *, allow_changed_weights: bool
    ) -> PlannedPosition:
        """Return the position of a state; other ranks, rows or weights add a segment.

        Args:
            states: the loaded states, which are equal.
            identity: of the loader.
            allow_changed_weights: weights of a blend may differ.

        Raises:
            BatchError: the state is of other data or settings, or damaged.
        """
        state = states[0]
        check_numbers(state, "epoch", "step")
        segments = [Segment.from_plain(plain) for plain in state["segments"]]
        check_identity(state["identity"], identity, allow_changed_weights=allow_changed_weights)
        last = segments[-1]
        if segments[0].item or state["step"] < last.step or min(last.width, last.item + 1) < 1:
            raise damaged(f"step {state['step']} and segments {state['segments']!r}"[:200])
        if not last.has_layout_of(self.layout):
            changed = last.continued(state["step"], self.layout)
            if not self.order.repeat:  # the last step may be short
                changed = replace(changed, item=min(changed.item, len(self.order)))
            # A segment in which no step was made has no item, and is replaced.
            segments = [segment for segment in segments if segment.item < changed.item] + [changed]
        return PlannedPosition(state["epoch"], state["step"], tuple(segments))

    def steps(self, position: PlannedPosition, turn: int) -> Iterator[Step]:
        """Yield the steps of one worker from a position on.

        Args:
            position: start position of all workers.
            turn: index of the worker in the rank, counted from the worker that makes the first step.
        """
        segment = position.segments[-1]
        step, stop = position.step + turn, inf if self.order.repeat else self.order.steps(segment, drop=self._drops)
        while step < stop:
            if self.order.read_ahead:
                self._request(position, step, stop)
            yield self._step(position, step, turn)
            step += self.num_workers
        dropped = self._dropped_at_the_end(segment) if turn == 0 else []
        yield Step(turn, None, None, [], dropped, ended=True)

    def _request(self, position: PlannedPosition, step: int, stop: float) -> None:
        """Request the items of this step and of the next steps of the worker."""
        places = list[int]()
        while len(places) < self.order.read_ahead and step < stop:
            places += self.order.places(position.segments[-1], step, self.rank)
            step += self.num_workers
        self.order.request(self.order.numbers(places, position.epoch, self.seed, position.segments))

    def _step(self, position: PlannedPosition, step: int, turn: int) -> Step:
        """Make the batch of this rank; if none of its items can be used, a row of another rank without targets.

        That row is part of collective operations, but not of the loss.
        """
        segment = position.segments[-1]
        batch, used, dropped = self._row(position, self.order.places(segment, step, self.rank))
        for rank in range(segment.ranks):
            if batch is not None or rank == self.rank:
                continue
            other, _, _ = self._row(position, self.order.places(segment, step, rank), is_counted=False)
            batch = None if other is None else without_targets(other)
        return Step(turn, batch, None, used, dropped)

    def _row(
        self, position: PlannedPosition, places: Sequence[int], *, is_counted: bool = True
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
        indices = self.order.numbers(places, position.epoch, self.seed, position.segments)
        values = [self.distributor.read_item(index) for index in indices]
        with no_collecting():
            encoded = encode_items(values, roles.processor)
        rows: list[Sequence[EncodedSample]] = []
        used, dropped = list[int](), list[int]()
        for place, value, samples in zip(places, values, encoded, strict=True):
            if isinstance(samples, EnergonPackedError) and is_counted:
                count_failure(roles.failures, samples, item_name(value, place), record_of(value))
            if isinstance(samples, EnergonPackedError) or not samples:
                dropped.append(place)
            else:
                rows.append(samples)
                used.append(place)
        if is_counted:
            roles.failures.use(len(used))
        # A single row is collated by its columns.
        samples = rows[0] if len(rows) == 1 else [sample for row in rows for sample in row]
        return roles.collator.collate(samples) if samples else None, used, dropped

    def _dropped_at_the_end(self, segment: Segment) -> list[int]:
        """Return the positions of the items of this rank in the last, short step, if it is left out."""
        if not self._drops:
            return []
        dropped = list(self.order.places(segment, self.order.steps(segment, drop=True), self.rank))
        for _ in dropped:
            self.roles.failures.drop("epoch_end")
        return dropped


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """A position in the shards of a rank.

    Attributes:
        epoch: from 0.
        step: batches of the epoch that were yielded.
        next_worker: index of the worker that makes the next step.
        num_shards: shards of the epoch.
        shards: (shard, JSON state of its WorkerStream) of each started shard of this rank.
        mark: of the weights of a mixture; None for other data.
    """

    epoch: int
    step: int
    next_worker: int
    num_shards: int
    shards: tuple[tuple[int, str], ...] = ()
    mark: Mark | None = None


class StreamSteps:
    """Read the shards of this rank.

    Args:
        roles: of the loader.
        rank, world_size: data-parallel rank and world size.
        num_workers: worker processes, at least 1.
        seed: of the loader.
    """

    def __init__(self, roles: LoaderParts, rank: int, world_size: int, num_workers: int, seed: int) -> None:
        self.roles, self.rank, self.num_workers, self.seed = roles, rank, num_workers, seed
        self.count = world_size * num_workers
        self.place: tuple[int, int] | None = (rank, world_size)
        self.ranks = None if roles.distributor.infinite else EvenRanks.of(roles.epoch_end, self.place)

    def check_rest(self, position: StreamPosition, *, warns: bool) -> None:
        """Warn that short batches are left out; their number is not known in advance."""
        if warns and self.roles.epoch_end == "drop" and (self.roles.packer.rows or 1) > 1:
            _log.warning(
                "`epoch_end='drop'` leaves out the last items of each worker that do not fill a batch in each epoch."
            )

    def begin(self, epoch: int) -> StreamPosition:
        """Return the position before the first step of an epoch."""
        return StreamPosition(epoch, 0, 0, self.count, mark=self._mark())

    def after(self, position: StreamPosition, step: Step) -> StreamPosition:
        """Return the position after a step."""
        shards = position.shards
        if step.state is not None:
            shards = (*(shard for shard in shards if shard[0] != step.state[0]), step.state)
        return replace(
            position,
            step=position.step + (step.batch is not None),
            next_worker=(step.worker + 1) % self.num_workers,
            shards=shards,
            mark=self._mark(),
        )

    def ended(self, position: StreamPosition) -> list[int]:
        """Return the shards that have no more items, so that no worker reads them again."""
        return [shard for shard, text in position.shards if json.loads(text)["ended"]]

    def length(self) -> int:
        """Return the number of steps of this rank in one epoch.

        Raises:
            TypeError: distributor or packer do not know it.
        """
        if self.ranks is None:
            return self._steps_of(self.rank)
        steps = map(self._steps_of, range(self.count // self.num_workers))
        return min(steps) if self.roles.epoch_end == "drop" else max(steps)

    def _steps_of(self, rank: int) -> int:
        """Return the steps of the own items of a rank in one epoch."""
        total = 0
        for worker in range(self.num_workers):
            shard = ShardSpec(index=rank * self.num_workers + worker, num_shards=self.count, seed=self.seed)
            count, rows = self.roles.distributor.count(shard), self.roles.packer.rows
            if count is None or rows is None:
                raise TypeError("the number of batches is not known in advance. Count steps, or plan the packs.")
            total += count // rows if self.roles.epoch_end == "drop" else -(-count // rows)
        return total

    def identity(self) -> dict[str, Any]:
        """Return data and settings that decide the batches."""
        inner = {f"distributor_{name}": value for name, value in self.roles.distributor.identity().items()}
        return inner | {f"packer_{name}": value for name, value in self.roles.packer.identity().items()}

    def to_plain(self, position: StreamPosition) -> dict[str, Any]:
        """Return the entries of a state.

        Raises:
            BatchError: a packer buffers samples that the distributor cannot read again.
        """
        shards = []
        for shard, text in sorted(position.shards):
            state = json.loads(text)
            if isinstance(state, str):
                raise BatchError(state)
            shards.append([shard, state])
        plain: dict[str, Any] = {
            "epoch": position.epoch,
            "step": position.step,
            "num_workers": self.num_workers,
            "next_worker": position.next_worker,
            "num_shards": position.num_shards,
            "shards": shards,
        }
        if position.mark is not None:
            plain["schedule"] = self._schedule.state_dict(position.mark)
        return plain

    def from_plain(
        self, states: Sequence[dict[str, Any]], identity: dict[str, Any], *, allow_changed_weights: bool
    ) -> StreamPosition:
        """Return the position of a state, and restore the weights of a mixture.

        Args:
            states: of all ranks, or of this rank if ranks and workers are as before.
            identity: of the loader.
            allow_changed_weights: weights of a mixture may differ.

        Raises:
            BatchError: the state is of other data or settings, damaged, not of all ranks that are needed, or cannot be
                continued by other ranks or workers.
        """
        for state in states:
            _check_damage(state)
            check_identity(state["identity"], identity, allow_changed_weights=allow_changed_weights)
        changed = states[0]["identity"] != identity  # weights, which may
        before = (states[0]["world_size"] * states[0]["num_workers"], states[0]["num_workers"])
        if before == (self.count, self.num_workers):
            state = self._own(states)
        else:
            states = _in_one_epoch(states)
            shards = [shard for saved_state in states for shard in saved_state["shards"]]
            self._check_elastic(states, is_started=bool(shards))
            own = [shard for shard in shards if shard[0] % self.count in self._indices]
            step = max(saved_state["step"] for saved_state in states)
            state = states[0] | {"step": step, "next_worker": 0, "shards": own}
            if not shards:  # no rank has started the epoch: it has the shards of the new workers
                state["num_shards"] = self.count
        if self._schedule is not None and "schedule" in state and not changed:
            self._schedule.load_state_dict(state["schedule"])
        if changed:  # learned weights start again from the new weights
            state["shards"] = [
                [n, {k: v for k, v in inner.items() if k != "schedule"}] for n, inner in state["shards"]
            ]
        return StreamPosition(
            state["epoch"],
            state["step"],
            state["next_worker"],
            state["num_shards"],
            tuple((int(index), json.dumps(inner)) for index, inner in state["shards"]),
            self._mark(),
        )

    def steps(self, position: StreamPosition, turn: int) -> Iterator[Step]:
        """Yield the steps of one worker from a position on.

        Args:
            position: start position of all workers.
            turn: index of the worker in the rank, counted from the worker that makes the first step.
        """
        worker = (turn + position.next_worker) % self.num_workers
        states = dict(position.shards)
        # Every `count`-th shard: with as many workers as shards, each worker has the shard of its index.
        for index in range(self.rank * self.num_workers + worker, position.num_shards, self.count):
            state = json.loads(states[index]) if index in states else None
            shard = ShardSpec(index=index, num_shards=position.num_shards, epoch=position.epoch, seed=self.seed)
            if state is None or not state["ended"]:
                yield from WorkerStream(self.roles, shard, state, worker)
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
                f"workers needs the states of all ranks ({saved}, {now}). Load the result of gather_state(loader)."
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


def _in_one_epoch(states: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
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
    check_numbers(state, "rank", "world_size", "epoch", "step", "num_workers", "next_worker", "num_shards")
    numbers = [number for number, _ in state["shards"]]
    # The last condition: a started epoch of the same workers has the state of at least one shard.
    if (
        state["next_worker"] >= state["num_workers"]
        or len(set(numbers)) < len(numbers)
        or not all(0 <= number < state["num_shards"] for number in numbers)
        or (state["step"] and not numbers and state["num_shards"] == state["world_size"] * state["num_workers"])
    ):
        raise damaged(f"step {state['step']}, next worker {state['next_worker']}, shards {numbers!r}"[:200])
