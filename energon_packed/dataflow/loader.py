"""PackedLoader and `get_packed_loader`: padding-free batches from a packed data set, in one call."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.energon import WorkerConfig, get_savable_loader

from energon_packed.dataflow.batch import PackedBatch
from energon_packed.dataflow.collator import Collator, PaddingFreeCollator
from energon_packed.dataflow.distributor import EnergonDistributor
from energon_packed.dataflow.failures import FailureLog
from energon_packed.dataflow.manifests import LoadedSplit, common_seq_len, loaded_splits
from energon_packed.dataflow.packer import Packer, PoolPacker
from energon_packed.dataflow.ranks import EvenRanks, check_every_worker_has_packs, epoch_steps
from energon_packed.dataflow.state import STATE_VERSION, LoaderState, dataset_fingerprint
from energon_packed.dataflow.task_encoder import PackedTaskEncoder
from energon_packed.encoding import Processor
from energon_packed.errors import ConfigError

_log = logging.getLogger(__name__)
_SEEDS_PER_EPOCH = 1_000_003  # far apart, so that neighbouring seeds do not share epochs


class PackedLoader:
    """An Energon savable loader of PackedBatch objects.

    Iterating again goes on where the last iteration stopped; after a full epoch the next one begins, in another order.
    The iterator has `save_state_rank` too.

    Attributes:
        failures: samples that failed to load, by reason.
        energon_loader: the Energon loader inside.
    """

    def __init__(
        self,
        build: Callable[[int], Any],
        failures: FailureLog,
        *,
        micro_batch_size: int,
        seed: int = 0,
        settings: dict[str, Any] | None = None,
        epoch_steps: int | None = None,
    ) -> None:
        """Use `get_packed_loader`.

        Args:
            build: makes Energon's dataset for an epoch.
            failures: handles the errors of that dataset.
            micro_batch_size: packs in one batch.
            seed: offset of the shuffle seed.
            settings: other arguments that decide the order; a state of others is refused.
            epoch_steps: batches in one epoch, None for as many as there are.
        """
        self.failures = failures
        self._build = build
        self._micro_batch_size = micro_batch_size
        self._seed = seed
        self._settings = settings or {}
        self._epoch_steps = epoch_steps
        self._start(0)
        dataset = build(0)
        self._worker_config = dataset.worker_config
        self._fingerprint = dataset_fingerprint(dataset.config())

    def _start(self, epoch: int) -> None:
        """Begin an epoch with a loader of its own, so that each is shuffled differently and ends for good."""
        self._epoch = epoch
        self._steps = 0
        self._last_restore_key: tuple[Any, ...] | None = None
        self.energon_loader = get_savable_loader(self._build(epoch))
        # Energon always asks for pinned memory; without a GPU torch only warns.
        self.energon_loader.pin_memory = torch.cuda.is_available()

    def __iter__(self) -> "PackedIterator":
        return PackedIterator(self, self._batches())

    def save_state_rank(self) -> LoaderState:
        """State of this rank after the last batch given out, to be saved with a checkpoint."""
        return self._state(self.energon_loader.save_state_rank())

    def restore_state_rank(self, state: LoaderState) -> None:
        """Go on after the batch at which `state` was saved; call it before iterating.

        Raises:
            BatchError: the state is of another world size, rank, number of workers, batch size, seed, data set or
                version.
        """
        state.check_against(self._state(None))
        self._start(state.epoch)
        self.energon_loader.restore_state_rank(state.energon)
        self._steps = state.steps
        self._last_restore_key = state.last_restore_key

    def _state(self, energon: Any) -> LoaderState:
        return LoaderState(
            format_version=STATE_VERSION,
            world_size=self._worker_config.world_size,
            rank=self._worker_config.rank,
            num_workers=self._worker_config.num_workers,
            micro_batch_size=self._micro_batch_size,
            seed=self._seed,
            settings=self._settings,
            dataset=self._fingerprint,
            epoch=self._epoch,
            steps=self._steps,
            last_restore_key=self._last_restore_key,
            energon=energon,
        )

    def _batches(self) -> Iterator[PackedBatch]:
        """Batches of one epoch, as many as `epoch_steps` says."""
        limit = self._epoch_steps
        for batch in self.energon_loader:
            if limit is not None and self._steps >= limit:
                break
            self._count(batch)
            yield batch
        while limit is not None and self._steps < limit and self._last_restore_key is not None:
            batch = self.energon_loader.restore_sample(self._last_restore_key)
            self._count(batch)
            yield batch
        self._start(self._epoch + 1)

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

    def save_state_rank(self) -> LoaderState:
        """As `PackedLoader.save_state_rank`."""
        return self._loader.save_state_rank()


def get_packed_loader(
    path: str | Path,
    encoder: Processor | None = None,
    *,
    seq_len: int | None = None,
    micro_batch_size: int = 1,
    num_workers: int = 2,
    split: str = "train",
    epochs: int | None = None,
    shuffle: bool = True,
    shuffle_buffer_size: int = 64,
    packing_buffer_size: int | None = None,
    packer: Packer | None = None,
    collator: Collator | None = None,
    drop_last: bool = False,
    even_ranks: EvenRanks = "auto",
    check_encoder: bool = True,
    check_lengths: bool = True,
    max_failures: int = 0,
    rank: int | None = None,
    world_size: int | None = None,
    seed: int = 0,
) -> PackedLoader:
    """A loader of padding-free batches.

        loader = get_packed_loader("out", encoder, micro_batch_size=2, epochs=1)
        for batch in loader:
            loss = model(**batch.transformers_inputs()).loss

    Args:
        path: folder that `energon-packed pack` wrote (`out` or `out/webdataset`), or an Energon Metadataset YAML.
        encoder: the Processor that the data was packed with; None for PackedTokensSample data without images, which
            holds all that is needed.
        seq_len: tokens in one row; by default what packing.json says.
        micro_batch_size: packs in one batch; they are joined into one row.
        num_workers: worker processes; 0 loads in this one.
        split: `train`, `val` or `test`.
        epochs: None repeats for ever, 1 ends after one exact pass.
        shuffle: mix shards and packs; False reads in order and needs epochs=1.
        shuffle_buffer_size: packs in the shuffle buffer.
        packing_buffer_size: pack on the fly with a buffer of this many samples, for MultiMixQASample data.
        packer: how samples are grouped on the fly; by default best fit decreasing.
        collator: how samples are laid in a row; by default without padding.
        drop_last: leave out the short batch at the end of each worker's data.
        even_ranks: with epochs=1, what ranks do whose data ends before that of others: `repeat` their last batch,
            `drop` what others have more, `off` end anyway; `auto` is `repeat` in a torch.distributed process group
            and `off` outside of one.
        check_encoder: refuse an encoder whose tokenizer, template, image settings or `loss_on` are not those that the
            data was packed with.
        check_lengths: raise where a sample's length differs from the recorded one.
        max_failures: samples of this rank that may fail to load and are skipped; 0 raises the first failure.
        rank, world_size: data-parallel place of this process; by default from torch.distributed, else 0 and 1.
        seed: offset of the shuffle seed.

    Raises:
        ConfigError: arguments that contradict each other or the data.
        FormatError: `path` is no packed data set.
    """
    splits = loaded_splits(Path(path), split)
    seq_len = common_seq_len(splits, seq_len)
    processor = splits[0].stored_tokens() if encoder is None else encoder
    for one in splits:
        if encoder is None:
            one.stored_tokens()
        elif check_encoder:
            one.check_encoder(encoder)
    if max_failures < 0:
        raise ConfigError(f"max_failures is {max_failures}; it must be at least 0")
    collator = collator or PaddingFreeCollator()
    if isinstance(collator, PaddingFreeCollator):
        _warn_of_padding(collator, splits)
    if packing_buffer_size is not None:
        packer = packer or _default_packer(packing_buffer_size, seq_len)
    failures = FailureLog(max_failures)
    worker_config = _worker_config(rank, world_size, num_workers, seed, failures)
    if epochs is None:
        check_every_worker_has_packs(splits, world_size=worker_config.world_size, num_workers=num_workers)
    distributor = EnergonDistributor(
        path if Path(path).is_file() else splits[0].path,
        split=split,
        micro_batch_size=micro_batch_size,
        shuffle=shuffle,
        shuffle_buffer_size=shuffle_buffer_size,
        packing_buffer_size=packing_buffer_size,
        epochs=epochs,
        drop_last=drop_last,
    )
    task_encoder = PackedTaskEncoder(
        processor,
        collator=collator,
        packer=packer,
        one_pass=epochs is not None,
        on_failure=failures.handle,
        shuffle_buffer_size=shuffle_buffer_size if shuffle else 1,
        check_lengths=check_lengths,
    )

    def build(epoch: int) -> Any:
        config = replace(worker_config, seed_offset=seed + _SEEDS_PER_EPOCH * epoch)
        return distributor.dataset(task_encoder, config)

    steps = None
    if epochs is not None:
        steps = epoch_steps(
            even_ranks,
            splits=splits,
            on_the_fly=packing_buffer_size is not None,
            dataset=build,
            world_size=worker_config.world_size,
            rank=worker_config.rank,
            micro_batch_size=micro_batch_size,
            num_workers=num_workers,
            drop_last=drop_last,
        )
    settings = {
        "split": split,
        "epochs": epochs,
        "shuffle": shuffle,
        "shuffle_buffer_size": shuffle_buffer_size,
        "packing_buffer_size": packing_buffer_size,
        "drop_last": drop_last,
        "epoch_steps": steps,
    }
    return PackedLoader(
        build, failures, micro_batch_size=micro_batch_size, seed=seed, settings=settings, epoch_steps=steps
    )


def _warn_of_padding(collator: PaddingFreeCollator, splits: list[LoadedSplit]) -> None:
    for one in splits:
        if one.manifest is not None and one.manifest.pad_multiple % collator.pad_multiple:
            _log.warning(
                "%s was packed with --pad-multiple %d and is padded to multiples of %d, so rows can be longer than "
                "seq_len %d; pack with that --pad-multiple",
                one.path,
                one.manifest.pad_multiple,
                collator.pad_multiple,
                one.manifest.seq_len,
            )
            return


def _default_packer(packing_buffer_size: int, seq_len: int | None) -> Packer:
    if packing_buffer_size < 1:
        raise ConfigError(f"packing_buffer_size is {packing_buffer_size}; it must be at least 1, or None")
    if seq_len is None:
        raise ConfigError("packing on the fly needs seq_len: no data set has a packing.json")
    return PoolPacker(seq_len)


def _worker_config(
    rank: int | None, world_size: int | None, num_workers: int, seed: int, failures: FailureLog
) -> WorkerConfig:
    """Place of this process among the data-parallel ranks."""
    if num_workers < 0:
        raise ConfigError(f"num_workers is {num_workers}; it must be at least 0")
    if (rank is None) != (world_size is None):
        raise ConfigError("give both rank and world_size, or neither")
    if rank is None or world_size is None:
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        rank = torch.distributed.get_rank() if distributed else 0
        world_size = torch.distributed.get_world_size() if distributed else 1
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank {rank} is not below world_size {world_size}")
    return WorkerConfig(
        rank=rank,
        world_size=world_size,
        num_workers=num_workers,
        seed_offset=seed,
        global_error_handler=failures.handle,
    )
