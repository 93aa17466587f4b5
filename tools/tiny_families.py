"""Create a processor and a tiny random model of every vision-language family of the installed Transformers.

Both come from the default settings of the family. `FAMILIES` has the settings that make images small, and the settings
of the model that must fit them. Run `python tools/tiny_families.py [TYPE ...]` to check the families.
"""

import argparse
import ast
import base64
import inspect
import json
import logging
import re
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tiny_models import tiny_config, tiny_model
from transformers import PreTrainedTokenizerFast
from transformers.models.auto import (
    feature_extraction_auto,
    image_processing_auto,
    modeling_auto,
    processing_auto,
    video_processing_auto,
)
from transformers.utils import is_torchvision_available
from transformers.video_utils import VideoMetadata

Video = tuple[Any, float]
"""All frames of a video, uint8 (frames, height, width, 3), and its frames per second."""

DEMO_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"  # in the chat template of energon_packed.demo
_SIDE = {"height": 56, "width": 56}
_CROPPED = {"size": {"shortest_edge": 56}, "crop_size": _SIDE}
_PINPOINTS = [[56, 112], [112, 56], [112, 112], [56, 168]]
_TOWER = {"vision_config.image_size": 56, "vision_config.patch_size": 14, "vision_config.num_attention_heads": 4}
_PAIRS = {**_TOWER, "vision_config.image_size": [56, 56], "vision_config.patch_size": [14, 14]}
_CLIP = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
_LLAVA = {"images": _CROPPED, "processor": _CLIP, "config": _TOWER}
_LLAVA_NEXT = {
    "images": {**_CROPPED, "image_grid_pinpoints": _PINPOINTS},
    "processor": _CLIP,
    "config": {**_TOWER, "image_grid_pinpoints": _PINPOINTS},
}


def _mrope(*section: int) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(section)}
    return {"text_config.rope_parameters": rope}


_QWEN2: dict[str, Any] = {"config": {"vision_config.num_heads": 4}}
_WINDOWS = {"config": {"vision_config.num_heads": 4, "vision_config.window_size": 112}}
_QWEN3 = {"images": {"patch_size": 16}, "videos": {"patch_size": 16}, "config": {"vision_config.num_heads": 4}}
_OMNI_TAGS = {f"{kind}_{edge}_token": f"<|{kind}_{edge}|>" for kind in ("vision", "audio") for edge in ("bos", "eos")}
_OMNI: dict[str, Any] = {
    "tokens": {
        **_OMNI_TAGS,
        "vision_start_token": "<|vision_bos|>",
        "audio_start_token": "<|audio_bos|>",
        **{f"{kind}_token": f"<|{kind.upper()}|>" for kind in ("image", "audio", "video")},
    },
    "text": "<|vision_bos|><|IMAGE|><|vision_eos|>",
    "feature_extractor": {"feature_size": 128},
}
_PIXTRAL = {
    "images": {"size": {"longest_edge": 128}, "patch_size": {"height": 14, "width": 14}},
    "processor": {"patch_size": 14},
    "config": {
        "vision_config.image_size": 128,
        "vision_config.patch_size": 14,
        "vision_config.hidden_size": 64,
        "vision_config.num_attention_heads": 4,
        "vision_config.head_dim": 16,
    },
}
_GEMMA3 = {
    "images": {"size": _SIDE},
    "processor": {"image_seq_length": 16},
    "tokens": {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
    "text": "<start_of_image>",
    "config": {**_TOWER, "mm_tokens_per_image": 16},
}
_GEMMA4 = {
    "tokens": {"audio_token": "<audio_soft_token>", "boa_token": "<start_of_audio>", "eoa_token": "<end_of_audio>"},
    "images": {"max_soft_tokens": 70},
    "videos": {"num_frames": 8},
}
_MINICPM = {"config": {"insert_layer_id": 0, "vision_config.insert_layer_id": 0, "vision_config.patch_size": 14}}
_GRANITE_SPEECH = {
    "parts": {"audio_processor": "GraniteSpeechFeatureExtractor"},
    "config": {"encoder_config.dim_head": 16, "encoder_config.input_dim": 160, "window_size": 15}
    | {"projector_config.encoder_hidden_size": 1024},
}
_WHISPER = {"feature_extractor": {"feature_size": 128}}
_INTERNVL = {
    "images": {"size": _SIDE},
    "videos": {"size": _SIDE},
    "processor": {"image_seq_length": 4},
    "tokens": {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"},
    "config": _PAIRS,
}
_IDEFICS3 = {
    "images": {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}},
    "processor": {"image_seq_len": 4},
    "more_tokens": tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
    "config": _TOWER,
}

# Keys of a family, all optional:
#   like: the family whose processor and settings of the processor it uses
#   parts: class names of the processor's parts that the mappings of Transformers do not name
#   images, videos: settings of the image and the video processor; processor: settings of the processor
#   tokens: named special tokens of the tokenizer; more_tokens: special tokens without a name
#   text: the text of an image, if it is not the image token of the processor; also written by the chat template
#   call: settings of the call of the processor
#   added: numbers of tokens that the processor adds at the start and the end of every text, and the encoder does not
#   config: settings of the model by dotted path; attention: its attention if it has no sdpa
FAMILIES: dict[str, dict[str, Any]] = {
    "aria": {
        "processor": {"size_conversion": {980: 16}},
        "config": {"projector_patch_to_query_dict": {49: 16}}
        | {"vision_config.image_size": 980, "vision_config.patch_size": 140, "vision_config.num_attention_heads": 4},
    },
    "aya_vision": {
        "images": {"size": _SIDE},
        "processor": {"patch_size": 14, "img_size": 56, "downsample_factor": 2},
        "config": _TOWER | {"text_config.hidden_size": 256, "text_config.intermediate_size": 512},
    },
    "chameleon": {
        "images": {"size": {"shortest_edge": 64}, "crop_size": {"height": 64, "width": 64}},
        "processor": {"image_seq_length": 16},
        "more_tokens": ("<image>", *(f"IMGIMG{letter}Z" for letter in "ABCDEFGH")),
        "added": (0, 1),
        "config": {"vq_config.resolution": 64, "vq_config.num_embeddings": 8},
    },
    "cohere2_vision": {
        "images": {"size": {"height": 64, "width": 64}, "patch_size": 2},
        "config": {"vision_config.image_size": 64, "vision_config.patch_size": 16},
    },
    "cohere_compass": {
        **_QWEN3,
        "config": {
            **_QWEN3["config"],
            "text_config.layer_types": ["sliding_attention", "full_attention"],
            "text_config.rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
                "full_attention": None,
            },
        },
    },
    "cosmos3_edge": {
        "images": {"size": {"shortest_edge": 3136, "longest_edge": 65536}},
        "call": {"return_mm_token_type_ids": True},
        "config": {"vision_config.num_attention_heads": 4, "text_config.head_dim": 16, **_mrope(4, 2, 2)},
    },
    "cosmos3_omni": {"like": "qwen3_vl", **_QWEN3},
    "deepseek_ocr2": {
        "config": {
            "text_config.mlp_layer_types": ["dense", "sparse"],
            "text_config.num_experts_per_tok": 2,
            "text_config.moe_intermediate_size": 64,
            "vision_config.encoder_config.hidden_size": 112,
            "vision_config.encoder_config.num_attention_heads": 4,
            "vision_config.encoder_config.num_key_value_heads": 2,
            "vision_config.sam_config.num_attention_heads": 1,
        },
    },
    "deepseek_vl": {
        "images": {"size": _SIDE},
        "processor": {"num_image_tokens": 16},
        "config": _TOWER,
    },
    "deepseek_vl_hybrid": {
        "images": {"size": _SIDE, "high_res_size": {"height": 256, "width": 256}},
        "processor": {"num_image_tokens": 16},
        "config": {**_TOWER, "high_res_vision_config.image_size": 256},
    },
    "dots3_note": {
        "images": {"temporal_patch_size": 1},
        "videos": {"temporal_patch_size": 1, "patch_size": 14},
        "config": {
            "vision_config.num_attention_heads": 4,
            "audio_config.adapter_input_size": 160,
            "text_config.num_hidden_layers": 2,
            "text_config.layer_types": ["indexed_attention", "indexed_attention"],
            "text_config.mlp_layer_types": ["dense", "sparse"],
            "text_config.per_layer_config": {},
        },
    },
    "emu3": {
        "added": (1, 0),
        "images": {"min_pixels": 4096, "max_pixels": 9216},
        "tokens": {"image_token": "<image>"},
        "more_tokens": ("<|extra_200|>", *(f"<|visual token {code:06}|>" for code in range(8))),
        "config": {"vq_config.codebook_size": 8},
    },
    "ernie4_5_vl_moe": {
        "videos": {"draw_on_frames": False, "num_frames": 16},
        "config": {**_QWEN2["config"], "text_config.head_dim": 16, **_mrope(3, 3, 2)},
    },
    "exaone4_5": {"config": {**_WINDOWS["config"], "vision_config.num_key_value_heads": 2}},
    "fast_vlm": {
        "like": "llava",
        "images": {"size": {"shortest_edge": 128}, "crop_size": {"height": 128, "width": 128}},
        "processor": {"patch_size": 64, "vision_feature_select_strategy": "full"},
        "config": {
            "vision_config.architecture": "fastvit_mci3",
            "vision_config.hidden_size": 256,
            "vision_config.global_pool": "avg",
            "vision_config.model_args": {"inference_mode": True, "layers": [1, 1, 1, 1, 1]}
            | {"embed_dims": [8, 16, 32, 64, 128]},
        },
    },
    "fun_asr_nano": {"config": {"adaptor_config.hidden_size": 512, "adaptor_config.intermediate_size": 128}},
    "nemo_speechlm": {
        **_WHISPER,
        "config": {
            "audio_config.diarization_config.head_config.audio_hidden_size": 64,
            "text_config.moe_intermediate_size": 64,
        },
    },
    "granite_speech": _GRANITE_SPEECH,
    "granite_speech_plus": _GRANITE_SPEECH,
    "audioflamingo3": _WHISPER,
    "glmasr": _WHISPER,
    "musicflamingo": {**_WHISPER, "parts": {"feature_extractor": "WhisperFeatureExtractor"}},
    "qwen2_audio": _WHISPER,
    "voxtral": _WHISPER,
    "gemma3": _GEMMA3,
    "gemma3n": {
        "config": {"vision_config.hidden_size": 2048, "vision_config.architecture": "mobilenetv5_300m_enc"}
        | {"vision_config.model_args": {"channel_multiplier": 0.25}}
    },
    "gemma4": {
        **_GEMMA4,
        "config": {
            "vision_config.model_type": "gemma4_vision",
            "audio_config.model_type": "gemma4_audio",
            "audio_config.subsampling_conv_channels": [128, 32],
        },
        "attention": {"": "sdpa", "audio_config": "eager"},
    },
    "gemma4_unified": {
        **_GEMMA4,
        "config": {
            "vision_config.model_type": "gemma4_unified_vision",
            "audio_config.model_type": "gemma4_unified_audio",
        },
    },
    "glm4v": _QWEN2,
    "glm5_next": {
        "config": {"vision_config.num_heads": 4, "text_config.index_topk": 16, "text_config.index_kpool": 4},
    },
    "glm_ocr": {"like": "glm46v", **_QWEN2},
    "glmga": {"like": "glm46v", **_QWEN2},
    "got_ocr2": {
        "images": {"size": {"height": 256, "width": 256}},
        "config": {
            "vision_config.image_size": 256,
            "vision_config.patch_size": 4,
            "vision_config.num_attention_heads": 1,
        },
        "attention": "eager",
    },
    "granite4_vision": {
        **_LLAVA_NEXT,
        "processor": {**_CLIP, "downsample_rate": "1/2"},
        "config": {
            **_LLAVA_NEXT["config"],
            "downsample_rate": "1/2",
            "spatial_target_layers": [-1],
            "deepstack_layer_map": [[-1, 0]],
        },
    },
    "granite_docling": {
        "images": {"size": {"height": 128, "width": 128}},
        "processor": {"image_seq_len": 4},
        "config": {"vision_config.image_size": 128, "vision_config.deepstack_visual_indexes": [0, 1]},
    },
    "hunyuan_vl": {
        "tokens": {
            "image_token": "<|image|>",
            "image_start_token": "<|image_start|>",
            "image_end_token": "<|image_end|>",
        },
        "images": {"size": {"shortest_edge": 4096, "longest_edge": 65536}},
        "text": "<|image_start|><|image|><|image_end|>",
        "config": {"text_config.head_dim": 16, **_mrope(2, 2, 2, 2)},
    },
    "hyperclovax_vision_v2": _WINDOWS,
    "idefics3": _IDEFICS3,
    "inkling2": {"attention": "eager"},
    "internvl": {**_INTERNVL, "text": "<IMG_CONTEXT>"},
    "janus": {
        "images": {"size": {"height": 96, "width": 96}},
        "config": {"vision_config.image_size": 96, "vision_config.patch_size": 4, "vision_config.projection_dim": 512},
    },
    "kimi_k25": {"config": {"vision_config.pos_emb_width": 64, "vision_config.num_attention_heads": 4}},
    # As the published models; by default, all layers have attention.
    "lfm2_vl": {"config": {"text_config.layer_types": ["conv", "full_attention"] * 3}},
    "lfm3_vl": {"images": {"patch_size": 16}, "videos": {"patch_size": 16}},
    "lighton_ocr": _PIXTRAL,
    "llama4": {
        "images": {"size": _SIDE},
        "processor": {"patch_size": 14},
        "config": {**_TOWER, "vision_config.intermediate_size": 384, "vision_config.vision_output_dim": 512},
    },
    "llava": _LLAVA,
    "llava_next": _LLAVA_NEXT,
    "llava_next_video": {**_LLAVA_NEXT, "videos": _CROPPED},
    "llava_onevision": {
        "images": {"size": _SIDE, "image_grid_pinpoints": _PINPOINTS},
        "videos": {"size": _SIDE},
        "processor": {"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
        "config": {**_TOWER, "image_grid_pinpoints": _PINPOINTS},
    },
    "minicpm_ocr": _MINICPM,
    "minicpmv4_6": _MINICPM,
    "minicpmv4_7": _MINICPM,
    "minimax_m3_vl": {
        "more_tokens": ("]<]image[>[", "]<]video[>[", "]<]start of image[>[", "]<]end of image[>["),
    },
    "mistral3": {**_PIXTRAL, "processor": {"patch_size": 14, "spatial_merge_size": 2}},
    "mistral_large4": {**_PIXTRAL, "processor": {"patch_size": 14, "spatial_merge_size": 2}},
    "molmo2": {
        "added": (1, 0),
        "images": {"size": _SIDE, "overlap_margins": [1, 1]},
        "tokens": {"image_patch_token": "<im_patch>"},
        "config": {
            **_TOWER,
            "vision_config.image_size": [56, 56],
            "vision_config.num_position_embeddings": 16,
            "vision_config.num_key_value_heads": 4,
            "adapter_config.vision_feature_layer": [1, 0],
        },
    },
    "muse_glimmer": {"config": {"vision_config.pos_emb_width": 32}},
    "muse_spark": {"config": {"vision_config.pos_emb_width": 32, "audio_config.out_hidden_size": 1024}},
    "nemotron_h_omni": {
        "parts": {"feature_extractor": "ParakeetFeatureExtractor"},
        "images": {"min_num_patches": 16},
        "config": {"vision_config.video_temporal_patch_size": 2, "text_config.moe_intermediate_size": 64},
    },
    "ovis2": {
        "images": {"size": _SIDE},
        "processor": {"image_seq_length": 4},
        "config": {**_TOWER, "vision_config.hidden_stride": 2, "hidden_size": 512},
    },
    "paddleocr_vl": {
        "images": {"size": {"shortest_edge": 3136, "longest_edge": 65536}},
        "config": {"vision_config.num_attention_heads": 4},
    },
    "paligemma": {
        "images": {"size": _SIDE, "image_seq_length": 16},
        "config": {**_TOWER, "text_config.hidden_size": 256, "projection_dim": 256},
    },
    "perception_lm": {
        "images": {"size": _SIDE, "tile_size": 56},
        "videos": {"size": _SIDE},
        "processor": {"patch_size": 14},
        "config": {
            "projector_pooling_ratio": 2,
            "vision_config.architecture": "vit_pe_core_large_patch14_336",
            "vision_config.model_args": {"embed_dim": 64, "img_size": [56, 56], "depth": 2, "num_heads": 4}
            | {"global_pool": "", "use_post_transformer_norm": False, "init_values": 0.1, "ref_feat_shape": [4, 4]},
        },
    },
    "phi4_multimodal": {
        "parts": {"audio_processor": "Phi4MultimodalFeatureExtractor"},
        "config": {
            "audio_config.depthwise_separable_out_channel": 128,
            "audio_config.ext_pw_out_channel": 128,
            "audio_config.nemo_conv_channels": 128,
        },
    },
    "pp_chart2table": {
        "images": {"size": {"height": 256, "width": 256}},
        "more_tokens": ("<imgpad>",),
        "text": "<imgpad>" * 256,
        "config": {
            "vision_config.image_size": 256,
            "vision_config.patch_size": 4,
            "vision_config.num_attention_heads": 1,
        },
        "attention": "eager",
    },
    "qianfan_ocr": {**_INTERNVL, "text": "<image>"},
    "qwen2_5_omni_thinker": {
        "like": "qwen2_5_omni",
        **_OMNI,
        "config": {**_WINDOWS["config"], "vision_start_token_id": 0},
    },
    "qwen2_5_vl": _WINDOWS,
    "qwen2_vl": {"config": {"vision_config.num_heads": 4, "vision_config.hidden_size": 1024}},
    "qwen3_5": _QWEN3,
    "qwen3_5_moe": _QWEN3,
    "qwen3_asr": {"config": {"audio_config.output_dim": 512}},
    "qwen3_omni_moe_thinker": {
        "like": "qwen3_omni_moe",
        **_QWEN3,
        **_OMNI,
        "config": {**_QWEN3["config"], "vision_start_token_id": 0, "position_id_per_seconds": 13}
        | {"text_config.num_attention_heads": 4, "text_config.num_key_value_heads": 2}
        | {"text_config.num_experts_per_tok": 4}  # all, as a rounding can select another expert
        | {"audio_config.output_dim": 256},  # the width of the text
    },
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": {"like": "qwen3_vl", **_QWEN3},
    "qwen4_exp": {
        **_QWEN3,
        "config": {
            **_QWEN3["config"],
            "text_config.indexer_n_heads": 2,
            "text_config.indexer_kv_heads": 1,
            "text_config.indexer_head_dim": 32,
            "text_config.indexer_budget": 512,
            "text_config.indexer_compress_ratio": 4,
        },
    },
    "smolvlm": {
        **_IDEFICS3,
        "videos": {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 56}, "num_frames": 8, "fps": 2},
    },
    "step3p7": {
        "images": {"size": {"height": 224, "width": 224}, "patch_size": 112},
        "config": {"vision_config.image_size": 224, "text_config.sliding_window": 16},
    },
    "unlimited_ocr": {"config": {"vision_config.sam_config.num_attention_heads": 1}},
    "video_llama_3": {"config": {"vision_config.patch_size": 14}},
    "video_llava": {**_LLAVA, "videos": _CROPPED},
    "vipllava": {**_LLAVA, "config": {**_TOWER, "vision_feature_layer": [-2, -1]}},
}

# Families that do not apply to packed conversations, with the reason.
NOT_CHAT: dict[str, str] = {
    "blip": "captions: the text decoder attends to the image by cross-attention, and the text has no image tokens",
    "blip-2": "the processor writes the image in front of the text; a text cannot name the place of an image",
    "diffusion_gemma": "block diffusion: the model denoises a canvas of the answer, and does not predict next tokens",
    "evolla": "inputs are sequences of proteins and structures, not images; cross-attention",
    "florence2": "encoder-decoder model: the image and the task are in the encoder, the answer in the decoder",
    "fuyu": "the processor writes the image in front of the text; a text cannot name the place of an image",
    "git": "captions: the model puts the image features in front of all tokens of a row, without image tokens",
    "idefics": "cross-attention layers: `image_attention_mask` selects the images of a token; no image tokens",
    "instructblip": "the Q-Former also reads the instruction, with its own tokenizer: one instruction per row",
    "instructblipvideo": "the Q-Former also reads the instruction, with its own tokenizer: one instruction per row",
    "kosmos-2": "AutoProcessor has no entry; the model needs the `image_embeds_position_mask` of Kosmos2Processor",
    "kosmos-2.5": "AutoProcessor has no entry; the model needs the `image_embeds_position_mask` of Kosmos2_5Processor",
    "mistral4": "a text model without images",
    "mllama": "cross-attention layers: `cross_attention_mask` selects the tiles of a token; no features in tokens",
    "pi0": "a policy of robots: the input has the state of the robot and noisy actions, the output is actions",
    "pix2struct": "encoder-decoder model: the image with the rendered question is in the encoder",
    "pp_formulanet": "encoder-decoder model: the image of a formula is in the encoder, without text",
    "qwen2_5_omni": "no forward method: the thinker is trained alone, as model type qwen2_5_omni_thinker",
    "qwen3_omni_moe": "no forward method: the thinker is trained alone, as model type qwen3_omni_moe_thinker",
    "shieldgemma2": "a classifier of one image; its processor writes the prompt from a policy",
    "t5gemma2": "encoder-decoder model: the image and the question are in the encoder",
    "udop": "encoder-decoder model: the image, the words of a page and their boxes are in the encoder",
    "vision-encoder-decoder": "encoder-decoder model: the image is in the encoder, the text in the decoder",
}
# Families of audio and text, whose audio is tried alone.
AUDIO = (
    "audioflamingo3",
    "fun_asr_nano",
    "glmasr",
    "granite_speech",
    "granite_speech_plus",
    "kyutai_speech_to_text",
    "moss_transcribe_diarize",
    "musicflamingo",
    "nemo_speechlm",
    "qwen2_audio",
    "qwen3_asr",
    "vibevoice_asr",
    "voxtral",
    "voxtral_realtime",
)
NOT_CHAT |= dict.fromkeys(AUDIO, "a model of audio and text, without images")
# Families of audio that are refused without a trial.
STREAMING = {
    "kyutai_speech_to_text": "streaming: codes of audio are added to text tokens, and the text has no audio tokens",
    "voxtral_realtime": "streaming: features of audio are added to text tokens, and the text has no audio tokens",
}
# Classes of models of audio and text that the mapping of multimodal language models does not have.
_OTHER_MODELS = {
    "audioflamingo3": "AudioFlamingo3ForConditionalGeneration",
    "musicflamingo": "MusicFlamingoForConditionalGeneration",
}

_SPECIAL_TOKEN = re.compile(r"<\|[^|\s]+\|>|<\uff5c[^\uff5c]+\uff5c>|<\|?[A-Za-z_/][^<>\s|]*\|?>|\[[A-Z_]+\]")
_TOKEN_ATTRIBUTE = re.compile(r"(\w+_token)(_ids?)?")
_CONFIG_TOKEN = re.compile(r"(\w+?)(?:_token)?_(?:id|index|idx)")
_TEXT_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


def types() -> list[str]:
    """List all model types, in the order of the mappings of Transformers."""
    names = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return list(dict.fromkeys([*names, *modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES, *_OTHER_MODELS]))


def build_processor(model_type: str, text_tokenizer: Path) -> Any:
    """Create the processor of a family with a small tokenizer.

    Raises:
        ValueError: the family has no processor, or one of its parts cannot be created.
    """
    family = _processor_family(model_type)
    name = processing_auto.PROCESSOR_MAPPING_NAMES.get(family.get("like", model_type))
    if name is None:
        raise ValueError(f"Transformers has no processor of model type {model_type!r}")
    processor_class = getattr(transformers, name)
    parts: dict[str, Any] = {}
    try:
        for part in processor_class.get_attributes():
            if part == "tokenizer":
                parts[part] = _tokenizer(processor_class, family, text_tokenizer)
            elif part == "alignment_tokenizer":
                parts[part] = parts["tokenizer"]
            elif part == "video_processor" and not is_torchvision_available():
                parts[part] = None  # video processors need torchvision
            else:
                settings = family.get({"image_processor": "images", "video_processor": "videos"}.get(part, part), {})
                parts[part] = getattr(transformers, _part_class(part, model_type, name))(**settings)
        videos = parts.get("video_processor")
        if videos is not None and getattr(videos, "num_frames", None) is None and getattr(videos, "fps", None) is None:
            videos.num_frames = 8  # published folders have a number or a rate
        return processor_class(**parts, **family.get("processor", {}))
    except (ImportError, AttributeError, TypeError, KeyError) as error:
        line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ValueError(f"the processor of {model_type!r} cannot be created: {line}") from error


def image_text(model_type: str, processor: Any) -> str:
    """Return the text of an image in the input of the processor."""
    return str(_processor_family(model_type).get("text", getattr(processor, "image_token", "")))


def model_inputs(
    model_type: str,
    processor: Any,
    text: str,
    images: list[Image.Image],
    videos: list[Video] | None = None,
    clips: list[Any] | None = None,
) -> dict[str, Any]:
    """Return the output of the processor as inputs of the model, with float32 tensors.

    The processor gets all frames of the videos, and selects some of them; clips are samples at its rate.
    """
    family = _processor_family(model_type)
    settings, (head, tail) = family.get("call", {}), family.get("added", (0, 0))
    if model_type == "voxtral" and clips:
        return _voxtral_inputs(processor, text, clips)
    media: dict[str, Any] = {"images": images} if images else {}
    if videos:
        media |= {"videos": [frames for frames, _ in videos], "do_sample_frames": True, "return_metadata": True}
        media["video_metadata"] = [_metadata(frames, fps) for frames, fps in videos]
    if clips:
        media["audio"] = clips
    inputs = processor(text=[text], add_special_tokens=False, return_tensors="pt", **media, **settings)
    inputs.pop("video_metadata", None)
    length = inputs["input_ids"].shape[1]
    for name in ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"):
        if name in inputs:
            inputs[name] = inputs[name][:, head : length - tail]
    if model_type == "qwen2_5_omni_thinker" and clips:  # the model reads the frames of the mask only
        frames = int(inputs["feature_attention_mask"].any(0).nonzero().max()) + 1
        for name in ("input_features", "feature_attention_mask"):
            inputs[name] = inputs[name][..., :frames]
    floats = {name for name, value in inputs.items() if isinstance(value, torch.Tensor) and value.is_floating_point()}
    return {name: value.float() if name in floats else value for name, value in inputs.items()}


def _voxtral_inputs(processor: Any, text: str, clips: list[Any]) -> dict[str, Any]:
    """Inputs of Voxtral: as its `apply_chat_template` with mistral-common, 375 tokens for each 30 s."""
    for clip in clips:
        text = text.replace(processor.audio_token, "[BEGIN_AUDIO]" + "\0" * 375 * -(-len(clip) // 480_000), 1)
    text = text.replace("\0", processor.audio_token)
    options = dict(processor.audio_kwargs)
    features = processor._retrieve_input_features(clips, options.pop("max_source_positions"), **options)
    return {**processor.tokenizer(text, add_special_tokens=False, return_tensors="pt"), "input_features": features}


def _metadata(frames: Any, fps: float) -> VideoMetadata:
    count, height, width, _ = frames.shape
    return VideoMetadata(total_num_frames=count, fps=fps, width=width, height=height, duration=count / fps)


def build_model(model_type: str, processor: Any, attention: str = "sdpa") -> Any:
    """Create a tiny random float32 model whose token ids and image sizes fit the processor.

    Raises:
        Exception: the family does not support the attention implementation.
    """
    config = _config(model_type, processor)
    return tiny_model(_model_class(model_type), config, FAMILIES.get(model_type, {}).get("attention", attention))


def write_folder(folder: Path, model_type: str, text_tokenizer: Path) -> Path:
    """Write the processor and the configuration of the model as a model folder of the Hub, without the weights."""
    processor = build_processor(model_type, text_tokenizer)
    processor.save_pretrained(folder)
    processor.tokenizer.save_pretrained(folder)
    _config(model_type, processor).save_pretrained(folder)
    return folder


def picture(height: int = 90, width: int = 140, seed: int = 0) -> Image.Image:
    """Create an RGB image of random colours, as large areas that also a coarse encoder distinguishes."""
    colours = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return Image.fromarray(colours).resize((width, height))


def _processor_family(model_type: str) -> dict[str, Any]:
    """Return the settings of the processor; a family with `like` starts from the settings of the other family."""
    family = FAMILIES.get(model_type, {})
    return {**_processor_family(family["like"]), **family} if "like" in family else family


def _part_class(part: str, model_type: str, processor_name: str) -> str:
    family = _processor_family(model_type)
    if part in family.get("parts", {}):
        return str(family["parts"][part])
    mappings: dict[str, dict[str, Any]] = {
        "image_processor": image_processing_auto.IMAGE_PROCESSOR_MAPPING_NAMES,
        "video_processor": video_processing_auto.VIDEO_PROCESSOR_MAPPING_NAMES,
        "feature_extractor": feature_extraction_auto.FEATURE_EXTRACTOR_MAPPING_NAMES,
    }
    found = mappings.get(part, {}).get(family.get("like", model_type))
    if isinstance(found, dict):
        found = (found.get("torchvision") if is_torchvision_available() else None) or found["pil"]
    return found or processor_name.replace("Processor", part.title().replace("_", ""))


def _tokenizer(processor_class: type[Any], family: dict[str, Any], text_tokenizer: Path) -> Any:
    """Create a tokenizer with the special tokens in the source of the processor, and those that it reads by name."""
    if processor_class.__name__ == "VoxtralProcessor":
        return mistral_tokenizer()
    tree = ast.parse(inspect.getsource(inspect.getmodule(processor_class)))  # type: ignore[arg-type]
    texts, names = [], []
    optional = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _SPECIAL_TOKEN.fullmatch(node.value):
            texts.append(node.value)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("tokenizer", "self.tokenizer"):
            match = _TOKEN_ATTRIBUTE.fullmatch(node.attr)
            names += [match[1]] if match else []
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("hasattr", "getattr") and len(node.args) > 1:
            optional.add(re.sub(r"_ids?$", "", ast.unparse(node.args[1]).strip("'")))
    names = [name for name in names if name not in (*optional, *_TEXT_TOKENS) and not name.startswith("add_")]
    named = {name: f"<{name}>" for name in names} | family.get("tokens", {})
    tokenizer = PreTrainedTokenizerFast.from_pretrained(text_tokenizer, extra_special_tokens=named)
    if "text" in family:
        tokenizer.chat_template = tokenizer.chat_template.replace(DEMO_IMAGE, family["text"])
    texts = [text for text in dict.fromkeys([*texts, *family.get("more_tokens", ())]) if text not in named.values()]
    tokenizer.add_special_tokens({"extra_special_tokens": texts}, replace_extra_special_tokens=False)
    for name in _TEXT_TOKENS:
        if getattr(tokenizer, name) is None:
            setattr(tokenizer, name, "<|im_end|>")
    return tokenizer


def mistral_tokenizer() -> Any:
    """Convert a Mistral tokenizer of bytes: VoxtralProcessor reads the audio token by its id."""
    from transformers.integrations.mistral import convert_tekken_tokenizer

    special = [f"<SPECIAL_{rank}>" for rank in range(34)]
    named = {
        0: "<unk>",
        1: "<s>",
        2: "</s>",
        3: "[INST]",
        4: "[/INST]",
        11: "<pad>",
        24: "[AUDIO]",
        25: "[BEGIN_AUDIO]",
    }
    for rank, token in named.items():
        special[rank] = token
    content = {
        "config": {"pattern": r"\s?\p{L}+|.", "default_vocab_size": 256 + len(special), "version": "v7"}
        | {"num_vocab_tokens": 256, "default_num_special_tokens": len(special)},
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(bytes([rank])).decode(), "token_str": None}
            for rank in range(256)
        ],
        "special_tokens": [
            {"rank": rank, "token_str": token, "is_control": True} for rank, token in enumerate(special)
        ],
    }
    template = (
        "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}[INST]{{ message['content'] }}"
        "[/INST]{% else %}{{ message['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tekken.json")
        path.write_text(json.dumps(content), encoding="utf-8")
        return convert_tekken_tokenizer(str(path), chat_template=template)


def _model_class(model_type: str) -> Any:
    name = {**modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES, **_OTHER_MODELS}[model_type]
    return getattr(transformers, name if isinstance(name, str) else name[0])


def _config(model_type: str, processor: Any) -> Any:
    """Create the configuration of the tiny model, with the token ids of the processor."""
    settings: dict[str, Any] = {}
    for path, value in FAMILIES.get(model_type, {}).get("config", {}).items():
        *parents, last = path.split(".")
        part = settings
        for parent in parents:
            part = part.setdefault(parent, {})
        part[last] = value
    config = tiny_config(model_type, None, settings)
    config.architectures = [_model_class(model_type).__name__]
    for part in (getattr(config, name, None) for name in config.sub_configs):
        for name in ("out_hidden_size", "text_hidden_size"):  # the features have the width of the text
            if hasattr(part, name):
                setattr(part, name, config.get_text_config().hidden_size)
    ids = _token_ids(processor)
    if hasattr(processor, "image_processor"):
        ids["image"] = _image_token_id(model_type, processor)
    _set_token_ids(config, ids, len(processor.tokenizer))
    audio = getattr(config, "audio_config", None)
    if hasattr(audio, "vocab_offset"):  # audio has ids of its own after those of the tokenizer
        text = config.get_text_config()
        audio.vocab_offset, text.vocab_size = text.vocab_size, text.vocab_size + audio.vocab_size
    if hasattr(config, "vocabulary_map"):
        config.vocabulary_map = processor.tokenizer.get_vocab()
    return config


def _image_token_id(model_type: str, processor: Any) -> int:
    """Return the token that the features of an image replace: the most frequent token of a large image."""
    output = model_inputs(model_type, processor, image_text(model_type, processor), [picture()])
    return int(Counter(output["input_ids"][0].tolist()).most_common(1)[0][0])


def _token_ids(processor: Any) -> dict[str, int]:
    """Return the id of every special token by the name before `_token`."""
    tokenizer = processor.tokenizer
    names = {name for name in dir(processor) if name.endswith(("_token", "_token_id")) and not name.startswith("_")}
    values = {name: getattr(processor, name, None) for name in names} | dict(tokenizer.special_tokens_map)
    ids: dict[str, int] = {}
    for name, value in sorted(values.items()):
        token = tokenizer.convert_tokens_to_ids(value) if isinstance(value, str) else value
        if isinstance(token, int):
            ids[re.sub(r"_token(_id)?$", "", name)] = token
    return ids


def _set_token_ids(config: Any, ids: dict[str, int], vocabulary: int) -> None:
    for name, value in list(vars(config).items()):
        match = _CONFIG_TOKEN.fullmatch(name)
        if hasattr(value, "to_dict"):
            _set_token_ids(value, ids, vocabulary)
        elif name == "vocab_size" and value >= 64:
            config.vocab_size = -(-vocabulary // 64) * 64 + 64
        elif match and match[1] in ids:
            setattr(config, name, ids[match[1]])
        elif match and "token" in name and isinstance(value, int):
            setattr(config, name, vocabulary + sum(name.encode()) % 64)


def _check(model_type: str, text_tokenizer: Path) -> str:
    """Run the model on a text with an image, and return the number of tokens and of features."""
    processor = build_processor(model_type, text_tokenizer)
    text = f"a {image_text(model_type, processor)} b"
    inputs, other = (model_inputs(model_type, processor, text, [picture(seed=seed)]) for seed in (0, 1))
    model = build_model(model_type, processor, "sdpa")
    tokens = int((inputs["input_ids"] == _image_token_id(model_type, processor)).sum())
    features: list[int] = []
    for module in model.modules():
        if hasattr(module, "get_image_features"):
            module.get_image_features = _counted(module.get_image_features, features)
    with torch.no_grad():
        logits, changed = (model(**batch, use_cache=False).logits for batch in (inputs, other))
    with tempfile.TemporaryDirectory() as name:
        loaded = transformers.AutoProcessor.from_pretrained(write_folder(Path(name), model_type, text_tokenizer))
    if not torch.equal(model_inputs(model_type, loaded, text, [picture()])["input_ids"], inputs["input_ids"]):
        raise ValueError("the processor of the folder returns other tokens")
    if torch.equal(logits, changed):
        raise ValueError("the image does not affect the logits")
    if features and tokens not in features:
        raise ValueError(f"{tokens} image tokens, features {features}")
    return f"{tokens} {features[-1] if features else '-'}"


def _counted(function: Any, counts: list[int]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        output = function(*args, **kwargs)
        features = getattr(output, "pooler_output", None)
        features = features if features is not None else getattr(output, "last_hidden_state", output)
        if features is None:  # features of several layers
            return output
        if not isinstance(features, torch.Tensor):
            features = torch.cat([feature.reshape(-1, feature.shape[-1]) for feature in features])
        counts.append(features.numel() // features.shape[-1])
        return output

    return call


def main() -> None:
    """Check the families of the command line, or all."""
    from energon_packed.demo import write_dataset, write_tokenizer

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("model_types", nargs="*", metavar="TYPE")
    chosen = parser.parse_args().model_types
    logging.disable(logging.ERROR)
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        demo = write_dataset(Path(name) / "demo", records=120)
        tokenizer = write_tokenizer(Path(name) / "tokenizer", demo.texts, vision=False)
        for model_type in chosen or types():
            start = time.perf_counter()
            if model_type in NOT_CHAT:
                state, text = "none", NOT_CHAT[model_type]
            else:
                try:
                    state, text = "ok", _check(model_type, tokenizer)
                except Exception as error:  # every family is reported
                    where = traceback.extract_tb(error.__traceback__)[-1]
                    line = " ".join(str(error).split())[:300]
                    state, text = "FAIL", f"{type(error).__name__}: {line} @ {where.name} {where.lineno}"
            counts[state] += 1
            print(state, model_type, text, f"{time.perf_counter() - start:.1f} s", flush=True)
    print(", ".join(f"{state} {count}" for state, count in sorted(counts.items())))


if __name__ == "__main__":
    main()
