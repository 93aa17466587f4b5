"""Two ranks train a tiny Qwen2-Audio, sharded, on rows with and without audio: run in test_audio_rows.py.

ARGUMENTS: OUT TOKENIZER

The row of rank r in step s has audio if bit r of s is set, so that every combination comes.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard

from energon_packed import ChatEncoder, EncodedSample, PaddingFreeCollator, normalize
from tests.audio import signal, tiny_model, write
from tests.integrations.launched import report

STEPS = 4


def row(encoder: ChatEncoder, folder: Path, step: int, rank: int) -> list[EncodedSample]:
    """Two samples, the second of them with audio or not."""
    audio = [str(write(folder / f"{step}-{rank}", "wav16", signal(16_000, 16_000, step), 16_000))]
    files = [[], audio if step >> rank & 1 else []]
    return [
        encoder.encode(normalize({"messages": [
            {"role": "user", "content": "<audio>" * len(each) + "What?"},
            {"role": "assistant", "content": "hello world" if step % 2 else "said in the audio"},
        ], "audios": each}))
        for each in files
    ]  # fmt: skip


def losses(model: Any, rows: list[list[list[EncodedSample]]], mode: Any) -> list[list[float]]:
    """Losses of the rows of every step of gradient descent on their mean."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.05), []
    for of_step in rows:
        batches = [PaddingFreeCollator(dummy_images=mode).collate(each) for each in of_step]
        parts = [batch.loss(model(**batch.transformers_inputs()).logits) for batch in batches]
        optimizer.zero_grad()
        torch.stack(parts).mean().backward()
        optimizer.step()
        found.append([part.item() for part in parts])
    return found


def main() -> None:
    out, tokenizer = sys.argv[1:3]
    torch.set_num_threads(1)
    rank = torch.distributed.get_rank()
    encoder = ChatEncoder.from_pretrained(tokenizer)
    token = encoder.rules.audio_token_id
    assert token is not None
    with tempfile.TemporaryDirectory() as folder:
        rows = [[row(encoder, Path(folder), step, each) for each in range(2)] for step in range(STEPS)]
    plain, sharded = (tiny_model(encoder.parts.vocabulary, token) for _ in range(2))
    for module in (*sharded.model.audio_tower.layers, *sharded.model.language_model.layers, sharded):
        fully_shard(module)
    expected = [each[rank] for each in losses(plain, rows, "never")]
    found = [each[0] for each in losses(sharded, [[each[rank]] for each in rows], "auto")]
    report(out, {"expected": expected, "found": found})
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
