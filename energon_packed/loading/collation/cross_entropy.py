"""Cross entropy of many targets in pieces: logits, or the input of the layer that computes them, to losses.

`torch.nn.functional.cross_entropy` keeps the log probabilities of all logits for the backward pass, in float32, and
its gradient is another tensor of this size; bfloat16 logits are converted before. With N targets and a vocabulary V,
these are up to 12 bytes for each of the N * V logits. With `cross_entropy`, only the gradient has N * V elements, in
the dtype of the logits. With `linear_cross_entropy`, no tensor has: it computes the gradients of the layer with the
loss, as the kernels of Liger do (P. Hsu et al., "Liger Kernel", 2024).
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from energon_packed.encoding import IGNORE_INDEX

_PIECE = 1 << 23  # logits that are converted to float32 at a time, 32 MiB: more than a GPU needs for its full speed
_ROWS = 1024  # of a piece of a layer at most; with fewer rows than inputs, memory limits the speed of its products


def pieces(logits: torch.Tensor) -> Iterator[slice]:
    """Yield slices of the rows of logits (N, V) that are converted to float32 at a time."""
    rows = max(1, _PIECE // max(1, logits.shape[1]))
    for start in range(0, len(logits), rows):
        yield slice(start, start + rows)


def in_float32(logits: torch.Tensor) -> torch.Tensor:
    """Convert to float32, because bfloat16 sums over the vocabulary lose digits; float64 stays."""
    return logits if logits.dtype == torch.float64 else logits.float()


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the loss of each target, float32 (N,), or float64 for float64 logits; 0 for -100.

    The gradient cannot be differentiated again.

    Args:
        logits: (N, V).
        targets: int64 (N,), on the device of the logits.
    """
    # Not compiled: the number of pieces differs between rows, and each number would be compiled again.
    losses: torch.Tensor = torch.compiler.disable(_CrossEntropy.apply)(logits, targets)  # type: ignore[no-untyped-call]
    return losses


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        losses, totals = (torch.empty(len(logits), dtype=dtype, device=logits.device) for _ in range(2))
        places = targets.clamp(min=0)[:, None]
        for piece in pieces(logits):
            values = in_float32(logits[piece])
            logps = torch.log_softmax(values, 1)
            losses[piece] = -logps.gather(1, places[piece])[:, 0]
            totals[piece] = values.amax(1) - logps.amax(1)  # the logarithm of the sum of exponentials
        ctx.save_for_backward(logits, targets, totals)
        return torch.where(targets == IGNORE_INDEX, 0, losses)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits, targets, totals = ctx.saved_tensors
        factors = torch.where(targets == IGNORE_INDEX, 0, gradient)[:, None]
        places = targets.clamp(min=0)[:, None]
        result = torch.empty_like(logits)
        for piece in pieces(logits):  # (softmax - onehot) * gradient
            values = (
                result[piece] if result.dtype == totals.dtype else torch.empty_like(result[piece], dtype=totals.dtype)
            )
            torch.sub(logits[piece], totals[piece, None], out=values)
            values.exp_().mul_(factors[piece]).scatter_add_(1, places[piece], -factors[piece])
            if values.dtype != result.dtype:
                result[piece] = values
        return result, None


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    factors: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the sum of the losses of the targets for logits `hidden @ weight.T + bias`, a float32 or float64 scalar.

    Args:
        hidden: (N, H).
        weight: (V, H).
        bias: (V,), or None.
        targets: int64 (N,); -100 has loss 0.
        factors: float32 (N,), factor of each loss, without gradient; 1 by default.
    """
    factors = torch.ones_like(targets, dtype=torch.float32) if factors is None else factors
    factors = torch.where(targets == IGNORE_INDEX, 0, factors)
    function = torch.compiler.disable(_LinearCrossEntropy.apply)  # type: ignore[no-untyped-call]
    loss: torch.Tensor = function(hidden, weight, bias, targets, factors)
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        factors: torch.Tensor,
    ) -> torch.Tensor:
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (hidden, weight, bias)]
        with torch.autocast(device, enabled=False):
            tensors = [None if tensor is None else tensor.to(dtype) for tensor in (hidden, weight, bias)]
            loss, *gradients = _loss_and_gradients(tensors, targets, factors, ctx.needs_input_grad)
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        scaled = [
            None if tensor is None else (tensor * gradient).to(dtype)
            for tensor, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return *scaled, None, None


def _loss_and_gradients(
    tensors: Sequence[Any], targets: torch.Tensor, factors: torch.Tensor, needs: Sequence[bool]
) -> tuple[torch.Tensor, Any, Any, Any]:
    """Sum of the losses, and its gradients by hidden, weight and bias, as far as needed; `tensors` are these three."""
    hidden, weight, bias = tensors
    sums: Any = {"dtype": torch.float64 if hidden.dtype == torch.float64 else torch.float32, "device": hidden.device}
    loss = torch.zeros((), **sums)
    of_hidden = torch.empty_like(hidden) if needs[0] else None
    of_weight = torch.zeros(weight.shape, **sums) if needs[1] else None
    of_bias = torch.zeros(bias.shape, **sums) if needs[2] else None
    places = targets.clamp(min=0)[:, None]
    factors = factors[:, None].to(sums["dtype"])
    rows = max(_PIECE // len(weight), min(hidden.shape[1], _ROWS), 1)
    for start in range(0, len(hidden), rows):
        piece = slice(start, start + rows)
        values = torch.log_softmax(in_float32(torch.nn.functional.linear(hidden[piece], weight, bias)), 1)
        loss -= (values.gather(1, places[piece]) * factors[piece]).sum()
        if not any(needs[:3]):
            continue
        values.exp_().mul_(factors[piece]).scatter_add_(
            1, places[piece], -factors[piece]
        )  # (softmax - onehot) * factor
        if of_bias is not None:
            of_bias += values.sum(0)
        values = values.to(hidden.dtype)
        if of_hidden is not None:
            torch.mm(values, weight, out=of_hidden[piece])
        if of_weight is not None and of_weight.dtype == values.dtype:
            of_weight.addmm_(values.T, hidden[piece])
        elif of_weight is not None:  # the sum of many pieces is in float32
            of_weight += values.T @ hidden[piece]
    return loss, of_hidden, of_weight, of_bias
