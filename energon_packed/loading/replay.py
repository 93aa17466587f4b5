"""`replay`: what a step of training will hold, before training: of packed data, or of a DataflowConfig."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from energon_packed.encoding import EncodedSample, Processor, StoredTokens
from energon_packed.errors import ConfigError, RecordError, Reject
from energon_packed.loading.collator import Collator
from energon_packed.loading.config import DataflowConfig
from energon_packed.loading.dataflow.steps import StreamSteps
from energon_packed.loading.dataflow.worker_stream import LoaderParts
from energon_packed.loading.dataset import PackedDataset
from energon_packed.loading.distributors.datasets import MapDistributor
from energon_packed.loading.raw_records import PackedIterableDataset, PlannedDataset, plan_in_memory
from energon_packed.records import Conversation


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """A step of one rank.

    Attributes:
        rank: from 0.
        worker: that makes the batch; None if the rank has no such step.
        packs: keys of the packs; empty if rows are packed while streaming.
        ids: of the samples in them.
        steps: steps of that rank in the epoch; those until `step`, while streaming.
    """

    rank: int
    worker: int | None
    packs: list[str]
    ids: list[str]
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Settings of a training run that decide its order.

    Attributes:
        world_size: data-parallel ranks.
        num_workers: loader workers of a rank; they decide the order of streams alone.
        batch_size: rows in one batch.
        epoch: from 0.
        seed: of the loader.
    """

    world_size: int = 1
    num_workers: int = 0
    batch_size: int = 1
    epoch: int = 0
    seed: int = 0


_DEFAULT = Run()


def replay(
    path: str | Path, step: int, run: Run = _DEFAULT, *, split: str = "train", shuffle: bool = True
) -> Iterator[Replayed]:
    """Step `step` of `DataflowLoader(MapDistributor(PackedDataset(path)), batch_size=...)` on every rank.

    Args:
        path: dataset folder or Metadataset.
        step: number in the epoch, from 1.
        run: settings of the run.
        split: `train`, `val` or `test`.
        shuffle: of the distributor.

    Raises:
        ConfigError: `step` is below 1, or beyond the epoch on every rank.
        FormatError: there is no dataset.
    """
    dataset = PackedDataset(path, StoredTokens(), split=split, check_encoder=False)
    return _of_ranks(MapDistributor(dataset, shuffle=shuffle), step, run)


def replay_config(config: DataflowConfig, step: int, run: Run = _DEFAULT) -> Iterator[Replayed]:
    """Step `step` of `get_raw_loader(config)` on every rank.

    Records are read and tokenized as far as packing needs their lengths, and no pixel is decoded: an image whose
    header is intact counts as usable.

    Args:
        config: what is read, and how it is packed.
        step: as for `replay`.
        run: settings of the run; a stream has a `batch_size` of 1.

    Raises:
        ConfigError: as for `replay`, or another `batch_size` while streaming.
        RejectLimitError: more records are rejected than the config allows.
    """
    if not config.streaming:
        return _of_ranks(MapDistributor(plan_in_memory(config), shuffle=config.shuffle), step, run)
    if run.batch_size != 1:
        raise ConfigError(f"`batch_size` must be 1 with `streaming: true`, got {run.batch_size}. Drop it.")
    roles = PackedIterableDataset(config).loader._roles
    processor = roles.processor if config.max_patches or config.truncate else _Lengths(roles.processor)
    return _streamed(roles._replace(processor=processor, collator=_Names()), step, run)


def _of_ranks(distributor: MapDistributor, step: int, run: Run) -> Iterator[Replayed]:
    """A step of items with a global order."""
    order, dataset = distributor.order, distributor.dataset
    segment = order.segment(run.world_size, run.batch_size)
    counts = [order.steps(segment, rank) for rank in range(run.world_size)]
    _check_step(step, max(counts))
    for rank, count in enumerate(counts):
        places = order.places(segment, step - 1, rank) if step <= count else range(0)
        numbers = order.numbers(places, run.epoch, run.seed, [segment])
        if isinstance(dataset, PlannedDataset):
            packs = [f"row {number}" for number in numbers]
            ids = [str(ident) for number in numbers for ident in dataset.ids(number)]
        else:
            read = [dataset.pack(number) for number in numbers]
            packs = [str(pack.__key__) for pack in read]
            ids = [str(talk.id) for pack in read for talk in pack.conversations()]
        worker = (step - 1) % max(1, run.num_workers) if step <= count else None
        yield Replayed(rank=rank, worker=worker, packs=packs, ids=ids, steps=count)


def _streamed(roles: LoaderParts, step: int, run: Run) -> Iterator[Replayed]:
    """A step of a stream, which is packed until there."""
    workers, longest = max(1, run.num_workers), 0
    for rank in range(run.world_size):
        plan = StreamSteps(roles, rank, run.world_size, workers, run.seed)
        turns = deque(iter(plan.steps(plan.begin(run.epoch), worker)) for worker in range(workers))
        count, found = 0, None
        while turns and found is None:
            one = next(turns[0])
            turns.rotate(-1)
            if one.ended:
                turns.pop()
            elif one.batch is not None:
                count += 1
                if count == step:
                    found = Replayed(rank=rank, worker=one.worker, packs=[], ids=one.batch, steps=count)
        longest = max(longest, count)
        yield found or Replayed(rank=rank, worker=None, packs=[], ids=[], steps=count)
    _check_step(step, longest)


def _check_step(step: int, longest: int) -> None:
    if step < 1:
        raise ConfigError(f"`step` must be at least 1, got {step}.")
    if step > longest:
        raise ConfigError(
            f"`step` must be at most {longest}, the steps of the epoch, got {step}. Pass another `epoch`."
        )


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
