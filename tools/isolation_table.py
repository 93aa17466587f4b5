"""Test which model families isolate packed samples: `python tools/isolation_table.py [MODEL_TYPE ...] [--dry-run]`.

For every causal language model and vision-language model of the installed Transformers, a tiny random model is tested
with `check_isolation`, with attention `sdpa` and `eager`. The results are written to
energon_packed/integrations/isolation_table.json and to the table in docs/isolation.md, with the logits that
PackedTrainer computes for the loss of the model. With model types, only their
rows change. --dry-run prints the results without writing.

A family counts as clean only if the same test detects leakage when boundaries are withheld (a positive control).

Rows with images are tested by tools/family_table.py.
"""

import argparse
import contextlib
import json
import logging
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import make_tables  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from bounded import bounded, line  # noqa: E402
from tiny_models import model_types, tiny_config, tiny_model  # noqa: E402

from energon_packed import PackedBatch  # noqa: E402
from energon_packed.integrations.isolation import IsolationResult, measure, short_row  # noqa: E402
from energon_packed.integrations.transformers.target_logits import (  # noqa: E402
    computes_head_in_pieces,
    computes_target_logits,
)

DATA = ROOT / "energon_packed" / "integrations" / "isolation_table.json"
GPU = ROOT / "tools" / "gpu" / "isolation.json"
# Limits of one family: processor time, memory.
SECONDS, GIGABYTES = 60, 12
_BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


def family(kind: str, model_type: str, class_name: str) -> dict[str, Any]:
    """Test a family, and return its results by attention implementation, or `not_tested` with the reason."""
    row: dict[str, Any] = {"model_type": model_type, "kind": kind, "class": class_name}
    for attention in ("sdpa", "eager"):
        try:
            model_class = getattr(transformers, class_name)
            model = tiny_model(model_class, tiny_config(model_type, model_class), attention)
        except Exception as error:
            if "does not support an attention implementation" in str(error):
                continue  # the family has only eager attention
            return row | {"not_tested": f"no tiny model: {line(error)}"}
        row |= result(model, attention)
        if "not_tested" in row:
            return row
        if row[attention] in ("clean", "leaks") and "loss_logits" not in row:
            with contextlib.suppress(Exception):  # some models need an image for their loss
                row["loss_logits"] = loss_logits(model)
    return row


def loss_logits(model: Any) -> str:
    """Logits that PackedTrainer computes for the loss: `all`, of `targets` alone, or of targets in `pieces`."""
    if not computes_target_logits(model):
        return "all"
    return "pieces" if computes_head_in_pieces(model) else "targets"


def result(model: Any, attention: str, batch: PackedBatch | None = None) -> dict[str, Any]:
    """Test a model, and return {attention: result}, with the missing kernel or the reason of a refusal."""
    batch = batch or short_row(model)
    bounds = batch.cu_seqlens.tolist()
    inputs = {name: value for name, value in batch.transformers_inputs().items() if name != "labels"}
    try:
        results = measure(model, inputs, bounds)
    except Exception as error:
        text = line(error)
        if "can't keep packed sequences apart without" in text:
            return {attention: "kernel", "needs": text.split("without `")[1].split("`")[0]}
        try:
            model(input_ids=inputs["input_ids"])
        except Exception as alone:
            return {"not_tested": f"the tiny model fails without packing: {line(alone)}"}
        return {attention: "refuses", "reason": text}
    if results.leaks:
        return {attention: "leaks", "share": f"{results.later:.0e}"}
    if not results.later < 1 or not withheld(model, inputs, bounds).leaks:
        return {"not_tested": "the tiny model's samples do not influence each other without boundaries either"}
    return {attention: "clean"}


def withheld(model: Any, inputs: dict[str, Any], bounds: list[int]) -> IsolationResult:
    """Run the same test without boundaries: the positions continue over all samples."""
    positions = torch.arange(bounds[-1], device=inputs["position_ids"].device).expand_as(inputs["position_ids"])
    plain = {name: value for name, value in inputs.items() if name not in _BOUNDARIES}
    return measure(model, plain | {"position_ids": positions}, bounds)


def with_kernels(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Add the float32 results of `tools/bench_gpu.py` to the families that need kernels, which run on a GPU only."""
    tables = json.loads(GPU.read_text(encoding="utf-8"))["tables"]
    found = {
        (row["family"], row.get("attention")): row for row in tables["isolation"] if row.get("dtype") == "float32"
    }
    for name, row in results.items():
        for attention in ("sdpa", "eager"):
            on_gpu = found.get((name, attention), {})
            if row.get(attention) == "kernel" and on_gpu.get("result") == "leaks":
                row |= {attention: "leaks", "share": on_gpu["reason"]}
            elif row.get(attention) == "kernel" and on_gpu.get("result") == "clean":
                row["with_kernel"] = "clean"
    return results


def main() -> None:
    """Test the families, print the results, and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_types", nargs="*", metavar="MODEL_TYPE")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    chosen = [entry for entry in model_types() if not options.model_types or entry[1] in options.model_types]
    rows = []

    def tried(entry: tuple[str, str, str]) -> dict[str, Any]:
        found = bounded(family, entry, seconds=SECONDS, gigabytes=GIGABYTES)
        names = dict(zip(("kind", "model_type", "class"), entry, strict=True))
        return names | {"not_tested": found} if isinstance(found, str) else dict(found)

    with ThreadPoolExecutor(options.processes) as pool:
        for row in pool.map(tried, chosen):
            rows.append(row)
            print(json.dumps(row), flush=True)
    if not options.dry_run:
        write(rows, keep=bool(options.model_types))


def write(rows: list[dict[str, Any]], *, keep: bool) -> None:
    """Write the table to the data file of the package and to the page; `keep` families that are not in `rows`.

    If a class has several model types, a model type that was tested overrides model types that were not.
    """
    before = json.loads(DATA.read_text(encoding="utf-8"))
    results: dict[str, dict[str, Any]] = before["families"] if keep else {}
    for row in rows:
        name = row["class"]
        if "not_tested" not in row or "not_tested" in results.get(name, row):
            results[name] = {key: value for key, value in row.items() if key != "class"}
    lines = ",\n".join(
        f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in with_kernels(dict(sorted(results.items()))).items()
    )
    head = f'"transformers": "{transformers.__version__}",\n"torch": "{torch.__version__.split("+")[0]}"'
    DATA.write_text(f'{{\n{head},\n"families": {{\n{lines}\n}}\n}}\n', encoding="utf-8")
    make_tables.write_pages()


if __name__ == "__main__":
    main()
