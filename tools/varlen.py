"""Transformers' flash attention path with the variable-length kernel of torch, without the package `flash-attn`.

`use_varlen()` adds the attention implementation `flash_varlen`. Models reach it with the arguments of
`transformers_inputs()` exactly as they reach `flash_attention_2`: the masks, the boundaries and the padding of head
sizes are those of Transformers, and only the kernel is `torch.nn.attention.varlen.varlen_attn`. On the CPU, which has
no such kernel, a loop over the samples replaces it.
"""

import inspect
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers import modeling_flash_attention_utils as flash
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.masking_utils import flash_attention_mask

VARLEN = "flash_varlen"


def use_varlen() -> None:
    """Register `flash_varlen`."""
    AttentionInterface.register(VARLEN, flash_attention_forward)
    AttentionMaskInterface.register(VARLEN, flash_attention_mask)
    before = flash._lazy_imports

    def imports(implementation: str | None, *arguments: Any, **options: Any) -> Any:
        if implementation == VARLEN:
            return dense, varlen, None, flash._pad_input, flash._unpad_input
        return before(implementation, *arguments, **options)

    flash._lazy_imports = imports


def varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:
    """Attention of samples in a row, with the arguments of `flash_attn_varlen_func`.

    Args:
        q: (T, heads, head size).
        k: (T, key heads, head size).
        v: (T, key heads, head size).
        cu_seqlens_q: int32 (S+1,), boundaries of the samples.
        cu_seqlens_k: int32 (S+1,).
        max_seqlen_q: tokens of the longest sample.
        max_seqlen_k: tokens of the longest sample.
        dropout_p: ignored, as the kernel has no dropout.
        softmax_scale: factor of the scores; None for 1 / sqrt(head size).
        causal: tokens attend to earlier tokens alone.
        window_size: tokens to the left and to the right that a token attends to; -1 for all.
    """
    if lacking := -q.shape[-1] % 8:  # as flash-attn, whose kernels need a multiple of 8
        scale = softmax_scale or q.shape[-1] ** -0.5
        q, k, v = (torch.nn.functional.pad(tensor, (0, lacking)) for tensor in (q, k, v))
        bounds = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return varlen(q, k, v, *bounds, dropout_p, scale, causal, window_size)[..., :-lacking]
    window = (window_size[0], 0 if causal else window_size[1])
    if not q.is_cuda:
        return _loop(q, k, v, cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), softmax_scale, window)
    from torch.nn.attention.varlen import varlen_attn

    # Releases after 2.11 refuse key heads that several heads share, unless asked for.
    options = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    bounds = (cu_seqlens_q.int(), cu_seqlens_k.int(), int(max_seqlen_q), int(max_seqlen_k))
    q, k, v = (tensor.contiguous() for tensor in (q, k, v))
    return varlen_attn(q, k, v, *bounds, scale=softmax_scale, window_size=window, **options)


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    """Attention of B samples of T tokens, with the arguments of `flash_attn_func`; q is (B, T, heads, head size)."""
    sizes = [tensor.shape[1] for tensor in (q, k)]
    bounds = [size * torch.arange(len(q) + 1, dtype=torch.int32, device=q.device) for size in sizes]
    out = varlen(*(tensor.flatten(0, 1) for tensor in (q, k, v)), *bounds, *sizes, **options)
    return out.unflatten(0, q.shape[:2])


def _loop(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts_q: list[int],
    starts_k: list[int],
    scale: float | None,
    window: tuple[int, int],
) -> torch.Tensor:
    parts = []
    for sample in range(len(starts_q) - 1):
        rows = slice(starts_q[sample], starts_q[sample + 1])
        columns = slice(starts_k[sample], starts_k[sample + 1])
        queries, keys, values = (x.transpose(0, 1)[None] for x in (q[rows], k[columns], v[columns]))
        # The last query is aligned with the last key.
        distance = torch.arange(keys.shape[2]) - torch.arange(queries.shape[2])[:, None]
        distance = distance - (keys.shape[2] - queries.shape[2])
        left, right = (side if side >= 0 else keys.shape[2] + queries.shape[2] for side in window)
        mask = (distance >= -left) & (distance <= right)
        out = torch.nn.functional.scaled_dot_product_attention(
            queries, keys, values, mask, scale=scale, enable_gqa=True
        )
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)
