"""Trust: the path of a dataset or Metadataset in, a ConfigError out if opening it with Energon would run foreign code.

Energon executes the sample_loader.py that dataset.yaml names, and creates an object from any mapping with `__module__`
in a Metadataset, in dataset.yaml and in split.yaml (megatron/energon/typed_converter.py). The files are parsed with
Energon's own parser here, so that the check sees the values that Energon sees.

Allowed are classes of Energon itself, and the sample_loader.py files that this package writes, byte for byte.
"""

import json
import re
from pathlib import Path
from typing import Any

from energon_packed.errors import ConfigError, FormatError
from energon_packed.files import read_if_there
from energon_packed.formats import CODECS, READ_ONLY
from energon_packed.metadatasets import (
    NV_META,
    SPLIT_FILE,
    TRUST_REMEDY,
    energon_join,
    is_metadataset,
    iter_mappings,
    read_metadataset,
    untrusted_object,
)
from energon_packed.shards.nv_meta import OLD_INFO, loader_files
from energon_packed.storage import as_path, map_paths

_ENERGON = "megatron.energon"
_KEYS = frozenset(("__module__", "__class__", "sample_type", "field_map", "part_filter", "decoder", "subflavors"))
_LOADER = ("sample_loader", "part_filter")
_CLASS = re.compile(r"[A-Z]\w*")  # no dots: a name such as `os.mkdir` reaches other modules


def check_trusted(path: str | Path, *, dataset_config: str | None = None) -> None:
    """Refuse a dataset or Metadataset if loading it would run code of neither this package nor Energon.

    Args:
        path: folder with `.nv-meta`, or a Metadataset YAML.
        dataset_config: name of the file that is read instead of dataset.yaml.

    Raises:
        ConfigError: the message names the file and the remedy.
        FormatError: a Metadataset cannot be read, or Energon reads other values from it than `read_metadataset`.
    """
    path = as_path(path)
    one = (path, dataset_config or "dataset.yaml", SPLIT_FILE)
    _check_folders(_folders_of(path) if is_metadataset(path) else [one])


def check_blend_trusted(path: str | Path) -> None:
    """Check a Metadataset as `check_trusted` does; accept a folder, which is read without Energon and runs no code.

    Raises:
        ConfigError, FormatError: as `check_trusted`.
    """
    path = as_path(path)
    if is_metadataset(path):
        _check_folders(_folders_of(path))


def _check_folders(checked: list[tuple[Path, str, str]]) -> None:
    folders, *files = zip(*checked, strict=True)
    map_paths(_check_folder, folders, *files, purpose="datasets")


def _folders_of(path: Path) -> list[tuple[Path, str, str]]:
    """The dataset folders of a Metadataset, and the names of the dataset.yaml and split.yaml of each."""
    metadataset = read_metadataset(path)
    metadataset.check_file()
    for inner in metadataset.nested():
        if _parsed(inner.path) != inner.content:
            raise FormatError(
                f"{inner.path} is not a Metadataset that Energon can read: its YAML parser reads other values from "
                "it. Write the file with energon-packed metadataset."
            )
    return list(
        dict.fromkeys(
            (folder, entry.dataset_config or "dataset.yaml", entry.split_config or SPLIT_FILE)
            for entry in metadataset.entries()
            if entry.metadataset is None
            for folder in (entry.path, *entry.aux.values())
        )
    )


def _check_folder(folder: Path, config: str, split: str) -> None:
    """Refuse a dataset folder if opening it would run code; a folder without `.nv-meta` has no code.

    The checks go from the class that is created to its arguments, as Energon does, and unknown keys are refused:
    a later release of Energon may run them.
    """
    meta = folder / NV_META
    names = dict.fromkeys((split, SPLIT_FILE, "split.json", ".info.json", OLD_INFO))
    map_paths(_check_data, [energon_join(meta, name) for name in names])
    file = energon_join(meta, config)
    content = read_if_there(file)
    if content is None:
        return  # Energon reports the missing file
    value = _parsed(file, content)
    if not isinstance(value, dict):
        raise FormatError(f"{file} is damaged: it is not a mapping. Run energon-packed nv-meta {folder}.")
    kind = value.get("sample_type", value)
    is_energon = isinstance(kind, dict) and kind.get("__module__") == _ENERGON
    is_own = isinstance(kind, dict) and kind.get("__module__") == "energon_packed.flavors"
    remedy = f"{TRUST_REMEDY}, or run energon-packed nv-meta {folder}"
    if is_own and not _is_generated_loader(value, meta / "sample_loader.py"):
        raise ConfigError(
            f"{meta / 'sample_loader.py'}, or {config} beside it, is not what energon-packed writes; loading "
            f"would run it: {remedy}"
        )
    if not (is_energon or is_own) or not _CLASS.fullmatch(str(kind.get("__class__"))) or "__function__" in kind:
        raise untrusted_object(file, kind, folder)
    if not is_own and (named := [name for name in _LOADER if isinstance(value.get(name), str)]):
        raise ConfigError(
            f"{file} names {value[named[0]]!r} as {named[0]}, which is not what energon-packed writes; loading would "
            f"run it: {remedy}"
        )
    if unknown := sorted(map(str, value.keys() - _KEYS - set(_LOADER if is_own else ()))):
        raise ConfigError(f"{file} sets {unknown[0][:100]!r}, which decides what Energon reads or runs: {remedy}")
    # Subflavors and field maps are data of the user, and may contain anything except objects.
    for mapping in iter_mappings([item for name, item in value.items() if name != "sample_type"]):
        if "__module__" in mapping:
            raise untrusted_object(file, mapping, folder)


def _is_generated_loader(value: dict[str, Any], loader: Path) -> bool:
    """Whether dataset.yaml names only a sample_loader.py that is byte for byte a file of this package."""
    generated = [loader_files(codec)[loader.name] for codec in (*CODECS.values(), *READ_ONLY.values())]
    return read_if_there(loader) in generated and all(value.get(name) == f"{loader.name}:{name}" for name in _LOADER)


def _check_data(file: Path) -> None:
    """Refuse a file of names and counts if it creates objects."""
    content = read_if_there(file)
    if content is None:
        return
    # Energon reads JSON in UTF-16 and UTF-32, too, in which a name has other bytes. Both have bytes of zero.
    if b"\0" in content:
        raise FormatError(
            f"{file} must be UTF-8, got another encoding. Convert it, or run energon-packed nv-meta on its dataset."
        )
    # A backslash may be an escape that spells `__module__`. Without both, large files need not be parsed.
    if b"__module__" not in content and b"\\" not in content:
        return
    for mapping in iter_mappings(_parsed(file, content)):
        if "__module__" in mapping:
            raise untrusted_object(file, mapping)


def _parsed(file: Path, content: bytes | None = None) -> Any:
    """Parse a file, which is read if its content is not passed, as Energon does."""
    from megatron.energon.eyaml import load_yaml

    try:
        content = file.read_bytes() if content is None else content
        return json.loads(content) if file.suffix == ".json" else load_yaml(content)
    except (Exception, RecursionError) as error:  # Energon's parser raises errors of any type
        reason = f"{type(error).__name__} {' '.join(str(error).split())[:200]}"
        raise FormatError(f"{file} cannot be read: {reason}. Copy it again, or run energon-packed nv-meta.") from error
