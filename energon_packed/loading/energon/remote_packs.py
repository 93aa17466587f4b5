"""Packs in an object store for Energon's datasets, by one request for each pack.

Energon's own reader downloads each tar when it is opened (multi-storage-client loads objects of up to 512 MB into
memory), and larger tars header by header.
"""

from bisect import bisect_right
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.energon.flavors.webdataset.itar_reader import ITarReader, ShardInfosITarReader
from megatron.energon.flavors.webdataset.sample_loader import WebdatasetSampleLoaderDataset
from megatron.energon.flavors.webdataset.structs import FilteredSample
from megatron.energon.source_info import SourceInfo

from energon_packed.shards.reader import ShardReader
from energon_packed.storage import ReadAhead

_AHEAD = 16  # packs that are requested ahead, over all slices of a dataset in a worker


def read_by_ranges(dataset: Any, folders: Mapping[str, Path]) -> None:
    """Replace the readers of tars in an object store, in all datasets that `dataset` wraps.

    Args:
        dataset: dataset of Energon.
        folders: dataset folder by the URL that Energon has for it.
    """
    for inner in getattr(dataset, "datasets", ()):
        read_by_ranges(inner, folders)
    if isinstance(dataset, WebdatasetSampleLoaderDataset):
        dataset.join_readers = [
            RemotePacks(reader, folders[str(reader.base_path)], dataset)
            if type(reader) is ShardInfosITarReader and not reader.base_path.is_local()
            else reader
            for reader in dataset.join_readers
        ]


class RemotePacks(ITarReader[int]):
    """Reader of the packs of a dataset folder, as `ShardInfosITarReader`.

    Energon reads a slice of packs in order, and alternates between slices, so the next packs of each slice are
    requested ahead.

    Args:
        reader: Energon's reader.
        folder: the dataset folder.
        loader: dataset that reads by it.
    """

    def __init__(self, reader: ShardInfosITarReader, folder: Path, loader: WebdatasetSampleLoaderDataset) -> None:
        names = (reader.base_path, reader.tar_filenames, reader.tar_filepaths, reader.part_filter)
        super().__init__(*names, sample_filter=reader.sample_filter)
        self._shards = [shard.name for shard in reader.shard_infos]
        self._packs = ShardReader([folder / name for name in self._shards])
        self._ahead: ReadAhead[int, dict[str, Any]] = ReadAhead(self._packs.__getitem__)
        self._bounds = sorted({edge for offsets in loader.workers_slice_offsets for edge in offsets})
        self._next = max(1, _AHEAD // loader.parallel_slice_iters)

    def __len__(self) -> int:
        return len(self._packs)

    def __str__(self) -> str:
        return f"RemotePacks(len={len(self)}, base_path={self.base_path})"

    def _get_itar_sample_pointer(self, idx: int) -> Any:
        raise NotImplementedError  # only the methods of the base class that are replaced call it

    def __getitem__(self, idx: int) -> FilteredSample | None:
        """Return the parts of a pack, as Energon's readers do; None if split.yaml excludes it."""
        edge = bisect_right(self._bounds, idx)
        stop = self._bounds[edge] if edge < len(self._bounds) else idx + 1
        self._ahead.request(range(idx, min(idx + 1 + self._next, stop)))
        raw = self._ahead.get(idx)
        shard = self._shards[self._packs.locate(idx)[0]]
        key = raw["__key__"]
        if self.sample_filter is not None and not self.sample_filter(f"{shard}/{key}"):
            return None
        parts = {
            name: content
            for name, content in raw.items()
            if not name.startswith("__") and (self.part_filter is None or self.part_filter(name))
        }
        source = SourceInfo(
            dataset_path=self.base_path,
            index=idx,
            shard_name=shard,
            file_names=tuple(f"{key}.{name}" for name in parts),
        )
        return FilteredSample(
            __key__=key, __shard__=shard, __restore_key__=("Webdataset", idx), __sources__=(source,), **parts
        )
