"""Every loader resumes within a dataset of videos, exactly after each batch, with the same decoded frames."""

from typing import Any

import pytest
import torch

from energon_packed import (
    DataflowConfig,
    DataflowLoader,
    EnergonDistributor,
    MapDistributor,
    PackedDataset,
    PackedIterableDataset,
    PoolPacker,
    get_packed_loader,
)
from tests.video_demo import VideoDemo


def signature(batch: Any) -> tuple[Any, ...]:
    """Everything of a batch that a model sees, small enough to compare."""
    pixels = batch.pixel_values_videos
    grids = None if batch.video_grid_thw is None else batch.video_grid_thw.tolist()
    seconds = None if batch.second_per_grid_ts is None else torch.as_tensor(batch.second_per_grid_ts).tolist()
    return (
        *batch.ids,
        int((batch.input_ids * batch.position_ids[0]).sum()),
        None if pixels is None else float(pixels.double().sum()),
        str(grids),
        str(seconds),
    )


def energon(demo: VideoDemo, workers: int) -> Any:
    options = {"shuffle_buffer_size": 3, "seed": 1}
    return get_packed_loader(demo.packed().shards, demo.encoder, epochs=1, num_workers=workers, **options)


def planned(demo: VideoDemo, workers: int) -> Any:
    dataset = PackedDataset(demo.packed(extract_frames=True).shards, demo.encoder)
    return DataflowLoader(MapDistributor(dataset), demo.encoder, num_workers=workers, seed=1)


def pooled(demo: VideoDemo, workers: int) -> Any:
    folder = demo.packed(sample_class="MultiMixQASample", unpacked=True).shards
    distributor = EnergonDistributor(folder, shuffle_buffer_size=5)
    return DataflowLoader(distributor, demo.encoder, PoolPacker(1024, pool_size=4), num_workers=workers, seed=1)


def raw(demo: VideoDemo, workers: int) -> Any:
    config = DataflowConfig(inputs=(str(demo.jsonl),), tokenizer=demo.tokenizer, seq_len=1024, max_reject_rate=1)
    return PackedIterableDataset(config, num_workers=workers)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("make", [energon, planned, pooled, raw])
def test_the_rest_is_identical_after_every_batch(video_demo: VideoDemo, make: Any, workers: int) -> None:
    loader = make(video_demo, workers)
    states, expected = [], []
    for batch in loader:
        expected.append(signature(batch))
        states.append(loader.state_dict())
    assert len(expected) > 2
    assert sum(entry[-2] != "None" for entry in expected) > 1
    for step, state in list(enumerate(states, 1))[:-1:2]:
        resumed = make(video_demo, workers)
        resumed.load_state_dict(state)
        assert [signature(batch) for batch in resumed] == expected[step:], f"after step {step}"
