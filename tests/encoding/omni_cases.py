"""Omni models with audio, images and videos: the cases of test_omni.py, which runs them with torchvision.

The oracles are the processor, called with the text and all media of a conversation, the model's `get_rope_index`, and
a tiny random thinker that is called with one conversation at a time.
"""

import torchvision_operators  # noqa: F401, I001  before Transformers

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family_table import _difference, _frames, _run
from PIL import Image
from tiny_families import _metadata, build_model, picture, write_folder

from energon_packed import AudioClip, ChatEncoder, Conversation, PaddingFreeCollator, normalize
from tests.audio import signal, write
from tests.internals import decode_audio, read_audio_info, write_video

TYPES = ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker")
RATE = 16_000
# Around a frame of 160 samples, and around the chunks of 100 frames of Qwen3-Omni's encoder.
SAMPLES = (480, 640, 641, 1599, 1600, 1601, 8000, 15_999, 16_000, 16_001, 20_000, 33_333)
QUESTIONS = (
    "<audio>What is a house?",
    "<audio><audio>hello",
    "a<audio> house <audio><image>is <audio>",
    "<image><audio>hello",
    "<image>What <image> is <audio>?",
    "<video><audio>hello",
    "It is <audio><video> a <image>",
    "<video> <audio> <video> world",
    "hello world",
    "<image>hello",
)


@dataclass
class Omni:
    """A model type: its folder, encoder, processor and tiny model."""

    model_type: str
    folder: Path

    def __post_init__(self) -> None:
        self.encoder = ChatEncoder.from_pretrained(self.folder)
        assert self.encoder.audio is not None
        self.processor = self.encoder.audio.processor
        self.model = build_model(self.model_type, self.processor)

    def expected(self, conversation: Conversation, **options: Any) -> dict[str, Any]:
        """The output of the processor for the media of a conversation."""
        vision = self.encoder.vision
        assert vision is not None
        # In the text of a family, the tags of an image are among its tokens.
        text = self.encoder.renderer.render(conversation).text.replace(vision.placeholder, vision.template_token)
        media: dict[str, Any] = {}
        if conversation.images:
            media["images"] = [Image.open(image.path) for image in conversation.images]
        if conversation.audios:
            media |= {"audio": [waveform(audio.file) for audio in conversation.audios], "sampling_rate": RATE}
        if conversation.videos:
            videos = [_frames(Path(video.file.path)) for video in conversation.videos]
            media |= {"videos": [frames for frames, _ in videos], "do_sample_frames": True}
            media["video_metadata"] = [_metadata(frames, fps) for frames, fps in videos]
        return dict(self.processor(text=[text], return_tensors="pt", **media, **options))

    def positions(self, inputs: dict[str, Any], **options: Any) -> Any:
        """`get_rope_index` of the model, (3, L), called with all that a forward pass of the model calls it with."""
        mask = inputs.get("feature_attention_mask")
        found, _ = self.model.model.get_rope_index(
            inputs["input_ids"],
            inputs.get("image_grid_thw"),
            inputs.get("video_grid_thw"),
            inputs["attention_mask"],
            audio_seqlens=None if mask is None else mask.sum(-1),
            second_per_grids=inputs.get("video_second_per_grid"),
            **options,
        )
        return found[:, 0]


@pytest.fixture(scope="module", params=TYPES)
def omni(request: pytest.FixtureRequest, text_tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Omni:
    folder = write_folder(tmp_path_factory.mktemp(request.param) / "model", request.param, text_tokenizer_dir)
    path = folder / "processor_config.json"
    config = json.loads(path.read_text())
    small = {"shortest_edge": 4 * 32 * 32, "longest_edge": 8 * 32 * 32}
    config["video_processor"] |= {"num_frames": None, "fps": 2.0, "size": small}
    config["image_processor"]["size"] = small
    path.write_text(json.dumps(config))
    return Omni(request.param, folder)


def waveform(file: Any) -> Any:
    info = read_audio_info(file)
    return decode_audio(file, AudioClip(rate=info.rate, start=0, samples=info.samples, total=info.samples), RATE)


def clip(folder: Path, frames: int, fps: int, height: int, width: int) -> Path:
    path = folder / f"{frames}-{fps}-{height}-{width}.mp4"
    if not path.exists():
        write_video(path, [np.array(picture(height, width, seed)) for seed in range(frames)], fps=fps)
    return path


def record(folder: Path, question: str, seed: int, least: int = 0) -> Conversation:
    """A conversation with random media; audio files have `least` samples or more."""
    rng = np.random.default_rng(seed)
    audios, images, videos = [], [], []
    for number in range(question.count("<audio>")):
        samples = max(least, int(rng.choice([*SAMPLES, rng.integers(700, 60_000)])))
        audios.append(write(folder / f"{seed}-{number}", "wav16", signal(samples, RATE, seed), RATE))
    for number in range(question.count("<image>")):
        images.append(folder / f"{seed}-{number}.png")
        picture(*rng.integers(30, 200, 2).tolist(), seed=seed).save(images[-1])
    for number in range(question.count("<video>")):
        videos.append(clip(folder, *[(24, 8, 112, 160), (30, 10, 90, 120)][(number + seed) % 2]))
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": "It is."}]
    named = {"audios": audios, "images": images, "videos": videos}
    media = {name: [str(path) for path in paths] for name, paths in named.items() if paths}
    return normalize({"messages": turns, **media})


def test_tokens_features_and_positions_are_as_of_the_processor_and_the_model(omni: Omni, tmp_path: Path) -> None:
    for seed, question in enumerate(QUESTIONS * 3):
        conversation = record(tmp_path, question, seed)
        theirs = omni.expected(conversation)
        [measured], [ours] = omni.encoder.measure([conversation]), omni.encoder.encode_many([conversation])
        place = (question, seed)
        assert ours.input_ids.tolist() == theirs["input_ids"][0].tolist(), place
        assert measured.length == len(ours), place
        expected = omni.positions(theirs)
        own = ours.position_ids if ours.position_ids is not None else np.tile(np.arange(len(ours)), (3, 1))
        assert own.tolist() == expected.tolist(), place
        inputs = PaddingFreeCollator(dummy_images="never").collate([ours]).transformers_inputs()
        names = theirs.keys() - {"input_ids", "attention_mask"}
        assert names <= inputs.keys(), place
        for name in names:
            assert torch.equal(inputs[name], theirs[name]), (name, place)


def test_a_row_is_as_its_samples_alone(omni: Omni, tmp_path: Path) -> None:
    """Clips of one row do not attend to each other: logits, loss and gradients are those of separate calls.

    Qwen3-Omni's encoder pads chunks to the longest chunk, of at most 100 frames: a clip of less than a second depends
    on the other clips of a batch.
    """
    questions = (
        "<audio>hello",
        "<image><audio>hello <audio>",
        "hello world",
        "<video><audio>hello",
        "<audio>a <image>",
    )
    records = [record(tmp_path, question, seed, least=RATE) for seed, question in enumerate(questions)]
    samples = [omni.encoder.encode(conversation) for conversation in records]
    alone = [omni.expected(conversation) for conversation in records]
    labels = [torch.from_numpy(sample.labels)[None] for sample in samples]
    separate = [_run(omni.model, inputs, of) for inputs, of in zip(alone, labels, strict=True)]
    row = PaddingFreeCollator(dummy_images="never").collate(samples)
    inputs = row.transformers_inputs()
    assert inputs["position_ids"].shape == (4, 1, row.input_ids.shape[1])
    assert _difference(_run(omni.model, inputs, row.labels), separate) is None
    with torch.no_grad():
        louder = omni.model(**inputs | {"input_features": inputs["input_features"] * 2}).logits[0]
    assert float((louder - torch.cat([logits for logits, _, _ in separate])).abs().max()) > 1e-2


def test_seconds_of_a_video_follow_its_rate(omni: Omni, tmp_path: Path) -> None:
    conversation = record(tmp_path, "a <video><audio>", 0)
    for fps in (1.0, 4.0):
        encoder = ChatEncoder.from_pretrained(omni.folder, fps=fps)
        [measured], [ours] = encoder.measure([conversation]), encoder.encode_many([conversation])
        if fps == 4 and "qwen3" in omni.model_type:  # 2 frames of 4 per second, 13 positions per second
            assert measured.reject == ours
            assert "positions in time are not whole numbers. Set another `fps`" in str(ours)
            continue
        theirs = omni.expected(conversation, fps=fps)
        assert ours.vision_inputs.values["video_second_per_grid"].tolist() == [2 / fps]
        assert ours.position_ids.tolist() == omni.positions(theirs).tolist()
        assert measured.length == len(ours) == theirs["input_ids"].shape[1]


def test_a_folder_of_the_whole_model_has_the_positions_of_its_thinker(omni: Omni, tmp_path: Path) -> None:
    conversation = record(tmp_path, "a <image><audio>", 0)
    folder = Path(shutil.copytree(omni.folder, tmp_path / "whole"))
    thinker = json.loads((folder / "config.json").read_text())
    whole = {"model_type": omni.model_type.removesuffix("_thinker"), "thinker_config": thinker}
    (folder / "config.json").write_text(json.dumps(whole))
    own, same = (encoder.encode(conversation) for encoder in (omni.encoder, ChatEncoder.from_pretrained(folder)))
    assert same.position_ids.shape == (3, len(same))
    assert (same.position_ids == own.position_ids).all()
    assert (same.position_ids != np.arange(len(same))).any()


def test_lengths_of_audio(omni: Omni, tmp_path: Path) -> None:
    """A clip that is too short has a clear reject; so has a clip that the processor would cut."""
    for samples, problem in ((200, "have no token of"), (31 * RATE, "31.00 s are more than the 30 s that")):
        file = write(tmp_path / "a", "wav16", signal(samples, RATE), RATE)
        conversation = normalize({"audio": str(file), "text": "hello"})
        [measured], [ours] = omni.encoder.measure([conversation]), omni.encoder.encode_many([conversation])
        if samples > 200 and "qwen3" in omni.model_type:
            assert measured.length == len(ours) == omni.expected(conversation)["input_ids"].shape[1]
        else:
            assert measured.reject == ours
            assert problem in str(ours)
