"""transformers.Trainer: a callback that checks isolation before the first step."""

from typing import Any

from transformers import TrainerCallback

from energon_packed.integrations.isolation import check_isolation


class IsolationCheck(TrainerCallback):
    """Runs `check_isolation` on the model when training begins: `Trainer(..., callbacks=[IsolationCheck()])`.

    Raises:
        IsolationError: the model does not keep packed samples apart.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, **kwargs: Any) -> None:
        """Check once; every process does the same."""
        check_isolation(model)
