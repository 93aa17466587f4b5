"""TextTokenizer: strings and character spans -> token ids, and a flag for each token, whether a span covers it.

It also decides which engine tokenizes (`engines.py`). Spans are mapped to tokens without offsets if possible:
byte-level BPE tokens have a known number of bytes, so the position of each token in its string is a cumulative sum.

    text      "Hi there"             spans  [(3, 8)]  ->  bytes 3 to 8
    tokens    H  i  Ġ  there         ends   1 2 3 8   ->  covered  0 0 0 1

If the sum differs from the length of the string (a normalizer changed it, a token absorbed a space), and for all other
tokenizers, the offsets of the tokenizer itself are used, which are slower by a third.
"""

import json
import logging
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from energon_packed.encoding.engines import (
    EngineName,
    FastokensEngine,
    compare,
    compare_engines,
    encode_exactly,
    is_compared,
    is_safe_here,
    prove,
    prove_in_child,
)
from energon_packed.encoding.pieces import PieceTokenizer, is_long
from energon_packed.encoding.skeleton import Span
from energon_packed.encoding.special_text import (
    PRIVATE_USE,
    ControlTokens,
    EscapedText,
    EscapedTokenizer,
    control_tokens,
    covered_by_offsets,
    has_private_use,
)
from energon_packed.errors import ConfigError, EngineMismatch, RecordError, Reject
from energon_packed.options import check_choice

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]
Float32 = npt.NDArray[np.float32]
Spans = Sequence[Span] | None
"""Characters [start, end) of a string; None covers every token, special tokens included."""
Weights = Sequence[float] | None
"""Weights of the spans of a string; None if all are 1."""
_log = logging.getLogger(__name__)
_NOT_USED = "texts are tokenized by tokenizers, not fastokens: %s"
_FORMS = ("NFC", "NFD", "NFKC", "NFKD")
_COMPARED_EVERY = 256  # every 256th string is tokenized by both engines
_FIRST = 32  # strings that both engines tokenize before fastokens is used
# Strings after which `auto` loads fastokens and compares it, in the time that some hundred strings need.
_WORTH_IT = 4096


@dataclass(frozen=True, slots=True)
class TokenizedTexts:
    """Tokens of S strings, end to end.

    Attributes:
        input_ids: int64 (T,).
        covered: bool (T,), tokens that contain at least one character of a span.
        cu_seqlens: int64 (S+1,), boundaries of the strings.
        weights: float32 (T,), weight of the last span that covers a token, else 0; None if no weights were passed.
        rejects: a Reject by the index of each string that cannot be tokenized: its text cannot be kept apart from
            control tokens, or it is too long. Its tokens have no meaning.
    """

    input_ids: Int64
    covered: Bool
    cu_seqlens: Int64
    weights: Float32 | None = None
    rejects: Mapping[int, Reject] = field(default_factory=dict)


class TextTokenizer:
    """Tokenizes strings and maps spans to tokens, with the faster engine if it is proved equal.

    Args:
        backend: `tokenizers.Tokenizer`, without padding and truncation.
        engine: a value of `EngineName`. `auto` uses fastokens for many strings, if it is installed, produces the same
            tokens with this tokenizer and is safe in this process; else tokenizers.
        control: control tokens that `SpecialText` escapes.

    Raises:
        ConfigError: an unknown engine, or `fastokens` if it cannot be used.
    """

    def __init__(self, backend: Any, engine: EngineName = "auto", *, control: Sequence[str] = ()) -> None:
        check_choice("tokenizer_engine", engine, EngineName)
        self.backend = backend
        self.serialized: str = backend.to_str()
        self._control = control_tokens(control)
        self._form = _normal_form(_settings(backend.normalizer))
        self._is_byte_level = _is_byte_level(_settings(backend.pre_tokenizer)) and self._form is not None
        self._fast: FastokensEngine | None = None
        self._is_decided = engine == "tokenizers"
        self._is_proved = False
        self._wanted = engine
        self._seen = 0
        if engine == "fastokens":
            self.load_fast()

    def __getstate__(self) -> dict[str, Any]:
        # A copy in another process decides again, because whether fastokens is safe depends on the process.
        own = {"_fast": None, "_is_decided": self._wanted == "tokenizers", "_is_proved": False}
        return {**self.__dict__, **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._wanted == "fastokens":
            self.load_fast()

    @property
    def engine(self) -> EngineName:
        """The engine in use now: `tokenizers` or `fastokens`."""
        chosen = self._fast is not None and (self._is_decided or self._wanted == "fastokens")
        return "fastokens" if chosen and is_safe_here() else "tokenizers"

    def load_fast(self) -> str:
        """Load fastokens; it is compared with tokenizers at the first use.

        Returns:
            Why it cannot be used; "" if it is loaded.

        Raises:
            ConfigError: `fastokens` was requested by name, and cannot be used.
        """
        if self._is_decided and self._fast is None:
            detail = "it was not chosen"
        elif not self._is_byte_level:
            detail = "it is used for byte-level BPE tokenizers only"
        elif not is_safe_here():
            detail = "the process that this process was forked from has used it already"
        else:
            try:
                self._fast = self._fast or FastokensEngine(self.serialized)
                return ""
            except ImportError:
                detail = "fastokens is not installed; run pip install fastokens"
            except ValueError as error:
                detail = f"fastokens cannot read it: {' '.join(str(error).split())[:300]}"
        if self._wanted == "fastokens":
            raise ConfigError(f"`tokenizer_engine` fastokens cannot be used: {detail}; use auto or tokenizers")
        return detail

    def prepare_fork(self) -> None:
        """Load fastokens and compare it with tokenizers once, instead of in every process forked from this process.

        Raises:
            ConfigError, EngineMismatch: as `load_fast`.
        """
        if self._is_decided or self._is_proved or self.load_fast():
            return
        assert self._fast is not None
        if difference := prove_in_child(self.backend, self._fast):
            self._reject_fast(EngineMismatch(difference))
        self._is_proved = True

    def encode(
        self,
        texts: Sequence[str],
        spans: Sequence[Spans],
        *,
        special: bool = False,
        weights: Sequence[Weights] | None = None,
    ) -> TokenizedTexts:
        """Tokenize strings in a single batch; a long string without spans is tokenized in pieces, see `pieces.py`.

        Args:
            texts: S strings.
            spans: spans of each string.
            special: add the tokenizer's own special tokens, such as BOS.
            weights: weights above 0 of the spans of each string; None returns no weights.

        Raises:
            EngineMismatch: both engines tokenized a string to different ids.
        """
        pairs = zip(texts, spans, strict=True)
        separate = [
            i for i, (text, s) in enumerate(pairs) if type(text) is EscapedText or (s is None and is_long(text))
        ]
        if separate:
            return self._encode_separately(texts, spans, special, weights, separate)
        input_ids, cu_seqlens = self._ids(texts, special)
        self._seen += len(texts)
        # Without a normalizer, only text that SpecialText escapes can become a control token.
        if self._control and not all([self._is_unchanged(text) for text in texts]):
            unwritten = self._control_tokens.unwritten(texts, input_ids, cu_seqlens, special=special)
            if unwritten:
                escaped = [EscapedText(text) if i in unwritten else text for i, text in enumerate(texts)]
                rejects = {i: PRIVATE_USE for i in unwritten if has_private_use(texts[i])}
                return replace(self._encode_separately(escaped, spans, special, weights, unwritten), rejects=rejects)
        found = self._covered(texts, spans, input_ids, cu_seqlens, weights)
        if weights is None:
            return TokenizedTexts(input_ids, found, cu_seqlens)
        return TokenizedTexts(input_ids, found > 0, cu_seqlens, found)

    @cached_property
    def _control_tokens(self) -> ControlTokens:
        return ControlTokens(self.backend, self._control)

    @cached_property
    def _escaped_tokenizer(self) -> EscapedTokenizer:
        return EscapedTokenizer(self.serialized, self._control)  # on first use: few datasets need it

    @cached_property
    def _piece_tokenizer(self) -> PieceTokenizer:
        return PieceTokenizer(self.backend, self._window_ids)

    def _window_ids(self, text: str) -> Int64:
        """Tokenize a window of a long document, by fastokens if possible: such a document is always worth it."""
        self._seen = max(self._seen + 1, _WORTH_IT)
        return self._ids([text], special=False)[0]

    def _encode_separately(
        self,
        texts: Sequence[str],
        spans: Sequence[Spans],
        special: bool,
        weights: Sequence[Weights] | None,
        separate: Sequence[int],
    ) -> TokenizedTexts:
        """Tokenize strings of which those at `separate` are escaped or long; escaped strings always use tokenizers."""
        pieces: dict[int, tuple[Int64, Any]] = {}
        rejects: dict[int, Reject] = {}
        for i in separate:
            try:
                if type(text := texts[i]) is EscapedText:
                    own = None if weights is None else weights[i]
                    pieces[i] = self._escaped_tokenizer.encode(text, spans[i], special=special, weights=own)
                else:
                    tokens_of_text = self._piece_tokenizer.encode(text, special=special)
                    pieces[i] = tokens_of_text, np.ones(len(tokens_of_text), dtype=bool)
            except RecordError as error:
                pieces[i], rejects[i] = (np.zeros(0, dtype=np.int64), np.zeros(0, dtype=bool)), error.reject
        others = [i for i in range(len(texts)) if i not in pieces]
        if others:
            tokens = self.encode(
                [texts[i] for i in others],
                [spans[i] for i in others],
                special=special,
                weights=None if weights is None else [weights[i] for i in others],
            )
            bounds = tokens.cu_seqlens[1:-1]
            found = tokens.covered if tokens.weights is None else tokens.weights
            columns = (np.split(tokens.input_ids, bounds), np.split(found, bounds))
            pieces |= dict(zip(others, zip(*columns, strict=True), strict=True))
            rejects |= {others[i]: reject for i, reject in tokens.rejects.items()}
        ids, covered = zip(*[pieces[i] for i in range(len(texts))], strict=True)
        if len(texts) == 1:  # no copy of a long document
            input_ids, joined = ids[0], covered[0]
        else:
            input_ids, joined = np.concatenate(ids), np.concatenate(covered)
        of_tokens = None if weights is None else joined.astype(np.float32)
        return TokenizedTexts(input_ids, joined > 0, np.cumsum([0, *map(len, ids)]), of_tokens, rejects)

    def _ids(self, texts: Sequence[str], special: bool) -> tuple[Int64, Int64]:
        """Tokenize strings by the engine in use; (input_ids, cu_seqlens) as of `encode_exactly`."""
        if not self._is_decided and is_safe_here() and (self._fast is not None or self._seen >= _WORTH_IT):
            self._decide(texts)
        if self._fast is None or not self._is_decided or not is_safe_here():
            return encode_exactly(self.backend, texts, special=special)
        unproved = [i for i, text in enumerate(texts) if not (is_compared(text) and self._is_unchanged(text))]
        if unproved:
            return self._ids_of_both(texts, special, unproved)
        input_ids, cu_seqlens = self._fast.encode(texts, special=special)
        for i in range(-self._seen % _COMPARED_EVERY, len(texts), _COMPARED_EVERY):
            expected = encode_exactly(self.backend, [texts[i]], special=special)[0].tolist()
            compare(texts[i], input_ids[cu_seqlens[i] : cu_seqlens[i + 1]], expected, special=special)
        return input_ids, cu_seqlens

    def _ids_of_both(self, texts: Sequence[str], special: bool, unproved: Sequence[int]) -> tuple[Int64, Int64]:
        """Tokenize the strings at `unproved` by tokenizers, the others by fastokens."""
        slow = encode_exactly(self.backend, [texts[i] for i in unproved], special=special)
        pieces = dict(zip(unproved, np.split(slow[0], slow[1][1:-1]), strict=True))
        others = [i for i in range(len(texts)) if i not in pieces]
        if others:
            fast = self._ids([texts[i] for i in others], special)
            pieces |= dict(zip(others, np.split(fast[0], fast[1][1:-1]), strict=True))
        columns = [pieces[i] for i in range(len(texts))]
        return np.concatenate(columns), np.cumsum([0, *map(len, columns)])

    def _decide(self, texts: Sequence[str]) -> None:
        """Use fastokens if it produces the same ids as tokenizers for `proof_texts` and for these strings.

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

    # --- spans -----------------------------------------------------------------------------------------------------

    @cached_property
    def _token_bytes(self) -> Int32 | None:
        """Bytes of text that each token represents, int32 (vocabulary,); None if this number is not fixed.

        A byte-level token is written with one character per byte (A. Radford et al., "Language Models are Unsupervised
        Multitask Learners", 2019, section 2.2; `bytes_to_unicode`); an added token is written as itself.
        """
        if not self._is_byte_level:
            return None
        vocabulary = self.backend.get_vocab(with_added_tokens=True)
        sizes = np.zeros(max(vocabulary.values(), default=-1) + 1, dtype=np.int32)
        for token, ident in vocabulary.items():
            sizes[ident] = len(token)
        for ident, added in self.backend.get_added_tokens_decoder().items():
            sizes[ident] = len(added.content.encode())
        return sizes

    def _covered(
        self,
        texts: Sequence[str],
        spans: Sequence[Spans],
        ids: Int64,
        cu_seqlens: Int64,
        weights: Sequence[Weights] | None,
    ) -> Any:
        """Tokens that contain a character of a span, bool (T,), or with `weights` their weights, float32 (T,)."""
        if weights is None and all([wanted is None for wanted in spans]):
            return np.ones(len(ids), dtype=bool)
        starts = np.zeros(len(ids) + 1, dtype=np.int64)  # first byte of each token in all strings end to end
        if self._token_bytes is not None:
            np.cumsum(self._token_bytes[ids], out=starts[1:])
        edges, others = self._byte_edges(texts, spans, starts[cu_seqlens].tolist())
        # From the first token that ends after the start of a span, to the last token that starts before its end.
        first = np.searchsorted(starts[1:], edges[0::2], side="right")
        after = np.searchsorted(starts[:-1], edges[1::2], side="left")
        values = None
        if weights is not None:
            columns = [(s, w) for i, (s, w) in enumerate(zip(spans, weights, strict=True)) if s and i not in others]
            values = np.array([v for s, w in columns for v in w or [1.0] * len(s)], dtype=np.float32)
        covered = _filled(len(ids), first, after, values)
        for i, wanted in enumerate(spans):
            if wanted is None:
                covered[cu_seqlens[i] : cu_seqlens[i + 1]] = True
        for i in others:
            tokens = slice(int(cu_seqlens[i]), int(cu_seqlens[i + 1]))
            encoding = self.backend.encode(texts[i], add_special_tokens=False)
            compare(texts[i], ids[tokens], encoding.ids, special=False)
            covered[tokens] = covered_by_offsets(encoding, spans[i] or (), None if weights is None else weights[i])
        return covered

    def _byte_edges(
        self, texts: Sequence[str], spans: Sequence[Spans], starts: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        """Convert spans from characters to bytes of all strings end to end.

        Args:
            texts: S strings.
            spans: spans of each string, in characters.
            starts: first byte of each string by the bytes of its tokens, and the end of the last string, S + 1.

        Returns:
            (start, end, start, end .. of the spans; indices of the strings whose tokens have other bytes).
        """
        edges: list[int] = []
        others: list[int] = []
        for i, wanted in enumerate(spans):
            if not wanted:
                continue
            text, start = texts[i], starts[i]
            size = starts[i + 1] - start
            if text.isascii() and len(text) == size:
                for first, after in wanted:
                    edges += (start + first, start + after)
            elif self._token_bytes is None or len(text.encode()) != size or not self._is_unchanged(text):
                others.append(i)
            else:
                # Encode only the characters since the edge before; all again if spans are not in order.
                at = offset = 0
                for edge in chain.from_iterable(wanted):
                    skipped = text[at:edge] if edge >= at else text[:edge]
                    offset = len(skipped.encode()) + (offset if edge >= at else 0)
                    at = edge
                    edges.append(start + offset)
        return edges, others

    def _is_unchanged(self, text: str) -> bool:
        """Whether the normalizer certainly does not change a string."""
        if not self._form:  # no normalizer, or a normalizer of another kind
            return self._form is not None
        return text.isascii() or unicodedata.is_normalized(self._form, text)  # type: ignore[arg-type]


def _filled(size: int, first: Int64, after: Int64, values: Float32 | None) -> Any:
    """Flags that are True in [first, after) of each of K ranges, bool (size,), or the values (K,) of the ranges."""
    if (first[1:] >= after[:-1]).all() and (first <= after).all():  # in order and disjoint, as nearly always
        edges = np.empty(2 * len(first) + 2, dtype=np.int64)
        edges[0], edges[1:-1:2], edges[2:-1:2], edges[-1] = 0, first, after, size
        filled = np.zeros(2 * len(first) + 1, dtype=bool if values is None else np.float32)
        filled[1::2] = True if values is None else values
        return np.repeat(filled, np.diff(edges))
    filled = np.zeros(size, dtype=bool if values is None else np.float32)
    for i, (start, end) in enumerate(zip(first.tolist(), after.tolist(), strict=True)):
        filled[start:end] = True if values is None else values[i]
    return filled


def _settings(component: Any) -> dict[str, Any] | None:
    """Settings of a normalizer or pre-tokenizer as in tokenizer.json, without parsing its vocabulary, or None."""
    settings: dict[str, Any] | None = None if component is None else json.loads(component.__getstate__())
    return settings


def _is_byte_level(before: dict[str, Any] | None) -> bool:
    steps = (before or {}).get("pretokenizers") or [before or {}]
    return any(step.get("type") == "ByteLevel" for step in steps)


def _normal_form(normalizer: dict[str, Any] | None) -> str | None:
    """Unicode form of a normalizer such as `NFC`; "" without a normalizer, None for any other normalizer."""
    if normalizer is None:
        return ""
    steps = normalizer.get("normalizers", [normalizer])
    if len(steps) == 1 and steps[0].get("type") in _FORMS:
        return str(steps[0]["type"])
    return "" if not steps else None
