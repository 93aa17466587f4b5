"""The public names, and that importing the package costs nothing."""

import subprocess
import sys

import pytest

import energon_packed
from tests.internals import energon_release


def test_every_public_name_loads() -> None:
    for name in energon_packed.__all__:
        assert getattr(energon_packed, name) is not None


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import sys, energon_packed; assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("installed", ["8.0.0", "10.1rc2"])
def test_releases_of_energon_with_other_names_are_refused(monkeypatch: pytest.MonkeyPatch, installed: str) -> None:
    energon_release.check_energon()
    monkeypatch.setattr(energon_release, "version", lambda _: installed)
    message = f"`megatron-energon` must be a version before 8, got {installed}. Run pip install 'megatron-energon<8'"
    with pytest.raises(energon_packed.ConfigError, match=message):
        energon_release.check_energon()
