"""Transformers tokenizers without torch: the class of a folder is asked for once, and imported by itself from then on.

`AutoTokenizer` imports the model configurations, which import torch: two seconds and some hundred megabytes in each
process, for a tokenizer that needs neither. What it decides, which class reads the folder, is kept in the cache folder
of the user, by the contents of the settings and the version of Transformers.
"""

import hashlib
import importlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from energon_packed.encoding.user_cache import cache_file, keep, recall

_GENERIC = ("TokenizersBackend", "PreTrainedTokenizerFast")
_SMALL = 1 << 20  # bytes: settings are smaller, vocabularies larger


def load_by_class(folder: Path) -> Any:
    """The tokenizer that `AutoTokenizer.from_pretrained` gives for a folder with settings.

    Raises:
        OSError, ValueError, KeyError, TypeError: as Transformers does.
    """
    file = cache_file("tokenizer-classes", _key(folder))
    found = _generic(folder) or _known(file)
    if found is not None:
        return found.from_pretrained(str(folder))
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    kind = type(tokenizer)
    if kind.__module__.partition(".")[0] == "transformers":
        keep(file, {"module": kind.__module__, "name": kind.__qualname__})
    return tokenizer


def _generic(folder: Path) -> Any:
    """The class that reads any tokenizer.json, where the settings ask for it and no model may ask for another."""
    if (folder / "config.json").exists():
        return None
    try:
        settings = json.loads((folder / "tokenizer_config.json").read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(settings, dict) or settings.get("tokenizer_class") not in _GENERIC or "auto_map" in settings:
        return None
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast


def _known(file: Path) -> Any:
    """The class that an earlier run was given; None without one."""
    try:
        value = recall(file)
        return getattr(importlib.import_module(value["module"]), value["name"])
    except (KeyError, TypeError, ImportError, AttributeError):
        return None


def _key(folder: Path) -> str:
    """Digest of what `AutoTokenizer` decides by: the settings, the names of all files, the name of the folder."""
    digest = hashlib.sha256(f"{version('transformers')} {folder.resolve()}".encode())
    for path in sorted(folder.iterdir()):
        digest.update(f"\n{path.name}\n".encode())
        if path.suffix == ".json" and path.stat().st_size <= _SMALL:
            digest.update(path.read_bytes())
        elif path.name == "tokenizer.json":
            digest.update(str(path.stat().st_mtime_ns).encode())
    return digest.hexdigest()
