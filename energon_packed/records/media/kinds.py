"""MediaKind: the kinds of media of a record, in the words, placeholders and reasons of each.

    <image> and images[k]    <video> and videos[k]    <audio> and audios[k]

Code for all kinds is a loop over `MEDIA_KINDS`; only reading a value and decoding a file differ.
"""

from typing import NamedTuple

from energon_packed.errors import Reason

IMAGE_PLACEHOLDER, VIDEO_PLACEHOLDER, AUDIO_PLACEHOLDER = "<image>", "<video>", "<audio>"


class MediaKind(NamedTuple):
    """A kind of media.

    Attributes:
        name: type of a content part, such as `audio`.
        a: a file of the kind in messages, such as `an audio file`.
        fields: fields of a record with such media; the first is also the attribute of Conversation.
        suffixes: extensions of its files, in lower case.
        placeholder: text that marks the place of a file in a conversation.
        missing, corrupt, mismatch: reasons of rejected records; the last is for another number of placeholders.
    """

    name: str
    a: str
    fields: tuple[str, str]
    suffixes: tuple[str, ...]
    placeholder: str
    missing: Reason
    corrupt: Reason
    mismatch: Reason

    @property
    def noun(self) -> str:
        """A file of the kind without article, such as `audio file`."""
        return self.a.partition(" ")[2]

    @property
    def plural(self) -> str:
        """Several files of the kind, such as `audio files`."""
        return f"{self.noun}s"

    @property
    def field(self) -> str:
        """Attribute of Conversation with the media of the kind."""
        return self.fields[0]

    def has_suffix(self, name: str) -> bool:
        """Whether a path ends like a file of the kind."""
        return name.lower().endswith(self.suffixes)


IMAGE = MediaKind(
    name="image",
    a="an image",
    fields=("images", "image"),
    suffixes=(
        *(".jpg", ".jpeg", ".jfif", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".heic", ".heif", ".avif"),
        ".jp2",
    ),
    placeholder=IMAGE_PLACEHOLDER,
    missing=Reason.MISSING_IMAGE,
    corrupt=Reason.CORRUPT_IMAGE,
    mismatch=Reason.IMAGE_COUNT_MISMATCH,
)
VIDEO = MediaKind(
    name="video",
    a="a video",
    fields=("videos", "video"),
    suffixes=(
        *(".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".ts", ".mts", ".m2ts", ".mpg", ".mpeg", ".flv", ".f4v"),
        *(".wmv", ".asf", ".3gp", ".3g2", ".ogv", ".vob"),
    ),
    placeholder=VIDEO_PLACEHOLDER,
    missing=Reason.MISSING_VIDEO,
    corrupt=Reason.CORRUPT_VIDEO,
    mismatch=Reason.VIDEO_COUNT_MISMATCH,
)
AUDIO = MediaKind(
    name="audio",
    a="an audio file",
    fields=("audios", "audio"),
    suffixes=(
        *(".wav", ".flac", ".mp3", ".m4a", ".m4b", ".aac", ".ogg", ".oga", ".opus", ".weba", ".aif", ".aiff", ".aifc"),
        *(".au", ".caf", ".w64", ".wma", ".amr", ".mka", ".mp2"),
    ),
    placeholder=AUDIO_PLACEHOLDER,
    missing=Reason.MISSING_AUDIO,
    corrupt=Reason.CORRUPT_AUDIO,
    mismatch=Reason.AUDIO_COUNT_MISMATCH,
)
MEDIA_KINDS = {kind.name: kind for kind in (IMAGE, VIDEO, AUDIO)}
"""All kinds by name, in the order of the attributes of Conversation."""
