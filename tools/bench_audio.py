"""Benchmark reading of audio files: lengths without decoding, decoding, and preparation by the model's processor.

    python tools/bench_audio.py [--seconds N] [--peers] [--json audio.json]

`read_audio_info` is compared with demultiplexing of the same files by PyAV alone; `decode_audio` with decoding and
resampling of the same files by PyAV alone, which returns the same samples.

Measuring of records (`ChatEncoder.measure`) is compared with the processor of Qwen2-Audio, which trainers call for
each clip to know the length of a record: decode, compute features, and tokenize. Its samples are from PyAV. With
`--peers`, ms-swift and LLaMA-Factory prepare the same records by their own code, in their environments of
`bench_compare.py`.

Ratios are of CPU time, the least of several runs.
"""

import json
import os
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from bench_compare import PEERS, ROOT, Peer, media_packages, python_of
from benchlib import Report, arguments
from transformers import Qwen2AudioConfig

from energon_packed import AudioClip, ChatEncoder, Conversation, MediaReference, normalize
from energon_packed.demo import write_tokenizer
from energon_packed.demo.speech import speech, write_audio
from energon_packed.encoding.audio.audio_file import decode_audio, read_audio_info

_FILES: dict[str, tuple[str, str | None, int]] = {  # name -> codec, container and rate
    "16k.wav": ("pcm_s16le", None, 16_000),
    "16k.flac": ("flac", None, 16_000),
    "44k.mp3": ("libmp3lame", None, 44_100),
    "48k.opus": ("libopus", "ogg", 48_000),
    "22k.m4a": ("aac", "ipod", 22_050),
}
_RATE = 16_000
_TEXT = "the old red clock sings under the quiet river "
_QUESTION = "Transcribe the audio."
_RUNS = 7
_BATCH = 32  # records that are measured at once; `pack` measures more

Samples = np.ndarray[Any, Any]


def write_files(folder: Path, seconds: int) -> list[Path]:
    """Write the files that are missing."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, (codec, container, rate) in _FILES.items():
        path = folder / f"{seconds}s-{name}"
        if not path.exists():
            samples = speech(_TEXT * seconds, rate)[: seconds * rate]
            write_audio(path, samples, rate, codec=codec, container=container)
        paths.append(path)
    return paths


def cpu(function: Callable[[], object], calls: int = 1) -> float:
    """Return the least CPU seconds of a call, of several runs of some calls."""
    costs = []
    for _ in range(_RUNS):
        start = time.process_time()
        for _ in range(calls):
            function()
        costs.append((time.process_time() - start) / calls)
    return min(costs)


def demultiplex(path: Path) -> int:
    """Read the packets with PyAV alone."""
    with av.open(str(path)) as container:
        return sum(packet.size for packet in container.demux(container.streams.audio[0]))


def decode(path: Path) -> Samples:
    """Decode and resample with PyAV alone."""
    resampler = av.AudioResampler(format="fltp", layout="mono", rate=_RATE)
    with av.open(str(path)) as container:
        stream = container.streams.audio[0]
        stream.codec_context.thread_count = 1
        frames = [out for frame in container.decode(stream) for out in resampler.resample(frame)]
    return np.concatenate([frame.to_ndarray()[0] for frame in [*frames, *resampler.resample(None)]])


def with_processor(encoder: ChatEncoder, path: Path, messages: list[dict[str, Any]]) -> int:
    """Tokens of a record, as trainers count them: all of its preparation."""
    assert encoder.audio is not None
    text = encoder.tokenizer.apply_chat_template(messages, tokenize=False)
    out = encoder.audio.processor(text=text, audio=[decode(path)], sampling_rate=_RATE, return_tensors="pt")
    return int(out["input_ids"].shape[1])


def main() -> None:
    """Run the benchmark."""
    parser = arguments(__doc__, "audio")
    parser.add_argument("--seconds", type=int, default=20, help="length of the files, at most 29")
    parser.add_argument("--peers", action="store_true", help="run ms-swift and LLaMA-Factory; installed if missing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    report = Report("Audio files", options.json)
    folder = write_tokenizer(options.work / "tokenizer-audio", [_TEXT, f"{_QUESTION} Audio 1:"], audio=True)
    encoder = ChatEncoder.from_pretrained(folder)
    totals: Counter[str] = Counter()
    paths = write_files(options.work / "audio", options.seconds)
    of_files = {path: bench_file(report, encoder, path) for path in paths}
    for costs in of_files.values():
        totals += costs
    report.add("all files: read_audio_info / demux", totals["info"] / totals["demux"], "x")
    report.add("all files: decode_audio / PyAV", totals["ours"] / totals["plain"], "x", "<= 1.2")
    report.add("all files: processor / ChatEncoder.measure", totals["processor"] / totals["measure"], "x")
    for name in ("measure", "processor"):
        hours = options.seconds * len(_FILES) / totals[name] / 3600
        report.add(f"hours of audio per CPU second, {name}", hours, "h")
    if options.peers:
        Qwen2AudioConfig(vocab_size=len(encoder.tokenizer)).save_pretrained(folder)
        for peer in PEERS:
            if peer.script in ("ms_swift", "llamafactory"):
                measured = {path: costs["measure"] for path, costs in of_files.items()}
                bench_peer(report, peer, folder, options.work, options.seconds, measured)
    report.finish()


def bench_peer(
    report: Report, peer: Peer, folder: Path, work: Path, seconds: int, measured: dict[Path, float]
) -> None:
    """Compare the preparation of a peer with the CPU seconds of `ChatEncoder.measure`, for the files that it reads."""
    script = ROOT / "tools" / "compare" / "peer_audio.py"
    paths = {str(path.resolve()): path for path in measured}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(media_packages(work, "audio").resolve())}
    command = [python_of(peer), str(script), peer.script, str(folder.resolve()), _QUESTION, _TEXT, *paths]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, tuple[float, int]] = json.loads(done.stdout.splitlines()[-1])
    for path, (cost, tokens) in found.items():
        ours = measured[paths[path]]
        name = f"{paths[path].name}: {peer.name} / ChatEncoder.measure"
        report.add(name, cost / ours, "x", cpu=cost, other=ours, tokens=tokens)
    cost, ours = sum(cost for cost, _ in found.values()), sum(measured[paths[path]] for path in found)
    report.add(f"{len(found)} files that {peer.name} reads: {peer.name} / ChatEncoder.measure", cost / ours, "x")
    for name, total in (("measure", ours), (peer.name, cost)):
        report.add(f"seconds of these files per CPU second, {name}", seconds * len(found) / total, "s")


def bench_file(report: Report, encoder: ChatEncoder, path: Path) -> Counter[str]:
    """Measure one file, and return CPU seconds."""
    reference = MediaReference(path=str(path))
    info = read_audio_info(reference)
    clip = AudioClip(rate=info.rate, start=0, samples=info.samples, total=info.samples)
    samples = decode_audio(reference, clip, _RATE)
    assert np.abs(decode(path)[: len(samples)] - samples[: len(decode(path))]).max() < 1e-3, path
    parts: list[dict[str, Any]] = [
        {"type": "audio", "audio": str(path)},
        {"type": "text", "text": _QUESTION},
    ]
    messages: list[dict[str, Any]] = [{"role": "user", "content": parts}, {"role": "assistant", "content": _TEXT}]
    conversation: Conversation = normalize({"messages": messages})
    measured = partial(encoder.measure, [conversation] * _BATCH)
    processed = partial(with_processor, encoder, path, messages)
    costs: Counter[str] = Counter()
    costs.update(  # type: ignore[call-overload]
        demux=cpu(partial(demultiplex, path), 10),
        info=cpu(partial(read_audio_info, reference), 10),
        plain=cpu(partial(decode, path)),
        ours=cpu(partial(decode_audio, reference, clip, _RATE)),
        measure=cpu(measured) / _BATCH,
        processor=cpu(processed),
    )
    for what, ours, other in (
        ("read_audio_info / demux", "info", "demux"),
        ("decode_audio / PyAV", "ours", "plain"),
        ("processor / ChatEncoder.measure", "processor", "measure"),
    ):
        report.add(f"{path.name}: {what}", costs[ours] / costs[other], "x", cpu=costs[ours], other=costs[other])
    assert measured()[0].reject is None, measured()[0].reject
    return costs


if __name__ == "__main__":
    main()
