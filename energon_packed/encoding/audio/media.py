"""Audio files of a conversation: clips and tokens (measure), or features (encode).

A clip is the part of the file that the record names. Its samples come from the header and the packets of the file; a
stored sample has its clip, and the file must decode to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from energon_packed.encoding.audio.audio_file import (
    AudioInfo,
    cut_bytes,
    decode_audio,
    is_cut,
    read_audio_info,
    resampled_length,
)
from energon_packed.encoding.audio.families import AudioFamily
from energon_packed.encoding.vision.positions import ImageRun, VisionInputs
from energon_packed.errors import Reason, RecordError
from energon_packed.records import AudioClip, AudioReference, Conversation, MediaReference
from energon_packed.storage import as_path, recent_status

TRUNCATED = "audio longer than the model reads: the rest is not used"
"""Note of a conversation with such a file, with `long_audio` truncate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioSize:
    """Audio files of a conversation as the planner needs them.

    Attributes:
        runs: tokens of each file, in the order of the text.
        clips: the samples of each file.
        num_bytes: bytes of the files, as `stored_bytes`.
        notes: what was decided for them, for the counts of a run.
        inputs: arguments of the model; None if they were only measured.
    """

    runs: Sequence[ImageRun] = ()
    clips: Sequence[AudioClip] = ()
    num_bytes: int = 0
    notes: tuple[str, ...] = ()
    inputs: VisionInputs | None = None


def measure_audio(family: AudioFamily, conversation: Conversation) -> AudioSize:
    """Compute tokens and bytes of the audio files, from headers and packets.

    Raises:
        RecordError: a file is missing or damaged, the part that the record names is not in it, or its length is not
            supported.
    """
    found = [clip_of(audio) for audio in conversation.audios]
    clips = [clip for clip, _ in found]
    runs = [_run(family, *pair) for pair in zip(conversation.audios, clips, strict=True)]
    is_cut = family.limit is not None and any([_samples(family, clip) > (family.limit or 0) for clip in clips])
    return AudioSize(
        runs=runs,
        clips=clips,
        num_bytes=sum([stored_bytes(*pair) for pair in found]),
        notes=(TRUNCATED,) if is_cut else (),
    )


def read_features(family: AudioFamily, conversation: Conversation) -> AudioSize:
    """Decode and preprocess the audio files of a conversation. Raises the errors of `measure_audio`."""
    size = measure_audio(family, conversation)
    samples = []
    for audio, clip in zip(conversation.audios, size.clips, strict=True):
        needed = family.needed(clip.samples, clip.rate)
        samples.append(decode_audio(audio.file, replace(clip, samples=needed), family.rate))
    inputs, runs = family.preprocess(samples)
    for audio, run, written in zip(conversation.audios, size.runs, runs, strict=True):
        if run.length != written.length:
            detail = (
                f"{audio.file.label}: {family.name} writes {written.length} tokens, but {run.length} were computed"
            )
            raise RecordError(Reason.UNSUPPORTED_AUDIO, detail)
    return replace(size, runs=runs, inputs=inputs)


def clip_of(audio: AudioReference) -> tuple[AudioClip, int]:
    """Return the samples of a file that a record names, and its size in bytes.

    Raises:
        RecordError: the file is missing or damaged, or does not have the part.
    """
    if audio.clip is not None:
        return audio.clip, audio.file.num_bytes()
    is_part = audio.offset > 0 or audio.duration is not None
    info = _info_of_parts(audio.file) if is_part else read_audio_info(audio.file)
    # Adjacent parts share no sample: both ends are rounded, as in Lhotse, and not the duration.
    start = _rounded(audio.offset * info.rate)
    stop = info.samples if audio.duration is None else _rounded((audio.offset + audio.duration) * info.rate)
    # Durations are often rounded, or include the padding of an encoder; the limit is that of Kaldi's extract-segments.
    if not start < min(stop, info.samples) or stop > info.samples + info.rate // 2:
        part = f"from {audio.offset:g} s" + ("" if audio.duration is None else f" for {audio.duration:g} s")
        detail = f"{audio.file.label} has {info.samples / info.rate:.3f} s, so that the part {part} is not in it"
        raise RecordError(Reason.UNSUPPORTED_AUDIO, detail)
    samples = min(stop, info.samples) - start
    return AudioClip(rate=info.rate, start=start, samples=samples, total=info.samples), info.num_bytes


def stored_bytes(clip: AudioClip, num_bytes: int) -> int:
    """Most bytes of a clip of a file of `num_bytes` bytes in a pack."""
    return cut_bytes(clip) if is_cut(clip, num_bytes) else num_bytes


def _info_of_parts(file: MediaReference) -> AudioInfo:
    """Count the samples of a file; of the last few files, the count is kept, as manifests list all parts of a file."""
    try:
        if file.path is None:
            return read_audio_info(file)
        status = recent_status(as_path(file.resolved()))
    except OSError:  # which the reader reports
        return read_audio_info(file)
    return _kept_info(file, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=16)
def _kept_info(file: MediaReference, size: int, changed: int) -> AudioInfo:
    return read_audio_info(file)


def _rounded(value: float) -> int:
    return int(value + 0.5)


def _samples(family: AudioFamily, clip: AudioClip) -> int:
    return resampled_length(clip.samples, clip.rate, family.rate)


def _run(family: AudioFamily, audio: AudioReference, clip: AudioClip) -> ImageRun:
    try:
        return family.run(_samples(family, clip))
    except RecordError as error:
        raise RecordError(error.reason, f"{audio.file.label}: {error.detail}") from error
