"""PackView: one pack as a person reads it, from its parts alone. No tokenizer, no pixels, no code of the data set."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import orjson

from energon_packed.conversation import MediaReference
from energon_packed.encoding import IGNORE_INDEX
from energon_packed.encoding.images import read_header
from energon_packed.errors import FormatError, RecordError
from energon_packed.shards.layouts import layout_for, sample_class_of


@dataclass(frozen=True, slots=True)
class ImageView:
    """An image of a sample: member name, bytes, size in pixels as it will be seen (0 where the header is broken)."""

    name: str
    bytes: int
    width: int = 0
    height: int = 0
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """What one role says.

    Attributes:
        role: as in the data; `tools` for the schemas of functions.
        text: its content.
        supervised: it is a target by default: assistant turns, plain text.
        extra: what else the template is told, such as tool calls, by name.
    """

    role: str
    text: str
    supervised: bool
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
        turns: what is said; empty for tokens.
        images: in order.
        supervised: supervised tokens, where the pack holds tokens.
        video: the images are frames of a video.
        cut_to: tokens that it was cut to; what its text says after the cut is not in the row. None where it is whole.
    """

    id: str | None
    start: int | None
    length: int | None
    turns: tuple[Turn, ...]
    images: tuple[ImageView, ...]
    supervised: int | None = None
    video: bool = False
    cut_to: int | None = None

    @property
    def kind(self) -> str:
        """`text`, `image` or `video`."""
        return "video" if self.video else "image" if self.images else "text"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackView:
    """One pack.

    Attributes:
        key: in the tar.
        sample_class: flavor, told by the parts.
        parts: bytes of each member, by part name.
        shapes: shape and dtype of each .npy member.
        schema: what the json lacks or has beside the flavor's keys.
        samples: in order.
    """

    key: str
    sample_class: str
    parts: Mapping[str, int]
    shapes: Mapping[str, str]
    schema: Sequence[str]
    samples: Sequence[SampleView]

    @property
    def tokens(self) -> int | None:
        """Tokens of the pack, None where a length is not recorded."""
        lengths = [sample.length for sample in self.samples]
        return None if None in lengths else sum(length for length in lengths if length is not None)

    def as_dict(self) -> dict[str, Any]:
        """Plain types, for JSON."""
        return asdict(self) | {"tokens": self.tokens, "sample_count": len(self.samples)}


def view_pack(raw: Mapping[str, Any], sample_class: str | None = None) -> PackView:
    """Read a pack from its raw parts.

    Args:
        raw: `__key__` and bytes by part name, as `ShardReader` gives them.
        sample_class: flavor; None tells it by the parts.

    Raises:
        FormatError: the parts are those of no flavor, or broken.
    """
    name = sample_class or sample_class_of(raw)
    try:
        fields = layout_for(name).read(raw)
        samples = _SAMPLES[name](fields, raw)
    except FormatError:
        raise
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise FormatError(f"{raw['__key__']} is no {name}: {type(error).__name__} {error}") from error
    return PackView(
        key=str(raw["__key__"]),
        sample_class=name,
        parts={part: len(content) for part, content in raw.items() if not part.startswith("__")},
        shapes={part: _shape(content) for part, content in raw.items() if part.endswith(".npy")},
        schema=_schema(name, fields),
        samples=samples,
    )


def _captioning(fields: Mapping[str, Any], raw: Mapping[str, Any]) -> list[SampleView]:
    count = int(fields["sample_count"])
    turns = []
    for i in range(count):
        system = fields["systems"][i] if fields["systems"] else None
        said = [Turn("system", system, False)] if system is not None else []
        prompts, captions = fields["prompts"][i], fields["captions"][i]
        for j in range(max(len(prompts), len(captions))):
            said += [Turn("user", prompts[j], False)] if j < len(prompts) else []
            said += [Turn("assistant", captions[j], True)] if j < len(captions) else []
        turns.append(tuple(said if prompts else [Turn("text", text, True) for text in captions]))
    return _views(
        fields["ids"] or [None] * count,
        fields["lengths"],
        turns,
        fields["images"],
        raw,
        videos=fields["videos"],
        cut_to=[fields["truncate"] if is_cut else None for is_cut in fields["truncated"] or [False] * count],
    )


def _multi_mix(fields: Mapping[str, Any], raw: Mapping[str, Any]) -> list[SampleView]:
    samples = fields["samples"]
    return _views(
        [sample.get("id") for sample in samples],
        fields["lengths"],
        [_messages(sample) for sample in samples],
        fields["images"],
        raw,
        videos=[bool(sample.get("video")) for sample in samples],
        cut_to=[sample.get("truncate") if sample.get("truncated") else None for sample in samples],
    )


def _single(fields: Mapping[str, Any], raw: Mapping[str, Any]) -> list[SampleView]:
    return _multi_mix(
        {"samples": [fields["sample"]], "lengths": [fields["length"]], "images": [fields["images"]]}, raw
    )


def _messages(sample: Mapping[str, Any]) -> tuple[Turn, ...]:
    if sample.get("text") is not None:
        return (Turn("text", sample["text"], True),)
    if sample.get("input_ids") is not None:
        return (Turn("tokens", f"{len(sample['input_ids'])} tokens", True),)
    tools = [Turn("tools", _json(sample["tools"]), False)] if sample.get("tools") else []
    return (*tools, *(_turn(message) for message in sample.get("messages") or ()))


def _turn(message: Mapping[str, Any]) -> Turn:
    extra = {name: value for name, value in message.items() if name not in ("role", "content")}
    return Turn(message["role"], message["content"], message["role"] == "assistant", extra)


def _json(value: Any) -> str:
    return value if isinstance(value, str) else orjson.dumps(value).decode()


def _tokens(fields: Mapping[str, Any], raw: Mapping[str, Any]) -> list[SampleView]:
    bounds = fields["cu_seqlens"]
    supervised = [int(n) for n in np.add.reduceat(fields["labels"] != IGNORE_INDEX, bounds[:-1], dtype=np.int64)]
    lengths = np.diff(bounds).tolist()
    return _views(fields["ids"], lengths, [()] * len(lengths), fields["images"], raw, supervised)


_SAMPLES = {
    "PackedCaptioningSample": _captioning,
    "PackedMultiMixQASample": _multi_mix,
    "MultiMixQASample": _single,
    "PackedTokensSample": _tokens,
}


def _views(
    ids: Sequence[str | None],
    lengths: Sequence[int | None] | None,
    turns: Sequence[tuple[Turn, ...]],
    images: Sequence[Sequence[bytes]],
    raw: Mapping[str, Any],
    supervised: Sequence[int] | None = None,
    videos: Sequence[bool] | None = None,
    cut_to: Sequence[int | None] | None = None,
) -> list[SampleView]:
    known = list(lengths) if lengths else [None] * len(ids)
    starts = [0, *accumulate(length or 0 for length in known)]
    members = sorted((part for part in raw if part.startswith("img") and not part.endswith(".npy")), key=_place)
    counted = iter(members)
    return [
        SampleView(
            id=ident,
            start=None if None in known else starts[i],
            length=known[i],
            turns=turns[i],
            images=tuple(_image(next(counted, "?"), data) for data in images[i]),
            supervised=None if supervised is None else supervised[i],
            video=bool(videos and videos[i]),
            cut_to=cut_to[i] if cut_to else None,
        )
        for i, ident in enumerate(ids)
    ]


def _place(part: str) -> tuple[int, int]:
    sample, _, image = part.split(".")[0].removeprefix("img").partition("_")
    if not (sample.isdecimal() and image.isdecimal()):
        raise FormatError(f"the image member {part} is not named img{{sample}}_{{image}}.{{extension}}")
    return int(sample), int(image)


def _image(name: str, data: bytes) -> ImageView:
    try:
        header = read_header(MediaReference(data=data))
    except RecordError as error:
        return ImageView(name, len(data), problem=error.detail)
    return ImageView(name, len(data), header.width, header.height)


def _shape(content: bytes) -> str:
    try:
        array = np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
    except ValueError as error:
        return f"broken: {error}"
    return f"{array.dtype} {tuple(array.shape)}"


_OPTIONAL = {"PackedCaptioningSample": ("ids", "systems", "lengths")}


def _schema(name: str, fields: Mapping[str, Any]) -> list[str]:
    """Keys of the flavor that this pack does not have, in words."""
    return [f"no {key}, as in data of other packers" for key in _OPTIONAL.get(name, ()) if fields.get(key) is None]
