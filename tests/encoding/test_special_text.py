"""Special tokens that a conversation writes are text: in every kind of tokenizer, in both engines, while measuring and
encoding alike, and counted; everything else keeps the ids of the tokenizer."""

import json
import re
import struct
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
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

from energon_packed import ChatEncoder, ConfigError, EncodedSample, PackOptions, RecordError, normalize, pack
from tests.conftest import DemoDataset
from tests.internals import (
    ESCAPE_BASE,
    EscapedTokenizer,
    SpecialText,
    TextTokenizer,
    control_tokens,
    searched_literals,
)
from tests.turns import supervised_turns

SPECIAL = ["<|im_start|>", "<|im_end|>", "<s>", "</s>", "<unk>", "<mask>"]
WRITTEN = "<|im_end|>"


def tokenizer(kind: str) -> Any:
    """One of each kind of model, with its special tokens in the vocabulary, added behind it, or products of merges."""
    sentences = ["abc abc b ca", "is im_end one? <| |> < >", "日本 é s mask unk", "what end start"] * 20
    if kind == "unigram":
        found = Tokenizer(models.Unigram())
        found.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        options = {"special_tokens": SPECIAL, "unk_token": "<unk>", "vocab_size": 120}
        found.train_from_iterator(sentences, trainers.UnigramTrainer(show_progress=False, **options))
    elif kind == "wordpiece":
        found = Tokenizer(models.WordPiece(unk_token="<unk>"))
        found.normalizer, found.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
        options = {"special_tokens": SPECIAL, "vocab_size": 200}
        found.train_from_iterator(sentences, trainers.WordPieceTrainer(show_progress=False, **options))
    elif kind == "merged":
        found = Tokenizer(models.BPE())
        found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        options = {"vocab_size": 400, "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
        repeated = [f"{token}{end}" for token in SPECIAL for end in ("", "bc")] * 20
        found.train_from_iterator(repeated, trainers.BpeTrainer(show_progress=False, **options))
        assert all(found.token_to_id(token) is not None for token in SPECIAL)
        found.add_special_tokens([*SPECIAL])
    elif kind == "llama":
        found = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        found.normalizer = normalizers.Sequence(steps)  # type: ignore[arg-type]
        options = {"special_tokens": ["<unk>", *[f"<0x{byte:02X}>" for byte in range(256)]], "vocab_size": 400}
        found.train_from_iterator(sentences, trainers.BpeTrainer(show_progress=False, **options))
        found.add_special_tokens([AddedToken(one, normalized=False) for one in SPECIAL])
    else:
        found = Tokenizer(models.BPE())
        found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=kind == "prefix")
        found.normalizer = normalizers.NFC()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        options = {"vocab_size": 300, "special_tokens": SPECIAL[:2], "initial_alphabet": alphabet}
        found.train_from_iterator(sentences, trainers.BpeTrainer(show_progress=False, **options))
        found.add_special_tokens([*SPECIAL[2:-1], AddedToken("<mask>", lstrip=True, rstrip=True)])
        found.add_tokens(["<think>", "</think>"])
    found.decoder = decoders.ByteLevel()
    number = found.token_to_id("<s>")
    found.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", number)])
    return found


KINDS = {kind: tokenizer(kind) for kind in ("bytes", "prefix", "merged", "llama", "unigram", "wordpiece")}
HOLDERS = {kind: EscapedTokenizer(one.to_str(), control_tokens(SPECIAL)) for kind, one in KINDS.items()}
PIECES = st.sampled_from(
    [*SPECIAL, "<think>", " ", "\n", "abc", "é", "e\u0301", "日本", "im_end", "<|", "|>", "< s >"]
)


def as_text(backend: Any, text: str) -> list[int]:
    """Ids with `split_special_tokens`, as Transformers asks tokenizers for it."""
    backend.encode_special_tokens = True
    try:
        return list(backend.encode(text, add_special_tokens=False).ids)
    finally:
        backend.encode_special_tokens = False


@settings(max_examples=150, deadline=None)
@given(kind=st.sampled_from(sorted(KINDS)), pieces=st.lists(PIECES, max_size=8), special=st.booleans())
@example(kind="bytes", pieces=["<|", "im_end", "|>"], special=False)
def test_only_what_is_held_is_text(kind: str, pieces: list[str], special: bool) -> None:
    text, backend, holder = "".join(pieces), KINDS[kind], HOLDERS[kind]
    ordinary = backend.encode(text, add_special_tokens=special)
    ids, covered = holder.encode(text, [(0, min(3, len(text)))], special=special)
    assert ids.tolist() == ordinary.ids
    assert covered.tolist() == [a < 3 and b > 0 for a, b in ordinary.offsets]
    # In the joined text, because pieces such as `<|`, `im_end` and `|>` are a control token together.
    held = re.sub(
        "|".join(map(re.escape, SPECIAL)), lambda one: chr(ESCAPE_BASE + control_tokens(SPECIAL).index(one[0])), text
    )
    found = holder.encode(held, None, special=False)[0].tolist()
    assert not {backend.token_to_id(one) for one in SPECIAL if one != "<unk>"} & set(found)
    if kind == "merged":  # its model finds control tokens by merges, with split_special_tokens too; text is unchanged
        assert backend.decode(found, skip_special_tokens=False) == text
    elif kind != "unigram":  # as this model, in its vocabulary
        assert found == as_text(backend, text)


def test_a_held_text_between_control_tokens_is_split_with_what_is_around_it() -> None:
    backend, holder = KINDS["bytes"], HOLDERS["bytes"]
    mark = chr(ESCAPE_BASE + control_tokens(SPECIAL).index(WRITTEN))
    ids, covered = holder.encode(f"<|im_start|>abc{mark} b<|im_end|>\n", [(12, 18)], special=False)
    middle = as_text(backend, f"abc{WRITTEN} b")
    expected = [*backend.encode("<|im_start|>").ids[1:], *middle, *backend.encode("<|im_end|>\n").ids[1:]]
    assert ids.tolist() == expected
    assert covered.tolist() == [False, *[True] * len(middle), *[False] * (len(ids) - len(middle) - 1)]


def precompiled(characters: dict[str, str]) -> Any:
    """A `Precompiled` normalizer that replaces characters of three bytes, as that of SentencePiece models does.

    Its first part is a double array as of Darts-clone: a node of each byte at `region ^ byte`, whose value is the
    offset of the replacement in the second part.
    """
    units, texts, regions = [0] * (1 << 15), b"", {b"": 1 << 8}
    units[0] = regions[b""] << 10
    for character, text in characters.items():
        key = character.encode()
        for depth, byte in enumerate(key):
            node = regions[key[:depth]] ^ byte
            after = regions.setdefault(key[: depth + 1], (len(regions) + 1) << 8)
            units[node] = (node ^ after) << 10 | byte
        units[node] |= 1 << 8  # it has a value
        units[after] = len(texts) | 1 << 31
        texts += text.encode() + b"\0"
    trie = struct.pack(f"<{len(units)}I", *units)
    return normalizers.Precompiled(struct.pack("<I", len(trie)) + trie + texts)


WIDE = {chr(ord(letter) + 0xFEE0): letter for letter in "<>/|ks"}
WIDE_END = "\uff1c/s\uff1e"
# Each with the characters that it turns into those of control tokens.
NORMALIZERS: dict[str, tuple[Any, dict[str, str]]] = {
    "NFC": (normalizers.NFC(), {"\u212a": "K"}),  # the Kelvin sign
    "NFD": (normalizers.NFD(), {"\u226f": ">", "\u226e": "<"}),  # not greater than: > and a combining character
    "NFKC": (normalizers.NFKC(), WIDE),
    "NFKD": (normalizers.NFKD(), WIDE),
    "Lowercase": (normalizers.Lowercase(), {"S": "s", "K": "k", "\u212a": "k"}),
    "StripAccents": (normalizers.StripAccents(), {"<\u0301": "<", "\u0301/": "/", "s\u0300": "s"}),
    "Replace": (normalizers.Replace("[", "<"), {"[": "<"}),
    "removed": (normalizers.Replace(Regex("[\u200b\u00ad]"), ""), {"<\u200b": "<", "s\u00ad": "s"}),
    "Strip": (normalizers.Strip(), {}),
    "Bert": (normalizers.BertNormalizer(), {"S": "s", "<\x00": "<"}),
    "Precompiled": (precompiled(WIDE), WIDE),
    "Nmt": (normalizers.Nmt(), {"<\x01": "<"}),
    "sequence": (normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()]), {**WIDE, "S": "s"}),
}
CONTROLS = ["<s>", "</s>", "<|k|>", "<K>"]


@cache
def normalizing(name: str, normalized: bool, merged: bool) -> tuple[Any, TextTokenizer]:
    """A byte-level BPE tokenizer with a normalizer.

    Args:
        name: in NORMALIZERS.
        normalized: control tokens are searched in the normalized text.
        merged: the merges produce the control tokens.
    """
    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found.decoder = decoders.ByteLevel()
    options = {"vocab_size": 500, "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    words = CONTROLS * 20 if merged else ["abc", "a b"]
    found.train_from_iterator(words, trainers.BpeTrainer(show_progress=False, **options))
    found.normalizer = NORMALIZERS[name][0]
    found.add_special_tokens([AddedToken(one, normalized=normalized) for one in CONTROLS])
    number = found.token_to_id("<s>")
    found.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", number)])
    return found, TextTokenizer(found, control=CONTROLS)


@settings(max_examples=300, deadline=None)
@given(
    name=st.sampled_from(sorted(NORMALIZERS)),
    normalized=st.booleans(),
    merged=st.booleans(),
    special=st.booleans(),
    pieces=st.lists(st.one_of(st.sampled_from([*CONTROLS, "abc", " ", "é"]), st.sampled_from(CONTROLS).map(list))),
    data=st.data(),
)
def test_no_normalizer_makes_a_control_token_of_text(
    name: str, normalized: bool, merged: bool, special: bool, pieces: list[Any], data: st.DataObject
) -> None:
    backend, tokenizer = normalizing(name, normalized, merged)
    if name == "Bert" and normalized:  # it removes the characters that stand for the tokens of the template
        with pytest.raises(ConfigError, match="the normalizer would remove <"):
            tokenizer.encode(["</S>"], [None])
        return
    rewritten = [(target, source) for source, target in NORMALIZERS[name][1].items()]
    text, written = "", Counter[str]({"<s>": int(special)})
    for piece in pieces:
        if isinstance(piece, list):  # a control token in another spelling
            target, source = data.draw(st.sampled_from(rewritten)) if rewritten else ("", "")
            spelled = "".join(piece).replace(target, source, 1) if target else "abc"
            text += spelled if spelled not in CONTROLS else "abc"
        else:
            text += piece
            written[piece] += piece in CONTROLS
    spans = [None, None] if special else [[(0, 1)], [(0, len(text))]]
    tokens = tokenizer.encode(["a", text], spans, special=special)
    ids = tokens.input_ids[tokens.cu_seqlens[1] :].tolist()
    assert {one: ids.count(backend.token_to_id(one)) for one in CONTROLS} == {one: written[one] for one in CONTROLS}
    shown = backend.normalizer.normalize_str(text) if not written.total() else None
    assert shown is None or backend.decode(ids, skip_special_tokens=False) == shown
    if (ordinary := backend.encode(text, add_special_tokens=special).ids) != ids:
        assert any(ordinary.count(backend.token_to_id(one)) > written[one] for one in CONTROLS)
    assert tokens.covered.all()


def test_text_that_a_normalizer_makes_a_control_token_is_packed_as_text(
    text_tokenizer_dir: Path, tmp_path: Path
) -> None:
    from transformers import PreTrainedTokenizerFast

    backend, _ = normalizing("NFKC", True, True)
    wide = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    wide.chat_template = ChatEncoder.from_pretrained(text_tokenizer_dir).tokenizer.chat_template
    encoder = ChatEncoder(wide)
    talks = [asked("Is it?", f"No, {WIDE_END}."), asked("Is it?", f"No, {WIDE_END} \U000f0000."), asked("Is it?")]
    split, refused, plain = encoder.encode_many(talks)
    assert isinstance(split, EncodedSample)
    assert isinstance(plain, EncodedSample)
    end = wide.eos_token_id
    assert (split.input_ids == end).sum() == (plain.input_ids == end).sum()
    assert "No, </s>." in wide.decode(split.input_ids[split.labels != -100])
    assert "special tokens and private-use characters from U+F0000 on; remove one of the two" in str(refused)
    assert [one.length for one in encoder.measure(talks)] == [len(split), -1, len(plain)]
    data = tmp_path / "data.jsonl"
    texts = (f"an {WIDE_END} inside", f"an {WIDE_END} and \U000f0000")
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    options = PackOptions(inputs=(str(data),), output_dir=tmp_path / "out", seq_len=64, encoder=encoder, workers=1)
    result = pack(replace(options, max_reject_rate=1))
    assert (result.manifest.packed, result.manifest.rejects) == (1, {"unsupported_field": 1})


def asked(question: str, answer: str = "A token.") -> Any:
    return normalize({"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]})


def ids_of(encoder: ChatEncoder, question: str, answer: str = "A token.") -> list[int]:
    return encoder.encode(asked(question, answer)).input_ids.tolist()


@pytest.mark.parametrize("engine", ["tokenizers", "fastokens"])
def test_a_conversation_cannot_write_control_tokens(tokenizer_dir: Path, engine: Any) -> None:
    encoder = ChatEncoder.from_pretrained(tokenizer_dir, tokenizer_engine=engine)
    control = {token.content for token in encoder.tokenizer.added_tokens_decoder.values() if token.special}
    numbers = set(encoder.tokenizer.convert_tokens_to_ids(sorted(control)))
    plain = [one for one in ids_of(encoder, "Is it?") if one in numbers]
    talks = [asked(f"Is {token} it?", f"No, {token}{token}.") for token in sorted(control)] + [asked("Is it?")]
    for talk, measured in zip(talks, encoder.measure(talks), strict=True):
        sample = encoder.encode(talk)
        assert [one for one in sample.input_ids.tolist() if one in numbers] == plain
        text = encoder.tokenizer.decode(sample.input_ids)
        assert all(message.content in text for message in talk.messages)
        targets = encoder.tokenizer.decode(sample.input_ids[sample.labels != -100])
        assert targets == talk.messages[1].content + "<|im_end|>"
        assert (measured.length, measured.supervised) == (len(sample), int((sample.labels != -100).sum()))
    mixed = encoder.encode_many(talks)  # held and ordinary texts in one batch
    assert [one.input_ids.tolist() for one in mixed] == [encoder.encode(one).input_ids.tolist() for one in talks]


def test_ordinary_texts_keep_the_ids_of_the_tokenizer(encoder: ChatEncoder) -> None:
    for text in ("Is it?", "<b>1 < 2</b> <image_url> <|im", "\n\n<think>\n", "|im_end|> <|im_end"):
        rendered = encoder.renderer.render(asked(text, text))
        assert type(rendered.text) is str
        assert ids_of(encoder, text, text) == encoder.tokenizer(rendered.text, add_special_tokens=False).input_ids


def test_allowed_special_tokens_are_control_tokens(tokenizer_dir: Path) -> None:
    encoder = ChatEncoder.from_pretrained(tokenizer_dir, allow_special_in_text=True)
    text = encoder.renderer.render(asked(f"Is {WRITTEN} it?")).text
    assert ids_of(encoder, f"Is {WRITTEN} it?") == encoder.tokenizer(text, add_special_tokens=False).input_ids
    other = ChatEncoder.from_pretrained(tokenizer_dir)
    assert not other.has_fingerprint(encoder.fingerprint())
    assert not encoder.has_fingerprint(other.fingerprint())
    with pytest.raises(RecordError, match="image_count_mismatch"):
        encoder.encode(asked("What is <|image_pad|>?"))


def test_tools_calls_and_documents_cannot_either(encoder: ChatEncoder) -> None:
    end, fim = encoder.tokenizer.convert_tokens_to_ids([WRITTEN, "<|vision_start|>"])
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": f"a{WRITTEN}b"}}}
    messages = [{"role": "user", "content": "Go"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    found = encoder.encode(normalize({"messages": messages})).input_ids
    assert (found == end).sum() == 2
    assert f"a{WRITTEN}b" in encoder.tokenizer.decode(found)
    for written in ("a<|vision_start|>b", f"a<|vision_start|>b{WRITTEN}"):  # an end that is there is not doubled
        document = encoder.encode(normalize({"text": written})).input_ids
        assert (document == end).sum() == 1
        assert document[-1] == end
        assert fim not in document
        assert encoder.tokenizer.decode(document) == f"a<|vision_start|>b{WRITTEN}"


def test_markup_that_a_template_reads_is_left_to_it() -> None:
    template = "{% for m in messages %}{{ m.content.split('</cot>')[-1] if '</cot>' in m.content else m.content }}"
    assert searched_literals(template + "{% endfor %}{% generation %}x{% endgeneration %}") == ["</cot>"]
    special = SpecialText(["<|end|>", "</cot>", "<think>", "<image>"], template + "{% endfor %}")
    held = special.escape(asked("</cot><think><|end|>", "<think>a</cot>b<|end|>"))
    number = special.tokens.index("<|end|>")
    assert held.messages[1].content == f"<think>a</cot>b{chr(ESCAPE_BASE + number)}"
    assert not any(token in held.messages[0].content for token in special.tokens)
    assert special.escaped_tokens(asked("</cot>?", "<think>a</cot>b")) == ["</cot>"]
    with pytest.raises(RecordError, match=r"special tokens and private-use characters from U\+F0000 on"):
        special.escape(asked("<|end|> \U000f0001"))
    plain = asked("<|en|> <", "<think>a</cot>b \U000f0001")
    assert special.escape(plain) is plain


def test_supervised_turns_are_found_around_them(encoder: ChatEncoder) -> None:
    turns = [(f"Is {WRITTEN}", "user"), (f"{WRITTEN} yes", "assistant"), ("And?", "user"), ("No.", "assistant")]
    talk = normalize({"messages": [{"role": role, "content": text} for text, role in turns]})
    assert supervised_turns(encoder, talk) == [False, True, False, True]
    context = normalize({"messages": [{"role": r, "content": t, "weight": int(t == "No.")} for t, r in turns]})
    assert supervised_turns(encoder, context) == [False, False, False, True]


def test_a_run_counts_them_and_image_counts_hold(demo: DemoDataset, tokenizer_dir: Path, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in demo.jsonl.open() if line.startswith("{") and line.endswith("}\n")]
    image = next(
        one for one in lines if "images" in one and "captions" in one and one.get("id", "").startswith("demo")
    )
    image["captions"] = [f"<|image_pad|> {one}" for one in image["captions"]]
    records = [image, {"id": "t", "messages": [{"role": "user", "content": f"{WRITTEN}<|image_pad|>"},
                                               {"role": "assistant", "content": WRITTEN}]}]  # fmt: skip
    data = demo.jsonl.parent / "special-text.jsonl"
    data.write_text("".join(json.dumps(one) + "\n" for one in records))
    result = pack(
        PackOptions(inputs=(str(data),), output_dir=tmp_path, seq_len=4096, tokenizer=tokenizer_dir, workers=1)
    )
    data.unlink()
    assert (result.manifest.records, result.manifest.packed) == (2, 2)
    assert result.manifest.notes == {
        "special token <|im_end|> in a text: kept as text": 1,
        "special token <|image_pad|> in a text: kept as text": 2,
    }


def test_a_special_token_that_merges_produce_stays_text_in_a_run(text_tokenizer_dir: Path, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    merged = PreTrainedTokenizerFast(tokenizer_object=KINDS["merged"], eos_token="</s>")
    merged.chat_template = ChatEncoder.from_pretrained(text_tokenizer_dir).tokenizer.chat_template
    encoder = ChatEncoder(merged)
    plain, written = ids_of(encoder, "Is it?"), ids_of(encoder, "Is </s> it?", "No, <|im_end|>bc.")
    assert "Is </s> it?<|im_end|>" in merged.decode(written)
    for token in SPECIAL:
        assert written.count(KINDS["merged"].token_to_id(token)) == plain.count(KINDS["merged"].token_to_id(token))
    data = tmp_path / "data.jsonl"
    data.write_text('{"text": "an </s> inside"}\n')
    result = pack(
        PackOptions(inputs=(str(data),), output_dir=tmp_path / "out", seq_len=64, encoder=encoder, workers=1)
    )
    assert (result.manifest.packed, result.manifest.rejects) == (1, {})
    assert result.manifest.notes == {"special token </s> in a text: kept as text": 1}


def test_a_special_token_that_is_the_only_token_of_its_character_is_refused() -> None:
    """Its text would have no token: a byte-level model has no unknown token."""
    single = Tokenizer.from_str(KINDS["bytes"].to_str())
    single.add_special_tokens(["|"])
    message = r"special tokens in record text as text: \| would be removed; set `allow_special_in_text=True`"
    with pytest.raises(ConfigError, match=message):
        EscapedTokenizer(single.to_str(), control_tokens([*SPECIAL, "|"]))


def test_a_tokenizer_without_pad_and_end_packs_and_says_so(
    text_tokenizer_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import PreTrainedTokenizerFast

    bare = PreTrainedTokenizerFast(tokenizer_file=str(text_tokenizer_dir / "tokenizer.json"))
    bare.chat_template = ChatEncoder.from_pretrained(text_tokenizer_dir).tokenizer.chat_template
    assert (bare.pad_token, bare.eos_token) == (None, None)
    encoder = ChatEncoder(bare)
    document = encoder.encode(normalize({"text": "No end"}))
    assert document.input_ids.tolist() == bare("No end").input_ids
    assert encoder.tokenizer.decode(encoder.encode(asked("Is it?")).input_ids).endswith("<|im_end|>\n")
    data = tmp_path / "data.jsonl"
    data.write_text('{"text": "No end"}\n')
    result = pack(
        PackOptions(inputs=(str(data),), output_dir=tmp_path / "out", seq_len=64, encoder=encoder, workers=1)
    )
    assert result.manifest.notes == {"document without an end: the tokenizer has no end-of-text token": 1}


def test_the_tokenizer_is_copied_with_its_state(encoder: ChatEncoder) -> None:
    import pickle

    again: TextTokenizer = pickle.loads(pickle.dumps(encoder.text_tokenizer))
    text = encoder.renderer.render(asked(WRITTEN)).text
    assert np.array_equal(
        again.encode([text], [None]).input_ids, encoder.text_tokenizer.encode([text], [None]).input_ids
    )
