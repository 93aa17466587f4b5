"""The data position of one rank in a checkpoint of Megatron-LM or Megatron-Bridge.

    DATALOADER_SAVE/iter_0000100/mp_rank_00/train_dataloader_dprank000.pt      Megatron-LM, without pipeline stages
    DATALOADER_SAVE/iter_0000100/mp_rank_00_000/train_dataloader_dprank000.pt  Megatron-LM, with pipeline stages
    SAVE/energon/iter_0000100/train_dataloader_dprank000.pt                    Megatron-Bridge

Both write {"dataloader_state_dict": state} there before the checkpoint is complete, and name the last complete one in
`latest_checkpointed_iteration.txt` (Megatron-LM) or `latest_train_state.pt` (Megatron-Bridge). So the newest folder
may be of a checkpoint that was never finished, and is not what a restart loads. Sources: `maybe_save_dataloader_state`
and `get_checkpoint_name` in megatron/training/checkpointing.py of Megatron-LM and in
megatron/bridge/training/checkpointing.py.

MegatronIterator: what Megatron's training loop reads, and saves into its checkpoints.
"""

import logging
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from energon_packed.errors import BatchError, ConfigError
from energon_packed.integrations.megatron.layouts import Layout, megatron_batch
from energon_packed.integrations.megatron.ranks import megatron_lm_args
from energon_packed.loading import DataflowLoader, PackedLoader
from energon_packed.loading.energon.states import read_state


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


_log = logging.getLogger(__name__)
_REMEDY = "pass restore=None to start the data from the beginning"


def restore_iterator(iterator: MegatronIterator, restore: str | Path | None, rank: int) -> None:
    """Move an iterator to the position that a checkpoint holds for this data-parallel rank.

    Raises:
        ConfigError: there is no state where one is expected, or it is not clear which one.
        BatchError: the file or the state is not that of this loader.
    """
    if restore is None:
        return
    file = _of_megatron_lm(rank) if restore == "auto" else state_file(Path(restore), rank)
    if file is None:
        return
    state = read_state(file).state
    try:
        iterator.restore_state(state)
    except BatchError as error:
        raise BatchError(f"{file}: {error}") from error
    _log.info("rank %d restored its data position from %s", rank, file)


def state_file(path: Path, rank: int) -> Path:
    """The state file of a data-parallel rank.

    Args:
        path: a file, an iteration folder, or a checkpoint folder, whose last complete iteration counts.
        rank: data-parallel rank.

    Raises:
        ConfigError: no such file; the message names the path, and what is there.
    """
    if path.is_file():
        return path
    if not path.is_dir():
        raise ConfigError(f"restore: {path} does not exist; {_REMEDY}")
    if not path.name.startswith("iter_") and not _in_iteration(path, rank):
        path = _last_iteration(path)
    return _only_file(path, rank)


def _of_megatron_lm(rank: int) -> Path | None:
    """The file that Megatron-LM saved with the iteration it resumes at; None when there is nothing to resume."""
    args = megatron_lm_args()
    if args is None:
        if "megatron.bridge" not in sys.modules:
            _log.warning(
                "restore='auto' knows the iteration of Megatron-LM, and Megatron-Bridge restores by itself; neither "
                "runs here, so the data starts from the beginning: pass restore=PATH after a restart"
            )
        return None
    iteration = getattr(args, "iteration", 0)
    if not iteration:
        return None
    folder = getattr(args, "dataloader_save", None)
    if not folder:
        raise ConfigError(
            f"Megatron resumes at iteration {iteration}, and its data position was not saved: give --dataloader-save "
            f"DIR from the start, pass restore=PATH, or {_REMEDY}"
        )
    return _only_file(Path(folder) / f"iter_{iteration:07d}", rank)


def _only_file(iteration: Path, rank: int) -> Path:
    found = _in_iteration(iteration, rank)
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(f"restore: {iteration} has several states, {', '.join(map(str, found))}; pass one of them")
    others = sorted(iteration.rglob(_name("*")))
    if others and "rank" not in read_state(others[0]).state:
        return others[0]  # the same on all ranks
    if not others:
        raise ConfigError(f"restore: {iteration} has no {_name(f'{rank:03d}')}; {_REMEDY}")
    ranks = len({one.name for one in others})
    raise ConfigError(
        f"restore: {iteration} has states of {ranks} data-parallel ranks and none of rank {rank}: the number of ranks "
        f"changed; run energon-packed state redist first, or {_REMEDY}"
    )


def _in_iteration(folder: Path, rank: int) -> list[Path]:
    name = _name(f"{rank:03d}")
    return [file for file in (folder / name, *sorted(folder.glob(f"mp_rank_*/{name}"))) if file.is_file()]


def _name(rank: str) -> str:
    return f"train_dataloader_dprank{rank}.pt"


def _last_iteration(folder: Path) -> Path:
    """The iteration folder of the last complete checkpoint.

    `folder` is that of the checkpoints or of the data positions, which may lie in it or beside its tracker.
    """
    for place in (folder, folder.parent):
        iteration = _tracked_iteration(place)
        if iteration is None:
            continue
        name = f"iter_{iteration:07d}"
        for root in (folder, folder / "energon"):
            if next((root / name).rglob(_name("*")), None) is not None:
                return root / name
        raise ConfigError(
            f"restore: {place} has a checkpoint of iteration {iteration}, and {folder} no data position of it; "
            f"{_REMEDY}"
        )
    raise ConfigError(
        f"restore: neither {folder} nor the folder above has latest_checkpointed_iteration.txt or "
        f"latest_train_state.pt, so the last complete iteration is not known; pass an iteration folder, or {_REMEDY}"
    )


def _tracked_iteration(folder: Path) -> int | None:
    """Iteration of the last complete checkpoint; None without a tracker."""
    bridge, megatron_lm = folder / "latest_train_state.pt", folder / "latest_checkpointed_iteration.txt"
    try:
        if bridge.is_file():
            return int(torch.load(bridge, map_location="cpu", weights_only=True)["step"])
        return int(megatron_lm.read_text()) if megatron_lm.is_file() else None
    except (ValueError, KeyError, RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
        tracker = bridge if bridge.is_file() else megatron_lm
        raise ConfigError(f"restore: {tracker} names no iteration; pass an iteration folder") from error
