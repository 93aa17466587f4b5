"""fastokens and tokenizers: equal where fastokens is used, refused where they differ."""

import json
import os
import pickle
import random
import subprocess
import sys
import unicodedata
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from energon_packed import ChatEncoder, ConfigError, Conversation, Message, pack
from tests.internals import EngineMismatch, FastokensEngine, TextTokenizer, engines, proof_texts
from tests.internals import tokenizer as tokenizer_module

# The pre-tokenizers of Qwen2, Llama 3 and GPT-2, from their tokenizer.json.
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA = QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
EXAMPLES = int(os.environ.get("ENERGON_PACKED_FUZZ", "400"))  # strings; `make hard` sets more
UNEQUAL = rf"(?:a(?=b)|{QWEN})"  # fastokens 0.3.5 takes U+180E for white space, as PCRE2 does


def byte_level(pattern: str | None, normalizer: Any = None, ignore_merges: bool = False) -> Any:
    return Tokenizer.from_str(trained(pattern, normalizer, ignore_merges))


@cache
def trained(pattern: str | None, normalizer: Any, ignore_merges: bool) -> str:
    backend = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    if pattern is None:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        steps = [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
        backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if normalizer is not None:
        backend.normalizer = normalizer()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=2000, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    texts = [text for text in proof_texts(backend) if len(text) < 1000]
    backend.train_from_iterator([*texts, *["a \u180ee", "a\u180eb"] * 20], trainer)  # merges that the engines split
    return str(backend.to_str())


@pytest.fixture(scope="module")
def unequal() -> Any:
    return byte_level(UNEQUAL)


def with_bos() -> Any:
    backend = byte_level(LLAMA, ignore_merges=True)
    template = processors.TemplateProcessing(
        single="<|endoftext|> $A", pair="<|endoftext|> $A $B", special_tokens=[("<|endoftext|>", 0)]
    )
    backend.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return backend


def with_added() -> Any:
    backend = byte_level(QWEN, normalizers.NFC)
    backend.add_tokens(
        [AddedToken("<mask>", lstrip=True), AddedToken("<r>", rstrip=True), AddedToken("word", single_word=True)]
    )
    backend.add_tokens([AddedToken("é x", normalized=True), AddedToken("</think>", normalized=False, special=False)])
    return backend


@pytest.mark.parametrize("make", [lambda: byte_level(None), with_bos, with_added])
def test_tokenizers_of_the_field_pass_the_comparison(make: Any) -> None:
    tokenizer = TextTokenizer(make())
    assert tokenizer.load_fast() == ""
    tokenizer.encode(["a text", "é"], [None, None])
    assert tokenizer.engine == "fastokens"


def test_a_tokenizer_with_other_tokens_is_found(unequal: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    automatic = TextTokenizer(unequal)
    for _ in range(2):
        automatic.encode(["a \u180ee"] * 4096, [None] * 4096)
    assert automatic.engine == "tokenizers"
    assert "not fastokens: fastokens and tokenizers produce different tokens, from token" in caplog.text
    named = TextTokenizer(unequal, "fastokens")
    with pytest.raises(
        EngineMismatch, match="different tokens, from token .*; run with `tokenizer_engine=tokenizers`"
    ):
        named.encode(["any text"], [None])


def test_auto_uses_fastokens_after_many_texts_and_one_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    prove = tokenizer_module.prove
    monkeypatch.setattr(tokenizer_module, "prove", lambda *parts: (compared.append(1), prove(*parts)))
    tokenizer = TextTokenizer(byte_level(QWEN))
    for _ in range(3):
        assert tokenizer.engine == "tokenizers"
        tokenizer.encode(["a text"] * 1366, [None] * 1366)
    for _ in range(3):
        tokenizer.encode(["a text"], [None])
        assert tokenizer.engine == "fastokens"
    assert compared == [1]


@pytest.mark.parametrize("text", ["'\u017fa", "it'\u017f", "'\u212a", "IT'Sa", "i'\u017f'\u212aa"])
def test_letters_that_fold_to_ascii_have_the_same_tokens(text: str) -> None:
    fast, slow = (TextTokenizer(byte_level(QWEN), name) for name in ("fastokens", "tokenizers"))
    assert fast.encode([text], [None]).input_ids.tolist() == slow.encode([text], [None]).input_ids.tolist()
    assert fast.engine == "fastokens"


def test_texts_longer_than_the_compared_texts_use_tokenizers() -> None:
    tokenizer = TextTokenizer(byte_level(QWEN), "fastokens")
    given = []
    tokenizer._is_decided = True
    tokenizer._fast = SimpleNamespace(encode=lambda texts, special: (given.append(texts), slow(texts, special))[1])  # type: ignore[assignment]
    slow = lambda texts, special: engines.encode_exactly(tokenizer.backend, texts, special=special)  # noqa: E731
    found = tokenizer.encode(["short", "a" * (engines.LONGEST + 1)], [None, None])
    assert given[0] == ["short"]
    assert found.cu_seqlens[-1] == len(found.input_ids)


WORDS = (
    "the", "The", "tokens", "WE'LL", "they'D", "isn\u2019t", "'s", "'RE", "'\u017fa", "\u212a", "Größe", "İstanbul",
    "ﬁne", "日本語", "ｶﾅ", "한국어", "\u1100\u1161\u11a8", "العربية", "हिन्दी", "ไทย", "Ελλάδα", "1", "42", "12345678",
    "١٢", "½", "ⅷ",
    "e\u0301", "A\u030a\u0301", "\u0301", "👍🏽", "👩\u200d👧", "🇩🇪", "❤\ufe0f", "\u200b", "\ufeff", "\x00", "\x1b[0m",
    "...", "!?", "((", "{'a': [1]}", "=>", "--", "\\n", "<p>", "<|", "|>", "x**2", "_", "#", "https://a.b/c?d=e&f",
    " ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", " \n ", "\u00a0", "\u2003", "\u3000", "\u180e", "\x85", "\u2028",
)  # fmt: skip


def fuzzed_texts(backend: Any, rng: random.Random, count: int) -> list[str]:
    """Random strings of words, spaces, added tokens, parts of them, and any characters of Unicode."""
    added = [token.content for token in backend.get_added_tokens_decoder().values()]
    words = [*WORDS, *[" "] * 12, *added, *[token[:-1] for token in added], *[token.upper() for token in added]]

    def part() -> str:
        if rng.random() < 0.8:
            return rng.choice(words)
        # Code points of a random block, so that letters of one script stand together.
        start = rng.choice((0x20, 0xA0, 0x300, 0x600, 0x900, 0x1100, 0x2000, 0x3000, 0x4E00, 0xAC00, 0xFF00, 0x1F300))
        start += rng.randrange(0x200)
        some = [chr(start + rng.randrange(0x40)) for _ in range(rng.randrange(1, 5))]
        return "".join([character for character in some if unicodedata.category(character) != "Cs"])

    return ["".join([part() for _ in range(rng.randrange(24))]) for _ in range(count)]


@pytest.mark.parametrize("make", [lambda: byte_level(None), lambda: byte_level(QWEN), with_bos, with_added])
@pytest.mark.parametrize("special", [False, True])
def test_random_texts_have_the_same_tokens_with_both(make: Any, special: bool) -> None:
    tokenizer, rng = TextTokenizer(make(), "fastokens"), random.Random(17)
    for start in range(0, EXAMPLES, 200):
        texts = fuzzed_texts(tokenizer.backend, rng, min(200, EXAMPLES - start))
        found = tokenizer.encode(texts, [None] * len(texts), special=special)
        assert tokenizer.engine == "fastokens"
        for text, ids in zip(texts, np.split(found.input_ids, found.cu_seqlens[1:-1]), strict=True):
            assert ids.tolist() == tokenizer.backend.encode(text, add_special_tokens=special).ids, repr(text)


def test_random_texts_find_the_difference_of_an_unequal_tokenizer(unequal: Any) -> None:
    texts = [text for text in fuzzed_texts(unequal, random.Random(1), 400) if engines.is_compared(text)]
    with pytest.raises(EngineMismatch, match="u180e"):
        engines.compare_engines(unequal, FastokensEngine(unequal.to_str()), texts)


def test_without_fastokens_its_name_is_an_error(unequal: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastokens", None)  # as if no wheel exists for this platform
    with pytest.raises(ConfigError, match="fastokens is not installed; run pip install fastokens"):
        TextTokenizer(unequal, "fastokens")
    with pytest.raises(ConfigError, match="`tokenizer_engine` must be one of auto, .*, got 'tokie'"):
        TextTokenizer(unequal, "tokie")  # type: ignore[arg-type]


def test_without_fastokens_texts_are_tokenized_by_tokenizers(
    text_tokenizer_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    records = [{"messages": [message.as_dict() for message in chat.messages]} for chat in chats(1500)]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    written = []
    for engine in ("fastokens", "tokenizers"):
        if engine == "tokenizers":
            monkeypatch.setitem(sys.modules, "fastokens", None)
        tokenizer = TextTokenizer(with_bos())
        tokenizer.prepare_fork()
        tokenizer.encode(["a text"] * 4096, [None] * 4096)  # many enough to load fastokens
        assert tokenizer.encode(["é"], [None]).input_ids.tolist() == tokenizer.backend.encode("é").ids[1:]
        assert tokenizer.engine == engine
        assert ("fastokens is not installed" in caplog.text) == (engine == "tokenizers")
        out = tmp_path / engine
        options: dict[str, Any] = {"seq_len": 2048, "workers": 2, "shard_prefix": "x"}
        result = pack(tmp_path / "d.jsonl", output_dir=out, tokenizer=text_tokenizer_dir, **options)
        assert engine == "fastokens" or result.manifest.tokenizer_engine == "tokenizers"
        written.append([file.read_bytes() for file in sorted([*result.shards.glob("*.tar"), result.lengths])])
    assert written[0] == written[1]


def test_other_kinds_of_tokenizers_keep_tokenizers() -> None:
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    assert "byte-level" in TextTokenizer(backend).load_fast()
    with pytest.raises(ConfigError, match="byte-level BPE tokenizers only"):
        TextTokenizer(backend, "fastokens")


def test_a_difference_stops_the_run_and_names_the_text(unequal: Any) -> None:
    tokenizer = TextTokenizer(unequal)
    tokenizer._fast, tokenizer._is_decided = FastokensEngine(tokenizer.serialized), True  # as if it were proved
    texts = ["fine"] * 255 + ["a \u180ee"] + ["fine"] * 3
    tokenizer.encode(texts, [None] * len(texts))  # text 255 is not compared
    assert tokenizer.encode(["fine"] * 252, [None] * 252).input_ids.any()
    assert tokenizer._seen == 511
    tokenizer.encode(["fine"], [None])
    with pytest.raises(
        EngineMismatch, match=r"different tokens, from token \d+, for the text '.*u180ee'; run with `tok"
    ):
        tokenizer.encode([texts[255]], [None])


def test_strings_that_the_normalizer_changes_use_tokenizers() -> None:
    tokenizer = TextTokenizer(byte_level(QWEN, normalizers.NFC))
    tokenizer._fast, tokenizer._is_decided = FastokensEngine(tokenizer.serialized), True
    given: list[list[str]] = []
    encode = tokenizer._fast.encode
    tokenizer._fast.encode = lambda texts, special: (given.append(list(texts)), encode(texts, special=special))[1]  # type: ignore[method-assign]
    texts = ["plain", "e\u0301", "caf\u00e9", "Z\u0351", "", "A\u030a\u0301"]
    found = tokenizer.encode(texts, [[(0, 1)]] * len(texts))
    assert given == [["plain", "caf\u00e9", "Z\u0351", ""]]
    for number, text in enumerate(texts):
        part = slice(*found.cu_seqlens[number : number + 2])
        assert found.input_ids[part].tolist() == tokenizer.backend.encode(text).ids


def test_copies_in_other_processes_decide_for_themselves(tokenizer_dir: Path) -> None:
    encoder = ChatEncoder.from_pretrained(tokenizer_dir, tokenizer_engine="fastokens")
    copy = pickle.loads(pickle.dumps(encoder))
    assert copy.text_tokenizer.engine == encoder.text_tokenizer.engine == "fastokens"
    assert copy.fingerprint() == encoder.fingerprint() == ChatEncoder.from_pretrained(tokenizer_dir).fingerprint()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_of_a_process_that_used_fastokens_does_not_use_it(tokenizer_dir: Path) -> None:
    tokenizer = ChatEncoder.from_pretrained(tokenizer_dir, tokenizer_engine="fastokens").text_tokenizer
    expected = tokenizer.encode(["hello"], [None]).input_ids.tolist()
    assert engines.is_safe_here()
    child = os.fork()
    if child == 0:
        same = tokenizer.encode(["hello"], [None]).input_ids.tolist() == expected
        os._exit(0 if same and tokenizer.engine == "tokenizers" else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("make", [with_bos, lambda: None])
def test_engines_are_compared_once_before_a_fork(
    make: Any, unequal: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In a process of its own: children of this process may use fastokens, and do not compare again."""
    caplog.set_level("INFO")
    backend = make()
    tokenizer = TextTokenizer(unequal if backend is None else backend)
    monkeypatch.setattr(engines, "_used_in", None)
    tokenizer.prepare_fork()
    assert engines._used_in is None
    monkeypatch.setattr(tokenizer_module, "prove", lambda *_: pytest.fail("compared again"))
    child = os.fork()
    if child == 0:
        try:
            tokenizer.encode(["hello"], [None])
            os._exit(0 if tokenizer.engine == ("tokenizers" if backend is None else "fastokens") else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert ("produce different tokens" in caplog.text) == (backend is None)


def test_a_comparison_that_dies_leaves_the_slower_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(engines, "prove", lambda *_: os._exit(7))
    tokenizer = TextTokenizer(with_bos())
    tokenizer.prepare_fork()
    assert "ended with exit code 7" in caplog.text
    tokenizer.encode(["hello"], [None])
    assert tokenizer.engine == "tokenizers"


def chats(count: int) -> list[Conversation]:
    words = "über naïve 日本語 👍🏽 e\u0301 code(x) 12345 \t\n  <|im_end|> what's"
    return [
        Conversation(messages=(Message("user", f"{number} {words}"), Message("assistant", words[number % 20 :] * 3)))
        for number in range(count)
    ]


def test_encoding_and_measuring_are_the_same_with_both(tokenizer_dir: Path) -> None:
    fast = ChatEncoder.from_pretrained(tokenizer_dir, tokenizer_engine="fastokens")
    slow = ChatEncoder.from_pretrained(tokenizer_dir, tokenizer_engine="tokenizers")
    for ours, theirs in zip(fast.encode_many(chats(40)), slow.encode_many(chats(40)), strict=True):
        assert np.array_equal(ours.input_ids, theirs.input_ids)  # type: ignore[union-attr]
        assert np.array_equal(ours.labels, theirs.labels)  # type: ignore[union-attr]
    assert fast.measure(chats(600)) == slow.measure(chats(600))


@pytest.mark.parametrize("sample_class", ["auto", "PackedTokensSample"])
def test_tars_are_the_same_with_both(text_tokenizer_dir: Path, tmp_path: Path, sample_class: str) -> None:
    records = [{"messages": [message.as_dict() for message in chat.messages]} for chat in chats(1500)]
    records += [{"text": "a document"}, {"messages": []}, {"input_ids": [5, 6, 7]}]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    written = {}
    for engine in ("tokenizers", "fastokens"):
        options: dict[str, Any] = {"seq_len": 2048, "workers": 2, "shard_prefix": "x", "sample_class": sample_class}
        out = tmp_path / engine
        result = pack(
            tmp_path / "d.jsonl", output_dir=out, tokenizer=text_tokenizer_dir, tokenizer_engine=engine, **options
        )
        files = sorted([*result.shards.glob("*.tar"), result.lengths, result.rejects])
        written[engine] = [(file.name, file.read_bytes()) for file in files]
        assert result.manifest.encoder.keys() == {"tokenizer", "loss_on"}
        assert result.manifest.tokenizer_engine in {engine, "tokenizers"}  # a process that used it before forks safely
    assert written["tokenizers"] == written["fastokens"]


_NEW_WORDS = """
import json, os, sys
os.environ |= {"RAYON_NUM_THREADS": "1", "FASTOKENS_BPE_THREADS": "1"}  # as in a worker
from tests.internals import FastokensEngine
engine, letters = FastokensEngine(sys.stdin.read()), str.maketrans("0123456789", "ghijklmnop")
def memory():
    return int(next(line for line in open("/proc/self/status") if line.startswith("RssAnon")).split()[1])
for first in range(0, 6_000_000, 20_000):
    if first in (0, 3_000_000):
        print(memory())
    words = (f"{number * 2654435761 % 2**32:x}" for number in range(first, first + 20_000))
    engine.encode([" ".join(words).translate(letters)], special=False)
print(memory())
"""


def test_fastokens_keeps_a_limited_number_of_words() -> None:
    """It keeps words that it has seen, until the process ends: in 0.3.5 at most a million of a thread."""
    done = subprocess.run(
        [sys.executable, "-c", _NEW_WORDS],
        input=trained(QWEN, None, False),
        capture_output=True,
        text=True,
        check=True,
    )
    start, full, end = (int(line) / 1024 for line in done.stdout.split())  # MiB
    assert 50 < full - start < 150
    assert end - full < 10
