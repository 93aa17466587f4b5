"""Timestamps of frames that are images: positions of patches and `fps` -> text before the tokens of each frame.

    <image>\\n<image>\\nWhat?   ─►   <0.0 seconds><image>\\n<1.5 seconds><image>\\nWhat?

The trainer of LLaVA-OneVision-2 encodes a record with `fps` in this way. A frame is all consecutive tokens whose
patches have the same t. An image usually has the patches of a single frame; an image that a video codec composed has
patches of several frames, and the placeholder of a frame then has their tokens. Without patch positions, every t is 0,
so that the images are one frame. Each group of images with only white space between them is replaced, with one line
break after it; other text between images stays. The trainer replaces everything from the first to the last image of a
message. Source: `process_sft_qa`, `compute_frame_timestamps` and `_rewrap_vision_by_frame` of `Qwen2VLTaskEncoder` in
EvolvingLMMs-Lab/LLaVA-OneVision-2. Its times belong to the sorted values of t; here each frame has its own.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from energon_packed.encoding.vision.positions import ImageRun, Int64
from energon_packed.errors import Reason, RecordError
from energon_packed.records import IMAGE_PLACEHOLDER, Conversation

_GROUP = re.compile(rf"{IMAGE_PLACEHOLDER}(?:\s*{IMAGE_PLACEHOLDER})*\n?")
_MOST_DECIMALS = 9


def has_timestamps(conversation: Conversation) -> bool:
    """Whether a family with `writes_timestamps` writes timestamps into the text of a conversation."""
    return bool(
        conversation.timestamps is not False
        and conversation.images
        and not conversation.videos  # their frames have the rate of the file
        and (conversation.fps or 0) > 0
        and conversation.messages  # the trainer has no documents
    )


def with_timestamps(
    conversation: Conversation, runs: Sequence[ImageRun], times: Int64 | None
) -> tuple[Conversation, list[ImageRun]]:
    """Write the time of each frame into the text.

    Args:
        conversation: for which `has_timestamps` is true.
        runs: tokens of each image.
        times: t of each token of all images, int64 (tokens,), in the order of the tokens; None for 0.

    Returns:
        (conversation with a placeholder for each frame, tokens of each frame).

    Raises:
        RecordError: `unsupported_field`, if `timestamp_decimal` is negative or too large.
    """
    decimals = conversation.timestamp_decimal or 1  # 0 means 1, as in the trainer
    if not 0 < decimals <= _MOST_DECIMALS:
        raise RecordError(
            Reason.UNSUPPORTED_FIELD, f"`timestamp_decimal` must be 1 to {_MOST_DECIMALS}, got {decimals}. Correct it"
        )
    lengths = [run.length for run in runs]
    if times is None:
        times = np.zeros(sum(lengths), dtype=np.int64)
    ends = np.cumsum([0, *lengths])
    frames: list[ImageRun] = []
    done = 0  # images with a time so far
    fps = conversation.fps or 1.0

    def spelled(match: re.Match[str]) -> str:
        nonlocal done
        start, done = done, done + match[0].count(IMAGE_PLACEHOLDER)
        texts = []
        for t, length in _frames(times[ends[start] : ends[done]]):
            frames.append(ImageRun(length))
            texts.append(f"<{round(t / fps, decimals):.{decimals}f} seconds>{IMAGE_PLACEHOLDER}\n")
        return "".join(texts)

    messages = [message._replace(content=_GROUP.sub(spelled, message.content)) for message in conversation.messages]
    # Only the number of images counts for the text.
    images = (conversation.images[0],) * len(frames)
    return replace(conversation, messages=tuple(messages), images=images, patch_positions=()), frames


def _frames(times: Int64) -> Iterator[tuple[int, int]]:
    """Yield (t, tokens) of each group of consecutive tokens with the same t."""
    starts = [0, *(np.flatnonzero(np.diff(times)) + 1).tolist()]
    for start, end in zip(starts, [*starts[1:], len(times)], strict=True):
        yield int(times[start]), end - start
