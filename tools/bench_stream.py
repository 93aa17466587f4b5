"""Benchmark streaming raw records into batches against the measure stage, which reads and tokenizes the same records.

    python tools/bench_stream.py [--json stream.json] [--records 300000] [--rounds 3]

Every run is a new process, with tokenizers on one thread, as in the workers of `pack`. CPU time is measured for the
process and its workers, from the first record on. Rounds are interleaved, and ratios are medians over rounds. Memory
may grow only by the word cache of the tokenizer, not with the number of records.
"""

import argparse
import gc
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from benchlib import Report, arguments, bench_tokenizer, text_records, write_jsonl

_SEQ_LEN = 4096
_MEMORY_INTERVAL = 200  # batches between two readings of memory
_MIB = 1 << 20


def cpu() -> float:
    """CPU seconds of this process and its finished children."""
    spent = 0.0
    for scope in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        used = resource.getrusage(scope)
        spent += used.ru_utime + used.ru_stime
    return spent


def resident() -> int:
    """Resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def run_measure(source: Path, tokenizer: Path, workers: int) -> dict[str, float]:
    """Run the measure stage alone, as `pack` runs it."""
    from energon_packed import ChatEncoder, DataflowConfig
    from energon_packed.pipeline.engine import LocalEngine
    from energon_packed.pipeline.reader import open_reader
    from energon_packed.pipeline.stages.measure import MeasureStage

    encoder = ChatEncoder.from_pretrained(tokenizer)
    encoder.text_tokenizer.load_fast()
    config = DataflowConfig(dataset_path=str(source), packing_length=_SEQ_LEN, encoder=encoder)
    folder = Path(tempfile.mkdtemp())
    stage = MeasureStage(
        options=config,
        reader=open_reader(config, folder),
        folder=folder,
        engine=LocalEngine(max(1, workers)),
        keep_tokens=False,
    )
    used, start = cpu(), time.perf_counter()
    table = stage.run()
    result = {"cpu": cpu() - used, "seconds": time.perf_counter() - start, "tokens": int(table.length.clip(0).sum())}
    shutil.rmtree(folder)
    return result


def run_stream(source: Path, tokenizer: Path, workers: int) -> dict[str, float]:
    """Run one epoch of `PackedIterableDataset`, and record its memory."""
    from energon_packed import ChatEncoder, DataflowConfig, PackedIterableDataset

    encoder = ChatEncoder.from_pretrained(tokenizer)
    encoder.text_tokenizer.load_fast()
    config = DataflowConfig(dataset_path=str(source), packing_length=_SEQ_LEN, encoder=encoder)
    stream = PackedIterableDataset(config, num_workers=workers)
    used, start = cpu(), time.perf_counter()
    tokens, rows, memory = 0, 0, []
    for rows, batch in enumerate(stream, 1):
        tokens += batch.num_tokens
        if rows % _MEMORY_INTERVAL == 0:
            memory.append((tokens / 1e6, resident() / _MIB))
    gc.collect()  # stops the workers, so that their CPU time is counted
    result = {"cpu": cpu() - used, "seconds": time.perf_counter() - start, "tokens": tokens}
    # The first third is excluded: the word cache of the tokenizer fills up.
    settled = np.array(memory[len(memory) // 3 :])
    slope = float(np.polyfit(*settled.T, 1)[0]) if len(settled) > 2 else 0.0
    first, last = (settled[0, 1], settled[-1, 1]) if len(settled) else (0.0, 0.0)
    return result | {"slope": slope, "first": first, "last": last, "utilization": tokens / rows / _SEQ_LEN}


def child(stage: str, source: Path, tokenizer: Path, workers: int) -> dict[str, float]:
    """Run one measurement in a new process."""
    from energon_packed.pipeline.engine import ONE_THREAD

    command = [sys.executable, __file__, "--child", stage, source, tokenizer, workers]
    environment = {**os.environ, **ONE_THREAD}
    done = subprocess.run(list(map(str, command)), check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def bench(report: Report, work: Path, records: int, rounds: int) -> None:
    """Compare tokens per CPU second, in one process and with two workers, and measure the memory of streaming."""
    source = write_jsonl(work / f"text-{records}.jsonl", text_records(records))
    tokenizer = bench_tokenizer(work, vision=False)
    streams: dict[int, float] = {}
    for workers in (0, 2):
        pairs = [[child(stage, source, tokenizer, workers) for stage in ("measure", "stream")] for _ in range(rounds)]
        rate = [[run["tokens"] / run["cpu"] for run in pair] for pair in pairs]
        wall = [[run["tokens"] / run["seconds"] for run in pair] for pair in pairs]
        metric = f"{records:,} JSONL records, {workers} workers"
        details = {"measure": statistics.median(pair[0] for pair in rate)}
        streams[workers] = statistics.median(pair[1] for pair in rate)
        details |= {"stream": streams[workers]}
        ratio = statistics.median(stream / measure for measure, stream in rate)
        target = (
            "" if workers else ">= 0.9"
        )  # with workers, batches are sent between processes, which measuring does not do
        report.add(f"{metric}: tokens per CPU second relative to measure", ratio, "", target, **details)
        report.add(f"{metric}: tokens/s relative to measure", statistics.median(s / m for m, s in wall))
        if not workers:
            last = pairs[-1][1]
            sizes = {"first_mib": last["first"], "last_mib": last["last"]}
            report.add(f"{metric}: memory slope", last["slope"], "MiB per million tokens", "<= 1", **sizes)
    metric = f"{records:,} JSONL records: CPU seconds per token, 2 workers relative to one process"
    report.add(metric, streams[0] / streams[2], "", "<= 1.25")


def main() -> None:
    """Run the benchmark and print the results."""
    if sys.argv[1:2] == ["--child"]:
        stage, source, tokenizer, workers = sys.argv[2:]
        run: Any = {"measure": run_measure, "stream": run_stream}[stage]
        print(json.dumps(run(Path(source), Path(tokenizer), int(workers))))
        return
    parser: argparse.ArgumentParser = arguments(__doc__, "stream")
    parser.add_argument("--records", type=int, default=300_000)
    parser.add_argument("--rounds", type=int, default=3)
    options: Any = parser.parse_args()
    report = Report("stream", options.json)
    bench(report, options.work, options.records, options.rounds)
    report.finish()


if __name__ == "__main__":
    main()
