"""Settings of DataflowLoader, and options of torch's DataLoader under it: which go together.

WorkerSteps: the dataset under torch's DataLoader, which yields the steps of each worker process.

DataflowLoader: the four roles under torch's DataLoader, with exact resume.
"""

import gc
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from energon_packed.encoding import Processor, StoredTokens
from energon_packed.errors import ConfigError
from energon_packed.loading.collator import Collator, PaddingFreeCollator
from energon_packed.loading.dataflow.steps import PlannedPosition, PlannedSteps, StreamPosition, StreamSteps
from energon_packed.loading.dataflow.transport import Message, WorkerProgress, guarded, messages, round_robin
from energon_packed.loading.dataflow.worker_stream import LoaderParts, Step
from energon_packed.loading.distributors.base import Distributor
from energon_packed.loading.distributors.datasets import MapDistributor
from energon_packed.loading.failures import FailureLog, watched
from energon_packed.loading.order_log import OrderLog
from energon_packed.loading.packers import Packer, PlannedPacker, SimpleBatcher
from energon_packed.loading.ranks import check_not_resharded, check_rank, resolve_rank, warn_uneven
from energon_packed.loading.state import check_state, damage_named, is_left, iterate_epoch, make_state, states_of
from energon_packed.options import make

_log = logging.getLogger(__name__)
_REFUSED = {
    "collate_fn": "pass a `collator`",
    "sampler": "the distributor decides the order",
    "batch_sampler": "the packer decides the batches",
    "shuffle": "set it on the distributor",
    "dataset": "pass it to a distributor, such as MapDistributor(dataset)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of `DataflowLoader`; see there."""

    rank: int | None = None
    world_size: int | None = None
    seed: int = 0
    max_failures: int | None = 0
    drop_last: bool = False
    allow_changed_weights: bool = False
    order_log: str | Path | None = None
    even_ranks: Literal["off", "mask"] = "off"

    def __post_init__(self) -> None:
        if self.even_ranks not in ("off", "mask"):
            raise ConfigError(f"`even_ranks` must be 'off' or 'mask', got {self.even_ranks!r}.")
        for name in ("seed", "max_failures"):
            if getattr(self, name) is not None and getattr(self, name) < 0:
                raise ConfigError(f"`{name}` is {getattr(self, name)}; it must be at least 0")


def refuse_contradictions(
    distributor: Any, packer: Packer | None, batch_size: int | None, options: dict[str, Any]
) -> None:
    """Refuse what the roles decide already.

    Raises:
        ConfigError: the message says what to drop.
    """
    for name, remedy in _REFUSED.items():
        if options.get(name) is not None:
            raise ConfigError(f"drop `{name}`: {remedy}")
    if not isinstance(distributor, Distributor):
        raise ConfigError(
            f"`distributor` is a {type(distributor).__name__}; pass a Distributor, such as MapDistributor(data) for "
            "what has a length, or IterableDistributor(data)"
        )
    if batch_size is not None and packer is not None:
        raise ConfigError(
            f"`batch_size` {batch_size} and {type(packer).__name__} both decide what shares a row; drop one of them"
        )
    if options.get("drop_last") and batch_size is None:
        raise ConfigError("`drop_last` belongs to `batch_size`; drop it, as packers give everything")


def corrected(of_torch: dict[str, Any], num_workers: int) -> dict[str, Any]:
    """The options, without those that need workers where there are none.

    Raises:
        ConfigError: one that cannot be left out silently.
    """
    if num_workers:
        return of_torch
    if of_torch.get("persistent_workers"):
        _log.warning("`persistent_workers` needs `num_workers` of at least 1; it is set to False")
        of_torch = {**of_torch, "persistent_workers": False}
    for name in ("prefetch_factor", "multiprocessing_context", "timeout"):
        if of_torch.get(name) not in (None, 0):
            raise ConfigError(f"`{name}` needs worker processes; drop it, or set `num_workers` to at least 1")
    return of_torch


_PARENT_CHECK_SECONDS = 2.0  # between two looks at the parent process


class WorkerSteps(torch.utils.data.IterableDataset[Any]):
    """In each worker process, the messages with its steps; without worker processes, the steps.

    Args:
        steps: of this rank.
        in_flight: messages of a worker that torch asks for in advance.
    """

    def __init__(self, steps: PlannedSteps | StreamSteps, in_flight: int) -> None:
        self.plan = steps
        self.in_flight = in_flight
        self.counts = WorkerProgress(steps.num_workers)
        self._epoch = torch.zeros(1, dtype=torch.int64)
        torch.Tensor.share_memory_(self._epoch)  # type: ignore[no-untyped-call]  # seen by persistent workers
        self._start: Any = None
        self._by_loader = False

    @contextmanager
    def begin(self, position: Any) -> Iterator[None]:
        """Set where the iteration begins that is made inside; only workers that start now see more than its epoch."""
        self._epoch[0] = position.epoch
        # A mark keeps every update of a mixture since then, and workers do not need it.
        self._start = replace(position, mark=None) if isinstance(position, StreamPosition) else position
        self.plan.roles.failures.start(is_whole=not position.step and not getattr(position, "shards", ()))
        self.counts.begin()
        self._by_loader = True
        try:
            yield
        finally:
            self._by_loader = False

    def __iter__(self) -> Iterator[Step | Message]:
        if not self._by_loader:
            raise ConfigError(
                "the data of a DataflowLoader is iterated by another loader, which loses its order, state and ranks: "
                "do not pass a DataflowLoader to accelerator.prepare or Trainer; iterate it directly, and move each "
                "batch to the device"
            )
        info = torch.utils.data.get_worker_info()
        epoch = int(self._epoch[0])
        start: Any = self._start if self._start.epoch == epoch else self.plan.begin(epoch)
        # Torch takes the first message from worker 0, so the worker that makes the first step must be worker 0.
        turn = 0 if info is None else info.id
        steps = self.plan.steps(start, turn)
        if info is None:
            return steps
        _end_with_parent()
        gc.freeze()  # what the main process had loaded is not searched for garbage again and again
        gc.set_threshold(100_000)
        one_by_one = self.plan.roles.distributor.schedule is not None  # it counts what workers were asked for
        worker = (turn + getattr(start, "next_worker", 0)) % self.plan.num_workers
        return messages(guarded(steps, turn), worker, self.counts, self.in_flight, one_by_one=one_by_one)


def _end_with_parent() -> None:
    """End this worker process when its parent was killed.

    Torch's worker notices that, too. But then it waits until its queue is empty, and the reader of the queue is gone:
    the worker, and what holds its output open, would wait indefinitely.
    """
    if any(thread.name == _end_with_parent.__name__ for thread in threading.enumerate()):
        return  # a persistent worker in a later epoch
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_CHECK_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name=_end_with_parent.__name__).start()


Position = PlannedPosition | StreamPosition
_TORCH = (
    "persistent_workers",
    "pin_memory",
    "prefetch_factor",
    "timeout",
    "multiprocessing_context",
    "worker_init_fn",
)
_NAME = "DataflowLoader"
"""In states, of subclasses too."""


class DataflowLoader(torch.utils.data.DataLoader[Any]):
    """Wires a Distributor, a Processor, a Packer and a Collator, once in every worker process.

        loader = DataflowLoader(MapDistributor(dataset), packer=PoolPacker(4096), num_workers=2)
        for batch in loader:                            # one epoch of PackedBatch; iterate again for the next
            ...
        state = loader.state_dict()                     # exact at every step

    Iterating again after a break resumes after the last batch; after the last batch of an epoch the next one begins,
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
            drawn by the new weights; `order_log`, a folder where every step is written down (`energon-packed order
            check` reads it); `even_ranks`, "mask" gives a rank without an item in the last step a row without
            targets, so that all ranks have as many batches; and these options of torch's DataLoader:
            `persistent_workers`, `pin_memory`, `prefetch_factor`, `timeout`, `multiprocessing_context`,
            `worker_init_fn`.

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
        self._roles = LoaderParts(
            distributor,
            processor or StoredTokens(),
            packer or PlannedPacker(),
            collator or PaddingFreeCollator(),
            self.failures,
        )
        self._settings = settings
        self._rank, self._world_size = resolve_rank(settings.rank, settings.world_size)
        planned = isinstance(distributor, MapDistributor) and self._roles.packer.rows is not None
        place = (self._roles, self._rank, self._world_size, max(1, num_workers), settings.seed)
        mask = settings.even_ranks == "mask"
        if mask and not planned:
            raise ConfigError("`even_ranks` 'mask' needs items with a global order, got a stream. Use 'off'.")
        self._plan: PlannedSteps | StreamSteps = PlannedSteps(*place, mask=mask) if planned else StreamSteps(*place)
        self._order_log = (
            None if settings.order_log is None else OrderLog(Path(settings.order_log), self._rank, planned=planned)
        )
        self._here: Any = self._plan.begin(0)
        self._given = self._empty_epochs = 0  # batches of the epoch
        self._moves = 0  # states that were loaded
        self._is_warned = False
        self._to_come: Iterator[Any] | None = None
        self._schedule = distributor.schedule
        super().__init__(
            WorkerSteps(self._plan, in_flight=of_torch.get("prefetch_factor") or 2),
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
        return iterate_epoch(self.rest_of_epoch, empty=int(self._here.step > 0))

    def rest_of_epoch(self) -> Iterator[Any]:
        """The batches of the current epoch that were not given yet: none after its last batch.

        Raises:
            ConfigError: as iterating.
        """
        check_rank((self._rank, self._world_size), self._settings.rank, self._settings.world_size)
        check_not_resharded(self._world_size)
        if not self._is_warned:
            self._is_warned = True
            warn_uneven(self._rank, self._world_size, self._plan.length)
        steps, began = self._steps_to_come(), (self.epoch, self._moves)
        while (step := self._next_of(steps)) is not None:
            if self._schedule is not None and not step.ended:
                self._schedule.handed_out(step.worker)
            self._here = self._plan.after(self._here, step)
            if self._order_log is not None:
                place = (self._rank, self._world_size, self._plan.num_workers)
                self._order_log.write(place, self._here, step)
            if step.batch is not None:
                self._given += 1
                yield step.batch
                if is_left(began, (self.epoch, self._moves)):
                    return
        self._end_epoch()

    def _steps_to_come(self) -> Iterator[Any]:
        """The steps of the workers; an iteration that counted steps continues with the same workers."""
        if self._to_come is None:
            if self._here.step:
                self._iterator = None  # new workers, which begin at the position
            if self._schedule is not None:
                self._schedule.begin()
            dataset: WorkerSteps = self.dataset  # type: ignore[assignment]
            with dataset.begin(self._here):
                self._to_come = watched(super().__iter__(), type(self).__name__)
            if self.num_workers:
                self._to_come = round_robin(self._to_come, getattr(self._here, "next_worker", 0), dataset.counts)
        return self._to_come

    def _next_of(self, steps: Iterator[Any]) -> Any:
        """The next step, or None; after an error, iterating starts again, at the state."""
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
        return self._plan.length(self._rank)

    @property
    def epoch(self) -> int:
        """Number of the epoch that the next batch belongs to, from 0."""
        return int(self._here.epoch)

    @property
    def place(self) -> tuple[int, int]:
        """(rank, world size) of this process."""
        return self._rank, self._world_size

    def position(self) -> Position:
        """The position after the last batch that was given: small, for `state_dict` of later."""
        return self._here  # type: ignore[no-any-return]

    def state_dict(self, position: Position | None = None) -> dict[str, Any]:
        """The state after the last batch that was given, in plain types.

        Args:
            position: after an earlier batch, for a trainer that reads ahead: the state is as after that batch, with
                all updates of a mixture until now.

        Raises:
            BatchError: a packer holds samples that the distributor cannot read again.
        """
        plain = self._plan.to_plain(position or self._here)  # type: ignore[arg-type]
        return make_state(_NAME, self._identity(), plain, self._plan.place)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the batch at which `state` was saved; call it before iterating.

        Items with a global order (a MapDistributor whose items are rows) continue exactly with any number of ranks and
        workers, and with another `batch_size`. A stream is identical with as many ranks and workers as before. With
        others, the new workers finish the shards of the begun epoch; `state` then is what `gather_state` returned, or
        the state of the only rank.

        Raises:
            BatchError: the state is of other data or settings (the message names what differs), or of a stream that
                cannot be continued with this number of ranks or workers.
        """
        with damage_named():
            states = states_of(state)
            for one in states:
                check_state(one, _NAME)
            allow = self._settings.allow_changed_weights
            self._here = self._plan.from_plain(states, self._identity(), allow_changed_weights=allow)
        self._given = self._here.step
        self._moves += 1
        self._iterator = self._to_come = None

    @cached_property
    def _processor(self) -> str:
        """Digest of what decides tokens, of megabytes of tokenizer: made once."""
        return self._roles.processor.fingerprint()

    def _identity(self) -> dict[str, Any]:
        """Data and settings that a state has in common with every loader that continues from it."""
        own = {"processor": self._processor} if self._processor else {}
        return {"seed": self._settings.seed} | own | self._plan.identity()

    def _end_epoch(self) -> None:
        self.failures.end_epoch(self.epoch, is_alone=self._world_size == 1)
        self._empty_epochs = 0 if self._given else self._empty_epochs + 1
        if self._empty_epochs:
            message = (
                f"rank {self._rank} of {self._world_size} has no item in epoch {self.epoch}: there are fewer items "
                "than ranks and workers, or all were dropped; use fewer of them, or more data"
            )
            if self._empty_epochs > 1:
                raise ConfigError(message)
            _log.warning("%s", message)
        if self._schedule is not None:
            self._schedule.end_epoch()
        self._here = self._plan.begin(self.epoch + 1)
        self._given, self._to_come = 0, None


def _unchanged(step: Any) -> Any:
    return step
