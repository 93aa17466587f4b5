"""The family of generated model folders: their own family, a warning, or an error. Never another family."""

import json
from pathlib import Path

import pytest
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

from energon_packed import ChatEncoder, ConfigError, EncoderSettings, normalize
from tests.internals import load_vision

REFUSED, WARNED = "refused", "warned "
IMAGES = "Qwen2VLImageProcessor"
Folder = tuple[str | None, str | None, str | None]
"""model_type, processor_class, image_processor_type; None if the folder does not have it."""

# Model types of Transformers whose image processor is Qwen2-VL's.
OF_TRANSFORMERS = {
    "colqwen2": REFUSED,
    "cosmos3_omni": REFUSED,
    "dots3_note": REFUSED,
    "exaone4_5": REFUSED,  # one-dimensional positions, as the next two
    "hyperclovax_vision_v2": REFUSED,
    "lfm3_vl": REFUSED,
    "qwen2_5_omni": REFUSED,
    "qwen2_5_vl": "Qwen25VLVision",
    "qwen2_vl": "Qwen2VLVision",
    "qwen3_5": "Qwen3VLVision",
    "qwen3_5_moe": "Qwen3VLVision",
    "qwen3_omni_moe": REFUSED,
    "qwen3_vl": "Qwen3VLVision",
    "qwen4_exp": REFUSED,
}
# Model types of Transformers with other image processors, which no family has.
OTHERS = (
    *("blip-2", "cohere2_vision", "deepseek_vl", "emu3", "florence2", "fuyu", "gemma3n", "glm_ocr", "got_ocr2"),
    *("hunyuan_vl", "janus", "kosmos-2.5", "lfm2_vl", "llama4", "llava", "minicpm_ocr", "mllama"),
    *("muse_glimmer", "nemotron_h_omni", "ovis2", "paddleocr_vl", "paligemma", "step3p7"),
)
FOLDERS: dict[Folder, str] = {
    # With their own code
    ("llava_onevision2", "Qwen2_5_VLProcessor", IMAGES): "LlavaOnevision2Vision",
    ("llava_onevision2_moe", "Qwen2_5_VLProcessor", IMAGES): "LlavaOnevision2Vision",
    ("llavaonevision1_5", "Qwen2_5_VLProcessor", IMAGES): "LlavaOnevision15Vision",
    ("qwen3_vl_moe", "Qwen3VLProcessor", IMAGES): "Qwen3VLVision",
    # Unknown model types decide nothing, and neither do the processors beside them.
    ("my_model", "Qwen2_5_VLProcessor", IMAGES): REFUSED,
    ("my_model", "Qwen2VLProcessor", IMAGES): REFUSED,
    ("my_model", None, IMAGES): REFUSED,
    ("qwen2_vl_audio", "Qwen2VLProcessor", IMAGES): REFUSED,
    ("qwen3_5_omni", "Qwen3VLProcessor", IMAGES): REFUSED,
    ("qwen2_5_omni_thinker", None, IMAGES): REFUSED,
    ("qwen2", "Qwen2VLProcessor", IMAGES): REFUSED,
    ("llama", None, IMAGES): REFUSED,
    # Conflicting declarations: the model type decides.
    ("qwen2_vl", "Qwen2_5_VLProcessor", IMAGES): "Qwen2VLVision",
    ("qwen2_5_vl", "Qwen2VLProcessor", IMAGES): "Qwen25VLVision",
    ("qwen3_vl", "Qwen2_5_VLProcessor", IMAGES): "Qwen3VLVision",
    ("qwen2_5_vl", "MyProcessor", IMAGES): "Qwen25VLVision",
    ("qwen2_5_vl", None, IMAGES): "Qwen25VLVision",
    ("exaone4_5", "Qwen2VLProcessor", IMAGES): REFUSED,
    ("qwen2_5_omni", "Qwen2_5_VLProcessor", IMAGES): REFUSED,
    # Without a model type, the processor class decides.
    (None, "Qwen2VLProcessor", IMAGES): "Qwen2VLVision",
    (None, "Qwen2_5_VLProcessor", IMAGES): "Qwen25VLVision",
    (None, "Qwen3VLProcessor", IMAGES): "Qwen3VLVision",
    (None, "Qwen3OmniMoeProcessor", IMAGES): REFUSED,
    (None, "Qwen2_5OmniProcessor", IMAGES): REFUSED,
    (None, "Exaone4_5_Processor", IMAGES): REFUSED,
    (None, "ColQwen2Processor", IMAGES): REFUSED,
    (None, "MyProcessor", IMAGES): REFUSED,
    # Without both, the image processor decides, with a warning.
    (None, None, IMAGES): WARNED + "Qwen2VLVision",
    (None, None, f"{IMAGES}Fast"): WARNED + "Qwen2VLVision",
    (None, None, f"{IMAGES}Pil"): WARNED + "Qwen2VLVision",
    (None, None, "CLIPImageProcessor"): REFUSED,
    (None, None, "SiglipImageProcessor"): REFUSED,
    (None, None, "PixtralImageProcessor"): REFUSED,
    (None, None, None): REFUSED,
}


def of_transformers(model_type: str) -> Folder:
    images = IMAGE_PROCESSOR_MAPPING_NAMES.get(model_type, {})
    return model_type, PROCESSOR_MAPPING_NAMES.get(model_type), images.get("torchvision") or images.get("pil")


EXPECTED: dict[Folder, str] = {
    **{of_transformers(name): result for name, result in OF_TRANSFORMERS.items()},
    **{of_transformers(name): REFUSED for name in OTHERS},
    **FOLDERS,
}


def write_folder(folder: Path, tokenizer: Path, declared: Folder) -> Path:
    """Write the configuration files of a model folder, beside the files of a tokenizer."""
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).symlink_to(tokenizer / name)
    model_type, processor_class, image_processor = declared
    names = {"processor_class": processor_class, "image_processor_type": image_processor}
    (folder / "preprocessor_config.json").write_text(json.dumps({k: v for k, v in names.items() if v}))
    if model_type is not None:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


def family_of(folder: Path) -> str:
    try:
        vision = load_vision(EncoderSettings(tokenizer=folder))
    except ConfigError as error:
        name = next(name for name in (*declared_in(folder), "without a name") if name is not None)
        is_named = str(error).startswith(f"unknown vision family {name if ' ' in name else repr(name)} of {folder} (")
        installs = str(error).endswith("; install it")  # of a processor that no family has
        return REFUSED if (is_named and "Set `vision_family` to one of" in str(error)) or installs else str(error)
    assert vision is not None
    warns = any("names no model" in line for line in vision.warnings)
    return (WARNED if warns else "") + type(vision).__name__


def declared_in(folder: Path) -> list[str | None]:
    config = folder / "config.json"
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    settings |= json.loads(config.read_text()) if config.exists() else {}
    return [settings.get(key) for key in ("model_type", "processor_class", "image_processor_type")]


def test_every_folder_is_of_its_own_family_or_refused_or_warned(text_tokenizer_dir: Path, tmp_path: Path) -> None:
    assert len(EXPECTED) >= 60
    folders = {
        declared: write_folder(tmp_path / str(index), text_tokenizer_dir, declared)
        for index, declared in enumerate(EXPECTED)
    }
    assert {declared: family_of(folder) for declared, folder in folders.items()} == EXPECTED


def test_the_table_has_every_model_type_with_the_image_processor_of_qwen() -> None:
    """A new model type of Transformers is decided here, before it is taken for another one."""
    known = {
        model_type
        for model_type, images in IMAGE_PROCESSOR_MAPPING_NAMES.items()
        if IMAGES in (images.get("torchvision"), images.get("pil"))
    }
    assert known <= set(OF_TRANSFORMERS), sorted(known - set(OF_TRANSFORMERS))
    assert set(OTHERS) <= set(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


@pytest.mark.parametrize("model_type", ["exaone4_5", "my_model"])
def test_a_family_is_forced_by_its_name_alone(text_tokenizer_dir: Path, tmp_path: Path, model_type: str) -> None:
    declared = (model_type, "Qwen2VLProcessor", IMAGES)
    folder = write_folder(tmp_path / "model", text_tokenizer_dir, declared)
    for own in ("Qwen2VLProcessor", IMAGES, "qwen2vl-image processor"):  # names of the folder decide nothing
        with pytest.raises(ConfigError, match=f"unknown vision family '{model_type}'.* Set `vision_family` to one of"):
            load_vision(EncoderSettings(tokenizer=folder, image_processor=own))
    vision = load_vision(EncoderSettings(tokenizer=folder, vision_family="Qwen3_VL"))
    assert type(vision).__name__ == "Qwen3VLVision"
    assert vision is not None
    assert vision.warnings == (f"image options win over {folder}: `vision_family` Qwen3_VL ({model_type})",)


def test_text_needs_no_family(tokenizer_dir: Path, text_tokenizer_dir: Path, tmp_path: Path) -> None:
    """`none`: the folder of a model without a family, or of a vision model for a text model."""
    folder = write_folder(tmp_path / "model", text_tokenizer_dir, of_transformers("qwen2_5_omni"))
    talk = normalize({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]})
    for source in (folder, tokenizer_dir):
        encoder = ChatEncoder.from_pretrained(source, vision_family="none")
        sample = encoder.encode(talk)
        assert encoder.vision is None
        assert sample.position_ids is None
        assert (
            sample.input_ids.tolist()
            == ChatEncoder.from_pretrained(text_tokenizer_dir).encode(talk).input_ids.tolist()
        )
        with pytest.raises(ConfigError, match="record a has images or videos, but `vision_family` is none. Remove it"):
            encoder.length(normalize({"id": "a", "images": [b"x"], "captions": ["c"]}))
    with pytest.raises(ConfigError, match="`factor` must not be set with `vision_family` none"):
        ChatEncoder.from_pretrained(tokenizer_dir, vision_family="none", factor=28)
