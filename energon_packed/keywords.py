"""Types of `**keywords` for editors and type checkers, which read them in `keywords.pyi`.

`tools/make_keywords.py` writes that file from the declared options. At runtime each type is a dict: the modules of the
types in it import this module, so this module cannot import them.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    if not name.endswith("Keywords"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return dict[str, Any]
