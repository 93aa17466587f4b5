"""PackedDataset: finished shards as a map-style dataset, for samplers, epochs and stock trainers.

BalancedSampler: the aligned order of training for loaders that take a sampler.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from energon_packed.encoding import EncodedSample, Processor, SampleSource
from energon_packed.encoding.vision.media import measure_media
from energon_packed.errors import ConfigError, FormatError, RecordError
from energon_packed.flavors import PackSample, load_pack
from energon_packed.formats import Codec, codec_for, codec_of
from energon_packed.loading.distributors.datasets import Balance, check_balance
from energon_packed.loading.failures import verify_hint
from energon_packed.loading.features import hf_dataset
from energon_packed.loading.manifests import (
    LoadedSplit,
    apportion,
    digests_of,
    drawn,
    epoch_pack_counts,
    least_used,
    loaded_splits,
    processor_for,
)
from energon_packed.loading.order import Order, check_sizes
from energon_packed.loading.process import encode_pack
from energon_packed.loading.ranks import refuse_dispatch, resolve_rank
from energon_packed.loading.trust import check_blend_trusted
from energon_packed.packing.balance import CostModel, Imbalance, RowSizes
from energon_packed.pipeline.run_state import digest
from energon_packed.shards.nv_meta import shards_in_split
from energon_packed.shards.reader import ShardReader


class BalancedSampler(torch.utils.data.Sampler[int]):
    """Distributed sampler that gives all ranks packs of similar compute cost in each step.

        sampler = BalancedSampler(dataset, batch_size=2)            # rank and world size from torch.distributed
        loader = DataLoader(dataset, batch_size=2, sampler=sampler, collate_fn=PaddingFreeCollator())
        print(sampler.imbalance)                                    # imbalance 1.412 -> 1.007

    The cost of a pack is `CostModel`: its tokens, the squared lengths of its samples, and its patches. The order
    depends on seed and epoch alone, so a loader resumes by skipping what was used, as StatefulDataLoader does.

    Args:
        dataset: PackedDataset, or what `plan_in_memory` returns.
        num_replicas, rank: data-parallel place; by default from torch.distributed. `rank="all"` gives the order of
            all ranks, batch by batch, for accelerate and the Trainer, which assign batches to ranks.
        batch_size: packs of one step on one rank.
        balance: `attention`.
        cost: of a pack.
        shuffle, seed: a new order every epoch; call `set_epoch`.
        drop_last: drop the packs after the last full step; False repeats some, so that all ranks have as many, and
            every pack comes at least once.

    Raises:
        ConfigError: `balance` is unknown, a number is below 1, or the dataset has no `row_sizes()`.
    """

    def __init__(
        self,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | Literal["all"] | None = None,
        *,
        batch_size: int = 1,
        balance: Balance = "attention",
        cost: CostModel | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        check_balance(balance)
        if rank == "all":
            self.rank: int | None = None
            self.ranks = resolve_rank(None, None)[1] if num_replicas is None else num_replicas
        else:
            self.rank, self.ranks = resolve_rank(rank, num_replicas)
        for name, value in (("ranks", self.ranks), ("batch_size", batch_size)):
            if value < 1:
                raise ConfigError(f"`{name}` must be at least 1, got {value}.")
        check_sizes(dataset)
        self.rows, self.seed, self.drop_last, self.epoch = batch_size, seed, drop_last, 0
        self.order = Order(_Indexed(dataset), shuffle=shuffle, cost=cost or CostModel())

    def set_epoch(self, epoch: int) -> None:
        """Order anew, as DistributedSampler's."""
        self.epoch = epoch

    @property
    def imbalance(self) -> Imbalance:
        """Slowest rank / mean rank of the current epoch, before and after balancing."""
        return self.order.imbalance(self.epoch, self.seed, self.order.segment(self.ranks, self.rows))

    def __iter__(self) -> Iterator[int]:
        ranks, width = self.ranks, self.ranks * self.rows
        order = self.order.epoch_order(self.epoch, self.seed, [self.order.segment(ranks, self.rows)])
        full = len(order) // width * width
        steps = order[:full].reshape(-1, self.rows, ranks)  # rank r has every `ranks`-th item of a step
        rest = order[full:] if not self.drop_last else order[:0]
        if self.rank is None:
            yield from steps.transpose(0, 2, 1).reshape(-1).tolist()
            yield from rest.tolist()
            return
        yield from steps[:, :, self.rank].reshape(-1).tolist()
        missing = -len(rest) % ranks
        yield from [*rest.tolist(), *(order[place % len(order)].item() for place in range(missing))][
            self.rank :: ranks
        ]

    def __len__(self) -> int:
        full, rest = divmod(len(self.order), self.ranks * self.rows)
        rest = 0 if self.drop_last else rest
        if self.rank is None:
            return full * self.ranks * self.rows + rest
        return full * self.rows + -(-rest // self.ranks)


class _Indexed:
    """A dataset by the indices of its present epoch, which samplers give: a blend has other packs in each epoch."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.row_sizes = dataset.row_sizes

    def __len__(self) -> int:
        return len(self._dataset)

    def set_epoch(self, epoch: int) -> None:
        """Draw the packs of the epoch."""
        if callable(set_epoch := getattr(self._dataset, "set_epoch", None)):
            set_epoch(epoch)


Int64 = npt.NDArray[np.int64]


class PackedDataset(torch.utils.data.Dataset[Sequence[EncodedSample]]):
    """Pack i of a packed dataset or of a blend, without Energon's loader.

        dataset = PackedDataset("out", encoder)
        trainer = transformers.Trainer(model, args, train_dataset=dataset, data_collator=PaddingFreeCollator())

    Each process that reads opens the tars itself; the dataset can be pickled, forked and indexed in any order. A tar
    that was packed again, changed or removed since raises DataChangedError.

    A Metadataset has an epoch of known length. With repetitions, each dataset is repeated as often; a fraction is a
    seeded choice. With weights, the epoch is as long as all datasets together, and each has its share of it: some
    packs come repeatedly, of others a seeded choice. `set_epoch` draws anew.

    Args:
        path: folder that `energon-packed pack` wrote, `out` or `out/webdataset`, or an Energon Metadataset YAML.
        encoder: the Processor that the data was packed with. None for a PackedTokensSample dataset without images,
            which holds everything that is needed.
        split: `train`, `val` or `test`.
        check_encoder: refuse an encoder other than the one that the data was packed with.
        check_lengths: raise where a sample's length differs from the recorded one.
        seed: of what a Metadataset repeats and samples.
        trust_sample_loader: let Energon, which reads a Metadataset, run the code of its datasets. A folder is read
            without running any.

    Raises:
        ConfigError: an empty split, another encoder, or none where one is needed; a Metadataset with joins or subsets.
        FormatError: `path` is not a packed dataset, or is damaged.
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
    ) -> None:
        if not trust_sample_loader:
            check_blend_trusted(path)
        self.blend = loaded_splits(Path(path), split, trusted=trust_sample_loader)
        self.encoder = processor_for(self.blend, encoder, check=check_encoder)
        self.check_lengths = check_lengths
        self.seed = seed
        self._folders = [_Folder(one, self.encoder) for one in self.blend]
        self._starts = np.cumsum([0, *self.packs])
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Draw what the blend repeats and samples in an epoch; a folder alone is always the same.

        Raises:
            ConfigError: accelerate calls it with `dispatch_batches=True`, which would cut rows in parts.
        """
        refuse_dispatch()
        self._packs: Int64 = self.epoch_items(epoch, self.weights)

    @property
    def weights(self) -> list[float] | None:
        """Of the datasets of a blend by weight, D numbers; None for a folder, and for a blend by repetitions."""
        found = [one.weight for one in self.blend if one.weight is not None]
        return found if len(found) == len(self.blend) else None

    @property
    def packs(self) -> list[int]:
        """Packs that each dataset of the blend has, D numbers."""
        return [len(folder.reader) for folder in self._folders]

    def epoch_items(self, epoch: int, weights: Sequence[float] | None) -> Int64:
        """Numbers of the packs of an epoch, int64 (N,), dataset by dataset; `item` takes them.

        Args:
            epoch: from 0.
            weights: D numbers, in place of the weights of the blend; None if it counts repetitions.
        """
        blend, packs = self.blend, self.packs
        if weights is not None:
            blend = [replace(one, weight=weight) for one, weight in zip(blend, weights, strict=True)]
        return np.concatenate(
            [
                start + drawn(count, of_epoch, np.random.default_rng([self.seed, epoch, member]))
                for member, (start, count, of_epoch) in enumerate(
                    zip(self._starts.tolist(), packs, epoch_pack_counts(blend, packs), strict=False)
                )
            ]
        )

    def redrawn(self, used: Int64, count: int, weights: Sequence[float], rng: np.random.Generator) -> Int64:
        """Numbers of the packs of the rest of an epoch whose weights changed in it, int64 (count,).

        Each dataset continues where it is: a pack comes again only after all others of its dataset have come as often.

        Args:
            used: int64 (n,), numbers of the packs that the epoch has used.
            count: packs of the rest.
            weights: D numbers, from here on.
            rng: chooses among packs that were used equally often.
        """
        times = np.bincount(used, minlength=int(self._starts[-1]))
        return np.concatenate(
            [
                start + least_used(times[start:stop], of_member, rng)
                for start, stop, of_member in zip(
                    self._starts[:-1].tolist(), self._starts[1:].tolist(), apportion(list(weights), count), strict=True
                )
            ]
        )

    def item(self, number: int) -> Sequence[EncodedSample]:
        """The encoded samples of a pack, by its number in all datasets of the blend.

        Raises:
            FormatError: as for indexing.
        """
        folder, pack = self._place(number)
        source = folder.source
        try:
            return encode_pack(folder.sample(pack), self.encoder, check_lengths=self.check_lengths, source=source)
        except (FormatError, RecordError) as error:
            raise error.at(folder.place(pack), verify_hint(source.dataset)) from error

    @property
    def reader(self) -> ShardReader:
        """Access to the tars of the first folder."""
        return self._folders[0].reader

    def __len__(self) -> int:
        return len(self._packs)

    def __getitem__(self, index: int) -> Sequence[EncodedSample]:
        """The encoded samples of one pack; negative numbers count from the end.

        Raises:
            IndexError: there is no such pack.
            FormatError: the shard is damaged, or a length differs from the recorded one.
        """
        return self.item(self._number(index))

    def sample(self, index: int) -> PackSample:
        """The pack as its flavor, not encoded. Raises IndexError as above."""
        return self.pack(self._number(index))

    def pack(self, number: int) -> PackSample:
        """The pack as its flavor, not encoded, by its number in all datasets of the blend."""
        folder, pack = self._place(number)
        return folder.sample(pack)

    def fingerprint(self) -> str:
        """Of the shards and how they repeat, for loader states; "" where a folder has no packing.json.

        Without the weights of a blend, which may change in a run.
        """
        shards = []
        for one in self.blend:
            if one.manifest is None:
                return ""
            split = None if one.split == "train" else one.split
            shards.append([split, one.repetitions, [shard.sha256 for shard in one.manifest.shards]])
        return digest(self.seed, shards)[:16]

    def to_hf(self) -> Any:
        """The packs as a `datasets.Dataset`, for trainers that take nothing else; see `hf_dataset`."""
        return hf_dataset(self)

    @property
    def lengths(self) -> Int64:
        """Tokens of each pack, int64 (N,); the first use reads what every pack recorded, and no image."""
        return np.concatenate([folder.lengths for folder in self._folders])[self._packs]

    def row_sizes(self) -> RowSizes:
        """Sizes that decide the cost of each pack of the epoch."""
        return self.item_sizes()[self._packs]

    def item_sizes(self) -> RowSizes:
        """Sizes that decide the cost of each pack, by its number in all datasets of the blend.

        The first use reads what every pack recorded, and the headers of its images.
        """
        parts = [folder.sizes for folder in self._folders]
        names = ("tokens", "squares", "patches")
        return RowSizes(**{name: np.concatenate([getattr(one, name) for one in parts]) for name in names})

    def _number(self, index: int) -> int:
        """Number of a pack of the epoch in all datasets of the blend.

        Raises:
            IndexError: there is no such pack.
        """
        if not -len(self) <= index < len(self):
            raise IndexError(f"pack {index} is not among the {len(self)} packs")
        return int(self._packs[index])

    def _place(self, number: int) -> tuple["_Folder", int]:
        """(dataset of the blend, number of the pack in it)."""
        member = int(np.searchsorted(self._starts, number, side="right")) - 1
        return self._folders[member], number - int(self._starts[member])


class _Folder:
    """The packs of one dataset folder."""

    def __init__(self, split: LoadedSplit, encoder: Processor) -> None:
        self.reader = ShardReader(shards_in_split(split.path, split.split), digests_of(split))
        self.source = SampleSource(str(split.path), dict(split.subflavors))
        self._manifest = split.manifest
        self._encoder = encoder

    def sample(self, pack: int) -> PackSample:
        return load_pack(self._codec, self.reader[pack])

    def place(self, pack: int) -> str:
        shard, _, _ = self.reader.locate(pack)
        return f"{self.reader.tars[shard]}, pack {pack} of its split"

    @cached_property
    def lengths(self) -> Int64:
        """Tokens of each pack, int64 (P,)."""
        return np.array([one.sum() for one in self._of_samples], dtype=np.int64)

    @cached_property
    def sizes(self) -> RowSizes:
        """Sizes that decide the cost of each pack."""
        squares = np.array([(one**2).sum() for one in self._of_samples], dtype=np.int64)
        patches = np.array([self._patches(pack) for pack in range(len(squares))], dtype=np.int64)
        return RowSizes(tokens=self.lengths, squares=squares, patches=patches)

    @cached_property
    def _codec(self) -> Codec:
        return codec_for(self._manifest.sample_class) if self._manifest else codec_of(self.reader[0])

    @cached_property
    def _of_samples(self) -> list[Int64]:
        """Tokens of the samples of each pack: as recorded, else measured."""
        found = []
        for pack in range(len(self.reader)):
            lengths = self._codec.lengths(self.reader.part(pack, self._codec.lengths_part))
            if None in lengths:
                lengths = [self._encoder.length(one) for one in self.sample(pack).conversations()]
            found.append(np.array(lengths, dtype=np.int64))
        return found

    def _patches(self, pack: int) -> int:
        vision = getattr(self._encoder, "vision", None)
        if vision is None or (self._manifest is not None and not self._manifest.images):
            return 0
        talks = [talk for talk in self.sample(pack).conversations() if talk.images]
        tokens = sum(run.length for talk in talks for run in measure_media(vision, talk).runs)
        return int(tokens * vision.merge_size**2)
