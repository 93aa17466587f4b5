"""The four roles to batches: DataflowLoader, a torch DataLoader that resumes exactly at every step.

| name | content |
|---|---|
| DataflowLoader | the loader, in the main process |
| WorkerSteps | the dataset under torch's DataLoader, in the worker processes |
"""

import gc
import logging
import os
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn, Unpack

import torch

from energon_packed.encoding import Processor, StoredTokens
from energon_packed.errors import ConfigError
from energon_packed.keywords import LoaderKeywords
from energon_packed.loading.collation.collator import Collator, PaddingFreeCollator
from energon_packed.loading.dataflow.steps import Steps
from energon_packed.loading.dataflow.transport import Message, guarded, messages, round_robin
from energon_packed.loading.dataflow.worker_stream import LoaderParts, Step
from energon_packed.loading.dataflow.workers import WatchedWorkers
from energon_packed.loading.distributors.base import Distributor, LoaderLayout
from energon_packed.loading.failures import FailureLog
from energon_packed.loading.loaders import Loader
from energon_packed.loading.monitoring.order_log import LoggedSamples, OrderLog
from energon_packed.loading.options import LoaderOptions
from energon_packed.loading.packers.base import Packer
from energon_packed.loading.packers.simple import PlannedPacker, SimpleBatcher
from energon_packed.loading.ranks import check_rank, resolve_rank
from energon_packed.loading.resharding import check_not_resharded
from energon_packed.loading.state import (
    Position,
    check_state,
    damage_named,
    is_left,
    iterate_epoch,
    make_state,
    refuse_as_dataset,
    states_of,
)
from energon_packed.options import check_type, make
from energon_packed.pipeline.output.run_state import digest
from energon_packed.pipeline.rejects import RejectLimits

_log = logging.getLogger(__name__)
_REFUSED = {
    "collate_fn": "DataflowLoader. Pass a `collator`.",
    "sampler": "DataflowLoader: the distributor decides the order.",
    "batch_sampler": "DataflowLoader: the packer decides the batches.",
    "shuffle": "DataflowLoader. Set it on the distributor.",
    "dataset": "DataflowLoader. Pass it to a distributor, such as MapDistributor(dataset).",
}


def _check_contradictions(
    distributor: Any, processor: Any, packer: Any, collator: Any, batch_size: int | None
) -> None:
    """Refuse objects of another class as a role, and a batch size beside a packer.

    Raises:
        ConfigError: the message names the option to remove.
    """
    if not isinstance(distributor, Distributor):
        raise ConfigError(
            f"`distributor` must be a Distributor, got {type(distributor).__name__}. Wrap map-style data in "
            "MapDistributor(data), iterables in IterableDistributor(data)."
        )
    check_type("processor", processor, Processor, "Pass a Processor, such as ChatEncoder.from_pretrained(DIR).")
    check_type("packer", packer, Packer, "Pass a Packer, such as PoolPacker(4096).")
    check_type("collator", collator, Collator, "Pass a Collator, such as PaddingFreeCollator().")
    if batch_size is not None and packer is not None:
        raise ConfigError(
            f"Pass either `batch_size` or `packer`, not both (got batch_size={batch_size} and "
            f"{type(packer).__name__})."
        )


_PARENT_CHECK_SECONDS = 2.0  # between two checks of the parent process


class WorkerSteps(torch.utils.data.IterableDataset[Any]):
    """Dataset whose items are the messages of each worker process, or the steps if there are no worker processes.

    Args:
        steps: steps of this rank.
        in_flight: messages of a worker that torch requests in advance.
    """

    def __init__(self, steps: Steps, in_flight: int) -> None:
        self.plan = steps
        self.in_flight = in_flight
        self.counts = torch.zeros((2, steps.num_workers), dtype=torch.int64)  # of `messages`
        self._epoch = torch.zeros(1, dtype=torch.int64)
        for shared in (self.counts, self._epoch):  # seen by persistent workers
            torch.Tensor.share_memory_(shared)  # type: ignore[no-untyped-call]
        self._start = steps.begin(0)
        self._by_loader = False

    @contextmanager
    def starting_at(self, position: Position) -> Iterator[None]:
        """Set the start position of an iteration that is made in this context.

        Workers that run already see only its epoch: they start an epoch together, at its first step.
        """
        self._epoch[0] = position.epoch
        self._start = self.plan.detached(position)
        self.plan.roles.failures.start(is_whole=not self.plan.is_started(position))
        self.counts.zero_()
        self._by_loader = True
        try:
            yield
        finally:
            self._by_loader = False

    def __iter__(self) -> Iterator[Step | Message]:
        if not self._by_loader:
            raise ConfigError(
                "Another DataLoader is iterating this DataflowLoader's dataset, which loses order, state and ranks. "
                "Iterate the DataflowLoader directly, and do not pass it to accelerator.prepare or Trainer."
            )
        info = torch.utils.data.get_worker_info()
        epoch = int(self._epoch[0])
        start = self._start if self._start.epoch == epoch else self.plan.begin(epoch)
        # Torch reads the first message from worker 0, so the worker that makes the first step must be worker 0.
        turn = 0 if info is None else info.id
        steps = self.plan.steps(start, turn)
        if info is None:
            return steps
        _end_with_parent()
        gc.freeze()  # objects of the main process are not searched for garbage in every collection
        gc.set_threshold(100_000)
        one_by_one = self.plan.roles.distributor.schedule is not None  # a schedule counts requested steps
        worker = (turn + self.plan.first_worker(start)) % self.plan.num_workers
        return messages(guarded(steps, turn), worker, self.counts, self.in_flight, one_by_one=one_by_one)


def _end_with_parent() -> None:
    """End this worker process when its parent was killed.

    Torch's worker notices that, too, but then it waits until its queue is empty. The reader of the queue is gone, so
    the worker, and each process that reads its output, would wait indefinitely.
    """
    if any(thread.name == _end_with_parent.__name__ for thread in threading.enumerate()):
        return  # a persistent worker in a later epoch
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_CHECK_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name=_end_with_parent.__name__).start()


_NAME = "DataflowLoader"
"""Name in loader states, also in states of subclasses."""


class DataflowLoader(torch.utils.data.DataLoader[Any], Loader):
    """Load batches through a Distributor, a Processor, a Packer and a Collator, once in every worker process.

        loader = DataflowLoader(MapDistributor(dataset), packer=PoolPacker(4096), num_workers=2)
        for batch in loader:                            # one epoch of PackedBatch; iterate again for the next
            ...
        state = loader.state_dict()                     # exact at every step

    Each iterator continues after the last batch that any iterator returned: `next(iter(loader))` uses a batch. After
    the last batch of an epoch, iterating again starts the next epoch, whether the loop met the end or counted steps.
    Each thread needs a separate loader.

    Args:
        distributor: assigns items to ranks and workers.
        processor: encodes conversations and records; by default data must be tokenized.
        packer: decides which samples share a row; by default every item is a row (PlannedPacker).
        collator: makes the batch; by default PaddingFreeCollator.
        batch_size: items in one batch, instead of a packer: builds a SimpleBatcher.
        options: the fields of `LoaderOptions`.

    Attributes:
        failures: samples of the current epoch that failed or were dropped: `counts` by reason, and the first `rows`.
        order_log: log of the consumed batches, or None.
        roles: distributor, processor, packer and collator.

    accelerator.prepare returns it unchanged, as it is sharded over ranks already; see `integrations.accelerate`.

    Raises:
        ConfigError: options are unknown or contradict each other; the message names the option to remove.

    Examples:
        >>> records = [{"text": "word " * n} for n in range(1, 20)]
        >>> loader = DataflowLoader(MapDistributor(records), encoder, PoolPacker(128))
        >>> [batch.num_tokens for batch in loader]
        [128, 128, 128, 53]
    """

    _is_accelerate_prepared = True  # otherwise accelerator.prepare splits the data of each rank over ranks again

    def __init__(
        self,
        distributor: Distributor,
        processor: Processor | None = None,
        packer: Packer | None = None,
        collator: Collator | None = None,
        *,
        batch_size: int | None = None,
        **options: Unpack[LoaderKeywords],
    ) -> None:
        _check_contradictions(distributor, processor, packer, collator, batch_size)
        self._options = make(LoaderOptions, options, refused=_REFUSED)
        of_torch = self._options.of_torch()
        if batch_size is not None:
            packer = SimpleBatcher(batch_size)
        context = of_torch.get("multiprocessing_context")
        packer = packer or PlannedPacker()
        limits = RejectLimits(max_failures=self._options.max_failures, overlong=packer.overlong)
        self.failures = FailureLog(limits, context=context, readers=distributor.readers)
        self.roles = LoaderParts(
            distributor,
            processor or StoredTokens(),
            packer,
            collator or PaddingFreeCollator(),
            self.failures,
            self._options.epoch_end,
            self._options.check_lengths,
        )
        self._rank, self._world_size = resolve_rank(self._options.rank, self._options.world_size)
        workers = max(1, self._options.num_workers)
        layout = LoaderLayout(self._rank, self._world_size, workers, self.roles.packer.rows)
        self._plan = Steps.of(self.roles, layout, self._options.seed)
        self.order_log: OrderLog | None = None
        self._step: Step | None = None  # of the batch that is about to be yielded
        self._position = self._plan.begin(0)
        self._yielded = 0  # batches of the epoch
        self._empty_epochs = 0  # in succession
        self._restores = 0  # states that were loaded
        self._is_warned = False
        self._steps: Iterator[Any] | None = None  # of the workers, while an epoch is not finished
        self._schedule = distributor.schedule
        super().__init__(
            WorkerSteps(self._plan, in_flight=of_torch.get("prefetch_factor") or 2),
            batch_size=None,
            collate_fn=unchanged,
            **of_torch,
        )
        if self._schedule is not None:
            self._schedule.in_flight = self.num_workers * (self.prefetch_factor or 0)
        if self._options.order_log is not None:
            self.log_order(self._options.order_log)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Yield the remaining batches of the current epoch; after its last batch, the batches of the next epoch.

        Raises:
            ConfigError: two epochs in succession have no batch, the process group changed since the loader was
                created, another tool splits the batches over ranks again, or a worker of a DataLoader reads them.
        """
        return iterate_epoch(self.rest_of_epoch, empty=int(self._position.step > 0))

    def rest_of_epoch(self) -> Iterator[Any]:
        """Yield the remaining batches of the current epoch: no batch after its last batch.

        With `complete_epochs` of the distributor, the next epochs follow without end.

        Raises:
            ConfigError: as iterating.
        """
        check_rank((self._rank, self._world_size), self._options.rank, self._options.world_size)
        check_not_resharded(self._world_size)
        if torch.utils.data.get_worker_info() is not None:
            raise ConfigError(
                f"A {type(self).__name__} cannot run in a DataLoader worker: each worker would read everything. "
                "Iterate it directly, and set its own `num_workers`."
            )
        while (yield from self._rest()) and self.roles.distributor.complete_epochs:
            pass

    def _rest(self) -> Generator[Any, None, bool]:
        """Yield the remaining batches of the current epoch, and return whether the next epoch is the current epoch."""
        self._plan.check_rest(self._position, warns=not (self._rank or self._is_warned))
        self._is_warned = True
        started = (self.epoch, self._restores)
        for batch in self._plan.even(self._position, self._own_batches()):
            self._yielded += 1
            if self._step is None:  # a row without targets, which counts so that all ranks are at the same step
                self._position = replace(self._position, step=self._position.step + 1)
            self._log(batch)
            yield batch
            if is_left(started, (self.epoch, self._restores)):
                return False
        if self.order_log is not None:
            self.order_log.add(self._position, None, end=True)
        self._end_epoch()
        return True

    def _own_batches(self) -> Iterator[Any]:
        """Yield the remaining batches of the items of this rank, each after the position moved to it."""
        while (step := self._next_step()) is not None:
            if self._schedule is not None and not step.ended:
                self._schedule.count_step(step.worker)
            # Before the batch is yielded: a state saved in the loop body is the state after this batch.
            self._position = self._plan.after(self._position, step)
            self._step = step
            if step.batch is not None:
                yield step.batch
            else:
                self._log(None)
        self._steps = None

    def _log(self, batch: Any) -> None:
        """Add a line to the order log: of a batch, or of a step without a batch."""
        step, self._step = self._step, None
        if self.order_log is None:
            return
        more = {} if step is None else self._plan.log_entries(self._position, step)  # None: a row without targets
        if batch is not None or more.get("end") or more.get("dropped"):
            samples = None if batch is None else LoggedSamples.of(batch)
            self.order_log.add(self._position, samples, **more)

    def _remaining_steps(self) -> Iterator[Any]:
        """Return the steps of the workers; iterating again after a break continues with the same workers."""
        if self._steps is None:
            if self._position.step:
                self._iterator = None  # new workers, which start at the position; persistent workers know no step
            if self._schedule is not None:
                self._schedule.start_epoch()
            dataset: WorkerSteps = self.dataset  # type: ignore[assignment]
            with dataset.starting_at(self._position):
                self._steps = super().__iter__()
            if self.num_workers:
                self._steps = round_robin(self._steps, self._plan.first_worker(self._position), dataset.counts)
        return self._steps

    def _get_iterator(self) -> Any:
        return WatchedWorkers(self) if self.num_workers else super()._get_iterator()

    def _next_step(self) -> Any:
        """Return the next step, or None; after an error, iterating starts again at the position."""
        try:
            return next(self._remaining_steps(), None)
        except BaseException:
            self._iterator = self._steps = None
            raise

    def __getitem__(self, index: Any) -> NoReturn:
        """Raise ConfigError: a loader is not a map-style dataset."""
        refuse_as_dataset(type(self).__name__)

    def __bool__(self) -> bool:
        """Return True: a loader without a known length is true as well."""
        return True

    def __len__(self) -> int:
        """Return the number of batches of this rank in one epoch.

        Raises:
            TypeError: the distributor or the packer do not know it.
        """
        return self._plan.length()

    @property
    def epoch(self) -> int:
        """Index of the epoch of the next batch, from 0."""
        return self._position.epoch

    @property
    def place(self) -> tuple[int, int]:
        """Rank and world size of this process."""
        return self._rank, self._world_size

    def position(self) -> Position:
        """Return the position after the last yielded batch: a small object, for a later `state_dict`."""
        return self._position

    def state_dict(self, position: Position | None = None) -> dict[str, Any]:
        """Return the state after the last yielded batch, in plain types.

        Args:
            position: position after an earlier batch, for a trainer that reads ahead: the state is as after that
                batch, with all updates of a mixture until now.

        Raises:
            BatchError: a packer buffers samples that the distributor cannot read again.
        """
        here = position or self._position
        plain = self._plan.to_plain(here)
        if self.order_log is not None:
            plain |= self.order_log.state(here)
        return make_state(_NAME, self._identity(), plain, self._plan.place)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the batch at which `state` was saved; call it before iterating.

        Items with a global order (a MapDistributor whose items are rows) continue exactly with any number of ranks and
        workers, and with another `batch_size`. A stream is identical with the same number of ranks and workers. With
        another number, the new workers finish the shards of the current epoch, and `state` must be the result of
        `gather_state`, or the state of the only rank.

        Raises:
            BatchError: the dataset or the settings differ (the message names the difference), or a stream cannot be
                continued with this number of ranks or workers.
        """
        with damage_named():
            states = states_of(state)
            for state_of_rank in states:
                check_state(state_of_rank, _NAME)
            allow = self._options.allow_changed_weights
            self._position = self._plan.from_plain(states, self._identity(), allow_changed_weights=allow)
            if self.order_log is not None:
                self.order_log.restore(states, self._position)
        self._yielded = self._position.step
        self._restores += 1
        self._iterator = self._steps = None

    save_state_rank, restore_state_rank = state_dict, load_state_dict  # names of Energon's savable loaders

    def log_order(self, folder: str | Path) -> None:
        """Write a line for each batch into this folder; `order_log` of the constructor.

        Raises:
            ConfigError: the loader has a log already.
        """
        if self.order_log is not None:
            raise ConfigError(
                f"`order_log` must be set once, got {folder} for a loader with a log. Remove one of them."
            )
        self.order_log = OrderLog(folder, self.place, self._order_facts, workers=self._plan.log_workers)

    def hold_log(self) -> None:
        """Write the lines of the order log only when `release_log` is called, as the trainer reads ahead."""
        if self.order_log is not None:
            self.order_log.hold()

    def release_log(self, position: Position) -> None:
        """Write the lines of the batches up to a position, which are consumed."""
        if self.order_log is not None:
            self.order_log.release(position)

    def _order_facts(self) -> dict[str, Any]:
        distributor = self.roles.distributor
        return {
            "loader": _NAME,
            "identity": digest(self._identity(), self.roles.packer.rows),
            "repeats": distributor.repeats or distributor.infinite,
            "learns": self._schedule is not None,
            **self._plan.log_facts(),
        }

    @cached_property
    def _processor(self) -> str:
        """Digest of the settings that decide tokens; computed once, as it reads megabytes of tokenizer."""
        return self.roles.processor.fingerprint()

    def _identity(self) -> dict[str, Any]:
        """Return the data and settings that a loader must share with a state to continue from it."""
        return {"seed": self._options.seed, "processor": self._processor} | self._plan.identity()

    def _end_epoch(self) -> None:
        self.failures.end_epoch(self.epoch, is_alone=self._world_size == 1)
        self._empty_epochs = 0 if self._yielded else self._empty_epochs + 1
        if self._empty_epochs:
            message = (
                f"rank {self._rank} of {self._world_size} has no item in epoch {self.epoch}: there are fewer items "
                "than ranks and workers, or all were dropped. Use fewer ranks and workers, or more data."
            )
            # Once is a warning: items may be dropped by chance, and other ranks have batches in this epoch.
            if self._empty_epochs > 1:
                raise ConfigError(message)
            _log.warning("%s", message)
        if self._schedule is not None:
            self._schedule.end_epoch()
        if self._steps is not None:  # `epoch_end='drop'` leaves out batches, which persistent workers may have sent
            self._iterator = None
        self._position = self._plan.begin(self.epoch + 1)
        self._yielded, self._steps = 0, None


def unchanged(batch: Any) -> Any:
    """Return the batch: the `collate_fn` of a DataLoader whose items are batches."""
    return batch
