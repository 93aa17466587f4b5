"""`normalize`: a record in any supported shape becomes one Conversation.

    (a) {"images": [...], "prompts": [...], "captions": [...]}      flat or list of lists, several turns
    (b) {"messages": [{"role", "content": "... <image> ..."}], "images": [...]}
    (c) {"conversations": [{"from", "value"}], "images": [...]}      ShareGPT
    (d) {"messages": [{"role", "content": [{"type": "text"|"image"|"image_url"|"video", ...}]}]}
    (e) {"text": "..."}                                               every token supervised
    (f) {"input_ids": [...], "labels": [...] or "loss_mask": [...]}

Optional in each: `system`, `tools`, `id`, `image` for one image, `video` or `videos` as lists of frames, one `<video>`
each, `patch_positions`, `fps`, `timestamp_decimal`. In (a), one list of images for each prompt stands before it.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from energon_packed.conversation.conversation import EXTRA_FIELDS, IMAGE_PLACEHOLDER, Conversation, Message
from energon_packed.conversation.media import MediaReference
from energon_packed.conversation.videos import VIDEO_PLACEHOLDER, has_videos, place_frames, read_videos
from energon_packed.errors import Reason, RecordError

Record = Mapping[str, Any]
_OBJECT = (dict, Mapping)  # dict first: asking it is five times as fast
_LARGEST_NUMBER = 1e9  # of fps and timestamp_decimal
_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "function_call": "assistant",
    "observation": "tool",
}


def normalize(record: Any, *, image_root: str | None = None) -> Conversation:
    """Make a Conversation from a record of any shape in this module's docstring.

        >>> c = normalize({"images": ["cat.jpg"], "prompts": ["What is it?"], "captions": ["A cat."]})
        >>> [(m.role, m.content) for m in c.messages]
        [('user', '<image>What is it?'), ('assistant', 'A cat.')]

    Args:
        record: a mapping, as a JSON line or a table row gives it.
        image_root: folder that relative media paths start from and that no path may leave; None for the working
            directory and no limit.

    Raises:
        RecordError: the record cannot be used; `reason` says why.
    """
    if not isinstance(record, _OBJECT):
        raise RecordError(Reason.BAD_JSON, f"a record must be an object, not {type(record).__name__}")
    for key, build in _SHAPES.items():
        if record.get(key) is not None:
            draft = _Draft(record, image_root)
            build(draft)
            return draft.finish()
    raise RecordError(
        Reason.MISSING_FIELD,
        f"none of {', '.join(_SHAPES)} in a record with the keys {_keys(record) or 'none'}",
    )


class _Draft:
    """A conversation while it is being read; media are collected in the order of their placeholders."""

    def __init__(self, record: Record, root: str | None) -> None:
        self.record = record
        self.root = root
        self.messages: list[Message] = []
        self.inline: list[MediaReference] = []
        self.listed = self._media(("images", "image"))
        self.text: str | None = None
        self.tokens: npt.NDArray[np.int64] | None = None
        self.labels: npt.NDArray[np.int64] | None = None
        self.videos = read_videos(record, root)
        self.video = bool(self.videos) or record.get("video") is True

    def finish(self) -> Conversation:
        record = self.record
        system = record.get("system")
        if system and self.text is not None:
            raise RecordError(Reason.BAD_ROLE, "a text record has a system field, which no template would render")
        if system and self.text is None and self.tokens is None:
            if not isinstance(system, str):
                raise RecordError(Reason.MISSING_FIELD, f"system must be text, not {type(system).__name__}")
            first = self.messages[0] if self.messages else None
            if first is None or first.role != "system":
                self.messages.insert(0, Message("system", system))
            elif first.content != system:
                raise RecordError(Reason.BAD_ROLE, "the record has a system field and another system message")
        if has_videos(record):
            self._place_videos()
        if self.inline and self.listed:
            raise RecordError(
                Reason.IMAGE_COUNT_MISMATCH,
                "images stand both in the messages and in the images field; use one",
            )
        ident = record.get("id")
        return Conversation(
            id=None if ident is None else str(ident),
            messages=tuple(self.messages),
            text=self.text,
            input_ids=self.tokens,
            labels=self.labels,
            images=tuple(self.inline or self.listed),
            patch_positions=tuple(self._media(("patch_positions",))),
            tools=_json_list(record.get("tools"), "tools"),
            video=self.video,
            fps=_number(record.get("fps"), "fps", float),
            timestamp_decimal=_number(record.get("timestamp_decimal"), "timestamp_decimal", int),
        )

    def _place_videos(self) -> None:
        if self.tokens is not None and not self.videos:
            return
        if self.tokens is not None:
            raise RecordError(Reason.UNSUPPORTED_MEDIA, "a record of input_ids has videos; name the frames images")
        texts = [message.content for message in self.messages] if self.text is None else [self.text]
        texts, self.listed = place_frames(texts, self.listed, self.videos)
        if self.text is None:
            self.messages = [replace(m, content=text) for m, text in zip(self.messages, texts, strict=True)]
        else:
            self.text = texts[0]

    def _media(self, keys: Iterable[str]) -> list[MediaReference]:
        given = [key for key in keys if self.record.get(key) is not None]
        if not given:
            return []
        given = [key for key in given if _flat(self.record[key])]
        if len(given) > 1:
            raise RecordError(Reason.IMAGE_COUNT_MISMATCH, f"both {' and '.join(given)} are given; use one")
        return [MediaReference.from_value(item, self.root) for key in given for item in _flat(self.record[key])]

    def add_parts(self, parts: Iterable[Any]) -> str:
        """Text of typed content parts; their media go to `inline`."""
        text = []
        for part in parts:
            if isinstance(part, str):
                text.append(part)
                continue
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind == "text":
                text.append(_text(part.get("text"), "a text part"))
            elif kind in ("image", "image_url"):
                value = part.get("image") or part.get("image_url") or part.get("path") or part.get("url")
                if value:
                    self.inline.append(MediaReference.from_value(value, self.root))
                text.append(IMAGE_PLACEHOLDER)
            elif kind == "video":
                frames = part.get("video") or part.get("frames")
                self.video = True
                if not frames and self.videos:
                    text.append(VIDEO_PLACEHOLDER)  # its frames are in `videos`
                    continue
                if not isinstance(frames, list | tuple) or not frames:
                    raise RecordError(
                        Reason.MISSING_IMAGE,
                        "a video must be a list of frame images; video files are not decoded",
                    )
                self.inline.extend(MediaReference.from_value(frame, self.root) for frame in frames)
                text.append(IMAGE_PLACEHOLDER * len(frames))
            else:
                raise RecordError(
                    Reason.MISSING_FIELD,
                    f"a content part of type {kind!r}; use text, image, image_url or video",
                )
        return "".join(text)


def _from_messages(draft: _Draft) -> None:
    for message in _turns(draft.record, "messages"):
        role, content = message.get("role"), message.get("content")
        if role is None:
            raise RecordError(Reason.MISSING_FIELD, f"a message has no role; its keys are {_keys(message)}")
        extra = {}
        if content is None or len(message) > 2:  # most messages have a role and a content, and nothing else
            extra = {key: message[key] for key in EXTRA_FIELDS if message.get(key)}
        if content is None and not extra:
            raise RecordError(Reason.MISSING_FIELD, f"the {role} message has no content")
        if isinstance(content, list | tuple):
            content = draft.add_parts(content)
        draft.messages.append(Message(str(role), _text(content or "", f"content of a {role} message"), extra))


def _from_sharegpt(draft: _Draft) -> None:
    for turn in _turns(draft.record, "conversations"):
        if "from" not in turn or "value" not in turn:
            raise RecordError(Reason.MISSING_FIELD, f"a turn needs from and value; it has {_keys(turn)}")
        role = _SHAREGPT_ROLES.get(turn["from"]) if isinstance(turn["from"], str) else None
        if role is None:
            raise RecordError(Reason.BAD_ROLE, f"from {turn['from']!r}; use one of {', '.join(_SHAREGPT_ROLES)}")
        draft.messages.append(Message(role, _text(turn["value"], f"value of a {role} turn")))


def _from_captions(draft: _Draft) -> None:
    captions = [_text(item, "a caption") for item in _flat(draft.record["captions"])]
    given = draft.record.get("prompts")
    prompts = [_text(item, "a prompt") for item in _flat(given)] if given is not None else []
    if not captions:
        raise RecordError(Reason.EMPTY, "captions is an empty list")
    prompts = prompts or [""] + ["" for _ in captions[1:]]
    if len(prompts) != len(captions):
        raise RecordError(
            Reason.MISSING_FIELD,
            f"{len(prompts)} prompts for {len(captions)} captions; give one prompt per caption",
        )
    if not any(IMAGE_PLACEHOLDER in text for text in (*prompts, *captions)):
        for turn, count in enumerate(_images_by_turn(draft, len(prompts))):
            prompts[turn] = IMAGE_PLACEHOLDER * count + prompts[turn]
        if draft.videos and not any(VIDEO_PLACEHOLDER in text for text in (*prompts, *captions)):
            prompts[0] = VIDEO_PLACEHOLDER * len(draft.videos) + prompts[0]
    for prompt, caption in zip(prompts, captions, strict=True):
        draft.messages += [Message("user", prompt), Message("assistant", caption)]


def _images_by_turn(draft: _Draft, turns: int) -> list[int]:
    """Images before each prompt: all before the first, or as a list of lists deals them."""
    given = draft.record.get("images")
    if not isinstance(given, list | tuple) or len(given) == 1:
        return [len(draft.listed)]
    if not any(isinstance(item, list | tuple) for item in given):
        return [len(draft.listed)]
    if len(given) != turns:
        raise RecordError(
            Reason.IMAGE_COUNT_MISMATCH,
            f"images is a list of {len(given)} lists for {turns} prompts; give one list per prompt, or placeholders",
        )
    return [len(_flat(item)) for item in given]


def _from_text(draft: _Draft) -> None:
    draft.text = _text(draft.record["text"], "text")
    if not draft.text.strip():
        raise RecordError(Reason.EMPTY, "text is empty")


def _from_tokens(draft: _Draft) -> None:
    draft.tokens = _token_array(draft.record["input_ids"], "input_ids")
    labels, mask = draft.record.get("labels"), draft.record.get("loss_mask")
    if labels is not None:
        draft.labels = _token_array(labels, "labels")
    elif mask is not None:
        flags = _token_array(mask, "loss_mask")
        if len(flags) != len(draft.tokens):
            raise RecordError(
                Reason.MISSING_FIELD, f"loss_mask has {len(flags)} entries for {len(draft.tokens)} input_ids"
            )
        draft.labels = np.where(flags != 0, draft.tokens, -100)
    else:
        draft.labels = draft.tokens.copy()


_SHAPES: dict[str, Callable[[_Draft], None]] = {
    "messages": _from_messages,
    "conversations": _from_sharegpt,
    "captions": _from_captions,
    "input_ids": _from_tokens,
    "text": _from_text,
}


def _turns(record: Record, key: str) -> list[Record]:
    turns = record[key]
    if not isinstance(turns, list | tuple):
        raise RecordError(Reason.MISSING_FIELD, f"{key} must be a list, not {type(turns).__name__}")
    if not turns:
        raise RecordError(Reason.EMPTY, f"{key} is an empty list")
    for turn in turns:
        if not isinstance(turn, _OBJECT):
            raise RecordError(Reason.MISSING_FIELD, f"an entry of {key} is {type(turn).__name__}, not an object")
    return list(turns)


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise RecordError(Reason.MISSING_FIELD, f"{what} must be text, not {type(value).__name__}")
    return value


def _flat(value: Any) -> list[Any]:
    """One value, a list, or a list of lists, as one list."""
    if not isinstance(value, list | tuple):
        return [value]
    return [inner for item in value for inner in (item if isinstance(item, list | tuple) else (item,))]


def _token_array(value: Any, what: str) -> npt.NDArray[np.int64]:
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise RecordError(Reason.MISSING_FIELD, f"{what} is not a flat list of numbers") from error
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iub"):
        raise RecordError(Reason.MISSING_FIELD, f"{what} must be a flat list of whole numbers")
    if array.size and (array.min() < -(2**63) or array.max() >= 2**63):
        raise RecordError(Reason.MISSING_FIELD, f"{what} holds a number over 64 bits")
    return array.astype(np.int64)


def _json_list(value: Any, what: str) -> list[Any] | None:
    if isinstance(value, str) and value.strip():
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise RecordError(Reason.MISSING_FIELD, f"{what} is no JSON list: {error}") from error
    if not value:
        return None
    if not isinstance(value, list | tuple):
        raise RecordError(Reason.MISSING_FIELD, f"{what} must be a list, not {type(value).__name__}")
    return list(value)


def _number(value: Any, what: str, kind: type[Any]) -> Any:
    if isinstance(value, list | tuple) and len(value) == 1:  # one for each video
        value = value[0]
    if value is None:
        return None
    try:
        number = float(value) if not isinstance(value, bool | list | tuple | dict) else math.nan
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number) or abs(number) > _LARGEST_NUMBER:
        raise RecordError(Reason.MISSING_FIELD, f"{what} must be a number, not {value!r}")
    return kind(number)


def _keys(record: Record) -> str:
    return ", ".join([str(key) for key in record if record[key] is not None][:8])
