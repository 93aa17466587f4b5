"""TurnFinder: rendered text and its messages -> the characters of each turn, found by prefixes, else by markers.

    TurnShape        text that the template writes around answers, found once with two questions and answers
    TurnFinder       characters of a turn: the rendered turns before it are usually a prefix of the text
    content_places   characters of all contents, found with markers; used if prefixes do not help

Prefixes locate turns only for templates that never look ahead. Templates of reasoning models do: Qwen3 writes an empty
`<think>` block only in the last turn, and drops the reasoning of turns before the last question. For them, the
conversation is rendered again with two private-use characters in each content. The result is used only if it is the
same text without these characters:

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
_LONG = 32  # messages from which turns with the same text around them are located once: each rendering is as long
_BOUNDARY = re.compile(r"[\n>\]:]")


Render = Callable[[Messages, bool], str]
"""Renders messages; with True, followed by the generation prompt."""


@dataclass(frozen=True, slots=True)
class TurnShape:
    """Text that a template writes around the text of the assistant.

    Attributes:
        prompt: the generation prompt, which is the end of the model's input at inference.
        header: the first part of the prompt, with which earlier turns start too. Qwen3.5's prompt opens a `<think>`
            block, which turns before the last question do not have.
        end: the token after the last turn; None without such a token, as in GLM-4.5.
        added: added tokens, the longest first.
        special: added tokens that are special, the longest first.
    """

    prompt: str
    header: str
    end: str | None
    added: tuple[str, ...]
    special: tuple[str, ...]

    @classmethod
    def of(cls, render: Render, added: tuple[str, ...], special: tuple[str, ...]) -> "TurnShape":
        """Compute the shape of a template from two plain questions and answers.

        Raises:
            RecordError: the template does not render them.
        """
        turns = [{"role": ("user", "assistant")[turn % 2], "content": marker(turn)} for turn in range(4)]
        after = render(turns[:2], False).partition(marker(1))[2].lstrip()
        end = next((token for token in added if after.startswith(token)), None)
        asked, text = render(turns[:1], True), render(turns, False)
        prompt = asked[_common(asked, render(turns[:1], False)) :]
        # The header is the part of the prompt that is before both answers in the text of all turns.
        size = len(prompt)
        for before in (asked, render(turns[:3], True)):
            size = min(size, max(0, _common(text, before) - (len(before) - len(prompt))))
        return cls(prompt, prompt[:size], end, added, special)

    @property
    def opener(self) -> str | None:
        """The special token at the start of the generation prompt, or None."""
        return next((token for token in self.special if self.prompt.startswith(token)), None)

    def after_prompt(self, text: str, start: int) -> int | None:
        """End of the prompt or header at `start`; None if the text has neither there."""
        return next((start + len(head) for head in self.heads if text.startswith(head, start)), None)

    @property
    def heads(self) -> tuple[str, ...]:
        """Possible starts of a turn, the longest first: the prompt, the header, or the first line of the header."""
        line = self.header[: self.header.find("\n") + 1]
        return tuple(head for head in dict.fromkeys((self.prompt, self.header, line)) if head)

    def end_before(self, text: str, start: int, until: int) -> int | None:
        """End of the turn that starts at `start`: after the token that the model stops with; None if there is none.

        Only the text up to `until`, the next content, is searched.
        """
        if self.end and (at := text.rfind(self.end, start, until)) >= 0:
            return at + len(self.end)
        if self.opener and (at := text.rfind(self.opener, start, until)) >= 0:
            # GPT-OSS: <|return|> after the last turn, <|end|> or <|call|> after others
            trimmed = text[start:at].rstrip()
            return start + len(trimmed) if trimmed.endswith(self.special) else at
        found = ((text.rfind(token, start, until), len(token)) for token in self.special)
        return max((at + size for at, size in found if at >= 0), default=None)

    def with_stop(self, text: str, end: int) -> int:
        """End of a turn in a template without an end-of-turn token: GLM-4.5 stops with the opener of the next turn."""
        if self.end is not None:
            return end
        follows = next((token for token in self.special if text.startswith(token, end)), "")
        return end + (len(follows) if follows != self.opener else 0)


class TurnFinder:
    """Finds the turns of a rendered conversation.

    Args:
        text: the rendered conversation.
        messages: its messages, with string contents.
        render: renders other messages with the same template and tools.
        shape: shape of turns of the template.
    """

    def __init__(self, text: str, messages: Messages, render: Render, shape: TurnShape) -> None:
        self._text = text
        self._messages = messages
        self._render = render
        self._shape = shape
        self._margins: dict[Any, Span] = {}  # of a turn around its content, by the text before and after it

    def span(self, turn: int) -> Span | None:
        """Characters that the model generates as this assistant turn; None if they cannot be located.

        In a long conversation, a turn between the same strings of the template as an earlier turn has the same margins
        around its content: rendering the turns before each turn would need time quadratic in the number of turns.
        """
        around = self._around(turn)
        if around is None:
            return self._rendered_span(turn)
        first, after = self._places[turn]
        if around not in self._margins:
            span = self._rendered_span(turn)
            if span is None or span[0] > first or span[1] < after:
                return span
            self._margins[around] = (first - span[0], span[1] - after)
        before, behind = self._margins[around]
        return first - before, after + behind

    def _around(self, turn: int) -> Any:
        """Role before a turn and strings of the template around its content; None if it must be located by itself.

        That is a turn whose content may be mistaken for a part of the prompt, or for its end.
        """
        if len(self._messages) < _LONG:
            return None
        near = [self._places.get(i) for i in (turn - 1, turn, turn + 1)]
        if None in near:
            return None
        previous, own, following = [place for place in near if place is not None]
        before, behind = self._text[previous[1] : own[0]], self._text[own[1] : following[0]]
        cuts = [(head[:size], head[size:]) for head in self._shape.heads for size in range(len(head))]
        if any([self._text.startswith(rest, own[0]) and before.endswith(start) for start, rest in cuts]):
            return None
        if self._text.endswith(self._shape.added, *own):
            return None
        return self._messages[turn - 1]["role"], before, behind

    def _rendered_span(self, turn: int) -> Span | None:
        if (start := self._start(turn)) is None or (end := self._end(turn, start)) is None:
            return None
        # The span must contain the answer: Gemma 4 writes the content of a turn with a call after the call's result.
        # An answer may start like the prompt (<think>), so the prompt is included.
        answer = self._messages[turn]["content"].rpartition("</think>")[2]
        written = self._text[max(0, start - len(self._shape.prompt)) : end]
        is_there = answer.strip() in written or "".join(answer.split()) in "".join(written.split())
        return (start, end) if is_there else None

    def turn_start(self, turn: int) -> int:
        """First character of any turn: the end of the turns before it.

        Raises:
            RecordError: the template does not render the turns before it alone, and markers do not help.
        """
        if not turn:
            return 0
        nested, answered = self._earlier(turn, ask=False), self._messages[turn - 1]["role"] == "assistant"
        if nested is not None:
            return self._shape.with_stop(self._text, len(nested)) if answered else len(nested)
        before = self.span(turn - 1) if answered else self._places.get(turn - 1)
        if before is not None:
            return before[1]
        # The last resort: the first character that differs from the text of the turns before.
        earlier = self._render(self._messages[:turn], False)
        differs = (i for i, (a, b) in enumerate(zip(self._text, earlier, strict=False)) if a != b)
        return next(differs, min(len(earlier), len(self._text)))

    def _start(self, turn: int) -> int | None:
        """End of the prompt for this turn: of the rendered turns before it, else the next prompt after them."""
        shape = self._shape
        if turn:
            asked = self._prefix(turn, ask=True)
            if asked is not None and self._text.startswith(asked):
                # Gemma 4 writes no generation prompt after a tool result, but starts the turn with it.
                again = None if asked.endswith(shape.prompt) else shape.after_prompt(self._text, len(asked))
                return again or len(asked)
            # The prompt of an earlier turn may be shortened to its header, as in Qwen3.5.
            if asked is not None and asked.endswith(shape.prompt):
                size = len(asked) - len(shape.prompt)
                if self._text.startswith(asked[:size]):
                    return shape.after_prompt(self._text, size)
            if turn - 1 not in self._places:
                return None
        if not shape.header:
            return None
        at = self._text.find(shape.heads[-1], self._places[turn - 1][1] if turn else 0)
        return None if at < 0 else shape.after_prompt(self._text, at)

    def _end(self, turn: int, start: int) -> int | None:
        last = turn == len(self._messages) - 1
        until = self._text if last else self._earlier(turn + 1, ask=False)
        if until is not None and len(until) >= start:
            # White space after the end-of-turn token belongs to the template and is not a target.
            trimmed = until.rstrip()
            ended = len(trimmed) > start and trimmed.endswith(self._shape.added)
            return self._shape.with_stop(self._text, len(trimmed) if ended else len(until))
        place = self._places.get(turn + 1)
        return None if place is None else self._shape.end_before(self._text, start, place[0])

    def _earlier(self, turn: int, *, ask: bool) -> str | None:
        """Rendered text of the turns before `turn` if the text of all turns starts with it, else None."""
        earlier = self._prefix(turn, ask=ask)
        return earlier if earlier is not None and self._text.startswith(earlier) else None

    def _prefix(self, turn: int, *, ask: bool) -> str | None:
        try:
            return self._render(self._messages[:turn], ask)
        except RecordError:  # the template rejects these turns alone: Qwen3.5 requires a question
            return None

    @cached_property
    def _places(self) -> dict[int, Span]:
        return content_places(self._text, self._messages, lambda messages: self._render(messages, False))


def _common(left: str, right: str) -> int:
    """Length of the common prefix, shortened to the end of a line or tag if it ends inside of a line or tag."""
    shorter = min(len(left), len(right))
    size = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), shorter)
    if size == shorter:
        return size
    return max((match.end() for match in _BOUNDARY.finditer(left, 0, size)), default=0)


def content_places(text: str, messages: Messages, render: Callable[[Messages], str]) -> dict[int, Span]:
    """Find the characters [start, end) of the contents in a rendered conversation, by turn.

    Contents that the template drops, repeats or searches are left out.

    Args:
        text: the rendered conversation.
        messages: its messages, with string contents.
        render: renders messages by the template.
    """
    # Markers in all contents are best. If they change the text (a template searches answers for `</think>`), mark only
    # the other contents, at last in their middle.
    others = {turn for turn, message in enumerate(messages) if message["role"] != "assistant"}
    for turns, inside in ((set(range(len(messages))), False), (others, False), (others, True)):
        places = _marked_places(text, messages, render, turns, inside=inside)
        if places is not None:
            return places
    return {}


def _marked_places(
    text: str, messages: Messages, render: Callable[[Messages], str], turns: set[int], *, inside: bool
) -> dict[int, Span] | None:
    """Find contents with markers around them; None if the template renders another text for marked contents.

    With `inside`, markers are in the middle of contents, because a template may search their start and end.
    """
    # A range of private-use characters that is not in the text: two characters for each turn.
    first = next(base for base in count(_FIRST, _STEP) if not re.search(_class(base), text))
    marked, cuts = [dict(message) for message in messages], {}
    for turn in sorted(turns)[: _STEP // 2]:
        content = messages[turn]["content"]
        if not content.strip() and messages[turn]["role"] == "assistant":
            continue  # an empty content next to a tool call: templates write a line break after a non-empty content
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
    at: dict[int, list[int]] = {}  # positions of each marker in the text without markers
    for earlier, match in enumerate(re.finditer(_class(first), again)):
        at.setdefault(ord(match[0]) - first, []).append(match.start() - earlier)
    places = {}
    for turn, (before, after) in cuts.items():
        starts, ends = at.get(2 * turn, []), at.get(2 * turn + 1, [])
        if len(starts) == len(ends) == 1 and text.endswith(before, 0, starts[0]) and text.startswith(after, ends[0]):
            places[turn] = (starts[0] - len(before), ends[0] + len(after))
    return places


def _class(first: int) -> str:
    """Regular expression of the marker characters that start at `first`."""
    return f"[{chr(first)}-{chr(first + _STEP - 1)}]"
