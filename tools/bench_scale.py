"""Measure how time and memory grow with the number of records, shards and members.

    python tools/bench_scale.py [--records 1000000] [--parts records shards members driver plan training view]

records   generated records through lengths, pack, report, inspect, verify, metadataset and the loaders
shards    5,000 shards of small packs: verify, nv-meta and the loaders
members   tars with 200,000 members: inspect, nv-meta, and `pack` of a tar in parallel
driver    the driver of `pack` with a table of 10 million synthetic records of text: memory of each step. Anonymous
          memory is needed; pages of mapped files leave the memory if other data needs it
plan      a million to a billion lognormal lengths: plan_counts, and the places of all samples from lengths in a file
          to arrays in files (17 GB for a billion), against reading the file twice from the disk and against
          numpy.argsort; pack_lengths of 10 million; and the packs of nodes that plan on their own against those of one
          plan
training  1, 10 and 100 million packs, links to one tar of 10,000 packs: first batch, resume and memory of a process;
          and `order check` of an epoch of a million and 10 million packs, each of one sample
view      the server of `view` for 10 million records in 5,000 shards, hard links of a shard: pages and memory

The first three parts run with a hundredth and a tenth first. The slope of the CPU time is the ratio of two increases
per record: from a tenth to all, and from a hundredth, which is mostly start-up, to a tenth. Memory per record is the
increase of the peak anonymous memory of all processes from a tenth to all. The output has the figures of the page
Performance.
"""

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from benchlib import Report, Usage, arguments, bench_tokenizer, command, paragraphs, usage

from energon_packed import pack_lengths
from energon_packed.packing import plan_counts
from energon_packed.shards import PackingManifest
from energon_packed.shards.nv_meta import INFO, info_file

_SEQ_LEN = 2048
_LINKED = 10_000  # packs of the tar to which all shards of the part `training` are linked
_BALANCED = 10_000_000  # most packs of a dataset with lengths.parquet, by which BalancedSampler orders them
_STAGES = ("records", "shards", "members", "driver", "plan", "training", "view")
_SHARDS = 5_000  # of the part `view`
_COPIES = 500  # of the records of a shard in a row group of lengths.parquet
_HEAD = "import logging, sys, time, warnings; warnings.filterwarnings('ignore'); logging.disable(logging.WARNING)\n"

_LOADER = (
    _HEAD
    + """
from energon_packed import get_packed_loader
loader = get_packed_loader(sys.argv[1], epochs=1, num_workers=0)
print(sum(len(batch.ids) for batch in loader))
"""
)

_DATAFLOW = (
    _HEAD
    + """
from energon_packed import DataflowLoader, MapDistributor, PackedDataset
loader = DataflowLoader(MapDistributor(PackedDataset(sys.argv[1])), num_workers=0)
print(sum(len(batch.ids) for batch in loader))
"""
)

# First batch of both loaders, without an epoch.
_FIRST = (
    _HEAD
    + """
from energon_packed import DataflowLoader, MapDistributor, PackedDataset, get_packed_loader
next(iter(get_packed_loader(sys.argv[1], num_workers=0)))
next(iter(DataflowLoader(MapDistributor(PackedDataset(sys.argv[1])), num_workers=0)))
"""
)


# First batch of a loader, and of a loader that continues from its state: seconds, and growth of the memory in MiB.
_TRAINING = (
    _HEAD
    + """
from energon_packed import BalancedSampler, DataflowLoader, MapDistributor, PackedDataset, get_packed_loader
from torch.utils.data import DataLoader

def memory():
    return int(next(line for line in open("/proc/self/status") if line.startswith("RssAnon")).split()[1]) / 1024

def make():
    if sys.argv[2] == "get_packed_loader":
        return get_packed_loader(sys.argv[1], num_workers=0)
    dataset = PackedDataset(sys.argv[1])
    if sys.argv[2] == "BalancedSampler":
        return DataLoader(dataset, sampler=BalancedSampler(dataset, 8, 0), collate_fn=len)
    return DataflowLoader(MapDistributor(dataset), num_workers=0, rank=9, world_size=10_000)

before, start = memory(), time.perf_counter()
loader = make()
batches = iter(loader)
next(batches)
print(time.perf_counter() - start)
for _ in range(50):
    next(batches)
print(memory() - before)
if hasattr(loader, "state_dict"):
    state, start = loader.state_dict(), time.perf_counter()
    loader = make()
    loader.load_state_dict(state)
    next(iter(loader))
    print(time.perf_counter() - start)
"""
)


# Steps of the driver with a synthetic table: name; bytes at the peak and after it, of anonymous memory (the peak by a
# thread that reads it every 5 ms) and of all memory; CPU and wall seconds.
_DRIVER = (
    _HEAD
    + """
import tempfile, threading
from pathlib import Path
import numpy as np
from energon_packed import PackOptions
from energon_packed.files import blocks, disk_array
from energon_packed.pipeline.measured.chunk_reader import RecordBytes
from energon_packed.pipeline.measured.chunks import NUMERIC, TOKEN
from energon_packed.pipeline.stages.plan import Plan, in_order, plan_packs, plan_shards, sample_places
from energon_packed.pipeline.measured.table import IN_REFS, RecordTable

def status(name):
    return int(next(line for line in open("/proc/self/status") if line.startswith(name)).split()[1]) * 1024

def watch():
    global peak
    while True:
        peak = max(peak, status("RssAnon"))
        time.sleep(0.005)

def step(name, run):
    global peak
    open("/proc/self/clear_refs", "w").write("5")  # sets the peak to the present memory
    peak, start, wall = status("RssAnon"), time.process_time(), time.perf_counter()
    result = run()
    memory = peak, status("RssAnon"), status("VmHWM"), status("VmRSS")
    print(name, *memory, time.process_time() - start, time.perf_counter() - wall)
    return result

def make_table():
    rng = np.random.default_rng(0)
    columns = {name: np.broadcast_to(np.zeros((), dtype=dtype), count) for name, dtype in NUMERIC.items()}
    values = {"address": 1200, "size": 1200, "text_bytes": 1100, "supervised": 100, "length": 0, "status": 0}
    for name, value in values.items():
        columns[name] = disk_array(folder, count, NUMERIC[name])
        for block in blocks(count):
            columns[name][block] = value * np.arange(block.start, block.stop) if name == "address" else value
    for block in blocks(count):
        columns["length"][block] = np.clip(rng.lognormal(5.3, 0.8, block.stop - block.start), 1, 4096)
    starts = np.arange(0, count, 50_000)
    return RecordTable(
        **columns,
        source_starts=np.array([0, count]),
        counts={},
        folder=folder,
        files=[Path("x")] * len(starts),
        file_starts=starts,
    )

count, folder = int(sys.argv[1]), Path(sys.argv[2])
options = PackOptions(inputs=("x",), output_dir="x", tokenizer="x", seq_len=4096, sample_class="PackedTokensSample")
peak = 0
threading.Thread(target=watch, daemon=True).start()
table = step("table", make_table)
packs, pack, place = step("packs", lambda: plan_packs(table, options))
shards = step("shards", lambda: plan_shards(packs, pack, table, options))
places = step("places", lambda: sample_places(pack, place, shards, options))
tokens = step("tokens", lambda: RecordBytes(table.files, table.file_starts, table.length, table.empty, unit=TOKEN))
plan = Plan(
    status=table.status, entries=table, packs=packs, places=places, shards=shards, utilization_ungrouped=None
)
columns = [*[getattr(table, name) for name in IN_REFS], *tokens.columns]
read = step("columns", lambda: in_order(plan, columns))
step("tasks", lambda: [read(shard.span, column).sum() for shard in shards for column in columns])
"""
)


# Places of all samples of a file of int32: seconds to read it twice from the disk; wall and CPU seconds of `assign`;
# its anonymous memory and that of the process before it, in MiB; packs.
_ASSIGN = (
    _HEAD
    + """
import os, threading
from functools import partial
from pathlib import Path
import numpy as np
from energon_packed.files import disk_array
from energon_packed.packing.planner import assign

def memory():
    return int(next(line for line in open("/proc/self/status") if line.startswith("RssAnon")).split()[1]) / 1024

def watch():
    global peak
    while True:
        peak = max(peak, memory())
        time.sleep(0.005)

file = os.open(sys.argv[1], os.O_RDONLY)
start = time.perf_counter()
for _ in range(2):
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.lseek(file, 0, 0)
    while os.read(file, 1 << 24):
        pass
read = time.perf_counter() - start
peak = before = memory()
threading.Thread(target=watch, daemon=True).start()
wall, cpu = time.perf_counter(), time.process_time()
out = assign(
    np.memmap(sys.argv[1], dtype=np.int32, mode="r"), 4096, "bfd", empty=partial(disk_array, Path(sys.argv[1]).parent)
)
print(read, time.perf_counter() - wall, time.process_time() - cpu, peak, before, len(out.sizes))
"""
)


def records(count: int) -> Iterator[str]:
    """Yield lines of JSONL: an id, a question, and an answer of lognormal length with a mean of 120 characters."""
    prose, _ = paragraphs()
    words = " ".join("".join(character if character.isalnum() else " " for character in " ".join(prose)).split())
    rng = np.random.default_rng(0)
    for first in range(0, count, 100_000):
        number = min(100_000, count - first)
        lengths = np.clip(rng.lognormal(np.log(120) - 0.32, 0.8, number), 4, 8000).astype(int).tolist()
        starts = rng.integers(0, len(words) - 8000, number).tolist()
        for index, (start, length) in enumerate(zip(starts, lengths, strict=True), first):
            answer = words[start : start + length]  # letters and digits only, so JSON needs no escapes
            turns = f'{{"role":"user","content":"Question {index}?"}},{{"role":"assistant","content":"{answer}"}}'
            yield f'{{"id":"scale-{index:010d}","messages":[{turns}]}}\n'


def jsonl(work: Path, count: int) -> Path:
    """Write generated records, unless the file exists."""
    path = work / f"scale-{count}.jsonl"
    if not path.exists():
        temporary = path.with_suffix(".tmp")
        with temporary.open("w", encoding="utf-8") as stream:
            stream.writelines(records(count))
        temporary.rename(path)
    return path


def tokenizer_of(work: Path) -> Path:
    """Return the tokenizer of all parts."""
    return bench_tokenizer(work, vision=False)


def packing(source: Path, out: Path, tokenizer: Path) -> list[str]:
    """Return the command that packs a file as tokens."""
    options = ("--seq-len", _SEQ_LEN, "--tokenizer", tokenizer, "--sample-class", "PackedTokensSample")
    return command("pack", source, "-o", out, "--shard-prefix", out.name.replace(".", "-"), *options)


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of all files in a folder."""
    return (
        sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        if path.is_dir()
        else path.stat().st_size
    )


def run_records(work: Path, count: int) -> dict[str, tuple[Usage, int]]:
    """Return resources and bytes of output of each command, for `count` records.

    The Metadataset blends this output with the output of the run of a tenth, if there is one.
    """
    source, out, tokenizer = jsonl(work, count), work / f"scale-{count}", tokenizer_of(work)
    shutil.rmtree(out, ignore_errors=True)
    html, blend = work / f"scale-{count}.html", work / f"scale-{count}.yaml"
    inputs = [folder for folder in (work / f"scale-{count // 10}", out) if folder == out or folder.exists()]
    blend.unlink(missing_ok=True)
    lines: dict[str, tuple[list[str], Path | None]] = {
        "lengths": (command("lengths", source, "-o", out, "--tokenizer", tokenizer), None),
        "pack": (packing(source, out, tokenizer), out / "webdataset"),
        "report": (command("report", out, "-o", html), html),
        "inspect --id": (command("inspect", out, "--id", f"scale-{count - 1:010d}"), None),
        "verify": (command("verify", out), None),
        "metadataset": (command("metadataset", blend, *inputs, "--epochized"), blend),
        "get_packed_loader, an epoch": ([sys.executable, "-c", _LOADER, str(out)], None),
        "DataflowLoader of the Metadataset, an epoch": ([sys.executable, "-c", _DATAFLOW, str(blend)], None),
    }
    return measured(lines, count)


def measured(lines: dict[str, tuple[list[str], Path | None]], count: int) -> dict[str, tuple[Usage, int]]:
    """Run commands, and return their resources and the bytes of their output."""
    results = {}
    for name, (line, output) in lines.items():
        used = usage(line)
        results[name] = used, size_of(output) if output else 0
        text = f"  {count:,}: {name}: {used.cpu:.1f} s CPU, {used.wall:.1f} s, {used.memory / 2**20:.0f} MiB"
        print(f"{text}, {used.anonymous / 2**20:.0f} of them anonymous", file=sys.stderr, flush=True)
    return results


def add_slopes(report: Report, unit: str, limit: int, runs: dict[int, dict[str, tuple[Usage, int]]]) -> None:
    """Report the resources of the largest run, and its slopes relative to a run of a tenth."""
    least, tenth, count = sorted(runs)
    for name, (used, size) in runs[count].items():
        start, before = runs[least][name][0], runs[tenth][name][0]
        label = f"{count:,} {unit}: {name}"
        report.add(f"{label}: CPU time", used.cpu, "s", wall=used.wall)
        # Shorter work has no slope: start-up varies more.
        if before.cpu > 1.5 * start.cpu:
            slope = (used.cpu - start.cpu) / (count - least) / (before.cpu - start.cpu) * (tenth - least)
            report.add(f"{label}: slope of the CPU time", slope, "", "<= 1.15")
        report.add(f"{label}: peak memory", used.memory / 2**20, "MiB", anonymous=used.anonymous / 2**20)
        more = (used.anonymous - before.anonymous) / (count - tenth)
        report.add(f"{label}: anonymous memory", more, f"B/{unit[:-1]}", f"<= {limit}")
        if size:
            report.add(f"{label}: output", size / 2**20, "MiB")


def bench(
    report: Report, unit: str, limit: int, count: int, run: Callable[[int], dict[str, tuple[Usage, int]]]
) -> None:
    """Run a hundredth, a tenth and all; `limit` is the most memory of a unit, in bytes."""
    add_slopes(report, unit, limit, {number: run(number) for number in (count // 100, count // 10, count)})


def run_shards(work: Path, count: int) -> dict[str, tuple[Usage, int]]:
    """Return resources of each command, for `count` shards of two packs."""
    source, out, tokenizer = jsonl(work, count * 10), work / f"shards-{count}", tokenizer_of(work)
    shutil.rmtree(out, ignore_errors=True)
    small = ("--seq-len", 256, "--max-packs-per-shard", 2, "--overlong", "truncate")
    lines: dict[str, tuple[list[str], Path | None]] = {
        "pack": ([*packing(source, out, tokenizer), *map(str, small)], out / "webdataset"),
        "inspect --id": (command("inspect", out, "--id", f"scale-{count - 1:010d}"), None),
        "verify": (command("verify", out), None),
        "nv-meta": (command("nv-meta", out), None),
        "first batch of both loaders": ([sys.executable, "-c", _FIRST, str(out)], None),
    }
    return measured(lines, count)


def run_members(work: Path, count: int) -> dict[str, tuple[Usage, int]]:
    """Return resources of each command, for a tar of `count` members."""
    source, tokenizer = jsonl(work, count), tokenizer_of(work)
    single, out = work / f"members-{count}", work / f"members-out-{count}"
    for folder in (single, out):
        shutil.rmtree(folder, ignore_errors=True)
    whole = ("--unpacked", "--seq-len", _SEQ_LEN, "--max-packs-per-shard", count)
    lines: dict[str, tuple[list[str], Path | None]] = {
        "pack to a tar": (
            command("pack", source, "-o", single, "--tokenizer", tokenizer, *whole),
            single / "webdataset",
        ),
        "inspect": (command("inspect", single), None),
        "nv-meta": (command("nv-meta", single), None),
        "pack of the tar": (
            packing(single / "webdataset" / f"{single.name}-000000.tar", out, tokenizer),
            out / "webdataset",
        ),
    }
    return measured(lines, count)


def run_driver(report: Report, work: Path, count: int) -> None:
    """Report the memory of the driver in each step of planning: its increase from a tenth of the records to all."""
    runs = [
        [line.split() for line in usage([sys.executable, "-c", _DRIVER, str(number), str(work)]).output.splitlines()]
        for number in (count // 10, count)
    ]
    for (name, *before), (_, *after) in zip(*runs, strict=True):
        peak, kept, mapped, _ = (
            (int(b) - int(a)) / (count - count // 10) for a, b in zip(before[:4], after, strict=False)
        )
        label = f"{count:,} records: driver, {name}"
        used = {"MiB": int(after[0]) >> 20, "cpu": after[4], "wall": after[5]}
        report.add(f"{label}: anonymous memory", peak, "B/record", "<= 1", kept=kept, **used)
        report.add(f"{label}: with mapped files", mapped, "B/record")


def run_plan(report: Report, work: Path) -> None:
    """Report plans of counts, of lengths in files and in memory, and the packs of separate plans."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(5.3, 0.8, 10_000_000), 1, 4096).astype(np.int32)
    counts = np.bincount(lengths, minlength=4097)
    for factor in (0.1, 1, 10, 100):
        start = time.process_time()
        plan = plan_counts((counts * factor).astype(np.int64), 4096)
        spent = time.process_time() - start
        label = f"{int(counts.sum() * factor):,} lengths: plan_counts"
        report.add(f"{label}: CPU time", spent, "s", packs=plan.num_packs, utilization=plan.utilization)
    for count in (10**6, 10**7, 10**8, 10**9):
        run_assign(report, work, lengths, count)
    start = time.process_time()
    packs = pack_lengths(lengths, 4096).num_packs
    report.add(f"{len(lengths):,} lengths: pack_lengths: CPU time", time.process_time() - start, "s", packs=packs)
    # Nodes that pack on their own, as with --part: a share of each of two inputs, or one input after the other.
    inputs = [
        lengths[: len(lengths) // 2],
        np.clip(rng.normal(2600, 300, len(lengths) // 2), 1, 4096).astype(np.int32),
    ]
    joined = plan_counts(np.bincount(np.concatenate(inputs)), 4096).num_packs
    for nodes in (8, 64, 512):
        shares = zip(*(np.array_split(values, nodes) for values in inputs), strict=True)
        for name, parts in (
            ("a share of each input", map(np.concatenate, shares)),
            ("one input after the other", np.array_split(np.concatenate(inputs), nodes)),
        ):
            packs = sum(plan_counts(np.bincount(part), 4096).num_packs for part in parts)
            report.add(
                f"{nodes} nodes, {name}: more packs than one plan", 100 * (packs / joined - 1), "%", packs=packs
            )


def run_assign(report: Report, work: Path, lengths: npt.NDArray[np.int32], count: int) -> None:
    """Report the places of `count` samples with lengths in a file, in an order of their own for each 10 million."""
    path, rng, total = work / f"lengths-{count}", np.random.default_rng(count), np.zeros(4097, dtype=np.int64)
    with path.open("wb") as file:
        for first in range(0, count, len(lengths)):
            part = rng.permutation(lengths)[: count - first]
            total += np.bincount(part, minlength=4097)
            part.tofile(file)
        file.flush()
        os.fsync(file.fileno())  # only then its pages can leave the memory
    read, wall, cpu, peak, before, packs = map(float, usage([sys.executable, "-c", _ASSIGN, str(path)]).output.split())
    plan = plan_counts(total, 4096)
    if packs != plan.num_packs:
        raise AssertionError(f"{packs} packs, and {plan.num_packs} of plan_counts")
    label = f"{count:,} lengths in a file: places"
    report.add(f"{label}: wall time / reading twice", wall / read, "", "<= 10", wall=wall, cpu=cpu, read_twice=read)
    report.add(
        f"{label}: anonymous memory", peak - before, "MiB", start=before, packs=packs, utilization=plan.utilization
    )
    if count <= 10**8:
        array = np.fromfile(path, dtype=np.int32)
        start = time.process_time()
        np.argsort(array)
        report.add(f"{label}: CPU time / numpy.argsort", cpu / (time.process_time() - start), "")
    path.unlink()


def simulated(work: Path, count: int) -> Path:
    """Return a dataset of `count` packs: links to a tar of 10,000 packs of one sample, and manifests of all shards."""
    single, folder = work / "training", work / f"training-{count}"
    out = folder / "webdataset"
    if not single.exists():
        options = ("--max-packs-per-shard", _LINKED, "--max-samples-per-pack", 1, "--overlong", "truncate")
        usage([*packing(jsonl(work, _LINKED), single, tokenizer_of(work)), *map(str, options)])
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(single / "webdataset" / ".nv-meta", out / ".nv-meta", ignore=lambda *_: ["index.sqlite"])
    manifest = PackingManifest.load(single)
    [shard] = manifest.shards
    names = [f"training-{number:06d}.tar" for number in range(count // _LINKED)]
    for name in names:
        for suffix in ("", ".idx"):
            (out / f"{name}{suffix}").hardlink_to(single / "webdataset" / f"{shard.name}{suffix}")
    replace(manifest, packs=count, shards=[replace(shard, name=name) for name in names]).save(out)
    (out / ".nv-meta" / INFO).write_bytes(info_file(dict.fromkeys(names, _LINKED)))
    split = {"split_parts": {"train": names, "val": [], "test": []}, "exclude": []}
    (out / ".nv-meta" / "split.yaml").write_text(yaml.safe_dump(split))
    table = pq.read_table(single / "lengths.parquet", columns=["pack", "length"])
    packs = [int(key.rpartition("_")[2]) for key in table["pack"].to_pylist()]
    with pq.ParquetWriter(folder / "lengths.parquet", table.schema) as writer:
        for number in range(len(names) if count <= _BALANCED else 0):
            keys = pa.array([f"training_{number * _LINKED + pack:08d}" for pack in packs])
            writer.write_table(table.set_column(0, table.schema.field("pack"), keys))
    return folder


def write_log(folder: Path, steps: int, ranks: int) -> None:
    """Write the order log of a complete epoch of packs of one sample, in the lines of a DataflowLoader."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    header = {"order_log": 1, "run": "0", "world_size": ranks, "loader": "DataflowLoader", "size": steps * ranks}
    header |= {"endless": False, "starts": [[ranks, [[0, 0]], [0, 0], 0]], "time": "2026-11-20T09:30:00.000+00:00"}
    for rank in range(ranks):
        with (folder / f"order-{rank:05d}-000.jsonl").open("w") as stream:
            stream.write(json.dumps(header | {"rank": rank}) + "\n")
            stream.writelines(
                f'{{"epoch": 0, "step": {step + 1}, "line": {step + 2}, "ids": ["scale-{step * ranks + rank:010d}"], '
                f'"sources": ["x"], "items": [{step * ranks + rank}]}}\n'
                for step in range(steps)
            )
            stream.write(f'{{"epoch": 0, "step": {steps}, "line": {steps + 2}, "end": true}}\n')


def run_training(report: Report, work: Path) -> None:
    """Report the first batch, resume and memory of a process of each loader, and `order check`."""
    for count in (1_000_000, 10_000_000, 100_000_000):
        folder = simulated(work, count)
        for name in ("DataflowLoader", "get_packed_loader", "BalancedSampler"):
            if name == "BalancedSampler" and count > _BALANCED:
                continue
            first, memory, *resumed = map(float, usage([sys.executable, "-c", _TRAINING, folder, name]).output.split())
            report.add(
                f"{count:,} packs: {name}: first batch", first, "s", "<= 5" if name != "BalancedSampler" else ""
            )
            for seconds in resumed:
                report.add(
                    f"{count:,} packs: {name}: resume", seconds, "s", "<= 5" if name != "BalancedSampler" else ""
                )
            report.add(f"{count:,} packs: {name}: memory of a process", memory, "MiB")
        shutil.rmtree(folder)
    for steps in (125_000, 1_250_000):
        write_log(work / "order-log", steps, 8)
        used = usage(command("order", "check", work / "order-log"))
        report.add(f"order log of {8 * steps:,} packs: order check", used.wall, "s", memory=used.memory / 2**20)
        shutil.rmtree(work / "order-log")


def many_shards(work: Path) -> Path:
    """Return a dataset of `_SHARDS` hard links of a shard of 2,000 records, with the reports of such a run."""
    out, source = work / "view", jsonl(work, 2_000)
    shutil.rmtree(out, ignore_errors=True)
    usage(packing(source, out, tokenizer_of(work)))
    data, (tar,) = out / "webdataset", (out / "webdataset").glob("*.tar")
    names = [f"view-{number:06d}.tar" for number in range(_SHARDS)]
    for name in names[1:]:
        (data / name).hardlink_to(tar)
        (data / f"{name}.idx").hardlink_to(tar.with_suffix(".tar.idx"))
    manifest = json.loads((data / ".nv-meta" / "packing.json").read_text())
    packs = manifest["packs"]
    manifest["shards"] = [{**manifest["shards"][0], "name": name} for name in names]
    manifest |= {name: _SHARDS * manifest[name] for name in ("records", "packed", "packs", "tokens")}
    (data / ".nv-meta" / "packing.json").write_text(json.dumps(manifest))
    with closing(sqlite3.connect(data / ".nv-meta" / "index.sqlite")) as database:
        row = "INSERT INTO samples (tar_file_id, sample_key, sample_index) VALUES (?, ?, ?)"
        places = product(range(1, _SHARDS), range(packs))
        database.executemany(row, ((shard, f"view_{shard * packs + pack:08d}", pack) for shard, pack in places))
        database.commit()
    table = pq.read_table(out / "lengths.parquet")
    with pq.ParquetWriter(out / "lengths.parquet", table.schema) as writer:
        for group in range(_SHARDS // _COPIES):
            rows = pa.concat_tables([table] * _COPIES).combine_chunks()
            ids = pa.array([f"scale-{group * len(rows) + number:010d}" for number in range(len(rows))])
            writer.write_table(rows.set_column(rows.schema.names.index("id"), rows.schema.field("id"), ids))
    return out


def run_view(report: Report, work: Path) -> None:
    """Report the time until the address is printed and of some pages, and the peak memory."""
    out = many_shards(work)
    label, start, before = f"{_SHARDS * 2_000:,} records: view", time.perf_counter(), 0.0
    pages = {
        "start of the command": None,
        "first page": "",
        "first page again, with the tokenizer": "",
        "last page": "?page=99999999",
        "a pack": "pack/view_00000003",
        "id of the last record": f"records?id={_SHARDS * 2_000 - 1:010d}",
        "records of a shard": "records?shard=004999",
        "text that no pack has": "text?text=absent",
    }
    line = command("view", out, "--no-browser", "--no-token")
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        for name, path in pages.items():
            if path is not None:
                with urllib.request.urlopen(url + path) as response:
                    response.read()
            stat = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            cpu = (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")
            report.add(f"{label}, {name}", time.perf_counter() - start, "s", cpu=cpu - before)
            start, before = time.perf_counter(), cpu
        status = Path(f"/proc/{process.pid}/status").read_text()
        process.send_signal(signal.SIGINT)
    report.add(f"{label}, peak memory", int(status.partition("VmHWM:")[2].split()[0]) / 1024, "MiB")


def main() -> None:
    """Run the benchmarks and print the results."""
    parser = arguments(__doc__, "scale")
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--parts", nargs="*", choices=_STAGES, default=list(_STAGES))
    options: Any = parser.parse_args()
    work: Path = options.work
    work.mkdir(parents=True, exist_ok=True)
    report = Report("scale", options.json)
    if "records" in options.parts:
        bench(report, "records", 1, options.records, partial(run_records, work))
    if "shards" in options.parts:
        bench(report, "shards", 10_000, 5_000, partial(run_shards, work))
    if "members" in options.parts:
        bench(report, "members", 1_000, 200_000, partial(run_members, work))
    if "driver" in options.parts:
        run_driver(report, work, 10 * options.records)
    if "plan" in options.parts:
        run_plan(report, work)
    if "training" in options.parts:
        run_training(report, work)
    if "view" in options.parts:
        run_view(report, work)
    report.finish()


if __name__ == "__main__":
    main()
