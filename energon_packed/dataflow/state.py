"""LoaderState: what a loader needs to go on exactly, and the check that it goes on with the same data."""

import hashlib
import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from energon_packed.dataflow.plain import from_plain, to_plain
from energon_packed.errors import BatchError
from energon_packed.shards import PackingManifest

STATE_VERSION = 2
_NOT_DATA = ("worker_config", "slice_offsets", "batcher", "map_fn", "pre_packer", "final_packer", "sample_loader")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderState:
    """State of one rank. It is saved in plain types: `torch.load` reads it where this package has been imported.

    Attributes:
        format_version: layout of this state.
        world_size, rank, num_workers, micro_batch_size, seed: how the data is dealt.
        settings: other arguments of the loader that decide the order, by name.
        dataset: fingerprint of the data and of Energon's pipeline over it.
        epoch: number of the epoch, 0 where the data repeats without end.
        steps: batches of the current epoch that were given out.
        last_restore_key: where the last batch came from, None before the first.
        energon: state of Energon's own loader.
    """

    format_version: int
    world_size: int
    rank: int
    num_workers: int
    micro_batch_size: int
    seed: int
    settings: dict[str, Any]
    dataset: str
    epoch: int
    steps: int
    last_restore_key: tuple[Any, ...] | None
    energon: Any

    def __reduce__(self) -> tuple[Any, tuple[dict[str, Any]]]:
        return _load, ({field.name: to_plain(getattr(self, field.name)) for field in fields(self)},)

    def check_against(self, other: "LoaderState") -> None:
        """Refuse to go on in a loader that would give other batches.

        Args:
            other: a state of the loader that shall go on.

        Raises:
            BatchError: the message names every field that differs, saved and now.
        """
        names = ("format_version", "world_size", "rank", "num_workers", "micro_batch_size", "seed")
        saved, now = ({n: getattr(s, n) for n in names} | s.settings for s in (self, other))
        differ = [f"{n} {saved.get(n)} saved, {value} now" for n, value in now.items() if saved.get(n) != value]
        if not differ and self.dataset != other.dataset:  # settings are part of it
            differ = [f"dataset {self.dataset} saved, {other.dataset} now"]
        if differ:
            raise BatchError(
                f"the saved state is of another loader: {'; '.join(differ)}; "
                "restore it with the same settings and data, or start without it"
            )


def _load(values: dict[str, Any]) -> LoaderState:
    known = {field.name for field in fields(LoaderState)}
    if set(values) != known:
        version = values.get("format_version")
        raise BatchError(f"the saved state has format_version {version}, this version reads {STATE_VERSION}")
    return LoaderState(**{name: from_plain(value) for name, value in values.items()})


torch.serialization.add_safe_globals([_load])  # makes a LoaderState of plain values, and nothing else


def dataset_fingerprint(config: dict[str, Any]) -> str:
    """Digest of an Energon dataset's `config()` without what names functions, ranks and places.

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
    """The hashes of all shards: what the input and the options were leaves open which images were there."""
    manifest = PackingManifest.load_if_there(Path(path))
    return None if manifest is None else [shard.sha256 for shard in manifest.shards]
