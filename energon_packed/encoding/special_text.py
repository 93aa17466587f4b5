"""SpecialText: special tokens that a conversation itself writes, such as `<|im_end|>` in a question, stay text.

A private-use character is held in the place of each before the template is rendered, so that neither the template nor
the search for turns takes it for a control token:

    content     "what is <|im_end|>?"       held     "what is \\U000f0002?"
    rendered    "<|im_start|>user\\nwhat is \\U000f0002?<|im_end|>"

`held_tokenizer.py` gives the ids of such a text: of the control tokens that the template wrote, and of the others as
Transformers' `split_special_tokens=True` does (which lets a Unigram model find control tokens in its vocabulary; here
it cannot).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from energon_packed.encoding.tokenizer_parts import TokenizerParts
from energon_packed.encoding.vision import VisionFamily
from energon_packed.errors import Reason, RecordError
from energon_packed.records import IMAGE_PLACEHOLDER, Conversation, Message

HELD = 0xF0000
"""Character that is held for the first control token; the next ones follow (Unicode, supplementary private use)."""
_PRIVATE = re.compile("[\U000f0000-\U0010ffff]")
_MARKUP = ("<think>", "</think>", "[THINK]", "[/THINK]", "<tool_call>", "</tool_call>")
_RESULT = ("<tool_response>", "</tool_response>")
_SEARCHES = ("split", "rsplit", "startswith", "endswith", "find", "rfind", "replace", "partition", "rpartition",
             "strip", "lstrip", "rstrip", "count", "index", "removeprefix", "removesuffix")  # fmt: skip


class HeldText(str):
    """A rendered text with held characters."""

    __slots__ = ()


class SpecialText:
    """Holds special tokens in the texts of conversations.

    The markup of an answer (`<think>`, `<tool_call>`, and what the template itself searches for in contents) is left
    to the template in assistant turns, the tags of a result in tool turns, and `<image>` everywhere.

    Args:
        tokens: control tokens of the tokenizer.
        template: Jinja source; None without a template.
    """

    def __init__(self, tokens: Sequence[str], template: str | None) -> None:
        self.tokens = control_tokens(tokens)
        self._place = {token: number for number, token in enumerate(self.tokens)}
        # One character of each token, a rare one: a search for one is far faster than for any text.
        self._marks = tuple(sorted({next((c for c in "|\uff5c" if c in one), one[0]) for one in self.tokens}))
        self._any = token_pattern(self.tokens) if self.tokens else None
        self._searched = [one for one in searched_literals(template or "") if any(t in one for t in self.tokens)]

    def hold(self, conversation: Conversation) -> Conversation:
        """The conversation with held characters; itself where it writes no special token.

        Raises:
            RecordError: it has private-use characters as well, which could not be told from held ones.
        """
        if not self._writes(conversation):
            return conversation
        messages = tuple([self._message(one) for one in conversation.messages])
        text = None if conversation.text is None else self._held(conversation.text)
        tools = None if conversation.tools is None else self._value(conversation.tools)
        held = replace(conversation, messages=messages, text=text, tools=tools)
        if held == conversation:
            return conversation
        if any(_PRIVATE.search(text) for _, text in _texts(conversation)):
            raise RecordError(
                Reason.UNSUPPORTED_FIELD,
                "the text has special tokens and private-use characters from U+F0000 on; remove one of the two",
            )
        return held

    def found(self, conversation: Conversation) -> list[str]:
        """The special tokens that `hold` keeps as text, sorted."""
        if not self._writes(conversation):
            return []
        assert self._any is not None
        found = set()
        for role, text in _texts(conversation):
            found |= set(self._any.findall(text)) - self._left(role, text)
        return sorted(found)

    def _writes(self, conversation: Conversation) -> bool:
        """Whether a special token may be in a text; most conversations pay for this alone."""
        for message in conversation.messages:
            content = message.content
            for mark in self._marks:
                if mark in content and self._has(content):
                    return True
            if message.extra and any(self._has(text) for text in _strings(message.extra)):
                return True
        if conversation.text is not None and self._has(conversation.text):
            return True
        return bool(conversation.tools) and any(self._has(text) for text in _strings(conversation.tools))

    def _has(self, text: str) -> bool:
        return self._any is not None and self._any.search(text) is not None

    def _message(self, message: Message) -> Message:
        content = self._held(message.content, self._left(message.role, message.content))
        return message._replace(content=content, extra=self._value(message.extra) if message.extra else message.extra)

    def _left(self, role: str, content: str) -> set[str]:
        """Tokens that the template reads as markup."""
        if role == "tool":
            return set(_RESULT)
        if role != "assistant":
            return set()
        searched = [one for one in self._searched if one in content]
        return {*_MARKUP, *(token for token in self.tokens if any(token in one for one in searched))}

    def _held(self, text: str, left: set[str] | frozenset[str] = frozenset()) -> str:
        assert self._any is not None
        return self._any.sub(lambda m: m[0] if m[0] in left else chr(HELD + self._place[m[0]]), text)

    def _value(self, value: Any) -> Any:
        """A JSON value with held characters in all of its texts."""
        if isinstance(value, str):
            return self._held(value)
        if isinstance(value, Mapping):
            return {self._value(key): self._value(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._value(item) for item in value]
        return value


def control_tokens_of(tokenizer: TokenizerParts, vision: VisionFamily | None) -> list[str]:
    """Tokens that steer a model: the special ones of a tokenizer, and those of images."""
    return [*tokenizer.special_added_tokens, *((*vision.reserved, vision.image_token) if vision else ())]


def control_tokens(tokens: Sequence[str]) -> tuple[str, ...]:
    """Tokens in a fixed order, without `<image>`, which stands for an image in every record."""
    return tuple(sorted({one for one in tokens if one and one != IMAGE_PLACEHOLDER}))


def token_pattern(tokens: Sequence[str]) -> re.Pattern[str]:
    """Finds tokens as a tokenizer does: from left to right, the longest first."""
    return re.compile("|".join(re.escape(one) for one in sorted(tokens, key=lambda one: (-len(one), one))))


def searched_literals(template: str) -> list[str]:
    """Texts that a template searches for, such as `</think>` in `content.split('</think>')`, sorted."""
    from jinja2 import Environment, nodes
    from jinja2.exceptions import TemplateSyntaxError

    try:
        tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
    except TemplateSyntaxError:  # a tag of its own, such as {% generation %}
        plain = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", template)
        try:
            tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(plain)
        except TemplateSyntaxError:
            return []
    found = []
    for node in tree.find_all((nodes.Compare, nodes.Call)):
        if isinstance(node, nodes.Compare):
            found += [node.expr] if any(one.op in ("in", "notin") for one in node.ops) else []
        elif isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr) and node.node.attr in _SEARCHES:
            found += node.args
    return sorted({one.value for one in found if isinstance(one, nodes.Const) and isinstance(one.value, str)})


def _texts(conversation: Conversation) -> Iterator[tuple[str, str]]:
    """(role, text) of everything that a template can write."""
    if conversation.text is not None:
        yield "", conversation.text
    for message in conversation.messages:
        yield message.role, message.content
        if message.extra:
            yield from (("", one) for one in _strings(message.extra))
    if conversation.tools:
        yield from (("", one) for one in _strings(conversation.tools))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)
