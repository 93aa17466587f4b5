"""A model's configuration -> floating point operations of its forward pass, per token, squared length, and patch.

Sources: the appendix of D. Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", 2021,
and the modeling files of Transformers. A matrix of a x b needs 2 a b operations for each token. Norms, activations,
position embeddings and the softmax are left out.
"""

from math import prod
from typing import Any

from energon_packed.errors import ConfigError

# Models whose MLP has 2 matrices instead of 3 (a gate), and vision towers whose MLP has 3 instead of 2. A test counts
# the operations of every causal language model of Transformers.
_WITHOUT_GATE = (
    *("apertus", "arcee", "biogpt", "bloom", "codegen", "falcon", "git", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox"),
    *("gpt_neox_japanese", "gptj", "jais2", "mpt", "nanochat", "nemotron", "openai-gpt", "opt", "persimmon", "phi"),
    *("starcoder2", "trocr", "xglm", "xlm"),
)
# Models with further layers, or with widths that differ by layer.
_OTHER_LAYERS = (
    *(
        "afmoe",
        "beam",
        "cpmant",
        "ctrl",
        "doge",
        "electra",
        "hrm_text",
        "lfm2",
        "mimo_v2_flash",
        "mllama_text_model",
        "moshi",
    ),
    *("prophetnet", "reformer", "rembert", "roc_bert", "xlnet"),
)
_GATED_TOWERS = ("qwen2_5_vl_vision", "qwen2_5_omni_vision_encoder", "pixtral", "glm4v_vision")
# Names of the same number in configurations of Transformers and Megatron.
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "num_moe_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "moe_router_topk", "moe_topk", "moe_k")
_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
_SHARED_SIZE = (
    *("shared_expert_intermediate_size", "shared_intermediate_size", "moe_shared_expert_intermediate_size"),
)
# Towers that resize or cut every image to `image_size`, so that attention has the same cost for every patch.
_FIXED_SIZE = ("clip_vision_model", "siglip_vision_model", "internvl_vision")


def text_flops(config: Any, vocab_size: int | None = None) -> tuple[float, float]:
    """Operations of the language model for a token, and for a squared sample length.

    Causal attention computes half of a square: 2 h for the scores and 2 h for the values, divided by 2. Layers with a
    sliding window count as if every sample were longer than the window. Of experts, the routed and shared experts of a
    token count.

    Raises:
        ConfigError: a number is missing, or the attention is of another kind.
    """
    _check_attention(config)
    hidden, layers = _number(config, "hidden_size"), _number(config, "num_hidden_layers", "num_layers")
    heads = _number(config, "num_attention_heads")
    groups = _number(config, "num_key_value_heads", "num_query_groups", "num_kv_heads", default=heads)
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        groups = 1  # Falcon, GPT-BigCode
    width = _number(config, "head_dim", "kv_channels", default=hidden // heads)
    projections = 2 * hidden * width * (2 * heads + 2 * groups)  # queries and output, keys and values
    of_layers = sum(_mlp(config, hidden, layer) + projections for layer in range(layers))
    window = _number(config, "sliding_window", default=0)
    # Without `layer_types`, a window is of all layers (Mistral, Phi-3, StarCoder2).
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * layers
    sliding = sum(kind == "sliding_attention" for kind in kinds)
    attention = 4 * heads * width
    vocabulary = vocab_size or _number(config, "vocab_size", default=0)
    token = of_layers + attention * window * sliding + 2 * hidden * vocabulary
    return float(token), float(attention / 2 * (layers - sliding))


def vision_flops(config: Any, text: Any) -> tuple[float, float]:
    """Operations of the vision tower, with the layers that join it to the language model.

    Attention within windows counts full windows. Videos attend within a temporal patch.

    Args:
        config: of the vision tower.
        text: configuration of the language model.

    Returns:
        (operations for a patch, operations for the squared patches of an image).

    Raises:
        ConfigError: a number is missing.
    """
    kind = getattr(config, "model_type", "")
    layers = _number(config, "depth", "num_hidden_layers", "num_layers")
    hidden = _number(config, "embed_dim", "hidden_size")
    ratio = getattr(config, "mlp_ratio", None) or 4
    inner = _number(config, "intermediate_size", "ffn_hidden_size", default=int(hidden * ratio))
    is_gated = getattr(config, "gated_linear_unit", kind in _GATED_TOWERS)
    patch = layers * (8 * hidden**2 + 2 * (3 if is_gated else 2) * hidden * inner)
    size = _side(config, "patch_size")
    depth = _number(config, "temporal_patch_size", default=1)
    patch += 2 * hidden * _number(config, "in_channels", "num_channels", default=3) * depth * size**2
    full_layers, window = _attention_of_tower(config, kind, layers, size)
    patch += 4 * hidden * window * (layers - full_layers)
    return float(patch + _projector(config, kind, hidden, text)), float(4 * hidden * full_layers)


def audio_flops(config: Any, text: Any) -> float:
    """Operations of an audio encoder with the layers of Whisper for a position, with the projector.

    A position is two frames. Every file is padded to `max_source_positions`, so that attention has the same cost for
    each position; the projector has half of the positions, as in Qwen2-Audio.

    Raises:
        ConfigError: a number is missing.
    """
    hidden, layers = _number(config, "d_model"), _number(config, "encoder_layers")
    positions = _number(config, "max_source_positions")
    of_layers = 8 * hidden**2 + 4 * hidden * _number(config, "encoder_ffn_dim") + 4 * hidden * positions
    convolutions = 2 * 2 * 3 * _number(config, "num_mel_bins") * hidden + 2 * 3 * hidden**2
    return float(layers * of_layers + convolutions + hidden * _number(text, "hidden_size"))


def _attention_of_tower(config: Any, kind: str, layers: int, size: int) -> tuple[int, int]:
    """Layers with attention over an image of any size, and patches of a window of the other layers."""
    full = getattr(config, "fullatt_block_indexes", None)
    if full is not None:
        return len(full), (_number(config, "window_size") // size) ** 2
    if kind in _FIXED_SIZE:
        return 0, (_side(config, "image_size") // size) ** 2
    return layers, 0


def _projector(config: Any, kind: str, hidden: int, text: Any) -> float:
    """Operations for a patch of the layers between the vision tower and the language model."""
    out = _number(text, "hidden_size")
    merge = _number(config, "spatial_merge_size", default=2 if kind == "internvl_vision" else 1) ** 2
    if getattr(config, "spatial_merge_size", None) is None:  # two layers, the first from the tower to the model
        return (2 * hidden * merge * out + 2 * out * out) / merge
    mergers = 1 + len(getattr(config, "deepstack_visual_indexes", None) or ())
    return mergers * (2 * (hidden * merge) ** 2 + 2 * hidden * merge * out) / merge


def _mlp(config: Any, hidden: int, layer: int) -> float:
    """Operations of the MLP of a layer for a token."""
    kind = getattr(config, "model_type", "")
    # BERT, BART and their relatives, as decoders, have no gate either.
    is_old = getattr(config, "is_decoder", False) or getattr(config, "is_encoder_decoder", False)
    matrices = 3 if getattr(config, "gated_linear_unit", kind not in _WITHOUT_GATE and not is_old) else 2
    experts = _number(config, *_EXPERTS, default=0)
    inner = _number(config, "intermediate_size", "ffn_hidden_size", "ffn_dim", default=4 * hidden)
    if not experts or not _has_experts(config, layer):
        return 2 * matrices * hidden * _number(config, "dense_intermediate_size", default=inner)
    of_expert = _number(config, "moe_intermediate_size", "moe_ffn_hidden_size", default=inner)
    routed = _number(config, *_CHOSEN) * of_expert
    shared = _number(config, *_SHARED_SIZE, default=0) or _number(config, *_SHARED, default=0) * of_expert
    return 2 * matrices * hidden * (routed + shared) + 2 * hidden * experts


def _has_experts(config: Any, layer: int) -> bool:
    frequency = getattr(config, "moe_layer_freq", None) or getattr(config, "moe_layer_interval", None) or 1
    if isinstance(frequency, list):
        return bool(frequency[layer])
    if (kinds := getattr(config, "mlp_layer_types", None)) is not None:
        return bool(kinds[layer] == "sparse")
    if layer < _number(config, "first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", default=0):
        return False
    if layer in (getattr(config, "mlp_only_layers", None) or ()):
        return False
    step = getattr(config, "decoder_sparse_step", None)
    return bool((layer + 1) % step == 0 if step else layer % frequency == 0)


def _check_attention(config: Any) -> None:
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    others = [*sorted(kinds)]
    if getattr(config, "kv_lora_rank", None) or getattr(config, "multi_latent_attention", False):
        others.append("multi-latent attention")
    if getattr(config, "window_size", None):
        others.append("window_size")
    if getattr(config, "model_type", "") in _OTHER_LAYERS:
        others.append(f"the layers of {config.model_type}")
    if others:
        raise ConfigError(
            f"`config` must have full attention or sliding windows in `layer_types`, got {', '.join(others)}. Measure "
            "the costs with CostModel.fit."
        )


def _side(config: Any, name: str) -> int:
    """A size that is a number, or (height, width)."""
    value = getattr(config, name, None)
    return round(prod(value) ** 0.5) if isinstance(value, list | tuple) else _number(config, name)


def _number(config: Any, *names: str, default: int | None = None) -> int:
    """The first attribute of these that is set."""
    for name in names:
        if (value := getattr(config, name, None)) is not None:
            return int(value)
    if default is None:
        raise ConfigError(
            f"`config` must have {' or '.join(f'`{name}`' for name in names)}, got {type(config).__name__}. Measure "
            "the costs with CostModel.fit."
        )
    return default
