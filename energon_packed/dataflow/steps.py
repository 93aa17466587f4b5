"""`steps_per_epoch`: of a dataset folder, and of a blend that counts repetitions."""

from pathlib import Path

from energon_packed.dataflow.blend import packs_of_epoch
from energon_packed.dataflow.manifests import loaded_splits
from energon_packed.dataflow.trust import check_blend_trusted
from energon_packed.errors import ConfigError, FormatError
from energon_packed.shards import PackingManifest
from energon_packed.shards.steps import steps_of_ranks


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
    place = {"world_size": world_size, "micro_batch_size": micro_batch_size, "num_workers": num_workers}
    if isinstance(path, PackingManifest):
        return steps_of_ranks([(path.packs_in(split), 1)], **place, drop_last=drop_last)
    check_blend_trusted(path)
    blend = loaded_splits(Path(path), split)
    if unknown := [one.path for one in blend if one.packs is None]:
        raise FormatError(
            f"the packs of {unknown[0]} are not known: split.yaml excludes single packs, or an index is missing; run "
            "energon-packed nv-meta"
        )
    counts = [one.packs or 0 for one in blend]
    if any(one.weight is not None for one in blend):
        raise ConfigError(
            f"{path} draws by weight indefinitely, so it has no epoch; count the steps to train for, or use "
            f"PackedDataset, whose epoch has {sum(packs_of_epoch(blend, counts))} packs"
        )
    times = [one.repetitions or 1 for one in blend]
    return steps_of_ranks(list(zip(counts, times, strict=True)), **place, drop_last=drop_last)
