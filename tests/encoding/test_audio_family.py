"""Tokens, masks and features of audio equal those of the Transformers processor."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoProcessor

from energon_packed import AudioClip, ChatEncoder, ConfigError, Conversation, PackOptions, RecordError, normalize
from tests.audio import KINDS, qwen2_audio, signal, write
from tests.internals import AUDIO_RULES, AudioFamily, decode_audio, read_audio_info

HOP, LIMIT, RATE = 160, 480_000, 16_000
# Around each token (4 frames of 160 samples), the first token, and the longest clip.
BOUNDARIES = [2 * HOP + 1, 3 * HOP, 3 * HOP + 1, 6 * HOP, 6 * HOP + 1, 7 * HOP - 1, 7 * HOP, 7 * HOP + 1, 8 * HOP]
LONG = [LIMIT - HOP, LIMIT - 1, LIMIT, LIMIT + 1, LIMIT + HOP, LIMIT + 5 * RATE]
TOO_SHORT = [1, HOP, 2 * HOP]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen2_audio(tmp_path_factory.mktemp("qwen2-audio"))


@pytest.fixture(scope="module")
def encoder(folder: Path) -> ChatEncoder:
    return ChatEncoder.from_pretrained(folder, long_audio="truncate")


@pytest.fixture(scope="module")
def processor(folder: Path) -> Any:
    return AutoProcessor.from_pretrained(folder)


def record(*files: Path, question: str = "What is said?") -> Conversation:
    marks = "<audio>" * len(files)
    return normalize(
        {
            "messages": [
                {"role": "user", "content": f"{marks}{question}"},
                {"role": "assistant", "content": "hello world"},
            ],
            "audios": [str(file) for file in files],
        }
    )


def waveform(conversation: Conversation, rate: int = RATE) -> list[Any]:
    """Samples of each file, at the rate of the processor."""
    found = []
    for audio in conversation.audios:
        info = read_audio_info(audio.file)
        clip = AudioClip(rate=info.rate, start=0, samples=info.samples, total=info.samples)
        found.append(decode_audio(audio.file, clip, rate))
    return found


def clips() -> list[tuple[str, int, int, int]]:
    """(kind, samples, rate, channels) of clips of all kinds with all rates, and around the edges."""
    rng = np.random.default_rng(0)
    found = [("float", samples, RATE, 1) for samples in (*BOUNDARIES, *LONG)]
    rates = (8000, 11_025, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000)
    kinds = ("wav16", "wav8", "wav24", "wav32", "float", "flac", "mp3", "m4a")
    for kind, rate in product(kinds, rates):
        if kind in ("mp3", "m4a") and rate < 16_000:
            continue
        seconds = float(rng.choice([rng.uniform(0.05, 1), rng.uniform(1, 6), rng.uniform(6, 12)]))
        found.append((kind, int(rate * seconds), rate, int(rng.integers(1, 3))))
    return found


def test_clips_are_as_the_processor_makes_them(encoder: ChatEncoder, processor: Any, tmp_path: Path) -> None:
    for number, (kind, samples, rate, channels) in enumerate(clips()):
        file = write(tmp_path / str(number), kind, signal(samples, rate, number), rate, channels)
        conversation = record(file)
        sample = encoder.encode(conversation)
        text = encoder.renderer.render(conversation).text
        expected = processor(text=text, audio=waveform(conversation), sampling_rate=RATE, return_tensors="pt")
        place = (kind, samples, rate, channels)
        assert sample.input_ids.tolist() == expected["input_ids"][0].tolist(), place
        assert sample.audio_inputs is not None
        for name in ("input_features", "feature_attention_mask"):
            assert torch.equal(sample.audio_inputs.values[name], expected[name]), (name, place)
        assert encoder.length(conversation) == len(sample), place
        file.unlink()


@pytest.mark.parametrize("turns", [1, 3])
def test_the_text_is_that_of_the_chat_template(
    turns: int, encoder: ChatEncoder, processor: Any, tmp_path: Path
) -> None:
    """Content parts of the type `audio`, as the processor's `apply_chat_template` gets them."""
    files = [write(tmp_path / str(i), "flac", signal(9000 + i, RATE), RATE) for i in range(2 * turns)]
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Listen."}]
    for turn in range(turns):
        first, second = ({"type": "audio", "audio": str(file)} for file in files[2 * turn : 2 * turn + 2])
        text = {"type": "text", "text": "hello world?"}
        messages.append({"role": "user", "content": [first, text, second]})
        messages.append({"role": "assistant", "content": "hello"})
    conversation = normalize({"messages": messages})
    text = processor.apply_chat_template(messages)
    assert encoder.renderer.render(conversation).text == text
    expected = processor(text=text, audio=waveform(conversation), sampling_rate=RATE, return_tensors="pt")
    sample = encoder.encode(conversation)
    assert sample.input_ids.tolist() == expected["input_ids"][0].tolist()
    assert sample.num_audios == 2 * turns
    assert not np.isin(sample.labels, [encoder.rules.audio_token_id]).any()


def test_a_document_has_the_tokens_around_its_audio(encoder: ChatEncoder, processor: Any, tmp_path: Path) -> None:
    file = write(tmp_path / "a", "flac", signal(9000, RATE), RATE)
    conversation = normalize({"text": "hello <audio> world", "audios": [str(file)]})
    text = f"hello <|audio_bos|><|AUDIO|><|audio_eos|> world{encoder.parts.end_of_document}"
    expected = processor(text=text, audio=waveform(conversation), sampling_rate=RATE)
    sample = encoder.encode(conversation)
    assert sample.input_ids.tolist() == expected["input_ids"][0]
    audio = sample.input_ids == encoder.rules.audio_token_id
    assert (sample.labels[audio] == -100).all()
    assert (sample.labels[~audio][1:] == sample.input_ids[~audio][1:]).all()


def test_audio_and_its_weights_expand_together(encoder: ChatEncoder, tmp_path: Path) -> None:
    file = write(tmp_path / "a", "flac", signal(9000, RATE), RATE)
    conversation = record(file)
    weighted = replace(
        conversation, messages=(conversation.messages[0], conversation.messages[1]._replace(weight=0.5))
    )
    plain, sample = encoder.encode(conversation), encoder.encode(weighted)
    assert sample.loss_weights is not None
    assert sample.input_ids.tolist() == plain.input_ids.tolist()
    assert set(sample.loss_weights[sample.labels != -100].tolist()) == {0.5}


def test_a_text_that_names_the_audio_token_is_text(encoder: ChatEncoder, tmp_path: Path) -> None:
    file = write(tmp_path / "a", "flac", signal(9000, RATE), RATE)
    sample = encoder.encode(record(file, question="What is <|AUDIO|>?"))
    plain = encoder.encode(record(file, question="What is?"))
    token = encoder.rules.audio_token_id
    assert (sample.input_ids == token).sum() == (plain.input_ids == token).sum() > 0


def test_clips_that_the_processor_would_cut_are_rejected(folder: Path, tmp_path: Path) -> None:
    encoder = ChatEncoder.from_pretrained(folder)
    for samples in LONG:
        conversation = record(write(tmp_path / "a", "flac", signal(samples, RATE), RATE))
        [measured] = encoder.measure([conversation])
        if samples <= LIMIT:
            assert measured.length == len(encoder.encode(conversation))
            continue
        assert measured.reject is not None
        assert measured.reject.reason == "unsupported_audio"
        assert "more than the 30 s that Qwen2AudioProcessor reads; split it" in measured.reject.detail
        with pytest.raises(RecordError, match="unsupported_audio"):
            encoder.encode(conversation)


def test_clips_without_a_token_are_rejected(encoder: ChatEncoder, tmp_path: Path) -> None:
    for samples in TOO_SHORT:
        conversation = record(write(tmp_path / "a", "wav16", signal(samples, RATE), RATE))
        [measured] = encoder.measure([conversation])
        assert measured.reject is not None
        assert f"{samples} samples at 16,000 per second have no token" in measured.reject.detail


def test_tokens_of_another_audio_file_are_rejected(encoder: ChatEncoder, tmp_path: Path) -> None:
    short, long = (
        record(write(tmp_path / str(seconds), "wav16", signal(seconds * RATE, RATE), RATE)) for seconds in (1, 2)
    )
    sample = encoder.encode(short)
    tokens = Conversation(input_ids=sample.input_ids, labels=sample.labels, audios=short.audios)
    assert encoder.encode(tokens).input_ids.tolist() == sample.input_ids.tolist()
    for call in (encoder.encode, encoder.length):
        with pytest.raises(
            RecordError, match=r"audio_count_mismatch: 25 <\|AUDIO\|> tokens, but the audio files need 50"
        ):
            call(replace(tokens, audios=long.audios))


def test_truncation_is_counted(encoder: ChatEncoder, tmp_path: Path) -> None:
    for samples, notes in ((LIMIT, ()), (LIMIT + 1, ("audio longer than the model reads: the rest is not used",))):
        [measured] = encoder.measure([record(write(tmp_path / "a", "flac", signal(samples, RATE), RATE))])
        assert measured.notes == notes


def test_parts_of_files(encoder: ChatEncoder, tmp_path: Path) -> None:
    file = write(tmp_path / "a", "flac", signal(5 * RATE, RATE), RATE)
    whole = waveform(record(file))[0]

    def part(**values: float) -> Conversation:
        return normalize({"audio": {"path": str(file), **values}, "text": "hello"})

    for values, expected in (
        ({"offset": 1.5}, whole[24_000:]),
        ({"duration": 2}, whole[:32_000]),
        ({"offset": 0.1, "duration": 0.7}, whole[1600:12_800]),
        ({"offset": 0.10004, "duration": 0.7}, whole[1601:12_801]),
        ({"offset": 0.10003, "duration": 0.70002}, whole[1600:12_801]),
        ({"offset": 4.0, "duration": 1.5}, whole[64_000:]),
    ):
        sample = encoder.encode(part(**values))
        alone = encoder.audio.preprocess([expected])[0]
        assert sample.audio_inputs is not None
        assert torch.equal(sample.audio_inputs.values["input_features"], alone.values["input_features"]), values
    for values in ({"offset": 5.0}, {"offset": 4.0, "duration": 1.51}, {"offset": 9.0}):
        with pytest.raises(RecordError, match=r"unsupported_audio: .* has 5.000 s, so that the part from"):
            encoder.encode(part(**values))


def test_audio_needs_an_audio_model(folder: Path, tmp_path: Path) -> None:
    encoder = ChatEncoder.from_pretrained(folder)
    text_only = ChatEncoder(encoder.tokenizer)
    with pytest.raises(ConfigError, match="has audio, but .* has no audio processor that is supported"):
        text_only.encode(record(write(tmp_path / "a", "flac", signal(9000, RATE), RATE)))


def test_settings_of_audio_are_in_the_fingerprint(folder: Path, encoder: ChatEncoder) -> None:
    other = ChatEncoder.from_pretrained(folder)
    assert other.fingerprint() != encoder.fingerprint()
    assert ChatEncoder.from_pretrained(folder, long_audio="truncate").fingerprint() == encoder.fingerprint()


def test_rules_that_differ_from_the_processor_are_an_error(processor: Any) -> None:
    rules = AUDIO_RULES["Qwen2AudioProcessor"]
    assert rules.tokens is not None
    AudioFamily(processor, rules)

    def wrong(processor: Any, samples: int) -> int:
        assert rules.tokens is not None
        return rules.tokens(processor, samples) + (samples == LIMIT)

    with pytest.raises(ConfigError, match=r"Qwen2AudioProcessor .* writes 750 tokens for 480001 samples, not 751"):
        AudioFamily(processor, replace(rules, tokens=wrong))


def test_containers_of_the_same_samples_have_the_same_features(encoder: ChatEncoder, tmp_path: Path) -> None:
    samples = np.round(signal(20_000, RATE) * 32_768) / 32_768
    lossless = [kind for kind in ("wav16", "wav24", "wav32", "float", "flac", "aiff", "caf", "w64", "au", "alac")]
    assert set(lossless) <= set(KINDS)
    first = None
    for kind in lossless:
        inputs = encoder.encode(record(write(tmp_path / kind, kind, samples.astype(np.float32), RATE))).audio_inputs
        assert inputs is not None
        first = inputs.values["input_features"] if first is None else first
        assert torch.equal(inputs.values["input_features"], first), kind


def test_tracks_of_videos_need_an_omni_model(folder: Path, text_tokenizer_dir: Path) -> None:
    for source, name in ((folder, "Qwen2AudioProcessor"), (text_tokenizer_dir, str(text_tokenizer_dir))):
        with pytest.raises(
            ConfigError, match=f"`load_audio_from_video` must be False for {name}, which does not write"
        ):
            ChatEncoder.from_pretrained(source, load_audio_from_video=True)
    settings = {"tokenizer": folder, "load_audio_from_video": True, "extract_frames": True}
    with pytest.raises(ConfigError, match="`extract_frames` must be False with `load_audio_from_video`"):
        PackOptions(inputs=["a.jsonl"], output_dir="out", seq_len=64, **settings)
