"""`extract_pack`: extract the members of a pack as files inside one folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from energon_packed.errors import FormatError
from energon_packed.files import write_whole


def extract_pack(raw: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write each part of a pack to `folder/KEY/PART`.

    Args:
        raw: `__key__` and bytes by part name.
        folder: created if missing; nothing is written outside of it.

    Raises:
        FormatError: a member name resolves to a path outside of the folder; nothing is written then.
    """
    target = folder / str(raw["__key__"])
    files = {}
    for part, content in raw.items():
        if part.startswith("__"):
            continue
        path = target / part
        if "\0" in str(path) or "/" in part or not path.resolve().is_relative_to(folder.resolve()):
            raise FormatError(
                f"member {raw['__key__']}.{part} would be written outside of {folder}; it was not extracted"
            )
        files[path] = content
    for path, content in files.items():
        write_whole(path, content)  # a new file: a hard link in the folder is replaced, not written through
    return list(files)
