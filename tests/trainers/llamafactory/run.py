"""The block `llamafactory` of docs/trainers.md, with the settings of the run."""

import os
import sys
import types
from importlib.machinery import ModuleSpec
from typing import Any

os.environ["DISABLE_VERSION_CHECK"] = "1"  # LLaMA-Factory 0.9.5 refuses this version of Transformers
# PyPI has no torchaudio for CPUs. LLaMA-Factory imports it, and uses it for sound alone.
sys.modules["torchaudio"] = types.ModuleType("torchaudio")
sys.modules["torchaudio"].__spec__ = ModuleSpec("torchaudio", None)

from llamafactory.train import tuner  # noqa: E402

from tests.trainers.derived import block, recorded  # noqa: E402
from tests.trainers.huggingface.run import arguments, latest  # noqa: E402
from tests.trainers.recorder import Spec  # noqa: E402


def main(spec: Spec) -> None:
    settings = arguments(spec) | {"output_dir": spec.checkpoints, "report_to": "none"}
    settings["resume_from_checkpoint"] = latest(spec) if spec.resume else None
    run_exp = tuner.run_exp

    def with_settings(options: dict[str, Any]) -> None:
        run_exp(options | settings)

    tuner.run_exp = with_settings
    with recorded(spec):
        exec(block("llamafactory"), {"__name__": "__main__"})


if __name__ == "__main__":
    main(Spec.read(sys.argv[1]))
