"""Which model families keep packed samples apart: `python tools/isolation_table.py [MODEL_TYPE ...] [--dry-run]`.

Makes a tiny random model of every causal language model and vision-language model of the installed Transformers, with
attention `sdpa` and `eager`, and applies the test of `check_isolation`. Writes
energon_packed/integrations/isolation_table.json and the table of docs/isolation.md; with model types, only their rows
change. --dry-run prints and writes nothing.

A family counts as clean only where the same test sees the influence when boundaries are withheld.
"""

import argparse
import json
import logging
import multiprocessing
import resource
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import torch  # noqa: E402
import transformers  # noqa: E402
from tiny_models import model_types, tiny_config, tiny_model  # noqa: E402

from energon_packed.integrations.isolation import Influence, measure, short_row  # noqa: E402

DATA = ROOT / "energon_packed" / "integrations" / "isolation_table.json"
PAGE = ROOT / "docs" / "isolation.md"
SECONDS, MOST_SECONDS, GIGABYTES = 60, 900, 12  # of processor time, of waiting, of memory
BEGIN, END = "<!-- isolation table -->", "<!-- end of isolation table -->"
GROUPS = {
    "Clean": "clean",
    "Need a kernel; refused by Transformers without it, not tested with it": "kernel",
    "Leak, refused by `check_isolation`": "leaks",
    "Do not take packed rows": "refuses",
    "Not tested: no tiny model could be built or run on text alone; `check_isolation` tests yours": "not_tested",
}
_BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


def family(kind: str, model_type: str, class_name: str) -> dict[str, Any]:
    """Results of one family by attention implementation, or `not_tested` with the reason."""
    row: dict[str, Any] = {"model_type": model_type, "kind": kind, "class": class_name}
    for attention in ("sdpa", "eager"):
        try:
            model_class = getattr(transformers, class_name)
            model = tiny_model(model_class, tiny_config(model_type, model_class), attention)
        except Exception as error:
            if "does not support an attention implementation" in str(error):
                continue  # only eager
            return row | {"not_tested": f"no tiny model: {_line(error)}"}
        row |= result(model, attention)
        if "not_tested" in row:
            return row
    return row


def result(model: Any, attention: str) -> dict[str, Any]:
    """{attention: result} of one model, and what a `kernel` needs or why it `refuses`."""
    batch = short_row(model)
    bounds = batch.cu_seqlens.tolist()
    inputs = {name: value for name, value in batch.transformers_inputs().items() if name != "labels"}
    try:
        found = measure(model, inputs, bounds)
    except Exception as error:
        text = _line(error)
        if "can't keep packed sequences apart without" in text:
            return {attention: "kernel", "needs": text.split("without `")[1].split("`")[0]}
        try:
            model(input_ids=inputs["input_ids"])
        except Exception as alone:
            return {"not_tested": f"the tiny model fails without packing: {_line(alone)}"}
        return {attention: "refuses", "reason": text}
    if found.leaks:
        return {attention: "leaks", "share": f"{found.later:.0e}"}
    if not found.later < 1 or not withheld(model, inputs, bounds).leaks:
        return {"not_tested": "the tiny model's samples do not influence each other without boundaries either"}
    return {attention: "clean"}


def withheld(model: Any, inputs: dict[str, Any], bounds: list[int]) -> Influence:
    """The same test on a row whose boundaries the model is not told: positions run on."""
    positions = torch.arange(bounds[-1]).expand_as(inputs["position_ids"])
    plain = {name: value for name, value in inputs.items() if name not in _BOUNDARIES}
    return measure(model, plain | {"position_ids": positions}, bounds)


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def _child(pipe: Any, arguments: tuple[str, str, str]) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (GIGABYTES * 2**30,) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS,) * 2)
    torch.set_num_threads(1)
    try:
        pipe.send(family(*arguments))
    except Exception as error:
        names = dict(zip(("kind", "model_type", "class"), arguments, strict=True))
        pipe.send(names | {"not_tested": _line(error)})


def bounded(arguments: tuple[str, str, str]) -> dict[str, Any]:
    """`family` in a process of its own, so that a family can cost no more than SECONDS and GIGABYTES."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(theirs, arguments))
    process.start()
    theirs.close()
    row = dict(zip(("kind", "model_type", "class"), arguments, strict=True))
    try:
        if ours.poll(MOST_SECONDS):
            return dict(ours.recv())
        return row | {"not_tested": f"no result within {MOST_SECONDS} seconds"}
    except EOFError:
        return row | {"not_tested": f"more than {SECONDS} seconds of processor time or {GIGABYTES} GB of memory"}
    finally:
        process.kill()
        process.join()


def main() -> None:
    """Test the families, print what was found, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_types", nargs="*", metavar="MODEL_TYPE")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    chosen = [one for one in model_types() if not options.model_types or one[1] in options.model_types]
    rows = []
    with ThreadPoolExecutor(options.processes) as pool:
        for row in pool.map(bounded, chosen):
            rows.append(row)
            print(json.dumps(row), flush=True)
    if not options.dry_run:
        write(rows, keep=bool(options.model_types))


def write(rows: list[dict[str, Any]], *, keep: bool) -> None:
    """The table as data of the package, and in the page; `keep` the families that are not in `rows`.

    Where a class has several model types, one that was tested counts.
    """
    found: dict[str, dict[str, Any]] = json.loads(DATA.read_text(encoding="utf-8"))["families"] if keep else {}
    for row in rows:
        name = row["class"]
        if "not_tested" not in row or "not_tested" in found.get(name, row):
            found[name] = {key: value for key, value in row.items() if key != "class"}
    table = {"transformers": transformers.__version__, "torch": torch.__version__.split("+")[0]}
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(found[name])}" for name in sorted(found))
    head = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in table.items())
    DATA.write_text(f'{{\n{head},\n"families": {{\n{lines}\n}}\n}}\n', encoding="utf-8")
    text = PAGE.read_text(encoding="utf-8")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n\n{page(found)}\n\n{END}{after}", encoding="utf-8")


def page(found: dict[str, dict[str, Any]]) -> str:
    """The Markdown list of families by result."""
    parts = [f"Transformers {transformers.__version__}: {len(found)} classes."]
    for title, wanted in GROUPS.items():
        names = {row["model_type"] for row in found.values() if _group(row) == wanted}
        listed = ", ".join(f"`{name}`" for name in sorted(names))
        parts.append(f"**{title}** ({len(names)}): {listed or 'none'}")
    return "\n\n".join(parts)


def _group(row: dict[str, Any]) -> str:
    if "not_tested" in row:
        return "not_tested"
    results = {row[name] for name in ("sdpa", "eager") if name in row}
    return next(name for name in ("leaks", "kernel", "refuses", "clean") if name in results)


if __name__ == "__main__":
    main()
