"""PackedTrainer: the evaluation loss is a mean over tokens, and training data are checked before the first step.

A stock Trainer's evaluation loss is the mean of the rows' losses, in which a row with few targets counts as much as
one with many, and with several processes some packs count twice.
"""

from collections.abc import Iterator, Sequence
from math import ceil
from typing import Any

import torch
from accelerate.data_loader import DataLoaderShard
from transformers import Trainer
from transformers.trainer_pt_utils import LengthGroupedSampler

from energon_packed.errors import ConfigError
from energon_packed.integrations.transformers.arguments import check_training_arguments
from energon_packed.integrations.transformers.callbacks import BlendEpochs, IsolationCheck
from energon_packed.integrations.transformers.stream import StreamState, TrainerStream


class PackedTrainer(Trainer):
    """A Trainer that checks arguments and isolation before the first step and evaluates by token.

        trainer = PackedTrainer(model, args, eval_dataset=dataset, data_collator=PaddingFreeCollator())

    `eval_loss` is sum(loss of each target) / number of targets, over all rows of all processes, and every pack counts
    once. `compute_metrics` gets a row of -100 labels where a process has fewer rows. A TrainerStream is saved and
    restored, a blend draws each epoch anew, and `train_sampling_strategy="group_by_length"` takes `lengths` of the
    data. Everything else is as in Trainer.

    Raises:
        ConfigError: arguments that do not fit the data; see `check_training_arguments`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sums: torch.Tensor | None = None
        self.add_callback(IsolationCheck())
        data = self.train_dataset
        if data is not None:
            check_training_arguments(self.args, data, lengths_known=hasattr(data, "lengths"))
        if isinstance(data, TrainerStream):
            self.add_callback(StreamState(data))
        elif len(getattr(data, "blend", ())) > 1:
            self.add_callback(BlendEpochs(data))

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """This process's rows of the packs; every process has the same number of rows."""
        if isinstance(eval_dataset, str):
            eval_dataset = self.eval_dataset[eval_dataset]
        return self._rows_of(self.eval_dataset if eval_dataset is None else eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """As `get_eval_dataloader`."""
        return self._rows_of(test_dataset)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """As in Trainer; while evaluating, the loss is the mean over this row's targets, and it is summed up."""
        if self._sums is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        targets = (inputs["labels"][..., 1:] != -100).sum()
        loss, outputs = super().compute_loss(model, inputs, True, None)
        if targets:
            pair = torch.stack([loss.detach().mean().double() * targets, targets.double()])
            self._sums += pair.to(self._sums.device)
        return (loss, outputs) if return_outputs else loss

    def evaluation_loop(
        self, dataloader: Any, description: str, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any
    ) -> Any:
        """As in Trainer, with the loss per token.

        Raises:
            ConfigError: no row has a target.
        """
        self._sums = torch.zeros(2, dtype=torch.float64, device=self.args.device)
        try:
            output = super().evaluation_loop(
                dataloader, description, *args, metric_key_prefix=metric_key_prefix, **kwargs
            )
            loss, targets = self.accelerator.reduce(self._sums, reduction="sum").tolist()
        finally:
            self._sums = None
        if not targets:
            raise ConfigError("no token of the evaluation data is a target; pack it with another `loss_on`")
        packs = getattr(getattr(dataloader, "dataset", None), "packs", output.num_samples)
        return output._replace(
            metrics={**output.metrics, f"{metric_key_prefix}_loss": loss / targets}, num_samples=packs
        )

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        data = self.train_dataset if train_dataset is None else train_dataset
        if self.args.train_sampling_strategy != "group_by_length" or not hasattr(data, "lengths"):
            return super()._get_train_sampler(train_dataset)
        size = self.args.train_batch_size * self.args.gradient_accumulation_steps
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        return _SeededGroups(size, data.lengths.tolist(), seed)

    def _rows_of(self, packs: Any) -> Any:
        if packs is None:
            raise ConfigError("evaluation needs `eval_dataset`; pass a PackedDataset of another split")
        replicas = self.get_tp_size() * self.get_cp_size() * self.get_sp_size()  # processes that share their data
        rows = _EvaluationRows(
            packs,
            self.data_collator,
            self.args.eval_batch_size,
            (self.accelerator.process_index // replicas, self.accelerator.num_processes // replicas),
        )
        return DataLoaderShard(
            rows,
            batch_size=None,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory and torch.cuda.is_available(),
        )


class _SeededGroups(LengthGroupedSampler):
    """Groups by length drawn from the seed and the epoch.

    The class of Transformers draws from torch's global generator, which dropout and a resumed run leave elsewhere on
    each process: then the parts of the processes do not make up an epoch.
    """

    def __init__(self, size: int, lengths: list[int], seed: int) -> None:
        super().__init__(size, lengths=lengths)
        self._seed = seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Called by accelerate's loaders before each epoch."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.generator = torch.Generator().manual_seed(self._seed + self._epoch)
        numbers: Iterator[int] = super().__iter__()
        return numbers


class _EvaluationRows(torch.utils.data.Dataset[dict[str, Any]]):
    """Rows of one process: packs in order, dealt out by rows; a process without a row repeats one, without targets."""

    def __init__(self, packs: Any, collator: Any, batch_size: int, place: tuple[int, int]) -> None:
        self.packs = len(packs)
        self._data, self._collator, self._batch_size = packs, collator, batch_size
        self._rank, self._world_size = place

    def __len__(self) -> int:
        return ceil(self.packs / (self._batch_size * self._world_size))

    def __getitem__(self, step: int) -> dict[str, Any]:
        if step >= len(self):
            raise IndexError(f"row {step} is not among the {len(self)} rows")
        first = (step * self._world_size + self._rank) * self._batch_size
        numbers: Sequence[int] = range(first, min(first + self._batch_size, self.packs))
        row: dict[str, Any] = self._collator([self._data[number] for number in numbers or [0]])
        return row if numbers else row | {"labels": torch.full_like(row["labels"], -100)}
