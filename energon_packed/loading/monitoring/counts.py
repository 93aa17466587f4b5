"""Batches in, their counts out: tokens, targets, padding, samples, tokens by source, and the sizes that cost compute.

| batch | source of its counts |
|---|---|
| PackedBatch | its own attributes |
| `transformers_inputs()`, batches of TRL | `cu_seq_lens_q`; otherwise restarting `position_ids`, or `attention_mask` |
| `megatron_inputs()` and the layouts of Megatron | `cu_seqlens_q`, `cu_seqlens` or `cu_lengths`, `padding_mask` |

A dict has no sources. Its padding is known only with `padding_mask` or `attention_mask`. Padding of
`transformers_inputs()` and of the layouts `megatron-lm` and `megatron-gpt` counts as tokens, and their padding tail as
a sample.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch

from energon_packed.encoding import IGNORE_INDEX
from energon_packed.errors import BatchError
from energon_packed.loading.collation.batch import PackedBatch, source_names

_TOKENS = ("input_ids", "tokens")
_BOUNDS = ("cu_seqlens_q", "cu_seq_lens_q", "cu_seqlens", "cu_lengths")
_PADDED_BOUNDS = ("cu_seqlens_q_padded", "cu_seqlens_padded")


class BatchCounts(NamedTuple):
    """Counts of one batch.

    Attributes:
        tokens: tokens of samples, without padding.
        padding: other tokens of the batch; all tokens of a row without targets, which replaces a missing row.
        targets: tokens that the model is trained to predict.
        samples: samples.
        squares: sum of the squared lengths of the segments, padding included.
        patches: patches of images and videos.
        patch_squares: sum of the squared patches of each image, and of each temporal patch of a video.
        sources: tokens by the dataset of their sample; {} if the batch has no sources.
    """

    tokens: int
    padding: int
    targets: int
    samples: int
    squares: int
    patches: int
    patch_squares: int
    sources: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedBatch:
    """Counts of a batch that may still be on a device, so that the host need not wait for it.

    Attributes:
        tokens: all tokens of the batch.
        numbers: int64 (5,): padding, targets, squares, patches and patch squares.
        lengths: int64 (S,), tokens of each segment; 0 for padding.
        sources: dataset of each sample, or [].
        is_empty: the row replaces a missing row.
    """

    tokens: int
    numbers: torch.Tensor
    lengths: torch.Tensor
    sources: list[str]
    is_empty: bool

    def read(self) -> BatchCounts:
        """Return the counts as numbers."""
        padding, targets, squares, patches, patch_squares = self.numbers.tolist()
        lengths = [0] if self.is_empty else self.lengths.tolist()
        tokens = 0 if self.is_empty else self.tokens - padding
        by_source: Counter[str] = Counter()
        for name, length in zip(self.sources, lengths, strict=False):
            by_source[name] += length
        return BatchCounts(
            tokens=tokens,
            padding=self.tokens - tokens,
            targets=targets,
            samples=sum(length > 0 for length in lengths),
            squares=squares,
            patches=patches,
            patch_squares=patch_squares,
            sources={} if self.is_empty else dict(by_source),
        )


def count_batch(batch: Any) -> CountedBatch:
    """Count a batch.

    Args:
        batch: PackedBatch, a dict of the table above, or (name, batch) of a JointLoader.

    Raises:
        BatchError: a batch of another type.
    """
    if isinstance(batch, tuple) and len(batch) == 2:
        batch = batch[1]
    if isinstance(batch, PackedBatch):
        given: Mapping[str, Any] = {part.name: getattr(batch, part.name) for part in fields(batch)}
    elif isinstance(batch, Mapping) and any(name in batch for name in _TOKENS):
        given = batch
    else:
        raise BatchError(
            f"`batch` must be a PackedBatch or a dict with `input_ids`, got {type(batch).__name__}. Pass the batch of "
            "the loader."
        )
    tokens = _first(given, *_TOKENS)
    padding = _padding(given)
    segments, lengths = _segments(given, tokens, padding)
    patches, patch_squares = _patches(given, tokens.device)
    between = segments.sum() - lengths.sum() if padding is None else padding.sum()
    labels = given.get("labels")
    targets = segments.new_zeros(()) if labels is None else (labels != IGNORE_INDEX).sum()
    numbers = [between, targets, (segments * segments).sum(), patches, patch_squares]
    return CountedBatch(
        tokens=tokens.numel(),
        numbers=torch.stack([number.to(tokens.device, torch.int64) for number in numbers]),
        lengths=lengths,
        sources=source_names(batch.sources) if isinstance(batch, PackedBatch) and any(batch.sources) else [],
        is_empty=isinstance(batch, PackedBatch) and not batch.has_targets,
    )


def _first(given: Mapping[str, Any], *names: str) -> Any:
    """First value that is not None, or None."""
    return next((given[name] for name in names if given.get(name) is not None), None)


def _padding(given: Mapping[str, Any]) -> torch.Tensor | None:
    """True at padding, bool (B, T); None if the batch does not mark it."""
    mask: torch.Tensor | None = given.get("padding_mask")
    attention = given.get("attention_mask")
    if mask is None and attention is not None and attention.ndim == 2:
        mask = attention == 0
    return mask


def _segments(
    given: Mapping[str, Any], tokens: torch.Tensor, padding: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lengths of all segments, with their padding, and of their samples, 0 for padding; int64 (S,) each."""
    bounds = _first(given, *_BOUNDS)
    if bounds is not None:
        bounds = bounds.flatten().long()
        padded = _first(given, *_PADDED_BOUNDS)
        padded = bounds if padded is None else padded.flatten().long()
        lengths = bounds.diff()
        if padding is not None:  # a segment that starts with padding is the tail
            starts = padded[:-1].clamp(max=tokens.numel() - 1)  # repeated entries at the end are empty segments
            lengths = lengths * ~padding.flatten().to(lengths.device)[starts]
        return padded.diff(), lengths
    rows, width = tokens.shape
    positions = given.get("position_ids")
    if positions is not None and padding is None:
        starts = (positions[0] if positions.ndim == 3 else positions).flatten().eq(0).nonzero()[:, 0]
        segments = torch.cat([starts, starts.new_tensor([tokens.numel()])]).diff()
        return segments, segments
    segments = torch.full((rows,), width, dtype=torch.int64, device=tokens.device)
    return segments, segments if padding is None else width - padding.sum(dim=1)


def _patches(given: Mapping[str, Any], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Patches of images and videos and positions of audio, and the sum of the squares of each; int64 () each."""
    visual = given.get("visual_inputs")
    media = given if visual is None else vars(visual)
    sums = torch.zeros(2, dtype=torch.int64, device=device)
    for name in ("image_grid_thw", "video_grid_thw"):
        if (grids := media.get(name)) is not None:
            frames, areas = grids[:, 0], grids[:, 1] * grids[:, 2]
            sums = sums + torch.stack([(frames * areas).sum(), (frames * areas * areas).sum()]).to(device)
    features = given.get("input_features", (given.get("audio_inputs") or {}).get("input_features"))
    if features is not None and features.ndim == 3:  # (files, mel bins, frames) or (files, frames, mel bins)
        files, length = features.shape[0], -(-max(features.shape[1:]) // 2)
        sums = sums + sums.new_tensor([files * length, files * length**2])
    if (images := given.get("num_tiles")) is not None:  # of the layout megatron-lm: patches of each image
        images = images.long()
        sums = sums + torch.stack([images.sum(), (images * images).sum()]).to(device)
    return sums[0], sums[1]
