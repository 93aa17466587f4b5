"""torchdata's StatefulDataLoader over PackedDataset resumes at every step."""

from typing import Any

import pytest
from torchdata.stateful_dataloader import StatefulDataLoader

from energon_packed import ChatEncoder, PackedDataset, PaddingFreeCollator


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_rest_is_identical_from_every_step(pack_demo: Any, encoder: ChatEncoder, num_workers: int) -> None:
    dataset = PackedDataset(pack_demo(max_packs_per_shard=3).shards, encoder)

    def new_loader() -> Any:
        return StatefulDataLoader(dataset, batch_size=3, num_workers=num_workers, collate_fn=PaddingFreeCollator())

    loader = new_loader()
    states, expected = [], []
    for batch in loader:
        expected.append(batch["input_ids"].tolist())
        states.append(loader.state_dict())
    assert len(expected) > 3
    for step, state in enumerate(states[:-1], 1):
        resumed = new_loader()
        resumed.load_state_dict(state)
        assert [batch["input_ids"].tolist() for batch in resumed] == expected[step:], f"after step {step}"
