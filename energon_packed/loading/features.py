"""Ordinary features, `{"input_ids": [...], "labels": [...]}`, as Hugging Face data sets and collators use them.

`hf_dataset`: packs as a `datasets.Dataset`, for trainers that take nothing else.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from energon_packed.encoding import IGNORE_INDEX, EncodedSample
from energon_packed.errors import BatchError, ConfigError

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


NUMBER = "input_ids"  # the stored column: the number of the pack. Trainers remove columns that no model takes.


def hf_dataset(packs: Any) -> Any:
    """A `datasets.Dataset` with a row for each pack, which is read and encoded when the row is.

    A row has `input_ids` and `labels`, int64 (T,), `seq_lengths`, int64 (S,), tokens of each sample, and `pack`, the S
    encoded samples, pixels included, of which PaddingFreeCollator makes the batch. The Arrow table holds the number of
    each pack alone, so `select`, `shuffle`, `shard` and `train_test_split` cost nothing. `map` would read everything:
    tell a trainer not to prepare the data (`dataset_kwargs={"skip_prepare_dataset": True}` in TRL).

    Args:
        packs: PackedDataset or PlannedDataset; P packs.

    Raises:
        ConfigError: the package `datasets` is not installed.
    """
    try:
        import datasets
    except ImportError as error:
        raise ConfigError("to_hf() needs the package datasets; run pip install datasets") from error
    table = datasets.Dataset.from_dict({NUMBER: np.arange(len(packs))})
    return table.with_transform(_Reading(packs))


class _Reading:
    """Turns numbers of packs into rows; picklable, so loader workers can read."""

    def __init__(self, packs: Any) -> None:
        self._packs = packs

    def __call__(self, columns: dict[str, list[int]]) -> dict[str, list[Any]]:
        rows = [self._packs[number] for number in columns[NUMBER]]
        return {
            "input_ids": [_joined(row, "input_ids") for row in rows],
            "labels": [_joined(row, "labels") for row in rows],
            "seq_lengths": [np.array([len(sample) for sample in row]) for row in rows],
            PACK: rows,
        }


def _joined(row: list[EncodedSample], name: str) -> Any:
    return np.concatenate([getattr(sample, name) for sample in row]).astype(np.int64)
