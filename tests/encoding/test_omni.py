"""Omni models: the cases of omni_cases.py run in a process with torchvision, which their video processors need."""

import os
import subprocess
import sys
from pathlib import Path

CASES = Path(__file__).with_name("omni_cases.py")
TORCHVISION = Path(sys.prefix, "torchvision")  # see the Makefile


def test_omni_models() -> None:
    assert TORCHVISION.is_dir(), "run `make setup`"
    path = os.pathsep.join([str(TORCHVISION), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", CASES],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
