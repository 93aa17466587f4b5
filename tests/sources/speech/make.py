"""Writes the files of this folder: `python make.py` with lhotse 1.33.0 and soundfile 0.14.0.

cuts.jsonl.gz          cuts of Lhotse: whole recordings, and a cut per supervision
nemo.jsonl             a manifest of NeMo, with parts that are and are not multiples of a sample
expected.json          text and samples (first, number, SHA-256 as float32): of Lhotse by `cut.load_audio()`, of
                       NeMo by the rule of `AudioSegment.from_file`, in its asr/parts/preprocessing/segment.py:
                       seek(int(offset * rate)), read(int(duration * rate))
"""

import hashlib
import itertools
import json
import os
import random
from pathlib import Path

import numpy as np
import soundfile
from lhotse import CutSet, Recording, RecordingSet, SupervisionSegment, SupervisionSet

RATE = 8000
FILES = ("a.wav", "b.flac")


def entry(text, samples, start):
    samples = np.ascontiguousarray(samples, dtype="<f4")
    digest = hashlib.sha256(samples.tobytes()).hexdigest()
    return {"text": text, "start": start, "samples": len(samples), "sha256": digest}


def main():
    os.chdir(Path(__file__).parent)
    noise = np.random.default_rng(0)
    rng = random.Random(0)
    for name in FILES:
        soundfile.write(name, noise.integers(-99, 99, 2 * RATE).astype(np.int16), RATE, subtype="PCM_16")
    recordings = [Recording.from_file(name, recording_id=name) for name in FILES]
    supervisions = []
    for recording in recordings:
        edges = sorted(rng.sample(range(400, 2 * RATE - 400), 5))
        for start, stop in itertools.pairwise(edges):
            ident = f"{recording.id}-{start}"
            supervisions.append(
                SupervisionSegment(
                    id=ident, recording_id=recording.id, start=start / RATE, duration=(stop - start) / RATE, channel=0,
                    text=f"Text of {ident}.", language="en", speaker="s",
                )
            )  # fmt: skip
    cuts = CutSet.from_manifests(RecordingSet.from_recordings(recordings), SupervisionSet.from_segments(supervisions))
    parts = cuts.trim_to_supervisions(keep_overlapping=False).to_eager()
    parts.to_file("cuts.jsonl.gz")
    expected = {"lhotse": [], "nemo": []}
    for cut in parts:
        start = round(cut.start * RATE)
        expected["lhotse"].append(entry(cut.supervisions[0].text, cut.load_audio()[0], start))
    lines = []
    for number in range(60):
        name = FILES[number % 2]
        offset, duration = rng.uniform(0, 1.5), rng.uniform(0.05, 0.45)
        if number < 30:  # multiples of a sample
            offset, duration = round(offset * RATE) / RATE, round(duration * RATE) / RATE
        lines.append({"audio_filepath": name, "offset": offset, "duration": duration, "text": f"Text {number}."})
        with soundfile.SoundFile(name) as file:
            file.seek(int(offset * RATE))
            samples = file.read(int(duration * RATE), dtype="float32")
        expected["nemo"].append(entry(lines[-1]["text"], samples, int(offset * RATE)))
    Path("nemo.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    Path("expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
