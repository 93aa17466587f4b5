"""The provider in real process groups of megatron-core."""

import json
import shutil
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from energon_packed import ChatEncoder, ConfigError, PackOptions, PaddingFreeCollator, pack
from tests import processes
from tests.conftest import Packer
from tests.internals import (
    LoggedData,
    MegatronRanks,
    StoredTokens,
    check_order,
    check_parallelism,
    ranks,
    train_valid_test_dataloaders_provider,
)
from tests.processes import Python

RANK = """
import os, sys, torch
from megatron.core import parallel_state
from energon_packed import ChatEncoder
from tests.internals import train_valid_test_dataloaders_provider
rank, world, tensor, pipeline, store, shards, tokenizer, layout, order = sys.argv[1:]
torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(world))
parallel_state.initialize_model_parallel(int(tensor), int(pipeline))
provider = train_valid_test_dataloaders_provider(
    shards, ChatEncoder.from_pretrained(tokenizer), layout=layout, num_workers=0, order=order,
    order_log=f"{store}-log")
assert provider.is_distributed
train, valid, test = provider([0, 0, 0])
print("valid", valid is not None, "test", test is not None)
if train is not None:
    batch = next(train)
    print("first", int(batch["tokens"].sum()))
    if layout == "bridge":
        print("pixels", batch["visual_inputs"].pixel_values is not None)
    state = train.save_state()
    after = next(train)
    again, _, _ = provider()
    again.restore_state(state)
    repeated = next(again)
    assert all(torch.equal(after[k], repeated[k]) for k in after if isinstance(after[k], torch.Tensor))
print("done")
"""


def run_ranks(
    tmp_path: Path, shards: Path, tokenizer: Path, layout: str, *, tensor: int = 1, pipeline: int = 1, world: int = 2,
    order: str = "global",
) -> list[str]:  # fmt: skip
    """Real processes in a real process group."""
    (tmp_path / "store").unlink(missing_ok=True)
    shutil.rmtree(tmp_path / "store-log", ignore_errors=True)
    arguments = [str(tensor), str(pipeline), str(tmp_path / "store"), str(shards), str(tokenizer), layout, order]
    ranks = [Python(RANK, rank, world, *arguments) for rank in range(world)]
    outputs = []
    for process in ranks:
        done = process.wait()
        out = done.stdout
        assert done.returncode == 0, done.stderr[-3000:]
        assert out.endswith("done\n")
        outputs.append(out)
    return outputs


@pytest.mark.parametrize("order", ["global", "energon"])
def test_data_parallel_ranks_get_different_rows(
    pack_demo: Packer, tokenizer_dir: Path, tmp_path: Path, order: str
) -> None:
    shards = pack_demo(split={"train": 0.7, "val": 0.3}, max_packs_per_shard=4).shards
    outputs = run_ranks(tmp_path, shards, tokenizer_dir, "bridge", tensor=1, pipeline=1, order=order)
    assert all("valid True test False" in out for out in outputs)
    assert len({next(line for line in out.splitlines() if "first" in line) for out in outputs}) == 2
    foreign = tmp_path / "foreign"  # what nv-meta makes for tars of other packers has splits, and no packing.json
    shutil.copytree(shards, foreign)
    (foreign / ".nv-meta" / "packing.json").unlink()
    outputs = run_ranks(tmp_path, foreign, tokenizer_dir, "bridge", tensor=1, pipeline=1, order=order)
    assert all("valid True test False" in out for out in outputs)


def test_tensor_parallel_ranks_get_the_same_rows_or_leave_loading_to_the_first(
    pack_demo: Packer, tokenizer_dir: Path, tmp_path: Path
) -> None:
    shards = pack_demo().shards
    same = run_ranks(tmp_path, shards, tokenizer_dir, "bridge", tensor=2, pipeline=1)
    assert same[0] == same[1]
    report = check_order(tmp_path / "store-log", LoggedData(shards))
    assert (report.problems, report.steps, report.replaced) == ([], 2, 1)
    first, second = run_ranks(tmp_path, shards, tokenizer_dir, "megatron-lm", tensor=2, pipeline=1)
    assert "first" in first
    assert "first" not in second


def test_all_stages_of_a_pipeline_get_the_same_row_and_the_middle_no_pixels(
    pack_demo: Packer, tokenizer_dir: Path, tmp_path: Path
) -> None:
    outputs = run_ranks(tmp_path, pack_demo().shards, tokenizer_dir, "bridge", pipeline=3, world=3)
    assert ["pixels True" in out for out in outputs] == [True, False, True]
    assert len({next(line for line in out.splitlines() if "first" in line) for out in outputs}) == 1


BALANCED = """
import sys, json
from megatron.core import num_microbatches_calculator, parallel_state
from tests.internals import train_valid_test_dataloaders_provider
rank, world, store, shards, batches = sys.argv[1:]
parallel_state.initialize_model_parallel()
options = {"num_workers": 0}
providers = [train_valid_test_dataloaders_provider(shards, None, balance=b, **options) for b in (None, "attention")]
providers[1]()  # each call asks the calculator, whose batch size may grow
num_microbatches_calculator.init_num_microbatches_calculator(int(rank), None, int(batches) * int(world), 1, int(world))
for provider in providers:
    train = provider()[0]
    lengths = [next(train)["cu_seqlens_q"].diff() for _ in range(5 * int(batches))]
    print(json.dumps([int(of_row.sum()) + int((of_row**2).sum()) / 49152 for of_row in lengths]))
print(json.dumps(train.save_state()["segments"]))
"""


def test_the_micro_batches_of_a_step_cost_the_same(tmp_path: Path) -> None:
    """Two data-parallel ranks with 4 micro batches each, as Megatron's calculator reports."""
    lengths = np.random.default_rng(0).integers(20, 2000, 80).tolist()  # packs that are not full cost differently
    tokens = [{"id": str(n), "input_ids": [1] * length, "labels": [1] * length} for n, length in enumerate(lengths)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in tokens))
    options: dict[str, Any] = {"sample_class": "PackedTokensSample", "workers": 1, "encoder": StoredTokens()}
    inputs = (str(tmp_path / "data.jsonl"),)
    packed = pack(PackOptions(inputs=inputs, output_dir=tmp_path, seq_len=2000, algorithm="sequential", **options))
    outputs = processes.run_ranks(BALANCED, 2, tmp_path / "store", packed.shards, 4)
    lines = [[json.loads(line) for line in output.splitlines()] for output in outputs]
    assert [of_rank.pop() for of_rank in lines] == [[[0, 0, 2, 1, None, 4]]] * 2  # accumulates 4 micro batches
    shuffled, aligned = np.array(lines).transpose(1, 2, 0).reshape(2, 5, 4, 2).sum(axis=2)
    assert (shuffled.max(axis=1) / shuffled.mean(axis=1)).mean() > 1.05
    assert (aligned.max(axis=1) / aligned.mean(axis=1)).mean() < 1.005


def test_outside_of_megatron_the_provider_says_what_is_missing(encoder: ChatEncoder) -> None:
    with pytest.raises(ConfigError, match="parallel_state is not initialized"):
        train_valid_test_dataloaders_provider("out", encoder)()


@pytest.mark.parametrize("name", ["rank", "world_size", "split", "epochs"])
def test_what_megatron_decides_is_no_option(encoder: ChatEncoder, name: str) -> None:
    options: dict[str, Any] = {name: 1}
    with pytest.raises(ConfigError, match=f"`{name}` is not an option of the provider"):
        train_valid_test_dataloaders_provider("out", encoder, **options)


def test_options_of_another_order_are_refused(encoder: ChatEncoder) -> None:
    with pytest.raises(ConfigError, match="`shuffle_buffer_size` is not an option of the global order"):
        train_valid_test_dataloaders_provider("out", encoder, shuffle_buffer_size=4)
    with pytest.raises(ConfigError, match="`balance` is not an option of order='energon', in which Energon decides"):
        train_valid_test_dataloaders_provider("out", encoder, order="energon", balance="attention")
    with pytest.raises(ConfigError, match="`order` must be 'global' or 'energon', got 'random'"):
        train_valid_test_dataloaders_provider("out", encoder, order="random")  # type: ignore[arg-type]


def place(context_parallel_size: int = 1, *, stage: str = "first") -> MegatronRanks:
    return MegatronRanks(
        rank=0,
        world_size=1,
        context_parallel_size=context_parallel_size,
        is_first_tensor_rank=True,
        is_middle_stage=stage == "middle",
    )


def test_context_parallelism_needs_padding_that_it_can_divide() -> None:
    check_parallelism(place(2), "bridge", PaddingFreeCollator(pad_multiple=8, pad_to=2048))
    check_parallelism(place(1), "bridge", None)
    for collator in (None, PaddingFreeCollator(pad_multiple=2), PaddingFreeCollator(pad_multiple=4, pad_to=2046)):
        with pytest.raises(
            ConfigError, match=r"multiples of 4 for context parallelism over 2 ranks, .* Pass collator="
        ):
            check_parallelism(place(2), "bridge", collator)


def test_what_the_multimodal_example_would_do_silently_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="replaces the sample boundaries"):
        check_parallelism(place(2), "megatron-lm", None)
    with pytest.raises(ConfigError, match="`loss_weighting` must be 'token' with layout 'megatron-lm', got 'sqrt'"):
        check_parallelism(place(), "megatron-lm", PaddingFreeCollator(loss_weighting="sqrt"))
    check_parallelism(place(), "megatron-gpt", PaddingFreeCollator(loss_weighting="sqrt"))
    arguments = Namespace(sequence_parallel=True)
    monkeypatch.setattr(ranks, "megatron_lm_args", lambda: arguments)
    with pytest.raises(ConfigError, match="replaces the sample boundaries"):
        check_parallelism(place(), "megatron-lm", None)


def test_releases_that_do_not_pass_the_boundaries_to_all_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = Namespace(tensor_model_parallel_size=1, pipeline_model_parallel_size=2, sequence_parallel=False)
    monkeypatch.setattr(ranks, "megatron_lm_args", lambda: arguments)
    monkeypatch.setattr(ranks, "megatron_version", lambda: "0.16.1")
    check_parallelism(place(), "megatron-gpt", None)
    arguments.pipeline_model_parallel_size = 3
    message = "over 1 and 3 pipeline stages needs Megatron-LM core_v0.18 or later, got 0.16.1, .* Update Megatron-LM"
    with pytest.raises(ConfigError, match=message):
        check_parallelism(place(), "megatron-gpt", None)
    check_parallelism(place(), "bridge", None)
    monkeypatch.setattr(ranks, "megatron_version", lambda: "0.18.2")
    check_parallelism(place(), "megatron-gpt", None)


def test_early_releases_of_bridge_are_refused_with_middle_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    check_parallelism(place(stage="middle"), "bridge", None)
    monkeypatch.setitem(sys.modules, "megatron.bridge", SimpleNamespace(__version__="0.5.1"))
    check_parallelism(place(), "bridge", None)
    with pytest.raises(ConfigError, match="stages needs Megatron-Bridge 0.6 or later, got 0.5.1, whose gpt_step"):
        check_parallelism(place(stage="middle"), "bridge", None)


def test_context_parallelism_is_refused_for_audio() -> None:
    check_parallelism(place(), "bridge-audio", None)
    with pytest.raises(ConfigError, match="'bridge-audio' does not support context parallelism, got 2 ranks"):
        check_parallelism(place(2), "bridge-audio", None)


def test_which_stages_load() -> None:
    assert place(stage="middle").loads("bridge")
    assert place(stage="middle").loads("bridge-audio")
    assert place(stage="middle").loads("megatron-gpt")  # every stage reads the boundaries with --sft
    assert not place(stage="middle").loads("megatron-lm")
