"""The data of all trainers, and which tests `make test` runs: those of the development environment."""

from pathlib import Path
from typing import Any

import pytest

from tests.integrations.conftest import short_packs
from tests.trainers.harness import Data

__all__ = ["short_packs", "trainer_data"]

# `make test-trainers` runs each of these folders in an environment of its own.
collect_ignore = [file.parent.name for file in Path(__file__).parent.glob("*/requirements.txt")]


@pytest.fixture(scope="session")
def trainer_data(tmp_path_factory: Any) -> Data:
    return Data(tmp_path_factory.mktemp("trainers"))
