"""Limits on rejects: `strict`, `overlong='error'`, `max_reject_rate`, and at least one packed record."""

import numpy as np
import numpy.typing as npt

from energon_packed.errors import RejectLimitError
from energon_packed.pipeline.options import PackOptions
from energon_packed.pipeline.reader import RecordReader
from energon_packed.pipeline.table import RecordTable, reject_counts
from energon_packed.pipeline.workspace import Workspace


def check_limits(
    table: RecordTable,
    status: npt.NDArray[np.int8],
    overlong: npt.NDArray[np.int64],
    *,
    options: PackOptions,
    reader: RecordReader,
    space: Workspace,
) -> None:
    """Hold the rejected records to the limits of the options.

    Args:
        table: measured records.
        status: int8 (n,), index into STATUSES, plan-time rejects included.
        overlong: int64 (k,), records longer than a row.
        options: of the run.
        reader: names the sources.
        space: names rejects.jsonl in messages.

    Raises:
        RejectLimitError: more is rejected than allowed.
    """
    counts = reject_counts(status)
    listed = ", ".join(f"{reason} {count}" for reason, count in counts.items())
    rejected = sum(counts.values())
    if len(overlong) and options.overlong == "error":
        source, row = table.locate(overlong[:1])
        raise RejectLimitError(
            f"{len(overlong)} records are longer than `seq_len` {options.seq_len}, the first is record {row[0]} "
            f"of {reader.sources[int(source[0])].path} with {table.length[overlong[0]]} tokens; "
            "raise `seq_len`, or set `overlong` to drop or truncate"
        )
    if rejected and options.strict:
        raise RejectLimitError(f"{rejected} records are rejected ({listed}); `strict` allows none")
    if rejected == len(table):
        raise RejectLimitError(
            f"none of {len(table)} records can be packed ({listed or 'the input is empty'}); see {space.rejects}"
        )
    if rejected > options.max_reject_rate * len(table):
        raise RejectLimitError(
            f"{rejected} of {len(table)} records ({rejected / len(table):.1%}) are rejected, more than "
            f"`max_reject_rate` {options.max_reject_rate:g} ({listed}); see {space.rejects}, "
            "fix the data or raise the limit"
        )
