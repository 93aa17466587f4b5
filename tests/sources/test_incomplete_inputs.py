"""Inputs that other readers take for shorter than they are: refused, or read whole."""

import bz2
import gzip
import io
import json
import logging
import lzma
import os
import re
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from energon_packed import RecordError, SourceError, normalize
from tests.internals import open_sources

ROWS = [{"id": f"r{n}", "text": f"Text {n}."} for n in range(60)]
LINES = "".join(f"{json.dumps(row)}\n" for row in ROWS).encode()


def read(path: Path) -> list[Any]:
    sources = open_sources([path], work_dir=path.parent / "work")
    return [row for source in sources for start, stop in source.chunks() for row in source.scan(start, stop)]


def records(path: Path) -> list[Any]:
    return [row.record for row in read(path)]


@pytest.mark.parametrize(
    ("name", "lines", "message"),
    [
        ("a.tsv", ["id\ttext", *(f'{n}\t"Well," she said {n}.' for n in range(9))],
         "in the row at line 2: text follows the closing quote"),
        ("a.tsv", ["text", "one", '"two', "three", '"four" and more', "five"],
         "in the row at line 3: text follows the closing quote"),
        ("a.csv", ["text", "one", '"two', "three"], "in the row at line 3: the file ends inside a quoted cell"),
        ("a.csv", ["text", '"a ""good"" one"', '"two\nlines"', '"x"y'], "in the row at line 5: text follows"),
    ],
)  # fmt: skip
def test_a_stray_quote_is_refused(tmp_path: Path, name: str, lines: list[str], message: str) -> None:
    (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
    with pytest.raises(SourceError, match=f"{name} cannot be read as CSV.*{message}"):
        records(tmp_path / name)


def test_quotes_that_are_part_of_the_format_or_of_a_text_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text('id\ttext\n1\t"two\nlines and a ""quote"""\n2\tSay "hi" now\n3\t5" wide\n4\t""\n')
    found = [record.get("text") for record in records(tmp_path / "a.tsv")]
    assert found == ['two\nlines and a "quote"', 'Say "hi" now', '5" wide', None]


def rows_of(path: Path) -> list[tuple[Any, str, int]]:
    """Record, detail of the reject and line of each row; each row is the same by its address."""
    (source,) = open_sources([path], work_dir=path.parent / "work")
    rows = list(source.scan(0, source.extent()))
    assert [source.read(row.address, row.size) for row in rows] == rows
    addresses, sizes = (np.array([row[place] for row in rows], dtype=np.int64) for place in (0, 1))
    lines = source.line_numbers(addresses, sizes).tolist()
    return [(row.record, row.reject.detail if row.reject else "", line) for row, line in zip(rows, lines, strict=True)]


LATIN = "the byte 0xe9 is not UTF-8 text; if the file is Latin-1 or Windows-1252, convert it: iconv -f WINDOWS-1252"


def test_a_faulty_row_of_a_table_rejects_only_itself_and_has_its_line(tmp_path: Path) -> None:
    text = 'text,id\r\none,r0\r\nshort\r\nlong,r1,x\r\n\r\n"two\r\nlines",r2\r\ncaf\xe9,r3\r\nlast,r4'
    for name, separator in (("a.csv", ","), ("a.tsv", "\t")):
        (tmp_path / name).write_bytes(text.replace(",", separator).encode("latin-1"))
        found = rows_of(tmp_path / name)
        assert [(record and record["id"], line) for record, _, line in found] == [
            *(("r0", 2), (None, 3), (None, 4), ("r2", 6), (None, 8), ("r4", 9)),
        ]
        assert [detail[: len(LATIN)] for record, detail, _ in found if record is None] == [
            "the row has 1 cells for 2 columns; quote cells with a delimiter or a line break",
            "the row has 3 cells for 2 columns; quote cells with a delimiter or a line break",
            LATIN,
        ]
        assert found[3][0]["text"] == "two\r\nlines"


def test_text_that_is_not_utf8_is_named_with_the_remedy(tmp_path: Path) -> None:
    lines = ['{"text": "ok"}', '{"text": "caf\xe9"}']
    for name, text in (("a.jsonl", "\n".join(lines)), ("a.json", f"[{', '.join(lines)}]")):
        (tmp_path / name).write_bytes(text.encode("latin-1"))
        (first, _, _), (second, detail, _) = rows_of(tmp_path / name)
        assert (first, second, detail[: len(LATIN)]) == ({"text": "ok"}, None, LATIN)
    (tmp_path / "b.csv").write_bytes("caf\xe9,id\nok,1\n".encode("latin-1"))
    with pytest.raises(
        SourceError, match="b.csv cannot be read as CSV .* in the header line: the byte 0xe9 is not UTF-8"
    ):
        rows_of(tmp_path / "b.csv")
    (tmp_path / "c.csv").write_bytes("text,id\nok,1\n".encode("utf-16"))
    with pytest.raises(SourceError, match="c.csv is UTF-16LE; write it as UTF-8: iconv -f UTF-16LE"):
        rows_of(tmp_path / "c.csv")


RECORDS = [{"text": "a"}, {"text": "b", "n": [1, {"x": 2}]}]
ARRAYS = {
    "indented": json.dumps(RECORDS, indent=2),
    "a record per line": "[" + ",\n".join(map(json.dumps, RECORDS)) + "]\n",
    "commas first": "[" + "\n,".join(map(json.dumps, RECORDS)) + "]\n",
    "one line": json.dumps(RECORDS) + "\n",
}


@pytest.mark.parametrize("form", ARRAYS)
@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.jsonl.gz", "metadata.jsonl"])
def test_an_array_in_a_file_of_lines_is_read(tmp_path: Path, form: str, name: str) -> None:
    content = ARRAYS[form].encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    assert [record for record, _, _ in rows_of(tmp_path / name)] == RECORDS


def test_a_file_of_lines_is_not_taken_for_an_array(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for count in (1, 2):
        (tmp_path / "a.jsonl").write_text(f"{json.dumps(turns)}\n" * count)
        assert [record for record, _, _ in rows_of(tmp_path / "a.jsonl")] == [turns] * count
    (tmp_path / "b.jsonl").write_text('{\n  "text": "a"\n}\n{\n  "text": "b"\n}\n')
    with pytest.raises(SourceError, match="b.jsonl has an object over several lines; .* jq -c . b.jsonl"):
        rows_of(tmp_path / "b.jsonl")
    (tmp_path / "c.jsonl").write_text('[\n{"text": "a"},\n')
    with pytest.raises(SourceError, match="c.jsonl is not a complete JSON array"):
        rows_of(tmp_path / "c.jsonl")


def write_repeated_column(path: Path) -> None:
    """A table with the columns text, id, text."""
    table = pa.table([["one"], ["r0"], ["two"]], names=["text", "id", "text"])
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    elif path.suffix in (".csv", ".tsv"):
        path.write_text("text,id,text\none,r0,two\n".replace(",", "," if path.suffix == ".csv" else "\t"))
    else:
        write = pa.ipc.new_stream if path.name == "stream.arrow" else pa.ipc.new_file
        with write(path, table.schema) as writer:
            writer.write_table(table)


@pytest.mark.parametrize(
    "name", ["a.csv", "a.tsv", "a.parquet", "a.arrow", "stream.arrow", "a.feather", "metadata.csv"]
)
def test_two_columns_of_the_same_name_are_refused(tmp_path: Path, name: str) -> None:
    write_repeated_column(tmp_path / name)
    with pytest.raises(SourceError) as caught:
        records(tmp_path / name)
    remedy = "Rename or remove all but one."
    assert str(caught.value) == f"{tmp_path / name}: column names must be unique, got 2 columns 'text'. {remedy}"
    assert not any((tmp_path / "work").rglob("*.arrow"))  # refused before the rows are copied


def test_columns_without_a_name_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,id,,\none,r0,,\ntwo,r1,,note\n")
    assert records(tmp_path / "a.csv") == [
        {"text": "one", "id": "r0", "column 3": None, "column 4": None},
        {"text": "two", "id": "r1", "column 3": None, "column 4": "note"},
    ]


def streams(batches: int) -> bytes:
    out = io.BytesIO()
    table = pa.Table.from_pylist(ROWS)
    with pa.ipc.new_stream(out, table.schema) as writer:
        for batch in table.to_batches(max_chunksize=len(ROWS) // batches):
            writer.write_batch(batch)
    return out.getvalue()


def test_an_arrow_stream_must_end_and_be_alone(tmp_path: Path) -> None:
    whole = streams(4)
    file = tmp_path / "a.arrow"
    file.write_bytes(whole)
    assert records(file) == ROWS
    for content in (whole[:-8], whole[: len(whole) // 2], whole + whole, whole + bytes(8)):
        file.write_bytes(content)
        with pytest.raises(SourceError, match=r"a\.arrow is not an Arrow file or stream, or is cut"):
            records(file)


@pytest.mark.parametrize("name", ["a.json.gz", "a.json.zst", "A.JSON.GZ"])
@pytest.mark.parametrize("content", [json.dumps(ROWS).encode(), json.dumps(ROWS, indent=1).encode(), LINES])
def test_compressed_json_is_an_array_or_lines(tmp_path: Path, name: str, content: bytes) -> None:
    compress = gzip.compress if name.lower().endswith("gz") else zstandard.ZstdCompressor().compress
    (tmp_path / name).write_bytes(compress(content))
    assert records(tmp_path / name) == ROWS


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.ndjson.zst", "a.json.gz"])
def test_an_empty_file_is_no_compressed_one(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(SourceError, match=rf"{name} is empty \(0 bytes\)"):
        records(tmp_path / name)


def test_a_file_that_needs_a_larger_window_is_told_from_a_damaged_one(tmp_path: Path) -> None:
    settings = zstandard.ZstdCompressionParameters(window_log=28, enable_ldm=True)
    with (tmp_path / "a.jsonl.zst").open("wb") as out:
        zstandard.ZstdCompressor(compression_params=settings).copy_stream(io.BytesIO(LINES), out)
    with pytest.raises(SourceError, match=r"was compressed with --long; decompress it: zstd -d --long=31"):
        records(tmp_path / "a.jsonl.zst")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", json.dumps({"rows": ROWS}), r"one JSON object; write its list rows alone to .*: jq \.rows a"),
        ("a.json", json.dumps({"data": ROWS, "x": 1}), r"one JSON object; write its list data alone to .*: jq \.data"),
        ("a.jsonl", LINES.decode().replace("\n", "\r"), r"the lines of .*a\.jsonl end in CR alone"),
        ("a.json", LINES.decode().replace("\n", "\r"), r"the lines of .*a\.json end in CR alone"),
    ],
)  # fmt: skip
def test_files_that_would_become_a_single_record_are_refused(
    tmp_path: Path, name: str, content: str, message: str
) -> None:
    (tmp_path / name).write_text(content, newline="")
    with pytest.raises(SourceError, match=message):
        records(tmp_path / name)


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.json", "metadata.jsonl"])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"])
def test_files_that_are_not_utf8_are_refused_with_a_command_that_converts_them(
    tmp_path: Path, name: str, encoding: str
) -> None:
    path = tmp_path / name
    path.write_bytes(LINES.decode().encode(encoding))
    with pytest.raises(SourceError, match="is UTF-(16|32)[LB]E; write it as UTF-8: iconv") as caught:
        records(path)
    command = str(caught.value).partition("UTF-8: ")[2]
    converted = subprocess.run(command.split(), cwd=tmp_path, capture_output=True, check=True).stdout
    path.write_bytes(converted)
    assert records(path) == ROWS


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
@pytest.mark.parametrize(
    ("suffix", "kind", "compress"),
    [
        (".gz", "gzip", gzip.compress),
        (".zst", "zstd", zstandard.compress),
        (".bz2", "bzip2", bz2.compress),
        (".xz", "xz", lzma.compress),
    ],
)
def test_compressed_content_without_the_suffix_is_named(
    tmp_path: Path, name: str, suffix: str, kind: str, compress: Callable[[bytes], bytes]
) -> None:
    (tmp_path / name).write_bytes(compress(LINES))
    with pytest.raises(SourceError, match=rf"is compressed \({kind}\); rename it to {name}{suffix}, or decompress it"):
        records(tmp_path / name)
    (tmp_path / name).rename(tmp_path / f"{name}{suffix}")
    assert records(tmp_path / f"{name}{suffix}") == ROWS
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(compress(LINES)))
    with pytest.raises(SourceError, match=rf"b.jsonl.gz is compressed \({kind}\); decompress it"):
        records(tmp_path / "b.jsonl.gz")
    (tmp_path / name).write_bytes(b"PK\3\4" + bytes(99))
    with pytest.raises(SourceError, match=r"is compressed \(zip\); decompress it"):
        records(tmp_path / name)


def test_zeros_at_the_start_reject_a_line_and_not_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(bytes(40) + b"\n" + LINES)
    rows = read(tmp_path / "a.jsonl")
    assert [row.reject is not None for row in rows] == [True] + [False] * len(ROWS)


@pytest.mark.parametrize("size", [100, 65 << 20])
def test_an_array_on_a_line_is_named(tmp_path: Path, size: int) -> None:
    """A long array is not parsed, as its objects need ten times its memory; a long list of turns is a record."""
    record = {"text": "One upon a time." * 50}
    turns = [{"role": "user", "content": "x" * size}, {"role": "assistant", "content": "y"}]
    array = [record] * max(2, size // 800)
    lines = [record, array, turns, record]
    (tmp_path / "a.jsonl").write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    found: list[Any] = []
    for row in read(tmp_path / "a.jsonl"):
        try:
            if row.reject is not None:
                raise RecordError.of(row.reject)
            found.append(len(normalize(row.record).messages))
        except RecordError as error:
            found.append(str(error))
    assert (found[0], found[2:]) == (0, [2, 0])
    assert re.fullmatch(
        "bad_json: .* if the file is a JSON array, rename it to .json, or write one record per line", found[1]
    )
    assert (" 6" in found[1] and " MB and looks like a JSON array" in found[1]) == (size > 100)


def test_one_record_of_a_list_is_a_record(tmp_path: Path) -> None:
    lines = [{"data": [{"a": 1}], "text": "One."}, {"text": "Two."}]
    (tmp_path / "a.json").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert records(tmp_path / "a.json") == lines


def test_skipped_data_files_of_a_folder_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a.jsonl", "b.ndjson.zst"):
        content = zstandard.ZstdCompressor().compress(LINES) if name.endswith("zst") else LINES
        (tmp_path / name).write_bytes(content)
    for name in ("c.jsonl.bak", "d.json", "dataset_info.json", "cache-0123456789abcdef.arrow"):
        (tmp_path / name).write_bytes(LINES)
    with caplog.at_level(logging.WARNING):
        sources = open_sources([tmp_path], work_dir=tmp_path / ".work")
    assert [source.path.name for source in sources] == ["a.jsonl", "b.ndjson.zst"]
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}: entries not read as input: unknown type (c.jsonl.bak); "
        "cache of datasets.map (cache-0123456789abcdef.arrow); metadata (dataset_info.json); JSON beside data files "
        "(d.json). Pass data files among them by name"
    ]


def member(name: str, content: bytes) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    return info.tobuf(tarfile.GNU_FORMAT, errors="surrogateescape") + content + bytes(-len(content) % 512)


def test_names_that_are_not_utf8_stay_visible(tmp_path: Path) -> None:
    names = [os.fsdecode(b"caf\xe9_%d.txt" % n) for n in range(3)]
    (tmp_path / "a.tar").write_bytes(b"".join(member(name, b"A text.") for name in names) + bytes(1024))
    assert [record["id"] for record in records(tmp_path / "a.tar")] == [f"caf\\xe9_{n}" for n in range(3)]


def test_a_header_of_the_whole_tar_may_stand_between_members(tmp_path: Path) -> None:
    """As in two archives of git that `tar -A` has joined."""
    header = tarfile.TarInfo.create_pax_global_header({"comment": "x" * 40})
    parts = [member("a.txt", b"A."), header, member("b.txt", b"B."), member("c.txt", b"C."), bytes(1024)]
    (tmp_path / "a.tar").write_bytes(b"".join(parts))
    assert [record["id"] for record in records(tmp_path / "a.tar")] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("state.json", {"_data_files": [{"filename": "\ud800.arrow"}]}, "is not a file of a Hugging Face dataset"),
        ("state.json", {"_data_files": []}, r"state\.json lists no data files"),
        ("dataset_dict.json", {"splits": "train"}, "is not a file of a Hugging Face dataset: .* not list"),
    ],
)
def test_folders_of_hugging_face_that_name_nothing(tmp_path: Path, name: str, value: object, message: str) -> None:
    (tmp_path / name).write_text(json.dumps(value))
    with pytest.raises(SourceError, match=message):
        records(tmp_path)


def test_names_of_files_that_cannot_be_used(tmp_path: Path) -> None:
    loop = tmp_path / "loop.jsonl"
    loop.symlink_to("loop.jsonl")
    with pytest.raises(OSError, match="Too many levels of symbolic links|no such file"):
        records(loop)
    latin = Path(os.fsdecode(os.fsencode(tmp_path) + b"/n\xe9.jsonl"))
    latin.write_bytes(LINES)
    with pytest.raises(SourceError, match=r"n\\udce9\.jsonl' is not UTF-8; rename it"):
        records(latin)


@pytest.mark.parametrize(
    ("end", "says"),
    [
        ("", "the line ends within the string that starts at column 10; the file may be cut"),
        ("\n", "the line ends within the string that starts at column 10; the file may be cut"),
        ("\r\n", "the line ends within the string that starts at column 10; the file may be cut"),
        ('"\n', "unexpected end of data: "),
        ('\t"}\n', "unexpected control character in string: "),
    ],
)
def test_a_line_that_was_cut_says_whether_it_ends_within_a_string(tmp_path: Path, end: str, says: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(('{"text": "one' + end).encode())
    (source,) = open_sources([tmp_path / "a.jsonl"], work_dir=tmp_path / "work")
    (row,) = source.scan(0, source.extent())
    assert str(row.reject).startswith(f"bad_json: {says}")
