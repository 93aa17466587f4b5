"""Records and what they become.

    record (any shape) ──normalize──► Conversation ──► messages, text or tokens + MediaReferences

`conversation.py` is the shape, `records.py` reads every supported record into it, `media.py` reads media bytes.
"""

from energon_packed.conversation.conversation import (
    EXTRA_FIELDS,
    IMAGE_PLACEHOLDER,
    ROLES,
    Conversation,
    Message,
)
from energon_packed.conversation.media import MediaReference
from energon_packed.conversation.records import normalize

__all__ = [
    "EXTRA_FIELDS",
    "IMAGE_PLACEHOLDER",
    "ROLES",
    "Conversation",
    "MediaReference",
    "Message",
    "normalize",
]
