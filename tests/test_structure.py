"""The shape of the code: short files, short functions, a map in each folder. Linters check imports and arguments."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "energon_packed"
FILES = sorted([*PACKAGE.rglob("*.py"), *(PACKAGE.parent / "tools").glob("*.py")])
LINES_OF_A_FILE = 350
LINES_OF_A_FUNCTION = 60


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE.parent)))
def test_files_and_functions_are_short(file: Path) -> None:
    source = file.read_text(encoding="utf-8")
    assert source.count("\n") <= LINES_OF_A_FILE, "two nouns in one file: split it"
    long = {
        node.name: node.end_lineno - node.lineno + 1
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno >= LINES_OF_A_FUNCTION
    }
    assert not long


def test_every_folder_has_a_map() -> None:
    folders = {file.parent for file in PACKAGE.rglob("*.py")}
    for folder in folders:
        assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))), folder
