"""`run_status`: an output folder in, which is only read; the progress of its run out."""

import glob
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import pyarrow as pa

from energon_packed.errors import ConfigError
from energon_packed.pipeline.measured.chunks import read_rows
from energon_packed.pipeline.output.folder import Folder, work_folder
from energon_packed.pipeline.output.locks import lock_holder
from energon_packed.shards import PackingManifest

Stage = Literal["nothing", "measured", "written", "done"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """Progress of the run in an output folder.

    Attributes:
        output_dir: the folder.
        stage: the last stage with a result; `measured` and `written` results may still be incomplete.
        running: `process 12 on host` of the run that has locked the folder, or None.
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


def run_status(output_dir: Path, work_dir: Path | None = None) -> list[RunStatus]:
    """Return the status of a folder, or of the folders of all input parts if its name contains `{part}`.

    Args:
        output_dir: the output folder.
        work_dir: as in `PackOptions`.

    Raises:
        ConfigError: the folder does not exist.
    """
    if "{part}" in str(output_dir):
        pattern = glob.escape(output_dir.name).replace("{part}", "p[0-9]*")
        folders = sorted(folder for folder in output_dir.parent.glob(pattern) if folder.is_dir())
    else:
        folders = [output_dir] if output_dir.is_dir() or work_folder(output_dir, work_dir).is_dir() else []
    if not folders:
        raise ConfigError(f"`output_dir` {output_dir} does not exist; no run has written there")
    return [_status(folder, work_folder(folder, work_dir)) for folder in folders]


def _status(folder: Path, work: Path) -> RunStatus:
    output = Folder(folder, work)
    measured = sum(_records(file) for file in _latest(output.work, "measure-*", "*.arrow"))
    shards = len(_latest(output.work, "write-*", "*.json"))
    manifest = PackingManifest.load_if_there(output.shards) if output.shards.is_dir() else None
    status = RunStatus(
        output_dir=folder,
        stage="written" if shards else "measured" if measured else "nothing",
        running=lock_holder(folder, work),
        measured=measured,
        shards=shards,
    )
    if manifest is None:
        return status
    return replace(
        status,
        stage="done",
        measured=measured or manifest.records,
        shards=len(manifest.shards),
        packs=manifest.packs,
        seq_len=manifest.seq_len,
        utilization=manifest.utilization if manifest.algorithm != "none" else None,
    )


def _latest(work: Path, folders: str, files: str) -> list[Path]:
    """Files of the folder that changed last."""
    by_age = sorted(work.glob(folders), key=lambda folder: folder.stat().st_mtime_ns)
    return sorted(by_age[-1].glob(files)) if by_age else []


def _records(file: Path) -> int:
    """Number of records in a chunk file; 0 if the file is being replaced."""
    try:
        return int(read_rows(file).num_rows)
    except (OSError, pa.ArrowInvalid):
        return 0
