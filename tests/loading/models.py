"""Tiny random models of the real classes, float32, on CPU."""

from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from energon_packed import ChatEncoder

_SIZE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def tiny_model(name: str, encoder: ChatEncoder, attention: str) -> Any:
    """A model whose vocabulary is that of the encoder's tokenizer."""
    torch.manual_seed(0)
    token = encoder.tokenizer.convert_tokens_to_ids
    vocabulary = {"vocab_size": len(encoder.tokenizer), "bos_token_id": None, "eos_token_id": token("<|im_end|>")}
    media = {
        "image_token_id": token("<|image_pad|>"),
        "video_token_id": token("<|video_pad|>"),
        "vision_start_token_id": token("<|vision_start|>"),
        "vision_end_token_id": token("<|vision_end|>"),
    }
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "out_hidden_size": 32}
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    if name == "qwen2":
        config: Any = Qwen2Config(**_SIZE, **_HEADS, **vocabulary)
        model_class: Any = Qwen2ForCausalLM
    elif name == "llama":
        config = LlamaConfig(**_SIZE, **_HEADS, **vocabulary)
        model_class = LlamaForCausalLM
    elif name == "qwen3_vl":
        config = Qwen3VLConfig(
            text_config={
                **_SIZE,
                **_HEADS,
                **vocabulary,
                "head_dim": 8,
                "rope_parameters": rope | {"mrope_section": [2, 1, 1]},
            },
            vision_config={
                **vision,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0],
            },
            **media,
        )
        model_class = Qwen3VLForConditionalGeneration
    elif name == "qwen2_vl":
        config = Qwen2VLConfig(
            text_config={**_SIZE, **_HEADS, **vocabulary, "rope_parameters": rope},
            vision_config={"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2},
            **media,
        )
        model_class = Qwen2VLForConditionalGeneration
    else:
        config = Qwen2_5_VLConfig(
            text_config={**_SIZE, **_HEADS, **vocabulary, "rope_parameters": rope},
            vision_config={
                **vision,
                "fullatt_block_indexes": [1],
                "window_size": 56,
                "tokens_per_second": 2,  # of the published models; the default of the class is 4
            },
            **media,
        )
        model_class = Qwen2_5_VLForConditionalGeneration
    return model_class._from_config(config, attn_implementation=attention, dtype=torch.float32).eval()
