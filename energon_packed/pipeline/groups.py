"""Samples that stay together: the groups of a measured table, and the groups that no row can have.

Input: a RecordTable, whose records are groups (`members`), or in a group of several records (`group`). Output: the
status and details of the records of rejected groups. A group is packed whole, or all its records are rejected.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from energon_packed.errors import ConfigError, Reason
from energon_packed.pipeline.chunks import STATUSES
from energon_packed.pipeline.options import RejectOptions
from energon_packed.pipeline.reader import RecordReader
from energon_packed.pipeline.rejects import images_detail, overlong_detail
from energon_packed.pipeline.table import RecordTable
from energon_packed.seqlens import round_up

Int64 = npt.NDArray[np.int64]
_OVERLONG_GROUP = STATUSES.index(Reason.OVERLONG_GROUP)


def check_complete(table: RecordTable, reader: RecordReader) -> None:
    """Refuse groups of several records, if the run may not have all records of a group.

    Raises:
        ConfigError: the run packs a part of each file, or samples records.
    """
    if not table.group.any():
        return
    if reader.part is not None:
        raise ConfigError(
            "`part` must be None if several records are a group: a group may be in two parts. Split the input into "
            "files with whole groups, and pack them in separate runs"
        )
    for source in reader.sources:
        if source.reading.fraction < 1:
            raise ConfigError(
                f"the weight of {source.path} must be an integer if several records are a group: it samples records, "
                "not groups. Set another weight"
            )


def reject_groups(
    table: RecordTable,
    options: RejectOptions,
    status: npt.NDArray[np.int8],
    details: dict[int, str],
    max_images: int | None = None,
) -> None:
    """Reject the groups that fit no row, and the groups with a rejected record; `status` and `details` are changed.

    Args:
        table: measured records.
        options: length of a row, and maximum samples in it.
        status: int8 (n,), index into STATUSES.
        details: details of rejected records by index.
        max_images: images that fit a row; None for any number.
    """
    samples = table.samples
    tokens = np.bincount(
        samples["record"],
        weights=round_up(samples["stop"] - samples["start"], options.pad_multiple),
        minlength=len(table),
    )
    for record in np.flatnonzero((table.members > 0) & (status == 0)).tolist():
        if problem := _problem(int(tokens[record]), int(table.members[record]), options):
            status[record], details[record] = _OVERLONG_GROUP, problem
    grouped = np.flatnonzero(table.group)
    if not len(grouped):
        return
    _, unit_of, sizes = np.unique(table.group[grouped], return_inverse=True, return_counts=True)
    padded = round_up(np.maximum(table.length[grouped], 0).astype(np.int64), options.pad_multiple)
    sums = np.bincount(unit_of, weights=padded)
    images = np.bincount(unit_of, weights=table.num_images[grouped])
    is_rejected = np.zeros(len(sizes), dtype=bool)
    is_rejected[unit_of[status[grouped] != 0]] = True
    unfit = {
        unit: _problem(int(sums[unit]), int(sizes[unit]), options) for unit in _above(sums, sizes, options).tolist()
    }
    if max_images is not None:
        for unit in np.flatnonzero(images > max_images).tolist():
            unfit.setdefault(unit, f"its group has {images_detail(int(images[unit]), max_images)}")
    chosen = np.isin(unit_of, [*np.flatnonzero(is_rejected).tolist(), *unfit])
    first: dict[int, int] = {}  # group -> its first rejected record
    for record, unit in zip(grouped[chosen].tolist(), unit_of[chosen].tolist(), strict=True):
        if is_rejected[unit] and status[record] != 0:
            first.setdefault(unit, record)
    for record, unit in zip(grouped[chosen].tolist(), unit_of[chosen].tolist(), strict=True):
        if unit in first:
            if status[record] == 0:
                status[record] = status[first[unit]]
                row = int(table.locate(np.array([first[unit]]))[1][0])
                details[record] = f"its group has a record that is rejected, row {row} of the file"
        else:
            status[record], details[record] = _OVERLONG_GROUP, unfit[unit]


def _above(tokens: npt.NDArray[Any], sizes: npt.NDArray[Any], options: RejectOptions) -> Int64:
    above = tokens > options.usable_len
    if options.max_samples_per_pack is not None:
        above |= sizes > options.max_samples_per_pack
    return np.flatnonzero(above)


def _problem(tokens: int, samples: int, options: RejectOptions) -> str:
    """Detail of a group that fits no row; "" if it fits."""
    limit = options.max_samples_per_pack
    if tokens > options.usable_len:
        detail = overlong_detail(tokens, options.row_length, options.pad_multiple)
        return f"its group of {samples} samples has {detail}; raise seq_len: groups are neither truncated nor split"
    if limit is not None and samples > limit:
        return f"its group has {samples} samples, more than max_samples_per_pack {limit}"
    return ""
