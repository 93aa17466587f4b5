"""Settings of DataflowLoader, and options of torch's DataLoader under it: which go together."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from energon_packed.dataflow.distributors.base import Distributor
from energon_packed.dataflow.packers import Packer
from energon_packed.errors import ConfigError

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
