"""What Energon would run when it opens a dataset, looked at before it does.

Energon executes the sample_loader.py that dataset.yaml names, and makes an object of any mapping with `__module__`, in
a Metadataset, in dataset.yaml and in split.yaml (megatron/energon/typed_converter.py). The parser of Energon reads the
files here as well, so that both see the same.
"""

import json
import re
from pathlib import Path
from typing import Any

from energon_packed.errors import ConfigError, FormatError
from energon_packed.files import read_yaml
from energon_packed.formats import CODECS, READ_ONLY
from energon_packed.metadatasets import (
    NV_META,
    SPLIT_FILE,
    TRUST_REMEDY,
    energon_join,
    iter_mappings,
    read_metadataset,
    untrusted_object,
)
from energon_packed.shards.nv_meta import OLD_INFO, loader_files

_ENERGON = "megatron.energon"
_KEYS = frozenset(("__module__", "__class__", "sample_type", "field_map", "part_filter", "decoder", "subflavors"))
_LOADER = ("sample_loader", "part_filter")
_CLASS = re.compile(r"[A-Z]\w*")


def check_trusted(path: str | Path, *, dataset_config: str | None = None) -> None:
    """Refuse a dataset, or a Metadataset, whose loading would run code that is not of this package or of Energon.

    Args:
        path: folder with `.nv-meta`, or a Metadataset YAML.
        dataset_config: what is read in place of dataset.yaml.

    Raises:
        ConfigError: the message names the file and the remedy.
        FormatError: a Metadataset that cannot be read, or that Energon reads otherwise than `read_metadataset`.
    """
    path = Path(path)
    for folder, config in _behind(path) if path.is_file() else [(path, dataset_config or "dataset.yaml")]:
        _check_folder(folder, config)


def check_blend_trusted(path: str | Path) -> None:
    """As `check_trusted` for a Metadataset; a folder that is read without Energon runs no code.

    Raises:
        ConfigError, FormatError: as `check_trusted`.
    """
    if Path(path).is_file():
        check_trusted(path)


def _behind(path: Path) -> list[tuple[Path, str]]:
    """The dataset folders behind a Metadataset, in all its splits, and the file that replaces dataset.yaml in each."""
    metadataset = read_metadataset(path)
    metadataset.check_file()
    for file in metadataset.files():
        if _parsed(file) != read_yaml(file, as_energon=True):
            raise FormatError(
                f"{file} is not a Metadataset that Energon can read: its YAML parser reads other values from it; "
                "write the file with energon-packed metadataset"
            )
    found: dict[tuple[Path, str], None] = {}
    for entry in metadataset.entries():
        for folder in (entry.path, *entry.aux.values()):
            if (folder / NV_META).is_dir():
                found[folder, entry.dataset_config or "dataset.yaml"] = None
                _check_data(energon_join(folder / NV_META, entry.split_config or SPLIT_FILE))
    return list(found)


def _check_folder(folder: Path, config: str) -> None:
    meta = folder / NV_META
    for name in ("split.yaml", "split.json", ".info.json", OLD_INFO):
        _check_data(meta / name)
    file = energon_join(meta, config)
    if not file.is_file():
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
            f"would run it: {TRUST_REMEDY}, or run energon-packed nv-meta {folder}"
        )
    is_standard = is_standard or is_ours  # perhaps with subflavors of its user
    if not is_standard or not _CLASS.fullmatch(str(kind.get("__class__"))) or "__function__" in kind:
        raise untrusted_object(file, kind, folder)
    if not is_ours and (named := [name for name in _LOADER if isinstance(value.get(name), str)]):
        raise ConfigError(
            f"{file} names {value[named[0]]!r} as {named[0]}, which is not what energon-packed writes; loading would "
            f"run it: {TRUST_REMEDY}, or run energon-packed nv-meta {folder}"
        )
    if unknown := sorted(map(str, value.keys() - _KEYS - set(_LOADER if is_ours else ()))):
        raise ConfigError(
            f"{file} sets {unknown[0][:100]!r}, which decides what Energon reads or runs: {TRUST_REMEDY}, or run "
            f"energon-packed nv-meta {folder}"
        )
    for one in iter_mappings(rest):
        if "__module__" in one:
            raise untrusted_object(file, one, folder)


def _loads_ours(value: dict[str, Any], loader: Path) -> bool:
    """A dataset.yaml that names nothing but a sample_loader.py that is byte for byte ours."""
    ours = [loader_files(codec)[loader.name] for codec in (*CODECS.values(), *READ_ONLY.values())]
    return (
        loader.is_file()
        and loader.read_bytes() in ours
        and all(value.get(name) == f"{loader.name}:{name}" for name in _LOADER)
    )


def _check_data(file: Path) -> None:
    """Refuse a file of names and counts that makes objects."""
    if not file.is_file():
        return
    content = file.read_bytes()
    if b"__module__" not in content and b"\\" not in content:  # nor written with escapes
        return
    for one in iter_mappings(_parsed(file)):
        if "__module__" in one:
            raise untrusted_object(file, one)


def _parsed(file: Path) -> Any:
    from megatron.energon.eyaml import load_yaml

    try:
        content = file.read_bytes()
        return json.loads(content) if file.suffix == ".json" else load_yaml(content)
    except (Exception, RecursionError) as error:  # the parser of Energon raises what its parts raise
        what = f"{type(error).__name__} {' '.join(str(error).split())[:200]}"
        raise FormatError(f"{file} cannot be read: {what}; copy it again, or run energon-packed nv-meta") from error
