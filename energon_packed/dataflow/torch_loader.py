"""DataflowLoader: the four roles under torch's DataLoader, with exact resume."""

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from energon_packed.dataflow.collator import Collator, PaddingFreeCollator
from energon_packed.dataflow.distributors.base import Distributor
from energon_packed.dataflow.elastic import check_elastic, rest_of
from energon_packed.dataflow.epochs import is_left, until_the_end
from energon_packed.dataflow.failures import FailureLog
from energon_packed.dataflow.order_log import OrderLog
from energon_packed.dataflow.packers import Packer, PlannedPacker, SimpleBatcher
from energon_packed.dataflow.resharding import refuse_second_split
from energon_packed.dataflow.share import Share, check_place, place_of, tell_uneven
from energon_packed.dataflow.state import (
    check_place_of,
    check_state,
    damage_named,
    equal_weights,
    states_of,
    without_weights,
)
from energon_packed.dataflow.torch_options import Settings, corrected, refuse_contradictions
from energon_packed.dataflow.torch_workers import Start, WorkerStreams
from energon_packed.dataflow.transport import in_turn
from energon_packed.dataflow.worker_errors import watched
from energon_packed.dataflow.worker_stream import Roles, Step
from energon_packed.encoding import Processor, StoredTokens
from energon_packed.errors import BatchError, ConfigError
from energon_packed.options import make

DATAFLOW_VERSION = 1
"""Version of the states of `DataflowLoader`."""
_log = logging.getLogger(__name__)
_TORCH = (
    "persistent_workers",
    "pin_memory",
    "prefetch_factor",
    "timeout",
    "multiprocessing_context",
    "worker_init_fn",
)


class DataflowLoader(torch.utils.data.DataLoader[Any]):
    """Wires a Distributor, a Processor, a Packer and a Collator, once in every worker process.

        loader = DataflowLoader(MapDistributor(dataset), packer=PoolPacker(4096), num_workers=2)
        for batch in loader:                            # one epoch of PackedBatch; iterate again for the next
            ...
        state = loader.state_dict()                     # exact at every step

    Iterating again after a break resumes behind the last batch; after the last batch of an epoch the next one begins,
    whether the loop met the end or counted steps.

    Args:
        distributor: the items of every rank and worker.
        processor: encodes conversations and records; by default data must be tokenized.
        packer: which samples share a row; by default every item is a row (PlannedPacker).
        collator: makes the batch; by default PaddingFreeCollator.
        batch_size: items in one batch, in place of a packer: builds a SimpleBatcher.
        num_workers: worker processes; 0 loads in this one.
        options: `rank` and `world_size`, data-parallel place, by default from torch.distributed; `seed`;
            `max_failures`, samples of this rank that may fail to load in an epoch; `drop_last`, with `batch_size`;
            `allow_changed_weights`, a state of other weights of a mixture or blend is restored, and what follows is
            drawn by the new ones; `order_log`, a folder where every step is written down (`energon-packed order
            check` reads it); and these of torch's
            DataLoader: `persistent_workers`, `pin_memory`, `prefetch_factor`, `timeout`,
            `multiprocessing_context`, `worker_init_fn`.

    Attributes:
        failures: samples of the current epoch that failed or were dropped: `counts` by reason, and the first `rows`.

    accelerator.prepare returns it as it is, as it deals batches to ranks itself; see `integrations.accelerate`.

    Raises:
        ConfigError: options that are unknown or contradict each other; the message says what to drop.
    """

    _is_accelerate_prepared = True  # otherwise accelerator.prepare splits each rank's part over ranks

    def __init__(
        self,
        distributor: Distributor,
        processor: Processor | None = None,
        packer: Packer | None = None,
        collator: Collator | None = None,
        *,
        batch_size: int | None = None,
        num_workers: int = 0,
        **options: Any,
    ) -> None:
        refuse_contradictions(distributor, packer, batch_size, options)
        of_torch = {name: options.pop(name) for name in _TORCH if name in options}
        settings = make(Settings, options, what="option")
        if isinstance(num_workers, bool) or not isinstance(num_workers, int) or num_workers < 0:
            raise ConfigError(f"`num_workers` is {num_workers!r}; it must be an integer of at least 0")
        if batch_size is not None:
            packer = SimpleBatcher(batch_size, drop_last=settings.drop_last)
        context = of_torch.get("multiprocessing_context")
        self.failures = FailureLog(settings.max_failures, context=context, readers=distributor.readers)
        self._roles = Roles(
            distributor,
            processor or StoredTokens(),
            packer or PlannedPacker(),
            collator or PaddingFreeCollator(),
            self.failures,
        )
        self._settings = settings
        rank, world_size = place_of(settings.rank, settings.world_size)
        self._share = Share(rank=rank, world_size=world_size, num_workers=max(1, num_workers), seed=settings.seed)
        self._order_log = None if settings.order_log is None else OrderLog(Path(settings.order_log), rank)
        self._epoch = self._steps = self._next_worker = self._empty_epochs = 0
        self._moves = 0  # states that were loaded
        self._is_told = False
        self._states: list[str | None] = [None] * self._share.num_workers
        self._to_come: Iterator[Any] | None = None
        self._rest: dict[str, Any] | None = None
        self._schedule = distributor.schedule
        super().__init__(
            WorkerStreams(self._roles, self._share, in_flight=of_torch.get("prefetch_factor") or 2),
            batch_size=None,
            num_workers=num_workers,
            collate_fn=_unchanged,
            **corrected(of_torch, num_workers),
        )
        if self._schedule is not None:
            self._schedule.in_flight = num_workers * (self.prefetch_factor or 0)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """The batches of the current epoch that were not given yet; after its last one, those of the next epoch.

        Raises:
            ConfigError: two epochs in succession have no batch, the process group is another one than when the loader
                was made, or another tool splits the batches over ranks again.
        """
        return until_the_end(self.rest_of_epoch, empty=int(self._steps > 0))

    def rest_of_epoch(self) -> Iterator[Any]:
        """The batches of the current epoch that were not given yet: none after its last one.

        Raises:
            ConfigError: as iterating.
        """
        share = self._share
        check_place((share.rank, share.world_size), self._settings.rank, self._settings.world_size)
        refuse_second_split(share.world_size)
        if not self._is_told:
            self._is_told = True
            tell_uneven(share, self._length)
        steps, here = self._steps_to_come(), (self._epoch, self._moves)
        while (step := self._next_of(steps)) is not None:
            self._states[step.worker] = step.state
            if self._schedule is not None:
                self._schedule.handed_out(step.worker)
            self._next_worker = (step.worker + 1) % self._share.num_workers
            if step.batch is not None:
                self._steps += 1
                self._handed_out(step)
                yield step.batch
                if is_left(here, (self._epoch, self._moves)):
                    return
            else:
                self._handed_out(step)
        self._end_epoch()

    def _steps_to_come(self) -> Iterator[Any]:
        """What the workers give; those of an iteration that counted steps go on where it left them."""
        if self._to_come is None:
            if self._steps:
                self._iterator = None  # workers begin anew, at the state
            start = Start(self._epoch, self._next_worker, list(self._states), self._rest)
            if self._schedule is not None:
                self._schedule.begin()
            streams: WorkerStreams = self.dataset  # type: ignore[assignment]
            with streams.begin(start):
                self._to_come = watched(super().__iter__(), type(self).__name__)
            if self.num_workers:
                self._to_come = in_turn(self._to_come, start.next_worker, streams.counts)
        return self._to_come

    def _next_of(self, steps: Iterator[Any]) -> Any:
        """The next step, or None; after an error, iterating begins anew, at the state."""
        try:
            return next(steps, None)
        except BaseException:
            self._iterator = self._to_come = None
            raise

    def __len__(self) -> int:
        """Batches of this rank in one epoch, where the distributor and the packer know.

        Raises:
            TypeError: they do not.
        """
        return self._length(self._share.rank)

    def _length(self, rank: int) -> int:
        total = 0
        for worker in range(self._share.num_workers):
            count = self._roles.distributor.count(replace(self._share_of(worker), rank=rank))
            steps = None if count is None else self._roles.packer.steps(count)
            if steps is None:
                raise TypeError("the number of batches is not known in advance: count steps, or plan the packs")
            total += steps
        return total

    @property
    def epoch(self) -> int:
        """Number of the epoch that the next batch belongs to, from 0."""
        return self._epoch

    def state_dict(self) -> dict[str, Any]:
        """State behind the last batch that was handed out, in plain types.

        Raises:
            BatchError: samples are held that the distributor cannot read again.
        """
        workers = [None if state is None else json.loads(state) for state in self._states]
        for state in workers:
            if isinstance(state, str):
                raise BatchError(state)
        place: dict[str, Any] = {
            "epoch": self._epoch,
            "steps": self._steps,
            "next_worker": self._next_worker,
            "workers": workers,
        }
        if self._rest is not None:
            place["rest"] = self._rest
        if self._schedule is not None:
            place["schedule"] = self._schedule.state_dict()
        return self._identity() | place

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue behind the batch at which `state` was saved; call it before iterating.

        With as many ranks and workers as before, the rest of the epoch is identical. With another number of them, what
        is left of the epoch is dealt anew, every item once; `state` then is what `gather_state` returned, or the state
        of the only rank. From the next epoch on, all is as if their number had always been the new one.

        Raises:
            BatchError: the state is of other data or settings (the message names what differs), not of all ranks where
                their number changed, or items would have to be read again and cannot be.
        """
        with damage_named():
            self._restore(states_of(state))
        self._moves += 1
        self._iterator = self._to_come = None

    def _restore(self, states: list[dict[str, Any]]) -> None:
        share = self._share
        changed = self._check(states)
        check_place_of(states)
        if changed is None and (states[0]["world_size"], len(states[0]["workers"])) == (
            share.world_size,
            share.num_workers,
        ):
            self._continue(next((one for one in states if one["rank"] == share.rank), states[0]))
        else:
            check_elastic(states, self._roles.distributor, share)
            epoch, rest = rest_of(states)
            self._epoch, self._rest = epoch, None if rest is None else replace(rest, weights=changed).to_plain()
            self._steps = 0 if rest is None else max(one["steps"] for one in states)
            self._next_worker, self._states = 0, [None] * share.num_workers

    def _check(self, states: list[dict[str, Any]]) -> list[float] | None:
        """The old weights of a blended dataset, where they changed and may; None where they are the same."""
        identity, name = self._settings_identity(), "distributor_blend_weights"
        if any("processor" not in one for one in states):  # of a release before it was part of states
            identity.pop("processor", None)
        if not self._settings.allow_changed_weights:
            for one in states:
                check_state(one, DATAFLOW_VERSION, identity)
            return None
        changed = identity.get(name) is not None and states[0].get(name) not in (None, identity[name])
        expected = without_weights(identity)
        for one in states:
            check_state(without_weights(one), DATAFLOW_VERSION, expected | ({name: one.get(name)} if changed else {}))
            if one.get("rest") and not equal_weights(one, identity | {name: one.get(name)}):
                raise BatchError(
                    "weights of a mixture changed in an epoch in which the number of ranks or workers had changed: "
                    "finish the epoch with the same weights"
                )
        return states[0][name] if changed else None

    def _continue(self, state: dict[str, Any]) -> None:
        check_state(state, DATAFLOW_VERSION, {"rank": self._share.rank})
        self._epoch, self._steps, self._next_worker = state["epoch"], state["steps"], state["next_worker"]
        self._rest, workers = state.get("rest"), state["workers"]
        if self._schedule is not None and "schedule" in state:
            if equal_weights(state, self._settings_identity()):
                self._schedule.load_state_dict(state["schedule"])
            else:  # given anew: what was learned before, and what workers took up of it, holds no longer
                workers = [one and {key: of for key, of in one.items() if key != "schedule"} for one in workers]
        self._states = [None if one is None else json.dumps(one) for one in workers]

    def _share_of(self, worker: int) -> Share:
        return replace(self._share, worker=worker, epoch=self._epoch)

    def _identity(self) -> dict[str, Any]:
        share = self._share
        place = {"world_size": share.world_size, "rank": share.rank, "num_workers": self.num_workers}
        return self._settings_identity() | place

    @cached_property
    def _processor(self) -> str:
        """Digest of what decides tokens, of megabytes of tokenizer: made once."""
        return self._roles.processor.fingerprint()

    def _settings_identity(self) -> dict[str, Any]:
        """What a state has in common with every loader that continues from it, whatever its ranks and workers."""
        own: dict[str, Any] = {"version": DATAFLOW_VERSION, "seed": self._share.seed}
        own |= {"processor": self._processor} if self._processor else {}
        inner = {f"distributor_{name}": value for name, value in self._roles.distributor.identity().items()}
        return own | inner | {f"packer_{name}": value for name, value in self._roles.packer.identity().items()}

    def _handed_out(self, step: Step) -> None:
        """Write a step down."""
        if self._order_log is not None:
            share = replace(self._share, worker=step.worker, epoch=self._epoch)
            self._order_log.write(share, self._steps if step.batch is not None else None, step)

    def _end_epoch(self) -> None:
        self.failures.end_epoch(self._epoch, is_alone=self._share.world_size == 1)
        self._empty_epochs = 0 if self._steps else self._empty_epochs + 1
        if self._empty_epochs:
            share = self._share
            message = (
                f"rank {share.rank} of {share.world_size} has no item in epoch {self._epoch}: there are fewer items "
                "than ranks and workers, or all were dropped; use fewer of them, or more data"
            )
            if self._empty_epochs > 1:
                raise ConfigError(message)
            _log.warning("%s", message)
        self._epoch += 1
        if self._schedule is not None:
            self._schedule.end_epoch()
        self._steps = self._next_worker = 0
        self._states = [None] * self._share.num_workers
        self._to_come = self._rest = None


def _unchanged(step: Any) -> Any:
    return step
