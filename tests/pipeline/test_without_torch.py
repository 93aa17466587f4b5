"""Packing text needs no torch: neither the driver nor a worker imports it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from energon_packed import ChatEncoder

ADAPTER = """
import sys

def check(record):
    assert "torch" not in sys.modules, "a worker has imported torch"
    return record
"""
SCRIPT = """
import sys
from energon_packed import pack
source, out, tokenizer = sys.argv[1:]
options = {"seq_len": 64, "workers": 2, "adapter": "adapt:check", "max_reject_rate": 0}
result = pack(source, output_dir=out, tokenizer=tokenizer, **options)
assert "torch" not in sys.modules, "the driver has imported torch"
print(result.manifest.packed)
"""


def run(folder: Path, tokenizer: Path, out: str) -> subprocess.CompletedProcess[str]:
    (folder / "adapt.py").write_text(ADAPTER)
    (folder / "d.jsonl").write_text("".join(json.dumps({"text": f"a document, {n}"}) + "\n" for n in range(40)))
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder / "d.jsonl"), str(folder / out), str(tokenizer)],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])},
    )


def test_packing_text_imports_no_torch(text_tokenizer_dir: Path, tmp_path: Path) -> None:
    done = run(tmp_path, text_tokenizer_dir, "out")
    assert (done.returncode, done.stdout) == (0, "40\n"), done.stderr


@pytest.mark.parametrize("name", ["Qwen2Tokenizer", "GPT2TokenizerFast"])
def test_nor_for_the_tokenizer_of_a_model_that_was_loaded_before(
    text_tokenizer_dir: Path, tmp_path: Path, name: str
) -> None:
    folder = shutil.copytree(text_tokenizer_dir, tmp_path / "tokenizer")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "tokenizer_class": name}))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2" if "Qwen" in name else "gpt2"}))
    first = ChatEncoder.from_pretrained(folder)  # by AutoTokenizer
    again = ChatEncoder.from_pretrained(folder)
    assert type(again.tokenizer) is type(first.tokenizer)
    assert type(first.tokenizer).__name__ == name.removesuffix("Fast")
    assert again.fingerprint() == first.fingerprint()
    done = run(tmp_path, folder, "out")
    assert (done.returncode, done.stdout) == (0, "40\n"), done.stderr
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", "a": 1}))  # asked again
    changed = run(tmp_path, folder, "again")
    assert "has imported torch" in changed.stderr
