"""A folder of images or videos with captions in text files of the same names."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from PIL import Image

from energon_packed import SourceError
from tests.internals import IgnoredEntries, cli, open_sources


def picture(path: Path, color: str = "red") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (56, 56), color).save(path)


def rows(folder: Path, tmp_path: Path, **options: Any) -> list[tuple[Any, str]]:
    sources = open_sources([folder], work_dir=tmp_path / "work", **options)
    found = [row for source in sources for row in source.scan(0, source.extent())]
    return [(row.record, row.reject.detail if row.reject else "") for row in found]


def test_each_image_has_the_caption_of_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "10_dog"
    for name, caption, text in (
        ("b.png", "b.txt", "A red dog.\n"),
        ("a.JPG", "a.caption", "\ufeffA dog."),
        ("c.d.webp", "c.d.TXT", "1girl, solo"),
        ("clip.mp4", "clip.txt", "A dog runs."),
    ):
        picture(folder / name) if not name.endswith("mp4") else (folder / name).write_bytes(b"")
        (folder / caption).write_text(text)
    (folder / "README.txt").write_text("about")
    assert rows(folder, tmp_path) == [
        ({"id": "a.JPG", "image": "a.JPG", "caption": "A dog."}, ""),
        ({"id": "b.png", "image": "b.png", "caption": "A red dog."}, ""),
        ({"id": "c.d.webp", "image": "c.d.webp", "caption": "1girl, solo"}, ""),
        ({"id": "clip.mp4", "video": "clip.mp4", "caption": "A dog runs."}, ""),
    ]


def test_an_image_without_one_caption_rejects_only_itself(tmp_path: Path) -> None:
    for name in ("a", "b", "c", "d"):
        picture(tmp_path / "d" / f"{name}.png")
    (tmp_path / "d" / "a.txt").write_text("One.")
    (tmp_path / "d" / "b.txt").write_text("Two.")
    (tmp_path / "d" / "b.caption").write_text("Second.")
    (tmp_path / "d" / "c.txt").write_bytes(b"caf\xe9")
    found = rows(tmp_path / "d", tmp_path)
    assert found[0][0]["caption"] == "One."
    assert [record for record, _ in found[1:]] == [None] * 3
    assert [detail for _, detail in found[1:]] == [
        "b.png has 2 captions, b.caption and b.txt; keep one",
        "c.txt: the byte 0xe9 is not UTF-8 text; if the file is Latin-1 or Windows-1252, convert it: "
        "iconv -f WINDOWS-1252 -t UTF-8 FILE",
        "d.png has no caption; write it to d.txt",
    ]


def test_a_caption_without_an_image_is_a_rejected_record(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    picture(tmp_path / "d" / "b.png")
    for name in ("a.caption", "a.txt", "b.txt", "c.txt", "README.txt", ".hidden.txt"):
        (tmp_path / "d" / name).write_text("A dog.")
    with caplog.at_level(logging.WARNING):
        sources = open_sources([tmp_path / "d"], work_dir=tmp_path / "work")
        found = [row for source in sources for row in source.scan(0, source.extent())]
    assert [str(row.reject) for row in found] == [
        "missing_image: a.caption is a caption, and no media file has its name; add the file",
        "None",
        "missing_image: c.txt is a caption, and no media file has its name; add the file",
    ]
    assert caplog.text == ""


def test_subfolders_and_splits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("train/1_cat/x", "train/1_dog/x", "test/y"):
        picture(tmp_path / "d" / f"{name}.png")
        (tmp_path / "d" / f"{name}.txt").write_text(name)
    picture(tmp_path / "d" / "sample.png")
    (tmp_path / "d" / "alone.txt").write_text("no image")
    with pytest.raises(SourceError, match="has the splits test, train; set `source_split` to one of them"):
        rows(tmp_path / "d", tmp_path)
    ignored: list[IgnoredEntries] = []
    with caplog.at_level(logging.WARNING):
        found = rows(tmp_path / "d", tmp_path, split="train", ignored=ignored)
    assert [record["caption"] for record, _ in found] == ["train/1_cat/x", "train/1_dog/x"]
    assert {entry.reason: entry.count for entry in ignored} == {"media": 1, "unknown type": 1, "of another split": 1}
    assert "alone.txt" in caplog.text


def test_data_files_come_first_and_text_alone_is_refused(tmp_path: Path) -> None:
    picture(tmp_path / "d" / "a.png")
    (tmp_path / "d" / "b.txt").write_text("not of a.png")
    with pytest.raises(SourceError, match="or media files with captions of the same name in .txt files"):
        rows(tmp_path / "d", tmp_path)
    (tmp_path / "d" / "a.txt").write_text("A.")
    assert rows(tmp_path / "d", tmp_path)[0][0]["caption"] == "A."
    (tmp_path / "d" / "data.jsonl").write_text('{"text": "One."}\n')
    assert rows(tmp_path / "d", tmp_path) == [({"text": "One."}, "")]


def test_pack_reads_the_folder_and_measures_a_changed_caption_again(tmp_path: Path, tokenizer_dir: Path) -> None:
    folder = tmp_path / "pics"
    for name in ("a", "sub/b"):
        picture(folder / f"{name}.png")
        (folder / f"{name}.txt").write_text("A red square.")
    arguments = [
        "pack",
        str(folder),
        "-o",
        str(tmp_path / "out"),
        "--seq-len",
        "512",
        "--tokenizer",
        str(tokenizer_dir),
    ]
    arguments += ["--image-processor", "Qwen2_5_VLProcessor", "--workers", "1", "--quiet"]
    manifest = tmp_path / "out" / "webdataset" / ".nv-meta" / "packing.json"
    counts = []
    for text in ("A red square.", "One red area."):  # of the same size
        (folder / "sub" / "b.txt").write_text(text)
        done = CliRunner().invoke(cli, [*arguments, "--overwrite"], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        found = json.loads(manifest.read_text())
        counts.append((found["packed"], found["rejects"], found["images"]))
        assert text.split()[0] in _content(tmp_path / "out")
    assert counts == [(2, {}, 2)] * 2


def _content(out: Path) -> str:
    done = CliRunner().invoke(cli, ["inspect", str(out), "--id", "b.png"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output
