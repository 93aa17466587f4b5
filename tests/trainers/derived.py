"""In `run.py` of a trainer derived from Trainer: run its block of docs/trainers.md with the settings of the run.

with recorded(spec):
    exec(block("llamafactory"), {"__name__": "__main__"})
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

from transformers import Trainer

from energon_packed import PackedTrainerMixin
from tests.docs.pages import code_block
from tests.trainers.recorder import RecordRows, Spec


def block(name: str) -> CodeType:
    """Return the block of docs/trainers.md with this title."""
    return compile(code_block("trainers.md", name), name, "exec")


@contextlib.contextmanager
def recorded(spec: Spec) -> Iterator[None]:
    """Record the training of a PackedTrainerMixin, in a folder with `tokens` and `model`, as the pages name them."""
    folder = Path(spec.out, f"folder{spec.rank}")
    (folder / "model").mkdir(parents=True)
    (folder / "tokens").symlink_to(spec.packs)
    for file in [*Path(spec.tokenizer).iterdir(), *Path(spec.model).iterdir()]:
        (folder / "model" / file.name).symlink_to(file)
    config = json.loads((folder / "model" / "config.json").read_text())
    (folder / "model" / "config.json").unlink()
    (folder / "model" / "config.json").write_text(json.dumps(config | {"attention_dropout": spec.dropout}))
    recorder, train = RecordRows(spec, PackedTrainerMixin), Trainer.train

    def finished(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        result = train(trainer, *args, **kwargs)
        recorder.finish(trainer.model.state_dict())
        return result

    Trainer.train = finished
    with contextlib.chdir(folder):
        yield
