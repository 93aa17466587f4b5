"""Find the sample of a record in a packed dataset: an id, or a file and a line, in; FoundRecords out.

`lengths.parquet` has the place of every sample, and `rejects.jsonl` the reason of every rejected record.
`matching_records` finds the records that match `record_tests`, some at a time.
"""

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from energon_packed.errors import ConfigError, FormatError, Reason
from energon_packed.inspection.folder import PackedFolder
from energon_packed.inspection.view import PackView, SampleView
from energon_packed.pipeline.measured.chunks import SPLIT
from energon_packed.pipeline.output.run_reports import length_row, open_lengths, read_lengths, read_rejects
from energon_packed.sources import JsonlSource

_COLUMNS = ["source", "row", "line", "id", "length", "status", "pack", "sample", "shard"]
_MEDIA = {kind: f"num_{kind}s" for kind in ("image", "video", "audio")}  # columns; the last two if there are any
T = TypeVar("T")
_MAX_NAMES = 5  # inputs named in a message


@dataclass(frozen=True, slots=True)
class FoundRecord:
    """Row of lengths.parquet, which is a record or a fragment of a split record.

    Attributes:
        source: path of the input file, as it was packed.
        row: index of the record in the file, or in its input part.
        line: its line in the file, from 1; None if records are not lines, or it is not known.
        id: id of the sample.
        length: tokens; None for a rejected record that was not measured.
        status: `packed`, `truncated`, `split`, `fragment` or the reason of the rejection.
        pack: key of the pack; None if it is in no pack.
        sample: index of the sample in the pack, or None.
        shard: file name of the tar, or None.
    """

    source: str
    row: int
    line: int | None
    id: str
    length: int | None
    status: str
    pack: str | None
    sample: int | None
    shard: str | None

    def sample_in(self, view: PackView) -> SampleView:
        """Return the sample in its pack.

        Raises:
            FormatError: the pack does not have it there.
        """
        sample = view.samples[self.sample] if self.sample is not None and self.sample < len(view.samples) else None
        if sample is None or (sample.id or "").encode(errors="replace").decode() != self.id:
            raise FormatError(
                f"sample {self.sample} of {self.pack} must be {self.id}, as in lengths.parquet. The table is of "
                "another run: copy the table of this dataset, or pack it again."
            )
        return sample

    @property
    def place(self) -> str:
        """Place of the record in its file: `data.jsonl line 18 (row 17)`."""
        number = f"row {self.row}" if self.line is None else f"line {self.line} (row {self.row})"
        return f"{self.source} {number}"


Test = tuple[Sequence[str], Callable[..., Any]]
"""Names of columns, and a function of these columns: whether each row matches, a boolean array; null is false."""


def record_tests(
    *,
    ident: str = "",
    status: str = "",
    media: str = "",
    shortest: int | None = None,
    longest: int | None = None,
    file: str = "",
    line: int | None = None,
    shards: Sequence[str] | None = None,
) -> list[Test]:
    """Return what records must have as tests of the rows of lengths.parquet.

    Args:
        ident: part of the id; "" for any.
        status: status in lengths.parquet; "" for any.
        media: `text`, `image`, `video` or `audio`; anything else for any.
        shortest, longest: first and last length in tokens; None for any.
        file: part of the path of the input file; "" for any.
        line: line of the file, from 1, or its row if records are not lines; None for any.
        shards: file names of the tars; None for any, and for records in no pack.
    """
    names = _MEDIA.values() if media == "text" else [_MEDIA.get(media, "")]
    tests: list[tuple[Any, Sequence[str], Callable[..., Any]]] = [
        (ident, ["id"], lambda ids: pc.match_substring(ids, ident)),
        (status, ["status"], lambda values: pc.equal(values, status)),
        (file, ["source"], lambda files: pc.match_substring(files, file)),
        (line is not None, ["line", "row"], lambda lines, rows: pc.equal(pc.coalesce(lines, rows), line)),
        (shards is not None, ["shard"], lambda tars: pc.is_in(tars, pa.array(shards, pa.string()))),
        (shortest is not None, ["length"], lambda lengths: pc.greater_equal(lengths, shortest)),
        (longest is not None, ["length"], lambda lengths: pc.less_equal(lengths, longest)),
        (media == "text", [*names], lambda *counts: pc.less_equal(pc.max_element_wise(*counts), 0)),
        (media in _MEDIA, [*names], lambda counts: pc.greater(counts, 0)),
    ]
    return [(columns, test) for is_wanted, columns, test in tests if is_wanted]


def first_found(
    steps: Iterator[tuple[int, T | None]], start: int, limit: int, seconds: float
) -> tuple[list[T], int | None]:
    """Return the first items of a search, and the place to continue from; None at the end.

    Args:
        steps: the place of each item with the item, or None for progress without an item.
        start: place of the first step.
        limit: most items.
        seconds: time after which the search stops, at the next place without an item after the start.
    """
    found: list[T] = []
    deadline = time.monotonic() + seconds
    for place, item in steps:
        is_last = place > start and time.monotonic() > deadline if item is None else len(found) == limit
        if is_last:
            return found, place
        found += [] if item is None else [item]
    return found, None


def matching_records(
    table: Path, tests: Sequence[Test], *, start: int, limit: int, seconds: float = math.inf
) -> tuple[list[FoundRecord], int | None, int]:
    """Find the first records from a row of lengths.parquet that match.

    Args:
        table: lengths.parquet.
        tests: result of `record_tests`.
        start: index of the first row in the table.
        limit, seconds: as of `first_found`.

    Returns:
        The records, the row to continue from (None after the last row that matches), and the rows of the table.

    Raises:
        FileNotFoundError: there is no such file.
        FormatError: it cannot be read, or has no places.
    """
    with open_lengths(table) as file:
        return *first_found(_matching(file, tests, start), start, limit, seconds), file.metadata.num_rows


def _matching(file: Any, tests: Sequence[Test], start: int = 0) -> Iterator[tuple[int, FoundRecord | None]]:
    """Yield the row and the record of each row from `start` that all tests match, as `first_found` needs.

    The columns of the tests are read by row groups, and the others only where a row matches.
    """
    names = dict.fromkeys(name for own, _ in tests for name in own) or ["id"]
    columns = [name for name in names if name in file.schema_arrow.names or name not in _MEDIA.values()]
    first = 0
    for group in range(file.num_row_groups):
        if first + file.metadata.row_group(group).num_rows <= start:
            first += file.metadata.row_group(group).num_rows
            continue
        whole = enumerate(read_lengths(file, _COLUMNS, group))
        for number, rows in enumerate(read_lengths(file, columns, group)):
            yield max(first, start), None
            masks = [test(*[_column(rows, name) for name in own]) for own, test in tests]
            mask = reduce(pc.and_, masks, pa.array(np.ones(len(rows), dtype=bool)))
            matched = pc.indices_nonzero(pc.fill_null(mask, False)).to_numpy()
            if len(matched := matched[matched + first >= start]):
                complete = next(batch for place, batch in whole if place == number)
                for row, values in zip(matched.tolist(), complete.take(pa.array(matched)).to_pylist(), strict=True):
                    yield first + row, FoundRecord(**length_row(values))
            first += len(rows)


def _column(rows: Any, name: str) -> Any:
    if name not in rows.schema.names:  # a table of records without videos or audio
        return pa.nulls(len(rows), pa.int64())
    return rows[name].dictionary_decode() if pa.types.is_dictionary(rows[name].type) else rows[name]


def find_records(
    folder: PackedFolder, *, ident: str | None = None, location: str | None = None
) -> Sequence[FoundRecord]:
    """Find the samples of a record in the packs, in input order; of a split record, its fragments.

    Records may share an id, and an input with a weight above 1 is read several times.

    Args:
        folder: the dataset.
        ident: id of the samples.
        location: FILE:LINE of the record, with lines from 1; FILE:ROW for formats without lines and folders of images,
            with rows from 0. FILE may be the end of the path, such as the file name.

    Raises:
        ConfigError: there is no such record, it is in no pack, or the table has no places.
        FormatError: the table cannot be read.
    """
    table = folder.path.parent / "lengths.parquet"
    try:
        with open_lengths(table) as file:
            if location is not None:
                found = _at_location(file, location)
            else:
                found = _records(file, (["id"], lambda ids: pc.equal(ids, ident)))
            if split := [each for each in found if each.status == SPLIT]:
                # Their fragments, in one pass for all of them.
                rows = _records(
                    file, (["source", "row"], lambda *rows: reduce(pc.or_, [_is_at(each, *rows) for each in split]))
                )
                found += [record for record in rows if record not in found]
    except FileNotFoundError as error:
        raise ConfigError(
            f"{table} must exist to find records. Run the pack command of the dataset again, which keeps its shards "
            "and writes the table."
        ) from error
    if not found:
        raise ConfigError(f"`ident` must be the id of a record, got {ident!r}, which {table} does not have.")
    packed = [record for record in found if record.pack is not None]
    if not packed:
        raise ConfigError(_not_packed(folder.path.parent / "rejects.jsonl", found))
    return packed


def _records(file: Any, *tests: Test) -> list[FoundRecord]:
    return [record for _, record in _matching(file, tests) if record is not None]


def _is_at(record: FoundRecord, sources: Any, rows: Any) -> Any:
    return pc.and_(pc.equal(sources, record.source), pc.equal(rows, record.row))


def _at_location(file: Any, location: str) -> list[FoundRecord]:
    """Find the record at FILE:LINE or FILE:ROW."""
    path, _, number = location.rpartition(":")
    if not path or not number.isdecimal():
        raise ConfigError(
            f"`location` must be FILE:LINE, got {location}. Lines are counted from 1; for tables and folders of "
            "images, pass FILE:ROW, with rows from 0, or use `ident`."
        )
    source = _source_of(file, path)
    # The lines of a file are known for all of its records, or for none.
    found = _records(file, (["source"], lambda files: pc.equal(files, source)), *record_tests(line=int(number)))
    if not found:
        raise ConfigError(
            f"`location` must be the place of a record, got {location}. The line is blank, or after the "
            f"end of {source}. Lines are counted from 1, and rows of tables from 0."
        )
    if found[0].line is None and JsonlSource.matches(Path(source)):
        raise ConfigError(
            f"`location` must be in a file whose lines are known, got {location}. They are not known in input parts, "
            "nor of files in object stores. Use `ident`."
        )
    return found


def _source_of(file: Any, path: str) -> str:
    """Find the input file with this path, absolute path or end of the path, or with a path that is the end of this."""
    batches = read_lengths(file, ["source"])
    names: dict[str, None] = dict.fromkeys(
        name for rows in batches for name in pc.unique(rows["source"]).to_pylist() if name is not None
    )
    parts = Path(path).parts
    for matches in (
        [name for name in names if name == path],
        [name for name in names if os.path.abspath(name) == os.path.abspath(path)],
        [name for name in names if Path(name).parts[-len(parts) :] == parts],
        # The input was packed by a relative path, in another folder.
        [name for name in names if parts[-len(Path(name).parts) :] == Path(name).parts],
    ):
        if len(matches) == 1:
            return matches[0]
        if matches:
            raise ConfigError(
                f"`location` must name one input, got {path}, which is {_listed(matches)}. Pass more of its path."
            )
    raise ConfigError(
        f"`location` must be in an input of the dataset, got {path}. Its inputs are {_listed(list(names))}. "
        "Pass one of them with the line or row of the record, or use `ident`."
    )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more


def _not_packed(rejects: Path, found: Sequence[FoundRecord]) -> str:
    """Message for records that are in no pack, with the reason of the first."""
    first = found[0]
    reason = "the run stopped before it was packed"
    if first.status in {value.value for value in Reason}:
        reason = f"{first.status}{_detail(rejects, first)}"
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return f"record {first.id!r}, {first.place}, is in no pack{more}: {reason}"


def _detail(rejects: Path, record: FoundRecord) -> str:
    """Detail of a rejected record in rejects.jsonl, after a colon; "" if it has none."""
    if not rejects.is_file():
        return ""
    place = (record.source, record.row)
    details = (line["detail"] for line in read_rejects(rejects) if (line["source"], line.get("row")) == place)
    return "".join(f": {detail}" for detail in islice(details, 1))
