"""`normalize`: a record in any supported shape becomes one Conversation.

The shapes are in `records/shapes`. Optional in each: `system` (or `system_prompt`, `system_message`), `tools`, `id`,
`image` for one image, `video` or `videos` as lists of frames with one `<video>` each, `patch_positions`, `fps`,
`timestamp_decimal`. A field that nothing reads is in `unused_fields` of the conversation, or costs the record.
"""

from typing import Any

from energon_packed.errors import Reason, RecordError
from energon_packed.records.accounting import unused_fields
from energon_packed.records.conversation import Conversation
from energon_packed.records.fields import OBJECT, check_writable, read_number
from energon_packed.records.media_fields import read_media, references
from energon_packed.records.placing import place_media
from energon_packed.records.plain import plain_conversation
from energon_packed.records.shapes import shape_of
from energon_packed.records.system import add_system
from energon_packed.records.tools import read_tools, without_written_calls

FPS_STORED = "fps stored, no timestamps in the text"
"""Note of a conversation whose frames have times that the model is not told."""


def normalize(record: Any, *, image_root: str | None = None) -> Conversation:
    """Make a Conversation from a record.

        >>> c = normalize({"images": ["cat.jpg"], "prompts": ["What is it?"], "captions": ["A cat."]})
        >>> [(m.role, m.content) for m in c.messages]
        [('user', '<image>What is it?'), ('assistant', 'A cat.')]

    Args:
        record: a mapping, as a JSON line or a table row gives it, or a list of messages.
        image_root: folder that relative media paths start from and that no path may leave; None for the working
            directory and no limit.

    Raises:
        RecordError: the record cannot be used; `reason` and `detail` say why.
    """
    if isinstance(record, list) and record and all(isinstance(turn, OBJECT) for turn in record):
        record = {"messages": record}
    if not isinstance(record, OBJECT):
        raise RecordError(Reason.BAD_JSON, f"a record must be an object, not {type(record).__name__}")
    shape = shape_of(record)
    if (plain := plain_conversation(record, shape)) is not None:
        return plain
    media = read_media(record, image_root, with_images=not shape.reads_images)
    unused = () if shape.fields is None else unused_fields(record, shape.fields)
    draft = shape.read(record, media)
    add_system(draft, record, shape)
    place_media(draft, media, shape)
    tools = read_tools(record, draft, media)
    draft.messages = [without_written_calls(m, media) if m.extra else m for m in draft.messages]
    if media.unused_fields:
        unused = tuple(sorted({*unused, *media.unused_fields}))
    check_writable(tools, "tools")
    for message in draft.messages:
        if message.extra:
            check_writable(message.extra, f"the {message.role} turn")
    ident, fps = record.get("id"), read_number(record.get("fps"), "fps", float)
    images = tuple(media.inline or media.images)
    if fps and images:
        media.notes.append(FPS_STORED)
    return Conversation(
        id=None if ident is None else str(ident),
        messages=tuple(draft.messages),
        text=draft.text,
        input_ids=draft.input_ids,
        labels=draft.labels,
        images=images,
        patch_positions=tuple(references(record, ("patch_positions",), image_root)),
        tools=tools,
        video=media.is_video,
        fps=fps,
        timestamp_decimal=read_number(record.get("timestamp_decimal"), "timestamp_decimal", int),
        unused_fields=unused,
        notes=tuple(media.notes),
    )
