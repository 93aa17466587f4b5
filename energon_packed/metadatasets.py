"""The only reader of Metadataset YAML and of `.nv-meta/split.yaml`. Input: YAML files. Output: datasets and shards.

    read_metadataset   YAML file to `Metadataset`: all splits, references and nested Metadatasets, with their faults
    Metadataset        `leaves(split)` resolves nested Metadatasets to datasets with weights or repetitions
    read_split         split.yaml to `SplitFile`: the shards of each split, and the excluded packs

A Metadataset is read as megatron-energon 7.4 reads it: the same scalars, keys, joined paths, products of weights and
inherited subflavors. Files that Energon refuses are refused here with the reason. Every command and every loader uses
this reader, so all of them accept the same files and refuse the others with the same message:

1. `weight` and `repetitions` must be finite numbers above 0. Energon stops at the first batch of a blend with a weight
   of 0, so an unwanted dataset must be removed from the file instead.
2. Paths are local, or in an object store as msc://PROFILE/KEY. Other URLs cannot be checked before Energon runs code
   that is stored there.
3. Every path is an Energon dataset (a folder with `.nv-meta`), a JSONL file or another Metadataset.
4. The split of a dataset that is read has shards.
5. Joins, subsets and `split_config` are refused: the number of packs, the steps of an epoch and the checks of
   packing.json are valid for whole splits of split.yaml only.
6. An object (`__module__`) of another package is refused unless the file is trusted.

Rules 1 to 3 and 6 apply to the whole file, as Energon opens all splits of it. Rules 4 and 5 apply to the split that is
read. This module imports neither Energon nor torch.
"""

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from energon_packed.errors import ConfigError, FormatError, first_of
from energon_packed.files import inner_names, of_type, read_yaml
from energon_packed.options import short
from energon_packed.records.fields import is_number
from energon_packed.storage import as_path, is_remote, map_paths
from energon_packed.system import raise_resource_error

NV_META = ".nv-meta"
SPLIT_FILE = "split.yaml"
TRUST_REMEDY = "review it and set `trust_sample_loader=True`"
Mode = Literal["weight", "repetitions", "once"]

_ENERGON = "megatron.energon"
_SCHEMAS = ("Metadataset", "MetadatasetV2")
_DEEPEST = 16  # Metadatasets inside Metadatasets
_MOST_LEAVES = 10_000  # of a split: nested files that list each other twice expand to billions
_LISTS: Mapping[bool, Mapping[str, Mode]] = {  # keys of a weighted list by schema: True for V2, False for V1
    True: {"blend": "weight", "blend_epochized": "repetitions"},
    False: {"datasets": "weight"},
}
# Keys that Energon accepts (its dataclasses in megatron/energon/metadataset); other keys are errors there, too.
_COMMON = ("split_part", "subflavors", "shuffle_over_epochs_multiplier", "dataset_config", "split_config")
_REFERENCE = {True: ("path", "aux", "subset", *_COMMON), False: ("path", "subflavor", *_COMMON)}
_READ_BY_ENERGON = "msc://"  # the only URLs that Energon opens
_JOIN = ("join", "joiner", "subset", *_COMMON)
_KINDS: Mapping[str, tuple[tuple[type, ...], str]] = {
    "path": ((str,), "a string"),
    "split_part": ((str, type(None)), "a string"),
    "subflavor": ((str, type(None)), "a string"),
    "subflavors": ((dict, type(None)), "a mapping"),
    "shuffle_over_epochs_multiplier": ((int, type(None)), "an integer"),
    "dataset_config": ((str, type(None)), "a string"),
    "split_config": ((str, type(None)), "a string"),
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
        subflavors: merged from all Metadatasets that lead here; the outer Metadataset overrides the inner.
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
    """One reference of a Metadataset, as written in the file.

    Attributes:
        path: absolute path; `..` is removed from the text before links are followed, as by Energon.
        split_part: split that is read there; None if it is the split of this reference.
        number: weight or repetitions; 1 by default.
        subflavors, dataset_config: as in `Leaf`.
        aux: paths of the auxiliary datasets and folders, by name.
        split_config: file that replaces split.yaml, or None.
        join: the datasets of a join; empty for a plain reference.
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
class MetadatasetSplit:
    """One split of a Metadataset.

    Attributes:
        mode: meaning of `Entry.number`: `weight`, `repetitions`, or `once` for a single reference.
        entries: the references, in order.
        unsupported: why the whole split is refused, or None.
    """

    mode: Mode
    entries: tuple[Entry, ...]
    unsupported: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Metadataset:
    """A Metadataset file with everything that it refers to.

    Attributes:
        path: the YAML file, as passed.
        splits: by name, in the order of the file.
        content: the file as plain types.
    """

    path: Path
    splits: Mapping[str, MetadatasetSplit]
    content: Mapping[str, Any] = field(repr=False, compare=False)

    def entries(self) -> list[Entry]:
        """Return all references of all splits, including joins and nested Metadatasets, each once."""
        return [entry for inner in self.nested() for entry in inner._own_entries()]

    def check_file(self) -> None:
        """Refuse a file with a fault in any split, nested Metadatasets included.

        Raises:
            ConfigError: the message has the first fault, and counts the other faults.
        """
        if faults := [entry.fault for entry in self.entries() if entry.fault is not None]:
            raise ConfigError(first_of(faults, "fault"))

    def leaves(self, split: str) -> list[Leaf]:
        """Return the datasets of `split`, nested Metadatasets resolved, in the order of Energon.

        Raises:
            ConfigError: a fault of the file, an unknown split, a join or a subset, or a dataset without shards in
                its split.
            FormatError: the split.yaml of a dataset cannot be read.
        """
        self.check_file()
        leaves = self._flatten(split, {})[1]
        # Each split.yaml is read once: a dataset may occur many times in nested files.
        parts = dict.fromkeys((leaf.path, leaf.split_part) for leaf in leaves)
        map_paths(_check_split, [folder for folder, _ in parts], [part for _, part in parts])
        return leaves

    def mode(self, split: str) -> Mode:
        """Return the draw mode of a split; a split with a single reference has the mode of its target.

        Raises:
            ConfigError, FormatError: as `leaves`.
        """
        self.check_file()
        return self._flatten(split, {})[0]

    def all_leaves(self) -> tuple[list[Leaf], list[str]]:
        """Return the datasets of all readable splits, and the reasons why other splits cannot be read, each once."""
        leaves: list[Leaf] = []
        problems: dict[str, None] = {}
        for split in self.splits:
            try:
                leaves += self.leaves(split)
            except (ConfigError, FormatError) as error:
                problems[str(error)] = None
        return leaves, list(problems)

    def nested(self) -> list["Metadataset"]:
        """Return this Metadataset and all nested Metadatasets, each once."""
        nested: dict[Path, Metadataset] = {}
        # By path, since a file may be referenced many times; a recursion would expand all of these references.
        stack = [self]
        while stack:
            metadataset = stack.pop()
            if metadataset.path not in nested:
                nested[metadataset.path] = metadataset
                stack += [entry.metadataset for entry in metadataset._own_entries() if entry.metadataset is not None]
        return list(nested.values())

    def _own_entries(self) -> list[Entry]:
        entries = [entry for split in self.splits.values() for entry in split.entries]
        return [*entries, *(joined for entry in entries for joined in entry.join)]

    def _flatten(self, split: str, subflavors: Mapping[str, Any]) -> tuple[Mode, list[Leaf]]:
        """Resolve the references of a split, with the subflavors of the outer Metadatasets."""
        if split not in self.splits:
            raise ConfigError(
                f"{self.path} has no split {split!r}; it has {', '.join(self.splits)}. Pass one of these as `split`, "
                "blend again with energon-packed metadataset --val DIR"
            )
        content = self.splits[split]
        total = sum(entry.number for entry in content.entries)
        leaves: list[Leaf] = []
        for entry in content.entries:
            if reason := content.unsupported or entry.unsupported:
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
            if content.mode == "once":  # a split with a single reference is that reference
                return mode, inner
            if mode not in ("once", content.mode):
                raise ConfigError(
                    f"{self.path} blends by {content.mode}, and {entry.path} by {mode}; Energon cannot mix them, list "
                    "its datasets directly"
                )
            # As in Energon: weights are normalized within each file, then multiplied along the path to a dataset;
            # repetitions are multiplied without normalization.
            for leaf in inner:
                if content.mode == "weight":
                    share = (1.0 if leaf.weight is None else leaf.weight) * entry.number / total
                    leaves.append(replace(leaf, weight=share, repetitions=None))
                else:
                    leaves.append(replace(leaf, repetitions=entry.number * (leaf.repetitions or 1)))
            if len(leaves) > _MOST_LEAVES:
                raise FormatError(f"{self.path} expands to more than {_MOST_LEAVES:,} datasets; list them directly")
        return content.mode, leaves


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitFile:
    """The content of split.yaml, with brace ranges expanded.

    Attributes:
        file: its path.
        parts: shard names of each split, in order, including excluded shards.
        excluded: skipped shards by name, and skipped packs as `SHARD/KEY`.
        exclude_patterns: `excluded` as written in the file, with brace ranges.
    """

    file: Path
    parts: Mapping[str, list[str]]
    excluded: frozenset[str]
    exclude_patterns: list[str]

    def shards(self, split: str) -> list[str]:
        """Return the shard names of a split without excluded shards; an empty list for an unknown split."""
        return [name for name in self.parts.get(split, []) if name not in self.excluded]

    @property
    def excluded_packs(self) -> list[str]:
        """`SHARD/KEY` of each excluded pack, sorted."""
        return sorted(name for name in self.excluded if "/" in name)

    def required(self, split: str, option: str = "split") -> list[str]:
        """Return the shard names of a split, which must have any.

        Args:
            split: name of the split.
            option: name of the argument that selects the split, for the error.

        Raises:
            ConfigError: the split is unknown or empty; the message lists the splits with shards.
        """
        if names := self.shards(split):
            return names
        filled = ", ".join(name for name in self.parts if self.shards(name)) or "none"
        raise ConfigError(
            f"{self.file.parents[1]} has no packs in split {split!r}; it has {filled}. Pass one of these as "
            f"`{option}`, or pack again with --split train=0.98,val=0.02"
        )


def read_split(folder: Path) -> SplitFile:
    """Read split.yaml as written by energon-packed, `energon prepare` (`split_parts`) or LLaVA-OneVision-2 (`split`).

    Args:
        folder: with `.nv-meta`.

    Raises:
        FormatError: split.yaml is missing or invalid, or names a file outside of the folder.
        ResourceError: open files, permissions or the disk fail.
    """
    file = folder / NV_META / SPLIT_FILE
    try:
        value = of_type(read_yaml(file), dict)
        # Brace ranges are expanded before use, and names may not leave the folder: the file is untrusted.
        listed = value["split_parts"] if "split_parts" in value else value["split"]
        patterns = value.get("exclude") or []
        return SplitFile(
            file=file,
            parts={str(name): inner_names(shards or []) for name, shards in of_type(listed, dict).items()},
            excluded=frozenset(inner_names(patterns)),
            exclude_patterns=patterns,
        )
    except (OSError, yaml.YAMLError, KeyError, ValueError) as error:
        raise_resource_error(error, file)
        raise FormatError(f"{file} is not a valid split file: {type(error).__name__} {error}") from error


def _check_split(folder: Path, split: str) -> None:
    if not folder.name.endswith(".jsonl") or folder.is_dir():  # JSONL files have no splits
        read_split(folder).required(split)


def prepared_folder(path: Path) -> Path | None:
    """Return `path` or `path/webdataset`, the first that has `.nv-meta`; None if neither has."""
    folders = [path, path / "webdataset"]
    found = map_paths(lambda path: path.is_dir(), [folder / NV_META for folder in folders])
    return next((folder for folder, is_prepared in zip(folders, found, strict=True) if is_prepared), None)


def is_metadataset(path: Path) -> bool:
    """Return whether a path is a YAML file, as a Metadataset is."""
    return path.suffix.lower() in (".yaml", ".yml") and path.is_file()


def read_metadataset(path: str | Path, *, trusted: bool = False) -> Metadataset:
    """Read a Metadataset, V1 or V2, and all Metadatasets that it refers to.

    Faults of single references are attributes of the entries, so that `inspect` can show a faulty file; `leaves` and
    `check_file` raise them.

    Args:
        path: the YAML file.
        trusted: allow objects of packages other than Energon in the file.

    Raises:
        FormatError: the file, or a nested file, is not a Metadataset that Energon can read, or contains itself.
        ConfigError: it names an object of another package, and `trusted` is False.
    """
    path = as_path(path)
    if path.suffix.lower() not in (".yaml", ".yml"):
        remedy = "Pack it with energon-packed pack, or load its records with get_raw_loader."
        raise FormatError(
            f"{path} must be a dataset folder or a Metadataset (.yaml), got another file. "
            f"{'Pass the folder of the tar.' if path.suffix == '.tar' else remedy}"
        )
    if not path.name.endswith(".yaml"):
        raise FormatError(
            f"{path} is not a Metadataset that Energon can read: its name must end in .yaml; rename the file"
        )
    return _read(path, trusted, (), {})


def energon_join(folder: Path, name: str) -> Path:
    """Join a path as Energon does: `..` is removed from the string, before links are followed."""
    if is_remote(name):
        return as_path(name).resolve()
    joined = as_path(str(folder.absolute() / name))  # an absolute name in a folder of a store is a local path
    return joined.resolve() if is_remote(joined) else Path(os.path.normpath(joined))


def iter_mappings(value: Any) -> Iterator[dict[str, Any]]:
    """Yield all mappings in a tree of plain types."""
    stack = [value]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            yield node
            stack += node.values()
        elif isinstance(node, list):
            stack += node


def untrusted_object(file: Path, kind: Any, folder: Path | None = None) -> ConfigError:
    """Return the error for a file that names an object of another package.

    Args:
        file: the file.
        kind: mapping with `__module__`, or None.
        folder: dataset that `nv-meta` would repair, for the remedy.
    """
    names = [str(kind.get(name, ""))[:100] for name in ("__module__", "__class__", "__function__")] if kind else []
    nv_meta = f", or run energon-packed nv-meta {folder}" if folder else ""
    return ConfigError(
        f"{file} names {'.'.join(filter(None, names)) or 'no class'}, which belongs neither to energon-packed nor to "
        f"Energon, and loading would run it; {TRUST_REMEDY}{nv_meta}"
    )


def _read(path: Path, trusted: bool, outer: tuple[Path, ...], known: dict[Path, Metadataset]) -> Metadataset:
    """Read one file; `outer` are the files that lead to it, and `known` the Metadatasets read before, by path."""
    # By the joined path rather than the real path: a link to a Metadataset is read relative to the link's folder.
    identity = energon_join(path.parent, path.name)
    if identity in outer or len(outer) > _DEEPEST:
        raise FormatError(f"{path} contains itself, or is in more than {_DEEPEST} others; list its datasets directly")
    if identity in known:
        return known[identity]
    try:
        value = read_yaml(path, as_energon=True)
    except (OSError, yaml.YAMLError) as error:
        raise_resource_error(error, path)
        reason = error.strerror if isinstance(error, OSError) else error
        raise _invalid_file(path, " ".join(str(reason).split())[:300]) from error
    if not isinstance(value, dict):
        raise _invalid_file(path, f"it is {_describe_type(value)}, not a mapping")
    module, name = value.get("__module__"), value.get("__class__")
    if "Recipe" in str(name):
        raise _invalid_file(path, "it is a Recipe of Energon 8; write it as a MetadatasetV2 with subflavors")
    if not trusted:  # before anything else is parsed: an object of another package may have any keys
        _check_objects(path, value)
    is_v2 = module is not None and name == _SCHEMAS[1]  # Energon reads V1 unless both keys are present
    if unknown := sorted(value.keys() - {"__module__", "__class__", "splits"}):
        raise _invalid_file(path, f"it has the unknown key {unknown[0][:100]!r}")
    splits = value.get("splits")
    if not isinstance(splits, dict) or not splits:
        raise _invalid_file(path, "it has no splits")
    reader = _FileReader(path, is_v2, trusted, (*outer, identity), known)
    parsed = {split: reader.split(split, content) for split, content in splits.items()}
    known[identity] = Metadataset(path=path, splits=parsed, content=value)
    return known[identity]


def _check_objects(path: Path, value: dict[str, Any]) -> None:
    """Refuse all objects but the Metadataset itself, and joiners: joins are refused anyway."""
    if value.get("__module__", _ENERGON) != _ENERGON or value.get("__class__", _SCHEMAS[0]) not in _SCHEMAS:
        raise untrusted_object(path, value)
    joiners = [id(item["joiner"]) for item in iter_mappings(value) if "join" in item and "joiner" in item]
    content = {name: item for name, item in value.items() if name not in ("__module__", "__class__")}
    for mapping in iter_mappings(content):
        if "__module__" in mapping and id(mapping) not in joiners:
            raise untrusted_object(path, mapping)


@dataclass(frozen=True, slots=True)
class _FileReader:
    """Parses the splits and entries of one file.

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

    def split(self, split: str, value: Any) -> MetadatasetSplit:
        if not isinstance(value, dict):
            raise _invalid_file(self.file, f"split {split!r} is {_describe_type(value)}, not a mapping")
        # A V2 split is a list of references or a single reference; a V1 split is always a list.
        listed = [name for name in _LISTS[self.is_v2] if name in value]
        if not listed and self.is_v2:
            return MetadatasetSplit(mode="once", entries=self.entries([value], None))
        if not listed:
            more = ", or add the lines __module__: megatron.energon and __class__: MetadatasetV2"
            raise _invalid_file(self.file, f"split {split!r} has no 'datasets'; add them{more}")
        name = listed[0]
        self.check_keys(value, (name, "subset") if self.is_v2 else (name,))
        items = value[name]
        if not isinstance(items, list) or not items:
            raise _invalid_file(self.file, f"{name!r} of split {split!r} has no datasets")
        mode = _LISTS[self.is_v2][name]
        unsupported = _unsupported_reason(self.file, "'subset'") if self.has_subset(value) else None
        return MetadatasetSplit(mode=mode, entries=self.entries(items, mode), unsupported=unsupported)

    def entries(self, values: list[Any], number_name: str | None) -> tuple[Entry, ...]:
        """Parse the references of a split, and check that their datasets exist."""
        entries = [self.entry(value, number_name) for value in values]
        # At the same time: in an object store, each of them is a request.
        found = map_paths(self.found, [entry.path for entry in entries], entries, values, purpose="datasets")
        return tuple(
            replace(entry, metadataset=self.nested(entry.path, value)) if checked is None else checked
            for entry, value, checked in zip(entries, values, found, strict=True)
        )

    def entry(self, value: Any, number_name: str | None) -> Entry:
        """Parse one reference.

        Args:
            value: its mapping.
            number_name: `weight` or `repetitions`, if the reference may have a number; None otherwise.
        """
        if not isinstance(value, dict):
            raise _invalid_file(self.file, f"a dataset is {_describe_type(value)}, not a mapping")
        numbers = () if number_name is None else (number_name,)
        if self.is_v2 and "join" in value:
            return self.join(value, numbers)
        self.check_keys(value, (*_REFERENCE[self.is_v2], *numbers))
        if "path" not in value:
            raise _invalid_file(self.file, "it has a dataset without a path")
        subflavors = dict(value.get("subflavors") or {})
        if value.get("subflavor") is not None:  # of old V1 files
            subflavors = {"__subflavor__": value["subflavor"], **subflavors}
        path, refused = energon_join(self.file.parent, value["path"]), ""
        if value.get("split_config") not in (None, SPLIT_FILE):
            refused = "split_config"
        if self.has_subset(value):
            refused = "subset"
        entry = Entry(
            path=path,
            split_part=value.get("split_part"),
            subflavors=subflavors,
            dataset_config=value.get("dataset_config"),
            split_config=value.get("split_config"),
            unsupported=_unsupported_reason(self.file, f"{refused!r} of {path}") if refused else None,
        )
        # Faults of a reference do not stop the parser, so that one error can count all of them.
        if "://" in value["path"] and not value["path"].startswith(_READ_BY_ENERGON):
            return replace(entry, fault=self.remote(value["path"]))
        if number_name is not None:
            number = value.get(number_name, 1)
            if not is_number(number) or not 0 < number < math.inf:
                limit = f"{number_name} of {value['path']} must be above 0, got {short(number)}"
                return replace(entry, fault=f"{self.file}: {limit}; remove the dataset instead")
            entry = replace(entry, number=number)
        return entry

    def nested(self, path: Path, value: dict[str, Any]) -> Metadataset:
        """Read the Metadataset of a reference."""
        for name in ("aux", "dataset_config", "split_config"):
            if value.get(name) is not None:
                raise _invalid_file(self.file, f"it sets {name!r} of the Metadataset {path}, which only datasets have")
        return _read(path, self.trusted, self.outer, self.known)

    def found(self, path: Path, entry: Entry, value: Any) -> Entry | None:
        """Return the entry with its auxiliary datasets or with its fault; None if it is a Metadataset."""
        if entry.fault is not None:
            return entry
        try:
            # As Energon decides: V2 by the ending of the name, V1 reads every file as a Metadataset.
            if (path.name.endswith(".yaml") or not self.is_v2) and path.is_file():
                return None
            if not (path / NV_META).is_dir() and not (path.name.endswith(".jsonl") and path.is_file()):
                return replace(entry, fault=f"{self.file} refers to {path}, {_missing_reason(path)}")
            aux, fault = self.aux(value.get("aux") or {})
            return replace(entry, aux=aux, fault=fault)
        except OSError as error:
            return replace(entry, fault=f"{self.file} refers to {path}: {error.strerror}")

    def join(self, value: dict[str, Any], numbers: tuple[str, ...]) -> Entry:
        self.check_keys(value, (*_JOIN, *numbers))
        items = value["join"].values() if isinstance(value["join"], dict) else value["join"]
        entries = []
        for item in items:
            if not isinstance(item, dict) or not isinstance(item.get("path"), str):
                raise _invalid_file(self.file, "'join' has a dataset without a path")
            entries.append(
                Entry(
                    path=energon_join(self.file.parent, item["path"]),
                    dataset_config=item.get("dataset_config"),
                    split_config=item.get("split_config"),
                )
            )
        fault = _unsupported_reason(self.file, "'join'")
        return Entry(path=entries[0].path if entries else self.file, join=tuple(entries), fault=fault)

    def aux(self, value: dict[str, Any]) -> tuple[dict[str, Path], str | None]:
        """Return the paths of auxiliary datasets and of `filesystem://` folders, and the first fault."""
        paths: dict[str, Path] = {}
        fault = None
        for name, item in value.items():
            # Three notations: a path, `filesystem://PATH`, or a mapping with `path` or `fs_path`.
            is_folder = isinstance(item, dict) and item.keys() == {"fs_path"}
            target = next(iter(item.values())) if isinstance(item, dict) and len(item) == 1 else item
            if not isinstance(target, str) or (isinstance(item, dict) and not item.keys() <= {"path", "fs_path"}):
                raise _invalid_file(self.file, f"aux {name!r} is not a path")
            if isinstance(item, str) and target.startswith("filesystem://"):
                is_folder, target = True, target.removeprefix("filesystem://")
            if "://" in target and not target.startswith(_READ_BY_ENERGON):
                fault = fault or self.remote(target)
                continue
            paths[name] = energon_join(self.file.parent, target)
            if not is_folder and not (paths[name] / NV_META / "index.sqlite").is_file():
                fault = fault or (
                    f"{self.file}: aux {name!r} refers to {paths[name]}, which is not a prepared Energon dataset; "
                    "run energon-packed nv-meta on it, or write filesystem://PATH for a folder of files"
                )
        return paths, fault

    def has_subset(self, value: dict[str, Any]) -> bool:
        """Return whether the mapping has a `subset`, which must be valid."""
        subset = value.get("subset")
        if subset is None:
            return False
        if not isinstance(subset, dict) or not isinstance(subset.get("range"), list) or len(subset["range"]) != 2:
            raise _invalid_file(self.file, "'subset' has no range of two values")
        return True

    def remote(self, path: str) -> str:
        if is_remote(path):
            return f"{self.file} refers to {path}, a URL that Energon cannot read; write it as msc://PROFILE/KEY"
        return (
            f"{self.file} refers to {path}, which is remote and cannot be checked before it is loaded; use a path "
            "of a mounted file system"
        )

    def check_keys(self, value: dict[str, Any], allowed: tuple[str, ...]) -> None:
        """Refuse keys and types that Energon refuses."""
        if unknown := sorted(value.keys() - set(allowed)):
            raise _invalid_file(
                self.file, f"it has the unknown key {unknown[0][:100]!r} beside {', '.join(allowed[:2])}"
            )
        for name, item in value.items():
            kinds, expected = _KINDS.get(name, ((object,), ""))
            if not isinstance(item, kinds):
                raise _invalid_file(self.file, f"{name!r} is {short(item)}, not {expected}")


def _describe_type(value: Any) -> str:
    return {list: "a list", str: "a string", type(None): "empty"}.get(type(value), short(value))


def _missing_reason(path: Path) -> str:
    if inner := prepared_folder(path):
        return f"which has no {NV_META} folder; use {inner}"
    if path.is_dir():
        return f"which has no {NV_META} folder; run energon-packed nv-meta on it"
    if path.is_file():
        return "which is not a dataset folder, a .yaml or a .jsonl file"
    return "which does not exist; copy the dataset there, or correct the path"


def _unsupported_reason(file: Path, feature: str) -> str:
    return f"{file} uses {feature}, which only Energon's own loader reads; list whole splits instead"


def _invalid_file(path: Path, reason: str) -> FormatError:
    return FormatError(f"{path} is not a Metadataset that Energon can read: {reason}")
