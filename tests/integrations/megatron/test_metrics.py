"""The lines of the page Metrics in a real process group of megatron-core."""

import json
from pathlib import Path

import pytest

from tests.conftest import Packer
from tests.docs.pages import code_block
from tests.processes import run_ranks

RANK = """
import json, sys, types
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
from energon_packed import ChatEncoder, PaddingFreeCollator, ThroughputMetrics
from tests.internals import train_valid_test_dataloaders_provider as provider_of

shards, tokenizer, code = sys.argv[4:]
written = []
parallel_state.initialize_model_parallel(1, 1)
init_num_microbatches_calculator(rank, None, 4, 1, count)  # 2 micro batches of each of 2 ranks
args = types.SimpleNamespace(log_interval=2, curr_iteration=0)
writer = types.SimpleNamespace(add_scalar=lambda *values: written.append(values))

def forward_step(data_iterator, model):
    return int(next(data_iterator)["tokens"].numel())

def pretrain(config, provider, kind, step):
    train, _, _ = provider([0, 0, 0])
    tokens = []
    for args.curr_iteration in range(1, 6):
        tokens.append([step(train, None) for _ in range(2)])
    print(json.dumps([tokens, written]))

class training:
    get_args, get_tensorboard_writer = (lambda: args), (lambda: writer)

sys.modules["megatron.training"] = training
names = {
    "ThroughputMetrics": ThroughputMetrics, "encoder": ChatEncoder.from_pretrained(tokenizer), "config": None,
    "ModelType": types.SimpleNamespace(encoder_or_decoder=1), "forward_step": forward_step, "pretrain": pretrain,
    "train_valid_test_dataloaders_provider":
        lambda _, encoder, **options: provider_of(
            shards, encoder, num_workers=0, collator=PaddingFreeCollator(pad_to=1100), **options),
}
exec(code, names)
"""


def test_the_lines_of_the_page(pack_demo: Packer, tokenizer_dir: Path, tmp_path: Path) -> None:
    shards = pack_demo().shards
    outputs = run_ranks(RANK, 2, tmp_path / "store", shards, tokenizer_dir, code_block("monitor.md", "logged_step.py"))
    (rows, written), (other_rows, other) = (json.loads(output) for output in outputs)
    found = [{name: value for name, value, step in values if step == 3} for values in (written, other)]
    assert found[0] == found[1]
    assert {step for _, _, step in written} == {3, 5}
    for values in found:
        tokens = values["data/tokens_per_step"] * 2  # of 2 steps
        assert tokens / (1 - values["data/padding"]) == pytest.approx(8 * 1100)
        assert values["perf/global_seq_len_avg"] == pytest.approx(tokens / 4)
        assert values["data/source/" + str(shards)] == 1
    assert all(width == 1100 for step in rows + other_rows for width in step)
