"""Loss that a model computes by itself: the same value, without all its logits in memory.

| part of the model | in its place | memory |
|---|---|---|
| loss function of Transformers for causal language models | the same loss in pieces | no float32 copy of the logits |
| last layer, a Linear whose outputs are the logits | its input; the loss computes logits in pieces | no logits |
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.trainer_utils import unwrap_peft_model

from energon_packed.encoding import IGNORE_INDEX
from energon_packed.loading.collation.batch import signals_of
from energon_packed.loading.collation.cross_entropy import linear_cross_entropy

ROUNDING = 0.02  # of bfloat16; other logits, or the loss of other targets, differ by far more


def without_ddp(model: Any) -> Any:
    """Return the model in a DistributedDataParallel, or the model itself."""
    return getattr(model, "module", model)


@contextmanager
def loss_in_pieces(model: Any, *, head: bool = False, weights: torch.Tensor | None = None) -> Iterator["_Head | None"]:
    """Context manager in which a model with the loss of Transformers for causal language models computes it in pieces.

    Args:
        model: a model, wrapped (PEFT, DDP) or not; another loss of the model is not changed.
        head: compute the logits in pieces as well, of a model that `has_plain_head`: its outputs have no logits.
        weights: with `head`, float32 (N,), weights of the targets: the loss is sum(loss * weight) / sum(weight).
    """
    inner = without_ddp(model)
    base = unwrap_peft_model(inner)
    if not isinstance(base, PreTrainedModel) or base.loss_function is not ForCausalLMLoss:
        yield None
        return
    taken = _Head(base.get_output_embeddings(), weights) if head else None
    base.loss_function = partial(_causal_loss, head=taken)
    hooks = []
    if taken is not None:
        taken.linear.forward = taken
        # PEFT calls `forward` of its base model, which runs no hooks of it.
        hooks = [module.register_forward_hook(_without_logits, prepend=True) for module in {model, inner, base}]
    try:
        yield taken
    finally:
        base.loss_function = ForCausalLMLoss
        if taken is not None:
            del taken.linear.forward
        for hook in hooks:
            hook.remove()


def has_plain_head(model: Any, loss_of: Callable[[], torch.Tensor]) -> bool:
    """Whether a model computes the same loss if its last layer computes logits in pieces.

    Args:
        model: as for `loss_in_pieces`.
        loss_of: runs the model, and returns its loss.
    """
    base = unwrap_peft_model(without_ddp(model))
    linear = base.get_output_embeddings() if isinstance(base, PreTrainedModel) else None
    # Another forward method, or hooks, may gather weights that are sharded or offloaded.
    if type(linear) is not torch.nn.Linear or "forward" in vars(linear):
        return False
    # A GradScaler must scale the gradients of float16 before they are summed.
    if linear._forward_hooks or linear._forward_pre_hooks or linear.weight.dtype == torch.float16:
        return False
    expected = loss_of()
    try:
        with loss_in_pieces(model, head=True) as head:
            found = loss_of()
    except (TypeError, ValueError, RuntimeError, IndexError):
        return False
    # Another loss, such as the loss of Liger, does not use the head.
    return head is not None and head.is_used and bool((found - expected).abs() <= ROUNDING * expected.abs())


class _Head:
    """Returns the input of a Linear in place of its logits, from which it computes the loss later.

    Args:
        linear: the last layer of a model.
        weights: float32 (N,), weights of the targets, or None.

    Attributes:
        is_used: a loss was computed.
    """

    def __init__(self, linear: Any, weights: torch.Tensor | None) -> None:
        self.linear, self.weights = linear, weights
        self.is_used = False
        self._input: torch.Tensor | None = None

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        self._input = hidden
        return hidden

    def sum_of_losses(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Sum of the losses, of which each is multiplied by its weight."""
        if hidden is not self._input:
            raise RuntimeError("The model changes its logits before it computes its loss. Set `logits='all'`.")
        self.is_used, self._input = True, None
        linear = self.linear
        return linear_cross_entropy(hidden.flatten(0, -2), linear.weight, linear.bias, targets, self.weights)


def _without_logits(module: Any, args: Any, output: Any) -> Any:
    return type(output)(**{**output, "logits": None})


def _causal_loss(
    logits: torch.Tensor,
    labels: torch.Tensor | None,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | float | None = None,
    ignore_index: int = IGNORE_INDEX,
    shift_labels: torch.Tensor | None = None,
    *,
    head: _Head | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Mean of the losses, or their sum divided by `num_items_in_batch`; arguments as for ForCausalLMLoss."""
    if shift_labels is None:
        shift_labels = torch.nn.functional.pad(labels, (0, 1), value=IGNORE_INDEX)[..., 1:]  # type: ignore[arg-type]
    targets = shift_labels.reshape(-1).to(logits.device)
    if head is None:
        total = signals_of(logits.reshape(-1, vocab_size), targets).sum()
    else:
        total = head.sum_of_losses(logits, targets)
        if head.weights is not None:  # a row without targets has loss 0
            return total / head.weights.to(total.dtype).sum().clamp(min=torch.finfo(torch.float32).tiny)
    divisor = (targets != IGNORE_INDEX).sum() if num_items_in_batch is None else num_items_in_batch
    return total / (divisor.to(logits.device) if isinstance(divisor, torch.Tensor) else divisor)
