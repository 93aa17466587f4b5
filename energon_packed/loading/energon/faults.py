"""Errors of Energon over damaged files: which file it is, and what to do.

Energon trusts what it reads, and fails with the error of whatever meets the damage first: `ReadError: bad checksum`,
`issubclass() arg 1 must be a class`. Then, and only then, the files are looked at one by one.

Answers of Energon's workers to commands, such as for their states: waited for only while they live.
"""

import ast
import queue
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from megatron.energon.epathlib import EPath
from megatron.energon.flavors.webdataset.metadata import WebdatasetMeta, get_info_shard_files

from energon_packed.errors import DataChangedError, EnergonPackedError, FormatError, WorkerError
from energon_packed.files import read_yaml
from energon_packed.loading.failures import dead_workers, in_one_line
from energon_packed.loading.manifests import OpenedSplits, loaded_splits
from energon_packed.metadatasets import NV_META
from energon_packed.shards.nv_meta import shards_in_split
from energon_packed.shards.reader import ShardReader
from energon_packed.shards.scan import scan_tar

_SECONDS = 1.0  # between two looks at the workers


class WorkerResultQueue:
    """In place of a `result_queue` of Energon's loader, whose `get` would wait for a dead worker indefinitely.

    Args:
        inner: the queue.
        loader: Energon's.
        timeout: seconds; 0 waits as long as the workers live.
    """

    def __init__(self, inner: Any, loader: Any, timeout: float) -> None:
        self._inner = inner
        self._loader = loader
        self._timeout = timeout

    def put(self, value: Any) -> None:
        """As the queue."""
        self._inner.put(value)

    def get(self) -> Any:
        """As the queue.

        Raises:
            WorkerError: a worker died, or does not answer in time.
        """
        start = time.monotonic()
        while True:
            try:
                return self._inner.get(timeout=_SECONDS)
            except queue.Empty:
                pass
            if dead := dead_workers(self._loader._iterator):
                raise WorkerError(
                    f"the loader has no state: a worker process (pid {dead[0]}) exited unexpectedly; the state that "
                    "was saved last is good: load it in a new loader"
                )
            if 0 < self._timeout < time.monotonic() - start:
                raise WorkerError(
                    f"a worker process did not tell its state for {self._timeout:g} seconds, `timeout`: a file system "
                    "that hangs, or samples that take longer; the state that was saved last is good"
                )


def patch_result_queue(loader: Any, timeout: float) -> None:
    """Make Energon's loader wait for its workers only while they live; before they are started."""
    loader.result_queues[:] = [
        WorkerResultQueue(inner, loader, timeout) for inner in loader.result_queues
    ]  # one list with workers


NAME = "the loader of get_packed_loader"
_NAMES = ("sample_loader", "part_filter")


@contextmanager
def raise_with_file_name(path: str | Path, split: str, opened: OpenedSplits | None = None) -> Iterator[None]:
    """Turn an error of Energon into one that names the damaged file, where there is one.

    Args:
        path: dataset folder, or Metadataset.
        split: `train`, `val` or `test`.
        opened: the tars as they were when the loader was made.

    Raises:
        FormatError: a file is damaged; the message names it and the remedy.
        DataChangedError: a file was replaced, changed or removed.
        WorkerError: a worker process died, or does not answer.
    """
    try:
        yield
    except ImportError:  # a package that is not installed is no damage
        raise
    except Exception as error:
        if found := in_one_line(error, NAME):
            raise found from error
        if isinstance(error, EnergonPackedError):
            raise
        if opened is not None:
            _check_unchanged(opened, error)
        if fault := _fault(Path(path), split):
            raise FormatError(f"{fault} ({type(error).__name__}: {' '.join(str(error).split())[:200]})") from error
        raise


def _check_unchanged(opened: OpenedSplits, error: Exception) -> None:
    try:
        opened.check_all()
    except DataChangedError as changed:
        raise changed from error


def _fault(path: Path, split: str) -> str | None:
    """The damaged file and the remedy; None where all files are whole."""
    try:
        splits = loaded_splits(path, split)
    except EnergonPackedError as error:
        return str(error)
    return next((fault for one in splits if (fault := _fault_in(one.path, one.split))), None)


def _fault_in(folder: Path, split: str) -> str | None:
    meta = folder / NV_META
    try:
        _check_dataset(meta / "dataset.yaml")
    except Exception as error:  # whatever reading a damaged file raises
        what = f"{type(error).__name__} {' '.join(str(error).split())[:200]}"
        return (
            f"{meta / 'dataset.yaml'}, or what it names, cannot be read: {what}; run energon-packed nv-meta {folder}"
        )
    try:
        shards = shards_in_split(folder, split)
        ShardReader(shards)
    except EnergonPackedError as error:
        return str(error)
    file = meta / ".info.json"
    try:  # as Energon reads them, which takes less than JSON and YAML are
        get_info_shard_files(EPath(folder))
        file = meta / "split.yaml"
        WebdatasetMeta.from_config(EPath(folder), split_part=split)
    except Exception as error:
        what = f"{type(error).__name__} {' '.join(str(error).split())[:200]}"
        return f"Energon cannot read {file}: {what}; run energon-packed nv-meta {folder}, or copy the file again"
    for tar in shards:
        try:
            expected = np.array(scan_tar(tar).rows().offsets, dtype="<u8").tobytes()
        except (EnergonPackedError, OSError) as error:
            return f"{error}; energon-packed verify {folder} lists all damage: copy or pack the shard again"
        index = tar.with_suffix(".tar.idx")
        if index.read_bytes() != expected:
            return f"{index} does not match {tar.name}; run energon-packed nv-meta {folder}"
    return None


def _check_dataset(file: Path) -> None:
    """As https://nvidia.github.io/Megatron-Energon describes dataset.yaml."""
    value: Any = read_yaml(file)
    named = value.get("sample_type", value)
    found = getattr(import_module(named["__module__"]), named["__class__"])
    if not isinstance(found, type):
        raise TypeError(f"{named['__class__']} is no class")
    if not isinstance(value.get("decoder"), dict | bool | None):
        raise TypeError(f"the decoder is {value['decoder']!r}")
    places = [value.get(name) for name in _NAMES]
    if named is value or value.get("field_map") is not None:
        return  # crude data, or fields by name
    if None in places:
        raise ValueError(f"it must name {' and '.join(_NAMES)}, or a field_map")
    for place in places:
        source, _, name = place.partition(":")
        if name not in _defined(file.parent / source):
            raise ValueError(f"{source} does not define {name}")


def _defined(file: Path) -> set[str]:
    """Names of functions that a Python file defines or imports; the imports are tried."""
    names: set[str] = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom):
            module = import_module(node.module or "")
            for alias in node.names:
                getattr(module, alias.name)
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef):
            names.add(node.name)
    return names
