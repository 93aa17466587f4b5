"""Image options against what a folder says: the options win and say so, and no factor is guessed."""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from energon_packed import ChatEncoder, ConfigError, EncoderSettings, VisionFamily, normalize
from tests.internals import load_vision

QWEN = "Qwen2_5_VLProcessor"


def turns_of(prompt: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


def vision_of(folder: Path | None, **settings: Any) -> VisionFamily:
    vision = load_vision(EncoderSettings(processor=folder, **settings))
    assert vision is not None
    return vision


def facts(vision: VisionFamily) -> tuple[Any, ...]:
    p = vision.image_processor
    limits = (int(p.size["shortest_edge"]), int(p.size["longest_edge"]))
    return (type(vision).__name__, int(p.patch_size), vision.merge_size, int(p.temporal_patch_size), limits)


def test_options_win_over_the_folder_and_say_so(tokenizer_dir: Path) -> None:
    folder = (3136, 28 * 28 * 48)
    assert facts(vision_of(tokenizer_dir)) == ("Qwen25VLVision", 14, 2, 2, folder)
    assert vision_of(tokenizer_dir).warnings == vision_of(tokenizer_dir).infos == ()
    vision = vision_of(tokenizer_dir, image_processor=QWEN, factor=32, min_pixels=4096, max_pixels=4_000_000)
    assert facts(vision) == ("Qwen25VLVision", 16, 2, 2, (4096, 4_000_000))
    assert vision.warnings == ()
    assert vision.infos == (
        f"image options win over {tokenizer_dir}: `factor` 32 (28), `min_pixels` 4096 (3136), "
        "`max_pixels` 4000000 (37632)",
    )
    image = Image.fromarray(np.zeros((320, 640, 3), dtype=np.uint8))
    assert vision.pixels([image])[1].tolist() == [[1, 20, 40]]  # of 16 pixels, not of 14
    vision = vision_of(tokenizer_dir, merge_size=3)
    assert facts(vision) == ("Qwen25VLVision", 14, 3, 2, folder)
    assert vision.infos == (f"image options win over {tokenizer_dir}: `merge_size` 3 (2)",)
    vision = vision_of(tokenizer_dir, vision_family="qwen3_vl")
    assert facts(vision)[0] == "Qwen3VLVision"
    assert vision.warnings == (f"image options win over {tokenizer_dir}: `vision_family` qwen3_vl ({QWEN})",)
    assert vision_of(tokenizer_dir, image_processor=QWEN, factor=28, min_pixels=3136).infos == ()  # it says the same


def test_a_factor_is_decided_by_sizes_families_and_folders(tokenizer_dir: Path) -> None:
    for settings, expected in (
        ({"image_processor": QWEN, "factor": 48, "patch_size": 16}, (16, 3)),
        ({"image_processor": QWEN, "factor": 48, "merge_size": 2}, (24, 2)),
        ({"image_processor": QWEN, "factor": 48, "vision_family": "llava_onevision2"}, (16, 3)),
        ({"vision_family": "LlavaOnevision2"}, (16, 3)),
        ({"vision_family": "llava_onevision2", "factor": 28}, (14, 2)),
        ({"vision_family": "llava_onevision1_5"}, (14, 2)),
        ({"image_processor": QWEN, "patch_size": 16}, (16, 2)),
        ({"image_processor": "Qwen3VLProcessor", "factor": 32}, (16, 2)),
    ):
        vision = vision_of(None, **settings)  # type: ignore[arg-type]
        assert (vision.image_processor.patch_size, vision.merge_size, vision.ambiguous_layouts) == (*expected, ())
    assert vision_of(None, vision_family="llava_onevision2").image_processor.temporal_patch_size == 1


def test_a_factor_of_two_meanings_has_lengths_and_no_pixels(tokenizer_dir: Path, text_tokenizer_dir: Path) -> None:
    settings: dict[str, Any] = {"image_processor": QWEN, "factor": 48, "min_pixels": 3136, "max_pixels": 500_000}
    stream = io.BytesIO()
    Image.new("RGB", (300, 700)).save(stream, "PNG")
    record = {"images": [stream.getvalue()], "messages": turns_of("<image>What?", "Nothing.")}
    encoders = [
        ChatEncoder.from_pretrained(text_tokenizer_dir, **settings, **more)
        for more in ({}, {"patch_size": 16}, {"patch_size": 24}, {"vision_family": "llava_onevision2"})
    ]
    lengths = {encoder.length(normalize(record)) for encoder in encoders}
    assert len(lengths) == 1
    undecided, *decided = encoders
    assert undecided.vision is not None
    assert undecided.vision.infos[-1].startswith("`factor` 48 is 16 x 3 or 24 x 2 (patch size x merge size)")
    with pytest.raises(ConfigError, match="`factor` 48 is 16 x 3 or 24 x 2 .* pass `patch_size`, `merge_size` or"):
        undecided.encode(normalize(record))
    packed_with = undecided.fingerprint()
    for encoder in decided:
        assert len(encoder.encode(normalize(record))) in lengths
        assert encoder.fingerprint() != packed_with
        assert encoder.has_fingerprint(packed_with)  # trains on what was packed by the factor alone
    other = ChatEncoder.from_pretrained(text_tokenizer_dir, image_processor=QWEN, factor=28)
    assert not other.has_fingerprint(packed_with)
    assert not decided[0].has_fingerprint(decided[1].fingerprint())
    over = vision_of(tokenizer_dir, **settings)  # the folder has 14 x 2, which is not 48
    assert over.ambiguous_layouts == ((16, 3), (24, 2))


@pytest.mark.parametrize("template", ["chat_template.jinja", "chat_template.json"])
@pytest.mark.parametrize("tokenizer_class", ["PreTrainedTokenizerFast", "Qwen2Tokenizer"])
@pytest.mark.parametrize("model", ["llava_onevision2", "qwen2_5_vl"])
def test_a_full_model_folder(
    text_tokenizer_dir: Path, tmp_path: Path, template: str, tokenizer_class: str, model: str
) -> None:
    """Files of a model folder, those with code of their own included: nothing is run, nothing is asked."""
    write_model_folder(tmp_path, text_tokenizer_dir, template=template, tokenizer_class=tokenizer_class, model=model)
    encoder = ChatEncoder.from_pretrained(
        tmp_path, image_processor=QWEN, factor=48, min_pixels=3136, max_pixels=4_000_000
    )
    assert encoder.vision is not None
    family = "LlavaOnevision2Vision" if model == "llava_onevision2" else "Qwen25VLVision"  # by the model type
    assert facts(encoder.vision) == (family, 16, 3, 1, (3136, 4_000_000))
    assert encoder.vision.warnings == ()
    assert encoder.vision.infos == (f"image options win over {tmp_path}: `max_pixels` 4000000 (2000000)",)
    talk = normalize({"messages": turns_of("Hi", "Hello.")})
    plain = ChatEncoder.from_pretrained(text_tokenizer_dir)
    assert encoder.encode(talk).input_ids.tolist() == plain.encode(talk).input_ids.tolist()


@pytest.mark.parametrize("image_processor_type", ["Qwen2VLImageProcessor", "SiglipImageProcessor"])
def test_a_size_of_height_and_width_is_refused_in_one_line(
    tokenizer_dir: Path, tmp_path: Path, image_processor_type: str
) -> None:
    settings = {"image_processor_type": image_processor_type, "size": {"height": 384, "width": 384}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    message = (
        f"of {tmp_path} has a `size` of height 384, width 384.*, but Qwen25VLVision needs .* register a VisionFamily"
    )
    with pytest.raises(ConfigError, match=message):
        ChatEncoder.from_pretrained(tokenizer_dir, tmp_path, image_processor=QWEN)


def write_model_folder(folder: Path, tokenizer: Path, *, template: str, tokenizer_class: str, model: str) -> None:
    """What Hugging Face has for such a model, without the weights."""
    folder.mkdir(exist_ok=True)
    shutil.copy(tokenizer / "tokenizer.json", folder)
    text = ChatEncoder.from_pretrained(tokenizer).tokenizer.chat_template
    (folder / template).write_text(text if template.endswith("jinja") else json.dumps({"chat_template": text}))
    settings = json.loads((tokenizer / "tokenizer_config.json").read_text()) | {"tokenizer_class": tokenizer_class}
    settings.pop("chat_template", None)
    code = {"auto_map": {"AutoConfig": "configuration_x.XConfig", "AutoProcessor": "processing_x.XProcessor"}}
    images = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": QWEN, "patch_size": 16}
    images |= {"merge_size": 3, "temporal_patch_size": 1, "min_pixels": 3136, "max_pixels": 2_000_000}
    own = code if model == "llava_onevision2" else {}
    for name, value in (
        ("tokenizer_config.json", settings | own),
        ("config.json", {"model_type": model, "architectures": ["X"]} | own),
        ("generation_config.json", {"do_sample": True}),
        ("preprocessor_config.json", images | own),
        ("video_preprocessor_config.json", images | {"video_processor_type": "Qwen2VLVideoProcessor"}),
    ):
        (folder / name).write_text(json.dumps(value))
