"""Audio in the formats of other projects, read as they read it."""

import csv
import hashlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from energon_packed import Conversation, RecordError, SourceConfig, SourceError, normalize
from tests import oldest
from tests.audio import signal, write
from tests.internals import audio_clip, decode_audio, open_sources
from tests.sources.tars import write_tar
from tests.storage import Store

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


def conversations(path: Path | str, tmp_path: Path, **options: Any) -> list[Conversation | str]:
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


def samples(path: Path | str, tmp_path: Path, **options: Any) -> list[Any]:
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
        {"file_name": "gone.MP3", "text": "Missing."},
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


SPEECH = Path(__file__).parent / "speech"  # written by Lhotse and by soundfile: make.py


def clips_of(path: Path, tmp_path: Path) -> list[dict[str, Any]]:
    """Text and decoded samples of each record, as in speech/expected.json."""
    out: list[dict[str, Any]] = []
    for found in conversations(path, tmp_path):
        assert isinstance(found, Conversation), found
        [audio] = found.audios
        clip, _ = audio_clip(audio)
        data = decode_audio(audio.file, clip, clip.rate).astype("<f4")
        assert len(data) == clip.samples
        digest = hashlib.sha256(data.tobytes()).hexdigest()
        text = found.messages[-1].content
        out.append({"text": text, "start": clip.start, "samples": clip.samples, "sha256": digest})
    return out


def test_cuts_of_lhotse_have_the_samples_that_lhotse_loads(tmp_path: Path) -> None:
    assert clips_of(SPEECH / "cuts.jsonl.gz", tmp_path) == json.loads((SPEECH / "expected.json").read_text())["lhotse"]


def test_parts_of_a_nemo_manifest_have_the_samples_that_nemo_reads(tmp_path: Path) -> None:
    """NeMo rounds down, so that the last bit of a product is a sample; all others are the same."""
    ours = clips_of(SPEECH / "nemo.jsonl", tmp_path)
    theirs = json.loads((SPEECH / "expected.json").read_text())["nemo"]
    assert [row["text"] for row in ours] == [row["text"] for row in theirs]
    lines = [json.loads(line) for line in (SPEECH / "nemo.jsonl").read_text().splitlines()]
    for line, row, other in zip(lines, ours, theirs, strict=True):
        start, stop = round(line["offset"] * 8000), round((line["offset"] + line["duration"]) * 8000)
        assert (row["start"], row["samples"]) == (start, stop - start)
        assert 0 <= row["start"] - other["start"] <= 1
        assert 0 <= row["samples"] - other["samples"] <= 2
        if (row["start"], row["samples"]) == (other["start"], other["samples"]):
            assert row["sha256"] == other["sha256"]
    assert ours[:30] == theirs[:30]  # multiples of a sample


def lines(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_fields_of_a_nemo_manifest(clips: list[Path], tmp_path: Path) -> None:
    path = lines(
        tmp_path / "manifest.json",
        [
            {"audio_filepath": "clips/c0.wav", "duration": 0.5, "text": "One.", "speaker": "s", "lang": "en"},
            {
                "audio_filepath": "clips/c1.flac",
                "offset": None,
                "duration": None,
                "answer": "Two.",
                "context": "What?",
            },
            {"audio_filename": "clips/c2.opus", "normalized_text": "three", "text": ""},
            {"audio_filepath": "clips/c0.wav", "text": "One.", "normalized_text": "one"},
        ],
    )
    found = [row for row in conversations(path, tmp_path) if isinstance(row, Conversation)]
    assert [tuple(message.content for message in row.messages) for row in found] == [
        ("<audio>", "One."), ("<audio>What?", "Two."), ("<audio>", "three"), ("<audio>", "One.")
    ]  # fmt: skip
    assert [row.audios[0].duration for row in found] == [0.5, None, None, None]
    assert [row.unused_fields for row in found] == [("lang", "speaker"), (), (), ("normalized_text",)]
    assert [row.audios[0].file.read() for row in found[:3]] == [file.read_bytes() for file in clips]


@pytest.mark.parametrize(
    ("fields", "detail"),
    [
        ({"offset": -1}, "unsupported_field: offset of an audio file must be seconds, not -1"),
        ({"offset": "1"}, "unsupported_field: offset of an audio file must be seconds, not '1'"),
        ({"duration": 0}, "unsupported_field: duration of an audio file must be above 0 seconds; remove the record"),
        ({"duration": -2.5}, "unsupported_field: duration of an audio file must be seconds, not -2.5"),
        ({"duration": True}, "unsupported_field: duration of an audio file must be seconds, not True"),
        ({"duration": [1, 2]}, "unsupported_field: duration of an audio file must be seconds, not [1, 2]"),
        ({"text": ""}, "empty: the transcript is empty"),
        ({"answer": "B"}, "unsupported_field: text and answer have different values. Keep only one."),
        ({"text_filepath": "a.txt"},
         "unsupported_field: the field text_filepath of the record is not supported: write the transcript as text"),
        ({"audio": "b.wav"}, "audio_count_mismatch: both audio and audio_filepath are in the record; use one"),
        ({"audio_filepath": ["a.wav", "b.wav"]}, "missing_field: audio_filepath must be text, not list"),
    ],
)  # fmt: skip
def test_damaged_lines_of_a_nemo_manifest(fields: dict[str, Any], detail: str) -> None:
    with pytest.raises(RecordError) as raised:
        normalize({"audio_filepath": "a.wav", "text": "A.", **fields})
    assert f"{raised.value.reason.value}: {raised.value.detail}" == detail


CUT = {
    "id": "c", "start": 0.5, "duration": 1.0, "channel": 1, "type": "MonoCut",
    "supervisions": [{"id": "s", "recording_id": "r", "start": 0, "duration": 1.0, "channel": 1, "text": "A."}],
    "recording": {
        "id": "r", "sampling_rate": 8000, "num_samples": 16000, "duration": 2.0, "channel_ids": [0, 1],
        "sources": [
            {"type": "file", "channels": [0], "source": "left.wav"},
            {"type": "file", "channels": [1], "source": "right.wav"},
        ],
    },
}  # fmt: skip


def test_a_cut_has_the_file_of_its_channel() -> None:
    [audio] = normalize(CUT).audios
    assert (audio.file.path, audio.offset, audio.duration) == ("right.wav", 0.5, 1.0)
    assert normalize(CUT).unused_fields == ()


def source(**fields: Any) -> dict[str, Any]:
    found = {"type": "file", "channels": [1], "source": "a.wav", **fields}
    return {"recording": {**CUT["recording"], "sources": [found]}}  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("fields", "detail"),
    [
        ({"type": "MixedCut", "tracks": []}, "a MixedCut is not supported; save its audio with cuts.save_audios()"),
        ({"supervisions": []}, "the cut has no supervision"),
        ({"supervisions": CUT["supervisions"] * 2},  # type: ignore[operator]
         "the cut has 2 supervisions; write a cut for each: cuts.trim_to_supervisions()"),
        ({"supervisions": [{"text": None}]}, "text of the supervision must be text, not null"),
        ({"recording": None}, "the cut has no recording; write cuts of recordings, and not of features alone"),
        ({"recording": {**CUT["recording"], "transforms": [{"name": "Speed"}]}},  # type: ignore[dict-item]
         "the recording has transforms, [{'name': 'Speed'}]; save its audio with cuts.save_audios()"),
        (source(channels=[0, 1]),
         "the cut has channel 1 of 2 channels of its file, and channels are averaged; save its audio with "
         "cuts.save_audios()"),
        (source(channels=[0]), "no source of the recording has channel 1"),
        (source(type="command", source="sox a.wav -t wav - |"),
         "the source 'sox a.wav -t wav - |' is a 'command', which is not run; save its audio with "
         "cuts.save_audios()"),
        ({"channel": [0, 1]}, "no source of the recording has channel [0, 1]"),
        ({"duration": 0}, "duration of an audio file must be above 0 seconds; remove the record"),
    ],
)  # fmt: skip
def test_cuts_that_are_not_read(fields: dict[str, Any], detail: str) -> None:
    with pytest.raises(RecordError) as raised:
        normalize({**CUT, **fields})
    assert raised.value.detail == detail


SUFFIXES = ("wav", "flac", "mp3", "ogg", "m4a", "opus")


def contents(folder: Path) -> dict[str, bytes]:
    """An audio file for each suffix of `SUFFIXES`."""
    kinds = {"wav": "wav16", "ogg": "opus"}
    return {
        suffix: write(folder / suffix, kinds.get(suffix, suffix), signal(9600, 48_000, place), 48_000).read_bytes()
        for place, suffix in enumerate(SUFFIXES)
    }


def test_audio_members_of_webdataset(tmp_path: Path) -> None:
    """Oracle: the writer and the reader of webdataset."""
    import webdataset

    files, path = contents(tmp_path), tmp_path / "a.tar"
    with webdataset.TarWriter(str(path)) as out:
        for place, (suffix, data) in enumerate(files.items()):
            text = f"Text {place}."
            parts = {"txt": text} if place % 2 else {"json": {"transcription": text, "duration": 0.2}}
            out.write({"__key__": f"k{place}", suffix: data, **parts})
    theirs = [
        (next(sample[suffix] for suffix in SUFFIXES if suffix in sample), 0, None,
         sample["txt"].decode() if "txt" in sample else json.loads(sample["json"])["transcription"])
        for sample in webdataset.WebDataset(str(path), shardshuffle=False)
    ]  # fmt: skip
    assert samples(path, tmp_path) == theirs
    assert len(theirs) == len(SUFFIXES)


def test_audio_members_of_energon(tmp_path: Path) -> None:
    """A CrudeWebdataset, which has no field_map, and an adapter, which gets the members by name."""
    data = contents(tmp_path)["flac"]
    folder = tmp_path / "d"
    (folder / ".nv-meta").mkdir(parents=True)
    (folder / ".nv-meta" / "dataset.yaml").write_text(
        "__module__: megatron.energon\n__class__: CrudeWebdataset\nsubflavors: {}\n"
    )
    split = {"split_parts": {"train": ["a.tar"], "val": [], "test": []}, "exclude": []}
    (folder / ".nv-meta" / "split.yaml").write_text(json.dumps(split))
    write_tar(folder / "a.tar", [("0.flac", data), ("0.txt", "Hello.")])
    assert samples(folder, tmp_path) == [(data, 0, None, "Hello.")]
    config = SourceConfig(path=str(folder), adapter=f"{__name__}:transcribed")
    [source] = open_sources([config], work_dir=tmp_path / "work")
    [row] = source.scan(0, source.extent())
    assert transcribed(row.record)["audio"] == row.record["flac"]
    assert row.record["flac"].file.read() == data


def transcribed(record: dict[str, Any]) -> dict[str, Any]:
    return {"audio": record["flac"], "text": record["txt"]}


TURNS = [{"role": "user", "content": "<audio>What?"}, {"role": "assistant", "content": "Hello."}]


@pytest.mark.parametrize(
    ("members", "names", "unused"),
    [
        ([("0.json", {"messages": TURNS})], ["0.a.wav", "0.b.wav"], ()),
        ([("0.json", {"messages": TURNS, "audios": ["0.b.wav"]})], ["0.b.wav"], ()),
        ([("0.json", {"messages": [{**TURNS[0], "content": [{"type": "audio", "audio": "b.wav"}]}, TURNS[1]]})],
         ["0.b.wav"], ()),
        ([("0.json", {"audio_filepath": "/old/x.wav", "text": "Hello.", "duration": 3.0})], ["0.a.wav", "0.b.wav"],
         ("duration",)),
        ([("0.json", {"messages": [{**TURNS[0], "content": "<image>Hi"}, TURNS[1]], "images": ["0.jpg"]}),
          ("0.jpg", b"x")], [], ("a.wav", "b.wav")),
    ],
)  # fmt: skip
def test_audio_members_that_a_json_part_names(
    tmp_path: Path, members: list[tuple[str, Any]], names: list[str], unused: tuple[str, ...]
) -> None:
    content = {"0.a.wav": b"a" * 9, "0.b.wav": b"b" * 9}
    path = write_tar(tmp_path / "a.tar", [*content.items(), *members])
    [source] = open_sources([path], work_dir=tmp_path / "work")
    [row] = source.scan(0, source.extent())
    if names == ["0.a.wav", "0.b.wav"] and "messages" in row.record:
        row.record["messages"][0]["content"] = "<audio><audio>What?"
    found = normalize(row.record, image_root=source.media_folder)
    assert [audio.file.read() for audio in found.audios] == [content[name] for name in names]
    assert found.unused_fields == unused


def test_the_path_from_before_a_tar_is_its_member(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [("0.wav", b"RIFF"), ("0.json", {"messages": TURNS, "audio": "/old/x.wav"})])
    [found] = conversations(path, tmp_path)
    assert isinstance(found, Conversation)
    assert found.audios[0].file.read() == b"RIFF"


def test_audio_in_object_stores(store: Store, tmp_path: Path) -> None:
    data = contents(tmp_path)["flac"]
    store.put("a/clips/x.flac", data)
    tar = write_tar(tmp_path / "b.tar", [("0.flac", data), ("0.txt", "Hello.")])
    store.put("a/b.tar", tar.read_bytes())
    manifest = {"audio_filepath": "clips/x.flac", "offset": 0.1, "duration": 0.05, "text": "Hello."}
    store.put("a/manifest.jsonl", json.dumps(manifest).encode())
    url = {**manifest, "audio_filepath": store.url("a/clips/x.flac")}
    (tmp_path / "local.jsonl").write_text(json.dumps(url))
    part = (data, 0.1, 0.05, "Hello.")
    assert samples(store.url("a/manifest.jsonl"), tmp_path) == [part]
    assert samples(tmp_path / "local.jsonl", tmp_path, image_root=store.url("a")) == [part]
    assert samples(store.url("a/b.tar"), tmp_path) == [(data, 0, None, "Hello.")]
    [found] = conversations(store.url("a/manifest.jsonl"), tmp_path)
    assert isinstance(found, Conversation)
    clip, num_bytes = audio_clip(found.audios[0])
    assert (clip.start, clip.samples, num_bytes) == (4800, 2400, len(data))


def test_a_folder_of_librispeech(clips: list[Path], tmp_path: Path) -> None:
    """LibriSpeech/dev-clean/SPEAKER/CHAPTER, as in its README.TXT."""
    root = tmp_path / "LibriSpeech"
    expected: list[Any] = []
    for split, chapter in (("dev-clean", "84-121123"), ("dev-clean", "84-121550"), ("train-clean-100", "19-198")):
        folder = root / split / chapter.replace("-", "/")
        folder.mkdir(parents=True)
        texts = {f"{chapter}-{number:04}": f"LINE {number} OF {chapter}" for number in range(2)}
        (folder / f"{chapter}.trans.txt").write_text("".join(f"{name} {text}\n" for name, text in texts.items()))
        for number, (name, text) in enumerate(texts.items()):
            file = write(folder / name, "flac", signal(8000 + number, 16_000, len(expected)), 16_000)
            if split == "dev-clean":
                expected.append((file.read_bytes(), 0, None, text))
    for name in ("README.TXT", "SPEAKERS.TXT", "LICENSE.TXT"):
        (root / name).write_text("x")
    assert samples(root, tmp_path, split="dev") == expected
    assert samples(root / "dev-clean", tmp_path) == expected
    assert samples(root / "dev-clean" / "84" / "121550" / "84-121550.trans.txt", tmp_path) == expected[2:]
    with pytest.raises(SourceError, match="has the splits train, validation; set `source_split`"):
        samples(root, tmp_path)


def test_damaged_lines_of_librispeech(tmp_path: Path) -> None:
    (tmp_path / "1-2.trans.txt").write_bytes(b"1-2-0000 A B\n1-2-0001\n1-2-0002 caf\xe9\n")
    gone, empty, latin = conversations(tmp_path, tmp_path)
    assert isinstance(gone, Conversation)
    assert gone.id == "1-2-0000"
    with pytest.raises(RecordError, match="No such file"):
        gone.audios[0].file.read()
    assert str(empty).startswith("missing_field: ")
    assert "the byte 0xe9 is not UTF-8" in str(latin)


@pytest.mark.parametrize("release", ["4", "17"])
def test_a_table_of_common_voice(clips: list[Path], tmp_path: Path, release: str) -> None:
    """Oracle: the rule of its dataset script, csv.DictReader with QUOTE_NONE."""
    names = {"4": "client_id path sentence up_votes down_votes age gender accent",
             "17": "client_id path sentence_id sentence sentence_domain up_votes down_votes age gender accents "
                   "variant locale segment"}[release].split()  # fmt: skip
    folder = tmp_path / "en"
    (folder / "clips").mkdir(parents=True)
    texts = ['"Hello," she said.', 'He said "no', "Zwei  Wörter."]
    lines = ["\t".join(names)]
    for number, text in enumerate(texts):
        file = write(folder / "clips" / f"cv_{number}", "mp3", signal(9600, 48_000, number), 48_000)
        name = file.stem if release == "4" else file.name
        row = {"client_id": "ab", "path": name, "sentence": text, "up_votes": "2", "down_votes": "0", "locale": "en"}
        lines.append("\t".join(row.get(name, "") for name in names))
    for split in ("train", "test"):
        (folder / f"{split}.tsv").write_text("\n".join(lines[: 4 if split == "train" else 2]) + "\n")
    with (folder / "train.tsv").open(newline="") as stream:
        expected = [
            ((folder / "clips" / row["path"]).with_suffix(".mp3").read_bytes(), 0, None, row["sentence"])
            for row in csv.DictReader(stream, delimiter="\t", quoting=csv.QUOTE_NONE)
        ]
    assert samples(folder / "train.tsv", tmp_path) == expected
    assert samples(tmp_path / "en", tmp_path, split="train") == expected
    assert [text for *_, text in expected] == texts


def kaldi(folder: Path, **files: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text)
    return folder


def test_a_kaldi_folder(clips: list[Path], tmp_path: Path) -> None:
    folder = kaldi(
        tmp_path / "clips",
        wav_scp="r1 c0.wav\nr2  c1.flac \n",
        text="r1 HELLO WORLD\nr2\tÜBER  UNS\n",
        utt2spk="r1 s\n",
    )
    data = [file.read_bytes() for file in clips[:2]]
    assert samples(folder, tmp_path) == [(data[0], 0, None, "HELLO WORLD"), (data[1], 0, None, "ÜBER  UNS")]
    assert samples(folder / "wav.scp", tmp_path) == samples(folder, tmp_path)
    kaldi(folder, segments="u1 r1 0.1 0.25\nu2 r1 0.25 -1\nu3 r2 0.0 0.5\n", text="u1 A\nu2 B\nu3 C\n")
    assert samples(folder, tmp_path) == [
        (data[0], 0.1, 0.15, "A"), (data[0], 0.25, None, "B"), (data[1], 0, 0.5, "C")
    ]  # fmt: skip
    ignored: list[Any] = []
    list(open_sources([folder], work_dir=tmp_path / "work", ignored=ignored))
    assert [entry.reason for entry in ignored] == ["media"]


def test_a_changed_transcript_of_kaldi_is_another_input(clips: list[Path], tmp_path: Path) -> None:
    prints = set()
    for text in ("r1 A\n", "r1 B\n"):
        folder = kaldi(tmp_path / "clips", wav_scp="r1 c0.wav\n", text=text)
        prints |= {source.fingerprint() for source in open_sources([folder], work_dir=tmp_path / "work")}
    assert len(prints) == 2


def test_damaged_lines_of_kaldi(tmp_path: Path) -> None:
    folder = kaldi(
        tmp_path / "d",
        wav_scp="r1 a.wav\nr2 sph2pipe -f wav b.sph |\nr3 -\n",
        segments="u1 r1 0 1 0\nu2 r2 0 1\nu3 r1 2 1\nu4 r1 x 1\nu5 r1 nan 1\nu6 r1\nu7 r9 0 1\nu8 r1 0 1\nu9 r3 0 1\n",
        text="".join(f"u{number} A\n" for number in (1, 2, 3, 4, 5, 6, 7, 9, 10)),
    )
    seconds = "unsupported_field: {}: segments must have a recording, a start and a later end in seconds, got {}"
    command = "unsupported_media: wav.scp has a command for {}, which is not run; write its output to a file"
    assert conversations(folder, tmp_path) == [
        "unsupported_field: u1: segments names the channel '0', and channels are averaged; cut the file",
        command.format("r2, 'sph2pipe -f wav b.sph |'"),
        seconds.format("u3", "'r1 2 1'"),
        seconds.format("u4", "'r1 x 1'"),
        seconds.format("u5", "'r1 nan 1'"),
        seconds.format("u6", "'r1'"),
        "missing_audio: the recording r9 has no line in wav.scp",
        "missing_field: u8 has no line in text",
        command.format("r3, '-'"),
        "missing_audio: u10 of text has no line in segments",
    ]
    kaldi(folder, text="u1 A\nu1 B\n")
    with pytest.raises(SourceError, match=r"text has u1 twice\. Fix it with utils/fix_data_dir\.sh\."):
        conversations(folder, tmp_path)
    (folder / "text").unlink()
    with pytest.raises(SourceError, match=r"text cannot be read: No such file or directory\. wav\.scp of Kaldi needs"):
        conversations(folder, tmp_path)


@pytest.mark.parametrize(
    "record",
    [
        {"client_id": "a", "path": "/x/en_train_0/c.mp3", "sentence": "Hi.", "locale": "en"},  # Common Voice
        {"file": "/x/84-1-0000.flac", "text": "Hi.", "speaker_id": 84, "id": "84-1-0000"},  # LibriSpeech
        {"segment_id": "P", "text": "Hi.", "audio_id": "Y", "begin_time": 1.0, "end_time": 2.0, "title": "t",
         "url": "http://x/y", "original_full_path": "audio/x.opus"},  # GigaSpeech
        {"num_samples": 9, "path": "/x/a.wav", "transcription": "Hi.", "raw_transcription": "Hi"},  # FLEURS
        {"original_path": "http://x/y.mp3", "audio_duration": 2.0, "transcript": "Hi.", "file": "a.flac"},  # MLS
    ],
)  # fmt: skip
def test_columns_of_public_datasets(record: dict[str, Any]) -> None:
    found = normalize({"audio": {"bytes": b"RIFF", "path": "a.wav"}, **record})
    assert [audio.file.data for audio in found.audios] == [b"RIFF"]
    assert [message.content for message in found.messages] == ["<audio>", "Hi."]
