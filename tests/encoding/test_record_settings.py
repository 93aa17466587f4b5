"""Settings of records that change inputs give the lengths, pixels and text of qwen_vl_utils and ms-swift."""

import io
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer
from transformers.utils import is_torchvision_available as has_torchvision

from energon_packed import ChatEncoder, Conversation, EncodedSample, RecordError, normalize
from tests.encoding.real_templates import source, tokenizer_of
from tests.golden.record_settings.cases import BOX_SIZES, image, messages
from tests.golden.videos.cases import digest

GOLDEN = Path(__file__).parents[1] / "golden" / "record_settings"
# The limits of qwen_vl_utils, which are those of the processors except the lower limit of Qwen3-VL.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"vision_family": "qwen2_vl"},
    "qwen2_5_vl": {"vision_family": "qwen2_5_vl"},
    "qwen3_vl": {"vision_family": "qwen3_vl", "min_pixels": 4096},
}


def golden(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (GOLDEN / f"{name}.jsonl").read_text().splitlines()]


@cache
def png(width: int, height: int) -> bytes:
    out = io.BytesIO()
    image(width, height).save(out, "PNG")
    return out.getvalue()


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: Any, text_tokenizer_dir: Path) -> tuple[str, ChatEncoder]:
    return request.param, ChatEncoder.from_pretrained(text_tokenizer_dir, **FAMILIES[request.param])


def record(*images: Any, **fields: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": "<image>" * len(images) + "What?"}, {"role": "assistant", "content": "A."}]
    return {"messages": turns, "images": list(images), **fields}


def pixels(sample: EncodedSample) -> torch.Tensor:
    assert sample.pixel_values is not None
    return sample.pixel_values


def of_part(data: bytes, settings: dict[str, int]) -> Conversation:
    parts = [{"type": "image", "image": data, **settings}, {"type": "text", "text": "What?"}]
    return normalize({"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "A."}]})


def test_images_with_settings_are_those_of_qwen_vl_utils(family: tuple[str, ChatEncoder]) -> None:
    name, encoder = family
    cases = [case for case in golden("images") if case["family"] == name]
    assert len(cases) == 25
    for case in cases:
        data = png(*case["size"])
        conversation = normalize(record({"bytes": data, **case["settings"]}))
        sample = encoder.encode(conversation)
        assert sample.image_grid_thw is not None
        assert sample.pixel_values is not None
        assert sample.image_grid_thw.tolist() == [case["grid"]], case
        if not has_torchvision():  # whose resize rounds differently; the next test compares its pixels
            assert digest(sample.pixel_values.numpy()) == case["pixels"], case
        assert encoder.length(conversation) == len(sample)
        assert of_part(data, case["settings"]).images == conversation.images


@pytest.mark.parametrize("name", [*FAMILIES, "llava_onevision2", "llava_onevision15"])
def test_measured_and_encoded_lengths_are_equal_with_settings_of_images(name: str, text_tokenizer_dir: Path) -> None:
    options = FAMILIES.get(name, {"vision_family": name})
    encoder = ChatEncoder.from_pretrained(text_tokenizer_dir, **options)
    limited = ChatEncoder.from_pretrained(text_tokenizer_dir, **{**options, "min_pixels": 4096, "max_pixels": 40_000})
    small, large = png(53, 90), png(640, 480)
    settings = {"min_pixels": 4096, "max_pixels": 40_000}
    plain = normalize(record(small, large, small))
    mixed = normalize(record(small, {"bytes": large, **settings}, small))
    assert encoder.length(mixed) == len(encoder.encode(mixed)) < encoder.length(plain)
    # An image with limits is the image of an encoder with these limits; the other images keep theirs.
    alone = [normalize(record({"bytes": data, **settings})) for data in (small, large)]
    for conversation, data in zip(alone, (small, large), strict=True):
        found, expected = encoder.encode(conversation), limited.encode(normalize(record(data)))
        assert encoder.length(conversation) == len(expected)
        assert torch.equal(pixels(found), pixels(expected))
    of_three, of_one = encoder.encode(mixed), encoder.encode(alone[1])
    first = encoder.encode(normalize(record(small)))
    assert torch.equal(pixels(of_three), torch.cat([pixels(first), pixels(of_one), pixels(first)]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_pixels": 0}, "max_pixels of an image must be a number above 0, not 0"),
        ({"max_pixels": "9"}, "max_pixels of an image must be a number above 0, not '9'"),
        ({"max_pixels": True}, "max_pixels of an image must be a number above 0, not True"),
        ({"min_pixels": 2.5}, "min_pixels of an image must be a whole number, not 2.5"),
        ({"resized_height": 28}, "resized_height of an image; use resized_height with resized_width"),
        (
            {"resized_height": 28, "resized_width": 28, "max_pixels": 9},
            "max_pixels and resized_height and resized_width",
        ),
    ],
)
def test_invalid_settings_of_an_image_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RecordError, match=f"^unsupported_field: .*{message}"):
        normalize(record({"bytes": png(28, 28), **settings}))


def test_settings_that_a_family_cannot_use_are_named(text_tokenizer_dir: Path) -> None:
    encoder, data = ChatEncoder.from_pretrained(text_tokenizer_dir, **FAMILIES["qwen3_vl"]), png(640, 480)
    for settings, message in (
        ({"max_pixels": 2048}, "min_pixels of an image must be at most max_pixels 2048, got 4096. Set both"),
        ({"min_pixels": 10**9, "max_pixels": 10**9}, "min_pixels of an image must be at most 67,108,864"),
        ({"resized_height": 9, "resized_width": 9000}, "resized_height and resized_width: absolute aspect ratio"),
    ):
        conversation = normalize(record({"bytes": data, **settings}))
        for use in (encoder.length, encoder.encode):
            with pytest.raises(RecordError, match=message):
                use(conversation)


def test_a_size_that_a_family_rejects_names_the_image(family: tuple[str, ChatEncoder], tmp_path: Path) -> None:
    for name, size in (("good.png", (28, 28)), ("thin.png", (1990, 5))):
        (tmp_path / name).write_bytes(png(*size))
    conversation = normalize(record("good.png", "thin.png"), image_root=tmp_path)
    for use in (family[1].length, family[1].encode):
        with pytest.raises(RecordError, match=r"^corrupt_image: thin\.png: 1990x5 pixels: .*; replace the image$"):
            use(conversation)


def test_a_placeholder_part_cannot_have_settings() -> None:
    part = {"type": "image", "max_pixels": 9000}
    turns = [{"role": "user", "content": [part]}, {"role": "assistant", "content": "A."}]
    with pytest.raises(RecordError, match="max_pixels of a content part without an image; write it into the object"):
        normalize({"messages": turns, "images": [png(28, 28)]})


TALK = [
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "3 + 3?"},
    {"role": "assistant", "content": "6"},
]


@pytest.mark.parametrize("kwargs", [{"enable_thinking": False}, {"enable_thinking": True}], ids=str)
@pytest.mark.parametrize("name", ["qwen3", "glm4moe", "qwen3_5_think"])
def test_variables_of_a_record_reach_the_template(name: str, kwargs: Any, text_tokenizer_dir: Path) -> None:
    tokenizer = tokenizer_of(AutoTokenizer.from_pretrained(text_tokenizer_dir), source(name))
    encoder = ChatEncoder(tokenizer)
    conversation = normalize({"messages": TALK, "chat_template_kwargs": kwargs})
    sample = encoder.encode(conversation)
    assert sample.input_ids.tolist() == tokenizer.apply_chat_template(TALK, **kwargs)["input_ids"]
    # The last answer starts after the prompt that the model gets with these variables.
    prompt = tokenizer.apply_chat_template(TALK[:-1], add_generation_prompt=True, **kwargs)["input_ids"]
    targets = (sample.labels != -100).nonzero()[0].tolist()
    last = [at for at in targets if at - 1 not in targets][-1]
    assert last == len(prompt)
    assert encoder.length(conversation) == len(sample)


# As the template of SmolLM3, which writes tools in one of two formats.
TOOLS = """{%- if xml_tools is defined and xml_tools %}<|im_start|>system
<tools>{{ xml_tools | join(' ') }}</tools><|im_end|>
{%- endif %}{%- set style = style | default('plain') %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if style == 'loud' and loop.last %}!{% endif %}{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def with_tools(text_tokenizer_dir: Path) -> tuple[Any, ChatEncoder]:
    tokenizer = tokenizer_of(AutoTokenizer.from_pretrained(text_tokenizer_dir), TOOLS)
    return tokenizer, ChatEncoder(tokenizer)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"xml_tools": ['{"name": "f"}', '{"name": "g"}'], "style": None, "python_tools": []},
        {"xml_tools": [], "enable_thinking": None, "custom_instructions": ""},
        {"style": "plain"},
        {},
    ],
    ids=str,
)
def test_the_format_of_tools_is_rendered(kwargs: dict[str, Any], text_tokenizer_dir: Path) -> None:
    tokenizer, encoder = with_tools(text_tokenizer_dir)
    given = {name: value for name, value in kwargs.items() if value is not None}
    conversation = normalize({"messages": TALK, "chat_template_kwargs": kwargs})
    sample = encoder.encode(conversation)
    assert sample.input_ids.tolist() == tokenizer.apply_chat_template(TALK, **given)["input_ids"]
    assert encoder.length(conversation) == len(sample)


def test_text_of_variables_cannot_write_control_tokens(text_tokenizer_dir: Path) -> None:
    _, encoder = with_tools(text_tokenizer_dir)
    plain, hostile = (
        encoder.encode(normalize({"messages": TALK, "chat_template_kwargs": {"xml_tools": [text]}}))
        for text in ("f", "f<|im_end|>")
    )
    end = encoder.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert (hostile.input_ids == end).sum() == (plain.input_ids == end).sum()
    assert len(hostile) > len(plain)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"enable_thinking": False}, "enable_thinking, which the chat template does not use; remove it"),
        ({"thinking_budget": 9}, "thinking_budget, which the chat template does not use; remove it"),
        ({"tools": [{"name": "f"}]}, "tools, which is not a setting of a template; remove it"),
        ({"messages": []}, "messages, which is not a setting of a template"),
        ({"add_generation_prompt": True}, "add_generation_prompt, which is not a setting of a template"),
        ({"bos_token": "<s>"}, "bos_token, which is not a setting of a template"),
    ],
)
def test_variables_that_the_template_does_not_use_are_named(
    kwargs: dict[str, Any], message: str, text_tokenizer_dir: Path
) -> None:
    _, encoder = with_tools(text_tokenizer_dir)
    conversation = normalize({"messages": TALK, "chat_template_kwargs": kwargs})
    for use in (encoder.length, encoder.encode):
        with pytest.raises(RecordError, match=f"^unsupported_field: chat_template_kwargs has {message}"):
            use(conversation)


@pytest.mark.parametrize(
    ("changes", "reason", "message"),
    [
        ({"chat_template_kwargs": [1]}, "missing_field", "chat_template_kwargs must be an object, not list"),
        ({"messages": None, "text": "A", "chat_template_kwargs": {"a": 1}}, "unsupported_field", "no template"),
        ({"messages": None, "input_ids": [1], "chat_template_kwargs": {"a": 1}}, "unsupported_field", "no template"),
        ({"chat_template_kwargs": {"a": 1 << 70}}, "bad_json", "chat_template_kwargs contains the number"),
        ({"chat_template_kwargs": {"max_pixels": 9}}, "unsupported_field", "max_pixels in chat_template_kwargs apply"),
        ({"videos": ["a.mp4"], "chat_template_kwargs": {"max_pixels": 9}}, "unsupported_field", "images alone"),
        ({"images": ["a.png"], "chat_template_kwargs": {"max_pixels": 0}}, "unsupported_field",
         "max_pixels of chat_template_kwargs must be a number above 0"),
    ],
)  # fmt: skip
def test_invalid_variables_are_named(changes: dict[str, Any], reason: str, message: str) -> None:
    given = {name: value for name, value in {"messages": TALK, **changes}.items() if value is not None}
    with pytest.raises(RecordError, match=f"^{reason}: .*{message}"):
        normalize(given)


def test_limits_of_a_record_are_limits_of_its_images() -> None:
    small, large = png(53, 90), png(640, 480)
    own = {"bytes": large, "max_pixels": 90_000}
    images = normalize(record(small, own, chat_template_kwargs={"max_pixels": 40_000, "min_pixels": 4096})).images
    assert [image.settings for image in images] == [
        {"min_pixels": 4096, "max_pixels": 40_000},
        {"min_pixels": 4096, "max_pixels": 90_000},
    ]
    conversation = normalize(record(small, chat_template_kwargs={"max_pixels": 40_000}))
    assert conversation == normalize(record({"bytes": small, "max_pixels": 40_000}))


GROUND = [
    {"role": "user", "content": "<image>Find <ref-object>."},
    {"role": "assistant", "content": "<bbox> and <bbox>"},
]
OBJECTS_OF_ONE = {"ref": ["it"], "bbox": [[1, 2, 30, 40], [5, 6]]}


def ground(**changes: Any) -> dict[str, Any]:
    return {"messages": GROUND, "images": [png(640, 480)], "objects": {**OBJECTS_OF_ONE, **changes}}


@pytest.fixture(scope="module")
def grounding(text_tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with the tokens of boxes."""
    folder = tmp_path_factory.mktemp("grounding")
    tokenizer = AutoTokenizer.from_pretrained(text_tokenizer_dir)
    tokens = [f"<|{name}_{side}|>" for name in ("object_ref", "box") for side in ("start", "end")]
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", FAMILIES)
def test_objects_are_written_as_by_ms_swift(name: str, grounding: Path) -> None:
    encoder = ChatEncoder.from_pretrained(grounding, **FAMILIES[name], allow_special_in_text=True)
    cases = [case for case in golden("boxes") if case["family"] == name]
    assert len(cases) == 12
    for case in cases:
        images = [{"bytes": png(*size), **case["settings"]} for size in BOX_SIZES]
        conversation = normalize({"messages": messages(2), "images": images, "objects": case["objects"]})
        turns = [{**turn, "content": text} for turn, text in zip(messages(2), case["contents"], strict=True)]
        expected, sample = (
            encoder.encode(normalize({"messages": turns, "images": images})),
            encoder.encode(conversation),
        )
        assert sample.input_ids.tolist() == expected.input_ids.tolist(), case
        assert sample.labels.tolist() == expected.labels.tolist()
        assert encoder.length(conversation) == len(sample)
        assert conversation.unused_fields == ()


def test_text_of_names_cannot_write_control_tokens(grounding: Path) -> None:
    encoder = ChatEncoder.from_pretrained(grounding, **FAMILIES["qwen2_vl"])
    end, start = encoder.tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|box_start|>"])
    for name in ("it", "it<|im_end|><|box_start|>", "<image>", "<bbox>"):
        conversation = normalize(ground(ref=[name]))
        sample = encoder.encode(conversation)
        assert ((sample.input_ids == end).sum(), (sample.input_ids == start).sum()) == (2, 2), name
        assert encoder.length(conversation) == len(sample)


@pytest.mark.parametrize("name", ["llava_onevision2", "llava_onevision15"])
def test_a_family_without_known_boxes_rejects_them(name: str, grounding: Path) -> None:
    encoder = ChatEncoder.from_pretrained(grounding, vision_family=name)
    conversation = normalize(ground())
    if name == "llava_onevision15":  # ms-swift has a template of it
        assert encoder.length(conversation) == len(encoder.encode(conversation))
        return
    for use in (encoder.length, encoder.encode):
        with pytest.raises(
            RecordError, match="^unsupported_field: LlavaOnevision2Vision has no known text of the boxes"
        ):
            use(conversation)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ref": []}, "1 <ref-object> placeholders for 0 names"),
        ({"bbox": [[1, 2]]}, "2 <bbox> placeholders for 1 boxes"),
        ({"ref": [5]}, r"a name \(ref\) of objects is 5; use text"),
        ({"ref": "it"}, "ref of objects must be a list, not str"),
        ({"bbox": [[1, 2, 3], [1, 2]]}, r"a box of objects is \[1, 2, 3\]; use x, y or x, y, x, y"),
        ({"bbox": [[1, "2"], [1, 2]]}, "a box of objects is"),
        ({"bbox": [[1, float("nan")], [1, 2]]}, "a box of objects is"),
        ({"bbox_type": "norm1000"}, "bbox_type of objects is 'norm1000'; use real or norm1"),
        ({"image_id": [1]}, "a box of objects is in image 1, and the record has 1 images"),
        ({"image_id": [True]}, "a box of objects is in image True"),
        ({"image_id": [0, 0, 0]}, "objects have 3 image_id for 2 boxes"),
        ({"category": [1]}, "objects have category; only ref, bbox, bbox_type, image_id are read, remove it"),
    ],
)
def test_invalid_objects_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecordError, match=f"^unsupported_field: {message}"):
        normalize(ground(**changes))


def test_objects_need_placeholders_and_an_image() -> None:
    for value in ([1], "x"):
        with pytest.raises(RecordError, match="objects must be an object with ref and bbox, not"):
            normalize({**ground(), "objects": value})
    turns = [{"role": "user", "content": "Find it."}, GROUND[1]]
    with pytest.raises(RecordError, match="a box of objects is in image 0, and the record has 0 images"):
        normalize({"messages": turns, "objects": {"bbox": OBJECTS_OF_ONE["bbox"]}})
    with pytest.raises(RecordError, match="<bbox> is not replaced by a box"):
        normalize({"text": "Find <bbox>.", "objects": {"bbox": [[1, 2]]}})
