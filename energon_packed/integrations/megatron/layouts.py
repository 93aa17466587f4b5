"""A PackedBatch to the dictionary of a Megatron training step: megatron_batch.

    bridge        Megatron-Bridge's packed steps (`gpt_step`, `vlm_step`): labels already shifted, THD metadata
    bridge-audio  Megatron-Bridge's `audio_lm_step` of Qwen2-Audio, which packs: a row of padded tokens for each sample
    megatron-lm   Megatron-LM's examples/multimodal/train.py: labels longer by 1 than tokens, shifted by the step
    megatron-gpt  Megatron-LM's pretrain_gpt.py with --sft: text only, labels already shifted, with the loss mask

Sources: `get_batch_from_iterator` and `get_packed_seq_params` of Megatron-Bridge, `get_batch` of the two files of
Megatron-LM.
"""

import sys
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import torch
from torch.nn.utils.rnn import pad_sequence

from energon_packed.encoding import IGNORE_INDEX
from energon_packed.errors import ConfigError
from energon_packed.loading.collation.batch import PackedBatch, padded_bounds
from energon_packed.options import check_choice

Layout = Literal["bridge", "bridge-audio", "megatron-lm", "megatron-gpt"]
"""Name of a layout of `megatron_batch`, by the training step that reads it."""
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
"""All layouts of `megatron_batch`."""
_AUDIO_LAYOUT: Layout = "bridge-audio"
_ABOVE_ROUNDING = 1 + 2**-18  # larger than the rounding error of a float32 sum, smaller than one target in 2**18


@dataclass(slots=False)
class VisualInputs:
    """Inputs that Megatron-Bridge moves to the device and passes to the vision tower.

    Attributes:
        pixel_values: (patches, patch_dim), float32 or the collator's `pixel_dtype`; None on pipeline stages without a
            vision tower.
        image_grid_thw: int64 (images, 3), or None; every stage computes M-RoPE positions from the grids.
        patch_positions: int64 (patches, 3), or None.
        pixel_values_videos: (patches, patch_dim), as `pixel_values`, of the video files.
        video_grid_thw: int64 (videos, 3), or None.
        second_per_grid_ts: float32 (videos,), for models with this argument; or None.
    """

    pixel_values: torch.Tensor | None = None
    image_grid_thw: torch.Tensor | None = None
    patch_positions: torch.Tensor | None = None
    pixel_values_videos: torch.Tensor | None = None
    video_grid_thw: torch.Tensor | None = None
    second_per_grid_ts: torch.Tensor | None = None

    def normalized_for_model(self) -> dict[str, torch.Tensor]:
        """Return the arguments of the model without None."""
        return {name: value for name, value in self.__dict__.items() if value is not None}


@dataclass(slots=False)
class AudioInputs:
    """Inputs that Megatron-Bridge moves to the device and passes to the audio encoder of Qwen2-Audio.

    Attributes:
        input_features: (files, 128, 3000), float32 or the collator's `pixel_dtype`.
        feature_attention_mask: int64 (files, 3000), 1 for the frames of a file.
    """

    input_features: torch.Tensor
    feature_attention_mask: torch.Tensor

    def normalized_for_model(self) -> dict[str, torch.Tensor]:
        """Return the arguments of the model."""
        return dict(self.__dict__)


def release(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version."""
    return tuple(int(number) for number in version.split(".")[:2])


def early_bridge() -> str | None:
    """Return the version of an imported Megatron-Bridge before 0.6, which reads other names."""
    bridge = sys.modules.get("megatron.bridge")
    version = None if bridge is None else str(bridge.__version__)
    return version if version is not None and release(version) < (0, 6) else None


def megatron_batch(batch: PackedBatch, layout: Layout, *, with_pixels: bool = True) -> dict[str, Any]:
    """Convert a batch to the dictionary of a training step.

    Args:
        batch: one row.
        layout: `bridge`, `bridge-audio`, `megatron-lm` or `megatron-gpt`.
        with_pixels: False for the middle stages of a pipeline, which have no vision tower or audio encoder (`bridge`,
            `bridge-audio`).

    Returns:
        `bridge`: tokens and input_ids, labels, loss_mask, position_ids, cu_seqlens_q/kv, cu_seqlens_q_padded/kv_padded
        if they differ, max_seqlen_q/kv int32 (), total_tokens (int), padding_mask if the collator pads,
        visual_inputs or None; for releases before 0.6, cu_seqlens with padding, max_seqlen, cu_seqlens_unpadded if
        they differ, and the number of boundaries in cu_seqlens_argmin and cu_seqlens_unpadded_argmin, int64 ().
        `bridge-audio`: tokens and input_ids, labels, loss_mask, position_ids and attention_mask (S, longest sample),
        padded at their ends, without the padding of the row, which the step adds; audio_inputs or None.
        `megatron-lm`: tokens (1, T), labels (1, T + 1) unshifted, imgs (patches, patch_dim), num_tiles int32
        (images,) patches of each image, cu_lengths int32 (1, S + 1), max_lengths int32 (1, 1); for a row without
        images, imgs and num_tiles are zeros of shape (1, 1), as in that example.
        `megatron-gpt`: tokens, labels, loss_mask, position_ids (1, T), cu_seqlens int32 (1, S + 1), padding included,
        max_seqlen int32 (1,).

    Raises:
        ConfigError: the layout is unknown, or does not support the row. All but `bridge-audio` refuse audio,
            `bridge-audio` images and M-RoPE positions, `megatron-lm` padding between samples, loss weights and video
            files, `megatron-gpt` and `bridge` before its release 0.6 images and video files.
    """
    check_choice("layout", layout, Layout)
    if batch.vision_inputs:
        raise ConfigError(
            f"layout {layout!r} supports only pixel_values of patches and image_grid_thw, got "
            f"{', '.join(batch.vision_inputs)} of this vision family. Use `transformers_inputs()`."
        )
    if layout == _AUDIO_LAYOUT:
        return _bridge_audio(batch, with_features=with_pixels)
    if batch.audio_inputs:
        raise ConfigError(
            f"layout {layout!r} has no place for audio. Use layout {_AUDIO_LAYOUT!r} for Qwen2-Audio, or "
            "`transformers_inputs()`."
        )
    if layout == "megatron-lm":
        return _megatron_lm(batch)
    if layout == "megatron-gpt":
        return _megatron_gpt(batch)
    return _bridge(batch, with_pixels=with_pixels)


def _bridge(batch: PackedBatch, *, with_pixels: bool) -> dict[str, Any]:
    inputs = batch.megatron_inputs()
    inputs["input_ids"] = inputs["tokens"]
    inputs["loss_mask"] = _countable(inputs["loss_mask"])
    for name in ("max_seqlen_q", "max_seqlen_kv"):
        inputs[name] = torch.tensor(inputs[name], dtype=torch.int32)
    # Names of releases before 0.6; later releases read `cu_seqlens_q` if it is present.
    bounds = [batch.cu_seqlens] if batch.cu_seqlens_padded is None else [batch.cu_seqlens_padded, batch.cu_seqlens]
    for name, value in zip(("cu_seqlens", "cu_seqlens_unpadded"), bounds, strict=False):
        inputs[name], inputs[f"{name}_argmin"] = value, torch.tensor(len(value))
    inputs["max_seqlen"] = inputs["max_seqlen_q"]
    visual = {field.name: inputs.pop(field.name, None) for field in fields(VisualInputs)}
    if not with_pixels:
        visual["pixel_values"] = visual["pixel_values_videos"] = None
    has_grids = not (visual["image_grid_thw"] is None and visual["video_grid_thw"] is None)
    inputs["visual_inputs"] = VisualInputs(**visual) if has_grids else None
    if has_grids and (version := early_bridge()):
        raise ConfigError(
            f"layout 'bridge' with images needs Megatron-Bridge 0.6 or later, got {version}, whose vlm_step does not "
            "pass the sample boundaries to the model. Update Megatron-Bridge."
        )
    return inputs


def _bridge_audio(batch: PackedBatch, *, with_features: bool) -> dict[str, Any]:
    features = batch.audio_inputs or {}
    names = {field.name for field in fields(AudioInputs)}
    if batch.position_ids.ndim == 3 or batch.image_token_id is not None or (features and set(features) != names):
        raise ConfigError(
            f"layout {_AUDIO_LAYOUT!r} is for Qwen2-Audio, the model of Megatron-Bridge's audio_lm_step, got samples "
            "of another model. Use `transformers_inputs()`."
        )
    inputs = batch.megatron_inputs()
    starts = padded_bounds(batch)
    places = list(zip(starts.tolist(), batch.cu_seqlens.diff().tolist(), strict=False))[: batch.num_samples]
    end = int(starts[batch.num_samples])
    # Of the padding at the end of the row, a dummy alone is needed.
    if batch.audio_token_id in (tail := batch.input_ids[0, end:].tolist()):
        places.append((end, len(tail) - tail[::-1].index(batch.audio_token_id)))

    def rows(values: torch.Tensor, fill: int = 0) -> torch.Tensor:
        parts = [values[0, start : start + length] for start, length in places]
        return pad_sequence(parts, batch_first=True, padding_value=fill)

    tokens = rows(inputs["tokens"])
    return {
        "tokens": tokens,
        "input_ids": tokens,
        "labels": rows(inputs["labels"], IGNORE_INDEX),
        "loss_mask": rows(_countable(inputs["loss_mask"])),
        "position_ids": rows(inputs["position_ids"]),
        "attention_mask": rows(torch.ones_like(inputs["tokens"])),  # without it, the step omits the pad token's id
        "audio_inputs": AudioInputs(**features) if features and with_features else None,
    }


def _megatron_lm(batch: PackedBatch) -> dict[str, Any]:
    if batch.cu_seqlens_padded is not None:
        raise ConfigError(
            "layout 'megatron-lm' has no boundaries for padded samples. Use pad_multiple=1 or layout 'bridge'."
        )
    if _is_weighted(batch.loss_mask):
        raise ConfigError(
            "layout 'megatron-lm' does not support loss weights, as examples/multimodal uses a loss mask of ones. Set "
            "`loss_weighting` to 'token', or use layout 'bridge' or 'megatron-gpt'."
        )
    if batch.video_grid_thw is not None:
        raise ConfigError(
            "layout 'megatron-lm' has no place for video files: examples/multimodal reads images only. Use layout "
            "'bridge', or pack with `extract_frames`, which stores frames as images."
        )
    end = torch.full_like(batch.labels[:, :1], IGNORE_INDEX)
    with_images = batch.pixel_values is not None and batch.image_grid_thw is not None
    return {
        "tokens": batch.input_ids,
        "labels": torch.cat([batch.labels, end], dim=1),
        "imgs": batch.pixel_values if with_images else torch.zeros(1, 1),
        "num_tiles": (
            batch.image_grid_thw.prod(dim=1).int()
            if batch.image_grid_thw is not None
            else torch.zeros(1, 1, dtype=torch.int32)
        ),
        "cu_lengths": batch.cu_seqlens[None],
        "max_lengths": torch.tensor([[batch.max_seqlen]], dtype=torch.int32),
    }


def _megatron_gpt(batch: PackedBatch) -> dict[str, Any]:
    has_images = batch.pixel_values is not None and (not batch.num_images or any(batch.num_images))
    if has_images or batch.video_grid_thw is not None:  # a dummy image is padding
        raise ConfigError("layout 'megatron-gpt' is for text: pretrain_gpt.py reads no images. Use layout 'bridge'.")
    inputs = batch.megatron_inputs()
    positions = batch.position_ids
    # Boundaries with padding only, as SFTDataset of Megatron-LM returns them: the step broadcasts `cu_seqlens_padded`
    # only with context parallelism, so the other tensor-parallel ranks would attend within different boundaries than
    # the first rank. A padding token follows its sample, so no token attends to it.
    bounds = padded_bounds(batch)
    return {
        "tokens": inputs["tokens"],
        "labels": inputs["labels"],
        "loss_mask": _countable(inputs["loss_mask"]),
        "position_ids": positions[0] if positions.ndim == 3 else positions,  # the text row of M-RoPE
        "cu_seqlens": bounds[None],
        "max_seqlen": torch.tensor([batch.max_seqlen], dtype=torch.int32),
    }


def _is_weighted(loss_mask: torch.Tensor) -> bool:
    return bool(((loss_mask != 0) & (loss_mask != 1)).any())


def _countable(loss_mask: torch.Tensor) -> torch.Tensor:
    """Return weights whose sum, truncated to an integer, is their own sum.

    Megatron divides by `loss_mask.sum().to(int)`, which would be too small by up to 1. The weights are scaled so that
    they sum to the nearest integer, at least 1: the mean of the row stays exact, and its share of the step changes by
    half a target at most (a sum below 0.5 becomes 1). By `loss_weighting`, they sum to the number of targets already,
    up to rounding; a factor slightly above 1 prevents that the integer is too small.
    """
    if not _is_weighted(loss_mask):
        return loss_mask
    total = float(loss_mask.double().sum())
    scale = max(round(total), 1) / total
    scale = 1.0 if abs(scale - 1) < _ABOVE_ROUNDING - 1 else scale
    return loss_mask * (scale * _ABOVE_ROUNDING)
