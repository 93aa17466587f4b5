"""Field accounting: a field is read, counted by name, or costs the record where ignoring it would change training."""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from energon_packed.errors import Reason, RecordError
from energon_packed.records.fields import Record

SYSTEM_FIELDS = ("system", "system_prompt", "system_message", "system_instruction", "systemInstruction")
COMMON_FIELDS = frozenset(
    (
        *("id", "images", "image", "video", "videos", "patch_positions", "fps", "timestamp_decimal"),
        *("image_base64_str", "tools", "functions", *SYSTEM_FIELDS),
    )
)
"""Fields that `normalize` itself reads, in every shape."""

_PREFERENCE = "preference data is out of scope; keep the chosen answer as messages"
_MASK = "give each turn a weight: 0 or 1"
_BOXES = (
    "write the boxes into the text in place of <ref-object> and <bbox>, in the coordinates of the model, "
    "with an `adapter`"
)
_PIXELS = "resize the image, or pass min_pixels and max_pixels as options"
_TOOLS = "pass the schemas as tools beside messages, and calls as tool_calls of a turn"
_REMEDIES = {
    r"audios?|audio_.*": "audio is not supported; remove it, or convert it to text",
    r"chosen.*|rejected.*|preferred|dispreferred": _PREFERENCE,
    r"objects|bbox(es)?|bounding_boxes": _BOXES,
    r"loss.*|(?!attention_)(.*_)?masks?|masked|weights?|sample_weight|train|training|train_.*": _MASK,
    r"tools?|functions?|function_calls?|tool_calls?|tool_call_.*": _TOOLS,
    r"system.*|developer.*": "pass it as system",
    r"chat_template_kwargs": "they change what a template renders; convert the record with an `adapter`",
    r"reasoning.*|thinking.*|thought.*": "move it into the assistant turn as reasoning_content",
    r".*_pixels|resized_(height|width)": _PIXELS,
    r"video(?!.*_ids?$).*|n?frames|max_frames": "pass the frames as videos, one list for each video",
    r"history": "write the earlier turns as messages",
    r"image_urls?": "nothing is fetched; download the image and give its path as image",
    r"images?|inline_data|file_data": "list images in the images field of the record",
    r"patch_positions": "list it in the record",
}
_RISKY = re.compile("|".join(f"(?:{pattern})" for pattern in _REMEDIES))


def is_given(value: Any) -> bool:
    """Neither null nor empty; of an object, one of its values."""
    if isinstance(value, Mapping):
        return any(is_given(inner) for inner in value.values())
    return value is not None and (not hasattr(value, "__len__") or len(value) > 0)


def unused_fields(record: Record, known: frozenset[str], what: str = "the record") -> tuple[str, ...]:
    """Names of fields with a value that nothing reads.

    Args:
        record: a record, a turn or a part.
        known: fields that are read.
        what: has the fields, for errors.

    Raises:
        RecordError: `unsupported_field` for a field that would change training, `unsupported_media` for a medium.
    """
    names = _unknown(tuple(record), known)
    if not names:
        return ()
    found = []
    for name, is_risky in names:
        value = record[name]
        if is_risky and is_given(value) and not _is_metadata(name, record):
            raise unsupported(name, what)
        if _is_medium(value):
            raise RecordError(
                Reason.UNSUPPORTED_MEDIA, f"the field {name} of {what} holds a medium; rename it to images"
            )
        if value is not None and (not is_risky or is_given(value)):
            found.append(str(name))
    return tuple(found)


def _is_metadata(name: str, record: Record) -> bool:
    """Whether `reasoning` only says that there is some (Nemotron), or `image_url` where an image came from (PixMo)."""
    if name in ("reasoning", "thinking"):
        return isinstance(record[name], bool) or record[name] in ("on", "off", "yes", "no")
    return name in ("image_url", "image_urls") and (is_given(record.get("image")) or is_given(record.get("images")))


def unsupported(name: str, what: str = "the record", remedy: str = "") -> RecordError:
    """The rejection of a field, with its remedy."""
    found = (text for pattern, text in _REMEDIES.items() if re.fullmatch(pattern, name))
    remedy = remedy or next(found, "remove it, or convert it with an `adapter`")
    return RecordError(Reason.UNSUPPORTED_FIELD, f"the field {name} of {what} is not supported: {remedy}")


def check_preference(record: Record) -> None:
    """Preference data is rejected as such, whatever else it holds.

    Raises:
        RecordError: `unsupported_field`.
    """
    for name in ("chosen", "rejected"):
        if is_given(record.get(name)):
            raise unsupported(name)


@lru_cache(maxsize=4096)
def _unknown(names: tuple[str, ...], known: frozenset[str]) -> tuple[tuple[str, bool], ...]:
    """Fields that are not known, and whether ignoring each would change training."""
    return tuple((name, _RISKY.fullmatch(str(name)) is not None) for name in names if name not in known)


def _is_medium(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = value.get("bytes")
    return isinstance(value, bytes | bytearray) and len(value) > 0
