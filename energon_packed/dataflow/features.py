"""Ordinary features, `{"input_ids": [...], "labels": [...]}`, as Hugging Face data sets and collators use them."""

from typing import Any

import numpy as np
import numpy.typing as npt

from energon_packed.encoding import IGNORE_INDEX, EncodedSample
from energon_packed.errors import BatchError

PACK = "pack"  # column of the samples in rows of `PackedDataset.to_hf()`


def is_features(value: Any) -> bool:
    """A dict with the token ids of one sample, that says nothing of text or images."""
    return isinstance(value, dict) and "input_ids" in value and "messages" not in value and "images" not in value


def from_features(feature: dict[str, Any]) -> EncodedSample:
    """The sample of a feature.

    Args:
        feature: `input_ids` (L,), a list, array or tensor of integers; `labels` of the same length, else all tokens
            are targets, as for `transformers.DataCollatorWithFlattening`; `attention_mask`, whose zeros are padding
            and are removed; `id`; `pixel_values` and `image_grid_thw`; other keys are ignored.

    Raises:
        BatchError: no token, or lengths that differ.
    """
    ids = _array(feature["input_ids"], "input_ids")
    labels = ids if feature.get("labels") is None else _array(feature["labels"], "labels")
    mask = feature.get("attention_mask")
    real = np.ones(len(ids), dtype=bool) if mask is None else _array(mask, "attention_mask").astype(bool)
    name = feature.get("id")
    for what, array in (("labels", labels), ("attention_mask", real)):
        if len(array) != len(ids):
            raise BatchError(
                f"feature {name} has {len(ids)} `input_ids` and {len(array)} `{what}`; they must have the same length"
            )
    if not real.any():
        raise BatchError(f"feature {name} has no token; remove it")
    labels = labels[real].copy()
    labels[0] = IGNORE_INDEX  # nothing predicts the first token
    return EncodedSample(
        id=None if name is None else str(name),
        input_ids=ids[real],
        labels=labels,
        pixel_values=feature.get("pixel_values"),
        image_grid_thw=feature.get("image_grid_thw"),
    )


def _array(values: Any, name: str) -> npt.NDArray[np.int64]:
    array = np.asarray(values, dtype=np.int64 if len(values) == 0 else None)
    if array.ndim == 2 and len(array) == 1:
        array = array[0]
    if array.ndim != 1 or array.dtype.kind not in "iub":
        raise BatchError(f"`{name}` has shape {array.shape} and dtype {array.dtype}; it must be integers, shape (L,)")
    return array.astype(np.int64)
