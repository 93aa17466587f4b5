"""AudioReference: an audio file of a record, or a part of it, and the samples that are read from it (AudioClip).

A record names a file. Measuring counts its samples from the header and the packets. A pack stores the file and the
clip, so that training reads exactly these samples: a file that decodes to another number of samples is an error.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from energon_packed.errors import Reason, RecordError
from energon_packed.records.fields import given, is_given, is_number, shown, unsupported_field
from energon_packed.records.media.reference import ImageRoot, MediaReference
from energon_packed.records.unused_fields import unused_fields

KEYS = ("audio", "audio_url", "bytes", "path", "url")
"""Fields of a content part or object with its audio file, in order of preference."""
_PART = ("offset", "duration")
_INLINE = ("input_audio",)
_FORMAT = frozenset(("data", "format"))
# `datasets` stores {"bytes", "path"}; {"array", "sampling_rate"} is a decoded file, whose samples are not stored.
FILE_FIELDS = frozenset(("type", *KEYS, *_INLINE, *_PART, "sampling_rate"))
"""Fields of a content part or object with an audio file that are read."""
_LONGEST = 1e6  # seconds of an offset or a duration


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioClip:
    """Samples of an audio file, at the rate of the file. A sample is the value of all channels at a time.

    Attributes:
        rate: samples per second of the file.
        start: first sample.
        samples: number of samples.
        total: samples of the file.

    Examples:
        >>> clip = AudioClip(rate=16000, start=0, samples=24000, total=24000)
        >>> clip.seconds
        1.5
    """

    rate: int
    start: int
    samples: int
    total: int

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.samples / self.rate

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole file."""
        return self.samples == self.total


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioReference:
    """An audio file of a sample, or a part of it.

    Attributes:
        file: the file.
        offset: seconds at which the part starts; 0 for the start of the file.
        duration: seconds of the part; None for the rest of the file.
        clip: the samples of the part; None in a record, before it is measured.

    Examples:
        >>> record = {"audios": ["hello.wav"], "prompts": ["What is said?"], "captions": ["Hello."]}
        >>> audio = normalize(record).audios[0]
        >>> audio.file.label, audio.clip
        ('hello.wav', None)
    """

    file: MediaReference
    offset: float = 0.0
    duration: float | None = None
    clip: AudioClip | None = None


def read_audio(value: Any, root: str | ImageRoot | None) -> AudioReference:
    """Make a reference from the value of an audio file.

    Args:
        value: a path, URL, bytes, MediaReference or AudioReference; an object with one of them, perhaps with `offset`
            and `duration` in seconds; or `{"input_audio": {"data", "format"}}` with base64, of OpenAI.
        root: folder that relative paths start from.

    Raises:
        RecordError: `missing_audio` if the value does not name a file; `unsupported_media` if it is remote, or decoded
            already; `unsupported_field` for a field of an object that would change training.
    """
    if isinstance(value, AudioReference):
        return value
    if not isinstance(value, Mapping):
        return AudioReference(file=MediaReference.from_value(value, root, kind="audio"))
    if is_given(value.get("array")):
        raise RecordError(
            Reason.UNSUPPORTED_MEDIA, "an audio file is decoded; read the dataset with `Audio(decode=False)`"
        )
    unused_fields(value, FILE_FIELDS | _FORMAT, "an audio file")  # only for its rejections
    inner: Any = next((value[key] for key in given(value, (*_INLINE, *KEYS))), None)
    if isinstance(inner, Mapping) and isinstance(inner.get("data"), str):
        inner = _inline(inner)
    elif isinstance(inner, Mapping):
        if any(isinstance(deep, Mapping) for deep in inner.values()):
            raise RecordError(Reason.MISSING_AUDIO, "an audio file is nested in several objects; use a path or bytes")
        inner = read_audio(inner, root)
    elif inner is None and value.get("bytes") == b"":
        inner = b""
    found = read_audio(inner, root)
    offset, duration = (_seconds(value, name) for name in _PART)
    if duration == 0:
        raise unsupported_field("duration of an audio file must be above 0 seconds; remove the record")
    return AudioReference(
        file=found.file,
        offset=found.offset if offset is None else offset,
        duration=found.duration if duration is None else duration,
        clip=found.clip,
    )


def _inline(value: Mapping[str, Any]) -> str:
    data = value["data"]
    if data.startswith(("data:", "file://")):
        return str(data)
    return f"data:audio/{value.get('format') or 'wav'};base64,{''.join(data.split())}"


def _seconds(value: Mapping[str, Any], name: str) -> float | None:
    number = value.get(name)
    if number is None:
        return None
    if not is_number(number) or not 0 <= number <= _LONGEST:
        raise unsupported_field(f"{name} of an audio file must be seconds, not {shown(number)}")
    return float(number)
