"""Cross entropy of many logits in pieces: logits in their own dtype in, float32 losses out.

`torch.nn.functional.cross_entropy` keeps the log probabilities of all logits for the backward pass, in float32, and
its gradient is another tensor of this size; bfloat16 logits are converted before. With N targets and a vocabulary V,
these are up to 12 bytes for each of the N * V logits. Here only the gradient has N * V elements, in the dtype of the
logits.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from energon_packed.encoding import IGNORE_INDEX

_PIECE = 1 << 23  # logits that are converted to float32 at a time, 32 MiB: more than a GPU needs for its full speed


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
