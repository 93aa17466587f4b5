"""Packs to the data loader of torchtitan's Trainer: a configuration of torchtitan names PackedDataLoader.

torchtitan reads rows of a fixed length, labels that are shifted already, and positions that restart in each sample.
From these positions it makes the masks of its attention backends `flex` and `varlen`; other backends ignore samples.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import torch

from energon_packed.encoding import ChatEncoder
from energon_packed.errors import BatchError, ConfigError
from energon_packed.integrations.consumed import Consumed
from energon_packed.integrations.optional import base_class
from energon_packed.loading.collation.batch import PackedBatch
from energon_packed.loading.collation.collator import PaddingFreeCollator
from energon_packed.loading.dataflow.loader import DataflowLoader
from energon_packed.loading.datasets.dataset import PackedDataset
from energon_packed.loading.distributors.datasets import MapDistributor

_Base: Any = base_class("torchtitan.components.dataloader", "BaseDataLoader", "torchtitan>=0.3")
_BaseConfig: Any = getattr(_Base, "Config", object)


class PackedDataLoader(_Base):
    """Data loader of torchtitan's Trainer over a packed dataset of text, in its global order, without end.

        config.dataloader = PackedDataLoader.Config(dataset_path="out")
        config.training.seq_len = 4096                          # at least the row length of the packs

    Each of the `local_batch_size` rows of a batch is a pack, padded to `seq_len`. Every pack is read once in each
    epoch by all ranks together; a row without targets fills the last row of an epoch. The state is the same on all
    ranks, so that a checkpoint continues with any number of data-parallel ranks.

    Args:
        config: the dataset.
        dp_world_size: data-parallel ranks.
        dp_rank: of this process.
        tokenizer: unused; the packs are encoded by `config.encoder`.
        seq_len: tokens of a row.
        local_batch_size: rows of a batch.
        snapshot_every_n_steps: unused; the state is exact after each batch.

    Raises:
        ConfigError: torchtitan is not installed, or the settings do not fit the dataset.
        BatchError: a pack has images or more than `seq_len` tokens, or its targets have different weights.

    Examples:
        >>> config = PackedDataLoader.Config(dataset_path="demo-out", encoder=tokenizer)
        >>> config.split, config.num_workers
        ('train', 0)
    """

    @dataclass(kw_only=True, slots=True)
    class Config(_BaseConfig):
        """Settings.

        Attributes:
            dataset_path: folder of a packed dataset, or a Metadataset.
            encoder: folder of the tokenizer that encodes the packs; not for PackedTokensSample.
            split: of the dataset.
            balance: `attention` assigns packs of similar cost to the ranks of a step.
            num_workers: processes that read packs.
            seed: of the order.
        """

        dataset_path: str | None = None
        encoder: str | None = None
        split: str = "train"
        balance: Literal["attention"] | None = None
        num_workers: int = 0
        seed: int = 0

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: Any,
        seq_len: int,
        local_batch_size: int,
        snapshot_every_n_steps: int | None = None,
    ) -> None:
        super().__init__()  # raises if torchtitan is not installed
        if config.dataset_path is None:
            raise ConfigError("`dataset_path` must be a packed dataset, got None. Set it in PackedDataLoader.Config.")
        encoder = None if config.encoder is None else ChatEncoder.from_pretrained(config.encoder)
        data = PackedDataset(config.dataset_path, encoder, split=config.split)
        self._rows = local_batch_size
        loader = DataflowLoader(
            MapDistributor(data, balance=config.balance),
            collator=PaddingFreeCollator(pad_to=seq_len),
            batch_size=1,
            num_workers=config.num_workers,
            rank=dp_rank,
            world_size=dp_world_size,
            seed=config.seed,
        )
        self._consumed = Consumed(loader, _row)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Yield `input` and `positions`, int64 (rows, seq_len), and shifted labels of that shape, -100 if unused."""
        rows = self._consumed.forever()
        while True:
            of_batch = islice(rows, self._rows)
            tokens, positions, labels = (torch.cat(parts) for parts in zip(*of_batch, strict=True))
            yield {"input": tokens, "positions": positions}, labels

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch, the same on all ranks, as a JSON string."""
        return {"loader": json.dumps(self._consumed.state_dict())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue after the batch at which the state was saved; an empty state starts at the first batch.

        Raises:
            BatchError: the dataset or the settings differ.
        """
        if state_dict:
            self._consumed.load_state_dict(json.loads(state_dict["loader"]))


def _row(batch: PackedBatch) -> tuple[torch.Tensor, ...]:
    """Tokens, positions and shifted labels of a row, each (1, T)."""
    inputs = batch.megatron_inputs()
    if batch.loss_weights is not None or any(batch.num_images) or any(batch.num_videos) or any(batch.num_audios):
        raise BatchError(
            "A row must have text and equal loss weights for torchtitan, got images or other loss weights. "
            "Use another trainer."
        )
    return inputs["tokens"], inputs["position_ids"], inputs["labels"]
