"""TextTokenizer: ids of texts in batches, and which tokens hold characters of given spans.

Byte-level BPE tokens have a known number of bytes, so the place of each token in its text is a cumulative sum:

    text      "Hi there"             spans  [(3, 8)]  ->  bytes 3 to 8
    tokens    H  i  Ġ  there         ends   1 2 3 8   ->  covered  0 0 0 1

Where that does not add up (a normalizer changed the text, a token absorbed a space), and for every other kind of
tokenizer, the offsets of the tokenizer itself are used; they take a third longer.
"""

import json
import logging
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from energon_packed.encoding.engines import (
    ENGINES,
    EngineName,
    FastokensEngine,
    HuggingFaceEngine,
    compare,
    compare_engines,
    is_compared,
    is_safe_here,
    prove,
    prove_in_child,
)
from energon_packed.encoding.skeleton import Span
from energon_packed.encoding.special_text import EscapedText, EscapedTokenizer, control_tokens, covered_by_offsets
from energon_packed.errors import ConfigError, EngineMismatch

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]
Spans = Sequence[Span] | None
"""Characters [start, end) of a text; None covers every token, special tokens included."""
_log = logging.getLogger(__name__)
_NOT_USED = "texts are tokenized by tokenizers, not fastokens: %s"
_FORMS = ("NFC", "NFD", "NFKC", "NFKD")
_COMPARED = 256  # one of this many texts goes through both engines
_FIRST = 32  # texts that go through both engines before fastokens is used
_WORTH_IT = 4096  # texts after which `auto` loads fastokens and compares it, which takes as long as some hundred texts


@dataclass(frozen=True, slots=True)
class TokenizedTexts:
    """Tokens of S texts, end to end.

    Attributes:
        input_ids: int64 (T,).
        covered: bool (T,), tokens that hold at least one character of a span.
        cu_seqlens: int64 (S+1,), boundaries of the texts.
    """

    input_ids: Int64
    covered: Bool
    cu_seqlens: Int64


class TextTokenizer:
    """A `tokenizers.Tokenizer` that knows which tokens cover a span, with a faster engine where that is proved equal.

    Args:
        backend: the tokenizer; padding and truncation are turned off.
        engine: of `ENGINES`. `auto` uses fastokens for many texts, if it is installed, gives the same tokens with this
            tokenizer and is safe in this process; else tokenizers.
        control: tokens that a conversation may write as text, as `SpecialText` holds them.

    Raises:
        ConfigError: an unknown engine, or `fastokens` where it cannot be used.
    """

    def __init__(self, backend: Any, engine: EngineName = "auto", *, control: Sequence[str] = ()) -> None:
        if engine not in ENGINES:
            raise ConfigError(f"`tokenizer_engine` is {engine!r}; use one of {', '.join(ENGINES)}")
        self.backend = backend
        backend.no_padding()
        backend.no_truncation()
        self.serialized: str = backend.to_str()
        self._control = control_tokens(control)
        self._form = _normal_form(_settings(backend.normalizer))
        self._is_byte_level = _is_byte_level(_settings(backend.pre_tokenizer)) and self._form is not None
        self._slow = HuggingFaceEngine(backend)
        self._fast: FastokensEngine | None = None
        self._is_decided = engine == "tokenizers"
        self._is_proved = False
        self._wanted = engine
        self._seen = 0
        if engine == "fastokens":
            self.load_fast()

    def __getstate__(self) -> dict[str, Any]:
        own = {"_fast": None, "_slow": None, "_is_decided": self._wanted == "tokenizers", "_is_proved": False}
        return {**self.__dict__, **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._slow = HuggingFaceEngine(self.backend)
        if self._wanted == "fastokens":
            self.load_fast()

    @property
    def engine(self) -> EngineName:
        """The engine in use now: `tokenizers` or `fastokens`."""
        chosen = self._fast is not None and (self._is_decided or self._wanted == "fastokens")
        return "fastokens" if chosen and is_safe_here() else "tokenizers"

    def load_fast(self) -> str:
        """Load fastokens, which is compared with tokenizers when it is first used.

        Returns:
            Why it cannot be used; "" if it is loaded.

        Raises:
            ConfigError: `fastokens` was requested by name, and cannot be used.
        """
        detail = self._why_not()
        if detail and self._wanted == "fastokens":
            raise ConfigError(f"`tokenizer_engine` fastokens cannot be used: {detail}; use auto or tokenizers")
        return detail

    def prepare_fork(self) -> None:
        """Load fastokens and compare it with tokenizers once, so that processes forked from this one need not.

        Raises:
            ConfigError, EngineMismatch: as `load_fast`.
        """
        if self._is_decided or self._is_proved or self.load_fast():
            return
        assert self._fast is not None
        if difference := prove_in_child(self.backend, self._fast):
            self._reject_fast(EngineMismatch(difference))
        self._is_proved = True

    def encode(self, texts: Sequence[str], spans: Sequence[Spans], *, special: bool = False) -> TokenizedTexts:
        """Tokenize texts in one batch.

        Args:
            texts: S texts.
            spans: of each text.
            special: add the tokenizer's own special tokens, such as BOS.

        Raises:
            EngineMismatch: a text that both engines tokenized got different ids.
        """
        if any([type(text) is EscapedText for text in texts]):
            return self._with_held(texts, spans, special)
        input_ids, cu_seqlens = self._ids(texts, special)
        self._seen += len(texts)
        return TokenizedTexts(input_ids, self._covered(texts, spans, input_ids, cu_seqlens), cu_seqlens)

    @cached_property
    def _held_tokenizer(self) -> EscapedTokenizer:
        return EscapedTokenizer(self.serialized, self._control)

    def _with_held(self, texts: Sequence[str], spans: Sequence[Spans], special: bool) -> TokenizedTexts:
        """As `encode`, where special tokens in some of the texts are text: those take tokenizers."""
        pieces: dict[int, tuple[Int64, Bool]] = {}
        others = [number for number, text in enumerate(texts) if type(text) is not EscapedText]
        for number, text in enumerate(texts):
            if type(text) is EscapedText:
                pieces[number] = self._held_tokenizer.encode(text, spans[number], special=special)
        if others:
            found = self.encode([texts[n] for n in others], [spans[n] for n in others], special=special)
            bounds = found.cu_seqlens[1:-1]
            columns = (np.split(found.input_ids, bounds), np.split(found.covered, bounds))
            pieces |= dict(zip(others, zip(*columns, strict=True), strict=True))
        ids, covered = zip(*[pieces[number] for number in range(len(texts))], strict=True)
        return TokenizedTexts(np.concatenate(ids), np.concatenate(covered), _bounds(ids))

    def _ids(self, texts: Sequence[str], special: bool) -> tuple[Int64, Int64]:
        """(input_ids, cu_seqlens) as `Engine.encode`."""
        if not self._is_decided and is_safe_here() and (self._fast is not None or self._seen >= _WORTH_IT):
            self._decide(texts)
        if self._fast is None or not self._is_decided or not is_safe_here():
            return self._slow.encode(texts, special=special)
        untried = [n for n, text in enumerate(texts) if not (is_compared(text) and self._is_unchanged(text))]
        if untried:
            return self._ids_of_both(texts, special, untried)
        input_ids, cu_seqlens = self._fast.encode(texts, special=special)
        for number in range(-self._seen % _COMPARED, len(texts), _COMPARED):
            expected = self._slow.encode([texts[number]], special=special)[0].tolist()
            compare(texts[number], input_ids[cu_seqlens[number] : cu_seqlens[number + 1]], expected, special=special)
        return input_ids, cu_seqlens

    def _ids_of_both(self, texts: Sequence[str], special: bool, untried: Sequence[int]) -> tuple[Int64, Int64]:
        slow = self._slow.encode([texts[number] for number in untried], special=special)
        pieces = dict(zip(untried, np.split(slow[0], slow[1][1:-1]), strict=True))
        others = [number for number in range(len(texts)) if number not in pieces]
        if others:
            fast = self._ids([texts[number] for number in others], special)
            pieces |= dict(zip(others, np.split(fast[0], fast[1][1:-1]), strict=True))
        columns = [pieces[number] for number in range(len(texts))]
        return np.concatenate(columns), _bounds(columns)

    def _decide(self, texts: Sequence[str]) -> None:
        """Use fastokens if it gives the same ids as tokenizers for the texts of `engine_corpus` and for these.

        Raises:
            ConfigError, EngineMismatch: it cannot be used or differs, and was requested by name.
        """
        detail = self.load_fast()
        if self._fast is not None:
            try:
                if not self._is_proved:
                    prove(self.backend, self._fast)
                compare_engines(self.backend, self._fast, [text for text in texts[:_FIRST] if is_compared(text)])
            except EngineMismatch as error:
                self._reject_fast(error)
        elif detail:
            _log.info(_NOT_USED, detail)
        self._is_decided = True

    def _reject_fast(self, error: EngineMismatch) -> None:
        """Use tokenizers from now on.

        Raises:
            EngineMismatch: fastokens was requested by name.
        """
        if self._wanted == "fastokens":
            raise error
        self._fast, self._is_decided = None, True
        _log.info(_NOT_USED, error)

    def _why_not(self) -> str:
        """As `load_fast`."""
        if self._is_decided and self._fast is None:
            return "it was not chosen"
        if not self._is_byte_level:
            return "it is used for byte-level BPE tokenizers only"
        if not is_safe_here():
            return "a process that this one was forked from has used it already"
        try:
            self._fast = self._fast or FastokensEngine(self.serialized)
        except ImportError:
            return "fastokens is not installed; run pip install fastokens"
        except ValueError as error:
            return f"fastokens cannot read it: {' '.join(str(error).split())[:300]}"
        return ""

    # --- spans -----------------------------------------------------------------------------------------------------

    @cached_property
    def _token_bytes(self) -> Int32 | None:
        """Bytes of each token, int32 (vocabulary,); None where tokens have no fixed number of bytes."""
        return _token_bytes(self.backend) if self._is_byte_level else None

    def _covered(self, texts: Sequence[str], spans: Sequence[Spans], ids: Int64, cu_seqlens: Int64) -> Bool:
        """bool (T,)."""
        if all([wanted is None for wanted in spans]):
            return np.ones(len(ids), dtype=bool)
        places = np.zeros(len(ids) + 1, dtype=np.int64)  # byte at which each token begins, in all texts end to end
        if self._token_bytes is not None:
            np.cumsum(self._token_bytes[ids], out=places[1:])
        edges, others = self._byte_edges(texts, spans, places[cu_seqlens].tolist())
        first = np.searchsorted(places[1:], edges[0::2], side="right")
        after = np.searchsorted(places[:-1], edges[1::2], side="left")
        covered = _filled(len(ids), first, after)
        for number, wanted in enumerate(spans):
            if wanted is None:
                covered[cu_seqlens[number] : cu_seqlens[number + 1]] = True
        for number in others:
            part = slice(int(cu_seqlens[number]), int(cu_seqlens[number + 1]))
            covered[part] = self._covered_by_offsets(texts[number], spans[number] or (), ids[part])
        return covered

    def _byte_edges(
        self, texts: Sequence[str], spans: Sequence[Spans], starts: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        """(start, end, start, end .. of the spans in bytes of all texts, the texts for which bytes do not tell).

        Args:
            texts: S texts.
            spans: of each text, in characters.
            starts: S + 1, byte at which each text begins by the bytes of its tokens.
        """
        edges: list[int] = []
        others: list[int] = []
        for number, wanted in enumerate(spans):
            if not wanted:
                continue
            text, start = texts[number], starts[number]
            size = starts[number + 1] - start
            if text.isascii() and len(text) == size:
                for first, after in wanted:
                    edges += (start + first, start + after)
            elif self._token_bytes is None or len(text.encode()) != size or not self._is_unchanged(text):
                others.append(number)
            else:
                at = place = 0
                for edge in chain.from_iterable(wanted):
                    skipped = text[at:edge] if edge >= at else text[:edge]
                    place = len(skipped.encode()) + (place if edge >= at else 0)
                    at = edge
                    edges.append(start + place)
        return edges, others

    def _is_unchanged(self, text: str) -> bool:
        """Whether the normalizer leaves a text as it is."""
        return not self._form or text.isascii() or unicodedata.is_normalized(self._form, text)  # type: ignore[arg-type]

    def _covered_by_offsets(self, text: str, spans: Sequence[Span], ids: Int64) -> Bool:
        encoding = self.backend.encode(text, add_special_tokens=False)
        compare(text, ids, encoding.ids, special=False)
        return covered_by_offsets(encoding, spans)


def _bounds(pieces: Sequence[Int64]) -> Int64:
    """Boundaries of S arrays end to end, int64 (S+1,)."""
    return np.concatenate([[0], np.cumsum([len(one) for one in pieces])]).astype(np.int64)


def _filled(size: int, first: Int64, after: Int64) -> Bool:
    """bool (size,), true in [first, after) of each of K ranges."""
    if (first[1:] >= after[:-1]).all() and (first <= after).all():  # in order and apart, as nearly always
        edges = np.empty(2 * len(first) + 2, dtype=np.int64)
        edges[0], edges[1:-1:2], edges[2:-1:2], edges[-1] = 0, first, after, size
        return np.repeat(np.arange(2 * len(first) + 1) % 2 == 1, np.diff(edges))
    filled = np.zeros(size, dtype=bool)
    for start, end in zip(first.tolist(), after.tolist(), strict=True):
        filled[start:end] = True
    return filled


def _settings(part: Any) -> dict[str, Any] | None:
    """A normalizer or pre-tokenizer as in tokenizer.json, without parsing the vocabulary there; None without one."""
    found: dict[str, Any] | None = None if part is None else json.loads(part.__getstate__())
    return found


def _is_byte_level(before: dict[str, Any] | None) -> bool:
    steps = (before or {}).get("pretokenizers") or [before or {}]
    return any(step.get("type") == "ByteLevel" for step in steps)


def _normal_form(normalizer: dict[str, Any] | None) -> str | None:
    """`NFC` and the like, "" without a normalizer, None for any other."""
    if normalizer is None:
        return ""
    steps = normalizer.get("normalizers", [normalizer])
    if len(steps) == 1 and steps[0].get("type") in _FORMS:
        return str(steps[0]["type"])
    return "" if not steps else None


def _token_bytes(backend: Any) -> Int32:
    """Bytes of text that each token stands for, int32 (vocabulary,).

    A byte-level token is written with one character per byte (A. Radford et al., "Language Models are Unsupervised
    Multitask Learners", 2019, section 2.2; `bytes_to_unicode`); an added token stands for itself.
    """
    vocabulary = backend.get_vocab(with_added_tokens=True)
    sizes = np.zeros(max(vocabulary.values(), default=-1) + 1, dtype=np.int32)
    for token, number in vocabulary.items():
        sizes[number] = len(token)
    for number, added in backend.get_added_tokens_decoder().items():
        sizes[number] = len(added.content.encode())
    return sizes
