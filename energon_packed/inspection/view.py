"""Show one pack, from its raw parts (bytes by part name), without pixels and without running code of the dataset.

`view_pack` returns a PackView: turns, media and recorded lengths of each sample. `extract_pack` writes the members as
files inside one folder.
"""

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain, groupby, repeat
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from energon_packed.encoding import IGNORE_INDEX, ChatEncoder, EncodedSample, Measurement, Processor
from energon_packed.encoding.audio.audio_file import read_audio_info, resampled_length
from energon_packed.encoding.vision.images import read_header
from energon_packed.encoding.vision.media import video_runs
from energon_packed.encoding.vision.video_file import read_video_info
from energon_packed.errors import ConfigError, FormatError, RecordError
from energon_packed.files import atomic_write
from energon_packed.formats import Codec, StoredSample, codec_of
from energon_packed.formats.references import MEDIA_PART, complete_parts, located_images
from energon_packed.inspection.supervision import supervised_turns
from energon_packed.inspection.tokens import KINDS, encoded_samples, token_runs
from energon_packed.records import AudioClip, AudioReference, Conversation, FrameSelection, MediaReference
from energon_packed.records.media.kinds import MEDIA_KINDS
from energon_packed.records.media.video import VideoReference

_MARKS = {name: kind.placeholder for name, kind in MEDIA_KINDS.items()}
_TIMES = 3  # timestamps of a video that are shown, besides the last


@dataclass(frozen=True, slots=True, kw_only=True)
class _FileView:
    """What all media have.

    Attributes:
        bytes: size of the files.
        problem: why it cannot be used, or None. Nothing but headers is decoded.
        file: file with the content, if it is not in the tar; None if it is.
        offset: its first byte in `file`.
    """

    bytes: int
    problem: str | None = None
    file: str | None = None
    offset: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageView(_FileView):
    """One image of a sample.

    Attributes:
        name: part name of the member.
        width, height: size in pixels after EXIF orientation; 0 if the header cannot be read.
    """

    name: str
    width: int = 0
    height: int = 0

    @property
    def text(self) -> str:
        """Values as one string: `160 x 112`, or the problem."""
        return self.problem or f"{self.width} x {self.height}"


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoView(_FileView):
    """One video of a sample.

    Attributes:
        names: part name of the video file, or of the images of its frames.
        is_file: there is a video file; False for images of the selected frames (`pack --extract-frames`).
        selection: the selected frames.
        tokens: number of tokens of the video; None if it is unknown without an encoder.
        container, codec: names of FFmpeg, such as `mov` and `h264`; "" without a file, or if it cannot be read.
    """

    names: Sequence[str]
    is_file: bool
    selection: FrameSelection
    tokens: int | None = None
    container: str = ""
    codec: str = ""

    @property
    def name(self) -> str:
        """Part names as one string."""
        return " to ".join(dict.fromkeys((self.names[0], self.names[-1])))

    @property
    def text(self) -> str:
        """Values as one string: `6 of 36 frames at 0, 0.5, 1, ... 2.5 s, 12 fps, 160 x 112, 72 tokens`."""
        video = self.selection
        times = [f"{time:.4g}" for time in video.timestamps]
        listed = ", ".join(times if len(times) <= _TIMES + 1 else [*times[:_TIMES], f"... {times[-1]}"])
        size = f"{video.width} x {video.height}"
        if video.resized is not None:
            size += f" resized to {video.resized[1]} x {video.resized[0]}"
        values = [f"{len(video.indices):,} of {video.num_frames:,} frames at {listed} s", f"{video.fps:.4g} fps", size]
        return _joined(self, values)


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioView(_FileView):
    """One audio file of a sample.

    Attributes:
        name: part name of the file.
        clip: the samples of the file that the sample has.
        tokens: number of tokens; None if it is unknown without an encoder.
    """

    name: str
    clip: AudioClip
    tokens: int | None = None

    @property
    def text(self) -> str:
        """Values as one string: `2.40 s from 1.00 s of 12.00 s, 16,000 Hz, 60 tokens`."""
        clip, part = self.clip, f"{self.clip.seconds:.2f} s"
        if not clip.is_whole:
            part += f" from {clip.start / clip.rate:.2f} s of {clip.total / clip.rate:.2f} s"
        return _joined(self, [part, f"{clip.rate:,} Hz"])


def _joined(file: VideoView | AudioView, values: Sequence[str]) -> str:
    tokens = [] if file.tokens is None else [f"{file.tokens:,} tokens"]
    return (f"{file.problem}; " if file.problem else "") + ", ".join([*values, *tokens])


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
        kind: its content: `text`, `image`, `video` or `audio`.
        runs: (kind, index of the first token in the sample, tokens) of runs of tokens of equal kind; empty if the
            kinds are unknown.
        problem: why the kinds are unknown although an encoder was passed, or None.
    """

    id: str | None
    start: int | None
    length: int | None
    turns: tuple[Turn, ...] = ()
    images: tuple[ImageView, ...] = ()
    supervised: int | None = None
    video: bool = False
    videos: tuple[VideoView, ...] = ()
    audios: tuple[AudioView, ...] = ()
    truncated_to: int | None = None
    group: str | None = None
    role: str | None = None
    label: tuple[float, ...] | None = None
    kind: str = "text"
    runs: Sequence[tuple[str, int, int]] = ()
    problem: str | None = None

    @property
    def tokens(self) -> dict[str, int]:
        """Number of tokens of each kind; empty if the kinds are unknown."""
        return {name: sum(count for kind, _, count in self.runs if kind == name) for name in KINDS if self.runs}

    @property
    def supervised_spans(self) -> list[tuple[int, int]] | None:
        """Spans [start, stop) of the supervised tokens, counted from its first token; None if unknown."""
        spans = [(start, start + count) for kind, start, count in self.runs if kind == "supervised"]
        return spans if self.runs else None

    def as_dict(self) -> dict[str, Any]:
        """Convert to plain types, for JSON; samples without videos, audio or a group have no such key."""
        hidden, if_given = ("kind", "runs", "problem"), ("videos", "audios", "group", "role", "label")
        items = asdict(self).items()
        value = {name: item for name, item in items if name not in hidden and (item or name not in if_given)}
        for video in value.get("videos", ()):
            frames = video.pop("selection")
            resized = frames.pop("resized")
            video |= {"frames": frames.pop("indices"), **frames, "resized": resized and resized[::-1]}
        for audio in value.get("audios", ()):
            clip = audio.pop("clip")
            seconds = {"start": clip["start"], "seconds": clip["samples"], "total_seconds": clip["total"]}
            audio |= {"rate": clip["rate"]} | {name: count / clip["rate"] for name, count in seconds.items()}
        return value

    @property
    def media(self) -> Iterator[tuple[str, int, Any]]:
        """Kind, index and view of each image, video and audio file."""
        for kind, files in (("image", self.images), ("video", self.videos), ("audio", self.audios)):
            yield from ((kind, number, file) for number, file in enumerate(files))

    @property
    def file_names(self) -> list[str]:
        """Names of its files, in the order of `Conversation.media_files`."""
        of_videos = [name for video in self.videos for name in video.names]
        return [*[image.name for image in self.images], *of_videos, *[audio.name for audio in self.audios]]

    @property
    def placed(self) -> list[tuple[Turn, list[str | ImageView | VideoView | AudioView]]]:
        """Each turn with its content in order: strings, and media in place of their placeholders.

        Without a placeholder for each of them, as in samples of tokens, they are all before the first turn's content.
        """
        files: tuple[Sequence[ImageView | VideoView | AudioView], ...] = (self.images, self.videos, self.audios)
        media = dict(zip(_MARKS.values(), files, strict=True))
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
class ShownFile:
    """Content of an image, video or audio file, for a page.

    Attributes:
        url: URL of the file; "" if it is not shown, such as audio that is too long.
        frames: (time in seconds, URL) of some selected frames of a video.
        wave: path of the waveform of audio; "" if the audio is not decoded.
        problem: why it cannot be decoded, or None.
        tokens: number of tokens of an image, if it is known.
    """

    url: str = ""
    frames: Sequence[tuple[float, str]] = ()
    wave: str = ""
    problem: str | None = None
    tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PackView:
    """One pack.

    Attributes:
        key: key of its members in the tar.
        sample_class: flavor.
        parts: size in bytes of each member, by part name.
        shapes: dtype and shape of each .npy member, by part name.
        samples: samples in order.
        files: content of their images, videos and audio files by name, as far as a page shows it.
    """

    key: str
    sample_class: str = ""
    parts: Mapping[str, int] = field(default_factory=dict)
    shapes: Mapping[str, str] = field(default_factory=dict)
    samples: Sequence[SampleView]
    files: Mapping[str, ShownFile] = field(default_factory=dict)

    @property
    def tokens(self) -> int | None:
        """Number of tokens, or None if a length is not recorded."""
        lengths = [sample.length for sample in self.samples]
        return None if None in lengths else sum(length for length in lengths if length is not None)

    def with_files(self, show: Callable[[str, int, int, Any], ShownFile | None]) -> "PackView":
        """Show its files by `show`: kind, indices of sample and file, and view of the file -> content."""
        files = {
            file.name: shown
            for index, sample in enumerate(self.samples)
            for kind, number, file in sample.media
            if file.problem is None and (shown := show(kind, index, number, file)) is not None
        }
        return replace(self, files=files)

    def as_dict(self) -> dict[str, Any]:
        """Convert to plain types, for JSON, with the samples as `SampleView.as_dict`."""
        value = asdict(replace(self, samples=(), files={})) | {
            "tokens": self.tokens,
            "sample_count": len(self.samples),
        }
        del value["files"]  # of pages
        return value | {"samples": [sample.as_dict() for sample in self.samples]}


def view_pack(
    raw: Mapping[str, Any], codec: Codec | None = None, encoder: Processor | None = None, *, multiple: int = 1
) -> PackView:
    """Read a pack from its raw parts.

    Args:
        raw: `__key__` and bytes by part name, as `ShardReader` returns them.
        codec: codec of the flavor; None detects it from the parts.
        encoder: encoder of the dataset, which marks the supervised turns; None leaves them unknown.
        multiple: samples start at multiples of this many tokens, as planned with `pad_multiple`.

    Raises:
        FormatError: the parts match no flavor, or are damaged.
    """
    codec = codec or codec_of(raw)
    located = located_images(raw) if MEDIA_PART in raw else {}
    # A missing image or video is shown with its location: the files of a dataset from others may not be here.
    samples = codec.read(complete_parts(raw, set()) if located else raw)
    return PackView(
        key=str(raw["__key__"]),
        sample_class=codec.sample_class,
        parts={part: len(content) for part, content in raw.items() if not part.startswith("__")},
        shapes={part: _shape(content) for part, content in raw.items() if part.endswith(".npy")},
        samples=view_samples(samples, encoder, located, multiple=multiple),
    )


def record_samples(conversation: Conversation, measured: Measurement) -> list[StoredSample]:
    """Return a record as packs store it, with its media in their files: a sample, or the samples of a group.

    Args:
        conversation: the record.
        measured: its measurement, which selects the frames of videos and the samples of audio.
    """
    members, lengths = [conversation], [measured.length]
    if conversation.members:  # without videos and audio
        group = str(conversation.id)
        members = [replace(each, id=each.id or conversation.id, group=group) for each in conversation.members]
        lengths = [each.length for each in measured.members or repeat(measured, len(members))]
    elif conversation.videos or conversation.audios:
        videos = zip(conversation.videos, chain(measured.frames, repeat(None)), strict=False)
        audios = zip(conversation.audios, chain(measured.clips, repeat(None)), strict=False)
        selected = tuple(replace(video, frames=video.frames or frames) for video, frames in videos)
        heard = tuple(replace(audio, clip=audio.clip or clip) for audio, clip in audios)
        members = [replace(conversation, videos=selected, audios=heard)]
    pairs = zip(members, lengths, strict=True)
    return [StoredSample(member, length if length > 0 else None) for member, length in pairs]


def view_samples(
    samples: Sequence[StoredSample],
    encoder: Processor | None,
    located: Mapping[str, MediaReference] | None = None,
    *,
    multiple: int = 1,
) -> list[SampleView]:
    """Describe the samples of a row.

    Args:
        samples: the samples. Media without a name get one of their kind and index, such as `image 0`.
        encoder, multiple: as in `view_pack`.
        located: media that are in no tar, by name.
    """
    # A sample that cannot be encoded has its recorded length, and the reason.
    outcomes = encoded_samples(samples, encoder) if isinstance(encoder, ChatEncoder) else repeat(None)
    views: list[SampleView] = []
    start: int | None = 0
    for sample, outcome in zip(samples, outcomes, strict=False):
        of = f" of sample {len(views)}" if len(samples) > 1 else ""
        views.append(view := _view(sample, outcome, start, encoder, located or {}, of))
        # An unknown length makes the start of every later sample unknown.
        start = None if start is None or view.length is None else start + -(-view.length // multiple) * multiple
    return views


def _view(
    sample: StoredSample,
    outcome: EncodedSample | str | None,
    start: int | None,
    encoder: Processor | None,
    located: Mapping[str, MediaReference],
    of: str,
) -> SampleView:
    conversation = sample.conversation
    encoded = outcome if isinstance(outcome, EncodedSample) else None
    supervised = None
    if conversation.input_ids is not None:
        labels = conversation.input_ids if conversation.labels is None else conversation.labels
        supervised = int((labels[1:] != IGNORE_INDEX).sum())  # no token predicts the first
    return SampleView(
        id=conversation.id,
        start=start,
        length=sample.length if encoded is None else len(encoded),
        turns=_turns(conversation, encoded, encoder),
        images=tuple(_image(image, f"image {i}{of}", located) for i, image in enumerate(conversation.images)),
        supervised=supervised,
        video=conversation.video,
        videos=tuple(_video(video, f"video {i}{of}", encoder, located) for i, video in enumerate(conversation.videos)),
        audios=_audios(conversation.audios, of, encoder, located),
        truncated_to=sample.truncate if sample.is_truncated else None,
        group=conversation.group,
        role=conversation.role,
        label=conversation.label,
        kind=conversation.kind,
        runs=() if encoded is None else token_runs(encoded.input_ids, encoded.labels, encoded),
        problem=outcome if isinstance(outcome, str) else None,
    )


def _turns(conversation: Conversation, encoded: EncodedSample | None, encoder: Processor | None) -> tuple[Turn, ...]:
    if conversation.input_ids is not None:
        # Token flavors store no turns.
        if isinstance(encoder, ChatEncoder):
            return tuple(_token_turns(conversation, encoder))
        return (Turn("tokens", f"{len(conversation.input_ids)} tokens", None),)
    known = None
    if isinstance(encoder, ChatEncoder) and encoded is not None:
        known = supervised_turns(encoder, conversation, encoded)
    # A document (plain text) has no messages, but one flag.
    flags: Sequence[bool | None] = known or [None] * max(len(conversation.messages), 1)
    if conversation.text is not None:
        return (Turn("text", conversation.text, flags[0]),)
    tools = [Turn("tools", _json(conversation.tools), False)] if conversation.tools else []
    columns = zip(conversation.messages, flags, strict=True)
    return (*tools, *(Turn(m.role, m.content, flag, m.extra) for m, flag in columns))


def _token_turns(conversation: Conversation, encoder: ChatEncoder) -> Iterator[Turn]:
    """Decode tokens, as a turn `context` or `target` for each run of tokens with or without loss."""
    ids, labels = conversation.input_ids, conversation.labels
    assert ids is not None
    runs = token_runs(ids, ids if labels is None else labels, encoder.rules)
    decode = partial(encoder.parts.backend.decode, skip_special_tokens=False)
    for is_target, own in groupby(runs, lambda run: run[0] == "supervised"):
        # Each run of tokens of media becomes a placeholder.
        texts = [_MARKS.get(kind) or decode(ids[start : start + count].tolist()) for kind, start, count in own]
        yield Turn("target" if is_target else "context", "".join(texts), is_target)


def _json(value: Any) -> str:
    return value if isinstance(value, str) else orjson.dumps(value).decode()


def _file(
    files: Sequence[MediaReference],
    located: Mapping[str, MediaReference],
    kind: str,
    check: Callable[[], Mapping[str, Any]],
) -> dict[str, Any]:
    """Describe the files of an image, video or audio file: bytes, place and problem, with the values of `check`."""
    reference = located.get(files[0].name or "?")
    values: dict[str, Any] = {"bytes": 0}
    values |= {} if reference is None else {"file": reference.path, "offset": reference.offset}
    try:
        values["bytes"] = sum(file.num_bytes() for file in files)
        is_missing = reference is not None and any(file.data == b"" for file in files)
        return values | dict({"problem": f"missing, or not the packed {kind}"} if is_missing else check())
    except RecordError as error:
        return values | {"problem": error.detail}
    except ConfigError:  # PyAV is not installed: the recorded values are shown
        return values


def _image(image: MediaReference, name: str, located: Mapping[str, MediaReference]) -> ImageView:
    # The header is enough for the size, and cheap for damaged or huge images. Messages are shown after the name.
    def size() -> Mapping[str, Any]:
        header = read_header(replace(image, name=None))
        return {"width": header.width, "height": header.height}

    return ImageView(name=image.name or name, **_file([image], located, "image", size))


def _video(
    video: VideoReference, name: str, encoder: Processor | None, located: Mapping[str, MediaReference]
) -> VideoView:
    vision = encoder.vision if isinstance(encoder, ChatEncoder) else None
    frames = video.frames or FrameSelection(indices=(), timestamps=(), fps=0.0, num_frames=0, height=0, width=0)
    tokens = None
    if vision is not None and frames.indices:
        with suppress(RecordError, ConfigError):  # another encoder than the encoder that packed the video
            tokens = sum(run.length for run in video_runs(vision, frames))
    return VideoView(
        names=[file.name or (name if video.file else f"{name}, frame {k}") for k, file in enumerate(video.files)],
        is_file=video.file is not None,
        selection=frames,
        tokens=tokens,
        **_file(video.files, located, "video", lambda: _video_values(video, frames)),
    )


def _video_values(video: VideoReference, frames: FrameSelection) -> Mapping[str, Any]:
    """Container and codec of a file, and damage that needs no decoding."""
    if not frames.indices:
        return {"problem": "its frames are not known"}
    values = {}
    if video.file is None:
        sizes = {(head.height, head.width) for head in map(read_header, video.images)}
        is_packed = sizes == {(frames.height, frames.width)}
    else:
        info = read_video_info(video.file)
        values = {"container": info.container, "codec": info.codec}
        is_packed = (info.num_frames, info.height, info.width) == (frames.num_frames, frames.height, frames.width)
    problem = "not the packed video: it has another number of frames, or another size"
    return values | ({} if is_packed else {"problem": problem})


def _audios(
    audios: Sequence[AudioReference], of: str, encoder: Processor | None, located: Mapping[str, MediaReference]
) -> tuple[AudioView, ...]:
    """Return the audio files of a sample; the tokens of some families depend on the longest of them."""
    clips = [audio.clip or AudioClip(rate=1, start=0, samples=0, total=0) for audio in audios]
    tokens: list[int | None] = [None] * len(audios)
    if isinstance(encoder, ChatEncoder) and (family := encoder.audio) is not None:
        sizes = [resampled_length(clip.samples, clip.rate, family.rate) for clip in clips]
        with suppress(RecordError):  # another encoder than the encoder that packed them
            tokens = tokens if 0 in sizes else [family.run(size, max(sizes)).length for size in sizes]
    return tuple(
        AudioView(
            name=audio.file.name or f"audio {i}{of}",
            clip=clip,
            tokens=count,
            **_file([audio.file], located, "audio file", partial(_audio_problem, audio.file, clip)),
        )
        for i, (audio, clip, count) in enumerate(zip(audios, clips, tokens, strict=True))
    )


def _audio_problem(file: MediaReference, clip: AudioClip) -> Mapping[str, Any]:
    """Find damage that needs no decoding."""
    if not clip.total:
        return {"problem": "its samples are not known"}
    info = read_audio_info(file)
    problem = "not the packed audio file: it has another number of samples, or another rate"
    return {} if (info.samples, info.rate) == (clip.total, clip.rate) else {"problem": problem}


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
