"""SpecialText: special tokens that a conversation itself writes, such as `<|im_end|>` in a question, stay text.

A private-use character is held in the place of each before the template is rendered, so that neither the template nor
the search for turns takes it for a control token:

    content     "what is <|im_end|>?"       held     "what is \\U000f0002?"
    rendered    "<|im_start|>user\\nwhat is \\U000f0002?<|im_end|>"

`EscapedTokenizer` gives the ids of such a text: of the control tokens that the template wrote, and of the others as
Transformers' `split_special_tokens=True` does (which lets a Unigram model find control tokens in its vocabulary; here
it cannot).

EscapedTokenizer: ids of texts in which the conversation's own special tokens are text.

It is the same tokenizer with other names for its control tokens: one private-use character each, under the same id.
The template's tokens are written as these characters, and a special token in the conversation is written out; no name
is equal to it any more, so it is split as any text, with the rest of the text around it.

    held        "<|im_start|>user\\nis \\U000f0002 one?<|im_end|>"
    renamed     "\\U000f8001user\\nis <|im_end|> one?\\U000f8002"
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from energon_packed.encoding.pretrained import TokenizerParts
from energon_packed.encoding.skeleton import Span
from energon_packed.encoding.vision.families import VisionFamily
from energon_packed.errors import ConfigError, Reason, RecordError
from energon_packed.records import IMAGE_PLACEHOLDER, Conversation, Message

HELD = 0xF0000
"""Character that is held for the first control token; the next ones follow (Unicode, supplementary private use)."""
_PRIVATE = re.compile("[\U000f0000-\U0010ffff]")
_MARKUP = ("<think>", "</think>", "[THINK]", "[/THINK]", "<tool_call>", "</tool_call>")
_RESULT = ("<tool_response>", "</tool_response>")
_SEARCHES = ("split", "rsplit", "startswith", "endswith", "find", "rfind", "replace", "partition", "rpartition",
             "strip", "lstrip", "rstrip", "count", "index", "removeprefix", "removesuffix")  # fmt: skip
Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]
_NAMES = 0xF8000  # character that names the first control token


class EscapedTokenizer:
    """A copy of a tokenizer with renamed control tokens.

    Args:
        serialized: tokenizer.json as text.
        tokens: control tokens, in the order in which they are held.

    Raises:
        ConfigError: a control token cannot be renamed.
    """

    def __init__(self, serialized: str, tokens: Sequence[str]) -> None:
        from tokenizers import Tokenizer

        self._tokens = tuple(tokens)
        names = {token: chr(_NAMES + number) for number, token in enumerate(tokens)}
        settings = json.loads(serialized)
        added = settings.get("added_tokens") or []
        self._pattern = token_pattern([*tokens, *(one["content"] for one in added), *_held(tokens)])
        self._names = names
        self._backend = Tokenizer.from_str(json.dumps(_renamed(settings, names)))
        for one in added:
            name = names.get(one["content"], one["content"])
            if self._backend.token_to_id(name) != one["id"]:
                raise ConfigError(
                    f"special tokens in texts cannot be kept as text with this tokenizer: {one['content']} would get "
                    f"another id than {one['id']}; set `allow_special_in_text=True`"
                )

    def encode(self, text: str, spans: Sequence[Span] | None, *, special: bool) -> tuple[Int64, Bool]:
        """(input_ids int64 (L,), covered bool (L,)) of a text with held characters; as `TextTokenizer.encode`."""
        written, edges = self._written(text)
        encoding = self._backend.encode(written, add_special_tokens=special)
        ids = np.array(encoding.ids, dtype=np.int64)
        if spans is None:
            return ids, np.ones(len(ids), dtype=bool)
        return ids, covered_by_offsets(encoding, [(edges[start], edges[end]) for start, end in spans])

    def _written(self, text: str) -> tuple[str, list[int]]:
        """The text that is tokenized, and where each character of `text` begins in it, and its end."""
        parts: list[str] = []
        sizes: list[int] = []
        end = 0
        for match in self._pattern.finditer(text):
            before, found = text[end : match.start()], match[0]
            parts.append(before)
            sizes += [1] * len(before)
            number = ord(found) - HELD if len(found) == 1 else -1
            part = self._tokens[number] if 0 <= number < len(self._tokens) else self._names.get(found, found)
            parts.append(part)
            sizes += [len(part), *([0] * (len(found) - 1))]
            end = match.end()
        parts.append(text[end:])
        sizes += [1] * (len(text) - end)
        return "".join(parts), list(accumulate(sizes, initial=0))


def covered_by_offsets(encoding: Any, spans: Sequence[Span]) -> Bool:
    """Tokens of a `tokenizers.Encoding` that hold at least one character of a span, bool (L,)."""
    starts, ends = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
    covered = np.zeros(len(starts), dtype=bool)
    for start, end in spans:
        covered |= (starts < end) & (ends > start)
    return covered


def _held(tokens: Sequence[str]) -> list[str]:
    return [chr(HELD + number) for number in range(len(tokens))]


def _renamed(settings: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """tokenizer.json with other names for some tokens, in its list of added ones and in the vocabulary."""
    added = [
        {**one, "content": names.get(one["content"], one["content"])} for one in settings.get("added_tokens") or []
    ]
    model = dict(settings["model"])
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(token, token): number for token, number in vocabulary.items()}
    elif vocabulary:
        model["vocab"] = [[names.get(token, token), score] for token, score in vocabulary]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    return {**settings, "added_tokens": added, "model": model}


class EscapedText(str):
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
