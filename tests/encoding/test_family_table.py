"""The trial of tools/family_table.py finds again what vision_families.json says: types of each kind, or all.

`ENERGON_PACKED_FAMILIES=200` is the long form: 200 conversations of every model type.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

ROOT = Path(__file__).parents[2]
TABLE = json.loads((ROOT / "energon_packed/encoding/vision/vision_families.json").read_text(encoding="utf-8"))
# M-RoPE and types of tokens, a kernel, rows of different lengths, and tiles; videos of the first and the last.
CHOSEN = ["glm4v", "lfm2_vl", "mistral3", "smolvlm"]
CONVERSATIONS = int(os.environ.get("ENERGON_PACKED_FAMILIES", "0"))
ALL = [[row["model_type"]] for row in TABLE["families"]]
TORCHVISION = Path(sys.prefix, "torchvision")  # see the Makefile


@pytest.mark.skipif(transformers.__version__ != TABLE["transformers"], reason="the table is of another Transformers")
@pytest.mark.parametrize("types", ALL if CONVERSATIONS else [CHOSEN], ids="-".join)
def test_the_trial_finds_the_results_of_the_table(types: list[str]) -> None:
    assert TORCHVISION.is_dir(), "run `make setup`"
    path = os.pathsep.join([str(TORCHVISION), os.environ.get("PYTHONPATH", "")])
    options = ["--check", "--processes", "1", "--conversations", str(CONVERSATIONS or 4)]
    done = subprocess.run(
        [sys.executable, ROOT / "tools/family_table.py", *options, *types],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
