"""Symbolic links: the path as written decides, before links are resolved; `--no-links` refuses links of the data."""

import io
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import orjson
import pytest
from click.testing import CliRunner
from PIL import Image

from energon_packed import (
    ConfigError,
    DataflowConfig,
    PackResult,
    RecordError,
    SourceError,
    get_raw_loader,
    materialize,
    normalize,
)
from tests.internals import ImageRoot, cli

TEXT = {"id": "text", "text": "A text."}
Rejects = dict[str, tuple[str, str]]


def image(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (28, 28), "red").save(path)
    return path


def link(path: Path, target: str | Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)
    return path


def record(name: str) -> dict[str, Any]:
    return {"id": name, "images": [name], "captions": ["A thing."]}


def rejects(result: PackResult) -> Rejects:
    lines = map(orjson.loads, result.rejects.read_bytes().splitlines())
    return {line["id"]: (line["reason"], line["detail"]) for line in lines}


def linked_folder(top: Path) -> dict[str, str | None]:
    """Links of 12 kinds in `top`, which a data file `top/data.jsonl` names: the reason of the reject, or None."""
    real = image(top / "plain.png")
    outside = image(top.parent / "outside" / "x.png")
    image(top.parent / "outside" / "inner" / "y.png")
    link(top / "folder", "../outside")
    link(top / "relative.png", "plain.png")
    link(top / "absolute.png", real)
    link(top / "out.png", outside)
    link(top / "chain.png", link(top / "second.png", link(top / "third.png", real)))
    link(top / "loop.png", "loop.png")
    link(top / "dangling.png", "nothing.png")
    link(top / "device.png", "/dev/zero")
    os.mkfifo(top / "pipe")
    link(top / "fifo.png", "pipe")
    link(top / "up", "..")
    return {
        "plain.png": None, "folder/x.png": None, "relative.png": None, "absolute.png": None, "out.png": None,
        "chain.png": None, "up/outside/x.png": None, "folder/../plain.png": None, str(top / "folder" / "x.png"): None,
        "loop.png": "missing_image", "dangling.png": "missing_image", "device.png": "missing_image",
        "fifo.png": "missing_image", "folder/none.png": "missing_image",
        "folder/../../outside/x.png": "image_outside_root", "../outside/x.png": "image_outside_root",
        str(outside): "image_outside_root", "/dev/zero": "image_outside_root",
    }  # fmt: skip


def test_the_path_as_written_decides(build: Any, tmp_path: Path) -> None:
    expected = linked_folder(tmp_path)
    found = rejects(build([record(name) for name in expected]))
    assert {name: found.get(name, (None,))[0] for name in expected} == expected
    assert "device.png: is a device, not a regular file" in found["device.png"][1]
    assert "fifo.png: is a FIFO, not a regular file" in found["fifo.png"][1]


def test_no_links_refuses_every_link(build: Any, tmp_path: Path) -> None:
    expected = linked_folder(tmp_path)
    with_links = build([record(name) for name in expected])
    strict = build(no_links=True, overwrite=True)
    assert strict.manifest.fingerprint != with_links.manifest.fingerprint
    found = rejects(strict)
    plain = {"plain.png", "folder/../plain.png"}
    assert {name for name in expected if name not in found} == plain
    assert found["folder/x.png"] == (
        "image_outside_root",
        f"{tmp_path}/folder is a symbolic link, which `no_links` refuses; replace it with its target, or omit "
        "`no_links`",
    )
    linked = {name for name, reason in expected.items() if reason is None} - plain
    assert {found[name][0] for name in linked} == {"image_outside_root"}


def test_a_folder_that_becomes_a_link_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that becomes a link after it was checked."""
    image(tmp_path / "data" / "images" / "x.png")
    image(tmp_path / "secret" / "x.png")
    reference = normalize(record("images/x.png"), image_root=ImageRoot(str(tmp_path / "data"), links=False)).images[0]
    real = os.stat

    def replacing(path: Any, *args: Any, **options: Any) -> os.stat_result:
        status = real(path, *args, **options)
        if path == "images" and not (tmp_path / "moved").exists():
            (tmp_path / "data" / "images").rename(tmp_path / "moved")
            (tmp_path / "data" / "images").symlink_to(tmp_path / "secret")
        return status

    monkeypatch.setattr(os, "stat", replacing)
    with pytest.raises(RecordError):
        reference.read()
    assert (tmp_path / "moved").exists()


def test_a_linked_data_file_beside_its_images(build: Any, tmp_path: Path) -> None:
    image(tmp_path / "set" / "images" / "x.png")
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "4f2a").write_text(json.dumps(record("images/x.png")) + "\n")
    link(tmp_path / "set" / "data.jsonl", "../store/4f2a")
    link(tmp_path / "other", "set")
    for path in (tmp_path / "set" / "data.jsonl", tmp_path / "set", tmp_path / "other", tmp_path / "other/data.jsonl"):
        assert build(inputs=(str(path),), overwrite=True).manifest.packed == 1
    assert build(inputs=(str(tmp_path / "set/data.jsonl"),), no_links=True, overwrite=True).manifest.packed == 1
    with pytest.raises(SourceError, match="data.jsonl is a symbolic link, which `no_links` refuses"):
        build(inputs=(str(tmp_path / "set"),), no_links=True, overwrite=True)
    with pytest.raises(SourceError, match="data.jsonl is a symbolic link, which `no_links` refuses"):
        build(inputs=(str(tmp_path / "set" / "*.jsonl"),), no_links=True, overwrite=True)


def hub_cache(home: Path) -> Path:
    """A dataset as `hf download` stores it; the snapshot is returned."""
    cache = home / "hub" / "datasets--org--name"
    snapshot = cache / "snapshots" / "0123abcd"
    blobs = {"images/a.png": image(cache / "a.png").read_bytes(), "images/b.png": image(cache / "b.png").read_bytes()}
    blobs["data.jsonl"] = "".join(json.dumps(record(name)) + "\n" for name in blobs).encode()
    for number, (name, content) in enumerate(blobs.items()):
        blob = cache / "blobs" / f"{number:040x}"
        blob.parent.mkdir(exist_ok=True)
        blob.write_bytes(content)
        link(snapshot / name, os.path.relpath(blob, (snapshot / name).parent))
    return snapshot


@pytest.mark.parametrize("media", ["copy", "reference"])
def test_the_cache_of_the_hub(build: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, media: str) -> None:
    snapshot = hub_cache(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    for name in (str(snapshot / "data.jsonl"), str(snapshot), "org/name"):
        result = build(inputs=(name,), media=media, overwrite=True)
        assert (result.manifest.packed, result.manifest.images) == (2, 2)
    with pytest.raises(SourceError, match="is a symbolic link"):
        build(inputs=("org/name",), no_links=True, overwrite=True)


def test_linked_roots_and_outputs(build: Any, tmp_path: Path) -> None:
    """An image root that is a link, absolute paths by either of its names, and an output folder that is a link."""
    image(tmp_path / "disk" / "images" / "x.png")
    link(tmp_path / "root", "disk")
    (tmp_path / "elsewhere").mkdir()
    link(tmp_path / "out", "elsewhere")
    names = ["images/x.png", f"{tmp_path}/root/images/x.png", f"{tmp_path}/disk/images/x.png"]
    for no_links in (False, True):
        result = build(
            [record(name) for name in names], image_root=tmp_path / "root", no_links=no_links, overwrite=True
        )
        assert rejects(result) == {}
    assert (tmp_path / "out").is_symlink()
    assert (tmp_path / "elsewhere" / "webdataset" / ".nv-meta" / "packing.json").exists()
    inner = link(tmp_path / "deep" / "link", tmp_path / "disk" / "images")
    result = build([record("images/x.png")], image_root=inner / "..", overwrite=True)  # as the system resolves it
    assert rejects(result) == {}
    (tmp_path / "elsewhere").rename(tmp_path / "gone")
    with pytest.raises((ConfigError, OSError), match="out"):
        build(image_root=inner / "..")


def test_references_through_links(build: Any, tmp_path: Path) -> None:
    image(tmp_path / "disk" / "x.png")
    link(tmp_path / "images", "disk")
    result = build([record("images/x.png"), TEXT], media="reference")
    with tarfile.open(next(result.shards.glob("*.tar"))) as tar:
        (part,) = [name for name in tar.getnames() if name.endswith(".media.json")]
        (locator,) = json.load(tar.extractfile(part) or io.BytesIO()).values()
    assert locator["file"] == f"{tmp_path}/images/x.png"
    materialize(result.shards, tmp_path / "copy")
    assert (tmp_path / "copy" / "webdataset").is_dir()
    strict = build(media="reference", no_links=True, overwrite=True, seq_len=255)
    assert list(rejects(strict)) == ["images/x.png"]


@pytest.mark.parametrize("root", [None, "", "pics", "/"])
def test_paths_that_climb(build: Any, tmp_path: Path, root: str | None) -> None:
    """`../pics/x.png` of a data file in another folder, with any image root that contains the image."""
    image(tmp_path / "pics" / "x.png")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "data.jsonl").write_text(json.dumps(record("../pics/x.png")) + "\n" + json.dumps(TEXT))
    options = {"inputs": (str(tmp_path / "notes" / "data.jsonl"),), "max_reject_rate": 1}
    if root is not None:
        result = build(**options, image_root=Path(root) if root == "/" else tmp_path / root)
        assert result.manifest.packed == 2
        return
    ((reason, detail),) = rejects(build(**options)).values()
    assert (reason, detail) == (
        "image_outside_root",
        f"../pics/x.png leads to {tmp_path}/pics/x.png, outside `image_root` {tmp_path}/notes; pass a folder that "
        f"contains both, such as {tmp_path}",
    )


def test_a_missing_image_is_named_by_its_absolute_path(build: Any, tmp_path: Path) -> None:
    image(tmp_path / "pics" / "x.png")
    found = rejects(build([record("none.png"), record(r"pics\x.png"), TEXT]))
    assert found["none.png"] == ("missing_image", f"{tmp_path}/none.png: No such file or directory")
    assert found[r"pics\x.png"][1] == (
        rf"{tmp_path}/pics\x.png: No such file or directory; its folders are separated by \, write / in the record"
    )


def test_raw_loaders_and_lengths_have_the_option(tmp_path: Path, tokenizer_dir: Path) -> None:
    image(tmp_path / "disk" / "x.png")
    link(tmp_path / "images", "disk")
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps(record("images/x.png")) + "\n" + json.dumps(TEXT) + "\n")
    options: dict[str, Any] = {"inputs": str(data), "tokenizer": tokenizer_dir, "seq_len": 256}
    for no_links in (False, True):
        config = DataflowConfig(**options, no_links=no_links, max_reject_rate=1)
        loader = get_raw_loader(config, num_workers=0)
        assert len(next(iter(loader)).ids) == 2 - no_links
    command = ["lengths", str(data), "--tokenizer", str(tokenizer_dir), "--no-links"]
    assert "image_outside_root" in str(CliRunner().invoke(cli, command).exception)
    (tmp_path / "pack.yaml").write_text(
        f"inputs: [{data}]\ntokenizer: {tokenizer_dir}\nseq_len: 256\nno_links: true\n"
    )
    assert DataflowConfig.from_yaml(tmp_path / "pack.yaml").no_links
