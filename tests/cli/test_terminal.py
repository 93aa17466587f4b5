"""Strings of a dataset reach a terminal, JSON and a report without control or direction characters."""

import io
import json
import os
import signal
import tarfile
import time
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from rich.control import Control
from rich.table import Table

from energon_packed import EnergonPackedError, pack
from tests.internals import Interrupts, SafeConsole, cli, echo, echo_json, main, visible
from tests.printed import invoke

ATTACK = "\x1b[31mred\x1b]0;title\x07\x1b[2J\x9b31m\u202etxt.exe\u2066\u200b\x7f\r\b"
SEEN = r"\x1b[31mred\x1b]0;title\x07\x1b[2J\x9b31m\u202etxt.exe\u2066\u200b\x7f\r\x08"
OBEYED = set(ATTACK) - set("[31mred]0;title2Jtxt.exe")


def test_a_console_prints_attacks_as_escapes_and_keeps_its_own_colors() -> None:
    out = io.StringIO()
    console = SafeConsole(
        file=out, force_terminal=True, color_system="standard", width=300, markup=False, highlight=False
    )
    table = Table("name", title=ATTACK)
    table.add_row(ATTACK)
    console.print(ATTACK, style="bold")
    console.print(table)
    shown = out.getvalue()
    assert shown.startswith("\x1b[1m")  # bold, the style of this program
    assert not OBEYED - {"\x1b"} & set(shown)
    assert "\x1b[31m" not in shown
    assert "\x1b]0" not in shown
    assert shown.count(r"\x1b[31mred\x1b]0;title") == 3
    console.print(Control.home(), end="")  # progress bars move the cursor
    assert out.getvalue() == f"{shown}\x1b[H"
    assert visible(ATTACK) == SEEN
    assert visible("a\tb\nc\u3000d 👩\u200d👩") == "a\tb\nc\u3000d 👩\u200d👩"
    assert visible("\udcfc") == r"\udcfc"  # a file name that is not UTF-8


def test_lines_in_a_pipe_are_not_wrapped(
    tmp_path: Path, text_tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    text = "word " * 60 + "end"
    (tmp_path / "d.jsonl").write_text(json.dumps({"text": text}) + "\n")
    packed = pack(tmp_path / "d.jsonl", output_dir=tmp_path / "out", tokenizer=text_tokenizer_dir, seq_len=512).shards
    shown = invoke("inspect", packed).output
    assert f"{text}\n" in shown
    monkeypatch.setenv("COLUMNS", "60")
    narrow = invoke("inspect", packed).output
    assert text not in narrow
    assert "word word" in narrow


def test_lines_and_json_have_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    echo(ATTACK, err=True)
    echo_json({ATTACK: [ATTACK, "日本", "\U000e0041"]})
    printed = capsys.readouterr()
    assert printed.err == SEEN + "\n"
    assert not OBEYED & set(printed.out)
    assert json.loads(printed.out) == {ATTACK: [ATTACK, "日本", "\U000e0041"]}


def test_strings_of_a_dataset_are_printed_with_escapes(tmp_path: Path, text_tokenizer_dir: Path) -> None:
    record = {"id": ATTACK, "messages": [{"role": "user", "content": ATTACK}, {"role": "assistant", "content": "x"}]}
    (tmp_path / "data.jsonl").write_text(json.dumps(record | {ATTACK: 1}) + "\n")
    out = tmp_path / "evil"
    pack(tmp_path / "data.jsonl", output_dir=out, tokenizer=text_tokenizer_dir, seq_len=512, workers=1)
    with tarfile.open(tmp_path / "evil.tar", "w") as tar:
        for name in (f"{ATTACK}.json", f"0.{ATTACK}"):
            tar.addfile(tarfile.TarInfo(name))
    page = tmp_path / "report.html"
    for arguments in (
        ("inspect", out, "--limit", "2"),
        ("inspect", out, "--json"),
        ("inspect", tmp_path / "evil.tar", "--limit", "0"),
        ("report", out, "-o", page),
    ):
        result = CliRunner().invoke(cli, list(map(str, arguments)))
        assert result.exception is None or isinstance(result.exception, EnergonPackedError), result.output
        assert not OBEYED & set(result.output), arguments
    assert not OBEYED & set(page.read_text(encoding="utf-8"))
    assert r"\u202etxt.exe" in page.read_text(encoding="utf-8")


def test_error_lines_have_escapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = tmp_path / ATTACK.replace("/", "")
    name.mkdir()
    monkeypatch.setattr("sys.argv", ["energon-packed", "verify", str(name)])
    with pytest.raises(SystemExit):
        main()
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ")
    assert not OBEYED & set(printed.err)
    assert r"\u202etxt.exe" in printed.err


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (EnergonPackedError("`seq_len` must be\nat least 1."), 1, "--seq-len must be at least 1."),
        (IsADirectoryError(21, "Is a directory", "out"), 1, "out: Is a directory"),
        (MemoryError(), 1,
         "memory ran out. Use fewer processes (--workers), or raise the memory limit (ulimit -v)."),
        (UnicodeEncodeError("utf-8", f"caf\udce9{'/' * 60}", 3, 4, ""), 1,
         rf"'caf\udce9{'/' * 40}' contains a name that is not valid UTF-8. Rename the file or folder."),
        (click.FileError("a.yaml", "no file"), 1, "Could not open file 'a.yaml': no file"),
        (click.UsageError("Is it?", click.Context(cli, info_name="energon-packed")), 2,
         "Is it? See 'energon-packed --help'."),
        (click.Abort(), 130, "interrupted; run the same command again to resume"),
    ],
)  # fmt: skip
def test_an_error_is_a_line_and_an_exit_status(
    error: BaseException,
    status: int,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(**options: bool) -> None:
        raise error

    monkeypatch.setattr(cli, "main", fail)
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code, capsys.readouterr()) == (status, ("", f"error: {line}\n"))


def test_without_arguments_the_help_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["energon-packed"])
    with pytest.raises(SystemExit):
        main()
    printed = capsys.readouterr()
    assert "\nCommands:\n  lengths " in printed.out + printed.err  # on stderr since Click 8.2
    assert "error" not in printed.err


def test_the_first_signal_ends_in_order_and_a_late_one_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ended, now = list[int](), 100.0
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    try:
        with Interrupts() as interrupts:
            signal.raise_signal(signal.SIGHUP)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGTERM)
            now += 2.9
            signal.raise_signal(signal.SIGTERM)  # while temporary files are removed
            assert not ended
            now += 0.2
            signal.raise_signal(signal.SIGTERM)
        assert ended == [interrupts.status] == [143]
        assert interrupts.message == "interrupted by SIGTERM; run the same command again to resume"
        assert signal.getsignal(signal.SIGTERM) == interrupts._handle  # until the process has ended
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    with Interrupts():
        assert signal.getsignal(signal.SIGTERM) != before[signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) == before[signal.SIGTERM]
