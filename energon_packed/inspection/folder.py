"""A finished dataset folder, opened for inspection: shards, manifest, packs, and the encoder it was packed with."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from energon_packed.encoding import ChatEncoder
from energon_packed.errors import ConfigError, FormatError
from energon_packed.foreign import read_yaml
from energon_packed.formats import CODECS, Codec, codec_for, codec_of
from energon_packed.metadatasets import read_split
from energon_packed.pipeline.encoders import EncoderOptions
from energon_packed.shards import PackingManifest
from energon_packed.shards.nv_meta import NV_META
from energon_packed.shards.reader import ShardReader
from energon_packed.shards.scan import TarScan, scan_tar
from energon_packed.shards.split import dataset_folder


@dataclass(frozen=True)
class PackedFolder:
    """A folder with `.nv-meta`, of `energon-packed pack` or of another packer.

    Attributes:
        path: with `.nv-meta`.
        manifest: its packing.json; None where another tool packed it.
    """

    path: Path
    manifest: PackingManifest | None

    @classmethod
    def open(cls, path: str | Path) -> "PackedFolder":
        """Open `path` or `path/webdataset`.

        Raises:
            FormatError: there is no dataset, or a packing.json that cannot be read.
        """
        folder = dataset_folder(path)
        return cls(folder, PackingManifest.load_if_there(folder))

    @cached_property
    def codec(self) -> Codec:
        """Of the flavor: as packing.json or dataset.yaml names it, else by the parts of the first pack.

        Raises:
            FormatError: the parts match no known flavor, or there is no pack.
        """
        if self.manifest is not None:
            return codec_for(self.manifest.sample_class)
        try:
            named = read_yaml(self.path / NV_META / "dataset.yaml")["sample_type"]["__class__"]
        except (OSError, yaml.YAMLError, KeyError, TypeError):
            named = None
        if named in CODECS:
            return CODECS[named]
        for tar in self.tars:
            for raw in packs_of(scan_tar(tar)):
                return codec_of(raw)
        raise FormatError(f"{self.path} holds no pack; pass a folder of packed shards")

    @cached_property
    def shards(self) -> dict[str, str]:
        """Split of each shard of packing.json, or else split.yaml, in the order of the index, excluded ones included.

        Raises:
            FormatError: split.yaml is needed, and cannot be read.
        """
        if self.manifest is not None:
            return {shard.name: shard.split for shard in self.manifest.shards}
        return dict(sorted(self.named_in_split_yaml().items()))

    def named_in_split_yaml(self) -> dict[str, str]:
        """Split of each shard by split.yaml, excluded ones included.

        Raises:
            FormatError: it cannot be read.
        """
        return {name: split for split, names in read_split(self.path).parts.items() for name in names}

    @cached_property
    def tars(self) -> list[Path]:
        """Existing tars, by name."""
        return sorted(self.path.glob("*.tar"))

    def load_encoder(self, tokenizer: Path | None = None, processor: Path | None = None) -> ChatEncoder:
        """The encoder that packing.json names; other folders may be passed.

        Raises:
            ConfigError: its folder does not exist here, or the encoder is another one.
        """
        if self.manifest is None:
            if tokenizer is None:
                raise ConfigError(f"{self.path} has no packing.json that names a tokenizer; pass `tokenizer`")
            return EncoderOptions(tokenizer=tokenizer, processor=processor).load()
        options = dict(self.manifest.encoder)
        if (custom := options.get("processor_class")) is not None:
            raise ConfigError(
                f"{self.path} was packed with the Processor {custom}, which packing.json cannot load; use --fast, or "
                "check the samples from Python"
            )
        if tokenizer is not None:
            options["tokenizer"] = tokenizer
        if processor is not None:
            options["processor"] = processor
        if not Path(str(options.get("tokenizer", ""))).is_dir():
            raise ConfigError(
                f"the tokenizer {options.get('tokenizer')} that packing.json names does not exist; pass `tokenizer` "
                "(verify --fast needs none)"
            )
        try:
            encoder = EncoderOptions(**options).load()
        except (TypeError, AttributeError) as error:
            raise FormatError(
                f"packing.json of {self.path} has no valid encoder: {error}; pack the data again"
            ) from error
        if not encoder.has_fingerprint(self.manifest.tokenizer_fingerprint):
            raise ConfigError(
                f"{options['tokenizer']} is not the tokenizer, template or image settings that {self.path} was packed "
                "with; pass `tokenizer` with the right one"
            )
        return encoder


def packs_of(scan: TarScan) -> Iterator[dict[str, Any]]:
    """Raw parts of every pack of an intact tar, in order."""
    reader = ShardReader.from_offsets({scan.path: scan.rows().offsets})
    for pack in range(len(reader)):
        yield reader[pack]
