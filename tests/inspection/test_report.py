"""The page of `report`: charts, gallery and warnings; scripts and links in the data are neither run nor fetched."""

import json
import re
import shutil
import sys
import tracemalloc
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from PIL import Image

from energon_packed import ConfigError, pack
from tests.browser import Browser
from tests.conftest import FLAVORS, Packer
from tests.inspection.datasets import METADATASET_V2, damaged, edit_manifest
from tests.internals import DemoDataset, PackedFolder, ReportData, ShardReader, _zoomed, codec_for, report_data
from tests.printed import invoke

EVIL = "<script>document.title='run'</script><img src=x onerror=\"document.title='run'\"></p></article>"
RECORD = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Blue."}]}


def run(*arguments: object) -> Result:
    return invoke("report", *arguments)


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

    def packs(self) -> list[dict[str, str | None]]:
        """Attributes of each pack of the gallery."""
        return [attrs for tag, attrs in self.tags if tag == "details" and attrs.get("class") == "pack"]


@pytest.fixture(scope="module")
def evil(tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report over records that hold markup wherever a record can."""
    root = tmp_path_factory.mktemp("evil")
    records: list[Any] = [
        {
            "id": f"{EVIL}{i}",
            f"field {EVIL}": 1,
            "prompts": [f"{EVIL} {i}?"],
            "captions": [f"{EVIL} blue {'circle ' * (i % 9)}"],
        }
        for i in range(400)
    ]
    records[0][f"field {EVIL}"] = 1
    records.append({"id": EVIL, "messages": [{"role": EVIL, "content": "x"}]})
    data = root / f"<b onload=x>$y_1$&amp;{'x' * 60}.jsonl"
    data.write_text("\n".join(map(json.dumps, records)))
    pack(data, output_dir=root / "out", tokenizer=tokenizer_dir, seq_len=512, workers=1)
    result = run(root / "out", "-o", root / "report.html")
    assert result.exit_code == 0, result.output
    return root / "report.html"


def test_markup_in_data_is_text(evil: Path) -> None:
    page = _Page(evil.read_text())
    assert page.count("script") == 1
    assert not [attrs for tag, attrs in page.tags if "onerror" in attrs or "onload" in attrs]
    assert any("<script>document.title" in text for text in page.text)
    assert any(f"field {EVIL}" in text for text in page.text)  # of the fields not used
    assert any("<b onload=x>$y_1$&amp;xxx" in text for text in page.text)  # of the sources
    policy = next(attrs for tag, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy")["content"]
    assert policy is not None
    assert "default-src 'none'" in policy
    assert "script-src 'sha256-" in policy
    fetched = [v for _, attrs in page.tags for k, v in attrs.items() if k in ("src", "href") and v]
    assert all(value.startswith(("data:", "#")) for value in fetched)


def test_the_page_works_in_a_browser_and_blocks_other_scripts(evil: Path, tmp_path: Path) -> None:
    with Browser(tmp_path) as browser:
        browser.open(evil.as_uri())
        assert not browser.log
        assert browser.run("document.title") == str(evil.parent / "out")  # what the planted script would have changed
        assert browser.run("document.querySelectorAll('figure').length") == 4
        is_open = browser.run("[...document.querySelectorAll('details.pack')].map((pack) => pack.open)")
        assert is_open == [True] + [False] * (len(is_open) - 1)


@pytest.mark.parametrize("flavor", FLAVORS)
def test_the_page_contains_the_counts_of_every_flavor(pack_demo: Packer, flavor: str, tmp_path: Path) -> None:
    result = pack_demo(sample_class=flavor, max_packs_per_shard=8, split={"train": 0.8, "val": 0.2})
    shown = run(result.shards.parent, "-o", tmp_path / "r.html")
    assert shown.exit_code == 0, shown.output
    page = _Page((tmp_path / "r.html").read_text())
    text = " ".join(page.text)
    for value in (result.manifest.records, result.manifest.tokens, result.manifest.packs):
        assert f"{value:,}" in text
    assert all(shard.name in text for shard in result.manifest.shards)
    assert all(reason in text for reason in result.manifest.rejects)
    assert page.count("figure") == (6 if flavor != "MultiMixQASample" else 4)
    assert f"{result.manifest.supervised_tokens:,} of {result.manifest.tokens:,}" in text
    assert page.count("img") > 0
    assert any(given.get("class") == "map" for _, given in page.tags) is (flavor != "MultiMixQASample")
    again = run(result.shards.parent, "-o", tmp_path / "again.html")
    assert again.exit_code == 0
    assert (tmp_path / "again.html").read_bytes() == (tmp_path / "r.html").read_bytes()


CLIPPED = """(() => {
  const clipped = [...document.body.querySelectorAll("*")].filter((e) => {
    const box = e.getBoundingClientRect(), style = getComputedStyle(e);
    const cut = style.overflowX !== "visible" && e.scrollWidth > e.clientWidth + 1;
    return !e.closest("svg *, thead") && (cut || box.right > innerWidth + 1 || box.left < -1);
  });
  return {width: innerWidth, page: document.documentElement.scrollWidth,
    cells: getComputedStyle(document.querySelector("td")).display,
    clipped: clipped.map((e) => e.outerHTML.slice(0, 200))};
})()"""


def test_nothing_is_clipped_on_narrow_screens(evil: Path, pack_demo: Packer, tmp_path: Path) -> None:
    shards = pack_demo(max_packs_per_shard=8, split={"train": 0.8, "val": 0.2}).shards
    mix = tmp_path / "mix.yaml"
    entries = "".join(
        f"      - {{path: {path}, weight: 1}}\n"
        for path in (shards, evil.parent / "out" / "webdataset", damaged(shards, tmp_path / ("y" * 200)))
    )
    mix.write_text(f"{METADATASET_V2}splits:\n  train:\n    blend:\n{entries}  val:\n    path: {shards}\n")
    assert run(shards, "-o", tmp_path / "packed.html").exit_code == 0
    assert run(mix, "-o", tmp_path / "mixed.html").exit_code == 0
    with Browser(tmp_path / "profile") as browser:
        for page in (evil, tmp_path / "packed.html", tmp_path / "mixed.html"):
            for width, cells in ((360, "grid"), (1280, "table-cell")):
                browser.show(width)
                browser.open(page.as_uri())
                assert browser.run(CLIPPED) == {"width": width, "page": width, "cells": cells, "clipped": []}


def test_the_least_utilized_packs_are_listed_and_the_chart_shows_the_others(pack_demo: Packer, tmp_path: Path) -> None:
    result = pack_demo(max_packs_per_shard=3)
    tokens = {}
    codec = codec_for(result.manifest.sample_class)
    for shard in result.manifest.shards:
        reader = ShardReader([result.shards / shard.name])
        for number in range(len(reader)):
            raw = reader[number]
            tokens[str(raw["__key__"]), shard.name] = sum(n or 0 for n in codec.lengths(raw))
    data = ReportData(PackedFolder.open(result.shards), None)
    assert [(p.key, p.shard) for p in data.worst] == sorted(tokens, key=lambda name: (tokens[name], name))[:10]
    assert sum(p.tokens for p in data.measured) == result.manifest.tokens
    assert sum(sum(p.images) for p in data.measured) == result.manifest.images
    assert run(result.shards, "-o", tmp_path / "r.html").exit_code == 0
    text = " ".join(_Page((tmp_path / "r.html").read_text()).text)
    assert f"{100 * data.worst[0].tokens / result.manifest.seq_len:.2f}%" in text
    assert _zoomed([99.0, 99.5, 99.9, 99.7] * 10 + [3.0]) == ([99.0, 99.5, 99.9, 99.7] * 10, 1)
    assert _zoomed([50.0, 60.0, 70.0]) == ([50.0, 60.0, 70.0], 0)
    assert _zoomed([100.0] * 9) == ([100.0] * 9, 0)


def test_warnings_and_settings(
    demo: DemoDataset, tokenizer_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [{**RECORD, "url": "u", "id": f"r{i}"} for i in range(40)] + [{"id": "none"}]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, records)))
    out, inputs = tmp_path / "out", [tmp_path / "d.jsonl", demo.jsonl]
    options: dict[str, Any] = {"tokenizer": tokenizer_dir, "seq_len": 1024, "workers": 1, "max_reject_rate": 1}
    result = pack(inputs, output_dir=out, split={"train": 0.999, "test": 0.001}, **options)
    text = _report(out, tmp_path)
    rejected = result.manifest.records - result.manifest.packed
    assert f"{rejected} of {result.manifest.records} records (" in text
    assert "split test has no pack; its share is 0.001" in text
    assert "not used: 1 field (url) of the records" in text
    assert "kinds of tokens (image, supervised, other) are unknown" not in text
    for entry, path, count in zip(result.manifest.sources, inputs, (41, demo.records), strict=True):
        assert (entry.path, entry.records) == ([str(path)], count)
        assert str(path) in text
    assert f"{tokenizer_dir} (fingerprint {result.manifest.tokenizer_fingerprint[:12]})" in text
    assert f"SHA-256 {result.manifest.template_fingerprint[:12]}; " in text
    assert "pixels; from" in text

    shard = out / "webdataset" / result.manifest.shards[0].name
    shard.write_bytes(shard.read_bytes() + b"\0" * 512)
    manifest = out / "webdataset" / ".nv-meta" / "packing.json"
    manifest.write_text(manifest.read_text().replace(str(tokenizer_dir), "/nowhere/tokenizer"))
    moved = _report(out, tmp_path)
    assert f"the size of 1 shard ({shard.name}) differs from packing.json" in moved
    assert "the tokenizer /nowhere/tokenizer of packing.json does not exist here. Pass --tokenizer" in moved
    assert "Kinds of tokens need --tokenizer" in moved
    assert f"{result.manifest.supervised_tokens:,} of {result.manifest.tokens:,}" in moved  # of packing.json
    given = _report(out, tmp_path, "--tokenizer", tokenizer_dir)
    assert "kinds of tokens, by their ids and labels" in given


def _report(path: Path, folder: Path, *arguments: object) -> str:
    """The text of the page."""
    result = run(path, "-o", folder / "r.html", *arguments)
    assert result.exit_code == 0, result.output
    return " ".join(" ".join(_Page((folder / "r.html").read_text()).text).split())


def test_entries_of_input_folders_that_are_not_read_are_shown(tokenizer_dir: Path, tmp_path: Path) -> None:
    folder, out = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    (folder / "a.jsonl").write_text(json.dumps(RECORD) + "\n")
    texts = []
    for names in ([], ["README.md", "b.avro", "c.avro"]):
        for name in names:
            (folder / name).touch()
        pack(folder, output_dir=out, tokenizer=tokenizer_dir, seq_len=512, workers=1, overwrite=True)
        assert run(out, "-o", tmp_path / "report.html").exit_code == 0
        texts.append(" ".join(" ".join(_Page((tmp_path / "report.html").read_text()).text).split()))
    alone, with_others = texts
    assert "not read as input" not in alone
    assert "entries of input folders that are not read as input: documentation 1, unknown type 2;" in with_others
    assert all(str(folder / name) in with_others for name in ("README.md", "b.avro", "c.avro"))
    assert str(folder / "c.avro") not in alone


def test_rare_images_are_not_called_unreadable(tokenizer_dir: Path, tmp_path: Path) -> None:
    Image.new("RGB", (56, 56)).save(tmp_path / "a.png")
    turns = [{"role": "user", "content": "<image>Which?"}, RECORD["messages"][1]]
    image = {"messages": turns, "images": ["a.png"]}
    records = tmp_path / "a.jsonl"
    records.write_text("".join(json.dumps(record) + "\n" for record in [image, *[RECORD] * 400]))
    options: Any = {"seq_len": 1024, "max_samples_per_pack": 1, "tokenizer": tokenizer_dir, "workers": 1}
    shards = pack(records, output_dir=tmp_path / "out", **options).shards
    assert "unknown: no image is in the 120 packs of the map" in _report(shards, tmp_path)


def test_a_metadataset_has_totals_and_shares(pack_demo: Packer, tmp_path: Path) -> None:
    a, b = pack_demo(max_packs_per_shard=3), pack_demo(max_packs_per_shard=3, seq_len=512)
    mix = tmp_path / "mix.yaml"
    paths = [a.shards, b.shards]
    weighted = "".join(f"      - {{path: {path}, weight: {n}}}\n" for path, n in zip(paths, (3, 1), strict=True))
    mix.write_text(f"{METADATASET_V2}splits:\n  train:\n    blend:\n{weighted}")
    text = _report(mix, tmp_path)
    packs, tokens = [one.manifest.packs for one in (a, b)], [one.manifest.tokens for one in (a, b)]
    assert f"{sum(packs):,}" in text
    assert f"{sum(tokens):,}" in text
    draws = sum(packs)
    drawn = [share * draws / count * size for share, count, size in zip((0.75, 0.25), packs, tokens, strict=True)]
    assert f"draws {draws:,.0f} packs" in text
    assert f"{sum(drawn):,.0f} tokens, counted" in text
    for share in (0.75, 0.25, drawn[0] / sum(drawn), drawn[1] / sum(drawn)):
        assert f"{share:.2%}" in text
    repeated = weighted.replace("weight", "repetitions")
    third = damaged(a.shards, tmp_path / "c")
    entry = f"      - {{path: {third}, repetitions: 1}}\n"
    mix.write_text(f"{METADATASET_V2}splits:\n  train:\n    blend_epochized:\n{repeated}{entry}")
    broken = _report(mix, tmp_path)
    assert "1 of 3 datasets cannot be read; the totals exclude it" in broken
    assert f"{sum(packs):,}" in broken
    mix.write_text(f"{METADATASET_V2}splits:\n  train:\n    blend_epochized:\n{repeated}")
    assert f"One epoch draws {3 * packs[0] + packs[1]:,} packs" in _report(mix, tmp_path)


def test_a_metadataset_is_shown_with_escaped_names(pack_demo: Packer, tmp_path: Path) -> None:
    shards = pack_demo(max_packs_per_shard=3).shards
    mix = tmp_path / "mix.yaml"
    damaged(shards, tmp_path / "<b>")
    entries = f"      - {{path: {shards}, weight: 3}}\n      - {{path: '<b>', weight: 1}}\n"
    mix.write_text(f"{METADATASET_V2}splits:\n  train:\n    blend:\n{entries}")
    assert run(mix, "-o", tmp_path / "r.html").exit_code == 0
    text = " ".join(_Page((tmp_path / "r.html").read_text()).text)
    assert str(shards) in text
    assert "<b>" in text
    mix.write_text(f"{METADATASET_V2}splits:\n  train:\n    blend:\n      - {{path: {shards}, weight: 3}}\n")
    assert run(mix, "-o", tmp_path / "r.html").exit_code == 0
    assert "100.00%" in (tmp_path / "r.html").read_text()


def test_without_matplotlib_the_error_names_the_pip_command(
    pack_demo: Packer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = pack_demo(max_packs_per_shard=3).shards
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run(shards, "-o", tmp_path / "r.html")
    assert isinstance(result.exception, ConfigError)
    assert "pip install 'energon-packed[report]'" in str(result.exception)


def test_images_are_in_their_places_in_the_text(demo: DemoDataset, tokenizer_dir: Path, tmp_path: Path) -> None:
    images = sorted(path.name for path in (demo.jsonl.parent / "images").iterdir() if path.stat().st_size > 1000)[:2]
    turns = [
        {"role": "user", "content": "before <image> between <image> after"},
        {"role": "assistant", "content": "long " * 1000 + "end"},
        {"role": "user", "content": "More?"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "<image>", "arguments": {}}}]},
    ]
    data = demo.jsonl.with_name("placed.jsonl")
    options: dict[str, Any] = {"tokenizer": tokenizer_dir, "seq_len": 8192, "workers": 1}
    for flavor, count in (("PackedMultiMixQASample", 4), ("PackedTokensSample", 2)):
        record = {"messages": turns[:count], "images": [f"images/{name}" for name in images]}
        data.write_text(json.dumps(record) + "\n")
        result = pack(data, output_dir=tmp_path / flavor, sample_class=flavor, **options)
        assert run(result.shards, "-o", tmp_path / "r.html").exit_code == 0
        page = (tmp_path / "r.html").read_text()
        (article,) = re.findall(r"<article>(.*?)</article>", page, re.S)
        shown = " ".join(re.sub(r'<img[^>]*title="(\w+)\.[^>]*>', r"[\1]", article).split())
        if flavor == "PackedTokensSample":
            named = re.sub(r"&lt;.*?&gt;", "|", shown)  # special tokens
            assert "<b>context</b> <div>|user before |[img0_0]| between |[img0_1]| after|" in named
            assert '<div class="turn supervised"><b>target</b> <div>long long ' in shown
            assert "<b>tokens</b>" in _tokens_page(result.shards, tmp_path)
            continue
        assert "<b>user</b> <div>before [img0_0] between [img0_1] after</div>" in shown
        assert 'long <i class="note"> ... 1,003 more characters</i>' in shown
        assert "tool_calls: [{&#34;function&#34;:{&#34;name&#34;:&#34;&lt;image&gt;&#34;" in shown
        assert "<b>user</b> <div>More?</div>" in shown


def _tokens_page(shards: Path, folder: Path) -> str:
    """The page of a dataset whose tokenizer is not found."""
    copy = shutil.copytree(shards, folder / "copy")
    edit_manifest(copy, lambda value: value["encoder"].update(tokenizer="none"))
    assert run(copy, "-o", folder / "copy.html").exit_code == 0
    return (folder / "copy.html").read_text()


def test_a_relative_tokenizer_is_found_from_other_folders(
    tokenizer_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work").mkdir()
    shutil.copytree(tokenizer_dir, tmp_path / "work" / "models" / "tokenizer")
    monkeypatch.chdir(tmp_path / "work")
    Path("d.jsonl").write_text(json.dumps(RECORD) + "\n")
    pack("d.jsonl", output_dir="runs/out", tokenizer="models/tokenizer", seq_len=512, workers=1)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "work").rename("moved")
    text = _report(Path("moved/runs/out"), tmp_path)
    assert "kinds of tokens, by their ids and labels" in text
    shutil.rmtree(tmp_path / "moved" / "models")
    missing = "the tokenizer models/tokenizer of packing.json does not exist here"
    assert missing in _report(Path("moved/runs/out"), tmp_path)


def test_two_runs_are_compared(pack_demo: Packer, tmp_path: Path) -> None:
    one = pack_demo(max_packs_per_shard=3).manifest
    shards, other = pack_demo(max_packs_per_shard=3).shards, pack_demo(max_packs_per_shard=3, seq_len=512)
    result = run(shards, other.shards, "-o", tmp_path / "r.html")
    assert result.exit_code == 0, result.output
    text = " ".join(" ".join(_Page((tmp_path / "r.html").read_text()).text).split())
    change = other.manifest.packs - one.packs
    packs = f"{one.packs} -> {other.manifest.packs}, {change:+} ({change / one.packs:+.2%})"
    assert f"packs: {packs}\n" in result.output
    assert "seq_len: 1024 -> 512\n" in result.output
    assert "records:" not in result.output  # are equal
    points = 100 * (other.manifest.utilization - one.utilization)
    utilization = f"utilization {one.utilization:.2%} {other.manifest.utilization:.2%} {points:+.2f} points"
    for expected in (
        f"packs {one.packs} {other.manifest.packs} {change:+}",
        f"records {one.records} {one.records} ",
        utilization,
        "corrupt_image 1 1 ",
        "seq_len 1024 512",
    ):
        assert expected in text
    same = run(shards, shards, "-o", tmp_path / "r.html")
    assert same.output.splitlines() == [same.output.strip()]
    refused = run(shards, shards, "--tokenizer", tmp_path, "-o", tmp_path / "r.html")
    assert "--tokenizer must be omitted with two datasets" in refused.output
    copy = tmp_path / "third-party"
    shutil.copytree(shards, copy, ignore=shutil.ignore_patterns("packing.json"))
    refused = run(shards, copy, "-o", tmp_path / "r.html")
    assert "third-party must have a packing.json to be compared" in str(refused.exception)


def test_compared_settings_are_content_not_paths(tokenizer_dir: Path, tmp_path: Path) -> None:
    data = tmp_path / "a.jsonl"
    data.write_text(json.dumps(RECORD) + "\n")
    folders = {"first": tokenizer_dir, "copy": tmp_path / "copied", "other": tmp_path / "changed"}
    for name in ("copied", "changed"):
        shutil.copytree(tokenizer_dir, tmp_path / name)
    settings = json.loads((tokenizer_dir / "preprocessor_config.json").read_text())
    (tmp_path / "changed" / "preprocessor_config.json").write_text(json.dumps(settings | {"image_std": [0.5] * 3}))
    outputs = {
        name: pack(data, output_dir=tmp_path / "out" / name, tokenizer=folder, seq_len=64, workers=1).shards
        for name, folder in folders.items()
    }
    lines = run(outputs["first"], outputs["copy"], "-o", tmp_path / "r.html").output.splitlines()
    assert not [line for line in lines if line.startswith("tokenizer")]
    lines = run(outputs["first"], outputs["other"], "-o", tmp_path / "r.html").output.splitlines()
    assert any(re.fullmatch(r"images: image_std: \[0\.268.*\] -> \[0\.5, 0\.5, 0\.5\]", line) for line in lines)
    assert f"tokenizer: {tokenizer_dir} -> {tmp_path / 'changed'}" in lines


def test_packs_are_drawn_in_memory_that_does_not_grow_with_their_number() -> None:
    tracemalloc.start()
    try:
        drawn = report_data._picked(np.random.default_rng(0), 2_000_000, 20_000)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert drawn == sorted(set(drawn))
    assert len(drawn) == 20_000
    assert 0 <= drawn[0] < 1000 < 1_999_000 < drawn[-1] < 2_000_000
    assert peak < 4_000_000  # an array of all has 16 MB
