"""Losses of per-token columns in a packed row have the gradients of each sample alone."""

from pathlib import Path
from typing import Any

import pytest
import torch

from energon_packed import ChatEncoder, PackedBatch, PackedDataset, PaddingFreeCollator, pack
from tests.internals import StoredTokens
from tests.loading.models import tiny_model
from tests.loading.test_columns import write_lines

K = 4


def records(vocabulary: int) -> list[dict[str, Any]]:
    """Rollouts with advantages, and the `K` most probable tokens of a random teacher."""
    made = []
    for seed, count in enumerate((9, 14, 5, 22)):
        generator = torch.Generator().manual_seed(seed)
        teacher = torch.randn(count, vocabulary, generator=generator).log_softmax(-1).topk(K)
        ids = torch.randint(20, 200, (count,), generator=generator).tolist()
        made.append(
            {
                "id": str(seed), "prompt_ids": ids[:3], "completion_ids": ids[3:],
                "completion_mask": [int((seed + i) % 3 > 0) for i in range(count - 3)],
                "advantages": torch.randn(count - 3, generator=generator).tolist(),
                "teacher_ids": teacher.indices.tolist(), "teacher_logprobs": teacher.values.tolist(),
            }
        )  # fmt: skip
    return made


def policy_loss(batch: PackedBatch, logits: torch.Tensor) -> torch.Tensor:
    """Sum over targets of -advantage * log probability."""
    labels = batch.labels[0, 1:]
    logps = logits[0, :-1].log_softmax(-1).gather(-1, labels.clamp(min=0)[:, None])[:, 0]
    return -(batch.columns["advantages"][0, 1:] * logps * (labels != -100)).sum()


def distillation_loss(batch: PackedBatch, logits: torch.Tensor) -> torch.Tensor:
    """Sum over targets of the KL divergence of the student from the stored tokens of the teacher."""
    ids, teacher = (batch.columns[name][0, 1:] for name in ("teacher_ids", "teacher_logprobs"))
    student = logits[0, :-1].log_softmax(-1).gather(-1, ids.long())
    divergence = (teacher.double().exp() * (teacher - student)).sum(-1)
    return (divergence * (batch.labels[0, 1:] != -100)).sum()


def megatron_loss(batch: PackedBatch, logits: torch.Tensor) -> torch.Tensor:
    """The same as `policy_loss`, from the shifted inputs of Megatron."""
    inputs = batch.megatron_inputs(columns=("advantages",))
    labels = inputs["labels"][0]
    logps = logits[0].log_softmax(-1).gather(-1, labels.clamp(min=0)[:, None])[:, 0]
    return -(inputs["advantages"][0] * logps * inputs["loss_mask"][0]).sum()


@pytest.mark.parametrize("loss", [policy_loss, distillation_loss, megatron_loss])
@pytest.mark.parametrize("multiple", [1, 4])
def test_gradients_of_a_row_are_those_of_its_samples(
    loss: Any, multiple: int, encoder: ChatEncoder, tokenizer_dir: Path, tmp_path: Path
) -> None:
    data = write_lines(tmp_path / "data.jsonl", records(len(encoder.tokenizer)))
    result = pack(
        data, output_dir=tmp_path / "out", seq_len=64, tokenizer=tokenizer_dir, workers=1,
        sample_class="PackedTokensSample", pad_multiple=multiple,
    )  # fmt: skip
    collator = PaddingFreeCollator(pad_multiple=multiple, pad_to=72)
    row = collator.collate(PackedDataset(result.shards, StoredTokens())[0])
    assert row.num_samples == 4
    model = tiny_model("qwen2", encoder, "sdpa").double()

    def gradients(batches: list[PackedBatch]) -> tuple[float, torch.Tensor]:
        model.zero_grad()
        total = 0.0
        for batch in batches:
            value = loss(batch, model(**batch.transformers_inputs(weighted_loss=True)).logits)
            value.backward()
            total += value.item()
        return total, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    packed = gradients([row])
    alone = gradients([PaddingFreeCollator().collate([sample]) for sample in row.split()])
    assert packed[0] == pytest.approx(alone[0], abs=1e-6)
    assert packed[1].abs().max() > 1e-3
    assert torch.allclose(packed[1], alone[1], atol=1e-6, rtol=0)
