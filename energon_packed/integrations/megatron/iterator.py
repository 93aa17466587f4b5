"""MegatronIterator: what Megatron's training loop reads, and saves into its checkpoints."""

from collections.abc import Iterator
from typing import Any

from energon_packed.dataflow import DataflowLoader, PackedLoader
from energon_packed.integrations.megatron.layouts import Layout, megatron_batch


class MegatronIterator(Iterator[dict[str, Any]]):
    """An endless iterator over a loader, as Megatron's training loop takes it.

    Megatron-LM and Megatron-Bridge call `save_state` at every checkpoint; Megatron-Bridge calls `restore_state` too.
    """

    def __init__(self, loader: PackedLoader | DataflowLoader, layout: Layout, *, with_pixels: bool = True) -> None:
        """Use `train_valid_test_dataloaders_provider`.

        Args:
            loader: repeats indefinitely.
            layout: as for `megatron_batch`.
            with_pixels: as for `megatron_batch`.
        """
        self._loader = loader
        self._layout: Layout = layout
        self._with_pixels = with_pixels
        self._batches = iter(loader)

    def __next__(self) -> dict[str, Any]:
        return megatron_batch(next(self._batches), self._layout, with_pixels=self._with_pixels)

    def save_state(self) -> dict[str, Any]:
        """State of this data-parallel rank: nested dicts and lists of numbers and strings."""
        return self._loader.state_dict()

    def restore_state(self, state: dict[str, Any]) -> None:
        """Resume from a saved state; call it before the first batch is taken.

        Raises:
            BatchError: the state is of another loader; the message names what differs.
        """
        self._loader.load_state_dict(state)
        self._batches = iter(self._loader)
