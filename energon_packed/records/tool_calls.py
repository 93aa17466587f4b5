"""Tool calls, in the one form that chat templates take.

    {"type": "function", "function": {"name": "f", "arguments": {...}}}    `arguments` an object

Records also give `arguments` as JSON text (OpenAI), calls as `{name, arguments}` (ShareGPT, xLAM), or all as JSON
text.
"""

from collections.abc import Mapping
from typing import Any

import orjson

from energon_packed.errors import Reason, RecordError
from energon_packed.records.fields import OBJECT, Record


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


def read_tools(value: Any) -> list[Any]:
    """`functions`, as OpenAI's older format lists them, as tools."""
    functions = _parsed(value, "functions") if isinstance(value, str) else value
    if not isinstance(functions, list | tuple):
        raise RecordError(Reason.MISSING_FIELD, f"functions must be a list, not {type(functions).__name__}")
    return [{"type": "function", "function": one} for one in functions]


def _call(call: Any, what: str) -> dict[str, Any]:
    if not isinstance(call, OBJECT):
        raise RecordError(Reason.MISSING_FIELD, f"a call of {what} is {_short(call)}, not an object")
    function = call.get("function")
    if isinstance(function, OBJECT):
        return {**call, "function": _function(function, what)}
    return {"type": "function", "function": {"arguments": {}, **_function(call, what)}}


def _function(function: Record, what: str) -> dict[str, Any]:
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise RecordError(Reason.MISSING_FIELD, f"a call of {what} has no name: {_short(function)}")
    fields = {key: value for key, value in function.items() if value is not None}
    if "arguments" not in fields:
        return fields
    arguments = fields["arguments"]
    if isinstance(arguments, str):
        arguments = _parsed(arguments or "{}", f"arguments of {name}")
    if not isinstance(arguments, Mapping):
        raise RecordError(Reason.BAD_JSON, f"arguments of {name} are {_short(arguments)}; use a JSON object")
    return {**fields, "arguments": dict(arguments)}


def _parsed(text: str, what: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise RecordError(Reason.BAD_JSON, f"{what} is not JSON: {error}; it begins with {_short(text)}") from error


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
