"""Supervised tokens from byte lengths equal those from the tokenizer's own offsets."""

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers

from energon_packed import ChatEncoder
from tests.internals import FastokensEngine, TextTokenizer

TEXTS = st.text(
    st.sampled_from("abc \n\té日本🙂👍🏽e\u0301ÅA\u030a<|im_end|>\u200d") | st.characters(exclude_categories=["Cs"]),
    max_size=30,
)


def with_spans(draw: Any, text: str) -> list[tuple[int, int]]:
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=6)))
    return list(zip(places[0::2], places[1::2], strict=False))


def by_offsets(backend: Any, text: str, spans: Any) -> list[bool]:
    encoding = backend.encode(text, add_special_tokens=False)
    return [any(a < end and b > start for start, end in spans) for a, b in encoding.offsets]


@pytest.fixture(scope="module")
def tokenizers(tokenizer_dir: Path) -> dict[str, TextTokenizer]:
    """Byte-level with and without a normalizer, with tokens that absorb spaces, and of another kind."""

    def byte_level() -> Any:
        return ChatEncoder.from_pretrained(tokenizer_dir).tokenizer.backend_tokenizer

    found = {name: byte_level() for name in ("plain", "NFC", "lowercase", "strip")}
    found["NFC"].normalizer = normalizers.NFC()
    found["lowercase"].normalizer = normalizers.Lowercase()
    found["strip"].add_special_tokens(
        [AddedToken("<mask>", lstrip=True, rstrip=True), AddedToken("b c", normalized=False)]
    )
    metaspace = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    metaspace.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>"], show_progress=False)
    metaspace.train_from_iterator(["abc abc b ca 日本 é"] * 20, trainer)
    found["metaspace"] = metaspace
    return {name: TextTokenizer(backend) for name, backend in found.items()}


@lru_cache
def fastokens_engine(serialized: str) -> FastokensEngine:
    return FastokensEngine(serialized)


@given(
    data=st.data(),
    name=st.sampled_from(["plain", "NFC", "lowercase", "strip", "metaspace"]),
    engine=st.sampled_from(["tokenizers", "fastokens"]),
)
@settings(max_examples=600, deadline=None)
def test_covered_tokens_are_those_of_the_offsets(
    tokenizers: dict[str, TextTokenizer], data: Any, name: str, engine: str
) -> None:
    tokenizer = tokenizers[name]
    fast = engine == "fastokens" and name in ("plain", "NFC", "strip")
    tokenizer._fast, tokenizer._is_decided = fastokens_engine(tokenizer.serialized) if fast else None, True
    texts = data.draw(st.lists(TEXTS, min_size=1, max_size=5))
    if name == "strip":
        texts = [text.replace("a", " <mask> ") for text in texts]
    spans = [data.draw(st.none() | st.just(with_spans(data.draw, text))) for text in texts]
    found = tokenizer.encode(texts, spans)
    assert len(found.cu_seqlens) == len(texts) + 1
    for number, (text, wanted) in enumerate(zip(texts, spans, strict=True)):
        part = slice(found.cu_seqlens[number], found.cu_seqlens[number + 1])
        assert found.input_ids[part].tolist() == tokenizer.backend.encode(text, add_special_tokens=False).ids
        expected = [True] * len(found.covered[part]) if wanted is None else by_offsets(tokenizer.backend, text, wanted)
        assert found.covered[part].tolist() == expected


def test_byte_lengths_are_used_where_they_can_be(tokenizers: dict[str, TextTokenizer]) -> None:
    def others(name: str, text: str, size: int) -> list[int]:
        """The texts, of this one, that need the offsets of the tokenizer."""
        return tokenizers[name]._byte_edges([text], [[(0, 1)]], [0, size])[1]

    assert others("plain", "é", 2) == []
    assert others("plain", " <mask> ", 6) == [0]  # a token absorbed the spaces
    assert others("NFC", "é", 2) == []
    assert others("NFC", "e\u0301", 3) == [0]  # the normalizer changes it
    assert tokenizers["lowercase"]._token_bytes is None
    assert tokenizers["metaspace"]._token_bytes is None
    assert np.array_equal(tokenizers["plain"].encode(["", "a"], [[], [(0, 1)]]).covered, [True])
