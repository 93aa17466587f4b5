"""Check that groups are whole: the groups of the packs, and those of lengths.parquet, in one Check out.

The samples of groups are in files, and only the groups of a range of numbers are in memory.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from energon_packed.arrays import blocks, common_ranges
from energon_packed.errors import FormatError
from energon_packed.files import DiskList
from energon_packed.inspection.verify.check import MAX_LISTED, Check
from energon_packed.inspection.verify.names import UInt64, differing, joined, name_hashes, with_values
from energon_packed.pipeline.output.run_reports import open_lengths, read_lengths

Int64 = npt.NDArray[np.int64]


def group_hashes(packs: UInt64, firsts: Int64, sizes: Int64) -> UInt64:
    """Hash groups: uint64 (g,), from the hashes of their packs, their first samples and sizes."""
    return with_values(packs, firsts * 2**32 + sizes)


def groups_whole(file: Path, check: Check, stored: DiskList, groups: int, unread: str) -> Check:
    """Check that the samples of each group in lengths.parquet follow each other in one pack, as a group.

    Args:
        file: lengths.parquet.
        check: this check of the tars, which is completed.
        stored: hashes of the groups of all tars.
        groups: number of groups in the tars.
        unread: names the tars that were not read; "" if all were.
    """
    check.summary, check.not_checked = f"{groups:,} groups", unread
    if not file.exists():
        check.not_checked = check.not_checked or "there is no lengths.parquet"
        return check
    number, sample, packs = DiskList(np.int64), DiskList(np.int64), DiskList(np.uint64)
    try:
        for rows in _group_rows(file):
            number.extend(np.array(rows["group"].to_pylist(), dtype=np.int64))
            sample.extend(np.array([-1 if own is None else own for own in rows["sample"].to_pylist()], dtype=np.int64))
            packs.extend(name_hashes(map(str, rows["pack"].to_pylist())))
        listed, apart = DiskList(np.uint64), list[tuple[int, int]]()
        for of_range in _in_ranges(number, sample, packs):
            listed.extend(of_range.hashes)
            apart += of_range.apart
        wrong = listed.values[:0] if check.not_checked else differing(stored.sorted(), listed.sorted())
        example = _example(_in_ranges(number, sample, packs), wrong) if len(wrong) else None
        wanted = {own for _, own in apart[:MAX_LISTED]} | ({example[0]} if example else set())
        names = _names(file, wanted) if wanted else {}
    except FormatError as error:
        check.fail(str(error))
        return check
    for group, own in apart:
        name = names.get(own)
        check.fail(f"a sample of the group {group} of lengths.parquet is in {name}, apart from others")
    if len(wrong):
        shown = f": {names[example[0]]} {example[1]} (pack and first sample)" if example else ""
        check.fail(f"{len(wrong):,} groups of the packs and of lengths.parquet differ{shown}")
    return check


class _ListedGroups(NamedTuple):
    """Some groups of lengths.parquet, in the order of their numbers.

    Attributes:
        hashes: of those with at least two packed samples, as `group_hashes`, uint64 (g,).
        packs: hashes of their packs, uint64 (g,).
        firsts: their first samples, int64 (g,).
        apart: number of the group, and hash of the pack, of each sample that is apart from the others of its group.
    """

    hashes: UInt64
    packs: UInt64
    firsts: Int64
    apart: list[tuple[int, int]]

    @classmethod
    def of(cls, number: Int64, sample: Int64, pack: UInt64) -> "_ListedGroups":
        """Find the groups of samples, sorted by the number of the group and by the index in the pack."""
        first = np.flatnonzero(np.diff(number, prepend=-1))
        sizes = np.diff(np.append(first, len(number)))
        place = np.arange(len(number)) - np.repeat(first, sizes)
        is_apart = (pack != np.repeat(pack[first], sizes)) | (
            (sample - np.repeat(sample[first], sizes) != place) & (sample >= 0)
        )
        is_listed = (sizes > 1) & (sample[first] >= 0)
        at = first[is_listed]
        return cls(
            group_hashes(pack[at], sample[at], sizes[is_listed]),
            pack[at],
            sample[at],
            list(zip(number[is_apart].tolist(), pack[is_apart].tolist(), strict=True)),
        )


def _in_ranges(number: DiskList, sample: DiskList, pack: DiskList) -> Iterator[_ListedGroups]:
    """Yield the groups of consecutive ranges of numbers, so that only the samples of a range are in memory."""
    numbers = number.values
    spans = [(block, numbers[block].min(), numbers[block].max()) for block in blocks(len(numbers))]
    ordered = joined([numbers], np.int64).sorted()
    for own, _ in common_ranges(ordered, ordered[:0]):
        rows = [np.zeros(0, dtype=np.int64)]
        for block, least, most in spans if len(own) else ():
            if least <= own[-1] and most >= own[0]:
                rows.append(np.flatnonzero((numbers[block] >= own[0]) & (numbers[block] <= own[-1])) + block.start)
        of_range = np.concatenate(rows)
        of_range = of_range[np.lexsort((sample.values[of_range], numbers[of_range]))]
        yield _ListedGroups.of(numbers[of_range], sample.values[of_range], pack.values[of_range])


def _example(groups: Iterable[_ListedGroups], wrong: UInt64) -> tuple[int, int] | None:
    """Hash of the pack, and first sample, of the first group with one of these hashes."""
    for of_range in groups:
        for place in np.flatnonzero(np.isin(of_range.hashes, wrong))[:1].tolist():
            return int(of_range.packs[place]), int(of_range.firsts[place])
    return None


def _names(file: Path, wanted: set[int]) -> dict[int, str]:
    """Names of the packs in lengths.parquet with these hashes."""
    names: dict[int, str] = {}
    for rows in _group_rows(file):
        packs = list(map(str, rows["pack"].to_pylist()))
        names |= {own: name for name, own in zip(packs, name_hashes(packs).tolist(), strict=True) if own in wanted}
    return names


def _group_rows(file: Path) -> Iterator[Any]:
    """Yield the samples of groups in lengths.parquet."""
    with open_lengths(file) as table:
        for rows in read_lengths(table, ["group", "pack", "sample"]):
            yield rows.filter(rows["group"].is_valid())
