"""Small dataflows without a tokenizer: each distributor, each packer, and a harness that restores at every step."""

import io
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from energon_packed import (
    DataflowLoader,
    Distributor,
    EnergonDistributor,
    FileShardDistributor,
    IterableDistributor,
    MapDistributor,
    MixtureDistributor,
    Packer,
    PackOptions,
    PlannedPacker,
    PoolPacker,
    SequentialPacker,
    SimpleBatcher,
    pack,
)
from tests.internals import StoredTokens

ITEMS = 13
LENGTHS = [3 + (7 * n) % 11 for n in range(ITEMS)]


def feature(number: int, start: int = 0) -> dict[str, Any]:
    """Sample `s{number}`, whose tokens are its number."""
    return {"id": f"s{start + number}", "input_ids": [start + number] * LENGTHS[number % ITEMS]}


FEATURES = [feature(number) for number in range(ITEMS)]


def part_of(numbers: range) -> Iterator[dict[str, Any]]:
    return (FEATURES[number] for number in numbers)


def energon_folder(folder: Path, count: int = ITEMS) -> Path:
    """Each sample a pack of its own, so that items are the same as those of the others."""
    return _packed(folder, map(feature, range(count)))


def energon_folders(factory: pytest.TempPathFactory, packs: dict[str, int]) -> dict[str, Path]:
    """For each name, a folder of so many packs, with a sample `NAME0`, `NAME1`, ... of 3 tokens in each."""
    return {
        name: _packed(factory.mktemp(name), ({"id": f"{name}{n}", "input_ids": [n] * 3} for n in range(count)))
        for name, count in packs.items()
    }


def _packed(folder: Path, features: Iterable[dict[str, Any]]) -> Path:
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(one | {"labels": one["input_ids"]}) + "\n" for one in features))
    options: dict[str, Any] = {"sample_class": "PackedTokensSample", "max_samples_per_pack": 1, "workers": 1}
    return pack(
        PackOptions(inputs=(str(data),), output_dir=folder, seq_len=16, encoder=StoredTokens(), **options)
    ).shards


DISTRIBUTORS: dict[str, Callable[[Path], Distributor]] = {
    "map": lambda folder: MapDistributor(FEATURES),
    "iterable": lambda folder: IterableDistributor(FEATURES),
    "rank_partitioned": lambda folder: FileShardDistributor(
        [range(start, min(start + 3, ITEMS)) for start in range(0, ITEMS, 3)], part_of, shuffle_within=True
    ),
    "mixture": lambda folder: MixtureDistributor(
        [MapDistributor(FEATURES[:8]), IterableDistributor(FEATURES[8:])], [1, 2]
    ),
    "energon": lambda folder: EnergonDistributor(folder, shuffle_buffer_size=5),
}
PACKERS: dict[str, Callable[[], Packer]] = {
    "planned": PlannedPacker,
    "pool": lambda: PoolPacker(16, pool_size=7),
    "sequential": lambda: SequentialPacker(16),
    "simple": lambda: SimpleBatcher(3),
}


def signature(batch: Any) -> tuple[Any, ...]:
    """Everything of a batch that a model sees, small enough to compare."""
    return (*batch.ids, *batch.cu_seqlens.tolist(), int((batch.input_ids * batch.position_ids).sum()))


def saved(state: Any) -> Any:
    """A state as a checkpoint keeps it: plain, and through a file."""
    assert json.loads(json.dumps(state)) == state
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def check_every_step(
    new_loader: Callable[[], DataflowLoader], steps: Callable[[int], bool] = lambda step: True
) -> None:
    """Save at every step of an epoch, restore each state in a new loader, compare the rest, or the next epoch.

    A harness on batches that repeat would prove nothing: all of them must differ, so that a loader that ignores its
    state fails at every step but the first.
    """
    loader = new_loader()
    states, expected = [saved(loader.state_dict())], []
    for batch in loader:
        expected.append(signature(batch))
        states.append(saved(loader.state_dict()))
    following = [signature(batch) for batch in loader]
    assert len(set(expected)) == len(expected) > 3
    for step in filter(steps, range(len(states))):
        resumed = new_loader()
        resumed.load_state_dict(states[step])
        assert saved(resumed.state_dict()) == states[step]
        assert [signature(batch) for batch in resumed] == (expected[step:] or following), f"after step {step}"
