"""The API pages: every public name once, with an example, and defaults as values."""

import ast
import contextlib
import html
import importlib
import re
from pathlib import Path

import energon_packed
from tests.docs.pages import ROOT
from tests.internals import declared

PAGES = sorted((ROOT / "docs" / "api").glob("*.md"))
SHOWN = [name for page in PAGES for name in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE)]
MODULES = sorted({name.rpartition(".")[0] for name in SHOWN})


def test_every_public_name_is_shown_once() -> None:
    assert len(MODULES) == 2
    public = [f"{module}.{name}" for module in MODULES for name in importlib.import_module(module).__all__]
    public.remove("energon_packed.__version__")
    assert sorted(SHOWN) == sorted(public)
    index = (ROOT / "docs" / "api" / "index.md").read_text(encoding="utf-8")
    for page in PAGES:
        for name in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE):
            assert f"[`{name.rpartition('.')[2]}`]({page.name}#{name})" in index


def test_names_have_an_entry_with_a_description(site: Path) -> None:
    text = "".join(file.read_text(encoding="utf-8") for file in (site / "api").rglob("index.html"))
    entries = re.findall(
        r'<h3 id="([^"]+)".*?<div class="doc doc-contents[^"]*">(.*?)(?=<h[123] |\Z)', text, re.DOTALL
    )
    assert sorted(name for name, _ in entries) == sorted(SHOWN)
    for name, content in entries:
        assert len(re.sub(r"<[^>]+>", "", content).split()) > 5, name
    assert "doc-symbol-module" not in text


def test_defaults_are_values(site: Path) -> None:
    defaults = set()
    for file in (site / "api").rglob("index.html"):
        page = file.read_text(encoding="utf-8")
        for default in re.findall(r"default:\s*<code>(.*?)</code>", page, re.DOTALL):
            defaults.add(html.unescape(re.sub(r"<[^>]+>", "", default)).strip())
        for signature in re.findall(r'<div class="[^"]*doc-signature[^"]*">.*?</div>', page, re.DOTALL):
            text = html.unescape(re.sub(r"<[^>]+>", "", signature)).strip()
            defaults |= {ast.unparse(default) for default in _defaults(text)}
    assert len(defaults) > 30
    objects = {"dict", "trainer_inputs", "array([], shape=(0, 3), dtype=int64)"}
    for default in defaults - objects:
        ast.literal_eval(default)


def _defaults(signature: str) -> list[ast.expr]:
    with contextlib.suppress(SyntaxError):
        (function,) = ast.parse(f"def {signature}: ...").body
        assert isinstance(function, ast.FunctionDef)
        return [*function.args.defaults, *filter(None, function.args.kw_defaults)]
    return []


def test_pack_options_show_options_alone(site: Path) -> None:
    page = (site / "api" / "data" / "index.html").read_text(encoding="utf-8")
    entry = page[page.index('<h3 id="energon_packed.PackOptions"') : page.index('<h3 id="energon_packed.PackResult"')]
    shown = re.findall(r"<b><code>(\w+)</code></b>", entry)
    assert sorted(shown) == sorted(option.name for option in declared(energon_packed.PackOptions))
    assert "energon_packed.PackOptions." not in entry  # methods and properties
