"""S3 server of a local folder for benchmarks: GET with ranges by sendfile, HEAD and listings, over kept connections.

moto reads a whole object to answer a range, and closes each connection, so it needs more time than its clients.
"""

import multiprocessing
import os
import socket
import threading
import time
from contextlib import suppress
from email.utils import formatdate
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

_BUCKET = "bucket"


class ObjectServer:
    """The objects of `folder` as the bucket `bucket`, served by a process of its own.

    Attributes:
        endpoint: URL of the server.
    """

    def __init__(self, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        context.Process(target=_serve, args=(folder, other), daemon=True).start()
        self.endpoint = f"http://127.0.0.1:{self._connection.recv()}"

    def latency(self, seconds: float) -> None:
        """Delay each answer."""
        self._connection.send(seconds)
        self._connection.recv()


def _serve(folder: Path, connection: Any) -> None:
    latency = [0.0]
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    threading.Thread(target=_accept, args=(listener, folder, latency), daemon=True).start()
    connection.send(listener.getsockname()[1])
    with suppress(EOFError):  # the parent has ended
        while True:
            latency[0] = connection.recv()
            connection.send(None)


def _accept(listener: socket.socket, folder: Path, latency: list[float]) -> None:
    while True:
        client = listener.accept()[0]
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=_answer_all, args=(client, folder, latency), daemon=True).start()


def _answer_all(client: socket.socket, folder: Path, latency: list[float]) -> None:
    data = b""
    with client:
        while True:
            while b"\r\n\r\n" not in data:
                if not (received := client.recv(1 << 16)):
                    return
                data += received
            head, _, data = data.partition(b"\r\n\r\n")
            first, *lines = head.decode().split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            method, target, _ = first.split(" ")
            url = urlsplit(target)
            time.sleep(latency[0])
            key = unquote(url.path).removeprefix(f"/{_BUCKET}").lstrip("/")
            if not key:
                body = _listing(folder, {name: values[0] for name, values in parse_qs(url.query).items()}).encode()
                client.sendall(_head("200 OK", len(body), "Content-Type: application/xml") + body)
            else:
                _answer(client, folder / key, method, headers.get("range"))


def _answer(client: socket.socket, file: Path, method: str, wanted: str | None) -> None:
    if not file.is_file():
        client.sendall(_head("404 Not Found", 0))
        return
    with file.open("rb") as stream:
        found = os.fstat(stream.fileno())
        at, stop, status = 0, found.st_size, "200 OK"
        lines = [f'ETag: "{found.st_mtime_ns:x}"', f"Last-Modified: {formatdate(found.st_mtime, usegmt=True)}"]
        if wanted is not None:
            start, _, last = wanted.removeprefix("bytes=").partition("-")
            at, stop, status = int(start), min(int(last or stop - 1) + 1, stop), "206 Partial Content"
            lines.append(f"Content-Range: bytes {at}-{stop - 1}/{found.st_size}")
        client.sendall(_head(status, stop - at, *lines))
        while method == "GET" and at < stop:
            at += os.sendfile(client.fileno(), stream.fileno(), at, stop - at)


def _head(status: str, size: int, *lines: str) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status}", f"Content-Length: {size}", *lines, "", ""]).encode()


def _listing(folder: Path, query: dict[str, str]) -> str:
    """Return the answer to ListObjectsV2, in one page."""
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    contents, folders = [], set()
    for file in sorted(
        (folder / prefix).parent.rglob("*") if not prefix.endswith("/") else (folder / prefix).rglob("*")
    ):
        key = str(file.relative_to(folder))
        if not file.is_file() or not key.startswith(prefix):
            continue
        inner, found, _ = key.removeprefix(prefix).partition(delimiter or "\0")
        if found:
            folders.add(prefix + inner + delimiter)
            continue
        if len(contents) + len(folders) == int(query.get("max-keys", -1)):
            break
        status = file.stat()
        changed = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(status.st_mtime))
        contents.append(
            f"<Contents><Key>{escape(key)}</Key><Size>{status.st_size}</Size><LastModified>{changed}</LastModified>"
            f'<ETag>"{status.st_mtime_ns:x}"</ETag></Contents>'
        )
    common = [f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in sorted(folders)]
    return (
        '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"<Name>{_BUCKET}</Name><Prefix>{escape(prefix)}</Prefix><IsTruncated>false</IsTruncated>"
        f"<KeyCount>{len(contents) + len(common)}</KeyCount>{''.join(contents + common)}</ListBucketResult>"
    )
