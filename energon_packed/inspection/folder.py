"""A finished data set folder, opened for looking: shards, manifest, packs, and the encoder it was packed with."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from energon_packed.build.options import EncoderOptions
from energon_packed.encoding import ChatEncoder
from energon_packed.errors import ConfigError, FormatError
from energon_packed.shards import PackingManifest
from energon_packed.shards.layouts import LAYOUTS
from energon_packed.shards.nv_meta import NV_META
from energon_packed.shards.reader import ShardReader
from energon_packed.shards.scan import TarScan
from energon_packed.shards.split import dataset_folder, shard_names


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
            FormatError: there is no data set, or a packing.json that cannot be read.
        """
        folder = dataset_folder(path)
        return cls(folder, PackingManifest.load_if_there(folder))

    @cached_property
    def sample_class(self) -> str:
        """The flavor.

        Raises:
            FormatError: neither packing.json nor dataset.yaml names one that is known.
        """
        if self.manifest is not None:
            return self.manifest.sample_class
        try:
            named = yaml.safe_load((self.path / NV_META / "dataset.yaml").read_bytes())["sample_type"]["__class__"]
        except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
            raise FormatError(
                f"dataset.yaml of {self.path} names no flavor ({type(error).__name__}); run energon-packed nv-meta"
            ) from error
        if named not in LAYOUTS:
            raise FormatError(f"dataset.yaml of {self.path} names {named}, which is none of {', '.join(LAYOUTS)}")
        return str(named)

    @cached_property
    def shards(self) -> dict[str, str]:
        """Split of each shard that packing.json names, or else split.yaml, in the order of the index; excluded too.

        Raises:
            FormatError: split.yaml is needed, and cannot be read.
        """
        if self.manifest is not None:
            return {shard.name: shard.split for shard in self.manifest.shards}
        return dict(sorted(self.named_in_split_yaml().items()))

    def named_in_split_yaml(self) -> dict[str, str]:
        """Split of each shard as split.yaml says, excluded ones too.

        Raises:
            FormatError: it cannot be read.
        """
        found = shard_names(self.path, with_excluded=True)
        return {name: split for split, names in found.items() for name in names}

    @cached_property
    def tars(self) -> list[Path]:
        """Tars that are there, by name."""
        return sorted(self.path.glob("*.tar"))

    def load_encoder(self, tokenizer: Path | None = None, processor: Path | None = None) -> ChatEncoder:
        """The encoder that packing.json names; another place of its folders may be given.

        Raises:
            ConfigError: its folder is not here, or the encoder is another one.
        """
        if self.manifest is None:
            if tokenizer is None:
                raise ConfigError(f"{self.path} has no packing.json that names a tokenizer; give --tokenizer DIR")
            return EncoderOptions(tokenizer=tokenizer, processor=processor).load()
        options = dict(self.manifest.encoder)
        if tokenizer is not None:
            options["tokenizer"] = tokenizer
        if processor is not None:
            options["processor"] = processor
        if not Path(options.get("tokenizer", "")).is_dir():
            raise ConfigError(
                f"the tokenizer {options.get('tokenizer')} that packing.json names is not here; give --tokenizer DIR "
                "(verify --fast needs none)"
            )
        encoder = EncoderOptions(**options).load()
        if encoder.fingerprint() != self.manifest.tokenizer_fingerprint:
            raise ConfigError(
                f"{options['tokenizer']} is not the tokenizer, template or image settings that {self.path} was packed "
                "with; give --tokenizer DIR with the right one"
            )
        return encoder


def packs_of(scan: TarScan) -> Iterator[dict[str, Any]]:
    """Raw parts of every pack of a sound tar, in order."""
    reader = ShardReader.from_offsets({scan.path: scan.rows().offsets})
    for pack in range(len(reader)):
        yield reader[pack]
