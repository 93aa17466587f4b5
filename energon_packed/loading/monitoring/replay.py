"""Replay: a dataset or DataflowConfig and a step in, the packs and sample ids of that step on every rank out.

It computes the order as the loaders do, before or after training, and decodes no image.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from energon_packed.encoding import EncodedSample, Measurement, Processor, StoredTokens
from energon_packed.encoding.vision.media import num_images
from energon_packed.errors import ConfigError, RecordError, Reject
from energon_packed.loading.collation.collator import Collator
from energon_packed.loading.dataflow.config import DataflowConfig
from energon_packed.loading.dataflow.raw_records import PackedIterableDataset, PlannedDataset, plan_in_memory
from energon_packed.loading.dataflow.steps import StreamSteps
from energon_packed.loading.dataflow.worker_stream import LoaderParts
from energon_packed.loading.datasets.dataset import PackedDataset
from energon_packed.loading.distributors.base import LoaderLayout
from energon_packed.loading.distributors.datasets import MapDistributor
from energon_packed.options import as_integer
from energon_packed.records import Conversation


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """A step of a rank.

    Attributes:
        rank: from 0.
        worker: index of the worker that makes the batch; None if the rank has no such step.
        packs: keys of the packs; empty if rows are packed while streaming.
        ids: ids of the samples in them.
        steps: steps of that rank in the epoch; for a stream, steps until `step`.
    """

    rank: int
    worker: int | None
    packs: list[str]
    ids: list[str]
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Settings of a training run that determine its order.

    Attributes:
        world_size: data-parallel ranks.
        num_workers: loader workers of a rank; they change only the order of streams.
        batch_size: rows in one batch.
        epoch: from 0.
        seed: seed of the loader.
    """

    world_size: int = 1
    num_workers: int = 0
    batch_size: int = 1
    epoch: int = 0
    seed: int = 0


_DEFAULT = Run()


def replay(path: str | Path, step: int, run: Run = _DEFAULT) -> Iterator[Replayed]:
    """Compute step `step` of `DataflowLoader(MapDistributor(PackedDataset(path)), batch_size=...)` on every rank.

    Args:
        path: dataset folder or Metadataset.
        step: step in the epoch, from 1.
        run: settings of the run.

    Raises:
        ConfigError: `step` is below 1, or beyond the epoch on every rank.
        FormatError: there is no dataset.
    """
    # Only keys and ids are read, so any processor serves, and the tokenizer of the data is not needed.
    dataset = PackedDataset(path, StoredTokens(), check_encoder=False)
    return _of_ranks(MapDistributor(dataset), step, run)


def replay_config(config: DataflowConfig, step: int, run: Run = _DEFAULT) -> Iterator[Replayed]:
    """Compute step `step` of `get_raw_loader(config)` on every rank.

    Records are read and tokenized as far as packing needs their lengths, and no pixel is decoded: an image with an
    intact header counts as usable.

    Args:
        config: the input, and how it is packed.
        step: step in the epoch, from 1.
        run: settings of the run; a stream has a `batch_size` of 1.

    Raises:
        ConfigError: as for `replay`, or another `batch_size` with a stream.
        RejectLimitError: more records are rejected than the config allows.
    """
    if not config.streaming:
        return _of_ranks(MapDistributor(plan_in_memory(config), shuffle=config.shuffle), step, run)
    if run.batch_size != 1:
        raise ConfigError(f"`batch_size` must be 1 with `streaming: true`, got {run.batch_size}. Remove it.")
    roles = PackedIterableDataset(config).roles
    # Limits of patches, truncation and splits need encoded samples; everything else needs only their lengths.
    needs_samples = config.max_patches or config.overlong in ("truncate", "split")
    processor = roles.processor if needs_samples else _Lengths(roles.processor)
    return _streamed(roles._replace(processor=processor, collator=_Ids()), step, run)


def _of_ranks(distributor: MapDistributor, step: int, run: Run) -> Iterator[Replayed]:
    """Compute a step of items with a global order."""
    order, dataset = distributor.order, distributor.dataset
    segment = order.segment(run.world_size, run.batch_size)
    count = order.steps(segment)
    _check_step(step, count)
    for rank in range(run.world_size):
        places = order.places(segment, step - 1, rank)
        items = order.numbers(places, run.epoch, run.seed, [segment])
        if isinstance(dataset, PlannedDataset):
            packs = [f"row {item}" for item in items]
            ids = [str(ident) for item in items for ident in dataset.ids(item)]
        else:
            read = [dataset.pack(item) for item in items]
            packs = [str(pack.__key__) for pack in read]
            ids = [str(conversation.id) for pack in read for conversation in pack.conversations()]
        worker = (step - 1) % max(1, run.num_workers) if items else None
        yield Replayed(rank=rank, worker=worker, packs=packs, ids=ids, steps=count)


def _streamed(roles: LoaderParts, step: int, run: Run) -> Iterator[Replayed]:
    """Compute a step of a stream, by packing the stream up to it."""
    workers, longest = max(1, run.num_workers), 0
    for rank in range(run.world_size):
        plan = StreamSteps(roles, LoaderLayout(rank, run.world_size, workers, None), run.seed)
        # The loader reads its workers round-robin: the next worker is at index 0, a finished worker is removed.
        turns = deque(iter(plan.steps(plan.begin(run.epoch), worker)) for worker in range(workers))
        count, replayed = 0, None
        while turns and replayed is None:
            made = next(turns[0])
            turns.rotate(-1)
            if made.ended:
                turns.pop()
            elif made.batch is not None:
                count += 1
                if count == step:
                    replayed = Replayed(rank=rank, worker=made.worker, packs=[], ids=made.batch, steps=count)
        longest = max(longest, count)
        yield replayed or Replayed(rank=rank, worker=None, packs=[], ids=[], steps=count)
    _check_step(step, longest)


def _check_step(step: int, longest: int) -> None:
    if as_integer(step, "step") > longest:
        raise ConfigError(
            f"`step` must be at most {longest}, the steps of the epoch, got {step}. Pass another `epoch`."
        )


class _Lengths(Processor):
    """Processor that only measures: its samples have the right lengths, token ids 0, and no pixels."""

    reads = "conversations"

    def __init__(self, processor: Processor) -> None:
        self.processor = processor

    def encode(self, conversation: Conversation) -> EncodedSample:
        """Return the blank sample of a conversation."""
        result = self.encode_many([conversation])[0]
        if isinstance(result, Reject):
            raise RecordError.of(result)
        return result

    def encode_many(self, conversations: Sequence[Conversation]) -> list[EncodedSample | Reject]:
        """Measure conversations, and return blank samples."""
        measurements = self.processor.measure(conversations)
        return [
            measured.reject or self._blank(conversation, measured)
            for conversation, measured in zip(conversations, measurements, strict=True)
        ]

    def _blank(self, conversation: Conversation, measured: Measurement) -> EncodedSample:
        tokens = np.broadcast_to(np.zeros(1, dtype=np.int64), (measured.length,))
        images = num_images(self.processor.vision, conversation, measured.frames)
        grids = torch.zeros((images, 3), dtype=torch.int64) if images else None  # packers count images by it
        return EncodedSample(id=conversation.id, input_ids=tokens, labels=tokens, image_grid_thw=grids)


class _Ids(Collator):
    """Collator whose batch is the list of sample ids."""

    def collate(self, samples: Sequence[EncodedSample]) -> Any:
        """Return the ids."""
        return [str(sample.id) for sample in samples]
