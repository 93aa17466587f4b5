"""LoRA by PEFT: a resumed adapter equals that of an uninterrupted run, and the saved adapter loads."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import set_seed

from energon_packed import PackedDataset, PackedTrainer, check_isolation, packed_training_arguments
from tests.integrations.launched import tiny_qwen2
from tests.integrations.trainer_runs import QUIET


def trained(packs: Path, folder: Path, *, steps: int, resume: bool = False) -> Any:
    set_seed(0)
    options = LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    )
    model = get_peft_model(tiny_qwen2(), options)
    data = PackedDataset(packs)
    settings = QUIET | {
        "save_strategy": "steps",
        "save_steps": 2,
        "max_steps": steps,
        "per_device_train_batch_size": 1,
    }
    settings |= {"learning_rate": 1e-2, "lr_scheduler_type": "constant"}
    trainer = PackedTrainer(model, packed_training_arguments(str(folder), data, **settings), train_dataset=data)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(str(folder / "adapter"))
    return model.eval()


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: value for name, value in model.state_dict().items() if "lora" in name}


def test_a_resumed_adapter_equals_the_one_without_interruption(text_packs: list[Path], tmp_path: Path) -> None:
    whole = trained(text_packs[0], tmp_path / "whole", steps=4)
    trained(text_packs[0], tmp_path / "parts", steps=2)
    resumed = trained(text_packs[0], tmp_path / "parts", steps=4, resume=True)
    assert any(value.any() for name, value in weights(whole).items() if "lora_B" in name), "it was trained"
    for name, value in weights(whole).items():
        assert torch.equal(weights(resumed)[name], value), name


def test_the_saved_adapter_loads_and_keeps_samples_apart(text_packs: list[Path], tmp_path: Path) -> None:
    model = trained(text_packs[0], tmp_path, steps=2)
    loaded = PeftModel.from_pretrained(tiny_qwen2(), str(tmp_path / "adapter")).eval()
    ids = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
        assert not torch.equal(tiny_qwen2().eval()(ids).logits, model(ids).logits)
        assert loaded.merge_and_unload()(ids).logits == pytest.approx(model(ids).logits, abs=1e-5)
    assert not check_isolation(model).leaks
