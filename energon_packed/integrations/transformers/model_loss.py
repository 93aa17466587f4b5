"""Loss that a model computes by itself: the same value, without a float32 copy of all its logits."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.trainer_utils import unwrap_peft_model

from energon_packed.encoding import IGNORE_INDEX
from energon_packed.loading.collation.batch import signals_of


@contextmanager
def loss_in_pieces(model: Any) -> Iterator[None]:
    """Context manager in which a model with the loss of Transformers for causal language models computes it in pieces.

    Args:
        model: a model, wrapped (PEFT, DDP) or not; another loss of the model is not changed.
    """
    base = unwrap_peft_model(getattr(model, "module", model))
    if not isinstance(base, PreTrainedModel) or base.loss_function is not ForCausalLMLoss:
        yield
        return
    base.loss_function = _causal_loss
    try:
        yield
    finally:
        base.loss_function = ForCausalLMLoss


def _causal_loss(
    logits: torch.Tensor,
    labels: torch.Tensor | None,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | float | None = None,
    ignore_index: int = IGNORE_INDEX,
    shift_labels: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Mean of the losses, or their sum divided by `num_items_in_batch`; arguments as for ForCausalLMLoss."""
    if shift_labels is None:
        shift_labels = torch.nn.functional.pad(labels, (0, 1), value=IGNORE_INDEX)[..., 1:]  # type: ignore[arg-type]
    targets = shift_labels.reshape(-1).to(logits.device)
    losses = signals_of(logits.reshape(-1, vocab_size), targets)
    divisor = (targets != IGNORE_INDEX).sum() if num_items_in_batch is None else num_items_in_batch
    return losses.sum() / (divisor.to(logits.device) if isinstance(divisor, torch.Tensor) else divisor)
