"""Costs of rows: constants are measured, and computed from configurations as PyTorch counts the operations."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from energon_packed import ConfigError, CostModel, MapDistributor, RowSizes


def sizes_of(lengths: list[list[int]], patches: list[list[int]] | None = None, multiple: int = 1) -> RowSizes:
    return RowSizes.of_samples(lengths, patches or [[] for _ in lengths], multiple=multiple)


def test_sizes_follow_from_samples_and_images() -> None:
    sizes = sizes_of([[3, 5], [4]], [[2, 6], []], multiple=4)
    assert sizes.columns().tolist() == [[12, 80, 8, 40], [4, 16, 0, 0]]
    model = CostModel(token=1, square=10, patch=100, patch_square=1000)
    assert model.costs(sizes).tolist() == [12 + 800 + 800 + 40_000, 4 + 160]
    assert sizes[np.array([1])].tokens.tolist() == [4]
    joined = RowSizes.joined([sizes[:1], sizes, sizes[1:]], 4)
    assert joined.columns().tolist() == sizes.columns()[[0, 0, 1, 1]].tolist()


def test_with_tokens_a_row_costs_its_tokens_alone() -> None:
    class Rows(list[int]):
        def row_sizes(self) -> RowSizes:
            return sizes_of([[3, 5], [4]], [[2, 6], []])

    cost = MapDistributor(Rows([0, 1]), balance="tokens").order.cost
    assert cost is not None
    assert cost.costs(Rows().row_sizes()).tolist() == [8, 4]


def test_constants_are_measured() -> None:
    rng = np.random.default_rng(0)
    tokens, patches = rng.integers(100, 9000, 40), rng.integers(0, 5000, 40)
    squares, patch_squares = tokens * rng.integers(50, 9000, 40), patches * rng.integers(100, 4000, 40)
    sizes = RowSizes(tokens=tokens, squares=squares, patches=patches, patch_squares=patch_squares)
    truth = CostModel(token=2e-6, square=3e-10, patch=5e-7, patch_square=3e-10)
    found = CostModel.fit(sizes, truth.costs(sizes) * rng.uniform(0.98, 1.02, 40))
    for name, value in truth.constants().items():
        assert getattr(found, name) == pytest.approx(value, rel=0.15)
    alone = CostModel.fit(sizes, 1e-6 * tokens)
    assert (alone.token, alone.square, alone.patch) == pytest.approx((1e-6, 0, 0), abs=1e-12)
    with pytest.raises(ConfigError, match=r"`seconds` must be a time above 0 .*, got \[1\. 2\.\] for 40 rows"):
        CostModel.fit(sizes, [1.0, 2.0])
    with pytest.raises(ConfigError, match="must be a time above 0 for each of 3 or more rows"):
        CostModel.fit(sizes[np.arange(2)], [1.0, 2.0])
    # Long samples that are faster than their tokens: a cost below 0 would be the best fit.
    assert CostModel.fit(sizes, 1e-6 * tokens - 1e-11 * squares).square == 0
    for wrong in ([1.0, 2.0, 0.0], [1.0, 2.0, 3.0, 4.0]):
        with pytest.raises(ConfigError, match="must be a time above 0 for each of 3 or more rows"):
            CostModel.fit(sizes[np.arange(3)], wrong)
    zeros = RowSizes(**dict.fromkeys(["tokens", "squares", "patches", "patch_squares"], np.zeros(3, dtype=np.int64)))
    with pytest.raises(ConfigError, match="`sizes` must have tokens or patches, got 0 for all 3 rows"):
        CostModel.fit(zeros, [1.0, 2.0, 3.0])
    assert CostModel.fit(sizes[np.arange(3)], 1e-6 * tokens[:3]).token == pytest.approx(1e-6)
    with pytest.raises(ConfigError, match="`patch` must be a number >= 0, got -1"):
        CostModel(patch=-1)
    with pytest.raises(ConfigError, match="`square` must be a number >= 0, got -1"):
        CostModel(square=-1)
    with pytest.raises(ConfigError, match="`token` must be a number >= 0, got nan"):
        CostModel(token=float("nan"))
    with pytest.raises(ConfigError, match="`token`, `square`, `patch` and `patch_square` must not all be 0"):
        CostModel(token=0, square=0, patch=0)


def counted(model: Any, **inputs: Any) -> int:
    """Floating point operations of a forward pass, as PyTorch counts them."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(**inputs, use_cache=False)
    return int(counter.get_total_flops())


def text_settings(**changes: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 96, "intermediate_size": 200, "num_hidden_layers": 3, "num_attention_heads": 4}
    return {**sizes, "num_key_value_heads": 2, "vocab_size": 500, "max_position_embeddings": 4096, **changes}


TEXT_MODELS = {
    "qwen2": {},
    "llama": {"head_dim": 32},
    "qwen3": {"head_dim": 48, "num_hidden_layers": 2},
    "gpt_neox": {"num_key_value_heads": 4},
    "qwen3_moe": {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": [1]},
    "qwen2_moe": {
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 2,
    },
}


@pytest.mark.parametrize("name", TEXT_MODELS)
def test_a_language_model_costs_what_pytorch_counts(name: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(name, **text_settings(**TEXT_MODELS[name]))
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    lengths = [16, 64, 160, 320]
    flops = [counted(model, input_ids=torch.ones(1, length, dtype=torch.int64)) for length in lengths]
    measured = CostModel.fit(sizes_of([[length] for length in lengths]), np.array(flops))
    computed = CostModel.from_config(config)
    # Three passes; the eager attention computes whole squares, of which half is masked.
    assert computed.token == pytest.approx(3 * measured.token, rel=0.02)
    assert 2 * computed.square == pytest.approx(3 * measured.square, rel=0.02)
    assert (computed.patch, computed.patch_square) == (0, 0)


VISION_MODELS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"embed_dim": 64, "hidden_size": 96, "depth": 3, "num_heads": 4},
    "qwen2_5_vl": {
        "hidden_size": 64, "out_hidden_size": 96, "depth": 4, "num_heads": 4, "intermediate_size": 150,
        "fullatt_block_indexes": [1, 3], "window_size": 112,
    },
    "qwen3_vl": {
        "hidden_size": 64, "out_hidden_size": 96, "depth": 3, "num_heads": 4, "intermediate_size": 150,
        "deepstack_visual_indexes": [0, 2], "num_position_embeddings": 64,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", VISION_MODELS)
def test_a_vision_tower_costs_what_pytorch_counts(name: str) -> None:
    from transformers import AutoConfig, AutoModel

    heads = {"rope_type": "default", "mrope_section": [4, 4, 4], "rope_theta": 10000.0}
    config = AutoConfig.for_model(
        name, text_config=text_settings(rope_parameters=heads), vision_config=VISION_MODELS[name]
    )
    tower = AutoModel.from_config(config, attn_implementation="eager").visual.eval()
    vision = config.vision_config
    dim = 3 * vision.temporal_patch_size * vision.patch_size**2
    grids = [(1, 8, 8), (1, 16, 16), (1, 16, 24), (1, 32, 32), (3, 16, 16)]
    flops = []
    for grid in grids:
        pixels = torch.zeros(int(np.prod(grid)), dim)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            tower(pixels, grid_thw=torch.tensor([grid]))
        flops.append(counter.get_total_flops())
    sizes = sizes_of([[] for _ in grids], [[height * width] * time for time, height, width in grids])
    measured = CostModel.fit(sizes, np.array(flops))
    computed, frozen = (CostModel.from_config(config, trains_vision=trains) for trains in (True, False))
    assert computed.patch == pytest.approx(3 * measured.patch, rel=0.02)
    assert computed.patch_square == pytest.approx(3 * measured.patch_square, rel=0.02)
    assert (frozen.patch, frozen.patch_square) == (computed.patch / 3, computed.patch_square / 3)
    assert frozen.token == computed.token == CostModel.from_config(config.get_text_config()).token


def test_towers_of_fixed_size_have_no_squares() -> None:
    from transformers import AutoConfig, CLIPVisionConfig, CLIPVisionModel

    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    vision = CLIPVisionConfig(**small, image_size=112, patch_size=14)
    config = AutoConfig.for_model("llava", text_config=text_settings(model_type="llama"), vision_config=vision)
    tower = CLIPVisionModel._from_config(vision, attn_implementation="eager").eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        tower(torch.zeros(1, 3, 112, 112))
    model = CostModel.from_config(config, trains_vision=False)
    joining = 2 * 64 * 96 + 2 * 96 * 96
    assert model.patch_square == 0
    assert model.patch - joining == pytest.approx(counter.get_total_flops() / 64, rel=0.03)  # and a class token


def test_an_audio_encoder_costs_what_pytorch_counts() -> None:
    from transformers import AutoConfig, Qwen2AudioForConditionalGeneration

    sizes = {"d_model": 64, "encoder_layers": 3, "encoder_attention_heads": 4, "encoder_ffn_dim": 160}
    config = AutoConfig.for_model(
        "qwen2_audio", audio_config=sizes | {"num_mel_bins": 128}, text_config=text_settings(model_type="qwen2")
    )
    model = Qwen2AudioForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        features = model.model.audio_tower(torch.zeros(2, 128, 3000)).last_hidden_state
        model.model.multi_modal_projector(features)
    computed, frozen = (CostModel.from_config(config, trains_vision=trains) for trains in (True, False))
    assert frozen.patch == pytest.approx(counter.get_total_flops() / 3000, rel=0.01)
    assert (computed.patch, computed.patch_square) == (3 * frozen.patch, 0)
    assert frozen.token == computed.token > 0


def test_configurations_of_megatron_cost_the_same() -> None:
    from megatron.core.transformer.transformer_config import TransformerConfig
    from transformers import AutoConfig

    same = {"num_layers": 3, "hidden_size": 96, "num_attention_heads": 4}
    dense = TransformerConfig(**same, ffn_hidden_size=200, num_query_groups=2, gated_linear_unit=True)
    expected = CostModel.from_config(AutoConfig.for_model("qwen2", **text_settings()))
    assert CostModel.from_config(dense, vocab_size=500) == expected
    assert CostModel.from_config(dense).token == expected.token - 3 * 2 * 96 * 500
    tower = TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4, ffn_hidden_size=128)
    both = CostModel.from_config(dense, SimpleNamespace(**vars(tower), patch_size=14), vocab_size=500)
    assert both.patch_square == 3 * 4 * 64 * 2
    experts = {"num_moe_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 64, "add_bias_linear": False}
    layers = [CostModel.from_config(TransformerConfig(**same, **experts, moe_layer_freq=f)) for f in (1, [1, 0, 0])]
    assert layers[0].token != layers[1].token


def test_other_attention_is_refused_in_one_line() -> None:
    settings = text_settings()
    linear = SimpleNamespace(**settings, layer_types=["linear_attention", "full_attention", "full_attention"])
    with pytest.raises(ConfigError, match="`config` must have full attention .*, got linear_attention. Measure"):
        CostModel.from_config(linear)
    with pytest.raises(ConfigError, match="got multi-latent attention"):
        CostModel.from_config(SimpleNamespace(**settings, kv_lora_rank=8))
    with pytest.raises(ConfigError, match="`config` must have `hidden_size`, got SimpleNamespace"):
        CostModel.from_config(SimpleNamespace())
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    sliding = CostModel.from_config(SimpleNamespace(**settings, layer_types=kinds, sliding_window=32))
    plain = CostModel.from_config(SimpleNamespace(**settings))
    assert sliding.square == pytest.approx(plain.square * 2 / 3)
    assert sliding.token == plain.token + 3 * 4 * 96 * 32
