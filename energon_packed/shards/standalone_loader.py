"""Reads packed captioning samples with numpy and the standard library alone; written by energon-packed.

A copy of this file is `.nv-meta/sample_loader.py` of a dataset whose dataset.yaml names a sample class of another
package. `sample_loader` returns the fields of that class: `images`, `prompts` and `captions` of each sample, and
`patch_positions`, `fps` and `timestamp_decimal` where the pack has them. Parts may be bytes, or what Energon's decoder
makes of them.
"""

import io
import json
from typing import Any

import numpy as np


def _json(part: Any) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(part) if isinstance(part, bytes | bytearray | str) else part
    return value


def _array(part: Any) -> Any:
    """The array of a .npy part; None where there is none. Pickles are refused."""
    if isinstance(part, bytes | bytearray):
        return np.load(io.BytesIO(part), allow_pickle=False)
    return part


def sample_loader(raw: dict[str, Any]) -> dict[str, Any]:
    """Fields of a sample.

    Args:
        raw: `__key__`, `__restore_key__`, `json`, and `img{i}_{j}.jpg` and `img{i}_{j}.npy` for image j of sample i.

    Raises:
        KeyError: an image is not in the tar.
    """
    pack = _json(raw["json"])
    counts = [len(names) for names in pack["images"]]
    fields = {
        "__key__": raw["__key__"],
        "__restore_key__": raw["__restore_key__"],
        "images": [[raw[f"img{i}_{j}.jpg"] for j in range(count)] for i, count in enumerate(counts)],
        "prompts": pack["prompts"],
        "captions": pack["captions"],
        "patch_positions": [
            [_array(raw.get(f"img{i}_{j}.npy")) for j in range(count)] for i, count in enumerate(counts)
        ],
    }
    for name in ("fps", "timestamp_decimal"):
        if name in pack:
            fields[name] = pack[name]
    return fields


def part_filter(part: str) -> bool:
    """Every part belongs to a pack."""
    return True
