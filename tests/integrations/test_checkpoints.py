"""Checkpoints of PackedTrainer: the weights of every model are restored, or the checkpoint is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2_5_VLForConditionalGeneration, TrainerCallback

from energon_packed import (
    ChatEncoder,
    ConfigError,
    PackedDataset,
    PackedTrainer,
    PaddingFreeCollator,
    packed_training_arguments,
)
from tests.integrations.launched import tiny_qwen2
from tests.integrations.trainer_runs import QUIET, StopAt
from tests.loading.models import tiny_model
from tests.oldest import needs_isolated_qwen2_5_vl

Weights = dict[str, torch.Tensor]


class Start(TrainerCallback):
    """Copies the weights that a run starts with."""

    weights: Weights

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, **kwargs: Any) -> None:
        self.weights = copied(model)


def copied(model: Any) -> Weights:
    return {name: weight.detach().clone() for name, weight in model.state_dict().items()}


def equal(first: Weights, second: Weights) -> bool:
    return first.keys() == second.keys() and all(first[name].equal(second[name]) for name in first)


def train(
    folder: Path, data: PackedDataset, model: Any, resume: Path | None = None, stop: int = 4, **arguments: Any
) -> tuple[Weights, Weights, list[float]]:
    """Weights before the first and after the last of at most 4 steps, and the loss of each step."""
    start = Start()
    steps = {"save_steps": 2, "max_steps": 4, "per_device_train_batch_size": 1}
    args = packed_training_arguments(str(folder), data, **QUIET | steps | arguments)
    trainer = PackedTrainer(
        model,
        args,
        train_dataset=data,
        eval_dataset=data,
        data_collator=PaddingFreeCollator(),
        callbacks=[start, StopAt(stop)],
    )
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return start.weights, copied(model), losses


@pytest.mark.parametrize("kind", [pytest.param("qwen2_5_vl", marks=needs_isolated_qwen2_5_vl), "tied embeddings"])
def test_a_resumed_run_continues_with_the_saved_weights(
    image_packs: Path, text_packs: list[Path], encoder: ChatEncoder, tmp_path: Path, kind: str
) -> None:
    data = PackedDataset(image_packs, encoder) if kind == "qwen2_5_vl" else PackedDataset(text_packs[0])

    def model() -> Any:
        if kind == "qwen2_5_vl":
            return tiny_model(kind, encoder, "sdpa").train()
        made = tiny_qwen2()
        made.config.tie_word_embeddings = True
        made.tie_weights()
        return made

    _, expected, losses = train(tmp_path / "complete", data, model(), save_strategy="no")
    _, saved, first = train(tmp_path / "parts", data, model(), stop=2)
    start, last, second = train(tmp_path / "parts", data, model(), tmp_path / "parts" / "checkpoint-2")
    assert not equal(saved, copied(model()))
    assert equal(start, saved)
    assert equal(last, expected)
    assert second[: len(first)] == first
    assert second == losses


@needs_isolated_qwen2_5_vl
def test_a_checkpoint_with_other_names_is_refused_until_it_is_rewritten(
    image_packs: Path, encoder: ChatEncoder, tmp_path: Path
) -> None:
    data = PackedDataset(image_packs, encoder)
    model = tiny_model("qwen2_5_vl", encoder, "sdpa").train()
    _, saved, _ = train(tmp_path, data, model, stop=2)
    checkpoint = tmp_path / "checkpoint-2"
    model.save_pretrained(checkpoint)  # as another Trainer does: with the names of the first release
    with pytest.raises(
        ConfigError, match=r"must have the weights of the model, got \d+ missing and \d+ unexpected"
    ) as caught:
        train(tmp_path, data, tiny_model("qwen2_5_vl", encoder, "sdpa"), checkpoint)
    assert "\n" not in str(caught.value)
    assert f"{type(model).__name__}.from_pretrained(PATH).save_pretrained(PATH, save_original_format=False)" in str(
        caught.value
    )
    Qwen2_5_VLForConditionalGeneration.from_pretrained(checkpoint).save_pretrained(
        checkpoint, save_original_format=False
    )
    start, _, _ = train(tmp_path, data, tiny_model("qwen2_5_vl", encoder, "sdpa"), checkpoint)
    assert equal(start, saved)


@needs_isolated_qwen2_5_vl
def test_the_best_model_is_restored(image_packs: Path, encoder: ChatEncoder, tmp_path: Path) -> None:
    data = PackedDataset(image_packs, encoder)
    evaluation = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "eval_loss"}
    best = {"load_best_model_at_end": True, "greater_is_better": True}  # the first checkpoint has the greatest loss
    _, saved, _ = train(tmp_path / "first", data, tiny_model("qwen2_5_vl", encoder, "sdpa").train(), stop=2)
    model = tiny_model("qwen2_5_vl", encoder, "sdpa").train()
    _, last, _ = train(tmp_path / "best", data, model, **evaluation, **best)
    assert equal(last, saved)
