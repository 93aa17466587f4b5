"""PieceTokenizer: a document of any size -> its token ids, tokenized in windows, in bounded memory.

tokenizers needs about 120 bytes of memory per character of a string. A long text is therefore tokenized in windows.
A window ends in the middle of a text, so only its first tokens are used, up to a cut, at which the next window starts:

    text     The cat sat on the mat. The dog lay ...
    window 0 [The cat sat on| the mat.| Th]             cut before " the"; a check up to " Th"
    window 1               [ the mat.| The dog| lay ..]  its first tokens must equal window 0 after the cut

A pre-tokenizer splits a text from left to right. From a split on, it depends on the text after the split only, unless
its pattern looks behind, and before a split only on the few words after it. A cut is therefore a split of the
pre-tokenizer that many words of the window follow. Tokenizers for which this is false are refused by their
settings (`_obstacle`), and all others are compared on a generated text at the first use.
"""

import json
import logging
import random
import re
import unicodedata
from collections.abc import Callable
from copy import copy
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from energon_packed.encoding.engines import LONGEST, encode_exactly, proof_texts
from energon_packed.errors import Reason, RecordError

Int64 = npt.NDArray[np.int64]
_log = logging.getLogger(__name__)
LONG = 1 << 22
"""Characters of the longest document that is tokenized at once."""
_MARGIN = 1 << 12  # characters
_CHANGES = 16  # starts and ends of words in the margin, at least
_PROOF_WINDOW = 1 << 14  # characters
_PROOF_LONGEST = 1 << 15  # characters of a string in the generated text
_NORMALIZERS = ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "BertNormalizer")
_PRE_TOKENIZERS = (
    *("ByteLevel", "Metaspace", "Split", "Whitespace", "WhitespaceSplit", "BertPreTokenizer"),
    *("Punctuation", "Digits", "CharDelimiterSplit"),
)
# Parts of a regular expression: a class of characters, the start of a group, or any other character.
_PART = re.compile(
    r"\\[pP]\{[^}]*\}|\\.|\[\^?\]?(?:\[(?:\\.|[^\]\\])*\]|\\.|[^\]\\])*\]|\(\?<?[=!]|\(\?[<a-zA-Z-]*[:)>]?|.",
    re.DOTALL,
)
_LOOKS_BEHIND = ("(?<=", "(?<!", "^", *(f"\\{letter}" for letter in "bBAGKXyY123456789"))
_LOOPS = ("+", "*", "{")


class PieceTokenizer:
    """Tokenizes long strings to the ids of the tokenizer.

    Args:
        backend: `tokenizers.Tokenizer`.
        encode: returns the ids of a window without special tokens, int64 (L,).

    Attributes:
        window: characters tokenized at once; more if they have no place to cut.
        most: most characters tokenized at once.
    """

    window = LONGEST
    most = 1 << 26  # needs about 8 GiB

    def __init__(self, backend: Any, encode: Callable[[str], Int64]) -> None:
        self._backend = backend
        self._encode = encode
        self._is_reported = False
        self._added = tuple([token.content for token in backend.get_added_tokens_decoder().values()])
        self._longest = max(map(len, self._added), default=0)

    @cached_property
    def obstacle(self) -> str:
        """Why this tokenizer cannot tokenize a text in pieces; "" if it can."""
        settings = json.loads(self._backend.to_str())
        return _obstacle(settings) or self._difference()

    def encode(self, text: str, *, special: bool) -> Int64:
        """Tokenize a text; `special` adds the tokenizer's own special tokens at its ends.

        Returns:
            int64 (L,).

        Raises:
            RecordError: `unsupported_field`, if the text has no place to cut and is too long to be tokenized at once.
        """
        if not self.obstacle:
            return self._in_windows(text, special)
        if len(text) > self.most:
            raise self._too_long(text, f"the tokenizer cannot tokenize it in pieces: {self.obstacle}")
        if not self._is_reported:
            _log.warning(
                "documents of more than %s characters need about 120 bytes of memory per character, because the "
                "tokenizer cannot tokenize them in pieces: %s",
                f"{LONG:,}",
                self.obstacle,
            )
            self._is_reported = True
        return encode_exactly(self._backend, [text], special=special)[0]

    def _too_long(self, text: str, why: str) -> RecordError:
        return RecordError(
            Reason.UNSUPPORTED_FIELD,
            f"the text must have at most {self.most:,} characters, got {len(text):,}, as {why}. Divide it into "
            "several records",
        )

    # --- windows ---------------------------------------------------------------------------------------------------

    @cached_property
    def _plain(self) -> Any:
        """The tokenizer without its post-processor, which would trim the white space of tokens from their offsets."""
        plain = type(self._backend).from_str(self._backend.to_str())
        plain.post_processor = None
        return plain

    def _in_windows(self, text: str, special: bool) -> Int64:
        pieces: list[npt.NDArray[np.int32]] = []
        start, size = 0, self.window
        expected = np.zeros(0, dtype=np.int32)  # first tokens of the window, as the window before has them
        done: list[tuple[int, int, npt.NDArray[np.int32]]] = []  # start, size and first tokens of earlier windows
        while True:
            stop = min(start + size, len(text))
            ids = self._encode(text[start:stop]).astype(np.int32)
            if ids[: len(expected)].tobytes() != expected.tobytes():
                # The cut before this window is wrong: a longer window has another cut.
                start, size, expected = done.pop()
                pieces.pop()
                cut = None
            elif stop == len(text):
                pieces.append(ids)
                break
            else:
                cut = self._cut(ids, text, start, stop)
            if cut is None:
                if size >= self.most:
                    raise self._too_long(
                        text, f"characters {start:,} to {stop:,} have no place to tokenize it in pieces"
                    )
                size *= 2
                continue
            end, first, last = cut
            done.append((start, size, expected))
            pieces.append(ids[:first])
            start, size, expected = end, self.window, ids[first:last]
        if special:
            short = self._backend.encode("a", add_special_tokens=True)
            own = np.array(short.ids, dtype=np.int32)
            is_text = np.flatnonzero(np.array(short.special_tokens_mask) == 0)
            first, end = (is_text[0], is_text[-1] + 1) if len(is_text) else (len(own), len(own))
            pieces = [own[:first], *pieces, own[end:]]
        return np.concatenate(pieces, dtype=np.int64)

    def _cut(self, ids: npt.NDArray[np.int32], text: str, start: int, stop: int) -> tuple[int, int, int] | None:
        """Find the cut of a window, and a later place up to which its tokens are compared with the next window.

        Only the end of the window is tokenized again, with offsets, which are slower.

        Args:
            ids: int32 (L,), tokens of the window.
            text: the whole text.
            start, stop: characters of the window.

        Returns:
            (character of `text` of the cut, index of the first token after it, index of the first token after the
            later place); None if the window has no such places.
        """
        margin = max(min(_MARGIN, self.window // 64), 2 * self._longest)
        base = max(start, stop - max((stop - start) // 8, 8 * margin))
        encoding = self._plain.encode(text[base:stop], add_special_tokens=False)
        before = len(ids) - len(encoding)  # tokens of the window before `base`, if the others are equal
        last = 0
        end = at = stop
        changes = 0
        kind = ""
        word: int | None = None
        for token in range(len(encoding) - 1, -1, -1):
            following, word = word, encoding.token_to_word(token)
            place = base + encoding.token_to_chars(token)[1]
            if start < base > place - margin:  # the first tokens after `base` may be others than in the window
                return None
            while at > place:
                at -= 1
                if (found := _kind(text[at])) not in ("", kind):
                    kind = found
                    changes += 1
            if word == following or end - place < margin or changes <= _CHANGES:
                continue
            if place >= stop or not self._is_place(text, place) or self._overlaps(encoding, token):
                continue
            if not last:
                last, end, changes = token + 1, place, 0
                continue
            first, after = before + token + 1, encoding.ids[token + 1 :]
            return (place, first, before + last) if first >= 0 and ids[first:].tolist() == after else None
        return None

    def _is_place(self, text: str, place: int) -> bool:
        """Whether a word starts or ends at a character, which is normalized apart from the text before it."""
        is_edge = {_kind(text[place - 1]), _kind(text[place])} == {"w", "o"}
        return is_edge and not text.startswith(self._added, place) and _is_stable(text[place])

    @staticmethod
    def _overlaps(encoding: Any, token: int) -> bool:
        """Whether the next token starts before the end of a token."""
        is_last = token + 1 >= len(encoding)
        return is_last or bool(encoding.token_to_chars(token + 1)[0] < encoding.token_to_chars(token)[1])

    # --- proof -----------------------------------------------------------------------------------------------------

    def _difference(self) -> str:
        """Compare the ids of a generated text in small windows with its ids as a whole; "" if they are equal."""
        strings = [string for string in proof_texts(self._backend) if len(string) <= _PROOF_LONGEST]
        strings += [unit * 3000 for unit in ("12", "日本", "e\u0301", " \n", ", ")]
        random.Random(0).shuffle(strings)
        text = "".join(f"{string}{' the' * (i % 3)}\n {i}" for i, string in enumerate(strings))
        expected = encode_exactly(self._backend, [text], special=True)[0]
        small = copy(self)
        small.window, small.most = _PROOF_WINDOW, 4 * _PROOF_LONGEST
        try:
            ids = small._in_windows(text, special=True)
        except RecordError:
            return "it does not split a generated text into words"
        return "" if np.array_equal(ids, expected) else "the tokens of pieces of a generated text differ"


def is_long(text: str) -> bool:
    """Whether a document is tokenized in pieces."""
    return len(text) > LONG


@lru_cache(maxsize=4096)
def _kind(character: str) -> str:
    """`w` for letters and digits, `o` for others; "" for characters that patterns treat as either, such as marks."""
    if character.isalnum():
        return "w"
    return "" if unicodedata.category(character) in ("Mn", "Mc", "Me", "Pc", "Cf") else "o"


@lru_cache(maxsize=4096)
def _is_stable(character: str) -> bool:
    """Whether no Unicode normal form combines a character with the characters before it."""
    first = unicodedata.normalize("NFKD", character)[0]
    is_jamo = 0x1160 <= ord(first) <= 0x11FF or 0xD7B0 <= ord(first) <= 0xD7FF
    return not is_jamo and not unicodedata.combining(first) and unicodedata.category(first)[0] != "M"


def _obstacle(settings: dict[str, Any]) -> str:
    """Why the settings of tokenizer.json do not allow to tokenize a text in pieces; "" if they may allow it."""
    if settings["model"].get("dropout"):
        return "its BPE dropout makes tokens random"
    for step in _steps(settings.get("normalizer"), "normalizers"):
        is_local = step["type"] == "Replace" and len(step["pattern"].get("String", "")) == 1
        if step["type"] not in _NORMALIZERS and not is_local:
            return f"its normalizer {step['type']} may change text across words"
    steps = _steps(settings.get("pre_tokenizer"), "pretokenizers")
    for step in steps:
        if step["type"] not in _PRE_TOKENIZERS:
            return f"its pre-tokenizer {step['type']} may depend on distant text"
        pattern = (step.get("pattern") or {}).get("Regex", "")
        if pattern and (part := _unbounded_part(pattern)):
            return f"{part} in the pattern of its pre-tokenizer may depend on distant text"
    if not any(_splits(step) for step in steps):
        return "it has no pre-tokenizer that splits text, so tokens may extend over any part of it"
    return ""


def _steps(component: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    """Steps of a normalizer or pre-tokenizer in tokenizer.json, which may be nested sequences."""
    if component is None:
        return []
    if component["type"] != "Sequence":
        return [component]
    return [step for part in component[name] for step in _steps(part, name)]


def _splits(step: dict[str, Any]) -> bool:
    if step["type"] == "ByteLevel":
        return bool(step.get("use_regex", True))
    return bool(step.get("split", True)) if step["type"] == "Metaspace" else True


def _unbounded_part(pattern: str) -> str:
    """Part of a regular expression that looks at the text before a match, or runs across words; "" without one."""
    parts = [match[0] for match in _PART.finditer(pattern)]
    pairs = list(zip(parts, [*parts[1:], ""], strict=True))
    for part, quantifier in pairs:
        if part in _LOOKS_BEHIND or (part[0] == "[" and quantifier == "]"):  # `]`: of a class that `_PART` cuts short
            return part
        if quantifier in _LOOPS and _matches(part, "a") and (_matches(part, " ") or _matches(part, ",")):
            return part + quantifier
    if any(part == ")" and quantifier in _LOOPS for part, quantifier in pairs):  # the repeated group may be any part
        matched = {character for part in parts for character in "a ," if _matches(part, character)}
        if "a" in matched and len(matched) > 1:
            return "a repeated group"
    return ""


def _matches(part: str, character: str) -> bool:
    """Whether a part of a regular expression, if it is a class of characters, matches a character."""
    from tokenizers import Regex, pre_tokenizers

    if part[0] not in ".[\\":
        return part == character
    try:
        pattern = Regex(part)
    except Exception:  # the class that tokenizers raises; this part of the pattern is not understood
        return True
    return not pre_tokenizers.Split(pattern, "removed").pre_tokenize_str(character)
