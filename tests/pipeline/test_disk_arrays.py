"""Arrays of all records are files: the same bytes as in memory, and nothing of them is left."""

import errno
import json
import mmap
import os
import subprocess
import sys
import tempfile
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from energon_packed import Progress, Reason, Reject, pack
from tests.internals import (
    arrays,
    compare,
    described,
    files,
    index_stage,
    plan_stage,
    planner,
    rejects,
    text_fragments,
)
from tests.pipeline.test_planning import Characters, options_of, table_of


@pytest.fixture
def all_in_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_IN_MEMORY", 1)
    for module, name, size in (
        (arrays, "BLOCK", 3),
        (plan_stage, "_BUCKET", 5),
    ):
        monkeypatch.setattr(module, name, size)


@pytest.fixture
def in_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also arrays of few entries are files, and blocks are short."""
    monkeypatch.setattr(files, "_IN_MEMORY", 1)
    for module, name in ((arrays, "BLOCK"), (plan_stage, "_BUCKET")):
        monkeypatch.setattr(module, name, 1 << 10)


def growth(run: Callable[[int], Callable[[], object]]) -> float:
    """Bytes of memory per entry beside mapped files, from the peaks of two sizes; `run` prepares a step."""
    peaks = []
    for count in (30_000, 90_000):
        step = run(count)
        tracemalloc.start()
        try:
            kept = step()
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
        del kept, step
    return (peaks[1] - peaks[0]) / 60_000


def texts(folder: Path, words: list[int]) -> Path:
    """Documents with these numbers of words; the second line is not a record."""
    lines = [json.dumps({"text": "word " * count}) for count in words]
    data = folder / "data.jsonl"
    data.write_text("\n".join([lines[0], "no JSON", "", *lines[1:]]) + "\n")
    return data


def test_an_array_has_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = files.disk_array(tmp_path, 1 << 18, np.int32)
    assert (array.shape, array.dtype, array.any()) == ((1 << 18,), np.int32, False)
    array[:] = np.arange(1 << 18)
    assert (array == np.arange(1 << 18)).all()
    assert isinstance(array.base.obj, mmap.mmap)
    small = files.disk_array(tmp_path, 3, np.int32)
    small[:] = 1
    assert small.base is None
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(files, "_IN_MEMORY", 1)
    assert files.disk_array(tmp_path, 0, np.int64).shape == (0,)


def test_a_killed_process_leaves_no_file(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from tests.internals import files\n"
        "files.disk_array(Path(sys.argv[1]), 1 << 20, 'i8')[:] = 1; os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == -9
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlong": "split", "sample_class": "PackedTokensSample"},
        {"overlong": "truncate", "group_by": "media", "algorithm": "window_7"},
        {"unpacked": True},
        {"algorithm": "sequential", "max_samples_per_pack": 3, "pad_multiple": 8},
    ],
    ids=str,
)
def test_the_bytes_are_those_of_arrays_in_memory(
    tmp_path: Path, options: dict[str, object], request: pytest.FixtureRequest
) -> None:
    rng = np.random.default_rng(0)
    data = texts(tmp_path, rng.integers(0, 14, 60).tolist())
    values = {
        "encoder": Characters(),
        "seq_len": 40,
        "shard_prefix": "d",
        "max_packs_per_shard": 5,
        "max_reject_rate": 1.0,
        **options,
    }

    def content(name: str) -> dict[str, bytes]:
        folder = pack(data, output_dir=tmp_path / name, workers=1, **values).shards.parent
        assert not list(folder.rglob(".*.tmp"))
        found = [file for file in folder.rglob("*") if file.is_file() and ".work" not in file.parts]
        return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(found)}

    expected = content("memory")
    request.getfixturevalue("all_in_files")
    assert content("files") == expected


def test_a_full_disk_is_an_error_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, all_in_files: None
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"No space left on device for 32 B.*measure-") as caught:
        pack(texts(tmp_path, [2, 3, 4]), output_dir=tmp_path / "out", encoder=Characters(), seq_len=40)
    assert caught.value.errno == errno.ENOSPC


@pytest.mark.parametrize(
    ("number", "remedy"),
    [(errno.ENOSPC, "free some space, or use a folder on another disk, "), (errno.EROFS, "use a folder that can be")],
)
def test_an_error_of_temporary_files_names_their_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, remedy: str
) -> None:
    def fails(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", fails)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    numbers = files.DiskList(np.int64)
    with pytest.raises(OSError, match=r"of temporary files, whose folder TMPDIR sets") as caught:
        numbers.extend(np.zeros(1 << 18, dtype=np.int64))
    line = f"{tmp_path}: {os.strerror(number)} for 2.0 MiB of temporary files, whose folder TMPDIR sets; {remedy}"
    assert described(caught.value).startswith(line)


def test_a_process_without_a_folder_of_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python tries TMPDIR, and then others."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/absent", "/proc"])
    with pytest.raises(OSError, match="No usable temporary directory found in") as caught:
        files.disk_array(None, 1 << 18, np.int64)
    assert described(caught.value) == (
        "TMPDIR: No usable temporary directory found in ['/absent', '/proc'] for 2.0 MiB of temporary files, whose "
        "folder TMPDIR sets"
    )


@pytest.mark.parametrize("dtype", [np.int64, np.uint64, np.uint32])
def test_numbers_are_appended(all_in_files: None, monkeypatch: pytest.MonkeyPatch, dtype: type) -> None:
    """From lists and arrays, in any order; sorted again if numbers were appended."""
    monkeypatch.setattr(files, "_WAITING", 3)
    rng, expected, numbers = np.random.default_rng(0), list[int](), files.DiskList(dtype)
    assert numbers.sorted().tolist() == numbers.repeated().tolist() == []
    for size in rng.integers(0, 6, 40).tolist():
        part = rng.integers(0, 150, size)
        numbers.extend(part.astype(dtype) if size % 2 else part.tolist())
        expected += part.tolist()
        assert len(numbers) == len(expected)
    assert numbers.values.tolist() == expected
    assert isinstance(numbers.values.base.base.obj, mmap.mmap)
    assert numbers.repeated().tolist() == sorted({number for number in expected if expected.count(number) > 1})
    assert numbers.values.tolist() == sorted(expected)
    numbers.extend([0, 2])
    assert numbers.sorted().tolist() == sorted([*expected, 0, 2])


@pytest.mark.parametrize("kind", ["samples", "groups"])
@pytest.mark.parametrize(
    ("algorithm", "max_samples"),
    [("bfd", None), ("ffd", None), ("sequential", None), ("sequential", 1), ("window_64", None), ("window_9000", 3)],
)
def test_memory_of_the_planner(
    tmp_path: Path, in_files: None, algorithm: str, max_samples: int | None, kind: str
) -> None:
    """Packs have two samples: an array of packs in memory would count."""
    empty = partial(files.disk_array, tmp_path)

    def run(count: int) -> Callable[[], object]:
        rng = np.random.default_rng(0)
        lengths = np.clip(rng.lognormal(4, 0.3, count), 1, 128).astype(np.int32)
        groups = rng.permutation(count) // 2 if kind == "groups" else None
        return lambda: planner.assign(lengths, 128, algorithm, max_samples, 1, groups, empty)

    assert growth(run) < 1


@pytest.mark.parametrize("algorithm", ["ffd", "sequential", "window_64"])
def test_memory_of_counted_packs(in_files: None, algorithm: str) -> None:
    def run(count: int) -> Callable[[], object]:
        lengths = np.clip(np.random.default_rng(0).lognormal(4, 0.3, count), 1, 128).astype(np.int32)
        return lambda: compare(lengths, [128, 256], records=count, algorithm=algorithm)

    assert growth(run) < 1


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"algorithm": "ffd", "group_by": "media"},
        {"algorithm": "sequential"},
        {"algorithm": "window_64"},
        {"unpacked": True},
        {"grouped": True},
        {"grouped": True, "group_by": "media", "max_samples_per_pack": 5},
        {"members": True},
    ],
    ids=str,
)
def test_memory_of_the_plan(tmp_path: Path, in_files: None, values: dict[str, Any]) -> None:
    values = dict(values)
    grouped, members = values.pop("grouped", False), values.pop("members", False)
    options = options_of(seq_len=128, **values)

    def run(count: int) -> Callable[[], object]:
        rng = np.random.default_rng(0)
        records = table_of(count, status=[0] * count, kind=np.arange(count) // 2 % 3)
        records.length[:] = np.clip(rng.lognormal(3 if grouped or members else 4, 0.3, count), 1, 64)
        records = replace(records, folder=tmp_path)
        if grouped:
            records.group[:] = rng.integers(1, 2**62, count // 2)[np.arange(count) // 2]
        if members:
            records.members[:] = 2
            samples = np.zeros(2 * count, dtype=records.samples.dtype)
            samples["record"], samples["number"], samples["member"] = np.arange(2 * count) // 2, [0, 1] * count, 1
            samples["stop"] = 20
            records = replace(records, samples=samples)

        def step() -> object:
            reader = SimpleNamespace(part=None, sources=[])
            entries = plan_stage.plan_rejects(records, options, reader, None)[1]
            packs, pack, place = plan_stage.plan_packs(entries, options)
            shards = plan_stage.plan_shards(packs, pack, entries, options)
            places = plan_stage.sample_places(pack, place, shards, options)
            plan = SimpleNamespace(entries=entries, packs=packs, places=places)
            read = plan_stage.in_order(plan, [entries.address, entries.length, records.size])
            return packs, shards, places, entries.group_numbers(), read

        return step

    assert growth(run) < 1


class Results:
    """An engine whose tasks end in the other order, with the same result for each record.

    Args:
        result: of a record, by its index.
    """

    def __init__(self, result: Callable[[int], object]) -> None:
        self._result = result

    def run(self, function: object, tasks: Iterable[Any]) -> Iterator[list[tuple[int, object]]]:
        for few in batched(tasks, 3):
            for task in reversed(few):
                yield [(row, self._result(row)) for row in reversed(task.rows.tolist())]


def batched(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    left = iter(items)
    while few := list(islice(left, size)):
        yield few


def three(row: int) -> Any:
    """Fragments of a record."""
    fragments = text_fragments(np.array([100]), 40, 10)
    fragments["record"] = row
    return fragments


@pytest.mark.parametrize(
    ("values", "columns", "result"),
    [
        ({}, {}, None),
        ({"overlong": "split"}, {}, None),
        ({"overlong": "split"}, {"divisible": 1, "supervised": 99}, None),
        ({"overlong": "split"}, {"divisible": 1}, three),
        ({"overlong": "truncate"}, {}, lambda row: Reject(Reason.NO_SUPERVISED_TOKENS, f"no target in record {row}")),
        ({}, {"members": 2}, None),
        ({}, {"group": lambda row: row // 2 + 1}, None),
        ({}, {"group": lambda row: row // 2 + 1, "status": lambda row: row % 2}, None),
    ],
    ids=["drop", "not split", "text", "split", "truncate", "members", "groups", "groups with a reject"],
)  # fmt: skip
def test_memory_of_rejected_and_split_records(
    tmp_path: Path, in_files: None, values: dict[str, Any], columns: dict[str, Any], result: Any
) -> None:
    """All records are longer than a row."""
    given = {"length": 100, "num_images": 0, "status": 0, **columns}

    def run(count: int) -> Callable[[], object]:
        rows = np.arange(count)
        filled = {name: np.broadcast_to(own(rows) if callable(own) else own, count) for name, own in given.items()}
        records = replace(table_of(count, **filled), folder=tmp_path)
        if "members" in columns:
            samples = np.zeros(2 * count, dtype=records.samples.dtype)
            samples["record"], samples["stop"] = np.arange(2 * count) // 2, 50
            records = replace(records, samples=samples)
        reader = SimpleNamespace(part=None, sources=[])

        def step() -> object:
            rejects, entries = plan_stage.plan_rejects(records, options_of(**values), reader, Results(result))
            fragments = 0 if entries.fragments is None else len(entries.fragments)
            assert sum(rejects.counts.values()) + fragments // 3 == count
            return rejects, entries

        return step

    assert growth(run) < 1


def test_memory_of_the_manifest(tmp_path: Path, in_files: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """All records are split in three, and all packs are in one shard."""
    for name in ("write_nv_meta", "_check_shard"):
        monkeypatch.setattr(index_stage, name, lambda *_, **_options: None)
    options = options_of(overlong="split", sample_class="PackedTokensSample", max_packs_per_shard=1 << 30)

    def run(count: int) -> Callable[[], object]:
        columns = {"length": 100, "supervised": 99, "divisible": 1, "num_images": 0, "status": 0}
        records = table_of(count, **{name: np.broadcast_to(value, count) for name, value in columns.items()})
        notes = {"unused_fields": Counter[str](), "notes": Counter[str]()}
        records = replace(records, folder=tmp_path, counts=notes)
        source = SimpleNamespace(reading=SimpleNamespace(config=0, copy=False))
        reader = SimpleNamespace(part=None, sources=[source], ignored_entries=[])
        rejects, entries = plan_stage.plan_rejects(records, options, reader, None)
        packs, pack, place = plan_stage.plan_packs(entries, options)
        shards = plan_stage.plan_shards(packs, pack, entries, replace(options, max_shard_bytes=1 << 60))
        places = plan_stage.sample_places(pack, place, shards, options)
        plan = SimpleNamespace(entries=entries, packs=packs, places=places, shards=shards, status=rejects.status)
        state = SimpleNamespace(
            options=options,
            output=SimpleNamespace(shards=tmp_path, write_folder=lambda _: tmp_path),
            reader=reader,
            progress=Progress(),
            counters={},
            tokenizer_engines=set(),
            fingerprints=SimpleNamespace(encoder="", input="", tars="", write=""),
        )
        summaries = [index_stage.ShardSummary(shard.name("d"), 1, "", packs.num_packs) for shard in shards]

        def step() -> object:
            manifest = index_stage.write_index(state, records, plan, summaries)
            assert (manifest.records_split, manifest.fragments, len(manifest.shards)) == (count, 3 * count, 1)
            assert manifest.sources[0].tokens == manifest.shards[0].tokens
            return manifest

        return step

    run(2_000)()
    assert growth(run) < 1


def test_fragments_are_in_the_order_of_the_records(tmp_path: Path, all_in_files: None) -> None:
    """Groups, text and records that are read, whose tasks end in any order."""
    count = 400
    kinds = np.arange(count) % 4  # a group of two samples, a text, a record that is read, a short record
    records = table_of(
        count, length=np.choose(kinds, [10, 100, 100, 30]), num_images=[0] * count, status=[0] * count,
        divisible=kinds > 0, supervised=np.where(kinds == 1, 99, 5), members=np.where(kinds == 0, 2, 0),
    )  # fmt: skip
    samples = np.zeros(count // 2, dtype=records.samples.dtype)
    samples["record"], samples["number"], samples["member"] = np.repeat(np.arange(0, count, 4), 2), [0, 1] * 100, 1
    samples["stop"] = 5
    records = replace(records, folder=tmp_path, samples=samples)
    options = options_of(overlong="split", split_overlap=10)
    entries = plan_stage.plan_rejects(records, options, SimpleNamespace(part=None), Results(three))[1]
    expected = []
    for record, kind in enumerate(kinds.tolist()):
        own = {0: samples[:2], 1: three(0), 2: three(0), 3: samples[:0]}[kind].copy()
        own["record"] = record
        expected += own.tolist()
    assert entries.fragments.tolist() == expected


def test_details_are_texts_of_some_records(tmp_path: Path, all_in_files: None) -> None:
    details = rejects.Details(100, tmp_path)
    assert (dict(details), len(details), details.get(3)) == ({}, 0, None)
    texts = {7: "a", 3: "\ud800 \U0001f600" * 50, 99: "", 0: "b" * 70_000}
    for record, text in texts.items():
        details[record] = text
    details[7] = texts[7] = "another text"
    assert dict(details) == texts
    assert list(details) == sorted(texts)
    assert len(details) == 4
    with pytest.raises(KeyError):
        details[1]
    assert list(tmp_path.iterdir()) == []


def test_shards_read_ranges_of_columns(tmp_path: Path, in_files: None) -> None:
    rng = np.random.default_rng(0)
    for has_fragments in (False, True):
        records = replace(table_of(9_000), folder=tmp_path)
        records.address[:] = rng.integers(0, 2**60, 9_000)
        one = np.broadcast_to(np.int64(7), 9_000)
        entries = records
        if has_fragments:
            fragments = np.zeros(3_000, dtype=records.samples.dtype)
            fragments["record"], fragments["number"] = np.arange(3_000) // 2 * 3, np.arange(3_000) % 2
            fragments["stop"] = 9
            entries = records.with_fragments(fragments)
        options = options_of(seq_len=128, max_packs_per_shard=40)
        packs, pack, place = plan_stage.plan_packs(entries, options)
        shards = plan_stage.plan_shards(packs, pack, entries, options)
        places = plan_stage.sample_places(pack, place, shards, options)
        plan = SimpleNamespace(entries=entries, packs=packs, places=places)
        read = plan_stage.in_order(plan, [entries.address, entries.length, records.size, one])
        assert len(shards) > 3
        for shard in shards:
            of_records = entries.records(shard.rows)
            for column, rows in (
                (entries.address, shard.rows), (entries.length, shard.rows),
                (records.size, of_records if has_fragments else shard.rows), (one, of_records),
            ):  # fmt: skip
                assert read(shard.span, column).tolist() == column[rows].tolist()
