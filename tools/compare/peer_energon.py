"""Megatron-Energon: WebDataset shards, and packing of a buffer in the loader. The task encoder is code of its user."""

import io
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from contract import IGNORED, Rows, Spec, run
from megatron.energon import (
    Cooker,
    DefaultTaskEncoder,
    Sample,
    SkipSample,
    WorkerConfig,
    basic_sample_keys,
    get_savable_loader,
    get_train_dataset,
    stateless,
)
from transformers import AutoImageProcessor, AutoTokenizer

_BUFFER = 1000  # samples that are packed at a time
_SHARD = 1000  # samples


def prepare(spec: Spec) -> None:
    """Write the shards, and run `energon prepare`."""
    from webdataset import ShardWriter

    shards = Path(spec.folder, "shards")
    shards.mkdir()
    with (
        Path(spec.records).open(encoding="utf-8") as lines,
        ShardWriter(str(shards / "shard-%04d.tar"), maxcount=_SHARD, verbose=0) as writer,
    ):
        for number, line in enumerate(lines):
            record = json.loads(line)
            images = {f"{index}.jpg": Path(path).read_bytes() for index, path in enumerate(record.get("images", []))}
            writer.write({"__key__": f"{number:08d}", "json": record, **images})
    energon = Path(sys.executable).with_name("energon")
    options = ["--non-interactive", "--num-workers", "2", "--split-ratio", "1,0,0", "--sample-type", "CrudeWebdataset"]
    subprocess.run([energon, "prepare", *options, "--no-progress", shards], check=True)


@stateless
def cook(sample: dict[str, Any]) -> "Crude":
    """Collect the parts of a sample."""
    record = json.loads(sample["json"])
    count = len(record.get("images", []))
    return Crude(
        **basic_sample_keys(sample),
        messages=record["messages"],
        images=[sample[f"{index}.jpg"] for index in range(count)],
    )


@dataclass
class Crude(Sample):
    """A conversation and the bytes of its images."""

    messages: list[dict[str, str]]
    images: list[bytes]


@dataclass
class Encoded(Sample):
    """Tokens and labels int64 (T,), pixels (patches, width) and grids (images, 3) of one sample or of a row."""

    ids: torch.Tensor
    labels: torch.Tensor
    lengths: list[int]
    pixels: torch.Tensor | None
    grids: torch.Tensor | None


class Packing(DefaultTaskEncoder):
    """Tokenizes conversations, and packs a buffer of them by first fit decreasing.

    Args:
        spec: settings of the process.
    """

    decoder = None
    cookers = (Cooker(cook),)

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self._seq_len = spec.seq_len
        self._tokenizer = AutoTokenizer.from_pretrained(spec.model)
        self._images = AutoImageProcessor.from_pretrained(spec.model) if spec.images else None
        self._pad = self._tokenizer.convert_tokens_to_ids("<|image_pad|>")

    @stateless
    def encode_sample(self, sample: Crude) -> Encoded:
        """Tokenize a conversation; one that is longer than a row is skipped."""
        messages = [
            {"role": turn["role"], "content": turn["content"].replace("<image>", self._placeholder)}
            for turn in sample.messages
        ]
        pixels = grids = None
        text = self._tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, mask = torch.tensor(text["input_ids"]), torch.tensor(text["assistant_masks"])
        if sample.images:
            from PIL import Image

            found = self._images(
                [Image.open(io.BytesIO(data)).convert("RGB") for data in sample.images], return_tensors="pt"
            )
            pixels, grids = found["pixel_values"], found["image_grid_thw"]
            repeats = torch.ones_like(ids)
            repeats[ids == self._pad] = grids.prod(-1) // self._images.merge_size**2
            ids, mask = ids.repeat_interleave(repeats), mask.repeat_interleave(repeats)
        if len(ids) > self._seq_len:
            raise SkipSample
        labels = torch.where(mask.bool(), ids, IGNORED)
        return Encoded.derive_from(sample, ids=ids, labels=labels, lengths=[len(ids)], pixels=pixels, grids=grids)

    _placeholder = "<|vision_start|><|image_pad|><|vision_end|>"

    def select_samples_to_pack(self, samples: list[Encoded]) -> list[list[Encoded]]:
        """Pack a buffer by first fit decreasing."""
        rows: list[list[Encoded]] = []
        free: list[int] = []
        for sample in sorted(samples, key=lambda sample: -len(sample.ids)):
            length = len(sample.ids)
            place = next((index for index, space in enumerate(free) if space >= length), len(rows))
            if place == len(rows):
                rows.append([])
                free.append(self._seq_len)
            rows[place].append(sample)
            free[place] -= length
        return rows

    @stateless
    def pack_selected_samples(self, samples: list[Encoded]) -> Encoded:
        """Join the samples of a row; their first tokens are not targets."""
        images = [sample for sample in samples if sample.grids is not None]
        return Encoded.derive_from(
            samples[0],
            ids=torch.cat([sample.ids for sample in samples]),
            labels=torch.cat([sample.labels for sample in samples]),
            lengths=[len(sample.ids) for sample in samples],
            pixels=torch.cat([sample.pixels for sample in images]) if images else None,
            grids=torch.cat([sample.grids for sample in images]) if images else None,
        )

    def batch(self, samples: list[Encoded]) -> Encoded:
        """Use each row as its own batch."""
        return samples[0]


def inputs_of(row: Encoded, model: Any) -> dict[str, torch.Tensor]:
    """Inputs of the model. Positions restart in each sample; with images they are (4, 1, T): text, then M-RoPE."""
    inputs = {"input_ids": row.ids[None], "labels": row.labels[None]}
    text = torch.cat([torch.arange(length) for length in row.lengths])[None]
    if not hasattr(model.config, "vision_config"):
        return inputs | {"position_ids": text}
    types = (row.ids == model.config.image_token_id).int()
    parts, image = [], 0
    for ids, kinds in zip(row.ids.split(row.lengths), types.split(row.lengths), strict=True):
        count = int((ids == model.config.vision_start_token_id).sum())
        grids = row.grids[image : image + count] if count else None
        image += count
        parts.append(model.model.get_rope_index(ids[None], mm_token_type_ids=kinds[None], image_grid_thw=grids)[0])
    if row.grids is not None:
        inputs |= {"pixel_values": row.pixels, "image_grid_thw": row.grids}
    return inputs | {"position_ids": torch.cat([text[None], torch.cat(parts, dim=-1)])}


def main(spec: Spec) -> None:
    """Write the shards, or train on them."""
    if spec.phase == "prepare":
        prepare(spec)
        return
    data = get_train_dataset(
        Path(spec.folder, "shards"),
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
        batch_size=1,
        packing_buffer_size=_BUFFER,
        shuffle_buffer_size=_BUFFER,
        max_samples_per_sequence=100,
        task_encoder=Packing(spec),
        repeat=False,
    )
    loader = get_savable_loader(data)
    model = spec.load_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    step = 0
    if spec.checkpoint:
        saved = torch.load(spec.checkpoint, weights_only=False)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.restore_state_rank(saved["loader"])
        step = saved["step"]
    rows = Rows(spec)
    for row in loader:
        inputs = inputs_of(row, model)

        def train(inputs: dict[str, torch.Tensor] = inputs) -> torch.Tensor:
            loss: torch.Tensor = model(**inputs, use_cache=False).loss
            loss.backward()
            return loss.detach()

        rows.step(model, inputs, train)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if spec.save_every and step % spec.save_every == 0:
            states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            Path(spec.checkpoints).mkdir(exist_ok=True)
            state = loader.save_state_rank()
            torch.save(states | {"loader": state, "step": step}, Path(spec.checkpoints, f"checkpoint-{step}"))
    rows.finish(model)


if __name__ == "__main__":
    run(main, "megatron-energon", "transformers", "torch")
