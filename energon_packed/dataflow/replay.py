"""`replay`: what a step of map-style training will hold, before training, without encoding anything."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from energon_packed.dataflow.dataset import PackedDataset
from energon_packed.dataflow.distributors.map import MapDistributor
from energon_packed.dataflow.share import Share
from energon_packed.encoding import StoredTokens
from energon_packed.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What one rank gets.

    Attributes:
        rank: of it.
        worker: that makes the batch; None where the rank has no such step.
        packs: keys of the packs.
        ids: of the samples in them.
        steps: steps of that rank in the epoch.
    """

    rank: int
    worker: int | None
    packs: list[str]
    ids: list[str]
    steps: int


def replay(
    path: str | Path, step: int, *, batch_size: int = 1, num_workers: int = 0, share: Share | None = None,
    split: str = "train", shuffle: bool = True,
) -> Iterator[Replayed]:  # fmt: skip
    """Step `step` of `DataflowLoader(MapDistributor(PackedDataset(path)), batch_size=...)` on every rank.

    Args:
        path: dataset folder or Metadataset.
        step: number in the epoch, from 1.
        batch_size, num_workers, shuffle: of the loader and its distributor.
        share: `world_size`, `epoch` and `seed` of the run.
        split: `train`, `val` or `test`.

    Raises:
        ConfigError: `step` is below 1, or beyond the epoch on every rank.
        FormatError: there is no dataset.
    """
    share = share or Share()
    if step < 1:
        raise ConfigError(f"`step` is {step}; it must be at least 1")
    dataset = PackedDataset(path, StoredTokens(), split=split, check_encoder=False)
    distributor = MapDistributor(dataset, shuffle=shuffle)
    workers = max(1, num_workers)
    longest = 0
    for rank in range(share.world_size):
        orders = [
            distributor.order(
                Share(rank=rank, world_size=share.world_size, worker=worker, num_workers=workers, epoch=share.epoch,
                      seed=share.seed)
            )
            for worker in range(workers)
        ]  # fmt: skip
        batches = [-(-len(order) // batch_size) for order in orders]
        # Workers take turns; one that ended is passed over.
        turns = [(turn, worker) for turn in range(max(batches)) for worker in range(workers) if turn < batches[worker]]
        longest = max(longest, len(turns))
        if step > len(turns):
            yield Replayed(rank=rank, worker=None, packs=[], ids=[], steps=len(turns))
            continue
        turn, worker = turns[step - 1]
        packs = [dataset.sample(int(n)) for n in orders[worker][turn * batch_size : (turn + 1) * batch_size]]
        ids = [str(talk.id) for one in packs for talk in one.conversations()]
        yield Replayed(rank=rank, worker=worker, packs=[str(one.__key__) for one in packs], ids=ids, steps=len(turns))
    if step > longest:
        raise ConfigError(f"`step` is {step}, and the epoch has {longest} steps; use one of them, or another `epoch`")
