"""Stage 2, plan, with --overlong truncate: which samples cannot be cut to a row."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from energon_packed.build.options import EncoderOptions
from energon_packed.build.reader import RecordReader
from energon_packed.build.table import RecordRefs
from energon_packed.errors import RecordError

Int64 = npt.NDArray[np.int64]


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

    def __call__(self, task: tuple[Int64, RecordRefs]) -> list[tuple[int, str, str]]:
        """(record number, reason, detail) of those records that cannot be cut."""
        rows, records = task
        encoder = self.encoder.load()
        failures = []
        for place, row in enumerate(rows.tolist()):
            source = int(records.source[place])
            record = self.reader.sources[source].read(int(records.address[place]), int(records.size[place]))
            try:
                encoder.encode_tokens(self.reader.conversation(source, record)).truncated(self.max_length)
            except RecordError as error:
                failures.append((row, error.reason.value, error.detail))
        return failures
