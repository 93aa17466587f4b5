"""Omni models with audio, images and videos: the cases of test_omni.py, which runs them with torchvision.

The oracles are the processor, called with the text and all media of a conversation, the model's `get_rope_index`, and
a tiny random thinker that is called with one conversation at a time.
"""

import torchvision_operators  # noqa: F401, I001  before Transformers

import copy
import json
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from family_table import _difference, _frames, _run
from PIL import Image
from tiny_families import _metadata, build_model, picture, write_folder

from energon_packed import (
    AudioClip,
    ChatEncoder,
    Conversation,
    MediaReference,
    PackedDataset,
    PackOptions,
    PaddingFreeCollator,
    Reject,
    normalize,
    pack,
)
from tests.audio import signal, write
from tests.internals import cli, decode_audio, read_audio_info, write_video

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
        if conversation.audios and "audio" not in options:
            media |= {"audio": [waveform(audio.file) for audio in conversation.audios]}
        if conversation.videos:
            videos = [_frames(Path(video.file.path)) for video in conversation.videos]
            media |= {"videos": [frames for frames, _ in videos], "do_sample_frames": True}
            media["video_metadata"] = [_metadata(frames, fps) for frames, fps in videos]
        return dict(self.processor(text=[text], return_tensors="pt", sampling_rate=RATE, **media, **options))

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
    config["feature_extractor"] |= {"chunk_length": 10, "n_samples": 10 * RATE, "nb_max_frames": 1000}
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
    for seed, question in enumerate(QUESTIONS * 2):
        conversation = record(tmp_path, question, seed)
        theirs = omni.expected(conversation)
        [measured], [ours] = omni.encoder.measure([conversation]), omni.encoder.encode_many([conversation])
        place = (question, seed)
        if isinstance(ours, Reject):  # of clips that Qwen3-Omni's encoder pads to other clips of a row
            assert measured.reject == ours
            assert "fewer than the 1 s that the longest clip of a sample must have" in str(ours), place
            assert "qwen3" in omni.model_type
            assert all(read_audio_info(audio.file).samples < RATE for audio in conversation.audios)
            continue
        assert ours.input_ids.tolist() == theirs["input_ids"][0].tolist(), place
        assert measured.length == len(ours), place
        expected = omni.positions(theirs)
        own = ours.position_ids if ours.position_ids is not None else np.tile(np.arange(len(ours)), (3, 1))
        assert own.tolist() == expected.tolist(), place
        inputs = PaddingFreeCollator(dummy_images="never").collate([ours]).transformers_inputs()
        names = theirs.keys() - {"input_ids", "attention_mask"}
        assert names <= inputs.keys(), place
        for name in names:
            assert torch.equal(inputs[name], as_cut(theirs, name)), (name, place)
        # The processor pads to the longest file that it reads, whose frames the model of Qwen2.5-Omni never gets.
        for features in (inputs["input_features"],) if conversation.audios else ():
            assert features.shape[-1] == max(inputs["feature_attention_mask"].sum(-1))
            assert features.untyped_storage().nbytes() == 4 * features.numel()


def as_cut(theirs: dict[str, Any], name: str) -> Any:
    """A tensor of the processor, without frames that are not in the mask of any file."""
    if name not in ("input_features", "feature_attention_mask"):
        return theirs[name]
    mask = theirs["feature_attention_mask"]
    return theirs[name][..., : int(mask.any(0).nonzero().max()) + 1]


def test_a_row_is_as_its_samples_alone(omni: Omni, tmp_path: Path) -> None:
    """Clips of one row do not attend to each other: logits, loss and gradients are those of separate calls.

    Qwen3-Omni's encoder pads chunks to the longest chunk, of at most 100 frames, which the longest clip has.
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


@pytest.mark.parametrize(
    ("questions", "images", "audios"),
    [
        (("<audio>hello", "hello <audio>"), 1, 2), (("<image>hello", "hello"), 1, 1), (("<video>hello",), 0, 1),
        (("hello",), 1, 1), (("<image>hello", "<audio>a"), 1, 1),
    ],
)  # fmt: skip
def test_every_row_calls_both_encoders(
    omni: Omni, tmp_path: Path, questions: tuple[str, ...], images: int, audios: int
) -> None:
    """As FSDP requires of all ranks; neither the loss nor a gradient changes."""
    samples = [omni.encoder.encode(record(tmp_path, text, seed, least=RATE)) for seed, text in enumerate(questions)]
    dummies = (omni.encoder.dummy, omni.encoder.dummy and omni.encoder.dummy.dummy)
    found = []
    for choice in ("never", "always"):
        row = PaddingFreeCollator(dummy_images=choice).collate(samples)  # type: ignore[arg-type]
        model = copy.deepcopy(omni.model).double()
        if "moe" in omni.model_type:
            model.set_experts_implementation("eager")  # others have no float64
        logits = model(**row.to("cpu", torch.float64).transformers_inputs()).logits
        row.loss(logits).backward()
        found.append((row, logits.detach(), {name: value.grad for name, value in model.named_parameters()}))
    (plain, expected, none), (row, logits, grads) = found
    real = plain.input_ids.shape[1]
    has = [any("<image>" in text or "<video>" in text for text in questions), any("<audio>" in q for q in questions)]
    needed = [dummy for dummy, is_there in zip(dummies, has, strict=True) if dummy is not None and not is_there]
    assert row.input_ids[0, real:].tolist() == [token for dummy in needed for token in dummy.input_ids.tolist()]
    inputs = row.transformers_inputs()
    assert len(inputs["image_grid_thw"] if images else ()) == images
    assert len(inputs["input_features"]) == audios
    assert float((logits[:, :real] - expected).abs().max()) < 1e-9
    for name, grad in grads.items():
        if none[name] is not None:
            assert float((grad - none[name]).abs().max()) < 1e-9, name
        elif grad is not None:
            assert not grad.any(), name
    for tower in ("visual", "audio_tower"):
        assert any(grad is not None for name, grad in grads.items() if f"{tower}." in name), tower
    for one, again in zip(samples, row.split(), strict=True):
        assert (again.input_ids.tolist(), again.num_audios) == (one.input_ids.tolist(), one.num_audios)
        assert again.num_images == one.num_images


def test_seconds_of_a_video_follow_its_rate(omni: Omni, tmp_path: Path) -> None:
    conversation = record(tmp_path, "a <video><audio>", 0, least=RATE)
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
    conversation = record(tmp_path, "a <image><audio>", 0, least=RATE)
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
    short = "0.01 s are fewer than the 1 s" if "qwen3" in omni.model_type else "have no token of"
    for samples, problem in ((200, short), (11 * RATE, "11.00 s are more than the 10 s that")):
        file = write(tmp_path / "a", "wav16", signal(samples, RATE), RATE)
        conversation = normalize({"audio": str(file), "text": "hello"})
        [measured], [ours] = omni.encoder.measure([conversation]), omni.encoder.encode_many([conversation])
        if samples > 200 and "qwen3" in omni.model_type:
            assert measured.length == len(ours) == omni.expected(conversation)["input_ids"].shape[1]
        else:
            assert measured.reject == ours
            assert problem in str(ours)


def heard(folder: Path, question: str, seed: int) -> Conversation:
    """`record`, whose videos have an audio track."""
    conversation = record(folder, question, seed, least=RATE)
    videos = []
    for number, video in enumerate(conversation.videos):
        path, seconds = Path(video.file.path), 1.1 + 1.7 * ((seed + number) % 3)
        with_track = path.with_name(f"heard-{seed}-{number}.mkv")
        add_track(path, with_track, signal(int(RATE * seconds) + seed, RATE, seed))
        videos.append(replace(video, file=MediaReference(path=str(with_track))))
    return replace(conversation, videos=tuple(videos))


def add_track(path: Path, target: Path, samples: Any, *, is_float: bool = False) -> None:
    """Copy the video track of a file, and add samples as a track of 16-bit PCM, or of float32."""
    with av.open(str(path)) as source, av.open(str(target), "w") as container:
        video = container.add_stream_from_template(source.streams.video[0])
        audio = container.add_stream("pcm_f32le" if is_float else "pcm_s16le", rate=RATE, layout="mono")
        for packet in list(source.demux(video=0)):
            if packet.dts is not None:
                packet.stream = video
                container.mux(packet)
        for start in range(0, len(samples), 1600):
            part = samples[start : start + 1600]
            part = part.astype(np.float32) if is_float else (part * 32767).astype(np.int16)
            frame = av.AudioFrame.from_ndarray(part[None], format="flt" if is_float else "s16", layout="mono")
            frame.sample_rate, frame.pts = RATE, start
            container.mux(audio.encode(frame))
        container.mux(audio.encode(None))


def test_audio_tracks_of_videos(omni: Omni, tmp_path: Path) -> None:
    """Tokens are interleaved as the processor writes them, which gets the tracks as the audio of the videos."""
    encoder = ChatEncoder.from_pretrained(omni.folder, load_audio_from_video=True)
    questions = ("<video>hello", "<audio>a<video>", "<video><image>b<audio>", "<video>a<audio>b<video>", "<audio>b")
    for seed, question in enumerate(questions):
        conversation = heard(tmp_path, question, seed)
        order = re.findall("<audio>|<video>", question)
        videos, audios = iter(range(len(conversation.videos))), iter(conversation.audios)
        slots = [next(videos) if name == "<video>" else None for name in order]
        files = [next(audios).file if at is None else conversation.videos[at].file for at in slots]
        tracks = {"load_audio_from_video": True, "audio_from_video_indices": slots} if conversation.videos else {}
        theirs = omni.expected(conversation, **tracks, audio=[waveform(file) for file in files])
        [measured], [ours] = encoder.measure([conversation]), encoder.encode_many([conversation])
        place = (question, seed)
        assert ours.input_ids.tolist() == theirs["input_ids"][0].tolist(), place
        assert measured.length == len(ours), place
        assert measured.notes == (), place
        assert len(measured.clips) == len(conversation.audios), place
        for name in ("input_features", "feature_attention_mask"):
            assert torch.equal(ours.audio_inputs.values[name], as_cut(theirs, name)), (name, place)
        expected = omni.positions(theirs, use_audio_in_video=bool(conversation.videos))
        own = ours.position_ids if ours.position_ids is not None else np.tile(np.arange(len(ours)), (3, 1))
        assert own.tolist() == expected.tolist(), place
        tokens = replace(conversation, messages=(), input_ids=ours.input_ids, labels=ours.labels)
        stored = encoder.encode(tokens)
        assert stored.input_ids.tolist() == ours.input_ids.tolist(), place
        assert torch.equal(stored.audio_inputs.values["input_features"], as_cut(theirs, "input_features")), place


def test_a_row_with_audio_tracks_is_as_its_samples_alone(omni: Omni, tmp_path: Path) -> None:
    encoder = ChatEncoder.from_pretrained(omni.folder, load_audio_from_video=True)
    records = [heard(tmp_path, "<video>hello", seed) for seed in range(2)]
    row = PaddingFreeCollator(dummy_images="never").collate([encoder.encode(talk) for talk in records])
    separate = []
    with torch.no_grad():
        for talk in records:
            tracks = {"load_audio_from_video": True, "audio_from_video_indices": [0]}
            inputs = omni.expected(talk, **tracks, audio=[waveform(talk.videos[0].file)])
            separate.append(omni.model(**inputs, use_audio_in_video=True, use_cache=False).logits[0])
        logits = omni.model(**row.transformers_inputs()).logits[0]
    expected = torch.cat(separate)
    assert float((logits - expected).abs().max()) <= 1e-5 * float(expected.abs().max())


def test_audio_tracks_of_a_pack_are_read_from_the_stored_videos(omni: Omni, tmp_path: Path) -> None:
    conversation = heard(tmp_path, "a <video> b", 1)
    record = {
        "messages": [{"role": message.role, "content": message.content} for message in conversation.messages],
        "videos": [conversation.videos[0].file.path],
    }
    (tmp_path / "data.jsonl").write_text(json.dumps(record))
    options = {"tokenizer": omni.folder, "load_audio_from_video": True}
    result = pack(PackOptions(inputs=[tmp_path / "data.jsonl"], output_dir=tmp_path / "out", seq_len=512, **options))
    encoder = ChatEncoder.from_pretrained(omni.folder, load_audio_from_video=True)
    expected = encoder.encode(conversation)
    row = PaddingFreeCollator(dummy_images="never").collate(PackedDataset(tmp_path / "out", encoder)[0])
    assert row.input_ids[0, : len(expected)].tolist() == expected.input_ids.tolist()
    assert torch.equal(row.input_features, expected.audio_inputs.values["input_features"])
    files = [path.stat().st_size for path in (tmp_path / "out").rglob("*.tar")]
    assert sum(files) < Path(record["videos"][0]).stat().st_size + 20_000  # no second copy of the track
    assert abs(result.manifest.audio_seconds - (2.8 + 1 / RATE)) < 1e-3
    arguments = ["lengths", str(tmp_path / "data.jsonl"), "--tokenizer", str(omni.folder), "--load-audio-from-video"]
    assert "0 audio files, 0.00 hours of audio" in CliRunner().invoke(cli, arguments).output


def test_full_checks_decode_the_tracks_that_are_used(omni: Omni, tmp_path: Path) -> None:
    samples = signal(2 * RATE, RATE, 1)
    samples[RATE] = np.nan  # found by decoding alone
    add_track(clip(tmp_path, 24, 8, 112, 160), tmp_path / "track.mov", samples, is_float=True)
    turns = [{"role": "user", "content": "<video>hello"}, {"role": "assistant", "content": "It is."}]
    records: list[Any] = [{"messages": turns, "videos": [str(tmp_path / "track.mov")]}, {"text": "hello world"}]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, records)))
    for number, (uses_tracks, check, rejects) in enumerate(
        ((True, "full", {"corrupt_audio": 1}), (True, "header", {}), (False, "full", {}))
    ):
        options: Any = {"tokenizer": omni.folder, "load_audio_from_video": uses_tracks, "check_media": check}
        paths: Any = {"inputs": [tmp_path / "data.jsonl"], "output_dir": tmp_path / f"out{number}"}
        result = pack(PackOptions(seq_len=512, max_reject_rate=1, **paths, **options))
        assert result.manifest.rejects == rejects
        assert (result.manifest.audio_seconds == 2) == (uses_tracks and not rejects)


def test_inspect_counts_the_tokens_of_a_short_clip_beside_a_longer_clip(omni: Omni, tmp_path: Path) -> None:
    clips = [str(write(tmp_path / str(size), "wav16", signal(size, RATE), RATE)) for size in (8001, 33_333)]
    turns = [{"role": "user", "content": "<audio><audio>hello"}, {"role": "assistant", "content": "It is."}]
    (tmp_path / "data.jsonl").write_text(json.dumps({"messages": turns, "audios": clips}))
    pack(
        PackOptions(inputs=[tmp_path / "data.jsonl"], output_dir=tmp_path / "out", seq_len=512, tokenizer=omni.folder)
    )
    arguments = ["inspect", str(tmp_path / "out"), "--pack", "out_00000000", "--json", "--tokenizer", str(omni.folder)]
    shown = json.loads(CliRunner().invoke(cli, arguments).output)
    [sample] = shown["samples"]
    theirs = omni.expected(normalize(json.loads((tmp_path / "data.jsonl").read_text())))
    count = int((theirs["input_ids"] == omni.encoder.rules.audio_token_id).sum())
    assert sum(audio["tokens"] for audio in sample["audios"]) == count


def test_videos_without_a_track(omni: Omni, tmp_path: Path) -> None:
    """Silent videos have the tokens of the processor; the model has no positions for both kinds in a sample."""
    encoder = ChatEncoder.from_pretrained(omni.folder, load_audio_from_video=True)
    silent = record(tmp_path, "<video> <audio>", 0)
    assert encoder.encode(silent).input_ids.tolist() == omni.encoder.encode(silent).input_ids.tolist()
    both, mute = heard(tmp_path, "<video> <video>", 0), record(tmp_path, "<video> <video>", 0)
    both = replace(both, videos=(both.videos[0], mute.videos[1]))
    [measured], [ours] = encoder.measure([both]), encoder.encode_many([both])
    assert measured.reject == ours
    assert "unsupported_media: a video with an audio track and a video without" in str(ours)
    [unused] = omni.encoder.measure([heard(tmp_path, "<video>", 0)])
    assert unused.notes == ("audio track of a video: not used",)
