"""Skeleton: the fixed text of a chat template for a sequence of roles; joins contents -> text and assistant spans.

A template that only joins contents (`tracer.py`) produces the same fixed text for all conversations with the same
roles. It is rendered once, with a marker for each content; later conversations are joined without Jinja:

    pieces    "<|im_start|>user\n"     "<|im_end|>\n<|im_start|>assistant\n"    "<|im_end|>\n"
    contents                      [0]                                       [1]
    spans                                                               (1, 33) .. (2, 10)    (piece, character in it)
"""

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

Span = tuple[int, int]
"""Characters [start, end) of the rendered text."""
_Place = tuple[int, int]
"""(index of the piece, character offset in the piece)."""
_BETWEEN = "\0"
_MARKER = re.compile("\ue0fe([0-9]+)\ue0ff")  # private-use characters, which no template contains


def marker(index: int) -> str:
    """Marker for content `index` when rendering a skeleton."""
    return f"\ue0fe{index}\ue0ff"


@dataclass(frozen=True, slots=True)
class ContentGuard:
    """Condition for the contents that a template only joins.

    Attributes:
        literals: strings that it searches for; contents must not contain any of them.
        filled: it branches on empty contents; contents must not be empty.
        stripped: characters that it strips; contents must not start or end with any of them. " " means all white
            space.
    """

    literals: tuple[str, ...] = ()
    filled: bool = False
    stripped: str = ""

    def accepts(self, contents: Sequence[str]) -> bool:
        """Whether the template only joins all of these contents."""
        if self.filled and not all(contents):
            return False
        if self.stripped and any([content and self._strips(content) for content in contents]):
            return False
        # Searching all contents at once is faster. A literal across two contents is a false alarm: Jinja renders them.
        joined = _BETWEEN.join(contents) if self.literals else ""
        return not any([literal in joined for literal in self.literals])

    def _strips(self, content: str) -> bool:
        first, last = content[0], content[-1]
        if " " in self.stripped and (first.isspace() or last.isspace()):
            return True
        return first in self.stripped or last in self.stripped


@dataclass(frozen=True, slots=True)
class Skeleton:
    """Fixed text with n slots for contents.

    Attributes:
        pieces: n + 1 fixed strings.
        order: index of the content after each piece except the last.
        places: start and end of each assistant turn.
        guard: the contents that may be joined.
    """

    pieces: tuple[str, ...]
    order: tuple[int, ...]
    places: tuple[tuple[_Place, _Place], ...]
    guard: ContentGuard

    @classmethod
    def from_marked(
        cls, text: str, spans: Sequence[Span], ends: tuple[str, ...], guard: ContentGuard
    ) -> "Skeleton | None":
        """Build a skeleton from a text that was rendered with markers.

        Args:
            text: rendered with `marker(i)` as content i.
            spans: assistant turns in `text`.
            ends: end-of-turn tokens. A turn must end with one that is part of the template; otherwise its end may
                depend on the content.
            guard: the contents that may be joined.

        Returns:
            The skeleton, or None if a span starts or ends inside a content or does not end with such a token.
        """
        split = _MARKER.split(text)
        pieces, order = split[0::2], split[1::2]
        starts = [0, *(match.end() for match in _MARKER.finditer(text))]

        def place(at: int) -> _Place | None:
            index = bisect_right(starts, at) - 1
            return (index, at - starts[index]) if at <= starts[index] + len(pieces[index]) else None

        places = []
        for start, end in spans:
            first, last = place(start), place(end)
            # A turn that ends without a token of the template might end differently after another content.
            if first is None or last is None or not pieces[last[0]][: last[1]].endswith(ends):
                return None
            places.append((first, last))
        return cls(tuple(pieces), tuple(int(index) for index in order), tuple(places), guard)

    def join_with_spans(self, contents: Sequence[str]) -> tuple[str, list[Span]]:
        """Render the text with these contents, and the character span of each assistant turn in it."""
        parts = [""] * (2 * len(self.pieces) - 1)  # pieces and contents in turn
        parts[0::2] = self.pieces
        parts[1::2] = [contents[index] for index in self.order]
        starts = list(accumulate(map(len, parts), initial=0))
        return "".join(parts), [(starts[2 * a] + i, starts[2 * b] + j) for (a, i), (b, j) in self.places]
