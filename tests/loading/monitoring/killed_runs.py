"""Training loops over every loader, killed by SIGKILL: the script of a rank of `test_killed_runs.py`."""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from energon_packed import (
    Consumed,
    DataflowLoader,
    EnergonDistributor,
    JointLoader,
    MapDistributor,
    PackedDataset,
    PoolPacker,
    TrainerStream,
    gather_state,
    get_packed_loader,
    prepare_loader,
)
from tests.internals import MegatronIterator, global_loader

Run = tuple[Iterator[Any], Callable[[], Any]]
"""Batches, and a function that returns the state of all ranks after the last batch."""
SAVED_EVERY = 3  # batches


def planned(packs: Path, **options: Any) -> DataflowLoader:
    return DataflowLoader(MapDistributor(PackedDataset(packs)), batch_size=2, **options)


def pooled(packs: Path, **options: Any) -> DataflowLoader:
    return DataflowLoader(EnergonDistributor(packs), packer=PoolPacker(40, pool_size=6), **options)


def _loader(loader: Any, state: Any, epochs: int = 2) -> Run:
    if state is not None:
        loader.load_state_dict(state)
    return (batch for _ in range(epochs) for batch in loader), lambda: gather_state(loader)


def accelerated(packs: Path, log: Path, state: Any) -> Run:
    # The variables of `accelerate launch`, for the process group of this test.
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
    os.environ |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    loader = prepare_loader(Accelerator(cpu=True), planned(packs), order_log=log)
    return _loader(loader, state)


def consumed(packs: Path, log: Path, state: Any) -> Run:
    loader = Consumed(planned(packs), lambda batch: batch, order_log=log)
    run, _ = _loader(loader, state)
    return run, loader.state_dict


def joint(packs: Path, log: Path, state: Any) -> Run:
    loaders = {"planned": planned(packs), "pooled": pooled(packs)}
    return _loader(JointLoader(loaders, {"planned": 2, "pooled": 1}, order_log=log), state, epochs=1)


def megatron(packs: Path, log: Path, state: Any) -> Run:
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    loader = global_loader(packs, None, rank=rank, world_size=world_size, num_workers=0, order_log=log)
    batches = MegatronIterator(loader, "bridge")
    if state is not None:
        batches.restore_state(state)
    return iter(batches), batches.save_state


def trainer_stream(packs: Path, log: Path, state: Any) -> Run:
    """As the Trainer: it reads two batches ahead, and its callback reports each used batch."""
    stream = TrainerStream(pooled(packs), order_log=log)
    if state is not None:
        stream.consumed.load_state_dict(state)
    stream.consumed.ahead = None

    def batches() -> Iterator[Any]:
        source, waiting = iter(stream), list[Any]()
        while True:
            while len(waiting) < 3:
                waiting.append(next(source))
            stream.consumed.use()
            yield waiting.pop(0)

    return batches(), stream.consumed.state_dict


def energon(packs: Path, log: Path, state: Any) -> Run:
    """Energon's loader, which restores `epochs=None` with other ranks if ranks x workers stays the same."""
    workers = 2 // torch.distributed.get_world_size()
    return _loader(get_packed_loader(packs, num_workers=workers, order_log=log), state)


KINDS: dict[str, Callable[[Path, Path, Any], Run]] = {
    "planned": lambda packs, log, state: _loader(planned(packs, order_log=log), state),
    "pooled": lambda packs, log, state: _loader(pooled(packs, order_log=log), state),
    "accelerated": accelerated,
    "consumed": consumed,
    "joint": joint,
    "megatron": megatron,
    "trainer_stream": trainer_stream,
    "energon": energon,
}


def train(kind: str, folder: Path, packs: Path, stop: int) -> None:
    """Train until batch `stop` of this process, or the end; save a state after each third batch."""
    file = folder / f"{kind}.json"
    saved = json.loads(file.read_text()) if file.exists() else None
    batches, state = KINDS[kind](packs, folder / kind, saved)
    for number, _ in enumerate(batches, 1):
        torch.distributed.barrier()  # as the reduction of gradients
        if number % SAVED_EVERY == 0:
            now = state()
            if torch.distributed.get_rank() == 0:
                file.with_suffix(".tmp").write_text(json.dumps(now))
                file.with_suffix(".tmp").replace(file)
            torch.distributed.barrier()
        if number == stop:
            return


def main() -> None:
    """Arguments: folder, packs, batches until the kill (0: until the end of the run), kinds."""
    folder, packs, stop, kinds = Path(sys.argv[4]), Path(sys.argv[5]), int(sys.argv[6]), sys.argv[7].split(",")
    for kind in kinds:
        train(kind, folder, packs, stop)
    if not sys.argv[8:]:
        os.kill(os.getpid(), signal.SIGKILL)
