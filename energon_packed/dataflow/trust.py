"""What Energon would run when it opens a dataset, looked at before it does.

Energon executes the sample_loader.py that dataset.yaml names, and makes an object of any mapping with `__module__`, in
a Metadataset, in dataset.yaml and in split.yaml (megatron/energon/typed_converter.py). The parser of Energon reads the
files here as well, so that both see the same.
"""

import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from energon_packed.errors import ConfigError, FormatError
from energon_packed.formats import CODECS, READ_ONLY
from energon_packed.options import short
from energon_packed.shards.nv_meta import NV_META, OLD_INFO, loader_files

_ENERGON = "megatron.energon"
_METADATASETS = ("Metadataset", "MetadatasetV2")
_KEYS = frozenset(("__module__", "__class__", "sample_type", "field_map", "part_filter", "decoder", "subflavors"))
_LOADER = ("sample_loader", "part_filter")
_CLASS = re.compile(r"[A-Z]\w*")
_DEEPEST = 16  # Metadatasets inside Metadatasets
_REMEDY = "review it and set `trust_sample_loader=True`"
Reference = tuple[Path, str]
"""A dataset folder, and the name of the file in `.nv-meta` that takes the place of dataset.yaml."""


def check_trusted(path: str | Path, *, dataset_config: str | None = None) -> None:
    """Refuse a dataset, or a Metadataset, whose loading would run code that is not of this package or of Energon.

    Args:
        path: folder with `.nv-meta`, or a Metadataset YAML.
        dataset_config: what is read in place of dataset.yaml.

    Raises:
        ConfigError: the message names the file and the remedy.
        FormatError: a Metadataset that cannot be read.
    """
    path = Path(path)
    folders = check_metadataset(path) if path.is_file() else [(path, dataset_config or "dataset.yaml")]
    for folder, config in dict.fromkeys(folders):
        _check_folder(folder, config)


def check_metadataset(path: Path, depth: int = 0) -> list[Reference]:
    """Refuse a Metadataset that makes objects of other classes than Energon's own; the datasets that it refers to.

    Args:
        path: the YAML file.
        depth: of the file inside other Metadatasets.

    Raises:
        ConfigError: it names a class or a function of another package, in whatever place.
        FormatError: it cannot be read, or contains itself.
    """
    value = _parsed(path)
    if not isinstance(value, dict):
        raise FormatError(f"{path} is not a Metadataset: {type(value).__name__}, not a mapping")
    if depth > _DEEPEST:
        raise FormatError(f"{path} contains itself")
    top = {name: item for name, item in value.items() if name not in ("__module__", "__class__")}
    if value.get("__module__", _ENERGON) != _ENERGON or value.get("__class__", _METADATASETS[0]) not in _METADATASETS:
        raise _runs(path, value)
    found: list[Reference] = []
    for one in _mappings(top):
        if "__module__" in one:
            raise _runs(path, one)
        if "://" in str(one.get("path")):
            raise ConfigError(
                f"{path} refers to {one['path']}, which cannot be looked at before it is loaded: {_REMEDY}"
            )
        for name in ("weight", "repetitions") if "path" in one else ():
            if one.get(name) is not None and not _is_share(one[name]):
                raise ConfigError(f"{path}: `{name}` of {one.get('path')} is {short(one[name])}; it must be above 0")
        aux = one.get("aux")
        for name in [one.get("path"), *(aux.values() if isinstance(aux, dict) else ())]:
            target = _joined(path.parent, name)
            if target.name.endswith((".yaml", ".yml")) and target.is_file():
                found += check_metadataset(target, depth + 1)
            elif (target / NV_META).is_dir():
                found.append((target, str(one.get("dataset_config") or "dataset.yaml")))
                _check_data(_joined(target / NV_META, one.get("split_config") or "split.yaml"))
    return found


def _is_share(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _check_folder(folder: Path, config: str) -> None:
    meta = folder / NV_META
    for name in ("split.yaml", "split.json", ".info.json", OLD_INFO):
        _check_data(meta / name)
    file = _joined(meta, config)
    if not file.is_file() or _is_ours(file, meta / "sample_loader.py"):
        return  # Energon says what is missing
    value = _parsed(file)
    if not isinstance(value, dict):
        raise FormatError(f"{file} is damaged: it is no mapping; run energon-packed nv-meta {folder}")
    kind = value.get("sample_type", value)
    is_standard = isinstance(kind, dict) and kind.get("__module__") == _ENERGON
    rest = [item for name, item in value.items() if name != "sample_type"]
    is_ours = isinstance(kind, dict) and kind.get("__module__") == "energon_packed.flavors"
    if is_ours and not _loads_ours(value, meta / "sample_loader.py"):
        raise ConfigError(
            f"{meta / 'sample_loader.py'}, or {config} beside it, is not what energon-packed writes; loading "
            f"would run it: {_REMEDY}, or run energon-packed nv-meta {folder}"
        )
    is_standard = is_standard or is_ours  # perhaps with subflavors of its user
    if not is_standard or not _CLASS.fullmatch(str(kind.get("__class__"))) or "__function__" in kind:
        raise _runs(file, kind, folder)
    if not is_ours and (named := [name for name in _LOADER if isinstance(value.get(name), str)]):
        raise ConfigError(
            f"{file} names {value[named[0]]!r} as {named[0]}, which is not what energon-packed writes; loading would "
            f"run it: {_REMEDY}, or run energon-packed nv-meta {folder}"
        )
    if unknown := sorted(map(str, value.keys() - _KEYS - set(_LOADER if is_ours else ()))):
        raise ConfigError(
            f"{file} sets {unknown[0][:100]!r}, which decides what Energon reads or runs: {_REMEDY}, or run "
            f"energon-packed nv-meta {folder}"
        )
    for one in _mappings(rest):
        if "__module__" in one:
            raise _runs(file, one, folder)


def _joined(folder: Path, name: Any) -> Path:
    """A path as Energon joins it: `..` is removed from the text, before links are followed."""
    return Path(os.path.normpath(folder.absolute() / str(name)))


def _is_ours(file: Path, loader: Path) -> bool:
    """dataset.yaml and sample_loader.py are byte for byte what `pack` writes for a flavor."""
    content = file.read_bytes()
    for ours in _our_files():
        if content == ours.get(file.name):
            if file.name != "dataset.yaml":
                return True
            return loader.is_file() and loader.read_bytes() == ours["sample_loader.py"]
    return False


def _our_files() -> list[dict[str, bytes]]:
    """What `pack` and `nv-meta` write for each flavor, by name of the file."""
    return [loader_files(codec) for codec in (*CODECS.values(), *READ_ONLY.values())]


def _loads_ours(value: dict[str, Any], loader: Path) -> bool:
    """A dataset.yaml that names nothing but a sample_loader.py that is byte for byte ours."""
    if not loader.is_file() or loader.read_bytes() not in [ours["sample_loader.py"] for ours in _our_files()]:
        return False
    return all(value.get(name) == f"sample_loader.py:{name}" for name in _LOADER)


def _check_data(file: Path) -> None:
    """Refuse a file of names and counts that makes objects."""
    if not file.is_file():
        return
    content = file.read_bytes()
    if b"__module__" not in content and b"\\" not in content:  # nor written with escapes
        return
    for one in _mappings(_parsed(file)):
        if "__module__" in one:
            raise _runs(file, one)


def _mappings(value: Any) -> Iterator[dict[str, Any]]:
    """All mappings of a tree of plain types."""
    stack = [value]
    while stack:
        one = stack.pop()
        if isinstance(one, dict):
            yield one
            stack += one.values()
        elif isinstance(one, list):
            stack += one


def _parsed(file: Path) -> Any:
    from megatron.energon.eyaml import load_yaml

    try:
        content = file.read_bytes()
        return json.loads(content) if file.suffix == ".json" else load_yaml(content)
    except (Exception, RecursionError) as error:  # the parser of Energon raises what its parts raise
        what = f"{type(error).__name__} {' '.join(str(error).split())[:200]}"
        raise FormatError(f"{file} cannot be read: {what}; copy it again, or run energon-packed nv-meta") from error


def _runs(file: Path, kind: Any, folder: Path | None = None) -> ConfigError:
    named = [str(kind.get(name, ""))[:100] for name in ("__module__", "__class__", "__function__")] if kind else []
    nv_meta = f", or run energon-packed nv-meta {folder}" if folder else ""
    return ConfigError(
        f"{file} names {'.'.join(filter(None, named)) or 'no class'}, which is neither of energon-packed nor of "
        f"Energon; loading would run it: {_REMEDY}{nv_meta}"
    )
