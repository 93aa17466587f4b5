"""Datasets in an object store are read as the same folder on a disk."""

import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from energon_packed import (
    ChatEncoder,
    ConfigError,
    DataChangedError,
    FormatError,
    PackedDataset,
    ResourceError,
    steps_per_epoch,
)
from tests.internals import OpenedFiles, ShardReader, as_path, cli, read_metadataset, storage_status, storage_threads
from tests.storage import Store


@pytest.fixture
def packed(store: Store, pack_demo: Any) -> tuple[Path, str]:
    """An output of `pack`, and its copy in the store."""
    folder = pack_demo().shards.parent
    for file in sorted(folder.rglob("*")):
        if file.is_file() and ".work" not in file.parts:
            store.put(f"out/{file.relative_to(folder)}", file.read_bytes())
    return folder, store.url("out")


def test_a_dataset_has_the_packs_of_the_local_folder(packed: tuple[Path, str], encoder: ChatEncoder) -> None:
    local, remote = (PackedDataset(path, encoder) for path in packed)
    assert len(remote) == len(local) > 3
    for index in range(len(local)):
        assert [s.input_ids.tolist() for s in remote[index]] == [s.input_ids.tolist() for s in local[index]]
    assert remote.fingerprint() == local.fingerprint()
    assert (remote.row_sizes().tokens == local.row_sizes().tokens).all()
    assert steps_per_epoch(packed[1]) == steps_per_epoch(packed[0])


def test_a_pack_needs_one_request(store: Store, packed: tuple[Path, str], encoder: ChatEncoder) -> None:
    dataset = PackedDataset(packed[1], encoder)
    with store.counted() as traffic:
        _ = dataset[0]
    assert [request.rpartition(".")[2] for request in traffic.requests] == ["idx", "tar"]
    assert traffic.count("GET") == 2
    with store.counted() as traffic:
        for index in range(1, 4):
            _ = dataset[index]
    assert [request.partition(" ")[0] for request in traffic.requests] == ["GET"] * 3
    assert traffic.bytes == sum(stop - start for _, start, stop in map(dataset.reader.locate, range(1, 4)))


def test_opening_needs_no_request_for_each_shard(store: Store, pack_demo: Any, encoder: ChatEncoder) -> None:
    url = store.put_folder("shards", pack_demo(max_packs_per_shard=1).shards)
    with store.counted() as traffic:
        dataset = PackedDataset(url, encoder)
    assert len(dataset.reader.tars) > 10
    assert [request for request in traffic.requests if ".tar" in request] == [
        f"HEAD /bucket/shards/{dataset.reader.tars[0].name}"
    ]


def requests_of(
    store: Store, rounds: list[list[str]], action: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[list[str]], Any]:
    """Return the requests of an action in rounds of these lengths, sorted in each, and its result.

    A request is answered when as many requests as its round has have arrived.
    """
    waiting = [barrier for count in map(len, rounds) for barrier in [threading.Barrier(count, timeout=60)] * count]

    def intercept(environ: dict[str, Any]) -> None:
        waiting.pop(0).wait()

    with store.counted() as traffic, monkeypatch.context() as patched:
        patched.setattr(store, "intercept", intercept)
        result = action()
    ends = [*itertools.accumulate(map(len, rounds[:-1]), initial=0), None]  # the last round has all others
    return [sorted(traffic.requests[start:stop]) for start, stop in itertools.pairwise(ends)], result


def test_independent_requests_of_opening_are_sent_at_the_same_time(
    store: Store, pack_demo: Any, encoder: ChatEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = pack_demo(max_packs_per_shard=4).shards
    store.put_folder("out/webdataset", folder)
    nv_meta = "GET /bucket/out/webdataset/.nv-meta"
    rounds = [
        ["LIST /bucket", "LIST /bucket"],  # of `out` and `out/webdataset`: the folder with .nv-meta
        [f"{nv_meta}/{name}" for name in (".info.json", "packing.json", "split.yaml")],
        [f"HEAD /bucket/out/webdataset/{min(folder.glob('*.tar')).name}", "LIST /bucket"],
        ["LIST /bucket"],
    ]
    # The client asks whether a folder exists before it lists the folder.
    requests, dataset = requests_of(store, rounds, lambda: PackedDataset(store.url("out"), encoder), monkeypatch)
    assert requests == rounds
    assert sum(map(len, requests)) == 8
    assert len(dataset) == len(PackedDataset(folder, encoder))


@pytest.fixture
def blend(store: Store, pack_demo: Any) -> str:
    """A Metadataset of four copies of a dataset, in the store."""
    folder = pack_demo(max_packs_per_shard=4).shards
    for name in "abcd":
        store.put_folder(f"blend/{name}", folder)
    paths = "".join(f"      - path: {name}\n" for name in "abcd")
    lines = "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n    blend_epochized:\n"
    return store.put("blend/mix.yaml", (lines + paths).encode())


def test_datasets_of_a_blend_are_opened_at_the_same_time(
    store: Store, blend: str, encoder: ChatEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def files(*names: str) -> list[str]:
        return [f"GET /bucket/blend/{folder}/.nv-meta/{name}" for folder in "abcd" for name in names]

    blend_file = "/bucket/blend/mix.yaml"
    tar = min(as_path(store.url("blend/a")).glob("*.tar")).name
    statuses = [
        [*[f"HEAD /bucket/blend/{folder}/{tar}" for folder in "abcd"], *["LIST /bucket"] * 4],
        ["LIST /bucket"] * 4,
    ]
    rounds = [
        *[[f"{method} {blend_file}"] for method in ("HEAD", "GET")],
        ["LIST /bucket"] * 4,  # whether each of them is a dataset
        [f"GET {blend_file}"],  # the parsers must agree
        files(".info.json", ".info.yaml", "split.json", "split.yaml"),  # no dataset runs code
        files("dataset.yaml"),
        files("sample_loader.py"),
        *[[f"{method} {blend_file}"] for method in ("HEAD", "GET")],
        ["LIST /bucket"] * 4,
        files("split.yaml"),
        ["LIST /bucket"] * 8,
        files(".info.json", "packing.json", "split.yaml"),
        *statuses,
    ]
    requests, dataset = requests_of(store, rounds, lambda: PackedDataset(blend, encoder), monkeypatch)
    assert requests == rounds
    assert len(dataset) == 4 * len(PackedDataset(blend.replace("mix.yaml", "a"), encoder))
    opened = OpenedFiles(tar for split in dataset.blend for tar in split.found)
    assert requests_of(store, statuses, opened.check_all, monkeypatch)[0] == statuses


def test_references_of_an_old_metadataset_are_checked_at_the_same_time(
    store: Store, blend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names files without an ending, too, so that each reference is requested."""
    paths = "".join(f"      - path: {name}\n" for name in ("a", "b", "mix.yaml"))
    path = as_path(store.put("blend/old.yaml", f"splits:\n  train:\n    datasets:\n{paths}".encode()))
    rounds = [
        ["GET /bucket/blend/old.yaml"],
        [f"HEAD /bucket/blend/{name}" for name in ("a", "b", "mix.yaml")],
        ["LIST /bucket"] * 2,
        ["GET /bucket/blend/mix.yaml"],
        ["LIST /bucket"] * 4,
    ]
    requests, metadataset = requests_of(store, rounds, lambda: read_metadataset(path), monkeypatch)
    assert requests == rounds
    assert len(metadataset.entries()) == 7


@pytest.mark.parametrize("threads", [1, 64])
def test_the_first_dataset_that_cannot_be_opened_is_named(
    store: Store, blend: str, encoder: ChatEncoder, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_threads, "_pools", {})
    monkeypatch.setattr(storage_threads, "REQUESTS", threads)  # no thread waits for a task of its own pool
    for name in "cb":
        store.put(f"blend/{name}/.nv-meta/packing.json", b"{")

    def intercept(environ: dict[str, Any]) -> None:
        if environ["PATH_INFO"].endswith("/b/.nv-meta/packing.json"):
            time.sleep(0.2)  # the other dataset fails first

    with (
        monkeypatch.context() as patched,
        pytest.raises(FormatError, match=r"^s3://bucket/blend/b/.nv-meta/packing.json is not a pac") as damaged,
    ):
        patched.setattr(store, "intercept", intercept)
        PackedDataset(blend, encoder)
    assert "\n" not in str(damaged.value)
    for name in "cb":
        for path in as_path(store.url(f"blend/{name}")).objects():
            path.unlink()
    with pytest.raises(
        ConfigError, match=r"mix.yaml refers to s3://bucket/blend/b, which does not exist; .*1 more faul"
    ):
        PackedDataset(blend, encoder)


def test_threads_request_the_index_of_a_shard_once(
    store: Store, packed: tuple[Path, str], encoder: ChatEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = PackedDataset(packed[1], encoder)

    def intercept(environ: dict[str, Any]) -> None:
        if environ["PATH_INFO"].endswith(".idx"):
            time.sleep(0.2)  # the threads of the other packs start in the meantime

    with store.counted() as traffic, monkeypatch.context() as patched:
        patched.setattr(store, "intercept", intercept)
        dataset.request(range(len(dataset)))
        for item in range(len(dataset)):
            dataset.pack(item)
    indexes = [request for request in traffic.requests if request.endswith(".idx")]
    assert len(indexes) == len(set(indexes)) == len(dataset.reader.tars)
    assert not storage_threads._locks  # each is dropped after its file is read


def test_all_opened_files_are_checked_by_a_listing(store: Store) -> None:
    opened = OpenedFiles([as_path(store.put(f"opened/{number}.tar", b"1")) for number in range(9)])
    with store.counted() as traffic:
        opened.check_all()
    assert sorted(traffic.requests) == ["HEAD /bucket/opened/0.tar", "LIST /bucket", "LIST /bucket"]
    store.put("opened/7.tar", b"2")
    with pytest.raises(DataChangedError, match=r"s3://bucket/opened/7.tar was replaced or changed"):
        opened.check_all()
    store.client.delete_object(Bucket="bucket", Key="opened/5.tar")
    with pytest.raises(DataChangedError, match=r"s3://bucket/opened/5.tar cannot be read any more"):
        opened.check_all()


def test_a_replaced_tar_is_noticed(
    store: Store, packed: tuple[Path, str], encoder: ChatEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = PackedDataset(packed[1], encoder)
    _ = dataset[0]
    tar = dataset.reader.tars[0]
    key = str(tar).removeprefix("s3://bucket/")
    store.put(key, tar.read_bytes() + bytes(512))
    monkeypatch.setattr(storage_status, "_FRESH", 0)
    with pytest.raises(DataChangedError, match=r"s3://bucket/out/webdataset/.*tar was replaced or changed"):
        _ = dataset[0]


def test_refused_requests_are_not_damage(store: Store, packed: tuple[Path, str], encoder: ChatEncoder) -> None:
    dataset = PackedDataset(packed[1], encoder)
    key = str(dataset.reader.tars[0]).removeprefix("s3://bucket/")
    for code in (403, 500):
        with store.failing(code, key), pytest.raises(ResourceError, match=rf"s3://bucket/{key}: .*{code}"):
            _ = dataset[0]
    for name in (".nv-meta/packing.json", ".nv-meta/split.yaml", ".nv-meta/.info.json"):
        with store.failing(403, f"out/webdataset/{name}"), pytest.raises(ResourceError, match="access is denied"):
            PackedDataset(packed[1], encoder)


def run(*arguments: Any) -> str:
    done = CliRunner().invoke(cli, [*map(str, arguments)])
    assert done.exit_code == 0, (done.output, done.exception)
    return done.output


def test_inspect_verify_and_report_read_the_store(
    packed: tuple[Path, str], tokenizer_dir: Path, tmp_path: Path
) -> None:
    folder, url = packed
    tar = next((folder / "webdataset").glob("*.tar"))
    some = [
        [f"webdataset/{tar.name}"],
        ["webdataset", "--json"],
        ["", "--pack", "pack_00000002"],
        ["", "--id", "demo-00003"],
    ]
    for arguments in ([""], *some):
        shown = [run("inspect", f"{root}/{arguments[0]}".rstrip("/"), *arguments[1:]) for root in packed]
        assert shown[1].replace(url, str(folder)) == shown[0]
    checked = [run("verify", root, "--workers", 1, "--tokenizer", tokenizer_dir) for root in packed]
    assert checked[1].replace(url, str(folder)) == checked[0]
    assert "✗" not in checked[1]
    pages = []
    for index, root in enumerate(packed):
        run("report", root, "-o", tmp_path / f"{index}.html")
        pages.append((tmp_path / f"{index}.html").read_text().replace(str(root), "ROOT"))
    assert pages[0] == pages[1]


def test_a_metadataset_in_the_store_names_its_neighbors(
    store: Store, packed: tuple[Path, str], encoder: ChatEncoder
) -> None:
    text = (
        "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n    blend_epochized:\n"
        "      - path: ./out/webdataset\n        repetitions: 2\n"
    )
    url = store.put("mix.yaml", text.encode())
    assert len(PackedDataset(url, encoder)) == 2 * len(PackedDataset(packed[0], encoder))


def test_headers_of_a_shard_are_read_in_blocks(store: Store, packed: tuple[Path, str]) -> None:
    folder, url = packed
    tars = sorted((folder / "webdataset").glob("*.tar"))
    local = ShardReader(tars)
    remote = ShardReader([as_path(f"{url}/webdataset/{tar.name}") for tar in tars])
    with store.counted() as traffic:
        assert remote.part(0, "json") == local.part(0, "json")
    assert traffic.count("GET") <= 2
