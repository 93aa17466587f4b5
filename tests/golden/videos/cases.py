"""Videos of the golden files, by number: their frames are a formula, so that no video is stored.

A case is a text with videos, and with an image in some. The generator passes them to the processor of Transformers,
the test to the vision family.
"""

import hashlib
import random
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
PATCH = {"qwen2_vl": 14, "qwen2_5_vl": 14, "qwen3_vl": 16}
CASES = 235  # of each family; every ninth has two videos; the processor raises an error for some
RATES = (1, 2, 5, 7.5, 10, 12, 15, 23.976023976023978, 24, 25, 29.97002997002997, 30, 50, 59.94005994005994, 60)
# Settings of the video processor of a folder. The first is that of published folders, which have no file for videos in
# Qwen2-VL and Qwen2.5-VL.
_QWEN2: tuple[dict[str, Any] | None, ...] = (
    None,
    {"size": {"shortest_edge": 3136, "longest_edge": 12544}, "do_sample_frames": True, "fps": 4},
    {"min_pixels": 784, "max_pixels": 9408, "fps": 2, "min_frames": 2, "max_frames": 10, "do_sample_frames": True},
    {"size": {"shortest_edge": 1568, "longest_edge": 50176}, "cap_pixels_per_frame": True, "max_video_tokens": 40},
    {"size": {"shortest_edge": 1568, "longest_edge": 6272}, "num_frames": 6, "image_mean": [0.5, 0.4, 0.3]},
    {
        "size": {"shortest_edge": 3136, "longest_edge": 9408},
        "image_std": [0.2, 0.25, 0.3],
        "rescale_factor": 1 / 127.5,
    },
)
_QWEN3: tuple[dict[str, Any] | None, ...] = (
    {"size": {"shortest_edge": 4096, "longest_edge": 25165824}},
    {"size": {"shortest_edge": 4096, "longest_edge": 65536}, "do_sample_frames": True, "fps": 4},
    {"size": {"shortest_edge": 4096, "longest_edge": 131072}, "fps": 2, "min_frames": 2, "max_frames": 10},
    {"size": {"shortest_edge": 2048, "longest_edge": 98304}, "cap_pixels_per_frame": True, "max_video_tokens": 5},
    {"size": {"shortest_edge": 4096, "longest_edge": 49152}, "num_frames": 7, "image_mean": [0.5, 0.4, 0.3]},
    {"size": {"shortest_edge": 65536, "longest_edge": 131072}, "fps": 1, "image_std": [0.2, 0.25, 0.3]},
)
FOLDERS = {"qwen2_vl": _QWEN2, "qwen2_5_vl": _QWEN2, "qwen3_vl": _QWEN3}


@dataclass(frozen=True)
class Video:
    """A video: frames are noise, or a gradient that moves."""

    seed: int
    num_frames: int
    fps: float
    height: int
    width: int

    def frame(self, index: int) -> npt.NDArray[np.uint8]:
        """RGB, uint8 (height, width, 3)."""
        y, x, c = np.indices((self.height, self.width, 3), dtype=np.uint32)
        if self.seed % 3 == 0:
            return ((x * (c + 1) + y * 2 + np.uint32(5 * index)) & 255).astype(np.uint8)
        value = y * np.uint32(104729) + x * np.uint32(1299709) + c * np.uint32(15485863)
        value += np.uint32((self.seed * 32452843 + index * 7919) & 0xFFFFFFFF)
        value ^= value >> 15
        value *= np.uint32(0x2C1B3CE5)
        value ^= value >> 12
        return (value & 255).astype(np.uint8)


@dataclass(frozen=True)
class Case:
    """A text with videos.

    Attributes:
        settings: settings of a record, for all its videos.
        folder: index of the settings of the folder, in `FOLDERS`.
        image: (height, width) of an image after the first video, or None.
    """

    family: str
    number: int
    videos: tuple[Video, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    folder: int = 0
    image: tuple[int, int] | None = None

    @cached_property
    def text(self) -> str:
        """Text before and after each medium, with a single token for each."""
        video, image = (f"<|vision_start|><|{name}_pad|><|vision_end|>" for name in ("video", "image"))
        media = [video] * len(self.videos)
        if self.image is not None:
            media.insert(1, image)
        return "Watch this: " + " and this\n".join(media) + (" then say what happens." if self.number % 4 else "")


def cases(family: str) -> list[Case]:
    """The cases of a family."""
    return [_case(family, number) for number in range(CASES)]


def _case(family: str, number: int) -> Case:
    rng = random.Random(f"{family} {number}")
    factor = PATCH[family] * 2
    folder = number % 6
    settings = _settings(rng, family, factor) if number % 2 or folder == 0 else {}
    few = folder == 0 and "max_pixels" not in settings and "total_pixels" not in settings  # large frames
    videos = tuple(_video(rng, few, number) for _ in range(2 if number % 9 == 8 else 1))
    if "num_frames" in settings and number % 15:  # else more than the video may have
        settings["num_frames"] = min(settings["num_frames"], *(video.num_frames for video in videos))
    image = (rng.randint(30, 200), rng.randint(30, 200)) if number % 18 == 8 else None
    return Case(family, number, videos, settings, folder, image)


def _settings(rng: random.Random, family: str, factor: int) -> dict[str, Any]:
    frames: list[dict[str, Any]] = [
        {},
        {"fps": rng.choice([0.5, 1, 1.5, 3, 4.7, 8, 24])},
        {"num_frames": rng.choice([2, 3, 4, 6, 8])},
        {"fps": rng.choice([1, 2]), "min_frames": rng.choice([2, 5, 8]), "max_frames": rng.choice([8, 11, 16])},
    ]
    side = rng.randint(1, 4)
    pixels: list[dict[str, Any]] = [{"max_pixels": side * factor**2}, {}]
    if family != "qwen3_vl":
        pixels.append({"min_pixels": side * factor**2, "max_pixels": 6 * factor**2})
        pixels.append({"min_pixels": 2 * factor**2, "total_pixels": int(rng.randint(10, 200) * factor**2 * 0.9)})
    return rng.choice(frames) | rng.choice(pixels)


def _video(rng: random.Random, few: bool, number: int) -> Video:
    num_frames = rng.randint(2, 9) if few else rng.choice([2, 3, 7, 11, rng.randint(3, 200), rng.randint(3, 200)])
    size = rng.choice([(48, 64), (64, 48), (rng.randint(2, 90), rng.randint(2, 90)), (7, 200), (150, 4), (2, 400)])
    if number % 30 == 20:  # rejected
        num_frames, size = rng.choice([(1, size), (num_frames, (2, 402))])
    if size[0] * size[1] * num_frames > 400_000:
        size = (28, 41)
    return Video(rng.randrange(1000), num_frames, rng.choice(RATES), *size)


def digest(values: npt.NDArray[Any]) -> str:
    """Hex digest of the bytes of an array."""
    return hashlib.blake2b(np.ascontiguousarray(values).tobytes(), digest_size=8).hexdigest()


MESSAGES = [{"role": "user", "content": "Look.\n{media}\nWhat is it?"}, {"role": "assistant", "content": "A test."}]
"""Conversation about real files."""
FILES: list[dict[str, Any]] = [
    # Arguments of `make_video`, and the extension.
    {"extension": "mp4", "frames": 60, "fps": 30},
    {"extension": "mp4", "frames": 45, "fps": 24, "rotation": 90},
    {"extension": "mp4", "frames": 45, "fps": 24, "rotation": 180, "width": 96},
    {"extension": "mov", "frames": 31, "fps": 10, "rotation": 270},
    {"extension": "mp4", "frames": 24, "fps": 12, "times": [index * 3 + index % 3 for index in range(24)]},
    {"extension": "mp4", "frames": 40, "fps": 25, "fragmented": True},
    {"extension": "mp4", "frames": 30, "fps": 15, "audio": True},
    {"extension": "mkv", "frames": 33, "fps": 25},
    {"extension": "mkv", "frames": 27, "fps": 30, "b_frames": 0},
    {"extension": "avi", "frames": 36, "fps": 12, "codec": "mpeg4"},
    {"extension": "ts", "frames": 50, "fps": 25},
    {"extension": "webm", "frames": 25, "fps": 5, "codec": "libvpx"},
    {"extension": "webm", "frames": 22, "fps": 30, "codec": "libvpx-vp9"},
    {"extension": "webm", "frames": 22, "fps": 20, "codec": "libvpx", "streamed": True},
    {"extension": "avi", "frames": 14, "fps": 7, "codec": "mjpeg"},
    {"extension": "mov", "frames": 20, "fps": 50, "codec": "prores_ks"},
    {"extension": "mkv", "frames": 19, "fps": 60, "codec": "ffv1", "width": 30, "height": 90},
    {"extension": "mp4", "frames": 26, "fps": 13, "codec": "libx265"},
    {"extension": "flv", "frames": 48, "fps": 24},
    {"extension": "mp4", "frames": 4, "fps": 1, "codec": "mpeg4", "width": 200, "height": 20},
]
