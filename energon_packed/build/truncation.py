"""Stage 2, plan, with --overlong truncate: which samples cannot be cut to a row."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from energon_packed.build.kept_tokens import TokenReader, TokenRefs
from energon_packed.build.options import EncoderOptions
from energon_packed.build.reader import RecordReader
from energon_packed.build.table import RecordRefs
from energon_packed.encoding import EncodedSample
from energon_packed.errors import RecordError

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class TruncationTask:
    """Samples longer than a row.

    Attributes:
        rows: int64 (k,), record numbers.
        records: where they are.
        tokens: where their tokens are, for layouts that keep them.
    """

    rows: Int64
    records: RecordRefs
    tokens: TokenRefs | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TruncationCheck:
    """Tells which samples cannot be cut to a row: the function of the plan stage's check.

    Attributes:
        reader, encoder: as in the other stages.
        max_length: tokens of a row.
    """

    reader: RecordReader
    encoder: EncoderOptions
    max_length: int

    def __call__(self, task: TruncationTask) -> list[tuple[int, str, str]]:
        """(record number, reason, detail) of those records that cannot be cut."""
        failures = []
        for row, sample in zip(task.rows.tolist(), self._samples(task), strict=True):
            try:
                sample.truncated(self.max_length)
            except RecordError as error:
                failures.append((row, error.reason.value, error.detail))
        return failures

    def _samples(self, task: TruncationTask) -> Iterator[EncodedSample]:
        encoder, records = self.encoder.load(), task.records
        if task.tokens is not None:
            with TokenReader(task.tokens) as reader:
                for place, length in enumerate(records.length.tolist()):
                    yield replace(reader.read(place, length), image_token_id=encoder.image_token_id)
            return
        for place, source in enumerate(records.source.tolist()):
            record = self.reader.sources[source].read(int(records.address[place]), int(records.size[place]))
            yield encoder.encode_tokens(self.reader.conversation(source, record))
