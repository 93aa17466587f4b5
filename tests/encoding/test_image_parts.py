"""Conversations with images give the ids of the model's own processor: typed parts through its chat template.

The oracle is `processor(text=processor.apply_chat_template(typed parts), images=...)` of Transformers, with the chat
templates that the trl package ships. `ENERGON_PACKED_FUZZ=20000` is the long form: 1,000 conversations of each model.
"""

import io
import logging
import os
import random
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import transformers
from PIL import Image
from tiny_families import build_processor
from transformers import PreTrainedTokenizerFast
from transformers.utils import is_torchvision_available as has_torchvision

from energon_packed import ChatEncoder, PackOptions, RecordError, normalize, pack
from tests import oldest
from tests.encoding.real_templates import source
from tests.encoding.test_processor_vision import NEED_TORCHVISION
from tests.internals import ProcessorVision

# (processor, chat template) of published models; SmolVLM has the processor of Idefics 3. trl has no template for the
# processors of the second line, so their image token is written into the template of another model.
MODELS = [
    *(("llava", "llava_next"), ("llava_next", "llava_next"), ("gemma3", "gemma3"), ("idefics3", "idefics3")),
    *(("idefics3", "smolvlm"), ("qwen25vl", "qwen2_5_vl"), ("qwen3vl", "qwen3_vl"), ("qwen35", "qwen3_5_nothink")),
    *(("aya_vision", "gemma3"), ("internvl", "smolvlm"), ("llava_onevision", "llava_next"), ("lighton_ocr", "gemma3")),
]
# Without torchvision, the others have real text expansion and Pillow images: all but the processors of videos.
MISSING = () if has_torchvision() else {*NEED_TORCHVISION} - {"internvl", "llava_onevision"}
HERE = [model for model in MODELS if model[0] not in MISSING]
QWEN = {"qwen25vl": "Qwen2_5_VLProcessor", "qwen3vl": "Qwen3VLProcessor", "qwen35": "Qwen3VLProcessor"}
SIZES = {"patch_size": 14, "merge_size": 2, "min_pixels": 56 * 56, "max_pixels": 112 * 112}
PLACES = ("i", "it", "ti", "tit", "iti", "iit", "itit", "tii", "iiit", "t")
SITUATIONS = ("alone", "later", "system", "image in the system message", "image in the answer")
if oldest.TRANSFORMERS:  # its processors leave out images of system and assistant messages
    SITUATIONS = SITUATIONS[:3]
ROUNDS = max(1, int(os.environ.get("ENERGON_PACKED_FUZZ", "0")) // 20 // (len(PLACES) * len(SITUATIONS)))
IMAGE = {"type": "image"}
TEXTS = ("What is this?", "\nWhat is this?", "  two\n\nlines ", "and", " ", "a <b> & 'c'", "1. first\n2. second\n")
ANSWER = "A drawing of a house."


class Model(NamedTuple):
    processor: Any
    encoder: ChatEncoder


@pytest.fixture(scope="module", params=HERE, ids="-".join)
def model(request: Any, text_tokenizer_dir: Path, tokenizer_dir: Path) -> Model:
    name, template_name = request.param
    processor, written = processor_of(name, text_tokenizer_dir, tokenizer_dir), source(template_name)
    if name not in QWEN:
        written = re.sub("<image>|<start_of_image>", lambda _: processor.image_token, written)
        processor.tokenizer.bos_token = "<|im_start|>"
    return model_of(processor, written, tokenizer_dir, name)


def processor_of(name: str, text_tokenizer_dir: Path, tokenizer_dir: Path) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        if not has_torchvision():  # the check refuses a processor without a video processor
            patch.setattr(transformers.ProcessorMixin, "check_argument_for_proper_class", lambda *_: None)
        if name not in QWEN:
            return build_processor(name, text_tokenizer_dir)
        images = getattr(transformers, "Qwen2VLImageProcessor" if has_torchvision() else "Qwen2VLImageProcessorPil")
        tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_dir)
        video = transformers.Qwen2VLVideoProcessor() if has_torchvision() else None
        return getattr(transformers, QWEN[name])(images(**SIZES), tokenizer, video)


def model_of(processor: Any, template: str, tokenizer_dir: Path, name: str) -> Model:
    processor.chat_template = processor.tokenizer.chat_template = template
    vision = ProcessorVision(processor) if name not in QWEN else None
    if vision is None:
        vision = ChatEncoder.from_pretrained(tokenizer_dir, vision_family=name, **SIZES).vision  # type: ignore[arg-type]
    return Model(processor, ChatEncoder(processor.tokenizer, vision))


def png(size: tuple[int, int]) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", size, (9, 99, 9)).save(stream, "PNG")
    return stream.getvalue()


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def turn(role: str, *parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": role, "content": list(parts)}


def conversation(rng: random.Random, places: str, situation: str) -> list[dict[str, Any]]:
    """Typed parts; `iti` is an image, a text and an image."""
    user, later = (
        turn("user", *[IMAGE if kind == "i" else text(rng.choice(TEXTS)) for kind in kinds])
        for kinds in (places, rng.choice(PLACES))
    )
    answer = turn("assistant", text(ANSWER))
    if situation == "later":
        return [user, answer, later, turn("assistant", text("Yes. "))]
    if situation == "system":
        return [turn("system", text("Be brief. ")), user, answer]
    if situation == "image in the system message":
        return [turn("system", IMAGE, text("Be brief.")), user, answer]
    if situation == "image in the answer":
        return [user, turn("assistant", text(ANSWER), IMAGE)]
    return [user, answer]


def of_processor(processor: Any, messages: list[dict[str, Any]], sizes: list[tuple[int, int]]) -> list[int] | None:
    """None if the template has no place for the images, or rejects the messages."""
    images = [Image.new("RGB", size, (9, 99, 9)) for size in sizes]
    try:
        written = processor.apply_chat_template(messages, tokenize=False)
        out = processor(text=[written], add_special_tokens=False, **({"images": images} if images else {}))
    except Exception:  # whatever a template or a processor class raises
        return None
    return list(out["input_ids"][0])


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_ids_equal_the_processor_with_typed_parts(model: Model, seed: int) -> None:
    rng, (processor, encoder) = random.Random(seed), model
    compared = set()
    for places, situation in ((places, situation) for places in PLACES for situation in SITUATIONS):
        messages = conversation(rng, places, situation)
        sizes = [(64 + 8 * n, 96) for n in range(sum(part == IMAGE for m in messages for part in m["content"]))]
        expected = of_processor(processor, messages, sizes)
        record = normalize({"messages": messages, "images": [{"bytes": png(size)} for size in sizes]})
        if expected is None:
            assert situation in SITUATIONS[3:], messages
            if "image" in encoder.renderer.template.needs_parts:
                with pytest.raises(RecordError):
                    encoder.encode(record)
            continue
        sample = encoder.encode(record)
        decode = encoder.tokenizer.decode
        assert sample.input_ids.tolist() == expected, (messages, decode(expected), decode(sample.input_ids))
        targets = sample.input_ids[sample.labels != -100]
        assert ANSWER in decode(targets), (messages, decode(targets))
        assert not (targets == encoder.image_token_id).any()
        assert encoder.length(record) == len(sample)
        compared.add(situation)
    assert compared >= {"alone", "later", "system"}


def test_a_template_that_writes_the_image_token_has_no_warning(model: Model) -> None:
    assert not [line for line in model.encoder.vision.warnings if "template" in line]  # type: ignore[union-attr]


@pytest.mark.parametrize("model", [("qwen25vl", "qwen2_5_vl"), ("qwen3vl", "qwen3_vl")], indirect=True, ids="-".join)
def test_templates_that_render_strings_and_parts_alike_keep_strings(model: Model) -> None:
    """Strings need no Jinja."""
    assert "image" not in model.encoder.renderer.template.needs_parts


def template(image: str, before: str = "") -> str:
    """Write `image` for an image part; strings are stripped, as parts are not."""
    return (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content | trim }}{% else %}"
        + before
        + "{% for part in m.content %}{% if part.type == 'image' %}"
        + image
        + "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"


@pytest.mark.parametrize(
    ("written", "shown"), [("<image>", "<image>"), ("Picture: <|image_pad|>\n", "Picture: <|image_pad|>")]
)
def test_a_template_that_writes_another_image_token_is_reported_in_one_line(
    tokenizer_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, written: str, shown: str
) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_dir)
    tokenizer.chat_template = template(written)
    vision = ChatEncoder.from_pretrained(tokenizer_dir).vision
    assert vision is not None
    encoders = [ChatEncoder(tokenizer, vision) for _ in range(2)]  # a second encoder does not repeat the line
    line = (
        f"the chat template writes {shown!r} for a content part of type image, but {type(vision).__name__} needs "
        f"{QWEN_IMAGE!r}. Use the chat template of the vision model."
    )
    assert vision.warnings == (line,)
    data = tmp_path / "data.jsonl"
    data.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n')
    with caplog.at_level(logging.WARNING):
        pack(PackOptions(inputs=(str(data),), output_dir=tmp_path / "out", seq_len=64, encoder=encoders[0], workers=1))
    assert [record.getMessage() for record in caplog.records] == [line]


@pytest.mark.parametrize(
    "text_template",
    [
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
        "{% for m in messages %}{{ m.role }}: {{ m.content | tojson }}\n{% endfor %}",
        "{% for m in messages %}{{ m.role }}: {% for part in m.content %}{{ part }}{% endfor %}\n{% endfor %}",
        "{% for m in messages %}{{ m.role + ': ' + m.content }}\n{% endfor %}",
        template(""),
        template("{{ raise_exception('no images') }}"),
    ],
)
def test_a_template_without_image_parts_is_not_reported(tokenizer_dir: Path, text_template: str) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_dir)
    tokenizer.chat_template = text_template
    encoder = ChatEncoder(tokenizer, ChatEncoder.from_pretrained(tokenizer_dir).vision)
    assert encoder.vision is not None
    assert encoder.vision.warnings == ()
    assert "image" not in encoder.renderer.template.needs_parts


@pytest.mark.parametrize(
    "one_image",
    [
        "{% if m.content | selectattr('type', 'equalto', 'image') | list | length > 1 %}{{ raise_exception('one') }}"
        "{% endif %}",
        "",
    ],
)
def test_outer_white_space_and_a_limit_of_one_image_are_those_of_the_template(
    tokenizer_dir: Path, one_image: str
) -> None:
    processor = processor_of("qwen25vl", tokenizer_dir, tokenizer_dir)
    processor = processor_of("qwen25vl", tokenizer_dir, tokenizer_dir)
    model = model_of(processor, template(QWEN_IMAGE, one_image), tokenizer_dir, "qwen25vl")
    messages = [turn("user", text(" a "), IMAGE, text(" b \n")), turn("assistant", text("b"))]
    record = normalize({"messages": messages, "images": [{"bytes": png((64, 96))}]})
    assert model.encoder.encode(record).input_ids.tolist() == of_processor(processor, messages, [(64, 96)])


def test_the_placeholder_of_a_custom_family_is_the_token_of_its_template(tokenizer_dir: Path) -> None:
    class Bare(type(ChatEncoder.from_pretrained(tokenizer_dir).vision)):  # type: ignore[misc]
        placeholder = "<|image_pad|>"

    processor = processor_of("qwen25vl", tokenizer_dir, tokenizer_dir)
    processor.chat_template = processor.tokenizer.chat_template = template("Picture: <|image_pad|>\n")
    encoder = ChatEncoder(processor.tokenizer, Bare(processor.image_processor))
    messages = [turn("user", text("a"), IMAGE, IMAGE, text("b")), turn("assistant", text("b"))]
    sizes = [(64, 96), (96, 64)]
    record = normalize({"messages": messages, "images": [{"bytes": png(size)} for size in sizes]})
    assert encoder.encode(record).input_ids.tolist() == of_processor(processor, messages, sizes)
    assert encoder.vision is not None
    assert encoder.vision.warnings == ()
