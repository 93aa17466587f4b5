"""Rows: a state behind any batch that a trainer has used, however far it has read ahead."""

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from energon_packed import (
    BatchError,
    ConfigError,
    DataflowConfig,
    DataflowLoader,
    JointLoader,
    MapDistributor,
    PackedDataset,
    PackedIterableDataset,
    PaddingFreeCollator,
    get_packed_loader,
)
from tests.internals import Rows

LOADERS: dict[str, Any] = {
    "energon": lambda packs, blend: get_packed_loader(packs, epochs=1, num_workers=0),
    "energon_repeated": lambda packs, blend: get_packed_loader(blend, num_workers=0),
    "energon_workers": lambda packs, blend: get_packed_loader(packs, epochs=1, num_workers=1),
    "dataflow": lambda packs, blend: DataflowLoader(MapDistributor(PackedDataset(packs))),
    "joint": lambda packs, blend: JointLoader(
        {name: DataflowLoader(MapDistributor(PackedDataset(packs)), seed=seed) for seed, name in enumerate("ab")},
        {"a": 2, "b": 1},
    ),
}
# Energon's loaders take a second to make: used and read ahead, of rows that are saved every 8.
SLOW = {"energon": [(0, 1), (7, 2), (10, 3)], "energon_repeated": [(9, 1)], "energon_workers": [(10, 2)]}
SLOW["joint"] = [(3, 2), (9, 1)]


def stream(rows: Rows) -> Any:
    while True:
        yield from rows.epoch()


@pytest.mark.parametrize("kind", LOADERS)
def test_the_rest_is_identical_from_every_batch_that_was_used(text_packs: list[Path], kind: str) -> None:
    make = lambda: LOADERS[kind](text_packs[0], text_packs[2])  # noqa: E731
    steps = 14
    expected = [batch.ids for batch in islice(stream(Rows(make())), steps)]
    assert len({str(ids) for ids in expected}) > 1
    for used, ahead in SLOW.get(kind, [(used, used % 4) for used in range(11)]):
        rows = Rows(make())
        read = [batch.ids for batch in islice(stream(rows), used + ahead)]
        assert read == expected[: used + ahead]
        state = rows.state_after(used)
        resumed = Rows(make())
        resumed.restore(state)
        assert resumed.state_after(used) == state
        rest = [batch.ids for batch in islice(stream(resumed), steps - used)]
        assert rest == expected[used:], f"{used} used, {ahead} read ahead"
        if kind not in SLOW:  # saved once more by the resumed run
            again = Rows(make())
            again.restore(resumed.state_after(used + 2))
            assert next(stream(again)).ids == expected[used + 2]


def test_states_that_are_gone_and_loaders_without_one_are_named(text_packs: list[Path]) -> None:
    rows = Rows(LOADERS["dataflow"](text_packs[0], None))
    assert len(list(islice(stream(rows), 12))) == 12
    rows.state_after(10)
    with pytest.raises(BatchError, match=r"the state behind batch 2 is gone"):
        rows.state_after(2)
    with pytest.raises(ConfigError, match="a list has no state_dict, so it cannot resume"):
        Rows([])


def test_a_raw_stream_inside_another_loader_is_refused(text_packs: list[Path], text_tokenizer_dir: Path) -> None:
    config = DataflowConfig(
        inputs=(str(text_packs[2].parent / "a.jsonl"),), tokenizer=text_tokenizer_dir, packing_length=384
    )
    data = PackedIterableDataset(config)
    with pytest.raises(ConfigError, match="each worker would read everything: iterate it directly"):
        list(torch.utils.data.DataLoader(data, batch_size=None, num_workers=1, multiprocessing_context="fork"))


def test_stateful_data_loaders_of_two_ranks(text_packs: list[Path]) -> None:
    data = PackedDataset(text_packs[0])

    def new_loader(rank: int) -> Any:
        sampler = StatefulDistributedSampler(data, num_replicas=2, rank=rank, shuffle=True, seed=1)
        return StatefulDataLoader(data, batch_size=1, sampler=sampler, collate_fn=PaddingFreeCollator())

    seen = []
    for rank in (0, 1):
        loader = new_loader(rank)
        states, batches = [], []
        for batch in loader:
            batches.append(batch["input_ids"].tolist())
            states.append(loader.state_dict())
        for step, state in enumerate(states[:-1], 1):
            resumed = new_loader(rank)
            resumed.load_state_dict(state)
            assert [batch["input_ids"].tolist() for batch in resumed] == batches[step:]
        seen += batches
    assert sorted(seen) == sorted(PaddingFreeCollator()([pack])["input_ids"].tolist() for pack in data)
