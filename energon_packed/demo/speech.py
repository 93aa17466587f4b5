"""Generate speech-like audio and its transcripts: a folder and a seed in, data.jsonl and its audio files out.

A letter is a tone of three formants with the harmonics of a voice, a space is a pause: audio of the length, the pauses
and the spectrum of speech, from which a model can learn the letters. Containers, codecs and rates differ, as in real
data. Some records are invalid on purpose. The same seed always results in the same records.
"""

import json
import random
import wave
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from energon_packed.demo.dataset import DemoDataset, write_lines
from energon_packed.encoding.av_file import load_av

_WORDS = (
    *("the", "a", "old", "red", "quiet", "clock", "river", "garden", "stands", "turns", "sings", "under", "behind"),
    *("window", "market", "lantern", "slowly", "again", "today", "and", "then", "letter", "waits", "station"),
)
_PROMPTS = ("Transcribe the audio.", "What is said?", "Write down what you hear.")
# (extension, codec, container or None, rate); files cycle through them.
_KINDS = (
    ("flac", "flac", None, 16_000),
    ("wav", "pcm_s16le", None, 16_000),
    ("mp3", "libmp3lame", None, 44_100),
    ("opus", "libopus", "ogg", 48_000),
    ("m4a", "aac", "ipod", 22_050),
    ("wav", "pcm_s24le", None, 48_000),
)
_FORMANTS = ((300, 870, 2240), (390, 1990, 2550), (530, 1840, 2480), (660, 1720, 2410), (730, 1090, 2440))
_SECONDS = 0.07  # of a letter
_LIMIT = 31  # seconds of a file that is too long for Qwen2-Audio

Samples = NDArray[np.float32]


def speech(text: str, rate: int, *, pitch: float = 120.0) -> Samples:
    """Return speech-like audio of a text, float32 (n,), n = rate * 0.07 s for each character.

    Args:
        text: letters and spaces.
        rate: samples per second.
        pitch: hertz of the voice.
    """
    size = int(rate * _SECONDS)
    time, fade = np.arange(size) / rate, np.hanning(size)
    parts = [np.zeros(0)]
    for place, letter in enumerate(text.lower()):
        tone = np.zeros(size)
        if letter.isalpha():
            code = ord(letter) - ord("a")
            voice = pitch * (1 + 0.1 * np.sin(place))
            for number, formant in enumerate(_FORMANTS[code % len(_FORMANTS)]):
                harmonic = max(1, round((formant + 11 * code) / voice))
                tone += np.sin(2 * np.pi * voice * harmonic * time) / (number + 1)
        parts.append(tone * fade)
    return (0.2 * np.concatenate(parts)).astype(np.float32)


def write_audio(
    path: Path, samples: Samples, rate: int, *, codec: str, container: str | None = None, channels: int = 1
) -> Path:
    """Write samples to an audio file.

    Args:
        path: the file; its extension selects the container if there is none.
        samples: float32 (n,), or (channels, n).
        rate: samples per second.
        codec: encoder of FFmpeg, such as `flac`, `pcm_s16le` or `libmp3lame`.
        container: format of FFmpeg, or None.
        channels: channels of the file; a single channel of samples is repeated.

    Raises:
        ConfigError: PyAV is not installed.
    """
    av = load_av()
    layout = "mono" if channels == 1 else "stereo"
    with av.open(str(path), "w", format=container) as out:
        stream: Any = out.add_stream(codec, rate)
        stream.layout = layout
        resampler = av.AudioResampler(format=stream.codec_context.format, layout=layout, rate=rate)
        values = np.ascontiguousarray(np.broadcast_to(np.atleast_2d(samples), (channels, np.shape(samples)[-1])))
        frames = []
        if values.shape[1]:
            frame = av.AudioFrame.from_ndarray(values, format="fltp", layout=layout)
            frame.sample_rate = rate
            frames = resampler.resample(frame) + resampler.resample(None)
        for each in [*frames, None]:
            out.mux(stream.encode(each))
    return path


def write_speech(folder: Path, *, records: int = 100, broken: int = 6, seed: int = 0) -> DemoDataset:
    """Write `records` lines to `folder/data.jsonl`, and their audio files to `folder/audio`.

    Args:
        folder: created if missing.
        records: number of lines, including invalid lines.
        broken: number of invalid lines: a missing, a truncated, an empty and a too long file, and others.
        seed: the same seed produces the same records.

    Raises:
        ConfigError: PyAV is not installed.
    """
    rng = random.Random(seed)
    audio = folder / "audio"
    audio.mkdir(parents=True, exist_ok=True)
    lines, sentences = [], []
    for index in range(records - broken):
        sentences.append(" ".join(rng.choices(_WORDS, k=rng.randint(3, 14))))
        name = f"audio/{_write(audio, f'{index:05d}', index, sentences[-1], rng)}"
        question = rng.choice(_PROMPTS)
        record: dict[str, Any] = {"id": f"speech-{index:05d}", "audios": [name]}
        if index % 3 == 0:
            record = {"id": record["id"], "audio": name, "text": sentences[-1]}
        elif index % 3 == 1:
            parts = [{"type": "audio", "audio": name}, {"type": "text", "text": question}]
            record = {"id": record["id"], "messages": _turns(parts, sentences[-1])}
        else:
            record["messages"] = _turns(f"<audio>{question}", sentences[-1])
        lines.append(json.dumps(record))
    texts = [*sentences, *_PROMPTS, "You are a helpful assistant.", "Audio 1:"]
    return write_lines(folder, lines, texts, _broken(audio), broken, rng)


def _turns(question: Any, answer: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _write(folder: Path, stem: str, index: int, text: str, rng: random.Random) -> str:
    extension, codec, container, rate = _KINDS[index % len(_KINDS)]
    samples = speech(text, rate, pitch=rng.uniform(90, 220))
    channels = 2 if index % 5 == 4 else 1
    write_audio(folder / f"{stem}.{extension}", samples, rate, codec=codec, container=container, channels=channels)
    return f"{stem}.{extension}"


def _broken(folder: Path) -> list[str]:
    rate = 16_000
    whole = write_audio(folder / "whole.flac", speech("the whole file", rate), rate, codec="flac").read_bytes()
    (folder / "truncated.flac").write_bytes(whole[: len(whole) // 2])
    (folder / "whole.flac").unlink()
    with wave.open(str(folder / "empty.wav"), "wb") as empty:
        empty.setparams((1, 2, rate, 0, "NONE", "not compressed"))
    write_audio(folder / "long.flac", np.zeros(_LIMIT * rate, dtype=np.float32), rate, codec="flac")
    (folder / "text.wav").write_text("This file has no audio.\n", encoding="utf-8")
    files = [{"audio": f"audio/{name}", "text": "a"} for name in ("missing.wav", "truncated.flac", "empty.wav")]
    files += [{"audio": "audio/long.flac", "text": "a"}, {"audio": "audio/text.wav", "text": "a"}]
    extra = {"messages": _turns("<audio>What?", "a"), "audios": []}
    return [json.dumps(record) for record in (*files, extra)]
