"""StoredSample: one sample as a codec writes it into a pack and reads it back."""

from dataclasses import dataclass, field
from typing import NamedTuple

from energon_packed.records import Conversation, MediaReference


@dataclass(frozen=True, slots=True)
class StoredImage:
    """An image of a sample.

    Attributes:
        extension: file extension of its format, without a dot.
        data: the bytes of the file.
        part: the member that it was read from; "" before it is written.
    """

    extension: str
    data: bytes
    part: str = field(default="", compare=False)


class StoredSample(NamedTuple):
    """One sample of a pack; what `Codec.write` takes and `Codec.read` returns.

    Attributes:
        conversation: the sample. Read back, its media are the bytes in `images` and `patch_positions`.
        length: tokens, after truncation; None where the packer recorded none.
        truncate: tokens that longer samples were truncated to, or None.
        is_truncated: this one was longer.
        images: of the conversation, in order.
        patch_positions: bytes of each .npy file.
    """

    conversation: Conversation
    length: int | None
    truncate: int | None = None
    is_truncated: bool = False
    images: tuple[StoredImage, ...] = ()
    patch_positions: tuple[bytes, ...] = ()


def media_references(images: tuple[StoredImage, ...]) -> tuple[MediaReference, ...]:
    """The bytes of images as references of a conversation."""
    return tuple([MediaReference(data=image.data) for image in images])


def byte_references(files: tuple[bytes, ...]) -> tuple[MediaReference, ...]:
    """Bytes as references of a conversation."""
    return tuple([MediaReference(data=data) for data in files])
