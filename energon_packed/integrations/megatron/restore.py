"""A loader to the iterator of Megatron's training loop, restored from the state file of a checkpoint.

    DATALOADER_SAVE/iter_0000100/mp_rank_00/train_dataloader_dprank000.pt      Megatron-LM, without pipeline stages
    DATALOADER_SAVE/iter_0000100/mp_rank_00_000/train_dataloader_dprank000.pt  Megatron-LM, with pipeline stages
    SAVE/energon/iter_0000100/train_dataloader_dprank000.pt                    Megatron-Bridge

Both write {"dataloader_state_dict": state} there before the checkpoint is complete, and name the last complete one in
`latest_checkpointed_iteration.txt` (Megatron-LM) or `latest_train_state.pt` (Megatron-Bridge). So the newest folder
may belong to a checkpoint that was never finished, and that a restart does not load. Sources:
`maybe_save_dataloader_state` and `get_checkpoint_name` in megatron/training/checkpointing.py of Megatron-LM and in
megatron/bridge/training/checkpointing.py.
"""

import logging
import pickle
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from energon_packed.errors import BatchError, ConfigError
from energon_packed.integrations.consumed import Consumed
from energon_packed.integrations.megatron.layouts import Layout, megatron_batch
from energon_packed.integrations.megatron.ranks import megatron_lm_args
from energon_packed.loading.collation.batch import PackedBatch
from energon_packed.loading.dataflow.loader import DataflowLoader
from energon_packed.loading.dataflow.state_files import read_state
from energon_packed.loading.monitoring.metrics import ThroughputMetrics

_log = logging.getLogger(__name__)
_REMEDY = "pass restore=None to read the data from its start"


class MegatronIterator(Iterator[dict[str, Any]]):
    """Endless iterator over a loader, for Megatron's training loop.

    Megatron-LM and Megatron-Bridge call `save_state` at every checkpoint; Megatron-Bridge calls `restore_state` too.
    """

    def __init__(
        self,
        loader: DataflowLoader,
        layout: Layout,
        *,
        with_pixels: bool = True,
        metrics: ThroughputMetrics | None = None,
    ) -> None:
        """Create an iterator; use `train_valid_test_dataloaders_provider`.

        Args:
            loader: repeats indefinitely.
            layout: as for `megatron_batch`.
            with_pixels: as for `megatron_batch`.
            metrics: counts each batch.
        """
        self._layout: Layout = layout
        self._with_pixels = with_pixels
        self._metrics = metrics
        self._consumed = Consumed(loader, self._to_inputs)
        self._inputs = self._consumed.forever()
        self._requested = 0.0  # time of the last request

    def __next__(self) -> dict[str, Any]:
        self._requested = time.perf_counter()
        inputs: dict[str, Any] = next(self._inputs)
        return inputs

    def _to_inputs(self, batch: PackedBatch) -> dict[str, Any]:
        if self._metrics is not None:
            self._metrics.add(batch, wait=time.perf_counter() - self._requested)
        return megatron_batch(batch, self._layout, with_pixels=self._with_pixels)

    def save_state(self) -> dict[str, Any]:
        """Return the state of this data-parallel rank: nested dicts and lists of numbers and strings."""
        return self._consumed.state()

    def restore_state(self, state: dict[str, Any]) -> None:
        """Resume from a saved state; call it before the first batch.

        Raises:
            BatchError: the state does not match the loader; the message names the difference.
        """
        self._consumed.load_state_dict(state)
        self._inputs = self._consumed.forever()


def restore_iterator(iterator: MegatronIterator, restore: str | Path | None, rank: int) -> None:
    """Move an iterator to the position of this data-parallel rank in a checkpoint.

    Raises:
        ConfigError: the state is missing, or there are several states.
        BatchError: the file is damaged, or the state does not match the loader.
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
    """Return the state file of a data-parallel rank.

    Args:
        path: a file, an iteration folder, or a checkpoint folder, whose last complete iteration counts.
        rank: data-parallel rank.

    Raises:
        ConfigError: there is not exactly one such file; the message names the path and its files.
    """
    if path.is_file():
        return path
    if not path.is_dir():
        raise ConfigError(f"restore: {path} does not exist; {_REMEDY}")
    if not path.name.startswith("iter_") and not _in_iteration(path, rank):
        path = _last_iteration(path)
    return _only_file(path, rank)


def _of_megatron_lm(rank: int) -> Path | None:
    """Return the file that Megatron-LM saved with the iteration at which it resumes; None if it does not resume."""
    args = megatron_lm_args()
    if args is None:
        if "megatron.bridge" not in sys.modules:
            _log.warning(
                "restore='auto' needs Megatron-LM or Megatron-Bridge, and both are not running, so the data is read "
                "from its start; pass restore=PATH after a restart"
            )
        return None
    iteration = getattr(args, "iteration", 0)
    if not iteration:
        return None
    folder = getattr(args, "dataloader_save", None)
    if not folder:
        raise ConfigError(
            f"Megatron resumes at iteration {iteration}, but the loader state was not saved. Run with "
            f"--dataloader-save DIR from the start, pass restore=PATH, or {_REMEDY}."
        )
    return _only_file(Path(folder) / f"iter_{iteration:07d}", rank)


def _only_file(iteration: Path, rank: int) -> Path:
    files = _in_iteration(iteration, rank)
    if len(files) == 1:
        return files[0]
    if files:
        raise ConfigError(f"restore: {iteration} has several states, {', '.join(map(str, files))}; pass one of them")
    others = sorted(iteration.rglob(_name("*")))
    if others and "rank" not in read_state(others[0]).state:
        return others[0]  # the same on all ranks
    if not others:
        raise ConfigError(f"restore: {iteration} has no {_name(f'{rank:03d}')}; {_REMEDY}")
    ranks = len({file.name for file in others})
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
    """Return the iteration folder of the last complete checkpoint.

    `folder` is the folder of checkpoints or of loader states, which may be in it or beside its tracker.
    """
    for parent in (folder, folder.parent):
        iteration = _tracked_iteration(parent)
        if iteration is None:
            continue
        name = f"iter_{iteration:07d}"
        for root in (folder, folder / "energon"):
            if next((root / name).rglob(_name("*")), None) is not None:
                return root / name
        raise ConfigError(
            f"restore: {parent} has a checkpoint of iteration {iteration}, but {folder} has no loader state of it; "
            f"{_REMEDY}"
        )
    raise ConfigError(
        f"restore: neither {folder} nor the folder above has latest_checkpointed_iteration.txt or "
        f"latest_train_state.pt, so the last complete iteration is not known; pass an iteration folder, or {_REMEDY}"
    )


def _tracked_iteration(folder: Path) -> int | None:
    """Return the iteration of the last complete checkpoint; None without a tracker."""
    bridge, megatron_lm = folder / "latest_train_state.pt", folder / "latest_checkpointed_iteration.txt"
    try:
        if bridge.is_file():
            return int(torch.load(bridge, map_location="cpu", weights_only=True)["step"])
        return int(megatron_lm.read_text()) if megatron_lm.is_file() else None
    except (ValueError, KeyError, RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
        tracker = bridge if bridge.is_file() else megatron_lm
        raise ConfigError(f"restore: {tracker} names no iteration; pass an iteration folder") from error
