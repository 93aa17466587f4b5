"""Create processor folders and tiny models of vision families that a Transformers processor supports."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from transformers import PreTrainedTokenizerFast
from transformers.utils import is_torchvision_available

from energon_packed import ChatEncoder, Conversation, MediaReference, Message, PackedBatch, PaddingFreeCollator

_IDEFICS3 = ("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>")
_TILES = tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))
_SIDE = {"height": 56, "width": 56}
_CROPPED = {"size": {"shortest_edge": 56}, "crop_size": _SIDE}
_CLIP = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
_GEMMA3 = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
_AYA = ("<image>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", "<|IMG_LINE_BREAK|>", "TILE_GLOBAL", "TILE")

# name: processor class, its image processor and the settings of both, special tokens
PROCESSORS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any], Any]] = {
    "llava": ("LlavaProcessor", "CLIPImageProcessorPil", _CROPPED, _CLIP, ("<image>",)),
    "llava_next": (
        "LlavaNextProcessor",
        "LlavaNextImageProcessorPil",
        {**_CROPPED, "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112], [56, 168]]},
        _CLIP,
        ("<image>",),
    ),
    "gemma3": ("Gemma3Processor", "Gemma3ImageProcessorPil", {"size": _SIDE}, {"image_seq_length": 4}, _GEMMA3),
    "idefics3": (
        "Idefics3Processor",
        "Idefics3ImageProcessorPil",
        {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}},
        {"image_seq_len": 4},
        (*_IDEFICS3, *_TILES),
    ),
    "aya_vision": (
        "AyaVisionProcessor",
        "GotOcr2ImageProcessorPil",
        {"size": _SIDE},
        {"patch_size": 14, "img_size": 56, "downsample_factor": 2},
        _AYA,
    ),
    "pixtral": (
        "PixtralProcessor",
        "PixtralImageProcessor",
        {"size": {"longest_edge": 128}, "patch_size": {"height": 16, "width": 16}},
        {"patch_size": 16},
        ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    ),
    "internvl": (
        "InternVLProcessor",
        "GotOcr2ImageProcessor",
        {"size": _SIDE},
        {"image_seq_length": 4, "video_processor": "InternVLVideoProcessor"},
        {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"}
        | {"video_token": "<video>"},
    ),
    "llava_onevision": (
        "LlavaOnevisionProcessor",
        "LlavaOnevisionImageProcessor",
        {"size": _SIDE, "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112], [56, 168]]},
        {"num_image_tokens": 16, "vision_feature_select_strategy": "full"}
        | {"video_processor": "LlavaOnevisionVideoProcessor"},
        ("<image>", "<video>"),
    ),
    "paligemma": ("PaliGemmaProcessor", "SiglipImageProcessorPil", {"size": _SIDE}, {}, ("<image>",)),
}


# Processors that do not load without torchvision. The processor of Idefics3 needs it after Transformers 5.16.
NEED_TORCHVISION = (
    *("pixtral", "internvl", "llava_onevision"),
    *(("idefics3",) if hasattr(transformers.Idefics3ImageProcessorPil, "_backends") else ()),
)


def load_processor(name: str, text_tokenizer: Path) -> Any:
    """Create a processor; without torchvision, with the Pillow image processor and without a video processor."""
    processor, image_processor, image_settings, settings, tokens = PROCESSORS[name]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(
        text_tokenizer, extra_special_tokens=tokens if isinstance(tokens, dict) else list(tokens)
    )
    if name == "paligemma":
        tokenizer.bos_token = "<|im_start|>"
        image_settings = {**image_settings, "image_seq_length": 16}
    if not is_torchvision_available():
        image_processor = f"{image_processor.removesuffix('Pil')}Pil"
    images = getattr(transformers, image_processor)(**image_settings)
    settings = dict(settings)
    if video := settings.pop("video_processor", None):
        settings["video_processor"] = getattr(transformers, video)() if is_torchvision_available() else None
    return getattr(transformers, processor)(images, tokenizer, **settings)


def write_processor(folder: Path, name: str, text_tokenizer: Path) -> Path:
    """Write a model folder as on the Hugging Face Hub, without the weights."""
    instance = load_processor(name, text_tokenizer)
    instance.save_pretrained(folder)
    instance.tokenizer.save_pretrained(folder)
    return folder


_TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 56,
    "patch_size": 14,
}
_CLIP_TOWER = {"model_type": "clip_vision_model", "projection_dim": 32, **_VISION}
_PINPOINTS = [[56, 112], [112, 56], [112, 112], [56, 168]]

# name: model class, its settings, the text and the vision part
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "llava": ("Llava", {}, {"model_type": "llama"}, _CLIP_TOWER),
    "llava_next": ("LlavaNext", {"image_grid_pinpoints": _PINPOINTS}, {"model_type": "llama"}, _CLIP_TOWER),
    "gemma3": (
        "Gemma3",
        {"mm_tokens_per_image": 4},
        {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 8},
        {"model_type": "siglip_vision_model", **_VISION},
    ),
    "idefics3": ("Idefics3", {"scale_factor": 2}, {"model_type": "llama"}, _VISION),
    "pixtral": (
        "Llava",
        {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
        {"model_type": "mistral", "sliding_window": None},
        {**_VISION, "model_type": "pixtral", "image_size": 128, "patch_size": 16, "head_dim": 8},
    ),
    "internvl": (
        "InternVL",
        {"downsample_ratio": 0.5},
        {"model_type": "qwen2"},
        {**_VISION, "model_type": "internvl_vision", "image_size": [56, 56], "patch_size": [14, 14]},
    ),
    "llava_onevision": (
        "LlavaOnevision",
        {"image_grid_pinpoints": _PINPOINTS, "vision_aspect_ratio": "anyres_max_9"},
        {"model_type": "qwen2"},
        {"model_type": "siglip_vision_model", **_VISION, "vision_use_head": False},
    ),
    "aya_vision": (
        "AyaVision",
        {"downsample_factor": 2, "adapter_layer_norm_eps": 1e-6},
        {"model_type": "cohere2", "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64},
        {"model_type": "siglip_vision_model", **_VISION},
    ),
}


def vision_model(name: str, encoder: ChatEncoder, attention: str) -> Any:
    """Create a model with the vocabulary of the encoder's tokenizer."""
    torch.manual_seed(0)
    model, settings, text, vision = MODELS[name]
    text = {**_TEXT, "vocab_size": len(encoder.tokenizer), **text}
    if name == "aya_vision":
        text.pop("head_dim")
    config = getattr(transformers, f"{model}Config")(
        text_config=text,
        vision_config=vision,
        image_token_id=encoder.image_token_id,
        image_token_index=encoder.image_token_id,
        **settings,
    )
    model_class = getattr(transformers, f"{model}ForConditionalGeneration")
    instance = model_class._from_config(config, attn_implementation=attention, dtype=torch.float32)
    for parameter in instance.parameters():
        if parameter.ndim >= 2:  # large enough for images to matter
            torch.nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
    return instance.eval()


def image_row(encoder: ChatEncoder) -> PackedBatch:
    """Encode a row of three samples with images of different sizes, and one sample without images."""
    samples = []
    for index, shapes in enumerate([[(64, 96)], [], [(120, 40), (50, 200)], [(80, 80)]]):
        turns = [
            Message("user", "<image>" * len(shapes) + f"What is a house {index}?"),
            Message("assistant", "It is."),
        ]
        samples.append(encoder.encode(Conversation(messages=turns, images=[_image(*shape) for shape in shapes])))
    return PaddingFreeCollator(dummy_images="never").collate(samples)


def _image(height: int, width: int) -> MediaReference:
    pixels = np.random.default_rng(height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return MediaReference(data=stream.getvalue())
