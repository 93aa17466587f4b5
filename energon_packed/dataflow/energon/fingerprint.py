"""The fingerprint of what an Energon loader reads, for its states."""

import hashlib
import json
from pathlib import Path
from typing import Any

from energon_packed.shards import PackingManifest

_NOT_DATA = (
    "worker_config",
    "slice_offsets",
    "len",
    "batcher",
    "map_fn",
    "pre_packer",
    "final_packer",
    "sample_loader",
)


def dataset_fingerprint(config: dict[str, Any]) -> str:
    """Digest of an Energon dataset's `config()` without the names of functions, ranks and places.

    A folder counts by its content where it has a packing.json, so a copy elsewhere is the same data.
    """
    return hashlib.sha256(json.dumps(_data_only(config), sort_keys=True, default=str).encode()).hexdigest()[:16]


def _data_only(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {k: _data_only(v) for k, v in value.items() if not k.startswith("_") and k not in _NOT_DATA}
        if "shards" in value and "_path" in value:
            kept["packing"] = _packing(value["_path"])
        return kept
    return [_data_only(item) for item in value] if isinstance(value, list | tuple) else value


def _packing(path: str) -> list[str] | None:
    """The hashes of all shards: input and options alone do not tell which images existed."""
    manifest = PackingManifest.load_if_there(Path(path))
    return None if manifest is None else [shard.sha256 for shard in manifest.shards]
