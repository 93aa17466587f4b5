"""Records and the one form that each becomes.

    record ──map, adapter──► record ──shape.read──► Draft ──system, placing──► Conversation: messages, text or tokens,
                                                                               with MediaReferences

conversation.py   Conversation and Message
normalize.py      record -> Conversation
shapes/           the record shapes
mapping.py        field maps and adapters: the user's own records
turns.py          one turn, in every spelling: role, content, and what else it has
media_fields.py   images and videos that a record lists
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
from energon_packed.records.record_formats import PartialConversation, RecordFormat, register_record_format

__all__ = [
    "EXTRA_FIELDS",
    "IMAGE_PLACEHOLDER",
    "ROLES",
    "Adapter",
    "Conversation",
    "FieldMap",
    "MediaReference",
    "Message",
    "PartialConversation",
    "RecordFormat",
    "normalize",
    "register_record_format",
]
