"""Show one pack, from its raw parts (bytes by part name), without pixels and without running code of the dataset.

`view_pack` returns a PackView: turns, media and recorded lengths of each sample. `extract_pack` writes the members as
files inside one folder.
"""

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import accumulate, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from energon_packed.encoding import IGNORE_INDEX, ChatEncoder, Measurement, Processor
from energon_packed.encoding.audio.audio_file import read_audio_info, resampled_length
from energon_packed.encoding.vision.families import VisionFamily
from energon_packed.encoding.vision.images import read_header
from energon_packed.encoding.vision.media import video_runs
from energon_packed.encoding.vision.video_file import read_video_info
from energon_packed.errors import ConfigError, FormatError, RecordError
from energon_packed.files import atomic_write
from energon_packed.formats import Codec, StoredAudio, StoredSample, StoredVideo, codec_of
from energon_packed.formats.references import MEDIA_PART, complete_parts, located_images
from energon_packed.inspection.supervision import supervised_turns
from energon_packed.records import AudioClip, Conversation, FrameSelection, MediaReference, VideoReference
from energon_packed.records.audio import AUDIO_PLACEHOLDER
from energon_packed.records.conversation import IMAGE_PLACEHOLDER
from energon_packed.records.video import VIDEO_PLACEHOLDER

_TIMES = 3  # timestamps of a video that are shown, besides the last


@dataclass(frozen=True, slots=True)
class ImageView:
    """One image of a sample.

    Attributes:
        name: part name of the member.
        bytes: size of the file.
        width, height: size in pixels after EXIF orientation; 0 if the header cannot be read.
        problem: why the header cannot be read, or None.
        file: file with the image, if it is not in the tar; None if it is.
        offset: its first byte in `file`.
    """

    name: str
    bytes: int
    width: int = 0
    height: int = 0
    problem: str | None = None
    file: str | None = None
    offset: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoView:
    """One video of a sample.

    Attributes:
        names: part name of the video file, or of the images of its frames.
        is_file: there is a video file; False for images of the selected frames (`pack --extract-frames`).
        bytes: size of these files.
        frames: indices of the selected frames.
        timestamps: time of each of them in seconds after frame 0.
        num_frames: frames of the video file.
        fps: average frames per second of the video file.
        width, height: size of a frame in pixels, upright.
        resized: (width, height) that frames are resized to; None if they are resized as images are.
        settings: settings that selected the frames.
        tokens: number of tokens of the video; None if it is unknown without an encoder.
        problem: why it cannot be used, or None. The frames are not decoded.
        file: file with the video, if it is not in the tar; None if it is.
        offset: its first byte in `file`.
    """

    names: Sequence[str]
    is_file: bool
    bytes: int
    frames: Sequence[int]
    timestamps: Sequence[float]
    num_frames: int
    fps: float
    width: int
    height: int
    resized: tuple[int, int] | None
    settings: Mapping[str, Any]
    tokens: int | None = None
    problem: str | None = None
    file: str | None = None
    offset: int | None = None

    @property
    def name(self) -> str:
        """Part names as one string."""
        return " to ".join(dict.fromkeys((self.names[0], self.names[-1])))

    @property
    def text(self) -> str:
        """Values as one string: `6 of 36 frames at 0, 0.5, 1, ... 2.5 s, 12 fps, 160 x 112, 72 tokens`."""
        times = [f"{time:.4g}" for time in self.timestamps]
        listed = ", ".join(times if len(times) <= _TIMES + 1 else [*times[:_TIMES], f"... {times[-1]}"])
        size = f"{self.width} x {self.height}"
        if self.resized is not None:
            size += f" resized to {self.resized[0]} x {self.resized[1]}"
        values = [f"{len(self.frames):,} of {self.num_frames:,} frames at {listed} s", f"{self.fps:.4g} fps", size]
        values += [] if self.tokens is None else [f"{self.tokens:,} tokens"]
        return (f"{self.problem}; " if self.problem else "") + ", ".join(values)


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioView:
    """One audio file of a sample.

    Attributes:
        name: part name of the file.
        bytes: size of the file.
        rate: samples per second of the file.
        start: second at which the part that the sample has starts.
        seconds: duration of this part.
        total_seconds: duration of the file.
        tokens: number of tokens; None if it is unknown without an encoder.
        problem: why it cannot be used, or None. The file is not decoded.
        file: file with the audio, if it is not in the tar; None if it is.
        offset: its first byte in `file`.
    """

    name: str
    bytes: int
    rate: int
    start: float
    seconds: float
    total_seconds: float
    tokens: int | None = None
    problem: str | None = None
    file: str | None = None
    offset: int | None = None

    @property
    def text(self) -> str:
        """Values as one string: `2.40 s from 1.00 s of 12.00 s, 16,000 Hz, 60 tokens`."""
        part = f"{self.seconds:.2f} s"
        if self.seconds != self.total_seconds:
            part += f" from {self.start:.2f} s of {self.total_seconds:.2f} s"
        values = [part, f"{self.rate:,} Hz"] + ([] if self.tokens is None else [f"{self.tokens:,} tokens"])
        return (f"{self.problem}; " if self.problem else "") + ", ".join(values)


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a conversation.

    Attributes:
        role: role in the record; `tools` for function schemas. Tokenized samples have `target` for supervised tokens
            and `context` for the others, or `tokens` without an encoder.
        text: content.
        supervised: True if one of its tokens is supervised; None if it is unknown without an encoder.
        extra: other values that are passed to the chat template, such as tool calls, by name.
    """

    role: str
    text: str
    supervised: bool | None
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def shown(self) -> str:
        """Content and extra values as one string."""
        lines = [f"{name}: {_json(value)}" for name, value in self.extra.items()]
        return "\n".join([self.text, *lines] if self.text else lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleView:
    """One sample of a pack.

    Attributes:
        id: sample id, or None.
        start: index of its first token in the row; None if a length of the pack is not recorded.
        length: number of tokens; None if it is not recorded.
        turns: turns in order.
        images: images in order.
        supervised: number of supervised tokens if the flavor stores tokens, else None.
        video: the images are frames of a video.
        videos: videos in order.
        audios: audio files in order.
        truncated_to: number of tokens that it was truncated to, or None. The end of its text is not in the row.
        group: index of its group in the pack, or None.
        role: its role in the group, or None.
        label: its label, or None.
    """

    id: str | None
    start: int | None
    length: int | None
    turns: tuple[Turn, ...]
    images: tuple[ImageView, ...]
    supervised: int | None = None
    video: bool = False
    videos: tuple[VideoView, ...] = ()
    audios: tuple[AudioView, ...] = ()
    truncated_to: int | None = None
    group: str | None = None
    role: str | None = None
    label: tuple[float, ...] | None = None

    @property
    def placed(self) -> list[tuple[Turn, list[str | ImageView | VideoView | AudioView]]]:
        """Each turn with its content in order: strings, and media in place of their placeholders.

        Without a placeholder for each of them, as in samples of tokens, they are all before the first turn's content.
        """
        media: dict[str, tuple[ImageView | VideoView | AudioView, ...]] = {IMAGE_PLACEHOLDER: self.images}
        if self.videos:
            media[VIDEO_PLACEHOLDER] = self.videos
        if self.audios:
            media[AUDIO_PLACEHOLDER] = self.audios
        if any(sum(turn.text.count(mark) for turn in self.turns) != len(found) for mark, found in media.items()):
            return [
                (turn, [*(self.images + self.videos + self.audios if turn is self.turns[0] else ()), turn.shown])
                for turn in self.turns
            ]
        rest = {mark: iter(found) for mark, found in media.items()}
        marks = re.compile(f"({'|'.join(media)})")
        placed = []
        for turn in self.turns:
            # A placeholder in a tool call is text.
            parts = [*marks.split(turn.text), turn.shown[len(turn.text) :]]
            placed.append((turn, [next(rest[part]) if part in rest else part for part in parts if part]))
        return placed


@dataclass(frozen=True, slots=True, kw_only=True)
class PackView:
    """One pack.

    Attributes:
        key: key of its members in the tar.
        sample_class: flavor.
        parts: size in bytes of each member, by part name.
        shapes: dtype and shape of each .npy member, by part name.
        samples: samples in order.
    """

    key: str
    sample_class: str
    parts: Mapping[str, int]
    shapes: Mapping[str, str]
    samples: Sequence[SampleView]

    @property
    def tokens(self) -> int | None:
        """Number of tokens, or None if a length is not recorded."""
        lengths = [sample.length for sample in self.samples]
        return None if None in lengths else sum(length for length in lengths if length is not None)

    def as_dict(self) -> dict[str, Any]:
        """Convert to plain types, for JSON; samples without videos, audio or a group have no such key."""
        value = asdict(self) | {"tokens": self.tokens, "sample_count": len(self.samples)}
        for sample in value["samples"]:
            for name in ("videos", "audios", "group", "role", "label"):
                if not sample[name]:
                    del sample[name]
        return value


def view_pack(raw: Mapping[str, Any], codec: Codec | None = None, encoder: Processor | None = None) -> PackView:
    """Read a pack from its raw parts.

    Args:
        raw: `__key__` and bytes by part name, as `ShardReader` returns them.
        codec: codec of the flavor; None detects it from the parts.
        encoder: encoder of the dataset, which marks the supervised turns; None leaves them unknown.

    Raises:
        FormatError: the parts match no flavor, or are damaged.
    """
    codec = codec or codec_of(raw)
    located = located_images(raw) if MEDIA_PART in raw else {}
    # A missing image or video is shown with its location: the files of a dataset from others may not be here.
    samples = codec.read(complete_parts(raw, set()) if located else raw)
    lengths = [sample.length for sample in samples]
    # One unknown length makes the start of every later sample unknown, so no start is shown then.
    starts = [0, *accumulate(length or 0 for length in lengths)]
    return PackView(
        key=str(raw["__key__"]),
        sample_class=codec.sample_class,
        parts={part: len(content) for part, content in raw.items() if not part.startswith("__")},
        shapes={part: _shape(content) for part, content in raw.items() if part.endswith(".npy")},
        samples=[
            _view(sample, None if None in lengths else start, encoder, located)
            for sample, start in zip(samples, starts, strict=False)
        ],
    )


def view_record(conversation: Conversation, measured: Measurement, encoder: Processor | None) -> list[SampleView]:
    """Read a record before it is packed: one sample, or the samples of a group.

    Args:
        conversation: the record. Its media are named by kind and index, such as `image 0`.
        measured: its measurement with this encoder, which selects the frames of videos.
        encoder: as in `view_pack`.
    """
    members = conversation.members or (conversation,)
    found = _record_media(conversation, measured)
    images, videos, audios = iter(found[0]), iter(found[1]), iter(found[2])
    start, views = 0, []
    for member, own in zip(members, measured.members or [measured] * len(members), strict=True):
        length = own.length if own.length > 0 else None
        sample = StoredSample(member, length)
        view = SampleView(
            id=member.id or conversation.id,
            start=start if length else None,
            length=length,
            turns=_turns(sample, encoder if own.reject is None else None),
            images=tuple(islice(images, len(member.images))),
            supervised=own.supervised if own.supervised >= 0 and length else None,
            video=member.video,
            videos=tuple(islice(videos, len(member.videos))),
            audios=tuple(islice(audios, len(member.audios))),
            group=str(conversation.id) if conversation.members else member.group,
            role=member.role,
            label=member.label,
        )
        start += length or 0
        views.append(view)
    return views


def record_files(conversation: Conversation) -> dict[str, MediaReference]:
    """Files of the media of a record, by the names that `view_record` has."""
    files = {f"image {i}": image for i, image in enumerate(conversation.images)}
    for i, video in enumerate(conversation.videos):
        files |= {name: file for name, file in zip(_frame_names(i, video), video.files, strict=True)}
    return files | {f"audio {i}": audio.file for i, audio in enumerate(conversation.audios)}


def _frame_names(index: int, video: VideoReference) -> list[str]:
    return [f"video {index}"] if video.file else [f"video {index}, frame {i}" for i in range(len(video.images))]


def _record_media(
    conversation: Conversation, measured: Measurement
) -> tuple[list[ImageView], list[VideoView], list[AudioView]]:
    images, videos, audios = [], [], []
    for i, image in enumerate(conversation.images):
        try:
            header = read_header(image)
            images.append(ImageView(f"image {i}", image.num_bytes(), header.width, header.height))
        except RecordError as error:
            images.append(ImageView(f"image {i}", 0, problem=error.detail))
    for i, video in enumerate(conversation.videos):
        frames = video.frames or (measured.frames[i] if len(measured.frames) > i else None)
        frames = frames or FrameSelection(indices=(), timestamps=(), fps=0.0, num_frames=0, height=0, width=0)
        problem = None if frames.indices else "its frames are not known"
        num_bytes = 0 if problem else sum(file.num_bytes() for file in video.files)
        names, is_file = _frame_names(i, video), video.file is not None
        videos.append(_video_view(names, frames, is_file=is_file, num_bytes=num_bytes, problem=problem))
    for i, audio in enumerate(conversation.audios):
        clip = measured.clips[i] if len(measured.clips) > i else None
        num_bytes = audio.file.num_bytes() if clip else 0
        clip = clip or AudioClip(rate=1, start=0, samples=0, total=0)
        problem = None if num_bytes else "its samples are not known"
        audios.append(_audio_view(f"audio {i}", clip, num_bytes=num_bytes, problem=problem))
    return images, videos, audios


def _view(
    sample: StoredSample, start: int | None, encoder: Processor | None, located: Mapping[str, MediaReference]
) -> SampleView:
    conversation = sample.conversation
    supervised = None
    if conversation.input_ids is not None:
        labels = conversation.input_ids if conversation.labels is None else conversation.labels
        supervised = int((labels[1:] != IGNORE_INDEX).sum())  # no token predicts the first
    return SampleView(
        id=conversation.id,
        start=start,
        length=sample.length,
        turns=_turns(sample, encoder),
        images=tuple(_image(image.part or "?", image.data, located.get(image.part)) for image in sample.images),
        supervised=supervised,
        video=conversation.video,
        videos=tuple(_video(video, encoder, located) for video in sample.videos),
        audios=_audios(sample.audios, encoder, located),
        truncated_to=sample.truncate if sample.is_truncated else None,
        group=conversation.group,
        role=conversation.role,
        label=conversation.label,
    )


def _turns(sample: StoredSample, encoder: Processor | None) -> tuple[Turn, ...]:
    conversation = sample.conversation
    if conversation.input_ids is not None:
        # Token flavors store no turns.
        if isinstance(encoder, ChatEncoder):
            return tuple(_token_turns(conversation, encoder))
        return (Turn("tokens", f"{len(conversation.input_ids)} tokens", None),)
    known = None
    if isinstance(encoder, ChatEncoder):
        known = supervised_turns(encoder, conversation, sample.truncate)
    # A document (plain text) has no messages, but one flag.
    flags: Sequence[bool | None] = known or [None] * max(len(conversation.messages), 1)
    if conversation.text is not None:
        return (Turn("text", conversation.text, flags[0]),)
    tools = [Turn("tools", _json(conversation.tools), False)] if conversation.tools else []
    columns = zip(conversation.messages, flags, strict=True)
    return (*tools, *(Turn(m.role, m.content, flag, m.extra) for m, flag in columns))


def _token_turns(conversation: Conversation, encoder: ChatEncoder) -> Iterator[Turn]:
    """Decode tokens, as a turn `context` or `target` for each run of tokens with or without loss."""
    assert conversation.input_ids is not None
    labels = conversation.input_ids if conversation.labels is None else conversation.labels
    ids, is_target = conversation.input_ids, labels != IGNORE_INDEX
    is_target[:1] = False  # no token precedes the first token
    marks = {encoder.image_token_id: IMAGE_PLACEHOLDER, encoder.rules.video_token_id: VIDEO_PLACEHOLDER}
    marks[encoder.rules.audio_token_id] = AUDIO_PLACEHOLDER
    for start, stop in _runs(is_target):
        texts = []
        # Each run of tokens of media becomes a placeholder.
        kinds = np.where(
            np.isin(ids[start:stop], [token for token in marks if token is not None]), ids[start:stop], -1
        )
        for first, last in _runs(kinds):
            decode = encoder.parts.backend.decode
            run = ids[start + first : start + last].tolist()
            texts.append(marks[run[0]] if kinds[first] >= 0 else decode(run, skip_special_tokens=False))
        yield Turn("target" if is_target[start] else "context", "".join(texts), bool(is_target[start]))


def _runs(values: npt.NDArray[Any]) -> Iterator[tuple[int, int]]:
    """Ranges [start, stop) of equal adjacent values."""
    edges = [0, *(np.flatnonzero(values[1:] != values[:-1]) + 1).tolist(), len(values)]
    return pairwise(edges)


def _json(value: Any) -> str:
    return value if isinstance(value, str) else orjson.dumps(value).decode()


def _image(name: str, data: bytes, reference: MediaReference | None) -> ImageView:
    file, offset = (None, None) if reference is None else (reference.path, reference.offset)
    if reference is not None and not data:
        return ImageView(name, 0, problem="missing, or not the packed image", file=file, offset=offset)
    try:
        # The header is enough for the size, and cheap for damaged or huge images.
        header = read_header(MediaReference(data=data))
    except RecordError as error:
        return ImageView(name, len(data), problem=error.detail, file=file, offset=offset)
    return ImageView(name, len(data), header.width, header.height, file=file, offset=offset)


def _video(stored: StoredVideo, encoder: Processor | None, located: Mapping[str, MediaReference]) -> VideoView:
    reference = located.get(stored.files[0].part or "?")
    vision = encoder.vision if isinstance(encoder, ChatEncoder) else None
    return _video_view(
        [file.part or "?" for file in stored.files],
        stored.frames,
        is_file=stored.file is not None,
        num_bytes=sum(len(file.data) for file in stored.files),
        tokens=None if vision is None else _video_tokens(vision, stored.frames),
        problem=_video_problem(stored, is_located=reference is not None),
        file=None if reference is None else reference.path,
        offset=None if reference is None else reference.offset,
    )


def _video_view(
    names: Sequence[str], frames: FrameSelection, *, is_file: bool, num_bytes: int, **values: Any
) -> VideoView:
    return VideoView(
        names=names,
        is_file=is_file,
        bytes=num_bytes,
        frames=frames.indices,
        timestamps=frames.timestamps,
        num_frames=frames.num_frames,
        fps=frames.fps,
        width=frames.width,
        height=frames.height,
        resized=None if frames.resized is None else (frames.resized[1], frames.resized[0]),
        settings=frames.settings,
        **values,
    )


def _video_tokens(vision: VisionFamily, frames: FrameSelection) -> int | None:
    try:
        return sum(run.length for run in video_runs(vision, frames))
    except (RecordError, ConfigError):  # another encoder than the encoder that packed the video
        return None


def _video_problem(stored: StoredVideo, *, is_located: bool) -> str | None:
    """Find damage that needs no decoding."""
    if is_located and not all(file.data for file in stored.files):
        return "missing, or not the packed video"
    frames = stored.frames
    try:
        if stored.file is None:
            headers = [read_header(image.reference("image")) for image in stored.images]
            sizes = {(header.height, header.width) for header in headers}
            is_packed = sizes == {(frames.height, frames.width)}
        else:
            info = read_video_info(stored.file.reference("video"))
            is_packed = (info.num_frames, info.height, info.width) == (frames.num_frames, frames.height, frames.width)
    except RecordError as error:
        return error.detail
    except ConfigError:  # PyAV is not installed: the recorded values are shown
        return None
    return None if is_packed else "not the packed video: it has another number of frames, or another size"


def _audios(
    stored: Sequence[StoredAudio], encoder: Processor | None, located: Mapping[str, MediaReference]
) -> tuple[AudioView, ...]:
    """Return the audio files of a sample; the tokens of some families depend on the longest of them."""
    tokens: list[int | None] = [None] * len(stored)
    if isinstance(encoder, ChatEncoder) and (family := encoder.audio) is not None:
        sizes = [resampled_length(audio.clip.samples, audio.clip.rate, family.rate) for audio in stored]
        with suppress(RecordError):  # another encoder than the encoder that packed them
            tokens = [family.run(size, max(sizes)).length for size in sizes]
    return tuple(_audio(audio, count, located) for audio, count in zip(stored, tokens, strict=True))


def _audio(stored: StoredAudio, tokens: int | None, located: Mapping[str, MediaReference]) -> AudioView:
    name = stored.file.part or "?"
    reference = located.get(name)
    return _audio_view(
        name,
        stored.clip,
        num_bytes=len(stored.file.data),
        tokens=tokens,
        problem=_audio_problem(stored, is_located=reference is not None),
        file=None if reference is None else reference.path,
        offset=None if reference is None else reference.offset,
    )


def _audio_view(name: str, clip: AudioClip, *, num_bytes: int, **values: Any) -> AudioView:
    return AudioView(
        name=name,
        bytes=num_bytes,
        rate=clip.rate,
        start=clip.start / clip.rate,
        seconds=clip.seconds,
        total_seconds=clip.total / clip.rate,
        **values,
    )


def _audio_problem(stored: StoredAudio, *, is_located: bool) -> str | None:
    """Find damage that needs no decoding."""
    if is_located and not stored.file.data:
        return "missing, or not the packed audio file"
    try:
        info = read_audio_info(stored.file.reference("audio"))
    except RecordError as error:
        return error.detail
    except ConfigError:  # PyAV is not installed: the recorded values are shown
        return None
    is_packed = (info.samples, info.rate) == (stored.clip.total, stored.clip.rate)
    return None if is_packed else "not the packed audio file: it has another number of samples, or another rate"


def _shape(content: bytes) -> str:
    try:
        # The header may name a size that the content does not have, so the array is read. Pickles would run code.
        array = np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
    except (ValueError, MemoryError) as error:
        return f"damaged: {error}"
    return f"{array.dtype} {tuple(array.shape)}"


def extract_pack(raw: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write each part of a pack to `folder/KEY/PART`, and also the images that are in other files.

    Args:
        raw: `__key__` and bytes by part name.
        folder: created if missing; nothing is written outside of it.

    Raises:
        FormatError: a member name resolves to a path outside of the folder; nothing is written then.
        DataChangedError: a referenced image changed, or is missing.
    """
    raw = complete_parts(raw)
    target = folder / str(raw["__key__"])
    files = {}
    # Keys and part names come from the tar: all paths are checked before the first file is written.
    for part, content in raw.items():
        if part.startswith("__"):
            continue
        path = target / part
        # `resolve` follows links in the folder, so a link that leads out of it is refused too.
        if "\0" in str(path) or "/" in part or not path.resolve().is_relative_to(folder.resolve()):
            raise FormatError(
                f"member {raw['__key__']}.{part} would be written outside of {folder}; it was not extracted"
            )
        files[path] = content
    for path, content in files.items():
        atomic_write(path, content)  # a new file: a hard link in the folder is replaced, not written through
    return list(files)
