"""Loader states for another number of ranks."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from energon_packed import BatchError, ChatEncoder, gather_state, get_packed_loader
from tests.conftest import Packer
from tests.internals import cli, redistribute
from tests.loading.test_resume import encoder, pack_demo, signature

PACKED: dict[str, Any] = {"sample_class": "PackedTokensSample", "max_packs_per_shard": 2, "seq_len": 1024}
__all__ = ["encoder", "pack_demo"]  # with small images
AFTER = 5  # batches of each worker that are compared


def new_loader(
    shards: Path, encoder: ChatEncoder, rank: int, world_size: int, num_workers: int, **options: Any
) -> Any:
    settings = {"shuffle_buffer_size": 5, "seed": 3, **options}
    return get_packed_loader(shards, encoder, rank=rank, world_size=world_size, num_workers=num_workers, **settings)


def of_rank(batches: Any, rank: int, num_workers: int, count: int) -> dict[int, list[Any]]:
    """Batches of each worker of a rank, in order: the workers make them in turn."""
    taken = [signature(batch) for batch in itertools.islice(batches, count * num_workers)]
    return {rank * num_workers + worker: taken[worker::num_workers] for worker in range(num_workers)}


@pytest.mark.parametrize(("before", "after", "steps"), [((4, 1), (2, 2), 5), ((2, 2), (4, 1), 4)])
def test_every_worker_resumes_where_it_stopped(
    pack_demo: Packer, encoder: ChatEncoder, before: tuple[int, int], after: tuple[int, int], steps: int
) -> None:
    shards = pack_demo(**PACKED).shards
    states, expected = [], {}
    for rank in range(before[0]):
        loader = new_loader(shards, encoder, rank, *before)
        batches = iter(loader)
        for _ in range(steps):
            next(batches)
        states.append(loader.state_dict())
        expected |= of_rank(batches, rank, before[1], AFTER)
    assert len(expected) == 4
    got: dict[int, Any] = {}
    for rank, state in enumerate(redistribute(states[::-1], after[0])):
        loader = new_loader(shards, encoder, rank, *after)
        loader.load_state_dict(state)
        assert loader.state_dict()["step"] == steps
        got |= of_rank(loader, rank, after[1], AFTER)
    assert got == expected


def test_the_command_keeps_the_form_of_megatrons_files(
    pack_demo: Packer, encoder: ChatEncoder, tmp_path: Path
) -> None:
    shards = pack_demo(**PACKED).shards
    folder, new = tmp_path / "iter_0000003", tmp_path / "new"
    folder.mkdir()
    expected = {}
    for rank in range(2):
        loader = new_loader(shards, encoder, rank, 2, 1)
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        name = f"train_dataloader_dprank{rank:03d}.pt"
        torch.save({"dataloader_state_dict": loader.state_dict()}, folder / name)
        expected |= of_rank(batches, rank, 1, AFTER)
    result = CliRunner().invoke(cli, ["state", "redist", str(folder), str(new), "--world-size", "1"])
    assert result.exit_code == 0, result.output
    assert "ranks x workers: 2 x 1 -> 1 x 2" in result.output
    assert [file.name for file in new.iterdir()] == ["train_dataloader_dprank000.pt"]
    loader = new_loader(shards, encoder, 0, 1, 2)
    with pytest.raises(BatchError, match=r"only rank 0 of 2, .*2 ranks x 1 workers saved, 1 x 2 now.*state redist"):
        loader.load_state_dict(torch.load(folder / "train_dataloader_dprank000.pt")["dataloader_state_dict"])
    loader.load_state_dict(torch.load(new / "train_dataloader_dprank000.pt")["dataloader_state_dict"])
    assert of_rank(loader, 0, 2, AFTER) == expected
    again = CliRunner().invoke(cli, ["state", "redist", str(folder), str(new), "--world-size", "1"])
    assert "already contains .pt files" in str(again.exception)


def test_states_that_cannot_be_redistributed(pack_demo: Packer, encoder: ChatEncoder) -> None:
    shards = pack_demo(**PACKED).shards

    def states(num_workers: int = 1, **options: Any) -> list[dict[str, Any]]:
        return [new_loader(shards, encoder, rank, 2, num_workers, **options).state_dict() for rank in range(2)]

    with pytest.raises(
        BatchError, match="must divide the 2 workers of 2 ranks x 1 workers, got 3. Use one of 1, 2 ranks"
    ):
        redistribute(states(), 3)
    with pytest.raises(BatchError, match="must be of 2 ranks, one of each, got ranks 0"):
        redistribute(states()[:1], 1)
    with pytest.raises(BatchError, match="got ranks 0, 0"):
        redistribute([states()[0]] * 2, 1)
    with pytest.raises(BatchError, match="seed 4 saved, 3 now"):
        redistribute([states()[0], states(seed=4)[1]], 1)
    with pytest.raises(BatchError, match="`world_size` must be at least 1, got 0"):
        redistribute(states(), 0)
    with pytest.raises(BatchError, match="This is not a loader state"):
        redistribute([{}], 1)


def test_what_one_rank_gathered_is_dealt_to_two(pack_demo: Packer, encoder: ChatEncoder) -> None:
    shards = pack_demo(**PACKED).shards
    loader = new_loader(shards, encoder, 0, 1, 2)
    batches = iter(loader)
    for _ in range(4):
        next(batches)
    state = gather_state(loader)
    expected = of_rank(batches, 0, 2, AFTER)
    found: dict[int, Any] = {}
    for rank in range(2):
        resumed = new_loader(shards, encoder, rank, 2, 1)
        resumed.load_state_dict(state)
        found |= of_rank(resumed, rank, 1, AFTER)
    assert found == expected
    whole = new_loader(shards, encoder, 0, 2, 1)
    whole.load_state_dict(state["ranks"][0])  # the state of the only rank
    assert of_rank(whole, 0, 1, AFTER) == {0: expected[0]}
