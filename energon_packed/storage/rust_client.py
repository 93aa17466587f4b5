"""Requests by the client of multi-storage-client that is written in Rust, of profiles with `rust_client`.

    prepare_client   moves this client out of a client of multi-storage-client
    rust_key         client and key to the client in Rust and its key
    start_loop       lets all requests of the process use it
    send_in_loop     sends requests at the same time

`read` of multi-storage-client starts an event loop for each request to this client, which needs more CPU time than the
request (tools/bench_storage.py): here, all requests of a process share a loop. `read` also asks cache, manifest and
replicas, so profiles with these, or with several backends, keep it.

The client in Rust starts threads for its first request. A fork does not have them, and even making a client in it may
wait forever for a lock of such a thread, so clients of a fork of a process with threads have no client in Rust. A
process that only opens datasets, as the parent of loader workers does, has no threads: the first request of several
objects starts them.
"""

import functools
import os
import sys
import threading
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from energon_packed.libraries import MULTI_STORAGE, private

REQUESTS = 64
"""Requests of a process at a time, one per referenced image; multi-storage-client keeps 128 connections."""
_THREAD = "tokio-rt-worker"  # name of the threads
_PROVIDERS = {
    "multistorageclient.providers.s3": "S3StorageProvider",
    "multistorageclient.providers.gcs": "GoogleStorageProvider",
}
_clients: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # the client in Rust by storage provider
_starting = threading.Lock()
_has_threads = False  # of this process, or of its parent before the fork


def prepare_client(client: Any) -> None:
    """Remove the client in Rust from a client, whose methods then use the client in Python; keep it for `rust_key`.

    Raises:
        ConfigError: multi-storage-client has other private names.
    """
    asks_others = client.replicas or any(
        private(client, name, MULTI_STORAGE) for name in ("_cache_manager", "_metadata_provider")
    )
    if asks_others or not private(client, "_is_rust_client_enabled", MULTI_STORAGE)():
        return
    provider = private(client, "_storage_provider", MULTI_STORAGE)
    private(provider, "_create_rust_client", MULTI_STORAGE)  # forks need the name
    if (rust := private(provider, "_rust_client", MULTI_STORAGE)) is not None:  # else another thread has moved it
        _clients[provider] = rust
        provider._rust_client = None


def rust_key(client: Any, key: str) -> tuple[Any, str] | None:
    """Return the client in Rust and its key for an object or folder; None if the profile has none, or keeps `read`."""
    provider = private(client, "_storage_provider", MULTI_STORAGE)
    rust = None if provider is None else _clients.get(provider)
    return None if rust is None else (rust, full_key(provider, key).partition("/")[2])


def full_key(provider: Any, key: str) -> str:
    """Return BUCKET/KEY, with the base path of the profile."""
    return str(private(provider, "_prepend_base_path", MULTI_STORAGE)(key)).lstrip("/")


def start_loop() -> None:
    """Start the event loop of this process, unless it has one."""
    with _starting:
        _event_loop()


def is_loop_started() -> bool:
    """Return whether this process has an event loop."""
    return _event_loop.cache_info().currsize > 0


def send_in_loop(requests: Collection[tuple[Any, str, Any]]) -> list[bytes | Exception]:
    """Send requests (client in Rust, key, range or None) at the same time; return the bytes or the error of each."""
    if not requests:
        return []
    import asyncio

    start_loop()
    loop, limit = _event_loop()

    async def answer(client: Any, key: str, wanted: Any) -> bytes | Exception:
        async with limit:
            try:
                return bytes(await client.get(key, wanted))
            except Exception as error:
                return error

    async def answers() -> list[bytes | Exception]:
        return await asyncio.gather(*(answer(*request) for request in requests))

    return asyncio.run_coroutine_threadsafe(answers(), loop).result()


@functools.cache
def _event_loop() -> tuple[Any, Any]:
    """Start the event loop in a thread; return it, and its limit of requests at a time.

    Notebooks, which have an event loop in the main thread, can wait for it.
    """
    import asyncio

    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="energon-packed-loop", daemon=True).start()
    return loop, asyncio.Semaphore(REQUESTS)


def _before_fork() -> None:
    """Look for threads of any client in Rust: Energon, or code of the user, may have sent a request, too."""
    global _has_threads
    _has_threads = False
    try:
        tasks = os.listdir("/proc/self/task")
    except OSError:  # not Linux, which alone forks by default
        _has_threads = True
        return
    for task in tasks:
        with suppress(OSError):  # the thread has ended
            _has_threads |= Path(f"/proc/self/task/{task}/comm").read_text().strip() == _THREAD


def _after_fork() -> None:
    global _starting
    _starting = threading.Lock()
    _event_loop.cache_clear()
    if _has_threads:
        for module, name in _PROVIDERS.items():
            if module in sys.modules:  # or it has made no client
                getattr(sys.modules[module], name)._create_rust_client = _no_client


def _no_client(provider: Any, options: Any = None) -> None:
    """Make no client in Rust: `_create_rust_client` of a provider in a fork."""


os.register_at_fork(before=_before_fork, after_in_child=_after_fork)
