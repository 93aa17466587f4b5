"""Models that do not keep the samples of a row apart are refused, and the table says what the test finds."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformers
from isolation_table import family, with_kernels
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

from energon_packed import ChatEncoder, IsolationCheckCallback, IsolationError, check_isolation
from tests import oldest
from tests.internals import isolation, isolation_table, measure, short_row
from tests.loading.models import tiny_model

_SMALL = {"vocab_size": 200, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def llama() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**_SMALL, intermediate_size=64))


def opt() -> Any:
    return OPTForCausalLM(OPTConfig(**_SMALL, ffn_dim=64, word_embed_proj_dim=32))


def test_a_clean_model_passes_in_any_dtype_and_keeps_its_mode() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = llama().to(dtype).eval()
        model.model.layers[0].train()
        assert not check_isolation(model).leaks
        assert not model.training
        assert model.model.layers[0].training


def test_qwen2_5_vl_is_refused_in_the_release_in_which_it_leaks(encoder: ChatEncoder) -> None:
    with pytest.raises(IsolationError, match="does not keep") if oldest.TRANSFORMERS else nullcontext():
        check_isolation(tiny_model("qwen2_5_vl", encoder, "sdpa"))


def test_withheld_boundaries_are_seen() -> None:
    model = llama()
    batch = short_row(model)
    inputs = {"input_ids": batch.input_ids, "position_ids": torch.arange(batch.input_ids.shape[1])[None]}
    assert measure(model, inputs, batch.cu_seqlens.tolist()).leaks


def test_a_row_has_samples_of_the_lengths_that_are_passed() -> None:
    """As in tools/bench_gpu.py: kernels need longer samples than the row of a check."""
    assert short_row(llama(), (130, 64)).cu_seqlens.tolist() == [0, 130, 194]


def test_special_tokens_stay() -> None:
    """An image token without its image would be an error of the model."""
    model = llama()
    batch = short_row(model)
    special = batch.input_ids[0, 1] = model.config.eos_token_id
    seen: list[torch.Tensor] = []
    model.get_input_embeddings().register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    check_isolation(model, batch)
    assert [int(ids[0, 1]) for ids in seen] == [special] * 3
    assert int(seen[1][0, 0]) != int(batch.input_ids[0, 0])


def test_a_leaking_model_is_refused_by_name_and_by_test(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(IsolationError, match=r"OPTForCausalLM with attn_implementation='sdpa' does not keep .* in"):
        IsolationCheckCallback().on_train_begin(None, None, None, model=opt())
    unknown = isolation_table() | {"families": {}}
    monkeypatch.setattr(isolation, "isolation_table", lambda: unknown)
    with pytest.raises(IsolationError, match="OPTForCausalLM .* other tokens in the first sample change the logits"):
        check_isolation(opt())


@pytest.mark.skipif(
    transformers.__version__ != isolation_table()["transformers"], reason="the table is of another release"
)
@pytest.mark.parametrize(
    ("model_type", "class_name", "result"),
    [
        ("llama", "LlamaForCausalLM", "clean"),
        ("afmoe", "AfmoeForCausalLM", "leaks"),
        ("bamba", "BambaForCausalLM", "leaks"),  # with its kernel
        ("zamba2", "Zamba2ForCausalLM", "kernel"),
        ("mamba", "MambaForCausalLM", "leaks"),
    ],
)
def test_the_table_is_what_the_scripts_find(model_type: str, class_name: str, result: str) -> None:
    """On this machine, and on a GPU for classes that need kernels."""
    found = with_kernels({class_name: family("text", model_type, class_name)})[class_name]
    assert found["eager"] == result
    known = isolation_table()["families"][class_name]
    names = ("sdpa", "eager", "with_kernel", "loss_logits")
    assert {name: known.get(name) for name in names} == {name: found.get(name) for name in names}
