"""The contract of the comparison, in the process of a peer: settings in, one JSON line for each trained row out.

    python tools/compare/peer_NAME.py SPEC.json

`bench_compare.py` writes the settings (`Spec`) and reads the rows. A peer has a function `main(spec)` and ends with
`run(main)`. Trainers that are derived from Trainer of Transformers call `watch_trainer(spec)`; other loops call
`Rows(spec).step(...)` for each micro batch.
"""

import dataclasses
import hashlib
import inspect
import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

IGNORED = -100
START = "[record {:06d}]"  # in the first question of record n
END = "[end {:06d}]"  # at the end of its last answer
_CHECKED = 6  # rows whose samples are compared with the samples alone
_MARK = re.compile(r"\[record (\d{6})\]")


@dataclasses.dataclass
class Spec:
    """Settings of one process of a peer.

    Attributes:
        phase: `prepare`: the offline command of the peer, if it has one; `start`: training until the first step;
            `train`: training.
        variant: of a peer with several rows in the table.
        records: JSONL of conversations in `messages`, with paths in `images`.
        model: folder with model, tokenizer and, with images, the processor.
        folder: for prepared data, caches and checkpoints; the same in all phases.
        rows: JSONL file for the rows of this process.
        seq_len: tokens of a row.
        images: the records have images.
        save_every: write a checkpoint after this number of steps, again and again; 0: never.
        resume_from: continue from the checkpoint of this step; 0: start.
        max_pixels, min_pixels: of an image, as in the processor.
    """

    phase: str
    variant: str
    records: str
    model: str
    folder: str
    rows: str
    seq_len: int
    images: bool
    save_every: int = 0
    resume_from: int = 0
    max_pixels: int = 200_704
    min_pixels: int = 3_136

    @property
    def checkpoints(self) -> str:
        """Folder of the checkpoints."""
        return str(Path(self.folder, "checkpoints"))

    @property
    def checkpoint(self) -> str | None:
        """Checkpoint of Transformers to continue from."""
        return str(Path(self.checkpoints, f"checkpoint-{self.resume_from}")) if self.resume_from else None

    def arguments(self) -> dict[str, Any]:
        """Arguments of TrainingArguments, the same for all peers: one row of a step, AdamW, constant learning rate."""
        saves = (
            {"save_strategy": "steps", "save_steps": self.save_every} if self.save_every else {"save_strategy": "no"}
        )
        return saves | {
            "output_dir": self.checkpoints,
            "num_train_epochs": 1,
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 1,
            "learning_rate": 1e-3,
            "lr_scheduler_type": "constant",
            "logging_strategy": "no",
            "report_to": "none",
            "use_cpu": True,
            "bf16": False,
            "fp16": False,
            "gradient_checkpointing": False,
            "dataloader_num_workers": 0,
            "disable_tqdm": True,
        }

    def load_model(self) -> Any:
        """Return the tiny model in float32, in training mode."""
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

        kind: Any = AutoModelForImageTextToText if self.images else AutoModelForCausalLM
        return kind.from_pretrained(self.model, dtype=torch.float32, attn_implementation="sdpa").train()


def run(main: Callable[[Spec], None], *packages: str) -> None:
    """Run `main` with the settings of this process, and print the versions of `packages` as JSON."""
    spec = Spec(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    torch.set_num_threads(1)
    torch.manual_seed(7)
    main(spec)
    print(json.dumps({name: version(name).partition("+")[0] for name in packages}))


def peak_memory(*, reset: bool = False) -> int:
    """Return the peak resident memory in bytes; `reset` starts it at the present memory (Linux, proc(5))."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) * 1024


class Rows:
    """Trains on micro batches, and writes a line about each.

    Args:
        spec: settings of the process.
    """

    def __init__(self, spec: Spec) -> None:
        from transformers import AutoTokenizer

        self._spec = spec
        self._tokenizer = AutoTokenizer.from_pretrained(spec.model)
        self._start = self._tokenizer.convert_tokens_to_ids("<|im_start|>")
        self._system = self._tokenizer("<|im_start|>system", add_special_tokens=False).input_ids
        self._pad = self._tokenizer.pad_token_id
        self._lines = 0
        self._memory = 0  # before the first step
        self._single: Any = None
        self._logits: Any = None

    def step(self, model: Any, inputs: Mapping[str, Any], train: Callable[[], Any]) -> Any:
        """Run `train()`, the forward and backward pass of a micro batch, and write its line (see `_line`).

        Args:
            model: the model that `train` calls.
            inputs: `input_ids` and `labels` (1, T) without a shift, with images `pixel_values` and `image_grid_thw`.
            train: returns the loss.
        """
        if self._spec.phase == "start":
            raise SystemExit(0)
        kept = {name: value.clone() for name, value in inputs.items() if isinstance(value, torch.Tensor)}
        is_checked = self._lines < _CHECKED
        before = peak_memory(reset=True)
        started = time.perf_counter()
        self._memory = self._memory or before
        if is_checked:
            self._load_single(model)
            calls: list[tuple[dict[str, Any], Any]] = []
            hook = model.register_forward_hook(
                lambda _model, _args, options, output: calls.append((options, output)), with_kwargs=True
            )
            loss = train()
            seconds = time.perf_counter() - started
            hook.remove()
            # Earlier calls check the model.
            self._logits = self._logits_of(model, kept["input_ids"].numel(), *calls[-1])
        else:
            loss = train()
            seconds = time.perf_counter() - started
        line = {"loss": float(loss), "memory": peak_memory() - self._memory, "started": started, "seconds": seconds}
        self._write(self._line(kept, is_checked) | line)
        self._lines += 1
        return loss

    def _logits_of(self, model: Any, size: int, options: dict[str, Any], output: Any) -> torch.Tensor:
        """Return the logits (1, size, vocabulary) of a call; some trainers compute only those of the targets."""
        logits: Any = getattr(output, "logits", None)
        if logits is None or logits.shape[1] != size:
            left_out = ("labels", "num_items_in_batch", "logits_to_keep")
            options = {name: value for name, value in options.items() if name not in left_out}
            with torch.no_grad():  # without the hooks and the replaced `forward` of a trainer
                logits = type(model).forward(model, **options).logits
        return torch.as_tensor(logits.detach())

    def finish(self, model: Any) -> None:
        """Write the digest of the weights after the last step."""
        digest = hashlib.sha256()
        for name, weight in sorted(model.state_dict().items()):
            digest.update(name.encode() + weight.detach().float().contiguous().numpy().tobytes())
        self._write({"weights": digest.hexdigest()})

    def _write(self, line: dict[str, Any]) -> None:
        with Path(self._spec.rows).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line | {"written": time.perf_counter()}))
            stream.write("\n")

    def _line(self, inputs: dict[str, Any], is_checked: bool) -> dict[str, Any]:
        """Describe a row: its size with and without padding, and for each sample [record, is whole, targets]."""
        ids, labels = inputs["input_ids"].reshape(-1), inputs["labels"].reshape(-1)
        tokens = int((ids != self._pad).sum())
        samples, apart = [], []
        for start, stop in self._bounds(ids):
            text = self._tokenizer.decode(ids[start:stop])
            found = _MARK.search(text)
            number = int(found[1]) if found else -1
            targets = int((labels[start + 1 : stop] != IGNORED).sum())
            samples.append([number, END.format(number) in text, targets])
            if is_checked and targets:
                apart.append([number, *self._losses(inputs, start, stop)])
        return {"samples": samples, "apart": apart, "tokens": tokens, "size": ids.numel()}

    def _bounds(self, ids: torch.Tensor) -> list[tuple[int, int]]:
        """Bounds of the samples: each starts with its only system message."""
        values = ids.tolist()
        width = len(self._system)
        starts = [
            index
            for index, value in enumerate(values)
            if value == self._start and values[index : index + width] == self._system
        ]
        end = len(values)
        while end and values[end - 1] == self._pad:
            end -= 1
        return list(pairwise([*starts, end]))

    def _losses(self, inputs: dict[str, Any], start: int, stop: int) -> tuple[float, float]:
        """Mean loss over the targets of a sample: (by itself, in its row)."""
        alone: dict[str, Any] = {"input_ids": inputs["input_ids"].reshape(1, -1)[:, start:stop]}
        if "image_grid_thw" in inputs:
            image = self._single.config.vision_start_token_id
            ids = inputs["input_ids"].reshape(-1)
            first, count = int((ids[:start] == image).sum()), int((ids[start:stop] == image).sum())
            grids = inputs["image_grid_thw"]
            patches = [0, *grids.prod(-1).cumsum(0).tolist()]
            alone["mm_token_type_ids"] = (alone["input_ids"] == self._single.config.image_token_id).int()
            if count:
                alone["image_grid_thw"] = grids[first : first + count]
                alone["pixel_values"] = inputs["pixel_values"][patches[first] : patches[first + count]]
        names = inspect.signature(self._single.forward).parameters
        with torch.no_grad():
            single = self._single(**{name: value for name, value in alone.items() if name in names}).logits[0]
        targets = inputs["labels"].reshape(-1)[start + 1 : stop]
        row = self._logits[0, start : stop - 1]
        losses = [
            torch.nn.functional.cross_entropy(logits.double(), targets, ignore_index=IGNORED).item()
            for logits in (single[:-1], row)
        ]
        return losses[0], losses[1]

    def _load_single(self, model: Any) -> None:
        """Load a model that no trainer has changed, with the present weights."""
        if self._single is None:
            self._single = self._spec.load_model()
        self._single.load_state_dict({name: value.detach().clone() for name, value in model.state_dict().items()})


def watch_trainer(spec: Spec) -> None:
    """Write a line about each micro batch of any Trainer of Transformers."""
    from transformers import Trainer

    rows = Rows(spec)
    step, train = Trainer.training_step, Trainer.train

    def training_step(self: Any, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        return rows.step(model, inputs, lambda: step(self, model, inputs, *args, **options))

    def train_and_finish(self: Any, *args: Any, **options: Any) -> Any:
        result = train(self, *args, **options)
        rows.finish(self.model)
        return result

    Trainer.training_step, Trainer.train = training_step, train_and_finish  # type: ignore[method-assign]


def as_options(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as command-line options `--name value`."""
    return [
        part
        for name, value in settings.items()
        for part in (f"--{name}", str(value).lower() if value in (True, False) else str(value))
    ]


def without_torchvision_operators() -> None:
    """Declare the operators of torchvision, which PyPI has only for CUDA; image processors do not call them."""
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def cache_folder(spec: Spec) -> None:
    """Put the caches of `datasets` into the folder of the peer."""
    os.environ["HF_DATASETS_CACHE"] = str(Path(spec.folder, "cache"))
