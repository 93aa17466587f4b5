"""The public names, and that importing the package costs nothing."""

import subprocess
import sys

import pytest

import energon_packed
from tests.internals import libraries, main


def test_every_public_name_loads() -> None:
    for name in energon_packed.__all__:
        assert getattr(energon_packed, name) is not None


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import sys, energon_packed; assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("installed", ["8.0.0", "10.1rc2"])
def test_releases_of_energon_with_other_names_are_refused(monkeypatch: pytest.MonkeyPatch, installed: str) -> None:
    libraries.check_energon()
    monkeypatch.setattr(libraries, "version", lambda _: installed)
    message = f"`megatron-energon` must be a version before 8, got {installed}. Run pip install 'megatron-energon<8'"
    with pytest.raises(energon_packed.ConfigError, match=message):
        libraries.check_energon()


def test_windows_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(sys, "argv", ["energon-packed", "--version"])
    with pytest.raises(SystemExit, match="1"):
        main()
    message = "energon-packed runs on Linux and macOS, got Windows. Use the Windows Subsystem for Linux (WSL 2)."
    assert capsys.readouterr().err == f"error: {message}\n"
