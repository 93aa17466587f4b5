"""What a build refuses to leave out: --strict, --overlong error, --max-reject-rate, or everything."""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from energon_packed.build.options import PackOptions
from energon_packed.build.reader import RecordReader
from energon_packed.build.table import RecordTable, reject_counts
from energon_packed.errors import RejectLimitError


def check_limits(
    table: RecordTable,
    status: npt.NDArray[np.int8],
    overlong: npt.NDArray[np.int64],
    *,
    options: PackOptions,
    reader: RecordReader,
    rejects: Path,
) -> None:
    """Hold the records left out to the limits of the options.

    Args:
        table: measured records.
        status: int8 (n,), index into STATUSES, plan-time rejects included.
        overlong: int64 (k,), records longer than a row.
        options: of the build.
        reader: names the sources.
        rejects: rejects.jsonl, named in messages.

    Raises:
        RejectLimitError: more is left out than allowed.
    """
    counts = reject_counts(status)
    listed = ", ".join(f"{reason} {count}" for reason, count in counts.items())
    rejected = sum(counts.values())
    if len(overlong) and options.overlong == "error":
        source, row = table.locate(overlong[:1])
        raise RejectLimitError(
            f"{len(overlong)} records are longer than --seq-len {options.seq_len}, the first is record {row[0]} "
            f"of {reader.sources[int(source[0])].path} with {table.length[overlong[0]]} tokens; "
            "raise --seq-len or use --overlong drop or truncate"
        )
    if rejected and options.strict:
        raise RejectLimitError(f"{rejected} records are left out ({listed}); --strict allows none")
    if rejected == len(table):
        raise RejectLimitError(
            f"none of {len(table)} records can be packed ({listed or 'the input is empty'}); see {rejects}"
        )
    if rejected > options.max_reject_rate * len(table):
        raise RejectLimitError(
            f"{rejected} of {len(table)} records ({rejected / len(table):.1%}) are left out, more than "
            f"--max-reject-rate {options.max_reject_rate:g} ({listed}); see {rejects}, "
            "mend the data or raise the limit"
        )
