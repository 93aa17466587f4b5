"""Two ranks train tiny vision models on rows with and without images: run in test_dummy_images.py.

ARGUMENTS: OUT TOKENIZER STEPS

The row of rank r in step s has an image where bit r of s is set, so that every combination comes. Rows of `media_rows`
have images and videos, in every combination.
"""

import io
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.distributed.fsdp import fully_shard

from energon_packed import ChatEncoder, EncodedSample, PaddingFreeCollator, normalize
from tests.integrations.launched import report
from tests.loading.clips import Clips
from tests.loading.models import tiny_model

MODELS = {"qwen2_5_vl": 14, "qwen3_vl": 16}  # and the pixels of a patch side


def encoder_of(model: str, tokenizer: str | Path) -> ChatEncoder:
    return ChatEncoder.from_pretrained(tokenizer, vision_family=model, patch_size=MODELS[model], min_pixels=3136)


def trained(name: str, encoder: ChatEncoder) -> Any:
    """The model as both ranks, and the run without ranks, begin."""
    model = tiny_model(name, encoder, "sdpa").train()
    model.gradient_checkpointing_enable()
    return model


def samples(encoder: ChatEncoder, step: int, rank: int) -> list[EncodedSample]:
    """The row of a rank: two samples, the second of them with an image or not."""
    pictured = step >> rank & 1
    made = []
    for number in range(2):
        picture = bool(pictured and number)
        turns = [
            {"role": "user", "content": ("<image>" if picture else "") + f"What is {step}?"},
            {"role": "assistant", "content": f"It is {step} and {rank + number}."},
        ]
        images = [_noise(step, rank)] if picture else []
        made.append(encoder.encode(normalize({"messages": turns, "images": images})))
    return made


def _noise(step: int, rank: int) -> bytes:
    pixels = np.random.default_rng([step, rank]).integers(0, 256, (64, 96 + 32 * (step % 2), 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def media_rows(name: str, model: Any) -> list[tuple[list[EncodedSample], list[EncodedSample]]]:
    """Rows of both ranks in each step: text, an image, a video, or both, in all pairs of different rows."""
    clips = Clips(name, model)
    kinds = [("text", kind) for kind in ("text", "image", "video", "image video")]
    return [(clips.samples(left), clips.samples(right)) for left, right in combinations(kinds, 2)]


def losses(wrapped: Any, collator: PaddingFreeCollator, rows: list[list[EncodedSample]]) -> list[float]:
    """The loss of this rank in every step of stochastic gradient descent."""
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05)
    found = []
    for row in rows:
        loss = wrapped(**collator.collate(row).transformers_inputs()).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def _sharded(name: str, encoder: ChatEncoder) -> Any:
    sharded = trained(name, encoder)
    for module in (*sharded.model.visual.blocks, *sharded.model.language_model.layers, sharded):
        fully_shard(module)
    return sharded


def main() -> None:
    out, tokenizer, steps = sys.argv[1:]
    torch.set_num_threads(1)
    rank = torch.distributed.get_rank()
    found: dict[str, Any] = {}
    for name in MODELS:
        encoder = encoder_of(name, tokenizer)
        rows = [samples(encoder, step, rank) for step in range(int(steps))]
        plain = trained(name, encoder)
        clips = [row[rank] for row in media_rows(name, plain)]
        model = torch.nn.parallel.DistributedDataParallel(plain)
        found[name] = losses(model, PaddingFreeCollator(), rows)
        found[f"{name} sharded"] = losses(_sharded(name, encoder), PaddingFreeCollator(), rows[:4])
        collator = PaddingFreeCollator(dummy_images=encoder.dummy)
        found[f"{name} videos"] = losses(_sharded(name, encoder), collator, clips)
    try:  # no rank has an image in step 0
        losses(model, PaddingFreeCollator(dummy_images="never"), rows[:2])
    except RuntimeError as error:
        found["without dummy images"] = str(error)
    report(out, found)
    torch.distributed.destroy_process_group()
