"""Datasets with referenced images in verify, inspect, report and nv-meta, and mixed with copies in a blend."""

import json
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from energon_packed import ChatEncoder, DataflowLoader, MapDistributor, PackedDataset, get_packed_loader
from tests.internals import PackedFolder, ReportData, verify
from tests.media import bmp, pack_media, write_files, write_tar
from tests.processes import energon_packed


class Datasets(NamedTuple):
    out: Path
    copied: Path
    source: Path


@pytest.fixture
def data(tokenizer_dir: Path, tmp_path: Path) -> Datasets:
    source = tmp_path / "source"
    jsonl = write_files(source, range(12))
    write_tar(source / "tar.tar", range(100, 112))
    for media in ("reference", "copy"):
        inputs = [jsonl, source / "tar.tar"]
        pack_media(tmp_path / media, tokenizer_dir, inputs, media=media, shard_prefix=media, max_packs_per_shard=3)
    return Datasets(tmp_path / "reference", tmp_path / "copy", source)


def _checks(*arguments: object) -> dict[str, dict[str, Any]]:
    done = energon_packed("verify", *arguments, "--json")
    value = json.loads(done.stdout)
    checks = value["checks"] if "checks" in value else value["datasets"][0]["checks"]
    return {check["name"]: check for check in checks}


def test_verify_reads_every_digest_and_passes_all_checks(data: Datasets) -> None:
    checks, copied = _checks(data.out), _checks(data.copied)
    assert checks.keys() - copied.keys() == {"referenced images are unchanged"}
    assert checks["referenced images are unchanged"]["found"] == "24 images"
    assert [check["passed"] for check in checks.values()] == [True] * len(checks)
    for name, check in copied.items():
        assert "tars" in name or check["found"] == checks[name]["found"]


def test_verify_lists_each_changed_file_once_with_its_number_of_packs(data: Datasets) -> None:
    file = data.source / "images" / "0003.bmp"
    file.write_bytes(bmp(4))
    (data.source / "images" / "0005.bmp").unlink()
    write_tar(data.source / "tar.tar", list(reversed(range(100, 112))))
    checks = _checks(data.out)
    changed = checks["referenced images are unchanged"]
    assert changed["passed"] is False
    problems = changed["problems"]
    assert [problem.partition(" (")[0].partition(" ")[0] for problem in problems] == [
        str(file), str(file.with_name("0005.bmp")), str(data.source / "tar.tar")
    ]  # fmt: skip
    assert problems[0].endswith("has other bytes (1 packs)")
    failed = {name for name, check in checks.items() if check["passed"] is False}
    assert failed <= {
        "referenced images are unchanged",
        "sample_loader.py is unmodified, and Energon loads the dataset",
    }
    done = energon_packed("verify", data.out)
    assert done.returncode == 1
    assert done.stdout.count(str(file)) == 1


def test_inspect_shows_file_offset_and_size_of_each_image_and_extracts_it(data: Datasets, tmp_path: Path) -> None:
    shown = [
        json.loads(line)
        for line in energon_packed("inspect", data.out, "--limit", 99, "--json").stdout.splitlines()
        if '"samples"' in line
    ]
    images = [image for pack in shown for sample in pack["samples"] for image in sample["images"]]
    assert len(images) == 24
    for image in images:
        content = Path(image["file"]).read_bytes()[image["offset"] :][: image["bytes"]]
        assert content in [bmp(number) for number in (*range(12), *range(100, 112))]
    assert {Path(image["file"]).name for image in images} >= {"tar.tar", "0003.bmp"}
    text = energon_packed("inspect", data.out, "--limit", 1, "--extract", tmp_path / "files").stdout
    assert f", {data.source}/" in text
    assert " from byte " in text
    energon_packed("inspect", data.copied, "--limit", 1, "--extract", tmp_path / "copies")
    folders = [sorted((tmp_path / name).glob("*/*")) for name in ("files", "copies")]
    assert [file.read_bytes() for file in folders[0]] == [file.read_bytes() for file in folders[1]]
    tokens = [energon_packed("inspect", out, "--limit", 1, "--tokens").stdout for out in (data.out, data.copied)]
    assert "image" in tokens[0]


def test_inspect_shows_the_location_of_images_that_are_not_there(data: Datasets) -> None:
    data.source.rename(data.source.with_name("elsewhere"))
    done = energon_packed("inspect", data.out, "--limit", 99, "--json")
    assert done.returncode == 0, done.stderr
    packs = [json.loads(line) for line in done.stdout.splitlines() if '"samples"' in line]
    images = [image for pack in packs for sample in pack["samples"] for image in sample["images"]]
    assert len(images) == 24
    assert all(image["file"].startswith(str(data.source)) for image in images)
    assert {image["problem"] for image in images} == {"missing, or not the packed image"}
    text = energon_packed("inspect", data.out, "--limit", 1).stdout
    assert "missing, or not the packed image" in " ".join(text.split())


def test_a_report_counts_and_shows_referenced_images(data: Datasets, encoder: ChatEncoder) -> None:
    reports = [ReportData(PackedFolder.open(out), encoder) for out in (data.out, data.copied)]
    assert [size.images for size in reports[0].measured] == [size.images for size in reports[1].measured]
    assert sum(sum(size.images) for size in reports[0].measured) == 24
    assert reports[0].image_sizes == reports[1].image_sizes
    assert [pack.files for pack in reports[0].shown] == [pack.files for pack in reports[1].shown]
    assert all(pack.files for pack in reports[0].shown)
    (data.out / "webdataset" / ".nv-meta" / "packing.json").unlink()
    counted = ReportData(PackedFolder.open(data.out), encoder)
    assert counted.is_counted
    assert counted.manifest.images == 24
    (data.source / "tar.tar").unlink()
    assert _checks(data.out, "--fast")["referenced images are unchanged"]["problem_count"] == 1


def test_nv_meta_repairs_a_dataset_whose_images_are_not_there(data: Datasets, encoder: ChatEncoder) -> None:
    meta = data.out / "webdataset" / ".nv-meta"
    before = {file.name: file.read_bytes() for file in meta.iterdir() if file.name != "index.uuid"}
    for name in ("dataset.yaml", "index.sqlite", ".info.json", "sample_loader.py"):
        (meta / name).unlink()
    data.source.rename(data.source.with_name("moved"))
    done = energon_packed("nv-meta", data.out)
    assert done.returncode == 0, done.stderr
    after = {file.name: file.read_bytes() for file in meta.iterdir() if file.name != "index.uuid"}
    assert before == after
    shutil.move(data.source.with_name("moved"), data.source)
    assert len(list(get_packed_loader(data.out, encoder, epochs=1, num_workers=0))) == len(
        PackedDataset(data.out, encoder)
    )


def test_a_blend_of_references_and_copies_has_the_packs_of_both(
    data: Datasets, encoder: ChatEncoder, tmp_path: Path
) -> None:
    done = energon_packed("metadataset", tmp_path / "mix.yaml", data.out, data.copied, "--epochized")
    assert done.returncode == 0, done.stderr
    mixed = DataflowLoader(
        MapDistributor(PackedDataset(tmp_path / "mix.yaml", encoder), shuffle=False), batch_size=1, num_workers=0
    )
    pixels = [batch.pixel_values.numpy().tobytes() for batch in mixed]
    assert len(pixels) % 2 == 0
    assert pixels[: len(pixels) // 2] == pixels[len(pixels) // 2 :]
    loader = get_packed_loader(tmp_path / "mix.yaml", encoder, epochs=1, num_workers=1)
    assert sorted(pixels) == sorted(batch.pixel_values.numpy().tobytes() for batch in loader)


@pytest.mark.parametrize("name", ["map", "energon"])
def test_a_state_of_every_step_continues_as_with_copies(data: Datasets, encoder: ChatEncoder, name: str) -> None:
    def make(out: Path) -> Any:
        if name == "energon":
            return get_packed_loader(out, encoder, epochs=1, num_workers=0)
        return DataflowLoader(MapDistributor(PackedDataset(out, encoder)), batch_size=1, num_workers=0)

    expected = [batch.pixel_values.numpy().tobytes() for batch in make(data.copied)]
    for step in range(len(expected)):
        loader = make(data.out)
        batches = iter(loader)
        for _ in range(step):
            next(batches)
        resumed = make(data.out)
        resumed.load_state_dict(loader.state_dict())
        assert [batch.pixel_values.numpy().tobytes() for batch in resumed] == expected[step:]


def test_verify_reads_each_image_once(data: Datasets, encoder: ChatEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: Counter[tuple[str, int]] = Counter()
    pread = os.pread

    def counted(descriptor: int, size: int, offset: int) -> bytes:
        reads[os.readlink(f"/proc/self/fd/{descriptor}"), offset] += 1
        return pread(descriptor, size, offset)

    monkeypatch.setattr(os, "pread", counted)
    assert all(check.passed for check in verify(PackedFolder.open(data.out), encoder))
    of_images = {place: count for place, count in reads.items() if place[0].startswith(str(data.source))}
    assert len(of_images) == 24
    first = len(PackedDataset(data.out, encoder).sample(0).stored_samples())
    assert sum(of_images.values()) <= 24 + first  # Energon loads the first pack
