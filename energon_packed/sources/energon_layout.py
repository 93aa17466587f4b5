"""Layout: how the keys of a tar become records: by their parts, or as the dataset.yaml of an Energon dataset says."""

import hashlib
import json
import logging
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from energon_packed.errors import FormatError, SourceError
from energon_packed.foreign import read_yaml
from energon_packed.formats import CODECS
from energon_packed.metadatasets import NV_META, SPLIT_FILE, SplitFile, read_split
from energon_packed.sources.base import changed_at
from energon_packed.sources.energon_flavors import FLAVORS, flavor_record, sample_record
from energon_packed.sources.sample_loader import SampleLoader
from energon_packed.sources.tar_records import KeyMembers, raw_records, read_pack, read_records

DATASET_FILE = "dataset.yaml"
_LOG = logging.getLogger(__name__)
_LEVELS = 4  # shards may lie in folders below the dataset


@dataclass(frozen=True, slots=True)
class Layout:
    """How the keys of a tar become records.

    Attributes:
        file: the dataset.yaml that says so; None for a plain WebDataset.
        flavor: a name of `FLAVORS`, `packed` for our own flavors, or "" for the parts of each key.
        fields: pairs of sample field and part, of `field_map`.
        guess_reason: why a dataset is read by its parts, where another program would read it by code of its own.
        loader: code of the dataset that makes its samples; run only where `is_trusted`.
        holds_packs: a class that another packer of our layouts writes, so that the parts say what the samples are.
        is_trusted: the user wants `loader` to be run.
        is_raw: an adapter gets the parts of each key by their names.
        excluded: keys that split.yaml excludes; they are no records.
    """

    file: Path | None = None
    flavor: str = ""
    fields: tuple[tuple[str, str], ...] = ()
    guess_reason: str = ""
    loader: SampleLoader | None = None
    holds_packs: bool = False
    is_trusted: bool = False
    is_raw: bool = False
    excluded: frozenset[str] = frozenset()

    @property
    def is_guess(self) -> bool:
        """The parts are read without the code that the dataset names for them."""
        return bool(self.guess_reason) and not self.is_trusted and not self.is_raw

    def opened(self, *, trust_sample_loader: bool, for_adapter: bool) -> "Layout":
        """This layout, with what the user has decided about the code of the dataset.

        Raises:
            SourceError: only its code makes its samples, and is not trusted; or it is, and cannot be run.
        """
        if self.loader is not None and trust_sample_loader:
            self.loader.load()
            return replace(self, is_trusted=True)
        if for_adapter and (self.loader is not None or not self.flavor):
            return replace(self, flavor="", is_raw=True)
        if self.loader is not None and not self.holds_packs:
            raise SourceError(
                f"{self.loader.file} makes the samples of this dataset, and code of a dataset is not run by default; "
                "set `trust_sample_loader` to run it, or pass an `adapter` that reads the parts of each key"
            )
        if self.is_guess:
            _warn(self.file, self.guess_reason)
        return self

    def records(self, group: KeyMembers) -> list[Any]:
        """The records of a key.

        Raises:
            RecordError: the key cannot be used.
        """
        if group.key in self.excluded:
            return []
        if self.is_trusted and self.loader is not None:
            sample = self.loader.sample(group)
            return [sample_record(group, self.flavor, sample) if self.flavor in FLAVORS else sample]
        if self.is_raw:
            return raw_records(group)
        if self.flavor == "packed":
            group.check()
            return list(read_pack(group))
        if self.flavor:
            group.check()
            return [flavor_record(group, self.flavor, dict(self.fields))]
        return read_records(group)

    def digest(self) -> str:
        """Hex digest of what decides the records; code that is run counts by its text."""
        code = self.loader.digest() if self.loader is not None and self.is_trusted else ""
        content = [self.flavor, self.fields, sorted(self.excluded), self.is_raw, code]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def dataset_of(tar: Path) -> Path | None:
    """The Energon dataset that a tar belongs to, or None."""
    for folder in [*tar.absolute().parents][:_LEVELS]:
        if (folder / NV_META).is_dir():
            return folder
    return None


def layout_of(tar: Path) -> Layout:
    """How the keys of a tar are read: by the dataset.yaml of its dataset, else by their parts.

    Raises:
        SourceError: dataset.yaml is invalid.
    """
    folder = dataset_of(tar)
    if folder is None:
        return Layout()
    file = folder / NV_META / DATASET_FILE
    layout = _read_layout(file, changed_at(file)) if file.is_file() else Layout()
    if not (folder / NV_META / SPLIT_FILE).is_file():
        return layout
    shard = tar.absolute().relative_to(folder).as_posix() + "/"
    excluded = frozenset(name.removeprefix(shard) for name in split_of(folder).excluded if name.startswith(shard))
    return replace(layout, excluded=excluded) if excluded else layout


def split_of(folder: Path) -> SplitFile:
    """The split.yaml of an Energon dataset.

    Raises:
        SourceError: it is missing or invalid.
    """
    try:
        return read_split(folder)
    except FormatError as error:
        raise SourceError(str(error)) from error


@lru_cache(maxsize=64)
def _read_layout(file: Path, changed: int) -> Layout:
    try:
        value = read_yaml(file)
        kind = value.get("sample_type") or value
        module, name = str(kind.get("__module__", "")), str(kind.get("__class__", ""))
        fields = tuple((str(field), str(part)) for field, part in (value.get("field_map") or {}).items())
    except (OSError, yaml.YAMLError, AttributeError, TypeError) as error:
        raise SourceError(f"{file} is not a valid dataset file: {type(error).__name__} {error}") from error
    if module == "energon_packed.flavors" or module.startswith("energon_packed."):
        return Layout(file, "packed")
    if name in CODECS and CODECS[name].packed:  # of another package: told by content, no code of it is run
        return Layout(file, "packed")
    flavor = name.removesuffix("Sample").removesuffix("Webdataset")
    is_standard = module == "megatron.energon" or module.startswith("megatron.energon.")
    if is_standard and name == "CrudeWebdataset":
        return Layout(file)
    if fields and is_standard and flavor in FLAVORS:
        return Layout(file, flavor, fields)
    given = value.get("sample_loader")
    reason = f"names {'a sample_loader for' if given else 'the sample class'} {name}, code that is not run"
    if not given:
        return Layout(file, guess_reason=reason)
    parts = value.get("part_filter")
    if not isinstance(given, str) or not isinstance(parts, str | list):
        raise SourceError(f"{file} is not a valid dataset file: a sample_loader needs a name and a part_filter")
    loader = SampleLoader(file.parent, given, parts if isinstance(parts, str) else tuple(map(str, parts)))
    known = flavor if is_standard and flavor in FLAVORS else ""
    return Layout(file, known, guess_reason=reason, loader=loader, holds_packs=name in CODECS)


@lru_cache(maxsize=64)
def _warn(file: Path | None, reason: str) -> None:
    """Once per dataset, not per tar."""
    _LOG.warning("%s %s; its samples are read by the names of their parts", file, reason)
