"""Benchmark `pack --media reference` against copied images.

    python tools/bench_media.py [--images N] [--json media.json]

Measures bytes and seconds of three values of --seq-len, reading of packs in several orders, with a cold and a warm
page cache, and the loaders. Copies and references take turns, so that a slow moment of the machine affects both. The
images are files, members of tars, or cells of Parquet, and no two are equal.
"""

import argparse
import io
import json
import logging
import os
import statistics
import struct
import tarfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from benchlib import Report, arguments, bench_tokenizer, seconds
from blake3 import blake3
from megatron.energon import (
    Cooker,
    DefaultTaskEncoder,
    Sample,
    WorkerConfig,
    basic_sample_keys,
    edataclass,
    get_loader,
    get_train_dataset,
    stateless,
)
from PIL import Image
from torch.utils.data import DataLoader

from energon_packed import (
    ChatEncoder,
    DataflowLoader,
    EnergonDistributor,
    PackedDataset,
    get_packed_loader,
    pack,
    pack_lengths,
)

_SEQ_LENS = (4096, 8192, 2048)
_MEDIA: dict[str, dict[str, Any]] = {
    "copy": {},
    "digest": {"media": "reference"},
    "time": {"media": "reference", "media_check": "time"},
}
_BASES = 64  # images that are encoded; the other images have other bytes in a comment


def images(count: int) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Yield a record without its image, and the image."""
    rng = np.random.default_rng(0)
    bases = []
    for _ in range(_BASES):
        coarse = Image.fromarray(rng.integers(0, 255, (28, 28, 3), dtype=np.uint8)).resize((448, 448))
        grain = rng.normal(0, 12, (448, 448, 3))  # noise, for JPEGs of a realistic size
        out = io.BytesIO()
        Image.fromarray((np.asarray(coarse) + grain).clip(0, 255).astype(np.uint8)).save(out, "JPEG", quality=75)
        bases.append(out.getvalue())
    for index in range(count):
        data, comment = bases[index % _BASES], b"%016d" % index
        messages = [
            {"role": "user", "content": f"<image>What is in image {index}?"},
            {"role": "assistant", "content": "Noise. " * (1 + index % 40)},
        ]
        image = data[:2] + b"\xff\xfe" + struct.pack(">H", 2 + len(comment)) + comment + data[2:]
        yield {"id": f"image-{index:08d}", "messages": messages}, image


def write_files(folder: Path, records: Iterable[tuple[dict[str, Any], bytes]]) -> list[Path]:
    """Write a JSONL with an image file for each record."""
    (folder / "images").mkdir(parents=True)
    with (folder / "data.jsonl").open("w") as lines:
        for record, image in records:
            name = f"images/{record['id']}.jpg"
            (folder / name).write_bytes(image)
            lines.write(json.dumps({**record, "images": [name]}) + "\n")
    return [folder / "data.jsonl"]


def write_tars(folder: Path, records: Iterable[tuple[dict[str, Any], bytes]]) -> list[Path]:
    """Write WebDataset tars of 1,000 records."""
    folder.mkdir(parents=True)
    tars: list[Path] = []
    tar = None
    for index, (record, image) in enumerate(records):
        if index % 1000 == 0:
            tars.append(folder / f"{index // 1000:05d}.tar")
            if tar is not None:
                tar.close()
            tar = tarfile.open(tars[-1], "w")  # noqa: SIM115
        for name, content in ((f"{index:08d}.jpg", image), (f"{index:08d}.json", json.dumps(record).encode())):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    tar.close()
    return tars


def write_parquet(folder: Path, records: Iterable[tuple[dict[str, Any], bytes]]) -> list[Path]:
    """Write a Parquet file with the images as cells."""
    folder.mkdir(parents=True)
    rows = [{**record, "images": [{"bytes": image, "path": None}]} for record, image in records]
    pq.write_table(pa.Table.from_pylist(rows), folder / "data.parquet", row_group_size=256)
    return [folder / "data.parquet"]


_WRITERS: dict[str, Callable[..., list[Path]]] = {"files": write_files, "tars": write_tars, "parquet": write_parquet}


def written(out: Path) -> int:
    """Bytes of the dataset and of its media, without the restart state."""
    files = [path for path in out.rglob("*") if path.is_file() and ".work" not in path.parts]
    return sum(path.stat().st_size for path in files)


def bench_pack(report: Report, work: Path, kind: str, inputs: list[Path]) -> None:
    """Pack with three values of --seq-len into one folder, as copies and as references."""
    tokenizer = bench_tokenizer(work, vision=True)
    for number, seq_len in enumerate(_SEQ_LENS, start=1):
        copy: tuple[int, float] | None = None
        for media, options in _MEDIA.items():
            out = work / f"out-{kind}-{media}"
            kept = written(out / "media")
            drop_cache(work / kind)
            start = time.perf_counter()
            result = pack(
                inputs,
                output_dir=out,
                seq_len=seq_len,
                tokenizer=tokenizer,
                shard_prefix="b",
                overwrite=True,
                **options,
            )
            values = written(out) - kept, time.perf_counter() - start
            copy = copy or values
            for name, value, base, unit in zip(("bytes", "seconds"), values, copy, ("bytes", "s"), strict=True):
                report.add(
                    f"{kind}: --seq-len {number}, {media}: {name}",
                    value,
                    unit,
                    of_copy=value / base,
                    stages=result.seconds,
                )


def drop_cache(*folders: Path) -> None:
    """Remove all files of the folders from the page cache."""
    for folder in folders:
        for path in folder.rglob("*"):
            if path.is_file():
                descriptor = os.open(path, os.O_RDONLY)
                os.fsync(descriptor)  # pages that are not yet on disk stay
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)


def bench_reads(report: Report, work: Path, kind: str) -> None:
    """Read packs without encoding them: shuffled, in order, and in the order of their first image."""
    datasets = {media: PackedDataset(work / f"out-{kind}-{media}", _encoder(work)) for media in _MEDIA}
    count = len(datasets["copy"])
    first = [_first_position(datasets["digest"].reader, pack) for pack in range(count)]
    rng = np.random.default_rng(0)
    orders = {
        "shuffled": rng.permutation(count).tolist(),
        "in shard order": list(range(count)),
        "by first image": sorted(range(count), key=first.__getitem__),
    }
    for cache in ("cold", "warm"):
        for name, order in orders.items():
            copy: tuple[float, float] | None = None
            for media, dataset in datasets.items():
                if cache == "cold":
                    drop_cache(work / f"out-{kind}-{media}", work / kind)
                start = time.perf_counter(), time.process_time()
                for number in order:
                    dataset.sample(number)
                wall, cpu = time.perf_counter() - start[0], time.process_time() - start[1]
                copy = copy or (wall, cpu)
                title = f"{kind}, {cache}, {name}: packs/s, {media}"
                report.add(title, len(order) / wall, "/s", of_copy=copy[0] / wall, cpu_of_copy=copy[1] / cpu)


def _first_position(reader: Any, pack: int) -> tuple[str, int]:
    media = json.loads(reader.part(pack, "media.json").get("media.json", b"{}"))
    located = [at for at in media.values() if at]
    return (located[0]["file"], located[0]["offset"]) if located else ("", 0)


@edataclass
class _MediaSample(Sample):  # type: ignore[misc]
    json: dict[str, Any]
    media: dict[str, Any]


@stateless
def _cook(sample: Any, **aux: Any) -> _MediaSample:
    """Cook a pack as the page Media does; a copied pack has its images."""
    media = sample.get("media.json") or {name: None for name in sample if name.startswith("img")}
    media = {name: aux[at["source"]][at["member"]][0] if at else sample[name] for name, at in media.items()}
    return _MediaSample(**basic_sample_keys(sample), json=sample["json"], media=media)


class _Encoder(DefaultTaskEncoder):  # type: ignore[misc]
    cookers = [Cooker(_cook)]  # noqa: RUF012


def plain_energon(out: Path) -> Iterable[Any]:
    """Read packs by a stock task encoder of Energon with the stock decoder."""
    metadataset = out / "media.yaml"
    dataset = get_train_dataset(
        metadataset if metadataset.exists() else out / "webdataset",
        **({} if metadataset.exists() else {"dataset_config": "crude.yaml"}),
        split_part="train",
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=2),
        batch_size=None,
        shuffle_buffer_size=None,
        max_samples_per_sequence=None,
        repeat=False,
        task_encoder=_Encoder(),
    )
    return get_loader(dataset)


def spent(loader: Iterable[Any], packs: int) -> float:
    """Seconds from the first batch to the last of `packs` batches: workers start before the first."""
    batches = iter(loader)
    next(batches)
    return seconds(lambda: sum(1 for _ in zip(range(packs - 1), batches, strict=False)))


def bench_loaders(report: Report, work: Path, kind: str, packs: int, rounds: int) -> None:
    """Compare the loaders, which decode images."""
    encoder = _encoder(work)
    loaders: dict[str, Callable[[Path], Iterable[Any]]] = {
        "PackedDataset": lambda out: DataLoader(PackedDataset(out, encoder), shuffle=True, collate_fn=list),
        "get_packed_loader": lambda out: get_packed_loader(out, encoder, epochs=1, num_workers=2),
        "DataflowLoader": lambda out: DataflowLoader(EnergonDistributor(out), encoder, num_workers=2),
        "Energon with a cooker": plain_energon,
    }
    for cache in ("cold", "warm"):
        for name, load in loaders.items():
            times: dict[str, list[float]] = {media: [] for media in _MEDIA}
            for _ in range(rounds):
                for media, runs in times.items():
                    out = work / f"out-{kind}-{media}"
                    if cache == "cold":
                        drop_cache(out, work / kind)
                    runs.append(spent(load(out), packs))
            for media, runs in times.items():
                ratio = statistics.median(times["copy"]) / statistics.median(runs)
                title = f"{kind}, {cache}: packs/s of {name}, {media}"
                report.add(title, packs / statistics.median(runs), "/s", of_copy=ratio)


def bench_calls(report: Report, work: Path) -> None:
    """Time of the calls that read one image from a warm page cache."""
    paths = sorted((work / "files" / "images").iterdir())[:2000]
    data = [path.read_bytes() for path in paths]

    def read(path: Path) -> bytes:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            return os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        finally:
            os.close(descriptor)

    per = 1e6 / len(paths)
    report.add("bytes of an image", sum(map(len, data)) / len(data), "bytes")
    report.add("open, fstat, pread and close of an image", per * seconds(lambda: [read(path) for path in paths]), "us")
    report.add("BLAKE3 hash of an image", per * seconds(lambda: [blake3(image).digest() for image in data]), "us")


def _encoder(work: Path) -> ChatEncoder:
    return ChatEncoder.from_pretrained(bench_tokenizer(work, vision=True))


def main() -> None:
    """Run all measurements."""
    parser = arguments(__doc__, "media")
    parser.add_argument("--images", type=int, default=20_000)
    parser.add_argument("--packs", type=int, default=300, help="packs that each loader reads")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each loader")
    parser.add_argument("--kinds", nargs="*", choices=_WRITERS, default=list(_WRITERS))
    parser.add_argument(
        "--parts", nargs="*", choices=("pack", "reads", "loaders"), default=["pack", "reads", "loaders"]
    )
    options: argparse.Namespace = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    pack_lengths([1, 2], capacity=4)  # compiles the planner
    report = Report("Media by reference", options.json)
    work = options.work / f"media-{options.images}"
    for kind in options.kinds:
        folder = work / kind
        inputs = sorted(folder.glob("data.*")) or sorted(folder.glob("*.tar"))
        inputs = inputs or _WRITERS[kind](folder, images(options.images))
        if "pack" in options.parts:
            bench_pack(report, work, kind, inputs)
        if "reads" in options.parts:
            bench_reads(report, work, kind)
        if "loaders" in options.parts:
            bench_loaders(report, work, kind, options.packs, options.rounds)
    if "files" in options.kinds:
        bench_calls(report, work)
    report.finish()


if __name__ == "__main__":
    main()
