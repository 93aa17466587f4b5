"""`--quiet`, `--verbose`, `--json`, and progress without a terminal."""

import io
import json
import logging
import re
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click import Context
from click.testing import CliRunner
from rich.console import Console

from tests.cli.test_cli import run, run_installed
from tests.internals import (
    NOTICE,
    DemoDataset,
    Output,
    TerminalProgress,
    cli,
    dry_run_table,
    duration,
    turn_text,
    unused_lines,
)


@pytest.fixture(scope="module")
def packed(demo: DemoDataset, tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Output of `pack --json`, and its folder."""
    out = tmp_path_factory.mktemp("json") / "out"
    options = ("--seq-len", "1024", "--tokenizer", tokenizer_dir, "--workers", "1")
    done = run("pack", demo.jsonl, "-o", out, *options, "--split", "train=99,val=1", "--json")
    assert done.returncode == 0, done.stderr
    return done, out


def test_json_of_pack_is_one_object_and_the_rest_is_on_stderr(packed: Any, demo: DemoDataset) -> None:
    done, out = packed
    value = json.loads(done.stdout)
    assert value["manifest"]["records"] == demo.records
    assert value["shards"] == str(out / "webdataset")
    assert value["steps_per_epoch"] == value["packs_by_split"]["train"]
    assert "│ records" in done.stderr


def test_a_split_without_a_pack_is_a_warning(packed: Any) -> None:
    done, _ = packed
    assert json.loads(done.stdout)["packs_by_split"]["val"] == 0
    assert re.search(r"^warning: split val is empty: .* Raise its share in --split", done.stderr, re.MULTILINE)


def test_json_of_the_other_commands(packed: Any, tmp_path: Path) -> None:
    _, out = packed
    verified = run("verify", out, "--fast", "--json")
    value = json.loads(verified.stdout)
    assert value["passed"]
    assert len(value["checks"]) > 5
    assert "✓" in verified.stderr
    blended = json.loads(run("metadataset", tmp_path / "mix.yaml", out, "--json").stdout)
    assert blended["train"][0]["path"] == str(out / "webdataset")
    assert blended["val"] == []
    repaired = json.loads(run("nv-meta", out, "--json").stdout)
    assert (repaired["shards"], repaired["kept_split"]) == (1, True)


def test_a_failed_check_is_in_json_and_shown_when_quiet(packed: Any, tmp_path: Path) -> None:
    import shutil

    _, out = packed
    shutil.copytree(out, tmp_path / "copy")
    tar = next((tmp_path / "copy" / "webdataset").glob("*.tar"))
    tar.write_bytes(tar.read_bytes()[:-2000])
    failed = run("verify", tmp_path / "copy", "--fast", "--json")
    value = json.loads(failed.stdout)
    assert failed.returncode == 1
    assert not value["passed"]
    assert "pack it again" in value["remedy"]
    shown = run("verify", tmp_path / "copy", "--fast", "--quiet")
    assert shown.returncode == 1
    assert "✗" in shown.stdout
    assert "✓" not in shown.stdout


def test_quiet_prints_nothing_and_verbose_more(
    demo: DemoDataset, tokenizer_dir: Path, packed: Any, tmp_path: Path
) -> None:
    options = ("--seq-len", "1024", "--tokenizer", tokenizer_dir, "--workers", "1", "-o", tmp_path / "o")
    quiet = run_installed("pack", demo.jsonl, *options, "--quiet")
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, "", "")
    verbose = run("pack", demo.jsonl, *options, "--verbose")
    assert f"reads {demo.jsonl}" in verbose.stderr
    assert "records measured and reused" in verbose.stderr
    both = run("pack", demo.jsonl, *options, "-q", "-v")
    assert (both.returncode, "contradict each other" in both.stderr) == (2, True)
    for command in (("verify", packed[1], "--fast"), ("nv-meta", packed[1]), ("metadataset", "m.yaml", packed[1])):
        done = run(*command, "--quiet", cwd=tmp_path)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_without_a_terminal_a_line_shows_progress_rate_and_remaining_time(monkeypatch: pytest.MonkeyPatch) -> None:
    out, seconds = io.StringIO(), iter([0.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(seconds, 0.7))
    progress = TerminalProgress(Console(file=out), interval=0.05)
    progress.start("measure", 100, "records")
    progress.advance(25, 50)
    until = time.monotonic() + 60
    while not out.getvalue() and time.monotonic() < until:
        time.sleep(0.01)
    progress.finish(1.0)
    lines = out.getvalue().splitlines()
    assert re.fullmatch(r"measure +25% 50 records, [\d,]+/s, 1 s, about 2 s left", lines[-2]), lines
    assert lines[-1].startswith("measure            50 records")
    time.sleep(0.15)
    assert out.getvalue().splitlines() == lines
    assert [duration(seconds) for seconds in (45, 89, 90, 720, 5340, 5400, 12_000)] == [
        "45 s", "89 s", "2 min", "12 min", "89 min", "1 h 30 min", "3 h 20 min",
    ]  # fmt: skip


def test_each_stage_counts_from_zero_and_a_rate_needs_a_count(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    progress = TerminalProgress(Console(file=out, width=200), interval=0.01)
    for stage, done, seconds in (("measure", (2, 6), 2.0), ("index", (4,), 2.0), ("write", (), 2.0)):
        progress.start(stage, 4, "items")
        if done:
            progress.advance(*done)
        progress.finish(seconds)
    lines = [" ".join(line.split()) for line in out.getvalue().splitlines() if "/s" in line or "write" in line]
    assert lines == ["measure 6 items 2.0 s 3/s", "index 4 items 2.0 s 2/s", "write 0 items 2.0 s"]
    # More than the total, which may be an estimate, has no remaining time.
    seconds_since = iter([0.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(seconds_since, 0.4))
    out.truncate(0)
    progress.start("plan", 2, "packs")
    progress.advance(3)
    until = time.monotonic() + 60
    while "150%" not in out.getvalue() and time.monotonic() < until:
        time.sleep(0.001)
    progress.stop()
    assert "plan     150% 3 packs, 0 s\n" in out.getvalue()  # and no rate before half a second


def test_a_line_shows_that_libraries_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    events = list[str]()

    class Timer:
        daemon = False

        def __init__(self, *arguments: Any) -> None: ...

        def start(self) -> None:
            events.append("start")

        def cancel(self) -> None:
            events.append("cancel")

    monkeypatch.setattr(threading, "Timer", Timer)
    monkeypatch.setattr("sys.stderr", stderr := io.StringIO())
    monkeypatch.setattr(stderr, "isatty", lambda: True)
    found = {}
    for case, flags, completes in (("", [], False), ("quiet", ["-q"], False), ("completion", [], True)):
        monkeypatch.setattr("sys.argv", ["energon-packed", "pack", *flags])
        events.clear()
        cli.get_command(Context(cli, resilient_parsing=completes), "pack")
        found[case] = [*events]
    assert found == {"": ["start", "cancel"], "quiet": ["cancel"], "completion": ["cancel"]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pack", "d.jsonl", "-o", "az://b/out"], "--output-dir az://b/out is remote; az:// is not supported"),
        (["pack", "d.jsonl", "-o", "s3://b/out", "--work-dir", "s3://b/w"], "--work-dir s3://b/w is remote"),
        (["pack", "d.jsonl", "-o", "out", "--work-dir", "w"], "--work-dir must be omitted for a local --output-dir"),
        (["pack", "az://bucket/d.jsonl", "-o", "out"], "az://bucket/d.jsonl is remote; az:// is not supported yet"),
        (["pack", "d.jsonl", "-o", "out", "--image-root", "hf://x"], "--image-root hf://x is remote"),
        (["demo", "-o", "s3://b/demo"], "--output-dir s3:/b/demo is remote"),
        (["state", "redist", "OUT", "s3://b/new", "--world-size", "2"], "s3:/b/new is remote"),
        (["lengths", "d.jsonl", "-o", "hf://bucket/out"], "--output-dir hf://bucket/out is remote"),
        (["metadataset", "az://bucket/mix.yaml", "OUT"], "az:/bucket/mix.yaml is remote"),
        (["metadataset", "mix.yaml", "az://bucket/a"], "az://bucket/a is remote"),
    ],
)
def test_object_stores_are_refused_at_once(packed: Any, tmp_path: Path, arguments: list[str], message: str) -> None:
    more = ["--tokenizer", "none"] if arguments[0] in ("pack", "lengths") else []
    more += ["--seq-len", "64"] if arguments[0] == "pack" else []
    arguments = [str(packed[1]) if one == "OUT" else one for one in arguments]
    done = run(*arguments, *more, cwd=tmp_path)
    assert done.returncode == (2 if arguments[0] in ("pack", "lengths") else 1)  # 2: wrong usage
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_help_has_groups_and_marks_what_is_required() -> None:
    shown = run("pack", "--help-all").stdout
    heads = re.findall(r"^(\w+):$", shown, re.MULTILINE)
    assert heads == ["Input", "Tokens", "Images", "Videos", "Audio", "Packing", "Output", "Run", "Table", "Messages"]
    for flag in ("--seq-len", "--tokenizer", "-o, --output-dir|--output-dir, -o"):
        assert re.search(rf"({flag}) [^-]*?\[required\]", shown), flag
    for command in ("lengths", "verify", "metadataset", "nv-meta"):
        text = run(command, "--help").stdout
        assert "Other:" not in text
        assert "--json" in text


@pytest.mark.parametrize("command", ["pack", "lengths", "verify", "view"])
def test_the_short_help_has_a_line_per_option_and_names_the_long_help(command: str) -> None:
    runner = CliRunner()
    flags = ("--help", "--help-all")
    short, long = (runner.invoke(cli, [command, flag], terminal_width=80).output for flag in flags)
    lines = short.splitlines()
    assert lines[-1].endswith(f" {command} --help-all")
    assert re.findall(r"^(\w+):$", short, re.MULTILINE)[-1] == "Messages"
    assert " [default: " in short
    assert "[default: False]" not in long
    options = lines[next(i for i, line in enumerate(lines) if re.fullmatch(r"\w+:", line)) : -1]
    assert all(re.fullmatch(r"|\w+:|  -\S.*  \S.*", line) and len(line) < 80 for line in options), short
    shown, known = (set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", text, re.MULTILINE)) for text in (short, long))
    assert shown < known
    assert len(shown) <= 21


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands_and_options(shell: str) -> None:
    import os
    import subprocess

    from tests.cli.test_cli import TOOL

    source = {**os.environ, "_ENERGON_PACKED_COMPLETE": f"{shell}_source"}
    done = subprocess.run([str(TOOL)], env=source, capture_output=True, text=True, check=False)
    if "Shell completion is not supported for Bash versions older" not in done.stderr:
        assert "_ENERGON_PACKED_COMPLETE" in done.stdout, done.stderr
    asked = {
        "_ENERGON_PACKED_COMPLETE": f"{shell}_complete",
        "COMP_WORDS": "energon-packed pack --seq",
        "COMP_CWORD": "2",
    }
    if shell == "fish":
        asked["COMP_CWORD"] = "--seq"
    done = subprocess.run([str(TOOL)], env={**os.environ, **asked}, capture_output=True, text=True, check=False)
    assert "--seq-len" in done.stdout, done.stderr


@pytest.mark.parametrize("is_terminal", [False, True])
@pytest.mark.parametrize("flags", [{}, {"quiet": True}, {"verbose": True}])
def test_long_steps_are_shown_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, flags: dict[str, bool]
) -> None:
    monkeypatch.setattr("sys.stderr", stderr := io.StringIO())
    monkeypatch.setattr(stderr, "isatty", lambda: is_terminal)
    log, level = logging.getLogger("energon_packed.test"), logging.getLogger("energon_packed").level
    with Output(**flags).logs():
        log.log(NOTICE, "loading the tokenizer ...")
        log.warning("`seq_len` is\nignored")
    shown = flags == {"verbose": True} or (is_terminal and not flags)
    assert stderr.getvalue() == "loading the tokenizer ...\n" * shown + "warning: --seq-len is ignored\n"
    assert logging.getLogger("energon_packed").level == level


def test_a_quiet_run_on_a_terminal_prints_its_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bar would pass what is printed on both streams to its console."""
    monkeypatch.setenv("TERM", "xterm")
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, stream := io.StringIO())
        monkeypatch.setattr(stream, "isatty", lambda: True)
    out, err, progress = sys.stdout, sys.stderr, Output(quiet=True).progress()
    progress.start("measure", 1, "records")
    print("warning: x", file=sys.stderr)
    progress.finish(1.0)
    assert (out.getvalue(), err.getvalue()) == ("", "warning: x\n")  # type: ignore[attr-defined]
    assert [Output(verbose=value).progress()._interval for value in (False, True)] == [60, 10]  # type: ignore[attr-defined]


def test_long_lists_names_and_texts_are_cut() -> None:
    counts = {"x" * 61: 2000, "a\nb": 12} | {f"f{number}": 1 for number in range(11)}
    [line] = unused_lines(SimpleNamespace(ignored_entries=(), unused_fields=counts, notes={}))
    shown = [f"2,000 x {'x' * 59}…", r"12 x a\nb", *(f"1 x f{number}" for number in range(8)), "and 3 more"]
    assert line == f"fields not used: {'; '.join(shown)}"
    assert turn_text("user", "y" * 2000) == f"  user      {'y' * 2000}"
    assert turn_text("user", "y" * 2001) == f"  user      {'y' * 2000} … (2,001 characters)"


def test_counts_of_a_sampled_dry_run_are_estimates() -> None:
    values = {"files": ("a",), "input_bytes": 1000, "to_measure": 0.25, "sampled": 5, "records": 10, "rejects": {}}
    values |= {"packs": 4, "tokens": 3, "shards": 2, "num_bytes": 1000, "free_bytes": 1000}
    console = Console(width=100, file=(out := io.StringIO()))
    console.print(dry_run_table(SimpleNamespace(**values)))
    cells = [[cell.strip() for cell in line.split("│") if cell.strip()] for line in out.getvalue().splitlines()]
    rows = {row[0]: row[1] for row in cells if len(row) == 2}
    assert (rows["measured before, reused"], rows["records"], rows["packs"]) == ("75%", "about 10", "about 4")
    assert rows["rejected"] == "0"
