"""PackedDataset: a dataset folder or Metadataset in, packs by index out, each a sequence of EncodedSamples.

    index of the epoch ──► item of all datasets ──► (dataset of the blend, pack in it) ──► tar ──► samples

An epoch of a folder is all its packs. An epoch of a blend is drawn: its indices select from the items of all datasets,
which are numbered dataset by dataset.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
import torch

from energon_packed.arrays import blocks
from energon_packed.encoding import EncodedSample, Processor
from energon_packed.errors import FormatError, RecordError
from energon_packed.files import DiskList, disk_array
from energon_packed.flavors import PackSample
from energon_packed.loading.collation.features import hf_dataset
from energon_packed.loading.costs.model import RowSizes
from energon_packed.loading.datasets.folder_packs import FolderPacks
from energon_packed.loading.datasets.manifests import (
    LoadedSplit,
    apportion,
    drawn,
    epoch_pack_counts,
    least_used,
    loaded_splits,
    path_of_dataset,
    processor_for,
    repeats_packs,
)
from energon_packed.loading.datasets.map_data import MapData
from energon_packed.loading.datasets.trust import check_blend_trusted
from energon_packed.loading.notebook import ShownSamples
from energon_packed.loading.process import encode_pack
from energon_packed.loading.resharding import refuse_dispatch
from energon_packed.loading.sample_errors import remedy_of, sendable
from energon_packed.packing.balance import Int64
from energon_packed.pipeline.output.run_state import digest
from energon_packed.shards.reader import ShardReader
from energon_packed.storage import ReadAhead, is_remote

_AHEAD = 24
"""Packs that a process requests ahead from an object store: three groups of `ReadAhead`."""


class PackedDataset(torch.utils.data.Dataset[Sequence[EncodedSample]], MapData):
    """Map-style dataset over packed shards: `dataset[i]` returns the EncodedSamples of pack i.

        dataset = PackedDataset("out", encoder)
        trainer = transformers.Trainer(model, args, train_dataset=dataset, data_collator=PaddingFreeCollator())

    It does not use Energon's loader. Each process opens the tars itself; the dataset can be pickled, forked and
    indexed in any order. A tar that was packed again, changed or removed in the meantime raises DataChangedError.

    A Metadataset has an epoch of known length. With repetitions, each dataset is read that many times; for a fraction,
    a seeded selection of its packs is read. With weights, the epoch is as long as all datasets together, and each
    dataset has its share of it: small datasets are repeated, large datasets are sampled. `set_epoch` draws again.

    Args:
        path: folder that `energon-packed pack` wrote, `out` or `out/webdataset`, or an Energon Metadataset YAML.
        encoder: the encoder that the data was packed with. None for a PackedTokensSample dataset without images, which
            stores the token ids.
        split: `train`, `val` or `test`.
        check_encoder: refuse an encoder that encodes differently than the encoder of the dataset.
        check_lengths: raise if the length of a sample differs from the recorded length.
        seed: seed of the packs that a Metadataset repeats and samples.
        trust_sample_loader: let Energon, which parses a Metadataset, run the code of its datasets. A folder is read
            without running any code.
        media_root: folders of referenced images that moved, new folder by old folder.

    Raises:
        ConfigError: an empty split, another encoder, or no encoder although one is required; a Metadataset with joins
            or subsets.
        FormatError: `path` is not a packed dataset, or is damaged.

    Examples:
        >>> dataset = PackedDataset("demo-out", encoder)
        >>> len(dataset), len(dataset[0]), sum(map(len, dataset[0]))
        (12, 21, 2046)
    """

    def __init__(
        self,
        path: str | Path,
        encoder: Processor | None = None,
        *,
        split: str = "train",
        check_encoder: bool = True,
        check_lengths: bool = True,
        seed: int = 0,
        trust_sample_loader: bool = False,
        media_root: Mapping[str, str] | None = None,
    ) -> None:
        # First, as opening a Metadataset parses it with Energon, which may run code that it names.
        if not trust_sample_loader:
            check_blend_trusted(path_of_dataset(path))
        self.blend = loaded_splits(path, split, trusted=trust_sample_loader)
        self.repeats = repeats_packs(self.blend)
        self.encoder = processor_for(self.blend, encoder, check=check_encoder)
        self.check_lengths = check_lengths
        self.seed = seed
        self._folders = [FolderPacks(member, self.encoder, media_root) for member in self.blend]
        self._starts = np.cumsum([0, *self.packs])  # first item of each dataset among the items of all datasets
        self._ahead: ReadAhead[int, PackSample] = ReadAhead(self._read)
        is_moved = any(map(is_remote, (media_root or {}).values()))
        self._remote = [is_moved or _is_remote(member) for member in self.blend]
        self.read_ahead = _AHEAD if any(self._remote) else 0
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Draw the packs that a blend repeats and samples in an epoch; the epochs of a folder are all equal.

        Raises:
            ConfigError: accelerate calls it with `dispatch_batches=True`, which would split rows between ranks.
        """
        refuse_dispatch()
        self._items = self.epoch_items(epoch, self.weights)
        self._count = sum(epoch_pack_counts(self.blend, self.packs))

    @property
    def weights(self) -> list[float] | None:
        """Weight of each dataset of a blend by weight; None for a folder, and for a blend by repetitions."""
        weights = [member.weight for member in self.blend if member.weight is not None]
        return weights if len(weights) == len(self.blend) else None

    @property
    def packs(self) -> list[int]:
        """Number of packs in each of the D datasets of the blend."""
        return [len(folder.reader) for folder in self._folders]

    def epoch_items(self, epoch: int, weights: Sequence[float] | None) -> Callable[[Int64], Int64]:
        """Return the function of indices in an epoch to items, both int64 (n,), which `item` reads.

        The indices are dataset by dataset.

        Args:
            epoch: from 0.
            weights: weight of each of the D datasets, instead of the weights of the blend; None if it counts
                repetitions.
        """
        blend, packs, starts = self.blend, self.packs, self._starts
        if weights is not None:
            blend = [replace(member, weight=weight) for member, weight in zip(blend, weights, strict=True)]
        counts = epoch_pack_counts(blend, packs)
        ends = np.cumsum([0, *counts])
        # A key per dataset: adding a dataset to the blend does not change the packs drawn from the others.
        draws = [drawn(packs[member], count, [self.seed, epoch, member]) for member, count in enumerate(counts)]

        return partial(_item_at, starts, ends, draws)

    def redrawn(self, used: Iterable[Int64], count: int, weights: Sequence[float], rng: np.random.Generator) -> Int64:
        """Items of the rest of an epoch whose weights changed in it, int64 (count,), in a file.

        Each dataset continues: a pack is repeated only after all others of its dataset were used equally often.

        Args:
            used: blocks of the items that the epoch has used, int64 (n,).
            count: items of the rest.
            weights: new weight of each of the D datasets.
            rng: chooses among packs that were used equally often.
        """
        bounds, items = self._starts.tolist(), DiskList(np.int64)
        times = disk_array(None, bounds[-1], np.int64)
        for block in used:
            np.add.at(times, block, 1)
        for start, stop, of_member in zip(bounds[:-1], bounds[1:], apportion(list(weights), count), strict=True):
            for chosen in least_used(times[start:stop], of_member, rng):
                items.extend(start + chosen)
        return items.values

    def request(self, numbers: Iterable[int]) -> None:
        """Start to read items of datasets in an object store, which `item` and `pack` return later.

        `read_ahead` is the number of items that are worth a request; 0 for local folders, whose items are not read.
        """
        if self.read_ahead:
            is_remote_data = all(self._remote)  # the usual case, without a search for each item
            self._ahead.request(
                number for number in numbers if is_remote_data or self._remote[self._locate(number)[0]]
            )

    def item(self, number: int) -> Sequence[EncodedSample]:
        """Return the encoded samples of an item: a pack by its index over all datasets of the blend.

        Raises:
            FormatError: the shard is damaged, or a length differs from the recorded length.
        """
        member, pack = self._locate(number)
        folder = self._folders[member]
        source = folder.source
        try:
            return encode_pack(self._ahead.get(number), self.encoder, check_lengths=self.check_lengths, source=source)
        except (FormatError, RecordError) as error:
            folder.reader.check_unchanged(pack)  # an object may have been replaced since its last check
            raise error.at(folder.describe(pack), remedy_of(error, source.dataset)) from error
        except Exception as error:
            if (sent := sendable(error)) is error:
                raise
            raise sent from error

    @property
    def reader(self) -> ShardReader:
        """Access to the tars of the first folder."""
        return self._folders[0].reader

    def __len__(self) -> int:
        return self._count

    def __getitems__(self, indices: Sequence[int]) -> list[Sequence[EncodedSample]]:
        """Return the packs of a batch, which are requested together; torch's DataLoader calls it."""
        items = self._numbers(indices)
        self.request(items)
        return [self.item(item) for item in items]

    def __getitem__(self, index: int) -> Sequence[EncodedSample]:
        """Return the encoded samples of one pack, which a notebook shows; negative indices count from the end.

        Raises:
            IndexError: the index is out of range.
            TypeError: the index is not an integer.
            FormatError: the shard is damaged, or a length differs from the recorded length.
        """
        return ShownSamples(self.item(self._numbers([index])[0]))

    def sample(self, index: int) -> PackSample:
        """Return one pack as its flavor, not encoded. Raises IndexError if the index is out of range."""
        return self.pack(self._numbers([index])[0])

    def pack(self, number: int) -> PackSample:
        """Return an item as its flavor, not encoded: a pack by its index over all datasets of the blend."""
        return self._ahead.get(number)

    def fingerprint(self) -> str:
        """Digest of the shards and their repetitions, for loader states; "" if a folder has no packing.json.

        It leaves out the weights of a blend, which may change in a run.
        """
        shards = []
        for member in self.blend:
            if member.manifest is None:  # without recorded hashes, comparing would need all bytes of the tars
                return ""
            split = None if member.split == "train" else member.split
            shards.append([split, member.repetitions, [shard.sha256 for shard in member.manifest.shards]])
        return digest(self.seed, shards)[:16]

    def to_hf(self) -> Any:
        """Return the packs as a `datasets.Dataset`, for trainers that accept nothing else; see `hf_dataset`."""
        return hf_dataset(self)

    @property
    def lengths(self) -> Int64:
        """Tokens of each pack, int64 (N,); the first use reads the recorded lengths of every pack, and no image."""
        return self._of_epoch(self._item_lengths)

    def row_sizes(self) -> RowSizes:
        """Sizes that determine the cost of each pack of the epoch."""
        return self.item_sizes().mapped(self._of_epoch)

    def item_sizes(self) -> RowSizes:
        """Sizes that determine the cost of each item; the first use reads the recorded lengths and some images."""
        return self._item_sizes

    # An array in a file has a descriptor, of which a process may have 1,024: those of a dataset are copied and closed.
    @cached_property
    def _item_lengths(self) -> Int64:
        """Tokens of each item, int64 (n,)."""
        lengths = disk_array(None, int(self._starts[-1]), np.int64)
        for folder, (start, stop) in zip(self._folders, pairwise(self._starts.tolist()), strict=True):
            lengths[start:stop] = folder.lengths()
        return lengths

    @cached_property
    def _item_sizes(self) -> RowSizes:
        if len(self._folders) == 1:
            return self._folders[0].sizes()
        return RowSizes.joined((folder.sizes() for folder in self._folders), int(self._starts[-1]))

    def _of_epoch(self, values: Int64) -> Int64:
        """Values of the items of the epoch, int64 (N,), from those of all items."""
        found = disk_array(None, len(self), np.int64)
        for block in blocks(len(self)):
            found[block] = values[self._items(np.arange(block.start, block.stop))]
        return found

    def _numbers(self, indices: Sequence[int]) -> list[int]:
        """Items at indices of the epoch.

        Raises:
            IndexError: an index is out of range.
            TypeError: an index is not an integer.
        """
        for index in indices:
            if not isinstance(index, SupportsIndex):  # numpy would round a float down
                raise TypeError(f"A pack index must be an integer, got {index!r}. Pass the index of a single pack.")
            if not -len(self) <= index < len(self):
                raise IndexError(f"Pack index {index} is out of range for a dataset of {len(self)} packs.")
        numbers: list[int] = self._items(np.array(indices, dtype=np.int64) % max(len(self), 1)).tolist()
        return numbers

    def _locate(self, number: int) -> tuple[int, int]:
        """(index of the dataset, index of the pack in it) of an item."""
        member = int(np.searchsorted(self._starts, number, side="right")) - 1
        return member, number - int(self._starts[member])

    def _read(self, numbers: Sequence[int]) -> list[PackSample]:
        by_member: dict[int, list[int]] = {}
        places = [self._locate(number) for number in numbers]
        for member, pack in places:
            by_member.setdefault(member, []).append(pack)
        samples = {member: iter(self._folders[member].samples(packs)) for member, packs in by_member.items()}
        return [next(samples[member]) for member, _ in places]


def _item_at(starts: Int64, ends: Int64, draws: Sequence[Callable[[Int64], Int64]], indices: Int64) -> Int64:
    """Items at indices in an epoch, int64 (n,).

    Args:
        starts: int64 (D + 1,), first item of each dataset.
        ends: int64 (D + 1,), first index of each dataset.
        draws: of each dataset, positions to packs.
        indices: int64 (n,).
    """
    members, items = np.searchsorted(ends, indices, side="right") - 1, np.empty_like(indices)
    for member in np.unique(members).tolist():
        of_member = members == member
        items[of_member] = starts[member] + draws[member](indices[of_member] - ends[member])
    return items


def _is_remote(split: LoadedSplit) -> bool:
    """Return whether packs, or the images that they refer to, are in an object store."""
    if is_remote(split.path):
        return True
    if split.manifest is None or split.manifest.media != "reference":
        return False
    return any(
        is_remote(path) for source in split.manifest.sources for path in [*source.path, source.image_root or ""]
    )
