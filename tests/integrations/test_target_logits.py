"""Logits of targets alone: the same loss and gradients as with all logits, and nothing computed for other tokens."""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen2ForCausalLM, Trainer, TrainerCallback

from energon_packed import (
    ChatEncoder,
    EncodedSample,
    PackedBatch,
    PackedDataset,
    PackedTrainer,
    PackedTrainerMixin,
    PaddingFreeCollator,
    packed_training_arguments,
)
from tests.integrations.launched import tiny_qwen2
from tests.integrations.trainer_runs import QUIET
from tests.internals import CROSS_ENTROPY, computes_head_in_pieces, computes_target_logits, loss_in_pieces
from tests.loading.models import tiny_model

FAMILIES = ("qwen2", "llama", "qwen2_vl", "qwen2_5_vl")


def row(encoder: ChatEncoder, packs: Path, *, weighting: Any = "token") -> PackedBatch:
    """A row of two packs, with images for a vision model."""
    data = PackedDataset(packs, encoder, check_encoder=False)
    collator = PaddingFreeCollator(loss_weighting=weighting)
    return collator.collate([sample for pack in (data[0], data[1]) for sample in pack])


def step(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-12, msg=name)


@pytest.fixture(scope="module")
def text_encoder(text_tokenizer_dir: Path) -> ChatEncoder:
    return ChatEncoder.from_pretrained(text_tokenizer_dir)


@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_gradients_are_those_of_all_logits(
    name: str, encoder: ChatEncoder, text_encoder: ChatEncoder, image_packs: Path, text_packs: list[Path]
) -> None:
    is_vision = "vl" in name
    encoder, packs = (encoder, image_packs) if is_vision else (text_encoder, text_packs[0])
    model, batch = tiny_model(name, encoder, "sdpa").double(), row(encoder, packs)
    targets = int((batch.labels != -100).sum())
    assert targets < 0.9 * batch.num_tokens
    full, alone = (model(**batch.transformers_inputs(logits=logits)) for logits in ("all", "targets"))  # type: ignore[arg-type]
    assert alone.logits.shape == (1, targets, full.logits.shape[2])
    assert alone.loss.item() == pytest.approx(full.loss.item(), rel=1e-6)  # models compute it in float32
    losses = [batch.loss(output.logits) for output in (full, alone)]
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-12)
    assert_equal(step(model, losses[1]), step(model, losses[0]))
    assert computes_target_logits(model)


@pytest.mark.parametrize("weighting", ["token", "sample"])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_in_pieces_have_the_loss_and_gradients_of_all_logits(
    name: str,
    weighting: Any,
    encoder: ChatEncoder,
    text_encoder: ChatEncoder,
    image_packs: Path,
    text_packs: list[Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CROSS_ENTROPY, "_PIECE", 1)
    monkeypatch.setattr(CROSS_ENTROPY, "_ROWS", 5)
    encoder, packs = (encoder, image_packs) if "vl" in name else (text_encoder, text_packs[0])
    model, batch = tiny_model(name, encoder, "sdpa").double(), row(encoder, packs, weighting=weighting)
    inputs = batch.transformers_inputs(weighted_loss=True, logits="targets")
    assert computes_head_in_pieces(model)
    weights = None if weighting == "token" else batch.loss_mask[0, 1:][inputs["logits_to_keep"]]
    step_targets = {} if weights is not None else {"num_items_in_batch": 7.0}
    with loss_in_pieces(model, head=True, weights=weights), Operators() as ran:
        output = model(**inputs, **step_targets)
        ran.largest = 0
        found = step(model, output.loss)
    assert output.logits is None
    logits = model(**batch.transformers_inputs(weighted_loss=True)).logits
    losses = torch.nn.functional.cross_entropy(logits[0, :-1], batch.labels[0, 1:], reduction="none")
    mask = batch.loss_mask[0, 1:].double()
    expected = (losses * mask).sum() / (7.0 if weights is None else mask.sum())
    assert output.loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert_equal(found, step(model, expected))


@pytest.mark.parametrize("count", [0, 11])
def test_the_sum_of_losses_of_a_layer_with_a_bias(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CROSS_ENTROPY, "_PIECE", 1)
    torch.manual_seed(0)
    linear, hidden = torch.nn.Linear(4, 9).double(), torch.randn(count, 4, dtype=torch.float64, requires_grad=True)
    targets, factors = torch.arange(count) % 9, torch.rand(count)
    targets[1:2] = -100
    leaves = (hidden, linear.weight, linear.bias)
    loss = CROSS_ENTROPY.linear_cross_entropy(*leaves, targets, factors) * 3
    expected = (torch.nn.functional.cross_entropy(linear(hidden), targets, reduction="none") * factors).sum() * 3
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    for found, gradient in zip(*(torch.autograd.grad(value, leaves) for value in (loss, expected)), strict=True):
        torch.testing.assert_close(found, gradient, rtol=1e-12, atol=1e-14)


class Capped(Qwen2ForCausalLM):
    """A model that changes its logits before the loss, as Gemma 2."""

    def forward(self, *args: Any, labels: Any = None, shift_labels: Any = None, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = torch.tanh(output.logits)
        if labels is not None:
            output.loss = self.loss_function(output.logits, labels, self.vocab_size, shift_labels=shift_labels)
        return output


def test_a_model_that_changes_its_logits_computes_them_at_once() -> None:
    model = Capped(tiny_qwen2().config)
    assert computes_target_logits(model)
    assert not computes_head_in_pieces(model)


class Halved(torch.nn.Linear):
    """A layer whose logits are no product with its weight alone; the loss of a random model is nearly the same."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden) / 2


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.lm_head.register_forward_hook(lambda *values: None),
        lambda model: model.lm_head.register_forward_pre_hook(lambda *values: None),
        lambda model: setattr(model.lm_head, "forward", partial(torch.nn.Linear.forward, model.lm_head)),
        lambda model: setattr(model.lm_head, "__class__", Halved),
        lambda model: model.half(),
    ],
    ids=["hook", "hook before", "forward", "class", "float16"],  # accelerate replaces `forward`
)
def test_a_last_layer_that_does_more_computes_logits(change: Any) -> None:
    model = tiny_qwen2()
    assert computes_head_in_pieces(model)
    change(model)
    assert not computes_head_in_pieces(model)


class OwnProduct(Qwen2ForCausalLM):
    """A model whose loss uses the weight of the last layer, and not its output, as with Liger."""

    def forward(self, *args: Any, labels: Any = None, shift_labels: Any = None, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.loss = self.lm_head.weight.square().mean()
        return output


def test_a_loss_without_the_last_layer_is_not_computed_in_pieces() -> None:
    assert not computes_head_in_pieces(OwnProduct(tiny_qwen2().config))


def test_gradients_of_a_frozen_layer_and_of_bfloat16_and_autocast(text_packs: list[Path]) -> None:
    batch = PaddingFreeCollator().collate(list(PackedDataset(text_packs[0])[0]))
    inputs = batch.transformers_inputs(logits="targets")
    for is_frozen, dtype, cast in ((True, torch.float32, False), (False, torch.bfloat16, False), (False, None, True)):
        model = tiny_qwen2().to(dtype)
        model.lm_head.weight.requires_grad_(not is_frozen)
        results = []
        for head in (False, True):
            with loss_in_pieces(model, head=head), torch.autocast("cpu", enabled=cast):
                loss = model(**inputs).loss
            results.append((loss.item(), step(model, loss)))
        assert results[1][0] == pytest.approx(results[0][0], rel=1e-5)
        assert results[1][1].keys() == results[0][1].keys()
        for name, gradient in results[0][1].items():
            difference = (results[1][1][name] - gradient).float().norm() / gradient.float().norm()
            assert difference < (1e-5 if is_frozen else 0.02), name


@pytest.mark.parametrize("divisor", [None, 7.0])
def test_batch_losses_accept_the_logits_of_targets(
    divisor: float | None, text_encoder: ChatEncoder, text_packs: list[Path]
) -> None:
    model, batch = tiny_qwen2(), row(text_encoder, text_packs[0], weighting="sample")
    full, alone = (
        model(**batch.transformers_inputs(weighted_loss=True, logits=logits)).logits  # type: ignore[arg-type]
        for logits in ("all", "targets")
    )
    losses = [batch.loss(logits, targets=divisor) for logits in (full, alone)]
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-6)
    for signal in ("loss", "entropy", "gradient_norm"):
        found, expected = (batch.loss_by_source(logits, signal) for logits in (alone, full))  # type: ignore[arg-type]
        assert {k: v.item() for k, v in found.items()} == pytest.approx({k: v.item() for k, v in expected.items()})


def test_a_row_without_targets_has_loss_0_with_a_gradient_of_0() -> None:
    """FSDP needs the backward pass on every rank."""
    ids = np.arange(5)
    batch = PaddingFreeCollator().collate([EncodedSample(input_ids=ids, labels=ids)]).without_targets()
    model = tiny_qwen2()
    for loss_of in (lambda output: output.loss, lambda output: batch.loss(output.logits, targets=3.0)):
        output = model(**batch.transformers_inputs(logits="targets"))
        assert output.logits.shape[1] == 0
        loss = loss_of(output)
        assert loss.item() == 0
        gradients = step(model, loss)
        assert len(gradients) == len(list(model.parameters()))
        assert not any(gradient.any() for gradient in gradients.values())


class OwnShift(Qwen2ForCausalLM):
    """A model that shifts labels itself, as Gemma 3 with images, and so computes another loss with fewer logits."""

    def forward(self, *args: Any, labels: Any = None, shift_labels: Any = None, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        if labels is not None:
            size = min(output.logits.shape[1], labels.shape[1])
            output.loss = torch.nn.functional.cross_entropy(output.logits[0, : size - 1], labels[0, 1:size])
        return output


class LastOnly(Qwen2ForCausalLM):
    """A model without the arguments."""

    def forward(self, input_ids: Any = None, position_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        wrong = {"logits_to_keep", "shift_labels"} & kwargs.keys()
        if wrong:
            raise TypeError(f"unexpected {wrong}")
        return super().forward(input_ids, position_ids=position_ids, labels=labels, use_cache=False)


@pytest.mark.parametrize("kind", [OwnShift, LastOnly])
def test_a_model_with_another_loss_gets_all_logits(kind: Any, text_packs: list[Path], tmp_path: Path) -> None:
    model = kind(tiny_qwen2().config)
    model.load_state_dict(tiny_qwen2().state_dict())
    assert not computes_target_logits(model)
    assert trained(model, text_packs[0], tmp_path)[0] == pytest.approx(
        trained(tiny_qwen2(), text_packs[0], tmp_path)[0]
    )


def trained(model: Any, packs: Path, folder: Path, **options: Any) -> tuple[list[float], list[int]]:
    """The losses of two steps, and the logits of each forward pass of them."""
    data = PackedDataset(packs)
    args = packed_training_arguments(
        str(folder), data, **QUIET | {"save_strategy": "no", "logging_steps": 1}, max_steps=2
    )
    trainer = PackedTrainer(model, args, train_dataset=data, **options)
    counts: list[int] = []
    hook = model.lm_head.register_forward_hook(
        lambda module, inputs, output: counts.append(output.shape[1]) if torch.is_grad_enabled() else None
    )
    trainer.train()
    hook.remove()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], counts


def test_a_trainer_computes_the_logits_of_targets_alone(text_packs: list[Path], tmp_path: Path) -> None:
    losses, counts = trained(tiny_qwen2(), text_packs[0], tmp_path)
    expected, tokens = trained(tiny_qwen2(), text_packs[0], tmp_path, logits="all")
    assert losses == pytest.approx(expected, rel=1e-6)
    assert len(counts) == len(tokens) == 2
    assert all(targets < 0.9 * all_tokens for targets, all_tokens in zip(counts, tokens, strict=True))
    weighted = {"data_collator": PaddingFreeCollator(loss_weighting="sample")}
    losses, counts = trained(tiny_qwen2(), text_packs[0], tmp_path, **weighted)
    assert losses == pytest.approx(
        trained(tiny_qwen2(), text_packs[0], tmp_path, logits="all", **weighted)[0], rel=1e-6
    )
    assert max(counts) < min(tokens)


def test_predictions_have_all_logits(text_packs: list[Path], tmp_path: Path) -> None:
    data = PackedDataset(text_packs[0], split="val")
    args = packed_training_arguments(str(tmp_path), data, **QUIET | {"save_strategy": "no"})
    seen: list[tuple[int, ...]] = []

    def metrics(prediction: Any) -> dict[str, float]:
        seen.append(prediction.predictions.shape[:2])
        return {}

    trainer = PackedTrainer(tiny_qwen2(), args, train_dataset=data, compute_metrics=metrics)
    loss = trainer.evaluate(data)["eval_loss"]
    output = trainer.predict(data)
    assert output.predictions.shape[:2] == output.label_ids.shape == seen[0]
    assert PackedTrainer(tiny_qwen2(), args, train_dataset=data).evaluate(data)["eval_loss"] == pytest.approx(loss)


class Operators(TorchDispatchMode):
    """Names of the operators that run, and the largest float32 tensor that one of them returns."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.counts[func.overloadpacket.__name__] += 1
        if isinstance(result, torch.Tensor) and result.dtype == torch.float32:
            self.largest = max(self.largest, result.numel())
        return result


@pytest.mark.parametrize("all_logits", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_loss_is_computed_in_pieces(dtype: torch.dtype, all_logits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CROSS_ENTROPY, "_PIECE", 3 * 50)
    torch.manual_seed(0)
    ids = np.arange(20)
    batch = PaddingFreeCollator().collate([EncodedSample(input_ids=ids, labels=np.where(ids % 3, ids, -100))] * 2)
    targets = batch.labels[0, 1:]
    kept = torch.arange(39) if all_logits else (targets != -100).nonzero()[:, 0]
    logits = torch.randn(1, 40 if all_logits else len(kept), 50).to(dtype).requires_grad_()
    with Operators() as ran:
        loss = batch.loss(logits)
        loss.backward()
    if dtype == torch.bfloat16:
        assert ran.largest <= 3 * 50
    assert logits.grad is not None
    found, logits.grad = logits.grad, None
    exact = logits[0, : len(kept)] if dtype == torch.float64 else logits[0, : len(kept)].float()
    expected = torch.nn.functional.cross_entropy(exact, targets[kept])
    expected.backward()
    close = {"rtol": 1e-12, "atol": 1e-15} if dtype == torch.float64 else {}
    torch.testing.assert_close(loss, expected, **close)  # type: ignore[arg-type]
    torch.testing.assert_close(found, logits.grad, **close)  # type: ignore[arg-type]


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The Linear layers that were called."""
    called: list[Any] = []
    before = torch.nn.Linear.forward

    def forward(self: torch.nn.Linear, values: torch.Tensor) -> torch.Tensor:
        called.append(self)
        return before(self, values)

    monkeypatch.setattr(torch.nn.Linear, "forward", forward)
    return called


@pytest.mark.parametrize("weighting", ["token", "sample"])
def test_a_trainer_has_no_logits_for_the_loss_alone(
    weighting: Any, text_packs: list[Path], tmp_path: Path, layers: list[Any]
) -> None:
    """Neither a step nor an evaluation calls the last layer, unless a callback needs its logits."""
    data, collator = PackedDataset(text_packs[0]), PaddingFreeCollator(loss_weighting=weighting)
    results = []
    for options in ({}, {"logits": "all"}, {"callbacks": [NeedsLogits()]}):
        model = tiny_qwen2()
        args = packed_training_arguments(
            str(tmp_path), data, **QUIET | {"save_strategy": "no", "logging_steps": 1}, max_steps=2
        )
        trainer = PackedTrainer(model, args, train_dataset=data, data_collator=collator, **options)  # type: ignore[arg-type]
        assert trainer.compute_loss(model, trainer.data_collator([data[0]])) > 0  # checks the model
        layers.clear()
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        losses.append(trainer.evaluate(data)["eval_loss"])
        results.append((losses, layers.count(model.lm_head)))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-6)
    assert results[2][0] == pytest.approx(results[1][0], rel=1e-6)
    # The check of the isolation calls it too.
    rows = 2 + len(trainer.get_eval_dataloader(data))
    assert [calls - results[0][1] for _, calls in results] == [0, rows, rows]


@pytest.mark.parametrize("weighting", ["token", "sample"])
def test_with_a_compiler_the_model_computes_logits(
    weighting: Any, text_packs: list[Path], tmp_path: Path, layers: list[Any]
) -> None:
    data, model = PackedDataset(text_packs[0]), tiny_qwen2()
    args = packed_training_arguments(str(tmp_path), data, **QUIET)
    collator = PaddingFreeCollator(loss_weighting=weighting)
    trainer = PackedTrainer(model, args, train_dataset=data, data_collator=collator)
    trainer.args.torch_compile = True  # later, so that nothing is compiled
    for _ in range(2):  # the first checks the model
        layers.clear()
        trainer.compute_loss(model, trainer.data_collator([data[0]]))
    assert layers.count(model.lm_head) == 1


class PassesOn(Trainer):
    """A trainer with a loss that is the loss of the model, as in LLaMA-Factory."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


class Derived(PackedTrainerMixin, PassesOn):
    pass


@pytest.mark.parametrize("logits", [None, "targets"])
def test_a_trainer_with_its_own_loss_computes_logits_of_targets_if_requested(
    logits: Any, text_packs: list[Path], tmp_path: Path, layers: list[Any]
) -> None:
    data, model = PackedDataset(text_packs[0]), tiny_qwen2()
    args = packed_training_arguments(str(tmp_path), data, **QUIET)
    trainer = Derived(model, args, train_dataset=data, data_collator=PaddingFreeCollator(), logits=logits)
    inputs = trainer.data_collator([data[0]])
    trainer.compute_loss(model, dict(inputs), num_items_in_batch=7.0)  # checks the model
    layers.clear()
    loss = trainer.compute_loss(model, dict(inputs), num_items_in_batch=7.0)
    assert layers.count(model.lm_head) == (logits is None)
    assert loss.item() == pytest.approx(model(**inputs).loss.item() * inputs["shift_labels"].shape[1] / 7, rel=1e-6)


class NeedsLogits(TrainerCallback):
    needs_logits = True


@pytest.mark.parametrize("weighting", ["token", "sample"])
def test_a_trainer_computes_the_loss_in_pieces(weighting: Any, text_packs: list[Path], tmp_path: Path) -> None:
    model, ran = tiny_qwen2(), Operators()
    loss_function = model.loss_function
    with ran:
        trained(model, text_packs[0], tmp_path, data_collator=PaddingFreeCollator(loss_weighting=weighting))
    # The operator of torch's cross entropy, whose losses are for all logits; pieces have no backward operator.
    assert ran.counts["_log_softmax"] > 0
    assert "_log_softmax_backward_data" not in ran.counts
    assert model.loss_function is loss_function


class Fused(Qwen2ForCausalLM):
    """A model as Liger makes it: no logits if it computes a loss for training, and in an evaluation if requested."""

    def forward(self, *args: Any, labels: Any = None, skip_logits: bool | None = None, **kwargs: Any) -> Any:
        if skip_logits and labels is None:
            raise ValueError("skip_logits is True, but labels is None")
        output = super().forward(*args, labels=labels, **kwargs)
        if labels is not None if skip_logits is None and self.training else skip_logits:
            output.logits = None
        return output


@pytest.mark.parametrize("weighting", ["token", "sample"])
def test_a_model_whose_loss_has_no_logits(
    weighting: Any, text_packs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`use_liger_kernel`: the loss of the model, or of its logits with loss weights."""
    monkeypatch.setattr("transformers.trainer.apply_liger_kernel", lambda model, config: None)
    results = []
    for kind, extra in ((Qwen2ForCausalLM, {}), (Fused, {"use_liger_kernel": True})):
        model = kind(tiny_qwen2().config)
        model.load_state_dict(tiny_qwen2().state_dict())
        data = PackedDataset(text_packs[0])
        arguments = QUIET | {"save_strategy": "no", "logging_steps": 1}
        args = packed_training_arguments(str(tmp_path), data, **arguments, **extra, max_steps=2)
        collator = PaddingFreeCollator(loss_weighting=weighting)
        trainer = PackedTrainer(model, args, train_dataset=data, data_collator=collator)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        results.append([*losses, trainer.evaluate(data)["eval_loss"]])
    assert results[1] == pytest.approx(results[0], rel=1e-6)


# The host reads a value of the device: operators, and functions that are no operators on a CPU. `tensor` and
# `new_tensor` copy a value of the host.
WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal")
READS = ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__", "tensor", "new_tensor")


class Functions(TorchFunctionMode):
    """Names of the functions of torch that are called."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.__name__] += 1
        return func(*args, **(kwargs or {}))


class Waits(TrainerCallback):
    """Counts after the first step, which checks the model."""

    def __init__(self) -> None:
        self.ran, self.called = Operators(), Functions()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            self.ran.counts.clear()
            self.called.counts.clear()

    def of(self, function: Any) -> dict[str, int]:
        with self.called, self.ran:
            function()
        found = {name: self.ran.counts.pop(name, 0) for name in WAITS}
        found |= {name: self.called.counts.pop(name, 0) for name in READS}
        return found


@pytest.mark.parametrize("kind", ["head", "weights", "logits of targets", "weights, logits of targets", "images"])
def test_a_trainer_waits_for_the_device_as_often_as_a_stock_trainer(
    kind: str, encoder: ChatEncoder, image_packs: Path, text_packs: list[Path], tmp_path: Path
) -> None:
    """In steps of two rows, logs and evaluations; rows are made on the host before."""
    is_vision = kind == "images"
    data = PackedDataset(image_packs, encoder) if is_vision else PackedDataset(text_packs[0])
    args = packed_training_arguments(
        str(tmp_path), data, **QUIET | {"save_strategy": "no"}, max_steps=3, gradient_accumulation_steps=2
    )
    collator = PaddingFreeCollator(loss_weighting="sample" if "weights" in kind else "token")
    callbacks = [NeedsLogits()] if "logits" in kind else []

    def waits_of(trainer_class: Any, rows: list[Any]) -> tuple[dict[str, int], dict[str, int]]:
        model, waits = tiny_model("qwen2_5_vl", encoder, "sdpa") if is_vision else tiny_qwen2(), Waits()
        trainer = trainer_class(model, args, train_dataset=data, data_collator=collator, callbacks=[waits, *callbacks])
        if not rows:
            rows += [trainer.data_collator([data[index]]) for index in range(6)]
        trainer.get_train_dataloader = lambda: rows
        trainer.get_eval_dataloader = lambda *values: rows[:3]
        counts = waits.of(trainer.train), waits.of(trainer.evaluate)
        assert trainer.state.global_step == 3
        return counts

    rows: list[Any] = []
    trained, evaluated = waits_of(PackedTrainer, rows)
    assert ("loss_mask" in rows[0]) == ("weights" in kind)
    expected_trained, expected_evaluated = waits_of(
        Trainer, [{name: value for name, value in row.items() if name != "loss_mask"} for row in rows]
    )
    assert trained == expected_trained
    # Once, for the mean of all rows.
    assert evaluated == expected_evaluated | {"tolist": expected_evaluated["tolist"] + 1}


def test_a_plain_loop_waits_once_for_the_places_of_the_targets(text_packs: list[Path]) -> None:
    batch = PaddingFreeCollator().collate(list(PackedDataset(text_packs[0])[0]))
    counts = {}
    for logits in ("all", "targets"):
        tokens = batch.input_ids.shape[1] if logits == "all" else int((batch.labels != -100).sum())
        values = torch.randn(1, tokens, 2000)
        with Operators() as ran:
            batch.transformers_inputs(logits=logits)  # type: ignore[arg-type]
            batch.loss(values)
            batch.loss(values, targets=3.0)
            batch.loss(values, targets=torch.tensor(3.0))
            batch.sample_logps(values)
        counts[logits] = sum(ran.counts[name] for name in WAITS)
    # With logits of targets alone, nonzero finds the tokens that they belong to: once in each of the five calls.
    assert counts == {"all": 0, "targets": 5}
    moved = batch.to("meta")  # a copy to the host, or a value that the host reads, is an error
    moved.transformers_inputs()
    for divisor in (None, 3.0, torch.tensor(3.0)):
        moved.loss(torch.empty(1, batch.input_ids.shape[1], 2000, device="meta"), targets=divisor)
