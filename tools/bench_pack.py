"""Benchmark packing against baselines.

    python tools/bench_pack.py [--json pack.json] [--records 200000] [--slopes]

Compares a complete `energon-packed pack` run, from start-up to indexed shards, with the tokenizer alone on the same
rendered texts, with tokenization and packing by `datasets` and TRL, and, for JPEGs, with a plain file copy. Also
measures a rerun with another --seq-len, `--help`, the start of a run, the utilization lost by --group-by media, and
the memory for a million records. `--slopes` instead measures the cost per stage for 10 thousand, 100 thousand and a
million records.
"""

import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchlib import (
    Report,
    arguments,
    bench_tokenizer,
    cli,
    command,
    image_records,
    run_peer,
    seconds,
    text_records,
    usage,
    write_jsonl,
)

from energon_packed import PackingManifest

_CORES = len(os.sched_getaffinity(0))
_SEQ_LEN = 4096

# Upper bound: the rendered texts are in memory and the tokens are discarded.
_TOKENIZER = """
import sys, time, orjson
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(sys.argv[1])
render = lambda r: "".join(f"<|im_start|>{m['role']}\\n{m['content']}<|im_end|>\\n" for m in r["messages"])
texts = [render(orjson.loads(line)) for line in open(sys.argv[2], "rb")]
start_time = time.perf_counter()
tokens = 0
for start in range(0, len(texts), 1000):
    tokens += sum(map(len, tokenizer.encode_batch_fast(texts[start : start + 1000], add_special_tokens=False)))
print(time.perf_counter() - start_time, tokens)
"""

_TRL = """
import json, sys, time
start_time = time.perf_counter()
from datasets import load_dataset
from transformers import AutoTokenizer
from trl import pack_dataset
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
data = load_dataset("json", data_files=sys.argv[2], split="train", cache_dir=sys.argv[3])
def tokenize(rows):
    return {"input_ids": tokenizer.apply_chat_template(rows["messages"], tokenize=True, return_dict=False)}
data = data.map(tokenize, batched=True, num_proc=int(sys.argv[4]), remove_columns=data.column_names)
packed = pack_dataset(data, 4096, "bfd", map_kwargs={"batch_size": len(data)})
print(json.dumps({"seconds": time.perf_counter() - start_time, "packs": len(packed)}))
"""

_LOAD = """
import sys, transformers
for name in ("AutoTokenizer", *sys.argv[2:]):
    getattr(transformers, name).from_pretrained(sys.argv[1])
"""


def pack(out: Path, source: Path, tokenizer: Path, *options: object, fresh: bool = True) -> tuple[float, Path]:
    """Run `energon-packed pack`, and return (wall seconds, output folder)."""
    if fresh:
        shutil.rmtree(out, ignore_errors=True)
    run = command("pack", source, "-o", out, "--seq-len", _SEQ_LEN, "--tokenizer", tokenizer, *options)
    return seconds(lambda: subprocess.run(run, check=True, stdout=subprocess.DEVNULL)), out


def tokenizer_alone(tokenizer: Path, source: Path) -> float:
    """Measure the seconds of `encode_batch_fast` with one thread per core."""
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": str(_CORES)}
    run = [sys.executable, "-c", _TOKENIZER, str(tokenizer / "tokenizer.json"), str(source)]
    done = subprocess.run(run, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return float(done.stdout.split()[0])


def bench_text(report: Report, work: Path, records: int) -> float:
    """Compare packing of text with the tokenizer and with TRL; return the seconds of one complete run."""
    source = write_jsonl(work / f"text-{records}.jsonl", text_records(records))
    tokenizer = bench_tokenizer(work, vision=False)
    rounds = [(tokenizer_alone(tokenizer, source), pack(work / "out-text", source, tokenizer)[0]) for _ in range(3)]
    limit, pack_seconds = (statistics.median(column) for column in zip(*rounds, strict=True))
    engine = PackingManifest.load(work / "out-text" / "webdataset").tokenizer_engine
    metric = f"text: records/s relative to encode_batch_fast alone, engine {engine}"
    report.add(
        metric,
        limit / pack_seconds,
        "",
        ">= 3",
        seconds=pack_seconds,
        tokenizer_seconds=limit,
        per_second=records / pack_seconds,
    )
    shutil.rmtree(work / "hf-cache", ignore_errors=True)
    peer = run_peer(work, _TRL, tokenizer, source, work / "hf-cache", _CORES)
    report.add("text: speedup over datasets and TRL", peer["seconds"] / pack_seconds, "x", ">= 5", peer=peer)

    as_tokens = ("--sample-class", "PackedTokensSample")
    tokens = statistics.median(pack(work / "out-tokens", source, tokenizer, *as_tokens)[0] for _ in range(3))
    metric = "text stored as tokens: records/s relative to encode_batch_fast alone"
    report.add(metric, limit / tokens, "", ">= 2", seconds=tokens)
    slow_engine = ("--tokenizer-engine", "tokenizers")
    slow = statistics.median(pack(work / "out-slow", source, tokenizer, *slow_engine)[0] for _ in range(3))
    report.add("text, engine tokenizers: records/s relative to encode_batch_fast alone", limit / slow, seconds=slow)

    again, out = pack(work / "out-text", source, tokenizer, "--overwrite", "--seq-len", 8192, fresh=False)
    counters = PackingManifest.load(out).counters
    report.add("another --seq-len: texts tokenized", counters["tokenized"], "", "<= 0", seconds=again, **counters)
    report.add("another --seq-len: share of the first run's time", again / pack_seconds)
    return pack_seconds


def bench_images(report: Report, work: Path) -> None:
    """Compare packing of JPEGs with a plain file copy plus packing of the same records without images."""
    source = write_jsonl(work / "images-3k.jsonl", image_records(work / "images-3k", 3000))
    plain = write_jsonl(work / "images-3k-text.jsonl", text_records(3000, mean_chars=400))
    tokenizer = bench_tokenizer(work, vision=True)
    images = sorted((work / "images-3k").iterdir())

    def copy() -> None:
        with (work / "copy.bin").open("wb") as out:
            for path in images:
                with path.open("rb") as stream:
                    shutil.copyfileobj(stream, out)
            out.flush()
            os.fsync(out.fileno())

    rounds = []
    for _ in range(3):
        text, _ = pack(work / "out-plain", plain, tokenizer)
        pack_seconds, _ = pack(work / "out-images", source, tokenizer, "--image-root", "/")
        rounds.append((text + seconds(copy), pack_seconds))
    (work / "copy.bin").unlink()
    limit, pack_seconds = (statistics.median(column) for column in zip(*rounds, strict=True))
    size = sum(path.stat().st_size for path in images)
    report.add(
        "JPEGs: speed relative to text-only packing plus copyfileobj",
        limit / pack_seconds,
        "",
        ">= 0.6",
        seconds=pack_seconds,
        bytes=size,
    )


def bench_groups(report: Report, work: Path) -> None:
    """Measure the utilization that is lost by separating text and images."""
    mixed = work / "mixed.jsonl"
    mixed.write_bytes(b"".join((work / f"images-3k{kind}.jsonl").read_bytes() for kind in ("", "-text")))
    tokenizer = bench_tokenizer(work, vision=True)
    utilizations = []
    for group in ("none", "media"):
        _, out = pack(work / f"out-{group}", mixed, tokenizer, "--image-root", "/", "--group-by", group)
        utilizations.append(PackingManifest.load(out).utilization)
    report.add(
        "--group-by media: utilization lost",
        100 * (utilizations[0] - utilizations[1]),
        "points",
        none=utilizations[0],
        media=utilizations[1],
    )


def bench_help(report: Report) -> None:
    """Measure the CPU time of `energon-packed --help`."""
    report.add("--help: CPU time", usage([sys.executable, "-m", "energon_packed", "--help"]).cpu, "s", "<= 0.3")


def bench_start(report: Report, work: Path) -> None:
    """Compare packing of 200 records with loading their tokenizer, and for images their image processor, alone."""
    for vision, target in ((False, "<= 0.7"), (True, "<= 1.2")):
        kind = "images" if vision else "text"
        records = image_records(work / "images-200", 200) if vision else text_records(200)
        source, tokenizer = write_jsonl(work / f"{kind}-200.jsonl", records), bench_tokenizer(work, vision=vision)
        load = [sys.executable, "-c", _LOAD, tokenizer, *(["AutoImageProcessor"] if vision else [])]
        options = ("--seq-len", _SEQ_LEN, "--tokenizer", tokenizer, "--image-root", "/", "--no-resume", "--overwrite")
        run = command("pack", source, "-o", work / f"out-{kind}-200", *options)
        rounds = [(usage(load), usage(run)) for _ in range(3)]
        alone, whole = (statistics.median(each.cpu for each in column) for column in zip(*rounds, strict=True))
        wall = min(packed.wall for _, packed in rounds)
        metric = f"200 records, {kind}: CPU time relative to loading tokenizer and image processor"
        report.add(metric, whole / alone, "", target, cpu=whole, seconds=wall)


def bench_memory(report: Report, work: Path) -> None:
    """Measure the peak memory for a million short records, summed over all processes."""
    source = write_jsonl(work / "short-1m.jsonl", text_records(1_000_000, mean_chars=60))
    options = ("--tokenizer", bench_tokenizer(work, vision=False), "--overwrite", "--no-resume")
    used = usage(command("pack", source, "-o", work / "out-1m", "--seq-len", _SEQ_LEN, *options))
    report.add("a million records: peak memory", used.memory / 2**30, "GiB", "<= 1.5", seconds=used.wall)


def bench_slopes(report: Report, work: Path) -> None:
    """Measure the time of each stage by number of records."""
    tokenizer = bench_tokenizer(work, vision=False)
    for records in (10_000, 100_000, 1_000_000):
        source = write_jsonl(work / f"text-{records}.jsonl", text_records(records))
        shutil.rmtree(work / "out-slope", ignore_errors=True)
        start_time = time.perf_counter()
        done = cli("pack", source, "-o", work / "out-slope", "--seq-len", _SEQ_LEN, "--tokenizer", tokenizer)
        whole = time.perf_counter() - start_time
        stages: dict[str, float] = {}
        for line in done.stdout.splitlines():
            words = line.replace("│", " ").split()
            if len(words) == 3 and words[1] == "seconds":
                stages[words[0]] = float(words[2])
        stages["start"] = whole - sum(stages.values())
        for stage, spent in stages.items():
            report.add(f"{records:,} records: {stage}", spent, "s", "<= 0.9" if stage == "start" else "")
    bench_stages(report, work, tokenizer)


def bench_stages(report: Report, work: Path, tokenizer: Path, records: int = 1_000_000) -> None:
    """Measure the CPU seconds of measuring and writing, without start-up; disk time is not CPU time."""
    source = write_jsonl(work / f"text-{records}.jsonl", text_records(records))
    few = work / "text-few.jsonl"
    with source.open("rb") as stream:
        few.write_bytes(b"".join(stream.readline() for _ in range(50)))
    out = work / "out-stages"
    options = ("-o", out, "--tokenizer", tokenizer)
    shutil.rmtree(out, ignore_errors=True)
    start = usage(command("lengths", few, *options)).cpu
    shutil.rmtree(out)
    measuring = usage(command("lengths", source, *options)).cpu - start
    writing = usage(command("pack", source, *options, "--seq-len", _SEQ_LEN)).cpu - start  # lengths are reused
    for stage, spent, target in (("measure", measuring, 60), ("plan, write and index", writing, 12)):
        share = spent / records * 1e6
        report.add(f"{records:,} records: core seconds of {stage} per million", share, "s", f"<= {target}")


def main() -> None:
    """Run the benchmarks and print the results."""
    parser = arguments(__doc__, "pack")
    parser.add_argument("--records", type=int, default=200_000)
    parser.add_argument(
        "--slopes", action="store_true", help="measure the cost per stage and number of records instead"
    )
    options: Any = parser.parse_args()
    report = Report("pack", options.json)
    if options.slopes:
        bench_slopes(report, options.work)
    else:
        bench_help(report)
        bench_start(report, options.work)
        bench_text(report, options.work, options.records)
        bench_images(report, options.work)
        bench_groups(report, options.work)
        bench_memory(report, options.work)
    report.finish()


if __name__ == "__main__":
    main()
