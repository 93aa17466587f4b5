"""Training with megatron-core over parallel groups, compared with training on each sample separately."""

import json
import random
import signal
from pathlib import Path

import pytest

from energon_packed import pack
from tests.integrations.megatron.training_loop import COMPLETE, STEPS, VOCABULARY
from tests.internals import StoredTokens
from tests.processes import run_ranks


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packs of texts of 3 to 24 tokens, whose lengths are not multiples of 4."""
    draw, folder = random.Random(0), tmp_path_factory.mktemp("texts")
    rows = []
    for number in range(100):
        tokens = [draw.randrange(VOCABULARY) for _ in range(draw.randint(3, 24))]
        prompt = len(tokens) // 3
        rows.append({"id": f"s{number}", "input_ids": tokens, "labels": [-100] * prompt + tokens[prompt:]})
    (folder / "data.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return pack(
        folder / "data.jsonl", output_dir=folder / "out", seq_len=64, encoder=StoredTokens(), workers=1,
        sample_class="PackedTokensSample", pad_multiple=4,
    ).shards  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "tensor", "pipeline", "context"),
    [("megatron-gpt", 2, 1, 1), ("bridge", 1, 2, 2)],
    ids=["DP2xTP2", "PP2xCP2"],
)
def test_training_equals_the_reference_and_resumes_after_a_kill(
    shards: Path, tmp_path: Path, layout: str, tensor: int, pipeline: int, context: int
) -> None:
    script = "from tests.integrations.megatron import training_loop; training_loop."
    of_samples = (shards, tmp_path / "reference.pt", 4 // (tensor * pipeline * context))
    [output] = run_ranks(f"{script}reference()", 1, tmp_path / "store", *of_samples)
    runs = []
    for attempt in range(2):
        arguments = (shards, tmp_path, layout, tensor, pipeline, context)
        outputs = run_ranks(f"{script}main()", 4, tmp_path / f"store{attempt}", *arguments, status=-signal.SIGKILL)
        runs.append([ended.splitlines() for ended in outputs])
    first, second = runs
    for lines in first:
        assert len(lines) == STEPS + 1
        assert float(lines[STEPS].removeprefix("difference ")) < 1e-5  # of the weights, relative to their change
    losses = [float(line.split()[1]) for line in first[-1][:STEPS]]  # the last rank is in the last stage
    assert losses == pytest.approx([float(line) for line in output.splitlines()], rel=1e-5)
    assert (tmp_path / "data" / "iter_0000004").is_dir()  # newer than the last complete checkpoint
    assert second == [lines[COMPLETE:] for lines in first]  # equal losses and weights
