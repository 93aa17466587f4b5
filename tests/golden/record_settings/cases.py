"""Cases of the golden files: images, their settings, and objects of ms-swift."""

from typing import Any

import numpy as np
from PIL import Image

PATCHES = {"qwen2_vl": 14, "qwen2_5_vl": 14, "qwen3_vl": 16}
SIZES = ((640, 480), (100, 70), (53, 911), (28, 28), (1201, 333))  # (width, height)
# In images of 28 x 28 pixels, the pixels of a token of Qwen2-VL; Qwen3-VL has 32 x 32.
SETTINGS: list[dict[str, int]] = [
    {"max_pixels": 64 * 784},
    {"min_pixels": 16 * 1024, "max_pixels": 20 * 1024},
    {"min_pixels": 400 * 1024},
    {"resized_height": 280, "resized_width": 420},
    {"resized_height": 97, "resized_width": 33},
]
BOX_SIZES = ((640, 480), (353, 211))
OBJECTS: list[dict[str, Any]] = [
    {"ref": ["a dog", "a {woman}"], "bbox": [[331.5, 61.4, 53.5, 194.8], [76, 85.8, 99.5, 27.4]]},
    {"ref": ["a", "b"], "bbox": [[0.25, 0.5, 0.75, 0.9995], [0.0005, 0.1235]], "bbox_type": "norm1"},
    {"ref": ["a", "b"], "bbox": [[10, 20, 30, 40], [615, 226]], "image_id": [1]},
    {"ref": ["a", "b"], "bbox": [[1, 2.5, 3.5, 4], [5, 6]], "image_id": [1, 0], "bbox_type": "real"},
]


def image(width: int, height: int) -> Image.Image:
    """Return an image of a formula: smooth, so that resizing is not only noise."""
    x, y = np.meshgrid(np.arange(width), np.arange(height))
    return Image.fromarray(np.stack([x * 7 % 256, y * 5 % 256, (x * y // 9) % 256], axis=-1).astype(np.uint8))


def messages(count: int) -> list[dict[str, str]]:
    """Return the turns of a record of `count` images with two names and two boxes."""
    return [
        {"role": "user", "content": "<image>" * count + "Find <ref-object> and <bbox>."},
        {"role": "assistant", "content": "It is [<bbox>], a <ref-object>"},
    ]
