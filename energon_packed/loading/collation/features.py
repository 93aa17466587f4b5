"""Hugging Face features: a dict of token ids in, an EncodedSample out; and packs in, a `datasets.Dataset` out.

| function | input | output |
|---|---|---|
| `row_of` | an item of a DataLoader | its samples |
| `from_features` | `{"input_ids": [...], "labels": [...]}` of one sample | EncodedSample |
| `hf_dataset` | PackedDataset or PlannedDataset | `datasets.Dataset`, for trainers that accept nothing else |
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from energon_packed.encoding import IGNORE_INDEX, EncodedRow, EncodedSample
from energon_packed.errors import BatchError, ConfigError, RecordError
from energon_packed.records.columns import Column, read_columns
from energon_packed.records.conversation import LOSS_WEIGHTS, is_loss_weight
from energon_packed.records.fields import shown

_KNOWN = frozenset(
    (
        *("input_ids", "labels", "loss_weights", "id", "pixel_values", "image_grid_thw", "pixel_values_videos"),
        *("video_grid_thw", "second_per_grid_ts", "seq_lengths", "length"),
    )
)
PACK = "pack"  # column of the samples in rows of `PackedDataset.to_hf()`
# The stored column has the pack index. It is called `input_ids`, as trainers remove columns that no model uses.
INDEX = "input_ids"


def is_features(value: Any) -> bool:
    """Whether a value is a dict with the token ids of one sample, and neither messages nor media."""
    return (
        isinstance(value, dict)
        and "input_ids" in value
        and not {"messages", "images", "videos", "audios"} & value.keys()
    )


def row_of(item: Any) -> Sequence[EncodedSample] | None:
    """Return the samples of an item that a DataLoader passes to its collator: a pack, a row of `to_hf()`, or features.

    Returns:
        None for another item, such as a sample.

    Raises:
        BatchError: as `from_features`.
    """
    if isinstance(item, dict) and PACK in item:
        item = item[PACK]
    if isinstance(item, list | EncodedRow):
        return item
    return [from_features(item)] if is_features(item) else None


def from_features(feature: dict[str, Any]) -> EncodedSample:
    """Convert a feature to a sample.

    Args:
        feature: `input_ids` (L,), a list, array or tensor of integers; `labels` of the same length, else all tokens
            are targets, as for `transformers.DataCollatorWithFlattening`; `loss_weights` of the same length;
            `attention_mask`, whose zeros are padding and are removed; `id`; `pixel_values` and `image_grid_thw`;
            `pixel_values_videos`, `video_grid_thw` and `second_per_grid_ts`; columns, (L,) or (L, k) numbers under
            other keys; the remaining keys are ignored.

    Raises:
        BatchError: there is no token, the lengths differ, or a loss weight or a column is invalid.
    """
    ids = _array(feature["input_ids"], "input_ids")
    labels = ids if feature.get("labels") is None else _array(feature["labels"], "labels")
    mask = feature.get("attention_mask")
    # Padding is removed instead of masked: a packed row has none.
    real = np.ones(len(ids), dtype=bool) if mask is None else _array(mask, "attention_mask").astype(bool)
    name = feature.get("id")
    weights = _weights(feature["loss_weights"], name) if feature.get("loss_weights") is not None else None
    for column, array in (("labels", labels), ("attention_mask", real), ("loss_weights", weights)):
        if array is not None and len(array) != len(ids):
            raise BatchError(
                f"Feature {name}: `{column}` must have {len(ids)} values, as `input_ids`, got {len(array)}."
            )
    if not real.any():
        raise BatchError(f"Feature {name}: `input_ids` is empty. Remove it.")
    labels = labels[real]
    if weights is not None:
        weights = weights[real]
        labels[weights == 0] = IGNORE_INDEX
    return EncodedSample(
        id=None if name is None else str(name),
        input_ids=ids[real],
        labels=labels,
        loss_weights=weights,
        columns=_columns(feature, len(ids), real) or None,
        pixel_values=feature.get("pixel_values"),
        image_grid_thw=feature.get("image_grid_thw"),
        pixel_values_videos=feature.get("pixel_values_videos"),
        video_grid_thw=feature.get("video_grid_thw"),
        second_per_grid_ts=None
        if (seconds := feature.get("second_per_grid_ts")) is None
        else np.asarray(seconds, float),
    )


def _columns(feature: dict[str, Any], tokens: int, real: npt.NDArray[np.bool_]) -> dict[str, Column]:
    values = {
        name: value.detach().cpu().to(None if value.dtype != torch.bfloat16 else torch.float32).numpy()
        if isinstance(value, torch.Tensor)
        else value
        for name, value in feature.items()
    }
    try:
        columns = read_columns(values, _KNOWN, tokens)
    except RecordError as error:
        raise BatchError(f"Feature {feature.get('id')}: {error.reject.detail}.") from error
    return {name: column[real] for name, column in columns.items()}


def _array(values: Any, name: str) -> npt.NDArray[np.int64]:
    array = np.asarray(values, dtype=np.int64 if len(values) == 0 else None)  # NumPy makes floats of an empty list
    if array.ndim == 2 and len(array) == 1:  # (1, L), as tokenizers return it with `return_tensors`
        array = array[0]
    if array.ndim != 1 or array.dtype.kind not in "iub":
        raise BatchError(
            f"`{name}` must be integers of shape (L,), got dtype {array.dtype} and shape {array.shape}. Pass one "
            "sample per feature."
        )
    return array.astype(np.int64)


def _weights(values: Any, name: Any) -> npt.NDArray[np.float32]:
    weights = np.asarray(values, dtype=np.float32)
    weights = weights[0] if weights.ndim == 2 and len(weights) == 1 else weights
    if weights.ndim != 1 or not all(map(is_loss_weight, weights.tolist())):
        raise BatchError(
            f"Feature {name}: `loss_weights` must be (L,) numbers, each 0 or {LOSS_WEIGHTS}, got "
            f"{shown(weights.tolist())}."
        )
    return weights


def hf_dataset(packs: Any) -> Any:
    """Return a `datasets.Dataset` with a table row for each pack, which is encoded when the table row is read.

    A table row has `input_ids` and `labels`, int64 (T,), `seq_lengths`, int64 (S,), tokens of each sample, and `pack`,
    the S encoded samples, pixels included, from which PaddingFreeCollator makes the batch. The Arrow table stores only
    pack indices, so `select`, `shuffle`, `shard` and `train_test_split` are free. `map` would read everything: make
    the trainer skip it (`dataset_kwargs={"skip_prepare_dataset": True}` in TRL).

    Args:
        packs: PackedDataset or PlannedDataset; P packs.

    Raises:
        ConfigError: the package `datasets` is not installed.
    """
    try:
        import datasets
    except ImportError as error:
        raise ConfigError("to_hf() needs the package datasets. Run pip install datasets.") from error
    table = datasets.Dataset.from_dict({INDEX: np.arange(len(packs))})
    return table.with_transform(_ReadPacks(packs))


def packs_of(data: Any) -> Any:
    """Return the packs of a `to_hf()` that still has all of them in order, and any other data as it is."""
    settings = getattr(data, "format", None)
    transform = settings["format_kwargs"].get("transform") if isinstance(settings, dict) else None
    if not isinstance(transform, _ReadPacks):
        return data
    indices = data.with_format("numpy")[:][INDEX]
    return transform.packs if np.array_equal(indices, np.arange(len(transform.packs))) else data


class _ReadPacks:
    """Transform of the table that replaces pack indices by table rows; a class, so that workers can unpickle it."""

    def __init__(self, packs: Any) -> None:
        self.packs = packs

    def __call__(self, columns: dict[str, list[int]]) -> dict[str, list[Any]]:
        rows = [self.packs[index] for index in columns[INDEX]]
        return {
            "input_ids": [_joined(row, "input_ids") for row in rows],
            "labels": [_joined(row, "labels") for row in rows],
            "seq_lengths": [np.array([len(sample) for sample in row]) for row in rows],
            PACK: rows,
        }


def _joined(row: list[EncodedSample], name: str) -> Any:
    return np.concatenate([getattr(sample, name) for sample in row]).astype(np.int64)
