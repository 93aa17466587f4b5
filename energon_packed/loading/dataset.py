"""PackedDataset: a dataset folder or Metadataset in, packs by index out, each a sequence of EncodedSamples.

`BalancedSampler` orders the indices so that all ranks process packs of similar cost; for trainers that use a sampler.

    index of the epoch ──► item of all datasets ──► (dataset of the blend, pack in it) ──► tar ──► samples

An epoch of a folder is all its packs. An epoch of a blend is drawn: its indices select from the items of all datasets,
which are numbered dataset by dataset.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from energon_packed.arrays import blocks
from energon_packed.encoding import EncodedSample, Processor, SampleSource
from energon_packed.encoding.audio.audio_file import resampled_length
from energon_packed.encoding.vision.media import measure_media
from energon_packed.errors import ConfigError, FormatError, RecordError
from energon_packed.files import DiskList, disk_array
from energon_packed.flavors import PackSample, load_pack
from energon_packed.formats import Codec, codec_for, codec_of
from energon_packed.formats.audios import is_audio_part
from energon_packed.formats.references import MEDIA_PART, emptied, located_names
from energon_packed.formats.videos import is_video_part
from energon_packed.loading.collation.features import hf_dataset
from energon_packed.loading.costs.model import Balance, RowSizes, cost_model
from energon_packed.loading.epoch_end import EpochEnd, check_epoch_end, check_rest
from energon_packed.loading.manifests import (
    LoadedSplit,
    apportion,
    digests_of,
    drawn,
    epoch_pack_counts,
    least_used,
    loaded_splits,
    path_of_dataset,
    processor_for,
    repeats_packs,
)
from energon_packed.loading.map_data import IndexedData, MapData
from energon_packed.loading.notebook import ShownSamples
from energon_packed.loading.order import Order
from energon_packed.loading.permutation import Permutation
from energon_packed.loading.process import encode_pack
from energon_packed.loading.ranks import resolve_rank
from energon_packed.loading.recorded_lengths import PackSums, recorded_sums
from energon_packed.loading.resharding import refuse_dispatch
from energon_packed.loading.sample_errors import remedy_of, sendable
from energon_packed.loading.trust import check_blend_trusted
from energon_packed.options import as_integer, optional_integer
from energon_packed.packing.balance import Imbalance, Int64
from energon_packed.pipeline.run_state import digest
from energon_packed.shards.nv_meta import shards_in_split
from energon_packed.shards.reader import ShardReader
from energon_packed.storage import ReadAhead, is_remote

_log = logging.getLogger(__name__)
_MAX_WITH_MEDIA = 20_000
"""Packs of a dataset whose images are read for their costs: more would need minutes when training starts."""
_TOGETHER = 4096
"""Indices that a sampler computes together."""
_AHEAD = 16
"""Packs that a process requests ahead from an object store: at 20 ms for each request, 16 threads read 800 packs/s."""


class BalancedSampler(torch.utils.data.Sampler[int]):
    """Distributed sampler that assigns packs of similar compute cost to all ranks in each step.

        sampler = BalancedSampler(dataset, batch_size=2)            # rank and world size from torch.distributed
        loader = DataLoader(dataset, batch_size=2, sampler=sampler, collate_fn=PaddingFreeCollator())
        print(sampler.imbalance)                                    # imbalance 1.412 -> 1.007

    `CostModel` estimates the cost from the tokens of a pack, the squared lengths of its samples, and its images. The
    order depends only on seed and epoch, so a loader resumes by skipping used indices, as StatefulDataLoader does.

    Args:
        dataset: PackedDataset or PlannedDataset.
        num_replicas, rank: world size and rank; by default from torch.distributed. `rank="all"` yields the order of
            all ranks, batch by batch, for accelerate and the Trainer, which assign batches to ranks.
        batch_size: packs of a step on a rank.
        balance: a CostModel, `attention` for its default constants, or `tokens`.
        accumulation: steps whose gradients the trainer accumulates, which are aligned together.
        shuffle, seed: draw a new seeded order every epoch; call `set_epoch`.
        epoch_end: the packs after the last full step. `repeat` reads the first packs again, with targets, because a
            sampler returns only indices: all ranks have the same number of packs, and every pack is read at least
            once. `drop` leaves them out, with a warning; `error` raises.

    Raises:
        ConfigError: `balance` or `epoch_end` is unknown, `batch_size` or `num_replicas` is below 1, the dataset has no
            `row_sizes()`, or `epoch_end` is `error` and the packs do not fill all steps.

    Examples:
        >>> dataset = PackedDataset("demo-out", encoder)
        >>> sampler = BalancedSampler(dataset, num_replicas=2, rank=0, batch_size=2)
        >>> len(sampler)
        6
    """

    def __init__(
        self,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | Literal["all"] | None = None,
        *,
        batch_size: int = 1,
        balance: Balance = "attention",
        accumulation: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        epoch_end: EpochEnd = "repeat",
    ) -> None:
        cost = cost_model(balance)
        if rank == "all":
            self.rank: int | None = None
            self.ranks = optional_integer(num_replicas, "num_replicas") or resolve_rank(None, None)[1]
        else:
            self.rank, self.ranks = resolve_rank(rank, num_replicas)
        self.rows, self.seed, self.epoch = as_integer(batch_size, "batch_size"), seed, 0
        check_epoch_end(epoch_end)
        check_rest(epoch_end, len(dataset) % (self.ranks * self.rows), len(dataset), warns=not self.rank)
        self._drops = epoch_end == "drop"
        # By index in the present epoch, which a sampler must return: a blend has other packs in each epoch.
        self.order = Order(IndexedData(dataset), shuffle=shuffle, cost=cost, accumulation=accumulation)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch to order, as `DistributedSampler.set_epoch`."""
        self.epoch = epoch

    @property
    def imbalance(self) -> Imbalance:
        """Slowest rank / mean rank of the current epoch, before and after balancing."""
        segment = self.order.segment(self.ranks, self.rows)
        shuffled, aligned = self.order.imbalances(self.epoch, self.seed, segment)
        return Imbalance(before=shuffled.mean, after=aligned.mean)

    def __iter__(self) -> Iterator[int]:
        ranks, width = self.ranks, self.ranks * self.rows
        epoch, size, segments = self.epoch, len(self.order), [self.order.segment(ranks, self.rows)]
        full = size // width * width  # items of full steps
        together = max(1, _TOGETHER // width) * width
        for start in range(0, full, together):
            part = self.order.items(range(start, min(start + together, full)), epoch, self.seed, segments)
            steps = part.reshape(-1, self.rows, ranks)  # rank r has every `ranks`-th item of a step
            of_rank = steps.transpose(0, 2, 1) if self.rank is None else steps[:, :, self.rank]
            yield from of_rank.reshape(-1).tolist()
        places = [*range(full, size)] if not self._drops else []
        if self.rank is not None:
            # As DistributedSampler, fill the last step with the first packs: ranks with fewer steps would hang the
            # others.
            places += [i % size for i in range(-len(places) % ranks)]
            places = places[self.rank :: ranks]
        yield from self.order.numbers(places, epoch, self.seed, segments)

    def __len__(self) -> int:
        full, rest = divmod(len(self.order), self.ranks * self.rows)
        rest = 0 if self._drops else rest
        if self.rank is None:
            return full * self.ranks * self.rows + rest
        return full * self.rows + -(-rest // self.ranks)


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
            self._ahead.request(number for number in numbers if self._remote[self._locate(number)[0]])

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
        """
        for index in indices:
            if not -len(self) <= index < len(self):
                raise IndexError(f"Pack index {index} is out of range for a dataset of {len(self)} packs.")
        numbers: list[int] = self._items(np.array(indices, dtype=np.int64) % max(len(self), 1)).tolist()
        return numbers

    def _locate(self, number: int) -> tuple[int, int]:
        """(index of the dataset, index of the pack in it) of an item."""
        member = int(np.searchsorted(self._starts, number, side="right")) - 1
        return member, number - int(self._starts[member])

    def _read(self, number: int) -> PackSample:
        member, pack = self._locate(number)
        return self._folders[member].sample(pack)


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


def _is_large(name: str) -> bool:
    """Whether a part is an audio file, a video file or a frame of it."""
    return is_video_part(name) or is_audio_part(name)


def _some_with_media(media: Int64, most: int) -> tuple[Int64, int]:
    """Choose packs with media.

    Args:
        media: int64 (P,), media of each pack.
        most: packs to choose.

    Returns:
        (int64 (n,), the same choice in each process, ascending; packs with media).
    """
    count = sum(int(np.count_nonzero(media[block])) for block in blocks(len(media)))
    wanted = np.sort(Permutation(count, [0])(np.arange(min(count, most))))  # of the packs with media
    chosen, before = [wanted[:0]], 0
    for block in blocks(len(media)):
        own = np.flatnonzero(media[block]) + block.start
        first, last = np.searchsorted(wanted, [before, before + len(own)])
        chosen.append(own[wanted[first:last] - before])
        before += len(own)
    return np.concatenate(chosen), count


class _NotLarge:
    """Names of all other parts of a pack."""

    def __contains__(self, name: object) -> bool:
        return not _is_large(str(name))


class FolderPacks:
    """The packs of a dataset folder, by index.

    Args:
        split: of the folder.
        encoder: computes patches of images, and lengths that are not recorded; None if neither is needed.
        media_root: as for PackedDataset.

    Attributes:
        reader: access to the tars.
        source: of the samples.
    """

    def __init__(
        self, split: LoadedSplit, encoder: Processor | None, media_root: Mapping[str, str] | None = None
    ) -> None:
        tars = shards_in_split(split.listed, split.split)
        self.reader = ShardReader(tars, digests_of(split), media_root, found=split.found)
        self.source = SampleSource(str(split.path), dict(split.subflavors))
        self._split, self._manifest = split, split.manifest
        self._encoder = encoder

    def sample(self, pack: int) -> PackSample:
        """The samples of a pack, not encoded."""
        return load_pack(self._codec, self.reader[pack])

    def describe(self, pack: int) -> str:
        """Tar and index of a pack, for error messages."""
        shard, _, _ = self.reader.locate(pack)
        return f"{self.reader.tars[shard]}, pack {pack} of its split"

    def lengths(self) -> Int64:
        """Tokens of each pack, int64 (P,)."""
        return self._sums(range(len(self.reader)), 1).tokens

    def sizes(self) -> RowSizes:
        """Sizes that determine the cost of each pack."""
        sizes, note = self.sizes_of(range(len(self.reader)), max_with_media=_MAX_WITH_MEDIA)
        if note:
            _log.info("%s: %s", self.source.dataset, note)
        return sizes

    def sizes_of(self, packs: Sequence[int], *, max_with_media: int, multiple: int = 1) -> tuple[RowSizes, str]:
        """Compute sizes of packs from their lengths, with the padding that they were planned with, and their images.

        Args:
            packs: P indices, ascending.
            max_with_media: packs whose images are read. If more packs have images, a seeded selection of this many is
                read, and each image of the others counts with the mean.
            multiple: each sample is padded to a multiple of it, too.

        Returns:
            (sizes, a note if only some images were read).
        """
        padded = int(np.lcm(multiple, 1 if self._manifest is None else self._manifest.pad_multiple))
        tokens, squares, media = self._sums(packs, padded)
        if not self._counts_patches:
            none = np.broadcast_to(np.zeros((), dtype=np.int64), len(packs))
            return RowSizes(tokens=tokens, squares=squares, patches=none, patch_squares=none), ""
        patches, patch_squares = (disk_array(None, len(packs), np.int64) for _ in range(2))
        chosen, count = np.arange(min(len(packs), max_with_media)), 0
        if len(packs) > max_with_media:
            media = self._media(packs) if media is None else media
            chosen, count = _some_with_media(media, max_with_media)
        for row in chosen.tolist():
            own = np.array(self.patches(packs[row]), dtype=np.float64)
            patches[row], patch_squares[row] = own.sum(), (own**2).sum()
        sizes = RowSizes(tokens=tokens, squares=squares, patches=patches, patch_squares=patch_squares)
        if media is None or len(chosen) >= count:
            return sizes, ""
        for column in (patches, patch_squares):
            exact = column[chosen]
            for block in blocks(len(column)):
                column[block] = (media[block] * (exact.sum() / media[chosen].sum())).round()
            column[chosen] = exact
        return sizes, f"images of {len(chosen):,} of {count:,} packs were read; others count with the mean"

    def _sums(self, packs: Sequence[int], multiple: int) -> PackSums:
        """Sums over the samples of P packs: of all packs from lengths.parquet, if it has them, otherwise from tars."""
        if len(packs) == len(self.reader) and (recorded := recorded_sums(self._split, self.reader, multiple)):
            return recorded
        tokens, squares = (disk_array(None, len(packs), np.int64) for _ in range(2))
        for row, pack in enumerate(packs):
            padded = -(-np.array(self.sample_lengths(pack), dtype=np.int64) // multiple) * multiple
            tokens[row], squares[row] = padded.sum(), (padded**2).sum()
        return PackSums(tokens, squares, None)

    def _media(self, packs: Sequence[int]) -> Int64:
        """Number of media of each of P packs, int64 (P,)."""
        media = disk_array(None, len(packs), np.int64)
        for row, pack in enumerate(packs):
            media[row] = self.num_media(pack)
        return media

    @property
    def _counts_patches(self) -> bool:
        """Whether packs may have patches, and the encoder can count them."""
        encoder = self._encoder
        return self.has_media and encoder is not None and not (encoder.vision is None and encoder.audio is None)

    @property
    def has_media(self) -> bool:
        """Whether packs may have images, videos or audio."""
        m = self._manifest
        return m is None or bool(m.images or m.videos or m.audios)

    @cached_property
    def _codec(self) -> Codec:
        return codec_for(self._manifest.sample_class) if self._manifest else codec_of(self.reader[0])

    def sample_lengths(self, pack: int) -> list[int]:
        """Tokens of each sample of a pack: the recorded lengths, else measured.

        Raises:
            ConfigError: no lengths are recorded, and there is no encoder.
        """
        # Only the member with the lengths is read, and no image.
        lengths = self._codec.lengths(self.reader.part(pack, self._codec.lengths_part))
        if None not in lengths:
            return [length for length in lengths if length is not None]
        if self._encoder is None:
            raise ConfigError(f"{self.source.dataset} records no lengths, so it needs an encoder. Pass `tokenizer`.")
        return [self._encoder.length(conversation) for conversation in self.sample(pack).conversations()]

    def num_media(self, pack: int) -> int:
        """Number of images, videos, stored frames and audio files of a pack, from the names of its members."""
        raw: dict[str, Any] = {}
        names = set()
        for member, content in self.reader.members(pack, only=(MEDIA_PART,)):
            names.add(member.part)
            if member.part == MEDIA_PART:
                raw[member.part] = content
        names |= located_names(raw)
        return sum(_is_large(name) or (name.startswith("img") and not name.endswith(".npy")) for name in names)

    def patches(self, pack: int) -> list[int]:
        """Patches of each image of a pack, of each temporal patch of its videos, and positions of each audio file."""
        if self._encoder is None or not self._counts_patches:
            return []
        vision, audio = self._encoder.vision, self._encoder.audio
        # Selected frames and clips are in the json: video and audio files, larger than all the rest, are not read.
        raw = emptied(self.reader.parts(pack, only=_NotLarge()), _is_large)
        conversations = load_pack(self._codec, raw).conversations()
        clips = [file.clip for conversation in conversations for file in conversation.audios]
        heard = (
            []
            if audio is None
            else [audio.positions(resampled_length(clip.samples, clip.rate, audio.rate)) for clip in clips if clip]
        )
        if vision is None:
            return heard
        conversations = [c for c in conversations if c.images or c.videos]
        media = [measure_media(vision, conversation) for conversation in conversations]
        # An image token represents merge_size x merge_size patches.
        patches = [run.length * vision.merge_size**2 for size in media for run in size.runs if not run.is_video]
        if vision.video_token is not None:  # otherwise the frames of a video are images
            for steps, height, width in [vision.video_grid(frames) for size in media for frames in size.frames]:
                patches += [height * width] * steps
        return patches + heard
