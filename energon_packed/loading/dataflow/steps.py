"""PlannedSteps: the steps of a DataflowLoader whose items have a global order. The position is (epoch, step).

StreamSteps: the steps of a DataflowLoader over a stream, whose position is that of every shard.

An epoch of a stream has a shard for each worker of each rank, and each shard keeps the items that its packer holds:

    2 ranks x 2 workers    shard 0 | shard 1      shard 2 | shard 3
    then 1 rank x 3        shards 0 and 3 | shard 1 | shard 2       until the epoch ends

With other ranks or workers, the shards of the begun epoch stay as they are, and the new workers finish them, one after
the other: no item is lost, and none comes twice. From the next epoch on, there is a shard for each new worker.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from energon_packed.encoding import EncodedSample
from energon_packed.errors import BatchError, EnergonPackedError
from energon_packed.loading.dataflow.worker_stream import (
    LoaderParts,
    Step,
    WorkerStream,
    count_failure,
    encoded,
    item_name,
    record_of,
)
from energon_packed.loading.distributors.datasets import MapDistributor
from energon_packed.loading.distributors.schedule import Mark
from energon_packed.loading.order import Segment
from energon_packed.loading.ranks import ShardSpec
from energon_packed.loading.state import check_identity, check_numbers, damaged, without_weights


@dataclass(frozen=True, slots=True)
class PlannedPosition:
    """A position in the order, the same on all ranks.

    Attributes:
        epoch: from 0.
        step: number of the next step in the epoch.
        segments: layouts of the epoch until here, the present one last.
    """

    epoch: int
    step: int
    segments: tuple[Segment, ...]


class PlannedSteps:
    """Reads the items of each step by arithmetic.

    Args:
        roles: of the loader; the distributor is a MapDistributor, the packer has `rows`.
        rank, world_size: data-parallel place.
        num_workers: worker processes, at least 1.
        seed: of the loader.
        mask: in a last step without an item for this rank, a row of another rank without targets, so that all ranks
            have as many steps and no item is used twice.
    """

    def __init__(
        self, roles: LoaderParts, rank: int, world_size: int, num_workers: int, seed: int, *, mask: bool = False
    ) -> None:
        assert isinstance(roles.distributor, MapDistributor)
        assert roles.packer.rows is not None
        self.roles, self.rank, self.num_workers, self.seed = roles, rank, num_workers, seed
        self.order = roles.distributor.order
        self.layout = self.order.segment(world_size, roles.packer.rows)
        self.mask = mask

    place = None  # a state is the same on all ranks

    def begin(self, epoch: int) -> PlannedPosition:
        """The position before the first step of an epoch."""
        return PlannedPosition(epoch, 0, (self.layout,))

    def after(self, position: PlannedPosition, step: Step) -> PlannedPosition:
        """The position after a step."""
        return replace(position, step=position.step + 1) if not step.ended else position

    def length(self, rank: int) -> int:
        """Steps of a rank in one epoch. Raises TypeError if they do not end."""
        return self._stop(self.layout, rank)

    def identity(self) -> dict[str, Any]:
        """Data and settings that decide the order."""
        return {f"distributor_{name}": value for name, value in self.roles.distributor.identity().items()}

    def to_plain(self, position: PlannedPosition) -> dict[str, Any]:
        """Entries of a state."""
        segments = [one.to_plain() for one in position.segments]
        return {"epoch": position.epoch, "step": position.step, "segments": segments}

    def from_plain(
        self, states: Sequence[dict[str, Any]], identity: dict[str, Any], *, allow_changed_weights: bool
    ) -> PlannedPosition:
        """The position of a state: with other ranks, rows or weights, a segment more.

        Args:
            states: that are loaded; they are equal, unless some ranks had a step less.
            identity: of the loader.
            allow_changed_weights: weights of a blend may differ.

        Raises:
            BatchError: the state is of other data or settings, or damaged.
        """
        for one in states:
            check_numbers(one, "epoch", "step")
        state = min(states, key=lambda one: (one["epoch"], -one["step"]))  # in the last step, some ranks have no item
        segments = [Segment.from_plain(one) for one in state["segments"]]
        if len(states) == self.layout.ranks and segments[-1].has_layout_of(self.layout):
            state = states[self.rank]
            segments = [Segment.from_plain(one) for one in state["segments"]]
        saved = state["identity"]
        if allow_changed_weights:
            saved, identity = without_weights(saved), without_weights(identity)
        check_identity(saved, identity)
        last = segments[-1]
        if segments[0].item or state["step"] < last.step or min(last.width, last.item + 1) < 1:
            raise damaged(f"step {state['step']} and segments {state['segments']!r}"[:200])
        if not last.has_layout_of(self.layout):
            changed = last.continued(state["step"], self.layout)
            if not self.order.repeat and changed.item > len(self.order):  # after the last, short step
                changed = replace(changed, item=len(self.order))
            segments = [one for one in segments if one.item < changed.item] + [changed]
        return PlannedPosition(state["epoch"], state["step"], tuple(segments))

    def steps(self, position: PlannedPosition, turn: int) -> Iterator[Step]:
        """The steps of one worker from a position on.

        Args:
            position: where all workers begin.
            turn: number of the worker among those of the rank, counted from the one that makes the first step.
        """
        segment, repeat = position.segments[-1], self.order.repeat
        step, stop = position.step + turn, 0 if repeat else self._stop(segment, self.rank)
        while repeat or step < stop:
            places = self.order.places(segment, step, self.rank)
            yield self._step(position, step, turn) if places else self._masked(position, step, turn)
            step += self.num_workers
        dropped = self._dropped_at_the_end(segment) if turn == 0 and not repeat else []
        yield Step(turn, None, None, [], dropped, ended=True)

    def _step(self, position: PlannedPosition, step: int, turn: int) -> Step:
        distributor, roles = self.roles.distributor, self.roles
        assert isinstance(distributor, MapDistributor)
        places = self.order.places(position.segments[-1], step, self.rank)
        numbers = self.order.numbers(places, position.epoch, self.seed, position.segments)
        values = [distributor.read_item(number) for number in numbers]
        rows: list[Sequence[EncodedSample]] = []
        used, dropped = [], []
        for place, value, found in zip(places, values, encoded(values, roles.processor), strict=True):
            if isinstance(found, EnergonPackedError):
                count_failure(roles.failures, found, item_name(value, place), record_of(value))
            if isinstance(found, EnergonPackedError) or not found:
                dropped.append(place)
            else:
                rows.append(found)
                used.append(place)
        roles.failures.use(len(used))
        samples = rows[0] if len(rows) == 1 else [sample for row in rows for sample in row]  # one row has its columns
        batch = roles.collator.collate(samples) if samples else None
        return Step(turn, batch, None, used, dropped)

    def _masked(self, position: PlannedPosition, step: int, turn: int) -> Step:
        """A row of the first rank without targets: it takes part in collective operations, and not in the loss."""
        other = PlannedSteps(self.roles, 0, self.layout.ranks, self.num_workers, self.seed)
        found = other._step(position, step, turn)
        batch = None if found.batch is None else found.batch.without_targets()
        return Step(turn, batch, None, [], [])

    def _stop(self, segment: Segment, rank: int) -> int:
        return self.order.steps(segment, None if self.mask else rank, drop_last=self.roles.packer.drop_last)

    def _dropped_at_the_end(self, segment: Segment) -> list[int]:
        """Places of the items of this rank in the last, short step, if it is left out."""
        if not self.roles.packer.drop_last:
            return []
        stop = self.order.steps(segment, self.rank, drop_last=True)
        dropped = list(self.order.places(segment, stop, self.rank))
        for _ in dropped:
            self.roles.failures.drop("drop_last")
        return dropped


_ENDED = {"ended": True, "ready": []}


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """A position in the shards of a rank.

    Attributes:
        epoch: from 0.
        step: batches of the epoch that were given.
        next_worker: that makes the next step.
        num_shards: of the epoch.
        shards: (shard, JSON state of its WorkerStream) of each shard of this rank that was begun.
        mark: of the weights of a mixture; None for other data.
    """

    epoch: int
    step: int
    next_worker: int
    num_shards: int
    shards: tuple[tuple[int, str], ...] = ()
    mark: Mark | None = None


class StreamSteps:
    """Reads the shards of this rank.

    Args:
        roles: of the loader.
        rank, world_size: data-parallel place.
        num_workers: worker processes, at least 1.
        seed: of the loader.
    """

    def __init__(self, roles: LoaderParts, rank: int, world_size: int, num_workers: int, seed: int) -> None:
        self.roles, self.rank, self.num_workers, self.seed = roles, rank, num_workers, seed
        self.count = world_size * num_workers
        self.place: tuple[int, int] | None = (rank, world_size)

    def begin(self, epoch: int) -> StreamPosition:
        """The position before the first step of an epoch."""
        return StreamPosition(epoch, 0, 0, self.count, mark=self._mark())

    def after(self, position: StreamPosition, step: Step) -> StreamPosition:
        """The position after a step."""
        shards = position.shards
        if step.state is not None:
            shards = (*(one for one in shards if one[0] != step.state[0]), step.state)
        return replace(
            position,
            step=position.step + (step.batch is not None),
            next_worker=(step.worker + 1) % self.num_workers,
            shards=shards,
            mark=self._mark(),
        )

    def length(self, rank: int) -> int:
        """Steps of a rank in one epoch.

        Raises:
            TypeError: distributor and packer do not know them.
        """
        total = 0
        for worker in range(self.num_workers):
            share = ShardSpec(index=rank * self.num_workers + worker, count=self.count, seed=self.seed)
            count = self.roles.distributor.count(share)
            steps = None if count is None else self.roles.packer.steps(count)
            if steps is None:
                raise TypeError("the number of batches is not known in advance: count steps, or plan the packs")
            total += steps
        return total

    def identity(self) -> dict[str, Any]:
        """Data and settings that decide the batches."""
        inner = {f"distributor_{name}": value for name, value in self.roles.distributor.identity().items()}
        return inner | {f"packer_{name}": value for name, value in self.roles.packer.identity().items()}

    def to_plain(self, position: StreamPosition) -> dict[str, Any]:
        """Entries of a state.

        Raises:
            BatchError: a packer holds samples that the distributor cannot read again.
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
        """The position of a state, and of the weights of a mixture.

        Args:
            states: of all ranks, or of this one if ranks and workers are as before.
            identity: of the loader.
            allow_changed_weights: weights of a mixture may differ.

        Raises:
            BatchError: the state is of other data or settings, damaged, not of all ranks that are needed, or cannot be
                continued by other ranks or workers.
        """
        for state in states:
            _check_damage(state)
            saved, expected = state["identity"], identity
            if allow_changed_weights:
                saved, expected = without_weights(saved), without_weights(identity)
            check_identity(saved, expected)
        changed = states[0]["identity"] != identity  # weights, which may
        before = (states[0]["world_size"] * states[0]["num_workers"], states[0]["num_workers"])
        if before == (self.count, self.num_workers):
            state = self._own(states)
        else:
            states = _in_one_epoch(states)
            shards = [shard for one in states for shard in one["shards"]]
            self._check_elastic(states, is_begun=bool(shards))
            own = [shard for shard in shards if shard[0] % self.count in self._indices]
            step = max(one["step"] for one in states)
            state = states[0] | {"step": step, "next_worker": 0, "shards": own}
            if not shards:  # no rank has begun the epoch: it has the shards of the new workers
                state["num_shards"] = self.count
        if self._schedule is not None and "schedule" in state and not changed:
            self._schedule.load_state_dict(state["schedule"])
        if changed:  # what was learned by other weights does not hold any more
            state["shards"] = [[n, {k: v for k, v in one.items() if k != "schedule"}] for n, one in state["shards"]]
        return StreamPosition(
            state["epoch"],
            state["step"],
            state["next_worker"],
            state["num_shards"],
            tuple((int(number), json.dumps(one)) for number, one in state["shards"]),
            self._mark(),
        )

    def steps(self, position: StreamPosition, turn: int) -> Iterator[Step]:
        """The steps of one worker from a position on.

        Args:
            position: where all workers begin.
            turn: number of the worker among those of the rank, counted from the one that makes the first step.
        """
        worker = (turn + position.next_worker) % self.num_workers
        states = dict(position.shards)
        for index in range(self.rank * self.num_workers + worker, position.num_shards, self.count):
            state = json.loads(states[index]) if index in states else None
            share = ShardSpec(index=index, count=position.num_shards, epoch=position.epoch, seed=self.seed)
            if state is None or not state["ended"] or state["ready"]:
                yield from WorkerStream(self.roles, share, state, worker)
        yield Step(worker, None, None, [], [], ended=True)

    @property
    def _indices(self) -> range:
        """Numbers of the workers of this rank, among those of all ranks."""
        return range(self.rank * self.num_workers, (self.rank + 1) * self.num_workers)

    @property
    def _schedule(self) -> Any:
        return self.roles.distributor.schedule

    def _mark(self) -> Mark | None:
        return None if self._schedule is None else self._schedule.mark()

    def _own(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The state of this rank, of as many ranks and workers as now."""
        own = next((one for one in states if one["rank"] == self.rank), None)
        if own is None:
            raise BatchError(
                f"the saved state is of rank {states[0]['rank']}, and this is rank {self.rank}: load the state of the "
                "same rank, or what gather_state(loader) returned, which has the states of all ranks"
            )
        return dict(own)

    def _check_elastic(self, states: Sequence[dict[str, Any]], *, is_begun: bool) -> None:
        """Refuse states that other ranks or workers cannot continue; an epoch that has begun has more conditions."""
        first, distributor = states[0], self.roles.distributor
        saved = f"{first['world_size']} ranks of {first['num_workers']} workers saved"
        now = f"{self.count // self.num_workers} of {self.num_workers} now"
        if len(states) != first["world_size"]:
            raise BatchError(
                f"the saved state is of rank {first['rank']} alone, and the shards of all ranks are assigned anew "
                f"({saved}, {now}): load what gather_state(loader) returned, which has the states of all ranks"
            )
        if not is_begun:
            return
        if len({(one["epoch"], one["num_shards"]) for one in states}) > 1:
            raise BatchError(
                f"the ranks are in different epochs, and cannot continue as other ranks ({saved}, {now}): save while "
                "all ranks are in one epoch, or continue with the same ranks and workers"
            )
        if any(one.get("schedule", {}).get("learner", {}).get("updates") for one in states):
            raise BatchError(
                f"the weights of the mixture were updated, and each worker draws by those that it took up ({saved}, "
                f"{now}): finish the epoch with the same ranks and workers"
            )
        if not distributor.can_seek:
            raise BatchError(
                f"{type(distributor).__name__} over a one-shot iterator cannot continue with another number of "
                f"ranks or workers ({saved}, {now}): pass a function that returns a new iterator, or keep their number"
            )
        if distributor.infinite and self.count > first["num_shards"]:
            raise BatchError(
                f"a stream without end has {first['num_shards']} shards, and {self.count} workers cannot share them "
                f"({saved}, {now}): use at most {first['num_shards']} workers on all ranks"
            )


def _in_one_epoch(states: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The states of ranks of which some have read their shards to the end, and others have a batch more.

    A rank that has ended is at the begin of the next epoch: its shards are marked as ended in the epoch of the others.
    """
    first = min(states, key=lambda one: int(one["epoch"]))
    found = []
    for state in states:
        if state["epoch"] == first["epoch"] + 1 and not state["shards"] and not state["step"]:
            workers = state["num_workers"]
            own = range(state["rank"] * workers, (state["rank"] + 1) * workers)
            count = state["world_size"] * workers
            ended = [[n, dict(_ENDED)] for n in range(first["num_shards"]) if n % count in own]
            state = state | {"epoch": first["epoch"], "num_shards": first["num_shards"], "shards": ended}
        found.append(state)
    return found


def _check_damage(state: dict[str, Any]) -> None:
    """Refuse a position that no loader can have.

    Raises:
        BatchError: the message names the value.
    """
    check_numbers(state, "rank", "world_size", "epoch", "step", "num_workers", "next_worker", "num_shards")
    numbers = [number for number, _ in state["shards"]]
    if (
        state["next_worker"] >= state["num_workers"]
        or len(set(numbers)) < len(numbers)
        or not all(0 <= number < state["num_shards"] for number in numbers)
        or (state["step"] and not numbers and state["num_shards"] == state["world_size"] * state["num_workers"])
    ):
        raise damaged(f"step {state['step']}, next worker {state['next_worker']}, shards {numbers!r}"[:200])
