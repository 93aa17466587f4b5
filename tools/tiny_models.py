"""Create a tiny random model of any family of the installed Transformers, by shrinking its default configuration.

All widths are divided by the same number, so that heads, projections and rotary parts still fit together. Numbers of
layers and experts, windows and vocabularies become small. One layer of every kind in the default is kept.
"""

import re
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig

DIVISOR = 8
VOCABULARY = 400
_WIDTH = re.compile(
    r"hidden_size|_dim$|_dims$|^dim$|d_model|d_inner|d_ssm|d_ff|d_kv|n_embd|n_inner|intermediate|_rank$|width|d_state|d_head|head_size"
    r"|ffn|embed_dim|projection_size|_channels$|conv_dim|state_size|embedding_size|mlp_dim|hidden_dim|_size_per_|mrope_section"
    r"|hidden_channels|xdrope_section|inner_size|hidden_features|mlp_hidden|nope_head|rope_head|hidden_act_dim|qkv_dim"
)
_KEPT = re.compile(
    r"patch|image_size|kernel|window|chunk|max_|in_channels|num_channels|vocab|merge|temporal|dim_ratio"
)
_LAYERS = re.compile(
    r"(^|_)(num_hidden_layers|num_layers|n_layers?|depth|encoder_layers|decoder_layers|num_blocks|layers|num_.*_layers)$"
)
_NO_LAYERS = re.compile(r"nextn|mtp|shared_layers|kv_shared")
_EXPERTS = re.compile(r"(num_experts|n_routed_experts|num_local_experts|moe_num_experts|n_experts)$")
_CHOSEN = re.compile(r"(per_tok|top_k|topk|num_selected_experts|moe_k|experts_per_token)$")
_GROUPS = re.compile(r"^(n_group|topk_group|num_expert_groups?)$")
_TOKEN = re.compile(r"token.*(_id|_ids|_index|_idx)$|_(id|index)_token$|^(image|video|audio).*_id$")
_LAYER_INDICES = re.compile(r"layer.*(ids|idx|indices|indexes)|_index(es)?$|_layers$|layer_indices")
_SMALL = {
    "sliding_window": 4, "attention_window_size": 4, "local_attention": 4, "window_size": 4, "index_topk": 4,
    "max_position_embeddings": 512, "n_positions": 512, "n_ctx": 512, "max_seq_len": 512, "max_sequence_length": 512,
    "first_k_dense_replace": 1, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
    "expert_layer_offset": 1, "full_attention_interval": 2, "moe_layer_start_index": 1, "layerdrop": 0.0,
    "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0, "num_attn_mem_blocks": 2, "num_mem_blocks": 1,
}  # fmt: skip
_SPECIAL: dict[str, dict[str, Any]] = {
    name: {"is_decoder": True}
    for name in [
        "bert",
        "bert-generation",
        "big_bird",
        "camembert",
        "data2vec-text",
        "electra",
        "ernie",
        "megatron-bert",
        "rembert",
        "roberta",
        "roberta-prelayernorm",
        "roc_bert",
        "roformer",
        "reformer",
        "xlm-roberta",
        "xlm-roberta-xl",
        "xmod",
    ]
}
_SPECIAL |= {"big_bird": {"is_decoder": True, "attention_type": "original_full"}, "xlm": {"causal": True}}
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
_SPECIAL |= {name: _ROPE for name in ("ministral", "hunyuan_v1_dense", "hunyuan_v1_moe")}
_SPECIAL |= {
    "deepseek_v2": {"num_experts_per_tok": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "nemotron": {"num_key_value_heads": 48},
}


def tiny_config(
    model_type: str, model_class: type[Any] | None, settings: dict[str, Any] | None = None
) -> PreTrainedConfig:
    """Create a small configuration of a model type, or of its text part if the class is a text model.

    Args:
        model_class: class of the model; None keeps the whole configuration.
        settings: values that replace the small ones; a dictionary under the name of a part changes that part.
    """
    config = _shrunk(CONFIG_MAPPING[model_type], _SPECIAL.get(model_type, {}) | (settings or {}))
    return config if model_class is None or isinstance(config, model_class.config_class) else config.get_text_config()


def tiny_model(model_class: type[Any], config: PreTrainedConfig, attention: str) -> Any:
    """Create a float32 model on the CPU, with weights that are large enough for every path to affect the output.

    Raises:
        Exception: the family does not support this configuration or attention implementation.
    """
    torch.manual_seed(0)
    model = model_class._from_config(config, attn_implementation=attention, dtype=torch.float32)
    for module in model.modules():
        section, frequencies = getattr(module, "mrope_section", None), getattr(module, "inv_freq", None)
        if isinstance(section, list | tuple) and frequencies is not None and sum(section) > frequencies.shape[-1]:
            # The sections of M-RoPE must sum to the number of frequencies: keep their proportions.
            small = [size * frequencies.shape[-1] // sum(section) for size in section]
            small[-1] += frequencies.shape[-1] - sum(small)
            module.mrope_section = small
    for parameter in model.parameters():
        if parameter.ndim >= 2 and parameter.is_floating_point():
            # Standard deviation 1 / sqrt(fan_in) keeps the variance of activations through the layers.
            fan_in = parameter[0].numel() if parameter.ndim > 2 else parameter.shape[-1]
            torch.nn.init.normal_(parameter, std=min(1.0, fan_in**-0.5))
    return model.eval()


def _shrunk(config_class: type[PreTrainedConfig], special: dict[str, Any]) -> PreTrainedConfig:
    default = config_class()
    values = {name: value for name, value in default.to_dict().items() if name in _parameters(default)}
    subs = {name: getattr(default, name) for name in config_class.sub_configs if getattr(default, name, None)}
    for name in special.keys() & config_class.sub_configs.keys() - subs.keys():  # a part that the default omits
        subs[name] = CONFIG_MAPPING[special[name].pop("model_type")]()
    values = {name: value for name, value in values.items() if name not in subs}
    width = next((values[n] for n in ("hidden_size", "d_model", "n_embd", "dim") if isinstance(values.get(n), int)), 0)
    divisor = DIVISOR if width >= 256 or subs else 1
    small = {name: _small(name, value, divisor) for name, value in values.items()}
    per_layer, layers = _per_layer(values)
    small = {name: _layers_of(name, value, small[name], layers) for name, value in values.items()} | per_layer
    changed = {name: value for name, value in small.items() if value != values[name]}
    parts = {name: _shrunk(type(sub), special.get(name, {})) for name, sub in subs.items()}
    return config_class(**{**changed, **special, **parts})


def _parameters(config: PreTrainedConfig) -> set[str]:
    base = set(PreTrainedConfig().to_dict()) - {"pad_token_id", "bos_token_id", "eos_token_id"}
    return set(config.to_dict()) - base - {"model_type", "transformers_version", "_name_or_path"}


def _small(name: str, value: Any, divisor: int) -> Any:
    if name == "per_layer_config":
        return {}
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    if isinstance(value, dict):
        return {key: _small(str(key), inside, divisor) for key, inside in value.items()}
    if _TOKEN.search(name):
        return _token(name, value)
    if name in _SMALL:
        return min(value, _SMALL[name])
    if name.endswith("vocab_size"):
        return min(value, VOCABULARY)
    if _EXPERTS.search(name):
        return min(value, 4)
    if _CHOSEN.search(name):
        return min(value, 2)
    if _GROUPS.search(name):
        return min(value, 1)
    if _WIDTH.search(name) and not _KEPT.search(name):
        if isinstance(value, list):
            return [_divided(width, divisor) for width in value]
        return _divided(value, divisor)
    return value


def _divided(value: Any, divisor: int) -> Any:
    return max(value // divisor, 2) if isinstance(value, int) and value >= divisor else value


def _token(name: str, value: Any) -> Any:
    """Move a special token id to the upper half of the small vocabulary, which text never uses."""
    if isinstance(value, list):
        return [_token(name, token) for token in value]
    if isinstance(value, int) and value >= VOCABULARY // 2:
        return VOCABULARY // 2 + sum(name.encode()) % (VOCABULARY // 2)
    return value


def _per_layer(values: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """Cut lists with an entry per layer to one layer of every kind, and return them with the number of layers."""
    count = next((v for n, v in values.items() if _LAYERS.search(n) and isinstance(v, int)), 0)
    lists = {n: v for n, v in values.items() if isinstance(v, list) and count > 1 and len(v) == count}
    kinds = list(zip(*lists.values(), strict=True))
    kept = [layer for layer, kind in enumerate(kinds) if kind not in kinds[:layer]][:6] or [0]
    while len(kept) < 2 and count > 1:
        kept.append(kept[-1])
    periodic = any((n in _SMALL and "interval" in n) or "period" in n for n in values) and not lists
    layers = 4 if periodic else len(kept)
    return {n: [v[layer] for layer in kept] for n, v in lists.items()}, layers


def _layers_of(name: str, default: Any, value: Any, layers: int) -> Any:
    if isinstance(default, bool) or not isinstance(default, int | list):
        return value
    if _NO_LAYERS.search(name) and isinstance(default, int):
        return 0
    if _LAYERS.search(name) and isinstance(default, int):
        return min(default, layers)
    if _LAYER_INDICES.search(name) and isinstance(default, list) and all(isinstance(index, int) for index in default):
        return sorted({min(index, layers - 1) for index in default})
    return value


def model_types() -> list[tuple[str, str, str]]:
    """List (kind, model type, class name) of every causal language model and vision-language model."""
    from transformers.models.auto import modeling_auto as auto

    types: list[tuple[str, str, str]] = []
    for kind, mapping in (
        ("text", auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        ("vision", auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES),
    ):
        for model_type, name in mapping.items():
            types.append((kind, model_type, name if isinstance(name, str) else name[0]))
    return types
