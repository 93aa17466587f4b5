"""Video files in tars, Energon datasets, tables, folders and object stores, as references to their bytes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from energon_packed import Conversation, MediaReference, RecordError, SourceConfig, VideoReference, normalize
from tests import oldest
from tests.internals import open_sources
from tests.sources.tars import conversations, picture, write_tar
from tests.storage import Store
from tests.videos import make_video

QUESTION, ANSWER = {"role": "user", "content": "<video>What?"}, {"role": "assistant", "content": "It runs."}
TURNS = [QUESTION, ANSWER]
PARTS = [
    {"role": "user", "content": [{"type": "video", "video": "KEY.mp4", "fps": 1.0}, {"type": "text", "text": "?"}]},
    ANSWER,
]


@pytest.fixture(scope="session")
def video(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., bytes]:
    """Return the bytes of video number N, in a container."""
    folder = tmp_path_factory.mktemp("videos")

    def content(number: int, suffix: str = "mp4") -> bytes:
        path = folder / f"{number}.{suffix}"
        return (path if path.exists() else make_video(path, frames=3 + number)).read_bytes()

    return content


def found(path: Path, **options: Any) -> list[Conversation]:
    return conversations(open_sources([path], work_dir=path.parent / "work", **options))


def summary(conversation: Conversation) -> tuple[list[str], list[bytes | None], list[bytes | None]]:
    """Return the texts, the bytes of the videos, and the bytes of the images."""
    texts = [message.content for message in conversation.messages]
    videos = [video.file.data for video in conversation.videos if video.file is not None]
    return texts or [conversation.text or ""], videos, [image.data for image in conversation.images]


# name: parts of a key (numbers are videos, negative numbers images), texts, numbers of the videos, of the images
KEYS: dict[str, tuple[dict[str, Any], list[str], list[int], list[int]]] = {
    "mp4 and txt": ({"mp4": 1, "txt": "A dog."}, ["<video>", "A dog."], [1], []),
    "upper case": ({"MP4": 1, "caption": "A dog."}, ["<video>", "A dog."], [1], []),
    "video2dataset": (
        {"mp4": 1, "txt": "A dog.",
         "json": {"key": "0", "caption": "A dog.", "url": "https://x.org/a.mp4", "duration": 2.5,
                                                "clips": [[0.0, 5.5]], "video_metadata": {"fps": 30}}},
        ["<video>", "A dog."], [1], [],
    ),
    "several videos, in natural order": (
        {"10.mp4": 3, "2.mp4": 2, "1.mp4": 1, "txt": "Three."}, ["<video><video><video>", "Three."], [1, 2, 3], [],
    ),
    "images and videos": ({"mp4": 1, "jpg": -1, "txt": "Both."}, ["<video><image>", "Both."], [1], [-1]),
    "a conversation that names nothing": (
        {"mp4": 1, "json": {"messages": TURNS}}, ["<video>What?", "It runs."], [1], [],
    ),
    "a bare list of turns": ({"mp4": 1, "json": TURNS}, ["<video>What?", "It runs."], [1], []),
    "LLaVA-Video": (
        {"mp4": 1, "json": {"video": "academic/0.mp4", "conversations": [
            {"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "It runs."}]}},
        ["<video>\nWhat?", "It runs."], [1], [],
    ),
    "ShareGPT4Video": (
        {"mp4": 1, "json": {"video_path": "panda/0.mp4", "captions": [
            {"idx": "1", "content": "It starts."}, {"idx": "-1", "content": "It runs."}]}},
        ["<video>", "It runs."], [1], [],
    ),
    "named by part": (
        {"mp4": 1, "json": {"videos": ["mp4"], "messages": TURNS}}, ["<video>What?", "It runs."], [1], [],
    ),
    "named in another order": (
        {"a.mp4": 1, "b.mp4": 2, "json": {"videos": ["KEY.b.mp4", "a.mp4"], "prompts": ["?"], "captions": ["!"]}},
        ["<video><video>?", "!"], [2, 1], [],
    ),
    "inside content parts": ({"mp4": 1, "json": {"messages": PARTS}}, ["<video>?", "It runs."], [1], []),
    "objects": (
        {"mp4": 1, "json": {"videos": [{"video": "mp4", "max_frames": 4}], "messages": TURNS}},
        ["<video>What?", "It runs."], [1], [],
    ),
    "images and videos by name": (
        {"mp4": 1, "jpg": -1, "json": {"videos": ["mp4"], "images": ["jpg"], "messages": [
            {"role": "user", "content": "<video> or <image>?"}, ANSWER]}},
        ["<video> or <image>?", "It runs."], [1], [-1],
    ),
    "only the image by name": (
        {"mp4": 1, "jpg": -1, "json": {"images": ["jpg"], "messages": [
            {"role": "user", "content": "<video> or <image>?"}, ANSWER]}},
        ["<video> or <image>?", "It runs."], [1], [-1],
    ),
    "only the image by name, without a placeholder": (
        {"mp4": 1, "jpg": -1, "json": {"images": ["jpg"], "messages": [
            {"role": "user", "content": "<image>?"}, ANSWER]}},
        ["<image>?", "It runs."], [], [-1],
    ),
}  # fmt: skip


def test_the_videos_of_a_key_belong_to_its_record(tmp_path: Path, video: Callable[..., bytes]) -> None:
    members = []
    for number, (parts, *_) in enumerate(KEYS.values()):
        for part, value in parts.items():
            if isinstance(value, int):
                value = video(value) if value > 0 else picture(-value)
            elif not isinstance(value, str):
                value = json.loads(json.dumps(value).replace("KEY", f"{number:03d}"))
            members.append((f"folder/{number:03d}.{part}", value))
    rows = found(write_tar(tmp_path / "a.tar", members))
    for name, conversation, (_, texts, videos, images) in zip(KEYS, rows, KEYS.values(), strict=True):
        expected = texts, [video(number) for number in videos], [picture(-number) for number in images]
        assert summary(conversation) == expected, name
    by_name = dict(zip(KEYS, rows, strict=True))
    assert by_name["inside content parts"].videos[0].settings == {"fps": 1.0}
    assert by_name["only the image by name, without a placeholder"].unused_fields == ("mp4",)
    assert by_name["objects"].videos[0].settings == {"max_frames": 4}


@pytest.mark.parametrize("suffix", ["mp4", "mov", "mkv", "avi", "ts", "mpg"])
def test_containers_are_members_by_reference(tmp_path: Path, video: Callable[..., bytes], suffix: str) -> None:
    content = make_video(
        tmp_path / f"a.{suffix}", codec="mpeg2video" if suffix == "mpg" else "mpeg4", frames=3
    ).read_bytes()
    path = write_tar(tmp_path / "a.tar", [(f"0.{suffix}", content), ("0.txt", "a")])
    (source,) = open_sources([path], work_dir=tmp_path / "work")
    (row,) = source.scan(0, source.extent())
    (reference,) = row.record["videos"]
    assert reference == VideoReference(file=MediaReference(path=str(path), offset=512, size=len(content)))
    assert reference.file.read() == content
    assert [file.suffix for file in (tmp_path / "work").rglob("*") if file.is_file()] == [".tarindex"]


def test_source_code_is_not_a_video(tmp_path: Path) -> None:
    (one,) = found(write_tar(tmp_path / "a.tar", [("0.ts", "Good: const x = 1;"), ("0.txt", "A document.")]))
    assert (one.text, one.unused_fields) == ("A document.", ("ts",))


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        (
            [("0.mp4", b"x"), ("0.m4a", b"x"), ("0.txt", "a")],
            "unsupported_media: 0.m4a is audio beside a video, whose sound is not used; remove it",
        ),
        ([("0.mp4", b"x"), ("0.mp4", b"x"), ("0.txt", "a")], "missing_field: "),
        ([("0.mp4", b"x")], "missing_field: 0 has the parts mp4 and no text"),
    ],
)
def test_a_bad_key_is_one_reject(tmp_path: Path, members: list[tuple[str, Any]], reason: str) -> None:
    path = write_tar(tmp_path / "a.tar", [*members, ("1.txt", "good")])
    (source,) = open_sources([path], work_dir=tmp_path)
    bad, good = source.scan(0, source.extent())
    assert str(bad.reject).startswith(reason)
    assert good.reject is None


def energon(folder: Path, members: list[tuple[str, Any]], kind: str, **more: Any) -> Path:
    """Write an Energon dataset of one tar as `energon prepare` does."""
    from tests.processes import energon as run_energon

    folder.mkdir()
    write_tar(folder / "shard-0.tar", members)
    prepare = ["prepare", "--non-interactive", "--split-ratio", "1,0,0", "--num-workers", "1", "--sample-type"]
    done = run_energon(*prepare, "CrudeWebdataset", folder)
    assert done.returncode == 0, done.stderr + done.stdout
    sample_type = {"__module__": "megatron.energon", "__class__": kind}
    value = {"sample_type": sample_type, **more} if kind != "CrudeWebdataset" else sample_type
    (folder / ".nv-meta" / "dataset.yaml").write_text(yaml.safe_dump(value))
    return folder


def test_video_questions_are_those_of_energon(tmp_path: Path, video: Callable[..., bytes]) -> None:
    """Oracle: Energon reads the same dataset, with the field_map of its VidQASample."""
    import megatron.energon as library

    about = {"q": "What?", "a": ["It stops.", "It runs.", "It runs."], "w": [0.6, 0.2, 0.2]}
    members = [(f"{n}.{part}", value) for n in (0, 1) for part, value in (("mp4", video(n)), ("json", about))]
    fields = {"video": "mp4", "context": "json[q]", "answers": "json[a]"}
    folder = energon(tmp_path / "d", members, "VidQASample", field_map=fields)
    data = library.get_train_dataset(
        folder, worker_config=library.WorkerConfig(rank=0, world_size=1, num_workers=0), batch_size=None,
        shuffle_buffer_size=None, max_samples_per_sequence=None, repeat=False,
    )  # fmt: skip
    theirs = sorted(((one.video.stream.getvalue(), one.context) for one in library.get_loader(data)), key=repr)
    rows = found(folder)
    ours = [(summary(one)[1][0], one.messages[0].content.removeprefix("<video>")) for one in rows]
    assert sorted(ours, key=repr) == theirs
    assert [summary(one)[0] for one in rows] == [["<video>What?", "It runs."]] * 2
    weighted = {**fields, "answer_weights": "json[w]"}
    rows = found(energon(tmp_path / "weighted", members, "VidQASample", field_map=weighted))
    assert [summary(one)[0][1] for one in rows] == ["It stops."] * 2
    missing = energon(
        tmp_path / "missing",
        [("0.mp4", b"x"), ("0.json", about)],
        "VidQASample",
        field_map={**fields, "video": "json[q]"},
    )
    (source,) = open_sources([missing], work_dir=tmp_path / "work")
    (row,) = source.scan(0, source.extent())
    assert str(row.reject) == "missing_video: 0 has no video 'What?'"


def test_crude_and_interleaved_datasets(tmp_path: Path, video: Callable[..., bytes]) -> None:
    members = [("0.mp4", video(1)), ("0.json", {"messages": TURNS})]
    (crude,) = found(energon(tmp_path / "crude", members, "CrudeWebdataset"))
    assert summary(crude) == (["<video>What?", "It runs."], [video(1)], [])
    members = [("0.a.mp4", video(1)), ("0.b.jpg", picture(1)), ("0.json", {"s": ["A ", "a.mp4", " and ", "b.jpg"]})]
    folder = energon(tmp_path / "interleaved", members, "InterleavedSample", field_map={"sequence": "json[s]"})
    (document,) = found(folder)
    assert summary(document) == (["A <video> and <image>"], [video(1)], [picture(1)])


def test_a_sample_loader_returns_videos_unchanged(tmp_path: Path, video: Callable[..., bytes]) -> None:
    names = {"sample_loader": "sample_loader.py:sample_loader", "part_filter": "sample_loader.py:part_filter"}
    folder = energon(tmp_path / "d", [("0.mp4", video(1)), ("0.txt", "What?")], "VidQASample", **names)
    code = """
def sample_loader(raw):
    return {"__key__": raw["__key__"], "video": VIDEO, "context": raw["txt"], "answers": ["It runs."]}

def part_filter(part):
    return True
"""
    (folder / ".nv-meta" / "sample_loader.py").write_text(code.replace("VIDEO", "raw['mp4']"))
    (one,) = found(folder, trust_sample_loader=True)
    assert summary(one) == (["<video>What?", "It runs."], [video(1)], [])
    (folder / ".nv-meta" / "sample_loader.py").write_text(code.replace("VIDEO", "raw['mp4'].get_video()"))
    (source,) = open_sources([folder], work_dir=tmp_path / "work", trust_sample_loader=True)
    (row,) = source.scan(0, source.extent())
    assert row.reject is not None
    assert str(row.reject).startswith("adapter_failed: sample_loader.py:sample_loader raised AttributeError")


def test_an_adapter_gets_references(
    tmp_path: Path, video: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "video_adapter.py").write_text(
        "def read(parts):\n    return {'id': parts['id'], 'video': parts['mp4'], 'caption': parts['xyz'].decode()}\n"
    )
    path = write_tar(tmp_path / "a.tar", [("0.mp4", video(1)), ("0.xyz", "A dog.")])
    config = SourceConfig(path=(str(path),), adapter="video_adapter:read")
    (source,) = open_sources([config], work_dir=tmp_path / "work")
    (row,) = source.scan(0, source.extent())
    reference = VideoReference(file=MediaReference(path=str(path), offset=512, size=len(video(1))))
    assert row.record["mp4"] == reference
    assert source.reading.adapter is not None
    assert normalize(source.reading.adapter.apply(row.record)).videos == (reference,)


@pytest.mark.skipif(oldest.DATASETS, reason="this release writes paths of videos instead of their bytes")
def test_tables_of_the_datasets_library(tmp_path: Path, video: Callable[..., bytes]) -> None:
    """Oracle: `datasets` writes the Video feature to Parquet, with the bytes, and to a folder of Arrow files."""
    from datasets import Dataset, Features, Value, Video

    (tmp_path / "a.mp4").write_bytes(video(1))
    features = Features({"video": Video(decode=False), "caption": Value("string")})
    data = Dataset.from_dict({"video": [str(tmp_path / "a.mp4")], "caption": ["A dog."]}, features=features)
    data.to_parquet(str(tmp_path / "a.parquet"))
    data.save_to_disk(str(tmp_path / "disk"))
    (tmp_path / "plain.jsonl").write_text(json.dumps({"videos": "a.mp4", "caption": "A dog."}))
    (tmp_path / "plain.csv").write_text("video,caption\na.mp4,A dog.\n")
    (tmp_path / "list.csv").write_text('videos,caption\n"[""a.mp4""]",A dog.\n')
    (tmp_path / "plain.json").write_text(json.dumps([{"video": {"path": "a.mp4"}, "caption": "A dog."}]))
    for name in ("a.parquet", "disk", "plain.jsonl", "plain.csv", "list.csv", "plain.json"):
        (one,) = found(tmp_path / name)
        assert summary(one) == (["<video>", "A dog."], [video(1)], []), name


@pytest.mark.parametrize(
    "kind",
    ["jsonl", pytest.param("csv", marks=pytest.mark.skipif(oldest.DATASETS, reason="this release does not read it"))],
)
def test_a_videofolder_is_read_as_datasets_reads_it(tmp_path: Path, video: Callable[..., bytes], kind: str) -> None:
    """Oracle: the videofolder of `datasets`, which gives the same files and texts."""
    from datasets import Video, load_dataset

    folder = tmp_path / "d"
    folder.mkdir()
    texts = {"a.mp4": "A dog.", "b.mkv": "A cat."}
    for number, name in enumerate(texts):
        (folder / name).write_bytes(video(number, name[2:]))
    lines = [json.dumps({"file_name": name, "text": text}) for name, text in texts.items()]
    rows = ["file_name,text", *(f"{name},{text}" for name, text in texts.items())]
    (folder / f"metadata.{kind}").write_text("\n".join(lines if kind == "jsonl" else rows) + "\n")
    data = load_dataset("videofolder", data_dir=str(folder), split="train", cache_dir=str(tmp_path / "cache"))
    theirs = [
        (Path(row["video"]["path"]).read_bytes(), row["text"])
        for row in data.cast_column("video", Video(decode=False))
    ]
    ours = [(summary(one)[1][0], one.messages[1].content) for one in found(folder)]
    assert sorted(ours) == sorted(theirs)
    assert len(ours) == 2


def test_other_spellings_of_a_videofolder(tmp_path: Path, video: Callable[..., bytes]) -> None:
    for number in (1, 2):
        (tmp_path / f"{number}.mp4").write_bytes(video(number))
    rows = [
        {"file_names": ["1.mp4", "2.mp4"], "messages": [{**QUESTION, "content": "Compare."}, ANSWER]},
        {"video_file_name": "1.mp4", "text": "A dog."},
        {"file_name": "2.mp4", "caption": "A cat."},
    ]
    (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found_rows = [summary(one)[:2] for one in found(tmp_path)]
    assert found_rows == [
        (["<video><video>Compare.", "It runs."], [video(1), video(2)]),
        (["<video>", "A dog."], [video(1)]),
        (["<video>", "A cat."], [video(2)]),
    ]


def test_videos_in_an_object_store(store: Store, tmp_path: Path, video: Callable[..., bytes]) -> None:
    store.put("v/a.mp4", video(1))
    path = write_tar(tmp_path / "b.tar", [("0.mp4", video(2)), ("0.txt", "A cat.")])
    store.put("v/b.tar", path.read_bytes())
    record = {"video": "a.mp4", "caption": "A dog."}
    store.put("v/a.jsonl", json.dumps(record).encode())
    (tmp_path / "local.jsonl").write_text(json.dumps({**record, "video": store.url("v/a.mp4")}))
    for inputs, options, number in (
        (store.url("v/a.jsonl"), {}, 1),
        (store.url("v/b.tar"), {}, 2),
        (str(tmp_path / "local.jsonl"), {"image_root": store.url("v")}, 1),
    ):
        (one,) = conversations(open_sources([inputs], work_dir=tmp_path / "work", **options))
        assert summary(one)[1] == [video(number)], inputs


def test_a_video_outside_the_root_is_refused(tmp_path: Path, video: Callable[..., bytes]) -> None:
    (tmp_path / "a.mp4").write_bytes(video(1))
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text(json.dumps({"video": "../a.mp4", "caption": "A."}))
    with pytest.raises(RecordError, match="outside `image_root`"):
        found(tmp_path / "in" / "a.jsonl")
