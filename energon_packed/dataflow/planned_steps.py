"""PlannedSteps: the steps of a DataflowLoader whose items have a global order. The position is (epoch, step)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from energon_packed.dataflow.distributors.map import MapDistributor
from energon_packed.dataflow.order import Segment
from energon_packed.dataflow.state import check_identity, check_numbers, damaged, without_weights
from energon_packed.dataflow.worker_stream import Roles, Step, count_failure, encoded, item_name, record_of
from energon_packed.encoding import EncodedSample
from energon_packed.errors import EnergonPackedError


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
        self, roles: Roles, rank: int, world_size: int, num_workers: int, seed: int, *, mask: bool = False
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
