"""Losses over the samples of packed rows equal those of TRL's trainers on the same pairs, each alone and padded."""

import copy
import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForSequenceClassification
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer

from energon_packed import (
    BatchError,
    ConfigError,
    EncodedSample,
    PackedBatch,
    PackedTrainer,
    PaddingFreeCollator,
    dpo_loss,
    kto_loss,
    packed_training_arguments,
    reward_loss,
)
from tests.integrations.launched import tiny_qwen2
from tests.integrations.trainer_runs import QUIET
from tests.internals import SampleLoss, preference_pairs, without_targets

PROMPTS = ["What is it? ", "Count to three. ", "Name a colour. ", "Say why. "]
CHOSEN = ["A cat.", "One, two, three.", "Blue", "Because it rains a lot in spring."]
REJECTED = ["A dog that runs away.", "One.", "Seven is a number.", "No."]
EXACT: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-7}  # Qwen2 computes its norms in float32


def arguments(output: Path, **changes: Any) -> dict[str, Any]:
    return {
        **{"output_dir": str(output), "per_device_train_batch_size": 4, "report_to": [], "use_cpu": True},
        **{"bf16": False, "gradient_checkpointing": False, "disable_tqdm": True, "remove_unused_columns": False},
        **changes,
    }


@pytest.fixture(scope="module")
def tokenizer(text_tokenizer_dir: Path) -> Any:
    return AutoTokenizer.from_pretrained(text_tokenizer_dir)


@pytest.fixture
def models() -> tuple[Any, Any]:
    """A model and a reference that differs from it, float64."""
    model = tiny_qwen2().double().eval()
    reference = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    return model, reference


def sample(prompt: list[int], answer: list[int], **fields: Any) -> EncodedSample:
    labels = np.array([-100] * len(prompt) + answer)
    return EncodedSample(input_ids=np.array(prompt + answer), labels=labels, **fields)


def row(samples: list[EncodedSample], **options: Any) -> PackedBatch:
    return PaddingFreeCollator(**options).collate(samples)


def logps(model: Any, batch: PackedBatch) -> torch.Tensor:
    return batch.sample_logps(model(**batch.transformers_inputs(logits="targets")).logits)


def gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, **EXACT, msg=lambda text, name=name: f"{name}: {text}")


def in_float64(*models: Any) -> None:
    """Replace the log probabilities of TRL's kernel, which are float32, by float64."""

    def forward(
        model: Any, original: Any, *args: Any, fused_lm_head: bool = False, labels: Any = None, **kwargs: Any
    ) -> Any:
        outputs = original(*args, **kwargs)
        if not fused_lm_head:
            return outputs
        targets = labels[:, 1:]
        log_p = torch.log_softmax(outputs.logits[:, :-1], -1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
        zeros = torch.zeros_like(log_p)
        is_target = targets != -100
        fields = {"entropy": zeros, "mean_logits": zeros, "is_top1": is_target, "label_mask": is_target}
        return SimpleNamespace(log_probs=torch.where(is_target, log_p, 0), **fields)

    for model in models:
        model.forward = partial(forward, model, partial(type(model).forward, model))


def trl_dpo(models: tuple[Any, Any], tokenizer: Any, output: Path, **changes: Any) -> DPOTrainer:
    data = datasets.Dataset.from_dict({"prompt": PROMPTS, "chosen": CHOSEN, "rejected": REJECTED})
    args = DPOConfig(**arguments(output, **changes))
    trainer = DPOTrainer(models[0], models[1], args, train_dataset=data, processing_class=tokenizer)
    in_float64(trainer.model, trainer.ref_model)
    return trainer


def pairs_of(trainer: DPOTrainer) -> list[EncodedSample]:
    """The token ids of TRL as samples of pairs; the pairs of a row need not be in the order of the roles."""
    samples = []
    for index, item in enumerate(trainer.train_dataset):
        for role in ("chosen", "rejected") if index % 2 else ("rejected", "chosen"):
            samples.append(sample(item["prompt_ids"], item[f"{role}_ids"], group=str(index), role=role))
    return samples


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_dpo_loss_and_gradients_are_those_of_trl(
    models: tuple[Any, Any], tokenizer: Any, tmp_path: Path, smoothing: float
) -> None:
    kind = {"loss_type": "robust"} if smoothing else {}
    trainer = trl_dpo(models, tokenizer, tmp_path, beta=0.3, label_smoothing=smoothing, **kind)
    inputs = trainer._prepare_inputs(trainer.data_collator(list(trainer.train_dataset)))
    expected = trainer.compute_loss(models[0], inputs)
    theirs = gradients(models[0], expected)

    batch = row(pairs_of(trainer), pad_multiple=4, pad_to=400)
    with torch.no_grad():
        reference = logps(models[1], batch)
    values = dpo_loss(batch, logps(models[0], batch), reference, beta=0.3, label_smoothing=smoothing)
    # The robust loss of TRL divides a difference; both are made of the losses of both orders of a pair.
    if smoothing:
        plain = dpo_loss(batch, logps(models[0], batch), reference, beta=0.3)
        flipped = dpo_loss(batch, logps(models[0], batch), reference, beta=0.3, label_smoothing=1.0)
        torch.testing.assert_close(values, (1 - smoothing) * plain + smoothing * flipped, **EXACT)
        values = ((1 - smoothing) * plain - smoothing * flipped) / (1 - 2 * smoothing)
    assert values.shape == (4,)
    assert values.std() > 0.01
    torch.testing.assert_close(values.mean(), expected, **EXACT)
    assert_same(gradients(models[0], values.mean()), theirs)


@pytest.mark.parametrize("kl", [0.0, 0.7])
def test_kto_loss_is_that_of_trl(models: tuple[Any, Any], tokenizer: Any, tmp_path: Path, kl: float) -> None:
    answers, labels = [CHOSEN[0], REJECTED[1], CHOSEN[2], REJECTED[3]], [True, False, True, False]
    data = datasets.Dataset.from_dict({"prompt": PROMPTS, "completion": answers, "label": labels})
    weights = {"desirable_weight": 1.5, "undesirable_weight": 0.5}
    kind = "kto" if kl else "apo_zero_unpaired"
    args = KTOConfig(**arguments(tmp_path, beta=0.3, loss_type=kind, **weights))
    trainer = KTOTrainer(models[0], models[1], args, train_dataset=data, processing_class=tokenizer)
    in_float64(trainer.model, trainer.ref_model)
    inputs = trainer._prepare_inputs(trainer.data_collator(list(trainer.train_dataset)))
    if kl:  # of mismatched answers, which the caller estimates
        trainer._compute_kl_logps = lambda model, batch: torch.full((4,), kl if model is models[0] else 0.0)
    expected = trainer.compute_loss(models[0], inputs)
    theirs = gradients(models[0], expected)

    items = zip(trainer.train_dataset, labels, strict=True)
    batch = row([sample(item["prompt_ids"], item["completion_ids"], label=(float(label),)) for item, label in items])
    with torch.no_grad():
        reference = logps(models[1], batch)
    values = kto_loss(batch, logps(models[0], batch), reference, beta=0.3, kl=kl, **weights)
    assert values.shape == (4,)
    torch.testing.assert_close(values.mean(), expected, **EXACT)
    assert_same(gradients(models[0], values.mean()), theirs)


@pytest.mark.parametrize(("center", "margins"), [(0.0, None), (0.01, None), (0.0, [0.5, 0.0, 1.0, 2.0])])
def test_reward_loss_is_that_of_trl(tokenizer: Any, tmp_path: Path, center: float, margins: Any) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes["num_key_value_heads"] = 2
    config = Qwen2Config(vocab_size=2048, num_labels=1, pad_token_id=tokenizer.pad_token_id, **sizes)
    model = Qwen2ForSequenceClassification(config).double().eval()
    data = datasets.Dataset.from_dict({"prompt": PROMPTS, "chosen": CHOSEN, "rejected": REJECTED})
    if margins:
        data = data.add_column("margin", margins)
    args = RewardConfig(**arguments(tmp_path, center_rewards_coefficient=center or None))
    trainer = RewardTrainer(model, args, train_dataset=data, processing_class=tokenizer)
    inputs = trainer._prepare_inputs(trainer.data_collator(list(trainer.train_dataset)))
    expected = trainer.compute_loss(model, inputs)
    theirs = gradients(model, expected)

    samples = []
    for index, item in enumerate(trainer.train_dataset):
        for role in ("rejected", "chosen"):
            label = (margins[index] if role == "chosen" else 0.0,) if margins else None
            samples.append(sample([], item[f"{role}_ids"], group=str(index), role=role, label=label))
    batch = row(samples, pad_multiple=4)
    arguments_of_model = batch.transformers_inputs()
    del arguments_of_model["labels"]
    states = model.model(**arguments_of_model).last_hidden_state
    scores = model.score(batch.last_tokens(states))[:, 0]
    values = reward_loss(batch, scores, center=center, margins=margins is not None)
    torch.testing.assert_close(values.mean(), expected, **EXACT)
    assert_same(gradients(model, values.mean()), theirs)


def test_pairs_are_of_one_group_and_of_comparable_samples() -> None:
    def one(group: str | None, role: str | None = None, label: float | None = None) -> EncodedSample:
        return sample([1], [2, 3], group=group, role=role, label=None if label is None else (label,))

    rows = [
        one("a", "rejected"), one("a", "chosen"), one("a", "rejected"),
        one("b", "completion", 2.0), one("b", "completion", 5.0), one("b", "completion", 2.0),
        one("c", "query"), one("c", "chosen"),
        one("c", "completion", 0.5), one(None, "rejected"), one("d", "completion"),
    ]  # fmt: skip
    preferred, other = preference_pairs(row(rows))
    assert list(zip(preferred.tolist(), other.tolist(), strict=True)) == [(1, 0), (1, 2), (4, 3), (4, 5)]
    assert len(dpo_loss(row(rows).without_targets(), torch.zeros(11), torch.zeros(11))) == 0
    assert len(dpo_loss(row([one(None)]), torch.zeros(1), torch.zeros(1))) == 0


def test_samples_without_a_label_have_no_kto_loss() -> None:
    batch = row([sample([1], [2], label=(1.0,)), sample([1], [3]), sample([1], [4], label=(0.0,))])
    values = kto_loss(batch, torch.zeros(3), torch.zeros(3), desirable_weight=3.0)
    assert values.tolist() == [1.5, 0.5]
    assert len(kto_loss(batch.without_targets(), torch.zeros(3), torch.zeros(3))) == 0


def test_a_row_that_fills_a_step_has_no_pair() -> None:
    pair = [sample([1], [2], group="a", role=role) for role in ("chosen", "rejected")]
    inputs = SampleLoss.collator(PaddingFreeCollator())([pair])
    assert SampleLoss(dpo_loss).count(inputs) == 1
    assert SampleLoss(dpo_loss).count(without_targets(inputs)) == 0


def test_values_of_samples_leave_out_prompts_and_padding() -> None:
    batch = row([sample([1, 2], [3, 4, 5]), sample([6], [7]), sample([8, 9], [10])], pad_multiple=4, pad_to=20)
    values = torch.arange(20.0)[None]
    # The samples start at 0, 8 and 12.
    assert batch.sample_sums(values).tolist() == [2 + 3 + 4, 9, 14]
    assert batch.last_tokens(values[..., None] * torch.tensor([1.0, -1])).tolist() == [[4, -4], [9, -9], [14, -14]]
    logits = torch.randn(1, 20, 50, dtype=torch.float64)
    log_p = torch.log_softmax(logits[0], -1)
    expected = [log_p[1, 3] + log_p[2, 4] + log_p[3, 5], log_p[8, 7], log_p[13, 10]]
    torch.testing.assert_close(batch.sample_logps(logits), torch.stack(expected))
    of_targets = batch.transformers_inputs(logits="targets")["logits_to_keep"]
    torch.testing.assert_close(batch.sample_logps(logits[:, of_targets]), torch.stack(expected))


def test_a_loss_without_its_reference_names_the_remedy() -> None:
    batch = row([sample([1], [2], label=(1.0,))])
    for loss in (dpo_loss, kto_loss):
        with pytest.raises(BatchError, match=rf"`{loss.__name__}` needs `ref_logps`.*Pass `ref_model`"):
            loss(batch, torch.zeros(1), None)


class Rows(torch.utils.data.Dataset[Any]):
    """Rows of pairs, as a trainer reads them."""

    def __init__(self, rows: list[list[EncodedSample]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> list[EncodedSample]:
        return self.rows[index]


def packed_trainer(model: Any, rows: list[list[EncodedSample]], output: Path, **options: Any) -> PackedTrainer:
    args = packed_training_arguments(
        output, None, **{**QUIET, "save_strategy": "no"}, max_steps=1, gradient_accumulation_steps=len(rows)
    )
    return PackedTrainer(model, args, PaddingFreeCollator(), Rows(rows), Rows(rows), **options)


def test_packed_trainer_has_the_loss_of_all_pairs_of_a_step(
    models: tuple[Any, Any], tokenizer: Any, tmp_path: Path
) -> None:
    model, reference = models
    theirs = trl_dpo((copy.deepcopy(model), reference), tokenizer, tmp_path, beta=0.3)
    inputs = theirs._prepare_inputs(theirs.data_collator(list(theirs.train_dataset)))
    expected = theirs.compute_loss(theirs.model, inputs)
    pairs = pairs_of(theirs)
    rows = [pairs[:6], pairs[6:]]  # three pairs, then one: every pair has the same weight
    trainer = packed_trainer(model, rows, tmp_path / "ours", loss=partial(dpo_loss, beta=0.3), ref_model=reference)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected.item(), rel=1e-6)
    logged = trainer.train()
    assert logged.training_loss == pytest.approx(expected.item(), rel=1e-6)
    assert next(reference.parameters()).grad is None


def test_packed_trainer_uses_stored_reference_log_probabilities(models: tuple[Any, Any], tmp_path: Path) -> None:
    model, reference = models
    pairs = [
        sample([1, 2], [3, 4], group="a", role="chosen"),
        sample([1, 2], [5], group="a", role="rejected"),
    ]
    with torch.no_grad():
        logits = reference(input_ids=row(pairs[:1]).input_ids).logits, reference(row(pairs[1:]).input_ids).logits
    stored = []
    for one, values in zip(pairs, logits, strict=True):
        log_p = torch.log_softmax(values[0, :-1], -1).gather(1, torch.tensor(one.input_ids[1:])[:, None])[:, 0]
        column = np.concatenate([[0], log_p.numpy()]).astype(np.float32)
        stored.append(EncodedSample(**{**vars(one), "columns": {"ref_logprobs": column}}))
    expected = packed_trainer(model, [pairs], tmp_path / "a", loss=dpo_loss, ref_model=reference).evaluate()
    found = packed_trainer(model, [stored], tmp_path / "b", loss=dpo_loss).evaluate()
    assert found["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-5)
    assert abs(found["eval_loss"] - math.log(2)) > 1e-3  # the loss without any difference between the models
    with pytest.raises(BatchError, match="`dpo_loss` needs `ref_logps`"):
        packed_trainer(model, [pairs], tmp_path / "c", loss=dpo_loss).train()


def test_the_reference_of_an_adapter_is_the_model_without_it(models: tuple[Any, Any], tmp_path: Path) -> None:
    model, _ = models
    pairs = [
        sample([1, 2], [3, 4], group="a", role="chosen"),
        sample([1, 2], [5], group="a", role="rejected"),
    ]
    base = copy.deepcopy(model)
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights=False)).double()
    expected = packed_trainer(adapted, [pairs], tmp_path / "a", loss=dpo_loss, ref_model=base).evaluate()
    found = packed_trainer(adapted, [pairs], tmp_path / "b", loss=dpo_loss).evaluate()
    assert found["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-6)
    assert abs(found["eval_loss"] - math.log(2)) > 1e-3


def test_options_of_the_loss_that_do_not_fit_are_refused(models: tuple[Any, Any], tmp_path: Path) -> None:
    model, reference = models
    with pytest.raises(ConfigError, match="`ref_model` needs `loss`"):
        packed_trainer(model, [[sample([1], [2])]], tmp_path, ref_model=reference)
    with pytest.raises(ConfigError, match="`loss` must be None with .*got dpo_loss"):
        packed_trainer(model, [[sample([1], [2])]], tmp_path, loss=dpo_loss, compute_loss_func=lambda *_: None)
    with pytest.raises(ConfigError, match="no row of the step has a pair"):
        packed_trainer(model, [[sample([1], [2])]], tmp_path, loss=dpo_loss, ref_model=reference).train()
