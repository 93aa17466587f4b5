"""Weights that changed between saving and resuming: named, and allowed, with every dataset where it was."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from energon_packed import (
    BatchError,
    DataflowLoader,
    JointLoader,
    MapDistributor,
    MixtureDistributor,
    PackedDataset,
)
from tests.internals import ratio
from tests.loading.flows import PACKERS, energon_folders, feature
from tests.loading.test_elastic import Ranks

PACKS = {"a": 60, "b": 20}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return energon_folders(tmp_path_factory, PACKS)


def blend(outputs: dict[str, Path], file: Path, *weights: int) -> PackedDataset:
    members = ", ".join(f"{{path: {outputs[n]}, weight: {w}}}" for n, w in zip("ab", weights, strict=True))
    file.write_text(
        f"__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train: {{blend: [{members}]}}\n"
    )
    return PackedDataset(file)


def of_members(seen: Counter[str]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for name, times in seen.items():
        found[name[0]] += times
    return dict(found)


def test_weights_are_shown_as_a_ratio() -> None:
    assert ratio([0.75, 0.25]) == "3:1"
    assert ratio({"a": 2 / 3, "b": 1 / 3}) == "2:1"
    assert ratio([5.0, 5.0, 2.5]) == "2:2:1"
    assert ratio([1000, 0, 1]) == "1000:0:1"
    assert ratio([1001, 1]) == "1001:1"
    assert ratio([0.6, 0.4]) == "3:2"
    assert ratio([0, 0]) == "0:0"
    assert ratio([1e-300, 1e300]) == "1e-300:1e+300"
    assert ratio([0.123456789, 0.987654321]) in ("1:8", "0.1235:0.9877")


@pytest.mark.parametrize(("world_size", "packer"), [(2, "planned"), (3, "planned"), (1, "simple"), (2, "simple")])
def test_a_blend_goes_on_by_its_new_weights(
    outputs: dict[str, Path], tmp_path: Path, world_size: int, packer: str
) -> None:
    old, new = blend(outputs, tmp_path / "old.yaml", 3, 1), blend(outputs, tmp_path / "new.yaml", 2, 1)

    def loader_of(dataset: PackedDataset, **options: Any) -> DataflowLoader:
        return DataflowLoader(MapDistributor(dataset), packer=PACKERS[packer](), seed=2, **options)

    before = Ranks(lambda **place: loader_of(old, **place), 2)
    first = before.take(3)
    assert sum(first.values()) < 40
    state = before.state()
    with pytest.raises(BatchError, match=r"^weights 3:1 saved, 2:1 now. Pass `allow_changed_weights=True` to cont"):
        Ranks(lambda **place: loader_of(new, **place), world_size, state)
    allow: Any = lambda **place: loader_of(new, allow_changed_weights=True, **place)  # noqa: E731
    after = Ranks(allow, world_size, state)
    resumed = after.take(1)
    middle = after.state()
    rest = resumed + after.take()
    left = 80 - sum(first.values())
    assert sum(rest.values()) == left  # the epoch keeps its length
    assert abs(of_members(rest)["b"] - left / 3) <= 1
    seen = first + rest
    assert max(times for name, times in seen.items() if name[0] == "a") == 1  # none again before the others
    assert len([name for name in seen if name[0] == "b"]) == 20
    assert max(seen.values()) <= 2
    assert of_members(after.take()) == {"a": 53, "b": 27}  # the next epoch is as of the new weights alone
    for size in (world_size, world_size + 1):  # exact where nothing changes any more, with any number of ranks
        assert resumed + Ranks(allow, size, middle).take() == rest


def test_new_weights_after_the_last_batch_are_those_of_the_next_epoch(
    outputs: dict[str, Path], tmp_path: Path
) -> None:
    old, new = blend(outputs, tmp_path / "old.yaml", 3, 1), blend(outputs, tmp_path / "new.yaml", 1, 3)
    loader = DataflowLoader(MapDistributor(old), batch_size=8)
    batches = iter(loader)
    for _ in range(10):
        next(batches)
    resumed = DataflowLoader(MapDistributor(new), batch_size=8, allow_changed_weights=True)
    resumed.load_state_dict(loader.state_dict())
    assert of_members(Counter(name for batch in resumed for name in batch.ids)) == {"a": 20, "b": 60}


def test_a_mixture_goes_on_by_its_new_weights() -> None:
    data = [[feature(number) for number in range(60)], [feature(number, 100) for number in range(60)]]

    def new_loader(*weights: int, **options: Any) -> DataflowLoader:
        mixture = MixtureDistributor([MapDistributor(one) for one in data], weights)
        return DataflowLoader(mixture, packer=PACKERS["simple"](), seed=2, **options)

    before = Ranks(lambda **place: new_loader(3, 1, **place), 2)
    seen = before.take(4)
    with pytest.raises(BatchError, match=r"^weights 3:1 saved, 1:9 now. Pass `allow_changed_weights=True`"):
        Ranks(lambda **place: new_loader(1, 9, **place), 2, before.state())
    after = Ranks(lambda **place: new_loader(1, 9, allow_changed_weights=True, **place), 2, before.state())
    following = after.take(6)
    assert sum(times for name, times in following.items() if int(name[1:]) >= 100) >= 26  # of 36
    one = Ranks(lambda **place: new_loader(1, 9, allow_changed_weights=True, **place), 1, after.state())
    more = one.take(2)
    seen += following + more + one.take()
    assert set(seen.values()) == {1}
    assert len(seen) == 120


def test_joint_loaders_go_on_by_their_new_weights() -> None:
    def new_joint(*weights: int, **options: Any) -> JointLoader:
        loaders = {
            "a": DataflowLoader(MapDistributor([feature(number) for number in range(40)])),
            "b": DataflowLoader(MapDistributor([feature(number, 100) for number in range(40)])),
        }
        return JointLoader(loaders, dict(zip("ab", weights, strict=True)), seed=4, stop="first", **options)

    joint = new_joint(3, 1)
    seen: Counter[str] = Counter()
    for _, (_, batch) in zip(range(12), joint, strict=False):
        seen.update(batch.ids)
    state = json.loads(json.dumps(joint.state_dict()))
    with pytest.raises(BatchError, match=r"^weights 3:1 saved, 2:1 now. Pass `allow_changed_weights=True`"):
        new_joint(2, 1).load_state_dict(state)
    resumed = new_joint(1, 20, allow_changed_weights=True)
    resumed.load_state_dict(state)
    rest = [(name, batch.ids[0]) for name, batch in resumed]
    assert sum(name == "b" for name, _ in rest) > 4 * sum(name == "a" for name, _ in rest)
    seen.update(ident for _, ident in rest)
    assert set(seen.values()) == {1}
