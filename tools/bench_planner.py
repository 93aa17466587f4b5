"""How fast and how good the planner is: against a numpy sort of the same lengths, and against the lower bound.

    python tools/bench_planner.py [--lengths 1000000] [--json planner.json]

`time / sort` is the time of the whole plan over that of numpy's stable argsort of the same int32 array, both the
median of three runs. `over bound` is packs over ceil(tokens / capacity).
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from energon_packed import pack_lengths


def mixtures(count: int, capacity: int) -> dict[str, np.ndarray]:
    """Length distributions that are met in practice, and two that are hard."""
    rng = np.random.default_rng(0)
    shares = {
        "lognormal": rng.lognormal(5.5, 0.9, count),
        "VLM mixture": np.where(rng.random(count) < 0.6, rng.normal(900, 250, count), rng.lognormal(4.8, 0.7, count)),
        "near half": rng.normal(capacity / 2, capacity / 40, count),
        "long tail": capacity * rng.beta(0.4, 2.5, count),
    }
    return {name: np.clip(values, 1, capacity).astype(np.int32) for name, values in shares.items()}


def median_seconds(function: Callable[[], object], runs: int = 3) -> float:
    """Median wall time of several runs."""
    times = []
    for _ in range(runs):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def main() -> None:
    """Run all mixtures and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    pack_lengths([1, 2], 4)  # compile
    table = Table("lengths", "capacity", "algorithm", "seconds", "time / sort", "packs", "over bound")
    rows = []
    for capacity in (4096, 32768):
        for name, lengths in mixtures(options.lengths, capacity).items():
            sort = median_seconds(lambda lengths=lengths: np.argsort(lengths, kind="stable"))
            for algorithm in ("bfd", "ffd"):
                seconds = median_seconds(
                    lambda lengths=lengths, c=capacity, a=algorithm: pack_lengths(lengths, c, algorithm=a)
                )
                plan = pack_lengths(lengths, capacity, algorithm=algorithm)
                bound = -(-plan.tokens // capacity)
                over = plan.num_packs / bound - 1
                rows.append(
                    {
                        "lengths": name,
                        "capacity": capacity,
                        "algorithm": algorithm,
                        "seconds": seconds,
                        "time_over_sort": seconds / sort,
                        "packs": plan.num_packs,
                        "over_bound": over,
                    }
                )
                table.add_row(
                    name,
                    str(capacity),
                    algorithm,
                    f"{seconds:.3f}",
                    f"{seconds / sort:.2f}",
                    f"{plan.num_packs:,}",
                    f"{over:.3%}",
                )
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
