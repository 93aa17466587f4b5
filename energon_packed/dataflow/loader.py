"""`get_packed_loader`: padding-free batches from a packed data set, in one call."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.energon import WorkerConfig, get_savable_loader
from megatron.energon.errors import reraise_exception

from energon_packed.dataflow.batch import PackedBatch
from energon_packed.dataflow.collator import Collator, PaddingFreeCollator
from energon_packed.dataflow.distributor import EnergonDistributor
from energon_packed.dataflow.packer import Packer, PoolPacker
from energon_packed.dataflow.task_encoder import PackedTaskEncoder
from energon_packed.encoding import Processor
from energon_packed.errors import ConfigError, FormatError
from energon_packed.shards import PackingManifest


class PackedLoader:
    """An Energon savable loader of PackedBatch objects.

    Iterating twice goes on where the first iteration stopped, as Energon does; after a full epoch it starts anew.
    """

    def __init__(self, loader: Any) -> None:
        self.energon_loader = loader

    def __iter__(self) -> Iterator[PackedBatch]:
        yield from self.energon_loader

    def save_state_rank(self) -> Any:
        """State of this rank, to be saved with a checkpoint."""
        return self.energon_loader.save_state_rank()

    def restore_state_rank(self, state: Any) -> None:
        """Go on from a saved state; call it before iterating."""
        self.energon_loader.restore_state_rank(state)


def get_packed_loader(
    path: str | Path,
    encoder: Processor,
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
    check_lengths: bool = True,
    rank: int | None = None,
    world_size: int | None = None,
    seed: int = 0,
) -> PackedLoader:
    """A loader of padding-free batches.

        loader = get_packed_loader("out/webdataset", encoder, micro_batch_size=2, epochs=1)
        for batch in loader:
            loss = model(**batch.transformers_inputs()).loss

    Args:
        path: folder that `energon-packed pack` wrote (`out` or `out/webdataset`), or an Energon Metadataset YAML.
        encoder: the Processor that the data was packed with.
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
        check_lengths: raise where a sample's length differs from the recorded one.
        rank, world_size: data-parallel place of this process; by default from torch.distributed, else 0 and 1.
        seed: offset of the shuffle seed.

    Raises:
        ConfigError: arguments that contradict each other or the data.
        FormatError: `path` is no packed data set.
    """
    folder, manifest = _resolve(Path(path))
    if manifest is not None:
        seq_len = manifest.seq_len if seq_len is None else seq_len
        if manifest.seq_len > seq_len:
            raise ConfigError(
                f"{path} was packed with seq_len {manifest.seq_len}, more than seq_len {seq_len}; raise it"
            )
    if packing_buffer_size is not None:
        if packing_buffer_size < 1:
            raise ConfigError(f"packing_buffer_size is {packing_buffer_size}; it must be at least 1, or None")
        if packer is None and seq_len is None:
            raise ConfigError("packing on the fly needs seq_len: the data set has no packing.json")
        packer = packer or PoolPacker(seq_len or 0)
    distributor = EnergonDistributor(
        folder,
        split=split,
        micro_batch_size=micro_batch_size,
        shuffle=shuffle,
        shuffle_buffer_size=shuffle_buffer_size,
        packing_buffer_size=packing_buffer_size,
        epochs=epochs,
        drop_last=drop_last,
    )
    task_encoder = PackedTaskEncoder(
        encoder, collator=collator or PaddingFreeCollator(), packer=packer, check_lengths=check_lengths
    )
    dataset = distributor.dataset(task_encoder, _worker_config(rank, world_size, num_workers, seed))
    loader = get_savable_loader(dataset)
    loader.pin_memory = torch.cuda.is_available()  # Energon always asks for it; without a GPU torch only warns
    return PackedLoader(loader)


def _resolve(path: Path) -> tuple[Path, PackingManifest | None]:
    """(what Energon opens, manifest where there is one)."""
    if path.is_file():
        return path, None
    if not path.is_dir():
        raise FormatError(f"{path} does not exist; give a folder that energon-packed wrote, or a Metadataset YAML")
    folder = path if (path / ".nv-meta").is_dir() else path / "webdataset"
    if not (folder / ".nv-meta").is_dir():
        raise FormatError(f"{path} has no .nv-meta folder; was the build finished?")
    try:
        return folder, PackingManifest.load(folder)
    except FormatError:
        return folder, None


def _worker_config(rank: int | None, world_size: int | None, num_workers: int, seed: int) -> WorkerConfig:
    """Place of this process among the data-parallel ranks; a sample that fails to load raises."""
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
        global_error_handler=reraise_exception,
    )
