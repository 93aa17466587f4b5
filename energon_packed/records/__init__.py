"""Records and the one form that each becomes.

    record ──shape.read──► Draft ──assemble──► Conversation: messages, text or tokens, with MediaReferences

conversation.py   Conversation and Message
normalize.py      record -> Conversation
shapes/           one file per record shape
media_fields.py   images and videos that a record lists, and their placeholders
parts.py          typed content parts
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
from energon_packed.records.media import MediaReference
from energon_packed.records.normalize import normalize
from energon_packed.records.shapes import Draft, Shape, register_shape

__all__ = [
    "EXTRA_FIELDS",
    "IMAGE_PLACEHOLDER",
    "ROLES",
    "Conversation",
    "Draft",
    "MediaReference",
    "Message",
    "Shape",
    "normalize",
    "register_shape",
]
