"""Loader: the base class of loaders, whose epochs continue after any batch.

| loader | batches |
|---|---|
| DataflowLoader | of the four roles |
| JointLoader | of several loaders, drawn by weight |
| OtherLoader | of an iterable of another package, with its `state_dict` |
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from energon_packed.errors import ConfigError
from energon_packed.loading.state import iterate_epoch


class Loader(ABC):
    """Batches with a position that is small, and a state that is versioned and plain.

    Iterating yields the remaining batches of the current epoch; after its last batch, the batches of the next epoch.
    `len()` raises a TypeError if the number of batches of an epoch is not known in advance.
    """

    @abstractmethod
    def __iter__(self) -> Iterator[Any]: ...

    @abstractmethod
    def rest_of_epoch(self) -> Iterator[Any]:
        """Yield the remaining batches of the current epoch: no batch after its last batch."""

    @abstractmethod
    def position(self) -> Any:
        """Return the position after the last batch that was returned, for a later `state_dict(position)`."""

    @abstractmethod
    def state_dict(self, position: Any = None) -> dict[str, Any]:
        """Return the state at a position, by default after the last batch that was returned, in plain types."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the batch at which `state` was saved; call it before iterating."""

    @abstractmethod
    def log_order(self, folder: str | Path) -> None:
        """Write a line for each batch into this folder.

        Raises:
            ConfigError: the loader has a log already, or cannot have a log.
        """

    def hold_log(self) -> None:  # noqa: B027
        """Write the lines of the order log only when `release_log` is called, as the trainer reads ahead."""

    def release_log(self, position: Any) -> None:  # noqa: B027
        """Write the lines of the batches up to a position, which are consumed."""

    @property
    def place(self) -> tuple[int, int] | None:
        """Rank and world size of this process; None if the loader does not know them."""
        return None

    def batches(self) -> Iterator[Any]:
        """Iterate over the batches; without names, if iterating the loader yields names and batches."""
        return iter(self)

    @property
    def steps(self) -> int | None:
        """Batches of this rank in one epoch; None if the number is not known in advance."""
        try:
            return len(self)  # type: ignore[arg-type]  # a loader may have no length
        except TypeError:
            return None


class OtherLoader(Loader):
    """An iterable of another package as a Loader. Its position is its state, so it should be small.

    Args:
        loader: an iterable that resumes after the last batch; to be resumed, with `state_dict` and `load_state_dict`.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._is_resumed = False

    def __iter__(self) -> Iterator[Any]:
        empty, self._is_resumed = int(self._is_resumed), False  # the state may be at the end of an epoch
        return iterate_epoch(self.rest_of_epoch, empty=empty)

    def __len__(self) -> int:
        return len(self._loader)

    def rest_of_epoch(self) -> Iterator[Any]:
        """Iterate over the iterable."""
        return iter(self._loader)

    def position(self) -> Any:
        """Return the state of the iterable."""
        return self._resumable().state_dict()

    def state_dict(self, position: Any = None) -> dict[str, Any]:
        """Return a position, which is a state."""
        state: dict[str, Any] = self.position() if position is None else position
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state of the iterable."""
        self._resumable().load_state_dict(state)
        self._is_resumed = True

    def log_order(self, folder: str | Path) -> None:
        """Refuse the log: the iterable counts no steps."""
        raise ConfigError(
            f"`order_log` needs a loader of energon-packed, got a {type(self._loader).__name__}. Remove it, or pass "
            "the loader of get_packed_loader, a DataflowLoader or a JointLoader."
        )

    def _resumable(self) -> Any:
        for name in ("state_dict", "load_state_dict"):
            if not hasattr(self._loader, name):
                raise ConfigError(
                    f"`loader` must have {name} to resume, got a {type(self._loader).__name__}. Pass the loader of "
                    "get_packed_loader, or a DataflowLoader."
                )
        return self._loader


def as_loader(loader: Any) -> Loader:
    """Return a Loader as it is, and any other iterable as an OtherLoader."""
    return loader if isinstance(loader, Loader) else OtherLoader(loader)
