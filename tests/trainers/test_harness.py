"""The harness finds the errors that it is for; the loop without an error is in ddp/test_ddp.py."""

from pathlib import Path
from typing import Any

import pytest

from tests.trainers.harness import Data, prove, run

ERRORS = {
    "shifted labels": ("assert_losses", "targets are expected|the loss of the samples by themselves"),
    "leaked attention": ("assert_losses", "the loss of the samples by themselves is"),
    "lost sample": ("assert_every_sample", r"epoch 0: no row has \['s\d+', 's\d+'\]"),
    "drop": ("assert_every_sample", r"\{12\} rows of each rank"),
    "mean of means": ("assert_gradients", "the relative difference of the gradient is"),
}


@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_is_found(trainer_data: Data, tmp_path: Path, kind: str) -> None:
    check, message = ERRORS[kind]
    only_exact: Any = lambda name, spec: run(name, spec) if spec.gradients else None  # noqa: E731
    result = prove("ddp", trainer_data, tmp_path, title="", packages=(), kind=kind, make_run=only_exact)
    with pytest.raises(AssertionError, match=message):
        getattr(result, check)()


def test_a_run_that_starts_again_is_found(trainer_data: Data, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="killed after .*: (resumed after 0 rows|other rows after it)"):
        prove("ddp", trainer_data, tmp_path, title="", packages=(), kind="start again").assert_resumed()
