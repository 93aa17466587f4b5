"""Megatron without a GPU: tensors that it creates on a device are created in memory."""

from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import parallel_state, utils
from megatron.core.tensor_parallel import random
from torch.distributed.nn.functional import all_reduce
from torch.overrides import TorchFunctionMode


class _InMemory(TorchFunctionMode):
    """Replaces the device in calls of functions that create tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def run_on_cpu() -> None:
    """Let Megatron run in this process without a GPU."""
    _InMemory().__enter__()
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor  # type: ignore[assignment, method-assign]
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    torch.cuda.current_stream = lambda *_: None  # type: ignore[assignment, return-value]
    # The generator of the device is not the generator of the host.
    device = torch.Generator()
    torch.cuda.manual_seed = device.manual_seed  # type: ignore[assignment]
    torch.cuda.get_rng_state = torch.cuda.random.get_rng_state = lambda *_, **__: device.get_state()
    random._set_cuda_rng_state = lambda state, *_, **__: device.set_state(state)
    # Of TransformerEngine, only the partition of a row over the ranks of a context-parallel group is used.
    utils.tex = SimpleNamespace(thd_get_partitioned_indices=partitioned_indices)
    utils.is_te_min_version = lambda *_: True


def partitioned_indices(bounds: torch.Tensor, tokens: int, size: int, rank: int) -> torch.Tensor:
    """Tokens of a context-parallel rank: the chunks `rank` and `2 * size - 1 - rank` of the 2 * size of each sample.

    Args:
        bounds: int32 (S + 1,), boundaries in the padded row.
        tokens: T, the end of the last sample.
        size: ranks that share the row.
        rank: of this process.
    """
    assert int(bounds[-1]) == tokens
    parts = []
    for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        chunks = torch.arange(start, end).chunk(2 * size)
        assert [len(chunk) for chunk in chunks] == [(end - start) // (2 * size)] * 2 * size
        parts += [chunks[rank], chunks[2 * size - 1 - rank]]
    return torch.cat(parts)


class PackedAttention(torch.nn.Module):
    """Causal attention inside each sample, on CPU, for which megatron-core has no kernel."""

    def __init__(self, **settings: object) -> None:
        super().__init__()

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object, **named: Any) -> Any:
        """Query, key and value (tokens of this rank, [1,] heads, width); returns (tokens, [1,] heads * width)."""
        shape, params = query.shape, named.get("packed_seq_params")
        query, key, value = (x.flatten(0, 1) if x.ndim == 4 else x for x in (query, key, value))
        bounds = torch.tensor([0, len(query)])
        group = parallel_state.get_context_parallel_group()
        size, rank = group.size(), group.rank()
        if params is not None:
            bounds = params.cu_seqlens_q if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded
        of_token = torch.repeat_interleave(torch.arange(len(bounds) - 1), bounds.diff())
        mine = torch.arange(len(of_token))
        if size > 1:  # the keys and values of all ranks, in the order of the row; addition has a gradient with gloo
            mine = partitioned_indices(bounds, size * len(query), size, rank)
            key, value = (
                all_reduce(x.new_zeros(size * len(x), *x.shape[1:]).index_copy(0, mine, x), group=group)
                for x in (key, value)
            )
        is_visible = (of_token[mine, None] == of_token) & (mine[:, None] >= torch.arange(len(of_token)))
        groups = query.shape[1] // key.shape[1]
        q, k, v = (x.transpose(0, 1) for x in (query, *(x.repeat_interleave(groups, dim=1) for x in (key, value))))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=is_visible).transpose(0, 1)
        return out.reshape(*shape[:-2], -1)
