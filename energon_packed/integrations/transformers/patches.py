"""Changes of transformers.Trainer for which it has no public hook; seen in Transformers 5.16 to 5.23.

1. `Trainer._save` calls `save_pretrained` without `save_original_format`: the checkpoints of many models have the
   names of their first release, and a Trainer that resumes loads them without converting the names (QwenLM/Qwen3-VL
   issue 1763, ms-swift issue 7947). `names_of_model` saves the names of the model.
2. `Trainer._issue_warnings_after_load` only logs a warning if a checkpoint did not restore all weights.
   PackedTrainerMixin overrides it and raises.
3. A Trainer that resumes computes the epoch, the batches to skip and the last step from the packs of a step now. If
   the steps before the checkpoint had another number of packs, `_inner_training_loop` (path of the checkpoint),
   `_init_training_state` (epoch, batches to skip) and `_run_epoch` (batches of the continued epoch) change them.

1 and 2 are needed until a Trainer restores every weight that it saved. Then
`test_a_stock_trainer_that_would_lose_weights_is_refused` in `tests/integrations/test_checkpoints.py` fails.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from transformers import PreTrainedModel, Trainer

from energon_packed.libraries import private

_OVERRIDDEN = (
    "_save_checkpoint",
    "_issue_warnings_after_load",
    "_inner_training_loop",
    "_init_training_state",
    "_run_epoch",
)


def check_trainer() -> None:
    """Check that Trainer has the private methods that PackedTrainerMixin overrides.

    Raises:
        ConfigError: the installed Transformers has no such method, so the override would have no effect.
    """
    for name in _OVERRIDDEN:
        private(Trainer, name, "transformers")


def saves_own_names(model: Any) -> bool:
    """Whether a Trainer saves the names of the weights in the model: the user replaced `save_pretrained` of it."""
    return not isinstance(model, PreTrainedModel) or "save_pretrained" in vars(model)


@contextmanager
def names_of_model(model: Any) -> Iterator[None]:
    """Context manager in which `save_pretrained` of a model saves weights by their names in the model."""
    if saves_own_names(model):
        yield
        return
    model.save_pretrained = partial(model.save_pretrained, save_original_format=False)
    try:
        yield
    finally:
        del model.save_pretrained
