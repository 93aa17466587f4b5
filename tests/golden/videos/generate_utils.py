"""Write the golden file of qwen_vl_utils: numbers of frames and sizes for videos of all lengths; see README.md.

python -m tests.golden.videos.generate_utils
"""

import json
import logging
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.golden.videos import operators  # noqa: F401

# isort: split
import qwen_vl_utils.vision_process as utils

PATCHES = {"qwen2_5_vl": 14, "qwen3_vl": 16}
CASES = 150


def settings_of(rng: random.Random, family: str) -> dict[str, Any]:
    """Settings of a record, by the names of energon-packed."""
    pixels = (2 * PATCHES[family]) ** 2
    settings: dict[str, Any] = {}
    if rng.random() < 0.5:
        settings |= {"fps": rng.choice([0.5, 1, 3, 4]), "max_frames": rng.choice([16, 32, 64, 128])}
    elif rng.random() < 0.5:
        settings["num_frames"] = rng.choice([4, 8, 16])
    # Without its own limits, Qwen3-VL has those of its processor, which are not those of qwen_vl_utils.
    if family == "qwen3_vl" or rng.random() < 0.5:
        settings |= {"min_pixels": rng.choice([4, 16, 100]) * pixels, "max_pixels": rng.choice([120, 500]) * pixels}
        settings["total_pixels"] = rng.choice([2000, 20_480, 128_000]) * pixels
    return settings


def fetched(video: dict[str, Any], family: str, settings: dict[str, Any]) -> tuple[int, Any]:
    """Number of frames and (height, width) that `fetch_video` resizes to, without its pixels."""
    named = {"nframes" if name == "num_frames" else name: value for name, value in settings.items()}
    frames = utils.smart_nframes(named, video["num_frames"], video["fps"])
    array = SimpleNamespace(shape=(frames, 3, video["height"], video["width"]))
    utils.VIDEO_READER_BACKENDS["array"] = lambda _: (array, {}, 0)
    utils.get_video_reader_backend = lambda: "array"
    utils.transforms = SimpleNamespace(
        functional=SimpleNamespace(resize=lambda _, size, **__: SimpleNamespace(float=lambda: size))
    )
    return frames, utils.fetch_video({"video": "", **named}, image_patch_size=PATCHES[family])


def main() -> None:
    """Write a line for each case."""
    logging.disable(logging.WARNING)
    rng, lines = random.Random(0), []
    for family in PATCHES:
        while len(lines) < CASES * (1 + list(PATCHES).index(family)):
            settings = settings_of(rng, family)
            rates = [10, 24, 25, 29.97002997002997, 30, 60]
            video = {"num_frames": rng.choice([rng.randint(4, 60), rng.randint(4, 3000)]), "fps": rng.choice(rates)}
            video |= {"height": rng.randint(30, 2200), "width": rng.randint(30, 2200)}
            try:
                frames, size = fetched(video, family, settings)
            except ValueError:
                continue
            lines.append(json.dumps([family, video, settings, frames, size], separators=(",", ":")))
    (Path(__file__).parent / "qwen_vl_utils.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
