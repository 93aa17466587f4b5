"""Audio in the formats of other projects, read as they read it."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from energon_packed import Conversation, RecordError, normalize
from tests import oldest
from tests.audio import signal, write
from tests.internals import open_sources

TEXTS = ["Hello world.", "  A second line. ", 'Third: ünïcode, "quoted".']


@pytest.fixture
def clips(tmp_path: Path) -> list[Path]:
    """Three audio files of different formats."""
    folder = tmp_path / "clips"
    folder.mkdir()
    kinds = ("wav16", "flac", "opus")
    return [
        write(folder / f"c{place}", kind, signal(8000 + place, 16_000, place), 48_000 if kind == "opus" else 16_000)
        for place, kind in enumerate(kinds)
    ]


def conversations(path: Path, tmp_path: Path, **options: Any) -> list[Conversation | str]:
    """Conversations, and details of rejects."""
    found: list[Conversation | str] = []
    for source in open_sources([path], work_dir=tmp_path / "work", **options):
        for row in source.scan(0, source.extent()):
            try:
                if row.reject is not None:
                    raise RecordError.of(row.reject)
                found.append(normalize(row.record, image_root=source.media_folder))
            except RecordError as error:
                found.append(f"{error.reason.value}: {error.detail}")
    return found


def samples(path: Path, tmp_path: Path, **options: Any) -> list[Any]:
    """Bytes, offset and duration of the audio file and the transcript of each record."""
    out: list[Any] = []
    for found in conversations(path, tmp_path, **options):
        if isinstance(found, str):
            out.append(found)
            continue
        [audio] = found.audios
        assert [message.content for message in found.messages][:-1] == ["<audio>"]
        out.append((audio.file.read(), audio.offset, audio.duration, found.messages[-1].content))
    return out


@pytest.mark.skipif(oldest.DATASETS, reason="this release needs soundfile")
@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_an_audiofolder_is_read_as_datasets_reads_it(
    clips: list[Path], tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the audiofolder of `datasets`."""
    from datasets import Audio, load_dataset

    # It imports the encoder, and does not use it for paths.
    encoders: Any = ModuleType("torchcodec.encoders")
    encoders.AudioEncoder = None
    for name, module in (("torchcodec", ModuleType("torchcodec")), ("torchcodec.encoders", encoders)):
        monkeypatch.setitem(sys.modules, name, module)

    folder = clips[0].parent
    if kind == "jsonl":
        rows = [{"file_name": file.name, "transcription": text} for file, text in zip(clips, TEXTS, strict=True)]
        (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        cells = [
            f'{file.name},"{text.replace(chr(34), 2 * chr(34))}"' for file, text in zip(clips, TEXTS, strict=True)
        ]
        (folder / "metadata.csv").write_text("\n".join(["file_name,transcription", *cells]) + "\n")
    data = load_dataset("audiofolder", data_dir=str(folder), split="train", cache_dir=str(tmp_path / "cache"))
    data = data.cast_column("audio", Audio(decode=False))
    expected = [(Path(row["audio"]["path"]).read_bytes(), 0, None, row["transcription"]) for row in data]
    assert samples(folder, tmp_path) == expected
    assert [text for *_, text in expected] == TEXTS


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_audio_columns_are_read_as_datasets_reads_them(clips: list[Path], tmp_path: Path, kind: str) -> None:
    from datasets import Audio, Dataset

    files = [
        {"bytes": clips[0].read_bytes(), "path": "c0.wav"},
        {"bytes": clips[1].read_bytes(), "path": None},
        {"bytes": None, "path": str(clips[2])},
    ]
    data = Dataset.from_dict({"audio": files, "sentence": TEXTS}).cast_column("audio", Audio(decode=False))
    if kind == "parquet":
        data.to_parquet(tmp_path / "data.parquet")
    else:
        data.save_to_disk(tmp_path / "saved")
    expected = [
        (row["audio"]["bytes"] or Path(row["audio"]["path"]).read_bytes(), 0, None, row["sentence"]) for row in data
    ]
    found = samples(tmp_path / ("data.parquet" if kind == "parquet" else "saved"), tmp_path)
    assert found == expected
    assert [data for data, *_ in found] == [file.read_bytes() for file in clips]


def test_audio_files_with_transcripts_of_the_same_name(clips: list[Path], tmp_path: Path) -> None:
    for file, text in zip(clips, TEXTS, strict=True):
        file.with_suffix(".txt").write_text(text)
    expected = [(file.read_bytes(), 0, None, text.strip()) for file, text in zip(clips, TEXTS, strict=True)]
    assert samples(clips[0].parent, tmp_path) == expected


def test_file_names_of_an_audiofolder(clips: list[Path], tmp_path: Path) -> None:
    folder = clips[0].parent
    rows = [
        {"file_names": [file.name for file in clips[:2]], "text": "Two."},
        {"audio_file_name": clips[2].name, "text": "One."},
        {"file_name": "c0.wav", "audio": "c1.flac", "text": "Both."},
        {"file_name": "gone.mp3", "text": "Missing."},
    ]
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    two, one, both, gone = conversations(folder, tmp_path)
    assert isinstance(two, Conversation)
    assert [audio.file.path for audio in two.audios] == ["c0.wav", "c1.flac"]
    assert isinstance(one, Conversation)
    assert [audio.file.path for audio in one.audios] == ["c2.opus"]
    assert both == "image_count_mismatch: file_name and audio both name audio files; keep one"
    assert isinstance(gone, Conversation)
    with pytest.raises(RecordError, match="No such file"):
        gone.audios[0].file.read()
