"""Distributors: items of each worker, limits of combined distributors, and the settings that a state belongs to."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from energon_packed import (
    BatchError,
    ConfigError,
    DataflowLoader,
    Distributor,
    EnergonDistributor,
    FileShardDistributor,
    Item,
    IterableDistributor,
    MapDistributor,
    MixtureDistributor,
    RankPartitionedDistributor,
    ShardSpec,
)
from tests.internals import allocate_ranks, check_order
from tests.loading.flows import FEATURES

THREE = [FEATURES[:4], FEATURES[4:9], FEATURES[9:]]


class Endless(Distributor):
    """An endless stream that cannot be read again."""

    can_seek = False
    infinite = True
    repeats = True
    read_ahead = 5
    readers = ("a reader",)  # type: ignore[assignment]

    def items(self, shard: ShardSpec, start: Any) -> Iterator[Item]:
        yield from (Item(number, number) for number in itertools.count(start))


def partitioned(*parts: Any, ratios: Any = (1, 1)) -> RankPartitionedDistributor:
    pairs = list(zip(parts, ratios, strict=False))
    sources = {f"{n}": {"dataset": part, "ratio": ratio} for n, (part, ratio) in enumerate(pairs)}
    return RankPartitionedDistributor(sources, world_size=sum(ratio for _, ratio in pairs))


def mixed(*parts: Any, **options: Any) -> MixtureDistributor:
    return MixtureDistributor(parts, [1] * len(parts), **options)


@pytest.mark.parametrize("combined", [partitioned, mixed])
def test_a_combined_distributor_has_the_limits_of_each_part(combined: Callable[..., Distributor]) -> None:
    plain, endless = MapDistributor(FEATURES), Endless()
    for parts in ((plain, endless), (endless, plain)):
        found = combined(*parts)
        assert (found.can_seek, found.infinite, found.repeats) == (False, True, True)
        assert (found.read_ahead, list(found.readers)) == (5, ["a reader"])
    found = combined(plain, plain)
    assert (found.can_seek, found.infinite, found.repeats) == (True, False, False)
    assert (found.read_ahead, list(found.readers)) == (32, [])


def test_workers_of_a_rank_share_its_source() -> None:
    sources = {
        "a": {"dataset": IterableDistributor(range(9)), "ratio": 2},
        "b": {"dataset": IterableDistributor(range(100, 105)), "ratio": 1},
    }
    distributor = RankPartitionedDistributor(sources, world_size=3)
    shards = [ShardSpec(index=index, num_shards=6) for index in range(6)]  # 2 workers in each of 3 ranks
    items = [[item.value for item in distributor.items(shard, 0)] for shard in shards]
    assert items == [[0, 4, 8], [1, 5], [2, 6], [3, 7], [100, 102, 104], [101, 103]]
    assert [distributor.read_many(shard, [1, 0]) for shard in shards] == [[row[1], row[0]] for row in items]


def test_items_are_read_again_in_the_order_of_their_keys() -> None:
    assert Endless().read_many(ShardSpec(), [7, 2, 5]) == [7, 2, 5]


def test_a_dataset_repeats_without_end_for_each_worker() -> None:
    distributor = MapDistributor(["a", "b", "c"], shuffle=False, repeat=True)
    shard = ShardSpec(index=1, num_shards=2)
    found = [item.value for item in itertools.islice(distributor.items(shard, 0), 5)]
    assert found == ["b", "a", "c", "b", "a"]
    assert distributor.read_many(shard, [4, 0]) == ["a", "b"]
    assert (distributor.count(shard), distributor.repeats) == (None, True)


def test_parts_and_their_items_have_another_order_in_each_part_and_epoch() -> None:
    parts = [[f"{part}{item}" for item in range(8)] for part in "abcd"]
    distributor = FileShardDistributor(parts, list, shuffle_within=True)
    epochs = [[item.value for item in distributor.items(ShardSpec(epoch=epoch), 0)] for epoch in range(2)]
    orders = []
    for values in epochs:
        names = [value[0] for value in values]
        assert sorted(values) == sorted(itertools.chain(*parts))
        assert names == [name for name in dict.fromkeys(names) for _ in range(8)]  # part after part
        orders.append([[value[1] for value in values if value[0] == name] for name in "abcd"])
    assert list(dict.fromkeys(value[0] for value in epochs[0])) != list(dict.fromkeys(v[0] for v in epochs[1]))
    assert len({tuple(order) for epoch in orders for order in epoch}) == 8


def test_a_mixture_draws_other_numbers_in_each_block_and_epoch() -> None:
    parts = [MapDistributor([100 * part + item for item in range(3)]) for part in range(3)]
    mixture = MixtureDistributor(parts, [0, 1, 3], repeat=True)
    assert (mixture.weights, mixture.current_weights) == ([1, 3], {"1": 0.25, "2": 0.75})
    assert mixture.count(ShardSpec()) is None
    items = list(itertools.islice(mixture.items(ShardSpec(), 0), 8192))
    values = [item.value for item in items]
    blocks = [[value // 100 for value in values[start : start + 4096]] for start in (0, 4096)]
    assert blocks[0] != blocks[1]
    assert all(abs(block.count(2) - 3072) < 150 for block in blocks)
    for start in (4095, 4096, 5000):
        rest = itertools.islice(mixture.items(ShardSpec(), items[start - 1].position), 50)
        assert [item.value for item in rest] == values[start : start + 50]
    own = [value for value in values if value < 200]
    epochs = {tuple(own[start : start + 3]) for start in range(0, 90, 3)}
    assert {tuple(sorted(epoch)) for epoch in epochs} == {(100, 101, 102)}
    assert len(epochs) == 6
    empty = MixtureDistributor([MapDistributor([]), MapDistributor(["a"])], [1, 1], repeat=True)
    assert [item.value for item in itertools.islice(empty.items(ShardSpec(), 0), 30)] == ["a"] * 30


def test_batches_of_packs_have_their_keys(folder: Path) -> None:
    loader = DataflowLoader(EnergonDistributor(folder, shuffle=False), batch_size=5)
    (first, *_) = keys = [batch.__key__ for batch in loader]
    assert [key.rpartition("_")[2] for key in first] == [f"{number:08d}" for number in range(5)]
    assert list(map(len, keys)) == [5, 5, 3]


def test_shards_of_packs_have_counts_seeds_and_epochs(folder: Path) -> None:
    def keys(distributor: Distributor, **place: Any) -> list[str]:
        return [item.value.__key__ for item in itertools.islice(distributor.items(ShardSpec(**place), 0), 30)]

    distributor = EnergonDistributor(folder)
    orders = []
    for place in ({}, {"seed": 1}, {"epoch": 1}):
        shards = [{"index": index, "num_shards": 4, **place} for index in range(4)]
        orders.append([keys(distributor, **shard) for shard in shards])
        assert sorted(itertools.chain(*orders[-1])) == [f"tokens0_{number:08d}" for number in range(13)]
        assert [len(order) for order in orders[-1]] == [distributor.count(ShardSpec(**shard)) for shard in shards]
    assert list(map(len, orders[0])) == [4, 3, 3, 3]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    endless = EnergonDistributor(folder, repeat=True)
    assert (len(keys(endless)), endless.count(ShardSpec())) == (30, None)
    # Of 7 and 6 packs, two batches each; one worker would make three of 13.
    assert len(DataflowLoader(distributor, batch_size=5, num_workers=2)) == 4


def test_items_without_a_batch_are_in_the_order_log(tmp_path: Path) -> None:
    items = [*FEATURES[:6], {"id": "empty", "input_ids": []}, *FEATURES[6:]]
    loader = DataflowLoader(
        IterableDistributor(items), batch_size=4, epoch_end="drop", max_failures=1, order_log=tmp_path
    )
    assert [batch.ids for batch in loader] == [[f"s{n}" for n in range(at, at + 4)] for at in (0, 4, 8)]
    assert loader.failures.counts == {"bad_batch": 1, "epoch_end": 1}
    report = check_order(tmp_path)
    assert (report.problems, report.complete) == ([], [0])
    with pytest.raises(ConfigError, match="needs batches of 4 items, got a last batch of 1 items"):
        list(DataflowLoader(IterableDistributor(FEATURES), batch_size=4, epoch_end="error"))


def test_a_missing_rank_comes_from_the_source_furthest_above_its_share() -> None:
    # Shares of 8 ranks: 3.9, 2.3, and 4 sources of 0.45, each of which needs a rank.
    assert allocate_ranks([39, 23, 4.5, 4.5, 4.5, 4.5], 8) == [3, 1, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("first", "second", "difference"),
    [
        (
            MapDistributor(FEATURES),
            IterableDistributor(FEATURES),
            "distributor_distributor MapD.* saved, Iterable.* now",
        ),
        (
            MapDistributor(FEATURES),
            MapDistributor(FEATURES, shuffle=False),
            "distributor_shuffle True saved, False now",
        ),
        (
            FileShardDistributor(THREE, list),
            FileShardDistributor(THREE[:2], list),
            "distributor_parts 3 saved, 2 now",
        ),
        (
            FileShardDistributor(THREE, list),
            FileShardDistributor(THREE, list, shuffle=False),
            "distributor_shuffle True saved, False now",
        ),
        (
            FileShardDistributor(THREE, list),
            FileShardDistributor(THREE, list, shuffle_within=True),
            "distributor_shuffle_within False saved, True now",
        ),
        (mixed(MapDistributor(FEATURES)), mixed(MapDistributor(FEATURES[:9])), "'items': 13.*'items': 9"),
        (
            mixed(MapDistributor(FEATURES)),
            mixed(MapDistributor(FEATURES), repeat=True),
            "distributor_repeat False saved, True now",
        ),
        (partitioned(FEATURES), partitioned(FEATURES[:9]), "'items': 13.*'items': 9"),
        (
            partitioned(FEATURES, FEATURES, ratios=(2, 1)),
            partitioned(FEATURES, FEATURES, ratios=(1, 2)),
            "'0': 2.*'0': 1",
        ),
    ],
)
def test_a_state_belongs_to_the_settings_of_its_distributor(
    first: Distributor, second: Distributor, difference: str
) -> None:
    place = {"rank": 0, "world_size": getattr(first, "world_size", 1)}
    state = DataflowLoader(first, batch_size=1, **place).state_dict()
    with pytest.raises(BatchError, match=f"does not match this loader: .*{difference}|changed .*{difference}"):
        DataflowLoader(second, batch_size=1, **place).load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        ({"shuffle": False}, "distributor_shuffle True saved, False now"),
        ({"shuffle_buffer_size": 5}, "distributor_shuffle_buffer_size 64 saved, 5 now"),
        ({"repeat": True}, "distributor_epochs 1 saved, None now"),
    ],
)
def test_a_state_of_energon_packs_belongs_to_its_settings(folder: Path, options: Any, difference: str) -> None:
    state = DataflowLoader(EnergonDistributor(folder), batch_size=1).state_dict()
    with pytest.raises(BatchError, match=f"does not match this loader: {difference}"):
        DataflowLoader(EnergonDistributor(folder, **options), batch_size=1).load_state_dict(state)
