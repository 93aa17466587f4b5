"""Where an epoch ends: at its last batch, however it is iterated; and repeating without leaving packs behind."""

from collections import Counter
from itertools import islice
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest

from energon_packed import (
    BatchError,
    ChatEncoder,
    ConfigError,
    DataflowConfig,
    DataflowLoader,
    JointLoader,
    MapDistributor,
    PackedIterableDataset,
    PoolPacker,
    SequentialPacker,
    SimpleBatcher,
    get_packed_loader,
)
from tests.conftest import Packer
from tests.internals import make_blend, write_metadataset
from tests.loading.flows import FEATURES, signature


@pytest.mark.parametrize("num_workers", [0, 2])
def test_counted_steps_are_a_complete_epoch(pack_demo: Packer, encoder: ChatEncoder, num_workers: int) -> None:
    result = pack_demo(sample_class="PackedTokensSample")
    loaders = [get_packed_loader(result.shards, encoder, epochs=1, num_workers=num_workers) for _ in range(2)]
    expected = [[batch.ids for batch in loaders[0]] for _ in range(3)]
    counted = []
    for _ in range(3):
        batches = iter(loaders[1])
        counted.append([next(batches).ids for _ in range(result.manifest.packs)])
    assert counted == expected
    assert len({str(epoch) for epoch in expected}) == 3


def test_counted_steps_of_ranks_that_repeat_their_last_batch(pack_demo: Packer, encoder: ChatEncoder) -> None:
    packs = pack_demo(sample_class="PackedTokensSample").manifest.packs
    world_size = next(number for number in (2, 3, 4, 5) if packs % number)
    shards = pack_demo(sample_class="PackedTokensSample").shards
    place: dict[str, Any] = {"rank": world_size - 1, "world_size": world_size}
    loader = get_packed_loader(shards, encoder, epochs=1, num_workers=0, **place)
    steps = -(-packs // world_size)
    assert [len(list(islice(loader, steps))) for _ in range(3)] == [steps] * 3


def test_a_state_after_the_last_batch_resumes_with_the_next_epoch(pack_demo: Packer, encoder: ChatEncoder) -> None:
    result = pack_demo(sample_class="PackedTokensSample")
    loader = get_packed_loader(result.shards, encoder, epochs=1, num_workers=1)
    batches = iter(loader)
    for _ in range(result.manifest.packs):
        next(batches)
    state = loader.state_dict()
    second = [batch.ids for batch in loader]
    resumed = get_packed_loader(result.shards, encoder, epochs=1, num_workers=1)
    resumed.load_state_dict(state)
    assert [batch.ids for batch in resumed] == second


@pytest.mark.parametrize("num_workers", [0, 2])
def test_complete_epochs_visit_all_before_repeating(pack_demo: Packer, encoder: ChatEncoder, num_workers: int) -> None:
    result = pack_demo(sample_class="PackedTokensSample")
    packs = result.manifest.packs
    once = get_packed_loader(result.shards, encoder, epochs=1, num_workers=0)
    everything = sum(batch.num_samples for batch in once)
    options: dict[str, Any] = {"num_workers": num_workers, "complete_epochs": True}
    stream = [batch.ids for batch in islice(get_packed_loader(result.shards, encoder, **options), 3 * packs)]
    for epoch in range(3):
        part = stream[epoch * packs : (epoch + 1) * packs]
        assert set(Counter(name for ids in part for name in ids).values()) == {1}
        assert sum(map(len, part)) == everything
    assert stream[:packs] != stream[packs : 2 * packs]
    for step in (packs,) if num_workers else (1, packs - 1, packs, packs + 2):
        loader = get_packed_loader(result.shards, encoder, **options)
        batches = iter(loader)
        for _ in range(step):
            next(batches)
        resumed = get_packed_loader(result.shards, encoder, **options)
        resumed.load_state_dict(loader.state_dict())
        assert [batch.ids for batch in islice(resumed, packs + 1)] == stream[step : step + packs + 1]


def test_complete_epochs_need_data_that_repeats_and_ends(
    pack_demo: Packer, encoder: ChatEncoder, tmp_path: Path
) -> None:
    shards = pack_demo(sample_class="PackedTokensSample").shards
    with pytest.raises(ConfigError, match="`complete_epochs` applies only to `epochs=None`. Remove it"):
        get_packed_loader(shards, encoder, epochs=1, complete_epochs=True)
    write_metadataset(make_blend([(shards, 1)]), tmp_path / "blend.yaml")
    with pytest.raises(ConfigError, match="draws by weight indefinitely, so it has no epoch. Remove `complete"):
        get_packed_loader(tmp_path / "blend.yaml", encoder, complete_epochs=True, num_workers=0)
    loader = get_packed_loader(shards, encoder, complete_epochs=True, num_workers=0)
    next(iter(loader))
    with pytest.raises(BatchError, match="complete_epochs|shuffle_buffer_size|dataset"):
        get_packed_loader(shards, encoder, num_workers=0).load_state_dict(loader.state_dict())


def counted(loader: Any, steps: list[int]) -> list[list[Any]]:
    """Epochs of a loop that counts steps and never meets the end."""
    epochs = []
    for count in steps:
        batches = iter(loader)
        epochs.append([next(batches) for _ in range(count)])
    return epochs


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
def test_counted_steps_of_a_dataflow_are_complete_epochs(options: dict[str, Any]) -> None:
    def new_loader() -> DataflowLoader:
        return DataflowLoader(MapDistributor(FEATURES), packer=PoolPacker(32, pool_size=5), seed=2, **options)

    whole = new_loader()
    expected = [[signature(batch) for batch in whole] for _ in range(3)]
    loader = new_loader()
    found = counted(loader, [len(epoch) for epoch in expected])
    assert [[signature(batch) for batch in epoch] for epoch in found] == expected
    resumed = new_loader()
    resumed.load_state_dict(loader.state_dict())
    assert [signature(batch) for batch in resumed] == [signature(batch) for batch in whole]


def test_counted_steps_of_records_are_complete_epochs(tmp_path: Path, tokenizer_dir: Path) -> None:
    data = tmp_path / "data.jsonl"
    line = '{"messages": [{"role": "user", "content": "how many %d"}, {"role": "assistant", "content": "%d"}]}\n'
    data.write_text("".join(line % (number, number) for number in range(20)))
    config = DataflowConfig(
        dataset_path=str(data), packing_length=128, processor_config={"tokenizer": str(tokenizer_dir)}
    )
    epochs = [[batch.ids for batch in PackedIterableDataset(config)]]
    stream = PackedIterableDataset(config)
    epochs, steps = [[batch.ids for batch in stream] for _ in range(2)], len(epochs[0])
    assert epochs[0] != epochs[1]
    found = counted(PackedIterableDataset(config), [steps, len(epochs[1])])
    assert [[batch.ids for batch in epoch] for epoch in found] == epochs


@pytest.mark.parametrize("stop", ["first", "all"])
def test_counted_steps_of_joint_loaders_are_complete_epochs(stop: Any) -> None:
    def new_loader() -> JointLoader:
        short = DataflowLoader(MapDistributor(FEATURES), packer=SequentialPacker(16), seed=1)
        long = DataflowLoader(MapDistributor(FEATURES * 3), packer=SimpleBatcher(5))
        return JointLoader({"short": short, "long": long}, {"short": 1, "long": 2}, seed=4, stop=stop)

    whole = new_loader()
    expected = [[(name, *signature(batch)) for name, batch in whole] for _ in range(4)]
    assert all(expected)
    loader = new_loader()
    found = counted(loader, [len(epoch) for epoch in expected])
    assert [[(name, *signature(batch)) for name, batch in epoch] for epoch in found] == expected


def test_breaks_keep_the_workers_and_what_they_read_ahead() -> None:
    loader = DataflowLoader(MapDistributor(FEATURES), batch_size=2, num_workers=1)
    expected = [signature(batch) for batch in DataflowLoader(MapDistributor(FEATURES), batch_size=2, num_workers=1)]
    others = set(active_children())  # of earlier tests
    processes = set()
    found = []
    for _ in expected:
        for batch in loader:
            processes |= {worker.pid for worker in active_children() if worker not in others}
            found.append(signature(batch))
            break
    assert found == expected
    assert len(processes) == 1
