"""Chromium without a window, controlled through its DevTools protocol (chromedevtools.github.io/devtools-protocol).

The test fails if Chromium is missing: `make chromium` installs it on Debian as root.
"""

import base64
import json
import os
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

NAMES = ("chromium", "google-chrome", "chromium-browser")
_FLAGS = ("headless", "no-sandbox", "disable-gpu", "no-first-run", "disable-background-networking", "hide-scrollbars")
_FLAGS += ("disable-component-update", "disable-sync", "remote-debugging-pipe")


class Browser:
    """A browser with one page; use it in a `with` statement.

    Attributes:
        log: messages of the console, errors of scripts and requests to other hosts, since the page was opened.
    """

    def __init__(self, profile: Path) -> None:
        program = next(filter(None, map(shutil.which, NAMES)), None)
        assert program is not None, "Chromium is missing. Run `make chromium` as root, or install it."
        self.log: list[str] = []
        self._number, self._session = 0, ""
        self._loads = set[str]()  # pages that are loaded
        read, self._commands = os.pipe()
        self._answers, write = os.pipe()
        # The browser reads commands from file descriptor 3 and writes answers to 4.
        shell = f'exec 3<&{read} 4>&{write}; exec "$@"'
        flags = [*(f"--{flag}" for flag in _FLAGS), f"--user-data-dir={profile}"]
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "bash", program, *flags],
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=(read, write),
        )
        os.close(read)
        os.close(write)
        self._buffer = b""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network"):
            self.call(f"{domain}.enable")
        self.call("Page.setLifecycleEventsEnabled", enabled=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._commands)
        os.close(self._answers)

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Call a method of the protocol, and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": arguments}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return dict(answer["result"])

    def show(self, width: int, height: int = 900, scheme: str = "light") -> None:
        """Set the size of the page in CSS pixels and the color scheme that the user prefers."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def open(self, url: str) -> None:
        """Open a page, and wait until it is loaded."""
        self.log.clear()
        answer = self.call("Page.navigate", url=url)
        assert "errorText" not in answer, (url, answer)
        while answer["loaderId"] not in self._loads:  # a page before it may still be loading
            self._receive()

    def run(self, script: str) -> Any:
        """Return the value of an expression of JavaScript; a promise is awaited."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def picture(self, **arguments: Any) -> bytes:
        """Return a PNG of the page, with the arguments of `Page.captureScreenshot`."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png", **arguments)["data"])

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            received = os.read(self._answers, 1 << 20)
            assert received, "Chromium ended"
            self._buffer += received
        message, _, self._buffer = self._buffer.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        values = answer.get("params", {})
        match answer.get("method"):
            case "Page.lifecycleEvent" if values["name"] == "load":
                self._loads.add(values["loaderId"])
            case "Runtime.consoleAPICalled":
                self.log.append(" ".join(str(value.get("value", value)) for value in values["args"]))
            case "Runtime.exceptionThrown":
                self.log.append(str(values["exceptionDetails"]))
            case "Network.requestWillBeSent":
                url = values["request"]["url"]
                if _host(url) not in ("", _host(values["documentURL"])):
                    self.log.append(f"request to {url}")
        return answer


def _host(url: str) -> str:
    return urlsplit(url).netloc
