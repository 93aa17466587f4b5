"""Fields that nothing reads, of a record, a turn or a part: counted by name, or rejected if training would change.

`REMEDIES` is the table of the second kind.
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from energon_packed.errors import Reason, RecordError
from energon_packed.records.fields import SCALARS, Record, given, is_given, unsupported_field

RECORD_WEIGHTS = ("weight", "sample_weight", "loss_weight", "loss_scale")
"""Fields of a record that may have its loss weight; `normalize` reads them with `record_weight='loss'`."""

_MASK = "give each turn a weight: 0 or 1"
_RECORD_WEIGHT = (
    "set `record_weight` to loss if it multiplies the loss of the record; to repeat or sample records, use the "
    "`weight` of a source"
)
_TOOLS = "pass the schemas as tools beside messages, and calls as tool_calls of a turn"
# Fields that would change training if they were ignored: pattern of the name -> remedy. Other fields are only counted.
REMEDIES = {
    r"audios?|audio_.*": "list the audio files as audios, with an <audio> in the text for each",
    # Names of a score, a model or an id describe the answers of a pair.
    r"(chosen|rejected)(?!.*(?i:scores?|ratings?|rewards?|ranks?|models?|policy|source|ids?|index|idx|lengths?|tokens?|"
    r"counts?|logps?|names?|types?)$).*|preferred|dispreferred": "write the answers as chosen and rejected",
    r"loss.*|(?!attention_)(.*_)?masks?|masked|weights?|sample_weight|train|training|train_.*": _MASK,
    r"tools?|functions?|function_calls?|tool_calls?|tool_call_.*": _TOOLS,
    r"system.*|developer.*": "pass it as system",
    r"chat_template_kwargs": "write it as a field of the record",
    r"reasoning.*|thinking.*|thought.*": "move it into the assistant turn as reasoning_content",
    r"bbox(es)?|bounding_boxes": "write the boxes into the text, in the coordinates of the model, with an `adapter`",
    r".*_pixels|resized_(height|width)": (
        "write it into the object of the image, as in images=[{path, max_pixels}], or pass min_pixels and max_pixels "
        "as options"
    ),
    r"video(?!.*_ids?$).*": "pass video files or lists of frames as videos",
    r"n?frames|(min|max)_frames|do_sample_frames": "pass the frames as videos, one list for each video",
    r"history": "write the earlier turns as messages",
    r"image_urls?": "nothing is fetched; download the image and give its path as image",
    r"pixel_values(_.*)?|(image|video)_grid_thw": "pixels are computed while training; list the images as images",
    r"images?|inline_data|file_data": "list images in the images field of the record",
    r"patch_positions": "list it in the record",
}
_RISKY = re.compile("|".join(f"(?:{pattern})" for pattern in REMEDIES))
_WORD_STARTS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|[\s.-]+")
_ABOUT_VIDEO = re.compile(
    r"video_(fps|duration|length|width|height|size|resolution|num_frames|source|title|name|type|category|format|codec|"
    r"hash|urls?|link|metadata)"
)
_ABOUT_AUDIO = re.compile(
    r"audio_(duration|length|seconds|sampling_rate|sample_rate|source|title|name|type|category|format|codec|hash|"
    r"urls?|link|metadata|id|language|num_samples|samples)"
)
_MEDIA = re.compile(r"images?|image_urls?|videos?")  # `media/unlisted.py` decides about their other spellings


def unused_fields(record: Record, known: frozenset[str], label: str = "the record") -> tuple[str, ...]:
    """List the fields that have a value and are not read.

    Args:
        record: a record, a turn or a content part.
        known: fields that are read.
        label: the object with the fields, for errors.

    Raises:
        RecordError: `unsupported_field` for a field that would change training, `unsupported_media` for a field with
            the bytes of an image or video.
    """
    # The names are checked before the values: most records have no unknown field, and the answer is cached.
    names = _unknown(tuple(record), known)
    if not names:
        return ()
    unused = []
    for name, is_risky in names:
        value = record[name]
        if value is None:
            continue
        if is_risky and is_given(value) and not _is_metadata(name, record):
            is_weight = name in RECORD_WEIGHTS and label == "the record" and isinstance(value, int | float)
            raise unsupported(name, label, _RECORD_WEIGHT if is_weight else "")
        if value.__class__ not in SCALARS and _is_media_bytes(value):
            raise RecordError(
                Reason.UNSUPPORTED_MEDIA,
                f"the field {name} of {label} contains an image or video; rename it to images, or add image={name} to "
                "`map`",
            )
        if not is_risky or is_given(value):
            unused.append(str(name))
    return tuple(unused)


def unsupported(name: str, label: str = "the record", remedy: str = "") -> RecordError:
    """Make the RecordError for an unsupported field, with its remedy."""
    names = (name, _plain_name(name))
    remedies = (text for pattern, text in REMEDIES.items() if any(re.fullmatch(pattern, n) for n in names))
    remedy = remedy or next(remedies, "remove it, or convert it with an `adapter`")
    return unsupported_field(f"the field {name} of {label} is not supported: {remedy}")


@lru_cache(maxsize=4096)
def _unknown(names: tuple[str, ...], known: frozenset[str]) -> tuple[tuple[str, bool], ...]:
    """List (unknown field, whether ignoring it would change training); cached, as the records of a file share keys."""
    return tuple((name, _is_risky(str(name))) for name in names if name not in known)


def _is_risky(name: str) -> bool:
    plain = _plain_name(name)
    return any(_RISKY.fullmatch(n) is not None for n in ((name,) if _MEDIA.fullmatch(plain) else (name, plain)))


def _plain_name(name: str) -> str:
    """Spelling of a name in the patterns: `toolCalls`, `Tool-Calls` and `TOOL_CALLS` are `tool_calls`."""
    return _WORD_STARTS.sub("_", name).lower()


def _is_metadata(name: str, record: Record) -> bool:
    """Whether a field is harmless: `reasoning` as a flag (Nemotron), `image_url` as the origin of an image (PixMo).

    `video_duration`, `video_url`, `audio_length` and similar fields describe a video or audio file of the record.
    """
    # A flag does not contain reasoning that would be lost.
    if _plain_name(name) in ("reasoning", "thinking"):
        return isinstance(record[name], bool) or record[name] in ("on", "off", "yes", "no")
    if name in ("image_url", "image_urls"):
        return is_given(record.get("image")) or is_given(record.get("images"))
    described = [(_ABOUT_VIDEO, ("video", "videos")), (_ABOUT_AUDIO, ("audio", "audios"))]
    return any(about.fullmatch(name) is not None and bool(given(record, keys)) for about, keys in described)


def _is_media_bytes(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = value.get("bytes")
    return isinstance(value, bytes | bytearray) and len(value) > 0
