"""The commands and Python blocks of all pages run in order, and print the output that the page shows."""

import ast
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

import energon_packed
from tests import oldest
from tests.docs.pages import PAGES, ROOT, needs_demo, needs_store, normalized, run_page, steps
from tests.internals import cli, megatron

_LINK = re.compile(r"\]\(([^)\s]+)\)")
_MODULE = re.compile(r"`((?:[a-z_]+/)*[a-z_0-9]+(?:\.py|/))`")
_OUTSIDE = ("energon_packed/", "tests/", "tools/", "docs/", "metadatasets/")
_CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
_RUNNABLE = [
    page
    for page in PAGES
    if any(step.language in ("console", "python") for step in steps(page.read_text(encoding="utf-8")))
]


@pytest.mark.parametrize("page", _RUNNABLE, ids=lambda page: page.stem)
def test_blocks_print_the_output_on_the_page(page: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if needs_demo(page):
        shutil.copytree(request.getfixturevalue("demo_out"), tmp_path, dirs_exist_ok=True)
    if needs_store(page):
        request.getfixturevalue("store")
    if page.stem == "tutorial" and oldest.TRANSFORMERS:
        pytest.skip("this release lets samples of Qwen2.5-VL attend to each other, so PackedTrainer refuses it")
    for step, printed in run_page(page, tmp_path):
        assert normalized(printed) == normalized(step.shown), step.code


def test_custom_roles_on_the_page_are_short() -> None:
    page = (ROOT / "docs" / "train-torch.md").read_text(encoding="utf-8")
    (code,) = [step.code for step in steps(page) if "(Processor)" in step.code]
    sizes = {
        node.name: node.end_lineno - node.lineno + 1
        for node in ast.parse(code).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.end_lineno
    }
    assert len(sizes) == 4  # data, processor, packer, collator
    assert max(sizes.values()) < 20


def test_each_framework_has_an_object_and_a_line_that_uses_it() -> None:
    text = (ROOT / "docs" / "train.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[(.+?)\]\(.+?\) \| `(\w+)` \| `(.+)` \|$", text, re.MULTILINE)
    assert len(rows) == len(re.findall(r"^\| \[", text, re.MULTILINE))
    for framework, name, line in rows:
        assert name in line, framework
        assert hasattr(energon_packed, name) or hasattr(megatron, name), framework
        if "_target_" in line or line.startswith("plugins"):
            assert yaml.safe_load(line), framework
        else:
            ast.parse(line)
    frameworks = (
        "Transformers TRL swift LLaMA axolotl accelerate PyTorch Lightning torchtitan Megatron-LM Bridge NeMo raw"
    )
    names = " ".join(framework for framework, *_ in rows)
    assert not [framework for framework in [*frameworks.split(), "custom trainer"] if framework not in names]


def test_most_pages_have_blocks_that_run() -> None:
    assert len(_RUNNABLE) >= 12


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 150


@pytest.mark.parametrize("name", cli.list_commands(None))
def test_every_option_is_on_the_page_of_the_command_line(name: str) -> None:
    command: Any = cli.get_command(None, name)
    text = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
    missing = [flag for one in command.params for flag in one.opts if flag.startswith("--") and flag not in text]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_relative_links_exist(page: Path) -> None:
    text = _CODE.sub("", page.read_text(encoding="utf-8"))
    for target in _LINK.findall(text):
        if not target.startswith(("http://", "https://", "#")):
            assert (page.parent / target.partition("#")[0]).exists(), target


def test_contributing_names_modules_and_folders_that_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    package = ROOT / "energon_packed"
    names = [name for name in _MODULE.findall(text) if not name.startswith(_OUTSIDE) and "/" in name]
    assert len(names) > 40
    assert not [name for name in names if not (package / name).exists()]


def test_terms_of_the_glossary_are_unique() -> None:
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([a-zA-Z, -]+) \|", text[text.index("## Glossary") :], re.MULTILINE)
    terms = [term for row in rows if row != "term" for term in row.split(", ")]
    assert len(terms) > 25
    assert len(terms) == len(set(terms))
