"""Values of record fields, checked: a wrong type is a RecordError that names the field."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from energon_packed.errors import Reason, RecordError
from energon_packed.records.json_text import parse_json

Record = Mapping[str, Any]
OBJECT = (dict, Mapping)  # dict first: testing it is five times as fast
_DEEPEST = 100  # objects and lists in each other; templates and JSON writers call themselves for each level
_LARGEST_NUMBER = 1e9  # of fps and timestamp_decimal


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
    if not isinstance(value, list | tuple):
        raise RecordError(Reason.MISSING_FIELD, f"{what} must be a list, not {type(value).__name__}")
    if not value:
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
    if not value:
        return None
    if not isinstance(value, list | tuple):
        raise RecordError(Reason.MISSING_FIELD, f"{what} must be a list, not {type(value).__name__}")
    return list(value)


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
