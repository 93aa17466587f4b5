"""Damages of an order log, logs of two runs, comparison with the data, uses of a sample, and Energon's order."""

import errno
import gc
import json
import os
import random
import time
import tracemalloc
from itertools import islice
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml
from click.testing import CliRunner

from energon_packed import (
    ConfigError,
    DataflowLoader,
    FormatError,
    IterableDistributor,
    MapDistributor,
    PackedDataset,
    ResourceError,
    SimpleBatcher,
    get_packed_loader,
)
from tests.internals import LoggedData, arrays, check_order, cli, files, order_lines, redistribute
from tests.loading.flows import FEATURES, energon_folder
from tests.printed import printed_json


def logged(log: Path, state: Any = None, stop: int | None = None, **options: Any) -> Any:
    """Run a loader up to a batch, or an epoch; return its state."""
    loader = DataflowLoader(MapDistributor(FEATURES), order_log=log, **options)
    if state is not None:
        loader.load_state_dict(state)
    batches = iter(loader)
    list(islice(batches, stop))
    return loader.state_dict()


def test_a_kill_may_cut_the_last_line_only(tmp_path: Path) -> None:
    state = logged(tmp_path, stop=4)
    logged(tmp_path, state, stop=2)
    file = tmp_path / "order-00000-001.jsonl"
    whole = file.read_bytes()
    for cut in (1, 2, 40):  # without a line feed, without the brace, in the middle
        file.write_bytes(whole[:-cut])
        assert check_order(tmp_path).samples == 5
        logged(tmp_path, state)
        report = check_order(tmp_path)
        assert (report.problems, report.samples, report.complete) == ([], 13, [0])
        (tmp_path / "order-00000-002.jsonl").unlink()
    lines = whole.splitlines(keepends=True)
    file.write_bytes(b"".join([*lines[:2], lines[2][:20] + b"\n", *lines[3:]]))
    with pytest.raises(FormatError, match=r"order-00000-001.jsonl, line 3: the line is damaged"):
        check_order(tmp_path)
    file.write_bytes(b"".join([*lines[:2], lines[2][:-3] + b"}\n", *lines[3:]]))
    with pytest.raises(FormatError, match=r"order-00000-001.jsonl, line 3: the line is damaged"):
        check_order(tmp_path)


def test_two_runs_in_one_folder_are_refused_or_reported(tmp_path: Path) -> None:
    logged(tmp_path / "a", stop=3)
    with pytest.raises(ConfigError, match="without the log of another run, .*Load a state of that run to continue it"):
        logged(tmp_path / "a")
    other = logged(tmp_path / "b", stop=2)
    logged(tmp_path / "a", other)
    (problem,) = check_order(tmp_path / "a").problems
    assert "lines of another run" in problem
    with pytest.raises(FormatError, match="has no order log of rank 0"):
        check_order(tmp_path / "c")


def test_a_log_may_start_with_a_resumed_run(tmp_path: Path) -> None:
    loader = DataflowLoader(MapDistributor(FEATURES))
    next(iter(loader))
    logged(tmp_path, loader.state_dict())
    (tmp_path / "order-00000 (copy).jsonl").write_text("not a log of a rank")
    report = check_order(tmp_path)
    assert (report.problems, report.samples, report.processes) == ([], 12, ["1 rank after epoch 0, step 1"])


def test_a_log_that_starts_in_an_epoch_has_not_lost_its_earlier_steps(tmp_path: Path) -> None:
    packs = energon_folder(tmp_path)
    for log, make in (
        (tmp_path / "stream", lambda **given: DataflowLoader(IterableDistributor(lambda: FEATURES), **given)),
        (tmp_path / "energon", lambda **given: get_packed_loader(packs, epochs=1, num_workers=0, **given)),
    ):
        first = make()
        list(islice(first, 2))
        resumed = make(order_log=log)
        resumed.load_state_dict(first.state_dict())
        list(resumed)
        report = check_order(log, LoggedData(packs) if log.name == "energon" else None)
        assert (report.problems, report.complete) == ([], [])


def test_epochs_that_are_read_in_several_passes_have_the_same_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in range(2):
        loader = DataflowLoader(MapDistributor(FEATURES), rank=rank, world_size=2, order_log=tmp_path)
        for _ in range(4):
            list(loader)
    for change in (lambda text: text, lambda text: text.replace('"epoch":2,"step":3', '"epoch":1,"step":3')):
        file = tmp_path / "order-00001-000.jsonl"
        file.write_text(change(file.read_text()))
        reports = []
        for together in (1, 20, 1000):  # an epoch has 16 lines
            monkeypatch.setattr(order_lines, "_TOGETHER", together)
            reports.append(check_order(tmp_path))
        assert reports[0] == reports[1] == reports[2]
        assert (reports[0].epochs, reports[0].samples) == ([0, 1, 2, 3], 4 * len(FEATURES))
    assert reports[0].complete == [0, 1, 3]
    assert any(text.startswith("epoch 1: 1 items are used twice") for text in reports[0].problems)


def test_ranks_without_lines_are_named(tmp_path: Path) -> None:
    logged(tmp_path, rank=0, world_size=3)
    assert "ranks 1, 2 of 3 have no lines" in check_order(tmp_path).problems[0]


def test_a_log_is_compared_with_the_data(tmp_path: Path) -> None:
    packs, log = energon_folder(tmp_path), tmp_path / "log"
    list(DataflowLoader(IterableDistributor(FEATURES[:12]), order_log=log))  # one sample less than the data
    done = CliRunner().invoke(cli, ["order", "check", str(log), "--data", str(packs)])
    assert done.exit_code == 1
    assert "are lost: s12" in done.output
    file = log / "order-00000-000.jsonl"
    text = file.read_text()
    file.write_text(text.replace('"s3"', '"s2"'))
    problems = check_order(log, LoggedData(packs)).problems
    assert any("2 samples of" in problem and "are lost: s12, s3" in problem for problem in problems)
    assert any("1 samples are used too often: s2" in problem for problem in problems)
    file.write_text(text.replace('"s3"', '"x"'))
    assert any("1 samples are not in" in problem for problem in check_order(log, LoggedData(packs)).problems)


def test_samples_without_an_id_make_no_difference(tmp_path: Path) -> None:
    packs, log = energon_folder(tmp_path), tmp_path / "log"
    list(DataflowLoader(MapDistributor(PackedDataset(packs)), order_log=log))
    data = LoggedData(packs)
    assert check_order(log, data).problems == []
    data._samples = lambda row: [(None, None)]  # type: ignore[method-assign, assignment, list-item]
    file = log / "order-00000-000.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text(
        "".join(
            json.dumps(line | ({"ids": [None] * len(line["ids"])} if "ids" in line else {})) + "\n" for line in lines
        )
    )
    del data.__dict__["_hashes"]
    assert check_order(log, data).problems == []
    file.write_text(file.read_text().replace("[null]", "[]", 1))
    assert "12 samples without an id are used" in check_order(log, data).problems[0]


def test_epochs_of_a_blend_are_compared_with_its_draws(tmp_path: Path) -> None:
    blend = {"blend_epochized": [{"path": str(energon_folder(tmp_path)), "repetitions": 1.5}]}
    plain = {"__module__": "megatron.energon", "__class__": "MetadatasetV2"}
    (tmp_path / "blend.yaml").write_text(yaml.safe_dump({**plain, "splits": {"train": blend}}))
    log, data = tmp_path / "log", LoggedData(tmp_path / "blend.yaml")
    loader = DataflowLoader(MapDistributor(PackedDataset(tmp_path / "blend.yaml")), order_log=log)
    for _ in range(2):
        list(loader)
    report = check_order(log, data)
    assert (report.problems, report.samples, report.complete) == ([], 2 * 19, [0, 1])
    file = log / "order-00000-000.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([lines[0], lines[1].replace('["s', '["x', 1), *lines[2:]]))
    assert check_order(log, data).problems


def test_uses_and_content_of_a_sample(tmp_path: Path) -> None:
    packs, log = energon_folder(tmp_path), tmp_path / "log"
    for rank in range(2):
        loader = DataflowLoader(MapDistributor(PackedDataset(packs)), rank=rank, world_size=2, order_log=log)
        batches = [batch.ids for batch in loader]
        if rank == 1:
            found = printed_json(cli, ["order", "find", batches[2][0], str(log), "--json"])
    (use,) = found["uses"]
    assert (use["epoch"], use["step"], use["rank"], use["sample"]) == (0, 3, 1, 0)
    shown = printed_json(cli, ["order", "replay", str(log), "--step", "3", "--json"])
    assert shown["ranks"][1]["ids"] == batches[2]
    done = CliRunner().invoke(cli, ["order", "replay", str(log), "--step", "3", "--content", "--data", str(packs)])
    assert done.exit_code == 0, done.output
    assert f"  {batches[2][0]}\n" in done.output
    for arguments, message in [
        (["replay", str(log), "--step", "99"], "`step` must be at most 7, the logged steps of epoch 0, got 99"),
        (["replay", str(log), "--step", "1", "--content"], "must be set together"),
        (["find", "absent", str(log)], "has no sample 'absent'"),
    ]:
        refused = CliRunner().invoke(cli, ["order", *arguments])
        assert refused.exit_code == (2 if "--content" in arguments else 1)
        assert message in f"{refused.exception} {refused.output}"


def test_the_log_of_an_energon_loader_continues_with_other_ranks(tmp_path: Path) -> None:
    packs, log = energon_folder(tmp_path), tmp_path / "log"
    states: list[Any] = []
    for world_size, stop in ((2, 4), (1, 5), (2, 6)):
        given = redistribute(states, world_size) if states else [None] * world_size
        states = []
        for rank in range(world_size):
            place = {"rank": rank, "world_size": world_size, "num_workers": 2 // world_size}
            loader = get_packed_loader(packs, order_log=log, shuffle_buffer_size=1, **place)
            if given[rank] is not None:
                loader.load_state_dict(given[rank])
            batches = iter(loader)
            list(islice(batches, stop))
            states.append(loader.state_dict())
            next(batches)  # after the checkpoint
    report = check_order(log, LoggedData(packs))
    assert report.problems == []
    assert (report.samples, report.replaced) == (2 * 4 + 5 + 2 * 7, 3)
    assert report.processes == ["2 ranks", "1 rank after epoch 0, step 4", "2 ranks after epoch 0, step 9"]


@pytest.mark.parametrize("damage", [False, True])
def test_an_epoch_of_an_energon_loader_has_each_pack_once(tmp_path: Path, damage: bool) -> None:
    packs, log = energon_folder(tmp_path), tmp_path / "log"
    for rank in range(2):
        loader = get_packed_loader(packs, epochs=1, num_workers=0, rank=rank, world_size=2, order_log=log)
        list(loader)
    file = log / "order-00000-000.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    if damage:
        file.write_text("".join([*lines[:2], lines[1], *lines[3:]]))
    report = check_order(log, LoggedData(packs))
    assert report.complete == [0]
    twice = ["1 lines are missing,", "1 lines are repeated", "1 packs are used twi"]
    twice += ["1 samples of " + str(packs)[:7], "1 samples are used t"]
    assert [text.split(": ")[1][:20] for text in report.problems] == (twice if damage else [])


def test_a_replay_of_a_thousand_ranks_takes_seconds(tmp_path: Path) -> None:
    packs = energon_folder(tmp_path, 2000)
    start = time.process_time()
    ranks = printed_json(cli, ["order", "replay", str(packs), "--step", "2", "--world-size", "1000", "--json"])[
        "ranks"
    ]
    assert len({ident for rank in ranks for ident in rank["ids"]}) == 1000
    assert time.process_time() - start < 5


def test_a_cut_line_may_be_longer_than_a_read(tmp_path: Path) -> None:
    state = logged(tmp_path, stop=3)
    file = tmp_path / "order-00000-000.jsonl"
    whole = file.read_bytes()
    for cut in (b'{"epoch":0,"ids":["' + b"x" * (3 << 20), whole.splitlines()[0] * 9):
        file.write_bytes(whole + cut)
        logged(tmp_path, state)
        report = check_order(tmp_path)
        assert (report.problems, report.samples, report.complete) == ([], 13, [0])
        file.write_bytes(whole)


def test_a_short_write_is_continued_and_a_full_disk_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, left = os.write, [10**9]

    def write(descriptor: int, text: bytes) -> int:
        """A disk that has some bytes left, and writes at most 7 at once."""
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = real(descriptor, text[: min(7, left[0])])
        left[0] -= written
        return written

    monkeypatch.setattr(os, "write", write)
    state = logged(tmp_path, stop=3)
    assert check_order(tmp_path).samples == 3
    left[0] = 400  # the header, and a part of the first line
    with pytest.raises(ResourceError, match=r"order-00000-001.jsonl: No space left on device; free some space"):
        logged(tmp_path, state)
    assert (tmp_path / "order-00000-001.jsonl").read_bytes().endswith(b"}\n")
    left[0] = 10**9
    logged(tmp_path, state)
    assert (check_order(tmp_path).problems, check_order(tmp_path).samples) == ([], 13)


def test_a_file_is_not_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="`order_log` must be a folder, got the file .*file. Pass another path"):
        logged(tmp_path / "file")


def test_another_format_is_refused(tmp_path: Path) -> None:
    state = logged(tmp_path, stop=3)
    file = tmp_path / "order-00000-000.jsonl"
    file.write_text(file.read_text().replace('"order_log":1', '"order_log":2'))
    message = "has format 2 of the order log, and this version of energon-packed needs format 1"
    with pytest.raises(FormatError, match=message):
        check_order(tmp_path)
    with pytest.raises(FormatError, match=message):
        logged(tmp_path, state)


@pytest.mark.parametrize("entry", ["starts", "sources"])
def test_a_line_without_an_entry_is_damaged(tmp_path: Path, entry: str) -> None:
    logged(tmp_path, stop=3)
    file = tmp_path / "order-00000-000.jsonl"
    file.write_text(file.read_text().replace(f'"{entry}":', '"x":'))
    with pytest.raises(FormatError, match=f"line {1 if entry == 'starts' else 2}: the line is damaged"):
        check_order(tmp_path)


def test_a_name_that_is_not_utf_8_is_an_error(tmp_path: Path) -> None:
    data = [FEATURES[0] | {"id": "caf\udce9"}]
    with pytest.raises(ConfigError, match=r"needs sample ids and dataset names in UTF-8, got 'caf\\udce9'"):
        list(DataflowLoader(MapDistributor(data), order_log=tmp_path))
    lines = logged(tmp_path / "log", stop=2)
    assert lines
    file = tmp_path / "log" / "order-00000-000.jsonl"
    file.write_bytes(file.read_bytes().replace(b'"ids":["', b'"ids":["\xe9', 1))
    with pytest.raises(FormatError, match="line 2: the line is damaged"):
        check_order(tmp_path / "log")


def test_a_run_without_a_saved_state_starts_again(tmp_path: Path) -> None:
    """Ranks were killed before the first checkpoint, rank 1 before its first line: no rank may refuse alone."""

    def ranks(world_size: int, stop: int | None) -> list[DataflowLoader]:
        loaders = [
            DataflowLoader(MapDistributor(FEATURES), order_log=tmp_path, rank=rank, world_size=world_size)
            for rank in range(world_size)
        ]
        for loader in loaders:
            list(islice(loader, stop))
        return loaders

    ranks(2, stop=2)
    (tmp_path / "order-00001-000.jsonl").unlink()
    ranks(3, stop=2)
    loaders = ranks(2, stop=None)
    report = check_order(tmp_path)
    assert (report.problems, report.samples, report.complete) == ([], 13, [0])
    assert (report.processes, report.replaced) == (["2 ranks"], 2 + 6)
    loaders[0].state_dict()
    for rank in range(3):
        with pytest.raises(ConfigError, match="without the log of another run"):
            list(DataflowLoader(MapDistributor(FEATURES), order_log=tmp_path, rank=rank, world_size=3))


@pytest.mark.parametrize("kind", ["planned", "stream", "energon"])
def test_packs_that_the_end_of_an_epoch_drops_are_not_lost(tmp_path: Path, kind: str) -> None:
    packs, log = energon_folder(tmp_path), tmp_path / "log"
    for rank in range(1 if kind == "stream" else 2):
        place: dict[str, Any] = {"rank": rank, "world_size": 1 if kind == "stream" else 2, "order_log": log}
        if kind == "energon":
            loader: Any = get_packed_loader(packs, epochs=1, num_workers=0, epoch_end="drop", **place)
        elif kind == "stream":
            loader = DataflowLoader(IterableDistributor(FEATURES), packer=SimpleBatcher(5), epoch_end="drop", **place)
        else:
            loader = DataflowLoader(MapDistributor(PackedDataset(packs)), epoch_end="drop", **place)
        list(loader)
    report = check_order(log, LoggedData(packs))
    assert (report.problems, report.complete) == ([], [0])
    assert report.samples + report.left_out == 13
    assert report.left_out == (3 if kind == "stream" else 1)
    done = CliRunner().invoke(cli, ["order", "check", str(log), "--data", str(packs)])
    assert f"{report.left_out} samples of {packs} were in dropped items" in done.output
    file = log / "order-00000-000.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines[2]["ids"] = []
    file.write_text(file.read_text().splitlines(keepends=True)[0])
    with file.open("ab") as stream:
        stream.writelines(orjson.dumps(line) + b"\n" for line in lines[1:])
    assert any("are lost" in problem for problem in check_order(log, LoggedData(packs)).problems)


def test_data_with_fewer_packs_than_the_epoch_used_are_of_another_run(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("all", "fewer")]
    for folder in folders:
        folder.mkdir()
    packs, fewer = energon_folder(folders[0]), energon_folder(folders[1], 3)
    log: dict[str, Any] = {"epochs": 1, "num_workers": 0, "world_size": 2, "order_log": tmp_path / "log"}
    for rank in range(2):
        list(get_packed_loader(packs, epoch_end="drop", rank=rank, **log))
    problems = check_order(tmp_path / "log", LoggedData(fewer)).problems
    assert problems == [f"epoch 0: 9 samples are not in {fewer}. Pass the data of the run."]


@pytest.mark.parametrize("ahead", [0, 1])
def test_places_that_all_ranks_have_passed_are_checked(tmp_path: Path, ahead: int) -> None:
    """A rank may be a batch ahead of the other; an item that a line does not have is lost."""
    for rank in range(2):
        logged(tmp_path, stop=3 + (rank == ahead), rank=rank, world_size=2)
    report = check_order(tmp_path)
    assert (report.problems, report.complete, report.samples) == ([], [], 7)
    file = tmp_path / f"order-0000{ahead}-000.jsonl"
    text = file.read_text()
    for step in range(1, 5):
        place = 2 * (step - 1) + ahead
        file.write_text(text.replace(f'"items":[{place}]', '"items":[]'))
        # The other rank has passed its place of step 3.
        lost = [f"epoch 0: 1 items are lost: {place}"] if place < 4 + (1 - ahead) else []
        assert check_order(tmp_path).problems == lost


@pytest.mark.parametrize("kind", ["planned", "stream", "energon"])
def test_an_epoch_is_complete_when_each_rank_has_ended_it(tmp_path: Path, kind: str) -> None:
    packs, log = energon_folder(tmp_path), tmp_path / "log"
    for rank in range(2):
        place: dict[str, Any] = {"rank": rank, "world_size": 2, "order_log": log}
        if kind == "energon":
            loader: Any = get_packed_loader(packs, epochs=1, num_workers=0, **place)
        elif kind == "stream":
            loader = DataflowLoader(IterableDistributor(FEATURES[:12]), packer=SimpleBatcher(1), **place)
        else:
            loader = DataflowLoader(MapDistributor(FEATURES[:12]), **place)
        batches = list(loader)
        if not rank:
            assert check_order(log).complete == []
    assert len(batches) > 5
    assert (check_order(log).problems[0:], check_order(log).complete) == ([], [0])
    file = log / "order-00001-000.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    kept = 0
    while len(lines) > 1:
        lines.pop()
        file.write_text("".join(lines))
        if '"ids":' in lines[-1] and kept != len(lines):
            steps = sum('"ids":' in line for line in lines)
            problems = [text for text in check_order(log).problems if "lines are missing" in text]
            assert bool(problems) == (len(batches) - steps > 1)  # a rank may be killed before its last batch
            assert check_order(log).complete == ([0] if steps == len(batches) and kind == "planned" else [])


HEADER = {"order_log": 1, "run": "0", "rank": 0, "world_size": 1, "time": "2026-11-20T09:30:00.000+00:00"}
HEADER |= {"starts": [[1, [[0, 0]], [0, 0], 0]]}


def write_log(folder: Path, header: dict[str, Any], steps: list[dict[str, Any]]) -> Path:
    """Write the log of an epoch of a rank."""
    folder.mkdir()
    lines = [{"epoch": 0, "step": step + 1, "line": step + 2, **each} for step, each in enumerate(steps)]
    lines.append({"epoch": 0, "step": len(steps), "line": len(steps) + 2, "end": True, **header.pop("last", {})})
    texts = (orjson.dumps(line) + b"\n" for line in [HEADER | header, *lines])
    (folder / "order-00000-000.jsonl").write_bytes(b"".join(texts))
    return folder


KINDS: dict[str, tuple[Any, Any, int]] = {
    "global order": (lambda steps: {"size": 2 * steps, "endless": False}, lambda n: {"items": [2 * n, 2 * n + 1]}, 0),
    "packs": (lambda steps: {"steps": steps}, lambda n: {"packs": [f"p{n}"]}, 0),
    "fragments": (
        lambda steps: {"last": {"shard": 0, "num_shards": 1}},
        lambda n: {"shard": 0, "num_shards": 1, "items": [f"{n}#0/2", f"{n}#1/2"]},
        0,
    ),
    "lost and repeated": (
        lambda steps: {"last": {"shard": 0, "num_shards": 1}},
        lambda n: {"shard": 0, "num_shards": 1, "items": [2 * n, 2 * n, f"{2 * n}#1/3", f"{2 * n}#1/3"]},
        2,
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_memory_does_not_grow_with_the_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Ids, items and packs are in files, and lines without a gap need no memory."""
    for module, name, size in ((files, "_IN_MEMORY", 1), (files, "_WAITING", 64), (arrays, "BLOCK", 1024)):
        monkeypatch.setattr(module, name, size)
    header, items, problems = KINDS[kind]
    peaks = []
    for steps in (3_000, 3_000, 15_000):
        each = [{"ids": [f"a{n}", f"b{n}"], "sources": ["x"], **items(n)} for n in range(steps)]
        folder = write_log(tmp_path / f"{len(peaks)}", header(steps), each)
        del each
        gc.collect()  # empties the free lists of Python, which fill again in each run
        tracemalloc.start()
        try:
            report = check_order(folder)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
        assert (len(report.problems), report.samples, report.complete) == (problems, 2 * steps, [0])
    assert peaks[2] - peaks[1] < 12_000


def test_lost_and_repeated_fragments_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Items of a stream in any order: whole items, and items of 2 to 4 fragments."""
    monkeypatch.setattr(arrays, "BLOCK", 7)
    rng = random.Random(0)
    for seed in range(30):
        counts = [rng.choice([1, 1, 2, 3, 4]) for _ in range(25)]
        every = [n if count == 1 else f"{n}#{k}/{count}" for n, count in enumerate(counts) for k in range(count)]
        lost = {each for each in every[1:-1] if rng.random() < 0.05 * (seed % 3)}
        twice = [each for each in every if each not in lost and rng.random() < 0.05 * (seed % 4)]
        used = [each for each in every if each not in lost] + twice + twice
        rng.shuffle(used)
        shard = {"shard": 0, "num_shards": 1}
        steps = [
            {"ids": [f"{n}"], "sources": ["x"], "items": used[n : n + 2], **shard} for n in range(0, len(used), 2)
        ]
        report = check_order(write_log(tmp_path / f"{seed}", {"last": shard}, steps))
        # An item without any fragment is one lost item.
        left = {int(str(each).split("#")[0]) for each in used}
        gone = sorted({int(str(each).split("#")[0]) for each in lost} - left)
        parts = [each for each in every if each in lost and int(str(each).split("#")[0]) in left]
        expected = [
            f"epoch 0, shard 0: {len(names)} items are {what}: {', '.join(map(str, names[:5]))}"
            + (", ..." if len(names) > 5 else "")
            for what, names in (
                ("used twice", sorted(twice, key=lambda each: isinstance(each, str))),
                ("lost", [*gone, *parts]),
            )
            if names
        ]
        assert report.problems == expected


def test_a_log_that_starts_after_the_last_batch_has_not_lost_a_batch(tmp_path: Path) -> None:
    header = {"size": 5, "endless": False, "starts": [[1, [[0, 5]], [0, 5], 0]], "last": {"step": 5}}
    assert check_order(write_log(tmp_path / "log", header, [])).problems == []
