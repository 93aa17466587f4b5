"""A dataset in, the ids of its samples out; an order log is compared with them: lost, repeated and unknown samples."""

from collections.abc import Container, Iterator
from functools import cached_property
from pathlib import Path

import numpy as np

from energon_packed.arrays import blocks, common_ranges
from energon_packed.encoding import StoredTokens
from energon_packed.files import DiskList
from energon_packed.loading.dataflow.config import DataflowConfig, is_dataflow_config
from energon_packed.loading.dataflow.raw_records import PlannedDataset, plan_in_memory
from energon_packed.loading.datasets.dataset import PackedDataset
from energon_packed.loading.monitoring.order_epoch import MAX_NAMED, Epoch, Int64
from energon_packed.records import Conversation


class LoggedData:
    """The data of an order log, by the ids of its samples, of which hashes are in files.

    Only ids are compared: the folder of a dataset may have another name than during training. Samples without an id
    are compared by their number.

    Args:
        path: packed folder, Metadataset, or the YAML of a DataflowConfig, whose records are measured.

    Raises:
        ConfigError, FormatError: as PackedDataset and `plan_in_memory`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._data: PackedDataset | PlannedDataset
        if is_dataflow_config(path):
            self._data = plan_in_memory(DataflowConfig.from_yaml(path))
            self._rows = len(self._data)
        else:
            self._data = PackedDataset(path, StoredTokens(), check_encoder=False)
            self._rows = sum(self._data.packs)

    def samples(self, ids: Container[str | None]) -> Iterator[tuple[str | None, Conversation]]:
        """Yield (id, conversation) of the samples with these ids."""
        for row in range(self._rows):
            yield from (sample for sample in self._samples(row) if sample[0] in ids)

    def compare(self, epoch: Epoch) -> tuple[list[str], int]:
        """Return a line for the samples that are lost, used too often, or not in the data.

        Lost samples are reported for complete epochs. If samples are drawn by weight, any number of uses is correct.

        Returns:
            the lines, and the number of samples that are missing because their items were dropped.
        """
        scope, problems = f"epoch {epoch.number}", list[str]()
        _, known, unnamed, _ = self._hashes
        if foreign := sum(len(np.setdiff1d(*pair)) for pair in common_ranges(epoch.hashes, known)):
            problems.append(f"{scope}: {foreign} samples are not in {self.path}. Pass the data of the run.")
        blend = self._data if isinstance(self._data, PackedDataset) and self._data.repeats else None
        by_weight = blend is not None and blend.weights is not None
        least, most = epoch.passes
        if by_weight or (epoch.repeats and not epoch.has_order) or (blend is not None and most > 1):
            return problems, 0
        if blend is not None:
            known = self._of_epoch(blend, epoch.number)
        rows = self._rows if blend is None else len(blend)
        lost, missing, twice = list[Int64](), list[Int64](), list[Int64]()
        for expected, found in common_ranges(known, epoch.hashes):
            ids, uses = np.unique(expected, return_counts=True)
            used, counts = np.unique(found, return_counts=True)
            times = np.zeros(len(ids), dtype=np.int64)
            _, at, of_used = np.intersect1d(ids, used, return_indices=True)
            times[at] = counts[of_used]
            is_lost = times < uses * least
            lost.append(ids[is_lost])
            missing.append((uses * least - times)[is_lost])
            twice.append(ids[times > uses * most])
        lost_ids, uses, repeated = map(np.concatenate, (lost, missing, twice))
        dropped = epoch.totals["dropped"] if epoch.used_packs is None else rows - epoch.used_packs
        is_dropped = self._are_items(lost_ids, uses, dropped)
        if len(lost_ids) and not is_dropped:
            problems.append(f"{scope}: {len(lost_ids)} samples of {self.path} are lost: {self._named(lost_ids)}")
        if len(repeated):
            problems.append(f"{scope}: {len(repeated)} samples are used too often: {self._named(repeated)}")
        fewest = 0 if dropped else unnamed * least
        if blend is None and not fewest <= epoch.unnamed <= unnamed * most:
            problems.append(f"{scope}: {epoch.unnamed} samples without an id are used, and {self.path} has {unnamed}.")
        return problems, int(uses.sum()) if is_dropped else 0

    def _are_items(self, lost: Int64, missing: Int64, dropped: int) -> bool:
        """Return whether at most `dropped` items contain all missing samples, each item a sample or a whole row.

        Args:
            lost: int64 `(n,)` sorted hashes of the ids of missing samples.
            missing: int64 `(n,)` uses that are missing.
            dropped: number of items.
        """
        ids, _, _, starts = self._hashes
        if missing.sum() <= dropped or dropped <= 0:  # below 0: the epoch used more packs than the data has
            return bool(missing.sum() <= dropped)
        at = np.minimum(np.searchsorted(lost, ids), len(lost) - 1)
        of_id = np.where(lost[at] == ids, missing[at], 0)
        begins = starts[:-1][np.diff(starts) > 0]
        of_row = np.maximum.reduceat(of_id, begins)
        is_whole = bool((of_row == np.minimum.reduceat(of_id, begins)).all())
        return is_whole and int(of_row.sum()) <= dropped

    @cached_property
    def _hashes(self) -> tuple[Int64, Int64, int, Int64]:
        """Int64 of the ids by row, and sorted, the number of samples without an id, and the first id of each row."""
        ids, unnamed, starts = DiskList(np.int64), 0, DiskList(np.int64)
        starts.extend([0])
        for row in range(self._rows):
            samples = self._samples(row)
            named = [hash(ident) for ident, _ in samples if ident is not None]
            unnamed += len(samples) - len(named)
            ids.extend(named)
            starts.extend([len(ids)])
        known = DiskList(np.int64)
        known.extend(ids.values)
        return ids.values, known.sorted(), unnamed, starts.values

    def _of_epoch(self, blend: PackedDataset, epoch: int) -> Int64:
        """Sorted hashes of the ids of the rows of an epoch, each as often as it is drawn."""
        ids, _, _, starts = self._hashes
        items, drawn = blend.epoch_items(epoch, None), DiskList(np.int64)
        for block in blocks(len(blend)):
            for row in items(np.arange(block.start, block.stop)).tolist():
                drawn.extend(ids[starts[row] : starts[row + 1]])
        return drawn.sorted()

    def _samples(self, row: int) -> list[tuple[str | None, Conversation]]:
        """(id, conversation) of the samples of a row."""
        if isinstance(self._data, PlannedDataset):
            return list(zip(self._data.ids(row), self._data.conversations(row), strict=True))
        return [(conversation.id, conversation) for conversation in self._data.pack(row).conversations()]

    def _named(self, hashes: Int64) -> str:
        wanted = set(hashes[:MAX_NAMED].tolist())
        names = {str(ident) for row in range(self._rows) for ident, _ in self._samples(row) if hash(ident) in wanted}
        return ", ".join(sorted(names)) + (", ..." if len(hashes) > MAX_NAMED else "")
