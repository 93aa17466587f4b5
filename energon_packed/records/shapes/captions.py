"""Prompts and captions: `{"images": [...], "prompts": [...], "captions": [...]}`, flat or as lists of lists.

Without any placeholder, images stand before the first prompt; a list of one image list per prompt puts each before its
own. This is the input of LLaVA-OneVision-2's offline packer.
"""

from typing import ClassVar

from energon_packed.errors import Reason, RecordError
from energon_packed.records.conversation import IMAGE_PLACEHOLDER, Message
from energon_packed.records.fields import COMMON_FIELDS, Record, flatten, is_given, read_text, unsupported
from energon_packed.records.media_fields import VIDEO_PLACEHOLDER, Media
from energon_packed.records.shapes.shape import Draft, Shape


class Captions(Shape):
    """Alternating prompts and captions."""

    key = "captions"
    fields: ClassVar[frozenset[str]] = COMMON_FIELDS | {"captions", "prompts"}
    images_lead: ClassVar[bool] = True

    def read(self, record: Record, media: Media) -> Draft:
        """User and assistant turns."""
        captions = [read_text(item, "a caption") for item in flatten(record["captions"])]
        given = record.get("prompts")
        if given is None and is_given(record.get("prompt")):
            raise unsupported("prompt", remedy="beside captions it is likely meant as prompts; rename it")
        prompts = [read_text(item, "a prompt") for item in flatten(given)] if given is not None else []
        if not captions:
            raise RecordError(Reason.EMPTY, "captions is an empty list")
        prompts = prompts or [""] * len(captions)
        if len(prompts) != len(captions):
            raise RecordError(
                Reason.MISSING_FIELD,
                f"{len(prompts)} prompts for {len(captions)} captions; one prompt per caption is needed",
            )
        if not any(IMAGE_PLACEHOLDER in text for text in (*prompts, *captions)):
            for turn, count in enumerate(_images_by_turn(media, len(prompts))):
                prompts[turn] = IMAGE_PLACEHOLDER * count + prompts[turn]
            if media.videos and not any(VIDEO_PLACEHOLDER in text for text in (*prompts, *captions)):
                prompts[0] = VIDEO_PLACEHOLDER * len(media.videos) + prompts[0]
        messages = []
        for prompt, caption in zip(prompts, captions, strict=True):
            messages += [Message("user", prompt), Message("assistant", caption)]
        return Draft(messages=messages)


def _images_by_turn(media: Media, turns: int) -> list[int]:
    """Images before each prompt: all before the first, or as a list of lists assigns them."""
    if media.per_turn is None:
        return [len(media.images)]
    if len(media.per_turn) != turns:
        raise RecordError(
            Reason.IMAGE_COUNT_MISMATCH,
            f"images is a list of {len(media.per_turn)} lists for {turns} prompts; "
            "pass one list per prompt, or placeholders",
        )
    return media.per_turn
