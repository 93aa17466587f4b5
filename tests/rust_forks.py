"""Reads two objects in a process, its forks and their forks; prints whether each used the client in Rust.

python -m tests.rust_forks URL URL
"""

import json
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tests.internals import as_path, rust_client, storage


def _has_threads() -> bool:
    tasks = Path("/proc/self/task").glob("*/comm")
    return any(task.read_text().strip() == "tokio-rt-worker" for task in tasks)


def read(urls: list[str], depth: int) -> list[list[object]]:
    """Bytes of the objects, and whether they were requested by the client in Rust: here, and in each deeper fork."""
    contents = [content.decode() for content in storage.read_ranges([(url, 0, 100) for url in urls])]
    return [[*contents, _has_threads()], *(in_fork(urls, depth - 1) if depth else ())]


def in_fork(urls: list[str], depth: int) -> list[list[object]]:
    """Run `read` in a fork."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        return pool.submit(read, urls, depth).result(timeout=30)


if __name__ == "__main__":
    given = sys.argv[1:]
    for one in given:  # as a process that opens datasets
        as_path(one).read_bytes()
        as_path(one).stat()
    rust_client.start_loop()  # as a process whose objects are kept: it has sent no request to the client in Rust
    found = {"opened": _has_threads(), "forks": in_fork(given, 1), "parent": read(given, 1)}
    print(json.dumps(found))
