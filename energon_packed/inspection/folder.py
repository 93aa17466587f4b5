"""A finished dataset folder, opened for inspection: shards, manifest, packs, and the encoder it was packed with."""

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from energon_packed.encoding import ChatEncoder, EncoderSettings
from energon_packed.errors import ConfigError, FormatError
from energon_packed.files import read_yaml
from energon_packed.formats import CODECS, Codec, codec_for, codec_of
from energon_packed.metadatasets import NV_META, read_split
from energon_packed.options import make
from energon_packed.pipeline.encoders import PretrainedEncoder
from energon_packed.shards import PackingManifest
from energon_packed.shards.index import open_sqlite_index
from energon_packed.shards.manifest import NewerFormatError
from energon_packed.shards.nv_meta import dataset_folder
from energon_packed.shards.scan import scan_tar


@dataclass(frozen=True)
class PackedFolder:
    """A folder with `.nv-meta`, of `energon-packed pack` or of another packer.

    Attributes:
        path: with `.nv-meta`.
        manifest: its packing.json; None where another tool packed it.
        tar: the only tar that is looked at; None for all.
    """

    path: Path
    manifest: PackingManifest | None
    tar: Path | None = None

    @classmethod
    def open(cls, path: str | Path) -> "PackedFolder":
        """Open `path` or `path/webdataset`.

        Raises:
            FormatError: there is no dataset, or a packing.json that cannot be read.
        """
        folder = dataset_folder(path)
        return cls(folder, PackingManifest.load_if_there(folder))

    @classmethod
    def of_tars(cls, path: Path) -> "PackedFolder":
        """As `open`; also one tar, a folder of tars without `.nv-meta`, and one with a damaged packing.json.

        Raises:
            FormatError: there is no tar and no dataset, or a newer release wrote it.
        """
        tar = path if path.is_file() else None
        folder = path.parent if tar else path if any(path.glob("*.tar")) else dataset_folder(path)
        try:
            return cls(folder, PackingManifest.load_if_there(folder), tar)
        except NewerFormatError:
            raise
        except FormatError:
            return cls(folder, None, tar)

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
            for raw in scan_tar(tar).packs(limit=1):
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
        return [self.tar] if self.tar else sorted(self.path.glob("*.tar"))

    def check_extractable(self) -> None:
        """Refuse to extract from a tar with members that are not files.

        Raises:
            FormatError: a member is a link, a FIFO, a device or a sparse file.
        """
        for tar in self.tars:
            for member in scan_tar(tar).members:
                if member.fault is not None:
                    raise FormatError(f"{tar}: {member.fault}")

    def first(self, limit: int) -> Iterator[dict[str, Any]]:
        """Raw parts of the first packs; a tar with faults gives those before the first fault that hides them."""
        for tar in self.tars:
            if limit <= 0:
                return
            for raw in scan_tar(tar).packs(limit=limit):
                yield raw
                limit -= 1

    def pack(self, key: str) -> dict[str, Any]:
        """Raw parts of the pack with this key.

        Raises:
            ConfigError: there is none.
        """
        for tar in self._tars_with(key):
            scan = scan_tar(tar)
            if key in (keys := scan.keys()):
                return next(scan.packs(first=keys.index(key), limit=1))
        raise ConfigError(f"no pack has the key {key!r}; inspect without --pack lists the first keys")

    def _tars_with(self, key: str) -> list[Path]:
        """The tar that index.sqlite names, or all."""
        database = self.path / NV_META / "index.sqlite"
        if self.manifest is None or not database.is_file() or len(self.tars) == 1:
            return self.tars
        try:
            with closing(open_sqlite_index(database)) as connection:
                row = connection.execute("SELECT tar_file_id FROM samples WHERE sample_key = ?", (key,)).fetchone()
        except (sqlite3.Error, UnicodeError):
            return self.tars
        if row is None:
            return []
        if not isinstance(row[0], int) or not 0 <= row[0] < len(self.manifest.shards):
            return self.tars  # it names a shard that there is not
        return [self.path / self.manifest.shards[row[0]].name]

    def encoder_or_reason(self, tokenizer: Path | None) -> tuple[ChatEncoder | None, str]:
        """The encoder, or why there is none; with a `tokenizer`, it must be there.

        Raises:
            FormatError, ConfigError: as `load_encoder`; the latter for the named `tokenizer` only.
        """
        try:
            encoder = self.load_encoder({} if tokenizer is None else {"tokenizer": tokenizer})
            if encoder.vision is not None and tokenizer is None:
                encoder.vision.check_decided()
            return encoder, ""
        except ConfigError as error:
            if tokenizer is not None:
                raise
            return None, str(error)

    def load_encoder(self, given: Mapping[str, Any] | None = None) -> ChatEncoder:
        """The encoder that packing.json names.

        Args:
            given: settings that override the recorded ones, by name, as `EncoderSettings` has them.

        Raises:
            FormatError: packing.json has no valid encoder.
            ConfigError: an invalid setting, a folder that does not exist here, or settings that give other tokens.
        """
        given = given or {}
        settings = make(EncoderSettings, {**self._recorded_settings(), **given})
        if settings.tokenizer is None:
            raise ConfigError(f"{self.path} has no packing.json that names a tokenizer; pass `tokenizer`")
        if "tokenizer" not in given and not settings.tokenizer.is_dir():
            raise ConfigError(
                f"the tokenizer {settings.tokenizer} of packing.json does not exist here; pass `tokenizer` (verify "
                "--fast needs none)"
            )
        encoder = PretrainedEncoder(settings).load()
        if self.manifest is not None and not encoder.has_fingerprint(self.manifest.tokenizer_fingerprint):
            got = ", ".join(self.overridden(given)) or settings.tokenizer
            raise ConfigError(
                f"the tokenizer, template and encoder settings must be those that {self.path} was packed with, got "
                f"{got}. Omit the settings that differ, or pass the `tokenizer` that it was packed with."
            )
        return encoder

    def overridden(self, given: Mapping[str, Any]) -> list[str]:
        """The given settings that differ from packing.json, each as "`min_pixels` 100 (3136 in packing.json)".

        Args:
            given: as `load_encoder` takes them.
        """
        if self.manifest is None:
            return []
        settings, recorded = make(EncoderSettings, given), make(EncoderSettings, self._recorded_settings())
        changes = []
        for name in given:
            value, before = getattr(settings, name), getattr(recorded, name)
            is_same = value.absolute() == before.absolute() if isinstance(before, Path) else value == before
            if not is_same:
                changes.append(f"`{name}` {value} ({'not set' if before is None else before} in packing.json)")
        return changes

    def _recorded_settings(self) -> dict[str, Any]:
        """The encoder settings of packing.json; {} without one."""
        if self.manifest is None:
            return {}
        recorded = self.manifest.encoder
        if (custom := recorded.get("processor_class")) is not None:
            raise ConfigError(
                f"{self.path} was packed with the Processor {custom}, which is not loaded by its name; use verify "
                "--fast, or check the samples from Python"
            )
        try:
            make(EncoderSettings, recorded, what="encoder setting")
        except ConfigError as error:
            raise FormatError(
                f"packing.json of {self.path} has no valid encoder: {error}; pack the data again"
            ) from error
        return recorded
