"""Tool calls, in the one form that chat templates take.

    {"type": "function", "function": {"name": "f", "arguments": {...}}}    `arguments` an object

Records also give `arguments` as JSON text (OpenAI) or as `parameters` (Llama), calls as `{name, arguments}` (ShareGPT,
xLAM), or all as JSON text.
"""

from collections.abc import Mapping
from typing import Any

import orjson

from energon_packed.errors import Reason, RecordError
from energon_packed.records.accounting import is_given
from energon_packed.records.fields import OBJECT, Record, check_writable
from energon_packed.records.json_text import parse_json

_CALL = frozenset(("id", "type", "index", "function"))
_FUNCTION = frozenset(("name", "arguments", "parameters"))


def read_tool_calls(value: Any, what: str) -> list[dict[str, Any]]:
    """Calls of one turn.

    Args:
        value: a call, a list of them, or JSON text of either.
        what: where it stands, for errors.

    Raises:
        RecordError: `bad_json` for text that is not JSON, `missing_field` for a call without a name.
    """
    calls = _parsed(value, what) if isinstance(value, str) else value
    calls = [calls] if isinstance(calls, OBJECT) else calls
    if not isinstance(calls, list | tuple) or not calls:
        raise RecordError(
            Reason.MISSING_FIELD, f"{what} is {_short(value)}; use a list of calls with a name and arguments"
        )
    return [_call(call, what) for call in calls]


def _call(call: Any, what: str) -> dict[str, Any]:
    if not isinstance(call, OBJECT):
        raise RecordError(Reason.MISSING_FIELD, f"a call of {what} is {_short(call)}, not an object")
    function = call.get("function")
    if isinstance(function, OBJECT):
        _check_keys(call, _CALL)
        _check_keys(function, _FUNCTION)
        return {**call, "function": _function(function, what)}
    _check_keys(call, (_CALL | _FUNCTION) - {"function"})
    ident = {"id": call["id"]} if is_given(call.get("id")) else {}
    return {**ident, "type": "function", "function": _function(call, what)}


def _check_keys(call: Record, known: frozenset[str]) -> None:
    for name in call:
        if name not in known and is_given(call[name]):
            raise RecordError(
                Reason.UNSUPPORTED_FIELD,
                f"the field {name} of a tool call is not supported: a call has a name and arguments",
            )


def _function(function: Record, what: str) -> dict[str, Any]:
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise RecordError(Reason.MISSING_FIELD, f"a call of {what} has no name: {_short(function)}")
    given = [key for key in ("arguments", "parameters") if function.get(key) not in (None, "", {}, [])]
    if len(given) > 1:
        raise RecordError(Reason.UNSUPPORTED_FIELD, f"a call of {name} has arguments and parameters; keep arguments")
    arguments = function[given[0]] if given else {}
    if isinstance(arguments, str):
        arguments = _parsed(arguments, f"arguments of {name}")
    if not isinstance(arguments, Mapping):
        raise RecordError(Reason.BAD_JSON, f"arguments of {name} are {_short(arguments)}; use a JSON object")
    return {"name": name, "arguments": dict(arguments)}


def _parsed(text: str, what: str) -> Any:
    try:
        value = parse_json(text)
    except orjson.JSONDecodeError as error:
        raise RecordError(Reason.BAD_JSON, f"{what} is not JSON: {error}; it begins with {_short(text)}") from error
    check_writable(value, what)
    return value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
