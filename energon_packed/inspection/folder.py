"""A finished data set folder, opened for looking: shards, manifest, packs, and the encoder it was packed with."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from energon_packed.build.options import EncoderOptions
from energon_packed.encoding import ChatEncoder
from energon_packed.errors import ConfigError
from energon_packed.shards import PackingManifest
from energon_packed.shards.reader import ShardReader
from energon_packed.shards.scan import TarScan
from energon_packed.shards.split import dataset_folder


@dataclass(frozen=True)
class PackedFolder:
    """A folder that `energon-packed pack` wrote.

    Attributes:
        path: with `.nv-meta`.
        manifest: its packing.json.
    """

    path: Path
    manifest: PackingManifest

    @classmethod
    def open(cls, path: str | Path) -> "PackedFolder":
        """Open `path` or `path/webdataset`.

        Raises:
            FormatError: there is no data set, or no readable packing.json.
        """
        folder = dataset_folder(path)
        return cls(folder, PackingManifest.load(folder))

    @cached_property
    def tars(self) -> list[Path]:
        """Tars that are there, by name."""
        return sorted(self.path.glob("*.tar"))

    def load_encoder(self, tokenizer: Path | None = None, processor: Path | None = None) -> ChatEncoder:
        """The encoder that packing.json names; another place of its folders may be given.

        Raises:
            ConfigError: its folder is not here, or the encoder is another one.
        """
        options = dict(self.manifest.encoder)
        if tokenizer is not None:
            options["tokenizer"] = tokenizer
        if processor is not None:
            options["processor"] = processor
        if not Path(options.get("tokenizer", "")).is_dir():
            raise ConfigError(
                f"the tokenizer {options.get('tokenizer')} that packing.json names is not here; give --tokenizer DIR"
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
