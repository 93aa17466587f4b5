"""Data of several tests of the loaders."""

from pathlib import Path

import pytest

from tests.loading.flows import energon_folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A packed folder with each sample of `FEATURES` in a pack."""
    return energon_folder(tmp_path_factory.mktemp("tokens"))
