"""The block `ms_swift` or `ms_swift_stream` of docs/trainers.md, with the settings of the run."""

import sys
from typing import Any

from swift.pipelines.train.sft import SwiftSft

from tests.trainers.derived import block, recorded
from tests.trainers.huggingface.run import latest
from tests.trainers.recorder import Spec


def main(spec: Spec) -> None:
    settings = {"output_dir": spec.checkpoints, "add_version": "false", "use_cpu": "true", "save_steps": 1}
    settings |= {"num_train_epochs": spec.epochs, "learning_rate": spec.learning_rate, "lr_scheduler_type": "constant"}
    settings |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": spec.accumulation}
    settings |= {"max_grad_norm": 0, "report_to": "none", "torch_dtype": "float32", "gradient_checkpointing": "false"}
    settings |= {"attn_impl": "sdpa", "dataloader_num_workers": 0, "check_model": "false"}
    if spec.resume:
        settings["resume_from_checkpoint"] = latest(spec)
    begin = SwiftSft.__init__

    def with_settings(self: Any, options: list[str]) -> None:
        begin(self, [*options, *(part for name, value in settings.items() for part in (f"--{name}", str(value)))])

    SwiftSft.__init__ = with_settings
    with recorded(spec):
        exec(block("ms_swift_stream" if spec.kind else "ms_swift"), {"__name__": "__main__"})


if __name__ == "__main__":
    main(Spec.read(sys.argv[1]))
