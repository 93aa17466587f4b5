"""Codec: what a pack of one flavor looks like on disk, written and read in one place.

StoredSample: one sample as a codec writes it into a pack and reads it back.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, ClassVar, NamedTuple, TypeVar

from energon_packed.errors import FormatError
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


_READERS = {"read", "lengths", "fields", "samples"}  # methods that meet the damage of a pack
_MEDIA = re.compile(r"img\w*\.\w+")
T = TypeVar("T")
Part = tuple[str, bytes]
"""(part name, content): `("json", b"...")` becomes the member `{key}.json`."""
RawPack = Mapping[str, Any]
"""`__key__` and the content of each member by what follows the first dot of its name."""


def _damage_named(read: Callable[[Any, Mapping[str, Any]], T]) -> Callable[[Any, Mapping[str, Any]], T]:
    """A method that reads the parts of a pack, or the columns in them.

    What it raises over parts that do not fit, such as a missing column, becomes a FormatError.
    """

    @wraps(read)
    def named(codec: Any, parts: Mapping[str, Any]) -> T:
        try:
            return read(codec, parts)
        except FormatError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            pack = parts.get("__key__") or "the pack"
            what = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise FormatError(f"{pack} is damaged, or no {codec.sample_class} ({what})") from error

    return named


class Codec(ABC):
    """The parts of a pack of one flavor. `read(write(samples)) == samples` holds for what `check` accepts.

    Attributes:
        sample_class: name of the flavor, as `pack --sample-class` takes it.
        flavor_class, flavor_module: its Energon dataclass in `energon_packed.flavors`, and the module with that, its
            `sample_loader` and `part_filter`. The defaults serve any codec that is registered where the data is
            loaded.
        layout: name of a stricter form of the flavor, as `pack --layout` takes it; images are then JPEGs named `.jpg`.
        packed: a member holds a pack; False for one sample per member.
        stores_tokens: conversations are written as `input_ids` and `labels`.
        lengths_part: the one part that `lengths` needs.
    """

    sample_class: ClassVar[str]
    flavor_class: ClassVar[str] = "StoredPack"
    flavor_module: ClassVar[str] = "energon_packed.flavors.stored_pack"
    layout: ClassVar[str] = ""
    packed: ClassVar[bool] = True
    stores_tokens: ClassVar[bool] = False
    lengths_part: ClassVar[str] = "json"

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name in _READERS & cls.__dict__.keys():
            setattr(cls, name, _damage_named(cls.__dict__[name]))

    @abstractmethod
    def matches(self, raw: RawPack) -> bool:
        """Whether a pack is of this flavor, by its parts."""

    def check(self, conversation: Conversation) -> None:  # noqa: B027 - by default everything fits
        """Reject a conversation that this flavor cannot hold; called while measuring.

        Raises:
            RecordError: the message names what it cannot hold, and a flavor that can.
        """

    def fitted(self, conversation: Conversation) -> Conversation:
        """A conversation that `check` accepts, as this flavor holds it; it is measured in this form."""
        return conversation

    @abstractmethod
    def write(self, samples: Sequence[StoredSample]) -> list[Part]:
        """The parts of one pack."""

    @abstractmethod
    def read(self, raw: RawPack) -> list[StoredSample]:
        """The samples of one pack.

        Raises:
            FormatError: a part is missing or damaged.
        """

    @abstractmethod
    def lengths(self, raw: RawPack) -> list[int | None]:
        """Tokens of each sample as recorded, None where none was; `raw` needs `lengths_part` only.

        Raises:
            FormatError: the part is missing or damaged.
        """

    def part_filter(self, part: str) -> bool:
        """Which parts are read from the tar; others are not of this flavor."""
        return part == "json" or _MEDIA.fullmatch(part) is not None
