"""`normalize`: a record in any supported record format in, a Conversation out.

The record formats are in `records/record_formats`. Fields that are optional in every format: `system` (or
`system_prompt`, `system_message`), `tools`, `id`, `image` for a single image, `video` or `videos` as files or lists of
frames with one `<video>` each, `audio` or `audios` with one `<audio>` each, `patch_positions`, `fps`,
`timestamp_decimal`. Other fields are listed in
`unused_fields` of the conversation; fields that would change training reject the record.

Most files contain only plain records: turns with a role and a string, perhaps an id. `plain_conversation` reads them
in a few passes over all turns. It leaves every unusual record to the record formats, which also report errors; both
paths return the same conversation.
"""

import re
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal

from energon_packed.errors import Reason, RecordError
from energon_packed.records.conversation import (
    LOSS_WEIGHTS,
    Conversation,
    Message,
    is_loss_weight,
    plain_messages,
)
from energon_packed.records.fields import (
    ARRAY_REMEDY,
    OBJECT,
    SYSTEM_FIELDS,
    Record,
    check_writable,
    given,
    is_given,
    is_number,
    missing_field,
    read_label,
    read_number,
    read_objects,
    read_text,
    shown,
    unsupported_field,
)
from energon_packed.records.media.fields import (
    NO_IMAGE,
    Media,
    check_spellings,
    has_empty_image_field,
    has_tags,
    read_media,
    references,
)
from energon_packed.records.media.kinds import IMAGE_PLACEHOLDER, MEDIA_KINDS, VIDEO_PLACEHOLDER
from energon_packed.records.media.reference import IMAGE_SETTINGS, ImageRoot, read_image_settings
from energon_packed.records.media.unlisted import check_unlisted
from energon_packed.records.media.video_fields import check_video_fields
from energon_packed.records.objects import BOX_PLACEHOLDER, REF_PLACEHOLDER
from energon_packed.records.record_formats import PartialConversation, RecordFormat, find_record_format
from energon_packed.records.record_formats.messages import Messages, ShareGPT, read_gemini_text
from energon_packed.records.tools import read_tools, without_written_calls
from energon_packed.records.turns import PLAIN_ROLES, is_turn, keys_of
from energon_packed.records.unused_fields import RECORD_WEIGHTS, unsupported

RecordWeight = Literal["refuse", "loss"]
FPS_STORED = "fps stored, no timestamps in the text"
"""Note of a conversation with frame times that do not appear in its text."""
TIMESTAMPS_ADDED = "fps: the reader adds timestamps to the measured length"
"""Note of a conversation that the trainer of a layout makes longer; leave space in `seq_len`."""
TIMESTAMPS_WRITTEN = "fps: timestamps in the text, before each frame"
"""Note of a conversation whose vision family writes timestamps; it replaces the two notes above."""
FPS_OF_FILE = "fps beside a video file, not used to sample frames"
"""Note of a conversation with a frame rate that is metadata of its video file."""
NO_PLACEHOLDER = "no placeholder: media are placed before the first user turn"
"""Note of a conversation without placeholders: its media were put before the first user turn."""
UNPAIRED = "label true or false: the answer is a target in both cases"
"""Note of a conversation with the label of KTO; training on its tokens alone would learn bad answers too."""
LABELS = ("label", "kto_tag", "labels")
"""Fields of the label of a sample, in order of preference; `labels` of tokens are read by their format."""
_PLAIN_FORMATS = (Messages, ShareGPT)
# Start of `<image>`, `<img>`, `<ImageHere>`, `<|image_1|>`, `<video>`, `<audio>`, `<bbox>` and `<ref-object>`.
_TAG = re.compile(r"<\|?(?:[iI]m|vid|aud|bbox|ref-)")
_TOOL_FIELDS = frozenset(("tools", "functions"))
_POSITION_FIELDS = ("patch_positions",)
_SYSTEM_NAMES = frozenset((*SYSTEM_FIELDS, "instruction"))


def normalize(
    record: Any, *, image_root: str | ImageRoot | None = None, record_weight: RecordWeight = "refuse"
) -> Conversation:
    """Make a Conversation from a record.

        >>> c = normalize({"images": ["cat.jpg"], "prompts": ["What is it?"], "captions": ["A cat."]})
        >>> [(m.role, m.content) for m in c.messages]
        [('user', '<image>What is it?'), ('assistant', 'A cat.')]

    Args:
        record: a mapping (a JSON line or a table row) or a list of messages.
        image_root: folder that relative media paths start from and that no path may leave; None for the working
            directory and no limit.
        record_weight: meaning of the fields `RECORD_WEIGHTS` of a record: `loss`, a factor of the loss of all its
            targets; `refuse` rejects the record, as the number may also be meant for sampling.

    Raises:
        RecordError: the record cannot be used; see its `reason` and `detail`.
    """
    # Files of bare lists of messages (one conversation per line).
    if isinstance(record, list) and record and is_turn(record[0]) and all(isinstance(turn, OBJECT) for turn in record):
        record = {"messages": record}
    if not isinstance(record, OBJECT):
        kind = f"list of {len(record)} values; {ARRAY_REMEDY}" if isinstance(record, list) else type(record).__name__
        raise RecordError(Reason.BAD_JSON, f"a record must be an object, not {kind}")
    record_format = find_record_format(record)
    if (plain := plain_conversation(record, record_format)) is not None:
        return plain
    weight, known = 1.0, record_format.fields
    if record_weight == "loss":
        weight = _record_weight(record)
        known = None if known is None else known | set(RECORD_WEIGHTS)
    media = read_media(record, image_root, with_images=not record_format.reads_images, known=known or frozenset())
    if media.files:  # before the fields of unknown names, as these have their own remedies
        check_video_fields(record, "the record", of_one_video=False)
    media.add_unused(record, known)
    # In this order: the formats collect images of content parts, the system text may contain placeholders and tools.
    draft = record_format.read(record, media)
    if draft.members:
        return _group(record, draft, media, image_root, record_weight, weight)
    add_system(draft, record, record_format)
    place_media(draft, media, record_format)
    if not record_format.has_roles:
        _check_pairs(draft, has_media=bool(media.images or media.files or media.audios))
    tools = None if _TOOL_FIELDS.isdisjoint(record) else read_tools(record, draft, media)
    draft.messages = [without_written_calls(m, media) if m.extra else m for m in draft.messages]
    if tools is not None:
        check_writable(tools, "tools")
    kwargs = _template_kwargs(record, draft, media) if "chat_template_kwargs" in record else None
    for message in draft.messages:
        if message.extra:
            check_writable(message.extra, f"the {message.role} turn")
    fps = read_number(record.get("fps"), "fps", float)
    images, videos = tuple(media.images), tuple(media.files)
    if not images and has_empty_image_field(record):
        media.notes.append(NO_IMAGE)
    if videos:  # also of content parts and of the format's own fields
        check_video_fields(record, "the record", of_one_video=False)
    if fps and (images or videos):
        media.notes.append(FPS_STORED if media.is_video or not videos else FPS_OF_FILE)
    return Conversation(
        id=_ident(record),
        messages=tuple(draft.messages),
        text=draft.text,
        input_ids=draft.input_ids,
        labels=draft.labels,
        loss_weights=draft.loss_weights,
        columns=draft.columns,
        weight=weight,
        label=draft.label or _label(record, record_format, draft, media),
        images=images,
        videos=videos,
        audios=tuple(media.audios),
        patch_positions=tuple(references(record, _POSITION_FIELDS, image_root, media.unused_fields))
        if "patch_positions" in record
        else (),
        tools=tools,
        chat_template_kwargs=kwargs or None,
        objects=_objects(record, draft, media) if "objects" in record else None,
        video=media.is_video,
        fps=fps,
        timestamp_decimal=read_number(record.get("timestamp_decimal"), "timestamp_decimal", int),
        unused_fields=tuple(sorted(media.unused_fields)),
        notes=tuple(media.notes),
    )


def _group(
    record: Record,
    draft: PartialConversation,
    media: Media,
    image_root: str | ImageRoot | None,
    record_weight: RecordWeight,
    weight: float,
) -> Conversation:
    """Read the members of a record like records of their own, and collect their notes.

    Raises:
        RecordError: of a member; the detail names its role.
    """
    members: list[Conversation] = []
    for index, entry in enumerate(draft.members):
        role = entry.get("role")
        try:
            if role is not None and (not isinstance(role, str) or not role):
                raise missing_field(f"the role of a member must be text, not {shown(role)}")
            own = {name: value for name, value in entry.items() if name not in ("role", "label")}
            found = normalize(own, image_root=image_root, record_weight=record_weight)
            if found.members:
                raise unsupported_field("a member is a group itself; list its members in the record")
            label = found.label if entry.get("label") is None else read_label(entry["label"])
            if label is None and entry.get("label") is not None:
                raise missing_field(f"its label must be a number or a list of numbers, not {shown(entry['label'])}")
        except RecordError as error:
            raise RecordError(error.reason, f"member {index} ({role or 'no role'}): {error.detail}") from error
        members.append(replace(found, role=role, label=label, weight=found.weight * weight))
        media.unused_fields.update(found.unused_fields)
        media.notes += [note for note in found.notes if note not in media.notes]
    used = [file for member in members for file in member.media_files]
    media.notes += check_unlisted(media.unlisted, used, media.root) if media.unlisted else []
    return Conversation(
        id=_ident(record),
        members=tuple(members),
        unused_fields=tuple(sorted(media.unused_fields)),
        notes=tuple(media.notes),
    )


def _ident(record: Record) -> str | None:
    """The id of a record; None without one, or for "", which would name all samples alike."""
    ident = record.get("id")
    return None if ident is None else str(ident) or None


def _label(
    record: Record, record_format: RecordFormat, draft: PartialConversation, media: Media
) -> tuple[float, ...] | None:
    """Read the label of a sample that is a number, or a number for each class; None without a label.

    Raises:
        RecordError: `missing_field` if `kto_tag` is not true or false.
    """
    if isinstance(record.get("kto_tag"), str | int | float) and not isinstance(record["kto_tag"], bool):
        raise missing_field(f"kto_tag must be true or false, not {shown(record['kto_tag'])}")
    for name in LABELS:
        if record.get(name) is None or (record_format.fields and name in record_format.fields):
            continue
        label = read_label(record[name])
        if label is None:
            continue
        if isinstance(record[name], bool) and draft.messages:
            media.notes.append(UNPAIRED)
        media.unused_fields.discard(name)
        return label
    return None


def _objects(record: Record, draft: PartialConversation, media: Media) -> Any:
    """Return the objects that replace placeholders in the messages; None for objects of another meaning (LVIS)."""
    contents = [message.content for message in draft.messages]
    if not any(name in text for name in (REF_PLACEHOLDER, BOX_PLACEHOLDER) for text in contents):
        return None
    media.unused_fields.discard("objects")
    return record["objects"]


def _template_kwargs(record: Record, draft: PartialConversation, media: Media) -> dict[str, Any]:
    """Read the variables of the chat template, and apply settings of images among them to all images (ms-swift).

    Raises:
        RecordError: `unsupported_field` if nothing uses them; `missing_field` if they are not an object.
    """
    name = "chat_template_kwargs"
    value = record[name]
    if value is None:
        return {}
    if not isinstance(value, OBJECT):
        raise missing_field(f"{name} must be an object, not {type(value).__name__}")
    settings = read_image_settings(value, name)
    if settings and (media.videos or not media.images):
        place = "into the content part or object of each image or video, as in images=[{path, max_pixels}]"
        raise unsupported_field(f"{' and '.join(settings)} in {name} apply to images alone; write them {place}")
    media.images = [image.with_settings(settings) for image in media.images]
    kwargs = {key: item for key, item in value.items() if key not in IMAGE_SETTINGS and item is not None}
    if any(map(is_given, kwargs.values())) and (draft.text is not None or draft.input_ids is not None):
        raise unsupported(name, remedy="no template renders a text or input_ids; remove it")
    check_writable(kwargs, name)
    return kwargs


def _check_pairs(draft: PartialConversation, *, has_media: bool) -> None:
    """Reject an empty answer, and empty questions without media; in lists of turns with roles, both are meant.

    Raises:
        RecordError: `empty`.
    """
    questions = [message.content for message in draft.messages if message.role == "user"]
    if questions and not has_media and not any(text.strip() for text in questions):
        raise RecordError(Reason.EMPTY, "the question is empty, and the record has no image, video or audio")
    for message in draft.messages:
        if message.role == "assistant" and not message.content.strip() and not message.extra.get("tool_calls"):
            raise RecordError(Reason.EMPTY, "an answer is empty")


def _record_weight(record: Record) -> float:
    """Read the loss weight of a record; 1 by default.

    Raises:
        RecordError: `unsupported_field` if two weights differ, or a weight is invalid.
    """
    values = {name: record[name] for name in RECORD_WEIGHTS if record.get(name) is not None}
    for name, value in values.items():
        if not is_number(value) or not is_loss_weight(value):
            raise unsupported_field(f"{name} of the record is {shown(value)}; use 0, or a number {LOSS_WEIGHTS}")
    if len(set(values.values())) > 1:
        raise unsupported_field(f"{' and '.join(values)} of the record differ; keep the one that is meant")
    return float(next(iter(values.values()), 1.0))


def plain_conversation(record: Record, record_format: RecordFormat) -> Conversation | None:
    """Read a record that contains only turns and an id; None for any other record."""
    # The exact classes, since a custom subclass may read its turns in another way.
    if record_format.__class__ not in _PLAIN_FORMATS or len(record) > 1 + ("id" in record):
        return None
    turns = record.get(record_format.key)
    if turns.__class__ is not list or set(map(type, turns)) != {dict}:
        return None
    keys = keys_of(tuple(turns[0]))
    if not keys.is_plain:
        return None
    try:
        names = tuple([turn[keys.role[0]] for turn in turns])
        contents = [turn[keys.content[0]] for turn in turns]
    except KeyError:
        return None
    if set(map(type, names)) | set(map(type, contents)) != {str}:
        return None
    joined = "".join(contents)
    has_media = "<" in joined and _TAG.search(joined) is not None
    roles, speakers = _roles(names)
    # Two keys per turn in sum, and KeyError for a turn without one of them: so all turns have exactly the same keys.
    if has_media or not roles or sum(map(len, turns)) != 2 * len(turns):
        return None
    for index in speakers:
        if contents[index] and not contents[index].isspace():
            return Conversation.of_checked(_ident(record), plain_messages(roles, contents))
    return None


@lru_cache(maxsize=1024)
def _roles(names: tuple[Any, ...]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """(role of each turn, turns that must not all be empty); ((), ()) if the turns need the record formats.

    The rules of `Conversation` apply: only the first message may be a system message, and at least one assistant
    turn (or any turn, if no turn is an assistant turn) must have content. Cached, since few role sequences occur.
    """
    roles = tuple([PLAIN_ROLES.get(name, "") for name in names])
    if "" in roles or "system" in roles[1:]:
        return (), ()
    answers = tuple([index for index, role in enumerate(roles) if role == "assistant"])
    return roles, answers or tuple(range(len(roles)))


def add_system(draft: PartialConversation, record: Record, record_format: RecordFormat) -> None:
    """Insert the system prompt of a record as the first message.

    Args:
        draft: the turns of the record; changed in place.
        record: a record, with or without a system field.
        record_format: the format of the record; decides whether `instruction` is a system prompt.

    Raises:
        RecordError: the prompt is not a string, two prompts differ, or the record has no turns to render it with.
    """
    if record_format.reads_system or _SYSTEM_NAMES.isdisjoint(record):
        return
    # `instruction` is the task itself in Alpaca, and a system prompt beside a conversation.
    names = (*SYSTEM_FIELDS, "instruction") if record_format.instruction_is_system else SYSTEM_FIELDS
    filled = given(record, names)
    if "instruction" in filled and _repeats_a_turn(record["instruction"], draft):
        filled.remove("instruction")  # Magpie repeats the question there
    if not filled:
        return
    system = _system_text(record[filled[0]], filled[0])
    if draft.input_ids is not None:
        raise unsupported(filled[0], remedy="input_ids are used as they are; put the prompt into them")
    # Dropping the prompt silently would change training, so these records are rejected.
    if draft.text is not None:
        raise RecordError(Reason.BAD_ROLE, f"a text record has a {filled[0]} field, which no template would render")
    if any(_system_text(record[name], name) != system for name in filled[1:]):
        raise RecordError(Reason.BAD_ROLE, f"{' and '.join(filled)} of the record differ; keep the one that is meant")
    first = draft.messages[0] if draft.messages else None
    # A repeated equal prompt is harmless; a different prompt is a conflict.
    if first is None or first.role != "system":
        draft.messages.insert(0, Message("system", system))
    elif first.content != system:
        raise RecordError(Reason.BAD_ROLE, f"the record has a {filled[0]} field and another system message")


def _repeats_a_turn(instruction: Any, draft: PartialConversation) -> bool:
    texts = (message.content.strip() for message in draft.messages if message.role == "user")
    return isinstance(instruction, str) and instruction.strip() in texts


def _system_text(value: Any, name: str) -> str:
    if isinstance(value, list | tuple):  # content parts of Anthropic and Bedrock
        return "".join([read_text(part.get("text"), f"a part of {name}") for part in read_objects(value, name)])
    if isinstance(value, OBJECT):
        return read_gemini_text(value, name)
    return read_text(value, name)


def place_media(draft: PartialConversation, media: Media, record_format: RecordFormat) -> None:
    """Add missing placeholders for images, videos and audio files, and replace each `<video>` by its frames.

    Args:
        draft: the turns or text of a record; changed in place.
        media: the media of the record; frames of videos are added to its images, in the order of the text.
        record_format: the format of the record; decides whether missing placeholders are usual (no note).

    Raises:
        RecordError: media appear both in the turns and in a field, placeholders and videos do not match, or
            placeholders have a spelling that is not read.
    """
    if any(has_tags(message.content) for message in draft.messages):  # formats without typed turns
        draft.messages = [message._replace(content=media.take_tagged(message.content)) for message in draft.messages]
    if media.unlisted:
        frames = [frame for video in media.videos if isinstance(video, list) for frame in video]
        used = [*media.images, *frames, *(file for video in media.files for file in video.files)]
        used += [audio.file for audio in media.audios]
        media.notes += check_unlisted(media.unlisted, used, media.root)
    if draft.input_ids is not None:
        if media.is_video and media.videos:
            raise RecordError(Reason.UNSUPPORTED_MEDIA, "a record of input_ids has videos; pass the frames as images")
        return
    contents = [draft.text] if draft.text is not None else [message.content for message in draft.messages]
    check_spellings(contents, has_objects=media.has_objects and draft.text is None)
    if not any(map(media.in_field, MEDIA_KINDS.values())):  # content parts placed all of their media
        return
    # Before leading placeholders are added: a single `<image>` may represent all frames of a video.
    contents = _mark_videos(contents, media)
    leading = _leading_placeholders(contents, media)
    if leading and draft.messages:
        first = next((turn for turn, message in enumerate(draft.messages) if message.role == "user"), None)
        # Without a user turn nothing is added; `Conversation` then reports the missing placeholders.
        if first is not None:
            contents[first] = leading + contents[first]
            if not record_format.images_first:
                media.notes.append(NO_PLACEHOLDER)
    if media.videos:
        contents = media.place(contents)
    if draft.text is not None:
        draft.text = contents[0]
    else:
        draft.messages = [
            message if message.content == text else message._replace(content=text)
            for message, text in zip(draft.messages, contents, strict=True)
        ]


def _leading_placeholders(texts: list[str], media: Media) -> str:
    """Build the placeholders of the media for which the strings have none."""
    sizes = {kind.placeholder: len(getattr(media, kind.field)) for kind in MEDIA_KINDS.values()}
    return "".join([name * size for name, size in sizes.items() if not any(name in text for text in texts)])


def _mark_videos(texts: list[str], media: Media) -> list[str]:
    """Adapt records that use a single placeholder for all frames of a video to one `<video>` per video.

    Two spellings exist: `<image>` in a record of videos without images, and `<video>` with its frames in the images
    field.
    """
    images = sum(text.count(IMAGE_PLACEHOLDER) for text in texts)
    videos = sum(text.count(VIDEO_PLACEHOLDER) for text in texts)
    # `<image>` for each video, as in LLaVA-Video.
    if media.videos and not media.images and not videos and images == len(media.videos):
        return [text.replace(IMAGE_PLACEHOLDER, VIDEO_PLACEHOLDER) for text in texts]
    # A single `<video>`, and its frames in the images field.
    if not media.videos and len(media.images) > 1 and videos == 1 and not images:
        media.set_videos([media.images])
        media.images = []
    elif media.is_video and not media.videos and len(media.images) > 1 and images == 1 and not videos:
        return [text.replace(IMAGE_PLACEHOLDER, IMAGE_PLACEHOLDER * len(media.images)) for text in texts]
    return texts
