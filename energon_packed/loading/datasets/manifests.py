"""Datasets of a loader: the path of a folder or Metadataset in, its dataset folders with their manifests out.

| part | purpose |
|---|---|
| `LoadedSplit`, `loaded_splits` | one split of each dataset folder, with its packing.json, weight and repetitions |
| `processor_for`, `common_seq_len` | the encoder and row length that fit all of them |
| `OpenedSplits` | notices tars that are packed again, changed or removed while they are read |
| `epoch_pack_counts`, `drawn`, `least_used` | a blend as an epoch of known length: which packs of each dataset |
| `steps_per_epoch` | micro batches per rank, before training |
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from energon_packed.arrays import blocks
from energon_packed.encoding import ChatEncoder, Processor, StoredTokens
from energon_packed.errors import ConfigError, FormatError
from energon_packed.files import DiskList
from energon_packed.formats import codec_for
from energon_packed.loading.datasets.trust import check_blend_trusted
from energon_packed.loading.epoch_end import EpochEnd, check_epoch_end, check_rest, steps_of_epoch
from energon_packed.loading.permutation import Permutation
from energon_packed.metadatasets import NV_META, SPLIT_FILE, Leaf, SplitFile, read_metadataset, read_split
from energon_packed.options import as_integer, check_type, short
from energon_packed.packing.balance import Int64
from energon_packed.shards import PackingManifest
from energon_packed.shards.counts import check_complete, shard_counts
from energon_packed.shards.manifest import FILE_NAME
from energon_packed.shards.nv_meta import INFO, dataset_folder, shards_in_split
from energon_packed.shards.reader import OpenedFiles, ShardReader, files_of
from energon_packed.storage import as_path, energon_url, is_remote, map_paths, statuses


@dataclass(frozen=True, slots=True)
class LoadedSplit:
    """A split of a dataset folder.

    Attributes:
        path: folder with `.nv-meta`.
        split: name of the split that is read.
        manifest: its packing.json; None if another tool packed it.
        listed: its split.yaml.
        subflavors: subflavors that the Metadatasets set for it.
        weight: share of the packs of an epoch, 0 to 1; None in a blend that counts repetitions.
        repetitions: how many times an epoch has each of its packs; None in a blend by weight.
        found: `statuses` of the tars of the split and of their indexes, when they were compared with its manifest.
    """

    path: Path
    split: str
    manifest: PackingManifest | None
    listed: SplitFile
    subflavors: Mapping[str, Any] = field(default_factory=dict)
    weight: float | None = None
    repetitions: float | None = 1
    found: Mapping[Path, os.stat_result] = field(default_factory=dict, repr=False, compare=False)

    @property
    def packs(self) -> int | None:
        """Number of packs, from packing.json or else the indexes of the shards.

        None if it is unknown: split.yaml excludes single packs, or there is no index. Both count whole shards only.
        """
        if self.listed.excluded_packs:
            return None
        if self.manifest is not None:
            names = set(self.listed.shards(self.split))
            return sum(shard.packs for shard in self.manifest.shards if shard.name in names)
        try:
            return len(ShardReader(shards_in_split(self.listed, self.split), found=self.found))
        except FormatError:  # no index: Energon raises that when it opens the dataset
            return None

    @classmethod
    def of_folder(cls, path: str | Path, split: str) -> "LoadedSplit":
        """Read the manifest of a dataset folder.

        Raises:
            FormatError: there is no dataset, packing.json cannot be read, or packs that it lists are missing.
            ConfigError: the split has no packs.
        """
        folder = dataset_folder(path)
        # At the same time: in an object store, each of them is a request.
        readers: dict[str, Callable[[Path], Any]] = {
            SPLIT_FILE: read_split, FILE_NAME: PackingManifest.load_if_there, INFO: shard_counts
        }  # fmt: skip
        files = [folder / NV_META / name for name in readers]
        listed, manifest, counts = map_paths(lambda file: readers[file.name](folder), files)
        found = statuses(files_of([folder / name for name in listed.required(split)]))
        check_complete(folder, split, listed, manifest, counts, found)
        return cls(folder, split, manifest, listed, found=found)

    def stored_tokens(self) -> Processor:
        """The processor for a dataset that stores all token ids, and no image or video.

        Raises:
            ConfigError: it stores something else, which a ChatEncoder must encode.
        """
        sample_class = self.manifest.sample_class if self.manifest else None
        stored = [name for name in ("videos", "images", "audios") if getattr(self.manifest, name, 0)]
        media = f" with {stored[0].replace('audios', 'audio')}" if stored else ""
        if sample_class is None or not codec_for(sample_class).stores_tokens or media:
            raise ConfigError(
                f"{self.path} stores {sample_class or 'packs'}{media}, which needs an "
                "encoder. Pass `encoder=ChatEncoder.from_pretrained(...)`."
            )
        return StoredTokens()

    def check_encoder(self, encoder: Processor) -> None:
        """Refuse an encoder that encodes differently than the encoder that the data was packed with.

        Raises:
            ConfigError: its fingerprint differs.
        """
        # Custom encoders and other packing tools may have no fingerprint; lengths are still checked per sample.
        if self.manifest is None or not (recorded := self.manifest.tokenizer_fingerprint):
            return
        if encoder.has_fingerprint(recorded) or not encoder.fingerprint():
            return
        differences = ["its tokenizer, chat template or settings differ"]
        if isinstance(encoder, ChatEncoder):
            differences = self.manifest.encoder_differences(encoder)
        raise ConfigError(
            f"{self.path} was packed with a different encoder: {', '.join(differences)}. Use the settings of "
            f"packing.json ({self.manifest.encoder}), repack the data, or set `check_encoder=False`."
        )


def processor_for(splits: Sequence[LoadedSplit], encoder: Processor | None, *, check: bool = True) -> Processor:
    """Return the encoder, compared with every dataset; without an encoder, the processor of stored tokens.

    Raises:
        ConfigError: a dataset was packed with another encoder (if `check`), or needs an encoder.
    """
    check_type("encoder", encoder, Processor, "Pass a Processor, such as ChatEncoder.from_pretrained(DIR).")
    for dataset in splits:
        if encoder is None:
            dataset.stored_tokens()
        elif check:
            dataset.check_encoder(encoder)
    return splits[0].stored_tokens() if encoder is None else encoder


def path_of_dataset(path: str | Path) -> Path:
    """Return the argument `path` of a loader as a Path.

    Raises:
        ConfigError: it is not a path.
    """
    if not isinstance(path, str | Path):
        raise ConfigError(f"`path` must be the path of a dataset or a Metadataset, got {short(path)}. Pass one path.")
    return as_path(path)


def loaded_splits(path: str | Path, split: str, *, trusted: bool = False) -> list[LoadedSplit]:
    """Open one dataset folder, or all dataset folders that a Metadataset YAML refers to.

    Args:
        path: dataset folder or Metadataset YAML.
        split: `train`, `val` or `test`.
        trusted: a Metadataset may create objects of any class.

    Raises:
        FormatError: there is no dataset, or no Metadataset that Energon can read.
        ConfigError: `path` is not a path, a dataset has no packs in its split, or as `Metadataset.leaves`.
    """
    path = path_of_dataset(path)
    if not path.suffix or not path.is_file():  # most folders have no suffix, and need no request
        return [LoadedSplit.of_folder(path, split)]
    leaves = read_metadataset(path, trusted=trusted).leaves(split)
    return map_paths(_of_leaf, [leaf.path for leaf in leaves], leaves, purpose="datasets")


def _of_leaf(path: Path, leaf: Leaf) -> LoadedSplit:
    return replace(
        LoadedSplit.of_folder(path, leaf.split_part),
        subflavors=leaf.subflavors,
        weight=leaf.weight,
        repetitions=leaf.repetitions,
    )


def common_seq_len(splits: list[LoadedSplit], seq_len: int | None) -> int | None:
    """Tokens of a row that fits the packs of all datasets: `seq_len`, or the largest recorded value.

    Raises:
        ConfigError: `seq_len` is less than a recorded value.
    """
    packed_with = {dataset.path: dataset.manifest.seq_len for dataset in splits if dataset.manifest is not None}
    for path, packed in packed_with.items():
        if seq_len is not None and packed > seq_len:
            raise ConfigError(
                f"{path} was packed with seq_len {packed}; `seq_len` must be at least that, got {seq_len}."
            )
    return max(packed_with.values(), default=None) if seq_len is None else seq_len


def digests_of(split: LoadedSplit) -> Mapping[Path, str]:
    """SHA-256 of each tar that packing.json lists."""
    shards = split.manifest.shards if split.manifest is not None else ()
    return {split.path / shard.name: shard.sha256 for shard in shards}


class OpenedSplits(OpenedFiles):
    """The tars that Energon reads, found by the `__sources__` of its samples.

    Args:
        splits: datasets of the loader.

    Attributes:
        splits: the datasets.

    Raises:
        FormatError: a tar is missing.
    """

    def __init__(self, splits: Sequence[LoadedSplit]) -> None:
        self.splits = splits
        digests: dict[Path, str] = {}
        tars: dict[Path, None] = {}
        self._found: dict[Path, os.stat_result] = {}
        for split in splits:
            folder = split.path.resolve()
            digests |= {folder / tar.name: digest for tar, digest in digests_of(split).items()}
            tars |= dict.fromkeys(folder / name for name in split.listed.shards(split.split))
            self._found |= {folder / file.relative_to(split.path): status for file, status in split.found.items()}
        super().__init__(tars, digests, self._found)
        self._tars: dict[tuple[Any, str], Path] = {}
        self._urls = {energon_url(split.path): split.path for split in splits if is_remote(split.path)}
        self._readers: dict[tuple[Any, ...], ShardReader] = {}

    def reader(self, url: str, names: Sequence[str]) -> ShardReader | None:
        """Return the reader of tars, the same for every epoch; None if they are not among the opened tars.

        Args:
            url: the folder, as Energon names it.
            names: file names of the tars.

        Raises:
            FormatError: as `ShardReader`.
        """
        folder = self._urls.get(url) or Path(url)
        key = (folder, *names)
        if key not in self._readers:
            tars = [folder.resolve() / name for name in names]
            if not all(tar in self for tar in tars):
                return None
            self._readers[key] = ShardReader(tars, opened=self, found=self._found)
        return self._readers[key]

    def check_sources(self, sources: Iterable[Any] | None, *, is_recent: bool = False) -> None:
        """Refuse a sample whose tar is not the file that was opened.

        Args:
            sources: `__sources__` of a sample of Energon, or None.
            is_recent: as in `check`.

        Raises:
            DataChangedError: a tar was replaced, changed or removed.
        """
        for source in sources or ():
            key = source.dataset_path, getattr(source, "shard_name", "")
            if key not in self._tars:  # resolving a path needs system calls, and every pack asks again
                folder = self._urls.get(str(key[0])) or Path(str(key[0]))
                self._tars[key] = folder.resolve() / str(key[1])
            if self._tars[key] in self:  # other files are of auxiliary datasets
                self.check(self._tars[key], is_recent=is_recent)


def epoch_pack_counts(blend: list[LoadedSplit], packs: list[int]) -> list[int]:
    """Number of packs of each dataset in an epoch.

    By repetitions, they multiply the packs of a dataset. By weight, an epoch is as long as all datasets together, and
    each dataset has its share of it, so a dataset with a large weight is repeated, and one with a small weight is
    sampled.

    Args:
        blend: D datasets.
        packs: number of packs in each of them.
    """
    if all(dataset.weight is None for dataset in blend):
        return [int((dataset.repetitions or 1) * count) for dataset, count in zip(blend, packs, strict=True)]
    return apportion([dataset.weight or 0.0 for dataset in blend], sum(packs))


def apportion(weights: list[float], total: int) -> list[int]:
    """Divide `total` in proportion to weights, as integers whose sum is `total`."""
    # Largest remainders (Hamilton's method): round down, then add 1 to the counts that lost most.
    exact = total * np.array(weights) / sum(weights)
    counts = np.floor(exact).astype(np.int64)
    counts[np.argsort(counts - exact, kind="stable")[: total - int(counts.sum())]] += 1
    return [int(count) for count in counts]


def repeats_packs(blend: Sequence[LoadedSplit]) -> bool:
    """Whether an epoch may have a pack several times: by weights or repetitions, or as a folder is listed twice."""
    is_weighted = any(member.repetitions is None or member.repetitions > 1 for member in blend)
    return is_weighted or len({(member.path, member.split) for member in blend}) < len(blend)


def drawn(packs: int, count: int, key: Sequence[int]) -> Callable[[Int64], Int64]:
    """Draw `count` of `packs` pack indices: each equally often, and a random few one time more.

    Returns:
        function of positions in the draw to pack indices, both int64 (n,).
    """
    return partial(_pack_at, packs, count // max(packs, 1) * packs, Permutation(packs, key))


def _pack_at(packs: int, whole: int, rest: Permutation, positions: Int64) -> Int64:
    """Pack indices at positions, of which the first `whole` are in complete copies of all packs."""
    indices = positions % max(packs, 1)
    is_rest = positions >= whole
    indices[is_rest] = rest(indices[is_rest])
    return indices


def least_used(used: Int64, count: int, rng: np.random.Generator) -> Iterator[Int64]:
    """Choose `count` pack indices, always among the packs that were used least, and yield them in blocks, int64 (n,).

    Args:
        used: int64 (P,), how many times each pack was used.
        count: packs to choose; if there are fewer, packs are chosen repeatedly.
        rng: chooses among packs that were used equally often.
    """
    level = int(used.min())
    while count > 0:
        # The packs of earlier rounds are included: each was chosen once in every round, as `level` grew by 1.
        ready = DiskList(np.int64)
        for block in blocks(len(used)):
            ready.extend(np.flatnonzero(used[block] <= level) + block.start)
        chosen = ready.values
        if len(chosen) > count:
            rng.shuffle(chosen)
        for block in blocks(min(len(chosen), count)):
            yield chosen[block]
        count, level = count - len(chosen), level + 1


def steps_per_epoch(
    path: str | Path | PackingManifest,
    *,
    world_size: int = 1,
    micro_batch_size: int = 1,
    num_workers: int = 0,
    split: str = "train",
    epoch_end: EpochEnd = "repeat",
) -> int:
    """Compute the micro batches of every rank in one epoch.

    An epoch of a folder or of a blend with repetitions has each pack as often as these. An epoch of a blend by weight,
    from which Energon draws indefinitely, has as many packs as its datasets together, as in PackedDataset.

    Args:
        path: packed dataset, its manifest, or a Metadataset. Without packing.json, packs are counted
            in the indexes.
        world_size, micro_batch_size, num_workers, split, epoch_end: as in `PackedLoaderOptions`.

    Raises:
        ConfigError: an argument is below its minimum, a rank has no batch, or `epoch_end` is `error` and the packs do
            not fill the last step.
        FormatError: there is no dataset.
    """
    check_epoch_end(epoch_end)
    steps_of = partial(
        steps_of_epoch,
        world_size=world_size,
        micro_batch_size=micro_batch_size,
        num_workers=num_workers,
        epoch_end=epoch_end,
    )
    if isinstance(path, PackingManifest):
        return steps_of([(path.packs_in(split), 1)])
    # Counting opens no dataset with Energon, but parsing a Metadataset must not create its objects.
    check_blend_trusted(path)
    blend = loaded_splits(path, split)
    counts = []
    for dataset in blend:
        if (packs := dataset.packs) is None:
            raise FormatError(
                f"The number of packs of {dataset.path} is unknown: split.yaml excludes single packs, or an index is "
                "missing. Run energon-packed nv-meta."
            )
        counts.append(packs)
    if any(dataset.weight is not None for dataset in blend):
        # Energon draws indefinitely, so each rank has a pack for every step: only the number of draws decides.
        total = sum(epoch_pack_counts(blend, counts))
        width = as_integer(world_size, "world_size") * as_integer(micro_batch_size, "micro_batch_size")
        check_rest(epoch_end, total % width, total)
        return total // width if epoch_end == "drop" else -(-total // width)
    repetitions = [dataset.repetitions or 1 for dataset in blend]
    return steps_of(list(zip(counts, repetitions, strict=True)))
