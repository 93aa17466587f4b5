"""Records and the one form that each becomes.

    record ──map, adapter──► record ──shape.read──► Draft ──system, placing──► Conversation: messages, text or tokens,
                                                                               with MediaReferences

conversation.py   Conversation and Message
normalize.py      record -> Conversation
shapes/           one file per record shape
mapping.py        field maps and adapters: the user's own records
turns.py          one turn, in every spelling: role, content, and what else it has
weights.py        masks of turns: which are targets
tool_calls.py     tool calls, in the form that templates take
history.py        earlier turns as pairs
choices.py        lettered choices of a question
parts.py          content parts, with or without their type
system.py         the system prompt of a record
media_fields.py   images and videos that a record lists
placing.py        their placeholders in the turns
accounting.py     which fields nothing reads, and which of them cost the record
fields.py         values of fields, checked
media.py          where the bytes of an image are, and the only code that reads them
"""

from energon_packed.records.conversation import (
    EXTRA_FIELDS,
    IMAGE_PLACEHOLDER,
    ROLES,
    Conversation,
    Message,
)
from energon_packed.records.mapping import Adapter, FieldMap
from energon_packed.records.media import MediaReference
from energon_packed.records.normalize import normalize
from energon_packed.records.shapes import Draft, Shape, register_shape

__all__ = [
    "EXTRA_FIELDS",
    "IMAGE_PLACEHOLDER",
    "ROLES",
    "Adapter",
    "Conversation",
    "Draft",
    "FieldMap",
    "MediaReference",
    "Message",
    "Shape",
    "normalize",
    "register_shape",
]
