"""Exact resume: restored at EVERY step of an epoch, in a new loader, the rest is identical."""

import collections
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from energon_packed import BatchError, ChatEncoder, get_packed_loader
from tests.conftest import Packer
from tests.processes import run_python

SMALL = {"max_pixels": 16 * 28 * 28}  # 16 tokens an image: pixels take most of the time of a loader
CASES = [
    ("PackedTokensSample", 0, {}),
    ("PackedTokensSample", 1, {}),
    ("PackedTokensSample", 2, {}),
    ("PackedCaptioningSample", 2, {"micro_batch_size": 2}),
    ("MultiMixQASample", 0, {"packing_buffer_size": 24}),
    ("MultiMixQASample", 1, {"packing_buffer_size": 24}),
    ("MultiMixQASample", 2, {"packing_buffer_size": 24}),
]


@pytest.fixture(scope="session")
def encoder(tokenizer_dir: Path) -> ChatEncoder:
    return ChatEncoder.from_pretrained(tokenizer_dir, **SMALL)


@pytest.fixture(scope="session")
def pack_demo(pack_demo: Packer) -> Packer:
    return lambda **options: pack_demo(**{**SMALL, "seq_len": 512, **options})


def signature(batch: Any) -> tuple[Any, ...]:
    """Everything of a batch that a model sees, small enough to compare."""
    return (tuple(batch.__key__), tuple(batch.ids), tuple(batch.cu_seqlens.tolist()), int(batch.input_ids.sum()))


def saved(state: Any) -> Any:
    """A state as a checkpoint keeps it: through a file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize(("flavor", "num_workers", "options"), CASES)
def test_the_rest_of_the_epoch_is_identical_from_every_step(
    pack_demo: Packer, encoder: ChatEncoder, flavor: str, num_workers: int, options: dict[str, Any]
) -> None:
    seq_len = 2048 // options.get("micro_batch_size", 1)  # few steps, as each is restored
    shards = pack_demo(sample_class=flavor, max_packs_per_shard=4, seq_len=seq_len).shards

    def new_loader() -> Any:
        return get_packed_loader(
            shards, encoder, epochs=1, num_workers=num_workers, shuffle_buffer_size=5, seed=3, **options
        )

    loader = new_loader()
    states, expected = [loader.save_state_rank()], []
    for batch in loader:
        expected.append(signature(batch))
        states.append(saved(loader.save_state_rank()))
    following = [signature(batch) for batch in loader]
    assert len(set(expected)) == len(expected) > 3
    assert following != expected
    for step, state in enumerate(states):
        resumed = new_loader()
        resumed.restore_state_rank(state)
        assert [signature(batch) for batch in resumed] == (expected[step:] or following), f"after step {step}"


RESTORE = """
import sys, torch
from energon_packed import ChatEncoder, get_packed_loader
states, shards, tokenizer, num_workers, max_pixels = sys.argv[1:]
encoder = ChatEncoder.from_pretrained(tokenizer, max_pixels=int(max_pixels))
for state in torch.load(states):
    loader = get_packed_loader(shards, encoder, epochs=1, num_workers=int(num_workers), shuffle_buffer_size=5)
    loader.restore_state_rank(state)
    print(*(f"{b.__key__[0]}:{int(b.input_ids.sum())}" for b in loader))
"""


@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_state_restores_in_a_new_process(
    pack_demo: Packer, encoder: ChatEncoder, tokenizer_dir: Path, tmp_path: Path, num_workers: int
) -> None:
    shards = pack_demo(sample_class="PackedTokensSample", seq_len=2048).shards
    loader = get_packed_loader(shards, encoder, epochs=1, num_workers=num_workers, shuffle_buffer_size=5)
    states, expected = [loader.save_state_rank()], []
    for batch in loader:
        expected.append(f"{batch.__key__[0]}:{int(batch.input_ids.sum())}")
        states.append(loader.save_state_rank())
    following = [f"{batch.__key__[0]}:{int(batch.input_ids.sum())}" for batch in loader]
    torch.save(states, tmp_path / "states.pt")
    arguments = [tmp_path / "states.pt", shards, tokenizer_dir, num_workers, SMALL["max_pixels"]]
    done = run_python(RESTORE, *arguments)
    assert done.returncode == 0, done.stderr
    rests = [expected[step:] or following for step in range(len(states))]
    assert [line.split() for line in done.stdout.splitlines()] == rests


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_state_saved_right_after_a_restore_is_as_good(
    pack_demo: Packer, encoder: ChatEncoder, num_workers: int
) -> None:
    shards = pack_demo(sample_class="PackedTokensSample").shards
    loaders = [get_packed_loader(shards, encoder, epochs=1, num_workers=num_workers) for _ in range(3)]
    iterator = iter(loaders[0])
    for _ in range(3):
        next(iterator)
    loaders[1].restore_state_rank(saved(loaders[0].save_state_rank()))
    loaders[2].restore_state_rank(saved(loaders[1].save_state_rank()))
    assert [signature(b) for b in loaders[2]] == [signature(b) for b in iterator]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_endless_loaders_resume_over_epochs(pack_demo: Packer, encoder: ChatEncoder, num_workers: int) -> None:
    result = pack_demo(sample_class="PackedTokensSample")
    steps = result.manifest.packs + 3
    loaders = [get_packed_loader(result.shards, encoder, num_workers=num_workers) for _ in range(2)]
    iterator = iter(loaders[0])
    for _ in range(steps):
        next(iterator)
    loaders[1].restore_state_rank(saved(loaders[0].save_state_rank()))
    resumed = iter(loaders[1])
    for _ in range(steps):
        assert signature(next(resumed)) == signature(next(iterator))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"micro_batch_size": 2}, "match this loader: packer_batch_size 1 saved, 2 now; .* Restore"),
        ({"seed": 4}, "seed 0 saved, 4 now"),
        ({"shuffle_buffer_size": 7}, "match this loader: distributor_shuffle_buffer_size 64 saved, 7 now. Restore"),
        ({"epochs": None}, "match this loader: distributor_epochs 1 saved, None now. Restore"),
        ({"shuffle": False}, "match this loader: distributor_shuffle True saved, False now. Restore"),
    ],
)
def test_another_loader_is_refused(
    pack_demo: Packer, encoder: ChatEncoder, change: dict[str, Any], message: str
) -> None:
    shards = pack_demo(sample_class="PackedTokensSample").shards
    state = get_packed_loader(shards, encoder, epochs=1, num_workers=0).save_state_rank()
    other = get_packed_loader(shards, encoder, **{"epochs": 1, "num_workers": 0, **change})
    with pytest.raises(BatchError, match=message):
        other.restore_state_rank(state)


def test_a_state_of_complete_epochs_is_refused_without_them(pack_demo: Packer, encoder: ChatEncoder) -> None:
    shards = pack_demo(sample_class="PackedTokensSample").shards
    state = get_packed_loader(shards, encoder, num_workers=0, complete_epochs=True).save_state_rank()
    with pytest.raises(BatchError, match="distributor_complete_epochs True saved, False now. Restore"):
        get_packed_loader(shards, encoder, num_workers=0).restore_state_rank(state)


def test_other_data_and_other_versions_are_refused(pack_demo: Packer, encoder: ChatEncoder) -> None:
    loader = get_packed_loader(pack_demo(sample_class="PackedTokensSample").shards, encoder, num_workers=0)
    state = loader.save_state_rank()
    other = pack_demo(sample_class="PackedTokensSample", seed=5).shards
    with pytest.raises(BatchError, match="dataset .* saved"):
        get_packed_loader(other, encoder, num_workers=0).restore_state_rank(state)
    with pytest.raises(BatchError, match=r"version 2 is not supported \(this release reads version 1\). Finish the"):
        loader.restore_state_rank({**state, "version": 2})
    for other_value in ({}, {"a": 1}, b"pickled"):
        with pytest.raises(BatchError, match="This is not a loader state"):
            loader.restore_state_rank(other_value)  # type: ignore[arg-type]
    assert json.loads(json.dumps(state)) == state
    loader.load_state_dict(json.loads(json.dumps(state)))


def test_a_copy_elsewhere_is_the_same_data(pack_demo: Packer, encoder: ChatEncoder, tmp_path: Any) -> None:
    import shutil

    shards = pack_demo(sample_class="PackedTokensSample").shards
    shutil.copytree(shards, tmp_path / "copy")
    state = get_packed_loader(shards, encoder, num_workers=0).save_state_rank()
    get_packed_loader(tmp_path / "copy", encoder, num_workers=0).restore_state_rank(state)


@pytest.mark.parametrize("num_workers", [0, 1, 2])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_one_epoch_gives_every_pack_to_one_rank(
    pack_demo: Packer, encoder: ChatEncoder, world_size: int, num_workers: int
) -> None:
    result = pack_demo(sample_class="PackedTokensSample", max_packs_per_shard=4)
    keys: collections.Counter[str] = collections.Counter()
    for rank in range(world_size):
        loader = get_packed_loader(
            result.shards, encoder, epochs=1, num_workers=num_workers, rank=rank, world_size=world_size
        )
        keys.update(key for batch in loader if batch.ids[0] is not None for key in batch.__key__)
    assert set(keys.values()) == {1}
    assert len(keys) == result.manifest.packs


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("choice", ["repeat", "drop"])
def test_ranks_can_end_together(pack_demo: Packer, encoder: ChatEncoder, choice: Any, num_workers: int) -> None:
    result = pack_demo(sample_class="PackedTokensSample", max_packs_per_shard=4)
    world_size = next(n for n in range(2, 9) if result.manifest.packs % n)
    options = {"epochs": 1, "num_workers": num_workers, "world_size": world_size}
    for rank in range(world_size):
        even = list(get_packed_loader(result.shards, encoder, rank=rank, epoch_end=choice, **options))
        packs = result.manifest.packs
        assert len(even) == (-(-packs // world_size) if choice == "repeat" else packs // world_size)
        own = [batch for batch in even if batch.has_targets]
        assert len(own) >= packs // world_size
        for batch in even[len(own) :]:
            assert any(torch.equal(batch.input_ids, other.input_ids) for other in own)
            assert (batch.labels == -100).all()


def test_a_repeating_rank_resumes_at_its_end(pack_demo: Packer, encoder: ChatEncoder) -> None:
    result = pack_demo(sample_class="PackedTokensSample", max_packs_per_shard=4)
    world_size = next(n for n in range(2, 9) if result.manifest.packs % n)

    def loader(rank: int) -> Any:
        return get_packed_loader(result.shards, encoder, epochs=1, num_workers=0, rank=rank, world_size=world_size)

    short = next(rank for rank in range(world_size) if list(loader(rank))[-1].ids[0] is None)
    first = loader(short)
    iterator = iter(first)
    batches = [signature(next(iterator)) for _ in range(result.manifest.packs // world_size)]
    resumed = loader(short)
    resumed.restore_state_rank(saved(first.save_state_rank()))
    assert [signature(batch)[0] for batch in resumed] == [signature(batch)[0] for batch in iterator]
    *own, last = loader(short)
    assert len(own) == len(batches)
    assert any(torch.equal(last.input_ids, batch.input_ids) for batch in own)
