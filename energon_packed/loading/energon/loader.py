"""PackedLoader: Energon's savable loader of PackedBatch objects, epoch after epoch."""

from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch
from megatron.energon import get_savable_loader

from energon_packed.errors import BatchError, DataChangedError, EnergonPackedError, WorkerError
from energon_packed.loading.batch import PackedBatch
from energon_packed.loading.energon.faults import NAME, patch_result_queue, raise_with_file_name
from energon_packed.loading.energon.source import EnergonSource
from energon_packed.loading.energon.states import dataset_fingerprint, from_plain, redistribute, to_plain
from energon_packed.loading.failures import FailureLog, end_workers, in_one_line, lost_worker
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
    states_of,
)

_TEXT_COLLECT_EVERY = 100  # batches; a collection takes as long as to read and collate a row
_NAME = "PackedLoader"
"""In states, of subclasses too."""


class EnergonPosition:
    """A position of a PackedLoader.

    Energon's workers keep checkpoints of the recent past, so the state behind an earlier batch can be asked for. A
    position of an epoch that has ended keeps the loader of that epoch, with its workers.

    Args:
        place: epoch, steps, and key of the last batch.
        loader: Energon's loader, at this position.
    """

    def __init__(self, place: tuple[int, int, Any], loader: Any) -> None:
        self.epoch, self.step, self.last_restore_key = place
        self._loader = loader
        self._counters, self._next_worker = list(loader._worker_sample_counters), loader._next_worker_id
        self._state: Any = None
        if not loader.num_workers or not loader._has_workers:
            self.complete()

    def complete(self) -> Any:
        """Energon's state at this position."""
        loader = self._loader
        if loader is not None:
            present = loader._worker_sample_counters, loader._next_worker_id
            try:
                loader._worker_sample_counters, loader._next_worker_id = list(self._counters), self._next_worker
                self._state = loader.save_state_rank()
            finally:
                loader._worker_sample_counters, loader._next_worker_id = present
            self._loader = None
        return self._state


class PackedLoader:
    """A loader whose state can be saved and restored at every step.

    Iterating again resumes where the last iteration stopped; after the last batch of an epoch the next one begins, in
    another order, whether the last iteration met its end or counted steps. The iterator has `state_dict` and
    `save_state_rank` too.

    Attributes:
        failures: samples that failed to load, by reason.
        epoch_steps: batches in one epoch, None for as many as there are.
    """

    def __init__(self, source: EnergonSource, failures: FailureLog) -> None:
        """Use `get_packed_loader`.

        Args:
            source: makes Energon's dataset for an epoch.
            failures: handles the errors of that dataset.
        """
        self.failures = failures
        self.epoch_steps: int | None = None
        self._source = source
        self._epoch = self._steps = 0
        self._moves = 0  # states that were loaded
        self._last_restore_key: tuple[Any, ...] | None = None
        self._loader: Any = None
        self._stream: Iterator[Any] | None = None
        self._fingerprint: str | None = None
        self._failed: BaseException | None = None

    @property
    def energon_loader(self) -> Any:
        """The Energon loader of the current epoch, made when it is first needed."""
        if self._loader is None:
            dataset = self._source.dataset(self._epoch)
            found = dataset_fingerprint(dataset.config())
            if self._fingerprint not in (None, found):
                raise DataChangedError(
                    f"{self._source.path} holds other packs than when the loader was made: it was packed or indexed "
                    "again; make a new loader, as states that were saved before belong to what it held then"
                )
            self._fingerprint = found
            options: dict[str, Any] = {}
            if not self._source.worker_config.num_workers:
                # The thread of Energon's watchdog never ends, and keeps its dataset: one an epoch, without workers.
                options["watchdog_timeout_seconds"] = None
            if self._source.task_encoder.encoder.image_token_id is None:
                # Energon collects garbage every 10 batches, to free pixels early. Rows of text are small.
                options["gc_collect_every_n_steps"] = _TEXT_COLLECT_EVERY
            self._loader = get_savable_loader(dataset, **options)
            # Energon always asks for pinned memory; without a GPU torch only warns.
            self._loader.pin_memory = torch.cuda.is_available()
            self._loader.timeout = self._source.config.timeout
            patch_result_queue(self._loader, self._source.config.timeout)
        return self._loader

    def __iter__(self) -> "PackedIterator":
        """Iterate the rest of this epoch, or the next one.

        Raises:
            ConfigError: the process group is another one than when the loader was made, or another tool splits the
                batches over ranks again.
        """
        config, worker_config = self._source.config, self._source.worker_config
        check_rank((worker_config.rank, worker_config.world_size), config.rank, config.world_size)
        check_not_resharded(worker_config.world_size)
        return PackedIterator(self, iterate_epoch(self.rest_of_epoch, empty=int(self._steps > 0)))

    def __len__(self) -> int:
        """Batches of this rank in one epoch of `epochs=1`, as long as no pack fails to load.

        Raises:
            TypeError: the loader repeats, or packs on the fly, so that nobody knows before.
        """
        config = self._source.config
        if config.epochs is None or config.on_the_fly:
            raise TypeError("the number of batches is not known in advance: count steps, or set `epochs=1`")
        return self.epoch_steps or len(self.energon_loader)

    def rest_of_epoch(self) -> Iterator[PackedBatch]:
        """The batches of the current epoch that were not returned yet: none after its last one.

        A loader that repeats goes on indefinitely.

        Raises:
            ConfigError: another tool splits the batches over ranks again.
        """
        check_not_resharded(self._source.worker_config.world_size)
        more = self._steps > 0  # a begun epoch may have nothing left
        returned = yield from self._rest()
        while self._source.config.complete_epochs and (returned > 0 or (returned == 0 and more)):
            more = False
            returned = yield from self._rest()

    @property
    def place(self) -> tuple[int, int]:
        """(rank, world size) of this process."""
        return self._source.worker_config.rank, self._source.worker_config.world_size

    def position(self) -> EnergonPosition:
        """The position after the last batch returned, for `state_dict` of later.

        Raises:
            WorkerError: as `state_dict`.
        """
        self._refuse_failed()
        place = self._epoch, self._steps, self._last_restore_key
        found: EnergonPosition = self._asking(lambda: EnergonPosition(place, self.energon_loader))
        return found

    def state_dict(self, position: EnergonPosition | None = None) -> dict[str, Any]:
        """State of this rank after the last batch returned: nested dicts and lists of numbers and strings.

        Args:
            position: after an earlier batch, for a trainer that reads ahead.

        Raises:
            WorkerError: the loader failed, a worker process died, or does not answer within `timeout`.
        """
        self._refuse_failed()
        here = position or self.position()
        plain = {
            "epoch": here.epoch,
            "step": here.step,
            "last_restore_key": to_plain(here.last_restore_key),
            "energon": to_plain(self._asking(here.complete)),
        }
        return make_state(_NAME, self._identity(), plain, self.place)

    def _asking(self, question: Callable[[], Any]) -> Any:
        """The answer of Energon's loader, whose workers may die meanwhile."""
        loader = self.energon_loader
        try:
            return question()
        except (RuntimeError, OSError, EOFError) as error:  # torch raises wherever the process is when a worker dies
            found = error if isinstance(error, WorkerError) else self._of_worker(error)
            if found is None:
                raise
            self._failed = found
            end_workers(loader._iterator)
            raise found from error

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the batch at which `state` was saved; call it before iterating.

        Args:
            state: of this rank, or of all ranks as `gather_state` returned it. With the latter, a loader of
                `epochs=None` goes on with another number of ranks, where `world_size * num_workers` is the same.

        Raises:
            BatchError: the state is of another world size, rank, number of workers, batch size, seed, dataset or
                version; the message names what differs.
        """
        with damage_named():
            self._restore(states_of(state), is_gathered=isinstance(state, dict) and GATHERED in state)

    def _restore(self, states: list[dict[str, Any]], *, is_gathered: bool) -> None:
        if is_gathered and len(states) != self._source.worker_config.world_size:
            states = redistribute(states, self._source.worker_config.world_size)
        worker_config = self._source.worker_config
        rank = worker_config.rank
        state = next((one for one in states if isinstance(one, dict) and one.get("rank") == rank), states[0])
        check_state(state, _NAME)
        check_numbers(state, "epoch", "step", "rank", "world_size")
        step, key, inner = state["step"], from_plain(state["last_restore_key"]), from_plain(state["energon"])
        if step and inner is None:
            raise damaged(f"step {step}, and no place in the data")
        here = (self._epoch, self._steps, self._last_restore_key, self._loader, self._stream)
        try:
            if self._epoch != state["epoch"] or self._steps:
                self._begin(state["epoch"])
            place = {"world_size": worker_config.world_size, "rank": rank}
            saved = {"world_size": state["world_size"], "rank": state["rank"]}
            check_identity(saved | state["identity"], place | self._identity())
        except BatchError:  # a state that is refused changes nothing
            self._epoch, self._steps, self._last_restore_key, self._loader, self._stream = here
            raise
        self._stream = None
        self._moves += 1
        self.energon_loader.restore_state_rank(inner)
        self._steps, self._last_restore_key = step, key

    save_state_rank = state_dict
    restore_state_rank = load_state_dict

    def _begin(self, epoch: int) -> None:
        """A new epoch has an Energon loader of its own, so that each is shuffled differently and ends for good."""
        self._epoch = epoch
        self._steps = 0
        self._last_restore_key = None
        self._loader = self._stream = None

    def _identity(self) -> dict[str, Any]:
        """What a state must have in common with the loader that continues from it."""
        config, worker_config = self._source.config, self._source.worker_config
        assert self.energon_loader is not None  # makes the fingerprint
        return {
            "num_workers": worker_config.num_workers,
            "micro_batch_size": config.micro_batch_size,
            "seed": config.seed,
            **config.order_fingerprint(),
            "epoch_steps": self.epoch_steps,
            "dataset": self._fingerprint,
        }

    def _rest(self) -> Generator[PackedBatch, None, int]:
        """Batches of one epoch that were not returned yet, as many as `epoch_steps` says in all.

        Returns:
            their number; -1 where another iterator has ended the epoch meanwhile.
        """
        self._refuse_failed()
        limit, before, here = self.epoch_steps, self._steps, (self._epoch, self._moves)
        if self._stream is None:
            self._stream = self._read()
        for batch in self._stream:  # worker processes go on where an iteration that counted steps left them
            if limit is not None and self._steps >= limit:
                break
            self._count(batch)
            yield batch
            self._refuse_failed()  # a state that could not be saved ended the workers
            if is_left(here, (self._epoch, self._moves)):
                return -1
        while limit is not None and self._steps < limit and self._last_restore_key is not None:
            batch = self.energon_loader.restore_sample(self._last_restore_key)
            self._count(batch)
            yield batch
            if is_left(here, (self._epoch, self._moves)):
                return -1
        returned = self._steps - before
        self._begin(self._epoch + 1)
        return returned

    def _read(self) -> Iterator[PackedBatch]:
        try:
            with raise_with_file_name(self._source.path, self._source.config.split, self._source.opened):
                yield from self._connected()
        except GeneratorExit:
            raise
        except BaseException as error:  # what comes next of a failed loader would be another place; also after Ctrl-C
            self._failed = error
            if isinstance(error, WorkerError):
                end_workers(self._loader._iterator)
            raise

    def _connected(self) -> Iterator[PackedBatch]:
        try:
            yield from self.energon_loader
        except (OSError, EOFError) as error:
            if (found := self._of_worker(error)) is not None:
                raise found from error
            raise

    def _of_worker(self, error: Exception) -> EnergonPackedError | None:
        return in_one_line(error, NAME) or lost_worker(error, NAME, self._loader._iterator)

    def _refuse_failed(self) -> None:
        if self._failed is not None:
            raise WorkerError(
                f"the loader failed before ({str(self._failed) or type(self._failed).__name__}); make a new one, and "
                "load the state that was saved last"
            ) from self._failed

    def _count(self, batch: PackedBatch) -> None:
        self._steps += 1
        self._last_restore_key = batch.__restore_key__


class PackedIterator(Iterator[PackedBatch]):
    """Iterates a PackedLoader; its state can be saved from here as well."""

    def __init__(self, loader: PackedLoader, batches: Iterator[PackedBatch]) -> None:
        self._loader = loader
        self._batches = batches

    def __next__(self) -> PackedBatch:
        return next(self._batches)

    def state_dict(self) -> dict[str, Any]:
        """As `PackedLoader.state_dict`."""
        return self._loader.state_dict()

    save_state_rank = state_dict
