"""Limits on rejects: `strict`, `overlong='error'`, `max_reject_rate`, and at least one packed record."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from energon_packed.errors import BY_CHOICE, RejectLimitError
from energon_packed.pipeline.examples import advice, reject_summary
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
    detail_of: Callable[[int], str],
) -> None:
    """Hold the rejected records to the limits of the options; those that the user left
    out by choice (`BY_CHOICE`) do not count.

    Args:
        table: measured records.
        status: int8 (n,), index into STATUSES, plan-time rejects included.
        overlong: int64 (k,), records longer than a row.
        options: of the run.
        reader: names the sources.
        space: names rejects.jsonl in messages.
        detail_of: detail of a plan-time reject by record number.

    Raises:
        RejectLimitError: more is rejected than allowed.
    """
    counts = reject_counts(status)
    rejected = sum(count for reason, count in counts.items() if reason not in BY_CHOICE)
    if not rejected and (status == 0).any():
        return
    considered = len(table) - (sum(counts.values()) - rejected)
    if len(overlong) and options.overlong == "error":
        source, row = table.locate(overlong[:1])
        raise RejectLimitError(
            f"{len(overlong)} records are longer than `seq_len` {options.seq_len}, the first is record {row[0]} "
            f"of {reader.sources[int(source[0])].path} with {table.length[overlong[0]]} tokens; "
            "raise `seq_len`, or set `overlong` to drop or truncate"
        )
    listed = reject_summary(table, status, reader.sources, detail_of)
    if rejected and options.strict:
        raise RejectLimitError(f"{rejected} records are rejected: {listed}; `strict` allows none")
    remedy = f"{to_do}; " if (to_do := advice(counts)) else ""
    if not (status == 0).any():
        raise none_packed(len(table), listed, f"{remedy}{space.rejects} lists all")
    if rejected > options.max_reject_rate * considered:
        raise RejectLimitError(
            f"{rejected} of {considered} records ({rejected / considered:.1%}) are rejected, more than "
            f"`max_reject_rate` {options.max_reject_rate:g}: {listed}; {remedy}{space.rejects} lists all; fix "
            "the data or raise the limit"
        )


def none_packed(records: int, summary: str, remedy: str) -> RejectLimitError:
    """The error of an input without a usable record.

    Args:
        records: in the input.
        summary: of their reasons; "" for an empty input.
        remedy: what to do.
    """
    if not summary:
        return RejectLimitError(
            f"none of {records} records can be packed: the input is empty; pass a file with records"
        )
    return RejectLimitError(f"none of {records} records can be packed: {summary}; {remedy}".removesuffix("; "))
