"""Loader: what trainers, joint loaders and order logs need of a loader of this package.

Other loaders only have `state_dict` and `load_state_dict`; `position_of` and `state_at` accept both.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from energon_packed.errors import ConfigError
from energon_packed.loading.monitoring.order_log import OrderLog
from energon_packed.loading.state import Position


class Loader(ABC):
    """Base class of loaders that have a state after each earlier batch, and an order log."""

    @abstractmethod
    def rest_of_epoch(self) -> Iterator[Any]:
        """Yield the remaining batches of the current epoch: no batch after its last batch."""

    @abstractmethod
    def position(self) -> Position:
        """Return the position after the last yielded batch: a small object, for a later `state_dict`."""

    @abstractmethod
    def state_dict(self, position: Position | None = None) -> dict[str, Any]:
        """Return the state after the last yielded batch, or at an earlier position, in plain types."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the batch at which `state` was saved."""

    @abstractmethod
    def log_order(self, folder: str | Path) -> None:
        """Write a line for each batch into a folder."""

    @abstractmethod
    def order_logs(self, position: Position) -> Iterator[tuple[OrderLog, Position]]:
        """Yield the order logs of the loader, each with its part of a position."""


def position_of(loader: Any) -> Any:
    """Return the position of a loader after the last batch that it returned, for a later `state_at`.

    A position is small, a state may be large. A third-party loader has only a state, which then is its position.
    """
    return loader.position() if isinstance(loader, Loader) else loader.state_dict()


def state_at(loader: Any, position: Any) -> dict[str, Any]:
    """Return the state of a loader at a position that `position_of` returned."""
    return loader.state_dict(position) if isinstance(loader, Loader) else dict(position)


def order_logs(loader: Any, position: Any) -> Iterator[tuple[OrderLog, Position]]:
    """Yield the order logs of a loader, each with its part of a position of `position_of`."""
    if isinstance(loader, Loader):
        yield from loader.order_logs(position)


def log_order(loader: Any, folder: str | Path | None) -> None:
    """Open the order log of a loader; None opens no log.

    Raises:
        ConfigError: the loader has no order log, or has one already.
    """
    if folder is None:
        return
    if not isinstance(loader, Loader):
        raise ConfigError(
            f"`order_log` needs a loader of energon-packed, got a {type(loader).__name__}. Remove it, or pass the "
            "loader of get_packed_loader, a DataflowLoader or a JointLoader."
        )
    if any(loader.order_logs(loader.position())):
        raise ConfigError(f"`order_log` must be set once, got {folder} for a loader with a log. Remove one of them.")
    loader.log_order(folder)
