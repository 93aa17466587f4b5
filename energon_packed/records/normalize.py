"""`normalize`: a record in any supported shape becomes one Conversation.

The shapes are in `records/shapes`. Optional in each: `system` (or `system_prompt`, `system_message`), `tools`, `id`,
`image` for one image, `video` or `videos` as lists of frames with one `<video>` each, `patch_positions`, `fps`,
`timestamp_decimal`. A field that nothing reads is in `unused_fields` of the conversation, or costs the record.

Plain records: turns with a role and a text, perhaps an id, and nothing else. Most files hold no other.

They are read in a few passes over all turns, each by one call of the interpreter. What is unusual in any way is left
to the shapes, which also say what is wrong; both ways give the same conversation.

The system prompt of a record: in any of `SYSTEM_FIELDS`, or in `instruction` beside a conversation.

An `instruction` that repeats a user turn (Magpie) is none.
"""

from functools import lru_cache
from typing import Any

from energon_packed.errors import Reason, RecordError
from energon_packed.records.conversation import IMAGE_PLACEHOLDER, Conversation, Message, plain_messages
from energon_packed.records.fields import (
    OBJECT,
    SYSTEM_FIELDS,
    Record,
    check_writable,
    is_given,
    read_number,
    read_objects,
    read_text,
    unsupported,
    unused_fields,
)
from energon_packed.records.media_fields import VIDEO_PLACEHOLDER, Media, read_media, references
from energon_packed.records.record_formats import PartialConversation, RecordFormat, shape_of
from energon_packed.records.record_formats.messages import Messages, ShareGPT, read_gemini_text
from energon_packed.records.tools import read_tools, without_written_calls
from energon_packed.records.turns import PLAIN_ROLES, keys_of

FPS_STORED = "fps stored, no timestamps in the text"
"""Note of a conversation whose frames have times that the model is not told."""
NO_PLACEHOLDER = "no placeholder: images stand before the first user turn"
"""Note of a conversation whose images or videos stand before the first user turn because nothing says where."""
_SHAPES = (Messages, ShareGPT)
_MEDIA = "<im"  # begins `<image>` and `<img>`
_NAMES = frozenset((*SYSTEM_FIELDS, "instruction"))


def place_media(draft: PartialConversation, media: Media, shape: RecordFormat) -> None:
    """Give images and videos without any placeholder their place, and put frames in the place of each `<video>`.

    Args:
        draft: of a record; its texts are changed.
        media: of the record; its images are put in order.
        shape: of the record; says whether images without placeholders are what it means.

    Raises:
        RecordError: media are given twice, or placeholders and videos do not match.
    """
    if any("<img>" in message.content for message in draft.messages):  # of shapes that have no turns of their own
        draft.messages = [message._replace(content=media.take_tagged(message.content)) for message in draft.messages]
    if media.inline and media.images:
        raise RecordError(
            Reason.IMAGE_COUNT_MISMATCH, "images stand both in the messages and in the images field; use one"
        )
    if draft.input_ids is not None:
        if media.videos:
            raise RecordError(Reason.UNSUPPORTED_MEDIA, "a record of input_ids has videos; pass the frames as images")
        return
    if media.elsewhere and not (media.images or media.inline or media.videos):
        raise RecordError(
            Reason.UNSUPPORTED_MEDIA,
            f"{media.elsewhere[0]} names an image that the record does not hold; give its path as image, with a `map` "
            "or an `adapter`",
        )
    if not (media.images or media.has_videos):
        return
    texts = [draft.text] if draft.text is not None else [message.content for message in draft.messages]
    texts = _stand_for_frames(texts, media)
    leading = _without_placeholder(texts, media)
    if leading and draft.messages:
        first = next((place for place, message in enumerate(draft.messages) if message.role == "user"), None)
        if first is not None:
            texts[first] = leading + texts[first]
            if not shape.images_first:
                media.notes.append(NO_PLACEHOLDER)
    if media.has_videos:
        texts = media.place(texts)
    if draft.text is not None:
        draft.text = texts[0]
    else:
        draft.messages = [
            message if message.content == text else message._replace(content=text)
            for message, text in zip(draft.messages, texts, strict=True)
        ]


def _without_placeholder(texts: list[str], media: Media) -> str:
    """Placeholders of the images, and of the videos, of which no text places any."""
    found = ""
    for placeholder, size in ((IMAGE_PLACEHOLDER, len(media.images)), (VIDEO_PLACEHOLDER, len(media.videos))):
        if not any(placeholder in text for text in texts):
            found += placeholder * size
    return found


def _stand_for_frames(texts: list[str], media: Media) -> list[str]:
    """Texts with `<video>` where one placeholder stands for the frames of a video.

    `<image>` does, where the record has videos, no images, and no `<video>`. `<video>` does, where the frames are in
    the images field.
    """
    images = sum(text.count(IMAGE_PLACEHOLDER) for text in texts)
    videos = sum(text.count(VIDEO_PLACEHOLDER) for text in texts)
    if media.videos and not media.images and not videos and images == len(media.videos):
        return [text.replace(IMAGE_PLACEHOLDER, VIDEO_PLACEHOLDER) for text in texts]
    if not media.videos and len(media.images) > 1 and videos == 1 and not images:
        media.videos, media.images = [media.images], []
        media.has_videos = media.is_video = True
    elif media.is_video and not media.videos and len(media.images) > 1 and images == 1 and not videos:
        return [text.replace(IMAGE_PLACEHOLDER, IMAGE_PLACEHOLDER * len(media.images)) for text in texts]
    return texts


def plain_conversation(record: Record, shape: RecordFormat) -> Conversation | None:
    """The conversation of a record that holds nothing but turns and an id; None for any other record."""
    if not isinstance(shape, _SHAPES) or len(record) > 1 + ("id" in record):
        return None
    turns = record.get(shape.key)
    if turns.__class__ is not list or not turns or turns[0].__class__ is not dict:
        return None
    keys = keys_of(tuple(turns[0]))
    if not keys.is_plain:
        return None
    try:
        names = tuple([turn[keys.role[0]] for turn in turns])
        contents = [turn[keys.content[0]] for turn in turns]
        has_media = _MEDIA in "".join(contents)  # a TypeError for what is no text
        roles, speakers = _roles(names)
    except (TypeError, KeyError):
        return None
    if has_media or not roles or sum(map(len, turns)) != 2 * len(turns):
        return None
    ident = record.get("id")
    for place in speakers:
        if contents[place] and not contents[place].isspace():
            return Conversation.of_checked(None if ident is None else str(ident), plain_messages(roles, contents))
    return None


@lru_cache(maxsize=1024)
def _roles(names: tuple[Any, ...]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """(role of each turn, turns of which one must say something); ((), ()) where the turns cannot be used as they are.

    As in `Conversation`: only the first may be a system message, and where a turn is an assistant's, one of these must
    not be empty.
    """
    roles = tuple([PLAIN_ROLES.get(name, "") for name in names])
    if "" in roles or "system" in roles[1:]:
        return (), ()
    answers = tuple([place for place, role in enumerate(roles) if role == "assistant"])
    return roles, answers or tuple(range(len(roles)))


def add_system(draft: PartialConversation, record: Record, shape: RecordFormat) -> None:
    """Make the system prompt of a record the first message.

    Args:
        draft: of the record; a message is added.
        record: with any system field, or none.
        shape: of the record; says whether `instruction` is a system prompt.

    Raises:
        RecordError: the value is not text, there are two different ones, or nothing would render it.
    """
    if shape.reads_system or _NAMES.isdisjoint(record):
        return
    names = (*SYSTEM_FIELDS, "instruction") if shape.instruction_is_system else SYSTEM_FIELDS
    given = [name for name in names if is_given(record.get(name))]
    if "instruction" in given and _repeats_a_turn(record["instruction"], draft):
        given.remove("instruction")
    if not given:
        return
    system = _text(record[given[0]], given[0])
    if draft.input_ids is not None:
        raise unsupported(given[0], remedy="input_ids are used as they are; put the prompt into them")
    if draft.text is not None:
        raise RecordError(Reason.BAD_ROLE, f"a text record has a {given[0]} field, which no template would render")
    if any(_text(record[name], name) != system for name in given[1:]):
        raise RecordError(Reason.BAD_ROLE, f"{' and '.join(given)} of the record differ; keep the one that is meant")
    first = draft.messages[0] if draft.messages else None
    if first is None or first.role != "system":
        draft.messages.insert(0, Message("system", system))
    elif first.content != system:
        raise RecordError(Reason.BAD_ROLE, f"the record has a {given[0]} field and another system message")


def _repeats_a_turn(instruction: Any, draft: PartialConversation) -> bool:
    texts = (message.content.strip() for message in draft.messages if message.role == "user")
    return isinstance(instruction, str) and instruction.strip() in texts


def _text(value: Any, name: str) -> str:
    if isinstance(value, list | tuple):  # content parts, of Anthropic and Bedrock
        return "".join([read_text(part.get("text"), f"a part of {name}") for part in read_objects(value, name)])
    if isinstance(value, OBJECT):
        return read_gemini_text(value, name)
    if not isinstance(value, str):
        raise RecordError(Reason.MISSING_FIELD, f"{name} must be text, not {type(value).__name__}")
    return value


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
