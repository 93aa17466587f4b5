"""`normalize`: a record in any supported shape becomes one Conversation.

The shapes are in `records/shapes`. Optional in each: `system`, `tools`, `id`, `image` for one image, `video` or
`videos` as lists of frames with one `<video>` each, `patch_positions`, `fps`, `timestamp_decimal`.
"""

from dataclasses import replace
from typing import Any

from energon_packed.errors import Reason, RecordError
from energon_packed.records.conversation import Conversation, Message
from energon_packed.records.fields import OBJECT, Record, read_json_list, read_number
from energon_packed.records.media_fields import Media, read_media, references
from energon_packed.records.shapes import Draft, shape_of


def normalize(record: Any, *, image_root: str | None = None) -> Conversation:
    """Make a Conversation from a record.

        >>> c = normalize({"images": ["cat.jpg"], "prompts": ["What is it?"], "captions": ["A cat."]})
        >>> [(m.role, m.content) for m in c.messages]
        [('user', '<image>What is it?'), ('assistant', 'A cat.')]

    Args:
        record: a mapping, as a JSON line or a table row gives it.
        image_root: folder that relative media paths start from and that no path may leave; None for the working
            directory and no limit.

    Raises:
        RecordError: the record cannot be used; `reason` and `detail` say why.
    """
    if not isinstance(record, OBJECT):
        raise RecordError(Reason.BAD_JSON, f"a record must be an object, not {type(record).__name__}")
    shape = shape_of(record)
    media = read_media(record, image_root)
    draft = shape.read(record, media)
    _add_system(draft, record.get("system"))
    if media.has_videos:
        _place_videos(draft, media)
    if media.inline and media.images:
        raise RecordError(
            Reason.IMAGE_COUNT_MISMATCH, "images stand both in the messages and in the images field; use one"
        )
    ident = record.get("id")
    return Conversation(
        id=None if ident is None else str(ident),
        messages=tuple(draft.messages),
        text=draft.text,
        input_ids=draft.input_ids,
        labels=draft.labels,
        images=tuple(media.inline or media.images),
        patch_positions=_patch_positions(record, image_root),
        tools=read_json_list(record.get("tools"), "tools"),
        video=media.is_video,
        fps=read_number(record.get("fps"), "fps", float),
        timestamp_decimal=read_number(record.get("timestamp_decimal"), "timestamp_decimal", int),
    )


def _add_system(draft: Draft, system: Any) -> None:
    """The system field as the first message."""
    if not system or draft.input_ids is not None:
        return
    if draft.text is not None:
        raise RecordError(Reason.BAD_ROLE, "a text record has a system field, which no template would render")
    if not isinstance(system, str):
        raise RecordError(Reason.MISSING_FIELD, f"system must be text, not {type(system).__name__}")
    first = draft.messages[0] if draft.messages else None
    if first is None or first.role != "system":
        draft.messages.insert(0, Message("system", system))
    elif first.content != system:
        raise RecordError(Reason.BAD_ROLE, "the record has a system field and another system message")


def _place_videos(draft: Draft, media: Media) -> None:
    """Frames in the place of each `<video>`."""
    if draft.input_ids is not None:
        if media.videos:
            raise RecordError(Reason.UNSUPPORTED_MEDIA, "a record of input_ids has videos; pass the frames as images")
        return
    if draft.text is not None:
        draft.text = media.place([draft.text])[0]
        return
    texts = media.place([message.content for message in draft.messages])
    draft.messages = [replace(m, content=text) for m, text in zip(draft.messages, texts, strict=True)]


def _patch_positions(record: Record, root: str | None) -> tuple[Any, ...]:
    return tuple(references(record, ("patch_positions",), root))
