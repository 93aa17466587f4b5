"""Open a packed dataset for inspection: a path in, a PackedFolder out.

A PackedFolder contains the manifest (packing.json), lists the shards and reads packs by key, from tars with or without
`.nv-meta`, of energon-packed or third-party tools. `load_encoder` loads the encoder that packing.json names.
"""

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any

import yaml

from energon_packed.encoding import ChatEncoder, EncoderSettings
from energon_packed.encoding.pretrained import is_same_folder
from energon_packed.errors import ConfigError, FormatError
from energon_packed.files import of_type, read_yaml
from energon_packed.formats import CODECS, Codec, codec_for, codec_of
from energon_packed.metadatasets import NV_META, read_split
from energon_packed.options import make
from energon_packed.pipeline.encoders import PretrainedEncoder
from energon_packed.shards import PackingManifest
from energon_packed.shards.index import open_sqlite_index
from energon_packed.shards.manifest import OtherVersionError
from energon_packed.shards.nv_meta import dataset_folder
from energon_packed.shards.scan import scan_tar
from energon_packed.sources.registry import SOURCES
from energon_packed.storage import is_remote


@dataclass(frozen=True)
class PackedFolder:
    """Packed dataset, written by `energon-packed pack` or a third-party tool.

    Attributes:
        path: folder with the tars.
        manifest: content of packing.json; None if a third-party tool packed the dataset.
        tar: single tar to inspect; None for all.
    """

    path: Path
    manifest: PackingManifest | None
    tar: Path | None = None

    @classmethod
    def open(cls, path: str | Path) -> "PackedFolder":
        """Open `path` or `path/webdataset`.

        Raises:
            FormatError: there is no dataset, or packing.json cannot be read.
        """
        folder = dataset_folder(path)
        return cls(folder, PackingManifest.load_if_there(folder))

    @classmethod
    def of_tars(cls, path: Path) -> "PackedFolder":
        """Open a dataset, a tar, or a folder of tars without `.nv-meta`; a damaged packing.json is ignored.

        Raises:
            FormatError: there is no tar and no dataset, or it has another format version.
        """
        if not path.exists():
            raise FormatError(f"{path} does not exist. Pass a tar, a dataset folder or a Metadataset YAML.")
        tar = path if path.is_file() else None
        if tar and ".tar" not in tar.name and any(source.matches(tar) for source in SOURCES):
            raise FormatError(
                f"{path} must be a tar, a dataset folder or a Metadataset YAML, got records. Use energon-packed "
                "lengths for records, or pack them first."
            )
        # A folder that contains tars is opened even if `.nv-meta` is missing or damaged.
        folder = path.parent if tar else path if any(path.glob("*.tar")) else dataset_folder(path)
        try:
            return cls(folder, PackingManifest.load_if_there(folder), tar)
        # A damaged packing.json says nothing about the tars, but another format may store packs in another way.
        except OtherVersionError:
            raise
        except FormatError:
            return cls(folder, None, tar)

    @cached_property
    def codec(self) -> Codec:
        """Codec of the flavor in packing.json or dataset.yaml, else detected from the parts of the first pack.

        Raises:
            FormatError: the parts match no known flavor, or there is no pack.
        """
        if self.manifest is not None:
            return codec_for(self.manifest.sample_class)
        try:
            # The class may belong to a third-party package, with the same name as one of the flavors. Only the name is
            # used.
            kind = of_type(read_yaml(self.path / NV_META / "dataset.yaml"), dict)["sample_type"]
            flavor = of_type(kind, dict)["__class__"]
        except (OSError, yaml.YAMLError, KeyError, ValueError):
            flavor = None
        if flavor in CODECS:
            return CODECS[flavor]
        for raw in self.first(1):  # the first pack of any tar is enough: a dataset has one flavor
            return codec_of(raw)
        raise FormatError(f"{self.path} contains no pack. Pass a folder of packed shards.")

    @cached_property
    def shards(self) -> dict[str, str]:
        """Split of each shard in packing.json, else in split.yaml, in the order of index.sqlite.

        Shards that split.yaml excludes are included.

        Raises:
            FormatError: split.yaml is needed, and cannot be read.
        """
        if self.manifest is not None:
            return {shard.name: shard.split for shard in self.manifest.shards}
        return dict(sorted(self.split_yaml_shards().items()))

    def split_yaml_shards(self) -> dict[str, str]:
        """Split of each shard in split.yaml, including excluded shards.

        Raises:
            FormatError: split.yaml cannot be read.
        """
        return {name: split for split, names in read_split(self.path).parts.items() for name in names}

    @cached_property
    def tars(self) -> list[Path]:
        """Existing tars, sorted by name."""
        return [self.tar] if self.tar else sorted(self.path.glob("*.tar"))

    def check_extractable(self) -> None:
        """Check that every member of every tar is a regular file.

        Raises:
            FormatError: a member is a link, a FIFO, a device or a sparse file.
        """
        for tar in self.tars:
            for member in scan_tar(tar).members:
                if member.fault is not None:
                    raise FormatError(f"{tar}: {member.fault}")

    def first(self, limit: int) -> Iterator[dict[str, Any]]:
        """Iterate over the raw parts of the first packs; of a damaged tar, the packs before the damage."""
        return islice(chain.from_iterable(scan_tar(tar).packs(limit=limit) for tar in self.tars), limit)

    def pack(self, key: str) -> dict[str, Any]:
        """Return the raw parts of the pack with this key.

        Raises:
            ConfigError: no pack has this key.
        """
        for tar in self._tars_with(key):
            scan = scan_tar(tar)
            if key in (keys := scan.keys()):
                return next(scan.packs(first=keys.index(key), limit=1))
        raise ConfigError(f"no pack has the key {key!r}. Run inspect without --pack to list the first keys.")

    def _tars_with(self, key: str) -> list[Path]:
        """Return the tar of the key in index.sqlite, or all tars if the index cannot be used."""
        # The index saves scanning the headers of all tars. It is untrusted: the caller scans the tar that it names.
        if self.manifest is None or len(self.tars) == 1 or not (self.path / NV_META / "index.sqlite").is_file():
            return self.tars
        try:
            place = self.indexed(key)
        except FormatError:
            return self.tars
        return [] if place is None else [self.path / self.manifest.shards[place[0]].name]

    def indexed(self, key: str) -> tuple[int, int] | None:
        """Index of the shard of a pack, and of the pack in it, in index.sqlite; None if the key is not there.

        Raises:
            FormatError: the index cannot be read, or names no shard of the dataset.
        """
        row, remedy = None, "run energon-packed nv-meta"
        try:
            # A sqlite connection as a context manager would commit, not close.
            with closing(open_sqlite_index(self.path / NV_META / "index.sqlite")) as database:
                query = "SELECT tar_file_id, sample_index FROM samples WHERE sample_key = ?"
                row = database.execute(query, (key,)).fetchone()
        except UnicodeEncodeError:  # a key that is not UTF-8 is in no index
            pass
        except (sqlite3.Error, OSError, UnicodeError) as error:
            raise FormatError(f"index.sqlite cannot be read: {error}; {remedy}") from error
        if row is not None and not (all(isinstance(value, int) for value in row) and 0 <= row[0] < len(self.shards)):
            raise FormatError(f"index.sqlite does not match the tars at {key}; {remedy}")
        return row if row is None else tuple(row)

    def encoder_or_reason(self, tokenizer: Path | None) -> tuple[ChatEncoder | None, str]:
        """Load the encoder, or return the reason why it cannot be loaded.

        Args:
            tokenizer: folder that overrides packing.json.

        Raises:
            FormatError: packing.json has no valid encoder.
            ConfigError: the encoder cannot be loaded with an explicit `tokenizer`.
        """
        try:
            encoder = self.load_encoder({} if tokenizer is None else {"tokenizer": tokenizer})
            if encoder.vision is not None and tokenizer is None:
                # Without an explicit tokenizer, an ambiguous `factor` is a reason to show no kinds of tokens, not an
                # error.
                encoder.vision.check_decided()
            return encoder, ""
        except ConfigError as error:
            if tokenizer is not None:
                raise
            return None, str(error)

    def encoder_loader(self, overrides: Mapping[str, Any] | None = None) -> PretrainedEncoder:
        """Find the tokenizer and check the settings in packing.json, without loading the encoder.

        Args:
            overrides: settings that replace the recorded settings: fields of `EncoderSettings` by name.

        Raises:
            FormatError: packing.json has no valid encoder.
            ConfigError: a setting is invalid, or its folder does not exist here.
        """
        overrides = overrides or {}
        settings = make(EncoderSettings, {**self._recorded_settings(), **overrides})
        if settings.tokenizer is None:
            raise ConfigError(f"{self.path} has no packing.json with a tokenizer. Pass `tokenizer`.")
        if "tokenizer" not in overrides and not settings.tokenizer.is_dir():
            raise ConfigError(
                f"the tokenizer {settings.tokenizer} of packing.json does not exist here. Pass `tokenizer` (verify "
                "--fast does not need it)."
            )
        return PretrainedEncoder(settings)

    def load_encoder(self, overrides: Mapping[str, Any] | None = None) -> ChatEncoder:
        """Load the encoder of `encoder_loader`.

        Raises:
            FormatError, ConfigError: as `encoder_loader`; it cannot be loaded, or results in other tokens.
        """
        loader = self.encoder_loader(overrides)
        encoder = loader.load()
        # Other tokens than those that were packed would be reported as damage of the dataset.
        if self.manifest is not None and not encoder.has_fingerprint(self.manifest.tokenizer_fingerprint):
            got = ", ".join(self.overridden(overrides or {})) or loader.settings.tokenizer
            raise ConfigError(
                f"the tokenizer, template and encoder settings must be those that {self.path} was packed with, got "
                f"{got}. Omit the settings that differ, or pass the `tokenizer` that it was packed with."
            )
        return encoder

    def overridden(self, overrides: Mapping[str, Any]) -> list[str]:
        """List the overrides that differ from packing.json, each as "`min_pixels` 100 (3136 in packing.json)".

        Args:
            overrides: argument of `load_encoder`.
        """
        if self.manifest is None:
            return []
        settings, recorded = make(EncoderSettings, overrides), make(EncoderSettings, self._recorded_settings())
        changes = []
        for name in overrides:
            value, before = getattr(settings, name), getattr(recorded, name)
            # packing.json may contain a relative path.
            is_same = is_same_folder(value, before) if isinstance(before, Path) else value == before
            if not is_same:
                changes.append(f"`{name}` {value} ({'not set' if before is None else before} in packing.json)")
        return changes

    def _recorded_settings(self) -> dict[str, Any]:
        """Return the encoder settings of packing.json; {} without packing.json."""
        if self.manifest is None:
            return {}
        recorded = self.manifest.encoder
        if (custom := recorded.get("processor_class")) is not None:
            # Importing a class that a file names would run code that the dataset chooses.
            raise ConfigError(
                f"{self.path} was packed with the Processor {custom}, which is not loaded by name. Use verify --fast, "
                "or check the samples from Python."
            )
        try:
            make(EncoderSettings, recorded, what="encoder setting")
        except ConfigError as error:
            raise FormatError(
                f"packing.json of {self.path} has no valid encoder (pack the data again): {error}"
            ) from error
        folders: dict[str, Any] = {
            name: self._recorded_folder(recorded[name]) for name in ("tokenizer", "processor") if recorded.get(name)
        }
        return {**recorded, **folders}

    def _recorded_folder(self, recorded: str) -> str:
        """Find a folder of packing.json. A relative path starts from the working folder of `pack`.

        That is often a folder above the dataset, also after both were moved.
        """
        if Path(recorded).is_absolute() or Path(recorded).exists() or is_remote(self.path):
            return recorded
        above = (folder / recorded for folder in self.path.absolute().parents)
        return str(next((folder for folder in above if folder.is_dir()), recorded))
