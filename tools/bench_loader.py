"""Benchmark the loader against baselines.

    python tools/bench_loader.py [--json loader.json]

Compares the loader with a bare Energon loader over the same tars, `PackedDataset[i]` in random order with
memory-mapped `datasets` rows of the same packs, and loading of raw text and images with the tokenizer and the image
processor alone. Reports medians of interleaved runs on one thread, in CPU time.
"""

import logging
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchlib import Report, arguments, bench_tokenizer, cli, image_records, run_peer, text_records, write_jsonl
from megatron.energon import DefaultTaskEncoder, WorkerConfig, get_loader, get_savable_loader, get_train_dataset

from energon_packed import ChatEncoder, PackedDataset, get_packed_loader
from energon_packed.encoding.engines import EngineName
from energon_packed.encoding.vision.images import load_image

_SEQ_LEN = 4096

# Baseline: the same packs as rows of an Arrow file, read in random order with Hugging Face datasets.
_DATASETS = """
import json, random, sys, time
import numpy as np, pyarrow as pa
from datasets import Dataset, load_from_disk
arrays = np.load(sys.argv[1])
rows = len(arrays["offsets"]) - 1
columns = {"input_ids": "offsets", "labels": "offsets", "seq_lengths": "starts"}
table = {name: pa.LargeListArray.from_arrays(arrays[ends], arrays[name]) for name, ends in columns.items()}
Dataset(pa.table(table)).save_to_disk(sys.argv[2])
dataset = load_from_disk(sys.argv[2]).with_format("numpy")
order = list(range(rows))
random.Random(0).shuffle(order)
times = []
for _ in range(5):
    start = time.process_time()
    for i in order:
        dataset[i]
    times.append(time.process_time() - start)
print(json.dumps(sorted(times)[2]))
"""


class _RawSamples(DefaultTaskEncoder):  # type: ignore[misc]
    """Task encoder that returns samples as Energon reads them."""


def bare(folder: Path, **options: Any) -> Iterator[Any]:
    """Iterate over a bare Energon loader; with `options`, over a savable one."""
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    dataset = get_train_dataset(
        folder / "webdataset",
        split_part="train",
        worker_config=config,
        batch_size=None,
        shuffle_buffer_size=64,
        max_samples_per_sequence=None,
        repeat=False,
        task_encoder=_RawSamples(),
    )
    yield from get_savable_loader(dataset, **options) if options else get_loader(dataset)


def spent(run: Callable[[], Any]) -> float:
    """CPU seconds to consume an iterable."""
    start = time.process_time()
    for _ in run():
        pass
    return time.process_time() - start


def interleaved(*runs: Callable[[], Any], times: int = 5) -> list[float]:
    """Median CPU seconds of each run; rounds are interleaved, so that a slow moment affects all runs."""
    rounds = [[spent(run) for run in runs] for _ in range(times + 1)]  # the first round warms up caches
    return [statistics.median(column) for column in zip(*rounds[1:], strict=True)]


def packed(work: Path, source: Path, sample_class: str) -> Path:
    """Pack a JSONL, or reuse the output of a previous run."""
    out = work / f"loader-{source.stem}-{sample_class}"
    tokenizer = bench_tokenizer(work, vision="images" in source.stem)
    cli("pack", source, "-o", out, "--seq-len", _SEQ_LEN, "--tokenizer", tokenizer, "--sample-class", sample_class)
    return out


def bench_tokens(report: Report, work: Path) -> None:
    """Compare stored tokens: the loader with Energon, random access with `datasets`."""
    source = write_jsonl(work / "text-20k.jsonl", text_records(20_000))
    folder = packed(work, source, "PackedTokensSample")
    encoder = ChatEncoder.from_pretrained(bench_tokenizer(work, vision=False))
    loader = get_packed_loader(folder, encoder, epochs=1, num_workers=0)
    # By default, Energon collects garbage every 10 rows and watches a thread; `get_packed_loader` sets both as here.
    same: dict[str, Any] = {"gc_collect_every_n_steps": 100, "watchdog_timeout_seconds": None}
    loader_seconds, default_seconds, energon_seconds = interleaved(
        lambda: loader, lambda: bare(folder), lambda: bare(folder, **same)
    )
    dataset = PackedDataset(folder)
    packs = len(dataset)
    metric = "tokens: packs per CPU second relative to a bare Energon loader"
    report.add(metric, default_seconds / loader_seconds, "", ">= 1", per_second=packs / loader_seconds)
    report.add(f"{metric} with the same garbage collection", energon_seconds / loader_seconds, "", ">= 0.7")

    samples = [dataset.sample(i) for i in range(packs)]
    np.savez(
        work / "packs.npz",
        input_ids=np.concatenate([s.input_ids for s in samples]),
        labels=np.concatenate([s.labels for s in samples]),
        seq_lengths=np.concatenate([np.diff(s.cu_seqlens) for s in samples]),
        offsets=np.cumsum([0, *(len(s.input_ids) for s in samples)]),
        starts=np.cumsum([0, *(len(s.cu_seqlens) - 1 for s in samples)]),
    )
    datasets_seconds = run_peer(work, _DATASETS, work / "packs.npz", work / "packs.arrow")
    order = np.random.default_rng(0).permutation(packs).tolist()
    (loader_seconds,) = interleaved(lambda: (dataset[i] for i in order))
    report.add(
        "PackedDataset[i] in random order: speedup over datasets[i]",
        datasets_seconds / loader_seconds,
        "x",
        ">= 1",
        per_second=packs / loader_seconds,
    )


def bench_texts(report: Report, work: Path) -> None:
    """Compare raw text: the loader with its default tokenizer engine, and the same loader with `tokenizers`."""
    source = write_jsonl(work / "text-20k.jsonl", text_records(20_000))
    folder = packed(work, source, "PackedCaptioningSample")
    tokenizer = bench_tokenizer(work, vision=False)
    engines: tuple[EngineName, ...] = ("fastokens", "tokenizers")
    encoders = [ChatEncoder.from_pretrained(tokenizer, tokenizer_engine=engine) for engine in engines]
    loaders = [get_packed_loader(folder, encoder, epochs=1, num_workers=0) for encoder in encoders]
    loader_seconds, slow_seconds = interleaved(lambda: loaders[0], lambda: loaders[1], times=3)
    metric = "text, captioning flavor: samples/s relative to the same loader with tokenizers"
    report.add(metric, slow_seconds / loader_seconds, "x", ">= 4", per_second=20_000 / loader_seconds)


def bench_images(report: Report, work: Path) -> None:
    """Compare raw text and images: the loader, and the tokenizer and image processor alone."""
    source = write_jsonl(work / "images-800.jsonl", image_records(work / "images-800", 800))
    folder = packed(work, source, "PackedCaptioningSample")
    encoder = ChatEncoder.from_pretrained(bench_tokenizer(work, vision=True))
    assert encoder.vision is not None
    loader = get_packed_loader(folder, encoder, epochs=1, num_workers=0)
    dataset = PackedDataset(folder, encoder)
    conversations = [c for i in range(len(dataset)) for c in dataset.sample(i).conversations()]
    messages = [[message.as_dict() for message in c.messages] for c in conversations]
    strings = [encoder.tokenizer.apply_chat_template(m, tokenize=False) for m in messages]

    def alone() -> Iterator[None]:
        for conversation, text in zip(conversations, strings, strict=True):
            encoder.tokenizer(text)
            if conversation.images:
                encoder.vision.pixels([load_image(image) for image in conversation.images])  # type: ignore[union-attr]
            yield

    loader_seconds, limit_seconds = interleaved(lambda: loader, alone, times=3)
    metric = "text and images: samples/s relative to tokenizer and image processor alone"
    report.add(metric, limit_seconds / loader_seconds, "", ">= 0.8", per_second=len(conversations) / loader_seconds)


def main() -> None:
    """Run the benchmarks and print the results."""
    options = arguments(__doc__, "loader").parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    report = Report("loader", options.json)
    bench_tokens(report, options.work)
    bench_texts(report, options.work)
    bench_images(report, options.work)
    report.finish()


if __name__ == "__main__":
    main()
