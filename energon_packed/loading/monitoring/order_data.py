"""A dataset in, the ids of its samples out; an order log is compared with them: lost, repeated and unknown samples."""

from array import array
from collections.abc import Container, Iterable, Iterator
from functools import cached_property
from pathlib import Path

import numpy as np

from energon_packed.encoding import StoredTokens
from energon_packed.loading.dataflow.config import DataflowConfig, is_dataflow_config
from energon_packed.loading.dataflow.raw_records import PlannedDataset, plan_in_memory
from energon_packed.loading.dataset import PackedDataset
from energon_packed.loading.monitoring.order_epoch import MAX_NAMED, Epoch, Int64
from energon_packed.records import Conversation


class LoggedData:
    """The data of an order log, by the ids of its samples: 8 bytes for each sample.

    Only ids are compared: the folder of a dataset may have another name than during training. Samples without an id
    are compared by their number.

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
            self._rows = len(self._data)
        else:
            self._data = PackedDataset(path, StoredTokens(), split=split, check_encoder=False)
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
        ids, unnamed, _ = self._hashes
        used, counts = np.unique(epoch.hashes, return_counts=True)
        if foreign := len(np.setdiff1d(used, ids)):
            problems.append(f"{scope}: {foreign} samples are not in {self.path}. Pass the data of the run.")
        blend = self._data if isinstance(self._data, PackedDataset) and self._data.repeats else None
        by_weight = blend is not None and blend.weights is not None
        least, most = epoch.passes
        if by_weight or (epoch.repeats and not epoch.has_order) or (blend is not None and most > 1):
            return problems, 0
        rows = np.arange(self._rows if blend is None else len(blend))
        rows = rows if blend is None else blend.epoch_items(epoch.number, None)(rows)
        known, expected = np.unique(ids if blend is None else self._of_rows(rows), return_counts=True)
        times = np.zeros(len(known), dtype=np.int64)
        _, at, of_used = np.intersect1d(known, used, return_indices=True)
        times[at] = counts[of_used]
        missing = np.maximum(expected * least - times, 0)
        dropped = epoch.totals["dropped"] if epoch.used_packs is None else len(rows) - epoch.used_packs
        is_dropped = self._are_items(known, missing, dropped)
        if len(lost := known[missing > 0]) and not is_dropped:
            problems.append(f"{scope}: {len(lost)} samples of {self.path} are lost: {self._named(lost)}")
        if len(twice := known[times > expected * most]):
            problems.append(f"{scope}: {len(twice)} samples are used too often: {self._named(twice)}")
        fewest = 0 if dropped else unnamed * least
        if blend is None and not fewest <= epoch.unnamed <= unnamed * most:
            problems.append(f"{scope}: {epoch.unnamed} samples without an id are used, and {self.path} has {unnamed}.")
        return problems, int(missing.sum()) if is_dropped else 0

    def _are_items(self, known: Int64, missing: Int64, dropped: int) -> bool:
        """Return whether at most `dropped` items contain all missing samples, each item a sample or a whole row.

        Args:
            known: int64 `(n,)` sorted hashes of ids.
            missing: int64 `(n,)` uses that are missing.
            dropped: number of items.
        """
        ids, _, starts = self._hashes
        if missing.sum() <= dropped or not dropped:
            return bool(missing.sum() <= dropped)
        at = np.minimum(np.searchsorted(known, ids), len(known) - 1)
        of_id = np.where(known[at] == ids, missing[at], 0)
        begins = starts[:-1][np.diff(starts) > 0]
        of_row = np.maximum.reduceat(of_id, begins)
        is_whole = bool((of_row == np.minimum.reduceat(of_id, begins)).all())
        return is_whole and int(of_row.sum()) <= dropped

    @cached_property
    def _hashes(self) -> tuple[Int64, int, Int64]:
        """Int64 of the ids, the number of samples without an id, and the index of the first id of each row."""
        ids, unnamed, starts = array("q"), 0, array("q", [0])
        for row in range(self._rows):
            samples = self._samples(row)
            named = [hash(ident) for ident, _ in samples if ident is not None]
            unnamed += len(samples) - len(named)
            ids.extend(named)
            starts.append(len(ids))
        return np.array(ids, dtype=np.int64), unnamed, np.array(starts, dtype=np.int64)

    def _of_rows(self, rows: Iterable[int]) -> Int64:
        """Int64 of the ids of rows, each as often as it is drawn."""
        ids, _, starts = self._hashes
        return np.concatenate([ids[starts[row] : starts[row + 1]] for row in rows])

    def _samples(self, row: int) -> list[tuple[str | None, Conversation]]:
        """(id, conversation) of the samples of a row."""
        if isinstance(self._data, PlannedDataset):
            return list(zip(self._data.ids(row), self._data.conversations(row), strict=True))
        return [(conversation.id, conversation) for conversation in self._data.pack(row).conversations()]

    def _named(self, hashes: Int64) -> str:
        wanted = set(hashes[:MAX_NAMED].tolist())
        names = {str(ident) for row in range(self._rows) for ident, _ in self._samples(row) if hash(ident) in wanted}
        return ", ".join(sorted(names)) + (", ..." if len(hashes) > MAX_NAMED else "")
