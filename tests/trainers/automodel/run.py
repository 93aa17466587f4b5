"""The recipe of docs/trainers.md for NeMo Automodel, with DDP on the CPU."""

import os
import sys
from pathlib import Path
from typing import Any

import yaml

os.environ["NEMO_ENABLE_USER_MODULES"] = "1"

import torch
from nemo_automodel._transformers import auto_model
from nemo_automodel.components.config._arg_parser import parse_args_and_load_config
from nemo_automodel.recipes.llm import train_ft

from tests.docs.pages import code_block
from tests.trainers.recorder import IGNORED, Recorder, Spec

# Automodel asks for GPUs also with gloo.
torch.cuda.reset_peak_memory_stats = lambda *_: None
torch.cuda.current_device = lambda: 0
apply_infrastructure = auto_model.apply_model_infrastructure
auto_model.apply_model_infrastructure = lambda **options: apply_infrastructure(**options | {"device": "cpu"})
# The norm of the gradients is a kernel of a GPU.
scale_gradients = train_ft.scale_grads_and_clip_grad_norm
train_ft.scale_grads_and_clip_grad_norm = lambda max_norm, *parts, **options: scale_gradients(None, *parts, **options)


class RecordingRecipe(train_ft.TrainFinetuneRecipeForNextTokenPrediction):
    """Records each micro batch."""

    def _forward_backward_step(
        self, idx: Any, batch: Any, *, loss_buffer: Any, num_label_tokens: Any, **options: Any
    ) -> Any:
        super()._forward_backward_step(
            idx, batch, loss_buffer=loss_buffer, num_label_tokens=num_label_tokens, **options
        )
        targets = int((batch["labels"] != IGNORED).sum())
        self.own.record(batch, float(loss_buffer[-1]) * num_label_tokens, targets=targets)


def settings(spec: Spec) -> dict[str, Any]:
    """The recipe of the page with the settings of this run."""
    recipe: dict[str, Any] = yaml.safe_load(code_block("trainers.md", "automodel.yaml"))
    recipe["dist_env"] = {"backend": "gloo", "timeout_minutes": 5}
    recipe["model"] |= {"pretrained_model_name_or_path": spec.model, "torch_dtype": "float32"}
    recipe["dataset"]["path"] = spec.packs
    recipe["step_scheduler"] |= {"global_batch_size": spec.accumulation * spec.world_size, "num_epochs": spec.epochs}
    recipe["optimizer"]["lr"] = spec.learning_rate
    recipe["checkpoint"]["checkpoint_dir"] = spec.checkpoints
    return recipe


def main(spec: Spec) -> None:
    file = Path(spec.out, f"recipe{spec.rank}.yaml")
    file.write_text(yaml.safe_dump(settings(spec)))
    recipe = RecordingRecipe(parse_args_and_load_config(str(file), argv=[]))
    recipe.setup()
    recorder = recipe.__dict__["own"] = Recorder(spec)
    recorder.watch(recipe.model_parts[0])
    recipe.run_train_validation_loop()
    recorder.finish(recipe.model_parts[0].state_dict())


if __name__ == "__main__":
    main(Spec.read(sys.argv[1]))
