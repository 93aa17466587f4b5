"""What must not go wrong when data, options or files change between runs, or are not what they seem."""

import base64
import hashlib
import io
import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from energon_packed import (
    ChatEncoder,
    ConfigError,
    PackingManifest,
    PackOptions,
    Progress,
    RejectLimitError,
    SourceError,
    get_packed_loader,
    pack,
)
from tests.encoding.test_spans import FORGETTING
from tests.internals import (
    CHATML_TEMPLATE,
    RecordOffsets,
    RecordRefs,
    ShardReader,
    ShardTask,
    TarShardWriter,
    atomic_path,
    dry_run,
    split_ranges,
)
from tests.sources.tars import write_tar

TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello. " * 30}]


def png(width: int, height: int, seed: int = 0) -> bytes:
    out = io.BytesIO()
    noise = random.Random(seed).randbytes(width * height * 3)
    Image.frombytes("RGB", (width, height), noise).save(out, "PNG")
    return out.getvalue()


def packed_ids(shards: Path) -> list[str]:
    """Ids in the tars, sorted."""
    reader = ShardReader(sorted(shards.glob("*.tar")))
    return sorted(
        ident for pack in range(len(reader)) for ident in json.loads(reader.part(pack, "json")["json"])["ids"]
    )


def unstable(record: dict[str, Any]) -> Any:
    """An adapter whose records change as soon as a file exists."""
    return record["then" if Path(record["marker"]).exists() else "first"]


class Touches(Progress):
    """Makes that file between measuring and writing."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def start(self, stage: str, total: int, unit: str) -> None:
        if stage == "write":
            self.marker.touch()


def unstable_record(folder: Path, first: dict[str, Any], then: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `pack` for a record that is another when it is written."""
    marker, file = folder / "marker", folder / "unstable.jsonl"
    file.write_text(json.dumps({"marker": str(marker), "first": first, "then": then}) + "\n")
    return {"inputs": file, "adapter": f"{__name__}:unstable", "progress": Touches(marker)}


def with_template(tokenizer_dir: Path, folder: Path, template: str) -> Path:
    tokenizer = ChatEncoder.from_pretrained(tokenizer_dir).tokenizer
    tokenizer.chat_template = template
    tokenizer.save_pretrained(str(folder))
    return folder


def test_the_order_of_split_shares_does_not_matter(build: Any) -> None:
    records = [{"messages": TURNS}] * 120
    first = build(records, split={"train": 0.9, "val": 0.1}, max_packs_per_shard=5)
    again = build(split={"val": 0.1, "train": 0.9}, max_packs_per_shard=5)
    assert again.manifest.shards == first.manifest.shards
    assert sum(shard.packs for shard in first.manifest.shards) == first.manifest.packs


@pytest.mark.parametrize("share", [float("nan"), float("inf")])
def test_shares_that_are_no_numbers_are_refused(build: Any, share: float) -> None:
    with pytest.raises(ConfigError, match="`split` must name shares"):
        build([{"messages": TURNS}], split={"train": share})


def test_shares_that_round_lose_no_pack() -> None:
    third = 1 / 3 - 1e-7
    ranges = split_ranges(20_000_000, {"train": third, "val": third, "test": third})
    assert [end for _, end in ranges.values()][-1] == 20_000_000
    assert [start for start, _ in ranges.values()][1:] == [end for _, end in ranges.values()][:-1]


@pytest.mark.parametrize("damage", ["a byte", "the size", "the size, at the same time"])
def test_a_shard_that_changed_since_it_was_written_is_written_again(build: Any, damage: str) -> None:
    first = build([{"messages": TURNS}] * 12, max_packs_per_shard=2)
    entry = first.manifest.shards[1]
    tar = first.shards / entry.name
    before, content = tar.stat(), bytearray(tar.read_bytes())
    content[600] ^= 1
    tar.write_bytes(content if damage == "a byte" else content[:-512])
    later = 0 if damage.endswith("same time") else 1_000_000_000
    os.utime(tar, ns=(before.st_atime_ns, before.st_mtime_ns + later))
    again = build(max_packs_per_shard=2)
    assert again.manifest.shards == first.manifest.shards
    assert hashlib.sha256(tar.read_bytes()).hexdigest() == entry.sha256
    assert again.manifest.counters["shards_written"] == 1
    assert again.manifest.counters["shards_reused"] == len(first.manifest.shards) - 1


def test_a_shard_is_written_again_if_anything_that_its_bytes_depend_on_differs() -> None:
    names = ("source", "row", "address", "size", "length", "media_bytes", "media_stamp")
    columns = {name: np.arange(2) + place for place, name in enumerate(names)}

    def digest(frames: int = 3, **changes: Any) -> str:
        own = {name: changes.pop(name, column) for name, column in columns.items()}
        records = RecordRefs(**own, fragments=changes.pop("fragments", None))
        of_frames = RecordOffsets(files=[], **dict.fromkeys(("file", "offset", "size", "sizes"), np.full(2, frames)))
        values = {"prefix": "a", "first_pack": 3, "offsets": np.array([0, 2]), "media": ("media.tar",), **changes}
        return ShardTask(tar=Path("a.tar"), state=Path("a"), records=records, frames=of_frames, **values).digest()

    assert digest() == digest()
    others: list[dict[str, Any]] = [{name: column + 1} for name, column in columns.items()]
    others += [{"prefix": "b"}, {"first_pack": 4}, {"offsets": np.array([0, 1, 2])}, {"media": ()}, {"frames": 4}]
    others += [{"fragments": np.zeros(2)}]
    assert len({digest(), *(digest(**other) for other in others)}) == len(others) + 1


def test_the_options_in_which_another_run_differs_are_named(build: Any) -> None:
    records: list[Any] = [{"messages": TURNS}] * 3
    build(records)
    with pytest.raises(ConfigError, match=r"another run \(`seed` was 0, now 1, `seq_len` was 256, now 512\)"):
        build(seq_len=512, seed=1)
    with pytest.raises(ConfigError, match=r"another run \(`loss_on` was 'assistant', now 'all'\)\. Set"):
        build(loss_on="all")
    with pytest.raises(ConfigError, match=r"run \(`min_pixels` was not set, now 56, `fps` was not set, now 1\.0\)"):
        build(fps=1.0, min_pixels=56)
    with pytest.raises(ConfigError, match=r"another run \(the content of the input differs, the path or time .* dif"):
        build(records[:2])
    assert build(records, overwrite=True)


def test_maps_and_the_code_of_adapters_are_named(build: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build([{"a": "Hi", "b": "Hello."}], map="user=a,assistant=b")
    with pytest.raises(ConfigError, match=r"run \(`map` was \"user=a,assistant=b\", now \"user=b,assistant=a\"\)"):
        build(map="user=b,assistant=a")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("one", "two"):
        Path(f"adapter_{name}.py").write_text(f"def convert(record): return {{'text': record['a'] + '{name}'}}\n")
    build(adapter="adapter_one:convert", overwrite=True)
    with pytest.raises(ConfigError, match=r"`adapter` was .*one:.*, now .*two:.*, the code of the adapter differs"):
        build(adapter="adapter_two:convert")


def test_a_file_that_is_read_from_a_converted_copy_may_not_change(
    build: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data.csv"
    data.write_text("text\nHello.\nBye.\n")
    (tmp_path / "growing_adapter.py").write_text(
        f"def convert(record):\n    with open({str(data)!r}, 'a') as file:\n        file.write('New.\\n')\n"
        "    return record\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SourceError, match=r"data.csv was replaced .* in use \(17 bytes before, \d+ now\); let its wr"):
        build(inputs=(str(data),), adapter="growing_adapter:convert")


def test_another_image_root_is_another_build(build: Any, tmp_path: Path) -> None:
    for number, name in enumerate("ab"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.png").write_bytes(png(60, 40, number))
    records = [{"images": ["x.png"], "captions": ["c"]}]
    first = build(records, image_root=tmp_path / "a")
    with pytest.raises(ConfigError, match=r"contains shards of another run \(`image_root` was .*/a.*, now .*/b"):
        build(image_root=tmp_path / "b")
    second = build(image_root=tmp_path / "b", overwrite=True)
    third = build(image_root=tmp_path / "a", overwrite=True)
    assert first.manifest.shards == third.manifest.shards != second.manifest.shards
    for entry in third.manifest.shards:
        assert hashlib.sha256((third.shards / entry.name).read_bytes()).hexdigest() == entry.sha256


def test_overwrite_touches_nothing_but_its_own_files(build: Any) -> None:
    first = build([{"messages": TURNS}])
    (first.shards / "notes.txt").write_text("mine")
    build(seq_len=300, overwrite=True)
    assert (first.shards / "notes.txt").read_text() == "mine"


def test_hidden_files_of_others_are_left_alone(build: Any, tmp_path: Path) -> None:
    theirs = [tmp_path / "out" / name for name in (".mine.tmp", "sub/.mine.tmp", "webdataset/.mine.tmp")]
    ours = [
        tmp_path / "out" / name
        for name in (".lengths.parquet.7.tmp", "webdataset/.pack-000000.tar.7.tmp", ".work/measure-x/.a.arrow.7.tmp")
    ]
    for file in (*theirs, *ours):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x")
    build([{"messages": TURNS}])
    assert all(file.exists() for file in theirs)
    assert not any(file.exists() for file in ours)


def test_default_ids_of_files_with_one_name_differ(build: Any, tmp_path: Path) -> None:
    for folder in "pq":
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "part.jsonl").write_text(json.dumps({"messages": TURNS, "n": folder}) + "\n")
    result = build(inputs=tuple(str(tmp_path / folder / "part.jsonl") for folder in "pq"))
    assert len(set(pq.read_table(result.lengths)["id"].to_pylist())) == 2


def test_an_empty_id_is_the_default_id(build: Any) -> None:
    """Else all records of an id column without values have one name, in batches and in the order log."""
    pair = {"prompt": "a", "chosen": "b", "rejected": "c", "id": ""}
    records = [{"messages": TURNS, "id": ""}, {"prompt": "a", "completion": "b", "id": ""}, {"id": ""}]
    result = build(records)
    assert pq.read_table(result.lengths)["id"].to_pylist() == ["data:0", "data:1", "data:2"]
    assert packed_ids(result.shards) == ["data:0", "data:1"]
    assert [json.loads(line)["id"] for line in result.rejects.read_text().splitlines()] == ["data:2"]
    assert packed_ids(build([pair], overwrite=True).shards) == ["data:0#0", "data:0#1"]


def test_a_changed_tokenizer_folder_is_loaded_anew(build: Any, tokenizer_dir: Path, tmp_path: Path) -> None:
    fingerprints = set()
    for template in (CHATML_TEMPLATE, "Once. " + CHATML_TEMPLATE):
        folder = with_template(tokenizer_dir, tmp_path / "t", template)
        fingerprints.add(build([{"messages": TURNS}], tokenizer=folder, overwrite=True).manifest.tokenizer_fingerprint)
    assert len(fingerprints) == 2


def test_paths_may_be_texts(build: Any, tokenizer_dir: Path, tmp_path: Path) -> None:
    result = build([{"messages": TURNS}], tokenizer=str(tokenizer_dir), output_dir=str(tmp_path / "text"))
    assert result.manifest.packed == 1


def test_an_image_root_that_is_not_there_is_named(build: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="`image_root` must be a folder, got .*nowhere"):
        build([{"messages": TURNS}], image_root=tmp_path / "nowhere")


def test_csv_texts_stay_texts(build: Any, encoder: ChatEncoder, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('prompts,captions\nSay it.,"[""a""]"\n')
    result = build(inputs=(str(tmp_path / "a.csv"),))
    batch = next(iter(get_packed_loader(result.shards, encoder, epochs=1, num_workers=0)))
    assert '["a"]<|im_end|>' in encoder.tokenizer.decode(batch.input_ids[0])


def test_stray_shards_of_an_earlier_run_go(build: Any, tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"{number}.png").write_bytes(png(200, 200, number))
    records = [{"images": [f"{number}.png"], "captions": ["c"]} for number in range(20)]
    assert len(build(records, max_packs_per_shard=1).manifest.shards) > 3
    for number in range(14):
        (tmp_path / f"{number}.png").unlink()
    result = build(max_packs_per_shard=1, resume=False)
    assert {p.name for p in result.shards.glob("*.tar")} == {shard.name for shard in result.manifest.shards}
    assert len(list(result.shards.glob("*.idx"))) == len(result.manifest.shards)


def test_a_mended_image_is_measured_again(build: Any, tmp_path: Path) -> None:
    records = [{"images": ["x.png"], "captions": ["c"]}, {"messages": TURNS}]
    assert build(records).manifest.rejects == {"missing_image": 1}
    (tmp_path / "x.png").write_bytes(png(60, 40))
    result = build()
    assert result.manifest.rejects == {}
    assert packed_ids(result.shards) == ["data:0", "data:1"]


ANSWERS = {"prompt": "a", "completions": ["b", "c", "d"], "scores": [1, 2, 3]}


@pytest.mark.parametrize(
    ("first", "then", "message"),
    [
        (
            {"text": "<image>c", "images": ["x.png"]},
            {"text": "c"},
            r"it has no media any more, but had 7308 bytes\); run again$",
        ),
        (
            ANSWERS,
            ANSWERS | {"completions": ["b", "c"], "scores": [1, 2]},
            r"it has 2 samples, and had more\); run again with `resume=False`$",
        ),
    ],
)
def test_a_record_that_is_another_when_it_is_written_stops_the_run(
    tmp_path: Path, tokenizer_dir: Path, first: dict[str, Any], then: dict[str, Any], message: str
) -> None:
    (tmp_path / "x.png").write_bytes(png(60, 40))
    run = unstable_record(tmp_path, first, then)
    with pytest.raises(SourceError, match=message):
        pack(**run, output_dir=tmp_path / "out", tokenizer=tokenizer_dir, seq_len=256, workers=1)


@pytest.mark.parametrize("max_packs_per_shard", [1, 3, 1000])
def test_images_that_come_back_between_runs(build: Any, tmp_path: Path, max_packs_per_shard: int) -> None:
    """The plan is another one each time, so no finished shard of an earlier plan may stay."""
    records = [{"id": f"r{n:02}", "images": [f"{n}.png"], "captions": ["word " * (n % 7 + 1)]} for n in range(40)]
    late = (7, 30, 11)
    for number in set(range(40)) - set(late):
        (tmp_path / f"{number}.png").write_bytes(png(60 + 20 * (number % 5), 40, number))
    options = {"max_packs_per_shard": max_packs_per_shard, "max_reject_rate": 0.5}
    build(records, **options)
    for number in late:
        (tmp_path / f"{number}.png").write_bytes(png(200, 100, number))
        result = build(**options)
        there = sorted(record["id"] for n, record in enumerate(records) if (tmp_path / f"{n}.png").exists())
        assert packed_ids(result.shards) == there
    assert result.manifest.rejects == {}


def bmp(color: int) -> bytes:
    """An image whose size in bytes does not depend on its pixels."""
    out = io.BytesIO()
    Image.new("RGB", (60, 40), (color, color, color)).save(out, "BMP")
    return out.getvalue()


def replaced(path: Path, content: bytes) -> None:
    """Write another content of the same size, at a later time."""
    before = path.stat()
    assert len(content) == before.st_size
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1_000_000))


@pytest.mark.parametrize("sample_class", ["PackedCaptioningSample", "PackedTokensSample"])
def test_images_replaced_between_runs_are_packed_again(build: Any, tmp_path: Path, sample_class: str) -> None:
    """Of the same size in bytes and pixels, as lengths would be the same; only shards with such an image change."""
    for number in range(6):
        (tmp_path / f"{number}.bmp").write_bytes(bmp(number))
    records = [{"images": [f"{number}.bmp"], "captions": ["c"]} for number in range(6)]
    options = {"max_samples_per_pack": 1, "max_packs_per_shard": 1, "sample_class": sample_class}
    first = build(records, **options)
    assert build(**options).manifest.counters | {"tokenized": 0} == {
        "measured": 0, "tokenized": 0, "reused": 6, "shards_written": 0, "shards_reused": 6,
    }  # fmt: skip
    replaced(tmp_path / "3.bmp", bmp(99))
    again = build(**options)
    fresh = build(**options, output_dir=tmp_path / "fresh", shard_prefix=first.manifest.shard_prefix)
    assert again.manifest.shards == fresh.manifest.shards
    assert len(set(again.manifest.shards) - set(first.manifest.shards)) == 1
    assert (again.manifest.counters["measured"], again.manifest.counters["shards_written"]) == (6, 1)


def test_any_changed_image_is_measured_again(build: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "small.png").write_bytes(png(60, 40))
    (tmp_path / "large.png").write_bytes(png(200, 100))
    (tmp_path / "x.png").write_bytes(png(60, 40))
    small = build([{"images": ["x.png"], "captions": ["c"]}]).manifest.tokens
    (tmp_path / "x.png").write_bytes(png(200, 100))
    large = build(seq_len=300, overwrite=True).manifest.tokens
    assert small < large
    (tmp_path / "x.png").unlink()
    (tmp_path / "x.png").symlink_to("small.png")
    assert build(seq_len=300).manifest.tokens == small
    (tmp_path / "x.png").unlink()
    (tmp_path / "x.png").symlink_to("large.png")
    assert build(seq_len=300).manifest.tokens == large
    assert caplog.text.count("have changed since they were measured: 1 records are measured again") == 3
    (tmp_path / "large.png").unlink()
    with pytest.raises(RejectLimitError, match="missing_image"):
        build(seq_len=300)


def test_changed_images_count_as_work_of_a_dry_run(build: Any, tmp_path: Path, tokenizer_dir: Path) -> None:
    (tmp_path / "x.bmp").write_bytes(bmp(1))
    build([{"images": ["x.bmp"], "captions": ["c"]}])
    options = PackOptions(
        inputs=(str(tmp_path / "data.jsonl"),), output_dir=tmp_path / "out", tokenizer=tokenizer_dir, seq_len=256
    )
    assert dry_run(options).to_measure == 0
    replaced(tmp_path / "x.bmp", bmp(2))
    assert dry_run(options).to_measure == 1


@pytest.mark.parametrize("name", ["a.tar", "a.parquet"])
def test_images_inside_a_replaced_input_are_packed_again(build: Any, tmp_path: Path, name: str) -> None:
    path = tmp_path / name

    def write(color: int) -> None:
        if name == "a.parquet":
            pq.write_table(pa.table({"image": [bmp(color)], "text": ["c"]}), path, compression="none")
            return
        write_tar(path, [("0.bmp", bmp(color)), ("0.txt", "c")])

    write(1)
    first = build(inputs=(str(path),))
    before = path.stat()
    write(2)
    assert path.stat().st_size == before.st_size
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1_000_000))
    again = build(inputs=(str(path),), overwrite=True)
    assert bmp(2) in (again.shards / again.manifest.shards[0].name).read_bytes()
    assert again.manifest.shards != first.manifest.shards


@pytest.mark.parametrize("folder", ["out", "out/webdataset"])
def test_a_dataset_is_not_packed_into_itself(build: Any, tokenizer_dir: Path, tmp_path: Path, folder: str) -> None:
    good = build([{"messages": TURNS}] * 5)
    before = {tar: tar.read_bytes() for tar in good.shards.glob("*.tar")}
    with pytest.raises(ConfigError, match=r"\.tar is an input, and the run would replace it; use another"):
        pack(tmp_path / folder, output_dir=tmp_path / "out", tokenizer=tokenizer_dir, seq_len=99, overwrite=True)
    assert {tar: tar.read_bytes() for tar in good.shards.glob("*.tar")} == before
    assert PackingManifest.load(good.shards) == good.manifest


def test_an_input_that_is_lost_whole_is_named(
    text_tokenizer_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, rows in (("a", [{"messages": TURNS}] * 50), ("b", [{"x": 1}]), ("c", [{"x": 1}, {"messages": TURNS}])):
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    inputs = [tmp_path / f"{name}.jsonl" for name in "abc"]
    pack(inputs, output_dir=tmp_path / "out", tokenizer=text_tokenizer_dir, seq_len=512, workers=1)
    assert [one.getMessage() for one in caplog.records if one.levelname == "WARNING"] == [
        f"{tmp_path}/b.jsonl: none of its 1 records can be used (missing_field); see rejects.jsonl"
    ]


@pytest.mark.parametrize("name", ["run.json", "owner.json"])
@pytest.mark.parametrize("content", [b"[]", b"null", b"\xff", None])
def test_damaged_notes_of_an_earlier_run_stop_nothing(build: Any, name: str, content: bytes | None) -> None:
    """None stands for a FIFO."""
    good = build([{"messages": TURNS}] * 5)
    note = good.shards.parent / ".work" / name
    note.unlink(missing_ok=True)
    _ = os.mkfifo(note) if content is None else note.write_bytes(content)
    if name == "run.json":
        with pytest.raises(ConfigError, match="contains shards of another run"):
            build()
    assert build(overwrite=True).manifest.shards == good.manifest.shards


def test_a_file_is_no_output_folder(build: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file is a file; pass a folder"):
        build([{"messages": TURNS}], output_dir=tmp_path / "file")


def test_overwrite_keeps_the_old_data_until_the_new_is_sure(build: Any) -> None:
    good = build([{"messages": TURNS}] * 5)
    before = next(good.shards.glob("*.tar")).read_bytes()
    beside = {file: file.read_bytes() for file in (good.lengths, good.rejects)}
    with pytest.raises(RejectLimitError, match=r"See .*\.work/rejects\.jsonl\. Fix the data"):
        build([{"messages": TURNS}, {"x": 1}], max_reject_rate=0, overwrite=True)
    assert {file: file.read_bytes() for file in beside} == beside
    assert next(good.shards.glob("*.tar")).read_bytes() == before
    assert PackingManifest.load(good.shards) == good.manifest
    replaced = build(overwrite=True)
    assert [json.loads(line)["reason"] for line in replaced.rejects.open()] == ["missing_field"]
    assert pq.read_table(replaced.lengths).num_rows == 2
    assert replaced.lengths == good.lengths


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux only")
def test_a_full_disk_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.bin").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as caught, atomic_path(tmp_path / "y.bin") as temporary:
        temporary.symlink_to("/dev/full")
        with temporary.open("wb") as out:
            out.write(b"x" * 100_000)
    assert caught.value.filename == str(tmp_path / "y.bin")
    with pytest.raises(OSError, match="No space left") as caught, TarShardWriter(tmp_path / "z.tar") as writer:
        writer._stream = open("/dev/full", "wb")  # noqa: SIM115
        writer.add("a", [("json", b"x" * 3_000_000)])
    assert caught.value.filename == str(tmp_path / "z.tar")


def test_a_template_that_refuses_some_texts_rejects_just_those(
    build: Any, tokenizer_dir: Path, tmp_path: Path
) -> None:
    template = "{% if messages[-1]['content'] == 'bad' %}{{ raise_exception('no') }}{% endif %}" + CHATML_TEMPLATE
    folder = with_template(tokenizer_dir, tmp_path / "t", template)
    records = [{"prompts": ["x"], "captions": ["bad" if n % 6 == 5 else "good"]} for n in range(300)]
    shards = []
    for workers in (1, 2):
        result = build(
            records, tokenizer=folder, workers=workers, output_dir=tmp_path / str(workers), shard_prefix="x"
        )
        assert result.manifest.rejects == {"bad_role": 50}
        shards.append(result.manifest.shards)
    assert shards[0] == shards[1]


def test_texts_that_a_template_rewrites_cost_their_records(build: Any, tokenizer_dir: Path, tmp_path: Path) -> None:
    folder = with_template(tokenizer_dir, tmp_path / "t", FORGETTING)
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    plain = {"messages": [{"role": role, "content": text} for role, text in turns]}
    thinking = json.loads(json.dumps(plain).replace('"b"', '"<think>t</think>b"'))
    assert build([plain], tokenizer=folder).manifest.packed == 1
    result = build([plain, thinking], tokenizer=folder, overwrite=True)
    assert (result.manifest.packed, result.manifest.rejects) == (1, {"not_rendered": 1})


def test_a_template_with_a_date_gives_the_same_tokens_every_day(
    build: Any, tokenizer_dir: Path, tmp_path: Path
) -> None:
    template = "{{ strftime_now('%d %b %Y') }}{{ date_string }}" + CHATML_TEMPLATE
    folder = with_template(tokenizer_dir, tmp_path / "t", template)
    result = build([{"messages": TURNS}], tokenizer=folder, sample_class="PackedTokensSample")
    encoder = ChatEncoder.from_pretrained(folder)
    batch = next(iter(get_packed_loader(result.shards, encoder, epochs=1, num_workers=0)))
    assert encoder.tokenizer.decode(batch.input_ids[0]).startswith("26 Jul 202426 Jul 2024<|im_start|>user")


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"input_ids": [50]}, "no_supervised_tokens"),
        ({"input_ids": [50, 51, 52], "loss_mask": [1, 0, 0]}, "no_supervised_tokens"),
        ({"input_ids": [50, 51, 52], "labels": [-100, -100, -100]}, "no_supervised_tokens"),
        ({"input_ids": [50, -7]}, "missing_field"),
        ({"input_ids": [50, 10**12]}, "missing_field"),
        ({"input_ids": [50, 51], "labels": [-100, 10**6]}, "missing_field"),
        ({"messages": TURNS, "tools": ["f"]}, "bad_json"),
    ],
)
def test_what_would_fail_in_training_is_rejected_while_packing(build: Any, record: Any, reason: str) -> None:
    result = build([record, {"messages": TURNS}], sample_class="PackedTokensSample")
    assert result.manifest.rejects == {reason: 1}


def test_an_image_in_the_system_message_loads(build: Any, encoder: ChatEncoder) -> None:
    image = "data:image/png;base64," + base64.b64encode(png(60, 40)).decode()
    record = {"messages": [{"role": "system", "content": "Look: <image>"}, *TURNS], "images": [image]}
    result = build([record])
    batch = next(iter(get_packed_loader(result.shards, encoder, epochs=1, num_workers=0)))
    assert len(batch.image_grid_thw) == 1


def test_damaged_pixels_are_found_while_packing(build: Any, tmp_path: Path) -> None:
    data = bytearray(png(200, 100))
    data[500:600] = bytes(100)
    (tmp_path / "x.png").write_bytes(data)
    result = build([{"images": ["x.png"], "captions": ["c"]}, {"messages": TURNS}])
    assert result.manifest.rejects == {"corrupt_image": 1}


@pytest.mark.parametrize("flavor", ["PackedCaptioningSample", "PackedTokensSample", "PackedMultiMixQASample"])
def test_shards_keep_to_their_size(build: Any, tmp_path: Path, flavor: str) -> None:
    records = [{"prompts": ["x"], "captions": ['ü word "q" ' * (n % 40 + 1)]} for n in range(600)]
    result = build(records, sample_class=flavor, max_shard_bytes=60_000)
    assert len(result.manifest.shards) > 2
    # A tar ends with up to 10 KiB of zeros, which no plan can spare.
    assert all(shard.bytes <= 60_000 + 11_264 for shard in result.manifest.shards)
    assert sum(shard.bytes for shard in result.manifest.shards) > 0.4 * 60_000 * len(result.manifest.shards)


def test_a_changed_file_is_read_anew_in_the_same_process(build: Any, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.feather

    for rows in (3, 5):
        pa.feather.write_feather(pa.table({"text": ["Once upon a time."] * rows}), tmp_path / "a.feather")
        result = build(inputs=(str(tmp_path / "a.feather"),), overwrite=True)
        assert result.manifest.records == rows


def test_a_byte_order_mark_costs_no_record(build: Any, tmp_path: Path) -> None:
    for name, text in (("a.jsonl", '{"text": "Once upon."}\r\n'), ("b.json", '[{"text": "Twice upon."}]')):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.encode())
    result = build(inputs=(str(tmp_path / "a.jsonl"), str(tmp_path / "b.json")))
    assert (result.manifest.packed, result.manifest.rejects) == (2, {})


def test_categorical_parquet_and_long_csv_cells(build: Any, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.csv

    column = pa.array(["One text.", "Two texts."] * 4).dictionary_encode()
    with pq.ParquetWriter(tmp_path / "a.parquet", pa.schema({"text": column.type})) as writer:
        writer.write_table(pa.table({"text": column}))
        writer.write_table(pa.table({"text": pa.array(["Three texts."] * 3).dictionary_encode()}))
    pa.csv.write_csv(pa.table({"text": ["word " * 600_000, "short text"], "fps": ["2", "3"]}), tmp_path / "b.csv")
    result = build(inputs=(str(tmp_path / "a.parquet"), str(tmp_path / "b.csv")))
    assert (result.manifest.packed, result.manifest.rejects) == (12, {"overlong": 1})
