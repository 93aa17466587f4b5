"""Records in, Conversations out: the common representation that is measured, packed and encoded.

    record ──map, adapter──► record ──record format──► PartialConversation ──system, media──► Conversation

kinds.py: images, videos and audio files, whose code is one loop. conversation.py: Conversation, Message. normalize.py:
the path above, with mapping.py (field maps, adapters) and record_formats/. columns.py: values of each token.
groups.py: records with a common field. turns.py: a turn in any spelling -> Message. tools.py: function schemas.
exact_json.py: JSON without loss. fields.py: checked values of fields. unused_fields.py: fields that nothing reads.
media_fields.py: images and videos that a record lists, with video_fields.py for the values of video fields;
unlisted_media.py: media in fields that are not read. media.py: MediaReference, the address of the bytes of an image or
video, and the only code that reads them. file_types.py: formats by the first bytes. video.py: VideoReference, a video
file and its selected frames. audio.py: AudioReference, an audio file.
"""

from energon_packed.records.audio import AudioClip, AudioReference
from energon_packed.records.conversation import EXTRA_FIELDS, ROLES, Conversation, Message
from energon_packed.records.kinds import AUDIO_PLACEHOLDER, IMAGE_PLACEHOLDER, VIDEO_PLACEHOLDER
from energon_packed.records.mapping import Adapter, FieldMap
from energon_packed.records.media import MediaReference
from energon_packed.records.normalize import normalize
from energon_packed.records.record_formats import PartialConversation, RecordFormat, register_record_format
from energon_packed.records.video import FrameSelection, VideoReference

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
