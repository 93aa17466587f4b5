"""Packing text needs no torch, and Transformers only once for a tokenizer: no process imports them."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from energon_packed import ChatEncoder
from tests import oldest

ADAPTER = """
import os
import sys

ABSENT = os.environ["ABSENT"].split()

def check(record):
    for name in ABSENT:
        assert name not in sys.modules, f"a worker has imported {name}"
    return record
"""
SCRIPT = """
import sys
from adapt import ABSENT
from energon_packed import pack
source, out, tokenizer = sys.argv[1:]
options = {"seq_len": 256, "workers": 2, "adapter": "adapt:check", "max_reject_rate": 0, "shard_prefix": "p"}
result = pack(source, output_dir=out, tokenizer=tokenizer, **options)
for name in ABSENT:
    assert name not in sys.modules, f"the driver has imported {name}"
print(result.manifest.packed)
"""


def run(
    folder: Path, tokenizer: Path, out: str, *, absent: str = "torch", **environment: str
) -> subprocess.CompletedProcess[str]:
    (folder / "adapt.py").write_text(ADAPTER)
    talks = [[{"role": r, "content": f"{r} {n}"} for r in ("user", "assistant") * (1 + n % 3)] for n in range(20)]
    records = [{"text": f"a document, {n}"} for n in range(20)] + [{"messages": talk} for talk in talks]
    (folder / "d.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder / "d.jsonl"), str(folder / out), str(tokenizer)],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path]), "ABSENT": absent, **environment},
    )


FIRST = "" if oldest.TRANSFORMERS else "torch"
"""What is absent where Transformers is asked about a tokenizer: the oldest allowed release imports torch for that."""


def test_packing_text_imports_no_torch(text_tokenizer_dir: Path, tmp_path: Path) -> None:
    done = run(tmp_path, text_tokenizer_dir, "out", absent=FIRST)
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


def test_what_transformers_made_of_a_tokenizer_is_kept(text_tokenizer_dir: Path, tmp_path: Path) -> None:
    tokenizer = shutil.copytree(text_tokenizer_dir, tmp_path / "tokenizer")
    cache = tmp_path / "cache"

    def tar(out: str, absent: str) -> bytes:
        done = run(tmp_path, tokenizer, out, absent=absent, XDG_CACHE_HOME=str(cache))
        assert (done.returncode, done.stdout) == (0, "40\n"), done.stderr
        return next((tmp_path / out).glob("webdataset/*.tar")).read_bytes()

    first = tar("out", FIRST)
    assert tar("two", "torch transformers") == first
    for file in cache.glob("energon-packed/*/*.json"):  # damaged: asked again
        file.write_text("{}")
    assert tar("six", FIRST) == first

    template = tokenizer / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|im_start|>", "<|im_start|>the "))
    assert tar("new", FIRST) != first


def test_kept_parts_are_those_of_the_tokenizer(text_tokenizer_dir: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(text_tokenizer_dir, tmp_path / "tokenizer")
    first, again = (ChatEncoder.from_pretrained(folder) for _ in range(2))
    given = ChatEncoder(again.tokenizer)
    assert again.fingerprint() == first.fingerprint() == given.fingerprint()
    assert again.parts.special_tokens == dict(again.tokenizer.special_tokens_map)
    assert set(again.parts.added_tokens) == set(again.tokenizer.added_tokens_encoder)
    assert again.parts.vocabulary == len(again.tokenizer)
