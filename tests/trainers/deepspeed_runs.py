"""What users of DeepSpeed write, ZeRO-2 on the CPU: run by torchrun in test_deepspeed.py.

python -m tests.trainers.deepspeed_runs OUT PACKS
"""

import os
import sys
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch

from energon_packed import GatheredLoader, PackedDataset, PaddingFreeCollator, get_packed_loader
from tests.integrations.launched import report, tiny_qwen2

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 2},
    "zero_force_ds_cpu_optimizer": False,
    "optimizer": {"type": "AdamW", "params": {"lr": 5e-3, "torch_adam": True}},
}


def begin(**options: Any) -> Any:
    """The engine, and the loader that DeepSpeed makes of `training_data`."""
    model = tiny_qwen2()
    engine, _, loader, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=CONFIG, **options
    )
    return engine, loader


def train(engine: Any, loader: Any, steps: int) -> list[list[float]]:
    """Tokens and loss of each step, epoch after epoch."""
    seen: list[list[float]] = []
    while len(seen) < steps:
        for batch in loader:
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            seen.append([batch["input_ids"].sum().item(), loss.item()])
            if len(seen) == steps:
                break
    return seen


def main() -> None:
    out, packs = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    make = lambda: GatheredLoader(get_packed_loader(packs, epochs=1, num_workers=0))  # noqa: E731
    epoch = len(make())
    complete = train(begin()[0], make(), 2 * epoch)

    engine, loader = begin()[0], make()
    train(engine, loader, 2)
    engine.save_checkpoint(str(out / "checkpoint"), client_state={"loader": loader.state_dict()})
    engine, loader = begin()[0], make()
    _, client_state = engine.load_checkpoint(str(out / "checkpoint"))
    loader.load_state_dict(client_state["loader"])
    rest = train(engine, loader, 2 * epoch - 2)

    engine, loader = begin(training_data=PackedDataset(packs), collate_fn=PaddingFreeCollator())
    mapped = [batch["input_ids"].sum().item() for batch in loader]
    report(str(out), {"complete": complete, "rest": rest, "map": mapped})


if __name__ == "__main__":
    main()
