"""Samples that stay together: the groups of a measured table, and the groups that no row can have.

Input: a RecordTable, whose records are groups (`members`), or in a group of several records (`group`). Output: the
status and details of the records of rejected groups. A group is packed whole, or all its records are rejected.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from energon_packed.arrays import blocks
from energon_packed.errors import ConfigError, Reason
from energon_packed.pipeline.measured.chunks import STATUSES
from energon_packed.pipeline.measured.table import RecordTable
from energon_packed.pipeline.options import RejectOptions
from energon_packed.pipeline.reader import RecordReader
from energon_packed.pipeline.rejects import Details, images_detail, overlong_detail
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
    details: Details,
    max_images: int | None = None,
) -> None:
    """Reject the groups that fit no row, and the groups with a rejected record; `status` and `details` are changed.

    Args:
        table: measured records.
        options: length of a row, and maximum samples in it.
        status: int8 (n,), index into STATUSES.
        details: details of rejected records.
        max_images: images that fit a row; None for any number.
    """
    tokens = table.empty(len(table), np.int64)
    for block in blocks(len(table.samples)):
        samples = table.samples[block]
        np.add.at(tokens, samples["record"], round_up(samples["stop"] - samples["start"], options.pad_multiple))
    for block in blocks(len(table)):
        is_above = _above(tokens[block], table.members[block], options) & (table.members[block] > 0)
        for record in (block.start + np.flatnonzero(is_above & (status[block] == 0))).tolist():
            status[record], details[record] = (
                _OVERLONG_GROUP,
                _problem(int(tokens[record]), int(table.members[record]), options),
            )
    if (units := table.units()) is None or not table.group.any():
        return
    # Of each group, at its first record: tokens, samples, images, and the first rejected record, or -1.
    tokens, images, rejected = (table.empty(len(table), np.int64) for _ in range(3))
    sizes = table.empty(len(table), np.int32)
    for block in blocks(len(table)):
        rejected[block] = -1
    for rows in _grouped(table):
        own = units[rows]
        np.add.at(tokens, own, round_up(np.maximum(table.length[rows], 0), options.pad_multiple))
        np.add.at(sizes, own, 1)
        np.add.at(images, own, table.num_images[rows])
        bad = rows[(status[rows] != 0) & (rejected[own] < 0)][::-1]
        rejected[units[bad]] = bad  # of several, the last assignment counts: the first record
    for rows in _grouped(table):
        own = units[rows]
        is_above = _above(tokens[own], sizes[own], options)
        if max_images is not None:
            is_above |= images[own] > max_images
        chosen = is_above | (rejected[own] >= 0)
        for record, unit in zip(rows[chosen].tolist(), own[chosen].tolist(), strict=True):
            if (first := int(rejected[unit])) >= 0:
                if status[record] == 0:
                    status[record] = status[first]
                    row = int(table.locate(np.array([first]))[1][0])
                    details[record] = f"its group has a record that is rejected, row {row} of the file"
                continue
            problem = _problem(int(tokens[unit]), int(sizes[unit]), options)
            if not problem and max_images is not None:
                problem = f"its group has {images_detail(int(images[unit]), max_images)}"
            status[record], details[record] = _OVERLONG_GROUP, problem


def _grouped(table: RecordTable) -> Iterator[Int64]:
    """Indices of the records that are in a group of several records, in blocks."""
    for block in blocks(len(table)):
        yield np.flatnonzero(table.group[block]) + block.start


def _above(tokens: npt.NDArray[Any], sizes: npt.NDArray[Any], options: RejectOptions) -> npt.NDArray[np.bool_]:
    """Whether a group with so many tokens and samples fits no row: bool, same shape."""
    above = tokens > options.usable_len
    if options.max_samples_per_pack is not None:
        above |= sizes > options.max_samples_per_pack
    return above


def _problem(tokens: int, samples: int, options: RejectOptions) -> str:
    """Detail of a group that fits no row; "" if it fits."""
    limit = options.max_samples_per_pack
    if tokens > options.usable_len:
        detail = overlong_detail(tokens, options.row_length, options.pad_multiple)
        return f"its group of {samples} samples has {detail}; raise seq_len: groups are neither truncated nor split"
    if limit is not None and samples > limit:
        return f"its group has {samples} samples, more than max_samples_per_pack {limit}"
    return ""
