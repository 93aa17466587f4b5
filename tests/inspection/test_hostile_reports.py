"""lengths.parquet and rejects.jsonl from another author: every reader has one clear line, and needs little memory."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from energon_packed import EnergonPackedError, pack
from tests.internals import cli

REMEDY = "Run the pack command of the dataset again, which keeps its shards and writes the reports."
Change = Callable[[Path], Any]


@pytest.fixture(scope="module")
def made(text_tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An output with a packed and a rejected record; its data and its tokenizer are beside it."""
    folder = tmp_path_factory.mktemp("reports")
    (folder / "a.jsonl").write_text('{"id": "good", "text": "A text."}\n{"id": "bad", "messages": []}\n')
    options: dict[str, Any] = {"seq_len": 64, "max_reject_rate": 1, "workers": 1}
    pack(folder / "a.jsonl", output_dir=folder / "out", tokenizer=text_tokenizer_dir, **options)
    return folder / "out"


@pytest.fixture
def out(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "out", ignore=shutil.ignore_patterns(".work"))
    return tmp_path / "out"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def line_of(result: Result) -> str:
    """The error, or the output of a command that failed without one."""
    if result.exception is None or isinstance(result.exception, SystemExit):
        return result.output
    assert isinstance(result.exception, EnergonPackedError), repr(result.exception)
    assert "\n" not in str(result.exception)
    return str(result.exception)


def written(change: Callable[[dict[str, Any]], Any], **options: Any) -> Change:
    """Write lengths.parquet with another column."""

    def write(file: Path) -> None:
        columns: dict[str, Any] = {field.name: column for field, column in _columns(file)}
        columns |= change(columns)
        pq.write_table(pa.table(columns), file, **options)

    return write


def _columns(file: Path) -> list[tuple[pa.Field, pa.ChunkedArray]]:
    table = pq.read_table(file)
    return list(zip(table.schema, table.columns, strict=True))


def typed(name: str, values: list[Any], kind: Any = None) -> Change:
    return written(lambda columns: {name: pa.array(values, type=kind)})


def replaced(content: bytes) -> Change:
    return lambda file: file.write_bytes(content)


def fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


LENGTHS: dict[str, tuple[Change, str]] = {
    "id of integers": (typed("id", [1, 2]), "column id must contain strings, got int64"),
    "id of lists": (typed("id", [["good"], ["bad"]]), "column id must contain strings, got list<"),
    "id of bytes": (typed("id", [b"good", b"bad"]), "column id must contain strings, got binary"),
    "status of structs": (typed("status", [{"a": 1}] * 2), "column status must contain strings, got struct<"),
    "status of integers": (typed("status", [0, 1]), "column status must contain strings, got int64"),
    "source of integers": (typed("source", [0, 1]), "column source must contain strings, got int64"),
    "source of dates": (typed("source", [0, 1], pa.date32()), "column source must contain strings, got date32"),
    "row of strings": (typed("row", ["0", "1"]), "column row must contain integers, got string"),
    "line of floats": (typed("line", [1.5, 2.5]), "column line must contain integers, got double"),
    "sample of dictionaries": (
        written(lambda columns: {"sample": pa.array(["0", "1"]).dictionary_encode()}),
        "column sample must contain integers, got string",
    ),
    "pack of booleans": (typed("pack", [True, False]), "column pack must contain strings, got bool"),
    "a table of another program": (lambda file: pq.write_table(pa.table({"x": [1]}), file), "must have the columns"),
    "no table": (replaced(b"PAR1"), "cannot be read"),
    "text": (replaced(b'{"id": 1}'), "cannot be read"),
    "a FIFO": (fifo, "is a FIFO"),
}
NULLS: dict[str, tuple[Change, str]] = {
    "source": (typed("source", [None, None], pa.string()), "must be in an input of the dataset"),
    "row": (typed("row", [None, None], pa.int64()), "has a row without row"),
    "status": (typed("status", [None, None], pa.string()), "has a row without status"),
}


@pytest.mark.parametrize("name", LENGTHS)
def test_hostile_lengths(out: Path, name: str) -> None:
    change, message = LENGTHS[name]
    change(out / "lengths.parquet")
    for command in (("inspect", out, "--id", "good"), ("inspect", out, "--source", "a.jsonl:1"), ("verify", out)):
        line = line_of(run(*command))
        assert message in line
        assert REMEDY in line


@pytest.mark.parametrize("name", NULLS)
def test_nulls_in_lengths(out: Path, name: str) -> None:
    change, message = NULLS[name]
    change(out / "lengths.parquet")
    assert message in line_of(run("inspect", out, "--source", "a.jsonl:1"))


def test_strings_that_are_not_utf8(out: Path) -> None:
    damaged = pa.Array.from_buffers(pa.string(), 2, pa.array([b"\xff\xfe", b"b"], pa.binary()).buffers())
    written(lambda columns: {"id": damaged})(out / "lengths.parquet")
    for command in (("verify", out), ("inspect", out, "--source", "a.jsonl:1")):
        assert "lengths.parquet cannot be read: " in line_of(run(*command))


GOOD = {"source": "a", "row": 0, "line": 1, "id": "x", "reason": "empty", "detail": "d"}
REJECTS: dict[str, tuple[bytes, str]] = {
    "not UTF-8": (b'{"reason": "\xff"}', "line 1, cannot be read: "),
    "nested deeply": (b'{"reason": ' + b"[" * 100_000, "line 1, cannot be read: "),
    "an array": (b'["reason"]', "line 1, cannot be read: it is not an object"),
    "a blank line": (b"\n" + json.dumps(GOOD).encode(), "line 1, cannot be read: "),
    "cut": (json.dumps(GOOD).encode()[:-5], "line 1, cannot be read: "),
    "a long line": (b" " * (1 << 20), "line 1, cannot be read: it has 1,048,576 bytes or more"),
    **{
        f"without {name}": (json.dumps({**GOOD, name: None}).encode(), f"cannot be read: {name} must be a string")
        for name in ("reason", "source", "id", "detail")
    },
    "a reason of lists": (json.dumps({**GOOD, "reason": ["empty"]}).encode(), "reason must be a string"),
    "a row of strings": (json.dumps({**GOOD, "row": "0"}).encode(), "row must be an integer or null"),
    "a line of floats": (json.dumps({**GOOD, "line": 1.5}).encode(), "line must be an integer or null"),
}


@pytest.mark.parametrize("name", REJECTS)
def test_hostile_rejects(out: Path, name: str) -> None:
    content, message = REJECTS[name]
    (out / "rejects.jsonl").write_bytes(content)
    commands = (("report", out, "-o", out / "r.html"), ("verify", out), ("inspect", out, "--id", "bad"))
    for command in commands:
        line = line_of(run(*command))
        assert message in line
        assert REMEDY in line


def test_runs_replace_hostile_reports(out: Path, made: Path, text_tokenizer_dir: Path) -> None:
    (out / "rejects.jsonl").write_bytes(b"\xff")
    (out / "lengths.parquet").write_bytes(b"PAR1")
    options = ["--tokenizer", text_tokenizer_dir, "--seq-len", 64, "--max-reject-rate", 1, "--workers", 1]
    data = made.parent / "a.jsonl"
    found = line_of(run("lengths", data, "--tokenizer", text_tokenizer_dir, "-o", out, "--workers", 1))
    assert "1 of 2 records" in found  # the reject rate of the data
    assert run("metadataset", out.parent / "mix.yaml", out).exit_code == 0
    assert run("pack", data, "-o", out, "--overwrite", *options).exit_code == 0
    assert run("verify", out).exit_code == 0
    assert run("inspect", out, "--id", "good").exit_code == 0


def test_many_reasons_are_limited(out: Path) -> None:
    file = out / "webdataset" / ".nv-meta" / "packing.json"
    manifest = json.loads(file.read_text())
    rejects = {f"reason {number}": 1 for number in range(1001)}
    for name in ("rejects", "notes", "unused_fields", "counters"):
        file.write_text(json.dumps({**manifest, name: rejects}))
        line = line_of(run("report", out, "-o", out / "r.html"))
        assert f"{name} must have at most 1,000 entries, got 1,001" in line
    lines = [{**GOOD, "reason": reason, "detail": "x" * 100_000} for reason in [*rejects][:300]]
    (out / "rejects.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    file.write_text(json.dumps({**manifest, "rejects": dict.fromkeys([*rejects][:300], 1)}))
    assert run("report", out, "-o", out / "r.html").exit_code == 0
    assert (out / "r.html").stat().st_size < 1 << 20


def test_one_row_group_of_all_records_is_streamed(out: Path) -> None:
    """600,000 rows, whose ids alone are 11 MB, in a single row group."""
    rows = 600_000
    columns: dict[str, Any] = {
        field.name: pa.repeat(
            column[0].cast(field.type.value_type) if pa.types.is_dictionary(field.type) else column[0], rows
        )
        for field, column in _columns(out / "lengths.parquet")
    }
    columns["id"] = pa.array([*(f"{number:014d}" for number in range(rows - 1)), "good"])
    pq.write_table(pa.table(columns), out / "lengths.parquet", row_group_size=rows, use_dictionary=False)
    del columns
    pool = pa.system_memory_pool()
    before = pa.default_memory_pool()
    pa.set_memory_pool(pool)
    try:
        result = run("inspect", out, "--id", "good")
    finally:
        pa.set_memory_pool(before)
    assert result.exit_code == 0, result.output
    assert pool.max_memory() < 9 << 20
