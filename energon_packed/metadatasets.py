"""The only reader of Metadataset YAML and of `.nv-meta/split.yaml`.

A Metadataset is read as megatron-energon 7.4 reads it: the same scalars, keys, joined paths, products of weights and
inherited subflavors. Files that Energon refuses are refused here with the reason. Every command and every loader uses
this reader, so all of them accept the same files and refuse the others with the same message:

- `weight` and `repetitions` must be finite numbers above 0. Energon stops at the first batch of a blend with a weight
  of 0, so a dataset that is not wanted is removed from the file instead.
- Paths are local. A remote path cannot be checked before Energon runs code that is stored there.
- Every path is an Energon dataset (a folder with `.nv-meta`), a JSONL file or another Metadataset.
- The split of a dataset that is read has shards.
- Joins, subsets and `split_config` are refused: the number of packs, the steps of an epoch and the checks of
  packing.json hold for whole splits of split.yaml only.
- An object (`__module__`) of another package is refused unless the file is trusted.

The first three rules and the last one hold for the whole file, as Energon opens all splits of it. The other rules hold
for the split that is read. Nothing here imports Energon or torch.
"""

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from energon_packed.errors import ConfigError, FormatError
from energon_packed.files import inner_names, read_yaml
from energon_packed.options import short

NV_META = ".nv-meta"
SPLIT_FILE = "split.yaml"
TRUST_REMEDY = "review it and set `trust_sample_loader=True`"
Mode = Literal["weight", "repetitions", "once"]

_ENERGON = "megatron.energon"
_SCHEMAS = ("Metadataset", "MetadatasetV2")
_DEEPEST = 16  # Metadatasets inside Metadatasets
_MOST_LEAVES = 10_000  # of one split: nested files that name each other twice stand for billions
_LISTS: Mapping[bool, Mapping[str, Mode]] = {  # by schema: V2 or V1
    True: {"blend": "weight", "blend_epochized": "repetitions"},
    False: {"datasets": "weight"},
}
_COMMON = ("split_part", "subflavors", "shuffle_over_epochs_multiplier", "dataset_config", "split_config")
_REFERENCE = {True: ("path", "aux", "subset", *_COMMON), False: ("path", "subflavor", *_COMMON)}
_JOIN = ("join", "joiner", "subset", *_COMMON)
_KINDS: Mapping[str, tuple[tuple[type, ...], str]] = {
    "path": ((str,), "text"),
    "split_part": ((str, type(None)), "text"),
    "subflavor": ((str, type(None)), "text"),
    "subflavors": ((dict, type(None)), "a mapping"),
    "shuffle_over_epochs_multiplier": ((int, type(None)), "an integer"),
    "dataset_config": ((str, type(None)), "text"),
    "split_config": ((str, type(None)), "text"),
    "aux": ((dict, type(None)), "a mapping"),
    "subset": ((dict, type(None)), "a mapping"),
    "join": ((dict, list), "a list or a mapping"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One dataset of a split, after all nested Metadatasets are resolved.

    Attributes:
        path: folder with `.nv-meta`, or a JSONL file.
        split_part: split of the dataset.
        weight: share of the draws, 0 to 1; None in a split that does not draw by weight.
        repetitions: how often an epoch has each sample; None in a split that draws by weight.
        subflavors: of all Metadatasets that lead here; those of an outer one win.
        dataset_config: file that replaces dataset.yaml, or None.
    """

    path: Path
    split_part: str
    weight: float | None = None
    repetitions: float | None = None
    subflavors: Mapping[str, Any] = field(default_factory=dict)
    dataset_config: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One reference of a Metadataset, as it is written.

    Attributes:
        path: absolute path; `..` is removed from the text before links are followed, as by Energon.
        split_part: split that is read there; None for that of the outer split.
        number: weight or repetitions; 1 if not given.
        subflavors, dataset_config: as in `Leaf`.
        aux: paths of the auxiliary datasets and folders, by name.
        split_config: file that replaces split.yaml, or None.
        join: the joined datasets; empty for a single one.
        metadataset: the Metadataset at `path`; None for a dataset.
        fault: why the whole file is refused, or None.
        unsupported: why the splits with this entry are refused, or None.
    """

    path: Path
    split_part: str | None = None
    number: float = 1.0
    subflavors: Mapping[str, Any] = field(default_factory=dict)
    aux: Mapping[str, Path] = field(default_factory=dict)
    dataset_config: str | None = None
    split_config: str | None = None
    join: tuple["Entry", ...] = ()
    metadataset: "Metadataset | None" = None
    fault: str | None = None
    unsupported: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Blend:
    """One split of a Metadataset.

    Attributes:
        mode: meaning of the numbers of the entries: `weight`, `repetitions`, or `once` for a single reference.
        entries: its references, in order.
        unsupported: why it is refused as a whole, or None.
    """

    mode: Mode
    entries: tuple[Entry, ...]
    unsupported: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Metadataset:
    """A Metadataset file with everything that it refers to.

    Attributes:
        path: the YAML file, as given.
        splits: by name, in the order of the file.
    """

    path: Path
    splits: Mapping[str, Blend]

    def entries(self) -> list[Entry]:
        """All references of all splits, those of joins and of nested Metadatasets included, each once."""
        return [entry for inner in self._nested() for entry in inner._own_entries()]

    def files(self) -> list[Path]:
        """This file and all nested Metadatasets, each once."""
        return [inner.path for inner in self._nested()]

    def check_file(self) -> None:
        """Refuse a file with a fault in any split, nested Metadatasets included.

        Raises:
            ConfigError: the message has the first fault and the number of others.
        """
        if faults := [entry.fault for entry in self.entries() if entry.fault is not None]:
            raise ConfigError(faults[0] + (f" (and {len(faults) - 1} more faults)" if len(faults) > 1 else ""))

    def leaves(self, split: str) -> list[Leaf]:
        """The datasets of one split, nested Metadatasets resolved, in the order of Energon.

        Raises:
            ConfigError: a fault of the file, an unknown split, a join or a subset, or a dataset without shards in
                its split.
            FormatError: the split.yaml of a dataset cannot be read.
        """
        self.check_file()
        leaves = self._flatten(split, {})[1]
        for folder, part in dict.fromkeys((leaf.path, leaf.split_part) for leaf in leaves):
            if folder.is_dir():
                read_split(folder).required(part)
        return leaves

    def mode(self, split: str) -> Mode:
        """What the numbers of a split mean; of the Metadataset behind it for a single reference to one.

        Raises:
            ConfigError, FormatError: as `leaves`.
        """
        self.check_file()
        return self._flatten(split, {})[0]

    def all_leaves(self) -> tuple[list[Leaf], list[str]]:
        """The datasets of all splits that can be read, and why the others cannot, each reason once."""
        leaves: list[Leaf] = []
        problems: dict[str, None] = {}
        for split in self.splits:
            try:
                leaves += self.leaves(split)
            except (ConfigError, FormatError) as error:
                problems[str(error)] = None
        return leaves, list(problems)

    def _nested(self) -> list["Metadataset"]:
        found: dict[Path, Metadataset] = {}
        stack = [self]
        while stack:
            one = stack.pop()
            if one.path not in found:
                found[one.path] = one
                stack += [entry.metadataset for entry in one._own_entries() if entry.metadataset is not None]
        return list(found.values())

    def _own_entries(self) -> list[Entry]:
        found = [entry for blend in self.splits.values() for entry in blend.entries]
        return [*found, *(joined for entry in found for joined in entry.join)]

    def _flatten(self, split: str, subflavors: Mapping[str, Any]) -> tuple[Mode, list[Leaf]]:
        if split not in self.splits:
            raise ConfigError(f"{self.path} has no split {split!r}; it has {', '.join(self.splits)}")
        blend = self.splits[split]
        total = sum(entry.number for entry in blend.entries)
        leaves: list[Leaf] = []
        for entry in blend.entries:
            if reason := blend.unsupported or entry.unsupported:
                raise ConfigError(reason)
            part = entry.split_part or split
            flavors = {**entry.subflavors, **subflavors}
            if entry.metadataset is not None:
                mode, inner = entry.metadataset._flatten(part, flavors)
            else:
                leaf = Leaf(
                    path=entry.path,
                    split_part=part,
                    repetitions=1,
                    subflavors=flavors,
                    dataset_config=entry.dataset_config,
                )
                mode, inner = "once", [leaf]
            if blend.mode == "once":
                return mode, inner
            if mode not in ("once", blend.mode):
                raise ConfigError(
                    f"{self.path} blends by {blend.mode}, and {entry.path} by {mode}; Energon cannot mix them, list "
                    "its datasets directly"
                )
            for leaf in inner:
                if blend.mode == "weight":
                    share = (1.0 if leaf.weight is None else leaf.weight) * entry.number / total
                    leaves.append(replace(leaf, weight=share, repetitions=None))
                else:
                    leaves.append(replace(leaf, repetitions=entry.number * (leaf.repetitions or 1)))
            if len(leaves) > _MOST_LEAVES:
                raise FormatError(f"{self.path} stands for more than {_MOST_LEAVES:,} datasets; list them directly")
        return blend.mode, leaves


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitFile:
    """The content of split.yaml, with brace ranges expanded.

    Attributes:
        file: its path.
        parts: shard names of each split, in order, excluded ones included.
        excluded: shard names, and `SHARD/KEY` for single packs, that are skipped.
        exclude_patterns: `excluded` as it is written.
    """

    file: Path
    parts: Mapping[str, list[str]]
    excluded: frozenset[str]
    exclude_patterns: list[str]

    def shards(self, split: str) -> list[str]:
        """Shard names of a split, without excluded ones; empty for an unknown split."""
        return [name for name in self.parts.get(split, []) if name not in self.excluded]

    @property
    def excluded_packs(self) -> list[str]:
        """`SHARD/KEY` of single packs that are excluded."""
        return sorted(name for name in self.excluded if "/" in name)

    def required(self, split: str) -> list[str]:
        """As `shards`.

        Raises:
            ConfigError: there is none.
        """
        if names := self.shards(split):
            return names
        there = ", ".join(name for name in self.parts if self.shards(name)) or "none"
        raise ConfigError(f"{self.file.parents[1]} has no packs in split {split!r}; it has {there}")


def read_split(folder: Path) -> SplitFile:
    """Read split.yaml as written by energon-packed, `energon prepare` (`split_parts`) or LLaVA-OneVision-2 (`split`).

    Args:
        folder: with `.nv-meta`.

    Raises:
        FormatError: split.yaml is missing or invalid, or names a file outside of the folder.
    """
    file = folder / NV_META / SPLIT_FILE
    try:
        value = read_yaml(file)
        listed = value["split_parts"] if "split_parts" in value else value["split"]
        patterns = value.get("exclude") or []
        return SplitFile(
            file=file,
            parts={str(name): inner_names(shards or []) for name, shards in listed.items()},
            excluded=frozenset(inner_names(patterns)),
            exclude_patterns=patterns,
        )
    except (OSError, yaml.YAMLError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise FormatError(f"{file} is not a valid split file: {type(error).__name__} {error}") from error


def prepared_folder(path: Path) -> Path | None:
    """`path` or `path/webdataset`, the first that has `.nv-meta`; None if neither has."""
    return next((folder for folder in (path, path / "webdataset") if (folder / NV_META).is_dir()), None)


def is_metadataset(path: Path) -> bool:
    """Whether a path is a YAML file, as a Metadataset is."""
    return path.suffix.lower() in (".yaml", ".yml") and path.is_file()


def read_metadataset(path: str | Path, *, trusted: bool = False) -> Metadataset:
    """Read a Metadataset, V1 or V2, and all Metadatasets that it refers to.

    Faults of single references are attributes of the entries; `leaves` and `check_file` raise them.

    Args:
        path: the YAML file.
        trusted: objects of other packages than Energon are allowed in it.

    Raises:
        FormatError: the file, or a nested one, is not a Metadataset that Energon can read, or contains itself.
        ConfigError: it names an object of another package and is not `trusted`.
    """
    path = Path(path)
    if not path.name.endswith(".yaml"):
        raise FormatError(
            f"{path} is not a Metadataset that Energon can read: its name must end in .yaml; rename the file"
        )
    return _read(path, trusted, (), {})


def joined(folder: Path, name: str) -> Path:
    """A path as Energon joins it: `..` is removed from the text, before links are followed."""
    return Path(os.path.normpath(folder.absolute() / name))


def mappings(value: Any) -> Iterator[dict[str, Any]]:
    """All mappings of a tree of plain types."""
    stack = [value]
    while stack:
        one = stack.pop()
        if isinstance(one, dict):
            yield one
            stack += one.values()
        elif isinstance(one, list):
            stack += one


def runs_code(file: Path, kind: Any, folder: Path | None = None) -> ConfigError:
    """The error for a file that names an object of another package.

    Args:
        file: the file.
        kind: mapping with `__module__`, or None.
        folder: dataset that `nv-meta` would repair.
    """
    named = [str(kind.get(name, ""))[:100] for name in ("__module__", "__class__", "__function__")] if kind else []
    nv_meta = f", or run energon-packed nv-meta {folder}" if folder else ""
    return ConfigError(
        f"{file} names {'.'.join(filter(None, named)) or 'no class'}, which is neither of energon-packed nor of "
        f"Energon; loading would run it: {TRUST_REMEDY}{nv_meta}"
    )


def _read(path: Path, trusted: bool, outer: tuple[Path, ...], known: dict[Path, Metadataset]) -> Metadataset:
    """Read one file; `outer` are the files that lead to it, and `known` those that were read before."""
    place = joined(path.parent, path.name)
    if place in outer or len(outer) > _DEEPEST:
        raise FormatError(f"{path} contains itself")
    if place in known:
        return known[place]
    try:
        value = read_yaml(path, as_energon=True)
    except (OSError, yaml.YAMLError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise _invalid(path, " ".join(str(reason).split())[:300]) from error
    if not isinstance(value, dict):
        raise _invalid(path, f"it is {_kind(value)}, not a mapping")
    module, name = value.get("__module__"), value.get("__class__")
    if not trusted:
        _check_objects(path, value)
    is_v2 = module is not None and name == _SCHEMAS[1]  # Energon takes V1 unless both are given
    if unknown := sorted(value.keys() - {"__module__", "__class__", "splits"}):
        raise _invalid(path, f"it has the unknown key {unknown[0][:100]!r}")
    splits = value.get("splits")
    if not isinstance(splits, dict) or not splits:
        raise _invalid(path, "it has no splits")
    reader = _Reader(path, is_v2, trusted, (*outer, place), known)
    found = Metadataset(path=path, splits={split: reader.blend(split, one) for split, one in splits.items()})
    known[place] = found
    return found


def _check_objects(path: Path, value: dict[str, Any]) -> None:
    """Refuse all objects but the Metadataset itself, and joiners: joins are refused anyway."""
    if value.get("__module__", _ENERGON) != _ENERGON or value.get("__class__", _SCHEMAS[0]) not in _SCHEMAS:
        raise runs_code(path, value)
    joiners = [id(one["joiner"]) for one in mappings(value) if "join" in one and "joiner" in one]
    for one in mappings({name: item for name, item in value.items() if name not in ("__module__", "__class__")}):
        if "__module__" in one and id(one) not in joiners:
            raise runs_code(path, one)


@dataclass(frozen=True, slots=True)
class _Reader:
    """Makes the entries of one file.

    Attributes:
        file: the Metadataset.
        is_v2: MetadatasetV2, otherwise Metadataset.
        trusted, outer, known: as in `_read`.
    """

    file: Path
    is_v2: bool
    trusted: bool
    outer: tuple[Path, ...]
    known: dict[Path, Metadataset]

    def blend(self, split: str, value: Any) -> Blend:
        if not isinstance(value, dict):
            raise _invalid(self.file, f"split {split!r} is {_kind(value)}, not a mapping")
        listed = [name for name in _LISTS[self.is_v2] if name in value]
        if not listed and self.is_v2:
            return Blend(mode="once", entries=(self.entry(value, None),))
        if not listed:
            more = ", or add the lines __module__: megatron.energon and __class__: MetadatasetV2"
            raise _invalid(self.file, f"split {split!r} has no 'datasets'; add them{more}")
        name = listed[0]
        self.check_keys(value, (name, "subset") if self.is_v2 else (name,))
        items = value[name]
        if not isinstance(items, list) or not items:
            raise _invalid(self.file, f"{name!r} of split {split!r} has no datasets")
        mode = _LISTS[self.is_v2][name]
        unsupported = _unsupported(self.file, "'subset'") if self.has_subset(value) else None
        return Blend(mode=mode, entries=tuple(self.entry(item, mode) for item in items), unsupported=unsupported)

    def entry(self, value: Any, number_name: str | None) -> Entry:
        """One reference.

        Args:
            value: its mapping.
            number_name: `weight` or `repetitions`, if it may have one.
        """
        if not isinstance(value, dict):
            raise _invalid(self.file, f"a dataset is {_kind(value)}, not a mapping")
        numbers = () if number_name is None else (number_name,)
        if self.is_v2 and "join" in value:
            return self.join(value, numbers)
        self.check_keys(value, (*_REFERENCE[self.is_v2], *numbers))
        if "path" not in value:
            raise _invalid(self.file, "it has a dataset without a path")
        subflavors = dict(value.get("subflavors") or {})
        if value.get("subflavor") is not None:  # of old V1 files
            subflavors = {"__subflavor__": value["subflavor"], **subflavors}
        found = Entry(
            path=joined(self.file.parent, value["path"]),
            split_part=value.get("split_part"),
            subflavors=subflavors,
            dataset_config=value.get("dataset_config"),
            split_config=value.get("split_config"),
        )
        if "://" in value["path"]:
            return replace(found, fault=self.remote(value["path"]))
        if number_name is not None:
            number = value.get(number_name, 1)
            if not _is_share(number):
                limit = f"{number_name} of {value['path']} must be above 0, got {short(number)}"
                return replace(found, fault=f"{self.file}: {limit}; remove a dataset that is not wanted")
            found = replace(found, number=number)
        try:
            return self.resolved(found, value)
        except OSError as error:
            return replace(found, fault=f"{self.file} refers to {found.path}: {error.strerror}")

    def resolved(self, entry: Entry, value: dict[str, Any]) -> Entry:
        """The entry with the Metadataset behind it, its auxiliary data and its faults."""
        path = entry.path
        if path.is_file() and (path.name.endswith(".yaml") or not self.is_v2):
            for name in ("aux", "dataset_config", "split_config"):
                if value.get(name) is not None:
                    raise _invalid(self.file, f"it sets {name!r} of the Metadataset {path}, which only datasets have")
            inner = _read(path, self.trusted, self.outer, self.known)
            entry = replace(entry, metadataset=inner)
        elif not (path / NV_META).is_dir() and not (path.is_file() and path.name.endswith(".jsonl")):
            return replace(entry, fault=f"{self.file} refers to {path}, {_missing(path)}")
        if value.get("aux") is not None:
            paths, fault = self.aux(value["aux"])
            entry = replace(entry, aux=paths, fault=fault)
        refused = "split_config" if entry.split_config not in (None, SPLIT_FILE) else ""
        if self.has_subset(value):
            refused = "subset"
        return replace(entry, unsupported=_unsupported(self.file, f"{refused!r} of {path}")) if refused else entry

    def join(self, value: dict[str, Any], numbers: tuple[str, ...]) -> Entry:
        self.check_keys(value, (*_JOIN, *numbers))
        items = value["join"].values() if isinstance(value["join"], dict) else value["join"]
        found = []
        for item in items:
            if not isinstance(item, dict) or not isinstance(item.get("path"), str):
                raise _invalid(self.file, "'join' has a dataset without a path")
            config = item.get("dataset_config"), item.get("split_config")
            found.append(Entry(path=joined(self.file.parent, item["path"]), dataset_config=config[0],
                               split_config=config[1]))  # fmt: skip
        fault = _unsupported(self.file, "'join'")
        return Entry(path=found[0].path if found else self.file, join=tuple(found), fault=fault)

    def aux(self, value: dict[str, Any]) -> tuple[dict[str, Path], str | None]:
        """Paths of auxiliary datasets (prepared by Energon) and `filesystem://` folders, and the first fault."""
        paths: dict[str, Path] = {}
        fault = None
        for name, item in value.items():
            is_folder = isinstance(item, dict) and item.keys() == {"fs_path"}
            given = next(iter(item.values())) if isinstance(item, dict) and len(item) == 1 else item
            if not isinstance(given, str) or (isinstance(item, dict) and not item.keys() <= {"path", "fs_path"}):
                raise _invalid(self.file, f"aux {name!r} is not a path")
            if isinstance(item, str) and given.startswith("filesystem://"):
                is_folder, given = True, given.removeprefix("filesystem://")
            if "://" in given:
                fault = fault or self.remote(given)
                continue
            paths[name] = joined(self.file.parent, given)
            if not is_folder and not (paths[name] / NV_META / "index.sqlite").is_file():
                fault = fault or (
                    f"{self.file}: aux {name!r} refers to {paths[name]}, which is not a prepared Energon dataset; "
                    "run energon-packed nv-meta on it, or write filesystem://PATH for a folder of files"
                )
        return paths, fault

    def has_subset(self, value: dict[str, Any]) -> bool:
        """Whether a `subset` is given, which must be valid."""
        subset = value.get("subset")
        if subset is None:
            return False
        if not isinstance(subset, dict) or not isinstance(subset.get("range"), list) or len(subset["range"]) != 2:
            raise _invalid(self.file, "'subset' has no range of two values")
        return True

    def remote(self, path: str) -> str:
        return (
            f"{self.file} refers to {path}, which is remote and cannot be looked at before it is loaded; use a path "
            "of a mounted file system"
        )

    def check_keys(self, value: dict[str, Any], allowed: tuple[str, ...]) -> None:
        """Refuse keys and types that Energon refuses."""
        if unknown := sorted(value.keys() - set(allowed)):
            raise _invalid(self.file, f"it has the unknown key {unknown[0][:100]!r} beside {', '.join(allowed[:2])}")
        for name, item in value.items():
            kinds, what = _KINDS.get(name, ((object,), ""))
            if not isinstance(item, kinds):
                raise _invalid(self.file, f"{name!r} is {short(item)}, not {what}")


def _is_share(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _kind(value: Any) -> str:
    return {list: "a list", str: "text", type(None): "empty"}.get(type(value), short(value))


def _missing(path: Path) -> str:
    if inner := prepared_folder(path):
        return f"which has no {NV_META} folder; use {inner}"
    if path.is_dir():
        return f"which has no {NV_META} folder; run energon-packed nv-meta on it"
    if path.is_file():
        return "which is not a dataset folder, a .yaml or a .jsonl file"
    return "which does not exist; copy the dataset there, or correct the path"


def _unsupported(file: Path, what: str) -> str:
    return f"{file} uses {what}, which only Energon's own loader reads; list whole splits instead"


def _invalid(path: Path, reason: str) -> FormatError:
    return FormatError(f"{path} is not a Metadataset that Energon can read: {reason}")
