"""TemplateMemo: what rendering has told about a chat template, kept so that a later run need not import Transformers.

Skeletons and the shape of turns are found by rendering markers, never texts of a user.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import astuple
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from energon_packed.encoding.skeleton import Skeleton
from energon_packed.encoding.turns import TurnShape
from energon_packed.encoding.user_cache import cache_file, keep, recall

Answer = TypeVar("Answer")
_MOST_TURNS = 64  # longer conversations are rendered by every run
_CODE = ("purity.py", "skeleton.py", "template.py", "turns.py")


class TemplateMemo:
    """Answers about one template.

    Args:
        decides: all that decides the answers, as plain JSON types; the versions and the code are added.
    """

    def __init__(self, *decides: Any) -> None:
        code = [(Path(__file__).parent / name).read_text(encoding="utf-8") for name in _CODE]
        versions = [version("transformers"), version("jinja2")]
        self._key = hashlib.sha256(json.dumps([decides, versions, code]).encode()).hexdigest()

    def skeleton(self, roles: tuple[str, ...], find: Callable[[], Skeleton | None]) -> Skeleton | None:
        """The skeleton of a sequence of roles, by `find` where no earlier run has found it."""
        if len(roles) > _MOST_TURNS:
            return find()
        return self._answer(("skeleton", *roles), find, _read_skeleton)

    def shape(self, find: Callable[[], TurnShape]) -> TurnShape:
        """The shape of turns, by `find` where no earlier run has found it."""
        return self._answer(("shape",), find, _read_shape)

    def _answer(self, question: tuple[str, ...], find: Callable[[], Answer], read: Callable[[Any], Answer]) -> Answer:
        file = cache_file("chat-templates", hashlib.sha256(json.dumps([self._key, question]).encode()).hexdigest())
        try:
            return read(recall(file)["answer"])
        except (KeyError, TypeError, ValueError):  # none, or a damaged one
            found = find()
        keep(file, {"answer": None if found is None else astuple(found)})  # type: ignore[call-overload]
        return found


def _read_skeleton(value: Any) -> Skeleton | None:
    if value is None:
        return None
    pieces, order, places = value
    turns = tuple(((int(a), int(i)), (int(b), int(j))) for (a, i), (b, j) in places)
    return Skeleton(tuple(map(str, pieces)), tuple(map(int, order)), turns)


def _read_shape(value: Any) -> TurnShape:
    prompt, header, end, added, special = value
    return TurnShape(str(prompt), str(header), end, tuple(added), tuple(special))
