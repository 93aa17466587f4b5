"""`energon-packed materialize`: a dataset with references becomes the dataset of `pack --media copy`."""

import json
import shutil
from pathlib import Path

import pytest

from energon_packed import PackingManifest, materialize
from tests.conftest import FLAVORS, Packer
from tests.media import pack_and_move
from tests.processes import energon_packed


def _files(folder: Path) -> dict[str, bytes]:
    """Content of all files but those of the restart state, and packing.json without the work of the run.

    Which tokenizer engines a run used depends on how many texts each process received.
    """
    files = {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file() and ".work" not in file.parts
    }
    manifest = json.loads(files.pop("webdataset/.nv-meta/packing.json"))
    del manifest["counters"], manifest["tokenizer_engine"]
    files["packing.json"] = json.dumps(list(manifest)).encode()
    # Field by field, so that a failure names the field.
    return files | {f"packing.json: {name}": json.dumps(value).encode() for name, value in manifest.items()}


@pytest.mark.parametrize("sample_class", FLAVORS)
def test_a_materialized_dataset_equals_a_copied_dataset_byte_for_byte(
    pack_demo: Packer, tmp_path: Path, sample_class: str
) -> None:
    options = {
        "sample_class": sample_class,
        "shard_prefix": "d",
        "max_packs_per_shard": 5,
        "split": {"train": 0.7, "val": 0.3},
    }
    copied = pack_demo(**options).shards.parent
    referenced = pack_demo(**options, media="reference").shards.parent
    for workers in (1, 2):
        done = energon_packed("materialize", referenced, "-o", tmp_path / str(workers), "--workers", workers)
        assert done.returncode == 0, done.stderr
        assert _files(tmp_path / str(workers)) == _files(copied)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["1", "2"]


def test_materialize_fills_an_empty_folder_that_is_a_link(pack_demo: Packer, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")  # as a mount, it cannot be replaced
    materialize(pack_demo(media="reference").shards, tmp_path / "link")
    assert _files(tmp_path / "disk") == _files(pack_demo().shards.parent)
    assert (tmp_path / "link").is_symlink()


def test_materialize_reads_moved_images_and_refuses_changed_ones(tokenizer_dir: Path, tmp_path: Path) -> None:
    old, new = pack_and_move(tmp_path, tokenizer_dir)
    out = tmp_path / "reference"
    missing = energon_packed("materialize", out, "-o", tmp_path / "out", "--workers", 2)
    assert missing.returncode == 1
    assert missing.stderr.count("\n") == 1
    assert "does not exist" in missing.stderr
    assert "pass --media-root if it was moved" in missing.stderr
    moved = energon_packed("materialize", out, "-o", tmp_path / "out", "--media-root", f"{old}={new}", "--json")
    assert moved.returncode == 0, moved.stderr
    assert json.loads(moved.stdout)["images"] == 12
    assert _files(tmp_path / "out") == _files(tmp_path / "copy")
    file = new / "images" / "0002.bmp"
    file.write_bytes(file.read_bytes()[::-1])
    changed = energon_packed("materialize", out, "-o", tmp_path / "out2", "--media-root", f"{old}={new}")
    assert changed.returncode == 1
    assert "(r2), is not the packed image" in changed.stderr
    assert not [path.name for path in tmp_path.iterdir() if "out2" in path.name]


@pytest.mark.parametrize("name", ["copied", "not empty", "two roots", "no folder"])
def test_a_wrong_argument_of_materialize_is_one_line(pack_demo: Packer, tmp_path: Path, name: str) -> None:
    referenced = pack_demo(shard_prefix="d", media="reference").shards.parent
    shutil.copytree(referenced, tmp_path / "full")
    arguments, message = {
        "copied": ([pack_demo(shard_prefix="d").shards.parent, "-o", tmp_path / "new"], "its tars contain the images"),
        "not empty": ([referenced, "-o", tmp_path / "full"], "--output-dir must be a new or empty folder, got"),
        "two roots": (
            [referenced, "-o", tmp_path / "new", "--media-root", "/a=/tmp", "--media-root", "/a=/usr"],
            "--media-root must have one new folder for /a, got /tmp and /usr",
        ),
        "no folder": ([referenced, "-o", tmp_path / "new", "--media-root", "/a"], "--media-root must be OLD=NEW, got"),
    }[name]
    done = energon_packed("materialize", *arguments)
    assert done.returncode == (2 if name in ("two roots", "no folder") else 1)  # 2: wrong usage
    assert done.stderr.count("\n") == 1
    assert message in done.stderr
    assert not (tmp_path / "new").exists()


def test_a_materialized_dataset_is_a_copied_dataset_in_its_manifest(pack_demo: Packer, tmp_path: Path) -> None:
    referenced = pack_demo(shard_prefix="d", media="reference").shards.parent
    assert energon_packed("materialize", referenced, "-o", tmp_path / "out").returncode == 0
    assert PackingManifest.load(tmp_path / "out").media == "copy"
    verified = energon_packed("verify", tmp_path / "out")
    assert verified.returncode == 0, verified.stdout
