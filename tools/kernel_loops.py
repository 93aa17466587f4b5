"""Loops over the samples of a row in place of kernels that need a GPU: `import kernel_loops` before a model's module.

Convolutions and linear attention of Transformers have torch functions, which cannot keep the samples of a row apart.
Such a row needs a kernel of `causal_conv1d`, `mamba_ssm` or `fla`. With `enable()`, the torch function is called for
each sample instead. The boundaries are those that the model passes to the kernel: `seq_idx`, or `cu_seqlens` for
`fla`.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
import transformers.integrations
from transformers.integrations import hub_kernels

_state = {"enabled": False}
_original = hub_kernels.use_kernel_func_from_hub_with_fallback


def enable() -> None:
    """Replace the kernels from now on."""
    _state["enabled"] = True


def _with_loop(function_name: str, package: str, internal_path: str | None = None) -> Callable[..., Any]:
    """`use_kernel_func_from_hub_with_fallback` whose functions call the torch function for each sample if enabled."""

    def decorate(torch_function: Callable[..., Any]) -> Callable[..., Any]:
        kernel = _original(function_name, package, internal_path)(torch_function)

        @functools.wraps(kernel)
        def loop(*arguments: Any, cu_seqlens: Any = None, seq_idx: Any = None, **options: Any) -> Any:
            if not _state["enabled"]:
                return kernel(*arguments, cu_seqlens=cu_seqlens, seq_idx=seq_idx, **options)
            if package == "fla" and cu_seqlens is not None:
                bounds = cu_seqlens.tolist()
            elif package != "fla" and seq_idx is not None:
                bounds = _bounds(seq_idx)
            else:  # the kernel ignores the other argument
                return kernel(*arguments, **options)
            axis = 2 if function_name == "causal_conv1d_fn" else 1
            parts = []
            for start, end in itertools.pairwise(bounds):
                part = functools.partial(_part, axis=axis, start=start, end=end, tokens=bounds[-1])
                own = {name: part(value) for name, value in options.items()}
                parts.append(torch_function(*map(part, arguments), **own))
            if isinstance(parts[0], tuple):  # the second value is the last state, which generation uses
                return torch.cat([outputs for outputs, _ in parts], axis), parts[-1][1]
            return None if parts[0] is None else torch.cat(parts, axis)

        return loop

    return decorate


def _bounds(seq_idx: torch.Tensor) -> list[int]:
    """Boundaries of the segments that `seq_idx`, (1, T), numbers."""
    changes = seq_idx[0].diff().nonzero()[:, 0] + 1
    return [0, *changes.tolist(), seq_idx.shape[1]]


def _part(value: Any, *, axis: int, start: int, end: int, tokens: int) -> Any:
    """Tokens `start` to `end` of a tensor with an axis of tokens; other values unchanged."""
    if isinstance(value, torch.Tensor) and value.ndim > 2 and value.shape[axis] == tokens:
        return value.narrow(axis, start, end - start)
    return value


hub_kernels.use_kernel_func_from_hub_with_fallback = _with_loop
transformers.integrations.use_kernel_func_from_hub_with_fallback = _with_loop
