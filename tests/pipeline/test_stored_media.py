"""Images that are in no file of the input, by reference: stored once in `out/media`, and read as copied images."""

import errno
import itertools
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from energon_packed import (
    ChatEncoder,
    ConfigError,
    PackedDataset,
    PackResult,
    SourceError,
    get_packed_loader,
    materialize,
    pack,
)  # fmt: skip
from tests.internals import ShardReader, complete_parts, main, stored_media
from tests.pipeline.embedded import (
    DIFFERENT,
    as_base64,
    png,
    rows,
    write_arrow,
    write_gzip,
    write_jsonl,
    write_mixed,
    write_parquet,
)
from tests.pipeline.faults import CommandLine, Fault
from tests.pipeline.undisturbed import contents, leftovers
from tests.sources.test_energon import picture, with_loader

ADAPTER = """
import io, itertools
from PIL import Image

calls = itertools.count()

def drawn(record):
    out = io.BytesIO()
    Image.new("RGB", (28, 28), (record["color"], 0, {blue})).save(out, "PNG")
    return {{"id": record["id"], "images": [out.getvalue()], "prompts": ["Which?"], "captions": ["Red."]}}
"""


Packs = Callable[..., PackResult]


@pytest.fixture
def packs(tmp_path: Path, tokenizer_dir: Path) -> Packs:
    def run(data: Any, out: str = "out", media: str = "reference", **options: Any) -> PackResult:
        settings = {
            "seq_len": 256,
            "workers": 1,
            "shard_prefix": "p",
            "tokenizer": tokenizer_dir,
            "max_reject_rate": 1,
        }
        return pack(data, output_dir=tmp_path / out, media=media, **{**settings, **options})  # type: ignore[arg-type]

    return run


def parts(result: PackResult) -> list[list[tuple[str, Any]]]:
    """The parts of all packs, with the images."""
    return parts_in(result.shards)


def parts_in(shards: Path) -> list[list[tuple[str, Any]]]:
    reader = ShardReader(sorted(shards.glob("*.tar")))
    found = [complete_parts(reader[pack]) for pack in range(len(reader))]
    return [[item for item in pack.items() if item[0] not in ("__folder__", "__media_root__")] for pack in found]


def locators(result: PackResult) -> list[dict[str, Any]]:
    reader = ShardReader(sorted(result.shards.glob("*.tar")))
    references = [json.loads(reader[pack].get("media.json", "{}")) for pack in range(len(reader))]
    return [locator for pack in references for locator in pack.values() if locator]


def tars(out: Path) -> dict[str, int]:
    """Time of change of every file of `out/media`."""
    return {str(path.relative_to(out)): path.stat().st_mtime_ns for path in (out / "media").rglob("*")}


def read_all(folder: Path, encoder: ChatEncoder) -> tuple[list[Any], list[Any]]:
    """Every pack of PackedDataset, and every batch of Energon's loader."""
    dataset = PackedDataset(folder, encoder)
    samples = [
        [
            (s.id, s.input_ids.tolist(), None if s.pixel_values is None else s.pixel_values.tolist())
            for s in dataset[pack]
        ]
        for pack in range(len(dataset))
    ]
    batches = get_packed_loader(folder, encoder, epochs=1, num_workers=0)
    return samples, [
        (batch.ids, batch.input_ids.tolist(), None if batch.pixel_values is None else batch.pixel_values.tolist())
        for batch in batches
    ]


@pytest.mark.parametrize("write", [write_parquet, write_arrow, write_jsonl, write_gzip, write_mixed])
def test_packs_equal_copied_packs_in_every_loader_also_after_a_move(
    packs: Packs, tmp_path: Path, encoder: ChatEncoder, write: Any
) -> None:
    data = write(tmp_path, rows())
    copied, referenced = packs(data, "copied", "copy"), packs(data)
    assert parts(referenced) == parts(copied)
    stored = [locator for locator in locators(referenced) if locator["source"] == "media"]
    images = sum(len(record["images"]) for record in rows())
    assert len(stored) == images > 3 * DIFFERENT
    assert {locator["member"] for locator in stored} == {f"{locator['digest']}.png" for locator in stored}
    assert referenced.manifest.media_stored == {
        "images": DIFFERENT,
        "bytes": sum(len(png(i)) for i in range(DIFFERENT)),
    }
    expected = read_all(copied.shards.parent, encoder)
    moved = tmp_path / "elsewhere" / "deep"
    moved.parent.mkdir()
    shutil.move(referenced.shards.parent, moved)
    assert read_all(moved, encoder) == expected
    (tmp_path / "link").symlink_to(moved / "webdataset")  # `..` of the link would be another folder
    assert read_all(tmp_path / "link", encoder) == expected


def test_a_materialized_dataset_has_the_stored_images_in_its_tars(packs: Packs, tmp_path: Path) -> None:
    data = write_parquet(tmp_path, rows())
    copied, referenced = packs(data, "copied", "copy"), packs(data)
    manifest = materialize(referenced.shards, tmp_path / "materialized")
    assert replace(manifest, counters={}) == replace(copied.manifest, counters={})
    for tar in copied.shards.glob("*.tar"):
        assert (tmp_path / "materialized" / "webdataset" / tar.name).read_bytes() == tar.read_bytes()


@pytest.mark.parametrize("check", ["digest", "time"])
def test_an_image_of_40_records_is_stored_once(packs: Packs, tmp_path: Path, check: str) -> None:
    result = packs(write_parquet(tmp_path, rows(40, different=1)), media_check=check)
    assert result.manifest.media_stored == {"images": 1, "bytes": len(png(0))}
    found = locators(result)
    assert len(found) == sum(len(record["images"]) for record in rows(40))
    assert len({json.dumps(locator) for locator in found}) == 1
    assert result.manifest.packed == 40
    (tar,) = (tmp_path / "out/media").glob("*.tar")
    assert tar.read_bytes().count(png(0)) == 1


def test_energon_finds_every_stored_image_by_its_member(packs: Packs, tmp_path: Path) -> None:
    from megatron.energon.cache.file_store import WebdatasetFileStore
    from megatron.energon.epathlib import EPath
    from megatron.energon.flavors.webdataset.metadata import get_dataset_type

    result = packs(write_parquet(tmp_path, rows()), max_shard_bytes=8192)
    assert len(list((tmp_path / "out/media").glob("*.tar"))) > 3
    folder = EPath(str(tmp_path / "out/media"))
    assert get_dataset_type(folder).name == "WEBDATASET"
    store = WebdatasetFileStore(folder)
    for locator in locators(result):
        tar = (result.shards / locator["file"]).read_bytes()
        assert store[locator["member"]][0] == tar[locator["offset"] : locator["offset"] + locator["size"]]


@pytest.mark.parametrize("bucket", [1 << 23, 1])
def test_workers_and_buckets_do_not_change_a_byte(
    packs: Packs, tmp_path: Path, bucket: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_parquet(tmp_path, rows(200, different=60))
    results = [contents(packs(data, "one", workers=1, max_shard_bytes=16384).shards.parent)]
    monkeypatch.setattr(stored_media, "_BUCKET", bucket)
    results.append(contents(packs(data, "three", workers=3, max_shard_bytes=16384).shards.parent))
    assert sum(name.startswith("media/media-") and name.endswith(".tar") for name in results[0]) > 8
    assert results[0] == results[1]


def test_another_seq_len_writes_no_media(packs: Packs, tmp_path: Path) -> None:
    data = write_parquet(tmp_path, rows())
    first = packs(data, max_shard_bytes=8192)
    assert first.manifest.counters["media_shards_written"] == len(list((tmp_path / "out/media").glob("*.tar")))
    before = tars(tmp_path / "out")
    second = packs(data, max_shard_bytes=8192, seq_len=512, overwrite=True)
    assert tars(tmp_path / "out") == before
    assert second.manifest.counters["media_shards_written"] == 0
    assert second.manifest.counters["media_shards_reused"] == first.manifest.counters["media_shards_written"]
    assert parts(second) == parts(packs(data, "copied", "copy", max_shard_bytes=8192, seq_len=512))


def test_overlong_records_have_their_images_stored_and_rejected_records_have_not(packs: Packs, tmp_path: Path) -> None:
    records = [rows()[1], rows()[2] | {"captions": ["long " * 300]}, rows()[3]]
    records[2]["images"] = [{"bytes": png(50)}, {"bytes": b"no image"}]
    data = write_parquet(tmp_path, records)
    result = packs(data, seq_len=128)
    assert result.manifest.rejects == {"overlong": 1, "corrupt_image": 1}
    assert result.manifest.media_stored["images"] == 2
    longer = packs(data, seq_len=4096, overwrite=True)
    assert (longer.manifest.packed, longer.manifest.counters["media_shards_written"]) == (2, 0)


def test_media_of_other_images_replace_those_of_the_old_dataset_when_the_new_one_is_complete(
    command_line: CommandLine, tmp_path: Path
) -> None:
    """A run with other images is killed when it has written a tar of images: the old dataset can be read."""
    (tmp_path / "new").mkdir()
    data = {"old": write_parquet(tmp_path, rows()), "new": write_parquet(tmp_path / "new", rows(40, different=11))}
    out = tmp_path / "out"

    def run(name: str, to: Path, *more: Any, fault: Fault | None = None) -> Any:
        settings = ("--seq-len", 256, "--workers", 2, "--media", "reference", "--max-shard-size", "8K", "--overwrite")
        given = ["pack", data[name], "-o", to, "--tokenizer", command_line.tokenizer, *settings, "--shard-prefix", "p"]
        return command_line.run(*given, *more, out=to, fault=fault)

    assert run("new", tmp_path / "expected").status == 0
    assert run("old", out).status == 0
    packed = parts_in(out / "webdataset")
    names = set(tars(out))
    ran = run("new", out, fault=Fault(at=2, role="worker", path=r"/media/", event="os.rename", kind="kill_all"))
    assert ran.fired
    assert names < set(tars(out))
    assert parts_in(out / "webdataset") == packed
    assert run("new", out).status == 0
    assert contents(out) == contents(tmp_path / "expected")
    assert not leftovers(out)


MOMENTS = [("worker", 1), ("worker", 4), ("parent", 0), ("parent", 3), ("parent", 7), ("parent", 11)]


@pytest.mark.parametrize(("role", "at"), MOMENTS)
def test_after_a_kill_one_run_gives_the_same_bytes(
    command_line: CommandLine, tmp_path: Path, role: str, at: int
) -> None:
    data = write_parquet(tmp_path, rows(different=20))
    settings = ("--seq-len", 256, "--workers", 2, "--media", "reference", "--max-shard-size", "8K")

    def run(out: Path, fault: Fault | None = None) -> Any:
        given = ["pack", data, "-o", out, "--tokenizer", command_line.tokenizer, *settings, "--shard-prefix", "p"]
        return command_line.run(*given, out=out, fault=fault)

    ran = run(tmp_path / "out", Fault(at=at, role=role, path=r"/media(/|$)|\.media$", kind="kill_all"))
    assert ran.fired
    done = len(list((tmp_path / "out/.work/media").glob("media-*.json")))
    assert run(tmp_path / "expected").status == 0
    expected = contents(tmp_path / "expected")
    for name, content in contents(tmp_path / "out").items():
        assert name.endswith(".tmp") or content == expected[name], name
    assert run(tmp_path / "out").status == 0
    assert contents(tmp_path / "out") == expected
    counters = json.loads((tmp_path / "out/webdataset/.nv-meta/packing.json").read_bytes())["counters"]
    assert counters["media_shards_reused"] == done
    assert not leftovers(tmp_path / "out")


@pytest.mark.parametrize(
    ("role", "event", "path"),
    [("parent", "open", r"/\.work/media/\.index"), ("worker", "os.fsync", r"/media/\.media-")],
)
def test_a_full_disk_is_one_line_and_the_run_continues_later(
    command_line: CommandLine, tmp_path: Path, role: str, event: str, path: str
) -> None:
    data = write_parquet(tmp_path, rows())
    given = [
        "pack",
        data,
        "-o",
        tmp_path / "out",
        "--tokenizer",
        command_line.tokenizer,
        "--seq-len",
        256,
        "--workers",
        2,
    ]
    given += ["--media", "reference", "--max-shard-size", "8K"]
    fault = Fault(at=0, role=role, event=event, path=path, kind="fail", errno=errno.ENOSPC)
    ran = command_line.run(*given, out=tmp_path / "out", fault=fault)
    assert (ran.fired, ran.status, ran.err.count("\n")) == (True, 1, 1), ran.err
    assert "No space left" in ran.err
    assert not leftovers(tmp_path / "out")
    assert command_line.run(*given, out=tmp_path / "out").status == 0


def test_a_copy_removes_the_media_of_an_earlier_reference(packs: Packs, tmp_path: Path) -> None:
    data = write_parquet(tmp_path, rows())
    packs(data)
    copied = packs(data, media="copy", overwrite=True)
    assert not (tmp_path / "out/media").exists()
    assert parts(copied) == parts(packs(data, "other", "copy"))
    again = packs(data, overwrite=True)
    assert parts(again) == parts(copied)


def test_lengths_and_copies_that_were_measured_first_are_measured_again_only_with_images(
    packs: Packs, tmp_path: Path
) -> None:
    """The first run has no digests of the images in memory."""
    (tmp_path / "text").mkdir()
    data = [write_parquet(tmp_path, rows()), write_jsonl(tmp_path / "text", rows(20)[::4][:2] * 50)]
    data[1].write_text("".join(json.dumps({"id": f"t{i}", "text": "words " * 9}) + "\n" for i in range(100)))
    copied = packs(data, media="copy")
    referenced = packs(data, overwrite=True)
    assert referenced.manifest.counters["reused"] == 100
    assert parts(referenced) == parts(packs(data, "copied", "copy"))
    assert copied.manifest.media_stored == {}


def test_a_changed_input_of_the_same_shape_stores_its_own_images(packs: Packs, tmp_path: Path) -> None:
    data = write_parquet(tmp_path, rows())
    before = packs(data)
    old = set(tars(tmp_path / "out"))
    changed = [record | {"images": [{"bytes": png(30)}]} for record in rows()]
    write_parquet(tmp_path, changed)
    after = packs(data, overwrite=True)
    assert after.manifest.media_stored["images"] == 1
    assert not {name for name in set(tars(tmp_path / "out")) & old if name.startswith("media/media-")}
    assert parts(after) == parts(packs(data, "copied", "copy"))
    assert before.manifest.media_stored["images"] == DIFFERENT


def test_a_record_that_can_be_packed_later_stores_its_images_then(packs: Packs, tmp_path: Path) -> None:
    """Its image comes first in its tar, so the images of finished shards move to other places."""
    records = [as_base64(record) for record in rows()]
    records[1]["images"] = [*as_base64({"images": [{"bytes": png(60)}]})["images"], "later.png"]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    first = packs(data, max_packs_per_shard=1)
    assert first.manifest.rejects == {"missing_image": 1}
    assert first.manifest.media_stored["images"] == DIFFERENT
    (tmp_path / "later.png").write_bytes(png(61))
    second = packs(data, max_packs_per_shard=1)
    assert second.manifest.media_stored["images"] == DIFFERENT + 1
    assert parts(second) == parts(packs(data, "copied", "copy", max_packs_per_shard=1))


def test_digests_of_fewer_records_than_a_copy_measured_are_not_used(packs: Packs, tmp_path: Path) -> None:
    records = [as_base64(record) for record in rows()]
    records[1]["images"] = [*as_base64({"images": [{"bytes": png(60)}]})["images"], "later.png"]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    packs(data)
    (tmp_path / "later.png").write_bytes(png(61))
    copied = parts(packs(data, media="copy", overwrite=True))
    referenced = packs(data, overwrite=True)
    assert (referenced.manifest.packed, referenced.manifest.media_stored["images"]) == (len(records), DIFFERENT + 1)
    assert parts(referenced) == copied


def test_files_of_others_in_the_folder_media_are_refused_and_stay(packs: Packs, tmp_path: Path) -> None:
    data = write_parquet(tmp_path, rows())
    own = tmp_path / "out/media/cat.jpg"
    own.parent.mkdir(parents=True)
    own.write_bytes(png(0))
    limit = re.escape(f"{own.parent} must be free for the images that are in no file, got cat.jpg in it. Move it, or")
    with pytest.raises(ConfigError, match=limit):
        packs(data)
    packs(data, media="copy")
    assert own.read_bytes() == png(0)


def test_input_parts_have_media_of_their_own(packs: Packs, tmp_path: Path) -> None:
    data = write_parquet(tmp_path, rows(200))
    packed = 0
    for index in range(2):
        result = packs(data, "part-{part}", part=(index, 2))
        assert result.manifest.media_stored["images"] == DIFFERENT
        assert parts(result) == parts(packs(data, "copy-{part}", "copy", part=(index, 2)))
        packed += result.manifest.packed
    assert packed == 200


@pytest.mark.parametrize("sample_class", ["PackedTokensSample", "PackedMultiMixQASample", "MultiMixQASample"])
def test_every_flavor_refers_to_stored_media(packs: Packs, tmp_path: Path, sample_class: str) -> None:
    data = write_parquet(tmp_path, rows())
    options = {"sample_class": sample_class, "unpacked": sample_class == "MultiMixQASample"}
    assert parts(packs(data, **options)) == parts(packs(data, "copied", "copy", **options))


def test_images_that_an_adapter_makes(packs: Packs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stored_adapter.py").write_text(ADAPTER.format(blue=0))
    (tmp_path / "data.jsonl").write_text("".join(f'{{"id": "c{i}", "color": {i % 3}}}\n' for i in range(9)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    result = packs("data.jsonl", adapter="stored_adapter:drawn")
    assert result.manifest.media_stored["images"] == 3
    assert parts(result) == parts(packs("data.jsonl", "copied", "copy", adapter="stored_adapter:drawn"))


def test_an_adapter_that_makes_other_images_each_time_is_an_error(
    packs: Packs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "random_adapter.py").write_text(ADAPTER.format(blue="next(calls) % 200"))
    (tmp_path / "data.jsonl").write_text("".join(f'{{"id": "c{i}", "color": {i % 3}}}\n' for i in range(9)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        SourceError, match=r"record 0 of data.jsonl changed since it was measured \(its image 0 has other"
    ):
        packs("data.jsonl", adapter="random_adapter:drawn")


def test_images_that_a_sample_loader_makes_beside_members_of_the_tar(packs: Packs, tmp_path: Path) -> None:
    code = """
from PIL import ImageOps

def sample_loader(raw):
    return {"sequence": ["Two: ", raw["a.jpg"], ImageOps.mirror(raw["a.jpg"]), raw["txt"]]}

def part_filter(part):
    return True
"""
    members = [
        (f"{i}.{part}", value) for i in range(4) for part, value in (("a.jpg", picture(i % 2)), ("txt", " seen."))
    ]
    folder = with_loader(tmp_path / "d", members, code, "InterleavedSample", part_filter=["a.jpg", "txt"])
    result = packs(folder, trust_sample_loader=True)
    assert result.manifest.media_stored["images"] == 2
    assert [locator["source"] for locator in locators(result)] == ["tars", "media"] * 4
    assert parts(result) == parts(packs(folder, "copied", "copy", trust_sample_loader=True))


def test_a_changed_tar_of_media_is_an_error(packs: Packs, tmp_path: Path, encoder: ChatEncoder) -> None:
    from energon_packed import DataChangedError

    result = packs(write_parquet(tmp_path, rows()))
    (tar,) = (tmp_path / "out/media").glob("*.tar")
    content = bytearray(tar.read_bytes())
    content[512 + 100] ^= 1
    tar.write_bytes(content)
    with pytest.raises(DataChangedError, match=f"{tar.name} has other bytes"):
        for pack_index in range(len(dataset := PackedDataset(result.shards, encoder))):
            dataset[pack_index]


def test_a_disk_too_small_for_the_media_is_refused_before_anything_is_replaced(
    packs: Packs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_parquet(tmp_path, rows())
    packs(data)
    before = contents(tmp_path / "out")
    write_parquet(tmp_path, [record | {"images": [{"bytes": png(30)}]} for record in rows()])
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10))
    with pytest.raises(ConfigError, match=r"the tars need about .* but the file system of .* has .* free"):
        packs(data, overwrite=True)
    assert contents(tmp_path / "out") == before


def test_the_table_and_the_progress_show_the_stored_images(
    tmp_path: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_parquet(tmp_path, rows())
    given = ["pack", data, "-o", tmp_path / "out", "--tokenizer", tokenizer_dir, "--seq-len", 256, "--workers", 1]
    monkeypatch.setattr("sys.argv", ["energon-packed", *map(str, given), "--media", "reference"])
    main()
    shown = capsys.readouterr().out
    assert re.search(rf"^media +{DIFFERENT} images", shown, re.MULTILINE)
    assert re.search(rf"stored in media +│ +{DIFFERENT} \(", shown)
    assert list(itertools.islice(re.findall(r"(\w+) seconds", shown), 5)) == [
        "measure",
        "plan",
        "media",
        "write",
        "digest",
    ]
