"""Benchmark steps that are aligned by cost: time of the slowest rank / mean rank, and the time to compute an order.

    python tools/bench_steps.py [--json steps.json] [--lengths 2000000] [--packs 1000000]

Samples of three distributions are packed into rows of 16,384 tokens by each planner. Text costs L + L^2 / 24,576, and
images cost the operations that `CostModel.from_config` computes for Qwen2.5-VL. Times are CPU times of one core.
"""

import time

import numpy as np
from benchlib import Report, arguments
from transformers import AutoConfig

from energon_packed import CostModel, MapDistributor, RowSizes, pack_lengths
from energon_packed.inspection.steps import expected_steps

SEQ_LEN, RANKS = 16_384, (16, 1_000)
PLANNERS = ("bfd", "ffd", "sequential", "window_1000")
TEXT = CostModel(token=1, square=1 / 24_576, patch=0)


class Rows(list[int]):
    """A dataset of which only the sizes are known."""

    def __init__(self, sizes: RowSizes) -> None:
        super().__init__(range(len(sizes.tokens)))
        self._sizes = sizes

    def row_sizes(self) -> RowSizes:
        """Sizes of all rows."""
        return self._sizes


def distributions(count: int) -> dict[str, tuple[np.ndarray, np.ndarray, CostModel]]:
    """Tokens of the samples int64 (count,), patches of their images (count,), and the cost model, by name."""
    rng = np.random.default_rng(0)
    none = np.zeros(count, dtype=np.int64)
    patches = np.where(rng.random(count) < 0.6, 4 * rng.integers(64, 4_096, count), 0)
    texts = {
        "chats": rng.lognormal(6.6, 1.1, count),  # as ShareGPT: median 735 tokens
        "two modes": np.where(rng.random(count) < 0.97, rng.lognormal(5.5, 0.5, count), rng.uniform(6e3, 16e3, count)),
    }
    lengths = {name: (np.clip(values, 16, SEQ_LEN).astype(np.int64), none, TEXT) for name, values in texts.items()}
    with_images = np.clip(patches // 4 + rng.lognormal(5.5, 0.9, count), 16, SEQ_LEN).astype(np.int64)
    vision = {"hidden_size": 1280, "out_hidden_size": 3584, "intermediate_size": 3420}
    text = {"hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28, "num_attention_heads": 28}
    text |= {"num_key_value_heads": 4, "vocab_size": 152_064}
    config = AutoConfig.for_model("qwen2_5_vl", text_config=text, vision_config=vision)
    return lengths | {"images": (with_images, patches, CostModel.from_config(config))}


def packed_sizes(lengths: np.ndarray, patches: np.ndarray, planner: str) -> RowSizes:
    """Sizes of the packs of a plan."""
    plan = pack_lengths(lengths, SEQ_LEN, algorithm=planner, seed=0)
    sums = [np.add.reduceat(column[plan.indices], plan.offsets[:-1]) for column in columns(lengths, patches)]
    return RowSizes(tokens=sums[0], squares=sums[1], patches=sums[2], patch_squares=sums[3])


def columns(lengths: np.ndarray, patches: np.ndarray) -> tuple[np.ndarray, ...]:
    """The sizes of single samples, in the order of RowSizes."""
    return lengths, lengths**2, patches, patches**2


def imbalance(report: Report, count: int) -> None:
    """Measure each distribution, planner and number of ranks, shuffled and aligned."""
    for name, (lengths, patches, cost) in distributions(count).items():
        for planner in PLANNERS:
            sizes = packed_sizes(lengths, patches, planner)
            for ranks in RANKS:
                for accumulation in (1, 8):
                    found = expected_steps(sizes, cost, ranks=ranks, accumulation=accumulation)
                    label = f"{name}, {planner}, {ranks} ranks x {accumulation}"
                    limit = "<= 1.01" if planner in ("bfd", "ffd") else ""
                    report.add(f"{label}, {found.steps} steps, shuffled", found.shuffled.mean)
                    report.add(f"{label}, aligned", found.aligned.mean, target=limit, p99=found.aligned.p99)


def orders(report: Report, packs: int) -> None:
    """Measure the order of an epoch, and the items of one rank at each step."""
    lengths, patches, _ = distributions(packs)["images"]
    sizes = RowSizes(**dict(zip(RowSizes.__dataclass_fields__, columns(lengths, patches), strict=True)))
    for balance, accumulation in ((None, 1), (TEXT, 1), (TEXT, 8)):
        start = time.process_time()
        order = MapDistributor(Rows(sizes), balance=balance, accumulation=accumulation).order
        segment = order.segment(1_000, 1)
        order.items(range(packs), 0, 0, [segment])
        name = "shuffled" if balance is None else f"aligned over {accumulation} micro batches"
        ordered = time.process_time()
        report.add(f"order of {packs:,} packs for 1,000 ranks, {name}", ordered - start, "s", "<= 5")
        steps = order.steps(segment)
        for step in range(steps):
            order.numbers(order.places(segment, step, 999), 0, 0, [segment])
        spent = (time.process_time() - ordered) / steps
        report.add(f"items of a rank at a step, {name}", 1e6 * spent, "us")


def main() -> None:
    """Run all measurements."""
    parser = arguments(__doc__, "steps")
    parser.add_argument("--lengths", type=int, default=2_000_000, help="samples of each distribution")
    parser.add_argument("--packs", type=int, default=1_000_000, help="packs of the order of an epoch")
    options = parser.parse_args()
    report = Report("Steps that are aligned by cost", options.json)
    imbalance(report, options.lengths)
    orders(report, options.packs)
    report.finish()


if __name__ == "__main__":
    main()
