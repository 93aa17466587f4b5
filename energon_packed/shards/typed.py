"""`typed`: a dataclass from JSON of strangers, every value of the declared type and within bounds."""

import math
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")
_LARGEST = 2**63 - 1
_MOST_SHOWN = 60  # characters of a value in a message


def typed(cls: type[T], value: Any, place: str = "") -> T:
    """An object of a dataclass whose fields are numbers, texts, and lists, mappings and dataclasses of them.

    Args:
        cls: the dataclass. `Any` in it stands for a number, a text, true, false or null.
        value: parsed JSON.
        place: of the value in the file, for messages.

    Raises:
        TypeError: a field is missing, unknown or of another type.
        ValueError: a number is negative, not finite, or needs more than 63 bits.
    """
    if not isinstance(value, dict):
        raise TypeError(f"{place or 'the content'} is {_shown(value)}, not an object")
    hints = get_type_hints(cls)
    known = {field.name for field in fields(cls)}  # type: ignore[arg-type]
    if unknown := sorted(value.keys() - known):
        raise TypeError(f"{place or 'it'} has an unknown field {_shown(unknown[0])}")
    return cls(**{name: _value(hints[name], item, f"{place}.{name}".lstrip(".")) for name, item in value.items()})


def _value(kind: Any, value: Any, place: str) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is UnionType:
        if value is None and NoneType in arguments:
            return None
        return _value(next(one for one in arguments if one is not NoneType), value, place)
    if is_dataclass(kind):
        return typed(kind, value, place)  # type: ignore[arg-type]
    if origin in (list, dict):
        if not isinstance(value, origin):
            raise TypeError(f"{place} is {_shown(value)}, not {'a list' if origin is list else 'an object'}")
        if origin is list:
            return [_value(arguments[0], item, f"{place}[{number}]") for number, item in enumerate(value)]
        return {name: _value(arguments[1], item, f"{place}.{_shown(name)}") for name, item in value.items()}
    if kind is Any:
        if isinstance(value, dict | list):
            raise TypeError(f"{place} is {_shown(value)}, not a number or a text")
        return _bounded(value, place) if isinstance(value, int | float) else value
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number if kind is float else type(value) is kind):
        raise TypeError(f"{place} is {_shown(value)}, not {kind.__name__}")
    return _bounded(value, place) if is_number else value


def _bounded(value: float, place: str) -> float:
    if not math.isfinite(value) or not 0 <= value <= _LARGEST:
        raise ValueError(f"{place} is {value}; it must be from 0 to {_LARGEST}")
    return value


def _shown(value: Any) -> str:
    text = repr(value) if isinstance(value, str | int | float | NoneType) else type(value).__name__
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"
