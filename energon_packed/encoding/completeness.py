"""Whether everything that a conversation says is in its rendered text.

A chat template may have no place for tools, tool calls or reasoning (that of Qwen2.5-VL ignores `tools`), and may drop
a role or parts of a content. What is not rendered is not trained on, so such a conversation is rejected by name.

Contents are searched in the text, one after another; white space and the escapes of JSON are the template's (Llama 3.1
writes results of tools as JSON strings). Names, argument values, reasoning and short contents ("5") may stand in the
text for another reason, so the messages are rendered once more with a marker in the place of each, and the markers are
searched. The ids of calls and the `name` of a tool's result are links, not text: templates need not render them.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from energon_packed.encoding.skeleton import Span
from energon_packed.errors import Reason, RecordError

Messages = Sequence[dict[str, Any]]
_REASONING = "reasoning_content"
_SHORT = 12  # characters: a shorter content is not searched for, but marked


def check_rendered(
    text: str, messages: Messages, tools: Sequence[Any] | None, render: Callable[[Messages, Any], str]
) -> None:
    """Reject a conversation of which the template drops something.

    Args:
        text: the rendered conversation.
        messages: with string contents.
        tools: JSON schemas, or None.
        render: the template.

    Raises:
        RecordError: `not_rendered`; the detail names the field.
    """
    field = _dropped_field(text, messages, tools, render)
    if field is None:
        return
    remedy = "has no place for it; remove it from the record, or use the `tokenizer` of a model whose template has one"
    for turn, message in enumerate(messages[:-1]):
        if message["role"] == "assistant" and _names(field, turn) and _kept_last(messages[: turn + 1], tools, render):
            remedy = (
                "drops it once later turns follow, as at inference; make a record that ends with this turn, and "
                "remove the reasoning from this one"
            )
    raise RecordError(Reason.NOT_RENDERED, f"{field} is not in the rendered text: the chat template {remedy}")


def _names(field: str, turn: int) -> bool:
    return re.search(rf"\bturn {turn}\b", field) is not None


def _kept_last(messages: Messages, tools: Sequence[Any] | None, render: Callable[[Messages, Any], str]) -> bool:
    """Whether the last turn is complete where no turn follows it; what other turns lack is told for them."""
    try:
        field = _dropped_field(render(messages, tools), messages, tools, render)
    except RecordError:
        return False
    return field is None or not _names(field, len(messages) - 1)


def _dropped_field(
    text: str, messages: Messages, tools: Sequence[Any] | None, render: Callable[[Messages, Any], str]
) -> str | None:
    """The first field that is not in the text; None where all are."""
    content = _dropped_content(text, messages)
    if content is not None:
        return content
    marks = _Marks(text)
    marked = [marks.message(turn, message) for turn, message in enumerate(messages)]
    marked_tools = [marks.tool(number, tool) for number, tool in enumerate(tools or ())]
    if not marks.fields:
        return None
    try:
        again = render(marked, marked_tools or None)
    except RecordError:  # the template looks into the values: search for them as they are
        again = None
    for mark, (field, value) in marks.fields.items():
        if (mark not in again) if again is not None else not any(form in text for form in _forms(value)):
            return field
    return None


def turn_places(text: str, contents: Sequence[str]) -> list[Span]:
    """Characters [start, end) of each content in the rendered text, found one after another; white space around a
    content may be the template's."""
    places: list[Span] = []
    for content in contents:
        start = places[-1][1] if places else 0
        places.append(_find(text, content, start) or (start, start))
    return places


def _dropped_content(text: str, messages: Messages) -> str | None:
    start, spaceless = 0, ""
    for turn, message in enumerate(messages):
        found = _find(text, message["content"], start)
        if found is not None:
            start = found[1]
            continue
        spaceless = spaceless or "".join(text.split())
        if "".join(message["content"].split()) not in spaceless:
            return f"the content of turn {turn} ({message['role']})"
    return None


def _find(text: str, content: str, start: int) -> Span | None:
    """Where a content stands after `start`: as it is, or else as JSON."""
    content = content.strip()
    found = text.find(content, start)
    if found < 0:
        content = json.dumps(content, ensure_ascii=False)[1:-1]
        found = text.find(content, start)
    return None if found < 0 else (found, found + len(content))


class _Marks:
    """Copies of messages and tools with a marker for each name, argument value, reasoning and short content.

    Attributes:
        fields: what each marker stands for: (name of the field, value).
    """

    def __init__(self, text: str) -> None:
        """For a text that holds none of the markers."""
        self.fields: dict[str, tuple[str, Any]] = {}
        self._prefix = "zqx"
        while self._prefix in text:
            self._prefix += "q"

    def message(self, turn: int, message: dict[str, Any]) -> dict[str, Any]:
        """A message with markers."""
        copy = dict(message)
        if 0 < len(message["content"].strip()) < _SHORT:
            copy["content"] = self._mark(f"the content of turn {turn} ({message['role']})", message["content"])
        if message.get("name") and message["role"] != "tool":
            copy["name"] = self._mark(f"the name of turn {turn} ({message['role']})", message["name"])
        if message.get(_REASONING):
            copy[_REASONING] = self._mark(f"the reasoning of turn {turn}", message[_REASONING])
        if message.get("tool_calls"):
            copy["tool_calls"] = [self._call(turn, call) for call in message["tool_calls"]]
        return copy

    def tool(self, number: int, tool: Any) -> Any:
        """A tool schema with a marker for its name."""
        inner = tool.get("function")
        if isinstance(inner, dict):
            return {**tool, "function": self.tool(number, inner)}
        return {**tool, "name": self._mark(f"the tool {tool['name']}", tool["name"])}

    def _call(self, turn: int, call: Any) -> Any:
        if not isinstance(call, dict):
            return call
        inner = call.get("function")
        if isinstance(inner, dict):
            return {**call, "function": self._call(turn, inner)}
        copy = dict(call)
        if call.get("name"):
            copy["name"] = self._mark(f"the tool call {call['name']} of turn {turn}", call["name"])
        if "arguments" in call:
            copy["arguments"] = self._values(f"argument of {call.get('name')} in turn {turn}", call["arguments"])
        return copy

    def _values(self, field: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._values(f"the {key} {field}", item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._values(field, item) for item in value]
        return self._mark(field, value)

    def _mark(self, field: str, value: Any) -> str:
        mark = f"{self._prefix}{len(self.fields)}xqz"
        self.fields[mark] = (field, value)
        return mark


def _forms(value: Any) -> tuple[str, ...]:
    """How a template may write a value: as it is, or as JSON."""
    plain = str(value).strip()
    return (
        plain,
        json.dumps(value, ensure_ascii=False, default=str).strip('"'),
        json.dumps(value, default=str).strip('"'),
    )
