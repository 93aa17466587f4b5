"""Values of options that no run can have: one line each, before anything is read or written."""

import math
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from energon_packed import ConfigError, DataflowConfig, PackedLoaderOptions, PackOptions
from tests.internals import LengthsOptions, declared, make, read_config

NESTED = f"sources: {'[' * 3000}{']' * 3000}"
BOMB = "\n".join(["a0: &a0 [x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9))])
VALUES = (
    *(None, True, 5, -1, 0, 0.5, math.nan, math.inf, 10**30, "", "x", "a\0b", "\ud800", "1/0", "nan", b"x"),
    *([], [1, 2], ["x"], [[1]], [None], {}, {"a": 1}, {1: 2}, {"train": "1"}, {"train": math.nan}, (1, 2, 3), {1}),
)
CLASSES: list[type[Any]] = [PackOptions, LengthsOptions, DataflowConfig, PackedLoaderOptions]


@pytest.mark.parametrize("cls", CLASSES)
def test_any_value_is_taken_or_refused_in_one_line(cls: type[Any], text_tokenizer_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "One."}\n')
    paths = {"inputs": tmp_path / "a.jsonl", "output_dir": tmp_path / "out", "tokenizer": text_tokenizer_dir}
    given = {name: value for name, value in {**paths, "seq_len": 64}.items() if name in names(cls)}
    refused = 0
    for name in names(cls):
        for value in VALUES:
            try:
                make(cls, {**given, name: value})
            except ConfigError as error:
                assert "\n" not in str(error), (name, value)
                assert len(str(error)) < 600, (name, value)
                refused += 1
    assert refused > len(VALUES) * len(names(cls)) // 2
    assert not (tmp_path / "out").exists()


def names(cls: type[Any]) -> list[str]:
    return [one.name for one in declared(cls)]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"seed": 2**63}, "`seed` must be at most 9223372036854775807, got 9223372036854775808"),
        ({"seed": None}, r"`seed` must not be null"),
        ({"max_reject_rate": math.nan}, "`max_reject_rate` must be a number, got nan"),
        ({"max_shard_bytes": "99999999999G"}, "`max_shard_bytes` must be at most"),
        ({"output_dir": ""}, r"`output_dir` is empty; pass a path \(\. is the current folder\)"),
        ({"inputs": ["a", ""]}, "an input is empty; pass a path"),
        ({"split": "train=0.9,val=0.05,val=0.05"}, "must name each split once, got val twice"),
        ({"part": [0.5, 1]}, r"`part` must be two integers, or a string such as 0/4, got \[0.5, 1\]"),
        ({"output_dir": os.fsdecode(b"n\xe9")}, "must be valid UTF-8"),
    ],
)
def test_the_line_names_value_limit_and_remedy(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    given = {"inputs": "a.jsonl", "output_dir": tmp_path / "out", "seq_len": 64, "tokenizer": tmp_path}
    with pytest.raises(ConfigError, match=message):
        make(PackOptions, {**given, **values})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 1\nseq_len: 8\nseed: 2", "line 3 repeats the key 'seed'"),
        ("seq_len: 8\nseq-len: 9", "sets `seq_len` twice, under two names"),
        ("split: {train: 1, train: 2}", "line 1 repeats the key 'train'"),
        ("seed: 2024-13-45", "is not YAML: it cannot be parsed: ValueError"),
        ("seed: !!int abc", "is not YAML: it cannot be parsed: ValueError"),
        ("seed: !!timestamp abc", "is not YAML: it cannot be parsed"),
        ("seed: !!python/object/apply:os.getcwd []", "is not YAML: could not determine a constructor"),
        (NESTED, "is not YAML: it cannot be parsed: RecursionError"),
        (BOMB, "is not YAML: it expands to more than 5,000,000 values"),
        ("strict: 1", "strict must be true or false, got 1"),
    ],
)
def test_config_files_that_are_traps(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_config(file, PackOptions)
    assert len(str(caught.value)) < 600


def test_a_config_file_is_a_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "c.yaml")
    with pytest.raises(ConfigError, match="is a FIFO, not a regular file"):
        read_config(tmp_path / "c.yaml", PackOptions)


def test_merged_keys_may_be_given_again(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("split: &all {train: 1, val: 2}\nsources:\n- {path: a, map: {<<: *all, train: 3}}\n")
    assert read_config(file, PackOptions)["sources"][0]["map"] == {"train": 3, "val": 2}
    assert yaml.safe_load(file.read_text())["sources"][0]["map"] == {"train": 3, "val": 2}


def test_the_home_folder_has_a_short_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    made = make(PackOptions, {"inputs": "a", "output_dir": "~/out", "seq_len": 64, "tokenizer": tmp_path})
    assert made.output_dir == tmp_path / "out"
