"""Costs of every causal language model of Transformers, against the operations that PyTorch counts in tiny models.

`ENERGON_PACKED_MODELS` is the number of model types; by default the first ones of `FIRST`, which take a second each.
"""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from tiny_models import tiny_config, tiny_model
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from energon_packed import ConfigError, CostModel, RowSizes

# Models with a window and no `layer_types`, without a gate, with shared keys and values, and with experts.
FIRST = (
    *("mistral", "phi3", "starcoder2", "apertus", "arcee", "nanochat", "persimmon", "mpt", "gpt_bigcode", "falcon"),
    *("bart", "ernie4_5_moe"),
)
TYPES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, key=lambda name: (*[name != one for one in FIRST], name))
COUNT = int(os.environ.get("ENERGON_PACKED_MODELS", "12"))
EQUAL, REFUSED, UNTESTED = "equal", "refused", "no tiny model"
# Other attention than full attention and sliding windows, or further layers.
OTHER_ATTENTION = {
    *("axk1", "axk2", "bailing_hybrid", "bamba", "blt", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4"),
    *("falcon_mamba", "glm4_moe_lite", "glm_moe_dsa", "gpt_neo", "granitemoehybrid", "hy_v4", "inkling2_text"),
    *("inkling_text", "jamba", "kimi_linear", "lfm2_moe", "lfm3", "llama4", "llama4_text", "longcat_flash", "mamba"),
    *("mamba2", "minicpm3", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text"),
    *("qwen3_5_text", "qwen3_next", "qwen4_exp", "qwen4_exp_text", "recurrent_gemma", "rwkv", "xlstm", "youtu"),
    *("zamba", "zamba2", "zaya"),
}
OTHER_LAYERS = {
    *("afmoe", "beam", "cpmant", "ctrl", "doge", "electra", "hrm_text", "lfm2", "mimo_v2_flash", "mllama", "moshi"),
    *("prophetnet", "reformer", "rembert", "roc_bert", "xlnet"),
}
# The general tiny configuration fails, or the model fails with it.
NO_TINY_MODEL = {
    *("cohere_compass_text", "dbrx", "dots1", "dots3_note", "dots3_note_text", "falcon_h1", "gemma3n", "gemma3n_text"),
    *("gemma4_assistant", "gemma4_unified_assistant", "hunyuan_v1_dense", "hunyuan_v1_moe", "ministral", "musicgen"),
    *("musicgen_melody", "xmod"),
}


def expected(model_type: str) -> str:
    if model_type in NO_TINY_MODEL:
        return UNTESTED
    return REFUSED if model_type in OTHER_ATTENTION | OTHER_LAYERS else EQUAL


def parts(config: Any) -> Iterator[Any]:
    """The configuration and the configurations of its parts."""
    yield config
    for name in config.sub_configs:
        if getattr(config, name, None) is not None:
            yield from parts(getattr(config, name))


def tiny(model_type: str, window: int) -> tuple[type[Any], Any]:
    """Model class and configuration; eager attention computes whole squares, so the window is the length."""
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    model_class = getattr(transformers, name if isinstance(name, str) else name[0])
    config = tiny_config(model_type, model_class)
    for part in parts(config):
        if hasattr(part, "sliding_window"):
            part.sliding_window = window
    config._experts_implementation = "eager"  # PyTorch does not count the operations of the other implementations
    return model_class, config


def tokens(length: int) -> torch.Tensor:
    return (torch.arange(length) % 190 + 5)[None]


def ratio(model_type: str, length: int) -> float:
    """Computed by counted operations of a forward pass with a sample of `length` tokens."""
    model_class, config = tiny(model_type, length)
    costs = CostModel.from_config(config)
    model = tiny_model(model_class, config, "eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=tokens(length), use_cache=False)
    computed = costs.costs(RowSizes.of_samples([[length]], [[]]))[0] + costs.square * length**2  # the masked half
    return float(computed) / 3 / counter.get_total_flops()


def outcome(model_type: str) -> str:
    try:
        ratios = [ratio(model_type, length) for length in (16, 96)]
    except ConfigError:
        return REFUSED
    except Exception as error:  # whatever a model raises
        return UNTESTED if expected(model_type) == UNTESTED else f"{type(error).__name__}: {error}"
    return EQUAL if all(0.95 < value < 1.05 for value in ratios) else str(ratios)


@pytest.mark.parametrize("model_type", TYPES[:COUNT])
def test_a_model_type_costs_what_pytorch_counts_or_is_refused(model_type: str) -> None:
    assert outcome(model_type) == expected(model_type)


@pytest.mark.parametrize("model_type", ["mistral", "mixtral", "phi3", "starcoder2"])
def test_a_window_without_layer_types_is_of_all_layers(model_type: str) -> None:
    """The model does not see tokens before its windows, and its squares cost nothing."""
    model_class, config = tiny(model_type, 4)
    assert getattr(config, "layer_types", None) is None
    model = tiny_model(model_class, config, "eager")
    first, other = tokens(64), tokens(64)
    other[0, 0] += 1
    with torch.no_grad():
        last = [model(input_ids=ids, use_cache=False).logits[0, -1] for ids in (first, other)]
    assert torch.equal(*last)
    windows = CostModel.from_config(config)
    config.sliding_window = None
    full = CostModel.from_config(config)
    assert windows.square == 0 < full.square
    assert windows.token == pytest.approx(full.token + 2 * full.square * 4)
