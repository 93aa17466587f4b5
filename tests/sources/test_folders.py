"""Folders, names of the Hub, splits, TSV, and inputs that are refused."""

import json
import logging
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest

from energon_packed import ConfigError, SourceError
from tests.internals import open_sources
from tests.sources.tars import conversations, picture, write_tar
from tests.sources.test_sources import read_all


def numbers(path: Path | str, tmp_path: Path, **options: Any) -> list[int]:
    return [int(record["n"]) for record in read_all(open_sources([path], work_dir=tmp_path / "work", **options))]


@pytest.mark.parametrize("ending", ["parquet", "arrow", "jsonl", "json", "csv", "tsv"])
def test_a_folder_is_its_parts(tmp_path: Path, ending: str) -> None:
    folder = tmp_path / "data"
    (folder / "sub").mkdir(parents=True)
    (folder / "README.md").write_text("read me")
    (folder / ".hidden.jsonl").write_text("{}")
    (folder / "dataset_info.json").write_text("{}")
    for name, number in {"part-2": 2, "part-1": 1, "sub/part-3": 3}.items():
        _write(folder / f"{name}.{ending}", number)
    assert numbers(folder, tmp_path) == [1, 2, 3]


def test_a_folder_of_tars_and_a_glob(tmp_path: Path) -> None:
    for number in (1, 0):
        write_tar(tmp_path / f"s-{number}.tar", [(f"{number}.txt", f"Text {number}.")])
    for given in (tmp_path, tmp_path / "*.tar"):
        found = conversations(open_sources([given], work_dir=tmp_path / "work"))
        assert [one.text for one in found] == ["Text 0.", "Text 1."]


def test_a_folder_with_splits(tmp_path: Path) -> None:
    for name, number in {"train-00000-of-00002": 1, "train-00001-of-00002": 2, "validation-00000-of-00001": 3}.items():
        (tmp_path / "d" / "data").mkdir(parents=True, exist_ok=True)
        _write(tmp_path / "d" / "data" / f"{name}.parquet", number)
    assert numbers(tmp_path / "d", tmp_path, split="train") == [1, 2]
    assert numbers(tmp_path / "d", tmp_path, split="val") == [3]
    with pytest.raises(SourceError, match="has the splits train, validation; set `source_split` to one of them"):
        numbers(tmp_path / "d", tmp_path)
    with pytest.raises(SourceError, match="has no split 'test'; set `source_split` to one of: train, validation"):
        numbers(tmp_path / "d", tmp_path, split="test")


def test_a_dataset_dict(tmp_path: Path) -> None:
    parts = {"train": datasets.Dataset.from_list([{"n": 1}]), "test": datasets.Dataset.from_list([{"n": 2}])}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "d"))
    assert numbers(tmp_path / "d", tmp_path, split="test") == [2]
    with pytest.raises(SourceError, match="has the splits train, test; set `source_split` to one of them"):
        numbers(tmp_path / "d", tmp_path)
    with pytest.raises(SourceError, match="has no split 'val'; it has train, test; set"):
        numbers(tmp_path / "d", tmp_path, split="val")


@pytest.mark.parametrize("name", ["metadata.jsonl", "metadata.csv", "metadata.parquet"])
def test_an_imagefolder(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "pictures" / "train"
    folder.mkdir(parents=True)
    rows = [{"file_name": f"{n}.jpg", "text": f"Picture {n}."} for n in (1, 2)]
    for number in (1, 2):
        (folder / f"{number}.jpg").write_bytes(picture(number))
    if name.endswith(".csv"):
        lines = ["file_name,text", *(f"{row['file_name']},{row['text']}" for row in rows)]
        (folder / name).write_text("\n".join(lines) + "\n")
    elif name.endswith(".parquet"):
        pa.parquet.write_table(pa.Table.from_pylist(rows), folder / name)
    else:
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    loaded = datasets.load_dataset("imagefolder", data_dir=str(folder), split="train", cache_dir=str(tmp_path / "c"))
    assert loaded["text"] == [row["text"] for row in rows]
    for given in (folder, folder.parent, folder / name):
        found = conversations(open_sources([given], work_dir=tmp_path / "work"))
        assert [[m.content for m in one.messages] for one in found] == [["<image>", f"Picture {n}."] for n in (1, 2)]
        assert [one.images[0].data for one in found] == [picture(1), picture(2)]


def test_several_images_of_a_row(tmp_path: Path) -> None:
    row = {"file_names": ["1.jpg", "2.jpg"], "prompts": ["<image>a<image>"], "captions": ["b"]}
    (tmp_path / "metadata.jsonl").write_text(json.dumps(row))
    (record,) = read_all(open_sources([tmp_path], work_dir=tmp_path / "work"))
    assert record == {"images": ["1.jpg", "2.jpg"], "prompts": ["<image>a<image>"], "captions": ["b"]}


def test_names_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_DATASETS_CACHE", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    with pytest.raises(SourceError, match="hf download --repo-type dataset org/data"):
        numbers("org/data", tmp_path)
    _write(tmp_path / "origin" / "train.jsonl", 1)
    _write(tmp_path / "origin" / "test.jsonl", 2)
    files = {split: str(tmp_path / "origin" / f"{split}.jsonl") for split in ("train", "test")}
    cache = tmp_path / "home" / "datasets"
    datasets.load_dataset("json", data_files=files, cache_dir=str(cache))  # what the cache of a Hub name looks like
    (cache / "json").rename(cache / "org___data")
    assert numbers("org/data", tmp_path, split="test") == [2]
    with pytest.raises(SourceError, match="has the splits test, train; set `source_split`"):
        numbers("org/data", tmp_path)
    snapshot = tmp_path / "home" / "hub" / "datasets--org--other" / "snapshots" / "0123abc"
    _write(snapshot / "data" / "train-00000-of-00001.parquet", 7)
    assert numbers("org/other", tmp_path) == [7]


@pytest.mark.parametrize("given", ["az://b/a.jsonl", "S3://b/a.tar", "hf://datasets/o/n", "https://h/a.jsonl"])
def test_remote_inputs_are_refused(tmp_path: Path, given: str) -> None:
    for one in (given, Path(given)):
        with pytest.raises(ConfigError, match="is remote; .* is not supported yet") as caught:
            open_sources([one], work_dir=tmp_path)
        assert "\n" not in str(caught.value)


def test_folders_that_cannot_be_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(SourceError, match=r"without a Hugging Face state\.json, an Energon \.nv-meta, or files of"):
        open_sources([tmp_path], work_dir=tmp_path)
    _write(tmp_path / "a.jsonl", 1)
    for given, message in {"a.jsonl": "no input has splits. Remove it", ".": "no file name contains train"}.items():
        with pytest.raises(SourceError, match=message):
            open_sources([tmp_path / given], work_dir=tmp_path, split="train")
    _write(tmp_path / "a.csv", 1)
    with caplog.at_level(logging.WARNING), pytest.raises(SourceError, match=r"contains \.jsonl and \.csv files. Pass"):
        open_sources([tmp_path], work_dir=tmp_path)


def _write(path: Path, number: int) -> None:
    """A file of one record."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"n": [number]})
    if path.suffix == ".parquet":
        pa.parquet.write_table(table, path)
    elif path.suffix == ".arrow":
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    elif path.suffix in (".csv", ".tsv"):
        separator = "," if path.suffix == ".csv" else "\t"
        path.write_text(f"n{separator}m\n{number}{separator}0\n")
    else:
        text = json.dumps({"n": number})
        path.write_text(f"[{text}]" if path.suffix == ".json" else text + "\n")


def test_a_folder_of_images_and_other_data_is_refused(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "metadata.jsonl").write_text('{"file_name": "a.png", "text": "a"}\n')
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(
        SourceError, match=r"contains images/metadata.jsonl, which describes media files, and .jsonl files"
    ):
        open_sources([tmp_path], work_dir=tmp_path / "work")


def test_one_json_object_over_several_lines_is_refused(tmp_path: Path) -> None:
    (tmp_path / "captions.json").write_text('{\n  "annotations": [{"caption": "a"}]\n}\n')
    with pytest.raises(SourceError, match=r"captions.json is one JSON object over several lines; .* jq .annotations"):
        open_sources([tmp_path / "captions.json"], work_dir=tmp_path / "work")
