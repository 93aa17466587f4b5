"""Small JSON files in the cache folder of the user: what was found out once about a tokenizer."""

import json
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

_log = logging.getLogger(__name__)


def cache_file(kind: str, key: str) -> Path:
    """Where a value is kept: https://specifications.freedesktop.org/basedir-spec/latest/

    Args:
        kind: name of the folder.
        key: hex digest of all that decides the value.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    return folder / "energon-packed" / kind / f"{key[:32]}.json"


def recall(file: Path) -> Any:
    """A kept value; None where there is none, or a damaged one."""
    try:
        return json.loads(file.read_bytes())
    except (OSError, ValueError):
        return None


def keep(file: Path, value: Any) -> None:
    """Write a value; the file appears when it is complete. A folder that cannot be written keeps nothing."""
    temporary = file.with_suffix(f".{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(value), encoding="utf-8")
        temporary.replace(file)
    except OSError as error:
        _log.info("not kept in the cache: %s", error)
        with suppress(OSError):
            temporary.unlink()
