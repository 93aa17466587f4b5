"""Interface of codecs: `Codec.write` converts `StoredSample`s to the parts of a pack, `Codec.read` converts them back.

A part is (name, bytes), one file of a tar key. A codec also recognizes the packs of its flavor (`matches`), rejects
conversations that the flavor cannot store (`check`) and reads lengths without the media (`lengths`).
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, ClassVar, TypeVar

from energon_packed.errors import FormatError
from energon_packed.formats.references import MEDIA_PART, complete_parts
from energon_packed.records import Conversation


@dataclass(frozen=True, slots=True)  # not a NamedTuple, which `energon preview` cannot print
class StoredSample:
    """One sample of a pack: the input of `Codec.write` and the result of `Codec.read`.

    Attributes:
        conversation: the sample. Its media have an `extension`, and bytes or a `locator`; read back, all have bytes.
        length: tokens after truncation; None if the packer recorded no lengths.
        truncate: tokens that longer samples were truncated to, or None.
        is_truncated: the sample was longer than `truncate`.

    Examples:
        >>> StoredSample(normalize({"text": "A document."}), length=4).is_truncated
        False
    """

    conversation: Conversation
    length: int | None
    truncate: int | None = None
    is_truncated: bool = False


_READERS = {"read", "read_row", "lengths"}  # methods of a codec that parse a pack, which may be damaged
_MEDIA = re.compile(r"(?:img|vid|aud)\w*\.\w+")
T = TypeVar("T")
Part = tuple[str, bytes]
"""(part name, content): `("json", b"...")` becomes the member `{key}.json`."""
RawPack = Mapping[str, Any]
"""`__key__`, and the content of each member by its part name (the name after the first dot)."""


def _as_format_error(read: Callable[[Any, Mapping[str, Any]], T]) -> Callable[[Any, Mapping[str, Any]], T]:
    """Decorate a method that parses a pack: errors such as a missing column become a FormatError.

    It resolves references to media, which no codec knows; `lengths` needs no media.
    """
    needs_media = read.__name__ != "lengths"

    @wraps(read)
    def wrapper(codec: Any, parts: Mapping[str, Any]) -> T:
        if needs_media and MEDIA_PART in parts:
            parts = complete_parts(parts, with_paths=True)
        try:
            return read(codec, parts)
        except FormatError:
            raise
        # The errors that indexing and converting a value of a wrong type raise; others are bugs, and pass.
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            pack = parts.get("__key__") or "the pack"
            cause = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise FormatError(f"{pack} is damaged, or no {codec.sample_class} ({cause})") from error

    return wrapper


class Codec(ABC):
    """Base class: reads and writes the packs of a flavor. `read(write(samples)) == samples` if `check` accepts them.

    Attributes:
        sample_class: name of the flavor, the value of `pack --sample-class`.
        flavor_class, flavor_module: Energon dataclass of the flavor in `energon_packed.flavors`, and the module with
            the dataclass, its `sample_loader` and `part_filter`. The defaults work for any codec that is also
            registered in the process that loads the data.
        layout: name of a stricter variant of the flavor, the value of `pack --layout`; images are then `.jpg` files.
        packed: a tar key has several samples; False for one sample per key.
        stores_tokens: conversations are written as `input_ids` and `labels`.
        lengths_part: name of the only part that `lengths` needs.

    Examples:
        >>> class Lines(Codec):
        ...     sample_class = "PackedLines"
        ...
        ...     def matches(self, raw):
        ...         return "lines" in json.loads(raw["json"])
        ...
        ...     def write(self, samples):
        ...         lines = [sample.conversation.text for sample in samples]
        ...         return [("json", json.dumps({"lines": lines}).encode())]
        ...
        ...     def read(self, raw):
        ...         lines = json.loads(raw["json"])["lines"]
        ...         return [StoredSample(normalize({"text": line}), None) for line in lines]
        ...
        ...     def lengths(self, raw):
        ...         return [None] * len(self.read(raw))
        >>> Lines().write([StoredSample(normalize({"text": "A document."}), 4)])
        [('json', b'{"lines": ["A document."]}')]
    """

    sample_class: ClassVar[str]
    flavor_class: ClassVar[str] = "StoredPack"
    flavor_module: ClassVar[str] = "energon_packed.flavors.stored_pack"
    layout: ClassVar[str] = ""
    packed: ClassVar[bool] = True
    stores_tokens: ClassVar[bool] = False
    lengths_part: ClassVar[str] = "json"

    # Wrapped here rather than by a decorator on each method, which a custom codec would forget.
    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name in _READERS & cls.__dict__.keys():
            setattr(cls, name, _as_format_error(cls.__dict__[name]))

    @abstractmethod
    def matches(self, raw: RawPack) -> bool:
        """Return whether a pack is of this flavor, by its parts."""

    def check(self, conversation: Conversation) -> None:  # noqa: B027 - by default everything fits
        """Reject a conversation that this flavor cannot store; called while measuring.

        Raises:
            RecordError: the message names the unsupported content, and a flavor that can store it.
        """

    def fitted(self, conversation: Conversation) -> Conversation:
        """Convert a conversation that `check` accepts to its stored form; the result is measured and written."""
        return conversation

    @abstractmethod
    def write(self, samples: Sequence[StoredSample]) -> list[Part]:
        """Convert the samples of one pack to its parts."""

    @abstractmethod
    def read(self, raw: RawPack) -> list[StoredSample]:
        """Convert the parts of one pack to its samples.

        Raises:
            FormatError: a part is missing or damaged.
        """

    @abstractmethod
    def lengths(self, raw: RawPack) -> list[int | None]:
        """Return the recorded tokens of each sample, or None for each; `raw` needs only `lengths_part`.

        Raises:
            FormatError: the part is missing or damaged.
        """

    def part_filter(self, part: str) -> bool:
        """Return whether a part belongs to this flavor, so that it is read from the tar."""
        return part in ("json", MEDIA_PART) or _MEDIA.fullmatch(part) is not None
