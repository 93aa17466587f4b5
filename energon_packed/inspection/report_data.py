"""Gather the data of a report from a dataset, and describe it in words.

Input: a PackedFolder and its encoder. Output: ReportData, with the counts of every shard and the contents
of a random sample of the packs. `facts`, `splits` and `warnings` turn it into settings, a table and sentences.
"""

import base64
import io
import math
import re
import wave
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from energon_packed.encoding import ChatEncoder
from energon_packed.encoding.audio.audio_file import Samples, decode_audio, read_audio_info
from energon_packed.encoding.vision.images import load_image
from energon_packed.encoding.vision.media import video_frames
from energon_packed.errors import EnergonPackedError, RecordError
from energon_packed.formats import Codec, codec_for
from energon_packed.formats.references import MEDIA_PART, complete_parts, located_names
from energon_packed.inspection.folder import PackedFolder
from energon_packed.inspection.tokens import KINDS
from energon_packed.inspection.view import AudioView, PackView, ShownFile, VideoView, view_pack
from energon_packed.pipeline.measured.chunks import WEIGHTED
from energon_packed.pipeline.output.run_reports import read_rejects
from energon_packed.pipeline.rejects import MOST_DETAIL
from energon_packed.records import AudioClip, FrameSelection, MediaReference, VideoReference
from energon_packed.shards import PackingManifest
from energon_packed.shards.counts import counted_manifest
from energon_packed.shards.manifest import ShardEntry
from energon_packed.shards.reader import ShardReader

# Limits on what is read and shown: the time and size of a report do not grow with the dataset. The page shows how many
# packs were read.
_MAX_MEASURED = 20_000  # packs whose lengths are read
_MAX_COUNTED = 1_000  # packs whose lengths are read if no lengths are recorded, so that packs are read in full
_MAX_MAPPED = 120  # packs in the packing map, whose tokens are counted by kind
_MAX_SHOWN = 40  # packs in the gallery
_MAX_WORST = 10  # packs in the list of least utilized packs
MOST_SHOWN = {"video": 2, "audio": 4}
"""Files of a pack in the gallery that are decoded, by kind: decoding is slower than all else."""
_MAX_PLAYED = 1 << 18  # bytes of an audio file in the page
_MAX_DRAWN = 600  # seconds of an audio file that are decoded for the page, from its start
_PLAYED_RATE = 16_000  # highest rate of audio that is converted for the page, which is enough for speech
_PEAKS = 240  # bars of a waveform
_HEIGHT = 32  # of a waveform, in units of the SVG; both as in the template
# Type of a data URL by the containers and codecs of FFmpeg that Chromium, Firefox and Safari play.
_PLAYABLE = {
    ("wav", "pcm_u8"): "wav",
    ("wav", "pcm_s16le"): "wav",
    ("wav", "pcm_s24le"): "wav",
    ("wav", "pcm_f32le"): "wav",
    ("flac", "flac"): "flac",
    ("mp3", "mp3float"): "mpeg",
    ("mov", "aac"): "mp4",
    ("aac", "aac"): "aac",
    ("ogg", "opus"): "ogg",
    ("ogg", "vorbis"): "ogg",
    ("matroska", "opus"): "webm",
}
_MAX_FRAMES = 8  # frames shown of a video
_MAX_NAMES = 5  # names listed in one warning
_EXAMPLES = 3  # examples shown per reject reason
_THUMBNAIL = 240  # pixels of the longer side
_FRAME = 140  # the same of a frame of a video
_DIGITS = 12  # characters shown of a fingerprint
_LOW_UTILIZATION = 0.9  # a warning is shown below it
_IMAGE = re.compile(r"img(\d+)_\d+\.(?!npy$)\w+")  # part name: sample index, image index
_VISION = ("image_processor_type", "patch_size", "merge_size", "min_pixels", "max_pixels", "size")


@dataclass(frozen=True, slots=True)
class PackSize:
    """Lengths and image counts of one pack.

    Attributes:
        key: key of its members in the tar.
        shard: file name of its tar.
        lengths: number of tokens of each sample.
        images: number of images of each sample.
    """

    key: str
    shard: str
    lengths: Sequence[int]
    images: Sequence[int]

    @property
    def tokens(self) -> int:
        """Number of tokens, without padding."""
        return sum(self.lengths)


class ReportData:
    """Content of the page of a dataset.

    Attributes:
        path: folder with the shards.
        manifest: packing.json, or counts from a scan.
        is_counted: there is no packing.json; the manifest contains counts from a scan, and no settings.
        encoder: encoder of the dataset, or None.
        packs: number of packs in the dataset.
        measured: packs that were read for the distributions.
        mapped: packs of the map.
        shown: packs of the gallery.
        image_sizes: (width, height) in pixels of the images in the packs of the map.
        bad_images: number of these images whose size cannot be read.
        not_encoded: why there is no encoder, or an empty string.
        wrong_shards: names of shards whose size differs from packing.json.
        rejects: (reason, count, examples), most frequent first.
    """

    def __init__(
        self, folder: PackedFolder, encoder: ChatEncoder | None, *, not_encoded: str = "", seed: int = 0
    ) -> None:
        """Read the data.

        Args:
            folder: dataset.
            encoder: encoder of the dataset, which computes the kinds of tokens; None leaves them unknown.
            not_encoded: why there is no encoder.
            seed: random seed of the sample of packs.

        Raises:
            FormatError: a shard is missing or damaged.
            ConfigError: there is no shard.
        """
        self.path, self.encoder, self.not_encoded = folder.path, encoder, not_encoded
        codec, self.is_counted = folder.codec, folder.manifest is None
        manifest = folder.manifest or counted_manifest(folder.path, codec)
        tars = [folder.path / shard.name for shard in manifest.shards]
        reader = ShardReader(tars)
        self.packs = len(reader)
        rng = np.random.default_rng(seed)
        contents = partial(_counted, encoder=encoder) if self.is_counted else recorded
        self.measured = [
            PackSize(key, reader.tars[reader.locate(pack)[0]].name, lengths, images)
            for pack in _picked(rng, len(reader), _MAX_COUNTED if self.is_counted else _MAX_MEASURED)
            for key, lengths, images in [contents(reader, pack, codec)]
        ]
        # Neither packing.json nor recorded lengths: the longest pack that was read is the width of the map.
        if not manifest.seq_len:
            manifest = replace(manifest, seq_len=max((pack.tokens for pack in self.measured), default=0))
        self.manifest = manifest
        # The order of the draws is fixed, so that a seed always results in the same page.
        picked = _picked(rng, len(reader), _MAX_MAPPED)
        self.mapped = [view_pack(reader[pack], codec, encoder, multiple=manifest.pad_multiple) for pack in picked]
        shown = _picked(rng, len(picked), _MAX_SHOWN)
        self.shown = [_shown(reader[picked[place]], self.mapped[place]) for place in shown]
        images = [image for pack in self.mapped for sample in pack.samples for image in sample.images]
        self.image_sizes = [(image.width, image.height) for image in images if image.problem is None]
        self.bad_images = len(images) - len(self.image_sizes)
        pairs = zip(manifest.shards, tars, strict=True)
        self.wrong_shards = [shard.name for shard, tar in pairs if tar.stat().st_size != shard.bytes]
        self.rejects = list(_rejects(folder.path.parent / "rejects.jsonl", manifest))

    @property
    def is_packed(self) -> bool:
        """True for packs; False for single samples, which are packed during training."""
        return codec_for(self.manifest.sample_class).packed

    @property
    def worst(self) -> Sequence[PackSize]:
        """Packs with the fewest tokens among the measured packs."""
        return sorted(self.measured, key=lambda pack: (pack.tokens, pack.key))[:_MAX_WORST]

    @property
    def token_kinds(self) -> dict[str, int]:
        """Number of tokens of each kind in the packs of the map; empty without an encoder."""
        if self.encoder is None:
            return {}
        counts = [sample.tokens for pack in self.mapped for sample in pack.samples if sample.runs]
        return {kind: sum(tokens[kind] for tokens in counts) for kind in KINDS}

    @property
    def audios(self) -> Sequence[AudioClip]:
        """Samples of each audio file in the packs of the map."""
        return [audio.clip for pack in self.mapped for sample in pack.samples for audio in sample.audios]

    @property
    def videos(self) -> Sequence[FrameSelection]:
        """Selected frames of each video in the packs of the map."""
        return [video.selection for pack in self.mapped for sample in pack.samples for video in sample.videos]


def _picked(rng: np.random.Generator, count: int, limit: int) -> list[int]:
    """Draw at most `limit` indices below `count`, in ascending order."""
    if count <= limit:
        return list(range(count))
    # Without `shuffle`, NumPy makes no array of all, if they are many.
    return sorted(rng.choice(count, limit, replace=False, shuffle=False).tolist())


def recorded(reader: ShardReader, pack: int, codec: Codec) -> tuple[str, list[int], list[int]]:
    """Key of a pack, recorded tokens and number of images of each sample. Images are counted by their names."""
    raw: dict[str, Any] = {}
    images: Counter[int] = Counter()
    names: set[str] = set()
    for member, content in reader.members(pack, only=(codec.lengths_part, MEDIA_PART)):
        raw.setdefault("__key__", member.key)
        names.add(member.part)
        if member.part in (codec.lengths_part, MEDIA_PART):
            raw[member.part] = content
    for name in names | located_names(raw):
        if (match := _IMAGE.fullmatch(name)) is not None:
            images[int(match[1])] += 1
    lengths = [length or 0 for length in codec.lengths(raw)]
    return raw["__key__"], lengths, [images[index] for index in range(len(lengths))]


def _counted(
    reader: ShardReader, pack: int, codec: Codec, encoder: ChatEncoder | None
) -> tuple[str, list[int], list[int]]:
    """Values of `recorded` for a pack of a third-party tool: recorded tokens, else measured tokens, else 0."""
    # Third-party tars record no lengths, so complete packs are read.
    raw = reader[pack]
    samples = codec.read(raw)
    conversations = [sample.conversation for sample in samples]
    lengths = [sample.length for sample in samples]
    if None in lengths and encoder is not None:
        lengths = [measured.length for measured in encoder.measure(conversations)]
    return raw["__key__"], [max(0, length or 0) for length in lengths], [len(c.images) for c in conversations]


def _shown(raw: Mapping[str, Any], view: PackView) -> PackView:
    raw = complete_parts(raw, set())  # missing files are shown as missing
    counts: Counter[str] = Counter()

    def show(kind: str, index: int, number: int, file: Any) -> ShownFile | None:
        counts[kind] += 1
        if counts[kind] > MOST_SHOWN.get(kind, counts[kind]):
            return None
        try:
            if kind == "video":
                return _strip(raw, file)
            if kind == "audio":
                return _player(raw[file.name], file)
            return ShownFile(url=_as_url(load_image(MediaReference(data=raw[file.name])), _THUMBNAIL))
        except EnergonPackedError as error:  # damaged, or PyAV is not installed
            return ShownFile(problem=error.detail if isinstance(error, RecordError) else str(error))

    return view.with_files(show)


def _player(data: bytes, audio: AudioView) -> ShownFile:
    """Decode an audio file for its waveform."""
    if not is_short(audio):
        return ShownFile()
    content, kind, decoded = playable(data, audio, _MAX_PLAYED)
    url = f"data:audio/{kind};base64,{base64.b64encode(content).decode()}" if len(content) <= _MAX_PLAYED else ""
    return ShownFile(url=url, wave=_wave(decoded))


def is_short(audio: AudioView) -> bool:
    """Whether the audio is decoded: the memory and time of a page do not grow with a file of many hours."""
    return (audio.clip.start + audio.clip.samples) / audio.clip.rate <= _MAX_DRAWN


def playable(data: bytes, audio: AudioView, most: int) -> tuple[bytes, str, Samples]:
    """Decode an audio file, and return a file that browsers play, its type after `audio/`, and the samples.

    Parts of files, formats that browsers do not play, and files of more than `most` bytes become WAV.

    Raises:
        EnergonPackedError: the file is damaged, or PyAV is not installed.
    """
    clip, rate = audio.clip, min(audio.clip.rate, _PLAYED_RATE)
    file = MediaReference(data=data, name=audio.name)
    info = read_audio_info(file)
    decoded = decode_audio(file, clip, rate)
    kind = _PLAYABLE.get((info.container, info.codec)) if clip.is_whole and len(data) <= most else None
    return (_wav(decoded, rate), "wav", decoded) if kind is None else (data, kind, decoded)


def _wav(samples: Samples, rate: int) -> bytes:
    """A WAV file of 16 bits."""
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setparams((1, 2, rate, len(samples), "NONE", ""))
        file.writeframes((samples.clip(-1, 1) * 32767).astype("<i2").tobytes())
    return out.getvalue()


def _wave(samples: Samples) -> str:
    """Draw the lowest and the highest value of each of `_PEAKS` parts; silence is a line."""
    starts = np.unique(np.arange(_PEAKS) * len(samples) // _PEAKS)
    values = np.nan_to_num(samples).clip(-1, 1)
    tops = ((1 - np.maximum.reduceat(values, starts)) * _HEIGHT / 2).tolist()
    bottoms = ((1 - np.minimum.reduceat(values, starts)) * _HEIGHT / 2).tolist()
    width = _PEAKS / len(starts)
    bars = zip(np.arange(len(starts)) * width, tops, bottoms, strict=True)
    return "".join(f"M{x:.4g} {top:.1f}h{width:.4g}v{bottom - top + 0.5:.1f}h-{width:.4g}z" for x, top, bottom in bars)


def _strip(raw: Mapping[str, Any], video: VideoView) -> ShownFile:
    """Decode some of the selected frames of a video."""
    places, times = shown_frames(video), video.selection.timestamps
    images = [_as_url(frame, _FRAME) for frame in decoded_frames(raw, video, places)]
    return ShownFile(frames=[(times[place], url) for place, url in zip(places, images, strict=True)])


def shown_frames(video: VideoView) -> list[int]:
    """Return the places of the frames that are shown, among the selected frames of a video."""
    count = len(video.selection.indices)
    # Equal frames, which fill a temporal patch, are shown once.
    places = [step * count // _MAX_FRAMES for step in range(_MAX_FRAMES)]
    return sorted({video.selection.indices[place]: place for place in places}.values())


def decoded_frames(raw: Mapping[str, Any], video: VideoView, places: Sequence[int]) -> Iterator[Image.Image]:
    """Decode some of the selected frames of a video.

    Args:
        raw: parts of its pack by name; only those of the video, or of these frames, are needed.
        video: the video.
        places: places of the frames among the selected frames.

    Raises:
        EnergonPackedError: the video is damaged, or PyAV is not installed.
    """
    indices, times = video.selection.indices, video.selection.timestamps
    frames = replace(
        video.selection, indices=tuple(indices[i] for i in places), timestamps=tuple(times[i] for i in places)
    )
    names = video.names if video.is_file else [video.names[i] for i in places]
    files = tuple(MediaReference(data=raw[name], name=name) for name in names)
    if video.is_file:
        reference = VideoReference(file=files[0], frames=frames)
    else:
        reference = VideoReference(file=None, frames=frames, images=files)
    return map(Image.fromarray, video_frames(reference, frames))


def _as_url(image: Image.Image, side: int) -> str:
    # JPEG at quality 70: forty packs of thumbnails would otherwise dominate the size of the page.
    image.thumbnail((side, side))
    out = io.BytesIO()
    image.save(out, "JPEG", quality=70)
    return "data:image/jpeg;base64," + base64.b64encode(out.getvalue()).decode()


def _rejects(file: Path, manifest: PackingManifest) -> Iterator[tuple[str, int, list[Mapping[str, Any]]]]:
    examples: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    if file.is_file():
        for value in read_rejects(file):
            if value["reason"] in manifest.rejects and len(examples[value["reason"]]) < _EXAMPLES:
                shown = {name: item[:MOST_DETAIL] if isinstance(item, str) else item for name, item in value.items()}
                examples[value["reason"]].append(shown)
            # The file may have millions of lines: stop as soon as every reason has its examples.
            if all(len(examples[reason]) >= min(_EXAMPLES, n) for reason, n in manifest.rejects.items()):
                break
    for reason, count in sorted(manifest.rejects.items(), key=lambda item: -item[1]):
        yield reason, count, examples[reason]


def facts(data: ReportData) -> Iterator[tuple[str, str]]:
    """Describe the settings and measures that are not plain counts: (name, value)."""
    m = data.manifest
    yield "supervised tokens", _supervised(data)
    if m.images:
        yield "image sizes", _image_size_facts(data)
    if m.videos:
        yield "videos", _video_facts(data)
    if data.audios:
        yield "audio files", _audio_facts(data.audios)
    if not data.is_counted:
        named = m.encoder.get("tokenizer") or m.encoder.get("processor_class") or "unknown"
        yield "tokenizer", f"{named} (fingerprint {m.tokenizer_fingerprint[:_DIGITS] or 'none'})"
    if not data.is_counted or data.encoder is not None:
        yield "chat template", _template(data)
        yield "image settings", _vision(data)
        if m.videos and data.encoder is not None and data.encoder.vision is not None:
            yield "video settings", _listed(data.encoder.vision.videos.plain())
        if m.audios and data.encoder is not None and data.encoder.audio is not None:
            settings = {name: getattr(data.encoder.audio, name) for name in ("name", "rate", "truncates")}
            yield "audio settings", _listed(settings)
    if data.is_counted:
        return
    if weighted := m.notes.get(WEIGHTED):
        yield "loss weights", f"other than 0 and 1 in {weighted:,} records"
    yield "supervised text (loss_on)", str(m.encoder.get("loss_on", "decided by the Processor"))
    if data.is_packed:
        limit = "any number of" if m.max_samples_per_pack is None else f"at most {m.max_samples_per_pack:,}"
        yield "packing", f"{m.algorithm}, {limit} samples per pack, grouped by {m.group_by}, seed {m.seed}"
    if m.pad_multiple > 1:
        yield "padding", f"every sample is rounded up to a multiple of {m.pad_multiple:,} tokens"
    overlong = f"samples longer than seq_len: {m.overlong}"
    if m.records_split:
        done = "are stored as" if m.groups else "were split into"
        overlong += f"; {m.records_split:,} records {done} {m.fragments:,} {'samples' if m.groups else 'fragments'}"
    if m.truncated:
        overlong += f"; {m.truncated:,} samples were truncated, {m.tokens_cut:,} tokens were removed"
    yield "overlong", overlong
    if m.groups:
        yield "groups", f"{m.groups:,} groups of at least two samples share a row"
    yield "input fingerprint", m.input_fingerprint[:_DIGITS] or "none"


def splits(manifest: PackingManifest) -> dict[str, list[ShardEntry]]:
    """Shards of every split that was requested or has a shard."""
    names = dict.fromkeys([*manifest.split, *(shard.split for shard in manifest.shards)])
    return {name: [shard for shard in manifest.shards if shard.split == name] for name in names}


def warnings(data: ReportData) -> Iterator[str]:
    """Describe possible problems of the dataset, one sentence each, the most serious first."""
    m = data.manifest
    if data.wrong_shards:
        yield f"the size of {_named(data.wrong_shards, 'shard')} differs from packing.json; run energon-packed verify"
    if rejected := sum(m.rejects.values()):
        reasons = ", ".join(f"{reason} {count:,}" for reason, count, _ in data.rejects)
        share = _percent(rejected, m.records)
        yield f"{rejected:,} of {m.records:,} records ({share}) were rejected: {reasons}"
    for name, shards in splits(m).items():
        # A split with share 0 has no packs on purpose.
        if not sum(shard.packs for shard in shards) and m.split.get(name) != 0:
            yield f"split {name} has no pack; its share is {m.split.get(name, 0):g} of {m.packs:,} packs"
    yield from _about_tokens(data)
    if m.unused_fields:
        yield f"not used: {_named(list(m.unused_fields), 'field')} of the records; see Fields not used"
    if m.ignored_entries:
        counts = ", ".join(f"{ignored.reason} {ignored.count:,}" for ignored in m.ignored_entries)
        yield f"entries of input folders that are not read as input: {counts}; see Sources"
    if m.truncated:
        yield f"{m.truncated:,} samples were truncated to seq_len; {m.tokens_cut:,} tokens were removed"
    if data.is_packed and not data.is_counted and m.utilization < _LOW_UTILIZATION:
        yield f"utilization is {m.utilization:.2%}; energon-packed lengths compares other values of seq_len"
    if data.bad_images:
        total = data.bad_images + len(data.image_sizes)
        yield f"{data.bad_images:,} of {total:,} images that were read are damaged"
    samples = [(pack, sample) for pack in data.shown for sample in pack.samples]
    for noun, used in (("video", "shown"), ("audio file", "played")):
        read = [(pack, file) for pack, sample in samples for kind, _, file in sample.media if noun.startswith(kind)]
        problems = [
            f"{file.name} of {pack.key}: {problem}"
            for pack, file in read
            if (problem := file.problem or pack.files.get(file.name, ShownFile()).problem) is not None
        ]
        if problems:
            yield f"{_named(problems, noun)} of the {len(read):,} that were read cannot be used or {used}"
    if data.not_encoded:
        yield f"kinds of tokens (image, supervised, other) are unknown: {data.not_encoded}"


def _about_tokens(data: ReportData) -> Iterator[str]:
    problems = [(sample, pack.key) for pack in data.mapped for sample in pack.samples if sample.problem is not None]
    if problems:
        sample, key = problems[0]
        example = f"{sample.id} in {key}: {sample.problem}"
        yield f"{len(problems):,} samples in the map cannot be encoded, such as {example}"
    # A sample whose kinds are unknown may have targets.
    if bare := [pack.key for pack in data.mapped if all(s.tokens.get("supervised") == 0 for s in pack.samples)]:
        yield f"{_named(bare, 'pack')} of the {len(data.mapped):,} in the map have no supervised token"
    if data.manifest.supervised_tokens == 0:
        yield "no token of the dataset is supervised"


def _supervised(data: ReportData) -> str:
    m = data.manifest
    if m.supervised_tokens is not None:
        return f"{m.supervised_tokens:,} of {m.tokens:,} ({_percent(m.supervised_tokens, m.tokens)})"
    if kinds := data.token_kinds:
        total = sum(kinds.values())
        share = _percent(kinds["supervised"], total)
        return f"{share} of {total:,} tokens in the {len(data.mapped):,} packs of the map; packing.json has no total"
    return "unknown: there is no total in packing.json and no tokenizer"


def _image_size_facts(data: ReportData) -> str:
    sizes = sorted(data.image_sizes, key=math.prod)  # by area
    if not sizes:
        mapped = f"the {len(data.mapped):,} packs of the map"
        return f"no size could be read in {mapped}" if data.bad_images else f"unknown: no image is in {mapped}"
    chosen = {"smallest": sizes[0], "median": sizes[len(sizes) // 2], "largest": sizes[-1]}
    listed = ", ".join(f"{name} {width} x {height}" for name, (width, height) in chosen.items())
    return f"{listed} pixels; from {len(sizes):,} of {data.manifest.images:,} images"


def _video_facts(data: ReportData) -> str:
    m = data.manifest
    stored = "frames as images" if m.extract_frames else "video files"
    selected = f" with {m.frames:,} selected frames, stored as {stored}" if m.frames else ""  # a scan counts no frames
    listed = f"{m.videos:,} videos{selected}"
    if not data.videos:
        return listed
    seconds = sorted(frames.num_frames / frames.fps for frames in data.videos if frames.fps)
    sizes = sorted({(frames.width, frames.height) for frames in data.videos}, key=math.prod)
    (first, last), count = (f"{width} x {height}" for width, height in (sizes[0], sizes[-1])), len(data.videos)
    durations = f"; {seconds[0]:.4g} to {seconds[-1]:.4g} s" if seconds else ""
    return f"{listed}{durations}, {first} to {last} pixels, from {count:,} videos"


def _audio_facts(clips: Sequence[AudioClip]) -> str:
    seconds, rates = sorted(clip.seconds for clip in clips), sorted({clip.rate for clip in clips})
    listed = f"{rates[0]:,} Hz" if len(rates) == 1 else f"{rates[0]:,} to {rates[-1]:,} Hz"
    return f"{seconds[0]:.4g} to {seconds[-1]:.4g} s, {listed}, from {len(clips):,} audio files"


def _template(data: ReportData) -> str:
    recorded = data.manifest.template_fingerprint
    if data.encoder is None:
        return f"SHA-256 {recorded[:_DIGITS]}" if recorded else "not recorded"
    template = data.encoder.renderer.template
    if template.source is None:
        return "none"
    marks = "{% generation %} tags" if template.is_tagged else "the strings before and after it"
    return f"SHA-256 {template.fingerprint[:_DIGITS]}; {marks} mark the assistant text"


def _vision(data: ReportData) -> str:
    if data.encoder is not None:
        if (vision := data.encoder.vision) is None:
            return "none (text only)"
        config = vision.config()["image_processor"]
        return _listed({"family": type(vision).__name__} | {name: config[name] for name in _VISION if name in config})
    other = ("tokenizer", "loss_on", "processor_class")
    settings = {name: value for name, value in data.manifest.encoder.items() if name not in other}
    return _listed(settings) if settings else "defaults of the tokenizer folder"


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _named(names: Sequence[str], noun: str) -> str:
    listed = ", ".join(names[:_MAX_NAMES]) + (", ..." if len(names) > _MAX_NAMES else "")
    return f"{len(names):,} {noun}{'' if len(names) == 1 else 's'} ({listed})"


def _percent(part: int, whole: int) -> str:
    return f"{part / whole:.2%}" if whole else "0%"
