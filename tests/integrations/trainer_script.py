"""What a user of transformers.Trainer writes: run by `torchrun` in test_trainer.py.

python trainer_script.py DATA TOKENIZER OUT
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from energon_packed import ChatEncoder, PackedDataset, PaddingFreeCollator
from tests.dataflow.models import tiny_model


class Recording(PaddingFreeCollator):
    """Remembers the samples of every batch."""

    seen: list[list[str]]

    def __call__(self, features: Any) -> Any:
        self.seen.append([sample.id for pack in features for sample in pack])
        return super().__call__(features)


def main() -> None:
    data, tokenizer, out = sys.argv[1:]
    torch.set_num_threads(1)
    encoder = ChatEncoder.from_pretrained(tokenizer)
    collator = Recording()
    collator.seen = []
    arguments = TrainingArguments(
        output_dir=out,
        num_train_epochs=2,
        per_device_train_batch_size=2,
        learning_rate=5e-3,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=tiny_model("qwen2_5_vl", encoder, "sdpa").train(),
        args=arguments,
        train_dataset=PackedDataset(data, encoder),
        data_collator=collator,
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    rank = int(os.environ.get("RANK", "0"))
    result = {"steps": trainer.state.global_step, "losses": losses, "seen": collator.seen}
    (Path(out) / f"rank{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
