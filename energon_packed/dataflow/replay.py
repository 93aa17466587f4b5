"""`replay`: what a step of training will hold, before training: of packed data, or of a DataflowConfig."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from energon_packed.dataflow.collator import Collator
from energon_packed.dataflow.config import DataflowConfig
from energon_packed.dataflow.dataset import PackedDataset
from energon_packed.dataflow.distributors.map import MapDistributor
from energon_packed.dataflow.packed_iterable import PackedIterableDataset
from energon_packed.dataflow.planned_dataset import PlannedDataset, plan_in_memory
from energon_packed.dataflow.share import Share
from energon_packed.dataflow.worker_stream import Roles, WorkerStream
from energon_packed.encoding import EncodedSample, Processor, StoredTokens
from energon_packed.errors import ConfigError, RecordError, Reject
from energon_packed.records import Conversation


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What one rank gets.

    Attributes:
        rank: of it.
        worker: that makes the batch; None where the rank has no such step.
        packs: keys of the packs; empty where rows are packed while streaming.
        ids: of the samples in them.
        steps: steps of that rank in the epoch; those until `step`, while streaming.
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
    dataset = PackedDataset(path, StoredTokens(), split=split, check_encoder=False)
    distributor = MapDistributor(dataset, shuffle=shuffle)
    return _on_ranks(_MapStyle(distributor, batch_size), step, num_workers, share or Share())


def replay_config(
    config: DataflowConfig, step: int, *, batch_size: int | None = None, num_workers: int = 0,
    share: Share | None = None,
) -> Iterator[Replayed]:  # fmt: skip
    """Step `step` of `get_raw_loader(config)` on every rank.

    Records are read and tokenized as far as packing needs their lengths, and no pixel is decoded: an image whose
    header is intact counts as usable.

    Args:
        config: what is read, and how it is packed.
        step, num_workers: as for `replay`.
        batch_size: rows in one batch of a plan; a stream has one row in each.
        share: `world_size` and `epoch` of the run, and `seed`, where another one than the config's is passed to it.

    Raises:
        ConfigError: as for `replay`; `batch_size` while streaming.
        RejectLimitError: more records are rejected than the config allows.
    """
    share = share or Share(seed=config.seed)
    if not config.streaming:
        distributor = MapDistributor(plan_in_memory(config), shuffle=config.shuffle)
        return _on_ranks(_MapStyle(distributor, batch_size or 1), step, num_workers, share)
    if batch_size not in (None, 1):
        raise ConfigError(f"`batch_size` is {batch_size}; drop it: with `streaming: true` every batch is one row")
    roles = PackedIterableDataset(config).loader._roles
    processor = roles.processor if config.max_patches or config.truncate else _Lengths(roles.processor)
    return _on_ranks(_Streamed(roles._replace(processor=processor, collator=_Names())), step, num_workers, share)


class _MapStyle:
    """Steps whose items are known by number."""

    def __init__(self, distributor: MapDistributor, batch_size: int) -> None:
        self.distributor = distributor
        self.batch_size = batch_size

    def steps(self, share: Share) -> Iterator[Any]:
        """Numbers of the items of each step of a share."""
        order = self.distributor.order(share).tolist()
        return (order[start : start + self.batch_size] for start in range(0, len(order), self.batch_size))

    def names(self, numbers: list[int]) -> tuple[list[str], list[str]]:
        """(packs, samples) of a step."""
        dataset = self.distributor.dataset
        if isinstance(dataset, PlannedDataset):
            return [f"row {n}" for n in numbers], [str(ident) for n in numbers for ident in dataset.ids(n)]
        packs = [dataset.sample(number) for number in numbers]
        return [str(one.__key__) for one in packs], [str(talk.id) for one in packs for talk in one.conversations()]


class _Streamed:
    """Steps that the roles make of a stream."""

    def __init__(self, roles: Roles) -> None:
        self.roles = roles

    def steps(self, share: Share) -> Iterator[Any]:
        """Names of the samples of each step of a share."""
        return (step.batch for step in WorkerStream(self.roles, share) if step.batch is not None)

    def names(self, ids: list[str]) -> tuple[list[str], list[str]]:
        """No packs, and the samples of a step."""
        return [], ids


def _on_ranks(flow: _MapStyle | _Streamed, step: int, num_workers: int, share: Share) -> Iterator[Replayed]:
    if step < 1:
        raise ConfigError(f"`step` is {step}; it must be at least 1")
    longest = 0
    for rank in range(share.world_size):
        shares = [
            replace(share, rank=rank, worker=worker, num_workers=max(1, num_workers))
            for worker in range(max(1, num_workers))
        ]
        # Workers take turns; one that ended is passed over.
        turns = deque((one.worker, flow.steps(one)) for one in shares)
        count, found = 0, Replayed(rank=rank, worker=None, packs=[], ids=[], steps=0)
        while turns:
            worker, steps = turns.popleft()
            content = next(steps, None)
            if content is None:
                continue
            count += 1
            turns.append((worker, steps))
            if count == step:
                packs, ids = flow.names(content)
                found = Replayed(rank=rank, worker=worker, packs=packs, ids=ids, steps=0)
                if isinstance(flow, _Streamed):  # the rest would be read and packed
                    break
        longest = max(longest, count)
        yield replace(found, steps=count)
    if step > longest:
        raise ConfigError(f"`step` is {step}, and the epoch has {longest} steps; use one of them, or another `epoch`")


class _Lengths(Processor):
    """Encodes to as many tokens as another processor does, all of them 0, and no pixels."""

    def __init__(self, processor: Processor) -> None:
        self.processor = processor

    def encode(self, conversation: Conversation) -> EncodedSample:
        """One of `encode_many`."""
        found = self.encode_many([conversation])[0]
        if isinstance(found, Reject):
            raise RecordError.of(found)
        return found

    def encode_many(self, conversations: Sequence[Conversation]) -> list[EncodedSample | Reject]:
        """By `measure`."""
        measured = self.processor.measure(conversations)
        return [
            _blank(talk, one.length) if one.reject is None else one.reject
            for talk, one in zip(conversations, measured, strict=True)
        ]


def _blank(talk: Conversation, length: int) -> EncodedSample:
    tokens = np.broadcast_to(np.zeros(1, dtype=np.int64), (length,))
    grids = torch.zeros((len(talk.images), 3), dtype=torch.int64) if talk.images else None
    return EncodedSample(id=talk.id, input_ids=tokens, labels=tokens, image_grid_thw=grids)


class _Names(Collator):
    """Names of the samples, in place of a batch."""

    def collate(self, samples: Sequence[EncodedSample]) -> Any:
        """The ids."""
        return [str(one.id) for one in samples]
