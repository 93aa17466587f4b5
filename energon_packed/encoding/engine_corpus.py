"""Texts on which two tokenizer engines must agree before the faster engine is used."""

import unicodedata
from collections.abc import Iterator
from typing import Any

from energon_packed.encoding.engines import FOLDED, LONGEST

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
_MAX_ADDED = 400  # added tokens that are tried one by one, from both ends of the list


def proof_texts(backend: Any) -> Iterator[str]:
    """Texts for which `is_compared` is true: every script, white space, very long words, and every added token.

    Engines differ in their tables of Unicode, in what is white space, and in the rules of added tokens. A part of the
    texts of each run confirms that they merge the same pairs.

    Args:
        backend: `tokenizers.Tokenizer`.
    """
    yield ""
    yield from _SENTENCES
    for space, following in zip(_SPACES, (*_SPACES[1:], ""), strict=True):
        yield from (space, f"a{space}b", f"{space}a", f"1{space}", f" {space}é{space}\n", f"x{space}{following}y")
    yield from _assigned_characters()
    yield from ("ab" * 10_000, " " * 5000, "a" * LONGEST)
    tokens = [one.content for one in backend.get_added_tokens_decoder().values()]
    for token in dict.fromkeys(tokens[: _MAX_ADDED // 2] + tokens[-_MAX_ADDED // 2 :]):
        yield from (token * 2, f"a{token}b", f" {token} ", f"\n{token}\n", f"é{token}日", f"1{token}\u0301")
        yield from (token[:-1], token[1:], token.upper(), token.title(), f"<|im_start|>user\nsay {token}<|im_end|>")


def _assigned_characters() -> Iterator[str]:
    """Every assigned character but most ideographs and syllables, in runs, between spaces and between letters."""
    assigned = [
        chr(code)
        for code in (*range(0x3400), *range(0x3400, 0xD7A4, 37), *range(0xE000, 0x30000))
        if unicodedata.category(chr(code)) not in ("Cn", "Cs", "Co")
        and chr(code) not in FOLDED
        and (code < 0x17000 or 0x1B000 <= code < 0x20000 or code % 61 == 0)
    ]
    for start in range(0, len(assigned), 64):
        part = assigned[start : start + 64]
        yield from ("".join(part), " ".join(part), "a".join(part))
