"""Audio by any Transformers processor: tokens and tensors equal those of the processor.

The types differ in kind. `tools/family_table.py` compares all types, and their models.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_families import model_inputs, write_folder
from transformers import AutoProcessor, AutoTokenizer

from energon_packed import BatchError, ChatEncoder, ConfigError, Conversation, PaddingFreeCollator, normalize
from tests.audio import signal, write
from tests.internals import AUDIO_RULES, AudioFamily, ModelNeeds, VisionInputs, trials, write_tokenizer

RATE, LIMIT = 16_000, 480_000
# musicflamingo: begin and end tokens, windows of 30 s, one clip per text. moss: numbers among the audio tokens, and no
# formula. gemma3n: plain text around the tokens, all clips have as many tokens, 30 s at most, and images.
TYPES = ("musicflamingo", "moss_transcribe_diarize", "gemma3n")
SAMPLES = {
    "musicflamingo": (640, 16_000, 24_321, LIMIT, LIMIT + 1, LIMIT + 700),
    "moss_transcribe_diarize": (1281, 16_000, 31_999, 32_000, 67_123, LIMIT + 1),
    "gemma3n": (1281, 16_000, 24_321, LIMIT),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("audio-families")
    text = write_tokenizer(path / "text", ["What is said? It is a drawing."], vision=False)
    return lambda model_type: write_folder(path / model_type, model_type, text)


def record(path: Path, *samples: int, text: str = "What?") -> tuple[Conversation, list[Any]]:
    clips = [np.round(signal(count, RATE, count) * 32_768) / 32_768 for count in samples]
    clips = [clip.astype(np.float32) for clip in clips]
    files = [write(path / str(at), "wav16", clip, RATE) for at, clip in enumerate(clips)]
    question = "<audio> a\n" * len(clips) + text
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": "It is."}]
    return normalize({"messages": messages, "audios": [str(file) for file in files]}), clips


@pytest.mark.parametrize("model_type", TYPES)
def test_tokens_and_tensors_are_as_the_processor_makes_them(model_type: str, folder: Any, tmp_path: Path) -> None:
    path = folder(model_type)
    encoder, processor = ChatEncoder.from_pretrained(path), AutoProcessor.from_pretrained(path)
    assert encoder.audio is not None
    cases = [(samples,) for samples in SAMPLES[model_type]]
    if not encoder.audio.name.startswith("MusicFlamingo"):
        cases += [(), (16_000, 8000), (8000, 16_000, 12_345)]
    for samples in cases:
        conversation, clips = record(tmp_path, *samples)
        question = conversation.messages[0].content.replace("<audio>", encoder.audio.placeholder)
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": "It is."}]
        text = encoder.renderer.template.render(turns)
        expected = processor(
            text=[text], audio=clips or None, return_tensors="pt", text_kwargs={"add_special_tokens": False}
        )
        sample = encoder.encode(conversation)
        assert sample.input_ids.tolist() == expected["input_ids"][0].tolist(), samples
        assert encoder.length(conversation) == len(sample), samples
        assert sample.num_audios == len(clips)
        audio = sample.input_ids == encoder.rules.audio_token_id
        assert (sample.labels[audio] == -100).all()
        values = {} if sample.audio_inputs is None else sample.audio_inputs.values
        assert clips == [] or {"input_features", "input_features_mask"} <= set(values)
        for name, value in values.items():
            assert torch.equal(value, expected[name]), (name, samples)
        if len(clips) == 1:  # the cost of the encoder: two frames a position, in windows of 30 s or of the clip
            windows, frames = values["input_features_mask"].shape
            found = encoder.audio.positions(samples[0])
            assert found == pytest.approx(windows * frames / 2, abs=2), (samples, windows, frames)
        if sample.token_type_ids is not None:
            assert sample.token_type_ids.tolist() == expected["token_type_ids"][0].tolist()
        if clips:  # the tokens of a sample that is stored tokenized are counted by its files
            stored = Conversation(
                input_ids=sample.input_ids, labels=sample.labels, audios=conversation.audios, images=[]
            )
            assert encoder.encode(stored).input_ids.tolist() == sample.input_ids.tolist()


def test_voxtral_is_as_its_chat_function(folder: Any, tmp_path: Path) -> None:
    """Its processor has no call for text with audio; `model_inputs` writes the tokens of mistral-common 1.13.1."""
    path = folder("voxtral")
    encoder, processor = ChatEncoder.from_pretrained(path), AutoProcessor.from_pretrained(path)
    assert encoder.audio is not None
    assert encoder.audio.warnings == ()
    for samples, tokens in (((1,), 375), ((LIMIT,), 375), ((LIMIT + 1,), 750), ((16_000, 800_000, 8000), 1500)):
        conversation, clips = record(tmp_path, *samples)
        question = conversation.messages[0].content.replace("<audio>", "[AUDIO]")
        theirs = model_inputs("voxtral", processor, f"<s>[INST]{question}[/INST]It is.</s>", [], clips=clips)
        sample = encoder.encode(conversation)
        assert sample.input_ids.tolist() == theirs["input_ids"][0].tolist()
        assert (sample.input_ids == 24).sum() == tokens
        assert (sample.input_ids == 25).sum() == len(clips)
        assert encoder.length(conversation) == len(sample)
        assert sample.audio_inputs is not None
        assert torch.equal(sample.audio_inputs.values["input_features"], theirs["input_features"])
        assert len(theirs["input_features"]) == tokens // 375
        assert encoder.audio.positions(samples[0]) == 1500 * -(-samples[0] // LIMIT)


def test_tokenizers_of_mistral_common_are_refused(folder: Any) -> None:
    processor = AutoProcessor.from_pretrained(folder("voxtral"))

    class MistralCommonBackend:
        is_fast = False

    processor.tokenizer = MistralCommonBackend()
    with pytest.raises(ConfigError, match="VoxtralProcessor .* its folder has no tokenizer.json"):
        AudioFamily(processor)
    with pytest.raises(ConfigError, match="MistralCommonBackend is a slow tokenizer.*convert_tekken_tokenizer"):
        ChatEncoder(processor.tokenizer)


def test_limits_and_the_shortest_clips_are_found(folder: Any, tmp_path: Path) -> None:
    encoder = ChatEncoder.from_pretrained(folder("gemma3n"))
    [measured] = encoder.measure([record(tmp_path, LIMIT + 1)[0]])
    assert measured.reject is not None
    assert "more than the 30 s that Gemma3nProcessor reads" in measured.reject.detail
    music = ChatEncoder.from_pretrained(folder("musicflamingo"))
    assert music.audio is not None
    assert music.audio.limit == 1200 * RATE
    for samples in (1, 160):
        [measured] = music.measure([record(tmp_path, samples)[0]])
        assert measured.reject is not None
        assert "have no token of MusicFlamingoProcessor" in measured.reject.detail


def test_models_that_mix_clips_have_no_dummy_audio_beside_the_dummy_image(folder: Any) -> None:
    path = folder("gemma3n")
    both = ChatEncoder.from_pretrained(path).dummy
    assert both is not None
    assert both.dummy is not None
    assert (both.num_images, both.num_audios, both.dummy.num_images, both.dummy.num_audios) == (1, 0, 0, 1)
    for problem, needs in (("logits differ", None), ("", ModelNeeds(one_audio=True))):
        encoder = ChatEncoder.from_pretrained(path)
        assert encoder.audio is not None
        encoder.audio.problem, encoder.audio.needs = problem, needs
        assert encoder.dummy is not None
        assert encoder.dummy.dummy is None


class Masking:
    """As Phi-4's processor, which needs torchvision: a mask for several clips only; a token for 10 samples."""

    audio_token = "<|audio|>"
    feature_extractor = SimpleNamespace(sampling_rate=1000)

    def __init__(self, tokenizer: Any) -> None:
        tokenizer.add_special_tokens({"extra_special_tokens": [self.audio_token]})
        self.tokenizer = tokenizer

    def __call__(self, text: list[str], audio: list[Any], **_: Any) -> dict[str, Any]:
        frames = [torch.from_numpy(clip[: len(clip) // 10 * 10]).reshape(-1, 10) for clip in audio]
        out: dict[str, Any] = {"features": torch.nn.utils.rnn.pad_sequence(frames, batch_first=True)}
        if len(audio) > 1:
            out["mask"] = torch.arange(out["features"].shape[1]) < torch.tensor([[len(f)] for f in frames])
        replaced = [[{"text": self.audio_token, "replacement": self.audio_token * len(f)}] for f in frames]
        return out | {"input_ids": torch.zeros((1, 1)), "text_replacement_offsets": replaced}


def test_a_mask_of_several_clips_is_made_for_each_clip(folder: Any, tmp_path: Path) -> None:
    family = AudioFamily(Masking(AutoTokenizer.from_pretrained(folder("moss_transcribe_diarize"))))
    parts = [family.preprocess([np.ones(count, dtype=np.float32)])[0] for count in (95, 40)]
    assert [part.values["mask"].tolist() for part in parts] == [[[True] * 9], [[True] * 4]]
    both, _ = family.preprocess([np.ones(count, dtype=np.float32) for count in (95, 40)])
    assert torch.equal(VisionInputs.joined(parts)[0]["mask"], both.values["mask"])
    assert [family.run(count).length for count in (19, 20, 30_001)] == [1, 2, 3000]
    assert "Masking is not among the processors whose models were tested packed" in family.warnings[0]


def test_rows_of_models_that_mix_clips_are_refused(folder: Any, tmp_path: Path) -> None:
    encoder = ChatEncoder.from_pretrained(folder("nemo_speechlm"))
    assert encoder.audio is not None
    assert "rows of several samples with audio are refused" in encoder.audio.warnings[0]
    samples = [encoder.encode(record(tmp_path, count)[0]) for count in (16_000, 8000)]
    with pytest.raises(BatchError, match=r"A row with audio must have 1 segment .* got 2"):
        PaddingFreeCollator().collate(samples).transformers_inputs()
    assert "input_features" in PaddingFreeCollator().collate(samples[:1]).transformers_inputs()


def test_clips_of_a_processor_of_one_clip_are_processed_alone(folder: Any, tmp_path: Path) -> None:
    """In a call with several clips, Qwen3-ASR's processor pads the shorter clip, and counts more frames."""
    encoder = ChatEncoder.from_pretrained(folder("qwen3_asr"))
    (tmp_path / "one").mkdir()
    samples = (16_000, 14_481)
    both = encoder.encode(record(tmp_path, *samples)[0])
    alone = [encoder.encode(record(tmp_path / "one", count)[0]) for count in samples]
    token = encoder.rules.audio_token_id
    assert (both.input_ids == token).sum() == sum((sample.input_ids == token).sum() for sample in alone)
    joined, _ = VisionInputs.joined([sample.audio_inputs for sample in alone if sample.audio_inputs is not None])
    assert both.audio_inputs is not None
    for name, value in both.audio_inputs.values.items():
        assert torch.equal(value, joined[name]), name


def test_audio_of_models_that_failed_their_trial_or_have_axes_of_positions_is_refused(
    folder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [row] = [row for row in trials() if row["model_type"] == "qwen3_asr"]
    monkeypatch.setitem(row, "audio", "refused: logits differ")
    encoder = ChatEncoder.from_pretrained(folder("qwen3_asr"))
    assert encoder.audio is not None
    with pytest.raises(ConfigError, match="audio of Qwen3ASRProcessor is not supported: logits differ"):
        encoder.encode(record(tmp_path, 16_000)[0])
    encoder.audio.problem = ""
    vars(encoder)["position_axes"] = 3
    with pytest.raises(ConfigError, match="M-RoPE positions with audio"):
        encoder.encode(record(tmp_path, 16_000)[0])


def test_processors_that_are_refused_are_named(folder: Any, tmp_path: Path) -> None:
    encoder = ChatEncoder.from_pretrained(folder("vibevoice_asr"))
    with pytest.raises(ConfigError, match=r"VibeVoiceAsrProcessor .* it writes the seconds of each clip in place of"):
        encoder.encode(record(tmp_path, 16_000)[0])
    assert len(encoder.encode(record(tmp_path)[0]))
    assert "VibeVoiceAsrProcessor" not in AUDIO_RULES
