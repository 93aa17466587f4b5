"""`check_rendered`: messages and their rendered text -> an error that names the first field that is not in the text.

A chat template may ignore tools, tool calls or reasoning (Qwen2.5-VL's ignores `tools`), and may drop a role or a part
of a content. A model would not be trained on it, so such a conversation is rejected.

Contents are searched in the text in order, with other white space or as JSON strings (Llama 3.1 writes tool results
so). Names, argument values, reasoning and short contents ("5") may be in the text for another reason. For these, the
messages are rendered again with a marker in place of each value, and the markers are searched. Templates need not
render the ids of calls and the `name` of a tool result, which are links and not text.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from energon_packed.encoding.skeleton import Span
from energon_packed.errors import Reason, RecordError

Messages = Sequence[dict[str, Any]]
Render = Callable[[Messages, Any], str]
_REASONING = "reasoning_content"
_SHORT = 12  # characters: a shorter content is not searched for, but marked


def check_rendered(
    text: str, messages: Messages, tools: Sequence[Any] | None, render: Render, media: Sequence[str] = ()
) -> None:
    """Raise an error if the template drops a field of a conversation.

    Args:
        text: the rendered conversation.
        messages: its messages, with string contents.
        tools: JSON schemas, or None.
        render: renders messages and tools by the template.
        media: tokens of images and audio files in contents; templates may move them, remove white space next to them,
            or number them.

    Raises:
        RecordError: `not_rendered`; the detail names the field.
    """

    def is_kept(turns: Messages) -> bool:
        """Whether the last of these turns is rendered completely; earlier turns are not considered."""
        try:
            dropped = _dropped_field(render(turns, tools), turns, tools, render, media)
        except RecordError:
            return False
        return dropped is None or not _names(dropped, len(turns) - 1)

    field = _dropped_field(text, messages, tools, render, media)
    if field is None:
        return
    remedy = "has no place for it; remove it from the record, or use the `tokenizer` of a model whose template has one"
    # Templates of reasoning models drop the reasoning of all turns but the last; then another remedy helps.
    for turn, message in enumerate(messages[:-1]):
        if message["role"] == "assistant" and _names(field, turn) and is_kept(messages[: turn + 1]):
            remedy = (
                "drops it once later turns follow, as at inference; make a record that ends with this turn, and "
                "remove the reasoning from this one"
            )
    raise RecordError(Reason.NOT_RENDERED, f"{field} is not in the rendered text: the chat template {remedy}")


def _names(field: str, turn: int) -> bool:
    return re.search(rf"\bturn {turn}\b", field) is not None


def _dropped_field(
    text: str, messages: Messages, tools: Sequence[Any] | None, render: Render, media: Sequence[str]
) -> str | None:
    """The first field that is not in the text; None if all are there."""
    if (content := _dropped_content(text, messages, media)) is not None:
        return content
    marks = _Marks(text)
    marked = [marks.message(turn, message) for turn, message in enumerate(messages)]
    marked_tools = [marks.tool(tool) for tool in tools or ()]
    if not marks.fields:
        return None
    try:
        again = render(marked, marked_tools or None)
    except RecordError:  # the template validates the values: search for the values themselves
        again = None
    for mark, (field, value) in marks.fields.items():
        is_there = any(form in text for form in _forms(value)) if again is None else mark in again
        if not is_there:
            return field
    return None


def turn_places(text: str, contents: Sequence[str], media: Sequence[str] = ()) -> list[Span]:
    """Find the characters [start, end) of each content in the rendered text, in order, without white space around it.

    A content that is not found has an empty span after the content before it.
    """
    spans: list[Span] = []
    for content in contents:
        start = spans[-1][1] if spans else 0
        spans.append(_find_pieces(text, content, start, media) or (start, start))
    return spans


def _dropped_content(text: str, messages: Messages, media: Sequence[str]) -> str | None:
    start, spaceless = 0, ""
    for turn, message in enumerate(messages):
        span = _find_pieces(text, message["content"], start, media)
        if span is not None:
            start = span[1]
            continue
        # Slower and less strict: the template may change white space, and may write contents in another order.
        spaceless = spaceless or "".join(text.split())
        if any("".join(piece.split()) not in spaceless for piece in _pieces(message["content"], media)):
            return f"the content of turn {turn} ({message['role']})"
    return None


def _pieces(content: str, media: Sequence[str]) -> list[str]:
    """The text between the media of a content."""
    return re.split("|".join(map(re.escape, media)), content) if media else [content]


def _find_pieces(text: str, content: str, start: int, media: Sequence[str]) -> Span | None:
    """Find a content as `_find`, or else the text between its media, piece by piece."""
    span = _find(text, content, start)
    pieces = [content] if span is not None else _pieces(content, media)
    if span is not None or len(pieces) == 1:
        return span
    first, end = None, start
    for piece in filter(str.strip, pieces):
        if (span := _find(text, piece, end)) is None:
            return None
        first, end = span[0] if first is None else first, span[1]
    return (start if first is None else first, end)


def _find(text: str, content: str, start: int) -> Span | None:
    """Find a content in the text after `start`: unchanged, or else as a JSON string."""
    content = content.strip()
    at = text.find(content, start)
    if at < 0:
        content = json.dumps(content, ensure_ascii=False)[1:-1]
        at = text.find(content, start)
    return None if at < 0 else (at, at + len(content))


class _Marks:
    """Copies of messages and tools with a marker for each name, argument value, reasoning and short content.

    Attributes:
        fields: (name of the field, value) by marker.
    """

    def __init__(self, text: str) -> None:
        """Choose markers that do not occur in `text`."""
        self.fields: dict[str, tuple[str, Any]] = {}
        self._prefix = "zqx"
        while self._prefix in text:
            self._prefix += "q"

    def message(self, turn: int, message: dict[str, Any]) -> dict[str, Any]:
        """Copy a message with markers."""
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

    def tool(self, tool: Any) -> Any:
        """Copy a tool schema with a marker for its name."""
        inner = tool.get("function")
        if isinstance(inner, dict):
            return {**tool, "function": self.tool(inner)}
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
    """Ways in which a template may write a value: unchanged, or as JSON."""
    as_json = [json.dumps(value, ensure_ascii=is_ascii, default=str).strip('"') for is_ascii in (False, True)]
    return str(value).strip(), *as_json
