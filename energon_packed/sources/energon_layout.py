"""Layout: how the keys of a tar become records: by their parts, or as the dataset.yaml of an Energon dataset says."""

import hashlib
import json
import logging
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from energon_packed.errors import SourceError
from energon_packed.sources.base import changed_at
from energon_packed.sources.energon_flavors import FLAVORS, flavor_record
from energon_packed.sources.tar_records import KeyMembers, read_pack, read_records

NV_META = ".nv-meta"
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
        excluded: keys that split.yaml excludes; they are no records.
    """

    file: Path | None = None
    flavor: str = ""
    fields: tuple[tuple[str, str], ...] = ()
    guess_reason: str = ""
    excluded: frozenset[str] = frozenset()

    @property
    def is_guess(self) -> bool:
        """The parts are read without the code that the dataset names for them."""
        return bool(self.guess_reason)

    def records(self, group: KeyMembers) -> list[Any]:
        """The records of a key.

        Raises:
            RecordError: the key cannot be used.
        """
        if group.key in self.excluded:
            return []
        if self.flavor == "packed":
            group.check()
            return list(read_pack(group))
        if self.flavor:
            group.check()
            return [flavor_record(group, self.flavor, dict(self.fields))]
        return read_records(group)

    def digest(self) -> str:
        """Hex digest of what decides the records."""
        return hashlib.sha256(json.dumps([self.flavor, self.fields, sorted(self.excluded)]).encode()).hexdigest()


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
    file = folder / NV_META / "dataset.yaml"
    layout = _read_layout(file, changed_at(file)) if file.is_file() else Layout()
    shard = tar.absolute().relative_to(folder).as_posix() + "/"
    excluded = frozenset(name.removeprefix(shard) for name in read_split(folder)[1] if name.startswith(shard))
    return replace(layout, excluded=excluded) if excluded else layout


def read_split(folder: Path) -> tuple[dict[str, list[str]], list[str]]:
    """(shard names of each split, excluded names) of split.yaml, with brace ranges expanded; empty without the file.

    Raises:
        SourceError: split.yaml is invalid.
    """
    from braceexpand import braceexpand

    file = folder / NV_META / "split.yaml"
    if not file.is_file():
        return {}, []
    try:
        value = yaml.safe_load(file.read_bytes())
        parts = value["split_parts"] if "split_parts" in value else value["split"]
        splits = {
            str(split): [name for pattern in patterns or [] for name in braceexpand(str(pattern))]
            for split, patterns in parts.items()
        }
        excluded = [name for pattern in value.get("exclude") or [] for name in braceexpand(str(pattern))]
    except (OSError, yaml.YAMLError, LookupError, TypeError, AttributeError, ValueError) as error:
        raise SourceError(f"{file} is not a valid split file: {type(error).__name__} {error}") from error
    return splits, excluded


@lru_cache(maxsize=64)
def _read_layout(file: Path, changed: int) -> Layout:
    try:
        value = yaml.safe_load(file.read_bytes())
        kind = value.get("sample_type") or value
        module, name = str(kind.get("__module__", "")), str(kind.get("__class__", ""))
        fields = tuple((str(field), str(part)) for field, part in (value.get("field_map") or {}).items())
    except (OSError, yaml.YAMLError, AttributeError, TypeError) as error:
        raise SourceError(f"{file} is not a valid dataset file: {type(error).__name__} {error}") from error
    if module == "energon_packed.flavors" or module.startswith("energon_packed."):
        return Layout(file, "packed")
    flavor = name.removesuffix("Sample").removesuffix("Webdataset")
    is_standard = module == "megatron.energon" or module.startswith("megatron.energon.")
    if is_standard and name == "CrudeWebdataset":
        return Layout(file)
    if fields and is_standard and flavor in FLAVORS:
        return Layout(file, flavor, fields)
    what = f"names a sample_loader for {name}" if value.get("sample_loader") else f"names the sample class {name}"
    reason = f"{what}, code that is not run"
    _LOG.warning("%s %s; its samples are read by the names of their parts", file, reason)
    return Layout(file, guess_reason=reason)
