"""Why records are rejected, with one example and what to do: for messages about a whole run."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from energon_packed.errors import BY_CHOICE, Reason
from energon_packed.pipeline.chunks import STATUSES, read_rows
from energon_packed.pipeline.table import RecordTable, reject_counts
from energon_packed.sources import Source

_LONGEST = 200  # characters of a detail
_SHAPE = (
    'the page "My data looks like" (docs/my-data.md) has a record and a command for each known format; for others, '
    "name the fields with `map`, or convert them with an `adapter`"
)
_IMAGES = "set `image_root` to the folder that image paths start from"
_ADVICE = {
    Reason.BAD_JSON: "each line must be one JSON object",
    Reason.MISSING_FIELD: _SHAPE,
    Reason.BAD_ROLE: _SHAPE,
    Reason.MISSING_IMAGE: _IMAGES,
    Reason.IMAGE_OUTSIDE_ROOT: _IMAGES,
    Reason.MISSING_PATCH_POSITIONS: "set `use_patch_positions=False` to ignore patch positions",
    Reason.OVERLONG: "raise `seq_len`, or set `overlong` to 'truncate'",
    Reason.NOT_SAMPLED: "raise its weight",
}


def reject_summary(
    table: RecordTable,
    status: npt.NDArray[np.int8],
    sources: Sequence[Source],
    detail_of: Callable[[int], str] | None = None,
    *,
    is_sample: bool = False,
) -> str:
    """All reasons with their counts, the most common first, and an example of that one.

    For example `40 x missing_field, e.g. row 0 of data.jsonl: no messages`; "" when nothing is rejected.

    Args:
        table: measured records.
        status: int8 (n,), index into STATUSES.
        sources: of the table.
        detail_of: detail of a plan-time reject by record number.
        is_sample: the table has some records of each source, so that row numbers are unknown.
    """
    counts = reject_counts(status)
    if not counts:
        return ""
    reason = main_reason(counts)
    row = int(np.flatnonzero(status == STATUSES.index(reason))[0])
    source, local = table.locate(np.array([row]))
    detail = _measured_detail(table, row) or (detail_of(row) if detail_of is not None else "")
    detail = " ".join(detail.split())
    detail = detail if len(detail) <= _LONGEST else f"{detail[: _LONGEST - 1]}…"
    name = "a record" if is_sample else f"row {local[0]}"
    listed = [f"{counts[reason]} x {reason}, e.g. {name} of {sources[int(source[0])].path}: {detail}"]
    listed += [f"{count} x {name}" for name, count in _ranked(counts) if name != reason]
    return "; ".join(listed)


def advice(counts: dict[str, int]) -> str:
    """What to do about the most common reason; "" where it depends on the record."""
    return _ADVICE.get(Reason(main_reason(counts)), "") if counts else ""


def main_reason(counts: dict[str, int]) -> str:
    """The most common one, of those that are not by choice where there are any."""
    return _ranked(counts)[0][0]


def _ranked(counts: dict[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: (item[0] in BY_CHOICE, -item[1], item[0]))


def _measured_detail(table: RecordTable, row: int) -> str | None:
    """The detail that measuring gave a record, from its chunk file."""
    place = int(np.searchsorted(table.file_starts, row, side="right")) - 1
    detail: str | None = read_rows(table.files[place])["detail"][row - int(table.file_starts[place])].as_py()
    return detail
