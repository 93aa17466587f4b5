"""In the process of a trainer: the settings of a run, and a record of each micro batch that it trained on.

A script `tests/trainers/NAME/run.py` has a function `main(spec)`, and ends with

    if __name__ == "__main__":
        main(Spec.read(sys.argv[1]))

It trains `spec.load_model()` on `spec.packs` and calls, on every rank,

    recorder = Recorder(spec)
    recorder.watch(model)                       # gradients at each step of a torch optimizer
    recorder.record(batch, loss_sum)            # each micro batch, before the backward pass
    recorder.finish(model.state_dict())         # after the last step

`RecordRows(spec, trainer)` does this for a Trainer of Transformers and for classes derived from it.
"""

import dataclasses
import faulthandler
import functools
import hashlib
import inspect
import json
import os
import signal
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from tests import optimizer_files  # noqa: F401

IGNORED = -100


@dataclasses.dataclass
class Spec:
    """What one run of a trainer does.

    Attributes:
        kind: which loader or trainer class, if a script has several.
        out: folder of the records of this run.
        packs: packed dataset, with an odd number of packs.
        samples: JSON file with the samples by id: [input_ids, labels].
        model, tokenizer: folders of Transformers.
        checkpoints: folder for checkpoints, written after every optimizer step.
        resume: continue from the last checkpoint in `checkpoints`.
        epochs: passes over the data.
        accumulation: micro batches of an optimizer step, each one pack.
        learning_rate: constant; 0 keeps the weights, so that every row can be compared with the reference.
        dropout: of the attention.
        kill_after: the process of rank `kill_rank` receives SIGKILL after this micro batch, from 1; 0: never.
        gradients: whether to record the gradient of each optimizer step.
    """

    kind: str
    out: str
    packs: str
    samples: str
    model: str
    tokenizer: str
    checkpoints: str
    resume: bool = False
    epochs: int = 2
    accumulation: int = 2
    learning_rate: float = 0.0
    dropout: float = 0.0
    kill_after: int = 0
    kill_rank: int = 0
    gradients: bool = False

    @staticmethod
    def read(path: str) -> "Spec":
        """Read the settings of this process; it ends after 10 minutes, so that no rank waits for a dead rank."""
        faulthandler.dump_traceback_later(600, exit=True)
        torch.set_num_threads(1)
        torch.manual_seed(7)
        return Spec(**json.loads(Path(path).read_text()))

    def write(self, path: Path) -> Path:
        """Write the settings to a file for `read`."""
        path.write_text(json.dumps(dataclasses.asdict(self)))
        return path

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return int(os.environ["RANK"])

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return int(os.environ["WORLD_SIZE"])

    def steps(self, rows: int) -> int:
        """Return the optimizer steps of all epochs, each of `rows` micro batches on each rank."""
        return self.epochs * -(-rows // self.accumulation)

    def load_model(self) -> Any:
        """Return the tiny model, the same on every rank, in training mode and with `dropout`."""
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.model, attention_dropout=self.dropout).train()


class Recorder:
    """Writes one JSON line for each micro batch of this rank: ids of its samples, sum of the loss, and targets.

    Args:
        spec: settings of the run.
    """

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        samples = json.loads(Path(spec.samples).read_text())
        self._id_of = {tuple(tokens): name for name, (tokens, _) in samples.items()}
        self._path = Path(spec.out, f"rank{spec.rank}.jsonl")
        self._lines = 0
        self._gradients: list[tuple[int, dict[str, torch.Tensor]]] = []

    def __len__(self) -> int:
        """Return the number of micro batches until now."""
        return self._lines

    def record(self, inputs: Mapping[str, Any], loss_sum: Any, *, targets: int | None = None) -> None:
        """Record a micro batch before its backward pass.

        Args:
            inputs: `input_ids` (1, T), `position_ids` (1, T) or (4, 1, T), and `labels` (1, T) without a shift.
            loss_sum: sum of the loss over the targets of the row, as the trainer computes it.
            targets: number of targets, if `inputs` has no such labels.
        """
        if targets is None:
            targets = int((inputs["labels"][..., 1:] != IGNORED).sum())
        ids = self._ids(inputs["input_ids"], inputs["position_ids"]) if targets else []
        with self._path.open("a") as file:
            file.write(json.dumps({"ids": ids, "loss": float(loss_sum), "targets": targets}) + "\n")
        self._lines += 1
        if (self._lines, self._spec.rank) == (self._spec.kill_after, self._spec.kill_rank):
            os.kill(os.getpid(), signal.SIGKILL)

    def _ids(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> list[str]:
        """Ids of the samples of a row, by their tokens; tokens that are no sample are shown instead of an id."""
        tokens = input_ids.reshape(-1).tolist()
        positions = position_ids.reshape(-1, len(tokens))[0].tolist()
        bounds = [index for index, position in enumerate(positions) if position == 0] + [len(tokens)]
        parts = [tuple(tokens[start:end]) for start, end in pairwise(bounds)]
        return [self._id_of.get(part, f"not a sample: {part}") for part in parts if any(part)]

    def watch(self, model: torch.nn.Module) -> None:
        """Record the gradients of a model after each step of any torch optimizer."""
        if self._spec.gradients:
            named = dict(model.named_parameters())
            self._hook = register_optimizer_step_post_hook(
                lambda *_: self.keep({name: value.grad for name, value in named.items()})
            )

    def keep(self, gradients: Mapping[str, torch.Tensor | None]) -> None:
        """Record the gradients of a step, by the names of the parameters; the same on all ranks."""
        whole = {_short(name): _whole(value) for name, value in gradients.items() if value is not None}
        if self._spec.gradients and self._spec.rank == 0:
            if self._gradients and self._gradients[-1][0] == self._lines:  # another optimizer of the same step
                self._gradients.pop()
            self._gradients.append((self._lines, whole))

    def finish(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Write the digest of the final weights, and the gradients; every rank calls it after the last step."""
        digest = hashlib.sha256()
        for name, weight in sorted((_short(name), weight) for name, weight in weights.items()):
            digest.update(name.encode() + _whole(weight).float().contiguous().numpy().tobytes())
        if self._gradients:
            torch.save(self._gradients, Path(self._spec.out, "gradients.pt"))
        Path(self._spec.out, f"rank{self._spec.rank}.weights").write_text(digest.hexdigest())


def RecordRows(spec: Spec, trainer: Any) -> Recorder:  # noqa: N802
    """Record all micro batches and gradients of a Trainer of Transformers.

    Args:
        spec: settings of the run.
        trainer: a Trainer, or a class derived from Trainer before its objects are created.

    Returns:
        the recorder; call `finish(trainer.model.state_dict())` after `train()`.
    """
    recorder = Recorder(spec)
    compute = trainer.compute_loss
    order = inspect.signature(compute)

    @functools.wraps(compute)
    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        given = order.bind(*args, **kwargs).arguments
        own = given.get("self", trainer)
        if recorder._lines == 0:
            recorder.watch(own.model)
        inputs = dict(given["inputs"])  # Trainer may remove the labels
        result = compute(*args, **kwargs)
        if own.model.training:
            loss = float((result[0] if isinstance(result, tuple) else result).detach())
            recorder.record(inputs, _loss_sum(own, loss, inputs, given.get("num_items_in_batch")))
        return result

    trainer.compute_loss = compute_loss
    return recorder


def _loss_sum(trainer: Any, loss: float, inputs: Mapping[str, Any], targets: Any) -> float:
    """The sum over the targets of a row, from the loss of a Trainer, which is a share of the mean of the step."""
    if targets is None:
        return loss * int((inputs["labels"][..., 1:] != IGNORED).sum())
    ranks = trainer.accelerator.num_processes if trainer.args.average_tokens_across_devices else 1
    return loss * float(targets) / ranks


def _short(name: str) -> str:
    """Name of a parameter without the wrappers of a trainer."""
    for wrapper in ("_forward_module.", "module.", "_orig_mod.", "_fsdp_wrapped_module."):
        name = name.replace(wrapper, "")
    return name


def _whole(value: torch.Tensor) -> torch.Tensor:
    """The whole tensor, on the CPU, of a value that may be sharded."""
    whole: torch.Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return whole.detach().clone().cpu()
