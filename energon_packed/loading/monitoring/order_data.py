"""A dataset in, the ids of its samples out, with which an order log is compared: lost, repeated and unknown samples."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from energon_packed.encoding import StoredTokens
from energon_packed.loading.config import DataflowConfig, is_dataflow_config
from energon_packed.loading.dataset import PackedDataset
from energon_packed.loading.monitoring.order_check import Epoch
from energon_packed.loading.raw_records import PlannedDataset, plan_in_memory

_MAX_NAMED = 5  # ids that a message names
Hashes = npt.NDArray[np.int64]


class DataIds:
    """The ids of all samples of an epoch, as hashes of 64 bits.

    Only ids are compared: the folder of a dataset may have another name than during training. Samples without an id are
    compared by their number.

    Args:
        path: packed folder, Metadataset, or the YAML of a DataflowConfig, whose records are measured.
        split: `train`, `val` or `test`.

    Raises:
        ConfigError, FormatError: as PackedDataset and `plan_in_memory`.
    """

    def __init__(self, path: Path, split: str = "train") -> None:
        self.path = path
        self._data: PackedDataset | PlannedDataset
        if is_dataflow_config(path):
            self._data = plan_in_memory(DataflowConfig.from_yaml(path))
            self._packs, self._draws = len(self._data), False
        else:
            self._data = PackedDataset(path, StoredTokens(), split=split, check_encoder=False)
            self._packs, self._draws = sum(self._data.packs), self._data.repeats
        names = list(self._names())
        named = [(hash(ident), pack) for pack, ident in names if ident is not None]
        self._unnamed = len(names) - len(named)
        self._ids, packs = np.array(named, dtype=np.int64).reshape(-1, 2).T
        # First id of each pack.
        self._of_pack = np.cumsum([0, *np.bincount(packs, minlength=self._packs)])

    def differences(self, epoch: Epoch) -> Iterator[str]:
        """Yield a line for the samples that are lost, used too often, or not in the data.

        Lost samples are reported for complete epochs. If samples are drawn by weight, any number of uses is correct.
        """
        scope = f"epoch {epoch.number}"
        known, expected = np.unique(self._expected(epoch.number), return_counts=True)
        used, counts = np.unique(epoch.samples, return_counts=True)
        if foreign := len(np.setdiff1d(used, self._ids)):
            yield f"{scope}: {foreign} samples are not in {self.path}. Pass the dataset of the run."
        if (epoch.repeats and not epoch.has_order) or self._weighted or (self._draws and epoch.most > 1):
            return
        times = np.zeros(len(known), dtype=np.int64)
        _, at, of_used = np.intersect1d(known, used, return_indices=True)
        times[at] = counts[of_used]
        if len(lost := known[times < expected * epoch.least]):
            yield f"{scope}: {len(lost)} samples of {self.path} are lost: {self._named_by(lost)}"
        if len(twice := known[times > expected * epoch.most]):
            yield f"{scope}: {len(twice)} samples are used too often: {self._named_by(twice)}"
        if not self._draws and not self._unnamed * epoch.least <= epoch.unnamed <= self._unnamed * epoch.most:
            yield f"{scope}: {epoch.unnamed} samples without an id, and {self._unnamed} in {self.path}"

    @property
    def _weighted(self) -> bool:
        return isinstance(self._data, PackedDataset) and self._data.weights is not None

    def _expected(self, epoch: int) -> Hashes:
        """Hashes of the ids of an epoch, each as often as the data has it."""
        if not self._draws or self._weighted or not isinstance(self._data, PackedDataset):
            return self._ids
        items = self._data.epoch_items(epoch, None)
        return np.concatenate([self._ids[self._of_pack[item] : self._of_pack[item + 1]] for item in items])

    def _names(self) -> Iterator[tuple[int, str | None]]:
        """Yield (pack, id) of each sample, pack by pack."""
        for pack in range(self._packs):
            if isinstance(self._data, PlannedDataset):
                yield from ((pack, ident) for ident in self._data.ids(pack))
            else:
                yield from ((pack, conversation.id) for conversation in self._data.pack(pack).conversations())

    def _named_by(self, hashes: Hashes) -> str:
        wanted = set(hashes[:_MAX_NAMED].tolist())
        names = sorted({str(ident) for _, ident in self._names() if hash(ident) in wanted})
        return ", ".join(names) + (", ..." if len(hashes) > _MAX_NAMED else "")
