"""LLaMA-Factory: `neat_packing`, with `tokenized_path` as its cache."""

import json
import os
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

from contract import Spec, cache_folder, run, watch_trainer, without_torchvision_operators

os.environ["DISABLE_VERSION_CHECK"] = "1"  # LLaMA-Factory 0.9.5 refuses this version of Transformers
# PyPI has no torchaudio for CPUs. LLaMA-Factory imports it, and uses it for sound alone.
sys.modules["torchaudio"] = types.ModuleType("torchaudio")
sys.modules["torchaudio"].__spec__ = ModuleSpec("torchaudio", None)
without_torchvision_operators()


def main(spec: Spec) -> None:
    """Prepare and train: `run_exp` tokenizes and packs before the training."""
    cache_folder(spec)
    from llamafactory.train.tuner import run_exp

    folder = Path(spec.folder)
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    columns = {"messages": "messages"} | ({"images": "images"} if spec.images else {})
    about = {"file_name": spec.records, "formatting": "sharegpt", "columns": columns}
    about["tags"] = tags | {"system_tag": "system"}
    (folder / "dataset_info.json").write_text(json.dumps({"conversations": about}), encoding="utf-8")
    watch_trainer(spec)
    run_exp(
        spec.arguments()
        | {
            "stage": "sft",
            "do_train": True,
            "finetuning_type": "full",
            "model_name_or_path": spec.model,
            "flash_attn": "sdpa",
            "disable_gradient_checkpointing": True,
            "dataset_dir": str(folder),
            "dataset": "conversations",
            "template": "qwen2_vl" if spec.images else "qwen",
            "cutoff_len": spec.seq_len,
            "neat_packing": True,
            "preprocessing_num_workers": 2,
            "tokenized_path": str(folder / "tokenized"),
            "image_max_pixels": spec.max_pixels,
            "image_min_pixels": spec.min_pixels,
            "freeze_vision_tower": False,
            "freeze_multi_modal_projector": False,
            "resume_from_checkpoint": spec.checkpoint,
            "overwrite_output_dir": True,
        }
    )


if __name__ == "__main__":
    run(main, "llamafactory", "transformers", "datasets")
