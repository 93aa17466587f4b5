"""The scripts of `tools/`."""

import json
from pathlib import Path

from tests.processes import run_python

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = [file for file in sorted((ROOT / "tools").glob("*.py")) if "__main__" in file.read_text(encoding="utf-8")]
# One process: most of the time is imports, which the scripts share.
_RUN = """
import contextlib, io, json, os, runpy, sys
printed = {}
for script in sys.argv[1:]:
    sys.argv[:] = [script, "--help"]
    sys.path[0] = os.path.dirname(script)
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        runpy.run_path(script, run_name="__main__")
    printed[script] = out.buffer.getvalue().decode()
print(json.dumps(printed))
"""


def _files() -> dict[Path, int]:
    """Time of the last change of the files that a script may write."""
    found = [path for name in ("docs", "tools") for path in (ROOT / name).rglob("*") if path.suffix != ".pyc"]
    return {path: path.stat().st_mtime_ns for path in [*found, ROOT / "README.md"] if path.is_file()}


def test_help_of_every_script_prints_help_and_does_nothing(tmp_path: Path) -> None:
    before = _files()
    done = run_python(_RUN, *SCRIPTS, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    printed = json.loads(done.stdout)
    assert len(printed) == len(SCRIPTS)
    assert not {name: text[:80] for name, text in printed.items() if not text.lower().startswith("usage:")}
    assert not list(tmp_path.iterdir())
    assert _files() == before
