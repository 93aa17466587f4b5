"""Imbalance of training steps: a dataset or a Metadataset and a number of ranks in, slowest rank / mean rank out.

`read_sizes` reads the sizes of a random sample of the packs, and repeats them to the number of packs of an epoch.
`expected_steps` orders them as the loaders do, shuffled and aligned.
"""

from dataclasses import dataclass
from math import ceil
from pathlib import Path

import numpy as np

from energon_packed.encoding import Processor
from energon_packed.errors import ConfigError, EnergonPackedError
from energon_packed.inspection.folder import PackedFolder
from energon_packed.loading.costs.model import CostModel, RowSizes
from energon_packed.loading.datasets.folder_packs import FolderPacks
from energon_packed.loading.datasets.manifests import LoadedSplit, epoch_pack_counts, loaded_splits
from energon_packed.loading.datasets.map_data import MapData
from energon_packed.loading.order import Order
from energon_packed.options import as_integer
from energon_packed.packing.balance import StepImbalance

MAX_PACKS = 50_000
"""Packs whose lengths are read, 45 us each."""
RANKS = (8, 64, 512)
"""Numbers of ranks in a report."""
_MAX_WITH_MEDIA = 500
"""Packs of each dataset whose images are read for the patches of an image."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochSizes:
    """Sizes of the packs of an epoch.

    Attributes:
        sizes: of P packs.
        read: packs that were read; the others have the sizes of a random pack of the same dataset.
        notes: how images count, if packs have images.
    """

    sizes: RowSizes
    read: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedSteps:
    """Steps of an epoch, and their imbalance.

    Attributes:
        packs: packs of an epoch.
        ranks: data-parallel ranks.
        micro_batch_size: packs of a micro batch.
        accumulation: micro batches of a step on each rank.
        steps: optimizer steps; the last step may have fewer packs.
        rest: packs of the last step if it is not full, otherwise 0.
        shuffled, aligned: imbalance of the full steps.
    """

    packs: int
    ranks: int
    micro_batch_size: int
    accumulation: int
    steps: int
    rest: int
    shuffled: StepImbalance
    aligned: StepImbalance


def read_sizes(
    path: str | Path,
    *,
    split: str = "train",
    tokenizer: Path | None = None,
    encoder: Processor | None = None,
    multiple: int = 1,
    max_packs: int = MAX_PACKS,
    seed: int = 0,
) -> EpochSizes:
    """Read the sizes of the packs of an epoch from the recorded lengths.

    The grids of images are not recorded: the headers of the images of some packs are read with the encoder of the
    dataset, and the images of the other packs count with the mean. Without an encoder, images do not count.

    Args:
        path: dataset folder or Metadataset.
        split: to read.
        tokenizer: folder that overrides packing.json, for datasets with images.
        encoder: of all datasets, instead of the encoders of packing.json.
        multiple: each sample is padded to a multiple of it, and of the multiple that the packs were planned with.
        max_packs: packs that are read.
        seed: of the packs that are read.

    Raises:
        FormatError: a dataset is missing or damaged.
        ConfigError: the split has no packs, or no lengths are recorded and there is no encoder.
    """
    splits = loaded_splits(path, split)
    folders = [FolderPacks(member, None) for member in splits]
    counts = epoch_pack_counts(splits, [len(folder.reader) for folder in folders])
    if not (total := sum(counts)):
        raise ConfigError(f"`split` {split} of {path} must have at least 1 pack in an epoch, got 0.")
    rng = np.random.default_rng(seed)
    parts, read, notes = [], 0, []
    encoders: dict[str | None, tuple[Processor | None, str]] = {}
    for member, folder, count in zip(splits, folders, counts, strict=True):
        if not count:
            continue
        limit = max(1, max_packs * count // total)
        # As a permutation of all packs, without an array of them if they are many.
        packs = rng.choice(len(folder.reader), min(limit, len(folder.reader)), replace=False)
        note = ""
        if folder.has_media:
            settings = member.manifest.tokenizer_fingerprint if member.manifest else None
            if settings not in encoders:
                encoders[settings] = (encoder, "") if encoder is not None else _encoder_of(member, tokenizer)
            processor, note = encoders[settings]
            folder = FolderPacks(member, processor)
        sizes, measured = folder.sizes_of(np.sort(packs).tolist(), multiple=multiple, max_with_media=_MAX_WITH_MEDIA)
        read += len(packs)
        parts.append(sizes[rng.permutation(np.resize(np.arange(len(packs)), count))])
        if folder.has_media:
            notes.append(note or measured)
    return EpochSizes(sizes=RowSizes.joined(parts, total), read=read, notes=tuple(dict.fromkeys(filter(None, notes))))


def expected_steps(
    sizes: RowSizes, cost: CostModel, *, ranks: int, micro_batch_size: int = 1, accumulation: int = 1, seed: int = 0
) -> ExpectedSteps:
    """Compute the imbalance of the steps of an epoch in the order of the loaders.

    Args:
        sizes: of the packs of the epoch.
        cost: cost model.
        ranks: data-parallel ranks.
        micro_batch_size: packs of a micro batch.
        accumulation: micro batches of a step on each rank.
        seed: of the order.

    Raises:
        ConfigError: a number is below 1, or the packs do not fill one step.
    """
    order = Order(_Rows(sizes), cost=cost, accumulation=accumulation)
    segment = order.segment(as_integer(ranks, "ranks"), as_integer(micro_batch_size, "micro_batch_size"))
    if len(order) < segment.aligned_width:
        raise ConfigError(
            f"a step has {segment.aligned_width:,} packs ({ranks} ranks x {accumulation} micro batches x "
            f"{micro_batch_size}), but an epoch has {len(order):,}. Use fewer ranks or micro batches."
        )
    shuffled, aligned = order.imbalances(0, seed, segment)
    return ExpectedSteps(
        packs=len(order),
        ranks=ranks,
        micro_batch_size=micro_batch_size,
        accumulation=accumulation,
        steps=ceil(order.steps(segment) / accumulation),
        rest=len(order) % segment.aligned_width,
        shuffled=shuffled,
        aligned=aligned,
    )


def steps_of_ranks(
    path: str | Path, *, encoder: Processor | None = None, max_packs: int = 20_000
) -> tuple[list[ExpectedSteps], tuple[str, ...]]:
    """Compute the steps of the train split for the numbers of ranks in `RANKS`, with the default costs, for a report.

    Returns:
        (steps of each number of ranks that the packs are enough for, notes); empty without lengths or a train split.
    """
    try:
        epoch = read_sizes(path, encoder=encoder, max_packs=max_packs)
    except EnergonPackedError as error:  # for example, a dataset of the Metadataset cannot be read
        return [], (str(error).rstrip("."),)
    ranks = [count for count in RANKS if count <= len(epoch.sizes.tokens)]
    return [expected_steps(epoch.sizes, CostModel(), ranks=count) for count in ranks], epoch.notes


class _Rows(MapData):
    """Data of which only the sizes are known."""

    def __init__(self, sizes: RowSizes) -> None:
        self._sizes = sizes

    def __len__(self) -> int:
        return len(self._sizes.tokens)

    def item(self, number: int) -> int:
        """Return the number."""
        return number

    def item_sizes(self) -> RowSizes:
        """Return the sizes of all rows."""
        return self._sizes


def _encoder_of(split: LoadedSplit, tokenizer: Path | None) -> tuple[Processor | None, str]:
    """Return the encoder of a dataset with images, or the reason why images do not count."""
    encoder, reason = PackedFolder.open(split.path).encoder_or_reason(tokenizer)
    if encoder is None or encoder.vision is None:
        return encoder, f"images do not count: {reason or 'the encoder has no image processor'}"
    return encoder, ""
