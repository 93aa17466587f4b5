"""The site of docs/: its links, and each page in Chromium, as wide as a laptop (light and dark) and a phone."""

import re
import threading
import time
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.browser import Browser
from tests.docs.pages import ROOT

WIDTH = 1400  # CSS pixels
VIEWS = ((WIDTH, "light", "default"), (WIDTH, "dark", "slate"), (360, "light", "default"))
"""Width, scheme of the system, and scheme of the page; the colors do not depend on the width."""
# Elements that widen the page, that are cut off, that are not loaded, or whose text is hard to read. Contrast is that
# of WCAG 2.1, section 1.4.3.
_FAULTS = """(() => {
  const faults = new Set(), root = document.documentElement;
  const color = text => { const parts = text.match(/[\\d.]+/g).map(Number); return [...parts, 1].slice(0, 4); };
  const over = (top, below) => [0, 1, 2].map(i => top[i] * top[3] + below[i] * (1 - top[3]));
  const light = rgb => rgb.map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  if (root.scrollWidth > root.clientWidth) faults.add(`is ${root.scrollWidth} px wide at ${root.clientWidth} px`);
  for (const image of document.images)
    if (!image.naturalWidth && image.checkVisibility()) faults.add(`${image.src} is not loaded`);
  for (const text of document.querySelectorAll("svg text")) {
    const inner = text.getBoundingClientRect(), outer = text.ownerSVGElement.getBoundingClientRect();
    if (inner.left < outer.left || inner.right > outer.right + 1) faults.add(`"${text.textContent}" is cut off`);
  }
  for (const line of document.querySelectorAll("svg .d-cut"))
    if (getComputedStyle(line).stroke != "rgb(229, 83, 75)") faults.add("a boundary is not red");
  const known = new Map([[null, {opacity: 1, paper: [255, 255, 255]}]]);
  const behind = element => {
    if (!known.has(element)) {
      const style = getComputedStyle(element), {opacity, paper} = behind(element.parentElement);
      known.set(element, {opacity: opacity * style.opacity, paper: over(color(style.backgroundColor), paper)});
    }
    return known.get(element);
  };
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const element = texts.currentNode.parentElement, style = getComputedStyle(element);
    if (!texts.currentNode.data.trim() || /^(SCRIPT|STYLE|TITLE|NOSCRIPT)$/i.test(element.tagName)) continue;
    if (!element.checkVisibility({opacityProperty: true, visibilityProperty: true})) continue;
    if (root.clientWidth < 600 && element.closest(".md-sidebar, .md-search")) continue;  // closed
    const ink = color(element instanceof SVGElement ? style.fill : style.color), layers = [];
    const {opacity, paper: below} = behind(element);
    ink[3] *= opacity;
    if (element instanceof SVGElement) {
      const box = element.getBoundingClientRect(), x = (box.left + box.right) / 2, y = (box.top + box.bottom) / 2;
      for (const rect of element.ownerSVGElement.querySelectorAll("rect")) {
        const area = rect.getBoundingClientRect(), shown = getComputedStyle(rect);
        if (area.left <= x && x <= area.right && area.top <= y && y <= area.bottom && shown.fill != "none")
          layers.push([...color(shown.fill).slice(0, 3), Number(shown.opacity)]);
      }
    }
    const paper = layers.reduce((lower, layer) => over(layer, lower), below);
    const [dark, bright] = [light(over(ink, paper)), light(paper)].sort((a, b) => a - b);
    const contrast = (bright + 0.05) / (dark + 0.05);
    if (contrast < 4.5) faults.add(`"${texts.currentNode.data.trim().slice(0, 40)}" (${element.tagName}.` +
      `${element.getAttribute("class")}) has a contrast of ${contrast.toFixed(2)}`);
  }
  return [...faults].slice(0, 9);
})()"""


class _Quiet(SimpleHTTPRequestHandler):
    def do_GET(self) -> None:
        """Answer with a file; the index of the search, which each page reads in a worker for 0.5 s, has no pages."""
        if not self.path.endswith("/search_index.json"):
            return super().do_GET()
        content = b'{"config": {"lang": ["en"], "separator": " ", "pipeline": [], "fields": {}}, "docs": []}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
        return None

    def log_message(self, format: str, *values: object) -> None:
        pass


class _Html(HTMLParser):
    """Targets of the links of a page, and its anchors."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.anchors: set[str] = {"", "__comments"}
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.anchors.add(value)
            elif name in ("href", "src") and value and tag != "base":
                self.links.add(value)


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """The address of the site, with a slash at the end."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


def test_links_and_anchors_exist(site: Path) -> None:
    pages = {file: _Html(file) for file in site.rglob("*.html")}
    checked, broken = 0, []
    for file, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            checked += 1
            path = unquote(parts.path)
            target = site / path[1:] if path.startswith("/") else file.parent / path if path else file
            target = (target / "index.html" if target.is_dir() else target).resolve()
            if not target.exists() or (target in pages and unquote(parts.fragment) not in pages[target].anchors):
                broken.append(f"{file.relative_to(site)}: {link}")
    assert checked > 1000
    assert not broken


def test_anchors_of_pages_outside_the_site_exist(site: Path) -> None:
    checked = 0
    for name in ("README.md", "CONTRIBUTING.md"):
        for page, anchor in re.findall(r"\]\(docs/([\w/-]+)\.md#([^)]+)\)", (ROOT / name).read_text(encoding="utf-8")):
            folder = site / page.removesuffix("index")
            assert anchor in _Html(folder / "index.html").anchors, f"{name}: docs/{page}.md#{anchor}"
            checked += 1
    assert checked


def test_pages_fit_and_are_readable(site: Path, address: str, tmp_path: Path) -> None:
    pages = sorted(str(file.parent.relative_to(site)) + "/" for file in site.rglob("index.html"))
    assert len(pages) >= 25
    faults = []
    with Browser(tmp_path) as browser:
        for _, scheme, colors in VIEWS:  # a page has the scheme of the system when it is opened
            browser.show(WIDTH, scheme=scheme)
            browser.open("about:blank")  # so that the last page no longer stores its scheme
            browser.call("Storage.clearDataForOrigin", origin=address.rstrip("/"), storageTypes="local_storage")
            browser.open(address)
            for _ in range(600):  # scripts of the page set it, perhaps after the page is loaded
                if browser.run("document.body.dataset.mdColorScheme") == colors:
                    break
                time.sleep(0.1)
            assert browser.run("document.body.dataset.mdColorScheme") == colors
        for page in pages:
            browser.show(WIDTH)
            browser.open(address + page)
            browser.run(
                "document.head.append(Object.assign(document.createElement('style'), "
                "{textContent: '* {transition: none !important}'}))"
            )
            for width, scheme, colors in VIEWS:
                browser.show(width, scheme=scheme)
                browser.run(f"document.body.dataset.mdColorScheme = '{colors}'")
                faults += [f"{page} at {width} px, {scheme}: {fault}" for fault in browser.run(_FAULTS)]
            faults += [f"{page}: {message}" for message in browser.log]
    assert not faults


def test_the_isolation_table_is_searched(address: str, tmp_path: Path) -> None:
    shown = """[...document.querySelectorAll(".searchable tbody tr")].filter(row => row.checkVisibility())
      .map(row => [...row.cells].map(cell => cell.innerText))"""
    with Browser(tmp_path) as browser:
        browser.show(WIDTH)
        browser.open(address + "isolation/")
        every = browser.run(shown)
        assert len(every) > 200
        browser.run("document.querySelector('.searchable input').focus()")
        for typed, words in (("Qwen2 ", ["qwen2"]), ("leaks", ["qwen2", "leaks"]), ("x", ["qwen2", "leaksx"])):
            browser.call("Input.insertText", text=typed)
            matching = [row for row in every if all(word in " ".join(row).lower() for word in words)]
            assert browser.run(shown) == matching
            count = browser.run("document.querySelector('.searchable output').value")
            assert count == f"{len(matching)} of {len(every)}"
        for typed, name in (
            ("llamaforcausallm", "LlamaForCausalLM"),
            ("llava_onevision", "LlavaOnevisionForConditionalGeneration"),
        ):
            browser.run("document.querySelector('.searchable input').select()")
            browser.call("Input.insertText", text=typed)
            assert [name, "sdpa, eager, flash", "pieces"] in browser.run(shown)


def test_pictures_are_small_and_of_both_schemes() -> None:
    pictures = {file.name: file.stat().st_size for file in (ROOT / "docs" / "images").glob("*.png")}
    assert sorted(pictures) == sorted(
        f"{page}-{scheme}.png" for page in ("inspect", "records", "report", "view") for scheme in ("dark", "light")
    )
    assert max(pictures.values()) < 150_000
