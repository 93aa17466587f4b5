"""Damages of an order log, logs of two runs, comparison with the data, uses of a sample, and Energon's order."""

import json
import time
from itertools import islice
from pathlib import Path
from typing import Any

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
    get_packed_loader,
)
from tests.internals import LoggedData, check_order, cli, redistribute
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
    file = tmp_path / "order-00000.jsonl"
    whole = file.read_bytes()
    for cut in (1, 2, 40):  # without a line feed, without the brace, in the middle
        file.write_bytes(whole[:-cut])
        assert check_order(tmp_path).samples == 5
        logged(tmp_path, state)
        report = check_order(tmp_path)
        assert (report.problems, report.samples, report.complete) == ([], 13, [0])
    lines = whole.splitlines(keepends=True)
    file.write_bytes(b"".join([*lines[:2], lines[2][:20] + b"\n", *lines[3:]]))
    with pytest.raises(FormatError, match=r"order-00000.jsonl, line 3: the line is damaged"):
        check_order(tmp_path)
    file.write_bytes(b"".join([*lines[:2], lines[2][:-3] + b"}\n", *lines[3:]]))
    with pytest.raises(FormatError, match=r"order-00000.jsonl, line 3: the line is damaged"):
        check_order(tmp_path)


def test_two_runs_in_one_folder_are_refused_or_reported(tmp_path: Path) -> None:
    logged(tmp_path / "a", stop=3)
    with pytest.raises(ConfigError, match="without the log of another run, .*Load a state of that run to continue it"):
        logged(tmp_path / "a")
    other = logged(tmp_path / "b", stop=2)
    logged(tmp_path / "a", other)
    (problem,) = check_order(tmp_path / "a").problems
    assert "lines of two runs" in problem
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


def test_ranks_without_lines_are_named(tmp_path: Path) -> None:
    logged(tmp_path, rank=0, world_size=3)
    assert "ranks 1, 2 of 3 have no lines" in check_order(tmp_path).problems[0]


def test_a_log_is_compared_with_the_data(tmp_path: Path) -> None:
    packs, log = energon_folder(tmp_path), tmp_path / "log"
    list(DataflowLoader(IterableDistributor(FEATURES[:12]), order_log=log))  # one sample less than the data
    done = CliRunner().invoke(cli, ["order", "check", str(log), "--data", str(packs)])
    assert done.exit_code == 1
    assert "are lost: s12" in done.output
    file = log / "order-00000.jsonl"
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
    file = log / "order-00000.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(line | {"ids": [None] * len(line.get("ids", ()))}) + "\n" for line in lines))
    file.write_text(file.read_text().replace('{"order_log": ', '{"order_log":').replace('{"epoch": ', '{"epoch":'))
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
    file = log / "order-00000.jsonl"
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
        with pytest.raises(ConfigError, match=message):
            CliRunner().invoke(cli, ["order", *arguments], catch_exceptions=False)


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
    assert (report.samples, report.repeated) == (2 * 4 + 5 + 2 * 7, 3)
    assert report.processes == ["2 ranks", "1 rank after epoch 0, step 4", "2 ranks after epoch 0, step 13"]


@pytest.mark.parametrize("damage", [False, True])
def test_an_epoch_of_an_energon_loader_has_each_pack_once(tmp_path: Path, damage: bool) -> None:
    packs, log = energon_folder(tmp_path), tmp_path / "log"
    for rank in range(2):
        loader = get_packed_loader(packs, epochs=1, num_workers=0, rank=rank, world_size=2, order_log=log)
        list(loader)
    file = log / "order-00000.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    if damage:
        file.write_text("".join([*lines[:2], lines[1], *lines[3:]]))
    report = check_order(log, LoggedData(packs))
    assert report.complete == [0]
    assert [text.split(": ")[1][:20] for text in report.problems] == (
        ["1 packs are used twi", "1 samples of " + str(packs)[:7], "1 samples are used t"] if damage else []
    )


def test_a_replay_of_a_thousand_ranks_takes_seconds(tmp_path: Path) -> None:
    packs = energon_folder(tmp_path, 2000)
    start = time.process_time()
    ranks = printed_json(cli, ["order", "replay", str(packs), "--step", "2", "--world-size", "1000", "--json"])[
        "ranks"
    ]
    assert len({ident for rank in ranks for ident in rank["ids"]}) == 1000
    assert time.process_time() - start < 5
