"""The manifests of what a loader reads: of a dataset folder, or of every one that a Metadataset refers to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from energon_packed.encoding import Processor, StoredTokens
from energon_packed.errors import ConfigError, FormatError
from energon_packed.formats import codec_for
from energon_packed.metadatasets import read_metadataset, read_split
from energon_packed.shards import PackingManifest
from energon_packed.shards.complete import check_complete
from energon_packed.shards.reader import ShardReader
from energon_packed.shards.split import dataset_folder, shards_in_split


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
