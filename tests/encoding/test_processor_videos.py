"""Videos through the processors of Transformers: the same frames, tokens and tensors, and lengths without decoding.

The processors are real: they write the text of a video, and join the tensors. Their video processors need
torchvision, so `Frames` reduces the frames in their place. The oracle is the processor with all frames of a file.
"""

import io
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tiny_families import build_processor
from transformers import Glm4vConfig, PreTrainedTokenizerFast
from transformers.video_utils import VideoMetadata, default_sample_indices_fn

from energon_packed import (
    ChatEncoder,
    ConfigError,
    Conversation,
    MediaReference,
    Message,
    PaddingFreeCollator,
    RecordError,
    VideoReference,
)
from tests.internals import ModelClass, ProcessorVision, processor_videos, trials, write_video

FAMILIES = ("internvl", "llava_onevision", "glm4v")
GLM = ("<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>")
QUESTIONS = ("<video>What is this?", "Look: <video> What is it?", "<video>\nWhich one? <video>", "a <image> <video>b")
CLIPS = ((30, 10, 64, 96), (24, 8, 96, 64), (25, 12, 120, 64))  # frames, frames per second, height, width
_OF_TEXT = {"input_ids", "attention_mask", "mm_token_type_ids", "video_metadata"}


class Frames:
    """Reduces the frames of a video, to (frames, 3, 56, 56) or to the patches of a grid."""

    merge_size = 2

    def __init__(self, *, is_grid: bool, num_frames: int | None = None, fps: float | None = None) -> None:
        self.is_grid, self.num_frames, self.fps = is_grid, num_frames, fps

    def sample_frames(self, metadata: Any, num_frames: int | None = None, fps: float | None = None) -> Any:
        if fps is None and num_frames is None and self.fps is None and self.num_frames is None:
            raise TypeError("unsupported operand type(s) for /: 'int' and 'NoneType'")  # as InternVL's
        fps, num_frames = (self.fps if fps is None else fps), (self.num_frames if num_frames is None else num_frames)
        return default_sample_indices_fn(metadata, num_frames=num_frames, fps=fps)

    def __call__(self, videos: Any, video_metadata: Any, do_sample_frames: bool, **_: Any) -> dict[str, Any]:
        values, grids = [], []
        for frames, metadata in zip(videos, video_metadata, strict=True):
            if do_sample_frames:
                metadata.frames_indices = self.sample_frames(metadata).tolist()
                frames = frames[metadata.frames_indices]
            pixels = torch.from_numpy(frames).permute(0, 3, 1, 2).float()
            if not self.is_grid:
                values.append(torch.nn.functional.adaptive_avg_pool2d(pixels, 56))
                continue
            steps, high, wide = -(-len(pixels) // 2), 2 + 2 * (frames.shape[1] > 80), 2 + 2 * (frames.shape[2] > 80)
            pooled = torch.nn.functional.adaptive_avg_pool2d(pixels, (high, wide))
            pooled = torch.cat([pooled, pooled[-1:]])[: 2 * steps].reshape(steps, 6, high, wide)
            values.append(pooled.permute(0, 2, 3, 1).reshape(-1, 6).repeat(1, 196))  # as wide as patches of images
            grids.append([steps, high, wide])
        if not self.is_grid:
            return {"pixel_values_videos": torch.stack(values)}
        patches = torch.cat(values)
        return {
            "pixel_values_videos": patches,
            "video_grid_thw": torch.tensor(grids),
            "video_metadata": video_metadata,
        }

    def to_json_string(self) -> str:
        return '{"size": 56}'


def processor_of(name: str, text_tokenizer: Path, **settings: Any) -> Any:
    frames = Frames(is_grid=name == "glm4v", **(settings or {"num_frames": 8}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.ProcessorMixin, "check_argument_for_proper_class", lambda *_: None)
        if name == "glm4v":
            tokenizer = PreTrainedTokenizerFast.from_pretrained(text_tokenizer, extra_special_tokens=list(GLM))
            images = transformers.Glm4vImageProcessorPil(size={"shortest_edge": 3136, "longest_edge": 65536})
            return transformers.Glm4vProcessor(images, tokenizer, frames)
        processor = build_processor(name, text_tokenizer)
        processor.video_processor = frames
        return processor


def encoder_of(processor: Any, folder: Path) -> ChatEncoder:
    model = None
    if "Glm4v" in type(processor).__name__:
        config = Glm4vConfig()
        ids = processor.tokenizer.convert_tokens_to_ids
        config.image_token_id, config.video_token_id = ids("<|image|>"), ids("<|video|>")
        config.save_pretrained(folder)
        model = ModelClass.of(folder)
    return ChatEncoder(processor.tokenizer, ProcessorVision(processor, model))


@pytest.fixture(scope="module", params=FAMILIES)
def processor(request: Any, text_tokenizer_dir: Path) -> Any:
    return processor_of(request.param, text_tokenizer_dir)


@pytest.fixture(scope="module")
def glm(text_tokenizer_dir: Path) -> Any:
    return processor_of("glm4v", text_tokenizer_dir)


@pytest.fixture(scope="module")
def encoder(processor: Any, tmp_path_factory: pytest.TempPathFactory) -> ChatEncoder:
    return encoder_of(processor, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def glm_encoder(glm: Any, tmp_path_factory: pytest.TempPathFactory) -> ChatEncoder:
    return encoder_of(glm, tmp_path_factory.mktemp("glm"))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder, rng = tmp_path_factory.mktemp("videos"), np.random.default_rng(0)
    return [
        write_video(folder / f"{frames}.mp4", rng.integers(0, 256, (frames, high, wide, 3), dtype=np.uint8), fps=fps)
        for frames, fps, high, wide in CLIPS
    ]


PICTURE = Image.fromarray(np.random.default_rng(1).integers(0, 256, (56, 56, 3), dtype=np.uint8))


def talk(question: str, files: list[Path], settings: dict[str, Any] | None = None) -> Conversation:
    stream = io.BytesIO()
    PICTURE.save(stream, "PNG")
    return Conversation(
        id=question,
        messages=[Message("user", question), Message("assistant", "A drawing of a house.")],
        images=[MediaReference(data=stream.getvalue())] * question.count("<image>"),
        videos=[
            VideoReference(file=MediaReference(data=path.read_bytes()), settings=settings or {})
            for path in files[: question.count("<video>")]
        ],
    )


def whole(path: Path) -> tuple[Any, VideoMetadata]:
    """All frames of a file, and its metadata."""
    with av.open(str(path)) as container:
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
        fps = float(container.streams.video[0].average_rate or Fraction(1))
    count, height, width, _ = frames.shape
    return frames, VideoMetadata(count, fps=fps, width=width, height=height, duration=count / fps)


def by_processor(encoder: ChatEncoder, question: str, files: list[Path]) -> dict[str, Any]:
    vision = vision_of(encoder)
    videos = [whole(path) for path in files[: question.count("<video>")]]
    content = question.replace("<image>", vision.template_token).replace("<video>", vision.video_placeholder)
    turns = [{"role": "user", "content": content}, {"role": "assistant", "content": "A drawing of a house."}]
    media: dict[str, Any] = {"images": [PICTURE]} if "<image>" in question else {}
    return dict(
        vision.processor(
            text=[encoder.renderer.template.render(turns)],
            videos=[frames for frames, _ in videos],
            video_metadata=[metadata for _, metadata in videos],
            do_sample_frames=True,
            add_special_tokens=False,
            return_tensors="pt",
            **media,
        )
    )


def vision_of(encoder: ChatEncoder) -> ProcessorVision:
    assert isinstance(encoder.vision, ProcessorVision)
    assert encoder.vision.video_problem == ""
    return encoder.vision


@pytest.mark.parametrize("question", QUESTIONS)
def test_frames_tokens_tensors_and_lengths_equal_the_processor(
    encoder: ChatEncoder, files: list[Path], question: str
) -> None:
    for first in range(len(files)):
        chosen = files[first:] + files[:first]
        record = talk(question, chosen)
        if "<image>" in question and "Glm4v" in type(vision_of(encoder).processor).__name__:
            for use in (encoder.encode, encoder.length):
                with pytest.raises(
                    RecordError, match="unsupported_media: images and videos in one record, which Glm4v"
                ):
                    use(record)
            continue
        theirs = by_processor(encoder, question, chosen)
        sample = encoder.encode(record)
        assert sample.input_ids.tolist() == theirs["input_ids"][0].tolist()
        assert encoder.length(record) == len(sample)
        kept = encoder.measure([record], keep_tokens=True)[0].sample
        assert kept is not None
        assert (kept.input_ids.tolist(), kept.labels.tolist()) == (sample.input_ids.tolist(), sample.labels.tolist())
        assert sample.vision_inputs is not None
        assert (sample.num_images, sample.num_videos) == (question.count("<image>"), question.count("<video>"))
        assert sample.vision_inputs.values.keys() == theirs.keys() - _OF_TEXT
        for name, value in sample.vision_inputs.values.items():
            assert torch.equal(value, torch.as_tensor(theirs[name])), name
        supervised = sample.input_ids[sample.labels != -100]
        assert encoder.tokenizer.decode(supervised).startswith("A drawing of a house.")
        stored = Conversation(
            id="a", input_ids=sample.input_ids, labels=sample.labels, images=record.images, videos=record.videos
        )
        if len(record.images) == 0:
            assert encoder.encode(stored).input_ids.tolist() == sample.input_ids.tolist()


def test_times_of_frames_are_text(glm_encoder: ChatEncoder, files: list[Path]) -> None:
    """Frames of 3 s; GLM-4.1V writes the second of every second frame."""
    text = glm_encoder.tokenizer.decode(glm_encoder.encode(talk("<video>What?", files)).input_ids)
    times = [part.split("<")[0] for part in text.split("<|end_of_image|>")[1:]]
    assert times == ["0", "0", "1", "2"]  # of frames 0, 7, 15, 22 at 10 frames per second


def test_positions_equal_the_model_with_the_types_of_the_processor(
    glm_encoder: ChatEncoder, files: list[Path], tmp_path: Path
) -> None:
    """The model reads the types that its processor returns; the same token has another type in a video."""
    question = "<video>What? <video>"
    theirs = by_processor(glm_encoder, question, files)
    vision = vision_of(glm_encoder)
    types = vision.processor.create_mm_token_type_ids(theirs["input_ids"].tolist())
    assert set(types[0]) == {0, 2}
    assert vision.model is not None
    expected, _ = vision.model._positions.get_rope_index(
        theirs["input_ids"],
        mm_token_type_ids=torch.tensor(types),
        video_grid_thw=theirs["video_grid_thw"],
        attention_mask=torch.ones_like(theirs["input_ids"]),
    )
    sample = glm_encoder.encode(talk(question, files))
    assert sample.position_ids is not None
    assert sample.position_ids.tolist() == expected[:, 0].tolist()


def test_a_template_with_parts_writes_its_own_tags(glm: Any, files: list[Path], tmp_path: Path) -> None:
    """As GLM-4.1V's, with a mark that a string does not have."""
    part = (
        "{% if part.type == 'video' %}{{ mark | default('V') }}<|begin_of_video|><|video|><|end_of_video|>"
        "{% else %}{{ part.text }}{% endif %}"
    )
    content = "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}" + part
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        + content
        + "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    )
    before = glm.tokenizer.chat_template
    glm.tokenizer.chat_template = template
    try:
        encoder = encoder_of(glm, tmp_path)
        record = talk("See <video>!", files)
        text = encoder.tokenizer.decode(encoder.encode(record).input_ids)
        own = encoder.encode(replace(record, chat_template_kwargs={"mark": "W"})).input_ids
    finally:
        glm.tokenizer.chat_template = before
    assert text.startswith("<|im_start|>user\nSee V<|begin_of_video|><|begin_of_image|>")
    assert encoder.tokenizer.decode(own) == text.replace("See V", "See W")
    assert text.count("<|begin_of_video|>") == text.count("<|end_of_video|>") == 1


def test_options_of_frames(text_tokenizer_dir: Path, tmp_path: Path, files: list[Path]) -> None:
    """`fps` and `num_frames` of an option or a record; an option without an effect is refused."""
    encoder = encoder_of(processor_of("internvl", text_tokenizer_dir, fps=None), tmp_path)
    vision = vision_of(encoder)
    record = talk("<video>What?", files)
    with pytest.raises(
        ConfigError, match="InternVLProcessor has no number or rate of frames. Set `video_fps` or `video_"
    ):
        encoder.length(record)
    vision.set_videos(None, {"fps": 2.0})
    [frames] = encoder.measure([record])[0].frames
    assert (frames.indices, frames.settings) == ((0, 5, 10, 15, 20, 25), {"fps": 2.0})
    [frames] = encoder.measure([talk("<video>What?", files, {"num_frames": 3})])[0].frames
    assert (frames.indices, frames.settings) == ((0, 10, 20), {"num_frames": 3})
    with pytest.raises(RecordError, match="unsupported_field: .* has no setting `max_frames`"):
        encoder.length(talk("<video>What?", files, {"max_frames": 3}))
    with pytest.raises(
        ConfigError, match="`video_max_frames` must not be set for InternVLProcessor, whose video proc"
    ):
        vision.set_videos(None, {"max_frames": 3})
    fixed = ProcessorVision(processor_of("internvl", text_tokenizer_dir, num_frames=4))
    with pytest.raises(ConfigError, match="`video_fps` must not be set for InternVLProcessor"):
        fixed.set_videos(None, {"fps": 2.0})
    assert fixed.video_config()["num_frames"] is None
    assert vision.video_config()["fps"] == 2.0


def test_videos_of_a_row_need_the_same_number_of_frames(
    text_tokenizer_dir: Path, tmp_path: Path, files: list[Path]
) -> None:
    """LLaVA-OneVision's tensor is (videos, frames, ...), which its processor does not pad."""
    encoder = encoder_of(processor_of("llava_onevision", text_tokenizer_dir, fps=2.0), tmp_path)
    with pytest.raises(ConfigError, match="with the same number of frames in a row. Set `video_num_frames`"):
        encoder.length(talk("<video>What?", files))
    fixed = encoder_of(processor_of("llava_onevision", text_tokenizer_dir, num_frames=28), tmp_path)
    assert fixed.length(talk("<video>What?", files)) > 28
    with pytest.raises(RecordError, match="unsupported_video: .*num_frames=28"):
        fixed.length(talk("<video>What?", files[1:]))


def test_a_row_of_images_and_videos_with_one_token(glm_encoder: ChatEncoder, files: list[Path]) -> None:
    """GLM-4.1V counts the same token for both: images are passed as videos, in the order of the samples."""
    questions = ("<image>a", "<video>b", "What?", "<image>c", "<video>d")
    samples = [glm_encoder.encode(talk(question, files[at % 2 :])) for at, question in enumerate(questions)]
    batch = PaddingFreeCollator(dummy_images="never").collate(samples)
    inputs = batch.transformers_inputs()
    grids = [
        values[name]
        for sample in samples
        if sample.vision_inputs is not None
        for values in [sample.vision_inputs.values]
        for name in ("image_grid_thw", "video_grid_thw")
        if name in values
    ]
    assert "pixel_values" not in inputs
    assert "image_grid_thw" not in inputs
    assert inputs["video_grid_thw"].tolist() == torch.cat(grids).tolist()
    assert [part.num_videos for part in batch.split()] == [0, 1, 0, 0, 1]
    for part, sample in zip(batch.split(), samples, strict=True):
        if sample.vision_inputs is None:
            continue
        assert part.vision_inputs is not None
        for name, value in sample.vision_inputs.values.items():
            assert torch.equal(part.vision_inputs.values[name], value)


class Content(Frames):
    """The number of frames depends on the pixels, as VideoLLaMA 3 drops tokens of equal frames."""

    def __call__(self, videos: Any, **settings: Any) -> dict[str, Any]:
        kept = [frames if frames.any() else frames[:1] for frames in videos]
        return super().__call__(kept, **settings)


def test_a_refused_family_has_images(text_tokenizer_dir: Path, tmp_path: Path, files: list[Path]) -> None:
    processor = processor_of("internvl", text_tokenizer_dir)
    processor.video_processor = Content(is_grid=False, num_frames=8)
    encoder = encoder_of(processor, tmp_path)
    assert encoder.length(talk("<image>What?", files)) > 0
    for use in (encoder.encode, encoder.length):
        with pytest.raises(
            ConfigError,
            match="InternVLProcessor: videos are not supported, the number of tokens of a video depends on its pix",
        ):
            use(talk("<video>What?", files))


def test_stored_frames_of_a_refused_family_are_refused(
    text_tokenizer_dir: Path, tmp_path: Path, files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial of a family with its tiny model is a reason, too."""
    processor = processor_of("internvl", text_tokenizer_dir)
    frames = encoder_of(processor, tmp_path).measure([talk("<video>What?", files)])[0].frames
    [row] = [row for row in trials() if row["processor"] == "InternVLProcessor"]
    monkeypatch.setitem(row, "video", "refused: logits differ by 1e+00")
    encoder = encoder_of(processor, tmp_path)
    file = MediaReference(data=files[0].read_bytes())
    record = Conversation(
        messages=talk("<video>What?", files).messages, videos=[VideoReference(file=file, frames=frames[0])]
    )
    with pytest.raises(ConfigError, match="videos are not supported, logits differ by 1e"):
        encoder.encode(record)


def test_a_video_with_too_many_pixels_is_rejected(
    text_tokenizer_dir: Path, tmp_path: Path, files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = encoder_of(processor_of("internvl", text_tokenizer_dir), tmp_path)
    monkeypatch.setattr(processor_videos, "_MAX_CLIP_PIXELS", 8 * 64 * 96 - 1)
    with pytest.raises(
        RecordError, match="unsupported_video: .*8 frames of 96x64 have more than 49,151 pixels. Set `vid"
    ):
        encoder.length(talk("<video>What?", files))
