"""Benchmark reading from an object store: bytes and requests, and samples per second with latency.

    python tools/bench_storage.py [--json storage.json] [--records 400] [--latency 0.02] [--parts traffic images]

traffic   bytes and requests of `pack` and the loaders, and their speed against local files
images    images per second of wall time and of CPU time, as bytes, against LitData and against clients alone that
          request the same ranges; needs `pip install --no-deps litdata lightning-utilities obstore tifffile zstd`.
          No reader decodes them. Size and time of each tar are compared, and the hash of each reference (`by time`:
          size and time of its file); LitData compares nothing. Both read the messages; `members alone` are bytes of
          packs, without conversations. `LitData, references` reads messages and file names from its chunks, which are
          local files, and requests each image file by its StreamingRawDataset, 16 at a time; `LitData, files` is the
          latter alone. Each reader has a process of its own, as a worker of a DataLoader, since memory that another
          reader has freed changes its speed by half

The store is moto's S3 server in a process of its own on this machine. It reads a whole object to answer a range, so
shards are small; `images` has the same rows with a server that answers ranges by sendfile. Each loader reads one
shuffled epoch in one process; LitData has threads of its own. Bytes needed are the packs (and the referenced images)
of the epoch; for `pack`, the files of the input. Peers: bare Energon on msc://, and WebDataset over s3fs, which reads
each tar as a stream, in order.
"""

import io
import json
import multiprocessing
import os
import shutil
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from benchlib import Report, arguments, bench_tokenizer, image_records, write_jsonl
from megatron.energon import DefaultTaskEncoder, WorkerConfig, get_loader, get_train_dataset
from object_server import ObjectServer

from energon_packed import ChatEncoder, DataflowLoader, MapDistributor, PackedDataset, get_packed_loader, pack
from energon_packed.formats.references import complete_parts
from energon_packed.storage import as_path, energon_url

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.storage import start_store

_TURNS = 3
_OPTIONS: dict[str, Any] = {"seq_len": 2048, "workers": 2, "max_packs_per_shard": 16}


class _RawSamples(DefaultTaskEncoder):  # type: ignore[misc]
    """Task encoder that returns samples as Energon reads them."""


def serve(connection: Any) -> None:
    """Run the store: `("latency", S)` sets it, `("traffic",)` returns and resets requests and bytes."""
    with tempfile.TemporaryDirectory() as folder:
        store = start_store(Path(folder))
        names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "MSC_CONFIG")
        connection.send({name: os.environ[name] for name in names})
        with store.counted() as traffic:
            while (message := connection.recv()) is not None:
                if message[0] == "latency":
                    store.latency = message[1]
                connection.send((len(traffic.requests), traffic.bytes))
                traffic.requests.clear()
                traffic.bytes = 0


class Store:
    """The store, seen from this process."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=serve, args=(other,), daemon=True)
        self._process.start()
        os.environ.update(self._connection.recv())
        # The same bucket as msc://rust, by the client of multi-storage-client that is written in Rust.
        file = Path(os.environ["MSC_CONFIG"])
        config = json.loads(file.read_text())
        provider = config["profiles"]["store"]["storage_provider"]
        options = provider["options"] | {"rust_client": {"allow_http": True}}
        config["profiles"]["rust"] = {"storage_provider": provider | {"options": options}}
        file.write_text(json.dumps(config))

    def add_server(self, endpoint: str) -> None:
        """Add the bucket of another server as msc://files, and as msc://files-rust by the client in Rust."""
        file = Path(os.environ["MSC_CONFIG"])
        config = json.loads(file.read_text())
        for name, of in (("files", "store"), ("files-rust", "rust")):
            provider = config["profiles"][of]["storage_provider"]
            moved = {"storage_provider": provider | {"options": provider["options"] | {"endpoint_url": endpoint}}}
            config["profiles"][name] = config["profiles"][of] | moved
        file.write_text(json.dumps(config))

    def put_folder(self, key: str, folder: Path) -> str:
        """Upload a folder, without restart state; return its URL."""
        for file in sorted(folder.rglob("*")):
            if file.is_file() and ".work" not in file.parts:
                as_path(f"s3://bucket/{key}/{file.relative_to(folder)}").upload(file)  # type: ignore[attr-defined]
        return f"s3://bucket/{key}"

    def latency(self, seconds: float) -> None:
        """Delay each answer."""
        self._ask("latency", seconds)

    def traffic(self) -> tuple[int, int]:
        """Return requests and bytes since the last call."""
        requests, size = self._ask("traffic")
        return requests, size

    def stop(self) -> None:
        """End the server."""
        self._connection.send(None)
        self._process.join()

    def _ask(self, *message: Any) -> Any:
        self._connection.send(message)
        return self._connection.recv()


def dataflow(path: Any, encoder: ChatEncoder) -> Iterable[Any]:
    """DataflowLoader over a PackedDataset."""
    return DataflowLoader(MapDistributor(PackedDataset(path, encoder)))


def packed_loader(path: Any, encoder: ChatEncoder) -> Iterable[Any]:
    """Loader of `get_packed_loader`."""
    return get_packed_loader(path, encoder, num_workers=0, epochs=1)


def packs_alone(path: Any, encoder: ChatEncoder, **options: Any) -> Iterable[Any]:
    """Packs of a PackedDataset in random order, not encoded, as bare Energon returns them."""
    dataset = PackedDataset(path, encoder, **options)
    order = np.random.default_rng(0).permutation(len(dataset)).tolist()
    for place, item in enumerate(order):
        dataset.request(order[place : place + dataset.read_ahead])
        yield dataset.pack(item)


def bare_energon(path: Any, encoder: ChatEncoder) -> Iterable[Any]:
    """Energon's own loader, which returns raw packs."""
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    options: dict[str, Any] = {"split_part": "train", "batch_size": None, "max_samples_per_sequence": None}
    options |= {"shuffle_buffer_size": 64, "repeat": False, "task_encoder": _RawSamples()}
    return get_loader(get_train_dataset(energon_url(as_path(path)), worker_config=config, **options))


def s3fs_stream(path: Any, encoder: ChatEncoder) -> Iterable[Any]:
    """Members of each tar by WebDataset, over the stream of s3fs (or of a local file)."""
    import fsspec
    import webdataset

    files = fsspec.open_files(f"{path}/*.tar", "rb")
    for file in files:
        with file as stream:
            yield from webdataset.tariterators.tar_file_iterator(stream)


READERS: dict[str, Callable[[Any, ChatEncoder], Iterable[Any]]] = {
    "DataflowLoader": dataflow,
    "get_packed_loader": packed_loader,
    "PackedDataset, packs alone": packs_alone,
    "bare Energon": bare_energon,
    "WebDataset over s3fs": s3fs_stream,
}


def main() -> None:
    """Run all measurements."""
    parser = arguments(__doc__, "storage")
    parser.add_argument("--records", type=int, default=400, help="records with images")
    parser.add_argument("--latency", type=float, default=0.02, help="seconds added to each request")
    parser.add_argument("--images", type=int, default=2000, help="images of the part `images`")
    parser.add_argument("--parts", nargs="*", choices=("traffic", "images"), default=["traffic", "images"])
    options = parser.parse_args()
    report = Report("Object storage", options.json)
    store = Store()
    if "traffic" in options.parts:
        bench_traffic(report, store, options)
    if "images" in options.parts:
        bench_images(report, store, options)
    store.stop()
    report.finish()


def bench_traffic(report: Report, store: Store, options: Any) -> None:
    """Compare bytes, requests and speed with what is needed and with local files."""
    work: Path = options.work / "storage"
    tokenizer = bench_tokenizer(options.work, vision=True)
    encoder = ChatEncoder.from_pretrained(tokenizer)
    source = work / "source"
    records = [_with_names(record) for record in image_records(source, options.records)]
    jsonl = write_jsonl(source / "data.jsonl", iter(records))
    raw = store.put_folder("raw", source)
    images = sum(file.stat().st_size for file in source.rglob("*") if file.is_file() and file != jsonl)
    rows = [{**record, "images": [(source / record["images"][0]).read_bytes()]} for record in records]
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, work / "data.parquet")
    with tarfile.open(work / "data.tar", "w") as tar:
        for number, record in enumerate(records):
            _add_record(tar, source, number, record)
    for name in ("data.parquet", "data.tar"):
        as_path(f"s3://bucket/{name}").upload(work / name)  # type: ignore[attr-defined]
    inputs = {
        "JSONL + images": (f"{raw}/data.jsonl", jsonl.stat().st_size + images),
        "Parquet": ("s3://bucket/data.parquet", (work / "data.parquet").stat().st_size),
        "tar": ("s3://bucket/data.tar", (work / "data.tar").stat().st_size),
    }
    folders = {}
    for media in ("copy", "reference"):
        for name, (url, size) in inputs.items():
            if media == "reference" and name != "JSONL + images":
                continue
            with tempfile.TemporaryDirectory(dir=work) as folder:
                store.traffic()
                result = pack(inputs=(url,), output_dir=folder, tokenizer=tokenizer, media=media, **_OPTIONS)
                requests, used = store.traffic()
                report.add(f"pack --media {media} of {name}: bytes / bytes needed", used / size, requests=requests)
                if name == "JSONL + images":
                    folders[media] = store.put_folder(media, result.shards), work / media
                    os.rename(result.shards, _emptied(work / media))
                    _bench_pack(
                        report, store, options.latency, url, str(jsonl), {"tokenizer": tokenizer, "media": media}
                    )
    for media, (url, local) in folders.items():
        tars = sum(tar.stat().st_size - 1024 for tar in local.glob("*.tar"))
        needed = tars + (images if media == "reference" else 0)
        for name, reader in READERS.items():
            if media == "reference" and reader in (bare_energon, s3fs_stream):
                continue
            start = time.perf_counter()
            base = sum(1 for _ in reader(local, encoder)) / (time.perf_counter() - start)
            for latency in (0.0, options.latency):
                store.latency(latency)
                store.traffic()
                start = time.perf_counter()
                count = sum(1 for _ in reader(url, encoder))
                spent = time.perf_counter() - start
                requests, used = store.traffic()
                own = reader in (dataflow, packed_loader, packs_alone)
                if not latency:
                    target = "<= 1.05" if own else ""
                    report.add(f"{name}, {media}: bytes / bytes needed", used / needed, target=target)
                    report.add(f"{name}, {media}: requests / packs", requests / max(1, count), requests=requests)
                label = f"{name}, {media}, {latency * 1000:.0f} ms: speed / local files"
                report.add(label, count / spent / base, rate=count / spent, local_rate=base)
            store.latency(0)


def _bench_pack(report: Report, store: Store, latency: float, url: str, local: str, settings: dict[str, Any]) -> None:
    """Compare the speed of `pack` with that of the same input on the local disk."""
    rates = []
    for source, delay in ((local, 0.0), (local, 0.0), (url, 0.0), (url, latency)):  # the first loads the encoder
        store.latency(delay)
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            result = pack(inputs=(source,), output_dir=folder, **settings, **_OPTIONS)
            rates.append(result.manifest.records / (time.perf_counter() - start))
    store.latency(0)
    for delay, rate in ((0.0, rates[2]), (latency, rates[3])):
        label = f"pack --media {settings['media']} of JSONL + images, {delay * 1000:.0f} ms: speed / local files"
        report.add(label, rate / rates[1], rate=rate, local_rate=rates[1])


def packed_images(path: Any, encoder: ChatEncoder, **options: Any) -> Iterator[bytes]:
    """Images of a PackedDataset in random order of the packs."""
    for item in packs_alone(path, encoder, **options):
        for conversation in item.conversations():
            yield from (image.read() for image in conversation.images)


def packed_members(path: Any, encoder: ChatEncoder) -> Iterator[bytes]:
    """Images of the members of packs in random order, without conversations."""
    reader = PackedDataset(path, encoder).reader
    for item in np.random.default_rng(0).permutation(len(reader)).tolist():
        yield from (content for name, content in complete_parts(reader.parts(item)).items() if name.endswith(".jpg"))


def litdata_images(path: Any, cache: Path, endpoint: str | None) -> Iterator[bytes]:
    """Images of a LitData dataset in its random order, with messages; chunks are downloaded to an empty folder."""
    litdata = _litdata()
    options: Any = {} if endpoint is None else {"storage_options": {"endpoint_url": endpoint}}
    for sample in litdata.StreamingDataset(str(path), shuffle=True, seed=0, cache_dir=str(_emptied(cache)), **options):
        json.loads(sample["messages"])
        yield sample["image"]


def litdata_files(path: str, cache: Path, endpoint: str | None) -> Iterator[bytes]:
    """Image files of a folder by LitData in random order, 16 at a time as in a batch."""
    dataset, places = _raw_dataset(path, cache, endpoint)
    order = np.random.default_rng(0).permutation(sorted(places.values())).tolist()
    for start in range(0, len(order), 16):
        yield from dataset.__getitems__(order[start : start + 16])


def litdata_references(rows: Path, path: str, cache: Path, endpoint: str | None) -> Iterator[bytes]:
    """Image files that the rows of a LitData dataset name, in its random order, with messages."""
    dataset, places = _raw_dataset(path, cache, endpoint)
    samples = _litdata().StreamingDataset(str(rows), shuffle=True, seed=0)
    batch: list[int] = []
    for number, sample in enumerate(samples, 1):  # `islice` would start again: each `iter` of it does
        json.loads(sample["messages"])
        batch.append(places[sample["name"]])
        if len(batch) == 16 or number == len(samples):
            yield from dataset.__getitems__(batch)
            batch.clear()


def _raw_dataset(path: str, cache: Path, endpoint: str | None) -> tuple[Any, dict[str, int]]:
    """Return LitData's dataset of the files of a folder, and the index of each image in it by its name."""
    options: Any = {} if endpoint is None else {"storage_options": {"endpoint_url": endpoint}}
    dataset = _litdata().StreamingRawDataset(path, cache_dir=str(_emptied(cache)), **options)
    names = [str(item.path).rpartition("/")[2] for item in dataset.items]
    return dataset, {name: index for index, name in enumerate(names) if name.endswith(".jpg")}


def _litdata() -> Any:
    import litdata
    from litdata.streaming import downloader

    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # its fast client; the store has no TLS
    return litdata


def measure(images: Callable[[], Iterator[bytes]]) -> tuple[int, float, float]:
    """Return the bytes of all images, and seconds of wall time and of CPU time to read them."""
    start = time.perf_counter(), time.process_time()
    found = sum(map(len, images()))
    return found, time.perf_counter() - start[0], time.process_time() - start[1]


def ranges_alone(ranges: Sequence[tuple[str, int, int]], endpoint: str) -> Iterator[bytes]:
    """Content of ranges (key, start, stop) by boto3, with as many requests at a time as a PackedDataset has."""
    import boto3
    from botocore.config import Config

    client = boto3.client("s3", endpoint_url=endpoint, config=Config(max_pool_connections=16))

    def read(wanted: tuple[str, int, int]) -> bytes:
        key, start, stop = wanted
        found: bytes = client.get_object(Bucket="bucket", Key=key, Range=f"bytes={start}-{stop - 1}")["Body"].read()
        return found

    with ThreadPoolExecutor(16) as threads:
        yield from threads.map(read, ranges)


def bench_images(report: Report, store: Store, options: Any) -> None:
    """Compare images per second of wall time and of CPU time, from local files and from the store."""
    from litdata.streaming.writer import BinaryWriter

    work = options.work / f"storage-images-{options.images}"
    server = ObjectServer(options.work)
    store.add_server(server.endpoint)
    tokenizer = bench_tokenizer(options.work, vision=True)
    encoder = ChatEncoder.from_pretrained(tokenizer)
    source = work / "source"
    records = [_with_names(record) for record in image_records(source, options.images)]
    jsonl = write_jsonl(source / "data.jsonl", iter(records))
    raw = store.put_folder(f"{work.name}/source", source)
    files = _emptied(work / "files")  # LitData writes an index into the folder, and the servers have `source`
    shutil.copytree(source, files, copy_function=os.link)
    num_bytes = sum((source / record["images"][0]).stat().st_size for record in records)
    places: dict[str, tuple[Path, str]] = {}
    for media, given in (("copy", str(jsonl)), ("reference", f"{raw}/data.jsonl")):
        with tempfile.TemporaryDirectory(dir=work) as folder:
            result = pack(inputs=(given,), output_dir=folder, tokenizer=tokenizer, media=media, **_OPTIONS)
            os.rename(result.shards, _emptied(work / media))
        places[media] = work / media, store.put_folder(f"{work.name}/{media}", work / media)
    for name, check in (("local reference", "digest"), ("local reference by time", "time")):  # to local files
        with tempfile.TemporaryDirectory(dir=work) as folder:
            options_of = {"media": "reference", "media_check": check, **_OPTIONS}
            result = pack(inputs=(str(jsonl),), output_dir=folder, tokenizer=tokenizer, **options_of)
            os.rename(result.shards, _emptied(work / name))
    for folder, has_images in (("litdata", True), ("litdata references", False)):
        writer = BinaryWriter(str(_emptied(work / folder)), chunk_bytes="64MB")
        for number, record in enumerate(records):
            name = record["images"][0]
            image = {"image": (source / name).read_bytes()} if has_images else {"name": name}
            writer[number] = {"id": record["id"], "messages": json.dumps(record["messages"]), **image}
        writer.done()
        writer.merge()
    litdata = work / "litdata", store.put_folder(f"{work.name}/litdata", work / "litdata")
    reader = PackedDataset(places["copy"][0], encoder).reader
    ranges: dict[str, list[tuple[str, int, int]]] = {"copy": [], "reference": []}
    for item in np.random.default_rng(0).permutation(len(reader)).tolist():
        shard, start, stop = reader.locate(item)
        ranges["copy"].append((f"{work.name}/copy/{reader.tars[shard].name}", start, stop))
    for number in np.random.default_rng(0).permutation(len(records)).tolist():
        name = records[number]["images"][0]
        ranges["reference"].append((f"{work.name}/source/{name}", 0, (source / name).stat().st_size))
    runs = [("local files", None, 0.0, "")]
    for latency in (0.0, options.latency):
        runs.append((f"{latency * 1000:.0f} ms", os.environ["AWS_ENDPOINT_URL"], latency, "s3://bucket"))
        runs.append((f"{latency * 1000:.0f} ms, ranges by sendfile", server.endpoint, latency, "msc://files"))
    for where, endpoint, latency, bucket in runs:
        store.latency(latency)
        server.latency(latency)
        readers: dict[str, Callable[[], Iterator[bytes]]] = {}
        if endpoint is not None:
            for client in ("", "rust"):
                url = bucket if not client else "msc://rust" if bucket == "s3://bucket" else "msc://files-rust"
                root = {raw: raw.replace("s3://bucket", url)}
                paths = {media: remote.replace("s3://bucket", url) for media, (_, remote) in places.items()}
                paths["reference, local packs"] = str(places["reference"][0])  # as LitData has the names of its files
                for media, path in paths.items():
                    name = f"{media}, Rust client" if client else media
                    readers[name] = partial(packed_images, path, encoder, media_root=root)
        else:
            readers["copy"] = partial(packed_images, places["copy"][0], encoder)
            readers["reference"] = partial(packed_images, work / "local reference", encoder)
            readers["reference by time"] = partial(packed_images, work / "local reference by time", encoder)
            for name, packs in (("copy", places["copy"][0]), ("reference by time", work / "local reference by time")):
                readers[f"{name}, members alone"] = partial(packed_members, packs, encoder)
        readers["LitData"] = partial(litdata_images, litdata[endpoint is not None], work / "cache", endpoint)
        place = str(files) if endpoint is None else raw
        readers["LitData, references"] = partial(
            litdata_references, work / "litdata references", place, work / "cache", endpoint
        )
        readers["LitData, files"] = partial(litdata_files, place, work / "cache", endpoint)
        if endpoint is not None:
            for media, wanted in ranges.items():
                readers[f"client alone, {media}"] = partial(ranges_alone, wanted, endpoint)
        rates: dict[str, list[tuple[float, float]]] = {name: [] for name in readers}
        spawn = multiprocessing.get_context("spawn")
        processes = {name: ProcessPoolExecutor(1, mp_context=spawn) for name in readers}
        for turn in range(_TURNS + 1):  # in turns, so that a slow moment of the machine affects all
            for name, images in readers.items():
                found, *seconds = processes[name].submit(measure, images).result()
                if "client alone" not in name and found != num_bytes:
                    raise AssertionError(f"{name} has {found} bytes of {num_bytes}")
                if turn:  # the first imports modules
                    rates[name].append((len(records) / seconds[0], len(records) / seconds[1]))
        for process in processes.values():
            process.shutdown()
        for name, measured in rates.items():
            wall, cpu = np.median(measured, axis=0)
            peer = np.median(rates["LitData, references" if "reference" in name else "LitData"], axis=0)
            report.add(
                f"images, {where}, {name}: per second", wall, "/s", per_cpu_second=cpu, of_litdata=wall / peer[0],
                cpu_of_litdata=cpu / peer[1],
            )  # fmt: skip
    store.latency(0)


def _with_names(record: dict[str, Any]) -> dict[str, Any]:
    return {**record, "images": [Path(image).name for image in record["images"]]}


def _add_record(tar: tarfile.TarFile, source: Path, number: int, record: dict[str, Any]) -> None:
    text = json.dumps({"messages": record["messages"]}).encode()
    info = tarfile.TarInfo(f"{number:06d}.json")
    info.size = len(text)
    tar.addfile(info, io.BytesIO(text))
    tar.add(source / record["images"][0], f"{number:06d}.jpg")


def _emptied(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    return folder


if __name__ == "__main__":
    main()
