"""`hf_dataset`: packs as a `datasets.Dataset`, for trainers that take nothing else."""

from typing import Any

import numpy as np

from energon_packed.dataflow.features import PACK
from energon_packed.encoding import EncodedSample
from energon_packed.errors import ConfigError

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
