"""Batches in Megatron's words, with real megatron-core objects and ranks."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from energon_packed import ChatEncoder, EncodedSample, PaddingFreeCollator, get_packed_loader
from energon_packed.errors import ConfigError
from energon_packed.integrations.megatron import megatron_batch, train_valid_test_dataloaders_provider
from tests.conftest import Packer


def random_samples(rng: np.random.Generator) -> list[EncodedSample]:
    samples = []
    for number in range(rng.integers(1, 7)):
        ids = rng.integers(0, 1000, rng.integers(1, 30))
        labels = np.where(rng.random(len(ids)) < 0.6, ids, -100)
        samples.append(EncodedSample(id=str(number), input_ids=ids, labels=labels))
    return samples if any(sample.num_supervised for sample in samples) else random_samples(rng)


def reference(sample: EncodedSample) -> tuple[list[int], list[int]]:
    """Tokens and next-token labels of one sample alone."""
    return sample.input_ids.tolist(), [*sample.labels[1:].tolist(), -100]


@pytest.mark.parametrize("multiple", [1, 8])
def test_labels_of_500_random_packs_equal_the_reference(multiple: int) -> None:
    rng = np.random.default_rng(multiple)
    for _ in range(500):
        samples = random_samples(rng)
        width = sum(-(-len(sample) // multiple) * multiple for sample in samples) + int(rng.integers(0, 9))
        batch = PaddingFreeCollator(pad_multiple=multiple, pad_to=width).collate(samples)
        inputs = megatron_batch(batch, "bridge")
        real = torch.ones(1, width, dtype=torch.bool) if batch.padding_mask is None else ~batch.padding_mask
        expected = [reference(sample) for sample in samples]
        assert inputs["tokens"][real].tolist() == [t for tokens, _ in expected for t in tokens]
        assert inputs["labels"][real].tolist() == [t for _, labels in expected for t in labels]
        assert (inputs["labels"][~real] == -100).all()
        assert ((inputs["loss_mask"] > 0) == (inputs["labels"] != -100)).all()
        bounds = inputs.get("cu_seqlens_q_padded", inputs["cu_seqlens_q"]).tolist()
        lengths = (inputs["cu_seqlens_q"][1:] - inputs["cu_seqlens_q"][:-1]).tolist()
        assert bounds[-1] == width == inputs["total_tokens"]
        for start, length, (tokens, _) in zip(bounds, lengths, expected, strict=False):
            assert inputs["tokens"][0, start : start + length].tolist() == tokens


def test_bridge_layout(pack_demo: Packer, encoder: ChatEncoder) -> None:
    batch = next(iter(get_packed_loader(pack_demo().shards, encoder, epochs=1, num_workers=0, micro_batch_size=2)))
    inputs = megatron_batch(batch, "bridge")
    tokens = batch.input_ids.shape[1]
    assert inputs["position_ids"].shape == (3, 1, tokens)
    assert inputs["max_seqlen_q"].cpu() == batch.max_seqlen  # the step moves it, so it must be a tensor
    assert set(inputs["visual_inputs"].normalized_for_model()) == {"pixel_values", "image_grid_thw"}
    assert not {"pixel_values", "cu_seqlens_q_padded"} & set(inputs)
    middle = megatron_batch(batch, "bridge", metadata_only=True)
    assert not {"tokens", "labels", "loss_mask", "visual_inputs", "pixel_values"} & set(middle)
    assert {"position_ids", "cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "total_tokens"} <= set(middle)


def test_packed_seq_params_are_those_of_megatron_core(pack_demo: Packer, encoder: ChatEncoder) -> None:
    options: dict[str, Any] = {"epochs": 1, "num_workers": 0, "shuffle": False}
    plain = next(iter(get_packed_loader(pack_demo().shards, encoder, **options))).packed_seq_params()
    assert isinstance(plain, PackedSeqParams)
    assert (plain.qkv_format, plain.cu_seqlens_q.dtype, plain.cu_seqlens_q_padded) == ("thd", torch.int32, None)
    collator = PaddingFreeCollator(pad_multiple=16)
    padded = next(iter(get_packed_loader(pack_demo().shards, encoder, collator=collator, **options)))
    params = padded.packed_seq_params()
    assert params.cu_seqlens_q.shape == params.cu_seqlens_q_padded.shape
    assert (params.cu_seqlens_q_padded % 16 == 0).all()
    assert params.max_seqlen_q == (params.cu_seqlens_q_padded[1:] - params.cu_seqlens_q_padded[:-1]).max()


def test_megatron_lm_layout(pack_demo: Packer, encoder: ChatEncoder) -> None:
    batch = next(iter(get_packed_loader(pack_demo().shards, encoder, epochs=1, num_workers=0)))
    inputs = megatron_batch(batch, "megatron-lm")
    assert set(inputs) == {"tokens", "labels", "imgs", "num_tiles", "cu_lengths", "max_lengths"}
    tokens = inputs["tokens"].shape[1]
    shifted = inputs["labels"][:, 1 : tokens + 1]  # what the example's step does
    assert torch.equal(shifted, batch.megatron_inputs()["labels"])
    assert inputs["cu_lengths"].shape == (1, batch.num_samples + 1)
    assert inputs["cu_lengths"].shape[0] == inputs["max_lengths"].shape[0] == 1
    assert inputs["num_tiles"].sum() == len(inputs["imgs"])
    assert {inputs[name].dtype for name in ("num_tiles", "cu_lengths", "max_lengths")} == {torch.int32}
    text = PaddingFreeCollator().collate(random_samples(np.random.default_rng(0)))
    assert megatron_batch(text, "megatron-lm")["imgs"].shape == torch.Size([1, 1])
    padded = PaddingFreeCollator(pad_multiple=32).collate(random_samples(np.random.default_rng(0)))
    with pytest.raises(ConfigError, match="no boundaries for padded sub-samples"):
        megatron_batch(padded, "megatron-lm")
    with pytest.raises(ConfigError, match="layout is 'thd'; use one of bridge, megatron-lm"):
        megatron_batch(text, "thd")  # type: ignore[arg-type]


RANK = """
import os, sys, torch
from megatron.core import parallel_state
from energon_packed import ChatEncoder
from energon_packed.integrations.megatron import train_valid_test_dataloaders_provider
rank, world, tensor, pipeline, store, shards, tokenizer, layout = sys.argv[1:]
torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(world))
parallel_state.initialize_model_parallel(int(tensor), int(pipeline))
provider = train_valid_test_dataloaders_provider(
    shards, ChatEncoder.from_pretrained(tokenizer), layout=layout, num_workers=0, shuffle_buffer_size=1)
assert provider.is_distributed
train, valid, test = provider([0, 0, 0])
print("valid", valid is not None, "test", test is not None)
if train is not None:
    batch = next(train)
    print("first", int(batch["tokens"].sum()) if "tokens" in batch else "metadata")
    state = train.save_state()
    after = next(train)
    again, _, _ = provider()
    again.restore_state(state)
    repeated = next(again)
    assert all(torch.equal(after[k], repeated[k]) for k in after if isinstance(after[k], torch.Tensor))
print("done")
"""


def run_ranks(tmp_path: Path, shards: Path, tokenizer: Path, layout: str, *, tensor: int, pipeline: int) -> list[str]:
    """Two real processes in a real process group."""
    arguments = [str(tensor), str(pipeline), str(tmp_path / "store"), str(shards), str(tokenizer), layout]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", RANK, str(rank), "2", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = []
    for process in ranks:
        out, error = process.communicate(timeout=300)
        assert process.returncode == 0, error[-3000:]
        assert out.endswith("done\n")
        outputs.append(out)
    return outputs


def test_data_parallel_ranks_get_different_rows(pack_demo: Packer, tokenizer_dir: Path, tmp_path: Path) -> None:
    shards = pack_demo(split={"train": 0.7, "val": 0.3}, max_packs_per_shard=4).shards
    outputs = run_ranks(tmp_path, shards, tokenizer_dir, "bridge", tensor=1, pipeline=1)
    assert all("valid True test False" in out for out in outputs)
    assert len({next(line for line in out.splitlines() if "first" in line) for out in outputs}) == 2
    foreign = tmp_path / "foreign"  # what nv-meta makes for tars of other packers has splits, and no packing.json
    shutil.copytree(shards, foreign)
    (foreign / ".nv-meta" / "packing.json").unlink()
    (tmp_path / "store").unlink(missing_ok=True)
    outputs = run_ranks(tmp_path, foreign, tokenizer_dir, "bridge", tensor=1, pipeline=1)
    assert all("valid True test False" in out for out in outputs)


def test_tensor_parallel_ranks_get_the_same_rows_or_leave_loading_to_the_first(
    pack_demo: Packer, tokenizer_dir: Path, tmp_path: Path
) -> None:
    shards = pack_demo().shards
    same = run_ranks(tmp_path, shards, tokenizer_dir, "bridge", tensor=2, pipeline=1)
    assert same[0] == same[1]
    (tmp_path / "store").unlink(missing_ok=True)
    first, second = run_ranks(tmp_path, shards, tokenizer_dir, "megatron-lm", tensor=2, pipeline=1)
    assert "first" in first
    assert "first" not in second


def test_outside_of_megatron_the_provider_says_what_is_missing(encoder: ChatEncoder) -> None:
    with pytest.raises(ConfigError, match="parallel_state is not initialized"):
        train_valid_test_dataloaders_provider("out", encoder)()
