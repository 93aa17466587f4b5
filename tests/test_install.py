"""The wheel and the sdist, installed in environments of the packages that pyproject.toml requires, and no others."""

import os
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.processes import energon_packed
from tools.install_sizes import ROOT, packages, requirements

NAMES = """
import energon_packed
loaded = []
for name in energon_packed.__all__:
    try:
        getattr(energon_packed, name)
        loaded.append(name)
    except energon_packed.ConfigError as error:
        assert str(error).endswith("Run pip install 'energon-packed[train]'."), error
assert len(loaded) < len(energon_packed.__all__)
print(energon_packed.__file__, *loaded)
"""


def run(*command: object, folder: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COVERAGE"))}
    done = subprocess.run(list(map(str, command)), cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist of the files of git, and the wheel that is built of the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", folder, folder=ROOT)
    (sdist,) = folder.glob("*.tar.gz")
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", folder]
    run(sys.executable, "-m", "pip", "wheel", *options, sdist, folder=folder)
    return folder


@pytest.fixture(scope="module")
def install(tmp_path_factory: pytest.TempPathFactory, dist: Path) -> Callable[..., Path]:
    """A function that installs the wheel, and links the packages of extras; it returns the folder of commands."""

    def make(*extras: str) -> Path:
        folder = tmp_path_factory.mktemp("environment")
        venv.create(folder, symlinks=True)
        (site,) = folder.glob("lib/python*/site-packages")
        for package in packages([text for extra in ("", *extras) for text in requirements(extra)]).values():
            for name in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
                link = site / name
                if not link.exists():
                    link.symlink_to(Path(str(package.locate_file(name))))
        (wheel,) = dist.glob("*.whl")
        options = ["--quiet", "--no-deps", "--no-index", "--disable-pip-version-check"]
        run(
            sys.executable,
            "-m",
            "pip",
            "--python",
            folder / "bin" / "python",
            "install",
            *options,
            wheel,
            folder=folder,
        )
        return folder / "bin"

    return make


def test_packing_needs_neither_torch_nor_energon(install: Callable[..., Path], tmp_path: Path) -> None:
    commands = install("report")
    file, *loaded = run(commands / "python", "-c", NAMES, folder=tmp_path).split()
    assert Path(file).is_relative_to(commands.parent)
    assert {"pack", "pack_lengths", "ChatEncoder", "normalize"} <= set(loaded)

    tool = commands / "energon-packed"
    shown = run(tool, "demo", "--records", "30", folder=tmp_path)
    assert "megatron-energon and torch are not installed. Run pip install 'energon-packed[train]'." in shown
    source = tmp_path / "demo-out" / "source"
    options = ["--tokenizer", source / "tokenizer", "--max-reject-rate", "1"]
    assert "recommended: --seq-len" in run(tool, "lengths", source / "data.jsonl", *options, folder=tmp_path)
    assert "demo-0000" in run(tool, "inspect", "demo-out", folder=tmp_path)
    checks = run(tool, "verify", "demo-out", folder=tmp_path)
    assert "checks passed, 2 not checked" in checks, checks
    assert "are not installed" in checks
    run(tool, "report", "demo-out", folder=tmp_path)
    options += ["--image-processor", "Qwen2_5_VLProcessor", "--factor", "28", "--sample-class", "PackedTokensSample"]
    arguments = ["pack", source / "data.jsonl", *options, "--seq-len", "1024", "--max-reject-rate", "0.5"]
    run(tool, *arguments, "-o", "out", folder=tmp_path)
    here = energon_packed(*arguments, "-o", tmp_path / "here", "--shard-prefix", "out")
    assert here.returncode == 0, here.stderr
    (tar,) = tmp_path.glob("here/webdataset/*.tar")
    assert (tmp_path / "out" / "webdataset" / tar.name).read_bytes() == tar.read_bytes()
    page = (tmp_path / "report.html").read_text()
    assert "megatron-energon and torch are not installed" in page

    for command in (["steps", "demo-out", "--world-size", "2"], ["order", "check", "log"]):
        failed = subprocess.run([tool, *command], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert failed.returncode == 1
        assert failed.stderr == (
            "error: megatron-energon and torch are not installed. Run pip install 'energon-packed[train]'.\n"
        )


def test_the_extra_train_is_enough_to_load(install: Callable[..., Path], tmp_path: Path) -> None:
    tool = install("train") / "energon-packed"
    shown = run(tool, "demo", "--records", "30", folder=tmp_path)
    assert "no padding" in shown
    assert "all checks passed" in run(tool, "verify", "demo-out", folder=tmp_path)
