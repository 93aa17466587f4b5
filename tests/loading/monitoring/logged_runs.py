"""A rank of a run with order logs that ends behind its saved state: the script of `test_damaged_logs.py`."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from energon_packed import (
    DataflowLoader,
    EnergonDistributor,
    IterableDistributor,
    MapDistributor,
    MixtureDistributor,
    PackedDataset,
    PoolPacker,
    SequentialPacker,
    gather_state,
    get_packed_loader,
)
from tests.loading.flows import feature

ITEMS = [feature(number % 13, number) for number in range(53)]
LOADERS: dict[str, Callable[..., Any]] = {
    "planned": lambda packs, workers, **more: DataflowLoader(
        MapDistributor(PackedDataset(packs)), batch_size=2, num_workers=workers, **more
    ),
    "stream": lambda packs, workers, **more: DataflowLoader(
        IterableDistributor([*ITEMS, {"id": "long", "input_ids": [1] * 30}]),
        packer=PoolPacker(16, pool_size=5, overlong="drop"), num_workers=workers, **more,
    ),
    "mixture": lambda packs, workers, **more: DataflowLoader(
        MixtureDistributor([MapDistributor(ITEMS[:20]), IterableDistributor(ITEMS[20:])], [1, 2]),
        packer=SequentialPacker(16), num_workers=workers, **more,
    ),
    "shards": lambda packs, workers, **more: DataflowLoader(
        EnergonDistributor(packs), packer=PoolPacker(40, pool_size=6), num_workers=workers, **more
    ),
    "energon": lambda packs, workers, **more: get_packed_loader(packs, num_workers=2 // more["world_size"], **more),
    "epochs": lambda packs, workers, **more: get_packed_loader(packs, epochs=1, num_workers=0, **more),
}  # fmt: skip


def train(kind: str, folder: Path, packs: Path, workers: int, steps: int, finishes: bool, behind: int) -> None:
    """Train some steps, perhaps to the end of the epoch; save; train some steps that are lost."""
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    loader = LOADERS[kind](packs, workers, rank=rank, world_size=world_size, order_log=folder / kind)
    file = folder / f"{kind}.json"
    if file.exists():
        loader.load_state_dict(json.loads(file.read_text()))
    torch.distributed.barrier()
    batches = (batch for _ in range(100) for batch in loader)
    for _ in range(steps):
        next(batches)
    if finishes and kind != "energon":  # has no end
        for _ in loader:
            pass
        batches = (batch for _ in range(100) for batch in loader)
    state = gather_state(loader)
    log = max((folder / kind).glob(f"order-{rank:05d}-*.jsonl"))  # of this process
    (folder / f"{kind}-{rank}").open("a").write(f"{len(log.read_bytes().splitlines())}\n")
    if not rank:
        file.write_text(json.dumps(state))
    for _ in range(behind):
        next(batches)


def main() -> None:
    """Arguments: folder, packs, kinds, workers, steps, whether to finish the epoch, steps behind the saved state."""
    folder, packs, kinds = Path(sys.argv[4]), Path(sys.argv[5]), sys.argv[6].split(",")
    workers, steps, finishes, behind = map(int, sys.argv[7:11])
    for kind in kinds:
        train(kind, folder, packs, workers, steps, bool(finishes), behind)
