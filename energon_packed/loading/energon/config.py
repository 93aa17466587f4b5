"""LoaderConfig: how an Energon loader deals, shuffles and checks packs."""

from dataclasses import dataclass
from typing import Any, Literal

from energon_packed.errors import ConfigError

EvenRanks = Literal["auto", "repeat", "drop", "off"]
EVEN_RANKS: tuple[EvenRanks, ...] = ("auto", "repeat", "drop", "off")
_MINIMUM = {
    "seq_len": 1,
    "micro_batch_size": 1,
    "num_workers": 0,
    "shuffle_buffer_size": 1,
    "packing_buffer_size": 1,
    "max_failures": 0,
    "timeout": 0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderConfig:
    """Settings of `get_packed_loader`.

    Attributes:
        seq_len: tokens in one row; by default what packing.json says.
        micro_batch_size: packs in one batch; they are joined into one row.
        num_workers: worker processes; 0 loads in this one.
        split: `train`, `val` or `test`.
        epochs: None repeats indefinitely, 1 ends after one exact pass.
        complete_epochs: with epochs=None, read every pack once before any is read again, in another order each time.
            Without it Energon shuffles across the end of its data, so that some packs come again before others came.
        shuffle: mix shards and packs; False reads in order and needs epochs=1.
        shuffle_buffer_size: packs in the shuffle buffer, held as raw bytes.
        packing_buffer_size: pack on the fly with a buffer of this many samples, for MultiMixQASample data.
        drop_last: drop the short batch at the end of each worker's data.
        even_ranks: with epochs=1, what happens when ranks have a different number of batches: `repeat` the last batch
            of the shorter ones, `drop` the surplus of the longer ones, `off` end apart; `auto` is `repeat` in a
            torch.distributed process group and `off` outside of one.
        check_encoder: refuse an encoder whose tokenizer, template, image settings or `loss_on` are not those that the
            data was packed with.
        check_lengths: raise when a sample's length differs from the recorded one.
        max_failures: samples of this rank that may fail to load and are skipped; 0 raises the first failure.
        trust_sample_loader: load a dataset whose dataset.yaml or sample_loader.py is not what energon-packed writes,
            and run its code; see SECURITY.md.
        timeout: seconds to wait for a batch or a state of the worker processes; 0 waits as long as they live. With it,
            storage that hangs raises instead of waiting.
        rank, world_size: data-parallel place of this process; by default from torch.distributed, else 0 and 1.
        seed: offset of the shuffle seed.

    Raises:
        ConfigError: an invalid value, or values that contradict each other.
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
    drop_last: bool = False
    even_ranks: EvenRanks = "auto"
    check_encoder: bool = True
    check_lengths: bool = True
    max_failures: int = 0
    trust_sample_loader: bool = False
    timeout: float = 0
    rank: int | None = None
    world_size: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, minimum in _MINIMUM.items():
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise ConfigError(f"`{name}` is {value}; it must be at least {minimum}")
        if self.epochs not in (None, 1):
            raise ConfigError(f"`epochs` is {self.epochs}; use None to repeat indefinitely, or 1 for one exact pass")
        if self.complete_epochs and self.epochs is not None:
            raise ConfigError("`complete_epochs` is about repeating; leave it out with `epochs=1`")
        if not self.shuffle and self.epochs is None:
            raise ConfigError("`shuffle=False` reads in order for one epoch; set `epochs=1` with it")
        if self.timeout and not self.num_workers:
            raise ConfigError(f"`timeout` {self.timeout:g} needs worker processes; leave it out with `num_workers=0`")
        if self.even_ranks not in EVEN_RANKS:
            raise ConfigError(f"`even_ranks` is {self.even_ranks!r}; use one of {', '.join(EVEN_RANKS)}")
        if (self.rank is None) != (self.world_size is None):
            raise ConfigError("pass both `rank` and `world_size`, or neither")
        if self.rank is not None and self.world_size is not None and not 0 <= self.rank < self.world_size:
            raise ConfigError(f"`rank` {self.rank} is not below `world_size` {self.world_size}")

    @property
    def on_the_fly(self) -> bool:
        """Rows are packed while loading."""
        return self.packing_buffer_size is not None

    @property
    def one_pass(self) -> bool:
        """Energon's dataset ends after one pass over the data."""
        return self.epochs is not None or self.complete_epochs

    def order_fingerprint(self) -> dict[str, Any]:
        """The settings that decide the order of batches, beside seed, batch size, ranks and workers."""
        names = ("split", "epochs", "shuffle", "shuffle_buffer_size", "packing_buffer_size", "drop_last")
        complete = {"complete_epochs": True} if self.complete_epochs else {}
        return {name: getattr(self, name) for name in names} | complete
