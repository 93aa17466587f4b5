"""Logits of targets alone: a model in, whether it computes them and the same loss out.

With a vocabulary of 152,000, the float32 logits of a row of 16,384 tokens are 10 GB. `logits_to_keep` names the tokens
whose logits are needed, and `shift_labels` has their targets; models without these arguments ignore or refuse them.
"""

from typing import Any

import torch

from energon_packed.encoding import IGNORE_INDEX
from energon_packed.integrations.isolation import repeatable, short_row
from energon_packed.integrations.transformers.model_loss import ROUNDING, has_plain_head

ARGUMENTS = ("logits_to_keep", "shift_labels")
_SHARE = 3  # every third token of the trial row is a target


def computes_target_logits(model: Any) -> bool:
    """Whether logits and loss with `transformers_inputs(logits="targets")` equal the results with all logits.

    Runs two forward passes over one short row, as `check_isolation`. With sharded parameters, call it on every rank.

    Args:
        model: a Hugging Face causal language model or vision-language model, wrapped (PEFT, DDP) or not.
    """
    inputs = _trial_inputs(model)
    with repeatable(model):
        full = _run(model, without_target_logits(inputs))
        try:
            found = _run(model, inputs)
        except (TypeError, ValueError, RuntimeError, IndexError):
            return False
    if full.logits is None or found.logits is None or full.loss is None or found.loss is None:
        return False
    expected = full.logits[:, inputs["logits_to_keep"]]
    return found.logits.shape == expected.shape and _equal(found.logits, expected) and _equal(found.loss, full.loss)


def computes_head_in_pieces(model: Any) -> bool:
    """Whether a model that computes target logits has the same loss in `loss_in_pieces(model, head=True)`."""
    inputs = _trial_inputs(model)
    with repeatable(model):
        return has_plain_head(model, lambda: _run(model, inputs).loss)


def _trial_inputs(model: Any) -> dict[str, Any]:
    row = short_row(model)
    row.labels[:, torch.arange(row.labels.shape[1]) % _SHARE > 0] = IGNORE_INDEX
    device = next(model.parameters()).device
    return {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in row.transformers_inputs(weighted_loss=True, logits="targets").items()
    }


def without_target_logits(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs of a model that computes all logits."""
    return {name: value for name, value in inputs.items() if name not in ARGUMENTS}


def _run(model: Any, inputs: dict[str, Any]) -> Any:
    device = inputs["input_ids"].device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        return model(**inputs)


def _equal(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((found - expected).abs().max() <= ROUNDING * expected.abs().max())
