"""The four roles with items of any kind: tensors, features and objects of custom processors, as in Cosmos."""

import math
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from energon_packed import (
    BatchError,
    Collator,
    ConfigError,
    DataflowLoader,
    DefaultBatchCollator,
    EncodedSample,
    IterableDistributor,
    JointLoader,
    MapDistributor,
    MixtureDistributor,
    PoolPacker,
    Processor,
    RankPartitionedDistributor,
    SequentialPacker,
    ShardSpec,
)
from tests.internals import allocate_ranks


class OwnProcessor(Processor):
    def encode(self, item: Any) -> Any:
        return {"y": item["x"] * 2}


class Same(Processor):
    def encode(self, item: Any) -> Any:
        return item


class Raw(Same):
    reads = "raw"


class OwnCollator(Collator):
    def collate(self, samples: Any) -> Any:
        return {"labels": torch.cat([sample["y"] for sample in samples])}


class Lists(Collator):
    def collate(self, samples: Any) -> Any:
        return list(samples)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_call_of_cosmos(num_workers: int) -> None:
    tensor = torch.arange(3)
    loader = DataflowLoader(
        MapDistributor([{"x": tensor}]), OwnProcessor(), collator=OwnCollator(), num_workers=num_workers
    )
    assert [batch["labels"].tolist() for batch in loader] == [[0, 2, 4]]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_of_tensors_are_stacked_and_resume(num_workers: int) -> None:
    items = [{"x": torch.full((2,), n), "name": f"n{n}"} for n in range(7)]

    def make(distributor: Any) -> DataflowLoader:
        return DataflowLoader(
            distributor, Same(), batch_size=2, collator=DefaultBatchCollator(), num_workers=num_workers
        )

    for distributor in (MapDistributor(items), IterableDistributor(items)):
        seen = [name for batch in make(distributor) for name in batch["name"]]
        assert sorted(seen) == [one["name"] for one in items]
        loader = make(distributor)
        first = next(iter(loader))
        assert first["x"].shape == (2, 2)
        rest = make(distributor)
        rest.load_state_dict(loader.state_dict())
        assert [*first["name"], *[name for batch in rest for name in batch["name"]]] == seen


@pytest.mark.parametrize(
    "item", [{"images": torch.ones(2), "text": "a"}, {"question": 3}, {"input_ids": [1, 2]}, (1, 2), "text", 7]
)
def test_a_custom_processor_gets_items_as_they_are(item: Any) -> None:
    for processor in (Same(), Raw()):
        (batch,) = DataflowLoader(MapDistributor([item]), processor, collator=Lists())
        assert batch[0] is item


def test_records_become_conversations_unless_a_processor_reads_raw_items() -> None:
    record = {"text": "A document."}
    (batch,) = DataflowLoader(MapDistributor([record]), Same(), collator=Lists())
    assert batch[0].text == "A document."
    (batch,) = DataflowLoader(MapDistributor([record]), Raw(), collator=Lists())
    assert batch[0] is record
    sample = EncodedSample(input_ids=np.array([1, 2]), labels=np.array([1, 2]))
    (batch,) = DataflowLoader(MapDistributor([[sample, sample]]), Raw(), collator=Lists())
    assert batch == [sample, sample]


def test_without_a_processor_or_collator_the_error_names_the_role() -> None:
    with pytest.raises(BatchError, match="PaddingFreeCollator needs EncodedSamples, got dict. .*DefaultBatchCollator"):
        list(DataflowLoader(MapDistributor([{"x": torch.ones(1)}]), Same()))


def rows(packer: Any, items: list[Any]) -> list[list[str]]:
    loader = DataflowLoader(MapDistributor(items, shuffle=False), Raw(), packer, Lists())
    return [[sample["n"] for sample in batch] for batch in loader]


@pytest.mark.parametrize("make", [partial(PoolPacker, pool_size=4), SequentialPacker])
def test_rows_by_a_custom_size(make: Any) -> None:
    items = [{"n": f"{n}", "x": torch.ones(2 + n % 2)} for n in range(8)]
    size_fn = lambda sample: len(sample["x"])  # noqa: E731
    found = rows(make(5, size_fn=size_fn), items)
    assert sorted(name for row in found for name in row) == [one["n"] for one in items]
    assert max(len(row) for row in found) == 2
    assert len(found) == 4
    assert rows(make(5, size_fn=size_fn, overlong="drop"), [*items, {"n": "long", "x": torch.ones(6)}]) == found
    with pytest.raises(ConfigError, match="needs the size of each sample, got a dict without `input_ids`. Pass `s"):
        rows(make(5), items)
    with pytest.raises(ConfigError, match="`size_fn` must return an integer of at least 0, got 2.5"):
        rows(make(5, size_fn=lambda _: 2.5), items)
    features = [{"n": one["n"], "input_ids": one["x"]} for one in items]
    assert rows(make(5), features) == found
    samples = [EncodedSample(id=f"{n}", input_ids=np.arange(n + 1), labels=np.arange(n + 1)) for n in range(4)]
    loader = DataflowLoader(MapDistributor(samples, shuffle=False), packer=make(4, size_fn=lambda _: 2))
    assert [batch.num_samples for batch in loader] == [2, 2]


@pytest.mark.parametrize("make", [partial(PoolPacker, pool_size=6), SequentialPacker])
def test_a_batch_has_one_modality(make: Any) -> None:
    extra: list[dict[str, Any]] = [{}, {"pixel_values": 1}, {"pixel_values_videos": 1}]
    items = [{"n": f"{n % 3}", "input_ids": [1, 2]} | extra[n % 3] for n in range(18)]
    assert {len(set(row)) for row in rows(make(8), items)} != {1}
    grouped = rows(make(8, group_by="media"), items)
    assert {len(set(row)) for row in grouped} == {1}
    assert sorted(map(len, grouped)) == [2, 2, 2, 4, 4, 4]  # a row waits for more samples of its kind
    grid = torch.tensor([[1, 2, 2]])
    media: list[dict[str, Any]] = [
        {},
        {"pixel_values": torch.zeros(4, 3), "image_grid_thw": grid},
        {"pixel_values_videos": torch.zeros(4, 3), "video_grid_thw": grid},
    ]
    features = [{"id": f"{n % 3}", "input_ids": [1, 2]} | media[n % 3] for n in range(18)]
    loader = DataflowLoader(MapDistributor(features), packer=make(8, group_by="media"))
    assert {len(set(batch.ids)) for batch in loader} == {1}


@pytest.mark.parametrize(
    ("ratios", "ranks", "expected"),
    [
        ([1], 4, [4]),
        ([1, 1], 4, [2, 2]),
        ([3, 1], 8, [6, 2]),
        ([2, 1], 4, [3, 1]),
        ([1, 1, 1], 8, [3, 3, 2]),
        ([100, 1, 1], 4, [2, 1, 1]),
        ([100, 1, 1], 3, [1, 1, 1]),
        ([0.5, 0.3, 0.2], 8, [4, 2, 2]),
        ([5, 3, 1, 1], 6, [3, 1, 1, 1]),
    ],
)
def test_ranks_follow_the_ratios(ratios: list[float], ranks: int, expected: list[int]) -> None:
    """The numbers are those that RankPartitionedDistributor of Cosmos computes."""
    assert allocate_ranks(ratios, ranks) == expected


@pytest.mark.parametrize("num_workers", [0, 2])
def test_ranks_read_their_source(num_workers: int) -> None:
    sources = {
        "a": {"dataset": [{"n": f"a{n}"} for n in range(12)], "ratio": 3},
        "none": {"dataset": None, "ratio": 0},
        "b": {"dataset": IterableDistributor([{"n": f"b{n}"} for n in range(5)]), "ratio": 1},
    }
    seen = []
    for rank in range(4):
        distributor = RankPartitionedDistributor(sources, world_size=4)
        assert distributor.ranks == {"a": 3, "b": 1}
        options: Any = {"rank": rank, "world_size": 4, "num_workers": num_workers, "collator": Lists()}
        loader = DataflowLoader(distributor, Raw(), batch_size=1, **options)
        names = [batch[0]["n"] for batch in loader]
        assert len(names) == len(loader) if rank < 3 else True
        assert {name[0] for name in names} == {"b" if rank == 3 else "a"}
        seen += names
        part = DataflowLoader(distributor, Raw(), batch_size=1, **options)
        again = [batch[0]["n"] for batch in islice(part, 2)]
        resumed = DataflowLoader(distributor, Raw(), batch_size=1, **options)
        resumed.load_state_dict(part.state_dict())
        assert sorted(again + [batch[0]["n"] for batch in resumed]) == sorted(names)
    assert sorted(seen) == sorted([f"a{n}" for n in range(12)] + [f"b{n}" for n in range(5)])


def test_partitions_that_cannot_be_are_refused() -> None:
    two: Any = {name: {"dataset": [1], "ratio": 1} for name in "ab"}
    with pytest.raises(ConfigError, match="There must be 1 to 1 sources with a ratio above 0, .* got 2. Use more"):
        RankPartitionedDistributor(two)
    with pytest.raises(ConfigError, match="got 0"):
        RankPartitionedDistributor({"a": {"dataset": [1], "ratio": 0}}, world_size=2)
    with pytest.raises(ConfigError, match="The ratio of 'a' must be at least 0 and finite, got -1"):
        RankPartitionedDistributor({"a": {"dataset": [1], "ratio": -1}}, world_size=2)
    with pytest.raises(ConfigError, match="The ratio of 'a' must be at least 0 and finite, got inf"):
        RankPartitionedDistributor({"a": {"dataset": [1], "ratio": math.inf}}, world_size=2)
    for source in ([1], {"dataset": [1], "ratio": 1, "weight": 2}):
        with pytest.raises(ConfigError, match="Source 'a' must be a mapping of `dataset` and `ratio`"):
            RankPartitionedDistributor({"a": source}, world_size=2)  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match="`world_size` of RankPartitionedDistributor is 2, and the loader has"):
        RankPartitionedDistributor(two, world_size=2).count(ShardSpec(index=0, num_shards=3))


def test_a_ratio_of_0_skips_a_source() -> None:
    parts = [MapDistributor([{"n": name}] * 3) for name in "abc"]
    mixture = MixtureDistributor(parts, [1, 0, 2], names=["a", "b", "c"])
    assert mixture.names == ["a", "c"]
    assert sorted(item.value["n"] for item in mixture.items(ShardSpec(), 0)) == ["a"] * 3 + ["c"] * 3
    with pytest.raises(ConfigError, match="`weights` must have a weight above 0, got only 0"):
        MixtureDistributor(parts, [0, 0, 0])
    for weight in (-1, math.inf):
        with pytest.raises(ConfigError, match=f"All `weights` must be at least 0 and finite, got {weight}"):
            MixtureDistributor(parts, [1, weight, 1])
    loaders = {name: DataflowLoader(part, Raw(), collator=Lists()) for name, part in zip("abc", parts, strict=True)}
    assert {name for name, _ in JointLoader(loaders, {"a": 1, "b": 0, "c": 1})} == {"a", "c"}
    with pytest.raises(ConfigError, match="`weights` must have a weight above 0, got only 0"):
        JointLoader(loaders, {"a": 0, "b": 0, "c": 0})


def test_options_that_need_workers_are_ignored_with_a_note(caplog: pytest.LogCaptureFixture) -> None:
    options: Any = {"prefetch_factor": 4, "persistent_workers": True, "timeout": 5, "multiprocessing_context": "fork"}
    loader = DataflowLoader(MapDistributor([(1,)]), Same(), collator=Lists(), num_workers=0, **options)
    assert [record.getMessage() for record in caplog.records] == [
        "persistent_workers, prefetch_factor, multiprocessing_context, timeout need worker processes, so they have no "
        "effect with `num_workers` 0"
    ]
    assert len(list(loader)) == 1
