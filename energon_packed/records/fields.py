"""Reads fields of a record: JSON text or a raw value in, a checked value out; a wrong type is a RecordError.

parse_json                           JSON text -> value, without loss: integers of any size and all digits of an `id`
read_text, read_list, read_tokens..  value of a field -> string, list, int64 array, number
one_text, joined_texts               several alternative or consecutive fields -> one string
unused_fields                        fields that nothing reads: counted by name, or rejected if training would change
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from functools import lru_cache
from numbers import Real
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from energon_packed.errors import Reason, RecordError

Record = Mapping[str, Any]
OBJECT = (dict, Mapping)  # dict first: testing it is five times as fast
SCALARS = frozenset((str, bool, int, float, type(None)))  # exact classes of most values, for tests on hot paths
ARRAY_REMEDY = "if the file is a JSON array, rename it to .json, or write one record per line"
_DEEPEST = 100  # levels of nesting: templates and JSON writers recurse once per level
# Larger values of fps and timestamp_decimal are faults of the writer, and would overflow when they are rendered.
_LARGEST_NUMBER = 1e9  # of fps and timestamp_decimal
# Limits of exact parsing: orjson is exact up to 64 bits (18 digits always fit), a float keeps 15 digits.
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
"""Fields that `normalize` itself reads, in every record format."""

RECORD_WEIGHTS = ("weight", "sample_weight", "loss_weight", "loss_scale")
"""Fields of a record that may have its loss weight; `normalize` reads them with `record_weight='loss'`."""

_PREFERENCE = "preference data is out of scope"
_CHOSEN_REMEDY = f"{_PREFERENCE}; return the answer to train on as messages from an `adapter`"
_QUESTIONS = ("prompt", "question", "instruction", "query", "input")  # beside `chosen`
_FIRST_ROLES = ("system", "user", "human")
_ASSISTANT = "Assistant: "
_KEPT = ("id", "system", "images", "image", "videos", "video", "tools")
_MASK = "give each turn a weight: 0 or 1"
_RECORD_WEIGHT = (
    "set `record_weight` to loss if it multiplies the loss of the record; to repeat or sample records, use the "
    "`weight` of a source"
)
_TOOLS = "pass the schemas as tools beside messages, and calls as tool_calls of a turn"
# Fields that would change training if they were ignored: pattern of the name -> remedy. Other fields are only counted.
_REMEDIES = {
    r"audios?|audio_.*": "audio is not supported; remove it, or convert it to text",
    r"chosen.*|rejected.*|preferred|dispreferred": _CHOSEN_REMEDY,
    r"loss.*|(?!attention_)(.*_)?masks?|masked|weights?|sample_weight|train|training|train_.*": _MASK,
    r"tools?|functions?|function_calls?|tool_calls?|tool_call_.*": _TOOLS,
    r"system.*|developer.*": "pass it as system",
    r"chat_template_kwargs": "they change what a template renders; convert the record with an `adapter`",
    r"reasoning.*|thinking.*|thought.*": "move it into the assistant turn as reasoning_content",
    r"bbox(es)?|bounding_boxes": "write the boxes into the text, in the coordinates of the model, with an `adapter`",
    r".*_pixels|resized_(height|width)": "resize the image, or pass min_pixels and max_pixels as options",
    r"video(?!.*_ids?$).*": "pass video files or lists of frames as videos",
    r"n?frames|(min|max)_frames|do_sample_frames": "pass the frames as videos, one list for each video",
    r"history": "write the earlier turns as messages",
    r"image_urls?": "nothing is fetched; download the image and give its path as image",
    r"pixel_values(_.*)?|(image|video)_grid_thw": "pixels are computed while training; list the images as images",
    r"images?|inline_data|file_data": "list images in the images field of the record",
    r"patch_positions": "list it in the record",
}
_RISKY = re.compile("|".join(f"(?:{pattern})" for pattern in _REMEDIES))
_WORD_STARTS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|[\s.-]+")
_ABOUT_VIDEO = re.compile(
    r"video_(fps|duration|length|width|height|size|resolution|num_frames|source|title|name|type|category|format|codec|"
    r"hash|urls?|link|metadata)"
)
_MEDIA = re.compile(r"images?|image_urls?|videos?")  # `unlisted_media.py` decides about their other spellings


def parse_json(text: str | bytes) -> Any:
    """Parse JSON text without losing digits.

    orjson turns integers over 64 bits into floats, so the ids 2**64 + 1 and 2**64 + 2 would become equal. Text that
    may contain such an integer is parsed again by the exact standard library; other text is parsed once.

    Raises:
        orjson.JSONDecodeError: it is not JSON, is not UTF-8, or is nested too deeply.
    """
    value = orjson.loads(text)
    if value.__class__ is dict and _is_text(value):
        return value
    data = text.encode() if isinstance(text, str) else text
    if _has_long_number(data):
        value = _standard(text)
    # An id is a name: 0.1000000000000000001 must not become 0.1, or two records would get the same id.
    if value.__class__ is dict and value.get("id").__class__ is float and len(repr(value["id"])) > _LONGEST_EXACT:
        value["id"] = _standard(text, parse_float=str)["id"]  # the digits as they are written
    return value


def _is_text(record: dict[str, Any]) -> bool:
    """Whether all values are strings or turns of strings, so that no number has to be checked: most files of turns."""
    # Exact classes instead of isinstance: this runs for every line of a file, and JSON has no subclasses.
    for value in record.values():
        if value.__class__ is list:
            for turn in value:
                if turn.__class__ is not dict:
                    return False
                for field in turn.values():
                    if field.__class__ is not str:
                        return False
        elif value.__class__ is not str:
            return False
    return True


def _has_long_number(data: bytes) -> bool:
    """Whether there are 19 consecutive digits, at an eighth of the time of a regular expression."""
    # 2**63 has 19 digits. Such a run covers one of the bytes 18, 37, 56 .., with nine or more of its digits before or
    # after that byte, so only every 19th byte and its neighborhood need to be read.
    for match in _DIGIT.finditer(data[_STEP - 1 :: _STEP]):
        at = _STEP * (match.start() + 1) - 1
        if data[at - 9 : at + 1].isdigit() or data[at : at + 10].isdigit():
            return _LONG_NUMBER.search(data) is not None
    return False


def _standard(text: str | bytes, parse_float: Callable[[str], Any] | None = None) -> Any:
    try:
        return json.loads(text, parse_float=parse_float)
    # The caller handles a single type of error, whichever parser failed.
    except RecursionError:
        raise orjson.JSONDecodeError("it has a long number and is nested too deeply", "", 0) from None


def is_given(value: Any) -> bool:
    """Whether a value is neither null nor empty; an object is empty if all of its values are."""
    if value is None or value.__class__ is str or value.__class__ is list:  # almost every call
        return bool(value)
    if isinstance(value, Mapping):
        return any(is_given(inner) for inner in value.values())
    return not hasattr(value, "__len__") or len(value) > 0


def shown(value: object) -> str:
    """Shorten the `repr` of a value to at most 80 characters, for messages."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def key_names(record: Record) -> str:
    """List the first keys that have a value, for messages."""
    # Keys come from untrusted files: limit their length and number, and escape control characters.
    names = [str(key)[:60] for key in record if record[key] is not None][:8]
    return ", ".join([name if name.isprintable() else repr(name) for name in names])


def flatten(value: Any) -> list[Any]:
    """Flatten a value, a list, or a list of lists into one list."""
    if not isinstance(value, list | tuple):
        return [value]
    return [inner for item in value for inner in (item if isinstance(item, list | tuple) else (item,))]


def read_text(value: Any, label: str) -> str:
    """Return a string unchanged, and a number as its digits, as tables of strings (CSV) have it.

    Raises:
        RecordError: `missing_field` for another value, also for NaN (an empty cell of pandas); `label` names it.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return str(value)
    kind = "null" if value is None else "NaN" if isinstance(value, float) else type(value).__name__
    raise missing_field(f"{label} must be text, not {kind}")


def one_text(record: Record, names: Sequence[str]) -> str | None:
    """Read alternative fields for the same text; None if no field has any.

    Raises:
        RecordError: `unsupported_field` if two fields have different strings; `missing_field` for another type.
    """
    strings = {name: read_text(record[name], name) for name in names if record.get(name) not in (None, "")}
    if len(set(strings.values())) > 1:
        raise unsupported_field(f"{' and '.join(strings)} have different values. Keep only one.")
    return next(iter(strings.values()), None)


def joined_texts(record: Record, names: Sequence[str]) -> str:
    """Join the strings of these fields with a blank line between.

    Raises:
        RecordError: `missing_field`, for another type.
    """
    return "\n\n".join([read_text(record[name], name) for name in names if record.get(name) not in (None, "")])


def read_list(value: Any, label: str) -> list[Any] | tuple[Any, ...]:
    """Return a list unchanged; `label` names it in the error."""
    if not isinstance(value, list | tuple):
        raise missing_field(f"{label} must be a list, not {type(value).__name__}")
    return value


def read_objects(value: Any, label: str) -> list[Record]:
    """Read a non-empty list of objects."""
    if not read_list(value, label):
        raise RecordError(Reason.EMPTY, f"{label} is an empty list")
    for entry in value:
        if not isinstance(entry, OBJECT):
            raise missing_field(f"an entry of {label} is {type(entry).__name__}, not an object")
    return list(value)


def read_json_list(value: Any, label: str) -> list[Any] | None:
    """Read a list, or the JSON text of a list; None if it is absent or empty."""
    if isinstance(value, str) and value.strip():
        try:
            value = parse_json(value)
        except orjson.JSONDecodeError as error:
            raise missing_field(f"{label} is not a JSON list: {error}") from error
    return list(read_list(value, label)) if value else None


def read_tokens(value: Any, label: str) -> npt.NDArray[np.int64]:
    """Read a flat list of integers as int64 (L,)."""
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise missing_field(f"{label} is not a flat list of numbers") from error
    # An empty list becomes a float64 array, so the type is checked only if there are entries.
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iub"):
        raise missing_field(f"{label} must be a flat list of integers")
    # astype(int64) would wrap values from 2**63 on to negative token ids.
    if array.size and (array.dtype.kind == "u" and array.max() >= 2**63):
        raise missing_field(f"{label} contains a number over 64 bits")
    return array.astype(np.int64)


def read_number(value: Any, label: str, kind: type[Any]) -> Any:
    """Read a finite number as `kind`; None if it is absent. A list of length 1 is accepted (one number per video)."""
    if value is not None and isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    if value is None:
        return None
    try:
        # NaN marks every invalid value, so that a single check below reports all of them.
        number = math.nan if isinstance(value, bool) or not isinstance(value, Real | Decimal | str) else float(value)
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number) or abs(number) > _LARGEST_NUMBER:
        raise missing_field(f"{label} must be a number, not {repr(value)[:80]}")
    return kind(number)


def check_writable(value: Any, label: str) -> None:
    """Reject a value that cannot be written as JSON and rendered: nested too deeply, or an integer over 64 bits.

    Raises:
        RecordError: `bad_json`; the message names the limit.
    """
    # Templates and JSON writers recurse, so the depth must be known before they run. This loop goes level by level, so
    # that a deep value cannot exhaust the stack here.
    level, depth = [value], 0
    while level := [item for item in level if isinstance(item, Mapping | list | tuple | int)]:
        for number in [item for item in level if isinstance(item, int)]:
            if not -(2**63) <= number < 2**64:
                raise RecordError(
                    Reason.BAD_JSON, f"{label} contains the number {number}, over 64 bits; write it as text"
                )
        level = [item for item in level if not isinstance(item, int)]
        depth += 1
        if depth > _DEEPEST:
            raise RecordError(Reason.BAD_JSON, f"{label} is nested more than {_DEEPEST} levels deep")
        level = [inner for item in level for inner in (item.values() if isinstance(item, Mapping) else item)]


def unused_fields(record: Record, known: frozenset[str], label: str = "the record") -> tuple[str, ...]:
    """List the fields that have a value and are not read.

    Args:
        record: a record, a turn or a content part.
        known: fields that are read.
        label: the object with the fields, for errors.

    Raises:
        RecordError: `unsupported_field` for a field that would change training, `unsupported_media` for a field with
            the bytes of an image or video.
    """
    # The names are checked before the values: most records have no unknown field, and the answer is cached.
    names = _unknown(tuple(record), known)
    if not names:
        return ()
    unused = []
    for name, is_risky in names:
        value = record[name]
        if value is None:
            continue
        if is_risky and is_given(value) and not _is_metadata(name, record):
            is_weight = name in RECORD_WEIGHTS and label == "the record" and isinstance(value, int | float)
            if label == "the record":
                check_preference(record)
            raise unsupported(name, label, _RECORD_WEIGHT if is_weight else "")
        if value.__class__ not in SCALARS and _is_media_bytes(value):
            raise RecordError(
                Reason.UNSUPPORTED_MEDIA,
                f"the field {name} of {label} contains an image or video; rename it to images, or add image={name} to "
                "`map`",
            )
        if not is_risky or is_given(value):
            unused.append(str(name))
    return tuple(unused)


def missing_field(detail: str) -> RecordError:
    """Make the RecordError for a field that is missing, or whose value has another type than needed."""
    return RecordError(Reason.MISSING_FIELD, detail)


def unsupported_field(detail: str) -> RecordError:
    """Make the RecordError for a field or value that is not supported."""
    return RecordError(Reason.UNSUPPORTED_FIELD, detail)


def unsupported(name: str, label: str = "the record", remedy: str = "") -> RecordError:
    """Make the RecordError for an unsupported field, with its remedy."""
    names = (name, _plain_name(name))
    remedies = (text for pattern, text in _REMEDIES.items() if any(re.fullmatch(pattern, n) for n in names))
    remedy = remedy or next(remedies, "remove it, or convert it with an `adapter`")
    return unsupported_field(f"the field {name} of {label} is not supported: {remedy}")


def check_preference(record: Record) -> None:
    """Reject preference data, whatever other fields the record has.

    Raises:
        RecordError: `unsupported_field`.
    """
    for name in ("chosen", "rejected", "rejected_response"):
        if is_given(record.get(name)):
            raise unsupported(name, remedy=_preference_remedy(record))


def _preference_remedy(record: Record) -> str:
    """Write an adapter that trains on the chosen answer, for the usual forms of preference data."""
    chosen: Any = record.get("chosen")
    prompt = next((name for name in _QUESTIONS if is_given(record.get(name))), None)
    turns = next((name for name in ("messages", "conversations") if isinstance(record.get(name), list)), None)
    is_list = isinstance(chosen, list | tuple) and len(chosen) > 0 and isinstance(chosen[0], OBJECT)
    is_dialog = is_list and any(chosen[0].get(name) in _FIRST_ROLES for name in ("role", "from"))
    if is_dialog and not isinstance(record.get("prompt"), list | tuple):
        kept = '"messages": record["chosen"]'  # with the prompt as its first turn, as in UltraFeedback
    elif turns is not None and chosen is None:  # ms-swift: the last turn is the chosen answer
        kept = f'"messages": record["{turns}"]'
    elif turns is not None and isinstance(chosen, OBJECT):
        kept = f'"messages": [*record["{turns}"], record["chosen"]]'  # LLaMA-Factory
    elif prompt is not None and (is_list or isinstance(chosen, str)):
        kept = f'"prompt": record["{prompt}"], "completion": record["chosen"]'
        if prompt == "instruction" and is_given(record.get("input")):
            kept = kept.replace('record["instruction"]', 'record["instruction"] + "\\n\\n" + record["input"]')
    elif isinstance(chosen, str) and _ASSISTANT in chosen:  # a transcript, as in HH-RLHF
        kept = f'**dict(zip(("prompt", "completion"), record["chosen"].rsplit("{_ASSISTANT}", 1)))'
    else:
        return _CHOSEN_REMEDY
    kept += "".join(f', "{name}": record["{name}"]' for name in _KEPT if is_given(record.get(name)))
    return (
        f"{_PREFERENCE}. To train on the chosen answer, pass --adapter dpo:chosen with this line in dpo.py: "
        f"def chosen(record): return {{{kept}}}"
    )


@lru_cache(maxsize=4096)
def _unknown(names: tuple[str, ...], known: frozenset[str]) -> tuple[tuple[str, bool], ...]:
    """List (unknown field, whether ignoring it would change training); cached, as the records of a file share keys."""
    return tuple((name, _is_risky(str(name))) for name in names if name not in known)


def _is_risky(name: str) -> bool:
    plain = _plain_name(name)
    return any(_RISKY.fullmatch(n) is not None for n in ((name,) if _MEDIA.fullmatch(plain) else (name, plain)))


def _plain_name(name: str) -> str:
    """Spelling of a name in the patterns: `toolCalls`, `Tool-Calls` and `TOOL_CALLS` are `tool_calls`."""
    return _WORD_STARTS.sub("_", name).lower()


def _is_metadata(name: str, record: Record) -> bool:
    """Whether a field is harmless: `reasoning` as a flag (Nemotron), `image_url` as the origin of an image (PixMo).

    `video_duration`, `video_url` and similar fields describe a video of the record.
    """
    # A flag does not contain reasoning that would be lost.
    if _plain_name(name) in ("reasoning", "thinking"):
        return isinstance(record[name], bool) or record[name] in ("on", "off", "yes", "no")
    if name in ("image_url", "image_urls"):
        return is_given(record.get("image")) or is_given(record.get("images"))
    return _ABOUT_VIDEO.fullmatch(name) is not None and any(is_given(record.get(key)) for key in ("video", "videos"))


def _is_media_bytes(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = value.get("bytes")
    return isinstance(value, bytes | bytearray) and len(value) > 0
