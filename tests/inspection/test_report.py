"""The report, as a browser sees it where there is one: charts, gallery, nothing run or fetched that data asks for."""

import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from energon_packed import pack
from energon_packed.cli.report import command
from energon_packed.errors import ConfigError
from tests.conftest import FLAVORS, Packer

EVIL = "<script>document.title='run'</script><img src=x onerror=\"document.title='run'\"></p></article>"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(command, list(map(str, arguments)))


class _Page(HTMLParser):
    """Tags with their attributes, and the text of all but scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


@pytest.fixture(scope="module")
def evil(tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report over records that hold markup wherever a record can."""
    root = tmp_path_factory.mktemp("evil")
    records: list[Any] = [
        {"id": f"{EVIL}{i}", "prompts": [f"{EVIL} {i}?"], "captions": [f"{EVIL} blue {'circle ' * (i % 9)}"]}
        for i in range(400)
    ]
    records.append({"id": EVIL, "messages": [{"role": EVIL, "content": "x"}]})
    (root / "d.jsonl").write_text("\n".join(map(json.dumps, records)))
    pack(root / "d.jsonl", output_dir=root / "out", tokenizer=tokenizer_dir, seq_len=512, workers=1)
    result = run(root / "out", "-o", root / "report.html")
    assert result.exit_code == 0, result.output
    return root / "report.html"


def test_markup_in_data_is_text(evil: Path) -> None:
    page = _Page(evil.read_text())
    assert page.count("script") == 1
    assert not [attrs for tag, attrs in page.tags if "onerror" in attrs or "onload" in attrs]
    assert any("<script>document.title" in text for text in page.text)
    policy = next(attrs for tag, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy")["content"]
    assert policy is not None
    assert "default-src 'none'" in policy
    assert "script-src 'sha256-" in policy
    fetched = [v for _, attrs in page.tags for k, v in attrs.items() if k in ("src", "href") and v]
    assert all(value.startswith(("data:", "#")) for value in fetched)


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")
def test_in_a_browser(evil: Path, tmp_path: Path) -> None:
    done = _browse(evil, tmp_path)
    assert "CONSOLE" not in done.stderr
    page = _Page(done.stdout)
    assert "<title>" in done.stdout
    title = re.search(r"<title>(.*?)</title>", done.stdout, re.S)
    assert title is not None
    assert title[1] == str(evil.parent / "out")  # what the planted script would have changed
    assert sum(tag == "figure" for tag, _ in page.tags) == 4
    packs = [attrs for tag, attrs in page.tags if tag == "details"]
    hidden = [attrs for attrs in packs if "hidden" in attrs]
    assert len(packs) - len(hidden) == 10
    assert re.search(r"page 1 of \d", done.stdout)

    # The same page without its policy, so that a script of ours may press the button.
    pressed = tmp_path / "pressed.html"
    text = re.sub(r"<meta http-equiv=.*?>", "", evil.read_text(), count=1)
    pressed.write_text(
        text.replace("</body>", "<script>document.querySelector('button[value=\"1\"]').click()</script>")
    )
    after = _browse(pressed, tmp_path)
    assert re.search(r"page 2 of \d", after.stdout)
    packs = [attrs for tag, attrs in _Page(after.stdout).tags if tag == "details"]
    assert all("hidden" in attrs for attrs in packs[:10])
    assert "hidden" not in packs[10]


def _browse(page: Path, profile: Path) -> subprocess.CompletedProcess[str]:
    """The page as Chromium has it after a while, and what it logged."""
    assert CHROMIUM is not None
    arguments = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
    arguments += ["--enable-logging=stderr", "--virtual-time-budget=3000", "--dump-dom", page.as_uri()]
    done = subprocess.run([CHROMIUM, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done


@pytest.mark.parametrize("flavor", FLAVORS)
def test_every_flavor(pack_demo: Packer, flavor: str, tmp_path: Path) -> None:
    result = pack_demo(sample_class=flavor, max_packs_per_shard=8, split={"train": 0.8, "val": 0.2})
    shown = run(result.shards.parent, "-o", tmp_path / "r.html")
    assert shown.exit_code == 0, shown.output
    page = _Page((tmp_path / "r.html").read_text())
    text = " ".join(page.text)
    for value in (result.manifest.records, result.manifest.tokens, result.manifest.packs):
        assert f"{value:,}" in text
    assert all(shard.name in text for shard in result.manifest.shards)
    assert all(reason in text for reason in result.manifest.rejects)
    assert page.count("figure") == (4 if flavor != "MultiMixQASample" else 2)
    assert page.count("img") > 0
    assert any(given.get("class") == "map" for _, given in page.tags) is (flavor != "MultiMixQASample")
    again = run(result.shards.parent, "-o", tmp_path / "again.html")
    assert again.exit_code == 0
    assert (tmp_path / "again.html").read_bytes() == (tmp_path / "r.html").read_bytes()


def test_a_blend(pack_demo: Packer, tmp_path: Path) -> None:
    shards = pack_demo(max_packs_per_shard=3).shards
    mix = tmp_path / "mix.yaml"
    mix.write_text(
        f"splits:\n  train:\n    blend:\n      - {{path: {shards}, weight: 3}}\n      - {{path: '<b>', weight: 1}}\n"
    )
    assert run(mix, "-o", tmp_path / "r.html").exit_code == 0
    text = " ".join(_Page((tmp_path / "r.html").read_text()).text)
    assert str(shards) in text
    assert "<b>" in text
    mix.write_text(f"splits:\n  train:\n    blend:\n      - {{path: {shards}, weight: 3}}\n")
    assert run(mix, "-o", tmp_path / "r.html").exit_code == 0
    assert "100.00%" in (tmp_path / "r.html").read_text()


def test_without_matplotlib_the_pip_command_is_told(
    pack_demo: Packer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = pack_demo(max_packs_per_shard=3).shards
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run(shards, "-o", tmp_path / "r.html")
    assert isinstance(result.exception, ConfigError)
    assert "pip install 'energon-packed[report]'" in str(result.exception)
