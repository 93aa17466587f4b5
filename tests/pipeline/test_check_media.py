"""`--check-media`: how far images are checked, what that costs a record, and where it is said."""

import json
import os
from pathlib import Path
from typing import Any

import orjson
import pytest
from click.testing import CliRunner

from energon_packed import ConfigError, PackingManifest
from tests.encoding.test_media_hostile import BAD_PIXELS, noise, saved
from tests.internals import cli

GOOD = {"good.jpg": saved(noise(64, 64), "JPEG"), "good.gif": saved(noise(64, 64), "GIF")}


@pytest.fixture
def records(tmp_path: Path) -> list[Any]:
    files = GOOD | {name.replace(" ", "-"): data for name, data in BAD_PIXELS.items()}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    return [
        {"id": name, "images": [name], "messages": [{"role": "user", "content": "<image>What?"},
                                                    {"role": "assistant", "content": "A thing."}]}
        for name in files
    ]  # fmt: skip


def rejected(folder: Path) -> set[str]:
    return {orjson.loads(line)["id"] for line in (folder / "rejects.jsonl").read_bytes().splitlines()}


def test_full_rejects_what_the_header_does_not_show(build: Any, records: list[Any], tmp_path: Path) -> None:
    bad = {record["id"] for record in records} - GOOD.keys()
    header = build(records)
    assert (header.manifest.packed, header.manifest.check_media) == (len(records), "header")
    assert (header.manifest.images, header.manifest.images_decoded) == (len(records), 1)  # the GIF has no quick check

    full = build(records, check_media="full", output_dir=tmp_path / "full")
    assert rejected(tmp_path / "full") == bad
    assert full.manifest.rejects == {"corrupt_image": len(bad)}
    assert (full.manifest.images, full.manifest.images_decoded, full.manifest.check_media) == (2, 2, "full")
    assert PackingManifest.load(full.shards) == full.manifest
    assert full.manifest.fingerprint != header.manifest.fingerprint

    over = build(records, check_media="full", overwrite=True)  # measured by header before, in this folder
    assert (over.manifest.packed, over.manifest.counters["measured"]) == (2, len(records))


def test_verify_names_the_option(build: Any, records: list[Any], tmp_path: Path) -> None:
    result = build(records)
    found = CliRunner().invoke(cli, ["verify", str(result.shards)])
    assert found.exit_code == 1
    remedy = (
        "pack it again; if the media of the input are damaged, with --check-media full, which rejects their records"
    )
    assert remedy in found.output
    full = build(records, check_media="full", overwrite=True)
    found = CliRunner().invoke(cli, ["verify", str(full.shards)])
    assert found.exit_code == 0, found.output


def test_the_table_says_how_far(records: list[Any], tmp_path: Path, tokenizer_dir: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    fixed = [str(data), "--tokenizer", str(tokenizer_dir), "--seq-len", "256", "--workers", "1"]
    fixed += ["--max-reject-rate", "1", "--overwrite", "-o", str(tmp_path / "out")]
    by_header = CliRunner().invoke(cli, ["pack", *fixed]).output
    rows = [line.strip("│ ").split("│") for line in by_header.splitlines() if "checked by" in line]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["checked by header", str(len(records) - 1)],
        ["checked by decoding", "1"],
    ]
    in_full = CliRunner().invoke(cli, ["pack", *fixed, "--check-media", "full"]).output
    assert "checked by header" not in in_full
    assert "checked by decoding" in in_full


def test_the_sample_of_a_dry_run_is_checked_alike(records: list[Any], tmp_path: Path, tokenizer_dir: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    command = ["pack", str(data), "--tokenizer", str(tokenizer_dir), "--seq-len", "256", "-o", str(tmp_path / "out")]
    found = CliRunner().invoke(cli, [*command, "--dry-run", "--check-media", "full", "--max-reject-rate", "0.7"])
    assert f"{len(records) - 2} x corrupt_image" in found.output


def test_another_value_is_refused(build: Any, records: list[Any]) -> None:
    assert "No such option" in CliRunner().invoke(cli, ["pack", "--check-images", "full"]).output
    with pytest.raises(ConfigError, match="`check_media`.*header, full"):
        build(records, check_media="some")


def test_images_that_a_layout_converts_are_decoded_while_measuring(
    build: Any, records: list[Any], tmp_path: Path
) -> None:
    converted = {"png-with-valid-checksums", "webp", "animated-webp"}  # a JPEG stays as it is
    result = build(records, layout="llava-onevision2")
    assert rejected(tmp_path / "out") == converted
    assert (result.manifest.packed, result.manifest.images_decoded) == (3, 1)
    kept = build(records, layout="llava-onevision2", keep_bytes=True, overwrite=True)
    assert kept.manifest.packed == len(records)


def test_hostile_places_cost_their_records(build: Any, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    (tmp_path / "good.jpg").write_bytes(GOOD["good.jpg"])
    (tmp_path / "link").symlink_to("/dev/zero")
    (tmp_path / "cut.svg").write_text("<svg/>")
    places = {
        "good.jpg": None,
        "fifo": "missing_image",
        "folder": "missing_image",
        "link": "missing_image",
        "cut.svg": "corrupt_image",
    }
    places |= dict.fromkeys(["/dev/zero", "../x", "/etc/passwd"], "image_outside_root")
    result = build([{"id": place, "images": [place], "captions": ["A thing."]} for place in places])
    lines = [orjson.loads(line) for line in (tmp_path / "out" / "rejects.jsonl").read_bytes().splitlines()]
    assert {line["id"]: line["reason"] for line in lines} == {p: why for p, why in places.items() if why}
    assert all(";" in line["detail"] for line in lines)
    assert (result.manifest.records, result.manifest.packed) == (len(places), 1)
