"""Special tokens that a conversation itself contains, such as `<|im_end|>` in a question, become plain text tokens.

    SpecialText       Conversation -> the same with a private-use character in place of each special token (escaped)
    EscapedTokenizer  text rendered from an escaped conversation -> ids; only tokens of the template are control tokens
    ControlTokens     texts and their ids -> the texts with control tokens that are not written in them

The conversation is escaped before it is rendered, so that neither the template nor the search for turns mistakes its
text for a control token:

    content     "what is <|im_end|>?"       escaped     "what is \\U000f0002?"
    rendered    "<|im_start|>user\\nwhat is \\U000f0002?<|im_end|>"

EscapedTokenizer is the same tokenizer with other names for its control tokens: a private-use character each, under the
same id. The tokens of the template are written as these characters, and the escaped tokens are written out. They are
not names of tokens any more, so they are split like other text:

    renamed     "\\U000f8001user\\nwhat is <|im_end|>?\\U000f8002"

The ids equal Transformers' `split_special_tokens=True`, except that a Unigram model could find a control token
in its vocabulary there, and a BPE model could merge the text of a control token to that token.

A normalizer can also make a control token from text that has none: NFKC turns the full-width `\uff1c/s\uff1e` into
`</s>`. ControlTokens finds such strings by their ids, and EscapedTokenizer tokenizes them, too.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from energon_packed.encoding.audio.families import AudioFamily
from energon_packed.encoding.engines import encode_exactly
from energon_packed.encoding.pieces import PieceTokenizer, is_long
from energon_packed.encoding.pretrained import TokenizerParts
from energon_packed.encoding.skeleton import Span
from energon_packed.encoding.vision.families import VisionFamily
from energon_packed.errors import ConfigError, Reason, RecordError, Reject
from energon_packed.records import AUDIO_PLACEHOLDER, IMAGE_PLACEHOLDER, VIDEO_PLACEHOLDER, Conversation, Message

ESCAPE_BASE = 0xF0000
"""Character that replaces the first control token; consecutive characters replace the others (Unicode, Supplementary
Private Use Area-A)."""
_PRIVATE = re.compile("[\U000f0000-\U0010ffff]")
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")  # byte fallback of a BPE model
# Tags that conversations contain as markup for the template, in assistant turns and in tool turns.
_MARKUP = ("<think>", "</think>", "[THINK]", "[/THINK]", "<tool_call>", "</tool_call>")
_RESULT = ("<tool_response>", "</tool_response>")
PRIVATE_USE = Reject(
    Reason.UNSUPPORTED_FIELD,
    "the text has special tokens and private-use characters from U+F0000 on; remove one of the two",
)
_SEARCHES = ("split", "rsplit", "startswith", "endswith", "find", "rfind", "replace", "partition", "rpartition",
             "strip", "lstrip", "rstrip", "count", "index", "removeprefix", "removesuffix")  # fmt: skip
Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]
_NAMES = 0xF8000  # new name of the first control token in EscapedTokenizer


class EscapedTokenizer:
    """A copy of a tokenizer with renamed control tokens.

    Args:
        serialized: tokenizer.json as text.
        tokens: control tokens, in the order of their escape characters.

    Raises:
        ConfigError: a control token cannot be renamed.
    """

    def __init__(self, serialized: str, tokens: Sequence[str]) -> None:
        from tokenizers import Tokenizer

        self._tokens = tuple(tokens)
        names = {token: chr(_NAMES + index) for index, token in enumerate(tokens)}
        escapes = [chr(ESCAPE_BASE + index) for index in range(len(tokens))]
        settings = json.loads(serialized)
        added = settings.get("added_tokens") or []
        # Other added tokens are matched too, so that a control token inside of a longer one is left alone.
        self._pattern = token_pattern([*tokens, *(token["content"] for token in added), *escapes])
        self._names = names
        self._backend = Tokenizer.from_str(json.dumps(_renamed(settings, names)))
        for token in added:  # new names must not change any id, and a normalizer must not remove them
            content, ident = token["content"], token["id"]
            name = names.get(content, content)
            if self._backend.token_to_id(name) != ident:
                raise _unusable(f"{content} would get another id than {ident}")
            if name != content and ident not in self._backend.encode(name, add_special_tokens=False).ids:
                raise _unusable(f"the normalizer would remove {content}")
        for token in tokens:  # the vocabulary of a BPE model has no other token for a single character
            if token.strip() and not self._backend.encode(token, add_special_tokens=False).ids:
                raise _unusable(f"{token} would be removed")

    def encode(
        self, text: str, spans: Sequence[Span] | None, *, special: bool, weights: Sequence[float] | None = None
    ) -> tuple[Int64, Any]:
        """Tokenize an escaped text; (input_ids int64 (L,), covered (L,)) as of `covered_by_offsets`."""
        if spans is None:
            written = self._pattern.sub(lambda match: self._written_token(match[0]), text)
            if is_long(written):
                ids = self._piece_tokenizer.encode(written, special=special)
            else:
                ids = np.array(self._backend.encode(written, add_special_tokens=special).ids, dtype=np.int64)
            return ids, np.ones(len(ids), dtype=bool)
        written, edges = self._written(text)
        encoding = self._backend.encode(written, add_special_tokens=special)
        ids = np.array(encoding.ids, dtype=np.int64)
        return ids, covered_by_offsets(encoding, [(edges[start], edges[end]) for start, end in spans], weights)

    @cached_property
    def _piece_tokenizer(self) -> PieceTokenizer:
        return PieceTokenizer(self._backend, lambda window: encode_exactly(self._backend, [window], special=False)[0])

    def _written_token(self, token: str) -> str:
        """Text that is tokenized for a token or escape character."""
        index = ord(token) - ESCAPE_BASE if len(token) == 1 else -1
        return self._tokens[index] if 0 <= index < len(self._tokens) else self._names.get(token, token)

    def _written(self, text: str) -> tuple[str, list[int]]:
        """(text that is tokenized, start of each character of `text` in it and the end of the last character)."""
        pieces: list[str] = []
        sizes: list[int] = []
        end = 0
        for match in self._pattern.finditer(text):
            before, token = text[end : match.start()], match[0]
            pieces.append(before)
            sizes += [1] * len(before)
            piece = self._written_token(token)
            pieces.append(piece)
            # A span that starts or ends inside of a token is moved to its end: only its first character has a width.
            sizes += [len(piece), *([0] * (len(token) - 1))]
            end = match.end()
        pieces.append(text[end:])
        sizes += [1] * (len(text) - end)
        return "".join(pieces), list(accumulate(sizes, initial=0))


class ControlTokens:
    """Finds strings whose tokens include a control token that is not written in the string.

    Args:
        backend: `tokenizers.Tokenizer`.
        tokens: control tokens.
    """

    def __init__(self, backend: Any, tokens: Sequence[str]) -> None:
        unknown = _unknown_token(backend)  # represents any text, as do the tokens of single bytes
        self._pattern = token_pattern([*tokens, *(t.content for t in backend.get_added_tokens_decoder().values())])
        ids = {backend.token_to_id(token): token for token in tokens if token != unknown and not _BYTE.match(token)}
        self._tokens = {ident: token for ident, token in ids.items() if ident is not None}
        self._is_control = np.zeros(max(self._tokens, default=-1) + 2, dtype=bool)
        self._is_control[list(self._tokens)] = True
        self._around = Counter(backend.encode("").ids)  # tokens of the post-processor

    def unwritten(self, texts: Sequence[str], ids: Int64, cu_seqlens: Int64, *, special: bool) -> list[int]:
        """Indices of strings with more control tokens than the string contains; arguments as of `TextTokenizer`."""
        places = np.flatnonzero(self._is_control[np.minimum(ids, len(self._is_control) - 1)])
        if not len(places):
            return []
        counts: dict[int, Counter[int]] = {}
        for index, ident in zip(
            (np.searchsorted(cu_seqlens, places, side="right") - 1).tolist(), ids[places].tolist(), strict=True
        ):
            counts.setdefault(index, Counter())[ident] += 1
        return [index for index, found in counts.items() if self._has_more(texts[index], found, special=special)]

    def _has_more(self, text: str, found: Counter[int], *, special: bool) -> bool:
        if special:
            found = found - self._around
        # `count` is far faster than the pattern, but it also finds a token inside of a longer one.
        if all([text.count(self._tokens[ident]) == count for ident, count in found.items()]):
            return False
        written = Counter(self._pattern.findall(text))
        return any(count > written[self._tokens[ident]] for ident, count in found.items())


def _unknown_token(backend: Any) -> str | None:
    """The token of unknown characters; the Python class of a Unigram model does not show it."""
    if (token := getattr(backend.model, "unk_token", None)) or type(backend.model).__name__ != "Unigram":
        return token
    model = json.loads(backend.to_str())["model"]
    return None if model["unk_id"] is None else model["vocab"][model["unk_id"]][0]


def covered_by_offsets(encoding: Any, spans: Sequence[Span], weights: Sequence[float] | None = None) -> Any:
    """Tokens of a `tokenizers.Encoding` that contain at least one character of a span, bool (L,).

    With `weights` of the spans, float32 (L,): the weight of the last span of a token, else 0.
    """
    starts, ends = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
    covered = np.zeros(len(starts), dtype=bool if weights is None else np.float32)
    for i, (start, end) in enumerate(spans):
        covered[(starts < end) & (ends > start)] = True if weights is None else weights[i]
    return covered


def _renamed(settings: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """tokenizer.json with other names for some tokens, in its list of added tokens and in the vocabulary."""
    added = [{**t, "content": names.get(t["content"], t["content"])} for t in settings.get("added_tokens") or []]
    model = dict(settings["model"])
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(token, token): ident for token, ident in vocabulary.items()}
    elif vocabulary:  # Unigram
        model["vocab"] = [[names.get(token, token), score] for token, score in vocabulary]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if merges := model.get("merges"):
        # `</s>` can be a control token and the product of merges; text must not become a control token by a merge.
        prefix = len(model.get("continuing_subword_prefix") or "")
        model["merges"] = [(a, b) for a, b in merges if names.keys().isdisjoint((a, b, a + b[prefix:]))]
    return {**settings, "added_tokens": added, "model": model}


def _unusable(problem: str) -> ConfigError:
    return ConfigError(
        f"this tokenizer cannot keep special tokens in record text as text: {problem}; set "
        "`allow_special_in_text=True`"
    )


_OTHER_FIELDS = ("tools", "chat_template_kwargs", "objects")


def has_private_use(text: str) -> bool:
    """Whether a text has characters that would be mistaken for escaped tokens or their new names."""
    return _PRIVATE.search(text) is not None


class EscapedText(str):
    """A text that was rendered from an escaped conversation."""

    __slots__ = ()


class SpecialText:
    """Escapes special tokens in the text of conversations.

    Some tokens are markup for the template and are not escaped: in assistant turns `<think>`, `<tool_call>` and
    strings that the template itself searches for, in tool turns the tags of a result, and `<image>` everywhere.

    Args:
        tokens: control tokens of the tokenizer.
        template: Jinja source; None without a template.
    """

    def __init__(self, tokens: Sequence[str], template: str | None) -> None:
        self.tokens = control_tokens(tokens)
        self._escape = {token: chr(ESCAPE_BASE + index) for index, token in enumerate(self.tokens)}
        # A rare character of each token: a search for a character is far faster than for a pattern.
        self._marks = tuple(sorted({next((c for c in "|\uff5c" if c in t), t[0]) for t in self.tokens}))
        self._any = token_pattern(self.tokens) if self.tokens else None
        self._searched = [text for text in searched_literals(template or "") if any(t in text for t in self.tokens)]

    def escape(self, conversation: Conversation) -> Conversation:
        """Return the conversation with escaped special tokens; the same object if it contains none.

        Raises:
            RecordError: it contains private-use characters as well, which would be mistaken for escaped tokens.
        """
        if not self._may_contain(conversation):
            return conversation
        messages = tuple([self._message(message) for message in conversation.messages])
        text = None if conversation.text is None else self._escaped(conversation.text)
        fields = {name: self._value(value) for name, value in _other_fields(conversation).items()}
        escaped = replace(conversation, messages=messages, text=text, **fields)
        if escaped == conversation:
            return conversation
        if any(has_private_use(text) for _, text in _strings_by_role(conversation)):
            raise RecordError.of(PRIVATE_USE)
        return escaped

    def escaped_tokens(self, conversation: Conversation) -> list[str]:
        """The special tokens of a conversation that `escape` keeps as text, sorted."""
        if not self._may_contain(conversation):
            return []
        assert self._any is not None
        tokens = set()
        for role, text in _strings_by_role(conversation):
            tokens |= set(self._any.findall(text)) - self._markup(role, text)
        return sorted(tokens)

    def _may_contain(self, conversation: Conversation) -> bool:
        """Whether a special token may be in a conversation; for most conversations, this fast check is all."""
        for message in conversation.messages:
            content = message.content
            for mark in self._marks:
                if mark in content and self._has(content):
                    return True
            if message.extra and any(self._has(text) for text in _strings(message.extra)):
                return True
        if conversation.text is not None and self._has(conversation.text):
            return True
        return any(self._has(text) for value in _other_fields(conversation).values() for text in _strings(value))

    def _has(self, text: str) -> bool:
        return self._any is not None and self._any.search(text) is not None

    def _message(self, message: Message) -> Message:
        content = self._escaped(message.content, self._markup(message.role, message.content))
        return message._replace(content=content, extra=self._value(message.extra) if message.extra else message.extra)

    def _markup(self, role: str, content: str) -> set[str]:
        """Tokens that the template reads as markup, which are not escaped."""
        if role == "tool":
            return set(_RESULT)
        if role != "assistant":
            return set()
        searched = [text for text in self._searched if text in content]
        return {*_MARKUP, *(token for token in self.tokens if any(token in text for text in searched))}

    def _escaped(self, text: str, markup: set[str] | frozenset[str] = frozenset()) -> str:
        assert self._any is not None
        return self._any.sub(lambda m: m[0] if m[0] in markup else self._escape[m[0]], text)

    def _value(self, value: Any) -> Any:
        """Copy a JSON value with all of its strings escaped."""
        if isinstance(value, str):
            return self._escaped(value)
        if isinstance(value, Mapping):
            return {self._value(key): self._value(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._value(item) for item in value]
        return value


def control_tokens_of(
    tokenizer: TokenizerParts, vision: VisionFamily | None, audio: AudioFamily | None = None
) -> list[str]:
    """Tokens that control a model: the special tokens of a tokenizer, and the tokens of images."""
    of_media = [*((*vision.reserved, vision.image_token) if vision else ()), *((audio.token,) if audio else ())]
    return [*tokenizer.special_added_tokens, *of_media]


def control_tokens(tokens: Sequence[str]) -> tuple[str, ...]:
    """Tokens in a fixed order, without `<image>`, `<audio>` and `<video>`, which represent media in every record."""
    media = (IMAGE_PLACEHOLDER, AUDIO_PLACEHOLDER, VIDEO_PLACEHOLDER)
    return tuple(sorted({token for token in tokens if token and token not in media}))


def token_pattern(tokens: Sequence[str]) -> re.Pattern[str]:
    """Pattern that finds tokens as a tokenizer does: from left to right, the longest first."""
    return re.compile("|".join(re.escape(t) for t in sorted(tokens, key=lambda token: (-len(token), token))))


def template_tree(template: str) -> Any:
    """Parse a template with Jinja; None if it is not valid."""
    from jinja2 import Environment
    from jinja2.exceptions import TemplateSyntaxError

    try:
        return Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
    except TemplateSyntaxError:  # Transformers adds a tag to Jinja: {% generation %}
        plain = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", template)
        try:
            return Environment(extensions=["jinja2.ext.loopcontrols"]).parse(plain)
        except TemplateSyntaxError:
            return None


def searched_literals(template: str) -> list[str]:
    """String literals that a template searches for, such as `</think>` in `content.split('</think>')`, sorted."""
    from jinja2 import nodes

    if (tree := template_tree(template)) is None:
        return []
    operands = []
    for node in tree.find_all((nodes.Compare, nodes.Call)):
        if isinstance(node, nodes.Compare):
            operands += [node.expr] if any(operand.op in ("in", "notin") for operand in node.ops) else []
        elif isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr) and node.node.attr in _SEARCHES:
            operands += node.args
    return sorted({node.value for node in operands if isinstance(node, nodes.Const) and isinstance(node.value, str)})


def _strings_by_role(conversation: Conversation) -> Iterator[tuple[str, str]]:
    """Yield (role, string) for every string that a template can write; the role is "" outside of contents."""
    if conversation.text is not None:
        yield "", conversation.text
    for message in conversation.messages:
        yield message.role, message.content
        if message.extra:
            yield from (("", text) for text in _strings(message.extra))
    for value in _other_fields(conversation).values():
        yield from (("", text) for text in _strings(value))


def _other_fields(conversation: Conversation) -> dict[str, Any]:
    """JSON values beside the messages that a template can write, by their names."""
    return {name: value for name in _OTHER_FIELDS if (value := getattr(conversation, name)) is not None}


def _strings(value: Any) -> Iterator[str]:
    """Yield all strings of a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)
