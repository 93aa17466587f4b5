"""Images through the processors of Transformers: the same tokens and tensors, and lengths without decoding."""

import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoProcessor
from transformers.utils import is_torchvision_available as has_torchvision

from energon_packed import ChatEncoder, ConfigError, Conversation, EncodedSample, MediaReference, Message, RecordError
from tests.internals import ProcessorVision

sys.path.append(str(Path(__file__).parents[2] / "tools"))
from tiny_vision import NEED_TORCHVISION, PROCESSORS, write_processor

TAKEN = [name for name in PROCESSORS if name != "paligemma" and (has_torchvision() or name not in NEED_TORCHVISION)]
_OF_TEXT = {"input_ids", "attention_mask", "token_type_ids"}
QUESTIONS = ("<image>\nWhat is this?", "Look: <image> What is it?", "<image><image>Which one?")


@pytest.fixture(scope="module", params=TAKEN)
def folder(request: Any, text_tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_processor(tmp_path_factory.mktemp(request.param), request.param, text_tokenizer_dir)


@pytest.fixture(scope="module")
def encoder(folder: Path) -> ChatEncoder:
    return ChatEncoder.from_pretrained(folder)


@pytest.fixture(scope="module")
def processor(folder: Path) -> Any:
    return AutoProcessor.from_pretrained(folder)


def vision_of(encoder: ChatEncoder) -> ProcessorVision:
    assert isinstance(encoder.vision, ProcessorVision)
    return encoder.vision


def pictures(seed: int, count: int) -> list[Image.Image]:
    rng = np.random.default_rng(seed)
    shapes = [[2, 700], [500, 31]] if seed == 0 else rng.integers(8, 600, (count, 2)).tolist()
    return [Image.fromarray(rng.integers(0, 256, (*shape, 3), dtype=np.uint8)) for shape in shapes[:count]]


def talk(question: str, images: list[Image.Image]) -> Conversation:
    return Conversation(
        id=question,
        messages=[Message("user", question), Message("assistant", "A drawing of a house.")],
        images=[MediaReference(data=png(image)) for image in images],
    )


def png(image: Image.Image) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()


def by_processor(processor: Any, encoder: ChatEncoder, question: str, images: list[Image.Image]) -> dict[str, Any]:
    """What its user gets: the chat template's text with the processor's own image token."""
    turns = [
        {"role": "user", "content": question.replace("<image>", processor.image_token)},
        {"role": "assistant", "content": "A drawing of a house."},
    ]
    text = encoder.renderer.template.render(turns)
    return dict(processor(text=[text], images=images, add_special_tokens=False, return_tensors="pt"))


@pytest.mark.parametrize("seed", range(12))
def test_tokens_tensors_and_lengths_equal_the_processor(encoder: ChatEncoder, processor: Any, seed: int) -> None:
    for question in QUESTIONS:
        images = pictures(seed, question.count("<image>"))
        record = talk(question, images)
        try:
            theirs = by_processor(processor, encoder, question, images)
        except ValueError:  # Pixtral's, of an image that shrinks to nothing
            for use in (encoder.encode, encoder.length):
                with pytest.raises(RecordError, match="corrupt_image: "):
                    use(record)
            continue
        sample = encoder.encode(record)
        assert sample.input_ids.tolist() == theirs["input_ids"][0].tolist()
        assert encoder.length(record) == len(sample)
        kept = encoder.measure([record], keep_tokens=True)[0].sample
        assert kept is not None
        assert kept.input_ids.tolist() == sample.input_ids.tolist()
        assert kept.labels.tolist() == sample.labels.tolist()
        assert sample.vision_inputs is not None
        assert sample.vision_inputs.values.keys() == theirs.keys() - _OF_TEXT
        for name, value in sample.vision_inputs.values.items():
            assert torch.equal(value, theirs[name]), name
        if "token_type_ids" in theirs:
            assert sample.token_type_ids is not None
            assert sample.token_type_ids.tolist() == theirs["token_type_ids"][0].tolist()
        supervised = sample.input_ids[sample.labels != -100]
        assert encoder.tokenizer.decode(supervised).startswith("A drawing of a house.")


def test_heights_that_transformers_takes_for_channels_are_rejected(encoder: ChatEncoder) -> None:
    for height in (1, 3):
        for use in (encoder.encode, encoder.length):
            with pytest.raises(RecordError, match=f"40x{height} pixels: Transformers reads a height of {height} for"):
                use(talk("<image>", [Image.new("RGB", (40, height))]))


def test_lengths_of_many_sizes(encoder: ChatEncoder) -> None:
    """The processor's formula, against the tokens that it writes for a picture of that size."""
    vision = vision_of(encoder)
    for height, width in np.random.default_rng(1).integers(4, 1200, (15, 2)).tolist():
        run = vision.image_token_run(height, width)
        assert run.make is not None
        assert run.length == len(run.make())


def test_stored_tokens_with_images_are_unchanged(encoder: ChatEncoder) -> None:
    images = pictures(3, 2)
    sample = encoder.encode(talk(QUESTIONS[2], images))
    references = [MediaReference(data=png(image)) for image in images]
    stored = Conversation(id="a", input_ids=sample.input_ids, labels=sample.labels, images=references)
    again = encoder.encode(stored)
    assert again.input_ids.tolist() == sample.input_ids.tolist()
    assert encoder.length(stored) == len(sample)


def test_an_encoder_is_the_same_in_another_process(encoder: ChatEncoder, folder: Path) -> None:
    assert ChatEncoder.from_pretrained(folder).fingerprint() == encoder.fingerprint()


def test_a_wrong_length_formula_raises(encoder: ChatEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    vision = vision_of(encoder)
    if vision._constant is None:
        return  # its formula is not used
    monkeypatch.setattr(vision, "_lengths", {})
    monkeypatch.setattr(vision, "_constant", vision._constant + 1)
    with pytest.raises(
        ConfigError, match=r"Processor needs a custom VisionFamily: it computes \d+ tokens for 40x30 pixels"
    ):
        encoder.encode(talk("<image>", [Image.new("RGB", (40, 30))]))


def test_another_tokenizer_is_refused(text_tokenizer_dir: Path, tmp_path: Path) -> None:
    llava = write_processor(tmp_path / "llava", "llava", text_tokenizer_dir)
    with pytest.raises(ConfigError, match="the tokenizer has no <image> token"):
        ChatEncoder.from_pretrained(text_tokenizer_dir, llava)
    with pytest.raises(ConfigError, match="ProcessorVision reads its image settings only from .*. Remove `factor`"):
        ChatEncoder.from_pretrained(llava, factor=28)


@pytest.mark.skipif(has_torchvision(), reason="torchvision is installed")
def test_a_package_that_is_missing_is_named(text_tokenizer_dir: Path, tmp_path: Path) -> None:
    folder = write_processor(tmp_path / "llava", "llava", text_tokenizer_dir)
    settings = json.loads((folder / "processor_config.json").read_text())
    (folder / "processor_config.json").write_text(json.dumps(settings | {"processor_class": "PixtralProcessor"}))
    message = (
        f"the processor of {folder} cannot be loaded here: PixtralProcessor requires the Torchvision library; install"
    )
    with pytest.raises(ConfigError, match=message):
        ChatEncoder.from_pretrained(folder)


def test_the_reason_why_a_processor_cannot_be_loaded_is_shown(text_tokenizer_dir: Path, tmp_path: Path) -> None:
    """Processors that need torchvision, where it is not installed; and image processors without a processor."""
    llava = write_processor(tmp_path / "llava", "llava", text_tokenizer_dir)
    settings = json.loads((llava / "processor_config.json").read_text())
    (llava / "processor_config.json").write_text(json.dumps(settings | {"processor_class": "NoSuchProcessor"}))
    with pytest.raises(ConfigError, match=r"unknown vision family 'NoSuchProcessor'.* register a VisionFamily"):
        ChatEncoder.from_pretrained(llava)


def test_a_processor_that_does_more_than_images_is_refused(text_tokenizer_dir: Path, tmp_path: Path) -> None:
    """PaliGemma's moves its images to the start and marks the whole text as a prefix."""
    folder = write_processor(tmp_path / "paligemma", "paligemma", text_tokenizer_dir)
    with pytest.raises(ConfigError, match="PaliGemmaProcessor needs a custom VisionFamily: .* register a V"):
        ChatEncoder.from_pretrained(folder)


def test_text_without_images_has_token_types(encoder: ChatEncoder) -> None:
    sample = encoder.encode(talk("What?", []))
    rows: list[EncodedSample] = encoder.encode_row(["a"], sample.input_ids, sample.labels, [0, len(sample)])
    for one in (sample, *rows):
        assert (one.token_type_ids is not None) == (vision_of(encoder).needs is not None)
        assert one.num_images == 0


def test_settings_of_images_and_boxes_are_rejected_by_name(encoder: ChatEncoder) -> None:
    image = MediaReference(data=png(pictures(1, 1)[0]), settings={"max_pixels": 9000})
    turns = [Message("user", "<image>Find it."), Message("assistant", "<bbox>")]
    limited = Conversation(messages=tuple(turns), images=(image,))
    boxed = replace(limited, images=(replace(image, settings=None),), objects={"bbox": [[1, 2]]})
    for conversation, message in (
        (limited, "ProcessorVision has no setting `max_pixels` for an image. Remove it"),
        (boxed, "ProcessorVision has no known text of the boxes of objects: write the boxes into the text"),
    ):
        for use in (encoder.length, encoder.encode):
            with pytest.raises(RecordError, match=f"^unsupported_field: {message}"):
                use(conversation)
