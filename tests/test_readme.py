"""README shows what really happens: its commands and Python blocks are run, in order, and their output compared."""

import os
import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_commands_and_code_print_what_the_readme_says(tmp_path: Path) -> None:
    blocks = _BLOCK.findall(README.read_text(encoding="utf-8"))
    ran = 0
    for number, (language, body) in enumerate(blocks):
        if language == "console":
            for command, expected in _commands(body):
                ran += 1
                assert _plain(_run(["bash", "-c", command], tmp_path)) == _plain(expected), command
        elif language == "python":
            ran += 1
            assert _plain(_run([sys.executable, "-c", body], tmp_path)) == _plain(blocks[number + 1][1])
    assert ran >= 8


def _commands(body: str) -> list[tuple[str, str]]:
    """(command, output) of each `$` line; a block without one is not run."""
    parts = re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]
    return [(part.partition("\n")[0], part.partition("\n")[2]) for part in parts]


def _run(command: list[str], folder: Path) -> str:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "COLUMNS": "120", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _plain(text: str) -> str:
    """Without times, rates and the size of compressed pictures, which differ between machines."""
    text = re.sub(r"(\d+ \w+) +[\d.]+ s +[\d,]+/s", r"\1", text)
    text = re.sub(r"│ (\w+ seconds|size) .*", r"│ \1", text)
    return "\n".join(line.rstrip() for line in text.strip().splitlines())
