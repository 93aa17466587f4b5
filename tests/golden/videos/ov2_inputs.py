"""Inputs of the golden files of LLaVA-OneVision-2: frames and videos by formula, and a tokenizer.

`make_llava_onevision2.py`, which runs the other project, and the tests use them. This module needs only numpy.
"""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

TOKENIZER = Path(__file__).parent.parent / "tokenizer"
VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"
# Text before a timestamp changes its tokens if these pairs are one token, as in the vocabulary of Qwen.
_MERGES = [("Ġ", "<"), ("?", "<"), ("0", "."), ("<", "0"), (">", "Ċ"), ("n", "d"), ("s", ">")]


def frame(seed: int, index: int, height: int, width: int) -> NDArray[np.uint8]:
    """Return an RGB frame of noise, (height, width, 3), a function of the arguments alone."""
    y, x, c = np.indices((height, width, 3), dtype=np.uint64)
    value = (
        y * np.uint64(2654435761) ^ x * np.uint64(40503) ^ c * np.uint64(69069) ^ np.uint64(seed * 977 + index * 331)
    )
    value = (value * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)) & np.uint64(2**64 - 1)
    # Noise over a slope: extreme values occur, so that a resize must clip.
    noise = (value >> np.uint64(56)).astype(np.int64)
    slope = (y * 255 // max(height - 1, 1) + x * 3 + np.uint64(index * 5)).astype(np.int64) % 256
    return np.where(noise % 3 == 0, slope, noise).astype(np.uint8)


def write_tokenizer(folder: Path, image_settings: dict[str, Any]) -> Path:
    """Write the golden tokenizer with more merges, and a preprocessor_config.json with `image_settings`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "chat_template.jinja").write_bytes((TOKENIZER / "chat_template.jinja").read_bytes())
    config = json.loads((TOKENIZER / "tokenizer_config.json").read_text(encoding="utf-8"))
    del config["extra_special_tokens"]  # they are in tokenizer.json, and earlier releases of Transformers need a dict
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    content = json.loads((TOKENIZER / "tokenizer.json").read_text(encoding="utf-8"))
    model = content["model"]
    shift = len(model["vocab"])
    used = set(model["vocab"].values()) | {token["id"] for token in content["added_tokens"]}
    free = (number for number in range(shift, shift + 1000) if number not in used)
    for left, right in _MERGES:
        if left + right not in model["vocab"]:
            model["vocab"][left + right] = next(free)
            model["merges"].append([left, right])
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    (folder / "preprocessor_config.json").write_text(json.dumps(image_settings), encoding="utf-8")
    return folder


def image_settings(patch: int, merge: int, min_pixels: int, max_pixels: int) -> dict[str, Any]:
    """Return the settings of an image processor of LLaVA-OneVision-2."""
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "LlavaOnevision2Processor",
        "patch_size": patch,
        "merge_size": merge,
        "temporal_patch_size": 1,
        "min_pixels": min_pixels,
        "max_pixels": max_pixels,
    }


def collapsed(text: str) -> str:
    """The text with each run of image tokens as its length."""
    return re.sub(r"(?:<\|image_pad\|>)+", lambda m: f"[{len(m[0]) // len('<|image_pad|>')}]", text)


def positions_of(case: dict[str, Any]) -> list[np.ndarray[Any, Any]]:
    """Return the .npy arrays of a record, row by row in each image."""
    m, (rows, columns) = case["layout"][1], case["blocks"]
    h, w = rows * m, columns * m
    if case["files"] == "none":
        return []
    grids = []
    for index, t in enumerate(case["times"]):
        grid = np.stack([np.full((h, w), t), *np.indices((h, w))], axis=-1)
        if case["files"] == "canvas":  # blocks of several frames: time increases from block to block of the video
            for block in range(rows * columns):
                y, x = divmod(block, columns)
                number = (index * rows * columns + block) // 2
                grid[y * m : (y + 1) * m, x * m : (x + 1) * m, 0] = 4 * number
        grids.append(grid.reshape(-1, 3))
    return [np.concatenate(grids)] if case["files"] == "video" else grids
