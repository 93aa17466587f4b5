"""Packed data to training and evaluation of transformers.Trainer: PackedTrainer, and callbacks for any Trainer.

Training uses the global order of the data: one state for all ranks, and every pack once in each epoch. The evaluation
loss is the mean over tokens. The evaluation loss of a stock Trainer is the mean of the losses of rows, in which a row
with few targets has the same weight as a row with many targets, and with several processes some packs count twice.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from math import ceil
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from accelerate.data_loader import DataLoaderShard
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME, TrainerState
from transformers.trainer_utils import get_last_checkpoint

from energon_packed.errors import ConfigError
from energon_packed.integrations.accelerate import PreparedLoader
from energon_packed.integrations.consumed import Consumed
from energon_packed.integrations.isolation import check_isolation, check_positions
from energon_packed.integrations.transformers.arguments import check_training_arguments
from energon_packed.integrations.transformers.checkpoints import (
    CheckpointCallback,
    TrainerStreamCallback,
    epoch_of,
)
from energon_packed.integrations.transformers.model_loss import loss_in_pieces
from energon_packed.integrations.transformers.patches import check_trainer, names_of_model
from energon_packed.integrations.transformers.sample_loss import (
    LossOfSamples,
    SampleLoss,
    outputs_without_router_loss,
    without_loss,
)
from energon_packed.integrations.transformers.stream import TrainerStream
from energon_packed.integrations.transformers.target_logits import (
    computes_head_in_pieces,
    computes_target_logits,
    without_target_logits,
)
from energon_packed.libraries import private
from energon_packed.loading.collation.batch import signals_of, target_signals, target_weights
from energon_packed.loading.collation.collator import Collator, PaddingFreeCollator, with_weights
from energon_packed.loading.collation.features import packs_of
from energon_packed.loading.costs.model import Balance
from energon_packed.loading.dataflow.loader import DataflowLoader
from energon_packed.loading.dataflow.raw_records import PlannedDataset
from energon_packed.loading.datasets.dataset import PackedDataset
from energon_packed.loading.distributors.datasets import MapDistributor
from energon_packed.loading.even_ranks import without_targets


class PackedTrainerMixin(Trainer):
    """Makes a PackedTrainer of a class that is derived from Trainer; put it first among the base classes.

        class PackedSFTTrainer(PackedTrainerMixin, SFTTrainer):
            pass

    `to_hf()` of a dataset is read like the dataset, for trainers that accept nothing else.

    Args: as in the other base class, and `balance`, `order_log` and `logits` as in PackedTrainer; `data_collator` may
        also be set by the constructor of the other base class. If that class has its own `compute_loss`, all logits
        are computed by default: pass `logits="targets"` if it uses only the loss of the model.

    Raises:
        ConfigError: as in PackedTrainer.

    Examples:
        >>> import transformers
        >>> class Trainer(PackedTrainerMixin, transformers.Trainer):
        ...     def log(self, logs, start_time=None):
        ...         super().log(logs | {"run": 1}, start_time)
    """

    data_collator: Any
    train_dataset: Any

    def __init__(
        self,
        *args: Any,
        balance: Balance | None = None,
        order_log: str | Path | None = None,
        logits: Literal["targets", "all"] | None = None,
        **kwargs: Any,
    ) -> None:
        check_trainer()
        super().__init__(*args, **kwargs)
        self.balance: Balance | None = balance
        if balance is None and self.args.train_sampling_strategy == "group_by_length":
            self.balance = "attention"
        self._order_log = order_log
        self._is_packed = isinstance(self.data_collator, Collator)
        if self._is_packed:  # a copy, because another Trainer with this collator would ignore the weights
            self.data_collator = with_weights(self.data_collator)
        self._sums: torch.Tensor | None = None
        # The loss of another base class may read all logits.
        has_own_loss = logits is None and super().compute_loss.__func__ is not Trainer.compute_loss
        needs_all = logits == "all" or self.label_smoother or self.compute_loss_func or has_own_loss
        one_process_a_row = self.get_sp_size() == self.get_cp_size() == 1
        self._computes_target_logits: bool | None = None if one_process_a_row and not needs_all else False
        self._computes_head_in_pieces = False
        self._only_loss = True
        self._sample_loss: SampleLoss | None = None
        # Trainer averages the means of rows for these models. With the attribute set, it counts the targets of a step.
        self._loss_is_mean = self._is_packed and not (
            self.model_accepts_loss_kwargs or self.compute_loss_func or self.get_sp_size() > 1
        )
        self.model_accepts_loss_kwargs |= self._loss_is_mean
        self.add_callback(IsolationCheckCallback())
        data = self.train_dataset = packs_of(self.train_dataset)  # SFTTrainer accepts nothing but `to_hf()`
        if data is not None:
            check_training_arguments(self.args, data, lengths_known=hasattr(data, "lengths"))
        self._loader: Any = None
        self._order_state = _OrderState(self)
        self._checkpoint: str | None = None
        self._continued: _Continued | None = None
        if isinstance(data, TrainerStream):
            self.add_callback(TrainerStreamCallback(data))
        elif self._has_order(data):
            self.add_callback(self._order_state)
        if balance is not None and not self._has_order(data):
            raise ConfigError(
                f"`balance` needs a PackedDataset or PlannedDataset with a collator of this package, got "
                f"{type(data).__name__}. Set `balance` of the loader, or remove it."
            )

    def get_train_dataloader(self) -> Any:
        """Return the rows of this process in each step, in the global order of the data."""
        data, args = self.train_dataset, self.args
        if isinstance(data, TrainerStream):  # other base classes read iterable data on one process for all
            return Trainer.get_train_dataloader(self)
        if not self._has_order(data):
            return super().get_train_dataloader()
        rank, world_size = self._place()
        workers: dict[str, Any] = {"persistent_workers": True} if args.dataloader_persistent_workers else {}
        if args.dataloader_num_workers and args.dataloader_prefetch_factor is not None:
            workers["prefetch_factor"] = args.dataloader_prefetch_factor
        loader = DataflowLoader(
            MapDistributor(data, balance=self.balance, accumulation=args.gradient_accumulation_steps),
            collator=self.data_collator,
            batch_size=self._train_batch_size,
            num_workers=args.dataloader_num_workers,
            rank=rank,
            world_size=world_size,
            seed=args.seed if args.data_seed is None else args.data_seed,
            epoch_end="drop" if args.dataloader_drop_last else "repeat",
            pin_memory=args.dataloader_pin_memory and torch.cuda.is_available(),
            **workers,
        )
        # Processes of tensor, context and sequence parallelism share a rank, and the first of them writes its log.
        is_first = self.accelerator.process_index % self._replicas() == 0
        consumed = _TrainerRows(
            loader,
            lambda batch: self.data_collator([batch]),
            ahead=1,
            order_log=self._order_log if is_first else None,
        )
        self._loader = PreparedLoader(self.accelerator, consumed)
        return self._loader

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as in Trainer.

        Raises:
            ConfigError: there is no checkpoint to resume from.
        """
        folder = self.args.output_dir if resume_from_checkpoint is True else resume_from_checkpoint
        if folder and not (
            os.path.isdir(folder) and (resume_from_checkpoint is not True or get_last_checkpoint(folder))
        ):
            raise ConfigError(
                f"`resume_from_checkpoint` must be True or a folder that has a checkpoint, got {folder} without one. "
                "Train without it to start from step 0."
            )
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _inner_training_loop(self, *args: Any, resume_from_checkpoint: Any = None, **kwargs: Any) -> Any:
        """Train as in Trainer; the path of the checkpoint is needed before the number of steps is computed."""
        self._checkpoint = resume_from_checkpoint
        return super()._inner_training_loop(*args, resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    def set_initial_training_values(self, args: Any, dataloader: Any) -> tuple[Any, ...]:
        """Compute the numbers of steps and epochs as in Trainer, and restore the loader.

        Trainer assumes that the steps before the checkpoint had as many packs as the steps after it. If they had not,
        the last step is moved, so that every pack is used in each epoch; `max_steps` is not changed.
        """
        epochs, per_epoch, *others, last = super().set_initial_training_values(args, dataloader)
        self._continued = None
        path = None if self._checkpoint is None else Path(self._checkpoint, TRAINER_STATE_NAME)
        if dataloader is self._loader and self._loader is not None and path is not None and path.is_file():
            state = TrainerState.load_from_json(str(path))
            if state.global_step:
                self._order_state.restore(self._order_state.saved(state), args, state)
                epoch, batches = self._left()
                steps = ceil(batches / args.gradient_accumulation_steps)
                # Steps to this position if all of them had as many packs as a step has now.
                done = (epoch + 1) * per_epoch - steps
                last += 0 if args.max_steps > 0 else state.global_step - done
                epochs = ceil((last - state.global_step + done) / per_epoch)
                self._continued = _Continued(epoch, (per_epoch - steps) * args.gradient_accumulation_steps, batches)
        return (epochs, per_epoch, *others, last)

    def _left(self) -> tuple[int, int]:
        """Return the epoch of the next batch, and the batches of a process that are left in it."""
        loader = self._loader.dataset.loader
        position, order = loader.position(), loader.roles.distributor.order
        left = order.steps(position.parts[-1], drop=self.args.dataloader_drop_last) - position.step
        epoch, left = (position.epoch, left) if left else (position.epoch + 1, len(loader))
        return epoch, left * self.get_sp_size()

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Initialize the state as in Trainer; return the epoch of the loader, and the empty batches to skip in it."""
        epoch, skipped = super()._init_training_state(*args, **kwargs)
        if self._continued is not None:
            epoch, skipped = self._continued.epoch, 0 if self.args.ignore_data_skip else self._continued.skipped
            self._loader.dataset.placeholders = skipped
        return epoch, skipped

    def _run_epoch(self, **arguments: Any) -> None:
        """Train an epoch as in Trainer; a continued epoch ends with the batches that are left in it."""
        if self._continued is not None and arguments["epoch"] == self._continued.epoch:
            batches = arguments["steps_trained_in_current_epoch"] + self._continued.batches
            steps = ceil(batches / self.args.gradient_accumulation_steps)
            arguments |= {"steps_in_epoch": batches, "num_update_steps_per_epoch": steps}
        super()._run_epoch(**arguments)

    def num_examples(self, dataloader: Any) -> int:
        """Return the packs of one epoch, for the log of the Trainer."""
        if dataloader is self._loader and self._loader is not None:
            return len(self.train_dataset)
        return int(super().num_examples(dataloader))

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return the evaluation rows of this process; every process has the same number of rows."""
        if isinstance(eval_dataset, str):
            eval_dataset = self.eval_dataset[eval_dataset]
        return self._rows_of(self.eval_dataset if eval_dataset is None else eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Return the rows of this process; see `get_eval_dataloader`."""
        return self._rows_of(test_dataset)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save weights by their names in the model, which are the names that resuming and the best model load.

        By default Transformers saves some models (Qwen2-VL, Qwen2.5-VL) with the names of their first release, which
        only `from_pretrained` converts. `save_model` does so, for other tools.
        """
        with names_of_model(self.accelerator.unwrap_model(self.model, keep_torch_compile=False)):
            super()._save_checkpoint(model, trial)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Refuse a checkpoint that did not restore all weights; the Trainer would only log a warning.

        Raises:
            ConfigError: a weight of the model or of the checkpoint has no counterpart.
        """
        absent = set(load_result.missing_keys)
        weights = self.model.state_dict() if absent else {}
        restored = {weight.data_ptr() for name, weight in weights.items() if name not in absent}
        # A tied weight is saved once, and restored through the name that was saved; constants are not saved.
        absent -= {name for name, weight in weights.items() if weight.data_ptr() in restored}
        missing = sorted(absent - set(private(self.model, "_keys_to_ignore_on_save", "transformers") or ()))
        wrong = [*missing, *load_result.unexpected_keys]
        if wrong:
            raise ConfigError(
                f"the checkpoint must have the weights of the model, got {len(missing)} missing and "
                f"{len(load_result.unexpected_keys)} unexpected names, such as {wrong[0]}. Resume with the model that "
                "was saved; if another Trainer saved it, rewrite it: "
                f"{type(self.model).__name__}.from_pretrained(PATH).save_pretrained(PATH, save_original_format=False)."
            )

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """Read the rows of a step as in Trainer; return them and the sum of the weights of their targets."""
        rows, targets = super().get_batch_samples(epoch_iterator, num_batches, device)
        replaces = self._sample_loss is not None or any("loss_mask" in row for row in rows)
        # The Trainer counts labels. One process may have other weights while all weights of another are 1.
        if self._is_packed and targets is not None and (replaces or self.accelerator.num_processes > 1):
            weights = torch.stack([self._weight(row) for row in rows]).sum()
            # `new_tensor` would wait for the device.
            sums = torch.stack([weights, torch.full_like(weights, replaces)]).to(device, non_blocking=True)
            if self.args.average_tokens_across_devices:
                sums = self.accelerator.reduce(sums, reduction="sum")
            # A row of this process nearly always has a pair, which is known without the device.
            if self._sample_loss is not None and not weights and not sums[0]:
                raise ConfigError(
                    "`loss` needs groups or labels, but no row of the step has a pair of samples, or a sample with a "
                    "label. Pack preference records, or remove `loss`."
                )
            targets = torch.where(sums[1] > 0, sums[0] / self._replicas(), targets)
        return rows, targets

    def _weight(self, inputs: dict[str, Any]) -> torch.Tensor:
        """Divisor of the mean of a row: the sum of the weights of its targets, or its pairs."""
        if self._sample_loss is None:
            return target_weights(inputs).sum()
        return torch.tensor(float(self._sample_loss.count(inputs)))

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute the loss as in Trainer, weighted by `loss_mask`; during evaluation, add it to the sum of all rows.

        Raises:
            ConfigError: the targets have different weights, but the loss is not the cross entropy; or the rows have
                M-RoPE positions, and the model does not.
        """
        try:
            loss, outputs = self._loss_of_row(model, inputs, return_outputs, num_items_in_batch)
        except (TypeError, ValueError, RuntimeError) as error:
            if (positions := inputs.get("position_ids")) is not None:
                check_positions(model, positions, error)
            raise
        return (loss, outputs) if return_outputs else loss

    def _loss_of_row(
        self, model: Any, inputs: Any, return_outputs: bool, num_items_in_batch: Any
    ) -> tuple[torch.Tensor, Any]:
        """Loss, and the outputs of the model if requested: SFTTrainer computes them in a separate forward pass."""

        def computed(inputs: Any, targets: Any) -> tuple[torch.Tensor, Any]:
            # With `torch_compile`, the compiler fuses the loss, and a change of the model would be compiled again.
            with nullcontext() if self.args.torch_compile or not self._is_packed else self._in_pieces(model, inputs):
                result = super(PackedTrainerMixin, self).compute_loss(model, inputs, return_outputs, targets)
            return result if return_outputs else (result, None)

        inputs = self._with_needed_logits(model, inputs, return_outputs)
        sums = self._sums  # None while training
        is_weighted = self._is_packed and "loss_mask" in inputs
        if sums is None and not self._loss_is_mean and not is_weighted and self._sample_loss is None:
            return computed(inputs, num_items_in_batch)
        weight = self._weight(inputs)
        if self._sample_loss is not None:
            values, outputs = self._sample_loss(model, inputs)
            loss = values.sum() / weight.clamp(min=1)
        elif is_weighted:
            loss, outputs = self._weighted_loss(model, inputs)
        else:
            loss, outputs = computed(inputs if sums is not None else _with_target(inputs), None)
        if sums is not None:
            weight = weight.to(sums.device, torch.float64)
            mean = loss.detach().mean().to(sums.device, torch.float64)
            # The mean of no target is NaN.
            sums += torch.stack([torch.where(weight > 0, mean * weight, 0.0), weight])
        elif num_items_in_batch is not None:
            # `loss` is the mean of this row. DDP averages the gradients of the ranks, as Trainer assumes as well.
            ranks = self.accelerator.num_processes // self.get_tp_size()
            loss = loss * weight * (ranks if self.args.average_tokens_across_devices else 1) / num_items_in_batch
        return loss, outputs

    def _with_needed_logits(self, model: Any, inputs: Any, return_outputs: bool) -> Any:
        """Remove the arguments for logits of targets alone if the model ignores them, or other logits are needed."""
        if not self._is_packed or "shift_labels" not in inputs:  # ms-swift has other arguments, without it
            return inputs
        if self._computes_target_logits is None:
            self._computes_target_logits = computes_target_logits(model)
            needs_logits = any(
                getattr(callback, "needs_logits", False) for callback in self.callback_handler.callbacks
            )
            if self._computes_target_logits and not needs_logits and not self.args.torch_compile:
                self._computes_head_in_pieces = computes_head_in_pieces(model)
        # An evaluation requests the outputs, and drops them if it needs the loss alone.
        of_loss_alone = self._only_loss if self._sums is not None else not return_outputs
        return inputs if self._computes_target_logits and of_loss_alone else without_target_logits(inputs)

    def _in_pieces(self, model: Any, inputs: Any, weights: torch.Tensor | None = None) -> Any:
        """Context manager in which the model computes its loss in pieces."""
        head = self._computes_head_in_pieces and "logits_to_keep" in inputs
        return loss_in_pieces(model, head=head, weights=weights)

    def _weighted_loss(self, model: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, Any]:
        """Mean of the row, weighted by `loss_mask`, and the outputs of the model."""
        if self.label_smoother is not None or self.compute_loss_func is not None:
            name = "compute_loss_func" if self.label_smoother is None else "label_smoothing_factor"
            raise ConfigError(f"`{name}` must not be set with loss weights, as its loss ignores them. Remove it.")
        weights = inputs["loss_mask"][0, 1:]
        if "logits_to_keep" in inputs and self._computes_head_in_pieces:
            weights = weights[inputs["logits_to_keep"]]
            with self._in_pieces(model, inputs, weights):
                outputs = outputs_without_router_loss(model, {k: v for k, v in inputs.items() if k != "loss_mask"})
            return outputs.loss, outputs
        # Without labels, the model computes no loss.
        outputs = outputs_without_router_loss(model, without_loss(inputs))
        logits = outputs.logits
        if "logits_to_keep" in inputs:
            losses = signals_of(logits.flatten(0, 1), inputs["shift_labels"][0].to(logits.device))
            weights = weights[inputs["logits_to_keep"]]
        else:
            losses = target_signals(logits, inputs["labels"])
        weights = weights.to(losses.device)
        # A row without targets has loss 0.
        return (losses * weights).sum() / weights.sum().clamp(min=torch.finfo(torch.float32).tiny), outputs

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """Evaluate as in Trainer, with the loss per token.

        Raises:
            ConfigError: no row has a target.
        """
        self._sums = torch.zeros(2, dtype=torch.float64, device=self.args.device)
        self._only_loss = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        try:
            output = super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
            # float64 sums of all processes: the result does not depend on the number of processes.
            loss, targets = self.accelerator.reduce(self._sums, reduction="sum").tolist()
        finally:
            self._sums = None
        if not targets:
            raise ConfigError("no token of the evaluation data is a target. Pack it with another `loss_on`.")
        packs = getattr(getattr(dataloader, "dataset", None), "packs", output.num_samples)
        return output._replace(
            metrics={**output.metrics, f"{metric_key_prefix}_loss": loss / targets}, num_samples=packs
        )

    def _has_order(self, data: Any) -> bool:
        """Return whether the Trainer reads `data` in its global order."""
        return isinstance(data, PackedDataset | PlannedDataset) and isinstance(self.data_collator, Collator)

    def _place(self) -> tuple[int, int]:
        """Return data-parallel (rank, world size): tensor, context and sequence parallelism share their data."""
        replicas = self._replicas()
        return self.accelerator.process_index // replicas, self.accelerator.num_processes // replicas

    def _replicas(self) -> int:
        """Return the number of processes that share their data."""
        return int(self.get_tp_size() * self.get_cp_size() * self.get_sp_size())

    def _rows_of(self, packs: Any) -> Any:
        if packs is None:
            raise ConfigError("evaluation needs `eval_dataset`. Pass a PackedDataset of another split.")
        rows = _EvaluationRows(packs, self.data_collator, self.args.eval_batch_size, self._place())
        return DataLoaderShard(
            rows,
            batch_size=None,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory and torch.cuda.is_available(),
        )


class PackedTrainer(PackedTrainerMixin):
    """Trainer that checks arguments and isolation before the first step, and evaluates by token.

        trainer = PackedTrainer(model, args, eval_dataset=dataset, data_collator=PaddingFreeCollator())

    A PackedDataset or PlannedDataset is read in its global order (`MapDistributor`): each epoch has every pack once,
    with any number of processes, a blend is drawn in each epoch, and a checkpoint continues exactly, also with another
    number of processes: the last step is then moved, unless `max_steps` is set. If the last step has no pack for a
    process, that process gets a row without targets.
    `balance` aligns the packs of a step by cost, with the accumulated rows of all processes; so does
    `train_sampling_strategy="group_by_length"`, with the default costs. The state of a TrainerStream is saved and
    restored.

    The loss of a step is the mean over the targets of all its rows on all processes, also for models of which Trainer
    averages the means of rows (`accepts_loss_kwargs = False`: Qwen-VL, Gemma 3). If targets have other weights than 1
    (`loss_mask`), it is sum(loss * weight) / sum(weight), and otherwise the loss of the model.

    Checkpoints have the names of the weights in the model; a checkpoint that does not restore all weights is refused.

    `eval_loss` is the same mean over all rows of all processes, and every pack counts once. `compute_metrics` gets a
    row of -100 labels if a process has fewer rows.

    Args: as in Trainer, `data_collator` by default a PaddingFreeCollator, `balance` as for MapDistributor, and
        `order_log`: a folder in which the rows of each step are recorded, for data that is read in its global order. A
        TrainerStream has its own argument. By default, logits are computed for targets alone, by most models in pieces
        and without returning them. `logits="all"` computes and returns the logits of all tokens; so do models for
        which the loss would differ, label smoothing, `compute_loss_func`, and evaluation with metrics or predictions.
        `loss` is computed from the log probabilities of the samples of a row, such as
        `dpo_loss` or `functools.partial(dpo_loss, beta=0.2)`, and averaged over its values in the step; `ref_model` is
        its reference, without gradients. Without it, the reference is the column `ref_logprobs` of the data, or the
        model without its PEFT adapter.

    Raises:
        ConfigError: the arguments do not fit the data (see `check_training_arguments`), a checkpoint does not fit the
            model, or, while training, the loss weights.

    Examples:
        >>> import transformers
        >>> sizes = dict(vocab_size=2000, hidden_size=8, intermediate_size=8, num_hidden_layers=1)
        >>> config = transformers.LlamaConfig(**sizes, num_attention_heads=1)
        >>> dataset = PackedDataset("demo-out", encoder)
        >>> args = packed_training_arguments("run", dataset, max_steps=1, use_cpu=True)
        >>> model = transformers.LlamaForCausalLM(config)
        >>> trainer = PackedTrainer(model, args, train_dataset=dataset, data_collator=PaddingFreeCollator())
        >>> len(trainer.get_train_dataloader())
        2
    """

    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[..., Any] | None = None,
        compute_loss_func: Callable[..., Any] | None = None,
        compute_metrics: Callable[..., Any] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[Any, dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[..., Any] | None = None,
        *,
        balance: Balance | None = None,
        order_log: str | Path | None = None,
        logits: Literal["targets", "all"] = "targets",
        loss: LossOfSamples | None = None,
        ref_model: Any = None,
    ) -> None:
        super().__init__(
            model=model,
            args=args,
            data_collator=PaddingFreeCollator() if data_collator is None else data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            model_init=model_init,
            compute_loss_func=compute_loss_func,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            balance=balance,
            order_log=order_log,
            logits=logits,
        )
        if loss is None:
            if ref_model is not None:
                raise ConfigError("`ref_model` needs `loss`, such as dpo_loss, got None. Pass `loss`, or remove it.")
            return
        if self.label_smoother is not None or self.compute_loss_func is not None or not self._is_packed:
            raise ConfigError(
                "`loss` must be None with `label_smoothing_factor`, `compute_loss_func` or a `data_collator` of "
                f"another package, got {getattr(loss, '__name__', loss)}. Remove one of them."
            )
        if ref_model is not None:
            ref_model = self.accelerator.prepare_model(ref_model.eval(), evaluation_mode=True)
        self._sample_loss = SampleLoss(loss, ref_model)
        self.data_collator = SampleLoss.collator(self.data_collator)
        self.model_accepts_loss_kwargs = True  # the Trainer then passes the number of pairs of the step


def _with_target(inputs: dict[str, Any]) -> dict[str, Any]:
    """Make a token a target if the row has none: the mean of no target is NaN, and times 0 as well."""
    ids, name, first = inputs["input_ids"], "labels", 1
    if "shift_labels" in inputs:
        name, first = "shift_labels", 0
        if not inputs[name].shape[1]:
            return inputs | {"logits_to_keep": ids.new_zeros(1), name: ids[:, 1:2]}
        ids = ids[:, inputs["logits_to_keep"] + 1]
    labels = inputs[name].clone()
    is_empty = (labels == -100).all()  # a tensor, so that the host does not wait for the device
    labels[..., first] = torch.where(is_empty, ids[..., first], labels[..., first])
    return inputs | {name: labels}


class IsolationCheckCallback(TrainerCallback):
    """TrainerCallback that checks the model when training starts: `callbacks=[IsolationCheckCallback()]`.

    Raises:
        IsolationError: the model does not keep packed samples apart.

    Examples:
        >>> callbacks = [IsolationCheckCallback()]  # of the Trainer
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, **kwargs: Any) -> None:
        """Run `check_isolation`, the same on every process."""
        check_isolation(model)


class SetEpochCallback(TrainerCallback):
    """TrainerCallback that draws the packs of a blend in each epoch: `callbacks=[SetEpochCallback(dataset)]`.

    The Trainer passes the epoch to its sampler, but not to the dataset. Resuming draws the saved epoch.

    Args:
        dataset: PackedDataset over a Metadataset.

    Examples:
        >>> dataset = PackedDataset("demo-out", encoder)
        >>> callbacks = [SetEpochCallback(dataset)]  # of the Trainer
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Draw the packs of this epoch."""
        self.dataset.set_epoch(epoch_of(state))


class _OrderState(CheckpointCallback):
    """Callback that saves and restores the position of a PackedTrainer in the order of its data."""

    remedy = "resume it with the Trainer that saved it"

    def __init__(self, trainer: PackedTrainerMixin) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Do nothing: the state was restored before the number of steps was computed."""

    def restore(self, state: dict[str, Any], args: Any, trainer_state: Any) -> None:
        """Move the loader to a saved state."""
        self._trainer._loader.load_state_dict(state)

    def state(self) -> dict[str, Any]:
        """Return the state of the loader, the same on all ranks."""
        state: dict[str, Any] = self._trainer._loader.state_dict()
        return state


class _Continued(NamedTuple):
    """The epoch that a resumed training continues.

    Attributes:
        epoch: from 0.
        skipped: empty batches that the Trainer skips at its start, a multiple of the accumulated batches.
        batches: batches of a process that are left in it.
    """

    epoch: int
    skipped: int
    batches: int


class _TrainerRows(Consumed):
    """Consumed for a Trainer that skips batches when it resumes in an epoch.

    Attributes:
        placeholders: empty batches at the start of the next iteration, for a Trainer that skips this many: the loader
            continues after the batches that they replace.
    """

    placeholders = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for _ in range(self.placeholders):
            yield {}
        self.placeholders = 0
        yield from super().__iter__()


class _EvaluationRows(torch.utils.data.Dataset[dict[str, Any]]):
    """Evaluation rows of one process: packs in order, a row for each process in turn.

    A process without a row in the last step repeats pack 0 without targets.
    """

    def __init__(self, packs: Any, collator: Any, batch_size: int, place: tuple[int, int]) -> None:
        self.packs = len(packs)
        self._data, self._collator, self._batch_size = packs, collator, batch_size
        self._rank, self._world_size = place

    def __len__(self) -> int:
        return ceil(self.packs / (self._batch_size * self._world_size))

    def __getitem__(self, step: int) -> dict[str, Any]:
        if step >= len(self):
            raise IndexError(f"row index must be below {len(self)}, got {step}")
        first = (step * self._world_size + self._rank) * self._batch_size
        indices: Sequence[int] = range(first, min(first + self._batch_size, self.packs))
        row: dict[str, Any] = self._collator([self._data[index] for index in indices or [0]])
        return row if indices else dict(without_targets(row))
