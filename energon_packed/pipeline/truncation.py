"""What truncating to `seq_len` leaves of each sample: a part of the plan stage, with `overlong='truncate'`."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from energon_packed.encoding import EncodedSample
from energon_packed.errors import Reason, RecordError, Reject
from energon_packed.pipeline.encoders import EncoderLoader
from energon_packed.pipeline.kept_tokens import TokenReader, TokenRefs
from energon_packed.pipeline.reader import RecordReader
from energon_packed.pipeline.table import RecordRefs

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class TruncationTask:
    """Samples longer than a row.

    Attributes:
        rows: int64 (k,), record numbers.
        records: where they are.
        tokens: where their tokens are, for flavors that store them.
    """

    rows: Int64
    records: RecordRefs
    tokens: TokenRefs | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TruncationCheck:
    """Truncates samples, to see which cannot be and what is left of the others: a function for an engine.

    Attributes:
        reader, encoder: as in the other stages.
        max_length: tokens of a row.
    """

    reader: RecordReader
    encoder: EncoderLoader
    max_length: int

    def __call__(self, task: TruncationTask) -> list[tuple[int, int | Reject]]:
        """(record number, targets that are left) of each record, or why it cannot be truncated."""
        results: list[tuple[int, int | Reject]] = []
        for row, sample in zip(task.rows.tolist(), self._samples(task), strict=True):
            try:
                results.append((row, sample.truncated(self.max_length).num_supervised))
            except RecordError as error:
                results.append((row, error.reject))
        return results

    def _samples(self, task: TruncationTask) -> Iterator[EncodedSample]:
        encoder, records = self.encoder.load(), task.records
        if task.tokens is not None:
            with TokenReader(task.tokens) as reader:
                for place, length in enumerate(records.length.tolist()):
                    yield replace(reader.read(place, length), image_token_id=encoder.image_token_id)
            return
        for place, source in enumerate(records.source.tolist()):
            conversation = self.reader.read(source, int(records.address[place]), int(records.size[place]))
            measured = encoder.measure([conversation], keep_tokens=True)[0]
            if measured.reject is not None or measured.sample is None:
                raise RecordError.of(measured.reject or Reject(Reason.EMPTY, "its encoder keeps no tokens"))
            yield measured.sample
