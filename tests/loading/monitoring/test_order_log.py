"""Order log, replay and joint loaders."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from energon_packed import (
    BatchError,
    ConfigError,
    DataflowConfig,
    DataflowLoader,
    Distributor,
    EnergonDistributor,
    JointLoader,
    MapDistributor,
    MixtureDistributor,
    PackedDataset,
    PoolPacker,
    SequentialPacker,
    get_raw_loader,
)
from tests.internals import DemoDataset, StoredTokens, check_order, cli
from tests.loading.flows import FEATURES, energon_folder, feature, signature
from tests.printed import printed_json

DATA = [feature(number % 13, number) for number in range(150)]


def ranks_of_a_run(log: Path, stops: list[int]) -> None:
    """8 ranks of 1 worker process each; every rank is stopped after some batches, some behind its last checkpoint."""
    states: list[Any] = [None] * 8
    for stop in [*stops, None]:
        for rank in range(8):
            loader = DataflowLoader(
                MapDistributor([*DATA, {"id": "long", "input_ids": [1] * 30}]),
                packer=PoolPacker(16, pool_size=5, overlong="drop"),
                rank=rank, world_size=8, order_log=log,
            )  # fmt: skip
            if states[rank] is not None:
                loader.load_state_dict(states[rank])
            for taken, _ in enumerate(loader, 1):
                if stop is not None and taken == stop:
                    states[rank] = loader.state_dict()
                if stop is not None and taken == stop + 1:  # crashes one step behind its checkpoint
                    break


def test_the_log_of_eight_ranks_stopped_three_times_proves_that_nothing_is_lost(tmp_path: Path) -> None:
    ranks_of_a_run(tmp_path, [2, 1, 3])
    found = check_order(tmp_path)
    assert found.problems == []
    assert found.samples == len(DATA)
    assert found.dropped == 1
    assert found.replaced == 24
    assert found.complete == [0]
    done = CliRunner().invoke(cli, ["order", "check", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "no sample lost or repeated, equal after every resume" in done.output


def test_an_epoch_that_is_not_complete_is_checked_up_to_its_last_batch(tmp_path: Path) -> None:
    """12 batches after the checkpoint are replaced by 8, and 4 items are left; nothing is known of these 4."""
    loader = DataflowLoader(MapDistributor(FEATURES), order_log=tmp_path)
    taken = iter(loader)
    states = [(next(taken), loader.state_dict())[1] for _ in range(13)]
    loader = DataflowLoader(MapDistributor(FEATURES), order_log=tmp_path)
    loader.load_state_dict(states[0])
    list(itertools.islice(loader, 8))
    done = CliRunner().invoke(cli, ["order", "check", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "12 batches replaced after a resume; epochs 0, complete: none" in done.output
    assert done.output.endswith("up to the last batch in the log, as these epochs are not complete: 0\n")


def test_a_row_without_targets_has_no_samples_in_the_log(tmp_path: Path) -> None:
    for rank in range(3):
        list(DataflowLoader(MapDistributor(FEATURES), rank=rank, world_size=3, order_log=tmp_path))
    found = check_order(tmp_path)
    assert found.problems == []
    assert (found.steps, found.samples, sum(found.sources.values())) == (15, 13, 13)


def _repeated_blend(folder: Path) -> Path:
    blend = {"blend_epochized": [{"path": str(energon_folder(folder, 12)), "repetitions": 2}]}
    plain = {"__module__": "megatron.energon", "__class__": "MetadatasetV2"}
    (folder / "blend.yaml").write_text(yaml.safe_dump({**plain, "splits": {"train": blend}}))
    return folder / "blend.yaml"


def _packs_of(folder: Path) -> PackedDataset:
    return PackedDataset(_repeated_blend(folder), StoredTokens(), check_encoder=False)


REPEATING: dict[str, Callable[[Path], Distributor]] = {
    "repetitions, by Energon": lambda folder: EnergonDistributor(_repeated_blend(folder)),
    "repetitions, by index": lambda folder: MapDistributor(_packs_of(folder)),
    "repeat": lambda folder: MapDistributor(DATA[:12], repeat=True),
    "weights": lambda folder: MixtureDistributor(
        [MapDistributor(DATA[:2]), MapDistributor(DATA[2:12])], [1, 1], repeat=True
    ),
}


@pytest.mark.parametrize("name", REPEATING)
def test_samples_that_weights_repeat_are_not_twice(tmp_path: Path, name: str) -> None:
    distributor = REPEATING[name](tmp_path)
    for rank in range(2):
        packer, log = SequentialPacker(16), tmp_path / "log"
        loader = DataflowLoader(distributor, packer=packer, rank=rank, world_size=2, order_log=log)
        ids = [ident for batch in itertools.islice(loader, 12) for ident in batch.ids]
    assert len(set(ids)) <= 12
    found = check_order(tmp_path / "log")
    assert found.problems == []
    assert found.samples > 12
    # A sample that a second shard reads without weights is still a problem.
    for file in (tmp_path / "log").iterdir():
        file.write_text(file.read_text().replace('"repeats":true', '"repeats":false'))
    assert any("samples are used twice" in problem for problem in check_order(tmp_path / "log").problems)


def test_an_id_of_two_datasets_is_not_twice(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    folders = [EnergonDistributor(energon_folder(tmp_path / name, 3)) for name in ("a", "b")]
    log = tmp_path / "log"
    ids = [batch.ids for batch in DataflowLoader(MixtureDistributor(folders, [1, 1]), order_log=log)]
    assert sorted(ids) == 2 * [["s0"]] + 2 * [["s1"]] + 2 * [["s2"]]
    assert check_order(log).problems == []


@pytest.mark.parametrize(
    ("process", "change", "problem"),
    [
        (0, lambda lines: lines[:2] + lines[3:], "items are lost"),
        (1, lambda lines: [*lines, json.dumps(json.loads(lines[-3]) | {"step": 99})], "items are used twice"),
        (
            0,
            lambda lines: [*lines[:3], lines[3].replace('"ids":["', '"ids":["x'), *lines[4:]],
            "than after it: step 3 of",
        ),
    ],
)
def test_a_log_with_a_loss_a_repeat_or_a_difference_fails(
    tmp_path: Path, process: int, change: Any, problem: str
) -> None:
    ranks_of_a_run(tmp_path, [2])
    file = tmp_path / f"order-00003-00{process}.jsonl"
    file.write_text("\n".join(change(file.read_text().splitlines())) + "\n")
    done = CliRunner().invoke(cli, ["order", "check", str(tmp_path)])
    assert done.exit_code == 1
    assert problem in done.output


@pytest.mark.parametrize("num_workers", [0, 2])
def test_replay_tells_what_a_step_holds(tmp_path: Path, num_workers: int) -> None:
    folder = energon_folder(tmp_path)
    for rank in range(2):
        loader = DataflowLoader(
            MapDistributor(PackedDataset(folder)),
            batch_size=2,
            num_workers=num_workers,
            rank=rank,
            world_size=2,
            seed=4,
        )
        for step, batch in enumerate(loader, 1):
            options = ["--step", step, "--world-size", 2, "--batch-size", 2, "--num-workers", num_workers, "--seed", 4]
            replayed = printed_json(cli, ["order", "replay", str(folder), "--json", *map(str, options)])
            assert replayed["ranks"][rank]["ids"] == [name for name in batch.ids if name is not None]
    with pytest.raises(ConfigError, match="`step` must be at most [34], the steps of the epoch, got 9"):
        CliRunner().invoke(
            cli, ["order", "replay", str(folder), "--step", "9", "--batch-size", "4"], catch_exceptions=False
        )


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_replay_of_a_config_tells_what_a_step_holds(
    demo: DemoDataset, tokenizer_dir: Path, tmp_path: Path, num_workers: int, streaming: bool
) -> None:
    """Text and images, rejected and overlong records: the ids of every step of every rank, in either form."""
    file = tmp_path / "train.yaml"
    options = {"dataset_path": str(demo.jsonl), "packing_length": 600, "packing_strategy": "pool_20", "seed": 4}
    options |= {"processor_config": str(tokenizer_dir), "streaming": streaming, "workers": 1, "max_reject_rate": 1}
    file.write_text(yaml.safe_dump(options | {"work_dir": str(tmp_path / "work"), "max_images": 2}))
    config = DataflowConfig.from_yaml(file)
    ids = [
        [
            [name for name in batch.ids if name is not None]
            for batch in get_raw_loader(config, rank=rank, world_size=2, num_workers=num_workers)
        ]
        for rank in range(2)
    ]
    assert min(map(len, ids)) > 8
    for step in {1, 7, min(map(len, ids)), max(map(len, ids))}:
        arguments = ["replay", str(file), "--json", "--world-size", "2", "--num-workers", str(num_workers)]
        ranks = printed_json(cli, ["order", *arguments, "--step", str(step)])["ranks"]
        assert [one["ids"] for one in ranks] == [(of_rank[step - 1 :] or [[]])[0] for of_rank in ids]
    with pytest.raises(ConfigError, match=f"`step` must be at most {max(map(len, ids))}, the st"):
        CliRunner().invoke(cli, ["order", *arguments, "--step", "999"], catch_exceptions=False)
    if streaming:
        with pytest.raises(ConfigError, match="`batch_size` must be 1 with `streaming: true`, got 2"):
            CliRunner().invoke(cli, ["order", *arguments, "--step", "1", "--batch-size", "2"], catch_exceptions=False)


def new_joint(**options: Any) -> JointLoader:
    loaders = {
        "short": DataflowLoader(MapDistributor(FEATURES), packer=SequentialPacker(16), seed=1),
        "long": DataflowLoader(MapDistributor(DATA), packer=PoolPacker(32, pool_size=8)),
    }
    return JointLoader(loaders, {"short": 1, "long": 3}, seed=5, **options)


@pytest.mark.parametrize("stop", ["first", "all"])
def test_joint_loaders_resume_at_every_step(stop: Any) -> None:
    joint = new_joint(stop=stop)
    states, expected = [joint.state_dict()], []
    for name, batch in joint:
        expected.append((name, *signature(batch)))
        states.append(json.loads(json.dumps(joint.state_dict())))
    following = [(name, *signature(batch)) for name, batch in joint]
    assert {name for name, *_ in expected} == {"short", "long"}
    for step, state in enumerate(states):
        resumed = new_joint(stop=stop)
        resumed.load_state_dict(state)
        found = [(name, *signature(batch)) for name, batch in resumed]
        assert found == (expected[step:] or following), f"after step {step}"
    with pytest.raises(BatchError, match="stop"):
        new_joint(stop="never").load_state_dict(states[0])


def test_joint_loaders_draw_by_ratio() -> None:
    names = [name for name, _ in itertools.islice(new_joint(stop="never"), 600)]
    assert abs(names.count("long") - 450) < 3 * (600 * 0.75 * 0.25) ** 0.5
    with pytest.raises(ConfigError, match="`weights` and `loaders` must have the same keys"):
        JointLoader({"a": []}, {"b": 1})
