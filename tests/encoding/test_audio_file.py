"""Samples of audio files: counted without decoding as decoded, and equal to other readers."""

import os
import re
import struct
import subprocess
import sys
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from energon_packed import AudioClip, ConfigError, MediaReference, RecordError
from tests.audio import KINDS, at, num_decoded, signal, write
from tests.internals import (
    audio_file,
    av_file,
    check_audio,
    cut_audio,
    cut_bytes,
    decode_audio,
    read_audio_info,
    write_audio,
)

RATES = (8000, 22_050, 48_000)
OPUS_RATES = (16_000, 24_000, 48_000)
# Around a packet of each codec, and the delay of its encoder.
LENGTHS = (1, 576, 1105, 1152, 2111, 5000, 32_017)
DECODED = ("adpcm", "alac", "mka-mp3")  # their packets do not show their number of samples


def whole(path: Path) -> AudioClip:
    info = read_audio_info(at(path))
    return AudioClip(rate=info.rate, start=0, samples=info.samples, total=info.samples)


def why(read: Callable[[], Any]) -> str:
    with pytest.raises(RecordError) as caught:
        read()
    return f"{caught.value.reason}: {caught.value.detail}"


@pytest.mark.parametrize("kind", KINDS)
def test_samples_are_counted_as_they_are_decoded(kind: str, tmp_path: Path) -> None:
    compared = 0
    for rate in OPUS_RATES if kind in ("opus", "webm") else RATES:
        for channels in (1, 2):
            for samples in LENGTHS:
                path = write(tmp_path / f"{rate}-{channels}-{samples}", kind, signal(samples, rate), rate, channels)
                try:
                    expected = num_decoded(path)
                except av.error.FFmpegError:  # a file of a few samples may have no packet
                    expected = 0
                if not expected:
                    assert why(lambda path=path: read_audio_info(at(path))).startswith("corrupt_audio: ")
                    continue
                info = read_audio_info(at(path))
                assert (info.samples, info.channels) == (expected, channels), path.name
                assert info.decoded == (kind in DECODED), path.name
                assert check_audio(at(path)).samples == expected
                compared += 1
    assert compared >= 2 * 3 * (len(LENGTHS) - 1)


@pytest.mark.parametrize("kind", ["wav16", "flac", "wav24", "wav32", "float", "double", "wav8"])
@pytest.mark.parametrize("channels", [1, 2])
def test_samples_of_wav_and_flac_are_the_stored_numbers(kind: str, channels: int, tmp_path: Path) -> None:
    """Bit by bit, as soundfile and the module `wave` read them; several channels are averaged."""
    samples = np.stack([signal(20_011, 16_000, seed) for seed in range(channels)])
    path = write(tmp_path / "a", kind, samples, 16_000, channels)
    actual = decode_audio(at(path), whole(path), 16_000)
    if kind == "flac":
        stored = np.round(samples * 32768).clip(-32768, 32767) / 32768  # the encoder stores 16 bits
        tolerance = 0.5 / 32768
    else:
        stored, tolerance = _stored(path, channels), 0.0
    expected = stored[0] if channels == 1 else stored.astype(np.float32).mean(axis=0)
    assert actual.dtype == np.float32
    assert np.abs(actual - expected.astype(np.float32)).max() <= tolerance


def _stored(path: Path, channels: int) -> Any:
    """Samples of a WAV file from -1 to 1, (channels, n)."""
    data = path.read_bytes()
    (tag,), (bits,) = struct.unpack_from("<H", data, 20), struct.unpack_from("<H", data, 34)
    at = data.index(b"data", 36)
    raw = data[at + 8 : at + 8 + struct.unpack_from("<I", data, at + 4)[0]]
    if tag == 3 or (tag == 0xFFFE and data[44:46] == b"\3\0"):
        values = np.frombuffer(raw, f"<f{bits // 8}")
    elif bits == 24:
        bytes_of = np.frombuffer(raw, np.uint8).reshape(-1, 3)
        values = (np.pad(bytes_of, ((0, 0), (1, 0))).copy().view("<i4")[:, 0] >> 8) / (1 << 23)
    elif bits == 8:
        values = (np.frombuffer(raw, np.uint8).astype(np.float64) - 128) / 128
    else:
        values = np.frombuffer(raw, f"<i{bits // 8}") / (1 << (bits - 1))
    return values.reshape(-1, channels).T


def test_the_module_wave_reads_the_same(tmp_path: Path) -> None:
    path = write(tmp_path / "a", "wav16", signal(9001, 16_000), 16_000)
    with wave.open(str(path)) as file:
        expected = np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 32768
    assert np.array_equal(decode_audio(at(path), whole(path), 16_000), expected)


@pytest.mark.parametrize("rate", [8000, 11_025, 22_050, 44_100, 48_000])
@pytest.mark.parametrize("samples", [1, 3, 160, 4410, 48_003])
def test_other_rates_are_resampled(rate: int, samples: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a", "float", signal(samples, rate), rate)
    actual = decode_audio(at(path), whole(path), 16_000)
    assert len(actual) == -(-samples * 16_000 // rate)  # as librosa
    monkeypatch.setattr(audio_file, "_CHUNK", 777)
    assert np.array_equal(actual, decode_audio(at(path), whole(path), 16_000))


@pytest.mark.parametrize("rate", [8000, 22_050, 48_000])
def test_a_resampled_tone_is_the_tone(rate: int, tmp_path: Path) -> None:
    time, at_16k = np.arange(rate) / rate, np.arange(16_000) / 16_000
    path = write(tmp_path / "a", "float", np.sin(2 * np.pi * 1000 * time).astype(np.float32) / 2, rate)
    actual = decode_audio(at(path), whole(path), 16_000)
    difference = actual - np.sin(2 * np.pi * 1000 * at_16k) / 2
    assert np.abs(difference[200:-200]).max() < 1e-4
    assert np.abs(actual[-8:]).max() > 0.2  # up to the last sample


@pytest.mark.parametrize("kind", ["wav16", "wav24", "flac", "mp3", "opus", "m4a"])
def test_a_clip_is_a_part_of_the_whole(kind: str, tmp_path: Path) -> None:
    rate = 48_000
    path = write(tmp_path / "a", kind, signal(10 * rate, rate), rate)
    clip = whole(path)
    samples = decode_audio(at(path), clip, rate)
    for start, size in ((0, 1), (1, 4095), (4096, 4096), (4097, 100_000), (clip.total - 5, 5), (96_001, 48_000)):
        part = AudioClip(rate=rate, start=start, samples=size, total=clip.total)
        assert np.array_equal(decode_audio(at(path), part, rate), samples[start : start + size]), (start, size)


@pytest.mark.parametrize(
    ("codec", "container"), [("pcm_s16le", "matroska"), ("flac", "matroska"), ("pcm_s16le", "asf")]
)
@pytest.mark.parametrize("rate", [16_000, 44_100])
def test_times_in_milliseconds_are_not_counted(codec: str, container: str, rate: int, tmp_path: Path) -> None:
    path = tmp_path / "a.mka"
    if codec == "flac":
        with (
            av.open(str(write(tmp_path / "a", "flac", signal(30_001, rate), rate))) as file,
            av.open(str(path), "w", format=container) as out,
        ):
            stream = out.add_stream_from_template(file.streams.audio[0])
            for packet in file.demux(audio=0):
                if packet.size:
                    packet.stream = stream
                    out.mux(packet)
    else:
        write_audio(path, signal(30_001, rate), rate, codec=codec, container=container, channels=1)
    clip = whole(path)
    assert clip.samples == check_audio(at(path)).samples == num_decoded(path) == 30_001
    samples = decode_audio(at(path), clip, rate)
    part = AudioClip(rate=rate, start=20_011, samples=5000, total=30_001)
    assert np.array_equal(decode_audio(at(path), part, rate), samples[20_011:25_011])


def test_a_part_of_a_flac_file_of_one_packet(tmp_path: Path) -> None:
    path = write(tmp_path / "a", "flac", signal(600, 16_000), 16_000)
    part = AudioClip(rate=16_000, start=300, samples=200, total=600)
    assert np.array_equal(decode_audio(at(path), part, 16_000), decode_audio(at(path), whole(path), 16_000)[300:500])


@pytest.mark.parametrize("kind", ["wav16", "flac"])
def test_a_clip_is_read_alone(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a", kind, signal(120 * 16_000, 16_000), 16_000)
    read = 0
    original = av_file.LimitedStream.read

    def counting(self: Any, size: int) -> bytes:
        nonlocal read
        data: bytes = original(self, size)
        read += len(data)
        return data

    monkeypatch.setattr(av_file.LimitedStream, "read", counting)
    clip = AudioClip(rate=16_000, start=100 * 16_000, samples=16_000, total=120 * 16_000)
    assert len(decode_audio(at(path), clip, 16_000)) == 16_000
    assert read < 0.2 * path.stat().st_size


def damaged(folder: Path) -> dict[str, tuple[bytes, str]]:
    """Damaged files by name, and the reason that each must have."""
    found: dict[str, tuple[bytes, str]] = {}
    for kind in ("wav16", "flac", "mp3", "m4a", "aac", "opus"):
        path = write(folder / f"intact-{kind}", kind, signal(48_000, 16_000), 16_000)
        data = path.read_bytes()
        found[f"half{path.suffix}"] = (data[: len(data) // 2], "copy it again|damaged data")
        found[f"empty{path.suffix}"] = (b"", "is empty, 0 bytes")
        found[f"head{path.suffix}"] = (data[:60], "header is damaged|copy it again|no audio track")
    found["last-bytes.flac"] = ((folder / "intact-flac.flac").read_bytes()[:-7], "damaged data")
    found["text.wav"] = (b"This is no audio file.\n" * 20, "is not an audio file of the formats wav, flac")
    found["zeros.mp3"] = (bytes(5000), "is not an audio file")
    found["playlist.m3u8"] = (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", "is not an audio file")
    found["concat.wav"] = (b"ffconcat version 1.0\nfile /etc/passwd\n", "is not an audio file")
    silent = (folder / "intact-wav16.wav").read_bytes()[:44]
    found["no-samples.wav"] = (silent[:4] + struct.pack("<I", 36) + silent[8:40] + bytes(4), "no samples|header is")
    return found


def test_damaged_files_are_rejected_with_the_reason(tmp_path: Path) -> None:
    for name, (data, reason) in damaged(tmp_path).items():
        path = tmp_path / name
        path.write_bytes(data)
        message = why(lambda path=path: read_audio_info(at(path)))
        assert message.startswith(f"corrupt_audio: {path}"), message
        assert re.search(reason, message), (name, message)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_was_cut_is_rejected_and_bytes_after_its_end_add_no_sample(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a", kind, signal(24_000, 16_000), 16_000)
    data, samples = path.read_bytes(), read_audio_info(at(path)).samples
    for share in (0.3, 0.6, 0.95):
        path.write_bytes(data[: int(share * len(data))])
        found = why(lambda: read_audio_info(at(path)))
        assert found.startswith(f"corrupt_audio: {path}"), (share, found)
    path.write_bytes(data + np.random.default_rng(0).bytes(3000))
    try:
        longer = read_audio_info(at(path)).samples
    except RecordError:
        return
    assert longer == samples or kind == "au", longer  # FFmpeg reads an AU file to its end


def changed_inside(data: bytes) -> list[bytes]:
    """A file with three other bytes, with zeros, and without some bytes in its middle."""
    middle = len(data) // 2
    flipped = bytes(255 - value for value in data[middle : middle + 3])
    return [
        data[:middle] + flipped + data[middle + 3 :],
        data[:middle] + bytes(5000) + data[middle + 5000 :],
        data[:middle] + data[middle + 3000 :],
    ]


def test_damage_inside_a_flac_file_is_found_by_its_checksums(tmp_path: Path) -> None:
    intact = write(tmp_path / "a", "flac", signal(48_000, 16_000), 16_000)
    path = tmp_path / "changed.flac"
    for data in changed_inside(intact.read_bytes()):
        path.write_bytes(data)
        for read in (read_audio_info, check_audio, lambda file: decode_audio(file, whole(intact), 16_000)):
            assert why(lambda read=read: read(at(path))) == f"corrupt_audio: {path} has damaged data; copy it again"
    # In other containers, packets have durations, so that only decoding finds damage.
    other = tmp_path / "a.mp4"
    with av.open(str(intact)) as source, av.open(str(other), "w") as out:
        stream = out.add_stream_from_template(source.streams.audio[0])
        for packet in source.demux(audio=0):
            if packet.size:
                packet.stream = stream
                out.mux(packet)
    other.write_bytes(changed_inside(other.read_bytes())[0])
    assert read_audio_info(at(other)).samples == 48_000
    for read in (check_audio, lambda file: decode_audio(file, whole(intact), 16_000)):
        assert "has damaged data" in why(lambda read=read: read(at(other)))


def ogg(folder: Path, codec: str) -> Path:
    """An Ogg file of 20 s with many pages."""
    path, samples = folder / f"{codec}.ogg", signal(20 * 48_000, 48_000)
    options = {"strict": "experimental"} if codec == "vorbis" else {}
    with av.open(str(path), "w", format="ogg") as out:
        stream = out.add_stream(codec, 48_000, options=options)
        stream.layout = "stereo"
        stream.codec_context.open()
        frame = av.AudioFrame.from_ndarray(np.stack([samples] * 2), format="fltp", layout="stereo")
        frame.sample_rate = 48_000
        resampler = av.AudioResampler(stream.codec_context.format, "stereo", 48_000, stream.codec_context.frame_size)
        for part in [*resampler.resample(frame), *resampler.resample(None), None]:
            out.mux([packet for packet in stream.encode(part) if packet.size])
    return path


@pytest.mark.parametrize("codec", ["libopus", "flac", "vorbis"])
def test_damage_inside_a_page_of_an_ogg_file_is_found_by_its_checksum(codec: str, tmp_path: Path) -> None:
    """FFmpeg leaves out the page, mostly without an error."""
    path = ogg(tmp_path, codec)
    data, samples = path.read_bytes(), read_audio_info(at(path)).samples
    assert samples == check_audio(at(path)).samples == num_decoded(path)
    path.write_bytes(data + b"TAG" + bytes(125))
    assert read_audio_info(at(path)).samples == samples
    places = [*np.linspace(len(data) // 20, len(data) - 1, 12).astype(int), data.rindex(b"OggS")]
    for place in places:
        path.write_bytes(data[:place] + bytes([data[place] ^ 255]) + data[place + 1 :])
        for read in (read_audio_info, check_audio):
            assert "has damaged data" in why(lambda read=read: read(at(path))), place
    for changed in changed_inside(data):
        path.write_bytes(changed)
        assert "damaged data" in why(lambda: read_audio_info(at(path)))


def test_a_flac_file_without_one_of_its_frames_is_rejected(tmp_path: Path) -> None:
    path = write(tmp_path / "a", "flac", signal(48_000, 16_000), 16_000)
    with av.open(str(path)) as container:
        packets = [bytes(packet) for packet in container.demux(audio=0) if packet.size]
    data = path.read_bytes()
    header = data[: data.index(packets[0])]
    assert header + b"".join(packets) == data
    path.write_bytes(header + b"".join(packets[:10] + packets[11:]))
    samples = num_decoded(path)
    assert samples < 48_000
    for read in (read_audio_info, check_audio):
        assert f"ends after {samples:,} of 48,000 samples; copy it again" in why(lambda read=read: read(at(path)))


def test_a_header_of_4_gib_reads_no_byte_more(tmp_path: Path) -> None:
    path = write(tmp_path / "a", "wav16", signal(24_000, 16_000), 16_000)
    data = bytearray(path.read_bytes())
    at_data = data.index(b"data") + 4
    for size in (0xF000_0000, 0x7FFF_FFFF):
        data[at_data : at_data + 4] = struct.pack("<I", size)
        data[4:8] = struct.pack("<I", size + 36)
        path.write_bytes(data)
        message = why(lambda: read_audio_info(at(path)))
        assert re.search(r"a.wav ends after 48,\d\d\d of [24],\d{3},\d{3},\d{3} bytes; copy it again$", message), (
            message
        )


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e300])
def test_samples_that_are_no_numbers_are_rejected(value: float, tmp_path: Path) -> None:
    path = write(tmp_path / "a", "double", signal(24_000, 16_000), 16_000)
    clip = whole(path)
    data = bytearray(path.read_bytes())
    data[-8:] = struct.pack("<d", value)
    path.write_bytes(data)
    for message in (why(lambda: check_audio(at(path))), why(lambda: decode_audio(at(path), clip, 16_000))):
        assert message == f"corrupt_audio: {path} has samples that are not numbers of float32; write it again"


FUZZ = """
import sys
import resource
from pathlib import Path
import numpy as np
from energon_packed import MediaReference, RecordError
from tests.encoding.test_audio_file import whole
from tests.internals import decode_audio

rng = np.random.default_rng(int(sys.argv[2]))
files = sorted(Path(sys.argv[1]).iterdir())
outcomes, peak = {"rejected": 0, "equal": 0}, 0
for number in range(int(sys.argv[3])):
    path = files[number % len(files)]
    data = bytearray(path.read_bytes())
    for _ in range(rng.integers(1, 5)):
        place = int(rng.integers(len(data) if rng.random() < 0.5 else min(len(data), 300)))
        size = int(rng.integers(1, 400))
        match rng.integers(5):
            case 0:
                data[place] = rng.integers(256)
            case 1:
                data[place : place + 4] = rng.choice([b"\\xff" * 4, b"\\xff\\xff\\xff\\xfe", bytes(4)])
            case 2:
                del data[place : place + size]
            case 3:
                data[place:place] = rng.bytes(size)
            case 4:
                data[place:place] = data[place // 2 :][: 5 * size]
    changed = path.with_name(f"changed{path.suffix}")
    changed.write_bytes(data)
    try:
        clip = whole(changed)
        assert len(decode_audio(MediaReference(path=str(changed)), clip, clip.rate)) == clip.samples
        outcomes["equal"] += 1
    except RecordError as error:
        assert str(changed) in error.detail and "\\n" not in error.detail and len(error.detail) < 400, error.detail
        outcomes["rejected"] += 1
    changed.unlink()
    if number == len(files):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert min(outcomes.values()) > int(sys.argv[3]) / 10, outcomes
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak)
"""


def test_fuzzed_files_are_read_or_rejected_in_little_memory(tmp_path: Path) -> None:
    """Every container and codec; nothing is printed by libraries."""
    for kind in KINDS:
        write(tmp_path / kind, kind, signal(8000, 16_000), 16_000)
    count = os.environ.get("ENERGON_PACKED_FUZZ", "420")
    done = subprocess.run([sys.executable, "-c", FUZZ, tmp_path, "1", count], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-1500:]
    assert "Traceback" not in done.stderr
    assert "Warning" not in done.stderr
    assert int(done.stdout) < 100_000  # KiB


def test_files_that_are_no_files(tmp_path: Path) -> None:
    assert why(lambda: read_audio_info(at(tmp_path / "a.wav"))).startswith("missing_audio: ")
    assert "of an audio file" in why(lambda: read_audio_info(at(tmp_path)))


def test_files_of_unknown_size_are_read_to_their_end(tmp_path: Path) -> None:
    """WAV files that a program writes to a pipe have no sizes in their headers."""
    path = write(tmp_path / "a", "wav16", signal(48_000, 16_000), 16_000)
    data = bytearray(path.read_bytes())
    at_data = data.index(b"data") + 4
    for size in (b"\xff\xff\xff\xff", bytes(4)):
        data[4:8] = data[at_data : at_data + 4] = size
        path.write_bytes(data)
        assert read_audio_info(at(path)).samples == 48_000
        assert len(decode_audio(at(path), whole(path), 16_000)) == 48_000


def test_tags_and_files_in_a_row(tmp_path: Path) -> None:
    for kind in ("flac", "mp3", "aac"):
        path = write(tmp_path / "a", kind, signal(30_000, 16_000), 16_000)
        data = path.read_bytes()
        samples = read_audio_info(at(path)).samples
        tagged = b"ID3\x04\0\0\0\0\0\x0a" + bytes(10) + data + b"TAG" + bytes(125)
        path.write_bytes(tagged)
        assert read_audio_info(at(path)).samples == samples == num_decoded(path)
    path.write_bytes(data + data)
    assert read_audio_info(at(path)).samples == num_decoded(path)
    path.write_bytes(data + write(tmp_path / "b", "aac", signal(30_000, 22_050), 22_050).read_bytes())
    assert "changes its rate or its number of channels; convert it" in why(lambda: check_audio(at(path)))


def test_random_damage_is_an_error_or_counted_right(tmp_path: Path) -> None:
    """Whatever the bytes are: the count is what a decoder returns, or the decoder fails for the same record."""
    rng = np.random.default_rng(0)
    outcomes = set()
    for kind in ("wav16", "flac", "mp3", "m4a", "aac", "opus"):
        path = write(tmp_path / kind, kind, signal(24_000, 16_000), 16_000)
        data = path.read_bytes()
        for _ in range(12):
            changed = bytearray(data)
            for place in rng.integers(0, len(data), int(rng.integers(1, 30))):
                changed[place] = rng.integers(256)
            path.write_bytes(changed[: int(rng.integers(len(data) // 2, len(data) + 1))])
            try:
                info = read_audio_info(at(path))
            except RecordError:
                outcomes.add("rejected")
                continue
            clip = AudioClip(rate=info.rate, start=0, samples=info.samples, total=info.samples)
            try:
                assert len(decode_audio(at(path), clip, info.rate)) == info.samples
                outcomes.add("equal")
            except RecordError as error:
                assert str(path) in str(error)
                outcomes.add("fails")
    assert outcomes >= {"rejected", "equal"}


def test_another_file_in_its_place_is_an_error_with_its_name(tmp_path: Path) -> None:
    path = write(tmp_path / "a", "flac", signal(16_000, 16_000), 16_000)
    clip = whole(path)
    for samples, rate in ((15_999, 16_000), (16_001, 16_000), (16_000, 8000)):
        write(tmp_path / "a", "flac", signal(samples, rate), rate)
        message = why(lambda: decode_audio(at(path), clip, 16_000))
        assert message.startswith(f"corrupt_audio: {path} ")
        assert message.endswith("as it had when it was measured; restore the file, or pack again")
    write(tmp_path / "a", "flac", signal(9000, 16_000), 16_000)
    part = AudioClip(rate=16_000, start=8000, samples=2000, total=16_000)
    assert "decodes to 9,000 samples, not 10,000, as it had" in why(lambda: decode_audio(at(path), part, 16_000))


def test_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a", "flac", signal(32_000, 16_000), 16_000)
    monkeypatch.setattr(audio_file, "MAX_SECONDS", 2)
    assert read_audio_info(at(path)).samples == check_audio(at(path)).samples == 32_000
    monkeypatch.setattr(audio_file, "MAX_SECONDS", 1)
    assert "hours of audio; split it" in why(lambda: read_audio_info(at(path)))
    assert "hours of audio; split it" in why(lambda: check_audio(at(path)))
    monkeypatch.setattr(av_file, "MAX_FILE_BYTES", 1000)
    assert "more than the limit of 1,000; split it" in why(lambda: read_audio_info(at(path)))


@pytest.mark.parametrize(
    ("rate", "channels", "is_read"),
    [(1000, 1, True), (999, 1, False), (768_000, 1, True), (768_001, 1, False), (8000, 64, True), (8000, 65, False)],
)
def test_rates_and_channels_have_limits(rate: int, channels: int, is_read: bool, tmp_path: Path) -> None:
    path, data = tmp_path / "a.wav", bytes(2 * channels * 100)
    layout = struct.pack("<HHIIHH", 1, channels, rate, rate * 2 * channels, 2 * channels, 16)
    path.write_bytes(b"RIFF" + struct.pack("<I", 36 + len(data)) + b"WAVEfmt " + struct.pack("<I", 16) + layout
                     + b"data" + struct.pack("<I", len(data)) + data)  # fmt: skip
    if is_read:
        info = read_audio_info(at(path))
        assert (info.samples, info.rate, info.channels) == (100, rate, channels)
        return
    found = f"has {rate:,} samples per second and {channels} channels"
    assert f"{found}; 1,000 to 768,000 and 1 to 64 are supported" in why(lambda: read_audio_info(at(path)))


def test_the_bytes_of_one_packet_have_a_limit_and_those_of_all_have_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a", "wav16", np.zeros(6_000_000, dtype=np.float32), 48_000)
    monkeypatch.setattr(av_file, "_MOST_BETWEEN_PACKETS", 8 << 20)  # more than FFmpeg reads to open a file
    assert read_audio_info(at(path)).samples == 6_000_000


def mpeg_frames(version: int, layer: int, kbits: int, bits: int, rate_bits: int, rate: int) -> bytes:
    """40 silent frames of MPEG audio: headers, and zeros; every third frame is padded."""
    frames = []
    for number in range(40):
        padding = int(number % 3 == 0)
        if layer == 1:
            size = 4 * (12_000 * kbits // rate + padding)
        else:
            size = (72_000 if layer == 3 and version < 3 else 144_000) * kbits // rate + padding
        head = bytes([0xFF, 0xE1 | version << 3 | (4 - layer) << 1, bits << 4 | rate_bits << 2 | padding << 1, 0xC0])
        frames.append(head + bytes(size - 4))
    return b"".join(frames)


@pytest.mark.parametrize(
    ("layer", "version", "kbits", "bits", "rate_bits", "rate", "samples"),
    [
        (1, 3, 128, 4, 0, 44_100, 384), (1, 2, 96, 6, 0, 22_050, 384),
        (2, 3, 64, 4, 1, 48_000, 1152), (2, 2, 48, 6, 2, 16_000, 1152),
        (3, 3, 128, 9, 2, 32_000, 1152), (3, 2, 64, 8, 0, 22_050, 576), (3, 0, 64, 8, 0, 11_025, 576),
    ],
)  # fmt: skip
def test_frames_of_every_layer_are_counted_by_their_headers(
    layer: int, version: int, kbits: int, bits: int, rate_bits: int, rate: int, samples: int, tmp_path: Path
) -> None:
    path = tmp_path / "a.mp3"
    path.write_bytes(mpeg_frames(version, layer, kbits, bits, rate_bits, rate))
    info = read_audio_info(at(path))
    assert (info.samples, info.rate, info.decoded) == (40 * samples, rate, False)
    assert num_decoded(path) == 40 * samples


def test_frames_of_another_rate_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "a.mp3"
    path.write_bytes(mpeg_frames(3, 3, 128, 9, 0, 44_100) + mpeg_frames(3, 3, 128, 9, 1, 48_000))
    assert "changes its rate or its number of channels; convert it" in why(lambda: read_audio_info(at(path)))


@pytest.mark.parametrize("kbits", [10, 24, 96])  # SILK, both, CELT
@pytest.mark.parametrize("frame", ["2.5", "5", "10", "20", "40", "60", "120"])
def test_packets_of_opus_show_their_samples(frame: str, kbits: int, tmp_path: Path) -> None:
    path, rate = tmp_path / "a.opus", 24_000
    with av.open(str(path), "w", format="ogg") as out:
        options = {"frame_duration": frame, "application": "voip", "b": str(kbits * 1000)}
        stream = out.add_stream("libopus", rate, options=options)
        stream.layout = "mono"
        stream.codec_context.open()
        resampler = av.AudioResampler(stream.codec_context.format, "mono", rate, stream.codec_context.frame_size)
        sound = av.AudioFrame.from_ndarray(signal(rate, rate)[None], format="fltp", layout="mono")
        sound.sample_rate = rate
        for part in [*resampler.resample(sound), *resampler.resample(None), None]:
            out.mux([packet for packet in stream.encode(part) if packet.size])
    info = read_audio_info(at(path))
    assert (info.samples, info.decoded) == (num_decoded(path), False)


@pytest.mark.parametrize(
    ("values", "bits"),
    [
        ([0.5, -1.0, 32767 / 32768], 16),
        ([0.5, -1.0, 1.0], 32),
        ([0.5, -1.0 - 1 / 32768, 0.0], 32),
        ([0.1, 0.0, 0.0], 32),
    ],
)
def test_a_cut_clip_is_a_wav_file_of_16_bits_if_they_are_enough(
    values: list[float], bits: int, tmp_path: Path
) -> None:
    path = write(tmp_path / "a", "float", np.array([9.0, *values, 9.0], dtype=np.float32), 16_000)
    clip = AudioClip(rate=16_000, start=1, samples=3, total=5)
    data = cut_audio(at(path), clip)
    kind, channels, rate, per_second, block, width = struct.unpack_from("<HHIIHH", data, 20)
    assert (kind, channels, rate, per_second, block, width) == (
        1 if bits == 16 else 3, 1, 16_000, 16_000 * bits // 8, bits // 8, bits,
    )  # fmt: skip
    assert struct.unpack_from("<I", data, 4)[0] == len(data) - 8
    assert len(data) == 44 + 3 * bits // 8 <= cut_bytes(clip) == 56
    whole_of_cut = AudioClip(rate=16_000, start=0, samples=3, total=3)
    assert decode_audio(MediaReference(data=data), whole_of_cut, 16_000).tolist() == np.float32(values).tolist()


MEMORY = """
import resource, sys
from energon_packed import MediaReference
from tests.internals import check_audio, read_audio_info
file = MediaReference(path=sys.argv[1])
read_audio_info(MediaReference(path=sys.argv[2]))
check_audio(MediaReference(path=sys.argv[2]))
used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert read_audio_info(file).samples == check_audio(file).samples == 3600 * 16_000
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used)
"""


def test_an_hour_needs_as_little_memory_as_a_second(tmp_path: Path) -> None:
    hour = write(tmp_path / "hour", "flac", np.zeros(3600 * 16_000, dtype=np.float32), 16_000)
    second = write(tmp_path / "second", "flac", np.zeros(16_000, dtype=np.float32), 16_000)
    done = subprocess.run([sys.executable, "-c", MEMORY, hour, second], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 20_000  # KiB


def test_the_package_is_needed_for_audio_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ConfigError, match=r"pip install 'energon-packed\[video\]'"):
        read_audio_info(at(tmp_path / "a.wav"))
