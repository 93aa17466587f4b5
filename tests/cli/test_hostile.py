"""Every command with a hostile dataset: its code is not run, its links are not followed, its values are checked."""

import json
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from energon_packed import EnergonPackedError
from tests.canary import Canary, changed, copied, dataset_yaml, packed_texts
from tests.internals import cli

LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{b}: &{b} [{','.join(['*' + a] * 10)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
DEEP = "[" * 50_000
SPLITS: dict[str, Any] = {
    "above": ["../stranger.tar"],
    "absolute": ["/stranger.tar"],
    "hidden": ["x/../../stranger.tar"],
    "many": ["s-{0..99999999999}.tar"],
    "product": ["{a,b}" * 40],
    "numbers": [1, 2],
    "nothing": 5,
}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory, text_tokenizer_dir: Path) -> Path:
    return packed_texts(tmp_path_factory.mktemp("hostile"), text_tokenizer_dir)


@pytest.fixture
def dataset(original: Path, tmp_path: Path) -> Path:
    shutil.copy(original / "s-000000.tar", tmp_path / "stranger.tar")
    return copied(original, tmp_path / "out")


@pytest.fixture
def canary(tmp_path: Path) -> Canary:
    return Canary(tmp_path)


def run(*arguments: object) -> Result:
    """Run a command, which must succeed or raise an error that is printed as one line."""
    result = CliRunner().invoke(cli, list(map(str, arguments)), standalone_mode=False)
    if result.exception is not None:
        assert isinstance(result.exception, EnergonPackedError | SystemExit | OSError), repr(result.exception)
        assert len(str(result.exception)) < 2000
    return result


def commands(dataset: Path, tokenizer: Path) -> dict[str, Callable[[], Result]]:
    """Every command that reads a dataset, with a new folder for each output."""
    out = dataset.parents[1]
    key = "s_00000000"
    return {
        "inspect": lambda: run("inspect", dataset),
        "inspect --pack": lambda: run("inspect", dataset, "--pack", key, "--tokenizer", tokenizer),
        "verify": lambda: run("verify", dataset, "--fast", "--workers", 1),
        "report": lambda: run("report", dataset, "-o", out / "report.html"),
        "metadataset": lambda: run("metadataset", out / "blend.yaml", dataset),
        "lengths": lambda: run("lengths", dataset, "--tokenizer", tokenizer, "--workers", 1),
        "pack": lambda: run(
            "pack", dataset, "-o", out / "again", "--tokenizer", tokenizer, "--seq-len", 128, "--workers", 1, "--quiet"
        ),
        "nv-meta": lambda: run("nv-meta", dataset),
    }


def test_no_command_runs_code_of_a_dataset(dataset: Path, canary: Canary, text_tokenizer_dir: Path) -> None:
    """Code in sample_loader.py, in YAML tags and in mappings that Energon calls, in every file of `.nv-meta`."""
    named = {name: f"sample_loader.py:{name}" for name in ("sample_loader", "part_filter")}
    (dataset / ".nv-meta" / "sample_loader.py").write_text(canary.code)
    for file in ("dataset.yaml", "crude.yaml"):
        (dataset / ".nv-meta" / file).write_text(dataset_yaml(**named, decoder=canary.object))
    for name, command in commands(dataset, text_tokenizer_dir).items():
        if name != "nv-meta":
            result = command()
            assert not canary.sang(), name
            if name in ("verify", "pack", "lengths"):
                assert result.exception is not None, name
    for file in ("dataset.yaml", "split.yaml"):
        for content in (canary.tag, yaml.safe_dump(canary.object)):
            with changed(dataset, file, content):
                for name in ("inspect", "verify", "metadataset"):
                    commands(dataset, text_tokenizer_dir)[name]()
                    assert not canary.sang(), (file, name)
    assert commands(dataset, text_tokenizer_dir)["nv-meta"]().exception is None  # replaces them by the generated files
    assert commands(dataset, text_tokenizer_dir)["verify"]().exception is None
    assert not canary.sang()


def test_no_command_follows_names_out_of_the_folder(dataset: Path, text_tokenizer_dir: Path) -> None:
    (dataset / ".nv-meta" / "packing.json").unlink()  # a third-party dataset: split.yaml lists the shards
    for case, names in SPLITS.items():
        content = yaml.safe_dump({"split_parts": {"train": names}, "exclude": []})
        with changed(dataset, "split.yaml", content):
            several = ("verify", "report", "lengths", "nv-meta") if case == "above" else ()
            for name in (*several, "metadataset"):
                result = commands(dataset, text_tokenizer_dir)[name]()
                assert result.exception is not None, (case, name)
                shown = result.output + str(result.exception)
                assert "split.yaml" in shown, (case, name, shown)
    for content in (LAUGHS + "split_parts: {train: *i}\n", DEEP, "split_parts: {train: 2001-99-99}"):
        with changed(dataset, "split.yaml", content):
            result = commands(dataset, text_tokenizer_dir)["metadataset"]()
            assert "is not a valid split file" in str(result.exception)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("packs", "3", "packs is '3', not int"),
        ("packs", True, "packs is True, not int"),
        ("records", -1, "records must be from 0 to 9223372036854775807, got -1"),
        ("tokens", 10**30, "tokens is 1e.30, not int"),
        ("tokens", 2**63, "tokens must be from 0 to 9223372036854775807, got 9223372036854775808"),
        ("utilization", "NaN", "utilization is 'NaN', not float"),
        ("utilization", True, "utilization is True, not float"),
        ("seq_len", 0, "seq_len must be from 1 to 2147483647, got 0"),
        ("seq_len", 2**40, "must be from 1 to 2147483647, got 1099511627776"),
        ("pad_multiple", 0, "pad_multiple must be from 1 to 2147483647, got 0"),
        ("shards", {}, "shards is dict, not a list"),
        ("shards", [[]], r"shards\[0\] is list, not an object"),
        ("rejects", {"\x1b[31m": []}, r"rejects.'\\x1b\[31m' is list, not int"),
        ("notes", dict.fromkeys(map(str, range(1001)), 1), "notes must have at most 1,000 entries, got 1,001"),
        ("encoder", {"tokenizer": {"a": 1}}, "encoder.'tokenizer' is dict, not a number or a string"),
        ("sample_class", None, "sample_class is None, not str"),
        ("sample_class", "Other", "names the unknown sample class 'Other', and not one of "),
        ("format_version", [], "not a packing manifest"),
        ("made_up", 1, "has an unknown field 'made_up'"),
        ("shards.name", "../stranger.tar", "leads out of the folder"),
        ("shards.name", "/stranger.tar", "leads out of the folder"),
        ("shards.bytes", 1.5, r"shards\[0\].bytes is 1.5, not int"),
    ],
)
def test_values_of_packing_json_are_typed_and_bounded(dataset: Path, field: str, value: Any, message: str) -> None:
    file = dataset / ".nv-meta" / "packing.json"
    manifest = json.loads(file.read_text())
    whole, _, part = field.partition(".")
    if part:
        manifest[whole][0][part] = value
    else:
        manifest[whole] = value
    file.write_text(json.dumps(manifest))
    for command in (("verify", dataset, "--fast"), ("report", dataset, "-o", dataset.parent / "r.html")):
        with pytest.raises(EnergonPackedError, match=message):
            raise run(*command).exception or AssertionError("it was read")


def test_a_packing_json_that_nests_deeply_or_names_another_encoder(dataset: Path) -> None:
    with changed(dataset, "packing.json", DEEP):
        assert "is not a packing manifest" in str(run("verify", dataset).exception)
    manifest = json.loads((dataset / ".nv-meta" / "packing.json").read_text())
    for encoder in ({"tokenizer": 5}, {**manifest["encoder"], "trust_remote_code": True}, {}):
        with changed(dataset, "packing.json", json.dumps({**manifest, "encoder": encoder})):
            assert isinstance(run("verify", dataset).exception, EnergonPackedError)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE samples SET tar_file_id = 999",
        "UPDATE samples SET tar_file_id = -1",
        "UPDATE samples SET tar_file_id = '../stranger'",
        "UPDATE samples SET byte_offset = 9e18, byte_size = 'x'",
        "UPDATE samples SET byte_offset = CAST(x'fffe' AS TEXT)",
        "DROP TABLE samples; CREATE VIEW samples AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) "
        "SELECT i AS tar_file_id, 'x' AS sample_key, i AS sample_index, i AS byte_offset, i AS byte_size FROM n",
        "ALTER TABLE sample_parts RENAME TO other; CREATE VIEW sample_parts AS SELECT * FROM other",  # equal rows
    ],
)
def test_damaged_rows_of_the_index_are_found(dataset: Path, statement: str) -> None:
    file = dataset / ".nv-meta" / "index.sqlite"
    shutil.copy(dataset / "s-000000.tar", dataset / "t.tar")  # so that inspect asks the index
    with closing(sqlite3.connect(file)) as connection:
        connection.executescript(statement)
    assert run("inspect", dataset, "--pack", "s_00000000").exception is None
    (dataset / "t.tar").unlink()
    result = run("verify", dataset, "--fast")
    assert isinstance(result.exception, SystemExit)
    assert "✗ .tar.idx, index.sqlite and .info.json match the members" in result.output
