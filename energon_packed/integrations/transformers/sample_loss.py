"""Loss of a PackedTrainer over the samples of a row, such as `dpo_loss`, with a reference model or stored columns."""

from collections.abc import Callable
from contextlib import nullcontext
from copy import copy
from typing import Any

import torch

from energon_packed.errors import ConfigError
from energon_packed.integrations.transformers.model_loss import without_ddp
from energon_packed.loading.collation.batch import PackedBatch
from energon_packed.loading.collation.collator import Collator, with_extra

LossOfSamples = Callable[[PackedBatch, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""A loss such as `dpo_loss`: a row, and (S,) log probabilities by the model and by the reference (or None) in; the
value of each pair or sample out, (P,)."""
REFERENCE = "ref_logprobs"
"""Column with the log probability of each token by the reference model."""
_ROW = "packed_batch"  # entry of the inputs with the row itself
_MEDIA = ("pixel_values", "pixel_values_videos", "patch_positions", "vision_inputs", "audio_inputs")


class SampleLoss:
    """Values of a loss over the samples of a row.

    Args:
        function: the loss.
        ref_model: reference model, prepared for evaluation; None for the column `ref_logprobs`, or the model without
            its adapter.
    """

    def __init__(self, function: LossOfSamples, ref_model: Any = None) -> None:
        self._function = function
        self._ref_model = ref_model

    @staticmethod
    def collator(collator: Collator) -> Collator:
        """Return a copy whose inputs have the row."""
        return with_extra(collator, _ROW, _without_media)

    def count(self, inputs: dict[str, Any]) -> int:
        """Number of pairs or samples in a row for which the loss has a value."""
        row: PackedBatch = inputs[_ROW]
        zeros = torch.zeros(row.num_samples)
        return len(self._function(row, zeros, zeros))

    def __call__(self, model: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, Any]:
        """Return the value of each pair or sample, (P,), and the outputs of the model.

        Raises:
            ConfigError: the model adds the loss of a router.
        """
        row: PackedBatch = inputs[_ROW]
        arguments = without_loss(inputs)
        outputs = outputs_without_router_loss(model, arguments)
        row = row.to(outputs.logits.device)
        return self._function(row, row.sample_logps(outputs.logits), self._reference(model, arguments, row)), outputs

    def _reference(self, model: Any, arguments: dict[str, Any], row: PackedBatch) -> torch.Tensor | None:
        """Log probabilities of the samples by the reference, (S,); None if there is none."""
        if self._ref_model is None and REFERENCE in row.columns:
            return row.sample_sums(row.columns[REFERENCE])
        adapted = without_ddp(model)
        has_adapter = hasattr(adapted, "disable_adapter")
        if self._ref_model is None and not has_adapter:
            return None
        with torch.no_grad(), nullcontext() if self._ref_model is not None else adapted.disable_adapter():
            return row.sample_logps((self._ref_model or model)(**arguments).logits)


def without_loss(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs without those from which a loss is computed."""
    of_loss = ("labels", "loss_mask", "shift_labels", "skip_logits", _ROW)
    return {name: value for name, value in inputs.items() if name not in of_loss}


def outputs_without_router_loss(model: Any, arguments: dict[str, Any]) -> Any:
    """Return the outputs of a model.

    Raises:
        ConfigError: the model adds the loss of a router to its loss.
    """
    outputs = model(**arguments)
    if getattr(outputs, "aux_loss", None) is not None:
        raise ConfigError(
            "`output_router_logits` must be False with loss weights and with `loss`, got True: the loss of the router "
            "is part of the loss that the model computes by itself. Set it to False in the configuration of the model."
        )
    return outputs


def _without_media(batch: PackedBatch) -> PackedBatch:
    """Return the row without pixels and audio, which the inputs have already."""
    row = copy(batch)
    for name in _MEDIA:
        setattr(row, name, None)
    return row
