"""JSON text in, its value out, without loss: integers of any size, and all digits of an `id`."""

import json
import re
from collections.abc import Callable
from typing import Any

import orjson

# Limits of exact parsing: orjson is exact up to 64 bits (18 digits always fit), a float keeps 15 digits.
_LONG_NUMBER = re.compile(rb"[0-9]{19}")
_STEP = 19
_DIGIT = re.compile(rb"[0-9]")
_LONGEST_EXACT = 15  # digits that a float always keeps


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
