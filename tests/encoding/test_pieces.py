"""Long documents are tokenized in pieces, with the ids of the whole document."""

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from energon_packed import ChatEncoder, RecordError, Reject, normalize
from tests.internals import PieceTokenizer, encode_exactly, pieces

QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
DEEPSEEK = r"[!-/:-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KIMI = r"[\p{Han}]+|" + O200K.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]")
UNITS = (
    *(" ", "\n", "\r\n", "\t", ",", ".", "'s", "don't", "é", "e\u0301", "a\u0323\u0307", "\u1100", "\u1161", "\u11a8"),
    *(
        "日本",
        "語。",
        "\uff0c",
        "가",
        "12",
        "1234",
        "_",
        "the",
        "The cat",
        "x",
        "🙂",
        "👩\u200d👧",
        "<|end|>",
        "<|e",
        "mask",
        "ﾊ\uff9e",
    ),
    *("\u00a0", "\u2028", "١٢", "ß", "ﬁ", "\u0301", "K", "\u017f", "a<|end|>b", " mask ", "<pad>"),
)
TRAINED = ["the cat don't pack 123 1234 rows é 日本語。 가\n\n  x_y, a.b e\u0301 ﬁ mask 🙂 \t\r\n"] * 20
ADDED = (
    AddedToken("<|end|>", special=True),
    AddedToken("<pad>", lstrip=True, rstrip=True, special=True),
    AddedToken("mask", single_word=True),
)


def byte_level(pre_tokenizer: Any, normalizer: Any = None) -> Any:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TRAINED, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return tokenizer


def split(*patterns: str) -> Any:
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def word_piece(pre_tokenizer: Any, normalizer: Any = None) -> Any:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    special = ["[UNK]", "[CLS]", "[SEP]"]
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(TRAINED, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return tokenizer


def metaspace(scheme: str = "always", *, split: bool = True, unigram: bool = False) -> Any:
    tokenizer = Tokenizer(models.Unigram() if unigram else models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer if unigram else trainers.BpeTrainer
    unknown = {"unk_token": "<unk>"} if unigram else {}
    tokenizer.train_from_iterator(
        TRAINED, trainer(vocab_size=200, special_tokens=["<unk>"], show_progress=False, **unknown)
    )
    return tokenizer


def gemma() -> Any:
    tokenizer = metaspace(split=False)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    return tokenizer


ALLOWED = {
    "gpt2": lambda: byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "prefix space": lambda: byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "qwen": lambda: byte_level(split(QWEN), normalizers.NFC()),
    "nfkd": lambda: byte_level(split(QWEN), normalizers.Sequence([normalizers.NFKD(), normalizers.Lowercase()])),
    "llama3": lambda: byte_level(split(LLAMA3)),
    "deepseek": lambda: byte_level(split(r"\p{N}{1,3}", r"[一-龥ぁ-ゟ]+", DEEPSEEK)),
    "o200k": lambda: byte_level(split(O200K)),
    "kimi": lambda: byte_level(split(KIMI)),
    "thousands": lambda: byte_level(split(r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", QWEN)),
    "bert": lambda: word_piece(pre_tokenizers.BertPreTokenizer(), normalizers.BertNormalizer()),
    "whitespace": lambda: word_piece(pre_tokenizers.Whitespace()),
    "whitespace split": lambda: word_piece(pre_tokenizers.WhitespaceSplit()),
    "metaspace": metaspace,
    "metaspace first": lambda: metaspace("first"),
    "unigram": lambda: metaspace(unigram=True),
}
REFUSED = {
    "no pre-tokenizer": (lambda: byte_level(split()), "no pre-tokenizer that splits"),
    "metaspace": (lambda: metaspace(split=False), "no pre-tokenizer that splits"),
    "looks behind": (lambda: byte_level(split(r"(?<=a)\s+", QWEN)), r"(?<= in the pattern"),
    "gemma": (gemma, "does not split a generated text"),
    "nested": (lambda: byte_level(split(r"[\p{L}&&[^[a-z]]]+|x")), r"[\p{L}&&[^[a-z]] in the pattern"),
    "group by name": (lambda: byte_level(split(r"(?<n>a)(?:\g<n>,)+")), "a repeated group in the pattern"),
    "boundary": (lambda: byte_level(split(r"\b\w+")), r"\b in the pattern"),
    "lines": (lambda: byte_level(split(r".+")), r".+ in the pattern"),
    "addresses": (lambda: byte_level(split(r"\S+@\S+", QWEN)), r"\S+ in the pattern"),
    "all": (lambda: byte_level(split(r"a(?=[\s\S]*z)", QWEN)), r"[\s\S]* in the pattern"),
    "groups": (lambda: byte_level(split(r"(?:\w+,?)+")), "a repeated group in the pattern"),
    "not a digit": (lambda: byte_level(split(r"[^0-9]+")), r"[^0-9]+ in the pattern"),
    "strip": (lambda: byte_level(split(QWEN), normalizers.Strip()), "normalizer Strip"),
    "prepend": (lambda: byte_level(split(QWEN), normalizers.Prepend("▁")), "normalizer Prepend"),
    "scripts": (lambda: byte_level(pre_tokenizers.UnicodeScripts()), "pre-tokenizer UnicodeScripts"),
    "dropout": (lambda: Tokenizer(models.BPE(dropout=0.1)), "dropout"),
}


def unknown(model: Any, normalizer: Any, *patterns: str) -> Any:
    """A tokenizer whose ids are all 0, so that comparing the ids of windows finds only other numbers of tokens."""
    tokenizer = Tokenizer(model(vocab={"mask": 0}, unk_token="mask"))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(p), "isolated") for p in patterns])
    tokenizer.add_tokens([AddedToken("mask", single_word=True)])
    return tokenizer


def unknown_characters() -> Any:
    return unknown(partial(models.BPE, merges=[]), normalizers.NFKC(), r"\p{P}?\p{L}+|\p{P}|\s+|\p{N}")


def unknown_words() -> Any:
    return unknown(models.WordLevel, normalizers.NFC(), r"\p{N}{1,3}", r"\p{N}(?!\p{N})|\p{L}")


def piece_tokenizer(backend: Any) -> PieceTokenizer:
    return PieceTokenizer(backend, lambda text: encode_exactly(backend, [text], special=False)[0])


def generated(rng: random.Random, size: int) -> str:
    parts: list[str] = []
    while sum(map(len, parts)) < size:
        unit = rng.choice(UNITS)
        parts.append(unit * rng.choice([1, 1, 1, 1, 2, 3, rng.randint(1, 200) if rng.random() < 0.1 else 1]))
        parts.append(rng.choice(["", " ", " ", "\n"]))
    return "".join(parts)


@pytest.mark.parametrize("name", ALLOWED)
def test_ids_of_pieces_are_those_of_the_whole_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = ALLOWED[name]()
    backend.add_tokens(list(ADDED))
    tokenizer = piece_tokenizer(backend)
    assert tokenizer.obstacle == ""  # the proof needs the places of production
    monkeypatch.setattr(PieceTokenizer, "window", 128)
    monkeypatch.setattr(pieces, "_CHANGES", 4)
    rng = random.Random(name)
    for _ in range(12):
        text = generated(rng, rng.choice([0, 10, 500, 3000]))
        for special in (False, True):
            expected = backend.encode(text, add_special_tokens=special).ids
            assert tokenizer.encode(text, special=special).tolist() == expected, text


@pytest.mark.parametrize(
    ("make", "units"),
    [
        (unknown_characters, ["…the", "x,"]),  # NFKC: three words, and the last continues after the character
        (unknown_characters, ["\u3260\u1161", " ", "1"]),  # NFKC composes the symbol and the letter
        (unknown_words, ["12345678", "x,"]),  # three digits are a group, whose last digit is a word
        (unknown_words, ["ⓐmask", " "]),  # "mask" is an added token, but not after a letter
    ],
)
def test_no_cut_changes_the_number_of_tokens(
    make: Callable[[], Any], units: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make()
    tokenizer = piece_tokenizer(backend)
    assert tokenizer.obstacle == ""
    monkeypatch.setattr(PieceTokenizer, "window", 128)
    monkeypatch.setattr(pieces, "_CHANGES", 4)
    rng = random.Random(0)
    for _ in range(20):
        text = "".join(rng.choices(units, k=300))
        assert tokenizer.encode(text, special=False).tolist() == backend.encode(text).ids


@pytest.mark.parametrize("name", REFUSED)
def test_a_tokenizer_that_depends_on_distant_text_is_reported_once_and_tokenizes_whole_texts(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make, reason = REFUSED[name]
    tokenizer = piece_tokenizer(make())
    assert reason in tokenizer.obstacle
    monkeypatch.setattr(PieceTokenizer, "most", 2000)
    text = generated(random.Random(0), 1500)
    if name != "dropout":
        assert tokenizer.encode(text, special=True).tolist() == make().encode(text).ids
    tokenizer.encode(text, special=False)
    (message,) = caplog.messages
    assert message.endswith(f"cannot tokenize them in pieces: {tokenizer.obstacle}")
    with pytest.raises(RecordError, match=r"must have at most 2,000 characters, got 3,\d+, as the tokenizer cannot"):
        tokenizer.encode(generated(random.Random(0), 3000), special=False)


def test_a_tokenizer_whose_pieces_differ_on_the_generated_text_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "_obstacle", lambda settings: "")  # not known by its settings
    assert "generated text" in piece_tokenizer(byte_level(split(r"2(?=[\s\S]{20000})", LLAMA3))).obstacle


def test_memory_is_that_of_a_window_unless_the_text_has_no_place_to_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PieceTokenizer, "window", 2048)
    monkeypatch.setattr(PieceTokenizer, "most", 8192)
    backend = ALLOWED["qwen"]()
    sizes: list[int] = []

    def encode(text: str) -> Any:
        sizes.append(len(text))
        return np.array(backend.encode(text).ids)

    tokenizer = PieceTokenizer(backend, encode)
    vars(tokenizer)["obstacle"] = ""
    text = "the cat, " * 4000
    assert tokenizer.encode(text, special=False).tolist() == backend.encode(text).ids
    assert max(sizes) == 2048
    assert sum(sizes) < 2 * len(text)
    sizes.clear()
    text = "the cat, " * 1000 + "a" * 4000 + " the cat" * 1000
    assert tokenizer.encode(text, special=False).tolist() == backend.encode(text).ids
    assert max(sizes) == 8192
    with pytest.raises(RecordError, match=r"characters 0 to 8,192 have no place to tokenize it in pieces"):
        tokenizer.encode("a" * 10_000, special=False)


def long_records() -> list[dict[str, Any]]:
    rng = random.Random(1)
    return [
        {"id": "short", "text": "a short one"},
        {"id": "long", "text": generated(rng, 3000)},
        {"id": "special", "text": "<|im_end|>".join(generated(rng, 1000) for _ in range(3))},
        {"id": "chat", "prompts": [generated(rng, 1000)], "captions": [generated(rng, 3000)]},
        {"id": "run", "text": "a" * 5000},
    ]


@pytest.mark.parametrize("allow", [False, True])
def test_long_documents_are_encoded_and_measured_in_pieces(
    tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch, allow: bool
) -> None:
    conversations = [normalize(record) for record in long_records()]
    encoder = ChatEncoder.from_pretrained(tokenizer_dir, allow_special_in_text=allow)
    expected = encoder.encode_many(conversations)
    monkeypatch.setattr(pieces, "LONG", 2000)
    monkeypatch.setattr(PieceTokenizer, "window", 256)
    monkeypatch.setattr(PieceTokenizer, "most", 4096)
    monkeypatch.setattr(pieces, "_CHANGES", 4)
    monkeypatch.setattr(PieceTokenizer, "obstacle", "")
    encoder = ChatEncoder.from_pretrained(tokenizer_dir, allow_special_in_text=allow)
    encoded, measured = encoder.encode_many(conversations), encoder.measure(conversations, keep_tokens=True)
    for conversation, whole, sample, measurement in zip(conversations, expected, encoded, measured, strict=True):
        if conversation.id == "run":
            assert isinstance(sample, Reject)
            assert sample == measurement.reject
            assert "got 5,010" in sample.detail
            continue
        assert not isinstance(whole, Reject)
        assert not isinstance(sample, Reject)
        assert measurement.sample is not None
        assert sample.input_ids.tolist() == whole.input_ids.tolist() == measurement.sample.input_ids.tolist()
        assert sample.labels.tolist() == whole.labels.tolist()
        assert measurement.length == len(sample)
