"""Already tokenized: `{"input_ids": [...], "labels": [...]}`, or `loss_mask` in place of labels."""

from typing import ClassVar

import numpy as np

from energon_packed.errors import Reason, RecordError
from energon_packed.records.accounting import COMMON_FIELDS
from energon_packed.records.fields import Record, read_tokens
from energon_packed.records.media_fields import Media
from energon_packed.records.shapes.shape import Draft, Shape


class Tokens(Shape):
    """Token ids with labels; without either, every token is supervised."""

    key = "input_ids"
    fields: ClassVar[frozenset[str]] = COMMON_FIELDS | {"input_ids", "labels", "loss_mask"}

    def read(self, record: Record, media: Media) -> Draft:
        """Ids and labels, int64 (L,)."""
        ids = read_tokens(record["input_ids"], "input_ids")
        labels, mask = record.get("labels"), record.get("loss_mask")
        if labels is not None:
            return Draft(input_ids=ids, labels=read_tokens(labels, "labels"))
        if mask is None:
            return Draft(input_ids=ids, labels=ids.copy())
        flags = read_tokens(mask, "loss_mask")
        if len(flags) != len(ids):
            raise RecordError(Reason.MISSING_FIELD, f"loss_mask has {len(flags)} entries for {len(ids)} input_ids")
        return Draft(input_ids=ids, labels=np.where(flags != 0, ids, -100))
