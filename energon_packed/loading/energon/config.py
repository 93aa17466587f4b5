"""Settings of `get_packed_loader`: LoaderConfig checks them, LoaderSettings types them as keyword arguments."""

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import TypedDict

from energon_packed.errors import ConfigError
from energon_packed.formats.references import moved_folders
from energon_packed.loading.epoch_end import EpochEnd, check_epoch_end
from energon_packed.loading.ranks import check_rank_arguments

_MINIMUM = {
    "seq_len": 1,
    "micro_batch_size": 1,
    "num_workers": 0,
    "shuffle_buffer_size": 1,
    "packing_buffer_size": 1,
    "max_failures": 0,
    "timeout": 0,
}


class LoaderSettings(TypedDict, total=False):
    """Keyword arguments of `get_packed_loader`: the fields of LoaderConfig, which documents and checks them."""

    seq_len: int | None
    micro_batch_size: int
    num_workers: int
    split: str
    epochs: int | None
    complete_epochs: bool
    shuffle: bool
    shuffle_buffer_size: int
    packing_buffer_size: int | None
    epoch_end: EpochEnd
    check_encoder: bool
    check_lengths: bool
    max_failures: int
    trust_sample_loader: bool
    timeout: float
    media_root: Mapping[str, str] | None
    rank: int | None
    world_size: int | None
    seed: int
    order_log: str | Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderConfig:
    """Settings of `get_packed_loader`.

    Attributes:
        seq_len: tokens in one row; by default the value in packing.json.
        micro_batch_size: packs in one batch; they are joined into one row.
        num_workers: worker processes; 0 loads in this process.
        split: `train`, `val` or `test`.
        epochs: None repeats indefinitely, 1 ends after one exact pass.
        complete_epochs: with epochs=None, read every pack once before any pack is repeated, in another order each
            time. Without it Energon shuffles across the end of its data, so that some packs are repeated early.
        shuffle: mix shards and packs; False reads in order and needs epochs=1.
        shuffle_buffer_size: packs in the shuffle buffer, stored as raw bytes.
        packing_buffer_size: pack on the fly with a buffer of this many samples, for MultiMixQASample data.
        epoch_end: the packs that do not fill the last step of all ranks, with epochs=1. `repeat`: a rank without a
            batch repeats a row without targets, so every pack counts once; `drop`: short batches, and batches that
            not all ranks have, are left out with a warning; `error`: ConfigError.
        check_encoder: refuse an encoder whose tokenizer, template, image settings or `loss_on` differ from the
            encoder that the dataset was packed with.
        check_lengths: raise if the length of a sample differs from the recorded length.
        max_failures: samples of this rank that may fail to load and are skipped; 0 raises the first failure.
        trust_sample_loader: load a dataset whose dataset.yaml or sample_loader.py differs from the files that
            energon-packed writes, and run its code; see SECURITY.md.
        timeout: seconds to wait for a batch or a state of the worker processes; 0 waits as long as they live. A
            timeout turns storage that hangs into an error.
        media_root: folders of referenced images that moved, new folder by old folder, for all loaders of the process
            over Energon.
        rank, world_size: data-parallel rank and world size; by default from torch.distributed, else 0 and 1.
        seed: offset of the shuffle seed.
        order_log: folder in which every batch is recorded (`energon-packed order check` reads it).

    Raises:
        ConfigError: a value is invalid, or values contradict each other.

    Examples:
        >>> config = LoaderConfig(micro_batch_size=2, num_workers=0, epochs=1)
        >>> config.one_pass, config.on_the_fly
        (True, False)
    """

    seq_len: int | None = None
    micro_batch_size: int = 1
    num_workers: int = 2
    split: str = "train"
    epochs: int | None = None
    complete_epochs: bool = False
    shuffle: bool = True
    shuffle_buffer_size: int = 64
    packing_buffer_size: int | None = None
    epoch_end: EpochEnd = "repeat"
    check_encoder: bool = True
    check_lengths: bool = True
    max_failures: int = 0
    trust_sample_loader: bool = False
    timeout: float = 0
    media_root: Mapping[str, str] | None = None
    rank: int | None = None
    world_size: int | None = None
    seed: int = 0
    order_log: str | Path | None = None

    def __post_init__(self) -> None:
        for name, minimum in _MINIMUM.items():
            value = getattr(self, name)
            if not isinstance(value, Real | None):
                raise ConfigError(f"`{name}` must be a number, got {value!r}.")
            if value is not None and value < minimum:
                raise ConfigError(f"`{name}` must be at least {minimum}, got {value}.")
        if self.epochs not in (None, 1):
            raise ConfigError(f"`epochs` must be None (repeat indefinitely) or 1 (one exact pass), got {self.epochs}.")
        if self.complete_epochs and self.epochs is not None:
            raise ConfigError("`complete_epochs` applies only to `epochs=None`. Remove it or unset `epochs`.")
        if not self.shuffle and self.epochs is None:
            raise ConfigError("`shuffle=False` requires `epochs=1`.")
        if self.timeout and not self.num_workers:
            raise ConfigError(
                f"`timeout` needs worker processes, got {self.timeout:g} with `num_workers=0`. Remove it."
            )
        check_epoch_end(self.epoch_end)
        check_rank_arguments(self.rank, self.world_size)
        moved_folders(self.media_root)

    @property
    def on_the_fly(self) -> bool:
        """Whether rows are packed while loading."""
        return self.packing_buffer_size is not None

    @property
    def one_pass(self) -> bool:
        """Whether Energon's dataset ends after one pass over the data."""
        return self.epochs is not None or self.complete_epochs
