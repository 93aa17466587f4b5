"""The folder of a dataflow for measurements and converted copies."""

import tempfile
from pathlib import Path

from energon_packed.dataflow.config import DataflowConfig

_TEMPORARY: list["tempfile.TemporaryDirectory[str]"] = []  # removed when this process ends


def work_folder(config: DataflowConfig) -> Path:
    """`work_dir`, or a temporary folder that lasts as long as this process."""
    if config.work_dir is not None:
        config.work_dir.mkdir(parents=True, exist_ok=True)
        return config.work_dir
    _TEMPORARY.append(tempfile.TemporaryDirectory(prefix="energon-packed-"))
    return Path(_TEMPORARY[-1].name)
