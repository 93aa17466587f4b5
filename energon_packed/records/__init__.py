"""Records in, Conversations out: the common representation that is measured, packed and encoded.

    record ──map, adapter──► record ──record format──► PartialConversation ──system, media──► Conversation

conversation.py: Conversation, Message. normalize.py: the path above, with mapping.py (field maps, adapters) and
record_formats/. media/: images, videos and audio files. columns.py: values of each token. groups.py: records with a
common field. turns.py: a turn in any spelling -> Message. tools.py: function schemas. objects.py: boxes in the text.
exact_json.py: JSON without loss. fields.py: checked values of fields. unused_fields.py: fields that nothing reads.
"""

from energon_packed.records.conversation import EXTRA_FIELDS, ROLES, Conversation, Message
from energon_packed.records.mapping import Adapter, FieldMap
from energon_packed.records.media.audio import AudioClip, AudioReference
from energon_packed.records.media.kinds import AUDIO_PLACEHOLDER, IMAGE_PLACEHOLDER, VIDEO_PLACEHOLDER
from energon_packed.records.media.reference import MediaReference
from energon_packed.records.media.video import FrameSelection, VideoReference
from energon_packed.records.normalize import normalize
from energon_packed.records.record_formats import PartialConversation, RecordFormat, register_record_format

__all__ = [
    "AUDIO_PLACEHOLDER",
    "EXTRA_FIELDS",
    "IMAGE_PLACEHOLDER",
    "ROLES",
    "VIDEO_PLACEHOLDER",
    "Adapter",
    "AudioClip",
    "AudioReference",
    "Conversation",
    "FieldMap",
    "FrameSelection",
    "MediaReference",
    "Message",
    "PartialConversation",
    "RecordFormat",
    "VideoReference",
    "normalize",
    "register_record_format",
]
