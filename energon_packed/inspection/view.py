"""PackView: one pack in readable form, from its parts: no pixels, no code of the dataset.

`extract_pack`: extract the members of a pack as files inside one folder.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from energon_packed.encoding import IGNORE_INDEX, ChatEncoder, Processor
from energon_packed.encoding.supervision import supervised_turns
from energon_packed.encoding.vision.images import read_header
from energon_packed.errors import FormatError, RecordError
from energon_packed.files import atomic_write
from energon_packed.formats import Codec, StoredSample, codec_of
from energon_packed.records import Conversation, MediaReference


@dataclass(frozen=True, slots=True)
class ImageView:
    """An image of a sample: member name, bytes, and size in pixels after EXIF orientation (0 if the header is bad)."""

    name: str
    bytes: int
    width: int = 0
    height: int = 0
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn.

    Attributes:
        role: as in the data; `tools` for the schemas of functions.
        text: its content.
        supervised: it has a target by its labels; None where there is no encoder to tell.
        extra: what else is passed to the template, such as tool calls, by name.
    """

    role: str
    text: str
    supervised: bool | None
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def shown(self) -> str:
        """Content and extras as one text."""
        lines = [f"{name}: {_json(value)}" for name, value in self.extra.items()]
        return "\n".join([self.text, *lines] if self.text else lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleView:
    """One sample of a pack.

    Attributes:
        id: its name, or None.
        start, length: place in the row and tokens; None where none are recorded.
        turns: in order.
        images: in order.
        supervised: supervised tokens, where the pack holds tokens.
        video: the images are frames of a video.
        truncated_to: tokens that it was truncated to; the end of its text is not in the row; or None.
    """

    id: str | None
    start: int | None
    length: int | None
    turns: tuple[Turn, ...]
    images: tuple[ImageView, ...]
    supervised: int | None = None
    video: bool = False
    truncated_to: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PackView:
    """One pack.

    Attributes:
        key: in the tar.
        sample_class: flavor.
        parts: bytes of each member, by part name.
        shapes: shape and dtype of each .npy member.
        samples: in order.
    """

    key: str
    sample_class: str
    parts: Mapping[str, int]
    shapes: Mapping[str, str]
    samples: Sequence[SampleView]

    @property
    def tokens(self) -> int | None:
        """Tokens of the pack, None where a length is not recorded."""
        lengths = [sample.length for sample in self.samples]
        return None if None in lengths else sum(length for length in lengths if length is not None)

    def as_dict(self) -> dict[str, Any]:
        """Plain types, for JSON."""
        return asdict(self) | {"tokens": self.tokens, "sample_count": len(self.samples)}


def view_pack(raw: Mapping[str, Any], codec: Codec | None = None, encoder: Processor | None = None) -> PackView:
    """Read a pack from its raw parts.

    Args:
        raw: `__key__` and bytes by part name, as `ShardReader` returns them.
        codec: of the flavor; None finds it by the parts.
        encoder: the one that it was packed with, which tells what is supervised; None leaves that open.

    Raises:
        FormatError: the parts match no flavor, or are damaged.
    """
    codec = codec or codec_of(raw)
    samples = codec.read(raw)
    lengths = [sample.length for sample in samples]
    starts = [0, *accumulate(length or 0 for length in lengths)]
    return PackView(
        key=str(raw["__key__"]),
        sample_class=codec.sample_class,
        parts={part: len(content) for part, content in raw.items() if not part.startswith("__")},
        shapes={part: _shape(content) for part, content in raw.items() if part.endswith(".npy")},
        samples=[
            _view(sample, None if None in lengths else start, encoder)
            for sample, start in zip(samples, starts, strict=False)
        ],
    )


def _view(sample: StoredSample, start: int | None, encoder: Processor | None) -> SampleView:
    conversation = sample.conversation
    return SampleView(
        id=conversation.id,
        start=start,
        length=sample.length,
        turns=_turns(sample, encoder),
        images=tuple(_image(image.part or "?", image.data) for image in sample.images),
        supervised=_supervised(conversation),
        video=conversation.video,
        truncated_to=sample.truncate if sample.is_truncated else None,
    )


def _turns(sample: StoredSample, encoder: Processor | None) -> tuple[Turn, ...]:
    conversation = sample.conversation
    if conversation.input_ids is not None:
        return (Turn("tokens", f"{len(conversation.input_ids)} tokens", None),)
    known = None
    if isinstance(encoder, ChatEncoder):
        known = supervised_turns(encoder, conversation, sample.truncate)
    flags: Sequence[bool | None] = known or [None] * max(len(conversation.messages), 1)
    if conversation.text is not None:
        return (Turn("text", conversation.text, flags[0]),)
    tools = [Turn("tools", _json(conversation.tools), False)] if conversation.tools else []
    columns = zip(conversation.messages, flags, strict=True)
    return (*tools, *(Turn(m.role, m.content, flag, m.extra) for m, flag in columns))


def _supervised(conversation: Conversation) -> int | None:
    """Supervised tokens, where the pack holds tokens."""
    if conversation.input_ids is None:
        return None
    labels = conversation.input_ids if conversation.labels is None else conversation.labels
    return int((labels != IGNORE_INDEX).sum())


def _json(value: Any) -> str:
    return value if isinstance(value, str) else orjson.dumps(value).decode()


def _image(name: str, data: bytes) -> ImageView:
    try:
        header = read_header(MediaReference(data=data))
    except RecordError as error:
        return ImageView(name, len(data), problem=error.detail)
    return ImageView(name, len(data), header.width, header.height)


def _shape(content: bytes) -> str:
    try:
        array = np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
    except (ValueError, MemoryError) as error:
        return f"damaged: {error}"
    return f"{array.dtype} {tuple(array.shape)}"


def extract_pack(raw: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write each part of a pack to `folder/KEY/PART`.

    Args:
        raw: `__key__` and bytes by part name.
        folder: created if missing; nothing is written outside of it.

    Raises:
        FormatError: a member name resolves to a path outside of the folder; nothing is written then.
    """
    target = folder / str(raw["__key__"])
    files = {}
    for part, content in raw.items():
        if part.startswith("__"):
            continue
        path = target / part
        if "\0" in str(path) or "/" in part or not path.resolve().is_relative_to(folder.resolve()):
            raise FormatError(
                f"member {raw['__key__']}.{part} would be written outside of {folder}; it was not extracted"
            )
        files[path] = content
    for path, content in files.items():
        atomic_write(path, content)  # a new file: a hard link in the folder is replaced, not written through
    return list(files)
