"""Where the turns of a conversation stand in its rendered text, found by markers in the contents of all of it.

Prefixes of a conversation tell where a turn begins and ends only for templates that never look ahead. Those of
reasoning models do: Qwen3 writes an empty `<think>` block in the last turn alone, and forgets the reasoning of turns
before the last question. For them, the conversation is rendered once more with two private-use characters in each
content. The rendering counts only if it is the same text without these characters:

    text      ..user\n Hi <|im_end|>\n<|im_start|>assistant\n Hello. <|im_end|>\n<|im_start|>user\n ..
    marked    ..user\n[Hi]<|im_end|>\n<|im_start|>assistant\n[Hello.]<|im_end|>\n<|im_start|>user\n[..
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Any

from energon_packed.encoding.skeleton import Span, marker
from energon_packed.errors import RecordError

Messages = Sequence[dict[str, Any]]
_FIRST, _STEP = 0xF0000, 0x1000  # Supplementary Private Use Area-A
_BOUNDARY = re.compile(r"[\n>\]:]")


Render = Callable[[Messages, bool], str]
"""Renders messages; with True, followed by the generation prompt."""


@dataclass(frozen=True, slots=True)
class TurnShape:
    """What a template writes around the text of the assistant.

    Attributes:
        prompt: the generation prompt: what the model sees last at inference.
        header: the part of it that earlier turns begin with too. Qwen3.5's prompt opens a `<think>` block, and no turn
            before the last question has one.
        end: the token after the last turn; None where there is none, as in GLM-4.5.
        added: added tokens, the longest first.
        special: the special ones of them.
    """

    prompt: str
    header: str
    end: str | None
    added: tuple[str, ...]
    special: tuple[str, ...]

    @classmethod
    def of(cls, render: Render, added: tuple[str, ...], special: tuple[str, ...]) -> "TurnShape":
        """The shape of a template, as two plain questions and answers show it.

        Raises:
            RecordError: the template does not render them.
        """
        talk = [{"role": ("user", "assistant")[turn % 2], "content": marker(turn)} for turn in range(4)]
        after = render(talk[:2], False).partition(marker(1))[2].lstrip()
        end = next((token for token in added if after.startswith(token)), None)
        asked, text = render(talk[:1], True), render(talk, False)
        prompt = asked[_common(asked, render(talk[:1], False)) :]
        size = len(prompt)
        for before in (asked, render(talk[:3], True)):
            size = min(size, max(0, _common(text, before) - (len(before) - len(prompt))))
        return cls(prompt, prompt[:size], end, added, special)

    @property
    def opener(self) -> str | None:
        """The special token that the generation prompt begins with."""
        return next((token for token in self.special if self.prompt.startswith(token)), None)

    def after_prompt(self, text: str, start: int) -> int | None:
        """Where the prompt that begins at `start` ends; None where there is none."""
        return next((start + len(head) for head in self.heads if text.startswith(head, start)), None)

    @property
    def heads(self) -> tuple[str, ...]:
        """What a turn may begin with, the longest first: the prompt, the header, or the first line of it."""
        line = self.header[: self.header.find("\n") + 1]
        return tuple(head for head in dict.fromkeys((self.prompt, self.header, line)) if head)

    def end_before(self, text: str, start: int, until: int) -> int | None:
        """Where the turn that begins at `start` ends, of the text up to the next content: after the token that the
        model stops with. None where no token tells it."""
        if self.end and (at := text.rfind(self.end, start, until)) >= 0:
            return at + len(self.end)
        if self.opener and (at := text.rfind(self.opener, start, until)) >= 0:
            # GPT-OSS: <|return|> after the last turn, <|end|> or <|call|> after others
            trimmed = text[start:at].rstrip()
            return start + len(trimmed) if trimmed.endswith(self.special) else at
        last = max(((text.rfind(token, start, until), token) for token in self.special), default=(-1, ""))
        return last[0] + len(last[1]) if last[0] >= 0 else None

    def with_stop(self, text: str, end: int) -> int:
        """Where a turn without a token of its own ends: GLM-4.5 stops with the opener of the next turn."""
        if self.end is not None:
            return end
        follows = next((token for token in self.special if text.startswith(token, end)), "")
        return end + (len(follows) if follows != self.opener else 0)


class TurnFinder:
    """Finds the turns of one rendered conversation."""

    def __init__(self, text: str, messages: Messages, render: Render, shape: TurnShape) -> None:
        self._text = text
        self._messages = messages
        self._render = render
        self._shape = shape

    def span(self, turn: int) -> Span | None:
        """Characters that the model generates as this assistant turn; None where that cannot be told."""
        start = self._start(turn)
        end = None if start is None else self._end(turn, start)
        if start is None or end is None:
            return None
        answer = self._messages[turn]["content"].rpartition("</think>")[2]
        written = self._text[max(0, start - len(self._shape.prompt)) : end]  # it may begin as the prompt does: <think>
        # Gemma 4 writes what a call is announced with after the result of the call.
        told = answer.strip() in written or "".join(answer.split()) in "".join(written.split())
        return (start, end) if told else None

    def begin(self, turn: int) -> int:
        """Where the text of any turn begins: after the turns before it.

        Raises:
            RecordError: the template does not render the turns before it alone, and markers do not tell.
        """
        if not turn:
            return 0
        nested, answered = self._earlier(turn, ask=False), self._messages[turn - 1]["role"] == "assistant"
        if nested is not None:
            return self._shape.with_stop(self._text, len(nested)) if answered else len(nested)
        before = self.span(turn - 1) if answered else self._places.get(turn - 1)
        if before is not None:
            return before[1]
        earlier = self._render(self._messages[:turn], False)
        differs = (i for i, (a, b) in enumerate(zip(self._text, earlier, strict=False)) if a != b)
        return next(differs, min(len(earlier), len(self._text)))

    def _start(self, turn: int) -> int | None:
        """After the prompt for this turn: the one of the text before it, or the next after the content before it."""
        shape = self._shape
        if turn:
            asked = self._prefix(turn, ask=True)
            if asked is not None and self._text.startswith(asked):
                # Gemma 4 asks for no turn after a result, and begins it all the same.
                again = None if asked.endswith(shape.prompt) else shape.after_prompt(self._text, len(asked))
                return again or len(asked)
            if asked is not None and asked.endswith(shape.prompt):
                size = len(asked) - len(shape.prompt)
                if self._text.startswith(asked[:size]):
                    return shape.after_prompt(self._text, size)
            if turn - 1 not in self._places:
                return None
        begin = self._places[turn - 1][1] if turn else 0
        at = self._text.find(shape.heads[-1], begin) if shape.header else -1
        return None if at < 0 else shape.after_prompt(self._text, at)

    def _end(self, turn: int, start: int) -> int | None:
        last = turn == len(self._messages) - 1
        until = self._text if last else self._earlier(turn + 1, ask=False)
        if until is not None and len(until) >= start:
            # White space after the end-of-turn token is the template's, not a target.
            trimmed = until.rstrip()
            ended = len(trimmed) > start and trimmed.endswith(self._shape.added)
            return self._shape.with_stop(self._text, len(trimmed) if ended else len(until))
        place = self._places.get(turn + 1)
        return None if place is None or place[0] < start else self._shape.end_before(self._text, start, place[0])

    def _earlier(self, turn: int, *, ask: bool) -> str | None:
        """The text of the turns before, where the text of all turns begins with it."""
        earlier = self._prefix(turn, ask=ask)
        return earlier if earlier is not None and self._text.startswith(earlier) else None

    def _prefix(self, turn: int, *, ask: bool) -> str | None:
        try:
            return self._render(self._messages[:turn], ask)
        except RecordError:  # the template refuses them alone: Qwen3.5 wants a question
            return None

    @cached_property
    def _places(self) -> dict[int, Span]:
        return content_places(self._text, self._messages, lambda messages: self._render(messages, False))


def _common(one: str, other: str) -> int:
    """Length of the common prefix, back to the end of a line or tag where it ends inside of one."""
    size = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    if size == min(len(one), len(other)):
        return size
    return max((match.end() for match in _BOUNDARY.finditer(one, 0, size)), default=0)


def content_places(text: str, messages: Messages, render: Callable[[Messages], str]) -> dict[int, Span]:
    """Characters [start, end) of the contents in a rendered conversation, by turn.

    A content that is dropped, repeated, or that the template looks into is not among them.

    Args:
        text: the rendered conversation.
        messages: with string contents.
        render: the template.
    """
    others = {turn for turn, message in enumerate(messages) if message["role"] != "assistant"}
    for turns, inside in ((set(range(len(messages))), False), (others, False), (others, True)):
        places = _marked_places(text, messages, render, turns, inside=inside)
        if places is not None:
            return places
    return {}


def _marked_places(
    text: str, messages: Messages, render: Callable[[Messages], str], turns: set[int], *, inside: bool
) -> dict[int, Span] | None:
    """None where the template gives another text for contents with markers.

    With `inside`, markers are put into the middle of contents: a template may look at how they begin and end.
    """
    first = next(base for base in count(_FIRST, _STEP) if not re.search(_class(base), text))
    marked, cuts = [dict(message) for message in messages], {}
    for turn in sorted(turns)[: _STEP // 2]:
        content = messages[turn]["content"]
        if not content.strip() and messages[turn]["role"] == "assistant":
            continue  # beside a tool call; templates write a line break after any content
        size = len(content.rstrip())
        start = min(len(content) - len(content.lstrip()), size)
        left, right = ((start + size) // 2,) * 2 if inside else (start, size)
        opener, closer = chr(first + 2 * turn), chr(first + 2 * turn + 1)
        marked[turn]["content"] = content[:left] + opener + content[left:right] + closer + content[right:]
        cuts[turn] = (content[start:left], content[right:size])
    try:
        again = render(marked)
    except RecordError:
        return None
    if re.sub(_class(first), "", again) != text:
        return None
    found: dict[int, list[int]] = {}
    for number, match in enumerate(re.finditer(_class(first), again)):
        found.setdefault(ord(match[0]) - first, []).append(match.start() - number)
    places = {}
    for turn, (before, after) in cuts.items():
        starts, ends = found.get(2 * turn, []), found.get(2 * turn + 1, [])
        if len(starts) == len(ends) == 1 and text.endswith(before, 0, starts[0]) and text.startswith(after, ends[0]):
            places[turn] = (starts[0] - len(before), ends[0] + len(after))
    return places


def _class(first: int) -> str:
    return f"[{chr(first)}-{chr(first + _STEP - 1)}]"
