"""Paths of object stores, against moto's S3 server, pathlib and Energon's EPath."""

import asyncio
import dataclasses
import hashlib
import io
import json
import multiprocessing
import os
import pickle
import random
import subprocess
import sys
import tarfile
import threading
import time
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from megatron.energon.epathlib import EPath
from multistorageclient import resolve_storage_client
from multistorageclient.types import (
    MetadataProvider,
    ProviderBundleV2,
    ResolvedPath,
    ResolvedPathState,
    StorageBackend,
    StorageProviderConfig,
)

from energon_packed import ConfigError, ResourceError
from tests.internals import (
    RemotePath,
    as_path,
    energon_url,
    open_regular,
    open_tar,
    read_content,
    read_range,
    request_objects,
    rust_client,
    status,
    statuses,
    storage,
    storage_path,
    storage_reader,
    storage_status,
    storage_threads,
)
from tests.storage import BUCKET, SECRET, Store


def test_names_are_computed_as_by_pathlib() -> None:
    path = as_path("s3://b/dir/a.tar")
    assert isinstance(path, RemotePath)
    assert str(path) == os.fspath(path) == f"{path}" == "s3://b/dir/a.tar"
    assert (path.name, path.suffix, path.stem) == ("a.tar", ".tar", "a")
    assert str(path.parent / "x" / "y") == "s3://b/dir/x/y"
    assert str(path.with_suffix(".tar.idx")) == "s3://b/dir/a.tar.idx"
    assert str(path.with_name("b.tar")) == "s3://b/dir/b.tar"
    assert str(path.relative_to(as_path("s3://b"))) == "dir/a.tar"
    assert [str(parent) for parent in path.parents] == ["s3://b/dir", "s3://b"]
    assert str(as_path("msc://profile/a/../../../b").resolve()) == "msc://profile/b"
    assert path.absolute() is path
    assert path.is_absolute()
    # A string whose slashes pathlib has joined names the same object.
    again = as_path(Path("s3://b/dir/a.tar"))
    assert again == path
    assert hash(again) == hash(path)
    assert str(again) == str(path)
    assert sorted([path, path.parent])[0] == path.parent
    assert pickle.loads(pickle.dumps(path)) == path
    assert type(pickle.loads(pickle.dumps(path))) is RemotePath


@pytest.mark.parametrize("name", ["a", "./s3", "/s3://b/k", "x/s3:/b", "file:///a", "s3", "hf://a/b"])
def test_other_strings_are_local(name: str) -> None:
    assert type(as_path(name)) is type(Path(name))


def test_objects_and_prefixes_are_files_and_folders(store: Store) -> None:
    content = random.Random(0).randbytes(5000)
    path = as_path(store.put("a/b/c.bin", content))
    assert path.exists()
    assert path.is_file()
    assert not path.is_dir()
    assert path.stat().st_size == 5000
    for folder in (path.parent, path.parent.parent, as_path(store.url())):
        assert folder.exists()
        assert folder.is_dir()
        assert not folder.is_file()
        with pytest.raises(IsADirectoryError, match=str(folder)):
            folder.open("rb")
    for missing in (path / "d", path.with_name("c"), as_path(store.url("a/b/c.bi"))):
        assert not missing.exists()
        assert not missing.is_file()
        assert not missing.is_dir()
        with pytest.raises(FileNotFoundError, match=r"No such file.*s3://bucket/a/b/c"):
            missing.stat()
        with pytest.raises(FileNotFoundError):
            missing.open("rb")
    assert path.read_bytes() == content
    store.put("a/b", b"an object with the name of a folder")
    assert path.parent.is_dir()
    assert path.parent.is_file()
    store.put("a/t.txt", "é\n".encode())
    assert as_path(store.url("a/t.txt")).read_text(encoding="utf-8") == "é\n"


def test_a_replaced_object_of_equal_size_has_another_time(store: Store) -> None:
    path = as_path(store.put("a", b"1"))
    before = path.stat().st_mtime_ns
    assert path.stat().st_mtime_ns == before
    store.put("a", b"2")
    assert path.stat().st_mtime_ns != before


def test_streams_have_the_content_of_a_local_file(store: Store, tmp_path: Path) -> None:
    rng = random.Random(1)
    content = b"".join(rng.randbytes(rng.randrange(200)) + b"\n" for _ in range(300))
    (tmp_path / "f").write_bytes(content)
    path = as_path(store.put("f", content))
    with path.open("rb", buffering=777) as remote, (tmp_path / "f").open("rb") as local:
        assert remote.readlines() == local.readlines()
        for _ in range(25):
            offset, whence, size = rng.randrange(len(content)), rng.choice((0, 2)), rng.randrange(-1, 5000)
            offset = -offset if whence == 2 else offset
            assert remote.seek(offset, whence) == local.seek(offset, whence)
            assert remote.read(size) == local.read(size)
            at, size = rng.randrange(len(content) + 100), rng.randrange(5000)
            assert read_range(remote, at, size) == content[at : at + size] == read_range(local, at, size)
            assert remote.tell() == local.tell()
        with pytest.raises(ValueError, match="negative seek position -1"):
            remote.seek(-1)
        assert remote.read(9) == local.read(9)
        assert remote.seek(len(content) + 5) == local.seek(len(content) + 5)
        assert remote.read() == local.read() == b""
    assert io.TextIOWrapper(path.open("rb"), errors="replace").read() == path.open(errors="replace").read()


def test_random_access_downloads_the_ranges_alone(store: Store) -> None:
    path = as_path(store.put("large", bytes(3 << 20)))
    stream = open_regular(path)
    with store.counted() as traffic:
        for at in range(0, 3 << 20, 1 << 19):
            assert len(read_range(stream, at, 1000)) == 1000
        assert read_range(stream, 3 << 20, 1000) == b""
    assert traffic.bytes == 6 * 1000
    assert traffic.requests == ["GET /bucket/large"] * 6
    with store.counted() as traffic, path.open("rb", buffering=1000) as buffered:
        buffered.seek(700_000)
        assert buffered.read(1) == b"\0"
    assert traffic.bytes == 1000


def test_an_open_stream_notices_a_replaced_object(store: Store, monkeypatch: Any) -> None:
    stream = open_regular(as_path(store.put("a", b"1")))
    before = status(stream)
    store.put("a", b"22")
    assert status(stream) == before  # one request for each minute of reads
    assert as_path(store.url("a")).stat().st_size == 2
    assert status(stream).st_size == 2
    store.put("a", b"333")
    assert storage.recent_status(as_path(store.url("a"))).st_size == 2
    monkeypatch.setattr(storage_status, "_FRESH", 0)
    assert storage.recent_status(as_path(store.url("a"))).st_size == 3
    assert status(stream).st_size == 3


def test_a_process_keeps_few_bytes_and_statuses(store: Store, monkeypatch: Any) -> None:
    """The newest of each: a range that it keeps is read again without a request."""
    monkeypatch.setattr(storage_reader, "_MOST_BLOCKS", 3)
    monkeypatch.setattr(storage_reader, "MOST_KEPT", 250)
    monkeypatch.setattr(storage_reader, "READ_AHEAD", 200)
    monkeypatch.setattr(storage_status, "_MOST_RECENT", 2)
    path = as_path(store.put("kept", bytes(1000)))

    def kept(*sizes: int) -> list[bool]:
        """Which of these ranges are kept, after all of them are read in this order."""
        storage_reader._blocks.clear()
        stream = open_regular(path)
        for index, size in enumerate(sizes):
            read_range(stream, 300 * index, size)
        found = []
        for index, size in reversed([*enumerate(sizes)]):
            with store.counted() as traffic:
                assert read_range(stream, 300 * index, size) == bytes(size)
            found.append(not traffic.requests)
        return found[::-1]

    assert kept(10, 10, 10) == [True, True, True]
    assert kept(10, 10, 10, 10) == [False, True, True, True]
    assert kept(100, 150) == [True, True]
    assert kept(101, 150) == [False, True]
    assert kept(200, 10) == [True, True]
    assert kept(201, 10) == [False, True]
    storage_reader._blocks.clear()
    streams = [open_regular(as_path(store.put(f"kept-{size}", bytes(size)))) for size in (100, 80, 69)]
    for stream in streams:
        read_range(stream, 0, 200)
    with store.counted() as traffic:
        assert [len(read_range(stream, 0, 200)) for stream in streams[::-1]] == [69, 80, 100]
    assert traffic.requests == []
    read_range(open_regular(as_path(store.put("kept-2", b"xx"))), 0, 2)  # 251 bytes
    with store.counted() as traffic:
        assert [len(read_range(stream, 0, 200)) for stream in streams[::-1]] == [69, 80, 100]
    assert traffic.requests == ["GET /bucket/kept-100"]

    paths = [as_path(store.put(f"{number}.recent", b"1")) for number in range(3)]
    for each in paths:
        each.stat()
    with store.counted() as traffic:
        for each in reversed(paths):
            storage.recent_status(each)
    assert traffic.requests == ["HEAD /bucket/0.recent"]


def test_empty_objects_are_read(store: Store) -> None:
    path = as_path(store.put("empty", b""))
    assert path.read_bytes() == b""
    assert path.open("rb").read() == b""
    assert read_range(open_regular(path), 0, 10) == b""


KEYS = ["a.jsonl", "b.jsonl", "b.txt", "in/a.jsonl", "in/deep/c.jsonl", "in/deep/x.tar", "out/a.jsonl", ".h/a.jsonl"]
PATTERNS = [
    *("*.jsonl", "*", "in/*", "*/a.jsonl", "**/*.jsonl", "**/a.jsonl", "in/**/*.tar", "[ab].*", "?.txt", "in/deep"),
    *("i*/d*/c.*", "none/*", "**/deep", "in/none", "*/deep/*"),
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_glob_finds_the_paths_that_pathlib_finds(store: Store, tmp_path: Path, pattern: str) -> None:
    for key in KEYS:
        store.put(f"d/{key}", b"1")
        (tmp_path / key).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / key).write_bytes(b"1")
    folder = as_path(store.url("d"))
    found = [path.relative_to(folder) for path in folder.glob(pattern)]
    assert sorted(map(str, found)) == sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob(pattern))
    everything = sorted(str(path.relative_to(tmp_path)) for path in (tmp_path / "in").rglob("*"))
    assert sorted(str(path.relative_to(folder)) for path in folder.glob("in/**")) == everything


def test_listing_shows_each_entry_once(store: Store) -> None:
    store.client.put_object(Bucket=BUCKET, Key="d/", Body=b"")  # the marker that consoles write for a folder
    for key in KEYS:
        store.put(f"d/{key}", b"1")
    folder = as_path(store.url("d"))
    assert sorted(path.name for path in folder.iterdir()) == [".h", "a.jsonl", "b.jsonl", "b.txt", "in", "out"]
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*.tar")) == ["in/deep/x.tar"]


@pytest.mark.parametrize("url", ["s3://bucket/d/k.bin", "msc://store/d/k.bin", "gs://mapped/d/k.bin"])
def test_energon_opens_the_same_object(store: Store, url: str) -> None:
    store.put("d/k.bin", b"content")
    path = as_path(url)
    assert path.read_bytes() == b"content"
    assert [str(found) for found in path.parent.iterdir()] == [url]
    assert EPath(energon_url(path)).read_bytes() == b"content"
    assert energon_url(Path("/a/b")) == "/a/b"


def _size(path: Any) -> int:
    return len(path.read_bytes())


def _sizes_of(paths: list[Any]) -> list[int]:
    return [_size(path) for path in paths]


def _sizes(path: Any) -> list[int]:
    """Sizes that a fork reads in each way, of a file that its parent has locked."""
    with storage.locked(path):
        _ahead.request([path])
        return [_size(path), _ahead.get(path), *storage.map_paths(_size, [path] * 2)]


_ahead: Any = storage.ReadAhead(_sizes_of)


def test_paths_work_after_a_fork(store: Store) -> None:
    path = as_path(store.put("a", b"12345"))
    _ahead.request([path])
    assert storage.map_paths(_size, [path] * 2) == [5, 5]  # the parent has connections and threads
    with storage.locked(path), multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map_async(_sizes, [path] * 4).get(60) == [[5] * 4] * 4


def test_a_locked_file_is_read_once() -> None:
    found: dict[Path, int] = {}
    reads: list[Path] = []

    def read(path: Path) -> None:
        with storage.locked(path):
            if path not in found:
                reads.append(path)
                time.sleep(0.05)
                found[path] = len(reads)

    with ThreadPoolExecutor(16) as threads:
        list(threads.map(read, [Path("a"), Path("b")] * 8))
    assert sorted(reads) == [Path("a"), Path("b")]
    assert not storage_threads._locks


@pytest.mark.parametrize(
    ("ranges", "requests"),
    [
        ([("a", 0, 10), ("a", 10 + 4096, 10)], 1),
        ([("a", 0, 10), ("a", 11 + 4096, 10)], 2),
        ([("a", 0, 200_000), ("a", 210_000, 10)], 1),  # 5%
        ([("a", 0, 200_000), ("a", 210_001, 10)], 2),
        ([("a", 0, 6 << 20), ("a", (6 << 20) + (256 << 10), 10)], 1),
        ([("a", 0, 6 << 20), ("a", (6 << 20) + (256 << 10) + 1, 10)], 2),
        ([("a", 0, 6 << 20), ("a", 6 << 20, 2 << 20)], 1),
        ([("a", 0, 6 << 20), ("a", 6 << 20, (2 << 20) + 1)], 2),
        ([("a", 0, 9 << 20), ("a", 1 << 20, 8 << 20)], 1),  # inside
        ([("a", 8000, 10), ("a", 0, 5000), ("a", 10, 10), ("a", 8000, 10)], 1),
        ([("b", 0, 10), ("a", 0, 10), ("b", 5, 10)], 2),
        ([("b", 990, 20), ("a", 5, 0)], 1),
        ([("b", 2000, 5)], 1),
        ([], 0),
    ],
)
def test_ranges_of_an_object_that_are_near_are_one_request(
    store: Store, ranges: list[tuple[str, int, int]], requests: int
) -> None:
    content = {"a": random.Random(2).randbytes(10 << 20), "b": random.Random(3).randbytes(1000)}
    urls = {name: store.put(f"ranges/{name}", data) for name, data in content.items()}
    with store.counted() as traffic:
        found = storage.read_ranges([(urls[name], at, size) for name, at, size in ranges])
    assert found == [content[name][at : at + size] for name, at, size in ranges]
    assert traffic.requests.count("GET /bucket/ranges/a") + traffic.requests.count("GET /bucket/ranges/b") == requests


def _with_profile(
    name: str, monkeypatch: pytest.MonkeyPatch, folder: Path, base_path: str = BUCKET, **settings: Any
) -> None:
    """Add a profile to the configuration: the bucket by the client in Rust of multi-storage-client."""
    config = json.loads(Path(os.environ["MSC_CONFIG"]).read_text())
    provider = config["profiles"]["store"]["storage_provider"]
    once = {"attempts": 1, "timeout": 5, "init_backoff_ms": 1, "max_backoff": 1}
    client = {"allow_http": True, "retry": once}
    options = provider["options"] | {"base_path": base_path, "rust_client": client}
    profile = {"storage_provider": provider | {"options": options}, "retry": {"attempts": 1}}
    config["profiles"][name] = profile | settings.pop("profile", {})
    (folder / "msc.json").write_text(json.dumps(config | settings))
    monkeypatch.setenv("MSC_CONFIG", str(folder / "msc.json"))


def test_requests_to_the_client_in_rust_share_an_event_loop(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _with_profile("rust", monkeypatch, tmp_path, f"{BUCKET}/rust")
    contents = [random.Random(seed).randbytes(100_000) for seed in range(5)]
    for index, content in enumerate(contents):
        store.put(f"rust/{index}", content)
    ranges = [(f"msc://rust/{index}", 10 * index, 1000) for index in range(5)]
    empty = store.put("rust/empty", b"").replace("s3://bucket/rust", "msc://rust")
    expected = [content[10 * index :][:1000] for index, content in enumerate(contents)]
    run = asyncio.run
    monkeypatch.setattr(asyncio, "run", None)  # multi-storage-client starts a loop for each request
    with store.counted() as traffic:
        assert storage.read_ranges(ranges) == expected
        assert RemotePath(ranges[0][0]).read_range(*ranges[0][1:]) == expected[0]
    assert sorted(traffic.requests) == [f"GET /bucket/rust/{index}" for index in (0, *range(5))]
    monkeypatch.setattr(asyncio, "run", run)
    assert storage.read_ranges([*ranges, (empty, 0, 10), (ranges[0][0], 100_000, 10)]) == [*expected, b"", b""]

    async def notebook() -> list[bytes]:
        return storage.read_ranges(ranges)

    assert run(notebook()) == expected


def test_a_fork_does_not_wait_for_the_threads_of_the_client_in_rust(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = {"replicas": [{"replica_profile": "rust-forked", "read_priority": 1}]}
    _with_profile("rust-replicated", monkeypatch, tmp_path, profile=replica)
    monkeypatch.setenv("MSC_CONFIG", str(tmp_path / "msc.json"))
    _with_profile("rust-forked", monkeypatch, tmp_path)
    path = RemotePath(store.put("forked/a", b"a" * 100).replace("s3://bucket", "msc://rust-forked"))
    store.put("forked/a.other", b"c" * 100)
    replicated = RemotePath("msc://rust-replicated/forked/a")
    assert replicated.read_bytes() == b"a" * 100
    assert _read_several(path) == [b"a" * 10, b"c" * 10]  # starts the threads
    with multiprocessing.get_context("fork").Pool(1) as pool:
        for each in (path, replicated):
            assert pool.apply_async(each.read_bytes).get(timeout=30) == b"a" * 100
        for each in (replicated, path):
            assert pool.apply_async(each.write_bytes, (b"b" * 20,)).get(timeout=30) == 20
        assert pool.apply_async(_read_several, (path,)).get(timeout=30) == [b"b" * 10, b"c" * 10]
    assert path.read_bytes() == b"b" * 20


def _read_several(path: RemotePath) -> list[bytes]:
    """Ranges that are requested together."""
    return storage.read_ranges([(str(path), 0, 10), (f"{path}.other", 0, 10)])


def test_forks_of_a_process_that_only_opened_datasets_use_the_client_in_rust(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fork of a process that has used it, which is a fork itself or not, uses the client in Python."""
    _with_profile("rust-forks", monkeypatch, tmp_path)
    for name in "ab":
        store.put(f"forks/{name}", name.encode())
    urls = [f"msc://rust-forks/forks/{name}" for name in "ab"]
    command = [sys.executable, "-m", "tests.rust_forks", *urls]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(done.stdout) == {
        "opened": False,
        "forks": [["a", "b", True], ["a", "b", False]],
        "parent": [["a", "b", True], ["a", "b", False]],
    }


def test_several_objects_or_ranges_are_requested_by_the_client_in_rust(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _with_profile("rust-several", monkeypatch, tmp_path)
    for name in "ab":
        store.put(f"several/{name}", name.encode() * 1000)
    paths = [RemotePath(f"msc://rust-several/several/{name}") for name in "ab"]
    stream = paths[0].open("rb")
    urls = [str(path) for path in paths]
    requests: list[tuple[Callable[..., None], list[Any], bool]] = [
        (request_objects, urls, True),
        (request_objects, urls[:1], False),
        (stream.request, [(0, 10), (20, 10)], True),
        (stream.request, [(0, 10)], False),
        (request_objects, [store.url(f"several/{name}") for name in "ab"], False),  # without `rust_client`
        (request_objects, [f"msc://unknown/{name}" for name in "ab"], False),  # each reader has the error
    ]
    for request, wanted, is_started in requests:
        rust_client._event_loop.cache_clear()
        request(wanted)
        assert rust_client.is_loop_started() == is_started, wanted
    with pytest.raises(ResourceError, match="msc://unknown/a: the profile 'unknown' is not configured"):
        storage.read_ranges([(f"msc://unknown/{name}", 0, 1) for name in "ab"])


class Routing(MetadataProvider):
    """Metadata provider of `Several`: the first component of a path is the backend."""

    def realpath(self, logical_path: str) -> ResolvedPath:
        backend, _, key = logical_path.partition("/")
        return ResolvedPath(key, ResolvedPathState.EXISTS, backend)


# The others are for listings and writes.
_unused: dict[str, None] = dict.fromkeys(MetadataProvider.__abstractmethods__ - {"realpath"})
_Routing: Any = type("_Routing", (Routing,), _unused)


class Several(ProviderBundleV2):
    """Profile with two backends, which a user's own Python class defines."""

    metadata_provider = _Routing()

    def __init__(self, **options: Any) -> None:
        self._options = options

    @property
    def storage_backends(self) -> dict[str, StorageBackend]:
        return {name: StorageBackend(StorageProviderConfig("s3", self._options)) for name in ("near", "far")}


def test_a_fork_of_a_profile_with_several_backends_does_not_wait_either(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _with_profile("rust-backend", monkeypatch, tmp_path)
    file = tmp_path / "msc.json"
    config = json.loads(file.read_text())
    options = config["profiles"]["rust-backend"]["storage_provider"]["options"]
    config["profiles"]["several"] = {"provider_bundle": {"type": f"{__name__}.Several", "options": options}}
    file.write_text(json.dumps(config))
    for name in ("a", "b"):
        store.put(f"backends/{name}", name.encode() * 100)
    paths = [RemotePath("msc://several/near/backends/a"), RemotePath("msc://several/far/backends/b")]
    assert [path.read_bytes() for path in paths] == [b"a" * 100, b"b" * 100]
    with multiprocessing.get_context("fork").Pool(1) as pool:
        for path, content in zip(paths, (b"a", b"b"), strict=True):
            assert pool.apply_async(path.read_bytes).get(timeout=30) == content * 100


def test_a_failed_request_is_repeated_and_named_by_the_client_in_rust_alone(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _with_profile("rust-fails", monkeypatch, tmp_path)
    for name in "ab":
        store.put(f"failing/{name}", name.encode() * 1000)
    ranges = [(f"msc://rust-fails/failing/{name}", 0, 1000) for name in "ab"]
    failures = iter([503])
    with monkeypatch.context() as patch:
        patch.setattr(
            store, "intercept", lambda request: next(failures, None) if request["PATH_INFO"][-1] == "b" else None
        )
        assert storage.read_ranges(ranges) == [b"a" * 1000, b"b" * 1000]
    refused = pytest.raises(ResourceError, match=r"rust-fails/failing/b: the object store cannot be read \(503")
    with store.failing(503, "failing/b"), store.counted() as traffic, refused:
        storage.read_ranges(ranges)
    assert traffic.requests.count("GET /bucket/failing/b") == 2  # the client in Rust repeats it once, and nothing else
    with (
        store.failing(403, "failing/b"),
        pytest.raises(ResourceError, match=r"rust-fails/failing/b: access is denied"),
    ):
        storage.read_ranges(ranges)
    with pytest.raises(FileNotFoundError, match="failing/c"):
        storage.read_ranges([*ranges, ("msc://rust-fails/failing/c", 0, 10)])


def test_a_client_in_rust_with_other_arguments_is_a_fault_of_the_package(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _with_profile("rust-changed", monkeypatch, tmp_path)
    paths = [RemotePath(f"msc://rust-changed/{name}") for name in "ab"]
    client, _ = paths[0]._client()

    class Changed:
        async def get(self, path: str) -> bytes:
            return b"x"

    monkeypatch.setitem(rust_client._clients, client._storage_provider, Changed())
    for read in (lambda: storage.read_ranges([(str(path), 0, 1) for path in paths]), paths[0].read_bytes):
        with pytest.raises(ConfigError, match="`multi-storage-client` must be a version that energon-packed knows"):
            read()


def test_threads_that_use_a_profile_first_keep_its_client_in_rust(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _with_profile("rust-threads", monkeypatch, tmp_path)
    client, key = resolve_storage_client("msc://rust-threads/k")
    is_enabled = client._is_rust_client_enabled

    def moved_by_another_thread() -> bool:
        found = is_enabled()
        monkeypatch.setattr(client, "_is_rust_client_enabled", is_enabled)
        rust_client.prepare_client(client)
        return found

    monkeypatch.setattr(client, "_is_rust_client_enabled", moved_by_another_thread)
    rust_client.prepare_client(client)
    assert rust_client.rust_key(client, key) is not None


def test_a_cache_of_a_profile_answers_in_place_of_the_client_in_rust(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = {"location": str(tmp_path / "cache"), "size": "100M", "check_source_version": False}
    _with_profile("rust-cached", monkeypatch, tmp_path, cache=cache, profile={"caching_enabled": True})
    for name in "ab":
        store.put(f"cached/{name}", name.encode() * 1000)
    ranges = [(f"msc://rust-cached/cached/{name}", 0, 1000) for name in "ab"]
    assert storage.read_ranges(ranges) == [b"a" * 1000, b"b" * 1000]
    with store.counted() as traffic:
        assert storage.read_ranges(ranges) == [b"a" * 1000, b"b" * 1000]
    assert traffic.requests == []


def test_a_replica_of_a_profile_answers_in_place_of_the_client_in_rust(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = {"replicas": [{"replica_profile": "store", "read_priority": 1}]}
    _with_profile("rust-replica", monkeypatch, tmp_path, f"{BUCKET}/far", profile=replica)
    urls = [f"msc://rust-replica/near/{name}" for name in "ab"]
    for name in "ab":
        store.put(f"near/{name}", name.encode() * 1000)
    with store.counted() as traffic:
        assert storage.read_ranges([(url, 1, 1000) for url in urls]) == [b"a" * 999, b"b" * 999]
    assert not any("/far/" in request for request in traffic.requests if request.startswith("GET"))


def test_the_client_is_imported_on_first_use_only() -> None:
    code = (
        "import sys; from tests.internals import as_path; as_path('s3://b/k').parent;"
        "print([m for m in ('multistorageclient', 'boto3') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def _tar(sizes: list[int]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for index, size in enumerate(sizes):
            info = tarfile.TarInfo(f"{index:06d}.bin")
            info.size = size
            tar.addfile(info, io.BytesIO(bytes([index % 255 + 1]) * size))
    return out.getvalue()


@pytest.mark.parametrize(
    ("sizes", "requests", "share"),
    [
        ([2000] * 2000, 5, 1.1),  # 5 MB of small members: all of it, in few requests
        ([3 << 20] * 5, 9, 0.45),  # large members: little more than their headers
        ([100, 3 << 20] * 4, 9, 0.45),
    ],
)
def test_headers_of_a_remote_tar_need_few_requests_and_bytes(
    store: Store, tmp_path: Path, sizes: list[int], requests: int, share: float
) -> None:
    content = _tar(sizes)
    (tmp_path / "a.tar").write_bytes(content)
    path = as_path(store.put("a.tar", content))
    with store.counted() as traffic, open_tar(path) as tar:
        members = list(tar)
    with open_tar(tmp_path / "a.tar") as tar:
        assert members == list(tar)
    assert traffic.count("GET") <= requests
    assert traffic.bytes < share * len(content)
    with store.counted() as traffic:
        assert read_content(path, members[0]) == read_content(tmp_path / "a.tar", members[0])
    assert traffic.bytes in (0, members[-1].size)  # 0 if a range that was requested before has it


def test_refused_and_failed_requests_are_one_line_with_the_remedy(store: Store) -> None:
    path = as_path(store.put("a", b"1"))
    cases = {
        403: r"^s3://bucket/a: access is denied \(403.*\); check the credentials, and the permissions of the bucket$",
        503: r"^s3://bucket/a: the object store cannot be read \(503.*\); check the endpoint and the network, ",
    }
    for code, message in cases.items():
        with store.failing(code, "a"):
            for function in (path.stat, path.exists, path.is_file, path.read_bytes, lambda: path.open("rb").read()):
                with pytest.raises(ResourceError, match=message) as caught:
                    function()
                assert "\n" not in str(caught.value)
                assert SECRET not in str(caught.value)
                assert isinstance(pickle.loads(pickle.dumps(caught.value)), ResourceError)
                assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_missing_bucket_is_named(store: Store) -> None:
    with pytest.raises(ResourceError, match=r"s3://no-such-bucket/a: the bucket does not exist; check its name"):
        list(as_path("s3://no-such-bucket/a").iterdir())


def test_an_unknown_profile_and_a_missing_package_have_a_remedy(store: Store, monkeypatch: Any) -> None:
    with pytest.raises(ResourceError, match=r"msc://nowhere/a: the profile 'nowhere' is not configured .*MSC_CONFIG"):
        as_path("msc://nowhere/a").exists()
    import multistorageclient.providers as providers

    monkeypatch.setattr(providers, "_imports", {})
    monkeypatch.delitem(sys.modules, "multistorageclient.providers.s3", raising=False)
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(ResourceError, match=r"package boto3 is not installed; .*pip install 'energon-packed\[s3\]'"):
        as_path("s3://other-bucket/a").exists()


def test_a_server_that_cannot_be_reached_is_named(store: Store, monkeypatch: Any) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(ResourceError, match=r"s3://unreached/a: .*EndpointConnectionError.*check the endpoint"):
        as_path("s3://unreached/a").exists()


def test_missing_credentials_and_an_invalid_configuration_are_reported_without_its_content(
    store: Store, tmp_path: Path, monkeypatch: Any
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    with pytest.raises(
        ResourceError, match=r"s3://anonymous/a: access is denied \(NoCredentialsError\); check the cred"
    ):
        as_path("s3://anonymous/a").exists()
    (tmp_path / "msc.json").write_text(f'{{"profiles": {{"p": {{"access_key": "{SECRET}"}}}}}}')
    monkeypatch.setenv("MSC_CONFIG", str(tmp_path / "msc.json"))
    with pytest.raises(
        ResourceError, match=r"msc://p/a: cannot be used with this configuration .*MSC_CONFIG"
    ) as caught:
        as_path("msc://p/a").exists()
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("key", ["a b/ü#x?.bin", "p%20q.bin", "x;y=1.bin", "+&=.bin"])
def test_keys_are_not_urls(store: Store, key: str) -> None:
    path = as_path(store.put(key, b"123"))
    assert path.read_bytes() == b"123"
    assert path.stat().st_size == 3
    assert path in list(path.parent.iterdir())
    assert EPath(energon_url(path)).read_bytes() == b"123"


def test_writing_is_refused(store: Store) -> None:
    path = as_path(store.url("new"))
    for write in (lambda: path.write_text("1"), lambda: path.open("wb")):
        with pytest.raises(ValueError, match=r"s3://bucket/new must be a local path to be written"):
            write()


def test_objects_are_uploaded_and_deleted(store: Store, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"content")
    path = as_path(store.url("f"))
    path.upload(tmp_path / "f")
    assert path.read_bytes() == b"content"
    digest = hashlib.sha256(b"content").hexdigest()
    assert store.client.head_object(Bucket=BUCKET, Key="f")["Metadata"] == {"sha256": digest}
    assert path.stored() == (7, digest)
    assert as_path(store.put("plain", b"12")).stored() == (2, None)
    path.unlink()
    path.unlink()
    assert not path.exists()
    assert path.write_bytes(b"other") == 5
    moved = path.rename(path.with_name("moved"))
    assert (moved.read_bytes(), moved.stored()) == (b"other", (5, hashlib.sha256(b"other").hexdigest()))
    assert not path.exists()
    assert PurePosixPath(path).name == "f"


@pytest.mark.parametrize("has_conditions", [True, False])
def test_the_first_writer_creates_an_object(store: Store, monkeypatch: Any, has_conditions: bool) -> None:
    path = as_path(store.url(f"created-{has_conditions}"))
    with monkeypatch.context() as patch:
        if not has_conditions:
            patch.setattr(storage_path, "private", lambda *names: None)
        assert path.create(b"first")
        assert not path.create(b"second")
    assert path.read_bytes() == b"first"


def test_uploads_below_a_prefix_are_aborted(store: Store) -> None:
    for key in ("up/a", "up/in/b", "upper/c"):
        store.client.create_multipart_upload(Bucket=BUCKET, Key=key)
    as_path(store.url("up")).abort_uploads()
    left = store.client.list_multipart_uploads(Bucket=BUCKET)["Uploads"]
    assert [upload["Key"] for upload in left] == ["upper/c"]
    as_path(store.url("upper")).abort_uploads()


def test_values_are_read_ahead_in_the_background() -> None:
    groups: list[list[int]] = []
    gate = threading.Event()

    def read(keys: list[int]) -> list[int]:
        groups.append(keys)
        assert gate.wait(60)
        if 3 in keys:
            raise ResourceError("3")
        return [key * key for key in keys]

    ahead = storage.ReadAhead(read, limit=4, group=2)
    ahead.request([0, 1, 2, 2, 3])
    ahead.request(range(4))
    gate.set()
    assert [ahead.get(key) for key in (1, 0, 9)] == [1, 0, 81]
    assert sorted(groups) == [[0, 1], [2, 3], [9]]  # each key once, of both requests
    assert ahead.get(2) == 4  # of a group that fails
    with pytest.raises(ResourceError, match="3"):
        ahead.get(3)
    assert groups[3:] == [[2], [3]]
    groups.clear()
    ahead.request(range(10, 20))  # more than the limit, at once
    assert [ahead.get(key) for key in range(10, 20)] == [key * key for key in range(10, 20)]
    assert sorted(groups) == [[key, key + 1] for key in range(10, 20, 2)]


def test_a_group_of_values_is_complete_before_it_is_read_ahead() -> None:
    groups: list[list[int]] = []

    def read(keys: list[int]) -> list[int]:
        groups.append(keys)
        return list(keys)

    ahead = storage.ReadAhead(read, group=3)
    for key in range(7):
        ahead.request(range(key, min(key + 5, 7)))
        assert ahead.get(key) == key
    assert sorted(groups) == [[0, 1, 2], [3, 4], [5, 6]]
    assert not ahead._futures


def test_old_values_are_forgotten() -> None:
    ahead = storage.ReadAhead(list, limit=4)
    for key in range(20, 30):
        ahead.request([key])
    assert [*ahead._futures] == [26, 27, 28, 29]
    copy = pickle.loads(pickle.dumps(storage.ReadAhead(list, limit=3, group=2)))
    for key in range(5):
        copy.request([key, key + 10])
    assert [*copy._futures] == [13, 4, 14]


def test_a_value_is_not_kept_after_it_was_read() -> None:
    ahead = storage.ReadAhead(lambda keys: [{key} for key in keys], group=2)
    ahead.request([0, 1])
    value = weakref.ref(ahead.get(0))  # while the other value of its group is kept
    assert value() is None
    assert ahead.get(1) == {1}


def test_requests_of_many_paths_overlap_and_keep_their_order(store: Store) -> None:
    paths = [as_path(store.put(f"n/{number}", bytes(number))) for number in range(32)]
    waiting = threading.Barrier(len(paths), timeout=60)  # breaks if fewer requests are sent at a time

    def size(path: Path) -> int:
        waiting.wait()
        return path.stat().st_size

    assert storage.map_paths(size, paths) == list(range(32))
    own, local = threading.get_ident(), [Path("a"), Path("b")]
    assert storage.map_paths(lambda path: threading.get_ident(), local) == [own, own]
    assert storage.map_paths(lambda path: threading.get_ident(), paths[:1]) == [own]
    names = storage.map_paths(lambda path: threading.current_thread().name, [*local, paths[0]], purpose="datasets")
    assert all(name.startswith("energon-packed-datasets") for name in names)


def test_the_status_of_many_objects_needs_one_listing(store: Store, tmp_path: Path) -> None:
    paths = [as_path(store.put(f"many/{number}.tar", bytes(number + 1))) for number in range(20)]
    alone = as_path(store.put("alone/a.tar", b"a"))
    store.put("many/inner/x.tar", b"x")
    (tmp_path / "local").write_bytes(b"local")
    absent = [paths[0].with_name("absent.tar"), tmp_path / "absent", tmp_path / "local" / "below a file"]
    wanted = {path: stamp(path.stat()) for path in [*paths, alone, tmp_path / "local"]}
    storage_status._recent.clear()
    with store.counted() as traffic:
        found = statuses([*wanted, *absent])
    assert {path: stamp(status) for path, status in found.items()} == wanted
    assert [request for request in traffic.requests if "/many/" in request and "absent" not in request] == [
        "HEAD /bucket/many/0.tar",
    ]
    assert len(traffic.requests) < 10
    assert traffic.requests.count("LIST /bucket") == 3  # two for `many`, and one for absent.tar: it could be a folder
    with store.counted() as traffic:  # of each object, not only of the first
        assert [stamp(storage.recent_status(path)) for path in paths] == [wanted[path] for path in paths]
    assert not traffic.requests


def test_the_statuses_of_local_files_need_little_memory(tmp_path: Path) -> None:
    paths = [tmp_path / str(number) for number in range(500)]
    for path in paths:
        path.touch()
    tracemalloc.start()
    found = statuses(paths)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert {path: stamp(status) for path, status in found.items()} == {path: stamp(path.stat()) for path in paths}
    assert used / len(paths) < 450  # bytes; the status that the system reports has 640


def test_a_listing_with_other_etags_is_not_used(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [as_path(store.put(f"etags/{number}.tar", bytes(number + 1))) for number in range(5)]
    listed = RemotePath.entries

    def entries(self: Any, **options: Any) -> Any:  # as of GCS, whose objects have a generation instead
        return ((path, dataclasses.replace(info, etag="other")) for path, info in listed(self, **options))

    monkeypatch.setattr(RemotePath, "entries", entries)
    assert {path: stamp(status) for path, status in statuses(paths).items()} == {
        path: stamp(path.stat()) for path in paths
    }


def test_objects_after_many_others_are_asked(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [as_path(store.put(f"late/{number}.tar", bytes(number + 1))) for number in range(5)]
    listed = RemotePath.entries
    monkeypatch.setattr(RemotePath, "entries", lambda self, **options: list(listed(self, **options))[1:])
    assert [statuses(paths)[path].st_size for path in paths] == [1, 2, 3, 4, 5]


def test_a_folder_is_not_the_object_of_its_name(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [as_path(store.put(f"both/{number}.tar", bytes(number + 1))) for number in range(5)]
    listed = RemotePath.entries

    def entries(path: Any, **options: Any) -> Iterator[tuple[Any, Any]]:
        found = list(listed(path, **options))
        yield from found
        yield found[3][0], dataclasses.replace(found[3][1], type="directory", content_length=0)

    monkeypatch.setattr(RemotePath, "entries", entries)
    assert [statuses(paths)[path].st_size for path in paths] == [1, 2, 3, 4, 5]


def test_without_permission_to_list_objects_are_asked(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [as_path(store.put(f"unlisted/{number}.tar", bytes(number + 1))) for number in range(5)]
    monkeypatch.setattr(store, "intercept", lambda environ: 403 if "list-type=" in environ["QUERY_STRING"] else None)
    assert [statuses(paths)[path].st_size for path in paths] == [1, 2, 3, 4, 5]


def stamp(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns
