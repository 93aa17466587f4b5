"""Packs and batches in a notebook."""

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest

from energon_packed import ChatEncoder, PackedDataset, PaddingFreeCollator, pack
from tests.browser import Browser
from tests.inspection.test_view import EVIL


@pytest.fixture(scope="module")
def dataset(tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> PackedDataset:
    folder = tmp_path_factory.mktemp("row")
    turns = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "It is it."}]
    lines = [json.dumps({"id": f"{EVIL}{number}", "messages": turns}) for number in range(3)]
    (folder / "data.jsonl").write_text("\n".join(lines))
    pack(folder / "data.jsonl", output_dir=folder / "out", tokenizer=tokenizer_dir, seq_len=256, workers=1)
    return PackedDataset(folder / "out", ChatEncoder.from_pretrained(tokenizer_dir))


def content_of(value: Any) -> str:
    shown = value._repr_html_()
    assert len(shown) < 40_000
    frame = r'<iframe sandbox title="\w+" width="100%" height="\d+" style="border: 0" srcdoc="([^"]*)"></iframe>'
    match = re.fullmatch(frame, shown.strip())
    assert match is not None
    return html.unescape(match[1])


def test_packs_and_batches_have_a_view_for_notebooks(dataset: PackedDataset, tmp_path: Path) -> None:
    samples = dataset[0]
    batch = PaddingFreeCollator(pad_to=256).collate(samples)
    for value, name in ((samples, "pack"), (batch, "PackedBatch")):
        content = content_of(value)
        assert f"{name}: 3 samples, {sum(map(len, samples))} of " in content
        assert "<script" not in content
        assert "default-src 'none'" in content
        cells = re.findall(r'<td data-label="(\w+)"[^>]*>\s*<span>(.*?)</span>', content, re.DOTALL)
        assert [int(text) for label, text in cells if label == "tokens"] == [len(sample) for sample in samples]
        assert [int(text) for label, text in cells if label == "supervised"] == [s.num_supervised for s in samples]
        (tmp_path / "page.html").write_text(f"<meta charset=utf-8><h1>notebook</h1>{value._repr_html_()}")
        with Browser(tmp_path / name) as browser:
            browser.open((tmp_path / "page.html").as_uri())
            assert browser.run("document.title") == ""  # markup of the ids did not run
            assert not browser.log
    assert f"of {batch.input_ids.shape[1]} tokens" in content_of(batch)
