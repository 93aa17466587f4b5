"""Strings of a dataset reach a terminal, JSON and a report without control or direction characters."""

import io
import json
import tarfile
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.table import Table

from energon_packed import EnergonPackedError, pack
from tests.internals import SafeConsole, cli, echo, echo_json, main, visible
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
