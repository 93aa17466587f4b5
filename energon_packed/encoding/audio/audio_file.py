"""Audio files -> AudioInfo (number of samples, from header and packets), or mono samples at a rate.

    read_audio_info    demultiplexes: the samples are counted, and not decoded
    decode_audio       decodes a clip
    check_audio        decodes all
    cut_audio          decodes a clip and writes it as a WAV file, which decodes to the same samples

A decoder returns as many samples as `read_audio_info` counts. PCM and FLAC packets have their number of samples. The
packets of MP3, AAC and Opus have the same number each (MP3, AAC), or show it in their first bytes (Opus); FFmpeg
reports the samples of the encoder's delay and padding, which decoders remove, as side data of packets. Vorbis, other
codecs, PCM and FLAC in containers with times in milliseconds (Matroska, ASF), and packets that look damaged are
counted by decoding.

Samples are float32 from -1 to 1, the mean of the channels, as `librosa.load` and `transformers.audio_utils.load_audio`
with the backend `soundfile` return them: integers are divided by half of their range. At the rate of the file they are
equal to these, bit by bit, for WAV and FLAC.

Other rates are converted by FFmpeg's resampler (libswresample), which `load_audio` uses by its default backend
`torchcodec`; its backend `soundfile`, librosa and qwen_omni_utils use soxr ("HQ"). The filters of the two end at
other frequencies near half of the lower rate: speech-like audio differs by less than 2e-5 of its peak, white noise by
1.3 % (from 48 kHz to 16 kHz) to 3.4 % (from 8 kHz) of its level. As in librosa, n samples become ceil(n * to / from).
"""

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from energon_packed.encoding.av_file import Damaged, FileKind, OpenFile, load_av, opened_file
from energon_packed.records import AudioClip, MediaReference
from energon_packed.records.media.kinds import AUDIO

MAX_SECONDS = 24 * 3600
"""Duration of the longest file: 24 hours."""
_KIND = FileKind(
    media=AUDIO,
    demuxers="wav,w64,aiff,au,caf,flac,mp3,aac,ogg,mov,matroska,asf,amr,avi,mpegts",
    containers="wav, flac, mp3, m4a, aac, ogg, opus, aiff, au, caf, w64, wma, amr or mka",
    remedy="replace the file",
)
_RATES = range(1000, 768_001)
_MOST_CHANNELS = 64
_MPEG = ("mp3", "mp3float", "mp2", "mp2float", "mp1", "mp1float")
_SCALES = {"u8": 1 << 7, "s16": 1 << 15, "s32": 1 << 31, "flt": 1, "dbl": 1}  # half of the range
_AS_COUNTED = "as it had when it was measured; restore the file, or pack again"
_CHUNK = 1 << 15  # samples that are resampled at once, or a frame if it is longer
_OPUS_RATE = 48_000
_WAV_HEADER = struct.Struct("<4sI8sIHHIIHH4sI")
_FLOAT = np.dtype("<f4")
_AAC_FRAMES = 8  # that are decoded: the delay of an encoder is at most 3 frames

Samples = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioInfo:
    """Samples of an audio file.

    Attributes:
        samples: samples that a decoder returns; a sample is the value of all channels at a time.
        rate: samples per second.
        channels: number of channels.
        container, codec: names of FFmpeg, such as `wav` and `pcm_s16le`.
        num_bytes: size of the file.
        decoded: they were counted by decoding, as packets do not show their number.
    """

    samples: int
    rate: int
    channels: int
    container: str
    codec: str
    num_bytes: int
    decoded: bool


def read_audio_info(reference: MediaReference) -> AudioInfo:
    """Count the samples of an audio file, without decoding if its packets show them.

    Raises:
        RecordError: `missing_audio`, `image_outside_root` or `corrupt_audio`.
        ResourceError: memory, open files or the disk fail.
        ConfigError: PyAV is not installed.
    """
    with _opened(reference) as audio:
        samples = _count_packets(audio)
        if samples is not None:
            return audio.info(samples, decoded=False)
    return check_audio(reference)


def has_audio_track(reference: MediaReference) -> bool:
    """Whether a video or audio file has an audio track, from its header. Raises as `read_audio_info`."""
    with opened_file(reference, _KIND) as file:
        return bool(file.container.streams.audio)


def check_audio(reference: MediaReference) -> AudioInfo:
    """Decode an audio file, in bounded memory. Returns and raises as `read_audio_info`."""
    with _opened(reference) as audio:
        samples = 0
        for frame in audio.frames():
            samples += frame.samples
        audio.check_header(samples)
        return audio.info(samples, decoded=True)


def decode_audio(reference: MediaReference, clip: AudioClip, rate: int) -> Samples:
    """Decode a clip of an audio file.

    A clip of a WAV, AIFF or FLAC file is read alone. Other files are decoded from their start: the decoders need the
    packets before a clip for the same samples.

    Args:
        reference: the file.
        clip: the samples.
        rate: samples per second of the result.

    Returns:
        Samples of the mean of the channels, float32 (ceil(clip.samples * rate / clip.rate),).

    Raises:
        RecordError: as `read_audio_info`; `corrupt_audio` also if the file does not have the clip.
        ResourceError, ConfigError: as `read_audio_info`.
    """
    with _opened(reference) as audio:
        parts = list(_resampled(_clip(audio, clip), clip.rate, rate))
    # As `librosa.util.fix_length`: the resampler returns some samples less for clips of few samples.
    samples = np.zeros(resampled_length(clip.samples, clip.rate, rate), dtype=np.float32)
    joined = np.concatenate(parts)[: len(samples)] if parts else samples[:0]
    samples[: len(joined)] = joined
    return samples


def is_cut(clip: AudioClip, num_bytes: int) -> bool:
    """Whether a clip of a file of `num_bytes` bytes is stored alone, as it needs fewer bytes than the file."""
    return not clip.is_whole and cut_bytes(clip) < num_bytes


def cut_bytes(clip: AudioClip) -> int:
    """Most bytes of `cut_audio`."""
    return _WAV_HEADER.size + clip.samples * _FLOAT.itemsize


def cut_audio(reference: MediaReference, clip: AudioClip) -> bytes:
    """Return a clip of an audio file as a mono WAV file, which decodes to the same samples as the clip.

    Its samples are int16 if that is exact, as for 16-bit mono files; else float32. Raises as `decode_audio`.
    """
    samples = decode_audio(reference, clip, clip.rate)
    whole = samples * np.float32(_SCALES["s16"])
    is_float = not bool(np.all((whole == np.rint(whole)) & (-_SCALES["s16"] <= whole) & (whole < _SCALES["s16"])))
    data = samples.astype(_FLOAT) if is_float else whole.astype("<i2")
    size, kind = data.itemsize, 3 if is_float else 1  # WAVE_FORMAT_IEEE_FLOAT, WAVE_FORMAT_PCM
    format_ = (kind, 1, clip.rate, clip.rate * size, size, 8 * size)
    sizes = (_WAV_HEADER.size - 8 + data.nbytes, data.nbytes)
    return _WAV_HEADER.pack(b"RIFF", sizes[0], b"WAVEfmt ", 16, *format_, b"data", sizes[1]) + data.tobytes()


def resampled_length(samples: int, rate: int, to: int) -> int:
    """Number of samples at the rate `to` of `samples` samples at `rate`."""
    return -(-samples * to // rate)


class _Audio:
    """An open audio file."""

    def __init__(self, file: OpenFile) -> None:
        self._file = file
        stream = file.container.streams.best("audio")
        if stream is None:
            raise Damaged("has no audio track")
        self.stream: Any = stream
        self.context: Any = stream.codec_context
        if self.context is None:
            raise Damaged("has a codec that this build of FFmpeg cannot decode; convert it to FLAC")
        self.demuxer = file.container.format.name.partition(",")[0]
        self.codec = str(self.context.name)
        self.rate, self.channels = int(self.context.sample_rate or 0), len(self.context.layout.channels)
        if self.rate not in _RATES or not 1 <= self.channels <= _MOST_CHANNELS:
            found = f"{self.rate:,} samples per second and {self.channels} channels"
            raise Damaged(f"has {found}; {_RATES[0]:,} to {_RATES[-1]:,} and 1 to {_MOST_CHANNELS} are supported")
        for other in file.container.streams:
            if other.index != stream.index:
                other.discard = file.av.stream.Discard.all
        self.context.thread_count = 1
        if self.codec == "flac":  # by default, FFmpeg decodes a frame with another checksum to noise
            self.context.options = {"err_detect": "crccheck+explode"}

    def info(self, samples: int, *, decoded: bool) -> AudioInfo:
        self._file.check_pages()
        if not samples:
            raise Damaged("has no samples")
        self.check_length(samples)
        return AudioInfo(
            samples=samples,
            rate=self.rate,
            channels=self.channels,
            container=self.demuxer,
            codec=self.codec,
            num_bytes=self._file.num_bytes,
            decoded=decoded,
        )

    def check_length(self, samples: int) -> None:
        if samples > MAX_SECONDS * self.rate:
            raise Damaged(f"has more than {MAX_SECONDS // 3600} hours of audio; split it")

    def check_declared(self, samples: int) -> None:
        """Raise `Damaged` if the header declares more samples."""
        duration = self.stream.duration
        declared = 0 if duration is None else round(duration * self.stream.time_base * self.rate)
        if samples < declared:
            raise Damaged(f"ends after {samples:,} of {declared:,} samples; copy it again")

    def check_header(self, samples: int) -> None:
        """Raise `Damaged` if a header with the exact number declares more samples: decoders skip damaged frames."""
        if self.demuxer in ("flac", "aiff", "au"):  # other containers have the size of the file, which is checked
            self.check_declared(samples)

    def check_packet(self, packet: Any) -> None:
        """Decode the last packet, which is incomplete in a truncated file."""
        if packet is not None:
            self.context.flush_buffers()
            self.context.decode(packet)

    @property
    def is_exact(self) -> bool:
        """Whether packets have exact times and durations, and decoding can start at any of them."""
        is_plain = self.codec == "flac" or self.codec.startswith("pcm_")
        return is_plain and self.stream.time_base * self.rate == 1  # Matroska and ASF have milliseconds

    def packets(self) -> Iterator[Any]:
        """Yield the packets of the audio track, without empty packets and without the end."""
        # The last packet of a WAV file of unknown size is marked, too; known sizes are checked in the header.
        is_checked, stream = self.demuxer != "wav", self._file.stream
        for packet in self._file.container.demux(self.stream):
            if packet.size:
                if is_checked and packet.is_corrupt:
                    raise Damaged("has damaged data; copy it again")
                stream.spent = 0
                yield packet

    def frames(self) -> Iterator[Any]:
        """Decode all packets from the present place."""
        samples = 0
        for packet in chain(self.packets(), (None,)):
            frames = self.context.decode(packet)
            # FFmpeg joins damaged frames to the packet before, and decodes the others.
            if self.codec == "flac" and packet is not None and len(frames) != 1:
                raise Damaged("has damaged data; copy it again")
            for frame in frames:
                if frame.is_corrupt:
                    raise Damaged("has damaged data")
                if self.codec.startswith("pcm_f") and not _is_finite(frame.to_ndarray()):
                    raise Damaged("has samples that are not numbers of float32; write it again")
                if (frame.sample_rate, len(frame.layout.channels)) != (self.rate, self.channels):
                    if samples:
                        raise Damaged("changes its rate or its number of channels; convert it")
                    self.rate, self.channels = frame.sample_rate, len(frame.layout.channels)
                samples += frame.samples
                self.check_length(samples)
                yield frame

    def seek(self, sample: int) -> int:
        """Go to a packet at or before a sample; return its first sample."""
        container = self._file.container
        try:
            container.seek(sample, stream=self.stream)
            place = next((packet.pts for packet in self.packets()), None)
            start = 0 if place is None or place > sample else int(place)
            container.seek(start, stream=self.stream)
        except PermissionError:  # AVERROR(1): FFmpeg finds no time in some FLAC files of a few packets
            container.seek(0, unsupported_byte_offset=True)
            return 0
        return start


@contextmanager
def _opened(reference: MediaReference) -> Iterator[_Audio]:
    with opened_file(reference, _KIND) as file:
        yield _Audio(file)


def _count_packets(audio: _Audio) -> int | None:
    """Samples that a decoder returns, from the packets; None if they do not show them."""
    if audio.is_exact:
        return _count_durations(audio)
    if audio.codec in _MPEG and audio.demuxer != "matroska":  # whose padding is another field
        return _count_mpeg(audio)
    if audio.codec == "opus":
        return _count_opus(audio)
    return _count_aac(audio) if audio.codec == "aac" else None


def _count_durations(audio: _Audio) -> int | None:
    """Count PCM and FLAC by the durations of packets."""
    samples, last = 0, None
    for packet in audio.packets():
        if not packet.duration:
            return None
        samples, last = samples + int(packet.duration), packet
    if audio.codec == "flac":
        audio.check_packet(last)
    audio.check_header(samples)
    return samples


def _skipped(packet: Any) -> int:
    """Samples of a packet that decoders remove, for the delay and the padding of the encoder."""
    if not packet.has_sidedata("skip_samples"):
        return 0
    data = bytes(packet.get_sidedata("skip_samples"))  # AV_PKT_DATA_SKIP_SAMPLES: start and end as u32, little-endian
    return int.from_bytes(data[:4], "little") + int.from_bytes(data[4:8], "little")


# Bit rates in kbit/s and rates of MPEG audio by version and layer, ISO/IEC 11172-3 2.4.2.3 and 13818-3.
_BITRATES = {
    (1, 1): (0, 32, 64, 96, 128, 160, 192, 224, 256, 288, 320, 352, 384, 416, 448),
    (1, 2): (0, 32, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384),
    (1, 3): (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    (2, 1): (0, 32, 48, 56, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256),
    (2, 2): (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
_MPEG_RATES = (44_100, 48_000, 32_000)


@lru_cache(maxsize=1024)  # a file has few headers
def _mpeg_frame(head: bytes) -> tuple[int, int, int] | None:
    """(rate, samples, bytes) of a frame of MPEG audio, from its header; None if it is not one of a known size."""
    if len(head) < 4 or head[0] != 0xFF or head[1] & 0xE0 != 0xE0:
        return None
    version, layer = (head[1] >> 3) & 3, 4 - ((head[1] >> 1) & 3)  # version 3 is 1, 2 is 2, 0 is 2.5
    rate, bitrate, padding = (head[2] >> 2) & 3, head[2] >> 4, (head[2] >> 1) & 1
    if version == 1 or layer == 4 or rate == 3 or bitrate in (0, 15):
        return None
    is_first = version == 3
    hertz = _MPEG_RATES[rate] >> (0 if is_first else 1 if version == 2 else 2)
    kbits = _BITRATES[(1, layer) if is_first else (2, min(layer, 2))][bitrate]
    if layer == 1:
        return hertz, 384, (12_000 * kbits // hertz + padding) * 4
    samples = 576 if layer == 3 and not is_first else 1152
    return hertz, samples, samples * 125 * kbits // hertz + padding


def _count_mpeg(audio: _Audio) -> int | None:
    samples, skipped, is_plain = 0, 0, True
    for packet in audio.packets():
        frame = _mpeg_frame(bytes(memoryview(packet)[:4]))
        is_plain = is_plain and frame is not None and frame[0] == audio.rate and frame[2] == packet.size
        samples, skipped = samples + (frame[1] if frame else 0), skipped + _skipped(packet)
    if skipped:  # only the header of LAME has the delay; with it, the duration is exact, and not an estimate
        audio.check_declared(samples - skipped)
    return samples - skipped if is_plain else None


def _count_opus(audio: _Audio) -> int | None:
    """Count Opus by the first bytes of packets: RFC 6716, 3.1 and 3.2."""
    samples = 0
    for packet in audio.packets():
        head = bytes(memoryview(packet)[:2])
        config, code = head[0] >> 3, head[0] & 3
        if config < 12:
            size = (480, 960, 1920, 2880)[config & 3]
        else:
            size = (480, 960)[config & 1] if config < 16 else 120 << (config & 3)
        count = (1, 2, 2, head[1] & 63 if len(head) > 1 else 0)[code]
        if not 0 < size * count <= 5760:
            return None
        samples += size * count - _skipped(packet)
    return samples if audio.rate == _OPUS_RATE else None


def _count_aac(audio: _Audio) -> int | None:
    """Count AAC by its packets: the first frames that are decoded have the size of all."""
    packets, skipped, size, last = 0, 0, 0, None
    for packet in audio.packets():
        packets, skipped, last = packets + 1, skipped + _skipped(packet), packet
        if packets <= _AAC_FRAMES:
            for frame in audio.context.decode(packet):
                if frame.sample_rate != audio.rate:  # doubled by spectral band replication
                    return None
                size = max(size, frame.samples)
    audio.check_packet(last)
    return packets * size - skipped if size in (1024, 2048) else None


def _clip(audio: _Audio, clip: AudioClip) -> Iterator[Samples]:
    """Decode the samples of a clip, mono.

    Raises:
        Damaged: the file does not have them.
    """
    place = audio.seek(clip.start) if clip.start and audio.is_exact else 0
    start, left = clip.start, clip.samples
    for frame in audio.frames():
        first, place = place, place + frame.samples
        if place <= start:
            continue
        if not left:
            break
        if audio.rate != clip.rate:
            raise Damaged(f"has {audio.rate:,} samples per second, not {clip.rate:,}, {_AS_COUNTED}")
        part = _mono(frame)[max(start - first, 0) :][:left]
        left -= len(part)
        yield part
    if left or (clip.is_whole and place != clip.total):
        expected = clip.total if clip.is_whole else clip.start + clip.samples
        raise Damaged(f"decodes to {place:,} samples, not {expected:,}, {_AS_COUNTED}")


def _is_finite(values: NDArray[np.floating[Any]]) -> bool:
    """Whether all values are numbers of float32, so that features are numbers."""
    with np.errstate(over="ignore"):
        return bool(np.isfinite(values.astype(np.float32)).all())


def _mono(frame: Any) -> Samples:
    """Mean of the channels of a frame, float32 (samples,)."""
    name, channels = str(frame.format.name), len(frame.layout.channels)
    array = frame.to_ndarray()
    if not name.endswith("p"):
        array = array.reshape(-1, channels).T
    name = name.removesuffix("p")
    if name not in _SCALES:
        raise Damaged(f"has samples of the type {name}; convert it to FLAC")
    values = array.astype(np.float32)
    if name == "u8":
        values -= 128
    values /= np.float32(_SCALES[name])
    return np.asarray(values[0] if channels == 1 else values.mean(axis=0), dtype=np.float32)


def _resampled(parts: Iterator[Samples], rate: int, to: int) -> Iterator[Samples]:
    """Convert mono samples to another rate, part by part: the result does not depend on the parts."""
    if rate == to:
        yield from parts
        return
    av = load_av()
    resampler = av.AudioResampler(format="fltp", layout="mono", rate=to)
    for part in _joined(parts):
        frame = av.AudioFrame.from_ndarray(part[None], format="fltp", layout="mono")
        frame.sample_rate = rate
        yield from (out.to_ndarray()[0] for out in resampler.resample(frame))
    yield from (out.to_ndarray()[0] for out in resampler.resample(None))


def _joined(parts: Iterator[Samples]) -> Iterator[Samples]:
    """Join parts, as each call of the resampler has a cost: frames of Opus have 960 samples."""
    waiting: list[Samples] = []
    for part in parts:
        waiting.append(part)
        if sum(map(len, waiting)) >= _CHUNK:
            yield np.concatenate(waiting)
            waiting = []
    if waiting:
        yield np.concatenate(waiting)
