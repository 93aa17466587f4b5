"""Packs for Energon's datasets, each by one read of its bytes: ShardReader in place of Energon's readers.

Energon's own reader (all releases until 7.4) reads a local tar header by header (three times the CPU time), and
downloads each tar of an object store when it is opened (multi-storage-client loads objects of up to 512 MB into
memory), and larger tars header by header. `BaseWebdatasetFactory.build` makes it, without an argument for another
reader, so the attribute `join_readers` of the finished datasets is set.
`test_energon_reads_a_pack_by_more_than_one_read` fails if Energon no longer needs it.
"""

from bisect import bisect_right
from typing import Any

from megatron.energon.flavors.webdataset.itar_reader import ITarReader, ShardInfosITarReader
from megatron.energon.flavors.webdataset.sample_loader import WebdatasetSampleLoaderDataset
from megatron.energon.flavors.webdataset.structs import FilteredSample
from megatron.energon.source_info import SourceInfo

from energon_packed.libraries import ENERGON, private
from energon_packed.loading.datasets.manifests import OpenedSplits
from energon_packed.shards.reader import ShardReader
from energon_packed.storage import ReadAhead

_AHEAD = 16  # packs of an object store that are requested ahead, over all slices of a dataset in a worker


def read_whole_packs(dataset: Any, opened: OpenedSplits) -> None:
    """Replace the readers of packs in all datasets that `dataset` wraps.

    Args:
        dataset: dataset of Energon.
        opened: the dataset folders; readers of other folders stay.

    Raises:
        FormatError: a `.tar.idx` is missing, or does not match its tar.
    """
    for inner in getattr(dataset, "datasets", ()):
        read_whole_packs(inner, opened)
    if isinstance(dataset, WebdatasetSampleLoaderDataset):
        readers = private(dataset, "join_readers", ENERGON)
        dataset.join_readers = [_replaced(reader, opened, dataset) for reader in readers]


def _replaced(reader: Any, opened: OpenedSplits, loader: WebdatasetSampleLoaderDataset) -> Any:
    if type(reader) is not ShardInfosITarReader:
        return reader
    shards = [shard.name for shard in reader.shard_infos]
    packs = opened.reader(str(reader.base_path), shards)
    if packs is None:
        return reader
    return WholePacks(reader, shards, packs, loader)


class WholePacks(ITarReader[int]):
    """Reader of the packs of a dataset folder, as `ShardInfosITarReader`.

    Energon reads a slice of packs in order, and alternates between slices, so the next packs of each slice are
    requested ahead from an object store.

    Args:
        reader: Energon's reader.
        shards: names of its tars.
        packs: reader of the same packs.
        loader: dataset that reads by it.
    """

    def __init__(
        self,
        reader: ShardInfosITarReader,
        shards: list[str],
        packs: ShardReader,
        loader: WebdatasetSampleLoaderDataset,
    ) -> None:
        names = (reader.base_path, reader.tar_filenames, reader.tar_filepaths, reader.part_filter)
        super().__init__(*names, sample_filter=reader.sample_filter)
        self._shards = shards
        self._packs = packs
        self._is_read: dict[str, bool] = {}  # results of `part_filter`
        self._ahead: ReadAhead[int, dict[str, Any]] | None = None
        if not reader.base_path.is_local():
            self._bounds = sorted({edge for offsets in loader.workers_slice_offsets for edge in offsets})
            self._next = max(1, _AHEAD // loader.parallel_slice_iters)
            self._ahead = ReadAhead(packs.packs, group=max(1, self._next // 2))

    def __len__(self) -> int:
        return len(self._packs)

    def __str__(self) -> str:
        return f"WholePacks(len={len(self)}, base_path={self.base_path})"

    def _get_itar_sample_pointer(self, idx: int) -> Any:
        raise NotImplementedError  # only the methods of the base class that are replaced call it

    def __getitem__(self, idx: int) -> FilteredSample | None:
        """Return the parts of a pack, as Energon's readers do; None if split.yaml excludes it."""
        raw = self._packs[idx] if self._ahead is None else self._requested(self._ahead, idx)
        shard = self._shards[self._packs.locate(idx)[0]]
        key = raw["__key__"]
        if self.sample_filter is not None and not self.sample_filter(f"{shard}/{key}"):
            return None
        parts = {name: content for name, content in raw.items() if self._reads(name)}
        source = SourceInfo(
            dataset_path=self.base_path,
            index=idx,
            shard_name=shard,
            file_names=tuple([f"{key}.{name}" for name in parts]),
        )
        return FilteredSample(
            __key__=key, __shard__=shard, __restore_key__=("Webdataset", idx), __sources__=(source,), **parts
        )

    def _reads(self, name: str) -> bool:
        """Return whether a key of raw parts is the name of a part that the flavor reads."""
        if (known := self._is_read.get(name)) is None:
            known = not name.startswith("__") and (self.part_filter is None or self.part_filter(name))
            self._is_read[name] = known
        return known

    def _requested(self, ahead: ReadAhead[int, dict[str, Any]], idx: int) -> dict[str, Any]:
        """Return a pack, and request the next packs of its slice."""
        edge = bisect_right(self._bounds, idx)
        stop = self._bounds[edge] if edge < len(self._bounds) else idx + 1
        ahead.request(range(idx, min(idx + 1 + self._next, stop)))
        return ahead.get(idx)
