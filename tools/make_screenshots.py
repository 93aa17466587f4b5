"""Write the screenshots of docs/images: `python tools/make_screenshots.py`. It needs Chromium (`make chromium`).

The pictures show the demo data of the pages, in the light and the dark color scheme. They depend on the fonts of the
machine, so no test compares them.
"""

import argparse
import contextlib
import io
import os
import subprocess
import sys
import tempfile
import threading
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from PIL import Image  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, MONOKAI  # noqa: E402
from rich.text import Text  # noqa: E402

from tests.browser import Browser  # noqa: E402
from tests.docs.pages import make_demo  # noqa: E402
from tests.internals import InputOptions, PackedFolder, RecordsViewer, Viewer, ViewServer  # noqa: E402

SIZES = {"report": (1100, 1500), "inspect": (960, 420), "view": (1100, 760), "records": (1100, 640)}  # CSS pixels
_INSPECT = ("inspect", "demo-out", "--pack", "demo-out_00000000")
_IMAGES = (
    "Promise.all([...document.images].map((image) => {"
    " image.loading = 'eager'; return image.decode().catch(() => 0); }))"
    ".then(() => 0)"
)
_TERMINAL = (
    "<!doctype html><meta charset=utf-8><style>{stylesheet} body {{ color: {foreground}; background: {background}; "
    "margin: 16px; font: 15px/1.4 monospace }} pre {{ margin: 0; font: inherit }}</style><pre>{code}</pre>"
)


def terminal(text: str, scheme: str) -> str:
    """Render the output of a command, with ANSI colors, as HTML."""
    console = Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(Text.from_ansi(text))
    theme = MONOKAI if scheme == "dark" else DEFAULT_TERMINAL_THEME
    return console.export_html(theme=theme, code_format=_TERMINAL)


def main() -> None:
    """Make the demo data, run both commands, and write the pictures."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name, contextlib.chdir(name):
        folder = Path(name)
        make_demo(folder)
        command = [sys.executable, "-m", "energon_packed"]
        subprocess.run([*command, "report", "demo-out", "-o", "report.html"], check=True)
        colors = os.environ | {"FORCE_COLOR": "1", "COLUMNS": "100"}
        shown = subprocess.run([*command, *_INSPECT], env=colors, check=True, capture_output=True, text=True).stdout
        for scheme in ("light", "dark"):
            (folder / "inspect.html").write_text(terminal(shown, scheme), encoding="utf-8")
            viewed = PackedFolder.open("demo-out")
            options = InputOptions(inputs=["demo-out/source/data.jsonl"], tokenizer="demo-out/source/tokenizer")
            records = ViewServer(RecordsViewer(options, folder))
            server = ViewServer(Viewer(viewed, partial(viewed.encoder_or_reason, None)))
            server.viewer.respond("/")  # the page after it has the kinds of tokens
            for each in (server, records):
                threading.Thread(target=each.serve_forever, daemon=True).start()
            urls = {"view": server.url, "records": records.url + "&text=triangles"}
            with server, records, Browser(folder / scheme) as browser:
                for page, size in SIZES.items():
                    browser.show(*size, scheme=scheme)
                    browser.open(urls.get(page) or (folder / f"{page}.html").as_uri())
                    browser.run(_IMAGES)
                    picture = ROOT / "docs" / "images" / f"{page}-{scheme}.png"
                    Image.open(io.BytesIO(browser.picture())).quantize(256).save(picture, optimize=True)
                    print(f"{picture.relative_to(ROOT)}: {picture.stat().st_size / 1000:.0f} kB")
                records.shutdown()
            server.shutdown()


if __name__ == "__main__":
    main()
