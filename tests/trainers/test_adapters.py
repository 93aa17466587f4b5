"""Adapters of trainers that the development environment does not have; with the trainers in their folders."""

from collections import Counter
from typing import Any

import pytest
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from energon_packed import AutomodelStream, BatchError, ConfigError, PackedDataLoader, PackedPlugin, PackedSft
from tests.trainers.harness import Data
from tests.trainers.recorder import IGNORED


def loader(data: Data, rank: int) -> Any:
    """As the recipes of NeMo Automodel make it."""
    return StatefulDataLoader(AutomodelStream(data.folder / "packs").shard(2, rank), batch_size=None)


def rows(epoch: Any) -> list[list[int]]:
    return [row["input_ids"][0].tolist() for row in epoch]


def test_automodel_reads_each_pack_once_and_trains_on_the_next_token(trainer_data: Data) -> None:
    seen: Counter[int] = Counter()
    for rank in range(2):
        epoch = list(loader(trainer_data, rank))
        assert len(epoch) == 7
        for row in epoch:
            is_target = row["labels"] != IGNORED
            assert row["labels"][is_target].equal(row["input_ids"].roll(-1)[is_target])
            seen[int(is_target.sum())] += 1
    expected = [sum(trainer_data.targets(name) for name in pack) for pack in trainer_data.packs]
    assert seen == Counter([*expected, 0])  # 13 packs, and a row without targets


def test_automodel_continues_after_each_row(trainer_data: Data) -> None:
    whole = loader(trainer_data, 1)
    complete = rows(whole) + rows(whole)
    for used in (1, 6, 7, 9):
        first = loader(trainer_data, 1)
        reader = iter(first)
        for number in range(used):
            if number == 7:
                reader = iter(first)
            next(reader)
        resumed = loader(trainer_data, 1)
        resumed.load_state_dict(first.state_dict())
        rest = rows(resumed) + rows(resumed)
        assert rest[: 14 - used] == complete[used:], used


def test_automodel_refuses_another_dataset(trainer_data: Data) -> None:
    state = AutomodelStream(trainer_data.folder / "packs", seed=1).state_dict()
    with pytest.raises(BatchError, match="seed"):
        AutomodelStream(trainer_data.folder / "packs").load_state_dict(state)


def test_automodel_refuses_worker_processes(trainer_data: Data) -> None:
    with pytest.raises(ConfigError, match="`num_workers` of the recipe's dataloader must be 0"):
        next(iter(DataLoader(AutomodelStream(trainer_data.folder / "packs"), batch_size=None, num_workers=1)))


def test_torchtitan_must_be_installed() -> None:
    with pytest.raises(ConfigError, match=r"PackedDataLoader needs torchtitan>=0.3, got: .* Run pip install"):
        PackedDataLoader(
            PackedDataLoader.Config(dataset_path="out"),
            dp_world_size=1, dp_rank=0, tokenizer=None, seq_len=8, local_batch_size=1,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("adapter", "arguments", "package"),
    [(PackedPlugin, (), "axolotl>=0.19"), (PackedSft, ([], None), "ms-swift>=4.6")],
)
def test_the_package_of_a_trainer_must_be_installed(adapter: Any, arguments: tuple[Any, ...], package: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^{adapter.__name__} needs {package}, got: .* Run pip install '{package}'.$"
    ):
        adapter(*arguments)


def test_axolotl_must_not_pack_again() -> None:
    register: Any = PackedPlugin.register
    with pytest.raises(ConfigError, match="`packed_dataset` must be a packed dataset, got none"):
        register(None, {})
    with pytest.raises(ConfigError, match="`sample_packing` must not be set with PackedPlugin, got True. Remove it."):
        register(None, {"packed_dataset": "out", "sample_packing": True})
    with pytest.raises(ConfigError, match="`context_parallel_size` must be 1 with PackedPlugin, got 2"):
        register(None, {"packed_dataset": "out", "context_parallel_size": 2})
    settings: dict[str, Any] = {"packed_dataset": "out", "sample_packing": False, "context_parallel_size": 1}
    register(None, settings)
    assert settings["datasets"] == [{"path": "out", "type": "packed"}]
