"""Already tokenized: `{"input_ids": [...], "labels": [...]}`, or a mask of 0 and 1 in place of labels.

    loss_mask        Megatron-LM            completion_mask  TRL
    assistant_masks  Transformers' `apply_chat_template(return_assistant_tokens_mask=True)`; also `assistant_mask`

`attention_mask` may leave out padding, which is removed.
"""

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from energon_packed.errors import Reason, RecordError
from energon_packed.records.fields import COMMON_FIELDS, Record, is_given, read_tokens
from energon_packed.records.media_fields import Media
from energon_packed.records.shapes.shape import Draft, Shape

_MASKS = ("loss_mask", "completion_mask", "assistant_masks", "assistant_mask")


class Tokens(Shape):
    """Token ids with labels; without either, every token is supervised."""

    key = "input_ids"
    fields: ClassVar[frozenset[str]] = COMMON_FIELDS | {"input_ids", "labels", "attention_mask", *_MASKS}

    def read(self, record: Record, media: Media) -> Draft:
        """Ids and labels, int64 (L,)."""
        ids = read_tokens(record["input_ids"], "input_ids")
        targets = {name: _flags(record, name, len(ids)) for name in _MASKS if is_given(record.get(name))}
        labels = ids
        if record.get("labels") is not None:
            labels = read_tokens(record["labels"], "labels")
            targets["labels"] = labels != -100
        names = list(targets)
        for name in names[1:]:
            if not np.array_equal(targets[name], targets[names[0]]):
                raise RecordError(
                    Reason.UNSUPPORTED_FIELD,
                    f"{names[0]} and {name} have different targets; keep the one that is meant",
                )
        if names:
            labels = np.where(targets[names[0]], labels, -100)
        if is_given(record.get("attention_mask")):
            kept = _flags(record, "attention_mask", len(ids))
            if len(labels) == len(ids):
                ids, labels = ids[kept], labels[kept]
        return Draft(input_ids=ids, labels=labels.copy())


def _flags(record: Record, name: str, size: int) -> npt.NDArray[np.bool_]:
    """A mask of 0 and 1, bool (L,)."""
    flags = read_tokens(record[name], name)
    if len(flags) != size:
        raise RecordError(Reason.MISSING_FIELD, f"{name} has {len(flags)} entries for {size} input_ids")
    if ((flags != 0) & (flags != 1)).any():
        raise RecordError(
            Reason.UNSUPPORTED_FIELD, f"{name} holds numbers other than 0 and 1, which are not supported"
        )
    return flags.astype(np.bool_)
