"""`run_status`: how far a run in an output folder is, without touching it."""

import glob
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import pyarrow as pa

from energon_packed.errors import ConfigError
from energon_packed.pipeline.chunks import read_rows
from energon_packed.pipeline.workspace import Workspace, lock_holder
from energon_packed.shards import PackingManifest

Stage = Literal["nothing", "measured", "written", "done"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """State of an output folder.

    Attributes:
        output_dir: the folder.
        stage: the last one with a result: `measured` and `written` results may still be incomplete.
        running: `process 12 on host` of the run that holds the folder, or None.
        measured: records measured by the latest run.
        shards: shards finished by the latest run.
        packs, seq_len, utilization: of a finished dataset; None before.
    """

    output_dir: Path
    stage: Stage
    running: str | None
    measured: int
    shards: int
    packs: int | None = None
    seq_len: int | None = None
    utilization: float | None = None


def run_status(output_dir: Path) -> list[RunStatus]:
    """The state of a folder, or of the folders of all parts where its name has `{part}`.

    Raises:
        ConfigError: there is no such folder.
    """
    if "{part}" in str(output_dir):
        pattern = glob.escape(output_dir.name).replace("{part}", "p[0-9]*")
        folders = sorted(folder for folder in output_dir.parent.glob(pattern) if folder.is_dir())
    else:
        folders = [output_dir] if output_dir.is_dir() else []
    if not folders:
        raise ConfigError(f"`output_dir` {output_dir} does not exist; no run has written there")
    return [_status(folder) for folder in folders]


def _status(folder: Path) -> RunStatus:
    space = Workspace(folder)
    measured = sum(_records(file) for file in _latest(space.work, "measure-*", "*.arrow"))
    shards = len(_latest(space.work, "write-*", "*.json"))
    manifest = PackingManifest.load_if_there(space.shards) if space.shards.is_dir() else None
    found = RunStatus(
        output_dir=folder,
        stage="written" if shards else "measured" if measured else "nothing",
        running=lock_holder(folder),
        measured=measured,
        shards=shards,
    )
    if manifest is None:
        return found
    return replace(
        found,
        stage="done",
        measured=measured or manifest.records,
        shards=len(manifest.shards),
        packs=manifest.packs,
        seq_len=manifest.seq_len,
        utilization=manifest.utilization if manifest.algorithm != "none" else None,
    )


def _latest(work: Path, folders: str, files: str) -> list[Path]:
    """Files of the folder that changed last."""
    found = sorted(work.glob(folders), key=lambda folder: folder.stat().st_mtime_ns)
    return sorted(found[-1].glob(files)) if found else []


def _records(file: Path) -> int:
    """Rows of a chunk file; 0 for one that is just being replaced."""
    try:
        return int(read_rows(file).num_rows)
    except (OSError, pa.ArrowInvalid):
        return 0
