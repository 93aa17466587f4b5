"""Texts on which two tokenizer engines must agree before the faster one is used."""

import random
import unicodedata
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

_SENTENCES = (
    "The quick brown fox jumps over the lazy dog; it's 3.14159 o'clock, isn't it? WE'LL SEE, they'D say.",
    "Größe, Straße, naïve, coöperate, İstanbul, ǅungla, ﬁne, Ærøskøbing, Łódź, Ðe, þorn.",
    "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία· τὸ ἄλφα καὶ τὸ ὦ.",
    "日本語の文章です。カタカナ、ひらがな、漢字、ﾊﾝｶｸ、全角ＡＢＣ１２３。",
    "我能吞下玻璃而不伤身体。繁體中文也一樣，「引號」和《書名》。",
    "키스의 고유조건은 입술끼리 만나야 하고 특별한 기술은 필요치 않다. ㄱㄴㄷ",
    "أنا قادر على أكل الزجاج و هذا لا يؤلمني. الْعَرَبِيَّةُ ١٢٣٤٥",
    "אני יכול לאכול זכוכית וזה לא מזיק לי. בְּרֵאשִׁית",
    "मैं काँच खा सकता हूँ और मुझे उससे कोई चोट नहीं पहुंचती। १२३",
    "আমি কাঁচ খেতে পারি, তাতে আমার কোনো ক্ষতি হয় না।",
    "நான் கண்ணாடி சாப்பிடுவேன், அதனால் எனக்கு ஒரு கேடும் வராது.",
    "ฉันกินกระจกได้ แต่มันไม่ทำให้ฉันเจ็บ ๑๒๓",
    "ᚠᛇᚻ᛫ᛒᛦᚦ᛫ᚠᚱᚩᚠᚢᚱ ᓱᓴᓐ 𐍈𐌰𐌹 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝟘𝟙𝟚 ⅷ ½ ² Ⅻ ㊿",
    "Tiếng Việt: Tôi có thể ăn thủy tinh mà không hại gì. Tie\u0302\u0301ng Vie\u0323\u0302t",
    "e\u0301 a\u030a o\u0308\u0304 \u0301alone Z\u0351\u036b\u0343\u036a\u0302a\u0321\u033d\u035c \u1100\u1161\u11a8",
    "👍🏽 👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪🇯🇵🇺🇸 ❤️‍🔥 🧑🏿‍🚀 1️⃣ #️⃣ ☺︎ 🙂🙂🙂🙂🙂🙂🙂🙂",
    "def f(x: int) -> dict[str, int]:\n    return {'a': x << 2, \"b\": x**3}  # 100%\n\n\n\tclass A: pass\n",
    '<div class="a b">\r\n  <p>Hi &amp; bye</p>\r\n</div>\r\n\r\n$x^2_{ij} \\frac{1}{2}$ /* c */ a->b::c() && !d',
    "0 1 12 123 1234 12345 123456789012345678901234567890 1,000,000.00 -5e-10 0x1F 2024-07-26T10:11:12Z",
    "a\x00b\x00\x00 \x01\x02\x1b[31m\x7f\x80\x85\x9f c\x0bd\x0ce\u2028f\u2029g",
    "a\ufeffb\ufffdc\u00add\u200be\u200df\u2060g",
    "https://example.org/a/b?c=d&e=%20#f user@example.org C:\\Windows\\x.dll /usr/lib/*.so ~/.cache @name #tag",
    "'s 't 're 've 'm 'll 'd 'S 'T 'RE 'Ve 'M 'LL 'D ’s ’t x's x'S ſ's 'ſ K'K",
    "....,,,,!!!!????----____====****####@@@@ ...\n!!!\r\n((([[[{{{<<<>>>}}}]]]))) \"\"\"'''```",
)
_SPACES = (
    *(
        " ",
        "  ",
        "   ",
        " " * 17,
        " " * 128,
        "\t",
        "\t\t\t",
        "\n",
        "\n\n",
        "\n" * 9,
        "\r",
        "\r\n",
        "\r\n\r\n",
        " \n",
        "\n ",
    ),
    *(" \t \n", "\u00a0", "\u3000", "\u2003", "\u1680", "\u202f", "\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\u180e"),
)
_PIECES = (
    *"abzAZ09_.,;:!?'\"()[]{}<>/\\|@#$%^&*-+=~`é日本ßıſКΩא",
    *(
        "the",
        "ing",
        " the",
        "'s",
        "'LL",
        "100",
        "e\u0301",
        "\u0301",
        "\u030a",
        "가",
        "ᄀ",
        "👍🏽",
        "\u200d",
        "\ufe0f",
        "🇩",
    ),
    *("\x00", "\x1b", "\ufffd", "İ", "ǅ", "²", "٣", "𝟘", "\U0010ffff"),
)
_MIXED = 3000
_MAX_ADDED = 400  # added tokens that are tried one by one, from both ends of the list
_SEED = 20240726


LONGEST = "a" * 1_000_000
"""One word of a megabyte."""


def proof_texts(added: Sequence[Any]) -> Iterator[str]:
    """Texts in many scripts, code, white space, control characters, very long words, random mixtures, and every
    added token in many contexts.

    Args:
        added: the `tokenizers.AddedToken`s of the tokenizer.
    """
    yield ""
    yield from _SENTENCES
    for space in _SPACES:
        yield from (space, f"a{space}b", f"{space}a", f"1{space}", f".{space}é{space}\n")
    for before, after in pairwise(_SPACES):
        yield from (f"x{before}{after}y", before + after, f"{after}{before}.")
    yield from _assigned_characters()
    yield from (letter * 5000 for letter in "a1 .é日\n\t'")
    yield "ab" * 10_000
    yield "".join(_SENTENCES) * 20
    yield "".join(_added_contexts(added))
    yield from _added_contexts(added)
    yield from _mixed([token.content for token in _few(added)])


def _assigned_characters() -> Iterator[str]:
    """Every assigned character but most ideographs and syllables, in runs, between spaces, letters and digits."""
    assigned = [
        chr(code)
        for code in (*range(0x3400), *range(0x3400, 0xD7A4, 37), *range(0xE000, 0x30000, 1))
        if unicodedata.category(chr(code)) not in ("Cn", "Cs", "Co")
        and (code < 0x17000 or 0x1B000 <= code < 0x20000 or code % 61 == 0)
    ]
    for start in range(0, len(assigned), 64):
        part = assigned[start : start + 64]
        yield from ("".join(part), " ".join(part), "a".join(part), "\n1".join(part))


def _few(added: Sequence[Any]) -> list[Any]:
    half = _MAX_ADDED // 2
    return list(added) if len(added) <= _MAX_ADDED else [*added[:half], *added[-half:]]


def _added_contexts(added: Sequence[Any]) -> Iterator[str]:
    for token in _few(added):
        text = token.content
        yield from (text, text * 2, f"a{text}b", f" {text} ", f"a {text} b", f"\n{text}\n", f"é{text}日", f"1{text}2")
        yield from (text[:-1], text[1:], f"{text[:-1]} {text[-1:]}", text.upper(), text.lower(), text.title())
        yield from (
            f"<|im_start|>user\nsay {text}<|im_end|>",
            f"  \t{text}\r\n  {text}",
            f"_{text}_",
            f"e{text}\u0301",
        )


def _mixed(added: Sequence[str]) -> Iterator[str]:
    """Random sequences of characters, spaces, sentences' parts and added tokens; always the same ones."""
    rng = random.Random(_SEED)
    words = " ".join(_SENTENCES).split(" ")
    for _ in range(_MIXED):
        parts = []
        for _ in range(rng.randint(1, 24)):
            kind = rng.random()
            if kind < 0.45:
                parts.append(rng.choice(_PIECES))
            elif kind < 0.7:
                parts.append(rng.choice(_SPACES))
            elif kind < 0.95 or not added:
                parts.append(rng.choice(words))
            else:
                parts.append(rng.choice(added))
        yield "".join(parts)
