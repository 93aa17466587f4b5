"""Media of a row: samples with images, videos and audio in, the media tensors of a PackedBatch out."""

from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np
import torch

from energon_packed.encoding import EncodedSample
from energon_packed.encoding.vision.positions import VisionInputs
from energon_packed.errors import BatchError

_MIXED_VISION = "Images of different vision families cannot share a row. Use one encoder for all samples."


def media_tensors(samples: Sequence[EncodedSample], pixel_dtype: torch.dtype | None) -> dict[str, Any]:
    """Join the media of samples into the fields of a PackedBatch.

    Args:
        samples: the samples of a row.
        pixel_dtype: dtype of pixels; None keeps the dtype of the image processor.

    Raises:
        BatchError: the samples come from different encoders.
    """
    tensors = [part(samples, pixel_dtype) for part in (_images, _videos, _vision_inputs, _audio_inputs)]
    return {name: tensor for of_kind in tensors for name, tensor in of_kind.items()}


def _images(samples: Sequence[EncodedSample], dtype: torch.dtype | None) -> dict[str, torch.Tensor | None]:
    """Pixels, grids and patch positions of all images of a row."""
    with_grid = [sample for sample in samples if sample.image_grid_thw is not None]
    if len({sample.patch_positions is None for sample in with_grid}) > 1:
        raise BatchError("Some samples with images have patch positions and some do not. Use one encoder for all.")
    positions = [torch.from_numpy(s.patch_positions) for s in with_grid if s.patch_positions is not None]
    return {
        "pixel_values": _pixel_row([sample.pixel_values for sample in samples], dtype),
        "image_grid_thw": _joined([s.image_grid_thw for s in with_grid if s.image_grid_thw is not None]),
        "patch_positions": _joined(positions),
    }


def _videos(samples: Sequence[EncodedSample], dtype: torch.dtype | None) -> dict[str, torch.Tensor | None]:
    """Pixels, grids and seconds of all video files of a row."""
    with_grid = [sample for sample in samples if sample.video_grid_thw is not None]
    if not with_grid:
        return {}
    seconds = [s.second_per_grid_ts for s in with_grid if s.second_per_grid_ts is not None]
    if seconds and len(seconds) < len(with_grid):
        raise BatchError("Some samples with videos have second_per_grid_ts and some do not. Use one encoder for all.")
    return {
        "pixel_values_videos": _pixel_row([sample.pixel_values_videos for sample in samples], dtype),
        "video_grid_thw": _joined([s.video_grid_thw for s in with_grid if s.video_grid_thw is not None]),
        # Processors return float32, and M-RoPE positions depend on the rounding.
        "second_per_grid_ts": torch.from_numpy(np.concatenate(seconds).astype(np.float32)) if seconds else None,
    }


def _vision_inputs(samples: Sequence[EncodedSample], dtype: torch.dtype | None) -> dict[str, Any]:
    """Arguments of vision towers without patches and grids, and the slices of each sample in them."""
    inputs = [sample.vision_inputs for sample in samples]
    has_grid = any(not (s.image_grid_thw is None and s.video_grid_thw is None) for s in samples)
    if has_grid and any(values is not None for values in inputs):
        raise BatchError(_MIXED_VISION)
    return _fields("vision", inputs, dtype, _MIXED_VISION)


def _audio_inputs(samples: Sequence[EncodedSample], dtype: torch.dtype | None) -> dict[str, Any]:
    """Arguments of the audio encoder, and the slices of each sample in them."""
    mixed = "Audio of different model families cannot share a row. Use one encoder for all samples."
    return _fields("audio", [sample.audio_inputs for sample in samples], dtype, mixed)


def _fields(
    kind: str, of_samples: Sequence[VisionInputs | None], dtype: torch.dtype | None, mixed: str
) -> dict[str, Any]:
    """The fields of a PackedBatch for the inputs of its samples; `mixed`: the error for inputs of several families."""
    inputs = [values for values in of_samples if values is not None]
    if not inputs:
        return {}
    if len({tuple(values.dims.items()) for values in inputs}) > 1:
        raise BatchError(mixed)
    joined, places = _joined_inputs(inputs, dtype)
    slices = iter(places)
    return {
        f"{kind}_inputs": joined,
        f"{kind}_dims": inputs[0].dims,
        f"{kind}_places": [{} if values is None else next(slices) for values in of_samples],
    }


def _joined_inputs(inputs: Sequence[VisionInputs], dtype: torch.dtype | None) -> tuple[dict[str, torch.Tensor], Any]:
    values, places = VisionInputs.joined(inputs)
    if dtype is not None:
        values = {name: value.to(dtype) if value.is_floating_point() else value for name, value in values.items()}
    return values, places


def _pixel_row(pixels: Sequence[torch.Tensor | None], dtype: torch.dtype | None) -> torch.Tensor | None:
    """Pixels of all samples, (patches, patch_dim)."""
    parts = [values for values in pixels if values is not None]
    if not parts:
        return None
    shapes = {tuple(part.shape[1:]) for part in parts}
    if len(shapes) > 1:
        raise BatchError(f"Patches must have one shape, got {sorted(shapes)}. Use one encoder for all samples.")
    if any(part.device.type != "cpu" for part in parts):
        return torch.cat([part.to(dtype=dtype) for part in parts])
    dtype = dtype or reduce(torch.promote_types, (part.dtype for part in parts))
    # One pass converts and joins; `torch.cat` of converted parts would write all pixels twice.
    out = _empty((sum(part.shape[0] for part in parts), *shapes.pop()), dtype)
    start = 0
    for part in parts:
        out[start : start + len(part)].copy_(part)
        start += len(part)
    return out


def _empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor in memory of NumPy, which requests huge pages: filling it is up to four times as fast."""
    if dtype == torch.bfloat16:
        return torch.from_numpy(np.empty(shape, dtype=np.int16)).view(torch.bfloat16)
    if dtype == torch.float32:
        return torch.from_numpy(np.empty(shape, dtype=np.float32))
    return torch.empty(shape, dtype=dtype)


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    return torch.cat(list(parts)) if parts else None
