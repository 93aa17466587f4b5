"""Eight ranks and a long tail: balanced orders cost alike at each step, lose nothing, repeat nothing, and resume."""

import json
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from energon_packed import (
    BalancedPoolPacker,
    BalancedSampler,
    ChatEncoder,
    ConfigError,
    CostModel,
    DataflowLoader,
    IterableDistributor,
    MapDistributor,
    PackedDataset,
    PackOptions,
    PaddingFreeCollator,
    PoolPacker,
    get_packed_loader,
    pack,
)
from tests.conftest import Packer
from tests.internals import StoredTokens
from tests.loading.flows import saved, signature

RANKS = 8
ATTENTION = CostModel(token=0, square=1, patch=0)
SEQ_LEN = 256


def long_tail(count: int) -> Iterator[dict[str, Any]]:
    lengths = np.clip(np.random.default_rng(0).lognormal(3.2, 1.1, count).astype(int), 2, SEQ_LEN)
    for number, length in enumerate(lengths.tolist()):
        yield {"id": f"s{number}", "input_ids": [number % 50 + 1] * length}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> PackedDataset:
    folder = tmp_path_factory.mktemp("tail")
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(one | {"labels": one["input_ids"]}) + "\n" for one in long_tail(2000)))
    options: dict[str, Any] = {"sample_class": "PackedTokensSample", "workers": 1, "encoder": StoredTokens()}
    return PackedDataset(pack(PackOptions(inputs=(str(data),), output_dir=folder, seq_len=SEQ_LEN, **options)).shards)


def squares(batch: Any) -> float:
    return float((batch.cu_seqlens.diff().double() ** 2).sum())


def waiting(of_ranks: list[list[float]]) -> float:
    """Time of the steps, each as long as its slowest rank, over the mean of the ranks."""
    steps = list(zip(*of_ranks, strict=False))
    return sum(max(one) for one in steps) / sum(sum(one) / len(one) for one in steps)


def test_sizes_are_those_of_the_packs(dataset: PackedDataset) -> None:
    sizes = dataset.row_sizes()
    for number in (0, 7, len(dataset) - 1):
        lengths = [len(one) for one in dataset[number]]
        assert (sizes.tokens[number], sizes.squares[number]) == (sum(lengths), sum(one**2 for one in lengths))
    assert np.array_equal(sizes.tokens, dataset.lengths)


def test_padding_for_context_parallelism_counts(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({**one, "labels": one["input_ids"]}) + "\n" for one in long_tail(20)))
    options: dict[str, Any] = {"sample_class": "PackedTokensSample", "workers": 1, "encoder": StoredTokens()}
    done = pack(PackOptions(inputs=(str(data),), output_dir=tmp_path, seq_len=SEQ_LEN, pad_multiple=8, **options))
    padded = PackedDataset(done.shards)
    lengths = [-(-len(sample) // 8) * 8 for sample in padded[0]]
    assert padded.row_sizes().columns()[0].tolist() == [sum(lengths), sum(length**2 for length in lengths), 0, 0]


def test_patches_count(pack_demo: Packer, encoder: ChatEncoder) -> None:
    dataset = PackedDataset(pack_demo().shards, encoder)
    sizes = dataset.row_sizes()
    for number in range(len(dataset)):
        grids = [one.image_grid_thw for one in dataset[number] if one.image_grid_thw is not None]
        assert sizes.patches[number] == sum(int(grid.prod(dim=1).sum()) for grid in grids)
        assert sizes.patch_squares[number] == sum(int((grid.prod(dim=1) ** 2).sum()) for grid in grids)
    assert sizes.patches.max() > 0
    by_hand = 1.0 * sizes.tokens + sizes.squares / (12 * 4096) + 0.1 * sizes.patches
    assert np.allclose(CostModel().costs(sizes), by_hand)


def loader_of(dataset: Any, rank: int, balance: Any = "attention", **options: Any) -> DataflowLoader:
    workers, size = options.get("num_workers", 0), options.get("batch_size", 1)
    order = MapDistributor(dataset, balance=ATTENTION if balance else None)
    return DataflowLoader(order, rank=rank, world_size=RANKS, batch_size=size, num_workers=workers, seed=3)


@pytest.mark.parametrize(("num_workers", "batch_size"), [(0, 1), (0, 2), (2, 2)])
def test_eight_ranks_lose_nothing_and_wait_less(dataset: PackedDataset, num_workers: int, batch_size: int) -> None:
    options = {"num_workers": num_workers, "batch_size": batch_size}
    found: dict[Any, list[list[Any]]] = {}
    for balance in (None, "attention") if not num_workers else ("attention",):
        found[balance] = [list(loader_of(dataset, rank, balance, **options)) for rank in range(RANKS)]
        ids = sorted(
            str(one) for batches in found[balance] for batch in batches for one in batch.ids if one is not None
        )
        assert ids == sorted(f"s{number}" for number in range(2000))
    own = {name: [[batch for batch in batches if batch.ids[0]] for batches in of] for name, of in found.items()}
    waits = {name: waiting([[squares(b) for b in batches] for batches in of]) for name, of in own.items()}
    assert waits["attention"] < 1.1
    assert waits.get(None, 2.0) > 1.25
    loaders = [loader_of(dataset, rank, **options) for rank in range(RANKS)]
    assert [len(loader) for loader in loaders] == [len(batches) for batches in found["attention"]]
    assert len(set(map(len, loaders))) == 1


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_balanced_order_resumes(dataset: PackedDataset, num_workers: int) -> None:
    options = {"num_workers": num_workers, "batch_size": 2}
    loader = loader_of(dataset, 5, **options)
    expected, states = [], []
    for batch in loader:
        expected.append(signature(batch))
        states.append(saved(loader.state_dict()))
    following = signature(next(iter(loader)))
    assert len(set(expected)) == len(expected) > 4
    for step in (0, len(expected) // 2):
        resumed = loader_of(dataset, 5, **options)
        resumed.load_state_dict(states[step])
        assert [signature(batch) for batch in resumed] == expected[step + 1 :]
        assert signature(next(iter(resumed))) == following
    other = DataflowLoader(MapDistributor(dataset), rank=5, world_size=RANKS, batch_size=2, seed=3)
    with pytest.raises(ValueError, match="distributor_balance"):
        loader_of(dataset, 5, batch_size=2).load_state_dict(other.state_dict())


@pytest.mark.parametrize("batch_size", [1, 3])
def test_samplers_of_all_ranks_have_every_pack(dataset: PackedDataset, batch_size: int) -> None:
    settings: dict[str, Any] = {"batch_size": batch_size, "balance": ATTENTION, "seed": 2}
    samplers = [BalancedSampler(dataset, RANKS, rank, **settings) for rank in range(RANKS)]
    numbers = [list(sampler) for sampler in samplers]
    assert {len(one) for one in numbers} == {len(samplers[0])}
    assert set().union(*numbers) == set(range(len(dataset)))
    assert sum(map(len, numbers)) - len(dataset) < RANKS
    exact = [list(BalancedSampler(dataset, RANKS, rank, epoch_end="drop", **settings)) for rank in range(RANKS)]
    together = [number for one in exact for number in one]
    assert len(together) == len(set(together)) == len(dataset) // (RANKS * batch_size) * RANKS * batch_size
    everyone = BalancedSampler(dataset, RANKS, "all", **settings)
    dealt = list(everyone)
    assert sorted(dealt) == list(range(len(dataset)))
    assert len(everyone) == len(dealt)
    batches = [dealt[start : start + batch_size] for start in range(0, len(together), batch_size)]
    for rank in range(RANKS):
        assert [number for batch in batches[rank::RANKS] for number in batch] == exact[rank]  # as accelerate deals
    samplers[0].set_epoch(1)
    assert list(samplers[0]) != numbers[0]
    assert samplers[0].imbalance.before > 1.2 > 1.06 > samplers[0].imbalance.after
    assert re.match(r"imbalance \d\.\d{3} -> 1\.0\d\d \(slowest rank", str(samplers[0].imbalance))


def test_a_sampler_of_a_blend_gives_the_packs_of_each_epoch(dataset: PackedDataset, tmp_path: Path) -> None:
    folder = dataset.blend[0].path
    members = [{"path": str(folder), "repetitions": times} for times in (1.5, 0.25)]
    (tmp_path / "blend.yaml").write_text(
        json.dumps(
            {
                "__module__": "megatron.energon",
                "__class__": "MetadatasetV2",
                "splits": {"train": {"blend_epochized": members}},
            }
        )
    )
    blend = PackedDataset(tmp_path / "blend.yaml")
    sampler = BalancedSampler(blend, 2, "all", balance=ATTENTION)
    order = MapDistributor(blend, balance=ATTENTION).order
    for epoch in range(2):
        sampler.set_epoch(epoch)
        numbers = list(sampler)
        assert sorted(numbers) == list(range(len(blend)))
        names = sorted(blend.sample(number).__key__ for number in numbers)
        items = order.items(range(len(order)), epoch, 0, [order.segment(2, 1)])
        assert names == sorted(blend.pack(int(number)).__key__ for number in items)
        assert 1 <= sampler.imbalance.after <= sampler.imbalance.before


def test_stateful_loaders_resume_in_the_middle(dataset: PackedDataset) -> None:
    def new() -> Any:
        sampler = BalancedSampler(dataset, RANKS, 1, batch_size=2, balance=ATTENTION)
        return StatefulDataLoader(dataset, batch_size=2, sampler=sampler, collate_fn=PaddingFreeCollator())

    loader = new()
    batches = iter(loader)
    for _ in range(4):
        next(batches)
    state = loader.state_dict()
    resumed = new()
    resumed.load_state_dict(state)
    rest = [one["input_ids"] for one in batches]
    assert len(rest) > 2
    for expected, found in zip(rest, resumed, strict=True):
        assert torch.equal(expected, found["input_ids"])


def pooled(packer: Any, rank: int) -> DataflowLoader:
    return DataflowLoader(IterableDistributor(list(long_tail(6000))), packer=packer, rank=rank, world_size=RANKS)


def test_pools_of_all_ranks_give_rows_of_similar_cost() -> None:
    options: dict[str, Any] = {"pool_size": 192}
    costs: dict[str, list[list[float]]] = {"pool": [], "balanced": []}
    tokens = {"pool": [], "balanced": []}  # type: dict[str, list[int]]
    for rank in range(RANKS):
        for name in costs:
            new = BalancedPoolPacker(SEQ_LEN, rows_per_round=24, cost=ATTENTION, **options)
            batches = list(pooled(new if name == "balanced" else PoolPacker(SEQ_LEN, **options), rank))
            costs[name].append([squares(batch) for batch in batches])
            tokens[name] += [batch.num_tokens for batch in batches]
            assert sorted(one for batch in batches for one in batch.ids) == sorted(
                one["id"] for number, one in enumerate(long_tail(6000)) if number % RANKS == rank
            )
    full = min(map(len, costs["balanced"])) // 24 * 24 - 24  # the ends of the epochs differ
    before, after = (waiting([one[:full] for one in costs[name]]) for name in ("pool", "balanced"))
    assert full > 40
    assert before > 1.25
    assert after - 1 < 0.5 * (before - 1)
    assert len(tokens["balanced"]) <= 1.03 * len(tokens["pool"])  # rows are as full


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_pool_is_part_of_the_state(num_workers: int) -> None:
    def new() -> DataflowLoader:
        packer = BalancedPoolPacker(SEQ_LEN, rows_per_round=4, pool_size=64)
        return DataflowLoader(IterableDistributor(list(long_tail(700))), packer=packer, num_workers=num_workers)

    loader = new()
    expected, states = [], []
    for batch in loader:
        expected.append(signature(batch))
        states.append(saved(loader.state_dict()))
    assert len(expected) > 30
    assert any(state["shards"][0][1]["waiting"] for state in states[:8])
    for step in (0, 1, 5, 17, len(expected) - 2):
        resumed = new()
        resumed.load_state_dict(states[step])
        assert [signature(batch) for batch in resumed] == expected[step + 1 :]
    other = DataflowLoader(IterableDistributor([]), packer=BalancedPoolPacker(SEQ_LEN, cost=ATTENTION, pool_size=64))
    with pytest.raises(ValueError, match="packer_"):
        other.load_state_dict(states[0])


def test_data_that_cannot_be_balanced_raises_one_line(dataset: PackedDataset) -> None:
    wrong: Any = "patches"
    with pytest.raises(ConfigError, match="`balance` must be 'attention', 'tokens', a CostModel or None, got"):
        MapDistributor(dataset, balance=wrong)
    with pytest.raises(ConfigError, match="`balance` needs the sizes of rows, which list does not have"):
        MapDistributor([1], balance="attention")
    with pytest.raises(ConfigError, match="`batch_size` must be at least 1, got 0"):
        BalancedSampler(dataset, 2, 0, batch_size=0)
    pooled = DataflowLoader(MapDistributor(dataset, balance="attention"), packer=PoolPacker(SEQ_LEN))
    with pytest.raises(ConfigError, match="`balance` aligns finished rows, and a packer or a mixture makes other"):
        next(iter(pooled))
    with pytest.raises(ConfigError, match="`rank` must be from 0 to `world_size` - 1, got 2"):
        BalancedSampler(dataset, 2, 2)
    with pytest.raises(ConfigError, match="BalancedPoolPacker has no effect here, .* Use PoolPacker, or a Dataflow"):
        get_packed_loader(dataset.blend[0].path, packer=BalancedPoolPacker(SEQ_LEN))
    option: Any = {"balance": "attention"}
    with pytest.raises(ConfigError, match="`balance` is not an option of get_packed_loader, .* Use DataflowLoader"):
        get_packed_loader(dataset.blend[0].path, **option)


def test_a_plan_in_memory_knows_its_rows(pack_demo: Packer, tokenizer_dir: Path, demo: Any) -> None:
    from energon_packed import DataflowConfig, plan_in_memory

    config = DataflowConfig(dataset_path=str(demo.jsonl), packing_length=1024, processor_config=str(tokenizer_dir))
    planned = plan_in_memory(config)
    sizes = planned.row_sizes()
    for number in islice(range(len(planned)), 3):
        assert sizes.squares[number] == sum(len(one) ** 2 for one in planned[number])
    assert sorted(BalancedSampler(planned, 2, "all")) == list(range(len(planned)))
