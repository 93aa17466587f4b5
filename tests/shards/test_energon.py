"""Written datasets agree with Energon's own command line, indexes and sharder."""

import random
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import yaml
from megatron.energon import WorkerConfig
from megatron.energon.flavors.webdataset.sharder import Sharder

from energon_packed import ChatEncoder, FormatError, PackingManifest, get_packed_loader, steps_per_epoch
from tests.conftest import FLAVORS, Packer
from tests.internals import steps_of_ranks
from tests.processes import energon


@pytest.mark.parametrize("media", ["copy", "reference"])
@pytest.mark.parametrize("flavor", FLAVORS)
def test_info_lint_and_preview_succeed(pack_demo: Packer, flavor: str, media: str) -> None:
    options = {} if media == "copy" else {"media": media}
    result = pack_demo(sample_class=flavor, max_packs_per_shard=8, split={"train": 0.8, "val": 0.2}, **options)
    info = energon("info", result.shards)
    assert info.returncode == 0, info.stderr
    assert f"`{flavor} <energon_packed.flavors" in info.stdout
    assert f"({result.manifest.packs} samples" in info.stdout.replace(",", "")
    lint = energon("lint", result.shards)
    assert lint.returncode == 0, lint.stderr
    assert "Error" not in lint.stdout + lint.stderr
    preview = energon("preview", result.shards)
    assert preview.returncode == 0, preview.stderr
    assert "Sample 0" in preview.stdout
    assert "Traceback" not in preview.stdout + preview.stderr


@pytest.mark.parametrize("flavor", FLAVORS)
def test_indexes_equal_energon_prepare(pack_demo: Packer, flavor: str, tmp_path: Path) -> None:
    ours = pack_demo(sample_class=flavor, max_packs_per_shard=8, split={"train": 0.8, "val": 0.2}).shards
    copy = tmp_path / "copy"
    shutil.copytree(ours, copy)
    for index in copy.glob("*.idx"):
        index.unlink()
    (copy / ".nv-meta" / "index.sqlite").unlink()
    done = energon("prepare", "--non-interactive", "--tar-index-only", "--num-workers", "2", copy)
    assert done.returncode == 0, done.stderr
    assert len(list(ours.glob("*.tar"))) > 1
    for index in ours.glob("*.tar.idx"):
        assert index.read_bytes() == (copy / index.name).read_bytes()
    for query in (
        "SELECT * FROM samples ORDER BY tar_file_id, sample_index",
        "SELECT * FROM sample_parts ORDER BY tar_file_id, sample_index, content_byte_offset",
    ):
        rows = [_rows(folder, query) for folder in (ours, copy)]
        assert rows[0]
        assert rows[0] == rows[1]
    # The same tables and indexes, however the statements are laid out.
    names = "SELECT type, name, tbl_name FROM sqlite_master ORDER BY name"
    assert _rows(ours, names) == _rows(copy, names)
    for table in ("samples", "sample_parts"):
        assert _rows(ours, f"PRAGMA table_info({table})") == _rows(copy, f"PRAGMA table_info({table})")


def test_full_energon_prepare_finds_the_same_shards(pack_demo: Packer, tmp_path: Path) -> None:
    ours = pack_demo(max_packs_per_shard=8, split={"train": 0.8, "val": 0.2}).shards
    copy = tmp_path / "copy"
    shutil.copytree(ours, copy, ignore=shutil.ignore_patterns(".nv-meta", "*.idx"))
    done = energon("prepare", "--non-interactive", "--split-ratio", "1,0,0", copy)
    assert done.returncode == 0, done.stderr + done.stdout
    info = [yaml.safe_load((folder / ".nv-meta" / ".info.json").read_text()) for folder in (ours, copy)]
    assert info[0] == info[1]


def test_steps_equal_the_sharding_of_energon() -> None:
    """The larger slices of a dataset continue after the last worker with a larger slice of the dataset before."""
    rng = random.Random(0)
    for _ in range(200):
        counts, world, workers = [rng.randint(0, 99) for _ in range(3)], rng.randint(1, 7), rng.randint(1, 5)
        dealt = []
        for rank in range(world):
            config, before, steps = WorkerConfig(rank=rank, world_size=world, num_workers=workers), 0, 0
            for packs in counts:
                offsets = Sharder.split_samples_to_workers(0, packs, config, rotation_offset=before)
                steps += offsets[-1] - offsets[0]
                before = (before + packs) % (world * workers)
            dealt.append(steps)
        parts = [(packs, 1.0) for packs in counts]
        assert steps_of_ranks(parts, world_size=world, num_workers=workers) == dealt


def test_steps_per_epoch_by_hand(pack_demo: Packer) -> None:
    result = pack_demo()
    packs = result.manifest.packs
    assert steps_per_epoch(result.shards) == packs
    assert steps_per_epoch(result.shards.parent, micro_batch_size=packs) == 1
    assert steps_per_epoch(result.manifest, world_size=3, num_workers=2) == -(-packs // 3)
    dropped = steps_per_epoch(result.manifest, micro_batch_size=packs + 1, epoch_end="drop")
    assert dropped == 0
    with pytest.raises(ValueError, match="`world_size` must be at least 1, got 0"):
        steps_per_epoch(result.manifest, world_size=0)
    with pytest.raises(ValueError, match="`epoch_end` must be"):
        steps_per_epoch(result.shards, epoch_end="stop")  # type: ignore[arg-type]
    halves = pack_demo(split="train=0.75,val=0.25")
    for source in (halves.shards, halves.manifest):
        assert steps_per_epoch(source, split="val") == halves.manifest.packs_in("val") < packs / 2
        assert steps_per_epoch(source) == packs - halves.manifest.packs_in("val")


def test_steps_ignore_excluded_shards(pack_demo: Packer, encoder: ChatEncoder, tmp_path: Path) -> None:
    result = pack_demo(max_packs_per_shard=3)
    shards = shutil.copytree(result.shards, tmp_path / "shards")
    split = shards / ".nv-meta" / "split.yaml"
    first = result.manifest.shards[0]
    split.write_text(split.read_text().replace("exclude: []", f"exclude: [{first.name}]"))
    steps = steps_per_epoch(shards)
    assert steps == result.manifest.packs - first.packs
    assert steps == len([*get_packed_loader(shards, encoder, epochs=1, num_workers=0)])
    split.write_text(split.read_text().replace(f"[{first.name}]", f"[{first.name}/a_00000000]"))
    with pytest.raises(FormatError, match=r"^The number of packs of .* is unknown: split.yaml excludes single packs"):
        steps_per_epoch(shards)


def test_the_manifest_reads_back(pack_demo: Packer, tmp_path: Path) -> None:
    result = pack_demo()
    assert PackingManifest.load(result.shards) == result.manifest
    with pytest.raises(ValueError, match=r"has no .nv-meta/packing\.json"):
        PackingManifest.load(tmp_path)
    (tmp_path / ".nv-meta").mkdir()
    file = tmp_path / ".nv-meta" / "packing.json"
    for content, message in (
        ('{"format_version": 99}', "format version 99"),
        ("{}", "not a packing manifest"),
        ("{", "not a packing manifest"),
    ):
        file.write_text(content)
        with pytest.raises(ValueError, match=message):
            PackingManifest.load(tmp_path)


def _rows(folder: Path, query: str) -> list[tuple[Any, ...]]:
    with sqlite3.connect(folder / ".nv-meta" / "index.sqlite") as database:
        return database.execute(query).fetchall()
