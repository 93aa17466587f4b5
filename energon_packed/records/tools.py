"""Function schemas and calls of a record in, `tools` and `tool_calls` for the chat template out, each rendered once.

Hermes' function calling datasets repeat their tools in the system text, and calls as `<tool_call>` text. A template
would write them a second time, so the copy in the text is kept and the field is dropped; the conversation gets a note.
"""

import re
from typing import Any

import orjson

from energon_packed.errors import Reason, RecordError
from energon_packed.records.conversation import Message
from energon_packed.records.exact_json import parse_json
from energon_packed.records.fields import OBJECT, Record, is_given, missing_field, read_json_list, unsupported_field
from energon_packed.records.media.fields import Media
from energon_packed.records.record_formats import PartialConversation
from energon_packed.records.unused_fields import unsupported

TOOLS_IN_TEXT = "tools are in the system text"
"""Note of a conversation whose `tools` field is not rendered, because the system text contains the tools."""
CALLS_IN_TEXT = "tool calls are in the text"
"""Note of a conversation with `tool_calls` that are not rendered, because the text of the turn contains them."""
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


def read_tools(record: Record, draft: PartialConversation, media: Media) -> list[Any] | None:
    """Read the tools for the template; None if there are none, or if the system text contains all of them.

    Raises:
        RecordError: a tool has no name, the system text contains only some tools, or the record has no turns.
    """
    tools = read_json_list(record.get("tools"), "tools")
    field = "tools" if tools is not None else "functions"
    if is_given(record.get("functions")):
        # `functions` is the older name of OpenAI; the two may list different functions.
        if tools is not None:
            raise unsupported_field("the record has both tools and functions; keep tools")
        functions = read_json_list(record["functions"], "functions") or ()
        tools = [{"type": "function", "function": _schema(schema, field)} for schema in functions]
    if not tools:
        return None
    if not draft.messages:
        raise unsupported(
            field, remedy="a document or a list of tokens has no place for them; remove it, or pass messages"
        )
    tools = [_schema(tool, field) for tool in tools]
    names = [_name(tool, field) for tool in tools]
    # Bare schemas (xLAM, LLaMA-Factory) get the envelope of OpenAI, which chat templates expect.
    tools = [
        tool if isinstance(tool.get("function"), OBJECT) else {"type": "function", "function": dict(tool)}
        for tool in tools
    ]
    system = draft.messages[0].content if draft.messages[0].role == "system" else ""
    # Only the name is compared: datasets format the schemas of the system text in many ways.
    repeated = [name for name in names if re.search(rf"""["']name["']\s*:\s*["']{re.escape(name)}["']""", system)]
    if not repeated:
        return tools
    # A template would render all tools, and the repeated tools twice.
    if len(repeated) < len(names):
        raise unsupported(
            field, remedy=f"the system text has {repeated[0]} but not all of them; write them in one place"
        )
    media.notes.append(TOOLS_IN_TEXT)
    return None


def without_written_calls(message: Message, media: Media) -> Message:
    """Drop `tool_calls` of a turn if its text contains them as `<tool_call>` JSON.

    Raises:
        RecordError: `unsupported_field` if the calls in the text and in the field differ.
    """
    calls = message.extra.get("tool_calls")
    written = _CALL.findall(message.content) if calls else ()
    if not written:
        return message
    try:
        # Order matters: the template renders calls in the order of the field.
        same = [_short(parse_json(text)) for text in written] == [_short(call["function"]) for call in calls or ()]
    except orjson.JSONDecodeError:
        same = False
    if not same:
        raise unsupported_field("a turn has tool_calls and other calls as <tool_call> in its text; keep one")
    media.notes.append(CALLS_IN_TEXT)
    extra = {key: value for key, value in message.extra.items() if key != "tool_calls"}
    return message._replace(extra=extra)


def _short(call: Any) -> Any:
    return (call.get("name"), call.get("arguments")) if isinstance(call, OBJECT) else None


def _schema(tool: Any, field: str) -> Any:
    """Read a tool schema; JSON text is parsed."""
    if isinstance(tool, str):
        try:
            tool = parse_json(tool)
        except orjson.JSONDecodeError as error:
            raise RecordError(Reason.BAD_JSON, f"an entry of {field} is not JSON: {error}") from error
    if not isinstance(tool, OBJECT):
        raise missing_field(f"an entry of {field} is {type(tool).__name__}; use a JSON schema")
    return tool


def _name(tool: Record, field: str) -> str:
    inner = tool.get("function")
    name = inner.get("name") if isinstance(inner, OBJECT) else tool.get("name")
    if not isinstance(name, str) or not name:
        raise missing_field(f"a tool of {field} has no name; use a JSON schema with name and parameters")
    return name
