"""Datasets in an object store are read as the same folder on a disk."""

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from energon_packed import ChatEncoder, DataChangedError, PackedDataset, ResourceError, steps_per_epoch
from tests.internals import ShardReader, as_path, cli, storage
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
    assert sum(".tar" in request for request in traffic.requests) == 2  # a tar for each listing
    assert len(traffic.requests) <= 15  # one after the other


def test_a_replaced_tar_is_noticed(
    store: Store, packed: tuple[Path, str], encoder: ChatEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = PackedDataset(packed[1], encoder)
    _ = dataset[0]
    tar = dataset.reader.tars[0]
    key = str(tar).removeprefix("s3://bucket/")
    store.put(key, tar.read_bytes() + bytes(512))
    monkeypatch.setattr(storage, "_FRESH", 0)
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
