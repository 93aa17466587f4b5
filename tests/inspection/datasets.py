"""Copies of packed datasets, damaged datasets and Metadatasets for the tests of this folder."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

METADATASET_V2 = "__module__: megatron.energon\n__class__: MetadatasetV2\n"


def copied_output(shards: Path, folder: Path) -> Path:
    """Copy the output folder of a dataset without its work files, and return the copied shards."""
    shutil.copytree(shards.parent, folder, ignore=shutil.ignore_patterns(".work"))
    return folder / shards.name


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the value of packing.json in place."""
    file = folder / ".nv-meta" / "packing.json"
    value = json.loads(file.read_text())
    change(value)
    file.write_text(json.dumps(value))


def damaged(shards: Path, copy: Path) -> Path:
    """Copy a dataset, with a packing.json that cannot be read."""
    shutil.copytree(shards, copy)
    (copy / ".nv-meta" / "packing.json").write_text("{")
    return copy
