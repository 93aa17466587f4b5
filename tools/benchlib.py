"""Shared benchmark code: synthetic data from Python's standard library, timing and tables.

The texts are English prose (help topics of the standard library) and Python code (its modules), split into paragraphs
and recombined for each conversation, so that the tokenizer workload is realistic.
"""

import argparse
import ast
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from pydoc_data import topics
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from energon_packed.demo import write_tokenizer

os.environ.setdefault("HF_HUB_OFFLINE", "1")
_QUESTIONS = ("What does this mean?", "Explain it step by step.", "Go on.", "Write a shorter version.", "Why?")


class Report:
    """Measured values with their targets, printed as a table and written as JSON."""

    def __init__(self, title: str, json_path: Path | None) -> None:
        self.title = title
        self.json_path = json_path
        self.rows: list[dict[str, Any]] = []

    def add(self, metric: str, value: float, unit: str = "", target: str = "", **details: Any) -> None:
        """Add a measured value; `target`, such as ">= 0.85", is checked against it."""
        row: dict[str, Any] = {"what": metric, "value": value, "unit": unit, "target": target, **details}
        if target:
            sign, limit = target.split()
            row["met"] = value >= float(limit) if sign == ">=" else value <= float(limit)
        self.rows.append(row)
        print(f"  {metric}: {value:.4g} {unit} {target}", file=sys.stderr, flush=True)

    def finish(self) -> None:
        """Print the table and write the JSON."""
        table = Table("what", "value", "target", "", title=self.title)
        for row in self.rows:
            met = {True: "met", False: "MISSED"}.get(row.get("met", ""), "")
            table.add_row(escape(row["what"]), f"{row['value']:.4g} {row['unit']}", row["target"], met)
        Console(width=150).print(table)
        if self.json_path:
            machine = {"cores": len(os.sched_getaffinity(0)), "python": platform.python_version()}
            value = {"title": self.title, "machine": machine, "rows": self.rows}
            self.json_path.parent.mkdir(parents=True, exist_ok=True)
            self.json_path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def arguments(doc: str | None, name: str) -> argparse.ArgumentParser:
    """Create a parser with the options that all benchmarks share."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--json", type=Path, default=Path("bench-results") / f"{name}.json", help="file for the results"
    )
    parser.add_argument(
        "--work", type=Path, default=Path("bench-work"), help="folder for data and peer packages; kept between runs"
    )
    return parser


def seconds(function: Callable[[], object]) -> float:
    """Measure the wall time of one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def median_seconds(function: Callable[[], object], runs: int = 3) -> float:
    """Measure the median wall time of several calls."""
    return statistics.median(seconds(function) for _ in range(runs))


def peer_python(work: Path) -> str:
    """Return the Python of a separate virtual environment with the peer packages, created if missing."""
    folder = work / "peers"
    python = folder / "bin" / "python"
    done = folder / ".installed"
    if not done.exists():
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        constraints = Path(__file__).resolve().parents[1] / "constraints.txt"
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([*install, "-c", str(constraints), "torch"], check=True)
        subprocess.run([*install, "-c", str(constraints), "trl", "datasets", "webdataset"], check=True)
        done.touch()
    return str(python)


def run_peer(work: Path, code: str, *args: object) -> Any:
    """Run code in the peers' Python and parse its last output line as JSON."""
    command = [peer_python(work), "-c", code, *map(str, args)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def paragraphs() -> tuple[list[str], list[str]]:
    """Return (prose, code): paragraphs of 40 to 2000 characters."""
    prose = [part for text in topics.topics.values() for part in text.split("\n\n")]
    code = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        source = path.read_text(encoding="utf-8", errors="replace")
        tree = ast.parse(source)
        lines = source.splitlines()
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                (prose if (doc := ast.get_docstring(node)) else []).append(doc or "")
                code.append("\n".join(lines[node.lineno - 1 : node.end_lineno]))
    return tuple([part for part in parts if 40 <= len(part) <= 2000] for parts in (prose, code))  # type: ignore[return-value]


def text_records(count: int, *, mean_chars: int = 1000, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield conversations of one to three exchanges with lognormal lengths; the first do not depend on `count`."""
    prose, code = paragraphs()
    rng, of_budgets, of_turns = np.random.default_rng(seed).spawn(3)
    # The mean of a lognormal distribution is exp(mu + sigma^2 / 2), and 0.8^2 / 2 = 0.32.
    budgets = of_budgets.lognormal(np.log(mean_chars) - 0.32, 0.8, count)
    turns = of_turns.integers(1, 4, count)
    for index, (budget, exchanges) in enumerate(zip(budgets.tolist(), turns.tolist(), strict=True)):
        messages = []
        for _ in range(exchanges):
            answer = ""
            while len(answer) < budget / exchanges:
                pool = code if rng.random() < 0.3 else prose
                answer += pool[int(rng.integers(len(pool)))] + "\n\n"
            answer = answer[: max(20, int(budget / exchanges))]
            question = f"{_QUESTIONS[int(rng.integers(len(_QUESTIONS)))]} ({int(rng.integers(10**6))})"
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        yield {"id": f"bench-{index:08d}", "messages": messages}


def write_jsonl(path: Path, records: Iterator[dict[str, Any]]) -> Path:
    """Write the records as JSONL unless the file exists."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        with temporary.open("w", encoding="utf-8") as stream:
            stream.writelines(json.dumps(record) + "\n" for record in records)
        temporary.rename(path)
    return path


def image_records(folder: Path, count: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield short conversations about JPEGs of 300 to 900 pixels per side, which are written to `folder`."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for index, record in enumerate(text_records(count, mean_chars=400, seed=seed)):
        width, height = (int(side) for side in rng.integers(300, 900, 2))
        path = folder / f"{index:06d}.jpg"
        if not path.exists():
            small = rng.integers(0, 255, (height // 16 + 1, width // 16 + 1, 3), dtype=np.uint8)
            image = Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)
            grain = rng.normal(0, 12, (height, width, 3))  # noise, for JPEGs of a realistic size
            Image.fromarray((np.asarray(image) + grain).clip(0, 255).astype(np.uint8)).save(path, quality=90)
        record["messages"][0]["content"] = "<image>" + record["messages"][0]["content"]
        yield {**record, "images": [str(path.resolve())]}


def bench_tokenizer(work: Path, *, vision: bool) -> Path:
    """Train a byte-level BPE tokenizer of 32,000 tokens on the paragraphs; `vision` adds Qwen2.5-VL image settings."""
    folder = work / ("tokenizer-vision" if vision else "tokenizer")
    if not (folder / "tokenizer.json").exists():
        prose, code = paragraphs()
        write_tokenizer(folder, [*prose, *code], vocab_size=32_000, vision=vision)
    return folder


def command(*args: object) -> list[str]:
    """Return the command line of `energon-packed` with these arguments."""
    return [sys.executable, "-m", "energon_packed", *map(str, args)]


def cli(*args: object) -> subprocess.CompletedProcess[str]:
    """Run `energon-packed` with these arguments in a subprocess."""
    return subprocess.run(command(*args), check=True, stdout=subprocess.PIPE, text=True)


class Usage(NamedTuple):
    """Resources of a command and its processes.

    Attributes:
        cpu: CPU seconds, user and system.
        wall: wall seconds.
        memory: largest sum of the proportional set sizes, in bytes.
        anonymous: the same without pages of files, which leave the memory if other data needs it.
        output: standard output.
    """

    cpu: float
    wall: float
    memory: int
    anonymous: int
    output: str


def usage(command: Sequence[object]) -> Usage:
    """Run a command, and measure its resources."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start_time = time.perf_counter()
    peak = peak_anonymous = 0
    done = threading.Event()
    with subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True) as process:

        def watch() -> None:
            nonlocal peak, peak_anonymous
            while not done.wait(0.5):  # reading the sizes of large processes takes milliseconds
                sizes = [_proportional(pid) for pid in _family(process.pid)]
                peak = max(peak, sum(size for size, _ in sizes))
                peak_anonymous = max(peak_anonymous, sum(size for _, size in sizes))

        watcher = threading.Thread(target=watch)
        watcher.start()
        output, _ = process.communicate()
        done.set()
        watcher.join()
    wall = time.perf_counter() - start_time
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, process.args, output)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Usage(cpu, wall, peak, peak_anonymous, output)


def _family(pid: int) -> list[int]:
    """Return a process and its descendants; any thread of a process can have started a child."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [child for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []
    return [pid, *(member for child in children for member in _family(int(child)))]


def _proportional(pid: int) -> tuple[int, int]:
    """Return the proportional set size of a process and its anonymous part, in bytes; (0, 0) if it ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except OSError:
        return 0, 0
    sizes = {name: int(size.split()[0]) * 1024 for name, _, size in (line.partition(":") for line in lines)}
    return sizes.get("Pss", 0), sizes.get("Pss_Anon", 0)
