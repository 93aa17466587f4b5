"""Output inside the input: the next run would read its files, so the first run is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from energon_packed import ConfigError, DataflowConfig, SourceError, get_raw_loader
from tests.internals import cli

LINE = json.dumps({"text": "A text."}) + "\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """`data` with a JSONL file in it and in a subfolder, and a link to it."""
    for name in ("a.jsonl", "deep/b.jsonl"):
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_text(LINE)
    (tmp_path / "link").symlink_to("data")
    return tmp_path


@pytest.mark.parametrize(
    ("pattern", "out"),
    [
        ("data", "data/out"), ("data", "data"), ("data", "data/deep/out"), ("link", "data/out"), ("data", "link/out"),
        ("data/", "data/../data/out"), ("data/**/*.jsonl", "data/out"), ("data/*", "data/out"), ("*", "data/out"),
        ("data/d*", "data/deep/out"), ("data/**", "data/out"), ("data/*/*.jsonl", "data/out"),
    ],
)  # fmt: skip
def test_an_output_that_the_next_run_would_read_is_refused(folder: Path, build: Any, pattern: str, out: str) -> None:
    other = folder / "other.jsonl"
    other.write_text(LINE)
    with pytest.raises(ConfigError, match=r"^`output_dir` must be outside the input .*data|\*, got .*next run would"):
        build(inputs=(str(other), str(folder / pattern)), output_dir=folder / out)
    assert not list(folder.rglob("*.parquet"))


@pytest.mark.parametrize(
    ("pattern", "out"),
    [
        ("data", "out"), ("data", "data2"), ("data", "data/.out"), ("data/a.jsonl", "data/out"),
        ("data/*.jsonl", "data/out"), ("data/*/b.jsonl", "data/deep/out"), ("data/deep", "data/out"),
        ("da[t]a/*.jsonl", "data/out"),
    ],
)  # fmt: skip
def test_other_outputs_pack_twice(folder: Path, build: Any, pattern: str, out: str) -> None:
    first, second = (build(inputs=(str(folder / pattern),), output_dir=folder / out).manifest for _ in range(2))
    assert first.records == first.packed == second.records == 1 + (pattern == "data")


def test_parts_lengths_and_raw_loaders(folder: Path, build: Any, tokenizer_dir: Path) -> None:
    data = str(folder / "data")
    for index in range(2):
        with pytest.raises(ConfigError, match="`output_dir` must be outside the input"):
            build(inputs=(data,), part=(index, 2), output_dir=folder / "data" / "{part}")
    command = ["lengths", data, "--tokenizer", str(tokenizer_dir)]
    for more in (["-o", f"{data}/out"], ["--output", f"{data}/lens.csv"]):
        failed = CliRunner().invoke(cli, [*command, *more])
        assert isinstance(failed.exception, ConfigError)
    assert CliRunner().invoke(cli, [*command, "--output", f"{data}/lens.txt"]).exit_code == 0
    config = DataflowConfig(inputs=data, tokenizer=tokenizer_dir, seq_len=64, work_dir=folder / "data" / "work")
    with pytest.raises(ConfigError, match="`work_dir` must be outside the input"):
        get_raw_loader(config)


def test_a_dataset_that_lists_its_files_may_contain_the_output(build: Any, tmp_path: Path) -> None:
    first = build([{"text": "A text."}], output_dir=tmp_path / "first")
    again = first.shards / "again"
    for _ in range(2):
        assert build(inputs=(str(first.shards),), output_dir=again).manifest.packed == 1
    with pytest.raises((ConfigError, SourceError), match="is an input, and the run would replace it"):
        build(inputs=(str(first.shards),), output_dir=tmp_path / "first")
