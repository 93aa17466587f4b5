"""The scripts of `tools/`."""

import json
from pathlib import Path

from tests.processes import run_python, run_tool

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


def test_the_check_of_a_gpu_runs_in_a_small_form_on_the_cpu(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    done = run_tool("bench_gpu.py", "--small", "--json", file)
    assert done.returncode == 0, done.stderr
    tables = json.loads(file.read_text(encoding="utf-8"))["tables"]
    assert set(tables) == {"peak", "throughput", "isolation", "families", "waits", "training from a loader"}
    assert {row["attention"] for row in tables["throughput"]} == {"sdpa", "flash_varlen"}
    kinds = {row["batches"] for row in tables["throughput"]}
    assert {"padded", "packed", "packed, logits of 10% targets", "packed, logits of 100% targets"} <= kinds
    assert all(row["tokens per second"] > 0 and row["MFU"] > 0 for row in tables["throughput"])
    assert [(row["family"], row["result"]) for row in tables["families"]] == [("LlamaForCausalLM", "clean")]
    kernels = [row for row in tables["isolation"] if row["family"] == "Qwen3NextForCausalLM"]
    assert [(row["result"], row["reason"]) for row in kernels] == [("kernel", "causal_conv1d")] * 2
    others = [row for row in tables["isolation"] if row not in kernels]
    assert {row["family"] for row in others} == {"Qwen2ForCausalLM", "qwen3_vl"}
    for row in others:
        exact = row["dtype"] == "float32"
        assert row["result"] == "clean"
        assert row["logits"] < (1e-5 if exact else 1e-2)
        assert row["gradients"] < (1e-5 if exact else 0.5 * row["rounding"])
    assert [row["waits"] for row in tables["waits"]] == ["none", "none"]
    assert "| Qwen2ForCausalLM | flash_varlen | bfloat16 | clean |" in done.stdout
