"""Tokenizer engines: strings -> token ids, from Hugging Face tokenizers or, several times as fast, from fastokens.

    HuggingFaceEngine, FastokensEngine   the engines
    prove, prove_in_child                compare both on `proof_texts`; fastokens is used only if all ids are equal
    compare_engines, compare             compare both on strings of the data, as a part of them is while packing

fastokens uses threads that a forked process does not have. A process whose parent tokenized with it therefore uses
tokenizers.
"""

import os
import unicodedata
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from energon_packed.errors import EngineMismatch
from energon_packed.system import call_in_child

Int64 = npt.NDArray[np.int64]
EngineName = Literal["auto", "tokenizers", "fastokens"]
_BATCH = 64  # strings in a call of tokenizers; its results need 100 bytes per token, so that these fit in the cache
_COMPARED_TOGETHER = 64  # strings in a call of both engines
_PROOF_LIMIT = 60  # seconds; the comparison needs some tenths of a second
_SPECIAL_STEP = 8  # every 8th string is also compared with the special tokens of the post-processor
_SHOWN = 200  # characters of a string in a message
LONGEST = 1 << 18
"""Characters of the longest string on which the engines are compared; longer strings are tokenized by tokenizers."""
FOLDED = "\u017f\u212a"
"""Letters outside ASCII whose case folding is an ASCII letter (s and k; Unicode CaseFolding.txt). A case-insensitive
part of a pattern, such as `(?i:'s)` of Qwen's tokenizers, matches them in tokenizers and not in fastokens."""
_used_in: int | None = None  # id of the process that tokenized with fastokens: this process, or one it was forked from


def encode_exactly(backend: Any, texts: Sequence[str], *, special: bool) -> tuple[Int64, Int64]:
    """Tokenize S strings by tokenizers; `special` adds the tokenizer's own special tokens, such as BOS.

    Returns:
        (input_ids int64 (T,) end to end, cu_seqlens int64 (S+1,)).
    """
    parts = [np.zeros(0, dtype=np.int64)]
    lengths: list[int] = []
    for start in range(0, len(texts), _BATCH):
        encodings = backend.encode_batch_fast(texts[start : start + _BATCH], add_special_tokens=special)
        columns = [encoding.ids for encoding in encodings]  # `ids` copies, so it is read only once
        sizes = list(map(len, columns))
        parts.append(np.fromiter(chain.from_iterable(columns), dtype=np.int64, count=sum(sizes)))
        lengths += sizes
    return np.concatenate(parts), np.cumsum([0, *lengths])


class FastokensEngine:
    """A `fastokens.Tokenizer`. Each of its threads keeps words that it has seen, up to about 130 MiB.

    Words of the thread that calls `encode` stay after the engine is deleted: a new engine needs as much memory again.

    Args:
        serialized: tokenizer.json as text.

    Raises:
        ImportError: fastokens is not installed.
        ValueError: it cannot read this tokenizer.
    """

    def __init__(self, serialized: str) -> None:
        from fastokens import Tokenizer

        self._tokenizer = Tokenizer.from_json_str(serialized)

    def encode(self, texts: Sequence[str], *, special: bool) -> tuple[Int64, Int64]:
        """Tokenize S strings, as `encode_exactly`."""
        global _used_in
        _used_in = os.getpid()
        ids, bounds = self._tokenizer.encode_batch_flat(list(texts), add_special_tokens=special)
        return np.frombuffer(ids, dtype="<u4").astype(np.int64), np.frombuffer(bounds, dtype="<u8").astype(np.int64)


def is_safe_here() -> bool:
    """Whether fastokens may be used in this process: it was not forked from a process that used fastokens."""
    return _used_in is None or _used_in == os.getpid()


def is_compared(text: str) -> bool:
    """Whether fastokens may tokenize a string; all other strings are tokenized by tokenizers."""
    return len(text) <= LONGEST and not any([letter in text for letter in FOLDED])


def prove(backend: Any, fast: FastokensEngine) -> None:
    """Compare the engines on `proof_texts`, in some tenths of a second.

    Args:
        backend: `tokenizers.Tokenizer`.
        fast: the other engine, with the same tokenizer.

    Raises:
        EngineMismatch: they differ.
    """
    texts = list(proof_texts(backend))
    compare_engines(backend, fast, texts)
    compare_engines(backend, fast, texts[::_SPECIAL_STEP], special=True)


def prove_in_child(backend: Any, fast: FastokensEngine) -> str:
    """Run `prove` in a forked process, so that other children of this process may use fastokens.

    The memory of the comparison (35 MiB) is then not copied into every worker process either.

    Returns:
        How the engines differ; "" if they agree.
    """
    try:
        return str(call_in_child(_difference, backend, fast, seconds=_PROOF_LIMIT))
    except TimeoutError:
        return f"the process that compared them did not end in {_PROOF_LIMIT} seconds"
    except ChildProcessError as error:
        return f"the process that compared them {error}"


def _difference(backend: Any, fast: FastokensEngine) -> str:
    try:
        prove(backend, fast)
    except EngineMismatch as error:
        return str(error)
    return ""


def compare_engines(backend: Any, fast: FastokensEngine, texts: Sequence[str], *, special: bool = False) -> None:
    """Compare the ids of two engines for several strings.

    Raises:
        EngineMismatch: they differ.
    """
    for start in range(0, len(texts), _COMPARED_TOGETHER):
        chunk = texts[start : start + _COMPARED_TOGETHER]
        expected, bounds = encode_exactly(backend, chunk, special=special)
        actual, actual_bounds = fast.encode(chunk, special=special)
        if actual.tobytes() == expected.tobytes() and actual_bounds.tobytes() == bounds.tobytes():
            continue
        for i, text in enumerate(chunk):  # find the string that differs
            ids = actual[actual_bounds[i] : actual_bounds[i + 1]]
            compare(text, ids, expected[bounds[i] : bounds[i + 1]].tolist(), special=special)


def compare(text: str, actual: Int64, expected: Sequence[int], *, special: bool) -> None:
    """Compare the ids of fastokens for a string with the ids of tokenizers.

    Raises:
        EngineMismatch: they differ; the message shows the string and the index of the first different token.
    """
    ids = actual.tolist()
    if ids == list(expected):
        return
    first = next((i for i, (a, b) in enumerate(zip(ids, expected, strict=False)) if a != b), len(expected))
    shown = repr(text[:_SHOWN]) + (f" (the first {_SHOWN} of {len(text)} characters)" if len(text) > _SHOWN else "")
    raise EngineMismatch(
        f"fastokens and tokenizers produce different tokens, from token {first}, for the text {shown}"
        f"{' with special tokens' if special else ''}; run with `tokenizer_engine=tokenizers`"
    )


# In this order: contractions, scripts and cases of more than one letter, combining characters, emoji, code, numbers,
# control and invisible characters, punctuation.
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
_MAX_ADDED = 400  # added tokens that are compared, from both ends of the list


def proof_texts(backend: Any) -> Iterator[str]:
    """Yield strings on which both engines must agree: every script, white space, very long words, added tokens.

    Engines differ in their tables of Unicode, their definition of white space and their rules of added tokens. That
    they merge the same pairs is confirmed by a part of the data of each run. `is_compared` is true for all strings.

    Args:
        backend: `tokenizers.Tokenizer`.
    """
    yield ""
    yield from _SENTENCES
    for space, following in zip(_SPACES, (*_SPACES[1:], ""), strict=True):
        yield from (space, f"a{space}b", f"{space}a", f"1{space}", f" {space}é{space}\n", f"x{space}{following}y")
    yield from _assigned_characters()
    yield from ("ab" * 10_000, " " * 5000, "a" * LONGEST)
    tokens = [added.content for added in backend.get_added_tokens_decoder().values()]
    for token in dict.fromkeys(tokens[: _MAX_ADDED // 2] + tokens[-_MAX_ADDED // 2 :]):
        yield from (token * 2, f"a{token}b", f" {token} ", f"\n{token}\n", f"é{token}日", f"1{token}\u0301")
        yield from (token[:-1], token[1:], token.upper(), token.title(), f"<|im_start|>user\nsay {token}<|im_end|>")


def _assigned_characters() -> Iterator[str]:
    """Yield every assigned character but most ideographs and syllables, in runs, between spaces and letters."""
    assigned = [
        chr(code)
        for code in (*range(0x3400), *range(0x3400, 0xD7A4, 37), *range(0xE000, 0x30000))
        if unicodedata.category(chr(code)) not in ("Cn", "Cs", "Co")
        and chr(code) not in FOLDED
        and (code < 0x17000 or 0x1B000 <= code < 0x20000 or code % 61 == 0)
    ]
    for start in range(0, len(assigned), 64):
        run = assigned[start : start + 64]
        yield from ("".join(run), " ".join(run), "a".join(run))
