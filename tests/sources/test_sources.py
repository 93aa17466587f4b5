"""Every format gives the same records, in order and one by one."""

import csv
import gzip
import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_packed import Source, SourceError
from tests.internals import JsonlSource, json_source, open_sources, parquet_batches

RECORDS = [
    {
        "id": f"r{i}",
        "messages": [
            {"role": "user", "content": f"Line\nbreak ü {i}"},
            {"role": "assistant", "content": "x" * (i % 50)},
        ],
        "images": [],
    }
    for i in range(700)
]
LINES = "".join(json.dumps(record) + "\n" for record in RECORDS)


def write(folder: Path, name: str) -> Path:
    """RECORDS in the format that the name says."""
    path = folder / name
    table = pa.Table.from_pylist(RECORDS)
    if name.endswith(".jsonl"):
        path.write_text(LINES)
    elif name.endswith(".gz"):
        path.write_bytes(gzip.compress(LINES.encode()))
    elif name.endswith(".zst"):
        half = len(LINES) // 2
        path.write_bytes(b"".join(zstandard.compress(part.encode()) for part in (LINES[:half], LINES[half:])))
    elif name.endswith(".json"):
        path.write_text(json.dumps(RECORDS, indent=1))
    elif name.endswith(".parquet"):
        pa.parquet.write_table(table, path, row_group_size=100)
    elif name.endswith(".feather"):
        pa.feather.write_feather(table, path, compression="lz4")
    elif name.endswith(".arrow"):
        with pa.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=33)
    elif name.endswith(".csv"):
        cells = {key: [json.dumps(r[key]) if key != "id" else r[key] for r in RECORDS] for key in RECORDS[0]}
        pa.csv.write_csv(pa.table(cells), path)
    else:
        datasets.Dataset.from_list(RECORDS).save_to_disk(str(path), num_shards=3)
    return path


def read_all(sources: list[Source]) -> list[Any]:
    return [row.record for source in sources for chunk in source.chunks() for row in source.scan(*chunk)]


@pytest.mark.parametrize(
    "name",
    ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.json", "a.parquet", "a.feather", "a.arrow", "a.csv", "saved"],
)
def test_formats_read_in_order_and_one_by_one(tmp_path: Path, name: str) -> None:
    sources = open_sources([write(tmp_path, name)], work_dir=tmp_path / "work")
    assert read_all(sources) == RECORDS
    for source in sources:
        rows = [row for chunk in source.chunks() for row in source.scan(*chunk)]
        assert [source.row(one) for chunk in source.chunks() for one in source.held(*chunk)] == rows
        for row in rows[::97]:
            assert source.read(row.address, row.size) == row
        addresses, sizes = (
            np.array(column) for column in zip(*((row.address, row.size) for row in rows), strict=True)
        )
        first = {".csv": 2, ".jsonl": 1}.get("." + name.split(".")[1] if "." in name else "", 0)  # 0: no lines
        expected = [first and first + place for place in range(len(rows))]
        assert source.line_numbers(addresses, sizes).tolist() == expected
        assert source.row_numbers(addresses.tolist()) == list(range(len(rows)))
        # The later half as an input part: its records are counted from its start, and its lines are not known.
        source.share = (1, 2, 2)
        part = [row.address for chunk in source.chunks() for row in source.scan(*chunk)]
        assert source.row_numbers(part) == list(range(len(part)))
        if name.endswith(("jsonl", "gz", "zst")):
            assert not source.line_numbers(np.array(part), sizes[-len(part) :]).any()


@given(
    lines=st.lists(st.sampled_from(["", " ", '{"a": 1}', '{"b": "' + "x" * 40 + '"}', "broken"]), max_size=30),
    step=st.integers(1, 90),
    newline_at_end=st.booleans(),
)
@settings(max_examples=200)
def test_any_cut_into_ranges_gives_every_line_once(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], step: int, newline_at_end: bool
) -> None:
    path = tmp_path_factory.mktemp("ranges") / "a.jsonl"
    path.write_text("\n".join(lines) + ("\n" if newline_at_end and lines else ""))
    source = JsonlSource(path)
    end = source.extent()
    rows = [row for start in range(0, end, step) for row in source.scan(start, min(start + step, end))]
    assert len(rows) == sum(bool(line.strip()) for line in lines)
    assert [row.address for row in rows] == sorted({row.address for row in rows})
    assert sum(row.reject is not None for row in rows) == lines.count("broken")
    numbers = [line for line, text in enumerate(lines, start=1) if text.strip()]
    places = np.array([[row.address, row.size] for row in rows], dtype=np.int64).reshape(-1, 2)
    assert source.line_numbers(*places.T).tolist() == numbers
    some = places[1::2] * [1, 0]  # sizes need not be known
    assert source.line_numbers(*some.T).tolist() == numbers[1::2]
    assert source.line_numbers(*places[:0].T).tolist() == []


def test_lines_are_counted_in_memory_that_does_not_grow_with_blank_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_source, "_BLOCK", 1 << 12)
    count = 50_000
    (tmp_path / "a.jsonl").write_text("{}\n\n" * count)
    source = JsonlSource(tmp_path / "a.jsonl")
    addresses, lines = 4 * np.arange(count), np.zeros(count, dtype=np.int64)
    tracemalloc.start()
    try:
        source.line_numbers(addresses, np.full(count, 3, dtype=np.int32), lines)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert lines.tolist() == (2 * np.arange(count) + 1).tolist()
    assert peak < 10 * count


def bytes_read() -> int:
    """Bytes that this process has read from files so far, by all system calls."""
    return int(Path("/proc/self/io").read_text().split("rchar:")[1].split()[0])


@pytest.mark.parametrize("lines", [[300] * 30_000, [300] * 1_000 + [16 << 20] + [300] * 1_000, [8 << 20] * 2])
def test_ranges_read_a_file_about_once_however_long_its_lines_are(tmp_path: Path, lines: list[int]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"".join(b'{"text": "' + b"x" * size + b'"}\n' for size in lines))
    source = JsonlSource(path)
    before = bytes_read()
    read = [len(row.record["text"]) for start, stop in source.chunks() for row in source.scan(start, stop)]
    assert read == lines
    assert len(source.chunks()) > 30
    assert bytes_read() - before < 3 * path.stat().st_size


def test_a_range_inside_a_long_line_does_not_read_the_line(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"text": "x" * 8_000_000}) + "\n" + json.dumps({"text": "next"}) + "\n")
    source = JsonlSource(path)
    step = 250_000
    tracemalloc.start()
    inside = [list(source.scan(start, start + step)) for start in range(step, 7_500_000, step)]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert not any(inside)
    assert peak < 3_000_000  # the buffer of the file, and a range
    assert [row.record for row in source.scan(7_750_000, 8_000_020)] == [{"text": "next"}]


def test_globs_and_several_inputs(tmp_path: Path) -> None:
    for part in (2, 1, 10):
        (tmp_path / f"part-{part:02d}.jsonl").write_text(f'{{"n": {part}}}\n')
    (tmp_path / "more.jsonl").write_text('{"n": 0}\n')
    sources = open_sources([tmp_path / "more.jsonl", str(tmp_path / "part-*.jsonl")], work_dir=tmp_path)
    assert [record["n"] for record in read_all(sources)] == [0, 1, 2, 10]


def test_image_bytes_of_a_parquet_file(tmp_path: Path) -> None:
    images = [[{"bytes": bytes([i] * 20), "path": None}] for i in range(5)]
    pa.parquet.write_table(pa.table({"images": images, "captions": [["c"]] * 5}), tmp_path / "a.parquet")
    records = read_all(open_sources([tmp_path / "a.parquet"], work_dir=tmp_path))
    assert [record["images"] for record in records] == images


def test_huge_numbers_in_a_json_array_stop_nothing(tmp_path: Path) -> None:
    huge = 10**40
    (tmp_path / "a.json").write_text(f'[{{"id": {huge}, "fps": 1.5}}, {{"fps": 1e400}}, {{"id": 1}}]')
    records = read_all(open_sources([tmp_path / "a.json"], work_dir=tmp_path))
    assert len(records) == 3
    assert (records[0]["fps"], records[2]) == (1.5, {"id": 1})


def test_elements_of_an_array_may_extend_over_many_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_source, "_BLOCK", 7)
    (tmp_path / "a.json").write_text(json.dumps(RECORDS[:20], indent=1))
    assert read_all(open_sources([tmp_path / "a.json"], work_dir=tmp_path)) == RECORDS[:20]


def test_a_converted_copy_is_made_once(tmp_path: Path) -> None:
    path = write(tmp_path, "a.parquet")
    copies = []
    for _ in range(2):
        source = open_sources([path], work_dir=tmp_path)[0]
        copies.append((source.data, source.data.stat().st_ino))
    assert copies[0] == copies[1]


def test_a_copy_elsewhere_has_the_same_fingerprint(tmp_path: Path) -> None:
    first = write(tmp_path, "a.jsonl")
    (tmp_path / "b.jsonl").write_bytes(first.read_bytes())
    (tmp_path / "c.jsonl").write_bytes(first.read_bytes()[:-2] + b" \n")
    prints = [JsonlSource(tmp_path / f"{name}.jsonl").fingerprint() for name in "abc"]
    assert prints[0] == prints[1] != prints[2]
    ends = []
    for end in (b"x", b"y"):  # of a large file, of which samples are read
        (tmp_path / "large.jsonl").write_bytes(bytes(3 << 20) + end)
        ends.append(JsonlSource(tmp_path / "large.jsonl").fingerprint())
    assert ends[0] != ends[1]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"x", "unknown format; known formats: .jsonl"),
        ("a.json", b'[{"a": 1}, {"a"', "not a complete JSON array"),
        ("a.json", b'[{"a": 1},]', "not a complete JSON array: element 1 is empty, at byte 10"),
        ("a.json", b'[{"a": 1}]\n[{"a": 2}]', "not a complete JSON array: extra data after the JSON array at byte 10"),
        ("a.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 1000, mtime=0)[:-9], "Copy the complete file again."),
        ("a.jsonl.zst", b"\x28\xb5\x2f\xfd\x00bad", "cannot be decompressed"),
        ("a.parquet", b"PAR1 nothing", "not a readable Parquet file: .* Copy the complete file again."),
        ("a.arrow", b"nothing", "not an Arrow file"),
    ],
)
def test_broken_files_are_named_in_one_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SourceError, match=message) as caught:
        read_all(open_sources([tmp_path / name], work_dir=tmp_path / "work"))
    assert name in str(caught.value)


def test_invalid_inputs_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}\n")
    with pytest.raises(SourceError, match="listed twice"):
        open_sources([tmp_path / "a.jsonl", str(tmp_path / "*.jsonl")], work_dir=tmp_path)
    with pytest.raises(SourceError, match="nothing matches .* Check the folder and the pattern."):
        open_sources([str(tmp_path / "*.parquet")], work_dir=tmp_path)
    with pytest.raises(SourceError, match=r"a.json: no such file. Did you mean a.jsonl\?"):
        open_sources([str(tmp_path / "a.json")], work_dir=tmp_path)
    with pytest.raises(SourceError, match=r"other.jsonl: no such file. Check the path."):
        open_sources([str(tmp_path / "other.jsonl")], work_dir=tmp_path)
    with pytest.raises(SourceError, match=r"none/a.jsonl: no such file. Check the path."):
        open_sources([str(tmp_path / "none" / "a.jsonl")], work_dir=tmp_path)
    with pytest.raises(SourceError, match="no input file"):
        open_sources([], work_dir=tmp_path)
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(SourceError, match=r"state.json is not a file of a Hugging Face dataset"):
        open_sources([tmp_path], work_dir=tmp_path)
    datasets.DatasetDict({"train": datasets.Dataset.from_list(RECORDS[:3])}).save_to_disk(str(tmp_path / "dict"))
    with pytest.raises(SourceError, match="has the splits train; set `source_split` to one of them"):
        open_sources([tmp_path / "dict"], work_dir=tmp_path)


def test_nested_dictionaries_and_large_rows_of_parquet(tmp_path: Path) -> None:
    words = pa.array([[{"role": "user", "n": k}] for k in range(200)])
    coded = pa.array(["user"] * 200).dictionary_encode()
    turns = pa.ListArray.from_arrays(pa.array(range(201), pa.int32()), pa.StructArray.from_arrays([coded], ["role"]))
    table = pa.table({"id": pa.array([str(k) for k in range(200)]), "messages": turns, "words": words})
    pyarrow.parquet.write_table(table, tmp_path / "d.parquet", row_group_size=50)
    (source,) = open_sources([str(tmp_path / "d.parquet")], work_dir=tmp_path / "work")
    rows = [row.record for row in source.scan(0, source.extent())]
    assert [row["id"] for row in rows] == [str(k) for k in range(200)]
    assert all(row["messages"] == [{"role": "user"}] for row in rows)


@pytest.mark.parametrize(("num_bytes", "most"), [(1 << 20, 7), ((64 << 20) * 50 // 11, 1)])  # batches of 11 rows, 2, 1
def test_batches_that_cannot_be_joined_are_read_in_smaller_ones(num_bytes: int, most: int) -> None:
    table = pa.table({"x": range(100)})

    class Stubborn:
        """Refuses batches of more than `most` rows, after some that were fine."""

        num_row_groups = 2
        metadata = SimpleNamespace(
            num_rows=100, row_group=lambda group: SimpleNamespace(num_rows=50, total_byte_size=num_bytes)
        )

        def iter_batches(self, batch_size: int, row_groups: list[int]) -> Iterator[Any]:
            (group,) = row_groups
            for start in range(0, 50, batch_size):
                if start >= 11 and batch_size > most:
                    raise pa.ArrowNotImplementedError("Nested data conversions not implemented")
                yield table.slice(50 * group + start, min(batch_size, 50 - start)).to_batches()[0]

    batches = list(parquet_batches(Stubborn()))
    assert pa.Table.from_batches(batches)["x"].to_pylist() == list(range(100))


def test_objects_of_a_table_lose_the_null_keys_of_other_rows(tmp_path: Path) -> None:
    """A column has the keys of all rows; those that a call does not have must not be trained on as null."""
    calls = [{"name": "weather", "arguments": {"city": "Paris"}}, {"name": "add", "arguments": {"x": 1, "y": None}}]
    records = [
        {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}],
         "tools": [{"name": call["name"], "parameters": {key: "string" for key in call["arguments"]}}]}
        for call in calls
    ]  # fmt: skip
    pyarrow.parquet.write_table(pa.Table.from_pylist(records), tmp_path / "d.parquet")
    (source,) = open_sources([str(tmp_path / "d.parquet")], work_dir=tmp_path / "work")
    first, second = (row.record for row in source.scan(0, 2))
    assert first["messages"][1]["tool_calls"] == [calls[0]]
    assert first["tools"] == records[0]["tools"]
    assert second["messages"][1]["tool_calls"][0]["arguments"] == {"x": 1}


def test_csv_cells_are_lists_where_lists_belong(tmp_path: Path) -> None:
    text = 'prompts,captions,videos\n"[""a"",""b""]","[""c"",""d""]","[[""1.png""]]"\nWrite a list.,"[""c""]",\n'
    (tmp_path / "d.csv").write_text(text)
    limit = csv.field_size_limit()
    (source,) = open_sources([str(tmp_path / "d.csv")], work_dir=tmp_path / "work")
    assert csv.field_size_limit() == limit  # of the process, which may read other files
    first, second = (row.record for row in source.scan(0, 2))
    assert first == {"prompts": ["a", "b"], "captions": ["c", "d"], "videos": [["1.png"]]}
    assert second == {"prompts": "Write a list.", "captions": '["c"]', "videos": None}


IMAGES = [{"id": 7, "file_name": "7.jpg", "license": 4}, {"id": 8, "file_name": "8.jpg", "license": 1}]
ANNOTATIONS = [
    {"image_id": 7, "id": 48, "caption": "A\ncat."},
    {"image_id": 7, "id": 2**64 + 1, "caption": 'A "pet", {it}.'},
]
COCO = {"info": {"year": 2017}, "images": IMAGES, "licenses": [{"id": 4}], "annotations": ANNOTATIONS}
QUESTIONS = {"02930152": {"question": "Dark?", "answer": "yes"}, "2": {"question": "Red?", "id": 5}, "3": {}}
OBJECTS: dict[str, tuple[Any, list[Any]]] = {
    "coco": (COCO, [{**IMAGES[0], **annotation, "image": "7.jpg"} for annotation in ANNOTATIONS]),
    "coco, annotations first": (
        {"annotations": [{"image_id": 9, "caption": "x"}, 5], "images": IMAGES},
        [{"image_id": 9, "caption": "x", "image": None}, 5],
    ),
    "gqa": (
        QUESTIONS,
        [{"id": "02930152", **QUESTIONS["02930152"]}, {"id": 5, "question": "Red?"}, {"id": "3"}],
    ),
    "textcaps": ({"dataset_type": "train", "info": {"year": 2020}, "data": ANNOTATIONS}, ANNOTATIONS),
}  # fmt: skip


@pytest.mark.parametrize("name", OBJECTS)
@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
@pytest.mark.parametrize("indent", [None, 1])
def test_published_objects_of_records_are_read(tmp_path: Path, name: str, suffix: str, indent: int | None) -> None:
    content, expected = OBJECTS[name]
    text = json.dumps(content, indent=indent).encode()
    file = tmp_path / f"a{suffix}"
    file.write_bytes(gzip.compress(text) if suffix.endswith(".gz") else text)
    (source,) = open_sources([file], work_dir=tmp_path / "work")
    assert [row.record for start, stop in source.chunks() for row in source.scan(start, stop)] == expected
    written = source.data.stat().st_mtime_ns
    (source,) = open_sources([file], work_dir=tmp_path / "work")
    assert source.data.stat().st_mtime_ns == written


def test_images_of_coco_without_a_caption_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.json").write_text(json.dumps(COCO))
    open_sources([tmp_path / "a.json"], work_dir=tmp_path / "work")
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path / 'a.json'}: 1 of 2 images have no caption, such as 8"
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (json.dumps(QUESTIONS)[:-9], "is not a complete JSON object of records: it ends at byte"),
        (json.dumps({**QUESTIONS, "4": [1]}), "is not .*: the value of '4' is not a record"),
        (json.dumps({**COCO, "images": IMAGES * 2}), "is not .*: two images have the same id"),
        (json.dumps(COCO)[:-1] + ', "images": []}', "is not .*: images occurs twice"),
        (
            json.dumps({**COCO, "annotations": [{"image_id": 7, "bbox": [1]}]}),
            "must have a caption, got bbox, image_id",
        ),
    ],
)
def test_an_object_that_would_lose_records_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(SourceError, match=message):
        open_sources([tmp_path / "a.json"], work_dir=tmp_path / "work")


def test_one_record_on_one_line_is_a_record(tmp_path: Path) -> None:
    for record in ({"images": ["a.jpg"], "data": ["Hi", "Hello."]}, {"prompt": {"text": "Hi"}, "data": [{"a": 1}]}):
        (tmp_path / "a.json").write_text(json.dumps(record))
        (source,) = open_sources([tmp_path / "a.json"], work_dir=tmp_path / "work")
        assert [row.record for row in source.scan(0, source.extent())] == [record]
