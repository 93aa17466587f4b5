"""The configuration on docs/trainers.md for axolotl, with the settings of the run."""

import os
import sys

os.environ |= {"AXOLOTL_DO_NOT_TRACK": "1", "ACCELERATE_USE_CPU": "true"}

from pathlib import Path

import yaml
from axolotl.cli.train import do_cli

from tests.docs.pages import code_block
from tests.trainers.derived import recorded
from tests.trainers.huggingface.run import latest
from tests.trainers.recorder import Spec


def main(spec: Spec) -> None:
    config = yaml.safe_load(code_block("trainers.md", "axolotl.yaml"))
    config |= {"output_dir": spec.checkpoints, "num_epochs": spec.epochs, "learning_rate": spec.learning_rate}
    config |= {"gradient_accumulation_steps": spec.accumulation, "lr_scheduler": "constant", "max_grad_norm": 0.0}
    config |= {"save_steps": 1, "save_total_limit": 50, "max_memory": {"cpu": "1GiB"}, "bf16": False, "use_cpu": True}
    if spec.resume:
        config["resume_from_checkpoint"] = latest(spec)
    sys.argv = sys.argv[:1]  # axolotl reads the options of the command line
    with recorded(spec):
        Path("axolotl.yaml").write_text(yaml.safe_dump(config))
        do_cli("axolotl.yaml")


if __name__ == "__main__":
    main(Spec.read(sys.argv[1]))
