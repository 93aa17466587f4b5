"""PackedBatch: one row of sub-samples laid end to end, and the forms that training frameworks take."""

from typing import Any

import torch
from megatron.energon import Batch, edataclass

from energon_packed.encoding import IGNORE_INDEX


@edataclass
class PackedBatch(Batch):
    """One row of T tokens with S sub-samples; a micro batch of several packs is joined into one row.

        sub-sample   |-- 0 --|- 1 -|---- 2 ----|(tail)
        cu_seqlens   0       3     5           9      T
        position_ids 0 1 2   0 1   0 1 2 3     0 ..

    Attributes:
        input_ids: int64 (1, T).
        labels: int64 (1, T), unshifted, -100 where not supervised; the first token of a sub-sample is never a
            target, since no token of its own sub-sample predicts it.
        loss_mask: float32 (1, T), 1 where `labels` is a target.
        position_ids: int64 (1, T), restarting at 0 in each sub-sample; (4, 1, T) for M-RoPE models: the text row,
            then t, h and w.
        cu_seqlens: int32 (S+1,), real tokens only; a tail that pads the row counts as one more segment.
        max_seqlen: tokens of the longest segment, padding included.
        cu_seqlens_padded: int32, as many as `cu_seqlens`, where segments lie in the row; None unless there is
            padding between sub-samples.
        padding_mask: bool (1, T), True at padding; None without padding.
        pixel_values: float32 (patches, patch_dim) of all images in order, or None.
        image_grid_thw: int64 (images, 3), or None.
        patch_positions: int64 (patches, 3), or None.
        ids: names of the S sub-samples.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int
    ids: list[str | None]
    cu_seqlens_padded: torch.Tensor | None = None
    padding_mask: torch.Tensor | None = None
    pixel_values: torch.Tensor | None = None
    image_grid_thw: torch.Tensor | None = None
    patch_positions: torch.Tensor | None = None

    @property
    def num_samples(self) -> int:
        """Sub-samples S in the row; a padding tail is none."""
        return len(self.ids)

    @property
    def num_tokens(self) -> int:
        """Real tokens, without padding."""
        padding = 0 if self.padding_mask is None else int(self.padding_mask.sum())
        return self.input_ids.shape[1] - padding

    def transformers_inputs(self) -> dict[str, Any]:
        """Arguments for any Hugging Face causal language model or Qwen-VL model.

        Labels are unshifted, as Transformers shifts them itself. There is no attention mask and no cache: only then
        does Transformers build a block-diagonal mask from positions that restart. The `cu_seq_lens_*` and
        `max_length_*` serve flash attention.
        """
        bounds = self.cu_seqlens if self.cu_seqlens_padded is None else self.cu_seqlens_padded
        inputs: dict[str, Any] = {
            "input_ids": self.input_ids,
            "labels": self.labels,
            "position_ids": self.position_ids,
            "use_cache": False,
            "cu_seq_lens_q": bounds,
            "cu_seq_lens_k": bounds,
            "max_length_q": self.max_seqlen,
            "max_length_k": self.max_seqlen,
        }
        optional = {"pixel_values": self.pixel_values, "image_grid_thw": self.image_grid_thw}
        if self.patch_positions is not None:
            optional["patch_positions"] = self.patch_positions
        return inputs | {name: value for name, value in optional.items() if value is not None}

    def megatron_inputs(self) -> dict[str, Any]:
        """The batch as Megatron takes it: labels and loss mask shifted inside each sub-sample.

        Token t gets the label of token t + 1 of the same sub-sample; the last token of each gets none.
        """
        labels = torch.full_like(self.labels, IGNORE_INDEX)
        labels[:, :-1] = self.labels[:, 1:]  # the first token of a sub-sample is no target, so none crosses over
        inputs: dict[str, Any] = {
            "tokens": self.input_ids,
            "labels": labels,
            "loss_mask": (labels != IGNORE_INDEX).to(self.loss_mask.dtype),
            "position_ids": self.position_ids,
            "cu_seqlens_q": self.cu_seqlens,
            "cu_seqlens_kv": self.cu_seqlens,
            "max_seqlen_q": self.max_seqlen,
            "max_seqlen_kv": self.max_seqlen,
            "total_tokens": self.input_ids.shape[1],
        }
        if self.cu_seqlens_padded is not None:
            inputs |= {"cu_seqlens_q_padded": self.cu_seqlens_padded, "cu_seqlens_kv_padded": self.cu_seqlens_padded}
        optional = {
            "padding_mask": self.padding_mask,
            "pixel_values": self.pixel_values,
            "image_grid_thw": self.image_grid_thw,
            "patch_positions": self.patch_positions,
        }
        return inputs | {name: value for name, value in optional.items() if value is not None}
