"""Clips of audio files as JSON, and back; names of the parts of audio files.

    aud{i}_{j}.{ext}   audio file j of sample i, as it is

`audio_files` lists the audio files of a sample, in order. Each has

    part             name of the file
    rate             samples per second of the file
    start, samples   the samples of the part that the sample has
    total            samples of the file

The restart state of `pack` has the same fields without the part (`clip_as_dict`, `clip_from_dict`).
"""

import re
from collections.abc import Mapping
from typing import Any

from energon_packed.files import of_type
from energon_packed.options import short
from energon_packed.records import AudioClip

_PART = re.compile(r"aud\d+_\d+\.\w+")
_HIGHEST_RATE = 768_000
_FIELDS = ("rate", "start", "samples", "total")


def is_audio_part(name: str) -> bool:
    """Return whether a part is an audio file."""
    return _PART.fullmatch(name) is not None


def clip_as_dict(clip: AudioClip) -> dict[str, Any]:
    """Return a clip as JSON."""
    return {name: getattr(clip, name) for name in _FIELDS}


def clip_from_dict(value: Mapping[str, Any]) -> AudioClip:
    """Return the clip of `clip_as_dict`, from untrusted JSON.

    Raises:
        ValueError, KeyError: it is not a part of an audio file; the message has the value.
    """
    numbers = [of_type(value, dict, "an entry of audio_files")[name] for name in _FIELDS]
    # True is an int of Python.
    is_valid = all(type(number) is int for number in numbers)
    if is_valid:
        rate, start, samples, total = numbers
        is_valid = 0 < rate <= _HIGHEST_RATE and start >= 0 and samples > 0 and start + samples <= total < 1 << 48
    if not is_valid:
        raise ValueError(f"a clip is {short(dict(zip(_FIELDS, numbers, strict=True)))}")
    return AudioClip(rate=rate, start=start, samples=samples, total=total)
