"""Values of record fields, checked: a wrong type is a RecordError that names the field.

JSON text as values without loss: an integer stays one, whatever its size, and an `id` keeps all its digits.

orjson makes floats of integers over 64 bits, so 2**64 + 1 and 2**64 + 2 would become the same id. Text that may have
such an integer is parsed a second time by the standard library, which is exact. It costs nothing elsewhere.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from energon_packed.errors import Reason, RecordError

Record = Mapping[str, Any]
OBJECT = (dict, Mapping)  # dict first: testing it is five times as fast
_DEEPEST = 100  # objects and lists in each other; templates and JSON writers call themselves for each level
_LARGEST_NUMBER = 1e9  # of fps and timestamp_decimal
_LONG_NUMBER = re.compile(rb"[0-9]{19}")
_STEP = 19
_DIGIT = re.compile(rb"[0-9]")
_LONGEST_EXACT = 15  # digits that a float always keeps
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


def parse_json(text: str | bytes) -> Any:
    """The value of JSON text.

    Raises:
        orjson.JSONDecodeError: it is not JSON, is not UTF-8, or is nested too deeply.
    """
    value = orjson.loads(text)
    if value.__class__ is dict and _is_text(value):
        return value
    data = text.encode() if isinstance(text, str) else text
    if _has_long_number(data):
        value = _standard(text)
    if value.__class__ is dict and value.get("id").__class__ is float and len(repr(value["id"])) > _LONGEST_EXACT:
        value["id"] = _standard(text, parse_float=str)["id"]  # the digits as they are written
    return value


def _is_text(record: dict[str, Any]) -> bool:
    """Whether a record holds texts and lists of objects of texts, so no number: turns and an id, in most files."""
    for value in record.values():
        if value.__class__ is list:
            for turn in value:
                if turn.__class__ is not dict:
                    return False
                for one in turn.values():
                    if one.__class__ is not str:
                        return False
        elif value.__class__ is not str:
            return False
    return True


def _has_long_number(data: bytes) -> bool:
    """Whether there are 19 digits in a row, at an eighth of the time of a search.

    They cover one of the bytes 18, 37, 56 .., with nine or more of them before it or after it.
    """
    for found in _DIGIT.finditer(data[_STEP - 1 :: _STEP]):
        at = _STEP * (found.start() + 1) - 1
        if data[at - 9 : at + 1].isdigit() or data[at : at + 10].isdigit():
            return _LONG_NUMBER.search(data) is not None
    return False


def _standard(text: str | bytes, **options: Any) -> Any:
    try:
        return json.loads(text, **options)
    except RecursionError:
        raise orjson.JSONDecodeError("it has a long number and is nested too deeply", "", 0) from None


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


def shown(value: object) -> str:
    """`repr` of a value for a message, at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def read_list(value: Any, what: str) -> list[Any] | tuple[Any, ...]:
    """A list; `what` names it in the error."""
    if not isinstance(value, list | tuple):
        raise RecordError(Reason.MISSING_FIELD, f"{what} must be a list, not {type(value).__name__}")
    return value


def read_text(value: Any, what: str) -> str:
    """A string; `what` names it in the error."""
    if not isinstance(value, str):
        raise RecordError(Reason.MISSING_FIELD, f"{what} must be text, not {type(value).__name__}")
    return value


def one_text(record: Record, names: Sequence[str]) -> str | None:
    """The text of the one of these fields that has any; None without.

    Raises:
        RecordError: `unsupported_field`, when two of them have different texts; `missing_field`, for another type.
    """
    given = {name: read_text(record[name], name) for name in names if record.get(name) not in (None, "")}
    if len(set(given.values())) > 1:
        raise RecordError(Reason.UNSUPPORTED_FIELD, f"{' and '.join(given)} differ; keep the one that is meant")
    return next(iter(given.values()), None)


def joined_texts(record: Record, names: Sequence[str]) -> str:
    """The texts of these fields, with a blank line between.

    Raises:
        RecordError: `missing_field`, for another type.
    """
    return "\n\n".join([read_text(record[name], name) for name in names if record.get(name) not in (None, "")])


def read_objects(value: Any, what: str) -> list[Record]:
    """A non-empty list of objects."""
    if not read_list(value, what):
        raise RecordError(Reason.EMPTY, f"{what} is an empty list")
    for entry in value:
        if not isinstance(entry, OBJECT):
            raise RecordError(Reason.MISSING_FIELD, f"an entry of {what} is {type(entry).__name__}, not an object")
    return list(value)


def check_writable(value: Any, what: str) -> None:
    """Refuse a value that cannot be written and rendered: nested too deeply, or with an integer over 64 bits.

    Raises:
        RecordError: `bad_json`; the message names the limit.
    """
    level, depth = [value], 0
    while level := [one for one in level if isinstance(one, Mapping | list | tuple | int)]:
        for number in [one for one in level if isinstance(one, int)]:
            if not -(2**63) <= number < 2**64:
                raise RecordError(Reason.BAD_JSON, f"{what} holds the number {number}, over 64 bits; write it as text")
        level = [one for one in level if not isinstance(one, int)]
        depth += 1
        if depth > _DEEPEST:
            raise RecordError(Reason.BAD_JSON, f"{what} is nested more than {_DEEPEST} levels deep")
        level = [inner for one in level for inner in (one.values() if isinstance(one, Mapping) else one)]


def flatten(value: Any) -> list[Any]:
    """One value, a list, or a list of lists, as one list."""
    if not isinstance(value, list | tuple):
        return [value]
    return [inner for item in value for inner in (item if isinstance(item, list | tuple) else (item,))]


def read_tokens(value: Any, what: str) -> npt.NDArray[np.int64]:
    """A flat list of integers, int64 (L,)."""
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise RecordError(Reason.MISSING_FIELD, f"{what} is not a flat list of numbers") from error
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iub"):
        raise RecordError(Reason.MISSING_FIELD, f"{what} must be a flat list of integers")
    if array.size and (array.dtype.kind == "u" and array.max() >= 2**63):
        raise RecordError(Reason.MISSING_FIELD, f"{what} holds a number over 64 bits")
    return array.astype(np.int64)


def read_json_list(value: Any, what: str) -> list[Any] | None:
    """A list, or JSON text of one; None where it is absent or empty."""
    if isinstance(value, str) and value.strip():
        try:
            value = parse_json(value)
        except orjson.JSONDecodeError as error:
            raise RecordError(Reason.MISSING_FIELD, f"{what} is not a JSON list: {error}") from error
    return list(read_list(value, what)) if value else None


def read_number(value: Any, what: str, kind: type[Any]) -> Any:
    """A finite number as `kind`; None where it is absent. A list of one number is accepted (one per video)."""
    if isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    if value is None:
        return None
    try:
        number = float(value) if not isinstance(value, bool | list | tuple | dict) else math.nan
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number) or abs(number) > _LARGEST_NUMBER:
        raise RecordError(Reason.MISSING_FIELD, f"{what} must be a number, not {repr(value)[:80]}")
    return kind(number)


def key_names(record: Record) -> str:
    """The first keys that have a value, for messages."""
    names = [str(key)[:60] for key in record if record[key] is not None][:8]
    return ", ".join([name if name.isprintable() else repr(name) for name in names])
