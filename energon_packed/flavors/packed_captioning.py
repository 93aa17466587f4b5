"""PackedCaptioningSample: a pack of image and text samples, encoded at training time."""

from collections.abc import Mapping
from typing import Any

from megatron.energon import edataclass

from energon_packed.conversation import IMAGE_PLACEHOLDER, Conversation, Message
from energon_packed.flavors.base import PackSample, references
from energon_packed.shards.layouts import captioning


@edataclass
class PackedCaptioningSample(PackSample):
    """S samples that share a row; lists have one entry per sample.

    Attributes:
        images: bytes of the images of each sample.
        prompts: user turns of each sample.
        captions: assistant turns of each sample; a plain text has no prompt and one caption.
        sample_count: S.
        ids: names, or None in data from other packers.
        systems: system prompts, or None.
        lengths: tokens, or None in data from other packers.
        patch_positions: bytes of the .npy files of each sample, or None.
        timestamp_decimal: decimals of frame timestamps, or None.
        fps: frames per second, or None.
        videos: whether the images are frames of a video, or None.
        truncate: tokens that samples were cut to, or None.
        truncated: which samples were, or None.
    """

    images: list[list[bytes]]
    prompts: list[list[str]]
    captions: list[list[str]]
    sample_count: int
    ids: list[str | None] | None = None
    systems: list[str | None] | None = None
    lengths: list[int] | None = None
    patch_positions: list[list[bytes]] | None = None
    timestamp_decimal: list[int | None] | None = None
    fps: list[float | None] | None = None
    videos: list[bool] | None = None
    truncate: int | None = None
    truncated: list[bool] | None = None

    def conversations(self) -> list[Conversation]:
        """The samples inside, in order."""
        return [self._conversation(i) for i in range(self.sample_count)]

    def expected_lengths(self) -> list[int | None]:
        """Recorded tokens of each sample."""
        return [None] * self.sample_count if self.lengths is None else list(self.lengths)

    def truncate_to(self) -> int | None:
        """Tokens that samples were cut to, or None."""
        return self.truncate

    def _conversation(self, i: int) -> Conversation:
        prompts, captions = list(self.prompts[i]), self.captions[i]
        if self.lengths is None and prompts and not any(IMAGE_PLACEHOLDER in t for t in (*prompts, *captions)):
            prompts[0] = IMAGE_PLACEHOLDER * len(self.images[i]) + prompts[0]  # as other packers leave it out
        turns = [("user", prompts, 0), ("assistant", captions, 1)]
        ordered = sorted((2 * j + shift, role, text) for role, texts, shift in turns for j, text in enumerate(texts))
        messages = tuple(Message(role, text) for _, role, text in ordered)
        system = self.systems[i] if self.systems else None
        is_text = not prompts and system is None and len(captions) == 1
        return Conversation(
            id=self.ids[i] if self.ids else None,
            messages=() if is_text else (Message("system", system), *messages) if system is not None else messages,
            text=captions[0] if is_text else None,
            images=references(self.images[i]),
            patch_positions=references(self.patch_positions[i]) if self.patch_positions else (),
            video=bool(self.videos and self.videos[i]),
            fps=self.fps[i] if self.fps else None,
            timestamp_decimal=self.timestamp_decimal[i] if self.timestamp_decimal else None,
        )


def sample_loader(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a PackedCaptioningSample from the parts of a tar member."""
    return captioning.read(raw)


def part_filter(part: str) -> bool:
    """Which parts are read from the tar."""
    return part == "json" or part.startswith("img")
