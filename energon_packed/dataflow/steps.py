"""`steps_per_epoch`: of a dataset folder, and of a blend that counts repetitions."""

from pathlib import Path
from typing import Any

from energon_packed.dataflow.blend import blended_splits, packs_of_epoch
from energon_packed.errors import ConfigError, FormatError
from energon_packed.shards import PackingManifest
from energon_packed.shards import steps_per_epoch as steps_of_folder
from energon_packed.shards.steps import packs_per_worker, steps_per_rank


def steps_per_epoch(
    path: str | Path | PackingManifest,
    *,
    world_size: int = 1,
    micro_batch_size: int = 1,
    num_workers: int = 0,
    split: str = "train",
    drop_last: bool = False,
) -> list[int]:
    """Micro batches per rank in one epoch of the Energon loader.

    Args:
        path: packed dataset, its manifest, or a Metadataset with repetitions. Without packing.json, packs are counted
            in the indexes.
        world_size: data-parallel ranks.
        micro_batch_size: packs per micro batch.
        num_workers: loader workers per rank.
        split: split to read.
        drop_last: drop the short batch at the end of each worker's slice.

    Returns:
        One number per rank. If they differ, train for the minimum or repeat the data.

    Raises:
        ConfigError: an argument is below its minimum, or a Metadataset that draws by weight, which has no epoch.
        FormatError: there is no dataset.
    """
    place: dict[str, Any] = {
        "world_size": world_size,
        "micro_batch_size": micro_batch_size,
        "num_workers": num_workers,
    }
    if isinstance(path, PackingManifest) or not Path(path).is_file():
        return steps_of_folder(path, split=split, drop_last=drop_last, **place)
    blend = blended_splits(Path(path), split)
    counts = []
    for one in blend:
        steps_of_folder(one.split.path, split=one.split.split, **place)  # refuses what is out of range
        if one.split.packs is None:
            raise FormatError(f"the packs of {one.split.path} are not known; run energon-packed nv-meta")
        counts.append(one.split.packs)
    if any(one.weight is not None for one in blend):
        raise ConfigError(
            f"{path} draws by weight indefinitely, so it has no epoch; count the steps to train for, or use "
            f"PackedDataset, whose epoch has {sum(packs_of_epoch(blend, counts))} packs"
        )
    totals = [0] * (world_size * max(1, num_workers))
    before = 0
    for one, packs in zip(blend, counts, strict=True):
        for worker, count in enumerate(packs_per_worker(packs, len(totals), before)):
            totals[worker] += int(count * one.times)
        before += packs
    return steps_per_rank(totals, world_size, micro_batch_size, drop_last=drop_last)
