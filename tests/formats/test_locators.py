"""Locators written by hand: each field, the folders that moved, and the sample that a message names."""

import json
import os
import resource
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from blake3 import blake3

from energon_packed import ConfigError, DataChangedError, FormatError, ResourceError
from tests.internals import references
from tests.storage import Store

CONTENT = bytes(range(256))


def digest(data: bytes) -> str:
    return blake3(data).hexdigest(length=16)


def locator(file: object, offset: int = 0, size: int = 5, **more: Any) -> dict[str, Any]:
    return {
        "file": str(file),
        "offset": offset,
        "size": size,
        "digest": digest(CONTENT[offset : offset + size]),
    } | more


def raw(folder: Path, located: Any, **parts: Any) -> dict[str, Any]:
    """Parts of a pack, as the reader of shards returns them."""
    return {"__key__": "k", "__folder__": folder, **parts, "media.json": json.dumps(located).encode()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("data/a.bin", "data/deep/b.bin", "out/c.bin"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(CONTENT)
    return tmp_path / "out"


def test_a_digest_is_that_of_b3sum(folder: Path) -> None:
    # A vector of the reference implementation: 0, 1, .., 250, 0, 1, .. in 1,025 bytes.
    # https://github.com/BLAKE3-team/BLAKE3/blob/master/test_vectors/test_vectors.json
    (folder / "vector").write_bytes(content := bytes(i % 251 for i in range(1025)))
    located = {"img0_0.bin": locator("vector", 0, 1025, digest="d00278ae47eb27b34faecf67b4fe263f")}
    assert references.complete_parts(raw(folder, located))["img0_0.bin"] == content


def test_a_locator_has_the_keys_that_are_set() -> None:
    assert references.Locator("f", 0, 5, digest="d").as_dict() == {"file": "f", "offset": 0, "size": 5, "digest": "d"}


# --- the parts of a pack -------------------------------------------------------------------------------------------


def test_located_parts_are_in_their_order_after_the_others(folder: Path) -> None:
    status = (folder / "c.bin").stat()
    changed = [status.st_size, status.st_mtime_ns]
    located = {
        "img0_0.bin": locator(folder.parent / "data/a.bin", 3, 7),
        "img0_1.bin": None,
        "img0_2.bin": locator("c.bin", 9, 4, digest=None, changed=changed),
        "img0_3.bin": locator("../data/deep/b.bin", 0, 0),
        "img0_4.bin": None,
    }
    del located["img0_2.bin"]["digest"]  # type: ignore[union-attr]
    parts = {"img0_1.bin": b"in the tar", "json": b"{}"}
    expected = {
        "__key__": "k", "__folder__": folder, "json": b"{}",
        "img0_0.bin": CONTENT[3:10], "img0_1.bin": b"in the tar", "img0_2.bin": CONTENT[9:13], "img0_3.bin": b"",
    }  # fmt: skip
    found = references.complete_parts(raw(folder, located, **parts))
    assert list(found.items()) == list(expected.items())
    paths = {
        "img0_0.bin": str(folder.parent / "data/a.bin"),
        "img0_2.bin": str(folder / "c.bin"),
        "img0_3.bin": str(folder.parent / "data/deep/b.bin"),
    }
    found = references.complete_parts(raw(folder, located, **parts), with_paths=True)
    assert found == expected | {"__paths__": paths}
    assert list(found["__paths__"]) == list(paths)
    assert references.located_names(raw(folder, located, **parts)) == set(paths)
    is_open = len(os.listdir("/proc/self/fd"))
    references.complete_parts(raw(folder, located, **parts))  # the files of parts of a file are kept, those of one not
    assert len(os.listdir("/proc/self/fd")) == is_open
    images = references.located_images(raw(folder, located, **parts))
    assert {name: (image.path, image.offset, image.size) for name, image in images.items()} == {
        name: (paths[name], located[name]["offset"], located[name]["size"]) for name in paths  # type: ignore[index]
    }  # fmt: skip
    assert [image.packed.changed for image in images.values()] == [None, changed, None]
    assert [image.packed.digest for image in images.values()] == [digest(CONTENT[3:10]), None, digest(b"")]


def test_links_of_the_folder_are_followed_once_for_a_pack(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = raw(folder, {f"img0_{number}.bin": locator("c.bin") for number in range(9)})
    follow, followed = os.path.realpath, []
    monkeypatch.setattr(os.path, "realpath", lambda path, **options: followed.append(path) or follow(path, **options))
    references.complete_parts(parts, with_paths=True)
    assert len(followed) == 1


def test_a_pack_without_locators_is_unchanged(folder: Path) -> None:
    parts = {"__key__": "k", "json": b"{}"}
    for found in (references.complete_parts(parts, with_paths=True), references.emptied(parts, lambda name: True)):
        assert found == parts
        assert found is not parts
    assert references.located_names(parts) == set()


def test_parts_that_are_left_out_are_empty_and_not_read(folder: Path) -> None:
    located = {"img0_0.bin": locator("missing.bin"), "img0_1.bin": locator("c.bin"), "vid0_0.bin": None}
    parts = raw(folder, located, json=b"{}", **{"vid0_0.bin": b"video"})
    found = references.emptied(parts, lambda name: name.endswith("0_0.bin"))
    assert json.loads(found.pop("media.json")) == {"img0_1.bin": located["img0_1.bin"]}
    left = {name: part for name, part in parts.items() if name != "media.json"}
    assert found == left | {"img0_0.bin": b"", "vid0_0.bin": b""}
    whole = references.complete_parts(references.emptied(parts, lambda name: name == "img0_0.bin"))
    assert (whole["img0_0.bin"], whole["img0_1.bin"], whole["vid0_0.bin"]) == (b"", CONTENT[:5], b"video")
    with pytest.raises(FormatError, match="is damaged"):
        references.emptied(raw(folder, []), lambda name: True)


def test_a_change_is_an_error_or_an_empty_part(folder: Path) -> None:
    located = {"vid1_0.bin": locator("c.bin", 1, digest="0" * 32), "img0_0.bin": locator("no.bin")}
    parts = raw(folder, located, json=b'{"ids": ["first", "second"]}')
    with pytest.raises(DataChangedError) as raised:
        references.complete_parts(parts)
    place = "k: vid1_0.bin, a video of sample 1 (second)"
    assert str(raised.value).startswith(f"{place}, is not the packed video: {folder / 'c.bin'} has other bytes. ")
    changes: set[str] = {"before"}
    found = references.complete_parts(parts, changes)
    assert (found["vid1_0.bin"], found["img0_0.bin"]) == (b"", b"")
    missing = f"{folder / 'no.bin'} does not exist (No such file or directory)"
    other = locator("c.bin", changed=[256, 1])
    del other["digest"]
    with pytest.raises(DataChangedError, match="c.bin has another size or time of change"):
        references.complete_parts(raw(folder, {"img0_0.bin": other}))
    assert changes == {"before", f"{folder / 'c.bin'} has other bytes", missing}
    packed = references.located_images(parts)["img0_0.bin"].packed
    assert packed == ("k: img0_0.bin, an image of sample 0 (first)", digest(CONTENT[:5]), None, "image")
    assert references.located_images(parts)["vid1_0.bin"].packed.kind == "video"


@pytest.mark.parametrize("offset", [0, 1])
def test_a_size_past_the_end_of_the_file_allocates_no_memory(folder: Path, offset: int) -> None:
    parts = raw(folder, {"img0_0.bin": locator("c.bin", offset, 1 << 29)})
    tracemalloc.start()
    try:
        with pytest.raises(DataChangedError, match=f"c.bin has 256 bytes and ends before byte {(1 << 29) + offset}"):
            references.complete_parts(parts)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_file_that_cannot_be_read_is_no_change(folder: Path) -> None:
    parts = raw(folder, {"img0_0.bin": locator("c.bin")})
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(free := os.dup(0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))  # no further file can be opened
    try:
        with pytest.raises(ResourceError) as raised:
            references.complete_parts(parts, set())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert str(raised.value).startswith("k: img0_0.bin, an image of sample 0, cannot be read: ")
    assert "c.bin" in str(raised.value)


@pytest.mark.parametrize(
    ("part", "content", "expected"),
    [
        ("img1_0.bin", b'{"ids": ["a", "b"]}', "an image of sample 1 (b)"),
        ("img2_0.bin", b'{"ids": ["a", "b"]}', "an image of sample 2"),
        ("img0_0.bin", b'{"ids": "ab"}', "an image of sample 0"),
        ("img1_3.bin", b'{"samples": [{"id": "a"}, {"id": "b"}]}', "an image of sample 1 (b)"),
        ("vid0_0.bin", b'{"samples": [{"id": "a"}]}', "a video of sample 0 (a)"),
        ("vid12_0.bin", b'{"samples": [], "id": "single"}', "a video of sample 12"),
        ("img0_0.bin", b'{"id": "single"}', "an image of sample 0 (single)"),
        ("img0_0.bin", {"id": "single"}, "an image of sample 0 (single)"),
        ("img0_0.bin", b'{"samples": [5]}', "an image of sample 0"),
        ("img0_0.bin", b'{"id": null}', "an image of sample 0"),
        ("img0_0.bin", b"[]", "an image of sample 0"),
        ("img0_0.bin", b"no json", "an image of sample 0"),
        ("img0_0.bin", None, "an image of sample 0"),
        ("imgx.bin", b'{"ids": ["a", "b"]}', "an image of sample x.bin"),
    ],
)
def test_a_message_names_the_sample(folder: Path, part: str, content: Any, expected: str) -> None:
    parts = raw(folder, {part: locator("no.bin")}) | ({} if content is None else {"json": content})
    with pytest.raises(DataChangedError) as raised:
        references.complete_parts(parts)
    assert str(raised.value).startswith(f"k: {part}, {expected}, is not the packed ")
    if not isinstance(content, dict):
        packed = references.located_images(parts)[part].packed
        assert packed.place == f"k: {part}, {expected}"


def test_a_pack_is_in_the_folder_of_its_source_or_the_working_directory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = raw(folder, {"img0_0.bin": locator("c.bin")})
    del parts["__folder__"]
    with pytest.raises(DataChangedError, match=f"{os.getcwd()}/c.bin does not exist"):
        references.complete_parts(parts)
    with pytest.raises(DataChangedError, match=f"{os.getcwd()}/c.bin does not exist"):
        references.complete_parts(parts | {"__sources__": ()})
    sources = tuple(SimpleNamespace(dataset_path=path) for path in (folder, "elsewhere"))
    assert references.complete_parts(parts | {"__sources__": sources})["img0_0.bin"] == CONTENT[:5]
    assert references.complete_parts(parts | {"__sources__": sources[1:], "__folder__": folder})
    link = folder.parent / "link"
    link.symlink_to(folder / "..", target_is_directory=True)  # `..` is of the folder that the link leads to
    parts = raw(link / "out", {"img0_0.bin": locator("../data/a.bin")})
    assert references.complete_parts(parts)["img0_0.bin"] == CONTENT[:5]
    inner = folder / "inner"
    inner.symlink_to(folder.parent / "data/deep", target_is_directory=True)
    parts = raw(inner, {"img0_0.bin": locator("../a.bin")})
    assert references.complete_parts(parts)["img0_0.bin"] == CONTENT[:5]


# --- media.json ----------------------------------------------------------------------------------------------------

GOOD = locator("a.bin")
TIME = {name: value for name, value in GOOD.items() if name != "digest"} | {"changed": [5, 6]}
END = 1 << 63


@pytest.mark.parametrize(
    "value",
    [
        GOOD, TIME, GOOD | {"changed": None}, TIME | {"digest": None}, GOOD | {"source": "files", "member": "a"},
        GOOD | {"size": 1 << 30}, GOOD | {"size": 0}, GOOD | {"offset": END - 6},
        GOOD | {"offset": END - 1, "size": 0}, TIME | {"digest": None, "source": "files", "member": "a"},
    ],
)  # fmt: skip
def test_locators_of_every_form(value: dict[str, Any]) -> None:
    located = {"img0_0.bin": value, "img0_1.bin": None}
    expected = {"img0_0.bin": references.Locator(**value), "img0_1.bin": None}
    text = json.dumps(located)
    for content in (text, text.encode(), bytearray(text.encode()), memoryview(text.encode()), located):
        assert references.read_locators({"__key__": "k", "media.json": content, "img0_1.bin": b""}) == expected


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (5, "a locator is int, not dict"),
        ({"file": "a", "offset": 0}, "is not a locator"),
        ({"file": "a", "offset": 0, "size": 0}, "has no digest"),
        ({"file": "a", "size": 0}, "is not a locator"),
        ({"offset": 0, "size": 0}, "is not a locator"),
        (GOOD | {"more": 1}, "is not a locator"),
        (GOOD | {"offset": True}, "is not a locator"),
        (GOOD | {"offset": 1.0}, "is not a locator"),
        (GOOD | {"size": True}, "is not a locator"),
        (GOOD | {"size": "5"}, "is not a locator"),
        (GOOD | {"file": 5}, "is not a locator"),
        (GOOD | {"file": ""}, "'' is not the path of a file"),
        (GOOD | {"file": "a\0b"}, r"'a\\x00b' is not the path of a file"),
        (GOOD | {"offset": -1}, "a file has 5 bytes from byte -1"),
        (GOOD | {"size": -1}, "a file has -1 bytes from byte 0"),
        (GOOD | {"size": (1 << 30) + 1}, "a file has 1073741825 bytes from byte 0"),
        (GOOD | {"offset": END - 5}, "a file has 5 bytes from byte"),
        (GOOD | {"digest": None}, "has no digest"),
        (GOOD | {"digest": "0" * 31}, "has no digest"),
        (GOOD | {"digest": "0" * 33}, "has no digest"),
        (GOOD | {"digest": 5}, "has no digest"),
        (GOOD | {"digest": [0] * 32}, "has no digest"),
        (GOOD | {"changed": [5, 6]}, "has no digest"),
        (TIME | {"changed": [5]}, "has no digest"),
        (TIME | {"changed": [5, 6, 7]}, "has no digest"),
        (TIME | {"changed": [True, 6]}, "has no digest"),
        (TIME | {"changed": [5, "6"]}, "has no digest"),
        (TIME | {"changed": "56"}, "has no digest"),
        (TIME | {"changed": None}, "has no digest"),
    ],
)
def test_a_damaged_locator_is_named(value: Any, problem: str) -> None:
    with pytest.raises(FormatError, match=rf"^k\.media\.json is damaged \(.*{problem}.*\); pack the data again$"):
        references.read_locators({"__key__": "k", "media.json": json.dumps({"img0_0.bin": value})})


@pytest.mark.parametrize("content", [b"[]", b"5", b"{", b"\xff", b'{"a": ' + b"[" * 3000, [GOOD], 5, None])
def test_a_damaged_media_json_is_one_short_line(content: Any) -> None:
    with pytest.raises(FormatError, match=r"^k\.media\.json is damaged \([^\n]{1,200}\); pack the data again$"):
        references.read_locators({"__key__": "k", "media.json": content})


def test_a_locator_replaces_no_other_part() -> None:
    for name in ("__key__", "__other", "json"):
        content = {"__key__": "k", "json": b"{}", "media.json": {name: GOOD}}
        with pytest.raises(FormatError, match=f"'{name}' is in the tar, or is not the name of an image"):
            references.read_locators(content)
    for named in ({5: GOOD}, {"__other": None}):
        with pytest.raises(FormatError, match="is not the name of an image"):
            references.read_locators({"__key__": "k", "media.json": named})
    assert references.read_locators({"__key__": "k", "json": b"{}", "media.json": {"json": None}}) == {"json": None}


# --- folders that moved --------------------------------------------------------------------------------------------


def test_inner_folders_are_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert references.moved_folders(None) == references.moved_folders({}) == ()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "new").mkdir()
    moved = {"/b/": "new", Path("/a"): tmp_path / "new/", "/a/in/../deep": "new", "old": "new"}
    new = str(tmp_path / "new")
    expected = ((str(tmp_path / "old"), new), ("/a/deep", new), ("/a", new), ("/b", new))
    assert references.moved_folders(moved) == expected
    assert references.moved_folders(dict(reversed(moved.items()))) == expected
    assert references.moved_folders({"/a": new, "/a/": new}) == (("/a", new),)


@pytest.mark.parametrize(
    ("moved", "message"),
    [
        ("a=b", "must map old folders to new folders, got 'a=b'"),
        ([("/a", "/")], "must map old folders to new folders"),
        ({5: "/"}, "must map old folders to new folders, got {5: '/'}"),
        ({"/a": 5}, "must map old folders to new folders, got {'/a': 5}"),
        ({"/a": None}, "must map old folders to new folders"),
        ({"/a\0": "/"}, "must map old folders to new folders"),
        ({"/a": "/\0"}, "must map old folders to new folders"),
        ({"/a": "/no/folder"}, "must name folders that exist, got /no/folder for /a"),
        ({"/a": "/", "/a/": "/tmp"}, "must have one new folder for /a, got / and /tmp. Remove one"),
    ],
)
def test_a_bad_media_root_is_named(moved: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        references.moved_folders(moved)
    if not isinstance(moved, str) or "=" not in moved:
        with pytest.raises(ConfigError, match=message):
            references.set_media_root(moved)


def test_media_roots_of_the_command_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert references.parse_media_root("/a=/b") == {"/a": "/b"}
    assert references.parse_media_root(["a=/b=c/", "/d/=e", "/d=e"]) == {
        str(tmp_path / "a"): "/b=c",
        "/d": str(tmp_path / "e"),
    }
    assert references.parse_media_root([]) == {}
    for value in ("a", "a=", "=b", "=", ""):
        with pytest.raises(ConfigError, match=f"must be OLD=NEW, got '{value}'"):
            references.parse_media_root(["/a=/b", value])
    with pytest.raises(ConfigError, match="must have one new folder for /a, got /b and /c. Remove one"):
        references.parse_media_root(["/a=/b", "/a/=/c"])


def test_folders_are_set_for_this_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(references, "_moved", {})
    data, gone = str(folder.parent / "data"), folder.parent / "gone"
    parts = raw(folder, {"img0_0.bin": locator("/old/a.bin"), "img0_1.bin": locator("/old/deep/b.bin")})
    with pytest.raises(DataChangedError, match="/old/a.bin does not exist"):
        references.complete_parts(parts)
    references.set_media_root({"/old": data})
    assert references.complete_parts(parts)["img0_1.bin"] == CONTENT[:5]
    assert references.located_images(parts)["img0_1.bin"].path == "/old/deep/b.bin"  # readers of records replace it
    gone.mkdir()
    references.set_media_root({"/old/deep": str(gone), "/new": data})
    assert references.moved_here() == (("/old/deep", str(gone)), ("/new", data), ("/old", data))
    with pytest.raises(DataChangedError, match=f"{gone}/b.bin does not exist"):
        references.complete_parts(parts)
    gone.rmdir()
    for before in ({"/old/deep": str(gone)}, dict(references.moved_here())):  # set before: not checked again
        references.set_media_root(before)
    for moved in ({"/old": "/"}, {"/x": data, "/old": "/"}):
        with pytest.raises(ConfigError, match=f"must have one new folder for /old, got {data} and /"):
            references.set_media_root(moved)
    assert references.moved_here() == (("/old/deep", str(gone)), ("/new", data), ("/old", data))
    # The folders of a reader replace them.
    found = references.complete_parts(parts | {"__media_root__": (("/old", data),)})
    assert found["img0_1.bin"] == CONTENT[:5]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/a/x", "/n/x"), ("/a", "/n"), ("/ab/x", "/ab/x"), ("/a/b/x", "/m/x"), ("/a/b", "/m"), ("/c/d/x", "/k/x"),
        ("/z/a/x", "/z/a/x"), ("/a/bc", "/n/bc"), ("/c/d", "/k"), ("/", "/"), ("/c", "/c"),
    ],
)  # fmt: skip
def test_a_path_moves_with_its_folder(path: str, expected: str) -> None:
    moved = (("/c/d", "/k"), ("/a/b", "/m"), ("/a", "/n"))
    assert references.moved_path(path, moved) == expected
    assert references.moved_path(path, ()) == path
    assert references.moved_path("/x/y", (("/", "/root"),)) == "/root/x/y"


# --- object stores -------------------------------------------------------------------------------------------------


def test_media_of_a_store_are_requested_together(store: Store, folder: Path) -> None:
    urls = [store.put(f"{name}.bin", CONTENT) for name in "ab"]
    places = [(0, 0, 100), (1, 7, 100), (0, 100, 50)]
    located = {f"img0_{n}.bin": locator(urls[which], at, size) for n, (which, at, size) in enumerate(places)}
    located["img0_3.bin"] = locator("c.bin")
    with store.counted() as traffic:
        found = references.complete_parts(raw(folder, located))
    assert [found[f"img0_{n}.bin"] for n in range(4)] == [
        *(CONTENT[at : at + size] for _, at, size in places), CONTENT[:5]
    ]  # fmt: skip
    assert sorted(request for request in traffic.requests if request.startswith("GET")) == [
        "GET /bucket/a.bin", "GET /bucket/b.bin"
    ]  # fmt: skip
    images = references.located_images(raw(folder, located))
    assert [str(image.path) for image in images.values()] == [urls[0], urls[1], urls[0], str(folder / "c.bin")]
    moved = {"__media_root__": (("/old", store.url().rstrip("/")),)}
    assert references.complete_parts(raw(folder, {"img0_0.bin": locator("/old/a.bin")}) | moved)["img0_0.bin"]
    located["img0_2.bin"] = locator(store.url("no.bin"))
    with pytest.raises(DataChangedError, match=r"img0_2.bin, an image of sample 0, .*/no.bin does not exist"):
        references.complete_parts(raw(folder, located))
