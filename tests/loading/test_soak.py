"""Long runs: memory and descriptors stay flat over epochs, and do not grow with the number of shards.

`ENERGON_PACKED_SOAK=200` is the long form: 200 epochs of each loader, 1,000 shards, a million records; `-s` prints it.
"""

import contextlib
import gc
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from energon_packed import (
    DataflowConfig,
    DataflowLoader,
    MapDistributor,
    PackedDataset,
    PackedIterableDataset,
    PackingManifest,
    PackOptions,
    PaddingFreeCollator,
    get_packed_loader,
    pack,
)
from tests.internals import StoredTokens

EPOCHS = int(os.environ.get("ENERGON_PACKED_SOAK", "9"))
LONG = EPOCHS >= 100
SHARDS = 1000 if LONG else 150
RECORDS = 1_000_000 if LONG else 3_000
MOST_MIB = 1500  # of all processes of `pack`
OPEN_TARS = 128  # of a process, at most
MOST_KIB = 16 if LONG else 200  # an epoch, main process and workers; few epochs say little


def data_of(folder: Path, records: int) -> Path:
    file = folder / "data.jsonl"
    rows = [[n % 1000 + 1] * (8 + n % 9) for n in range(records)]
    file.write_text(
        "".join(f"{json.dumps({'id': f'r{n}', 'input_ids': r, 'labels': r})}\n" for n, r in enumerate(rows))
    )
    return file


def packed(folder: Path, records: int, packs_per_shard: int) -> Path:
    options: dict[str, Any] = {"max_samples_per_pack": 1, "max_packs_per_shard": packs_per_shard, "workers": 1}
    inputs, options["sample_class"] = (str(data_of(folder, records)),), "PackedTokensSample"
    return pack(
        PackOptions(inputs=inputs, output_dir=folder / "out", seq_len=16, encoder=StoredTokens(), **options)
    ).shards


def joined(packs: list[Any]) -> Any:
    return PaddingFreeCollator().collate([sample for one in packs for sample in one])


def by_energon(path: Path, workers: int) -> Any:
    return get_packed_loader(path, epochs=1, num_workers=workers)


def by_dataset(path: Path, workers: int) -> Any:
    options: dict[str, Any] = {"persistent_workers": True} if workers else {}
    return torch.utils.data.DataLoader(PackedDataset(path), num_workers=workers, collate_fn=joined, **options)


def by_dataflow(path: Path, workers: int) -> Any:
    options: dict[str, Any] = {"persistent_workers": True} if workers else {}
    return DataflowLoader(MapDistributor(PackedDataset(path)), num_workers=workers, **options)


def by_stream(path: Path, workers: int) -> Any:
    data = str(path.parents[1] / "data.jsonl")
    config = DataflowConfig(dataset_path=data, packing_length=64, encoder=StoredTokens())
    return PackedIterableDataset(config, num_workers=workers)


def processes() -> list[int]:
    return [os.getpid(), *(child.pid for child in multiprocessing.active_children() if child.pid is not None)]


def descriptors(process: int) -> int:
    return len(os.listdir(f"/proc/{process}/fd"))


def kib(process: int) -> int:
    """Proportional set size without the pages of files: pages that processes share count once in all.

    Pages of libraries are left out: the share of a process in them grows when unrelated processes end.
    """
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))


def used() -> Iterator[tuple[int, int]]:
    """(KiB, descriptors) of this process and its workers."""
    for process in processes():
        try:
            yield kib(process), descriptors(process)
        except (FileNotFoundError, ProcessLookupError, PermissionError):  # a worker that just ended
            continue


def at_rest(before: list[int]) -> int:
    """Descriptors of this process, once as few as before; queues of an epoch may need a moment to close."""
    until = time.monotonic() + 2
    while (found := descriptors(os.getpid())) > min(before, default=found) and time.monotonic() < until:
        time.sleep(0.01)
    return found


def slope(values: list[int]) -> float:
    """A step: the median over all pairs (Theil and Sen), whatever a few values have more."""
    first, second = np.triu_indices(len(values), k=1)
    return float(np.median((np.array(values)[second] - np.array(values)[first]) / (second - first)))


@pytest.mark.parametrize("loader", [by_energon, by_dataset, by_dataflow, by_stream])
def test_memory_and_descriptors_are_flat(
    tmp_path: Path, loader: Callable[..., Any], own_process: ProcessPoolExecutor
) -> None:
    # Workers that are not persistent must not have sent all and ended at the third step.
    records = {by_stream: 1600, by_energon: 120}.get(loader, 24)
    path = packed(tmp_path, records, records // 6)
    assert own_process.submit(kib_per_epoch, loader, path).result() < MOST_KIB


@pytest.fixture(scope="module")
def own_process() -> Iterator[ProcessPoolExecutor]:
    """A process without the memory of other tests, which it would return, or share with workers, in the meantime."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


def kib_per_epoch(loader: Callable[..., Any], path: Path) -> float:
    """Growth of the memory with each epoch; also checks the descriptors."""
    batches = loader(path, 2)
    memory, files, rest = [], [], []
    for _ in range(EPOCHS):
        steps = 0
        for batch in batches:
            steps += 1
            seen = sum(batch.cu_seqlens.diff() > 0)
            if steps == 3:
                found = list(used())
        assert steps > 3
        assert seen > 0
        gc.collect()
        memory.append(sum(one for one, _ in found))
        files.append(sum(one for _, one in found))
        rest.append(at_rest(rest[-1:]))
    warm = EPOCHS // 3
    per_epoch = slope(memory[warm:])
    print(
        f"\n{loader.__name__}: {EPOCHS} epochs, {len(found)} processes; {memory[warm] / 1024:.1f} to "
        f"{memory[-1] / 1024:.1f} MiB, {per_epoch:+.2f} KiB an epoch; descriptors {min(files[warm:])} to "
        f"{max(files[warm:])}, at rest {min(rest[warm:])} to {max(rest[warm:])}"
    )
    assert slope(rest[warm:]) < 0.01 or max(rest[warm:]) - min(rest[warm:]) <= 1  # those of other tests end
    assert slope(files[warm:]) < 0.05 or max(files[warm:]) - min(files[warm:]) <= 6  # queues close a moment later
    return per_epoch


@pytest.mark.parametrize("loader", [by_energon, by_dataset, by_dataflow, by_stream])
def test_epochs_in_one_process_leave_no_thread(tmp_path: Path, loader: Callable[..., Any]) -> None:
    batches = loader(packed(tmp_path, 24, 4), 0)
    assert next(iter(batches)) is not None
    before = threading.active_count()
    for _ in range(EPOCHS):
        assert sum(len(batch.ids) for batch in batches) > 0
    assert threading.active_count() <= before


@pytest.fixture(scope="module")
def many_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = packed(tmp_path_factory.mktemp("shards"), SHARDS, 1)
    assert len(list(path.glob("*.tar"))) == SHARDS
    return path


@pytest.mark.parametrize("loader", [by_energon, by_dataset, by_dataflow])
def test_descriptors_do_not_grow_with_shards(many_shards: Path, loader: Callable[..., Any]) -> None:
    path = many_shards
    before, limits = descriptors(os.getpid()), resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = 1024 if LONG else before + OPEN_TARS + 16
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limits[1]))
    try:
        most, samples = 0, 0
        for batch in loader(path, 0):
            most = max(most, descriptors(os.getpid()))
            samples += len(batch.ids)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    print(f"\n{loader.__name__}: {SHARDS} shards, {before} descriptors before, {most} at most, limit {limit}")
    assert samples == SHARDS
    assert most <= before + OPEN_TARS + 8


def test_readers_share_the_open_files(many_shards: Path) -> None:
    """As in a blend of many folders: each has a reader of its own, with one bound for all."""
    gc.collect()
    before = descriptors(os.getpid())
    datasets = [PackedDataset(many_shards) for _ in range(2)]
    for dataset in datasets:
        assert sum(len(dataset[place]) for place in range(len(dataset))) == SHARDS
    assert before + OPEN_TARS // 2 < descriptors(os.getpid()) <= before + OPEN_TARS
    del dataset
    datasets.clear()
    gc.collect()
    assert descriptors(os.getpid()) <= before  # readers that are gone close their files


def tree(root: int) -> list[int]:
    """A process and all below it."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdigit():
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(folder.name))
    found = [root]
    for process in found:
        found += children.get(process, [])
    return found


def test_many_records_are_packed_in_little_memory(text_tokenizer_dir: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    with data.open("w") as out:
        for number in range(RECORDS):
            talk = [{"role": "user", "content": f"question {number}"}, {"role": "assistant", "content": "word " * 40}]
            out.write(f'{{"id": "r{number}", "messages": {json.dumps(talk)}}}\n')
    command = [sys.executable, "-m", "energon_packed", "pack", str(data), "--output-dir", str(tmp_path / "out")]
    command += ["--tokenizer", str(text_tokenizer_dir), "--seq-len", "4096", "--workers", "2"]
    peak, most = 0, 0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
        while run.poll() is None:
            of_all = []
            for process in tree(run.pid):
                with contextlib.suppress(OSError, StopIteration):
                    of_all.append(kib(process))
            peak, most = max(peak, sum(of_all)), max(most, len(of_all))
            time.sleep(0.2)
    assert run.returncode == 0
    manifest = PackingManifest.load(tmp_path / "out")
    print(
        f"\npack: {RECORDS} records, {data.stat().st_size} bytes; at most {peak / 1024:.0f} MiB in {most} processes; "
        f"{manifest.packs} packs, {sum(shard.bytes for shard in manifest.shards)} bytes of shards"
    )
    assert manifest.packed == RECORDS
    assert peak < MOST_MIB * 1024
