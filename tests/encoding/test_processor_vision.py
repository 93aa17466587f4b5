"""Images through the processors of Transformers: the same tokens and tensors, and lengths without decoding."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_families
import torch
import transformers
from PIL import Image
from tiny_families import write_folder
from transformers import AutoProcessor, LlavaNextProcessor
from transformers.utils import is_torchvision_available as has_torchvision

from energon_packed import (
    BatchError,
    ChatEncoder,
    ConfigError,
    Conversation,
    EncodedSample,
    MediaReference,
    Message,
    PaddingFreeCollator,
    RecordError,
)
from tests import oldest
from tests.internals import ProcessorVision

NEED_TORCHVISION = ("internvl", "llava_onevision", *(("idefics3",) if oldest.TRANSFORMERS else ()))
TYPES = ("llava", "llava_next", "idefics3", "aya_vision", "lighton_ocr", "internvl", "llava_onevision", "gemma3")
TAKEN = [name for name in TYPES if has_torchvision() or name not in NEED_TORCHVISION]
_OF_TEXT = {"input_ids", "attention_mask", "token_type_ids"}
QUESTIONS = ("<image>\nWhat is this?", "Look: <image> What is it?", "<image><image>Which one?")


@pytest.fixture(scope="module", params=TAKEN)
def folder(request: Any, text_tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp(request.param), request.param, text_tokenizer_dir)


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


def has_tokens(processor: Any, encoder: ChatEncoder, image: Image.Image) -> bool:
    """False for an image that Pixtral's processor shrinks to less than a patch: it raises, or returns no token."""
    try:
        out = processor(text=[processor.image_token], images=[image], add_special_tokens=False)
    except ValueError:
        return False
    return encoder.image_token_id in out["input_ids"][0]


@pytest.mark.parametrize("seed", range(12))
def test_tokens_tensors_and_lengths_equal_the_processor(encoder: ChatEncoder, processor: Any, seed: int) -> None:
    for question in QUESTIONS:
        images = pictures(seed, question.count("<image>"))
        record = talk(question, images)
        if not all(has_tokens(processor, encoder, image) for image in images):
            for use in (encoder.encode, encoder.length):
                with pytest.raises(RecordError, match="corrupt_image: "):
                    use(record)
            continue
        theirs = by_processor(processor, encoder, question, images)
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
    monkeypatch.setattr(vision, "_sizes", {})
    monkeypatch.setattr(vision, "_constant", vision._constant + 1)
    with pytest.raises(
        ConfigError, match=r"Processor needs a custom VisionFamily: it computes \d+ tokens for 40x30 pixels"
    ):
        encoder.encode(talk("<image>", [Image.new("RGB", (40, 30))]))


def test_another_tokenizer_is_refused(text_tokenizer_dir: Path, tmp_path: Path) -> None:
    llava = write_folder(tmp_path / "llava", "llava", text_tokenizer_dir)
    with pytest.raises(ConfigError, match="the tokenizer has no <image> token"):
        ChatEncoder.from_pretrained(text_tokenizer_dir, llava)
    with pytest.raises(ConfigError, match="ProcessorVision reads its image settings only from .*. Remove `factor`"):
        ChatEncoder.from_pretrained(llava, factor=28)


@pytest.mark.skipif(has_torchvision(), reason="torchvision is installed")
def test_a_package_that_is_missing_is_named(text_tokenizer_dir: Path, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "llava", "llava", text_tokenizer_dir)
    settings = json.loads((folder / "processor_config.json").read_text())
    (folder / "processor_config.json").write_text(json.dumps(settings | {"processor_class": "PixtralProcessor"}))
    message = (
        f"the processor of {folder} cannot be loaded here: PixtralProcessor requires the Torchvision library; install"
    )
    with pytest.raises(ConfigError, match=message):
        ChatEncoder.from_pretrained(folder)


def test_a_torchvision_of_another_torch_is_one_line(
    tokenizer_dir: Path, text_tokenizer_dir: Path, tmp_path: Path
) -> None:
    llava = write_folder(tmp_path / "llava", "llava", text_tokenizer_dir)
    package, metadata = tmp_path / "site/torchvision/__init__.py", tmp_path / "site/torchvision-0.9.dist-info/METADATA"
    for file in (package, metadata):
        file.parent.mkdir(parents=True)
    package.write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    metadata.write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.9\n")
    (tmp_path / "data.jsonl").write_text("{}\n")
    release = f"Transformers {transformers.__version__}"
    for arguments, what in (
        ([llava], f"Transformers cannot load the tokenizer of {llava}"),
        ([tokenizer_dir, "--processor", llava], f"{release} cannot load the processor of {llava} here"),
        ([tokenizer_dir], f"{release} cannot load the image processor of {tokenizer_dir}"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "energon_packed", "lengths", tmp_path / "data.jsonl", "--tokenizer", *arguments],
            env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stderr.splitlines()[-1] == (
            f"error: {what}: operator torchvision::nms does not exist; install the torchvision release that belongs "
            "to the installed torch"
        )
        assert "Traceback" not in done.stderr


def test_the_reason_why_a_processor_cannot_be_loaded_is_shown(text_tokenizer_dir: Path, tmp_path: Path) -> None:
    """Processors that need torchvision, where it is not installed; and image processors without a processor."""
    llava = write_folder(tmp_path / "llava", "llava", text_tokenizer_dir)
    settings = json.loads((llava / "processor_config.json").read_text())
    (llava / "processor_config.json").write_text(json.dumps(settings | {"processor_class": "NoSuchProcessor"}))
    (llava / "config.json").unlink()  # names the family
    with pytest.raises(ConfigError, match=r"unknown vision family 'NoSuchProcessor'.* register a VisionFamily"):
        ChatEncoder.from_pretrained(llava)


def test_a_processor_that_does_more_than_images_is_refused(text_tokenizer_dir: Path, tmp_path: Path) -> None:
    """PaliGemma's moves its images to the start and marks the whole text as a prefix."""
    folder = write_folder(tmp_path / "paligemma", "paligemma", text_tokenizer_dir)
    with pytest.raises(ConfigError, match="PaliGemmaProcessor .* it returns labels: .* register a V"):
        ChatEncoder.from_pretrained(folder)


def test_text_without_images_has_token_types(encoder: ChatEncoder) -> None:
    sample = encoder.encode(talk("What?", []))
    rows: list[EncodedSample] = encoder.encode_row(["a"], sample.input_ids, sample.labels, [0, len(sample)])
    for one in (sample, *rows):
        assert (one.token_type_ids is not None) == (vision_of(encoder).needs is not None)
        assert one.num_images == 0


def tiny(path: Path, model_type: str, text: Path) -> ChatEncoder:
    """An encoder of a folder with the processor and the configuration of a tiny model."""
    return ChatEncoder.from_pretrained(tiny_families.write_folder(path / model_type, model_type, text))


def tokens_of(encoder: ChatEncoder, question: str, images: int) -> list[str]:
    """Tokens of the question, as encoded and as measured."""
    record = talk(question, pictures(1, images))
    sample = encoder.encode(record)
    assert encoder.length(record) == len(sample)
    found = [encoder.tokenizer.decode([token]) for token in sample.input_ids.tolist()]
    return found[found.index("<|im_start|>") + 1 : found.index("<|im_end|>")]


def test_a_processor_that_adds_tokens_to_every_text_is_warned_about(tmp_path: Path, text_tokenizer_dir: Path) -> None:
    encoder = tiny(tmp_path, "chameleon", text_tokenizer_dir)
    [warning] = [line for line in vision_of(encoder).warnings if "adds" in line]
    assert warning.startswith(
        "ChameleonProcessor adds <sep_token> at the end of every text, and `pack` does not: add it to"
    )
    assert "<sep_token>" not in tokens_of(encoder, "Look <image> here", 1)


def test_the_text_of_an_image_follows_from_ids_and_gets_a_space_after_it(
    tmp_path: Path, text_tokenizer_dir: Path
) -> None:
    """Idefics2 returns no text of images, puts a space after an image, and shares a tag of two images."""
    encoder = tiny(tmp_path, "idefics2", text_tokenizer_dir)
    processor = AutoProcessor.from_pretrained(tmp_path / "idefics2")
    for question in ("<image>What?", "<image> What?", "Look\n<image>\n<image>.", "<image><b>", "<image>"):
        images = pictures(2, question.count("<image>"))
        sample = encoder.encode(talk(question, images))
        assert sample.input_ids.tolist() == by_processor(processor, encoder, question, images)["input_ids"][0].tolist()
    for use in (encoder.encode, encoder.length):
        with pytest.raises(RecordError, match="unsupported_media: two images without a token between them"):
            use(talk("<image><image>", pictures(1, 2)))


def test_the_text_of_an_image_may_come_from_the_chat_template(tmp_path: Path, text_tokenizer_dir: Path) -> None:
    """Qianfan-OCR's placeholder is not its image token, and PP-Chart2Table has no image token."""
    encoder = tiny(tmp_path, "qianfan_ocr", text_tokenizer_dir)
    assert vision_of(encoder).template_token == "<image>"
    assert tokens_of(encoder, "<image>", 1)[2:5] == ["<img>", "<IMG_CONTEXT>", "<IMG_CONTEXT>"]
    encoder = tiny(tmp_path, "pp_chart2table", text_tokenizer_dir)
    assert vision_of(encoder).placeholder == "<imgpad>"
    assert tokens_of(encoder, "<image> and <image>", 2).count("<imgpad>") == 512
    template = tmp_path / "pp_chart2table" / "chat_template.jinja"
    template.write_text(template.read_text().replace("<imgpad>", ""))
    with pytest.raises(ConfigError, match="it has no image_token; add a chat template that writes images"):
        ChatEncoder.from_pretrained(tmp_path / "pp_chart2table")


def writing(
    monkeypatch: pytest.MonkeyPatch, text_of: Callable[[int, int], str], folder: Path, tokenizer: Path
) -> Path:
    """A processor without a formula that writes `text_of` the index and the height of an image."""

    def replace_image_token(self: Any, image_inputs: Any, image_idx: int, **_: Any) -> str:
        return text_of(image_idx, int(image_inputs["image_sizes"][image_idx][0]))

    monkeypatch.setattr(LlavaNextProcessor, "replace_image_token", replace_image_token)
    monkeypatch.delattr(LlavaNextProcessor, "_get_num_multimodal_tokens")
    return write_folder(folder / "llava_next", "llava_next", tokenizer)


def test_text_with_the_index_of_an_image(
    tmp_path: Path, text_tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = writing(
        monkeypatch,
        lambda index, _: f"<|vision_start|>{index}<|vision_end|><image><image>",
        tmp_path,
        text_tokenizer_dir,
    )
    encoder = ChatEncoder.from_pretrained(folder)
    record = talk("<image>" + " <image>" * 11, pictures(1, 12))
    sample = encoder.encode(record)
    text = encoder.tokenizer.decode(sample.input_ids.tolist())
    for index in range(12):
        assert f"<|vision_start|>{index}<|vision_end|><image><image>" in text
    assert encoder.length(record) == len(sample)
    kept = encoder.measure([record], keep_tokens=True)[0].sample
    assert kept is not None
    assert kept.input_ids.tolist() == sample.input_ids.tolist()


def test_text_that_depends_on_other_images_is_refused(
    tmp_path: Path, text_tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = writing(monkeypatch, lambda index, _: "<image>" * (index + 1), tmp_path, text_tokenizer_dir)
    with pytest.raises(ConfigError, match="the text of an image depends on the other images of the sample"):
        ChatEncoder.from_pretrained(folder)


def test_plain_text_around_an_image_may_depend_on_its_size(
    tmp_path: Path, text_tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is text of the conversation, so that a tokenizer can merge it with the text around."""
    folder = writing(
        monkeypatch, lambda _, height: "<image>" * 4 + " of" * (height > 100), tmp_path, text_tokenizer_dir
    )
    encoder = ChatEncoder.from_pretrained(folder)
    for question, heights in (("<image> What? <image>a", (300, 50)), ("<image>fer", (300,))):
        record = talk(question, [Image.new("RGB", (60, height)) for height in heights])
        sample = encoder.encode(record)
        assert encoder.length(record) == len(sample)
        text = encoder.tokenizer.decode(sample.input_ids.tolist())
        assert ("<image> of What? <image><image><image><image>a" in text) == (len(heights) == 2)
        assert sample.input_ids.tolist() == encoder.tokenizer.encode(text, add_special_tokens=False)


def returning(
    monkeypatch: pytest.MonkeyPatch, values_of: Callable[[list[Image.Image]], Any], folder: Path, tokenizer: Path
) -> ChatEncoder:
    """An encoder with a processor whose images have one tensor, `values_of` the images."""
    original = LlavaNextProcessor.__call__

    def call(self: Any, images: Any = None, return_tensors: str | None = None, **settings: Any) -> Any:
        out = original(self, images=images, return_tensors="pt", **settings)
        del out["image_sizes"], out["pixel_values"]
        out["pixel_values"] = values_of(images)
        are_equal = len({value.shape for value in out["pixel_values"]}) == 1
        assert return_tensors == "pt" or not are_equal, "some processors join tiles for tensors only"
        if return_tensors and not are_equal:
            raise ValueError("Unable to create tensor")
        return out

    monkeypatch.setattr(LlavaNextProcessor, "__call__", call)
    return ChatEncoder.from_pretrained(write_folder(folder / "llava_next", "llava_next", tokenizer))


def test_images_of_different_numbers_of_tiles_join_along_the_tiles(
    tmp_path: Path, text_tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tiles(images: list[Image.Image]) -> list[torch.Tensor]:
        return [torch.full((1 + image.height // 300, 2), float(image.width)) for image in images]

    encoder = returning(monkeypatch, tiles, tmp_path, text_tokenizer_dir)
    sizes = ((50, 100), (60, 100)), ((70, 300),), ((80, 650), (90, 90))
    samples = [encoder.encode(talk("a <image>" * len(s), [Image.new("RGB", size) for size in s])) for s in sizes]
    for sample, count in zip(samples, (2, 2, 4), strict=True):
        assert sample.vision_inputs is not None
        assert sample.vision_inputs.values["pixel_values"].shape == (1, count, 2)
    row = PaddingFreeCollator(dummy_images="never").collate(samples).transformers_inputs()
    expected = [50, 60, 70, 70, 80, 80, 80, 90]
    assert row["pixel_values"][0, :, 0].tolist() == expected


def test_tensors_that_depend_on_the_images_before_need_rows_of_one_sample(
    tmp_path: Path, text_tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Molmo2 counts the patches of all images of a sample."""

    def indices(images: list[Image.Image]) -> torch.Tensor:
        return torch.arange(2 * len(images)).reshape(-1, 2)

    encoder = returning(monkeypatch, indices, tmp_path, text_tokenizer_dir)
    sample = encoder.encode(talk("a <image> b <image>", pictures(1, 2)))
    collator = PaddingFreeCollator(dummy_images="never")
    assert collator.collate([sample]).transformers_inputs()["pixel_values"].tolist() == [[0, 1], [2, 3]]
    with pytest.raises(BatchError, match="A row with images must have 1 segment for this model family, got 2"):
        collator.collate([sample, sample]).transformers_inputs()


def test_settings_of_images_and_boxes_are_rejected_by_name(encoder: ChatEncoder) -> None:
    image = MediaReference(data=png(pictures(1, 1)[0]), settings={"max_pixels": 9000})
    turns = [Message("user", "<image>Find it."), Message("assistant", "<bbox>")]
    limited = Conversation(messages=tuple(turns), images=(image,))
    boxed = replace(limited, images=(replace(image, settings=None),), objects={"bbox": [[1, 2]]})
    for conversation, message in (
        (limited, "[A-Z].*Processor has no setting `max_pixels` for an image. Remove it"),
        (boxed, "[A-Z].*Processor has no known text of the boxes of objects: write the boxes into the text"),
    ):
        for use in (encoder.length, encoder.encode):
            with pytest.raises(RecordError, match=f"^unsupported_field: {message}"):
                use(conversation)
