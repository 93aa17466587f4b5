"""The manifests of what a loader reads: of a dataset folder, or of every one that a Metadataset refers to.

What a loader opened, so that it notices when a dataset is packed again, changed or removed under it.

Blends as an epoch of known length: how many packs of each dataset, and which ones.

`steps_per_epoch`: of a dataset folder, and of a blend that counts repetitions.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from energon_packed.encoding import Processor, StoredTokens
from energon_packed.errors import ConfigError, FormatError
from energon_packed.formats import codec_for
from energon_packed.loading.trust import check_blend_trusted
from energon_packed.metadatasets import read_metadataset, read_split
from energon_packed.shards import PackingManifest
from energon_packed.shards.counts import check_complete
from energon_packed.shards.nv_meta import dataset_folder, shards_in_split
from energon_packed.shards.reader import OpenedFiles, ShardReader
from energon_packed.shards.steps import steps_of_ranks


@dataclass(frozen=True, slots=True)
class LoadedSplit:
    """One split of one dataset folder.

    Attributes:
        path: folder with `.nv-meta`.
        split: which of its splits is read.
        manifest: its packing.json; None where another tool packed it.
        subflavors: what the Metadatasets say of it.
        weight: share of the packs of an epoch, 0 to 1; None in a blend that counts repetitions.
        repetitions: how often an epoch has each of its packs; None in a blend by weight.
    """

    path: Path
    split: str
    manifest: PackingManifest | None
    subflavors: Mapping[str, Any] = field(default_factory=dict)
    weight: float | None = None
    repetitions: float | None = 1

    @property
    def packs(self) -> int | None:
        """Packs that are read; without packing.json, from the indexes.

        None where that is not known: single packs are excluded, or an index is missing.
        """
        split = read_split(self.path)
        if split.excluded_packs:
            return None
        if self.manifest is not None:
            names = set(split.shards(self.split))
            return sum(shard.packs for shard in self.manifest.shards if shard.name in names)
        try:
            return len(ShardReader(shards_in_split(self.path, self.split)))
        except FormatError:  # no index: Energon says so
            return None

    @classmethod
    def of_folder(cls, path: str | Path, split: str) -> "LoadedSplit":
        """A dataset folder.

        Raises:
            FormatError: there is none, a packing.json that cannot be read, or fewer packs than it says.
            ConfigError: it has no packs in that split.
        """
        folder = dataset_folder(path)
        read_split(folder).required(split)
        manifest = PackingManifest.load_if_there(folder)
        check_complete(folder, split, manifest)
        return cls(folder, split, manifest)

    def stored_tokens(self) -> Processor:
        """The processor for data that holds all tokens and no image.

        Raises:
            ConfigError: it holds something else, which a ChatEncoder must encode.
        """
        sample_class = self.manifest.sample_class if self.manifest else None
        images = self.manifest.images if self.manifest else 0
        if sample_class is None or not codec_for(sample_class).stores_tokens or images:
            raise ConfigError(
                f"{self.path} holds {sample_class or 'packs'}{' with images' if images else ''}, which an encoder "
                "must turn into tokens and pixels: pass ChatEncoder.from_pretrained(...)"
            )
        return StoredTokens()

    def check_encoder(self, encoder: Processor) -> None:
        """Refuse an encoder other than the one that the data was packed with.

        Raises:
            ConfigError: its fingerprint differs.
        """
        found = encoder.fingerprint()
        if self.manifest is None or not found or not self.manifest.tokenizer_fingerprint:
            return
        if not encoder.has_fingerprint(self.manifest.tokenizer_fingerprint):
            raise ConfigError(
                f"{self.path} was packed with another tokenizer, chat template, image settings or loss_on than this "
                f"encoder, or by an earlier release that encoded differently; packing.json names "
                f"{self.manifest.encoder}; use those, pack the data again, or set `check_encoder=False` if the "
                "difference is intended"
            )


def processor_for(splits: Sequence[LoadedSplit], encoder: Processor | None, *, check: bool = True) -> Processor:
    """The encoder, compared with every dataset; without one, the processor of stored tokens.

    Raises:
        ConfigError: another encoder than a dataset was packed with (where `check`), or none where one is needed.
    """
    for one in splits:
        if encoder is None:
            one.stored_tokens()
        elif check:
            one.check_encoder(encoder)
    return splits[0].stored_tokens() if encoder is None else encoder


def loaded_splits(path: Path, split: str, *, trusted: bool = False) -> list[LoadedSplit]:
    """What is read: one dataset folder, or all those behind a Metadataset YAML.

    Args:
        path: of either.
        split: `train`, `val` or `test`.
        trusted: a Metadataset may make objects of any class.

    Raises:
        FormatError: there is no dataset, or no Metadataset that Energon can read.
        ConfigError: a dataset without packs in its split, or as `Metadataset.leaves`.
    """
    if not path.is_file():
        return [LoadedSplit.of_folder(path, split)]
    return [
        replace(
            LoadedSplit.of_folder(leaf.path, leaf.split_part),
            subflavors=leaf.subflavors,
            weight=leaf.weight,
            repetitions=leaf.repetitions,
        )
        for leaf in read_metadataset(path, trusted=trusted).leaves(split)
    ]


def common_seq_len(splits: list[LoadedSplit], seq_len: int | None) -> int | None:
    """Tokens of a row that holds the packs of all these: `seq_len`, or the largest that one was packed with.

    Raises:
        ConfigError: `seq_len` is less than one was packed with.
    """
    for one in splits:
        if one.manifest is not None and seq_len is not None and one.manifest.seq_len > seq_len:
            raise ConfigError(
                f"{one.path} was packed with seq_len {one.manifest.seq_len}, more than `seq_len` {seq_len}; raise it"
            )
    packed_with = [one.manifest.seq_len for one in splits if one.manifest is not None]
    return max(packed_with, default=None) if seq_len is None else seq_len


def digests_of(one: LoadedSplit) -> Mapping[Path, str]:
    """SHA-256 of each tar that packing.json lists."""
    shards = one.manifest.shards if one.manifest is not None else ()
    return {one.path / shard.name: shard.sha256 for shard in shards}


class OpenedSplits(OpenedFiles):
    """The tars that Energon reads, by the sources that it names.

    Args:
        splits: of the loader.

    Attributes:
        folders: the dataset folders, with `.nv-meta`.

    Raises:
        FormatError: a tar is missing.
    """

    def __init__(self, splits: Sequence[LoadedSplit]) -> None:
        self.folders = [one.path for one in splits]
        digests: dict[Path, str] = {}
        tars: dict[Path, None] = {}
        for one in splits:
            folder = one.path.resolve()
            digests |= {folder / tar.name: digest for tar, digest in digests_of(one).items()}
            tars |= dict.fromkeys(folder / name for name in read_split(one.path).shards(one.split))
        super().__init__(tars, digests)
        self._found: dict[tuple[Any, str], Path | None] = {}

    def check_sources(self, sources: Iterable[Any] | None) -> None:
        """Refuse a sample whose tar is not the one of before.

        Args:
            sources: `__sources__` of a sample of Energon, or none.

        Raises:
            DataChangedError: a tar was replaced, changed or removed.
        """
        for source in sources or ():
            if (tar := self._tar(source.dataset_path, getattr(source, "shard_name", ""))) is not None:
                self.check(tar)

    def _tar(self, folder: Any, name: str) -> Path | None:
        """The tar of a source, a name in an EPath; None for what is none of ours, such as an auxiliary file."""
        key = (folder, name)
        if key not in self._found:
            tar = Path(str(folder)).resolve() / str(name)
            self._found[key] = tar if tar in self else None
        return self._found[key]


Int64 = npt.NDArray[np.int64]


def epoch_pack_counts(blend: list[LoadedSplit], packs: list[int]) -> list[int]:
    """Packs that an epoch has of each dataset.

    By repetitions, their product with the packs there are. By weight, an epoch is as long as all datasets together,
    and each has its share of it (largest remainders), so a dataset of a large weight is repeated, and one of a small
    weight is sampled.

    Args:
        blend: D datasets.
        packs: D numbers, packs in each.
    """
    if all(one.weight is None for one in blend):
        return [int((one.repetitions or 1) * count) for one, count in zip(blend, packs, strict=True)]
    return apportion([one.weight or 0.0 for one in blend], sum(packs))


def apportion(weights: list[float], total: int) -> list[int]:
    """`total` divided by weights, with the sum `total`, by largest remainders."""
    exact = total * np.array(weights) / sum(weights)
    counts = np.floor(exact).astype(np.int64)
    for place in np.argsort(counts - exact, kind="stable")[: total - int(counts.sum())]:
        counts[place] += 1
    return [int(count) for count in counts]


def drawn(packs: int, count: int, rng: np.random.Generator) -> Int64:
    """Numbers of `count` of `packs` packs, int64 (count,): every pack equally often, and a random few once more."""
    copies, rest = divmod(count, packs)
    return np.concatenate([np.tile(np.arange(packs), copies), np.sort(rng.permutation(packs)[:rest])])


def least_used(used: Int64, count: int, rng: np.random.Generator) -> Int64:
    """Numbers of `count` packs, int64 (count,): each is chosen when it is among the packs that came least.

    Args:
        used: int64 (P,), how often each pack was used.
        count: packs to choose; a pack is chosen repeatedly if there are fewer.
        rng: chooses among packs that were used equally often.
    """
    found, level = [np.zeros(0, dtype=np.int64)], int(used.min())
    while count > 0:
        ready = np.flatnonzero(used <= level)  # with the packs of the rounds before, which came once more in each
        chosen = ready if len(ready) <= count else rng.choice(ready, count, replace=False)
        found.append(chosen)
        count, level = count - len(chosen), level + 1
    return np.concatenate(found)


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
            f"PackedDataset, whose epoch has {sum(epoch_pack_counts(blend, counts))} packs"
        )
    times = [one.repetitions or 1 for one in blend]
    return steps_of_ranks(list(zip(counts, times, strict=True)), **place, drop_last=drop_last)
