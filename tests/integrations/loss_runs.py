"""The gradient of the first optimizer step of a training loop, compared with the samples one by one: run by torchrun.

python -m tests.integrations.loss_runs OUT JOBS     JOBS is JSON: {name: [a key of `JOBS`, arguments]}
"""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from itertools import islice
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import LlamaForCausalLM, Qwen2_5_VLForConditionalGeneration, Qwen2ForCausalLM, Trainer

from energon_packed import (
    ChatEncoder,
    DataflowLoader,
    MapDistributor,
    PackedBatch,
    PackedDataset,
    PackedTrainer,
    PaddingFreeCollator,
    get_packed_loader,
    packed_training_arguments,
    step_targets,
)
from tests.docs.pages import code_block
from tests.integrations.launched import report, tiny_qwen2
from tests.integrations.trainer_runs import QUIET
from tests.loading.models import tiny_model

MODELS: tuple[Any, ...] = (Qwen2ForCausalLM, LlamaForCausalLM, Qwen2_5_VLForConditionalGeneration)


class FirstStep:
    """Records the rows that the model of this process has read, and its gradients, until the first optimizer step.

    Attributes:
        rows: the batches, in the order of the forward passes.
        gradients: of all parameters after the first step; the same on all ranks.
    """

    def __init__(self) -> None:
        self.rows: list[PackedBatch] = []
        self.gradients: dict[str, torch.Tensor] = {}
        self._model: Any = None
        self._batches: dict[bytes, PackedBatch] = {}

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Watch every batch that becomes arguments, every forward pass, and the optimizer."""
        convert, forwards = PackedBatch.transformers_inputs, {kind: kind.forward for kind in MODELS}

        def converted(batch: PackedBatch, **options: Any) -> Any:
            if batch.ids[0] is not None:  # not the batch of the isolation check
                self._batches[batch.input_ids.numpy().tobytes()] = batch
            return convert(batch, **options)

        def watched(forward: Any) -> Any:
            @wraps(forward)  # the Trainer reads the signature
            def wrapped(model: Any, *args: Any, **inputs: Any) -> Any:
                batch = self._batches.get(inputs["input_ids"].numpy().tobytes())
                if batch is not None and not self.gradients:
                    self._model = model
                    self.rows.append(batch)
                return forward(model, *args, **inputs)

            return wrapped

        def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
            self.keep({name: value.grad for name, value in self._model.named_parameters()})

        hook = register_optimizer_step_post_hook(stepped)
        PackedBatch.transformers_inputs = converted  # type: ignore[method-assign]
        for kind, forward in forwards.items():
            kind.forward = watched(forward)
        try:
            yield
        finally:
            hook.remove()
            PackedBatch.transformers_inputs = convert  # type: ignore[method-assign]
            for kind, forward in forwards.items():
                kind.forward = forward

    def keep(self, gradients: dict[str, Any]) -> None:
        """Keep the gradients of the first step."""
        if not self.gradients:
            self.gradients = {name: full(grad).clone() for name, grad in gradients.items() if grad is not None}

    def compared(self, model: Any, weighting: str = "token", weights: str = "") -> dict[str, Any]:
        """Relative error of the gradient; and the loss of the step, from each sample in a forward pass of its own.

        Args:
            model: as it was before the step.
            weighting: `token`: the mean over all targets; `sample`: the mean over samples of their means.
            weights: JSON file with the loss weights of the tokens of each record, by id; "" if all are 1.
        """
        model = model.double()  # so that only the loop has errors of rounding
        weight_of = json.loads(Path(weights).read_text()) if weights else {}
        ranks: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(ranks, [sample for row in self.rows for sample in row.split()])
        total = divisor = 0.0
        for sample in (sample for samples in ranks for sample in samples):
            count = int((sample.labels[1:] != -100).sum())
            if not count:
                continue
            row = PaddingFreeCollator(dummy_images="never").collate([sample])
            logits = model(**row.transformers_inputs(weighted_loss=True)).logits
            losses = torch.nn.functional.cross_entropy(logits[0, :-1], row.labels[0, 1:], reduction="none")
            weight = torch.tensor(weight_of[sample.id] if weights else [1.0] * len(sample), dtype=torch.float64)[1:]
            weight = weight * (row.labels[0, 1:] != -100) / (count if weighting == "sample" else 1)
            loss = (losses * weight).sum()
            loss.backward()
            total, divisor = total + loss.item(), divisor + weight.sum().item()
        exact = {name: value.grad / divisor for name, value in model.named_parameters() if value.grad is not None}
        distance = sum(float((self.gradients[name].double() - grad).square().sum()) for name, grad in exact.items())
        size = sum(float(grad.square().sum()) for grad in exact.values())
        counts = [int((row.labels != -100).sum()) for row in self.rows]
        return {"error": (distance / size) ** 0.5, "loss": total / divisor, "targets": counts}


def full(value: Any) -> torch.Tensor:
    """The whole tensor of a gradient that may be sharded."""
    whole: torch.Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value.detach()
    return whole


def block_error(folder: str, page: str, name: str) -> dict[str, Any]:
    """Run a block of a page in a folder with `tokens` and `model`."""
    names: dict[str, Any] = {"__name__": "__main__"}
    sys.argv = [name, "tokens", "model", "1"]  # data, model, epochs
    step = FirstStep()
    if name == "deepspeed":
        _watch_deepspeed(step)
    begin = torch.distributed.init_process_group
    torch.distributed.init_process_group = lambda *args, **kwargs: None  # the group exists
    try:
        with contextlib.chdir(folder), step.recording():
            exec(compile(code_block(page, name), name, "exec"), names)
    finally:
        torch.distributed.init_process_group = begin
    return step.compared(tiny_qwen2())


def naive_error(folder: str) -> dict[str, Any]:
    """The mean of the means of 4 micro batches, with DDP: the loop that users write."""
    step = FirstStep()
    with step.recording():
        model = torch.nn.parallel.DistributedDataParallel(tiny_qwen2())
        optimizer = torch.optim.AdamW(model.parameters())
        batches = iter(get_packed_loader(f"{folder}/tokens", epochs=1, num_workers=0))
        for _ in range(4):
            (model(**next(batches).transformers_inputs()).loss / 4).backward()
        optimizer.step()
    return step.compared(tiny_qwen2())


def loop_error(folder: str, packs: str, tokenizer: str, model: str, weighting: str, weights: str) -> dict[str, Any]:
    """A step of a loop with `batch.loss`, `step_targets` and DDP."""
    encoder, step = ChatEncoder.from_pretrained(tokenizer), FirstStep()
    data = PackedDataset(packs, encoder, check_encoder=False)
    collator = PaddingFreeCollator(loss_weighting=weighting)  # type: ignore[arg-type]
    with step.recording():
        replica = torch.nn.parallel.DistributedDataParallel(tiny_model(model, encoder, "sdpa").train())
        optimizer = torch.optim.AdamW(replica.parameters())
        rows = list(islice(DataflowLoader(MapDistributor(data), collator=collator, num_workers=0), 4))
        targets = step_targets(rows)
        for row in rows:
            row.loss(replica(**row.transformers_inputs(weighted_loss=True)).logits, targets=targets).backward()
        optimizer.step()
    return step.compared(tiny_model(model, encoder, "sdpa"), weighting, weights)


def trainer_error(
    folder: str,
    packs: str,
    tokenizer: str,
    model: str,
    weighting: str,
    weights: str = "",
    kind: str = "PackedTrainer",
) -> dict[str, Any]:
    """A step of a Trainer with 4 micro batches; also the loss that it logs."""
    encoder = ChatEncoder.from_pretrained(tokenizer)
    data = PackedDataset(packs, encoder, check_encoder=False)
    settings = QUIET | {"save_strategy": "no", "max_grad_norm": 0.0, "per_device_train_batch_size": 1}
    args = packed_training_arguments(folder, data, **settings, gradient_accumulation_steps=4, max_steps=1)
    step = FirstStep()
    with step.recording():
        trainer = (Trainer if kind == "Trainer" else PackedTrainer)(
            tiny_model(model, encoder, "sdpa").train(),
            args,
            train_dataset=data,
            data_collator=PaddingFreeCollator(loss_weighting=weighting),  # type: ignore[arg-type]
        )
        trainer.train()
    (logged,) = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    found = step.compared(tiny_model(model, encoder, "sdpa"), weighting, weights) | {"logged": logged}
    if kind == "PackedTrainer":
        trainer.args.per_device_eval_batch_size = len(data)  # rank 1 has a row without targets
        found["evaluated"] = trainer.evaluate(data)["eval_loss"]
        collator = PaddingFreeCollator(loss_weighting=weighting)  # type: ignore[arg-type]
        batch = collator.collate([sample for number in range(len(data)) for sample in data[number]])
        with torch.no_grad():
            found["expected"] = batch.loss(
                trainer.model(**batch.transformers_inputs(weighted_loss=True)).logits
            ).item()
    return found


def _watch_deepspeed(step: FirstStep) -> None:
    """Keep the gradients of a DeepSpeed engine, whose optimizer has flat parts of them."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # or it would be compiled, for a minute
    taken = deepspeed.DeepSpeedEngine.step

    def watched(engine: Any, *args: Any, **kwargs: Any) -> Any:
        if engine.is_gradient_accumulation_boundary():
            found = {n: deepspeed.utils.safe_get_full_grad(p) for n, p in engine.module.named_parameters()}
            step.keep({name: grad for name, grad in found.items() if grad is not None})
        return taken(engine, *args, **kwargs)

    deepspeed.DeepSpeedEngine.step = watched


JOBS: dict[str, Callable[..., dict[str, Any]]] = {
    "block": block_error,
    "naive": naive_error,
    "loop": loop_error,
    "trainer": trainer_error,
}


def main() -> None:
    out, jobs = sys.argv[1:]
    torch.set_num_threads(1)
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    report(out, {name: JOBS[kind](**arguments) for name, (kind, arguments) in json.loads(jobs).items()})


if __name__ == "__main__":
    main()
