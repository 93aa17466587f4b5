"""The public names, and that importing the package costs nothing."""

import subprocess
import sys

import energon_packed


def test_every_public_name_loads() -> None:
    for name in energon_packed.__all__:
        assert getattr(energon_packed, name) is not None


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import sys, energon_packed; assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
