"""`inspect --id` and `--source` find the sample of a record by id, line or row, or report why it has none."""

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import Result

from energon_packed import pack
from tests.conftest import FLAVORS, Packer
from tests.inspection.datasets import copied_output
from tests.internals import PackedFolder, find_records, matching_records, record_tests, run_reports
from tests.printed import invoke

TEXT = "the quick brown fox jumps over the lazy dog " * 9
RECORDS: list[Any] = [
    {"id": "long", "text": TEXT},
    {"id": "same", "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "One."}]},
    {"id": "same", "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Two."}]},
    {"messages": [{"role": "user", "content": "No answer"}]},
]


def run(*arguments: object) -> Result:
    return invoke("inspect", *arguments)


@pytest.fixture(scope="module")
def out(text_tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Output of a JSONL file with blank lines and of a Parquet file; the first record is split."""
    folder = tmp_path_factory.mktemp("search")
    (folder / "a.jsonl").write_text("\n" + "\n\n".join(map(json.dumps, RECORDS)) + "\n")
    pq.write_table(
        pa.Table.from_pylist([{"id": f"p{row}", "text": f"Row {row}."} for row in range(3)]), folder / "b.parquet"
    )
    options: dict[str, Any] = {
        "seq_len": 64,
        "overlong": "split",
        "max_reject_rate": 1,
        "sample_class": "PackedTokensSample",
        "workers": 1,
    }
    inputs = [folder / "a.jsonl", folder / "b.parquet"]
    pack(inputs, output_dir=folder / "out", tokenizer=text_tokenizer_dir, max_packs_per_shard=2, **options)
    return folder / "out"


@pytest.mark.parametrize("flavor", FLAVORS)
def test_the_sample_of_a_line_is_shown_with_its_supervised_tokens(pack_demo: Packer, flavor: str) -> None:
    result = pack_demo(sample_class=flavor, max_packs_per_shard=3)
    rows = [row for row in pq.read_table(result.lengths).to_pylist() if row["pack"] is not None]
    for row in (rows[7], rows[-1]):
        location = f"{row['source']}:{row['line']}"
        value = json.loads(run(result.shards, "--source", location, "--json").output)
        assert {name: value[name] for name in row if name != "num_images"} == {
            name: row[name] for name in row if name != "num_images"
        }
        assert (value["content"]["id"], value["content"]["length"]) == (row["id"], row["length"])
        # A tar is enough to find a sample of another tar.
        tar = sorted(result.shards.glob("*.tar"))[0]
        tokens = [json.loads(line) for line in run(tar, "--id", row["id"], "--tokens", "--json").output.splitlines()]
        assert {token["segment"] for token in tokens} == {row["sample"]}
        supervised = [index for index, token in enumerate(tokens) if token["label"] >= 0]
        assert supervised == [index for start, stop in value["supervised_spans"] for index in range(start, stop)]
        assert supervised
    shown = run(result.shards.parent, "--id", row["id"]).output
    assert f"line {row['line']} (row {row['row']}), packed\nsample {row['sample']} of " in shown
    assert f"in {row['pack']}, {row['shard']}\n" in shown
    assert f"supervised tokens of the sample: [{value['supervised_spans'][0][0]}, " in shown


@pytest.mark.parametrize("location", ["a.jsonl:2", "b.parquet:0"])  # a fragment, and a whole document
def test_the_first_token_of_a_sample_is_not_counted_as_supervised(out: Path, location: str) -> None:
    value = json.loads(run(out, "--source", location, "--json").output.splitlines()[0])
    assert value["content"]["supervised"] == sum(stop - start for start, stop in value["supervised_spans"])
    assert value["content"]["supervised"] == value["content"]["length"] - 1


def test_split_repeated_and_table_records_are_found(out: Path) -> None:
    folder = PackedFolder.open(out)
    by_id, by_line = find_records(folder, ident="long"), find_records(folder, location="a.jsonl:2")
    assert [record.id for record in by_id] == [f"long#{number}" for number in range(len(by_id))]
    assert len(by_id) > 1
    assert by_line == by_id
    assert find_records(folder, ident="long#1") == by_id[1:2]
    assert [(record.line, record.row) for record in find_records(folder, ident="same")] == [(4, 1), (6, 2)]
    assert run(out, "--id", "same").output.count("in out_") == 2
    (row,) = find_records(folder, location=f"{out.parent}/b.parquet:2")
    assert (row.id, row.line, row.place) == ("p2", None, f"{out.parent}/b.parquet row 2")


def test_fragments_of_all_split_records_with_an_id(text_tokenizer_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(RECORDS[0]) + "\n" for _ in range(2)))
    options: dict[str, Any] = {"seq_len": 64, "overlong": "split", "sample_class": "PackedTokensSample", "workers": 1}
    pack(tmp_path / "a.jsonl", output_dir=tmp_path / "out", tokenizer=text_tokenizer_dir, **options)
    found = find_records(PackedFolder.open(tmp_path / "out"), ident="long")
    assert [record.id for record in found if record.row == 0] == [record.id for record in found if record.row == 1]
    assert len({record.id for record in found}) == len(found) // 2 > 1


def test_the_first_samples_of_an_id_are_shown(text_tokenizer_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"id": "same", "text": "Hi."}\n' * 23)
    pack(tmp_path / "a.jsonl", output_dir=tmp_path / "out", tokenizer=text_tokenizer_dir, seq_len=64, workers=1)
    shown = run(tmp_path / "out", "--id", "same").output
    assert shown.count("supervised tokens of the sample") == 20
    assert shown.endswith("and 3 more samples\n")


def test_a_search_without_time_gets_further(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_reports, "_BATCH_ROWS", 2)
    start, places = 0, list[int | None]()
    while start is not None:
        _, start, _ = matching_records(
            out / "lengths.parquet", record_tests(ident="p1"), start=start, limit=1, seconds=-1
        )
        assert start is None or not places or start > (places[-1] or 0)
        places.append(start)
        assert len(places) < 50
    assert len(places) > 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--id", "p9"], "`ident` must be the id of a record, got 'p9'"),
        (
            ["--id", "a:3"],
            "record 'a:3', .*a.jsonl line 8 .row 3., is in no pack: no_supervised_tokens: no assistant turn",
        ),
        (["--source", "a.jsonl:8"], "is in no pack: no_supervised_tokens: no assistant turn"),
        (["--source", "a.jsonl:3"], "got a.jsonl:3. The line is blank, or after the end of .*a.jsonl"),
        (["--source", "b.parquet:3"], "got b.parquet:3. The line is blank, or after the end of "),
        (["--source", "c.jsonl:1"], "an input of the dataset, got c.jsonl. Its inputs are .*a.jsonl, .*b.parquet."),
        (["--source", "pictures/1.png:0"], "Pass one of them with the line or row of the record, or use `ident`"),
        (["--source", "a.jsonl"], "must be FILE:LINE, got a.jsonl"),
        (
            ["--source", "pictures/1.png"],
            "for tables and folders of images, pass FILE:ROW, with rows from 0, or use `i",
        ),
        (["--id", ""], "got ''"),
    ],
)
def test_a_record_without_a_sample_is_one_line(out: Path, arguments: list[str], message: str) -> None:
    result = run(out, *arguments)
    assert result.exit_code == 1
    assert not result.output
    assert re.search(message, str(result.exception)), result.exception
    assert "\n" not in str(result.exception)


def test_tables_without_places_are_refused_with_the_remedy(out: Path, tmp_path: Path) -> None:
    copy = copied_output(out / "webdataset", tmp_path / "copy").parent
    file = copy / "lengths.parquet"
    table = pq.read_table(file)
    pq.write_table(table.set_column(table.column_names.index("sample"), "sample", pa.array([1000] * len(table))), file)
    assert "sample 1000 of out_00000" in str(run(copy, "--id", "p1").exception)
    pq.write_table(table.drop_columns(["line", "pack", "sample", "shard"]), file)
    refused = str(run(copy, "--id", "p1").exception)
    assert "must have the columns line, pack, sample, shard to find records. Run the pack command of the" in refused
    file.write_bytes(b"PAR1")
    assert "lengths.parquet cannot be read" in str(run(copy, "--id", "p1").exception)
    file.unlink()
    assert "lengths.parquet must exist to find records. Run the pack command" in str(run(copy, "--id", "p1").exception)


def test_the_absolute_path_of_an_input_with_a_relative_path_is_found(
    text_tokenizer_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jsonl").write_text(json.dumps(RECORDS[1]) + "\n")
    monkeypatch.chdir(tmp_path)
    pack("data/a.jsonl", output_dir="out", tokenizer=text_tokenizer_dir, seq_len=64, workers=1)
    monkeypatch.chdir("/")
    assert (
        "data/a.jsonl line 1 (row 0), packed" in run(tmp_path / "out", "--source", f"{tmp_path}/data/a.jsonl:1").output
    )


def test_lines_of_an_input_part_are_not_known(text_tokenizer_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"id": f"{i}", "text": "word " * 9}) + "\n" for i in range(40))
    )
    options: dict[str, Any] = {"tokenizer": text_tokenizer_dir, "seq_len": 64, "workers": 1}
    results = [
        pack(tmp_path / "a.jsonl", output_dir=tmp_path / f"p{part}", part=(part, 2), **options) for part in (0, 1)
    ]
    first, second = (PackedFolder.open(result.shards) for result in results)
    (found,) = find_records(first, location="a.jsonl:3")
    assert found.id == "2"
    refused = run(second.path, "--source", "a.jsonl:3").exception
    assert "in a file whose lines are known, got a.jsonl:3. They are not known in input parts" in str(refused)
    assert run(second.path, "--id", "39").exit_code == 0
