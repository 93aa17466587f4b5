"""Energon's datasets to batches, epoch after epoch, with a state at every step: PackedLoader."""

from collections.abc import Callable, Generator, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

import torch
from megatron.energon import get_savable_loader

from energon_packed.errors import BatchError, DataChangedError, EnergonPackedError, WorkerError
from energon_packed.libraries import ENERGON, calls, private
from energon_packed.loading.batch import PackedBatch
from energon_packed.loading.energon.faults import NAME, patch_result_queue, raise_with_file_name
from energon_packed.loading.energon.source import READING, EnergonSource
from energon_packed.loading.energon.states import dataset_fingerprint, from_plain, redistribute, to_plain
from energon_packed.loading.even_ranks import EvenRanks
from energon_packed.loading.failures import FailureLog, end_workers, in_one_line, lost_worker, watch_workers
from energon_packed.loading.monitoring.order_log import OrderLog
from energon_packed.loading.ranks import check_not_resharded, check_rank
from energon_packed.loading.state import (
    GATHERED,
    check_identity,
    check_numbers,
    check_state,
    damage_named,
    damaged,
    is_left,
    iterate_epoch,
    make_state,
    refuse_as_dataset,
    states_of,
)
from energon_packed.pipeline.run_state import digest

_TEXT_COLLECT_EVERY = 100  # batches; a garbage collection is as slow as reading and collating a row
_NAME = "PackedLoader"
"""Name in loader states, also in states of subclasses."""


class EnergonPosition:
    """A position of a PackedLoader.

    Energon's workers keep checkpoints of recent batches, so the state after an earlier batch can be requested. A
    position of an epoch that has ended keeps the loader of that epoch, with its workers.

    Args:
        epoch, step, last_restore_key: index of the epoch, its batches so far, and the key of the last batch.
        loader: Energon's loader, at this position.
    """

    def __init__(self, epoch: int, step: int, last_restore_key: Any, loader: Any) -> None:
        self.epoch, self.step, self.last_restore_key = epoch, step, last_restore_key
        self._loader = loader
        self._counters = list(private(loader, "_worker_sample_counters", ENERGON))
        self._next_worker = private(loader, "_next_worker_id", ENERGON)
        self._state: Any = None
        # Without worker processes, the dataset itself moves on, so its state is copied now.
        if not loader.num_workers or not private(loader, "_has_workers", ENERGON):
            self.complete()

    def complete(self) -> Any:
        """Return Energon's state at this position."""
        loader = self._loader
        if loader is not None:
            # Energon derives the states of workers from these counters, which are set back for the request.
            current = loader._worker_sample_counters, loader._next_worker_id
            try:
                loader._worker_sample_counters, loader._next_worker_id = list(self._counters), self._next_worker
                self._state = loader.save_state_rank()
            finally:
                loader._worker_sample_counters, loader._next_worker_id = current
            self._loader = None
        return self._state


class PackedLoader:
    """Loader of PackedBatch whose state can be saved and restored at every step; made by `get_packed_loader`.

    Each iterator continues after the last batch that any iterator returned: `next(iter(loader))` uses a batch. After
    the last batch of an epoch, iterating again starts the next epoch in another order, whether the loop met the end or
    counted steps. Each thread needs a separate loader. The iterator also has `state_dict` and `save_state_rank`.

    Attributes:
        failures: samples that failed to load, by reason.
        epoch_steps: batches in one epoch, the same on all ranks; None if it is not known.
        ranks: makes the ranks end an epoch together if it is not known.
        repeats: an epoch may have a pack several times.
        order_log: log of the consumed batches, or None.

    Examples:
        >>> loader = get_packed_loader("demo-out", encoder, num_workers=0, epochs=1)
        >>> len(list(loader))
        12
    """

    def __init__(self, source: EnergonSource, failures: FailureLog) -> None:
        """Create a loader; use `get_packed_loader`.

        Args:
            source: creates Energon's dataset of an epoch.
            failures: handles the errors of that dataset.
        """
        self.failures = failures
        self.epoch_steps: int | None = None
        self.ranks: EvenRanks | None = None
        self.repeats = False
        self.order_log: OrderLog | None = None
        self._source = source
        self._epoch = self._steps = 0
        self._restores = 0  # states that were loaded
        self._last_restore_key: tuple[Any, ...] | None = None
        self._loader: Any = None
        self._stream: Iterator[Any] | None = None
        self._fingerprint: str | None = None
        self._failed: BaseException | None = None

    @property
    def energon_loader(self) -> Any:
        """The Energon loader of the current epoch, created on first use."""
        if self._loader is None:
            dataset = self._source.dataset(self._epoch)
            fingerprint = dataset_fingerprint(dataset.config())
            if self._fingerprint not in (None, fingerprint):
                raise DataChangedError(
                    f"{self._source.path} has other packs than when the loader was created: it was packed or indexed "
                    "again. Create a new loader; states that were saved before belong to the earlier packs."
                )
            self._fingerprint = fingerprint
            options: dict[str, Any] = {}
            if not self._source.worker_config.num_workers:
                # The thread of Energon's watchdog never ends and keeps its dataset: memory would grow in each epoch.
                options["watchdog_timeout_seconds"] = None
            if self._source.task_encoder.encoder.image_token_id is None:
                # Energon collects garbage every 10 batches, to free pixels early. Rows of text do not need that.
                options["gc_collect_every_n_steps"] = _TEXT_COLLECT_EVERY
            self._loader = get_savable_loader(dataset, **options)
            # Energon always requests pinned memory; without a GPU, torch only warns.
            self._loader.pin_memory = torch.cuda.is_available()
            self._loader.timeout = self._source.config.timeout
            patch_result_queue(self._loader, self._source.config.timeout)
        return self._loader

    def __iter__(self) -> "PackedIterator":
        """Iterate the rest of this epoch, or the next one.

        Raises:
            ConfigError: the process group changed since the loader was created, or another tool splits the batches
                over ranks again.
        """
        config, worker_config = self._source.config, self._source.worker_config
        check_rank((worker_config.rank, worker_config.world_size), config.rank, config.world_size)
        check_not_resharded(worker_config.world_size)
        return PackedIterator(self, iterate_epoch(self.rest_of_epoch, empty=int(self._steps > 0)))

    def __getitem__(self, index: Any) -> NoReturn:
        """Raise ConfigError: a loader is not a map-style dataset."""
        refuse_as_dataset(type(self).__name__)

    def __len__(self) -> int:
        """Return the batches of this rank in one epoch of `epochs=1`, if no pack fails to load.

        Raises:
            TypeError: the loader repeats, or packs on the fly.
        """
        config = self._source.config
        if config.epochs is None or config.on_the_fly:
            raise TypeError(
                "len() is undefined for `epochs=None` or on-the-fly packing. Count steps, or set `epochs=1`. "
                "A Trainer needs TrainerStream(loader) as `train_dataset`."
            )
        return self.epoch_steps or len(self.energon_loader)

    def rest_of_epoch(self) -> Iterator[PackedBatch]:
        """Yield the remaining batches of the current epoch: no batch after its last batch.

        A loader that repeats continues indefinitely.

        Raises:
            ConfigError: another tool splits the batches over ranks again.
        """
        check_not_resharded(self._source.worker_config.world_size)
        more = self._steps > 0  # a started epoch may have no batch left
        returned = yield from self._rest()
        while self._source.config.complete_epochs and (returned > 0 or (returned == 0 and more)):
            more = False
            returned = yield from self._rest()

    @property
    def place(self) -> tuple[int, int]:
        """Rank and world size of this process."""
        return self._source.worker_config.rank, self._source.worker_config.world_size

    def position(self) -> EnergonPosition:
        """Return the position after the last yielded batch, for a later `state_dict`.

        Raises:
            WorkerError: as `state_dict`.
        """
        self._refuse_failed()
        here = self._epoch, self._steps, self._last_restore_key
        position: EnergonPosition = self._request(lambda: EnergonPosition(*here, self.energon_loader))
        return position

    def state_dict(self, position: EnergonPosition | None = None) -> dict[str, Any]:
        """Return the state of this rank after the last batch: nested dicts and lists of numbers and strings.

        Args:
            position: position after an earlier batch, for a trainer that reads ahead.

        Raises:
            WorkerError: the loader failed, a worker process died, or does not answer within `timeout`.
        """
        self._refuse_failed()
        here = position or self.position()
        plain = {
            "epoch": here.epoch,
            "step": here.step,
            "last_restore_key": to_plain(here.last_restore_key),
            "energon": to_plain(self._request(here.complete)),
        }
        if self.order_log is not None:
            plain |= self.order_log.state((here.epoch, here.step))
        return make_state(_NAME, self._identity(), plain, self.place)

    def _request(self, state: Callable[[], Any]) -> Any:
        """Return a state of Energon's loader, whose workers may die in the meantime."""
        loader = self.energon_loader
        try:
            return state()
        except (RuntimeError, OSError, EOFError) as error:  # torch raises at any place of the process if a worker dies
            failure = error if isinstance(error, WorkerError) else self._worker_failure(error)
            if failure is None:
                raise
            self._failed = failure
            end_workers(_iterator_of(loader))
            raise failure from error

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the batch at which `state` was saved; call it before iterating.

        Args:
            state: of this rank, or of all ranks as `gather_state` returned it. With the latter, a loader of
                `epochs=None` continues with another number of ranks, if `world_size * num_workers` is the same.

        Raises:
            BatchError: the world size, rank, number of workers, batch size, seed, dataset or version of the state
                differ; the message names the difference.
        """
        with damage_named():
            self._restore(states_of(state), is_gathered=isinstance(state, dict) and GATHERED in state)

    def _restore(self, states: list[dict[str, Any]], *, is_gathered: bool) -> None:
        saved_states = states  # before they are redistributed
        if is_gathered and len(states) != self._source.worker_config.world_size:
            states = redistribute(states, self._source.worker_config.world_size)
        worker_config = self._source.worker_config
        rank = worker_config.rank
        own = (saved for saved in states if isinstance(saved, dict) and saved.get("rank") == rank)
        state = next(own, states[0])
        check_state(state, _NAME)
        check_numbers(state, "epoch", "step", "rank", "world_size")
        step, key, inner = state["step"], from_plain(state["last_restore_key"]), from_plain(state["energon"])
        if step and inner is None:
            raise damaged(f"step {step}, and no state of Energon's loader")
        here = (self._epoch, self._steps, self._last_restore_key, self._loader, self._stream)
        try:
            if self._epoch != state["epoch"] or self._steps:
                self._begin(state["epoch"])
            own_rank = {"world_size": worker_config.world_size, "rank": rank}
            saved_rank = {"world_size": state["world_size"], "rank": state["rank"]}
            check_identity(saved_rank | state["identity"], own_rank | self._identity())
        except BatchError:  # a refused state leaves the loader as it was
            self._epoch, self._steps, self._last_restore_key, self._loader, self._stream = here
            raise
        self._stream = None
        self._restores += 1
        with calls(ENERGON, is_parser=True):
            self.energon_loader.restore_state_rank(inner)
        self._steps, self._last_restore_key = step, key
        if self.order_log is not None:
            self.order_log.restore(saved_states, (self._epoch, self._steps))

    def log_order(self, folder: str | Path) -> None:
        """Write a line for each batch into this folder; `order_log` of `get_packed_loader`."""
        self.order_log = OrderLog(folder, self.place, self._order_facts)

    def _order_facts(self) -> dict[str, Any]:
        identity = digest(self._identity())
        drops = self._source.config.epoch_end == "drop" and self.epoch_steps is not None
        facts = {"loader": _NAME, "identity": identity, "repeats": self.repeats, "steps": self.epoch_steps}
        return facts | ({"drops": True} if drops else {})

    save_state_rank = state_dict
    restore_state_rank = load_state_dict

    def _begin(self, epoch: int) -> None:
        """Start an epoch with a new Energon loader, so that each epoch is shuffled differently and ends once."""
        self._epoch = epoch
        self._steps = 0
        self._last_restore_key = None
        self._loader = self._stream = None

    def _identity(self) -> dict[str, Any]:
        """Return the settings that a state and the loader that continues from it must share."""
        config, worker_config = self._source.config, self._source.worker_config
        assert self.energon_loader is not None  # computes the fingerprint
        return {
            "num_workers": worker_config.num_workers,
            "micro_batch_size": config.micro_batch_size,
            "seed": config.seed,
            **config.order_fingerprint(),
            "dataset": self._fingerprint,
        }

    def _rest(self) -> Generator[PackedBatch, None, int]:
        """Yield the remaining batches of one epoch, up to `epoch_steps` batches in the epoch.

        Returns:
            their number; -1 if another iterator has ended the epoch in the meantime.
        """
        self._refuse_failed()
        before, here = self._steps, (self._epoch, self._restores)
        for batch in self._own_batches() if self.ranks is None else self.ranks.even(self._own_batches()):
            self._steps += 1
            self._log(batch)
            yield batch
            self._refuse_failed()  # saving a state may have failed and ended the workers
            if is_left(here, (self._epoch, self._restores)):
                return -1
        self._log(None)
        returned = self._steps - before
        self._begin(self._epoch + 1)
        return returned

    def _log(self, batch: PackedBatch | None) -> None:
        """Add a line to the order log: of a batch, or of the end of the epoch."""
        if self.order_log is not None:
            packs = [] if batch is None else batch.__key__
            self.order_log.add((self._epoch, self._steps), batch, packs=packs, end=batch is None)

    def _own_batches(self) -> Iterator[PackedBatch]:
        """Yield the remaining batches of this rank, and up to `epoch_steps` its last batch without targets."""
        limit, drops = self.epoch_steps, self._source.config.epoch_end == "drop"
        if self._stream is None:
            self._stream = self._read()
        for batch in self._stream:  # worker processes continue after the batches of an earlier iteration
            if drops and limit is not None and self._steps >= limit:
                return
            self._last_restore_key = batch.__restore_key__
            yield batch
        while limit is not None and self._steps < limit and self._last_restore_key is not None:
            with READING, raise_with_file_name(self._source.path, self._source.config.split, self._source.opened):
                batch = self.energon_loader.restore_sample(self._last_restore_key)
            yield batch.without_targets()

    def _read(self) -> Iterator[PackedBatch]:
        try:
            with raise_with_file_name(self._source.path, self._source.config.split, self._source.opened):
                try:
                    batches = iter(self.energon_loader)
                    # Loaders of other threads wait for a batch of this process, but not for a batch of its workers.
                    turn = nullcontext() if self._source.worker_config.num_workers else READING
                    while True:
                        with turn:
                            batch = next(batches, None)
                        if batch is None:
                            return
                        watch_workers(_iterator_of(self._loader), NAME)  # torch's iterator starts with the first batch
                        yield batch
                except (OSError, EOFError) as error:
                    if (failure := self._worker_failure(error)) is not None:
                        raise failure from error
                    raise
        except GeneratorExit:
            raise
        except BaseException as error:  # also Ctrl-C: the next batch of a failed loader would be out of order
            self._failed = error
            if isinstance(error, WorkerError):
                end_workers(_iterator_of(self._loader))
            raise

    def _worker_failure(self, error: Exception) -> EnergonPackedError | None:
        return in_one_line(error, NAME) or lost_worker(error, NAME, _iterator_of(self._loader))

    def _refuse_failed(self) -> None:
        if self._failed is not None:
            raise WorkerError(
                f"the loader failed before ({str(self._failed) or type(self._failed).__name__}). Create a new loader, "
                "and load the last saved state."
            ) from self._failed


def _iterator_of(loader: Any) -> Any:
    """Iterator of torch's DataLoader, whose worker processes are watched."""
    return private(loader, "_iterator", "torch")


class PackedIterator(Iterator[PackedBatch]):
    """Iterator of a PackedLoader, which also saves its state."""

    def __init__(self, loader: PackedLoader, batches: Iterator[PackedBatch]) -> None:
        self._loader = loader
        self._batches = batches

    def __next__(self) -> PackedBatch:
        return next(self._batches)

    def state_dict(self) -> dict[str, Any]:
        """Return `PackedLoader.state_dict()`."""
        return self._loader.state_dict()

    save_state_rank = state_dict
