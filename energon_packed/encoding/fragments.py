"""Split samples that are longer than a row: the tokens of a sample -> Fragments, each of at most a row.

    tokens       0 1 2 3 4 5 6 7 8 9        rows of 4 tokens, an overlap of 1
    fragment 0   0 1 2 3
    fragment 1         3 4 5 6              token 3 is context: token 4, which it predicts, is a target here
    fragment 2               6 7 8 9

Every token but the first of the sample is a target in one fragment (if it is supervised), because the first token of a
fragment, which nothing predicts, is a target of the fragment before. All fragments but the last fill a row, unless an
image is at the end of the row: an image, and the two tokens around it that may mark it, stay together.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from energon_packed.encoding.sample import IGNORE_INDEX, EncodedSample
from energon_packed.errors import Reason, RecordError

Int64 = npt.NDArray[np.int64]
Fragments = npt.NDArray[np.void]
"""Fragments, structured (f,) of dtype `FRAGMENT`."""
FRAGMENT = np.dtype(
    [
        ("record", np.int64),
        ("number", np.int32),
        ("start", np.int64),
        ("stop", np.int64),
        ("context", np.int32),
        ("first_image", np.int32),
        ("last_image", np.int32),
        ("supervised", np.int32),
        ("total", np.int64),
        ("member", np.int8),
    ]
)
"""Fragment `number` of a record: its tokens [start, stop) of `total`, the first `context` are not targets, its
images [first_image, last_image) and its number of targets. `member` is 1 if the record is a group of samples, and the
fragment one of them. In a list of samples, `number` -1 is a complete record."""
_MARGIN = 2  # tokens beside an image that may mark it, as <|vision_start|> does


def fragment_id(ident: str, number: int) -> str:
    """Return the id of a fragment, such as `doc-7#0`."""
    return f"{ident}#{number}"


def text_fragments(totals: npt.NDArray[np.integer], max_length: int, overlap: int) -> Fragments:
    """Split samples of text without images, of which every token is supervised; `record` is the index of the sample.

    Args:
        totals: integers (n,), tokens of each sample.
        max_length: tokens of a row.
        overlap: tokens that a fragment repeats from the fragment before, 1 to `max_length - 1`.
    """
    step = max_length - overlap
    counts = np.maximum(-(-(totals.astype(np.int64) - overlap) // step), 1)  # fragments of each sample
    found = np.zeros(int(counts.sum()), dtype=FRAGMENT)
    found["record"] = np.repeat(np.arange(len(totals)), counts)
    found["number"] = np.arange(len(found)) - np.repeat(np.cumsum(counts) - counts, counts)
    found["start"] = found["number"].astype(np.int64) * step
    found["total"] = totals[found["record"]]
    found["stop"] = np.minimum(found["start"] + max_length, found["total"])
    found["context"] = np.where(found["number"] > 0, overlap, 0)
    found["supervised"] = found["stop"] - found["start"] - np.maximum(found["context"], 1)
    return found


def split_sample(sample: EncodedSample, max_length: int, overlap: int, num_images: int | None = None) -> Fragments:
    """Split the tokens of a sample; fragments without a target are left out, as they train nothing.

    Args:
        sample: the sample; its pixels may be missing.
        max_length, overlap: as for `text_fragments`.
        num_images: images of the sample; None for those that it has.

    Raises:
        RecordError: `overlong`, if a row has no place to split the sample, or if it has a video file;
            `no_supervised_tokens` without a target.
    """
    input_ids, labels, total = sample.input_ids, sample.labels, len(sample)
    if sample.video_token_id is not None and (input_ids == sample.video_token_id).any():
        raise RecordError(Reason.OVERLONG, f"{total} tokens; a sample with video files cannot be split")
    num_images = _num_images(sample) if num_images is None else num_images
    # Start and end of each run of image tokens: int64 (images, 2).
    is_image = np.zeros(total, dtype=bool) if sample.image_token_id is None else input_ids == sample.image_token_id
    edges = np.flatnonzero(np.diff(np.concatenate([[False], is_image, [False]]))).reshape(-1, 2)
    if num_images and len(edges) != num_images:
        raise RecordError(
            Reason.OVERLONG,
            f"{total} tokens; it cannot be split between its {num_images} images, whose tokens are {len(edges)} runs",
        )
    blocked = np.zeros(total + 1, dtype=bool)
    for first, last in edges.tolist():
        # One token more after an image, because the next fragment repeats at least one token of text.
        blocked[max(first - _MARGIN + 1, 0) : last + _MARGIN + 1] = True
    blocked[total] = False
    rows: list[tuple[Any, ...]] = []
    start = context = 0
    while True:
        stop = min(start + max_length, total)
        while blocked[stop] and stop > start + context:
            stop -= 1
        if stop <= start + context:
            raise RecordError(
                Reason.OVERLONG, f"{total} tokens; a row of {max_length} has no place to split it beside its images"
            )
        images = np.searchsorted(edges[:, 0], [start, stop]).tolist()
        supervised = int((labels[start + max(context, 1) : stop] != IGNORE_INDEX).sum())
        if supervised:
            rows.append((0, len(rows), start, stop, context, *images, supervised, total, 0))
        if stop == total:
            break
        # The context must not contain a part of an image, nor the tokens that mark its end.
        after_image = int(edges[images[1] - 1, 1]) + _MARGIN if images[1] else 0
        start = max(stop - overlap, after_image)
        context = stop - start
    if not rows:
        raise RecordError(Reason.NO_SUPERVISED_TOKENS, f"{total} tokens, none of which is a target")
    return np.array(rows, dtype=FRAGMENT)


def fragment_labels(labels: Int64, fragment: np.void) -> Int64:
    """Return the labels of a fragment's tokens from the labels of the sample: int64 (L,)."""
    masked = labels[fragment["start"] : fragment["stop"]].copy()
    masked[: fragment["context"]] = IGNORE_INDEX
    return masked


def fragment_of(sample: EncodedSample, fragment: np.void) -> EncodedSample:
    """Return a fragment as a sample, with its own images; positions start at 0 again.

    Raises:
        RecordError: `overlong`, if the inputs of the vision tower cannot be divided by image.
    """
    tokens = slice(int(fragment["start"]), int(fragment["stop"]))
    images = slice(int(fragment["first_image"]), int(fragment["last_image"]))
    columns = sample.token_columns(tokens) | {"labels": fragment_labels(sample.labels, fragment)}
    if "position_ids" in columns:  # a fragment starts with text, whose position is equal in t, h and w
        columns["position_ids"] = columns["position_ids"] - columns["position_ids"][:, :1]
    ident = fragment_id(str(sample.id), int(fragment["number"]))
    return replace(sample, id=ident, **columns, **_media_of(sample, images))


def _num_images(sample: EncodedSample) -> int:
    """Number of images, also if they have one grid (`trained_grids`): images have one step in time."""
    return sample.num_images if sample.image_grid_thw is None else int(sample.image_grid_thw[:, 0].sum())


def _media_of(sample: EncodedSample, images: slice) -> dict[str, Any]:
    """Inputs of the vision tower for some images of a sample."""
    if not sample.num_images or (images.start, images.stop) == (0, _num_images(sample)):
        return {}
    if images.start == images.stop:
        return dict.fromkeys(("pixel_values", "image_grid_thw", "patch_positions", "vision_inputs"))
    if sample.vision_inputs is not None:
        inputs = sample.vision_inputs
        if any(tensor.shape[inputs.dims[name]] != inputs.images for name, tensor in inputs.values.items()):
            raise RecordError(
                Reason.OVERLONG, f"{len(sample)} tokens; the tiles of its images cannot be divided between fragments"
            )
        count, dims = images.stop - images.start, inputs.dims
        values = {name: tensor.narrow(dims[name], images.start, count) for name, tensor in inputs.values.items()}
        return {"vision_inputs": replace(inputs, values=values, images=count)}
    assert sample.image_grid_thw is not None
    grids = sample.image_grid_thw
    # In families that join the grids of images with patch positions, a step of the joined grid is an image.
    steps = grids.repeat_interleave(grids[:, 0], dim=0)
    steps[:, 0] = 1
    ends = [0, *steps.prod(dim=1).cumsum(0).tolist()]
    patches = slice(ends[images.start], ends[images.stop])
    pixels, positions = sample.pixel_values, sample.patch_positions
    own = steps[images]
    if len(grids) < len(steps):
        own = own[:1] * own.new_tensor([len(own), 1, 1])
    return {
        "image_grid_thw": own,
        "pixel_values": None if pixels is None else pixels[patches],
        "patch_positions": None if positions is None else positions[patches],
    }
