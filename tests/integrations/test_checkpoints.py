"""Checkpoints of PackedTrainer: the weights of every model are restored, or the checkpoint is refused."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2_5_VLForConditionalGeneration, Trainer, TrainerCallback

from energon_packed import (
    ChatEncoder,
    ConfigError,
    PackedDataset,
    PackedTrainer,
    PaddingFreeCollator,
    check_training_arguments,
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


def stock_run(folder: Path, data: PackedDataset, model: Any, steps: int, resume: Path | None = None) -> Weights:
    """Weights that a stock Trainer starts with; it saves a checkpoint after each step."""
    start = Start()
    arguments = {"save_steps": 1, "max_steps": steps, "per_device_train_batch_size": 1, "save_only_model": False}
    args = packed_training_arguments(str(folder), data, **QUIET | arguments)
    trainer = Trainer(model, args, train_dataset=data, data_collator=PaddingFreeCollator(), callbacks=[start])
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return start.weights


@pytest.mark.parametrize(
    ("kind", "lost"), [("qwen2_5_vl", "model.language_model."), ("qwen3_moe", "experts.down_proj")]
)
def test_a_stock_trainer_that_would_lose_weights_is_refused(
    image_packs: Path, text_packs: list[Path], encoder: ChatEncoder, tmp_path: Path, kind: str, lost: str
) -> None:
    data = PackedDataset(image_packs, encoder) if kind == "qwen2_5_vl" else PackedDataset(text_packs[0])

    def made() -> Any:
        if kind == "qwen2_5_vl":
            return tiny_model(kind, encoder, "sdpa").train()
        sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
        experts = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
        vocabulary = {"vocab_size": len(encoder.tokenizer), "bos_token_id": None, "eos_token_id": None}
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **experts, **vocabulary))

    args = packed_training_arguments(str(tmp_path), data, **QUIET)
    model, others = made(), made()
    stock_run(tmp_path / "lost", data, model, 1)
    start = stock_run(tmp_path / "lost", data, others, 2, tmp_path / "lost" / "checkpoint-1")
    missing = [name for name, weight in copied(model).items() if not weight.equal(start[name])]
    assert any(lost in name for name in missing)
    message = (
        rf"checkpoints must restore all weights of {type(model).__name__}, .* such as .*{lost}.* Use PackedTrainer"
    )
    with pytest.raises(ConfigError, match=message):
        check_training_arguments(args, data, model=model)

    check_training_arguments(packed_training_arguments(str(tmp_path), data, save_strategy="no"), data, model=model)
    kept = made()
    kept.save_pretrained = partial(kept.save_pretrained, save_original_format=False)
    check_training_arguments(args, data, model=kept)
    stock_run(tmp_path / "kept", data, kept, 1)
    assert equal(stock_run(tmp_path / "kept", data, made(), 2, tmp_path / "kept" / "checkpoint-1"), copied(kept))


def test_models_with_their_own_names_are_accepted(text_packs: list[Path], tmp_path: Path) -> None:
    data = PackedDataset(text_packs[0])
    check_training_arguments(packed_training_arguments(str(tmp_path), data, **QUIET), data, model=tiny_qwen2())


@pytest.mark.parametrize("checkpoint", [True, "checkpoint-7"])
def test_resuming_without_a_checkpoint_is_refused(
    checkpoint: Any, text_packs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data = PackedDataset(text_packs[0])
    args = packed_training_arguments("run", data, **QUIET)
    with pytest.raises(ConfigError, match="must be True or a folder that has a checkpoint, got (run|checkpoint-7) "):
        PackedTrainer(tiny_qwen2(), args, train_dataset=data).train(resume_from_checkpoint=checkpoint)
