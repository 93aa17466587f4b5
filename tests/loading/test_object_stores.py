"""Loaders of datasets in an object store yield the batches of the local folder, and their errors name the URL."""

import base64
import itertools
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from energon_packed import (
    ChatEncoder,
    DataChangedError,
    DataflowConfig,
    DataflowLoader,
    EnergonDistributor,
    MapDistributor,
    PackedDataset,
    PackOptions,
    ResourceError,
    get_packed_loader,
    get_raw_loader,
    pack,
)
from tests.conftest import Packer
from tests.internals import (
    DemoDataset,
    make_blend,
    read_ranges,
    references,
    storage_reader,
    storage_status,
    write_metadataset,
)
from tests.loading.flows import signature
from tests.sources.tars import picture
from tests.storage import BUCKET, Store

Places = tuple[Path, str]
"""A dataset folder, or an input file, and its copy in the store."""


@pytest.fixture(scope="module")
def records(demo: DemoDataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first records of the demo data: moto needs 10 ms for each request."""
    file = tmp_path_factory.mktemp("records") / "data.jsonl"
    file.write_text("".join(demo.jsonl.read_text().splitlines(keepends=True)[:40]))
    file.with_name("images").symlink_to(demo.jsonl.parent / "images")
    return file


@pytest.fixture
def packed(store: Store, pack_demo: Packer, records: Path, demo: DemoDataset) -> Places:
    options = {"inputs": (str(records),), "image_root": demo.jsonl.parent, "max_packs_per_shard": 2}
    folder = pack_demo(**options).shards
    return folder, store.put_folder("out/webdataset", folder)


LOADERS: dict[str, Callable[..., Any]] = {
    "map": lambda path, encoder, workers: DataflowLoader(
        MapDistributor(PackedDataset(path, encoder)), num_workers=workers
    ),
    "energon": lambda path, encoder, workers: DataflowLoader(EnergonDistributor(path), encoder, num_workers=workers),
    "packed_loader": lambda path, encoder, workers: get_packed_loader(path, encoder, num_workers=workers, epochs=1),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", LOADERS)
def test_batches_and_states_are_those_of_the_local_folder(
    packed: Places, encoder: ChatEncoder, kind: str, workers: int
) -> None:
    local, remote = (LOADERS[kind](path, encoder, workers) for path in packed)
    expected = [(signature(batch), local.state_dict()) for batch in local]
    assert len(expected) > 3
    for step, (batch, (content, state)) in enumerate(zip(remote, expected, strict=True), 1):
        assert signature(batch) == content
        if kind != "packed_loader" or not workers:
            assert remote.state_dict() == state
        elif step == 2:
            # A worker of Energon adds a checkpoint at the end of its packs, so that states depend on its speed.
            resumed = LOADERS[kind](packed[0], encoder, workers)
            resumed.load_state_dict(remote.state_dict())
            assert [signature(batch) for batch in resumed] == [content for content, _ in expected[step:]]


@pytest.mark.parametrize("kind", LOADERS)
def test_a_loader_resumes_at_every_step(packed: Places, encoder: ChatEncoder, kind: str) -> None:
    expected = [signature(batch) for batch in LOADERS[kind](packed[0], encoder, 0)]
    loader = LOADERS[kind](packed[1], encoder, 0)
    for step, _ in enumerate(itertools.islice(loader, 3), 1):
        resumed = LOADERS[kind](packed[1], encoder, 0)
        resumed.load_state_dict(loader.state_dict())
        assert signature(next(iter(resumed))) == expected[step]


@pytest.mark.parametrize("streaming", [True, False])
def test_raw_records_are_read_from_the_store(
    store: Store, demo: DemoDataset, records: Path, tokenizer_dir: Path, streaming: bool
) -> None:
    store.put_folder("raw/images", demo.jsonl.parent / "images")
    url = store.put("raw/data.jsonl", records.read_bytes())
    batches = []
    for path in (str(records), url):
        loader = get_raw_loader(
            DataflowConfig(
                dataset_path=path,
                packing_length=1024,
                tokenizer=tokenizer_dir,
                image_root=demo.jsonl.parent if path != url else None,
                streaming=streaming,
                max_reject_rate=0.2,
            ),
            num_workers=2,
        )
        batches.append([signature(batch) for batch in loader])
    assert batches[1] == batches[0]
    assert len(batches[0]) > 2


@pytest.mark.parametrize(("streaming", "count"), [(True, 24), (False, 6)])
def test_images_of_raw_records_are_requested_at_the_same_time(
    store: Store, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch, streaming: bool, count: int
) -> None:
    """Those of a chunk, of which a worker has four, or of a planned row."""
    names = [f"{index:02d}" for index in range(count)]
    for index, name in enumerate(names):
        store.put(f"raw/{name}.jpg", picture(index, 30))
    text = {"conversations": [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A."}]}
    lines = [json.dumps({"id": name, "image": f"{name}.jpg", **text}) + "\n" for name in names]
    url = store.put("raw/data.jsonl", "".join(lines).encode())
    settings: dict[str, Any] = {"dataset_path": url, "packing_length": 1024, "tokenizer": tokenizer_dir}
    loader = get_raw_loader(DataflowConfig(**settings, streaming=streaming), num_workers=0)
    for known in (storage_status._recent, storage_reader._blocks):  # of planning
        known.clear()
    all_requested = threading.Barrier(6)  # a request waits for those of the other images

    def wait(environ: dict[str, Any]) -> None:
        if environ["PATH_INFO"].endswith(".jpg"):
            all_requested.wait(timeout=20)

    monkeypatch.setattr(store, "intercept", wait)
    assert sum(batch.num_samples for batch in loader) == count


def test_loaders_request_each_pack_once(store: Store, packed: Places, encoder: ChatEncoder) -> None:
    reader = PackedDataset(packed[0], encoder).reader
    packs = len(reader)
    needed = sum(stop - start for _, start, stop in map(reader.locate, range(packs)))
    for kind in LOADERS:
        with store.counted() as traffic:
            assert sum(batch.num_samples for batch in LOADERS[kind](packed[1], encoder, 0)) > packs
        reads = [request for request in traffic.requests if request.startswith("GET") and request.endswith(".tar")]
        # Adjacent packs of a group are one request; Energon requests few packs of each of its slices.
        assert len(reads) == len(reader.tars) if kind == "map" else len(reader.tars) <= len(reads) <= packs, kind
        # When the dataset is opened and when Energon starts an epoch, and not for each pack.
        checks = [request for request in traffic.requests if request.startswith("HEAD") and request.endswith(".tar")]
        assert len(checks) <= 1 + len(reader.tars) < packs, kind
        assert needed <= sum(traffic.bytes_of[request] for request in set(reads)) <= 1.05 * needed


@pytest.fixture(scope="module")
def referenced(
    demo: DemoDataset, tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """Function that packs the demo records with references to their images."""

    def run(source: str) -> Path:
        options: dict[str, Any] = {"inputs": (source,), "output_dir": tmp_path_factory.mktemp("referenced")}
        options |= {"tokenizer": tokenizer_dir, "seq_len": 1024, "max_reject_rate": 0.2, "workers": 1}
        return pack(PackOptions(**options, shard_prefix="pack", media="reference")).shards

    return run


def test_referenced_images_are_read_from_the_store(
    store: Store, demo: DemoDataset, encoder: ChatEncoder, referenced: Callable[..., Path]
) -> None:
    store.put_folder("raw/images", demo.jsonl.parent / "images")
    url = store.put("raw/data.jsonl", demo.jsonl.read_bytes())
    local, remote = (referenced(source) for source in (str(demo.jsonl), url))
    expected = [signature(batch) for batch in LOADERS["map"](local, encoder, 0)]
    with store.counted() as traffic:
        assert [signature(batch) for batch in LOADERS["map"](remote, encoder, 0)] == expected
    assert traffic.count("HEAD") == 0
    images = [image for n in range(len(expected)) for image in PackedDataset(local, encoder).sample(n).conversations()]
    assert traffic.count("GET") == sum(len(conversation.images) for conversation in images)
    first = next(request for request in traffic.requests if request.startswith("GET")).partition("/bucket/")[2]
    store.put(first, b"another image")
    with pytest.raises(DataChangedError, match=rf"is not the packed image: s3://bucket/{first} ends before byte "):
        list(LOADERS["map"](remote, encoder, 0))


@pytest.mark.parametrize("is_truncated", [False, True])
def test_a_replaced_shard_is_noticed_by_packs_that_are_requested_together(
    store: Store, packed: Places, encoder: ChatEncoder, monkeypatch: pytest.MonkeyPatch, is_truncated: bool
) -> None:
    dataset = PackedDataset(packed[1], encoder)
    tar = dataset.reader.tars[0]
    content = bytearray(tar.read_bytes())
    if is_truncated:  # noticed by its size, while the status of the complete shard is kept
        del content[dataset.reader.locate(1)[2] - 600 :]
    else:  # packed again with the same size
        at = content.index(b"captions") + 20
        content[at : at + 1] = b"#"
        manifest = tar.parent / ".nv-meta" / "packing.json"
        listed = json.loads(manifest.read_bytes())
        listed["shards"][0]["sha256"] = "0" * 64
        manifest.write_bytes(json.dumps(listed).encode())
        monkeypatch.setattr(storage_status, "_FRESH", 0)
    store.put(str(tar).removeprefix(f"s3://{BUCKET}/"), bytes(content))
    dataset.request([0, 1])
    with pytest.raises(DataChangedError, match=f"{tar.name} was replaced or changed while it was in use"):
        dataset.pack(1)


@pytest.fixture
def remote_images(
    store: Store, demo: DemoDataset, records: Path, encoder: ChatEncoder, referenced: Callable[..., Path]
) -> tuple[Path, list[list[str]]]:
    """A local dataset whose packs refer to images in the store, and the keys of the images of each pack."""
    store.put_folder("raw/images", demo.jsonl.parent / "images")
    folder = referenced(store.put("raw/data.jsonl", records.read_bytes()))
    reader = PackedDataset(folder, encoder).reader
    parts = [reader.part(pack, "media.json").get("media.json", b"{}") for pack in range(len(reader))]
    files = [[locator["file"] for locator in json.loads(part).values()] for part in parts]
    return folder, [[file.removeprefix("s3://bucket/") for file in of_pack] for of_pack in files]


def test_images_of_several_packs_are_requested_at_the_same_time(
    store: Store, encoder: ChatEncoder, remote_images: tuple[Path, list[list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, keys = remote_images
    numbers = [number for number, of_pack in enumerate(keys) if of_pack][:3]
    wanted = {f"/bucket/{key}" for number in numbers for key in keys[number]}
    assert len(wanted) > max(len(of_pack) for of_pack in keys)
    all_requested = threading.Barrier(len(wanted))

    def wait(environ: dict[str, Any]) -> None:
        if environ["PATH_INFO"] in wanted:
            all_requested.wait(timeout=20)

    monkeypatch.setattr(store, "intercept", wait)
    dataset = PackedDataset(folder, encoder)
    assert dataset.read_ahead >= 16
    dataset.request(numbers)
    assert [len(list(dataset.pack(number).conversations())) for number in numbers]
    assert not all_requested.broken


def test_packs_of_a_blend_that_are_requested_together_keep_their_order(
    store: Store, packed: Places, encoder: ChatEncoder, pack_demo: Packer, tmp_path: Path
) -> None:
    options = {"max_packs_per_shard": 4, "shard_prefix": "other"}
    other = store.put_folder("other/webdataset", pack_demo(**options).shards)
    mix = tmp_path / "mix.yaml"
    write_metadataset(make_blend([(packed[1], None), (other, None)], epochized=True), mix)
    dataset = PackedDataset(mix, encoder)
    own = dataset.packs[0]
    numbers = [own, 0, own + 1, 1, own + 2]  # of both datasets
    expected = [[conversation.id for conversation in dataset.pack(number).conversations()] for number in numbers]
    assert len({tuple(ids) for ids in expected}) == len(numbers)
    dataset.request(numbers)
    assert [
        [conversation.id for conversation in dataset.pack(number).conversations()] for number in numbers
    ] == expected


def test_a_missing_or_refused_image_is_named_with_its_pack(
    store: Store, encoder: ChatEncoder, remote_images: tuple[Path, list[list[str]]]
) -> None:
    folder, keys = remote_images
    number = next(number for number, of_pack in enumerate(keys) if len(of_pack) > 1)
    key = keys[number][1]
    dataset = PackedDataset(folder, encoder)
    refused = pytest.raises(
        ResourceError, match=r"img\d+_?\d*\.\w+, an image of sample \d+ \(.*\), cannot be read: .*403"
    )
    with store.failing(403, key), refused:
        dataset.pack(number)
    store.client.delete_object(Bucket=BUCKET, Key=key)
    with pytest.raises(DataChangedError, match=rf"is not the packed image: s3://bucket/{key} does not exist"):
        dataset.pack(number)


def test_a_changed_image_is_an_error_of_its_pack_alone(
    store: Store, encoder: ChatEncoder, remote_images: tuple[Path, list[list[str]]]
) -> None:
    folder, keys = remote_images
    numbers = [number for number, of_pack in enumerate(keys) if of_pack][:3]
    expected = [PackedDataset(folder, encoder).item(number) for number in numbers]
    store.put(keys[numbers[1]][0], b"another image")
    dataset = PackedDataset(folder, encoder)
    dataset.request(numbers)
    assert [len(dataset.item(number)) for number in numbers[::2]] == [len(item) for item in expected[::2]]
    with pytest.raises(DataChangedError, match=f"is not the packed image: s3://bucket/{keys[numbers[1]][0]} ends"):
        dataset.item(numbers[1])


def test_nearby_ranges_are_read_by_one_request(store: Store) -> None:
    content = bytes(range(256)) * 4000
    url = store.put("a", content)
    ranges = [(700_000, 50), (0, 1000), (2000, 30_000), (33_000, 10), (1_023_990, 100), (2_000_000, 10), (5, 10)]
    with store.counted() as traffic:
        assert read_ranges([(url, at, size) for at, size in ranges]) == [
            content[at : at + size] for at, size in ranges
        ]
    assert traffic.count("GET") == 4
    assert traffic.bytes < 1.1 * sum(size for _, size in ranges)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_dataset_is_read_by_other_processes(packed: Places, encoder: ChatEncoder, method: Any) -> None:
    dataset = PackedDataset(packed[1], encoder)
    dataset.request(range(3))
    expected = [sample.input_ids.tolist() for sample in dataset[0]]
    workers = 2 if method == "fork" else 1  # a spawned worker imports everything again
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=2, num_workers=workers, multiprocessing_context=method, collate_fn=list
    )
    batches = list(loader)
    assert len(batches) == -(-len(dataset) // 2)
    assert [sample.input_ids.tolist() for sample in batches[0][0]] == expected


@pytest.mark.parametrize("kind", LOADERS)
def test_a_refused_request_stops_the_loader_in_one_line(
    store: Store, packed: Places, encoder: ChatEncoder, kind: str
) -> None:
    keys = [f"out/webdataset/{tar.name}" for tar in packed[0].glob("*.tar")]
    loader = LOADERS[kind](packed[1], encoder, 0)
    for code in (403, 503):
        with (
            store.failing(code, *keys),
            pytest.raises(ResourceError, match=rf"s3://bucket/out/.*tar: .*{code}") as error,
        ):
            list(loader)
        assert "\n" not in str(error.value)
        assert not sum(loader.failures.counts.values())
        loader = LOADERS[kind](packed[1], encoder, 0)


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("change", ["replaced", "removed"])
def test_changed_objects_stop_the_loader(
    store: Store, packed: Places, encoder: ChatEncoder, kind: str, change: str
) -> None:
    loader = LOADERS[kind](packed[1], encoder, 0)
    for tar in packed[0].glob("*.tar"):
        if change == "replaced":
            store.put(f"out/webdataset/{tar.name}", b"x" * 512)
        else:
            store.client.delete_object(Bucket=BUCKET, Key=f"out/webdataset/{tar.name}")
    with pytest.raises(DataChangedError, match=r"s3://bucket/out/webdataset/.*tar"):
        list(loader)


def test_a_metadataset_has_local_and_remote_members(
    store: Store, packed: Places, encoder: ChatEncoder, tmp_path: Path, pack_demo: Packer
) -> None:
    other = pack_demo(shard_prefix="other").shards
    signatures = []
    for n, first in enumerate(packed):
        mix = tmp_path / f"{n}.yaml"
        write_metadataset(make_blend([(first, None), (other, None)], epochized=True), mix)
        for kind in LOADERS:
            signatures.append((n, kind, [signature(batch) for batch in LOADERS[kind](mix, encoder, 0)]))
    half = len(LOADERS)
    assert [entry[1:] for entry in signatures[:half]] == [entry[1:] for entry in signatures[half:]]


def test_moved_and_stored_images_are_read_from_the_store(
    store: Store,
    demo: DemoDataset,
    encoder: ChatEncoder,
    referenced: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(references, "_moved", {})  # the loaders of other tests read the images of the demo
    # Images of files, which `media_root` leads to the store.
    local = referenced(str(demo.jsonl))
    images = demo.jsonl.parent / "images"
    moved = {images: store.put_folder("moved", images)}
    expected = [signature(batch) for batch in LOADERS["map"](local, encoder, 0)]
    with store.counted() as traffic:
        dataset = PackedDataset(local, encoder, media_root=moved)
        assert [signature(batch) for batch in DataflowLoader(MapDistributor(dataset))] == expected
        loader = DataflowLoader(EnergonDistributor(local, media_root=moved), encoder)
        assert sorted(signature(batch) for batch in loader) == sorted(expected)
    assert traffic.count("GET") > 20
    # Images of JSON, which pack stores once in the output folder: their locations are relative.
    records = []
    for number, file in enumerate(sorted(images.glob("*.png"))[:12]):
        image = f"data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}"
        turns = [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": f"Image {number}."}]
        records.append(json.dumps({"messages": turns, "images": [image]}))
    (tmp_path / "data.jsonl").write_text("\n".join(records))
    folder = referenced(str(tmp_path / "data.jsonl")).parent
    url = store.put_folder("stored", folder)
    for kind in LOADERS:
        batches = [[signature(batch) for batch in LOADERS[kind](path, encoder, 0)] for path in (folder, url)]
        assert batches[0] == batches[1]
        assert batches[0]
