"""Packed data in ms-swift: its supervised training, with the data, order and loss of PackedTrainer."""

from collections.abc import Sequence
from typing import Any

from energon_packed.errors import ConfigError
from energon_packed.integrations.optional import base_class
from energon_packed.integrations.transformers.arguments import STREAM_ARGUMENTS, set_steps
from energon_packed.integrations.transformers.stream import TrainerStream
from energon_packed.integrations.transformers.target_logits import without_target_logits
from energon_packed.integrations.transformers.trainer import PackedTrainerMixin
from energon_packed.libraries import private
from energon_packed.loading.collation.collator import Collator, PaddingFreeCollator

_PACKAGE = "ms-swift>=4.6"
_SwiftSft: Any = base_class("swift.pipelines.train.sft", "SwiftSft", _PACKAGE)
_Seq2SeqTrainer: Any = base_class("swift.trainers", "Seq2SeqTrainer", _PACKAGE)


class PackedSft(_SwiftSft):
    """`swift sft` on packed data: the same options, and the datasets as objects.

        PackedSft(["--model", "DIR", "--tuner_type", "full"], PackedDataset("out")).main()

    Args:
        args: options of `swift sft`. `--dataset` and `--val_dataset` are set.
        train_dataset: PackedDataset, PlannedDataset, or TrainerStream, for which the options that it needs are set:
            no loader workers, one row per batch, and `--max_steps` from its batches if they are known.
        eval_dataset: PackedDataset of another split, or None for no evaluation.
        data_collator: None is a PaddingFreeCollator.

    Raises:
        ConfigError: ms-swift is not installed, or an option packs, splits or averages the data again.
    """

    model: Any

    def __init__(
        self,
        args: Sequence[str],
        train_dataset: Any,
        eval_dataset: Any = None,
        data_collator: Collator | None = None,
    ) -> None:
        self._datasets = [train_dataset, eval_dataset]
        self._collator = data_collator or PaddingFreeCollator()
        evaluated = ["--val_dataset", "packed"] if eval_dataset is not None else []
        fixed = ["--dataset", "packed", *evaluated, "--average_tokens_across_devices", "true"]
        if isinstance(train_dataset, TrainerStream):  # first, so that options of the user win, and are checked
            args = [part for name, value in STREAM_ARGUMENTS.items() for part in (f"--{name}", str(value))] + [*args]
        super().__init__([*args, *fixed])
        set_steps(self.args.training_args, train_dataset)
        required = {"task_type": "causal_lm", "packing": False, "padding_free": False, "sequence_parallel_size": 1}
        for name, needed in required.items():
            if (value := getattr(self.args, name)) != needed:
                raise ConfigError(f"`{name}` must be {needed} with packed data, got {value}. Remove the option.")

    def run(self) -> Any:
        """Train with PackedSwiftTrainer; as SwiftSft.run, without its datasets and its choice of a trainer."""
        from swift.utils import get_model_parameter_info

        train_dataset, eval_dataset = self._datasets
        self.args.save_args()
        self.model = self.prepare_model(self.args, self.model, template=self.template, train_dataset=train_dataset)
        self.train_msg["model_parameter_info"] = get_model_parameter_info(self.model)
        trainer = PackedSwiftTrainer(
            model=self.model,
            args=self.args.training_args,
            template=self.template,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            packed_collator=self._collator,
        )
        return self.train(trainer)


class PackedSwiftTrainer(PackedTrainerMixin, _Seq2SeqTrainer):
    """Trainer of ms-swift that reads packed data in its global order; see PackedTrainerMixin."""

    def __init__(self, *args: Any, packed_collator: Collator, template: Any, **kwargs: Any) -> None:
        for name in ("_get_data_collator", "_prepare_inputs", "prepare_logits_to_keep"):
            private(_Seq2SeqTrainer, name, "ms-swift")  # methods below override them
        self._packed_collator = packed_collator
        template.model_accepts_loss_kwargs = False  # its loss of a row without targets is NaN; PackedTrainer has 0
        super().__init__(*args, template=template, **kwargs)

    def _get_data_collator(self, args: Any, template: Any) -> Collator:
        return self._packed_collator

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        # ms-swift computes its own arguments for the logits of targets.
        prepared: dict[str, Any] = super()._prepare_inputs(without_target_logits(inputs))
        if "loss_mask" in prepared:  # the weighted loss calls the model with all other inputs
            prepared.pop("compute_loss_func", None)
        return prepared

    def prepare_logits_to_keep(self, inputs: dict[str, Any]) -> None:
        """Keep the logits of targets alone, except if the row has no target, or loss weights for all its tokens."""
        if "loss_mask" not in inputs and (inputs["labels"][..., 1:] != -100).any():
            super().prepare_logits_to_keep(inputs)
