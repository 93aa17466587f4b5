"""Damaged inputs of every container: one line that names the file, or records that are rejected one by one."""

import gzip
import io
import itertools
import json
import os
import random
import tarfile
from collections.abc import Iterator
from datetime import datetime
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet
import pytest
import zstandard

from energon_packed import Conversation, EnergonPackedError, RecordError, ResourceError, SourceError, normalize
from tests import oldest
from tests.internals import CsvSource, open_sources
from tests.pipeline.mutations import KEYS

DAMAGES = int(os.environ.get("ENERGON_PACKED_FUZZ", "400")) // 20  # of each file
ROWS = 150
RECORDS = [
    {
        "id": f"r{n}",
        "messages": [{"role": "user", "content": f"ü {n}"}, {"role": "assistant", "content": "x" * (n + 1)}],
    }
    for n in range(ROWS)
]
LINES = "".join(json.dumps(record) + "\n" for record in RECORDS).encode()
TABLE = pa.Table.from_pylist(RECORDS)
NAMES = (
    *("a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.json", "a.parquet", "checked.parquet", "a.feather", "file.arrow"),
    *("stream.arrow", "a.csv", "a.tar"),
)


def write(path: Path) -> bytes:
    """RECORDS in the format of the name."""
    name = path.name
    if name.endswith(".jsonl"):
        path.write_bytes(LINES)
    elif name.endswith(".gz"):
        path.write_bytes(gzip.compress(LINES, mtime=0))
    elif name.endswith(".zst"):
        path.write_bytes(zstandard.ZstdCompressor(write_checksum=True).compress(LINES))
    elif name.endswith(".json"):
        path.write_text(json.dumps(RECORDS, indent=1))
    elif name.endswith(".parquet"):
        pa.parquet.write_table(TABLE, path, row_group_size=60, write_page_checksum=name.startswith("checked"))
    elif name.endswith(".feather"):
        pa.feather.write_feather(TABLE, path, compression="lz4")
    elif name.endswith(".arrow"):
        make = pa.ipc.new_stream if name.startswith("stream") else pa.ipc.new_file
        with make(path, TABLE.schema) as writer:
            writer.write_table(TABLE, max_chunksize=64)
    elif name.endswith(".csv"):
        cells = {"id": [r["id"] for r in RECORDS], "messages": [json.dumps(r["messages"]) for r in RECORDS]}
        pa.csv.write_csv(pa.table(cells), path)
    else:
        with tarfile.open(path, "w") as tar:
            for record in RECORDS:
                content = json.dumps(record).encode()
                member = tarfile.TarInfo(f"{record['id']}.json")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return path.read_bytes()


def damaged(content: bytes, rng: random.Random) -> tuple[str, bytes]:
    """What is done, and the result."""
    kind, at = rng.choice(("cut", "flip", "flip", "flips", "delete", "zeros")), rng.randrange(len(content))
    if kind == "cut":
        return kind, content[:at]
    if kind == "delete":
        return kind, content[:at] + content[at + rng.randrange(1, 900) :]
    if kind == "zeros":
        return kind, content[:at] + bytes(len(content[at : at + 64])) + content[at + 64 :]
    flipped = bytearray(content)
    for _ in range(1 if kind == "flip" else 20):
        flipped[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    return kind, bytes(flipped)


def read(path: Path, work_dir: Path) -> Iterator[Conversation | None]:
    """The conversations of a file; None for a record that is rejected."""
    for source in open_sources([path], work_dir=work_dir):
        for chunk in source.chunks():
            for row in source.scan(*chunk):
                try:
                    if row.reject is not None:
                        raise RecordError.of(row.reject)
                    yield normalize(row.record, image_root=source.image_root)
                except (RecordError, RecursionError):
                    yield None


def check(path: Path, kind: str, work_dir: Path) -> None:
    """Read it: an error names the file in one line; without one and without a reject, no record is missing."""
    try:
        found = list(read(path, work_dir))
    except EnergonPackedError as error:
        # The oldest release of PyArrow reports some damaged sizes as a lack of memory.
        assert isinstance(error, SourceError) or (oldest.PYARROW and isinstance(error, ResourceError))
        assert str(path) in str(error)
        assert "\n" not in str(error)
        return
    by_line = path.name in ("d.jsonl", "d.csv", "d.json")  # what is removed between two line ends leaves no trace
    if None not in found and not (kind in ("cut", "delete") and by_line):
        assert len(found) >= ROWS


@pytest.mark.parametrize("name", NAMES)
def test_damage_is_named_or_costs_records(tmp_path: Path, name: str) -> None:
    content = write(tmp_path / name)
    path = tmp_path / f"d{name[name.index('.') :]}"
    rng = random.Random(name)
    for number in range(DAMAGES):
        kind, changed = damaged(content, rng)
        path.write_bytes(changed)
        check(path, kind, tmp_path / f"work-{number}")


@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_another_format_or_of_nothing_is_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / f"d{name[name.index('.') :]}"
    kinds = {other[other.index(".") :]: other for other in NAMES}
    contents = [b"", b"\0", b"\n", b"\xff\xfe", *[write(tmp_path / kinds[one]) for one in kinds if one != path.suffix]]
    for number, content in enumerate(contents):
        path.write_bytes(content)
        try:
            found = list(read(path, tmp_path / f"work-{number}"))
        except SourceError as error:
            assert str(path) in str(error)
            assert "\n" not in str(error)
            continue
        assert not content.strip() or found, (name, content[:20])


def test_a_parquet_file_whose_counts_of_rows_differ_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    pa.parquet.write_table(pa.table({"text": [f"Text {number}." for number in range(60)]}), path)
    content = path.read_bytes()
    footer = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    sixty = b"\x16\x78"  # a 64-bit field of Thrift's compact protocol, with the value 60
    places = [at for at in range(footer, len(content)) if content.startswith(sixty, at)]
    refused = 0
    for number, (at, count) in enumerate(itertools.product(places, (b"\x76", b"\x7a"))):  # 59 and 61
        path.write_bytes(content[: at + 1] + count + content[at + 2 :])
        try:
            assert len(list(read(path, tmp_path / str(number)))) == 60
        except SourceError as error:
            assert "rows in place of" in str(error)
            refused += 1
    assert refused == 4  # the count of the file and that of its row group; that of the column is not used


def test_texts_that_are_not_utf8_and_times_out_of_range_cost_their_rows(tmp_path: Path) -> None:
    texts = pa.array([b"one", b"\xff\xfe", b"three", b"four"]).view(pa.string())
    times = pa.array([0, 0, 10**12, 0], pa.int64()).view(pa.timestamp("s"))
    table = pa.table({"text": texts, "time": times, "nested": pa.array([["a"], ["b"], [], None])})
    pa.parquet.write_table(table, tmp_path / "a.parquet")
    pa.feather.write_feather(table, tmp_path / "a.feather")
    for name in ("a.parquet", "a.feather"):
        (source,) = open_sources([tmp_path / name], work_dir=tmp_path / "work")
        rows = list(source.scan(0, 4))
        assert [row.record and row.record["text"] for row in rows] == ["one", None, None, "four"]
        assert [row.reject.detail.split(":")[0] for row in rows if row.reject] == [
            "the column text has no value",
            "the column time has no value",
        ]
        assert [source.read(number, 0) for number in range(4)] == rows


@pytest.mark.parametrize("name", ["d.parquet", "d.arrow", "d.csv"])
def test_columns_of_any_type_cost_their_rows(tmp_path: Path, name: str) -> None:
    values = [5, 0.5, True, b"\xff", "", "[", Decimal("1.5"), datetime(2020, 1, 2)]
    values += [[1], [[2]], {"a": 1}, [{"role": "x"}]]
    keys = {"d.arrow": KEYS[::2], "d.parquet": KEYS[::9]}.get(name, CsvSource.json_columns)
    for number, value in enumerate(values):
        for key in keys:
            columns = {"text": ["One."], key: [str(value) if name == "d.csv" else value]}
            if name.endswith("parquet"):
                pa.parquet.write_table(pa.table(columns), tmp_path / name)
            elif name.endswith("csv"):
                pa.csv.write_csv(pa.table(columns), tmp_path / name)
            else:
                pa.feather.write_feather(pa.table(columns), tmp_path / name)
            assert len(list(read(tmp_path / name, tmp_path / f"work-{number}"))) == 1


def test_a_table_that_ends_inside_quotes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('text\n"One."\n"Two, of wh')
    with pytest.raises(SourceError, match="a.csv cannot be read .* line 3: the file ends inside a quoted cell"):
        open_sources([tmp_path / "a.csv"], work_dir=tmp_path / "work")


def test_a_faulty_row_of_a_metadata_table_rejects_only_itself(tmp_path: Path) -> None:
    rows = ["file_names,image,text", '"[""a.png"",",,One.', '"[""a.png""]",b.png,Two.', '"[""a.png""]",,Three.']
    (tmp_path / "metadata.csv").write_text("\n".join(rows) + "\n")
    (source,) = open_sources([tmp_path / "metadata.csv"], work_dir=tmp_path / "work")
    found = list(read(tmp_path / "metadata.csv", tmp_path / "work"))
    assert [(one and one.text) or (one and one.messages[-1].content) for one in found][2] == "Three."
    assert len(list(source.scan(0, 3))) == 3


@pytest.mark.parametrize("levels", [90, 400, 900, 5000])
def test_deep_json_of_a_tar_costs_its_key(tmp_path: Path, levels: int) -> None:
    nested = b"[" * levels + b"]" * levels
    contents = {"a": json.dumps(RECORDS[0]).encode(), "b": b'{"messages":%s,"images":%s}' % (nested, nested)}
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for key, content in (*contents.items(), ("c", contents["a"])):
            member = tarfile.TarInfo(f"{key}.json")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    found = list(read(tmp_path / "a.tar", tmp_path / "work"))
    assert [one is None for one in found] == [False, True, False]


def test_a_footer_that_names_fewer_batches_is_refused(tmp_path: Path) -> None:
    streams, footers = [], []
    for batches in (3, 1):
        out = io.BytesIO()
        with pa.ipc.new_file(out, TABLE.schema) as writer:
            writer.write_table(TABLE[: 50 * batches], max_chunksize=50)
        content = out.getvalue()
        end = len(content) - 10 - int.from_bytes(content[-10:-6], "little")
        streams.append(content[:end])
        footers.append(content[end:])
    (tmp_path / "whole.arrow").write_bytes(streams[0] + footers[0])
    assert len(list(read(tmp_path / "whole.arrow", tmp_path / "work"))) == ROWS
    (tmp_path / "a.arrow").write_bytes(streams[0] + footers[1])
    with pytest.raises(SourceError, match=r"a.arrow .* its footer names 1 of 3 record batches"):
        list(read(tmp_path / "a.arrow", tmp_path / "work"))


@pytest.mark.parametrize(
    ("element", "is_read"),
    [
        (r'{"text":"a\ud83d\ude00b"}', True),
        (r'{"text":"a\\ud83d b"}', True),
        (r'{"text":"a\ud83d b"}', False),
        (r'{"text":"a\ude00 b"}', False),
        ('{"text":"a","n":NaN}', False),
        ('{"text":"a\nb"}', False),
        ('{"text":"a",\n"n":1}', True),
        ('{"text":"a","n":%s}' % ("[" * 300 + "]" * 300), True),
        ('{"text":"a","n":%s}' % ("[" * 3000 + "]" * 3000), False),
    ],
)
def test_an_element_of_an_array_is_read_as_a_line_is(tmp_path: Path, element: str, is_read: bool) -> None:
    (tmp_path / "a.json").write_text(f'[{{"text":"Before."}},\n{element}\n, {{"text":"After."}}]')
    found = list(read(tmp_path / "a.json", tmp_path / "work"))
    assert [one is not None for one in found] == [True, is_read, True]
    if is_read:
        assert found[1] == normalize({"text": json.loads(element)["text"]})
