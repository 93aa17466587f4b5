"""LoaderOptions and PackedLoaderOptions: the options of all loaders, declared once.

LoaderOptions         of DataflowLoader beside its roles, and of every function that makes one
PackedLoaderOptions   + the packs that get_packed_loader reads through Energon

Each field is declared by `option(default, help=...)`; creating an instance checks the values. The API pages and the
types of keyword arguments (`keywords.pyi`) are made from these classes.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from energon_packed.errors import ConfigError
from energon_packed.formats.references import moved_folders
from energon_packed.loading.epoch_end import EpochEnd
from energon_packed.loading.ranks import check_rank_arguments
from energon_packed.options import Options, declared, declared_again, option

_log = logging.getLogger(__name__)
RANKS, ORDER, CHECKS, TORCH, PACKS = "Ranks and workers", "Order", "Checks", "torch's DataLoader", "Packs"
_rank_option = partial(option, group=RANKS, flags=())
_order_option = partial(option, group=ORDER, flags=())
_check_option = partial(option, group=CHECKS, flags=())
_torch_option = partial(option, group=TORCH, flags=())
_pack_option = partial(option, group=PACKS, flags=())


@dataclass(frozen=True, kw_only=True)
class LoaderOptions(Options):
    """Options of `DataflowLoader` beside its roles, and of the functions that return one.

    Raises:
        ConfigError: when made with an invalid value.

    Examples:
        >>> LoaderOptions(num_workers=2, timeout=60).epoch_end
        'repeat'
    """

    num_workers: int = _rank_option(0, help="Worker processes; 0 loads in this process.", minimum=0)
    rank: int | None = _rank_option(
        None, help="Data-parallel rank.", shown_default="the rank in torch.distributed, else 0"
    )
    world_size: int | None = _rank_option(
        None, help="Data-parallel world size.", shown_default="the world size of torch.distributed, else 1"
    )
    seed: int = _order_option(0, help="Seed of the order.", minimum=0)
    epoch_end: EpochEnd = _order_option(
        "repeat", help="The items that do not fill the last step of all ranks. repeat: a rank without a batch gets a "
        "row without targets, so every item counts once, and a short batch stays short; drop: the step is left out on "
        "all ranks, with a warning; error: ConfigError. The ranks of a stream of unknown length exchange before each "
        "batch whether they have a batch, so every rank must iterate the loader.",
    )  # fmt: skip
    allow_changed_weights: bool = _order_option(
        False, help="Accept a state with other weights of a mixture or blend, and draw the rest by the new weights."
    )
    order_log: Path | None = _order_option(
        None, help="Folder in which every step is recorded (`energon-packed order check` reads it)."
    )
    max_failures: int | None = _check_option(
        0, help="Samples of this rank that may fail to load in an epoch and are skipped; 0 raises the first failure, "
        "None allows any number.", minimum=0,
    )  # fmt: skip
    check_lengths: bool = _check_option(
        True, help="A sample of a pack fails if its length differs from the recorded length."
    )
    persistent_workers: bool = _torch_option(False, help="Keep the worker processes after an epoch.")
    pin_memory: bool = _torch_option(False, help="Copy batches into pinned memory.")
    prefetch_factor: int | None = _torch_option(
        None, help="Batches that a worker prepares in advance.", shown_default="2 with worker processes", minimum=1
    )
    timeout: float = _torch_option(
        0, help="Seconds to wait for a batch or a state of the worker processes; 0 waits as long as they live. A "
        "timeout turns storage that hangs into an error.", minimum=0,
    )  # fmt: skip
    multiprocessing_context: Any = _torch_option(
        None, help="How worker processes start: a name such as `spawn`, or a context of multiprocessing."
    )
    worker_init_fn: Callable[[int], None] | None = _torch_option(
        None, help="Called in each worker process with its number."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rank_arguments(self.rank, self.world_size)

    def of_torch(self) -> dict[str, Any]:
        """Return the options of torch's DataLoader by name.

        Without worker processes, options that need them have no effect, and a warning names them.
        """
        values = {o.name: getattr(self, o.name) for o in declared(LoaderOptions) if o.group == TORCH}
        if not self.num_workers:
            names = ("persistent_workers", "prefetch_factor", "multiprocessing_context", "timeout")
            if ignored := [name for name in names if values[name]]:
                text = ", ".join(ignored)
                _log.warning("%s need worker processes, so they have no effect with `num_workers` 0", text)
            values = {name: value for name, value in values.items() if name not in names}
        return values | {"num_workers": self.num_workers}


@dataclass(frozen=True, kw_only=True)
class PackedLoaderOptions(LoaderOptions):
    """Options of `get_packed_loader`: how Energon reads packs, and the options of a DataflowLoader.

    Raises:
        ConfigError: when made with an invalid value, or values contradict each other.

    Examples:
        >>> PackedLoaderOptions(micro_batch_size=2, num_workers=0, epochs=1).one_pass
        True
    """

    num_workers: int = declared_again(LoaderOptions, "num_workers", 2)
    pin_memory: bool = declared_again(
        LoaderOptions, "pin_memory", torch.cuda.is_available, shown_default="True if CUDA is available"
    )
    micro_batch_size: int = _pack_option(1, help="Packs in one batch; they are joined into one row.", minimum=1)
    seq_len: int | None = _pack_option(
        None, help="Tokens in one row.", shown_default="the value in packing.json", minimum=1
    )
    split: str = _pack_option("train", help="`train`, `val` or `test`.")
    epochs: int | None = _pack_option(
        None, help="None repeats without end, 1 ends after one exact pass; iterate again for the next epoch."
    )
    complete_epochs: bool = _pack_option(
        False, help="With epochs=None, read every pack once before any pack is repeated, in another order each time. "
        "Without it Energon shuffles across the end of its data, so that some packs are repeated early.",
    )  # fmt: skip
    shuffle: bool = _pack_option(True, help="Mix shards and packs; False reads in order and needs epochs=1.")
    shuffle_buffer_size: int = _pack_option(64, help="Packs in the shuffle buffer, stored as raw bytes.", minimum=1)
    packing_buffer_size: int | None = _pack_option(
        None, help="Pack on the fly with a buffer of this many samples, for MultiMixQASample data.", minimum=1
    )
    check_encoder: bool = _pack_option(
        True, help="Refuse an encoder whose tokenizer, template, image settings or `loss_on` differ from the encoder "
        "that the dataset was packed with.",
    )  # fmt: skip
    trust_sample_loader: bool = _pack_option(
        False, help="Load a dataset whose dataset.yaml or sample_loader.py differs from the files that energon-packed "
        "writes, and run its code; see SECURITY.md.",
    )  # fmt: skip
    media_root: Mapping[str, str] | None = _pack_option(
        None, help="Folders of referenced images that moved, new folder by old folder, for all loaders of the process "
        "over Energon.",
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.epochs not in (None, 1):
            raise ConfigError(f"`epochs` must be None (repeat indefinitely) or 1 (one exact pass), got {self.epochs}.")
        if self.complete_epochs and self.epochs is not None:
            raise ConfigError("`complete_epochs` applies only to `epochs=None`. Remove it or unset `epochs`.")
        if not self.shuffle and self.epochs is None:
            raise ConfigError("`shuffle=False` requires `epochs=1`.")
        moved_folders(self.media_root)

    @property
    def on_the_fly(self) -> bool:
        """Whether rows are packed while loading."""
        return self.packing_buffer_size is not None

    @property
    def one_pass(self) -> bool:
        """Whether Energon's dataset ends after one pass over the data."""
        return self.epochs is not None or self.complete_epochs
