"""Texts on which two tokenizer engines must agree before the faster engine is used."""

import random
import unicodedata
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from energon_packed.encoding.engines import FOLDED, LONGEST, is_compared

# Contractions; scripts and cases of more than one letter; combining characters; emoji; code; numbers; control and
# invisible characters; punctuation.
_SENTENCES = (
    "'s 't 're 've 'm 'll 'd 'S 'T 'RE 'Ve 'M 'LL 'D ’s ’t x's x'S 'Sa isn't WE'LL they'D o'clock",
    "Größe, naïve, İstanbul, ǅungla, ﬁne, Łódź, 日本語の文章です。ﾊﾝｶｸ、全角ＡＢＣ１２３ 가ᄀ ١٢٣ १२३ 𝟘𝟙 ⅷ ½ ²",
    "e\u0301 a\u030a o\u0308\u0304 \u0301alone Z\u0351\u036b\u0343 \u1100\u1161\u11a8 e\u0302\u0301",
    "👍🏽 👩\u200d👩\u200d👧 🏳\ufe0f\u200d🌈 🇩🇪🇯🇵🇺🇸 ❤\ufe0f\u200d🔥 1\ufe0f\u20e3 ☺\ufe0e 🙂🙂🙂🙂🙂🙂🙂🙂",
    "def f(x: int) -> dict:\n    return {'a': x << 2, \"b\": x**3}  # 100%\n\n\n\tclass A: pass\r\n\r\n<p>",
    "0 1 12 123 1234 12345 12345678901234567890 1,000,000.00 -5e-10 0x1F 2024-07-26T10:11:12Z C:\\x.dll a@b.c",
    "a\x00b\x00\x00 \x01\x02\x1b[31m\x7f\x80\x9f a\ufeffb\ufffdc\u00add\u200be\u200df\u2060g\u2028h\u2029 \U0010ffff",
    "....,,,,!!!!????----____====****####@@@@ ...\n!!!\r\n((([[[{{{<<<>>>}}}]]]))) \"\"\"'''```",
)
_SPACES = (
    *(" ", "  ", "   ", " " * 17, " " * 128, "\t", "\t\t\t", "\n", "\n\n", "\n" * 9, "\r", "\r\n", "\r\n\r\n"),
    *(" \n", "\n ", " \t \n", *"\x0b\x0c\x1c\x85\u00a0\u1680\u180e\u2003\u2028\u202f\u3000"),
)
_MIXED = 2000  # random texts
_FROM_VOCABULARY = 10_000  # tokens of the vocabulary that they are made of
_MAX_ADDED = 400  # added tokens that are tried one by one, from both ends of the list
_SEED = 20240726


def proof_texts(backend: Any) -> Iterator[str]:
    """Texts for which `is_compared` is true: every script, white space, very long words, mixtures of the tokenizer's
    vocabulary, and every added token.

    Args:
        backend: `tokenizers.Tokenizer`.
    """
    rng = random.Random(_SEED)
    tokens = list(backend.get_added_tokens_decoder().values())
    half = _MAX_ADDED // 2
    added = [one.content for one in (tokens if len(tokens) <= _MAX_ADDED else [*tokens[:half], *tokens[-half:]])]
    yield ""
    yield from _SENTENCES
    for space in _SPACES:
        yield from (space, f"a{space}b", f"{space}a", f"1{space}", f".{space}é{space}\n")
    for before, after in pairwise(_SPACES):
        yield from (f"x{before}{after}y", before + after, f"{after}{before}.")
    yield from _assigned_characters()
    yield from (letter * 5000 for letter in "a1 .é日\n\t'")
    yield "ab" * 10_000
    yield "a" * LONGEST
    contexts = [text for token in added for text in _contexts(token)]
    yield "".join(contexts)
    yield from contexts
    words = [*" ".join(_SENTENCES).split(" "), *"".join(_SENTENCES)]
    yield from filter(is_compared, _mixed(rng, _vocabulary(rng, backend), words, added))


def _assigned_characters() -> Iterator[str]:
    """Every assigned character but most ideographs and syllables, in runs, between spaces, letters and digits."""
    assigned = [
        chr(code)
        for code in (*range(0x3400), *range(0x3400, 0xD7A4, 37), *range(0xE000, 0x30000))
        if unicodedata.category(chr(code)) not in ("Cn", "Cs", "Co")
        and chr(code) not in FOLDED
        and (code < 0x17000 or 0x1B000 <= code < 0x20000 or code % 61 == 0)
    ]
    for start in range(0, len(assigned), 64):
        part = assigned[start : start + 64]
        yield from ("".join(part), " ".join(part), "a".join(part), "\n1".join(part))


def _contexts(token: str) -> Iterator[str]:
    """An added token beside letters, spaces and itself, in parts and in other cases."""
    yield from (token, token * 2, f"a{token}b", f" {token} ", f"a {token} b", f"\n{token}\n", f"é{token}日")
    yield from (token[:-1], token[1:], f"{token[:-1]} {token[-1:]}", token.upper(), token.lower(), token.title())
    yield from (f"<|im_start|>user\nsay {token}<|im_end|>", f"  \t{token}\r\n  {token}", f"_{token}_")
    yield from (f"1{token}2", f"e{token}\u0301")


def _vocabulary(rng: random.Random, backend: Any) -> list[str]:
    """Texts of tokens, the same for the same tokenizer."""
    size = backend.get_vocab_size(with_added_tokens=False)
    return [backend.decode([number]) for number in rng.sample(range(size), min(size, _FROM_VOCABULARY))]


def _mixed(rng: random.Random, vocabulary: list[str], words: list[str], added: list[str]) -> Iterator[str]:
    """Random sequences of tokens of the vocabulary, white space, words and characters, and added tokens."""
    kinds = [kind for kind in (vocabulary, _SPACES, words, added) if kind]
    weights = [{id(_SPACES): 5, id(added): 1}.get(id(kind), 7) for kind in kinds]
    for _ in range(_MIXED):
        yield "".join(rng.choice(kind) for kind in rng.choices(kinds, weights, k=rng.randint(1, 24)))
