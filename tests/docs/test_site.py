"""The site of docs/ in a browser: no page is wider than a phone or a laptop window."""

import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
WIDTHS = (360, 1400)  # CSS pixels
# Loads each page in a frame of each width, and writes the names of elements that are cut off or widen the page.
_MEASURE = """
<body><script>
const pages = PAGES, widths = WIDTHS, found = [];
async function measure() {
  for (const width of widths) for (const page of pages) {
    const frame = document.createElement("iframe");
    frame.style.cssText = `width:${width}px;height:900px;border:0`;
    const loaded = new Promise(done => frame.onload = done);
    frame.src = page; document.body.append(frame); await loaded;
    const doc = frame.contentDocument, root = doc.documentElement;
    if (root.scrollWidth > width) found.push(`${page} is ${root.scrollWidth} px wide at ${width} px`);
    for (const text of doc.querySelectorAll("svg text")) {
      const inner = text.getBoundingClientRect(), outer = text.ownerSVGElement.getBoundingClientRect();
      if (inner.left < outer.left || inner.right > outer.right + 1)
        found.push(`${page}: "${text.textContent}" is cut off at ${width} px`);
    }
    frame.remove();
  }
  await fetch("/result", {method: "POST", body: JSON.stringify({pages: pages.length, found})});
}
measure();
</script></body>
"""


class Site(SimpleHTTPRequestHandler):
    """Serve a folder, and put the posted result into a queue."""

    results: "queue.Queue[bytes]" = queue.Queue()

    def log_message(self, format: str, *values: object) -> None:
        pass

    def do_POST(self) -> None:
        self.results.put(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(204)
        self.end_headers()


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")
def test_pages_fit_a_phone_and_a_laptop(tmp_path: Path) -> None:
    site = tmp_path / "site"
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", site],
        cwd=ROOT,
        env={"NO_MKDOCS_2_WARNING": "1", "PATH": "/usr/bin:/bin"},
        check=True,
        timeout=300,
    )
    pages = sorted(str(file.parent.relative_to(site)) + "/" for file in site.rglob("index.html"))
    assert len(pages) >= 25
    measure = _MEASURE.replace("PAGES", json.dumps(pages)).replace("WIDTHS", json.dumps(WIDTHS))
    (site / "measure.html").write_text(measure, encoding="utf-8")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Site, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    flags = ["headless", "no-sandbox", "disable-gpu", "no-first-run", "disable-background-networking"]
    flags += ["disable-component-update", "disable-sync", "remote-debugging-port=0", f"user-data-dir={tmp_path}"]
    url = f"http://127.0.0.1:{server.server_port}/measure.html"
    browser = subprocess.Popen(
        [str(CHROMIUM), *(f"--{flag}" for flag in flags), url], stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        result = json.loads(Site.results.get(timeout=300))
    finally:
        os.killpg(browser.pid, signal.SIGKILL)
        browser.wait()
        server.shutdown()
    assert result == {"pages": len(pages), "found": []}
