"""The examples in the docstrings of public names, after the first lines on the page of names."""

import doctest
import inspect
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import energon_packed
from tests.docs.pages import ROOT

# Their docstrings have examples that need the trainer, which tests/trainers has, or no example.
NOT_RUN = {
    "PackedPlugin": "axolotl, in tests/trainers/axolotl",
    "PackedSft": "ms-swift, in tests/trainers/ms_swift",
    "ResourceError": "needs a full disk",
    "WorkerError": "needs a process that dies",
}
CLASSES = sorted(name for name in energon_packed.__all__ if inspect.isclass(getattr(energon_packed, name)))
FUNCTIONS = ("normalize", "pack_lengths")


@pytest.fixture(scope="module")
def names(demo_out: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A folder with the demo data, and the names that the first lines of the examples define there."""
    folder = tmp_path_factory.mktemp("examples")
    shutil.copytree(demo_out, folder, dirs_exist_ok=True)
    index = (ROOT / "docs" / "api" / "index.md").read_text(encoding="utf-8")
    first = re.search(r"```py\n(.*?)```", index, re.DOTALL)
    assert first is not None
    names: dict[str, Any] = {"folder": folder}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        exec(first[1], names)
    return names


@pytest.mark.parametrize("name", [name for name in (*CLASSES, *FUNCTIONS) if name not in NOT_RUN])
def test_example(name: str, names: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(names["folder"])
    found = doctest.DocTestFinder(recurse=False).find(getattr(energon_packed, name), name, globs=names)
    examples = [example for test in found for example in test.examples]
    assert examples, "no example"
    assert not any(example.options for example in examples), "an example has directives"
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    report: list[str] = []
    for test in found:
        runner.run(test, out=report.append)
    assert not runner.failures, "".join(report)


def test_examples_that_are_not_run_are_of_public_names() -> None:
    assert set(NOT_RUN) <= set(CLASSES)
