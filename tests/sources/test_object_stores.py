"""Inputs and images in an object store: the tars are those of the same files on a disk."""

import gzip
import itertools
import json
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from energon_packed import ConfigError, MediaReference, PackResult, Progress, ResourceError, SourceError, pack
from tests.internals import open_sources, storage, storage_reader, storage_status
from tests.processes import energon_packed
from tests.sources.tars import picture, write_tar
from tests.storage import Store


@pytest.fixture
def packed(tokenizer_dir: Path, tmp_path: Path) -> Any:
    def run(name: str, inputs: Any, **options: Any) -> PackResult:
        settings = {"seq_len": 512, "tokenizer": tokenizer_dir, "workers": 1, "shard_prefix": "p"}
        return pack(inputs, output_dir=tmp_path / name, **{**settings, **options})

    return run


def contents(result: PackResult) -> dict[str, bytes]:
    files = [*result.shards.glob("*.tar"), *result.shards.glob("*.idx")]
    table = pq.read_table(result.lengths).drop_columns("source").to_pylist()
    return {"lengths": repr(table).encode(), **{file.name: file.read_bytes() for file in files}}


def rejects(result: PackResult) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.rejects.read_text().splitlines()]


def records(count: int, image: str = "images/{}.jpg") -> list[dict[str, Any]]:
    return [
        {
            "id": f"r{index}",
            "image": image.format(index % 4),
            "conversations": [
                {"from": "human", "value": f"<image>\nQuestion {index}?"},
                {"from": "gpt", "value": f"Answer {index}."},
            ],
        }
        for index in range(count)
    ]


def lines(items: list[Any]) -> bytes:
    return b"".join(json.dumps(item).encode() + b"\n" for item in items)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files of each format, with the images in a folder beside them."""
    root = tmp_path / "data"
    (root / "images").mkdir(parents=True)
    for index in range(4):
        (root / "images" / f"{index}.jpg").write_bytes(picture(index, 60 + index))
    (root / "a.jsonl").write_bytes(lines(records(12)))
    (root / "b.jsonl.gz").write_bytes(gzip.compress(lines(records(12)), mtime=0))
    (root / "c.json").write_text(json.dumps(records(12)))
    plain = [{"id": f"p{i}", "prompt": f"Question {i}?", "response": f"Answer {i}."} for i in range(12)]
    pq.write_table(pa.Table.from_pylist(plain), root / "d.parquet", row_group_size=5)
    with (
        pa.OSFile(str(root / "e.arrow"), "wb") as out,
        pa.ipc.new_file(out, pa.Table.from_pylist(plain).schema) as new,
    ):
        new.write_table(pa.Table.from_pylist(plain))
    (root / "f.csv").write_text("id,prompt,response\n" + "".join(f"{i},Question {i}?,Answer {i}.\n" for i in range(9)))
    members = [(f"k{i}.{part}", value) for i in range(8) for part, value in
               (("jpg", picture(i)), ("json", {"caption": f"Caption {i}"}))]  # fmt: skip
    write_tar(root / "g.tar", members)
    return root


NAMES = ["a.jsonl", "b.jsonl.gz", "c.json", "d.parquet", "e.arrow", "f.csv", "g.tar"]


@pytest.mark.parametrize("name", NAMES)
def test_an_input_in_a_store_is_packed_as_the_same_file_on_a_disk(
    store: Store, packed: Any, folder: Path, name: str
) -> None:
    url = store.put_folder("data", folder)
    local, remote = packed("local", folder / name), packed("remote", f"{url}/{name}")
    assert local.manifest.packed > 0
    assert contents(remote) == contents(local)
    # The second run reuses the measurements and the shards.
    again = packed("remote", f"{url}/{name}")
    assert contents(again) == contents(local)


def test_globs_and_folders_are_listed(store: Store, packed: Any, folder: Path) -> None:
    for part in range(3):
        (folder / f"part_{part}.jsonl").write_bytes(lines(records(4 + part)))
    url = store.put_folder("data", folder)
    assert contents(packed("r", f"{url}/part_*.jsonl")) == contents(packed("l", f"{folder}/part_*.jsonl"))
    parts = folder / "parts"
    (parts / "inner").mkdir(parents=True)
    (parts / "x.jsonl").write_bytes(lines(records(3, "../images/{}.jpg")))
    (parts / "inner/y.jsonl").write_bytes(lines(records(3, "../images/{}.jpg")))
    (parts / ".hidden").mkdir()
    (parts / ".hidden/z.jsonl").write_bytes(b"broken")
    (parts / "README.md").write_bytes(b"")
    store.put_folder("data", folder)
    root = {"image_root": folder / "images"}, {"image_root": f"{url}/images"}
    assert contents(packed("lf", parts, **root[0])) == contents(packed("rf", f"{url}/parts", **root[1]))


@pytest.mark.parametrize("image", ["images/{}.jpg", "s3://bucket/data/images/{}.jpg"])
@pytest.mark.parametrize("root", ["s3://bucket/data", None, "s3://bucket"])
def test_images_are_read_inside_the_image_root(
    store: Store, packed: Any, folder: Path, image: str, root: str | None
) -> None:
    store.put_folder("data", folder)
    if root == "s3://bucket" and not image.startswith("s3"):
        image = f"data/{image}"
    url = store.put("data/x.jsonl", lines(records(8, image)))
    (folder / "x.jsonl").write_bytes(lines(records(8)))
    local = packed("local", folder / "x.jsonl")
    remote = packed("remote", url, **({} if root is None else {"image_root": root}))
    assert remote.manifest.packed == 8
    assert contents(remote) == contents(local)


def test_a_local_file_may_name_images_of_the_image_root(store: Store, packed: Any, folder: Path) -> None:
    url = store.put_folder("data", folder)
    assert packed("a", folder / "a.jsonl", image_root=url).manifest.packed == 12


def test_images_outside_the_root_and_missing_images_are_rejected(store: Store, packed: Any, folder: Path) -> None:
    store.put_folder("data", folder)
    store.put("other/0.jpg", picture(0))
    images = {
        "missing_image": ["images/none.jpg", "s3://bucket/data/images/none.jpg", "images"],
        "image_outside_root": ["../other/0.jpg", "s3://bucket/other/0.jpg", "s3://else/data/images/0.jpg", "/a.jpg"],
        "unsupported_media": ["https://host/a.jpg"],
    }  # fmt: skip
    bad = [
        {**records(1)[0], "id": str(i), "image": name}
        for i, name in enumerate(name for names in images.values() for name in names)
    ]
    url = store.put("data/x.jsonl", lines([*records(4), *bad]))
    result = packed("x", url, max_reject_rate=0.9)
    assert result.manifest.packed == 4
    assert [row["reason"] for row in rejects(result)] == [reason for reason, names in images.items() for _ in names]


def test_objects_of_local_records_need_a_root_in_the_store(store: Store, packed: Any, folder: Path) -> None:
    url = store.put_folder("data", folder)
    (folder / "x.jsonl").write_bytes(lines([*records(2), *records(2, f"{url}/images/{{}}.jpg")]))
    result = packed("x", folder / "x.jsonl", max_reject_rate=0.9)
    assert [(row["reason"], "set `image_root`" in row["detail"]) for row in rejects(result)] == [
        ("unsupported_media", True)
    ] * 2


def test_a_replaced_input_is_measured_again(store: Store, packed: Any, folder: Path) -> None:
    url = store.put_folder("data", folder)
    packed("x", f"{url}/a.jsonl")
    changed = lines(records(12)).replace(b"Answer 3.", b"Answer 7.")
    store.put("data/a.jsonl", changed)
    (folder / "a.jsonl").write_bytes(changed)
    assert contents(packed("x", f"{url}/a.jsonl", overwrite=True)) == contents(packed("l", folder / "a.jsonl"))


def test_a_replaced_tar_is_read_again(store: Store, packed: Any, folder: Path) -> None:
    url = store.put_folder("data", folder)
    packed("x", f"{url}/g.tar")
    write_tar(folder / "g.tar", [(f"k{i}.{part}", value) for i in range(8) for part, value in
                                 (("jpg", picture(i + 50)), ("json", {"caption": f"Other caption {i}"}))])  # fmt: skip
    store.put_folder("data", folder)
    assert contents(packed("y", f"{url}/g.tar")) == contents(packed("l", folder / "g.tar"))


def test_refused_requests_end_the_run_and_reject_no_record(store: Store, packed: Any, folder: Path) -> None:
    url = store.put_folder("data", folder)
    for key in ("data/a.jsonl", "data/images/2.jpg"):
        with store.failing(403, key), pytest.raises(ResourceError, match=f"s3://bucket/{key}: access is denied"):
            packed("x", f"{url}/a.jsonl")


def test_the_command_line_prints_a_refused_request_in_one_line(
    store: Store, folder: Path, tokenizer_dir: Path, tmp_path: Path
) -> None:
    url = store.put_folder("data", folder)
    arguments = ("pack", f"{url}/a.jsonl", "-o", tmp_path / "out", "--seq-len", 512, "--tokenizer", tokenizer_dir)
    with store.failing(403, "data/images/2.jpg"):
        done = energon_packed(*arguments, "--workers", 2)
    assert done.returncode == 1
    remedy = "check the credentials, and the permissions of the bucket"
    assert done.stderr == f"error: s3://bucket/data/images/2.jpg: access is denied (403); {remedy}\n"
    assert energon_packed(*arguments, "--workers", 2).returncode == 0


def test_missing_inputs_are_named(store: Store, packed: Any) -> None:
    for given, error, message in (
        (store.url("none.jsonl"), SourceError, r"^s3://bucket/none.jsonl: no such file"),
        (store.url("no*.jsonl"), SourceError, r"^nothing matches s3://bucket/no\*.jsonl"),
        ("s3://no-bucket/a.jsonl", ResourceError, "the bucket does not exist"),
        ("s3://no-bucket/*.jsonl", ResourceError, "the bucket does not exist"),
        ("hf://a/b.jsonl", ConfigError, "is remote; hf:// is not supported"),
    ):
        with pytest.raises(error, match=message):
            packed("x", given)


def test_records_of_a_tar_are_downloaded_in_few_requests(store: Store, packed: Any, folder: Path) -> None:
    url = store.put_folder("data", folder)
    size = (folder / "g.tar").stat().st_size
    with store.counted() as traffic:
        packed("x", f"{url}/g.tar")
    # The headers of the tar, then headers and contents of each of 8 keys at once, to measure and to write.
    assert traffic.bytes < 4 * size + (64 << 10)
    assert traffic.count("GET") <= 4 + 2 * 8
    assert traffic.count("HEAD") < 30  # of the run: none for a record


def _own_images(folder: Path, count: int) -> Path:
    """A JSONL file whose records have an image each."""
    for index in range(count):
        (folder / "images" / f"{index}.jpg").write_bytes(picture(index, 20 + index))
    each = [{**record, "image": f"images/{index}.jpg"} for index, record in enumerate(records(count))]
    (folder / "own.jsonl").write_bytes(lines(each))
    return folder / "own.jsonl"


class _WriteStage(Progress):
    """Lets the write stage start as in a process that has read none of the objects.

    Attributes:
        began: whether it has started.
    """

    began = False

    def start(self, stage: str, total: int, unit: str) -> None:
        self.began = stage == "write"
        storage_status._recent.clear()
        storage_reader._blocks.clear()


@pytest.mark.parametrize("first", [storage.READ_AHEAD, 100])
def test_records_and_images_of_a_batch_are_requested_at_the_same_time(
    store: Store, packed: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    """Before they are written also if an image is larger than what is requested to measure it."""
    local = packed("local", _own_images(folder, 12))
    url = store.put_folder("data", folder)
    stage = _WriteStage()
    monkeypatch.setattr(storage_reader, "READ_AHEAD", first)
    images, written_records = threading.Barrier(12), threading.Barrier(12)  # a request waits for the others

    def wait(environ: dict[str, Any]) -> None:
        if "/images/" in environ["PATH_INFO"]:
            if stage.began or first > 100:
                images.wait(timeout=20)
        elif first > 100 and stage.began and environ["REQUEST_METHOD"] == "GET":
            written_records.wait(timeout=20)

    monkeypatch.setattr(store, "intercept", wait)
    remote = packed("remote", f"{url}/own.jsonl", progress=stage)
    assert remote.manifest.packed == 12
    assert contents(remote) == contents(local)


def test_an_image_is_requested_once_and_its_status_before_and_after(store: Store, packed: Any, folder: Path) -> None:
    _own_images(folder, 66)
    url = store.put_folder("data", folder)
    with store.counted() as traffic:
        packed("remote", f"{url}/own.jsonl", seq_len=4096)
    methods = [request.split()[0] for request in traffic.requests if "/images/" in request]
    batches = [(64, "HEAD"), (64, "GET"), (2, "HEAD"), (2, "GET"), (66, "HEAD")]
    assert methods == [method for count, method in batches for _ in range(count)]


@pytest.mark.parametrize("first", [100, 1100])
def test_images_that_are_larger_than_the_first_request(
    store: Store, packed: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    local = packed("local", _own_images(folder, 12))
    url = store.put_folder("data", folder)
    sizes = [(folder / f"images/{index}.jpg").stat().st_size for index in range(12)]
    assert sum(size > first for size in sizes) in ((12,) if first == 100 else range(1, 12))
    stage, requested = _WriteStage(), list[tuple[str, str]]()

    def note(environ: dict[str, Any]) -> None:
        if stage.began and environ["REQUEST_METHOD"] == "GET" and "/images/" in environ["PATH_INFO"]:
            requested.append((environ["PATH_INFO"], environ["HTTP_RANGE"]))

    monkeypatch.setattr(storage_reader, "READ_AHEAD", first)
    monkeypatch.setattr(store, "intercept", note)
    assert contents(packed("remote", f"{url}/own.jsonl", progress=stage)) == contents(local)
    ranges = [(f"/bucket/data/images/{index}.jpg", f"bytes=0-{size - 1}") for index, size in enumerate(sizes)]
    assert sorted(requested) == sorted(ranges)


def test_a_file_of_several_blocks_is_read_with_one_request(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_reader, "READ_AHEAD", 1000)  # its bytes are not kept
    reference = MediaReference(path="a.bin", root=store.url("data"))
    for size in (300_000, 400_000):
        content = random.Random(size).randbytes(size)
        store.put("data/a.bin", content)
        with store.counted() as traffic:
            assert reference.read() == content  # of the new object, not of the status a moment ago
        assert traffic.requests == ["HEAD /bucket/data/a.bin", "GET /bucket/data/a.bin"]


def test_an_image_that_changes_while_it_is_written_is_named(
    store: Store, packed: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _own_images(folder, 3)
    url = store.put_folder("data", folder)
    other = (folder / "images/1.jpg").read_bytes()[:-10] + bytes(10)

    def after_writing(change: Callable[[], int | None]) -> Callable[[dict[str, Any]], int | None]:
        statuses = itertools.count()  # the first is requested to measure the image

        def intercept(environ: dict[str, Any]) -> int | None:
            request = environ["REQUEST_METHOD"], environ["PATH_INFO"]
            is_last = request == ("HEAD", "/bucket/data/images/1.jpg") and next(statuses) == 1
            return change() if is_last else None

        return intercept

    monkeypatch.setattr(store, "intercept", after_writing(lambda: 403))
    with pytest.raises(ResourceError, match="images/1.jpg: access is denied"):
        packed("refused", f"{url}/own.jsonl")
    monkeypatch.setattr(store, "intercept", after_writing(lambda: store.put("data/images/1.jpg", other) and None))
    with pytest.raises(SourceError, match=r"record 1 of .*own.jsonl changed .*replaced"):
        packed("replaced", f"{url}/own.jsonl")


@pytest.mark.parametrize("name", ["a.jsonl", "g.tar"])
def test_records_of_an_object_are_requested_at_the_same_time(
    store: Store, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    url = store.put_folder("data", folder)
    (source,) = open_sources([f"{url}/{name}"], work_dir=tmp_path)
    scanned = list(source.scan(0, source.extent()))
    storage_reader._blocks.clear()  # as in a process that has not read the file
    all_requested = threading.Barrier(4)

    def wait(environ: dict[str, Any]) -> None:
        if environ["REQUEST_METHOD"] == "GET":
            all_requested.wait(timeout=20)

    monkeypatch.setattr(store, "intercept", wait)
    rows = scanned[2:6]
    source.request([(row.address, row.size) for row in rows])
    with store.counted() as traffic:
        assert [source.read(row.address, row.size).record for row in rows] == [row.record for row in rows]
    opened = ["HEAD /bucket/data/a.jsonl"] if name == "a.jsonl" else []  # its stream, once
    assert traffic.requests == opened
    if name == "g.tar":
        storage_reader._blocks.clear()
        with store.counted() as traffic:
            assert list(source.scan(0, rows[2].address)) == scanned[:4]
        assert traffic.count("GET") == 4


def test_keys_that_are_larger_than_a_request_are_not_requested_in_advance(
    store: Store, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = store.put_folder("data", folder)
    (source,) = open_sources([f"{url}/g.tar"], work_dir=tmp_path)
    expected = list(source.scan(0, source.extent()))
    storage_reader._blocks.clear()
    monkeypatch.setattr(storage_reader, "READ_AHEAD", 1000)
    with store.counted() as traffic:
        assert list(source.scan(0, source.extent())) == expected
    assert traffic.count("GET") == 2 * 8  # headers, and contents
