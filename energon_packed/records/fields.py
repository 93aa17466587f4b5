"""Reads fields of a record: a raw value in, a checked value out; a wrong type is a RecordError.

read_text, read_list, read_tokens..  value of a field -> string, list, int64 array, number
one_text, joined_texts               several alternative or consecutive fields -> one string
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from numbers import Real
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt
import orjson

from energon_packed.errors import Reason, RecordError
from energon_packed.records.exact_json import parse_json

Record = Mapping[str, Any]
OBJECT = (dict, Mapping)  # dict first: testing it is five times as fast
SCALARS = frozenset((str, bool, int, float, type(None)))  # exact classes of most values, for tests on hot paths
ARRAY_REMEDY = "if the file is a JSON array, rename it to .json, or write one record per line"
_DEEPEST = 100  # levels of nesting: templates and JSON writers recurse once per level
# Larger values of fps and timestamp_decimal are faults of the writer, and would overflow when they are rendered.
_LARGEST_NUMBER = 1e9  # of fps and timestamp_decimal
_LARGEST_LABEL = 2**24  # whole numbers are exact in float32
_LARGEST_SETTING = 1e12  # of settings of images and videos
SYSTEM_FIELDS = ("system", "system_prompt", "system_message", "system_instruction", "systemInstruction")
COMMON_FIELDS = frozenset(
    (
        *("id", "images", "image", "video", "videos", "audio", "audios", "patch_positions", "fps"),
        *("timestamp_decimal", "image_base64_str", "tools", "functions", *SYSTEM_FIELDS),
        "chat_template_kwargs",
    )
)
"""Fields that `normalize` itself reads, in every record format."""


def is_given(value: Any) -> bool:
    """Whether a value is neither null nor empty; an object is empty if all of its values are."""
    if value is None or value.__class__ is str or value.__class__ is list:  # almost every call
        return bool(value)
    if isinstance(value, Mapping):
        return any(is_given(inner) for inner in value.values())
    if getattr(value, "shape", None) == ():  # `len` of an array or tensor of one number is an error
        return True
    return not hasattr(value, "__len__") or len(value) > 0


def given(record: Record, names: Iterable[str]) -> list[str]:
    """List the fields of these names that have a value, in the order of the names."""
    return [name for name in names if is_given(record.get(name))]


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a value is an integer or a float; True and False, which Python counts as integers, are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


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
    if is_number(value) and (isinstance(value, int) or math.isfinite(value)):
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


def read_label(value: Any) -> tuple[float, ...] | None:
    """Read the label of a sample: a number, true or false, or a number for each class; None for other values.

    A list of integers is not read: it may have a number for each class, or the indices of some classes.
    """
    values = value if isinstance(value, list | tuple) else (value,)
    if not values or not all(isinstance(number, int | float) and abs(number) <= _LARGEST_LABEL for number in values):
        return None
    if isinstance(value, list | tuple) and not any(isinstance(number, bool | float) for number in values):
        return None
    return tuple([float(number) for number in values])


def read_setting(value: Any, label: str, *, is_whole: bool) -> int | float:
    """Read a setting of an image or video, a number above 0.

    Args:
        value: the value.
        label: the setting, for errors, such as `max_pixels of an image`.
        is_whole: it must be a whole number, and is returned as an int.

    Raises:
        RecordError: `unsupported_field`.
    """
    if not is_number(value) or not 0 < value <= _LARGEST_SETTING:
        raise unsupported_field(f"{label} must be a number above 0, not {shown(value)}")
    if is_whole and value != int(value):
        raise unsupported_field(f"{label} must be a whole number, not {shown(value)}")
    return int(value) if is_whole else float(value)


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


def missing_field(detail: str) -> RecordError:
    """Make the RecordError for a field that is missing, or whose value has another type than needed."""
    return RecordError(Reason.MISSING_FIELD, detail)


def unsupported_field(detail: str) -> RecordError:
    """Make the RecordError for a field or value that is not supported."""
    return RecordError(Reason.UNSUPPORTED_FIELD, detail)
