"""DataflowLoader: every item once, exact resume at every step, and one line for what contradicts."""

import collections
import itertools
import logging
import os
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from energon_packed import (
    BatchError,
    ConfigError,
    DataflowLoader,
    Distributor,
    FileShardDistributor,
    Item,
    IterableDistributor,
    MapDistributor,
    MixtureDistributor,
    Packer,
    PoolPacker,
    SequentialPacker,
    ShardSpec,
    SimpleBatcher,
)
from tests.loading.flows import (
    DISTRIBUTORS,
    FEATURES,
    ITEMS,
    PACKERS,
    check_every_step,
    energon_folder,
    feature,
    signature,
)

COMBINATIONS = [
    (distributor, list(PACKERS)[(shift + number) % len(PACKERS)])
    for shift in range(len(PACKERS))
    for number, distributor in enumerate(DISTRIBUTORS)
]
"""All distributors and packers; the first of them have each distributor, and each packer."""
WITH_WORKERS = COMBINATIONS[: int(os.environ.get("ENERGON_PACKED_COMBINATIONS", "5"))]


@pytest.mark.parametrize(
    ("distributor", "packer", "num_workers"),
    [*((*pair, 0) for pair in COMBINATIONS), *((*pair, 2) for pair in WITH_WORKERS)],
)
def test_the_rest_of_the_epoch_is_identical_from_every_step(
    folder: Path, distributor: str, packer: str, num_workers: int
) -> None:
    def new_loader() -> DataflowLoader:
        return DataflowLoader(
            DISTRIBUTORS[distributor](folder), packer=PACKERS[packer](), num_workers=num_workers, seed=3
        )

    check_every_step(new_loader)


@pytest.mark.parametrize("packer", ["planned", "pool"])
def test_an_energon_epoch_longer_than_the_interval_of_its_states(tmp_path: Path, packer: str) -> None:
    """Energon's state is saved every 64 items: loaders continue before, at and after two of these saves."""
    folder = energon_folder(tmp_path, count=140)
    steps = {"planned": range(62, 132, 3), "pool": range(20, 65, 4)}[packer]

    def new_loader() -> DataflowLoader:
        return DataflowLoader(DISTRIBUTORS["energon"](folder), packer=PACKERS[packer](), seed=3)

    check_every_step(new_loader, lambda step: step in steps)


@pytest.mark.parametrize("distributor", DISTRIBUTORS)
def test_a_loader_that_ignores_its_state_fails_the_harness(folder: Path, distributor: str) -> None:
    class Forgetful(DataflowLoader):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            self._claimed = state

        def state_dict(self) -> dict[str, Any]:
            return getattr(self, "_claimed", None) or super().state_dict()

    with pytest.raises(AssertionError, match="after step 1"):
        check_every_step(lambda: Forgetful(DISTRIBUTORS[distributor](folder), packer=PACKERS["pool"]()))


@pytest.mark.parametrize("num_workers", [0, 1, 2])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("distributor", DISTRIBUTORS)
def test_every_item_once_an_epoch(folder: Path, distributor: str, world_size: int, num_workers: int) -> None:
    for epoch in range(1 if num_workers else 2):  # worker processes take most of the time
        seen: collections.Counter[str] = collections.Counter()
        for rank in range(world_size):
            loader = DataflowLoader(
                DISTRIBUTORS[distributor](folder),
                packer=PoolPacker(16, pool_size=4),
                num_workers=num_workers,
                rank=rank,
                world_size=world_size,
            )
            if epoch:
                loader.load_state_dict(loader.state_dict() | {"epoch": 1})
            for batch in loader:
                assert batch.num_tokens <= 16
                seen.update(batch.ids)
        assert seen == {f"s{number}": 1 for number in range(ITEMS)}


def test_a_second_epoch_has_another_order_and_resumes(folder: Path) -> None:
    loader = DataflowLoader(MapDistributor(FEATURES), batch_size=4, num_workers=2, persistent_workers=True, seed=1)
    epochs = [[signature(batch) for batch in loader] for _ in range(3)]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert loader.epoch == 3
    fresh = DataflowLoader(MapDistributor(FEATURES), batch_size=4, num_workers=2, persistent_workers=True, seed=1)
    iterator = iter(fresh)
    first = [signature(next(iterator))]
    resumed = DataflowLoader(MapDistributor(FEATURES), batch_size=4, num_workers=2, persistent_workers=True, seed=1)
    resumed.load_state_dict(fresh.state_dict())
    assert [
        first + [signature(batch) for batch in resumed],
        *([signature(b) for b in resumed] for _ in "12"),
    ] == epochs


@pytest.mark.parametrize("num_workers", [0, 2])
def test_iterating_again_after_a_break_resumes(num_workers: int) -> None:
    def new_loader() -> DataflowLoader:
        return DataflowLoader(IterableDistributor(FEATURES), packer=PACKERS["pool"](), num_workers=num_workers)

    expected = [signature(batch) for batch in new_loader()]
    loader, found = new_loader(), []
    for _ in range(2):
        for batch in loader:
            found.append(signature(batch))
            break
    assert found + [signature(batch) for batch in loader] == expected


class Gap(Distributor):
    """Items with these numbers."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers

    def items(self, shard: ShardSpec, start: Any) -> Iterator[Item]:
        for number in self.numbers[start:]:
            yield Item(number, FEATURES[number])


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("numbers", "message"),
    [([0, 1, 3], "Gap.items must yield item 2 next, got item 3"), ([0, 1, 1], "item 2 next, got item 1")],
)
def test_items_with_a_gap_or_a_repeat_raise(numbers: list[int], message: str, num_workers: int) -> None:
    with pytest.raises(BatchError, match=message) as raised:
        list(DataflowLoader(Gap(numbers), batch_size=1, num_workers=num_workers))
    assert "\n" not in str(raised.value)


def test_a_distributor_that_ignores_where_it_begins_raises() -> None:
    class Deaf(Gap):
        def items(self, shard: ShardSpec, start: Any) -> Iterator[Item]:
            return super().items(shard, 0)

    loader = DataflowLoader(Deaf([0, 1, 2, 3]), batch_size=2)
    next(iter(loader))
    resumed = DataflowLoader(Deaf([0, 1, 2, 3]), batch_size=2)
    resumed.load_state_dict(loader.state_dict())
    with pytest.raises(BatchError, match=r"Deaf.items must yield item 2 next, got item 0: data would be repeated"):
        list(resumed)


def test_a_state_has_integers_of_any_size() -> None:
    """The state of NumPy's generator, for example, is two integers of 128 bits."""

    class Random(Gap):
        def items(self, shard: ShardSpec, start: Any) -> Iterator[Item]:
            bits = np.random.PCG64(0)
            first, bits.state = start or (0, bits.state)
            for number in range(first, 4):
                drawn = int(bits.random_raw() % len(FEATURES))
                yield Item(number, FEATURES[drawn], position=[number + 1, bits.state])

    def new(packer: Packer | None) -> DataflowLoader:
        return DataflowLoader(Random([]), packer=packer or SimpleBatcher(1))

    for packer in (None, PoolPacker(16, pool_size=3)):  # a pool reads its samples again, by the position before each
        expected = [signature(batch) for batch in new(packer)]
        assert len(expected) > 1
        loader = new(packer)
        next(iter(loader))
        resumed = new(packer)
        resumed.load_state_dict(loader.state_dict())
        assert [signature(batch) for batch in resumed] == expected[1:]


def stream() -> Iterator[dict[str, Any]]:
    yield from FEATURES


def test_a_one_shot_iterator_is_saved_unless_samples_are_out_of_order() -> None:
    expected = [signature(b) for b in DataflowLoader(IterableDistributor(FEATURES), packer=SequentialPacker(16))]
    for step in range(len(expected)):
        loader = DataflowLoader(IterableDistributor(stream()), packer=SequentialPacker(16))
        iterator = iter(loader)
        found = [signature(next(iterator)) for _ in range(step)]
        resumed = DataflowLoader(IterableDistributor(stream()), packer=SequentialPacker(16))
        resumed.load_state_dict(loader.state_dict())
        assert found + [signature(batch) for batch in resumed] == expected
    with pytest.raises(BatchError, match="generator was read once and cannot be read again"):
        list(resumed)
    loader = DataflowLoader(IterableDistributor(stream()), packer=PoolPacker(16, pool_size=6))
    next(iter(loader))
    with pytest.raises(BatchError, match="PoolPacker buffers samples out of order, and IterableDistributor reads"):
        loader.state_dict()
    with pytest.raises(BatchError, match="the stream must have 5 items, as when the state was saved, got 4"):
        list(resumed_stream(SequentialPacker(16), FEATURES[:4], state_after(SequentialPacker(16), FEATURES, 3)))


def state_after(packer: Packer, items: list[Any], steps: int) -> Any:
    loader = DataflowLoader(IterableDistributor(iter(items)), packer=packer, max_failures=1)
    for _ in zip(range(steps), loader, strict=False):
        pass
    return loader.state_dict()


def resumed_stream(packer: Packer, items: list[Any], state: Any) -> DataflowLoader:
    loader = DataflowLoader(IterableDistributor(iter(items)), packer=packer, max_failures=1)
    loader.load_state_dict(state)
    return loader


def test_an_item_that_cannot_be_used_is_skipped_again_in_a_resumed_stream() -> None:
    empty = {"id": "empty", "input_ids": []}
    waiting = [{"id": f"{number}", "input_ids": [1] * count} for number, count in enumerate((8, 8, 3, 4, 9))]
    for items, new_packer in (
        ([*FEATURES[:4], empty, *FEATURES[4:]], lambda: SequentialPacker(16)),
        ([*waiting[:3], empty, *waiting[3:]], lambda: PoolPacker(16, pool_size=4)),  # it is between waiting items
    ):
        loader = DataflowLoader(IterableDistributor(items), packer=new_packer(), max_failures=1)
        expected = [signature(batch) for batch in loader]
        for step in range(len(expected)):
            state = state_after(new_packer(), items, step)
            assert [signature(b) for b in resumed_stream(new_packer(), items, state)] == expected[step:]


def test_a_waiting_item_that_cannot_be_used_any_more_is_named() -> None:
    state = state_after(SequentialPacker(16), FEATURES, 3)
    items = [*FEATURES[:4], {"id": "empty", "input_ids": []}, *FEATURES[5:]]
    with pytest.raises(BatchError, match="item 4 of the saved state cannot be encoded any more: .*empty"):
        list(resumed_stream(SequentialPacker(16), items, state))


class LastFirst(Packer):
    """Rows of one of 4 waiting items, the last item first."""

    buffer_size = 4

    def select(self, lengths: Any) -> list[Any]:
        return list(np.roll(np.arange(len(lengths)), 1).reshape(-1, 1))


def test_an_iterator_is_not_saved_until_all_items_before_the_last_used_item_are_in_rows() -> None:
    loader, found = DataflowLoader(IterableDistributor(stream()), packer=LastFirst()), []
    for batch in itertools.islice(loader, 8):
        try:
            loader.state_dict()
            found.append((*batch.ids, "saved"))
        except BatchError:
            found.append((*batch.ids, "refused"))
    refused = [(name, "refused") for name in ("s3", "s0", "s1")]
    assert found[:4] == [*refused, ("s2", "saved")]
    assert found[4:] == [*[(name, "refused") for name in ("s7", "s4", "s5")], ("s6", "saved")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"batch_size": 2, "packer": SequentialPacker(16)},
            "Pass either `batch_size` or `packer`, not both .got batch_size=2 and Seq",
        ),
        (
            {"batch_size": 2, "shuffle": True},
            "^`shuffle` is not an option of DataflowLoader. Set it on the distributor.$",
        ),
        ({"sampler": [1]}, "^`sampler` is not an option of DataflowLoader: the distributor decides the order.$"),
        ({"collate_fn": list}, "^`collate_fn` is not an option of DataflowLoader. Pass a `collator`.$"),
        ({"epoch_end": "mask"}, "`epoch_end` must be one of repeat, drop, error, got 'mask'"),
        ({"num_worker": 2}, "^unknown argument 'num_worker'; did you mean `num_workers`.$"),
        ({"rank": 2, "world_size": 2}, "`rank` must be from 0 to `world_size` - 1, got 2"),
        ({"rank": 0}, "`rank` and `world_size` must be passed together"),
        ({"num_workers": -1}, "`num_workers` must be at least 0, got -1"),
        ({"batch_size": 0}, "`batch_size` must be at least 1, got 0"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DataflowLoader(MapDistributor(FEATURES), **options)
    with pytest.raises(
        ConfigError, match="`distributor` must be a Distributor, got list. Wrap map-style data in MapDistributor"
    ):
        DataflowLoader(FEATURES)  # type: ignore[arg-type]


def test_numbers_of_numpy_are_numbers_in_the_identity_of_a_packer() -> None:
    for packer in (SequentialPacker, PoolPacker):
        made, same = packer(np.int64(16), max_images=np.int32(2)), packer(16, max_images=2)
        assert made.identity() == same.identity()
        with pytest.raises(ConfigError, match="`max_images` must be an integer, got 1.5"):
            packer(16, max_images=1.5)


def test_persistent_workers_without_workers_is_corrected_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        loader = DataflowLoader(MapDistributor(FEATURES), persistent_workers=True)
    assert not loader.persistent_workers
    assert "persistent_workers need worker processes, so they have no effect" in caplog.text
    assert len(list(loader)) == len(loader) == ITEMS


@pytest.mark.parametrize("num_workers", [0, 2])
def test_fewer_items_than_workers_never_spins(num_workers: int, caplog: pytest.LogCaptureFixture) -> None:
    def new_loader(rank: int) -> DataflowLoader:
        return DataflowLoader(
            IterableDistributor(FEATURES[:1]), batch_size=1, num_workers=num_workers, rank=rank, world_size=2
        )

    assert [len(list(new_loader(rank))) for rank in range(2)] == [1, 0]
    idle = new_loader(1)
    list(idle)
    assert "rank 1 of 2 has no item in epoch 0" in caplog.text
    with pytest.raises(ConfigError, match="rank 1 of 2 has no item in epoch 1: there are fewer items than ranks"):
        list(idle)


def test_a_state_of_other_data_or_settings_is_refused() -> None:
    def new_loader(count: int = ITEMS, size: int = 2, **options: Any) -> DataflowLoader:
        return DataflowLoader(MapDistributor(FEATURES[:count]), batch_size=size, **options)

    state = new_loader().state_dict()
    for other, message in (
        (new_loader(12), "distributor_items 13 saved, 12 now"),
        (new_loader(seed=1), "seed 0 saved, 1 now"),
    ):
        with pytest.raises(BatchError, match=message):
            other.load_state_dict(state)
    endless = DataflowLoader(MapDistributor(FEATURES, repeat=True), batch_size=2).state_dict()
    with pytest.raises(BatchError, match="distributor_repeat True saved, False now"):
        new_loader().load_state_dict(endless)
    with pytest.raises(BatchError, match="version"):
        new_loader().load_state_dict(state | {"version": 9})


@pytest.mark.parametrize("packer", [PoolPacker, SequentialPacker])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_overlong_samples_are_dropped_and_counted_or_raise(packer: Callable[..., Packer], num_workers: int) -> None:
    data = MapDistributor([*FEATURES, {"id": "long", "input_ids": [1] * 17}])
    loader = DataflowLoader(data, packer=packer(16, overlong="drop"), num_workers=num_workers)
    assert {ident for batch in loader for ident in batch.ids} == {f"s{number}" for number in range(ITEMS)}
    assert loader.failures.counts == {"overlong": 1}
    with pytest.raises(BatchError, match="a sample does not fit a row: 17 tokens, more than seq_len 16"):
        list(DataflowLoader(data, packer=packer(16), num_workers=num_workers))


def images(count: int, number: int) -> dict[str, Any]:
    grid = torch.tensor([[1, 2, 2]] * count)
    return feature(number) | {"image_grid_thw": grid, "pixel_values": torch.zeros(4 * count, 3)}


@pytest.mark.parametrize(("limit", "most"), [({"max_images": 3}, 3), ({"max_patches": 8}, 2)])
@pytest.mark.parametrize("packer", [PoolPacker, SequentialPacker])
def test_images_and_patches_of_a_row_are_limited(packer: Callable[..., Packer], limit: Any, most: int) -> None:
    data = [images(1 + number % 2, number) for number in range(ITEMS)]
    batches = list(DataflowLoader(MapDistributor(data), packer=packer(1000, **limit)))
    assert max(len(batch.image_grid_thw) for batch in batches) == most
    assert sum(batch.num_samples for batch in batches) == ITEMS
    above = MapDistributor([*data, images(4, 0)])
    with pytest.raises(BatchError, match=r"a sample does not fit a row: .* more than max_(images|patches) (3|8)"):
        list(DataflowLoader(above, packer=packer(1000, **limit)))
    loader = DataflowLoader(above, packer=packer(1000, **limit, overlong="drop"))
    assert sum(batch.num_samples for batch in loader) == ITEMS
    assert loader.failures.counts == {"overlong": 1}


@pytest.mark.parametrize("packer", [PoolPacker, SequentialPacker])
def test_patches_of_videos_count_in_the_limit_and_videos_are_no_images(packer: Callable[..., Packer]) -> None:
    grid = torch.tensor([[2, 1, 2]])
    data = [
        feature(number) | {"video_grid_thw": grid, "pixel_values_videos": torch.zeros(4, 3)} for number in range(4)
    ]
    data.append(images(1, 4))
    batches = list(DataflowLoader(MapDistributor(data, shuffle=False), packer=packer(1000, max_patches=8)))
    assert sorted(sum(batch.num_images) + sum(batch.num_videos) for batch in batches) == [1, 2, 2]
    batches = list(DataflowLoader(MapDistributor(data), packer=packer(1000, max_images=1)))
    assert [batch.num_samples for batch in batches] == [5]


def test_a_packer_that_loses_a_sample_raises() -> None:
    class Loses(Packer):
        buffer_size = 4

        def select(self, lengths: Any) -> list[Any]:
            return [torch.arange(len(lengths) - 1).numpy()]

    with pytest.raises(
        BatchError, match="Loses.select must return every sample .*, got 3 sample indices for 4 samples"
    ):
        list(DataflowLoader(MapDistributor(FEATURES), packer=Loses()))


def test_a_dropped_last_batch_is_counted() -> None:
    loader = DataflowLoader(MapDistributor(FEATURES), batch_size=4, epoch_end="drop")
    assert [batch.num_samples for batch in loader] == [4, 4, 4]
    assert len(loader) == 3
    assert loader.failures.counts == {"epoch_end": 1}


def test_failures_are_skipped_up_to_the_limit() -> None:
    broken = MapDistributor([*FEATURES, {"id": "empty", "input_ids": []}, {"what": "is this"}])
    loader = DataflowLoader(broken, batch_size=4, max_failures=2)
    assert sum(batch.num_samples for batch in loader) == ITEMS
    assert sum(loader.failures.counts.values()) == 2
    with pytest.raises(BatchError, match="more than `max_failures` 1"):
        list(DataflowLoader(broken, batch_size=4, max_failures=1))


def test_mixture_draws_by_ratio_the_same_on_every_rank() -> None:
    data = [MapDistributor([index] * 1000) for index in range(3)]
    weights = [5.0, 3.0, 2.0]
    draws = 50_000
    sequences = []
    for rank in range(2):
        mixture = MixtureDistributor(data, weights, repeat=True)
        shard = ShardSpec(index=rank, num_shards=2, seed=7)
        sequences.append([item.value for item, _ in zip(mixture.read(shard), range(draws), strict=False)])
    assert sequences[0] == sequences[1]
    for index, weight in enumerate(weights):
        p = weight / sum(weights)
        assert abs(sequences[0].count(index) - draws * p) < 3 * (draws * p * (1 - p)) ** 0.5
    with pytest.raises(ConfigError, match="`weights` must have one weight for each of the 3 distributors, got 2"):
        MixtureDistributor(data, [1, 2])
    with pytest.raises(ConfigError, match="All `weights` must be at least 0 and finite, got -1"):
        MixtureDistributor(data, [1, 2, -1])


def test_memory_of_a_worker_is_that_of_its_own_files() -> None:
    peaks = []
    for count in (20_000, 20_000, 120_000):
        distributor = FileShardDistributor(range(count), lambda part: [part])
        tracemalloc.start()
        try:
            shard = ShardSpec(index=3, num_shards=count // 20, epoch=1, seed=2)
            assert len(list(distributor.items(shard, 0))) == 20
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert peaks[2] - peaks[1] < 10_000


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_repeating_mixture_resumes_in_any_epoch_of_its_parts(num_workers: int) -> None:
    def new_loader() -> DataflowLoader:
        parts = [MapDistributor(FEATURES[:3]), FileShardDistributor([FEATURES[3:6], FEATURES[6:]], list)]
        mixture = MixtureDistributor(parts, [2, 1], repeat=True)
        return DataflowLoader(mixture, packer=PACKERS["pool"](), num_workers=num_workers)

    loader = new_loader()
    states, expected = [], []
    for batch, _ in zip(loader, range(12), strict=False):
        expected.append(signature(batch))
        states.append(loader.state_dict())
    for step in range(0, 12, 4):
        resumed = new_loader()
        resumed.load_state_dict(states[step])
        assert [signature(b) for b, _ in zip(resumed, expected[step + 1 :], strict=False)] == expected[step + 1 :]


def test_a_pool_packs_better_than_a_sequence() -> None:
    data = [feature(number % ITEMS, number) for number in range(400)]
    rows = {}
    for name, packer in (("pool", PoolPacker(32, pool_size=64)), ("sequence", SequentialPacker(32))):
        rows[name] = len(list(DataflowLoader(IterableDistributor(data), packer=packer)))
    assert rows["pool"] <= 1.02 * -(-sum(len(one["input_ids"]) for one in data) // 32)
    assert rows["pool"] < rows["sequence"]


def test_batches_are_not_longer_than_asked() -> None:
    assert [b.num_samples for b in DataflowLoader(MapDistributor(FEATURES), packer=SimpleBatcher(5))] == [5, 5, 3]
