"""Reports and limits of rejected records, against the same lists in plain Python."""

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from energon_packed import (
    Conversation,
    EncodedSample,
    PackOptions,
    Processor,
    RejectLimitError,
    SourceConfig,
    pack,
)
from tests.audio import signal, write
from tests.internals import Folder, chunks, open_sources, reader, rejects, reports, table
from tests.videos import make_video

FRAGMENT = table.FRAGMENT
OVERLONG = chunks.STATUSES.index("overlong")
REQUESTED = ("dropped_by_adapter", "not_sampled")
COUNTS = [
    {},
    {"overlong": 3},
    {"not_sampled": 9, "bad_json": 1},
    {"missing_image": 2, "overlong": 4, "bad_json": 2, "dropped_by_adapter": 50},
    {
        "bad_json": 1,
        "bad_role": 2,
        "empty": 3,
        "overlong": 4,
        "missing_image": 5,
        "corrupt_image": 6,
        "not_sampled": 7,
    },
]


class Words(Processor):
    def encode(self, conversation: Conversation) -> EncodedSample:
        ids = np.arange(len(str(conversation.text).split()))
        return EncodedSample(input_ids=ids, labels=ids)


def options_of(**values: Any) -> PackOptions:
    settings = {"inputs": ("a.jsonl",), "output_dir": Path("out"), "encoder": Words(), "seq_len": 50, **values}
    return PackOptions(**settings)


class Input:
    """Records of a JSONL file that is read twice and of two Parquet files, in chunks; one chunk has no record.

    Attributes:
        records: expected source, row, line, id, length, images, videos, status and detail of each record.
        rejected: a `TableRejects` of the same records.
        fragments: of some records of text.
    """

    def __init__(self, folder: Path, *, videos: bool = True, seed: int = 0, **named: Any) -> None:
        rng = random.Random(seed)
        lines = [json.dumps({"text": "w" * rng.randint(1, 9)}) for _ in range(7)]
        paths = [folder / "a.jsonl", folder / "b.parquet", folder / "c.parquet"]
        paths[0].write_text("\n\n".join(lines) + "\n")  # every second line is blank
        pq.write_table(pa.table({"text": ["x"] * 5}), paths[1])
        pq.write_table(pa.table({"text": ["x"] * 4}), paths[2])
        inputs = [SourceConfig(path=(str(paths[0]),), weight=2), *map(str, paths[1:])]
        sources = open_sources(inputs, work_dir=folder)
        assert [source.path for source in sources] == [paths[0], *paths]
        self.records: list[dict[str, Any]] = []
        columns: dict[str, list[int]] = {name: [] for name in chunks.NUMERIC}
        self.file_starts, files, source_starts = [], [], [0]
        for number, (source, sizes) in enumerate(zip(sources, [(3, 4), (7, 0), (2, 2, 1), (4,)], strict=True)):
            addresses = [sum(len(line) + 2 for line in lines[:row]) for row in range(7)]
            row = 0
            for size in sizes:
                self.file_starts.append(len(self.records))
                files.append(folder / f"{len(files)}.arrow")
                own: list[dict[str, Any]] = []
                for _ in range(size):
                    status = rng.choice([0] * 20 + [OVERLONG] * 6 + [*range(1, len(chunks.STATUSES))])
                    if not self.records:
                        status = 0
                    is_long = chunks.STATUSES[status] == "overlong"
                    ident = rng.choice([None, f"id{len(self.records)}", "é"])
                    default = f"{source.path.stem}:{row}" + "#2" * (number == 1)
                    one = {
                        "source": str(source.path),
                        "row": row,
                        "line": 2 * row + 1 if number < 2 else None,
                        "id": default if ident is None else ident,
                        "length": -1 if status and not is_long else rng.randint(1, 90) if self.records else 0,
                        "num_images": rng.randint(0, 3),
                        "num_videos": rng.randint(0, 2) if videos else 0,
                        "status": chunks.STATUSES[status],
                        "detail": None if is_long or not status else f"fault  of\n{row}",
                        "ident": ident,
                    }
                    own.append(one)
                    self.records.append(one)
                    values = {"address": addresses[row] if number < 2 else row, "size": len(lines[row]) + 1}
                    for name, column in columns.items():
                        column.append({**one, **values, "status": status}.get(name, 0))
                    row += 1
                rows = slice(len(self.records) - size, None)
                chunk = {name: column[rows] for name, column in columns.items()}
                texts = {"id": [one["ident"] for one in own], "detail": [one["detail"] for one in own]}
                counts = {name: Counter() for name in chunks.COUNTED}
                chunks.write_rows(files[-1], {**chunk, **texts}, counts, chunks.MediaFiles())
            source_starts.append(len(self.records))
        arrays = {name: np.array(column, dtype=chunks.NUMERIC[name]) for name, column in columns.items()}
        self.table = table.RecordTable(
            **arrays,
            source_starts=np.array(source_starts),
            folder=files[0].parent,
            files=files,
            file_starts=np.array(self.file_starts),
            counts={},
        )
        self.reader = reader.RecordReader(sources=sources, sample_class="auto", use_patch_positions=True)
        self.rejected = reports.TableRejects(table=self.table, reader=self.reader, status=arrays["status"], **named)
        found: list[tuple[int, ...]] = []
        for record, one in enumerate(self.records):
            if one["status"] == "packed" and one["length"] > 50 and not one["num_videos"]:
                middle = one["length"] - 40
                found.append((record, 0, 0, 50, 0, 0, 1, 50, one["length"], 0))
                found.append((record, 1, middle, one["length"], 1, 1, one["num_images"], 40, one["length"], 0))
        self.fragments = np.array(found, dtype=FRAGMENT)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("videos", [False, True])
def test_reports_list_every_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, is_split: bool, videos: bool
) -> None:
    monkeypatch.setattr(reports, "_GROUP_ROWS", 8)  # memory grows with the row groups
    options = options_of(overlong="split" if is_split else "truncate", sample_class="PackedTokensSample")
    data = Input(tmp_path, videos=videos, seed=seed, options=options)
    fragments = data.fragments if is_split else None
    assert len(data.fragments) > 1
    count = len(data.records) + (len(data.fragments) if is_split else 0)
    rng = random.Random(seed)
    packs = [rng.choice([-1, *range(12)]) for _ in range(count)]
    samples = [rng.randint(0, 4) if pack >= 0 else 0 for pack in packs]
    places = reports.SamplePlaces(
        np.array(packs, dtype=np.int32),
        np.array(samples, dtype=np.int32),
        np.array([0, 5, 11]),
        pa.array(["x", "y", "z"]),
        "out",
    )
    folder = Folder(tmp_path)
    reports.write_reports(data.rejected, fragments, usable_len=50, output=folder, fingerprint="f0", places=places)
    expected: list[dict[str, Any]] = []
    groups = [0]
    ends = [*data.file_starts[1:], len(data.records)]
    for start, end in zip(data.file_starts, ends, strict=True):
        parts: list[tuple[dict[str, Any], int]] = []
        for record in range(start, end):
            one = data.records[record]
            long_status = "split" if is_split and not one["num_videos"] else "truncated"
            is_long = one["status"] == "packed" and one["length"] > 50
            parts.append(({**one, "status": long_status if is_long else one["status"]}, record))
        for index, part in enumerate(data.fragments.tolist() if is_split else ()):
            record, number, first, stop, _, first_image, last_image, *_ = part
            if start <= record < end:
                own = {"id": f"{data.records[record]['id']}#{number}", "length": stop - first, "status": "fragment"}
                own |= {"num_images": last_image - first_image, "num_videos": 0}
                parts.append(({**data.records[record], **own}, len(data.records) + index))
        groups[-1] += len(parts)
        groups += [0] if groups[-1] >= 8 else []
        for one, entry in parts:
            pack = packs[entry]
            row = {name: one[name] for name in ("source", "row", "line", "id", "length", "num_images", "status")}
            row["length"] = None if one["length"] < 0 else one["length"]
            row["pack"] = None if pack < 0 else f"out_{pack:08d}"
            row["sample"] = None if pack < 0 else samples[entry]
            row["shard"] = None if pack < 0 else "x" if pack < 5 else "y" if pack < 11 else "z"
            expected.append(row | ({"num_videos": one["num_videos"]} if videos else {}))
    file = pq.ParquetFile(tmp_path / "lengths.parquet")
    assert file.read().to_pylist() == expected
    kinds = {
        "row": pa.int64(),
        "line": pa.int64(),
        "length": pa.int32(),
        "num_images": pa.int32(),
        "sample": pa.int32(),
    }
    assert all(file.schema_arrow.field(name).type == kind for name, kind in kinds.items())
    assert [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)] == [*filter(None, groups)]
    group = file.metadata.row_group(0)
    columns = {group.column(place).path_in_schema: group.column(place) for place in range(group.num_columns)}
    packed = {name for name, column in columns.items() if "RLE_DICTIONARY" in column.encodings}
    assert packed == set(columns) - {"row", "line", "id", "pack"}
    assert {name for name, column in columns.items() if "DELTA_BINARY_PACKED" in column.encodings} == {"row", "line"}
    lines = (tmp_path / "rejects.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == rejected_of(data, options)


def rejected_of(data: Input, options: PackOptions) -> list[dict[str, Any]]:
    """The lines of rejects.jsonl."""
    found = []
    for one in data.records:
        if one["status"] == "packed":
            continue
        detail = one["detail"]
        if detail is None:
            detail = ""
            if one["length"] > 50:
                detail = f"{one['length']} tokens, more than seq_len {options.seq_len}"
            if detail and options.overlong == "split":
                detail += "; conversations are not split: raise seq_len, or set overlong to truncate"
        row = {name: one[name] for name in ("source", "row", "line", "id")}
        found.append({**row, "reason": one["status"], "detail": detail})
    return found


def test_rejects_in_memory_are_those_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = options_of()
    data = Input(tmp_path, seed=4, options=options)
    expected = rejected_of(data, options)
    report = data.rejected.report()
    assert report.rows == expected
    assert report.counts == data.rejected.counts == Counter(row["reason"] for row in expected)
    for reason in report.counts:
        found = [each._asdict()["row"] for each in data.rejected.rows(reason)]
        assert found == [row["row"] for row in expected if row["reason"] == reason]
    monkeypatch.setattr(reports, "MOST_ROWS", 3)
    assert data.rejected.report().rows == report.rows[:3]
    # A sample of the records has no lines.
    sample = reports.TableRejects(table=data.table, reader=data.reader, status=data.table.status, is_sample=True)
    assert {each.line for each in sample.rows()} == {None}
    assert {each.detail for each in sample.rows("overlong")} == {""}


@pytest.mark.parametrize(
    ("values", "most", "detail"),
    [
        ({}, None, "60 tokens, more than seq_len 50"),
        ({"pad_multiple": 16}, None, "60 tokens, more than seq_len 50 down to a multiple of pad_multiple 16, 48"),
        ({"pad_multiple": 25}, None, "60 tokens, more than seq_len 50"),
        (
            {"pad_multiple": 16, "overlong": "split"},
            2,
            "60 tokens, more than seq_len 50 down to a multiple of pad_multiple 16, 48; conversations are not split: "
            "raise seq_len, or set overlong to truncate",
        ),
        ({"seq_len": 60}, 2, "3 images, more than max_images 2"),
        ({"seq_len": 60}, None, ""),
        ({"seq_len": 59}, 2, "60 tokens, more than seq_len 59"),
    ],
)
def test_details_of_samples_that_do_not_fit(tmp_path: Path, values: Any, most: int | None, detail: str) -> None:
    data = Input(tmp_path)
    data.table.length[:], data.table.num_images[:] = 60, 3
    flavor = {"sample_class": "PackedTokensSample"}
    rejected = reports.TableRejects(
        table=data.table,
        reader=data.reader,
        status=data.table.status,
        details={0: "cannot be cut"},
        options=options_of(**flavor, **values),
        max_images=most,
    )
    assert [rejected.row(2, 5, "x", text).detail for text in (None, "", "own")] == [detail, detail, "own"]
    assert [rejected.row(0, 5, "x", text).detail for text in (None, "own")] == ["cannot be cut", "own"]


def ranked(counts: dict[str, int]) -> list[str]:
    """Reasons: requested ones last, then by count, then by name."""
    names = sorted(counts)
    names.sort(key=counts.__getitem__, reverse=True)
    return [name for name in names if name not in REQUESTED] + [name for name in names if name in REQUESTED]


@pytest.mark.parametrize("counts", COUNTS)
def test_summaries_list_reasons_with_the_most_common_first(counts: dict[str, int]) -> None:
    asked: list[str] = []

    def example(reason: str) -> str:
        asked.append(reason)
        return f"the {reason}"

    names = ranked(counts)
    listed = [f"{counts[name]} x {name}" + f", e.g. the {name}" * (n < 5) for n, name in enumerate(names)]
    assert rejects.summary(counts, example) == "; ".join(listed)
    assert asked == names[:5]
    assert rejects.by_reason(counts) == ", ".join(f"{name} {counts[name]}" for name in names)
    hint = rejects.advice(counts)
    advised = rejects.summary(counts, example, advise=True)
    if names:
        assert rejects.main_reason(counts) == names[0]
        if hint:
            listed[0] += f" ({hint})"
    assert advised == "; ".join(listed)
    assert rejects.advice({"empty": 1}) == ""
    assert bool(hint) == (names[:1] in (["overlong"], ["bad_json"]))
    line = rejects.warning_of(counts, 99, "the report")
    is_silent = set(names) <= set(REQUESTED)
    expected = f"{sum(counts.values())} of 99 records are rejected ({rejects.by_reason(counts)}); see the report"
    assert line == ("" if is_silent else expected)
    assert rejects.warning_of({"not_sampled": 3}, 99, "x") == ""
    failures = [name for name in counts if rejects.is_failure(name)]
    assert failures == [name for name in counts if name not in (*REQUESTED, "overlong")]


def test_examples_are_one_short_line() -> None:
    def example(detail: str, line: int | None = None, **named: Any) -> str:
        return rejects.example_of(rejects.Rejected("a.jsonl", 4, line, "x", "empty", detail), **named)

    assert example(" no\n turns ", 5) == "line 5 of a.jsonl: no turns"
    assert example("no turns") == "row 4 of a.jsonl: no turns"
    assert example("no turns", 5, is_sample=True) == "a record of a.jsonl: no turns"
    assert example("x" * 200) == f"row 4 of a.jsonl: {'x' * 200}"
    assert example("x" * 201) == f"row 4 of a.jsonl: {'x' * 199}…"


def test_an_input_without_a_usable_record_is_named() -> None:
    empty = "none of 0 records can be packed: the input is empty; pass a file with records"
    assert str(rejects.none_packed(0, "", "")) == empty
    assert str(rejects.none_packed(3, "3 x empty", "")) == "none of 3 records can be packed: 3 x empty"
    one = rejects.none_packed(3, "3 x empty", "add text", "sampled records")
    assert str(one) == "none of 3 sampled records can be packed: 3 x empty; add text"
    assert isinstance(one, RejectLimitError)


def line_of(reason: str) -> Any:
    return rejects.Rejected("a.jsonl", 4, 5, "x", reason, "why")


def raised(check: Any, *arguments: Any, **named: Any) -> str | None:
    try:
        check(*arguments, **named)
    except RejectLimitError as error:
        return str(error)
    return None


def test_one_record_stops_a_strict_run() -> None:
    limits = rejects.RejectLimits
    strict, none, error = limits(strict=True), limits(), limits(overlong="error")
    bad = "record x of a.jsonl is rejected: bad_json: why (`strict` stops at the first)"
    long = "record x of a.jsonl is rejected: overlong: why"
    remedy = " (`overlong` is 'error'); raise `seq_len`, or set `overlong` to drop or truncate"
    assert raised(strict.check_record, line_of("bad_json")) == bad
    found = raised(strict.check_record, line_of("overlong"), more=", and more")
    assert found == f"{long} (`strict` stops at the first)"
    assert raised(error.check_record, line_of("overlong")) == long + remedy
    assert raised(error.check_record, line_of("overlong"), more=", and more") == f"{long}, and more{remedy}"
    assert raised(limits(strict=True, overlong="error").check_record, line_of("overlong")) == long + remedy
    for lenient, reason in ((none, "overlong"), (none, "bad_json"), (error, "bad_json"), (strict, "not_sampled")):
        assert raised(lenient.check_record, line_of(reason)) is None


def example(reason: str) -> str:
    return f"the {reason}"


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("packed", [0, 1, 30])
def test_limits_stop_a_run_with_more_rejected_records(counts: dict[str, int], packed: int) -> None:
    rejected = sum(count for name, count in counts.items() if name not in REQUESTED)
    failed = rejected - counts.get("overlong", 0)
    listed, advised = rejects.summary(counts, example), rejects.summary(counts, example, advise=True)
    hint = rejects.advice(counts)
    for most in (None, 0, failed, failed - 1, failed + 1):
        for share in (None, 0.0, rejected / (packed + rejected or 1), 0.3, 0.99 * rejected / (packed + rejected or 1)):
            if most is not None and most < 0:
                continue
            limits = rejects.RejectLimits(max_failures=most, max_reject_rate=share)
            count = None
            if most is not None and failed > most:
                count = f"{failed} records were rejected (limit `max_failures` {most}): {rejects.by_reason(counts)}. "
                count += "Fix the data, or raise `max_failures`"
            assert raised(limits.check_failures, counts) == count
            for report, what in (("", "records"), ("out/rejects.jsonl", "sampled records")):
                expected = None
                if not packed and not counts:
                    expected = "none of 0 records can be packed: the input is empty; pass a file with records"
                elif not packed:
                    expected = f"none of {sum(counts.values())} {what} can be packed: {listed}"
                    expected += f"; {hint}" * bool(hint) + f"; {report} lists all" * bool(report)
                elif count is not None:
                    expected = count
                elif share is not None and rejected > share * (packed + rejected):
                    expected = (
                        f"{rejected} of {packed + rejected} {what} ({100 * rejected / (packed + rejected):.1f}%) were "
                        f"rejected (limit `max_reject_rate` {share:g}): {advised}. "
                        + f"See {report}. " * bool(report)
                        + "Fix the data or raise `max_reject_rate`"
                    )
                found = raised(limits.check_all, counts, packed, example, report, what)
                assert found == expected
                if not report:
                    assert raised(limits.check_all, counts, packed, example) == expected
            for window in (rejected, 2 * rejected + 1, 100):
                expected = None
                if share is not None and rejected > share * window:
                    expected = (
                        f"{rejected} of the last 40 records were rejected (limit `max_reject_rate` {share:g} of "
                    )
                    expected += f"{window}): {advised}. Fix the data or raise `max_reject_rate`"
                assert raised(limits.check_window, counts, rejected, 40, window, example) == expected


def test_limits_of_a_table_name_its_first_and_its_longest_record(tmp_path: Path) -> None:
    limits, status = rejects.RejectLimits, chunks.STATUSES.index
    data = Input(tmp_path, options=options_of())
    records, counts = data.table, data.table.status
    records.length[:], counts[:] = 10, 0
    where = tmp_path / "b.parquet"

    def stopped(**values: Any) -> str | None:
        return raised(data.rejected.check, limits(**values), "the report")

    assert stopped(strict=True, overlong="error", max_failures=0, max_reject_rate=0) is None
    assert data.rejected.summary() == ""
    counts[15], records.length[15] = OVERLONG, 60  # the second record of the Parquet file
    ident = data.records[15]["id"]
    first = f"record {ident} of {where} is rejected: overlong: 60 tokens, more than seq_len 50"
    remedy = " (`overlong` is 'error'); raise `seq_len`, or set `overlong` to drop or truncate"
    assert stopped(overlong="error") == first + remedy
    assert stopped(overlong="error", strict=True) == first + remedy
    assert stopped(strict=True) == first + " (`strict` stops at the first)"
    counts[18], records.length[18] = OVERLONG, 70
    counts[19] = status("not_sampled")
    more = ", the first of 2 such records (the longest sample has 70 tokens)"
    assert stopped(overlong="error") == first + more + remedy
    counts[16] = status("empty")
    counts[14] = status("dropped_by_adapter")
    assert stopped(overlong="error") == first + more + remedy
    assert stopped(strict=True) == first + " (`strict` stops at the first)"
    long = f"row 1 of {where}: 60 tokens, more than seq_len 50 (the longest sample has 70 tokens)"
    others = [f"1 x empty, e.g. row 2 of {where}: ", f"1 x dropped_by_adapter, e.g. row 0 of {where}: "]
    others.append(f"1 x not_sampled, e.g. row 0 of {tmp_path / 'c.parquet'}: ")
    expected = "; ".join([f"2 x overlong, e.g. {long}", *others])
    assert data.rejected.summary() == expected
    assert stopped() is None
    assert stopped(max_failures=1, max_reject_rate=0.5) is None
    hint = rejects.advice({"overlong": 2})
    rate = (
        f"3 of {len(records) - 2} records ({3 / (len(records) - 2):.1%}) were rejected (limit `max_reject_rate` 0.1): "
    )
    listed = expected.replace(long, f"{long} ({hint})")
    assert stopped(max_reject_rate=0.1) == f"{rate}{listed}. See the report. Fix the data or raise `max_reject_rate`"
    # Too many images, and no options: no length is compared.
    records.length[:] = 10
    assert "longest" not in data.rejected.summary()
    records.length[15] = 50
    assert "longest" not in data.rejected.summary()
    sample = reports.TableRejects(table=records, reader=data.reader, status=counts, is_sample=True)
    assert sample.summary().startswith(
        f"2 x overlong, e.g. a record of {where}: ; 1 x empty, e.g. a record of {where}: "
    )
    counts[counts == 0] = status("empty")
    empty = f"none of {len(records)} sampled records can be packed: "
    assert str(raised(sample.check, limits())).startswith(empty)
    assert str(raised(data.rejected.check, limits())).startswith(empty.replace("sampled ", ""))


def test_media_that_the_encoder_does_not_measure_reject_their_record(tmp_path: Path) -> None:
    write(tmp_path / "a", "flac", signal(16_000, 16_000), 16_000)
    make_video(tmp_path / "a.mp4", frames=4)
    records = [
        {"text": "one two"},
        {"text": "<audio>one", "audios": ["a.flac"]},
        {"text": "<video>one", "videos": ["a.mp4"]},
    ]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    result = pack(data, output_dir=tmp_path / "out", encoder=Words(), seq_len=50, workers=1, max_reject_rate=1)
    rejected = [json.loads(line) for line in result.rejects.read_text().splitlines()]
    assert [(line["row"], line["reason"], line["detail"]) for line in rejected] == [
        (1, "unsupported_media", "its encoder counts no samples of audio; use a ChatEncoder"),
        (2, "unsupported_media", "its encoder selects no frames of videos; use a ChatEncoder, or frames as images"),
    ]
