"""An object store on this machine: moto's S3 server, with the requests and bytes that the code under test causes.

`start_store` sets the environment of boto3 and of multi-storage-client for this process and its children; the profile
`store` of the configuration file leads to the bucket `bucket`.
"""

import hashlib
import json
import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BUCKET = "bucket"
SECRET = "kept-from-all-messages"


@dataclass
class Traffic:
    """Requests as `METHOD /bucket/key`, listings as `LIST /bucket/prefix`, and the bytes of the answers."""

    requests: list[str] = field(default_factory=list)
    bytes: int = 0
    bytes_of: Counter[str] = field(default_factory=Counter)
    """Bytes of the answers by request."""

    def count(self, method: str) -> int:
        return sum(request.startswith(method + " ") for request in self.requests)


@dataclass
class Store:
    """The running server."""

    endpoint: str
    client: Any
    traffic: list[Traffic] = field(default_factory=list)
    latency: float = 0.0
    """Seconds before each answer."""
    failures: dict[str, int] = field(default_factory=dict)
    """HTTP status that requests for a path, as `/bucket/key`, get instead of the object."""
    intercept: Callable[[dict[str, Any]], int | None] = lambda environ: None
    """Called with the WSGI environment of each request; returns a status that is the answer, 0 to cut the connection,
    or None."""

    def url(self, key: str = "") -> str:
        return f"s3://{BUCKET}/{key}"

    def put(self, key: str, content: bytes) -> str:
        self.client.put_object(Bucket=BUCKET, Key=key, Body=content)
        return self.url(key)

    def put_folder(self, key: str, folder: Path) -> str:
        """Upload all files of a folder, also those in hidden folders."""
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                self.put(f"{key}/{file.relative_to(folder)}", file.read_bytes())
        return self.url(key)

    @contextmanager
    def counted(self) -> Iterator[Traffic]:
        traffic = Traffic()
        self.traffic.append(traffic)
        try:
            yield traffic
        finally:
            self.traffic.remove(traffic)

    def objects(self, prefix: str) -> dict[str, bytes]:
        """Content of all objects below a prefix, after checking size and hash in the metadata of each."""
        found = {}
        for page in self.client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=f"{prefix}/"):
            for entry in page.get("Contents", []):
                answer = self.client.get_object(Bucket=BUCKET, Key=entry["Key"])
                name, content = entry["Key"].removeprefix(f"{prefix}/"), answer["Body"].read()
                if name != ".work/owner.json":  # stored by a conditional request, without metadata
                    assert answer["Metadata"] == {"sha256": hashlib.sha256(content).hexdigest()}, name
                found[name] = content
        return found

    @contextmanager
    def failing(self, status: int, *keys: str) -> Iterator[None]:
        paths = [f"/{BUCKET}/{key}" for key in keys]
        self.failures.update(dict.fromkeys(paths, status))
        try:
            yield
        finally:
            for path in paths:
                del self.failures[path]


def retry_at_once(module: Any) -> None:
    """Let multi-storage-client send a request again without a wait of 1 to 5 s; `module` is its `retry`."""
    module.sleep_before_retry = lambda settings, attempt: None


def start_store(folder: Path) -> Store:
    """Start the server on a free port, and make the bucket. The server ends with the process."""
    environment = {
        "AWS_ACCESS_KEY_ID": "tests",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_MAX_ATTEMPTS": "1",
    }
    os.environ.update(environment)
    import boto3
    import multistorageclient.retry
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    retry_at_once(multistorageclient.retry)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each request
    application = DomainDispatcherApplication(create_backend_app)
    store = Store("", None)

    def counting(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        is_list = "list-type=" in environ.get("QUERY_STRING", "")
        request = f"{'LIST' if is_list else environ['REQUEST_METHOD']} {path}"
        for traffic in store.traffic:
            traffic.requests.append(request)
        time.sleep(store.latency)
        status = store.failures.get(path) or store.intercept(environ)
        if status == 0:
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        if status is not None:
            start_response(f"{status} Refused", [("Content-Length", "0")])
            return []
        answer = list(application(environ, start_response))
        for traffic in store.traffic:
            traffic.bytes += sum(map(len, answer))
            traffic.bytes_of[request] += sum(map(len, answer))
        return answer

    server = make_server("127.0.0.1", 0, counting, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    store.endpoint = f"http://127.0.0.1:{server.server_port}"
    config = folder / "msc_config.json"
    options = {"base_path": BUCKET, "endpoint_url": store.endpoint, "region_name": "us-east-1"}
    profile = {"storage_provider": {"type": "s3", "options": options}, "retry": {"attempts": 1}}
    config.write_text(json.dumps({"profiles": {"store": profile}, "path_mapping": {"gs://mapped/": "msc://store/"}}))
    os.environ.update({"AWS_ENDPOINT_URL": store.endpoint, "MSC_CONFIG": str(config)})
    store.client = boto3.client("s3")
    store.client.create_bucket(Bucket=BUCKET)
    return store
