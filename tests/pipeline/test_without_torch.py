"""Packing text with a tokenizer that needs no torch imports no torch, in no process."""

import json
import os
import subprocess
import sys
from pathlib import Path

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


def test_packing_text_imports_no_torch(text_tokenizer_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "adapt.py").write_text(ADAPTER)
    talks = [[{"role": r, "content": f"{r} {n}"} for r in ("user", "assistant") * (1 + n % 3)] for n in range(20)]
    records = [{"text": f"a document, {n}"} for n in range(20)] + [{"messages": talk} for talk in talks]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    absent = "" if oldest.TRANSFORMERS else "torch"  # the oldest allowed release imports torch for any tokenizer
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "d.jsonl"), str(tmp_path / "out"), str(text_tokenizer_dir)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]), "ABSENT": absent},
    )
    assert (done.returncode, done.stdout) == (0, "40\n"), done.stderr
