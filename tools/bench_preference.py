"""Benchmark steps of direct preference optimization: packed pairs against the padded pairs of TRL's DPOTrainer.

    python tools/bench_preference.py [--json preference.json] [--pairs 32] [--rounds 3]

Both train on the same pairs (texts of log-normal length, a chat template) with a reference model and the same Qwen2
model (hidden size 128, 2 layers, random weights): TRL with batches of 8 pairs in their order, padded to the longest;
PackedTrainer with the same pairs in rows of 2,048 tokens. One step has all pairs, on one core. TRL's `padding_free` is
disabled in its release 1.16. Each run is a new process. The losses
differ a little, as the line break after the last turn is a target of TRL, and not of `pack`.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchlib import Report, arguments, bench_tokenizer, paragraphs

_ROW, _BATCH = 2048, 8


def records(count: int) -> list[dict[str, Any]]:
    """Pairs of answers of different lengths to the same prompt."""
    import numpy as np

    rng = np.random.default_rng(0)
    words = " ".join(paragraphs()[0]).split()

    def text(mean: float) -> str:
        size = int(np.clip(rng.lognormal(np.log(mean), 0.8), 3, 600))
        return " ".join(rng.choice(words, size))

    return [
        {
            "id": str(index),
            "prompt": [{"role": "user", "content": text(60)}],
            "chosen": [{"role": "assistant", "content": text(80)}],
            "rejected": [{"role": "assistant", "content": text(80)}],
        }
        for index in range(count)
    ]


def run(kind: str, work: Path, pairs: int) -> dict[str, float]:
    """CPU seconds of a step, its loss, and the share of padding in the rows of the model."""
    import datasets
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM
    from trl import DPOConfig, DPOTrainer

    from energon_packed import ChatEncoder, PackedDataset, PackedTrainer, dpo_loss, packed_training_arguments

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(work / "tokenizer")
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen2Config(vocab_size=len(tokenizer), num_key_value_heads=2, **sizes)
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    torch.manual_seed(1)
    reference = Qwen2ForCausalLM(config)
    common: dict[str, Any] = {
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "logging_steps": 1,
        "max_steps": 1,
    }
    common |= {"save_strategy": "no", "learning_rate": 0.0, "output_dir": str(work / kind)}
    if kind == "TRL":
        own = [{name: record[name] for name in ("prompt", "chosen", "rejected")} for record in records(pairs)]
        args = DPOConfig(
            **common,
            per_device_train_batch_size=_BATCH,
            gradient_accumulation_steps=pairs // _BATCH,
            gradient_checkpointing=False,
            bf16=False,
            max_length=None,
        )
        data = datasets.Dataset.from_list(own)
        trainer: Any = DPOTrainer(model, reference, args, train_dataset=data, processing_class=tokenizer)
    else:
        data = PackedDataset(work / "packs", ChatEncoder.from_pretrained(work / "tokenizer"))
        output = common.pop("output_dir")
        args = packed_training_arguments(output, data, **common, gradient_accumulation_steps=len(data))
        trainer = PackedTrainer(model, args, train_dataset=data, loss=dpo_loss, ref_model=reference)
    tokens = 0

    def count(module: Any, inputs: Any, kwargs: Any) -> None:
        nonlocal tokens
        tokens += kwargs["input_ids"].numel()

    model.register_forward_pre_hook(count, with_kwargs=True)
    trainer.get_train_dataloader()
    start = time.process_time()
    loss = trainer.train().training_loss
    return {"seconds": time.process_time() - start, "loss": loss, "tokens": tokens}


def child(kind: str, work: Path, pairs: int) -> dict[str, float]:
    """Run in a new process."""
    command = [sys.executable, __file__, "--run", kind, "--work", str(work), "--pairs", str(pairs)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def bench(report: Report, work: Path, pairs: int, rounds: int) -> None:
    """Compare both trainers."""
    from energon_packed import pack

    work.mkdir(parents=True, exist_ok=True)
    tokenizer = bench_tokenizer(work, vision=False)
    if tokenizer != work / "tokenizer":
        (work / "tokenizer").unlink(missing_ok=True)
        (work / "tokenizer").symlink_to(tokenizer.resolve())
    file = work / "pairs.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records(pairs)))
    packed = pack(file, output_dir=work / "packs", tokenizer=str(tokenizer), seq_len=_ROW, resume=False)
    results = [[child(kind, work, pairs) for kind in ("TRL", "PackedTrainer")] for _ in range(rounds)]
    theirs, ours = (statistics.median(result[i]["seconds"] for result in results) for i in range(2))
    report.add("DPO: pairs/s relative to TRL", theirs / ours, "x", ">= 1.2", seconds=ours)
    first = results[0]
    report.add("DPO: tokens of the model relative to TRL, padding included", first[1]["tokens"] / first[0]["tokens"])
    report.add("DPO: difference of the losses", abs(first[1]["loss"] - first[0]["loss"]), "", "<= 0.01")
    report.add("DPO: utilization of rows of pairs", packed.manifest.utilization)


def main() -> None:
    """Run the benchmark and print the results."""
    parser = arguments(__doc__, "preference")
    parser.add_argument("--pairs", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        print(json.dumps(run(options.run, options.work, options.pairs)))
        return
    report = Report("preference", options.json)
    bench(report, options.work, options.pairs, options.rounds)
    report.finish()


if __name__ == "__main__":
    main()
