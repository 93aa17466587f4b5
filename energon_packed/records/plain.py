"""Plain records: turns with a role and a text, perhaps an id, and nothing else. Most files hold no other.

They are read in a few passes over all turns, each by one call of the interpreter. What is unusual in any way is left
to the shapes, which also say what is wrong; both ways give the same conversation.
"""

from functools import lru_cache
from typing import Any

from energon_packed.records.conversation import Conversation, plain_messages
from energon_packed.records.fields import Record
from energon_packed.records.shapes import Shape
from energon_packed.records.shapes.messages import Messages
from energon_packed.records.shapes.sharegpt import ShareGPT
from energon_packed.records.turns import PLAIN_ROLES, keys_of

_SHAPES = (Messages, ShareGPT)
_MEDIA = "<im"  # begins `<image>` and `<img>`


def plain_conversation(record: Record, shape: Shape) -> Conversation | None:
    """The conversation of a record that holds nothing but turns and an id; None for any other record."""
    if not isinstance(shape, _SHAPES) or len(record) > 1 + ("id" in record):
        return None
    turns = record.get(shape.key)
    if turns.__class__ is not list or not turns or turns[0].__class__ is not dict:
        return None
    keys = keys_of(tuple(turns[0]))
    if not keys.is_plain:
        return None
    try:
        names = tuple([turn[keys.role[0]] for turn in turns])
        contents = [turn[keys.content[0]] for turn in turns]
        has_media = _MEDIA in "".join(contents)  # a TypeError for what is no text
        roles, speakers = _roles(names)
    except (TypeError, KeyError):
        return None
    if has_media or not roles or sum(map(len, turns)) != 2 * len(turns):
        return None
    ident = record.get("id")
    for place in speakers:
        if contents[place] and not contents[place].isspace():
            return Conversation.of_checked(None if ident is None else str(ident), plain_messages(roles, contents))
    return None


@lru_cache(maxsize=1024)
def _roles(names: tuple[Any, ...]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """(role of each turn, turns of which one must say something); ((), ()) where the turns cannot be used as they are.

    As in `Conversation`: only the first may be a system message, and where a turn is an assistant's, one of these must
    not be empty.
    """
    roles = tuple([PLAIN_ROLES.get(name, "") for name in names])
    if "" in roles or "system" in roles[1:]:
        return (), ()
    answers = tuple([place for place, role in enumerate(roles) if role == "assistant"])
    return roles, answers or tuple(range(len(roles)))
