"""Local server of `energon-packed view`: Pages in, answers to the browser of the same machine out.

Only the loopback interface is bound, and only GET and HEAD are answered. The name in Host must be of this machine, so
that a page of another site cannot reach the server through a DNS entry that it changes. The token of the printed
address keeps other users of the machine out; the browser then has it in a cookie. Pages run no script but page.js, and
no answer is stored or shown in a frame.
"""

import hmac
import re
import secrets
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any
from urllib.parse import parse_qsl, urlencode

from energon_packed.errors import ConfigError
from energon_packed.inspection.viewer.pages import Pages, Response

_ADDRESS = "127.0.0.1"
_LOCAL = re.compile(r"(127\.0\.0\.1|localhost)(:\d+)?")  # with any port: a tunnel may have another
_IDLE = 60  # seconds after which an open connection without a request is closed
_PAGE_POLICY = (
    "default-src 'none'; img-src 'self' data:; media-src 'self'; style-src 'self'; script-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_MEDIA_POLICY = "default-src 'none'; sandbox; frame-ancestors 'none'"  # for content of the dataset, opened by itself
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")


class ViewServer(ThreadingTCPServer):  # HTTPServer needs a DNS request
    """Server of the pages of a viewer; `serve_forever` answers, each connection in a thread of its own.

    Attributes:
        viewer: the pages.
        token: what the address, or the cookie, must have; "" for no token.
    """

    daemon_threads = True  # an open connection does not delay the end of the command
    allow_reuse_address = True

    def __init__(self, viewer: Pages, port: int = 0, *, token: bool = True) -> None:
        """Bind the port on the loopback interface; 0 is any free port.

        Raises:
            ConfigError: the port is in use.
        """
        self.viewer, self.token = viewer, secrets.token_urlsafe(16) if token else ""
        try:
            super().__init__((_ADDRESS, port), _Handler)
        except OSError as error:
            raise ConfigError(
                f"`port` must be free, got {port}: {error.strerror}. Pass another, or omit it."
            ) from error
        self.server_port = self.server_address[1]

    @property
    def url(self) -> str:
        """Address of the first page."""
        return f"http://{_ADDRESS}:{self.server_port}/" + (f"?token={self.token}" if self.token else "")


class _Handler(BaseHTTPRequestHandler):
    server: ViewServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "energon-packed", ""
    timeout = _IDLE

    def handle(self) -> None:
        with suppress(ConnectionError):  # the browser left
            super().handle()

    def do_GET(self) -> None:
        # `//host` or `http://host` in a redirect would be another site.
        path, _, query = self.path.partition("?")
        path, fields = "/" + path.lstrip("/"), parse_qsl(query)
        if not self._is_local():
            return self._send(_refused("Host and Origin must be of this machine; open the printed address"))
        if self.server.token and _equal(dict(fields).get("token", ""), self.server.token):
            # The token leaves the address, so that links to pages do not have it.
            rest = urlencode([field for field in fields if field[0] != "token"])
            cookie = f"{self._cookie}={self.server.token}; Path=/; HttpOnly; SameSite=Lax"
            headers = {"Location": path + (f"?{rest}" if rest else ""), "Set-Cookie": cookie}
            return self._send(Response(303, b""), headers)
        if self.server.token and not self._has_cookie():
            return self._send(_refused("the token is missing; open the address that the command printed"))
        return self._send(self.server.viewer.respond(path + (f"?{query}" if query else "")))

    do_HEAD = do_GET  # noqa: N815

    @property
    def _cookie(self) -> str:
        # Browsers send the cookies of a port to all ports of its host.
        return f"energon-packed-{self.server.server_port}"

    def _is_local(self) -> bool:
        host = self.headers.get("Host", "")
        return bool(_LOCAL.fullmatch(host)) and self.headers.get("Origin", f"http://{host}") == f"http://{host}"

    def _has_cookie(self) -> bool:
        pairs = [pair.strip().partition("=") for pair in self.headers.get("Cookie", "").split(";")]
        return any(name == self._cookie and _equal(value, self.server.token) for name, _, value in pairs)

    def _send(self, response: Response, headers: dict[str, str] | None = None) -> None:
        content, status, headers = response.content, response.status, dict(headers or {})
        if response.is_media:
            headers["Accept-Ranges"] = "bytes"
            if match := _RANGE.fullmatch(self.headers.get("Range", "")):
                start, end = _bounds(match[1], match[2], len(content))
                status = 206 if start < end else 416
                headers["Content-Range"] = f"bytes {f'{start}-{end - 1}' if start < end else '*'}/{len(content)}"
                content = content[start:end]
        self.send_response(status)
        headers |= {
            "Content-Type": response.kind,
            "Content-Length": str(len(content)),
            "Content-Security-Policy": _MEDIA_POLICY if response.is_media else response.policy or _PAGE_POLICY,
            "X-Content-Type-Options": "nosniff",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a request that is not HTTP, or another method than GET and HEAD, in one line."""
        # The connection is closed, as the body of the request is not read.
        self._send(Response(code, f"error: {message or self.responses[code][0]}\n".encode()), {"Connection": "close"})

    def log_message(self, format: str, *values: Any) -> None:
        """Print nothing: requests are of no interest, and contain strings of the dataset."""


def _refused(message: str) -> Response:
    return Response(403, f"error: {message}\n".encode())


def _equal(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode(), token.encode())


def _bounds(first: str, last: str, size: int) -> tuple[int, int]:
    """Bytes [start, end) of a range; empty if it is not in the content."""
    if not first:
        return max(0, size - int(last or 0)), size
    return int(first), min(size, int(last) + 1) if last else size
