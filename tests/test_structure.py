"""The shape of the code: a map in each folder, and tests that know no place of it. Linters check the rest."""

import ast
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

import grimp
import pytest

from tests import internals

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "energon_packed"
FILES = sorted(
    file
    for file in TESTS.rglob("*.py")
    if file.name not in ("internals.py", "test_structure.py") and ".nv-meta" not in file.parts
)
PLACE = re.compile(r"(from|import) energon_packed\.\w|energon_packed(\.\w+){2,}[.:]?\w*")
"""An import from a module of the package in a script, or the name of such a module alone."""


def places_in(file: Path) -> Iterator[str]:
    """What a file takes from a module of the package: imports, scripts in strings, targets of monkeypatch."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("energon_packed."):
            yield f"{node.lineno}: from {node.module} import ..."
        elif isinstance(node, ast.Import):
            yield from (f"{node.lineno}: import {a.name}" for a in node.names if a.name.startswith("energon_packed."))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = PLACE.fullmatch(node.value) or re.search(r"(?m)\b(from|import) energon_packed\.\w+", node.value)
            if text:
                yield f"{node.lineno}: {text[0]}"


def test_tests_know_no_place_in_the_package() -> None:
    """They import from `energon_packed`, or from `tests.internals`, the only file to edit when code moves."""
    assert not [f"{file.relative_to(TESTS)}:{place}" for file in FILES for place in places_in(file)]


@pytest.mark.parametrize(
    "code",
    [
        "from energon_packed.loading.collation.batch import PackedBatch",
        "import energon_packed.loading",
        "def f():\n    from energon_packed.errors import ConfigError",
        "SCRIPT = 'import sys; from energon_packed.cli.main import main'",
        "patch.setattr('energon_packed.pipeline.stages.write._MOST', 2)",
    ],
)
def test_a_place_in_the_package_is_found(code: str, tmp_path: Path) -> None:
    (tmp_path / "file.py").write_text(code)
    assert len(list(places_in(tmp_path / "file.py"))) == 1


def test_modules_import_each_other_in_one_direction() -> None:
    """Also in functions, and for types only: `prepare` raises CycleError with the modules of a circle."""
    graph = grimp.build_graph("energon_packed")
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    graphlib.TopologicalSorter(imports).prepare()


def test_every_internal_is_needed() -> None:
    used = set()
    for file in FILES:
        text = file.read_text(encoding="utf-8")
        for names in re.findall(r"from tests\.internals import (\([^)]*\)|.*)", text):
            used |= set(re.findall(r"\w+", names))
    assert set(internals.PLACES) <= used, set(internals.PLACES) - used
    public = set(internals.import_module("energon_packed").__all__)
    assert not public & set(internals.PLACES), "public: import it from energon_packed"


def test_every_folder_has_a_map() -> None:
    folders = {file.parent for file in PACKAGE.rglob("*.py")}
    for folder in folders:
        assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))), folder
