"""TextTokenizer: ids of texts in batches, and which tokens hold characters of given spans.

Byte-level BPE tokens have a known number of bytes, so the place of each token in its text is a cumulative sum:

    text      "Hi there"             spans  [(3, 8)]  ->  bytes 3 to 8
    tokens    H  i  Ġ  there         ends   1 2 3 8   ->  covered  0 0 0 1

Where that does not add up (a normalizer changed the text, a token absorbed a space), and for every other kind of
tokenizer, the offsets of the tokenizer itself are used; they take a third longer.
"""

import json
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from energon_packed.encoding.skeleton import Span

Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]
Spans = Sequence[Span] | None
"""Characters [start, end) of a text; None covers every token, special tokens included."""
_FORMS = ("NFC", "NFD", "NFKC", "NFKD")


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
    """A `tokenizers.Tokenizer` that knows which tokens cover a span.

    Args:
        backend: the tokenizer; padding and truncation are turned off.
    """

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        backend.no_padding()
        backend.no_truncation()
        settings = json.loads(backend.to_str())
        self._form = _normal_form(settings.get("normalizer"))
        self._token_bytes = _token_bytes(backend) if _is_byte_level(settings) and self._form is not None else None

    def encode(self, texts: Sequence[str], spans: Sequence[Spans], *, special: bool = False) -> TokenizedTexts:
        """Tokenize texts in one batch.

        Args:
            texts: S texts.
            spans: of each text.
            special: add the tokenizer's own special tokens, such as BOS.
        """
        columns = [e.ids for e in self.backend.encode_batch_fast(texts, add_special_tokens=special)]
        cu_seqlens = np.zeros(len(columns) + 1, dtype=np.int64)
        np.cumsum([len(ids) for ids in columns], out=cu_seqlens[1:])
        input_ids = np.fromiter(chain.from_iterable(columns), dtype=np.int64, count=int(cu_seqlens[-1]))
        return TokenizedTexts(input_ids, self._covered(texts, spans, input_ids, cu_seqlens), cu_seqlens)

    def _covered(self, texts: Sequence[str], spans: Sequence[Spans], ids: Int64, cu_seqlens: Int64) -> Bool:
        """bool (T,)."""
        covered = np.zeros(len(ids), dtype=bool)
        sizes = np.zeros(len(ids), dtype=np.int64) if self._token_bytes is None else self._token_bytes[ids]
        ends = np.cumsum(sizes)
        text_at = np.concatenate([[0], ends])[cu_seqlens].tolist()  # byte at which each text begins
        bounds = cu_seqlens.tolist()
        edges: list[int] = []  # start and end of each span, in bytes of all texts end to end
        others: list[int] = []
        for number, wanted in enumerate(spans):
            if wanted is None:
                covered[bounds[number] : bounds[number + 1]] = True
            elif wanted:
                places = self._byte_places(texts[number], wanted, text_at[number + 1] - text_at[number])
                edges += [text_at[number] + place for place in places]
                if not places:
                    others.append(number)
        if edges:
            first = np.searchsorted(ends, edges[0::2], side="right")
            after = np.searchsorted(ends - sizes, edges[1::2], side="left")
            steps = np.zeros(len(ids) + 1, dtype=np.int64)
            np.add.at(steps, first, 1)
            np.add.at(steps, np.maximum(first, after), -1)
            covered |= np.cumsum(steps[:-1]) > 0
        for number in others:
            covered[bounds[number] : bounds[number + 1]] = self._covered_by_offsets(texts[number], spans[number] or ())
        return covered

    def _byte_places(self, text: str, spans: Sequence[Span], size: int) -> list[int]:
        """Starts and ends of spans in bytes, [start, end, start, ...]; [] where bytes do not tell."""
        if self._token_bytes is None:
            return []
        if text.isascii():
            return [place for span in spans for place in span] if len(text) == size else []
        if self._form and not unicodedata.is_normalized(self._form, text):  # type: ignore[arg-type]
            return []
        if len(text.encode()) != size:
            return []
        return [len(text[:place].encode()) for span in spans for place in span]

    def _covered_by_offsets(self, text: str, spans: Sequence[Span]) -> Bool:
        encoding = self.backend.encode(text, add_special_tokens=False)
        starts, ends = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
        covered = np.zeros(len(starts), dtype=bool)
        for start, end in spans:
            covered |= (starts < end) & (ends > start)
        return covered


def _is_byte_level(settings: dict[str, Any]) -> bool:
    before = settings.get("pre_tokenizer") or {}
    steps = before.get("pretokenizers") or [before]
    return any(step.get("type") == "ByteLevel" for step in steps)


def _normal_form(normalizer: dict[str, Any] | None) -> str | None:
    """`NFC` and the like, "" without a normalizer, None for any other."""
    if normalizer is None:
        return ""
    steps = normalizer.get("normalizers", [normalizer])
    if len(steps) == 1 and steps[0].get("type") in _FORMS:
        return str(steps[0]["type"])
    return "" if not steps else None


def _token_bytes(backend: Any) -> Int64:
    """Bytes of text that each token stands for, int64 (vocabulary,).

    A byte-level token is written with one character per byte (A. Radford et al., "Language Models are Unsupervised
    Multitask Learners", 2019, section 2.2; `bytes_to_unicode`); an added token stands for itself.
    """
    vocabulary = backend.get_vocab(with_added_tokens=True)
    sizes = np.zeros(max(vocabulary.values(), default=-1) + 1, dtype=np.int64)
    for token, number in vocabulary.items():
        sizes[number] = len(token)
    for number, added in backend.get_added_tokens_decoder().items():
        sizes[number] = len(added.content.encode())
    return sizes
