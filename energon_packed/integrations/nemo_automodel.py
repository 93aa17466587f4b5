"""Packs to the dataset of NeMo Automodel: a recipe names AutomodelStream.

Automodel does not shift labels. With the batches of PaddingFreeCollator, whose labels are for Transformers, it would
train each token to predict itself. AutomodelStream yields shifted labels.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch

from energon_packed.encoding import ChatEncoder
from energon_packed.errors import BatchError, ConfigError
from energon_packed.integrations.consumed import Consumed
from energon_packed.loading.collation.batch import PackedBatch
from energon_packed.loading.dataflow.loader import DataflowLoader
from energon_packed.loading.datasets.dataset import PackedDataset
from energon_packed.loading.distributors.datasets import MapDistributor


class AutomodelStream(Consumed):
    """Iterable dataset for recipes of NeMo Automodel over a packed dataset of text, in its global order.

        dataset:
          _target_: energon_packed.AutomodelStream
          path: out
        dataloader:
          batch_size: null                     # an item is a finished row
        step_scheduler:
          local_batch_size: 1

    Each item is the arguments of the model for one pack, with shifted labels, int64 (1, T). An iteration is an epoch,
    or its rest after a checkpoint. Every pack is read once in each epoch by all ranks together; a row without targets
    fills the last row. The recipe saves and restores the position.

    Args:
        path: folder of a packed dataset, or a Metadataset.
        encoder: folder of the tokenizer that encodes the packs; not for PackedTokensSample.
        split: of the dataset.
        balance: `attention` assigns packs of similar cost to the ranks of a step.
        seed: of the order.

    Raises:
        BatchError: a pack has images, or its targets have different weights.

    Examples:
        >>> turns = {"prompts": ["2 + 2?"], "captions": ["4"]}
        >>> _ = Path("text.jsonl").write_text(json.dumps(turns))
        >>> result = pack("text.jsonl", output_dir="text", seq_len=64, tokenizer=tokenizer)
        >>> inputs = next(iter(AutomodelStream("text", encoder=tokenizer)))
        >>> inputs["cu_seq_lens_q"].tolist()
        [0, 16]
    """

    def __init__(
        self,
        path: str | Path,
        *,
        encoder: str | Path | None = None,
        split: str = "train",
        balance: Literal["attention"] | None = None,
        seed: int = 0,
    ) -> None:
        data = PackedDataset(path, None if encoder is None else ChatEncoder.from_pretrained(encoder), split=split)
        self._order, self._seed = MapDistributor(data, balance=balance), seed
        super().__init__(self._loader_of(0, 1), _arguments)

    def shard(self, num_shards: int, index: int) -> "AutomodelStream":
        """Read the packs of data-parallel rank `index` of `num_shards`; the recipe calls it."""
        self.loader = self._loader_of(index, num_shards)
        return self

    def _loader_of(self, rank: int, world_size: int) -> DataflowLoader:
        return DataflowLoader(self._order, batch_size=1, rank=rank, world_size=world_size, seed=self._seed)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the arguments of the model for each row, with shifted labels.

        Raises:
            ConfigError: a worker process of the recipe's dataloader reads the stream.
        """
        if torch.utils.data.get_worker_info() is not None:
            raise ConfigError(
                "`num_workers` of the recipe's dataloader must be 0 with AutomodelStream, which reads its position in "
                "the training process, got more. Remove it."
            )
        return super().__iter__()


def _arguments(batch: PackedBatch) -> dict[str, Any]:
    """Arguments of the model for a row, with the labels of Megatron, which are shifted."""
    if any(batch.num_images) or any(batch.num_videos) or any(batch.num_audios):
        raise BatchError("A row must have text for AutomodelStream, got images. Use another trainer.")
    inputs = batch.transformers_inputs()
    inputs.pop("num_items_in_batch", None)  # the recipe divides by the targets of the step
    return inputs | {"labels": batch.megatron_inputs()["labels"]}
