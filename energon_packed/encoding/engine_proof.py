"""Whether fastokens gives the ids of Hugging Face tokenizers for a tokenizer: tried on many texts, once.

The proof runs in a process of its own, `python -m energon_packed.encoding.engine_proof`, because fastokens starts
threads, which processes forked later lack. Its result is kept in the cache folder of the user, by tokenizer and
versions.
"""

import hashlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from filelock import FileLock

from energon_packed.encoding.engine_corpus import LONGEST, proof_texts
from energon_packed.encoding.engines import Engine, FastokensEngine, HuggingFaceEngine, compare
from energon_packed.encoding.user_cache import cache_file, keep, recall
from energon_packed.errors import EngineMismatch

_log = logging.getLogger(__name__)
_PROOF_VERSION = 1  # raise it when other texts are tried
_BATCH = 64
_TIME_LIMIT = 600.0  # seconds
_SPECIAL_STEP = 8  # one of this many texts is tried with the special tokens of the post-processor as well


@dataclass(frozen=True, slots=True)
class Proof:
    """Whether fastokens may be used; `detail` says why not."""

    holds: bool
    detail: str = ""


def fastokens_version() -> str | None:
    """The installed version; None without fastokens, or where it cannot be imported on this machine."""
    try:
        import fastokens  # noqa: F401

        return version("fastokens")
    except (ImportError, PackageNotFoundError):
        return None


def known_proof(serialized: str) -> Proof | None:
    """What an earlier proof found for this tokenizer and these versions; None without one."""
    if fastokens_version() is None:
        return Proof(False, "fastokens is not installed; run pip install fastokens")
    try:
        value = recall(_cache_file(serialized))
        return Proof(bool(value["holds"]), str(value["detail"]))
    except (KeyError, TypeError):
        return None


def prove(serialized: str) -> Proof:
    """The proof for a tokenizer, from the cache or made now, which takes some seconds.

    Args:
        serialized: tokenizer.json as text.
    """
    known = known_proof(serialized)
    if known is not None:
        return known
    file = _cache_file(serialized)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # One process proves, the others wait for it.
        lock: AbstractContextManager[object] = FileLock(f"{file}.lock", fallback_to_soft=False)
    except OSError:
        lock = nullcontext()
    try:
        with lock:
            return known_proof(serialized) or _proved_now(serialized, file)
    except OSError as error:  # a folder that takes no lock
        _log.info("no lock for the proof of the tokenizer engine: %s", error)
        return _proved_now(serialized, file)


def _proved_now(serialized: str, file: Path) -> Proof:
    """Run the proof, and keep what it finds; a proof that did not finish is not kept."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__],
            input=serialized.encode(),
            capture_output=True,
            env=environment,
            timeout=_TIME_LIMIT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Proof(False, f"the proof did not finish: {error}")
    try:
        value = json.loads(done.stdout)
        proof = Proof(bool(value["holds"]), str(value["detail"]))
    except (ValueError, KeyError, TypeError):
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        return Proof(False, f"the proof stopped with status {done.returncode}: {''.join(last)[:200]}")
    keep(file, {"holds": proof.holds, "detail": proof.detail})
    return proof


def compare_engines(backend: Any, fast: Engine, texts: Sequence[str], *, special: bool = False) -> None:
    """Refuse texts for which the two engines differ.

    Raises:
        EngineMismatch: they differ.
    """
    for start in range(0, len(texts), _BATCH):
        part = texts[start : start + _BATCH]
        expected, bounds = HuggingFaceEngine(backend).encode(part, special=special)
        found, found_bounds = fast.encode(part, special=special)
        if found.tobytes() == expected.tobytes() and found_bounds.tobytes() == bounds.tobytes():
            continue
        for number, text in enumerate(part):
            ours = found[found_bounds[number] : found_bounds[number + 1]]
            compare(text, ours, expected[bounds[number] : bounds[number + 1]].tolist(), special=special)


def try_all(serialized: str) -> Proof:
    """Compare the engines on all texts of the proof, in this process."""
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(serialized)
    texts = list(proof_texts(list(backend.get_added_tokens_decoder().values())))
    try:
        fast = FastokensEngine(serialized)
        compare_engines(backend, fast, texts)
        compare_engines(backend, fast, texts[::_SPECIAL_STEP], special=True)
        compare_engines(backend, fast, [LONGEST])
    except EngineMismatch as error:
        return Proof(False, str(error).partition("; run with")[0])
    except ValueError as error:
        return Proof(False, f"fastokens cannot read it: {' '.join(str(error).split())[:300]}")
    return Proof(True)


def _cache_file(serialized: str) -> Path:
    versions = f"{_PROOF_VERSION} {version('tokenizers')} {fastokens_version()} {sys.platform} "
    return cache_file("tokenizer-engines", hashlib.sha256(versions.encode() + serialized.encode()).hexdigest())


if __name__ == "__main__":
    _found = try_all(sys.stdin.buffer.read().decode())
    sys.stdout.write(json.dumps({"holds": _found.holds, "detail": _found.detail}))
