"""Data positions in checkpoints of Megatron-LM and Megatron-Bridge: found, restored, or refused."""

import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.energon.savable_loader import SavableDataLoaderState

from energon_packed import BatchError, ChatEncoder, ConfigError, get_packed_loader
from tests.conftest import Packer
from tests.internals import MegatronIterator, global_loader, restore_iterator, state_file
from tests.internals import restore as module

NAME = "train_dataloader_dprank000.pt"


def new_iterator(pack_demo: Packer, encoder: ChatEncoder, **options: Any) -> MegatronIterator:
    settings = {"num_workers": 0, "rank": 0, "world_size": 1, "shuffle_buffer_size": 4, **options}
    return MegatronIterator(get_packed_loader(pack_demo().shards, encoder, **settings), "bridge")


def saved_by(folder: Path, state: Any) -> Path:
    folder.mkdir(parents=True)
    torch.save({"dataloader_state_dict": state}, folder / NAME)
    return folder / NAME


@pytest.mark.parametrize("place", ["", "mp_rank_00", "mp_rank_00_000"])
def test_the_file_is_found_where_the_frameworks_save_it(tmp_path: Path, place: str) -> None:
    data = tmp_path / "energon"
    file = saved_by(data / "iter_0000100" / place, {})
    saved_by(data / "iter_0000200" / place, {})  # of a checkpoint that was never completed
    torch.save({"step": torch.tensor(100)}, tmp_path / "latest_train_state.pt")
    for path in (tmp_path, data, data / "iter_0000100", file.parent, file):
        assert state_file(path, 0) == file
    (tmp_path / "latest_train_state.pt").unlink()
    with pytest.raises(ConfigError, match="the last complete iteration is not known; pass an iteration folder"):
        state_file(data, 0)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("100\n")
    assert state_file(tmp_path, 0) == state_file(data, 0) == file
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    with pytest.raises(ConfigError, match="latest_checkpointed_iteration.txt names no iteration"):
        state_file(tmp_path, 0)


def test_a_missing_state_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="absent does not exist; pass restore=None"):
        state_file(tmp_path / "absent", 0)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("100")
    with pytest.raises(ConfigError, match="a checkpoint of iteration 100, but .* has no loader state of it"):
        state_file(tmp_path, 0)
    saved_by(tmp_path / "iter_0000100" / "mp_rank_00", {"version": 1, "rank": 0})
    with pytest.raises(ConfigError, match="states of 1 data-parallel ranks and none of rank 1: .* state redist first"):
        state_file(tmp_path, 1)
    saved_by(tmp_path / "iter_0000100" / "mp_rank_00_000", {})
    with pytest.raises(ConfigError, match="has several states, .*; pass one of them"):
        state_file(tmp_path, 0)


def test_a_state_of_the_global_order_is_that_of_every_rank(
    pack_demo: Packer, encoder: ChatEncoder, tmp_path: Path
) -> None:
    """2 ranks are resumed by 3, of which the last has no file of its own."""

    def iterators(ranks: int) -> list[MegatronIterator]:
        place: dict[str, Any] = {"world_size": ranks, "num_workers": 0}
        shards = pack_demo().shards
        return [
            MegatronIterator(global_loader(shards, encoder, rank=rank, **place), "bridge") for rank in range(ranks)
        ]

    def tokens(ranks: list[MegatronIterator], steps: int) -> list[Any]:
        return [tuple(next(one)["tokens"].flatten().tolist()) for _ in range(steps) for one in ranks]

    packs = pack_demo().manifest.packs
    expected = tokens(iterators(1), packs)
    first = iterators(2)
    seen = tokens(first, 2)
    folder = tmp_path / "iter_0000002"
    folder.mkdir()
    for rank, iterator in enumerate(first):
        torch.save({"dataloader_state_dict": iterator.save_state()}, folder / f"train_dataloader_dprank{rank:03d}.pt")
    second = iterators(3)
    for rank, iterator in enumerate(second):
        restore_iterator(iterator, folder, rank)
    seen += tokens(second, packs // 3)
    assert seen[:packs] == expected  # one sequence, whatever the number of ranks


def test_reading_draws_no_random_numbers_of_the_training(pack_demo: Packer, encoder: ChatEncoder) -> None:
    """Otherwise dropout on the host would differ after a restart, when the loader starts at another step."""
    loader = global_loader(pack_demo().shards, encoder, rank=0, world_size=1, num_workers=0)
    before = torch.get_rng_state()
    next(MegatronIterator(loader, "bridge"))
    assert torch.equal(torch.get_rng_state(), before)


def test_auto_restores_the_iteration_that_megatron_lm_loaded(
    pack_demo: Packer, encoder: ChatEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = new_iterator(pack_demo, encoder)
    for _ in range(3):
        next(first)
    saved_by(tmp_path / "iter_0000003" / "mp_rank_00", first.save_state())
    arguments = Namespace(iteration=3, dataloader_save=str(tmp_path))
    monkeypatch.setattr(module, "megatron_lm_args", lambda: arguments)  # what its get_args() returns
    second = new_iterator(pack_demo, encoder)
    restore_iterator(second, "auto", 0)
    expected = [next(first)["tokens"] for _ in range(3)]
    assert all(torch.equal(next(second)["tokens"], tokens) for tokens in expected)
    arguments.iteration = 4
    with pytest.raises(ConfigError, match=r"iter_0000004 has no train_dataloader_dprank000.pt; pass restore=None"):
        restore_iterator(new_iterator(pack_demo, encoder), "auto", 0)
    arguments.dataloader_save = None
    with pytest.raises(ConfigError, match="resumes at iteration 4, but the loader state was not saved"):
        restore_iterator(new_iterator(pack_demo, encoder), "auto", 0)
    arguments.iteration = 0
    restore_iterator(second, "auto", 0)  # a first start


def test_a_foreign_or_damaged_state_is_refused(pack_demo: Packer, encoder: ChatEncoder, tmp_path: Path) -> None:
    iterator = new_iterator(pack_demo, encoder)
    energon = SavableDataLoaderState(worker_states=[], next_worker_id=0, micro_batch_size=1)
    with pytest.raises(BatchError, match=r"dprank000.pt contains Python objects, as Energon's own loader saves them"):
        restore_iterator(iterator, saved_by(tmp_path / "energon", energon), 0)
    with pytest.raises(BatchError, match=r"has no state of a loader of energon-packed"):
        restore_iterator(iterator, saved_by(tmp_path / "other", {"position": 3}), 0)
    other = saved_by(tmp_path / "seed", new_iterator(pack_demo, encoder, seed=7).save_state())
    with pytest.raises(BatchError, match=r"000.pt: The saved state does not match this loader: seed 7 saved, 0 now"):
        restore_iterator(iterator, other, 0)
    shutil.copy(other, tmp_path / "half.pt")
    (tmp_path / "half.pt").write_bytes(other.read_bytes()[:1000])
    with pytest.raises(BatchError, match=r"half.pt is damaged \(.*\). Use an earlier checkpoint"):
        restore_iterator(iterator, tmp_path / "half.pt", 0)
