"""Audio files of a conversation: clips and tokens (measure), or features (encode).

A clip is the part of the file that the record names. Its samples come from the header and the packets of the file; a
stored sample has its clip, and the file must decode to it.

The audio track of a video (`load_audio_from_video`) is a clip of the video file. Its tokens are among the tokens of
the video, and its features among the features of the audio files, in the order of the text.
"""

import re
from dataclasses import replace
from functools import lru_cache

import numpy as np

from energon_packed.encoding.audio.audio_file import (
    AudioInfo,
    cut_bytes,
    decode_audio,
    has_audio_track,
    is_cut,
    read_audio_info,
    resampled_length,
)
from energon_packed.encoding.audio.families import AudioFamily
from energon_packed.encoding.vision.positions import AudioSize, ImageRun
from energon_packed.errors import Reason, RecordError
from energon_packed.records import (
    AUDIO_PLACEHOLDER,
    VIDEO_PLACEHOLDER,
    AudioClip,
    AudioReference,
    Conversation,
    MediaReference,
)
from energon_packed.storage import as_path, recent_status

_PLACEHOLDERS = re.compile(f"{AUDIO_PLACEHOLDER}|{VIDEO_PLACEHOLDER}")
TRUNCATED = "audio longer than the model reads: the rest is not used"
"""Note of a conversation with such a file, with `long_audio` truncate."""


def measure_audio(family: AudioFamily, conversation: Conversation) -> AudioSize:
    """Compute tokens and bytes of the audio files, from headers and packets.

    Raises:
        RecordError: a file is missing or damaged, the part that the record names is not in it, or its length is not
            supported.
    """
    heard = _heard(family, conversation)
    found = [clip_of(audio) for audio, _ in heard]
    clips = [clip for clip, _ in found]
    sizes = [resampled_length(clip.samples, clip.rate, family.rate) for clip in clips]
    longest = max(sizes, default=0)
    runs = [_run(family, audio, size, longest) for (audio, _), size in zip(heard, sizes, strict=True)]
    files = [at for at, (_, video) in enumerate(heard) if video is None]
    is_cut = family.limit is not None and longest > family.limit
    return AudioSize(
        runs=[runs[at] for at in files],
        tracks={video: run.length for (_, video), run in zip(heard, runs, strict=True) if video is not None},
        clips=[clips[at] for at in files],
        track_clips=[clip for clip, (_, video) in zip(clips, heard, strict=True) if video is not None],
        num_bytes=sum([stored_bytes(*found[at]) for at in files]),
        notes=(TRUNCATED,) if is_cut else (),
    )


def read_features(family: AudioFamily, conversation: Conversation) -> AudioSize:
    """Decode and preprocess the audio files of a conversation. Raises the errors of `measure_audio`."""
    size = measure_audio(family, conversation)
    heard, files = _heard(family, conversation), iter(zip(size.clips, size.runs, strict=True))
    samples, computed = [], []
    for audio, video in heard:
        clip, run = next(files) if video is None else (clip_of(audio)[0], ImageRun(size.tracks[video]))
        needed = family.needed(clip.samples, clip.rate)
        samples.append(decode_audio(audio.file, replace(clip, samples=needed), family.rate))
        computed.append(run.length)
    if not heard:
        return size
    inputs, runs = family.preprocess(samples)
    for (audio, _), own, run in zip(heard, computed, runs, strict=True):
        if own != run.length:
            detail = f"{audio.file.label}: {family.name} writes {run.length} tokens, but {own} were computed"
            raise RecordError(Reason.UNSUPPORTED_AUDIO, detail)
    own_runs = [run for (_, video), run in zip(heard, runs, strict=True) if video is None]
    return replace(size, runs=own_runs, inputs=inputs)


def _heard(family: AudioFamily, conversation: Conversation) -> list[tuple[AudioReference, int | None]]:
    """Audio files and tracks in the order of the text, each track with the index of its video.

    Raises:
        RecordError: as `measure_audio`; `unsupported_media`, if one video has a track and another has not.
    """
    files: list[tuple[AudioReference, int | None]] = [(audio, None) for audio in conversation.audios]
    if not (family.uses_tracks and conversation.videos):
        return files
    tracks: list[tuple[AudioReference, int | None]] = []
    for index, video in enumerate(conversation.videos):
        if video.file is None:
            detail = "a video that is stored as frames has no audio track; remove `load_audio_from_video`"
            raise RecordError(Reason.UNSUPPORTED_MEDIA, detail)
        if has_audio_track(video.file):
            tracks.append((AudioReference(file=video.file), index))
    if not tracks:  # as the processor
        return files
    if len(tracks) < len(conversation.videos):
        detail = "a video with an audio track and a video without, for which the model has no positions"
        raise RecordError(Reason.UNSUPPORTED_MEDIA, f"{detail}; put them into two records")
    names = _order_of_tokens(family, conversation) if conversation.input_ids is not None else _order(conversation)
    kinds = {AUDIO_PLACEHOLDER: iter(files), VIDEO_PLACEHOLDER: iter(tracks)}
    return [found for name in names if (found := next(kinds[name], None)) is not None]


def _order(conversation: Conversation) -> list[str]:
    texts = [conversation.text] if conversation.text is not None else [m.content for m in conversation.messages]
    return [name for text in texts for name in _PLACEHOLDERS.findall(text)]


def _order_of_tokens(family: AudioFamily, conversation: Conversation) -> list[str]:
    """Order of files and tracks in stored tokens: a track starts with tokens of its video."""
    ids, processor = np.asarray(conversation.input_ids), family.processor
    starts = np.flatnonzero(ids[:-1] == processor.tokenizer.convert_tokens_to_ids(processor.audio_bos_token))
    is_track = ids[starts + 1] == processor.tokenizer.convert_tokens_to_ids(processor.video_token)
    return [VIDEO_PLACEHOLDER if track else AUDIO_PLACEHOLDER for track in is_track.tolist()]


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


def _run(family: AudioFamily, audio: AudioReference, samples: int, longest: int) -> ImageRun:
    try:
        return family.run(samples, longest)
    except RecordError as error:
        raise RecordError(error.reason, f"{audio.file.label}: {error.detail}") from error
