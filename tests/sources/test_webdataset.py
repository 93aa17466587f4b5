"""Tars of WebDataset: what each key becomes, what is read of the file, and what is wrong with a broken one."""

import gzip
import json
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_packed import MediaReference, PackOptions, SourceError, pack
from tests.internals import open_sources, tar_index
from tests.sources.tars import conversations, picture, write_tar

TURNS = [{"role": "user", "content": "<image>What is it?"}, {"role": "assistant", "content": "A cat."}]
SHAREGPT = [{"from": "human", "value": "<image>What is it?"}, {"from": "gpt", "value": "A cat."}]
PARTS = [
    {"role": "user", "content": [{"type": "image", "image": "0.jpg"}, {"type": "text", "text": "What?"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "0.jpg"}]},
]
CAPTION = {"captions": ["A cat."]}
LAION = {
    "url": "https://x/1.jpg", "caption": "A cat.", "key": "k", "status": "success", "error_message": None,
    "width": 40, "height": 40, "original_width": 80, "exif": "{}", "sha256": "00", "NSFW": "UNLIKELY",
}  # fmt: skip
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "jpg and txt": ({"jpg": 1, "txt": "A cat."}, {"images": [1], **CAPTION}),
    "txt before the image": ({"caption": "A cat.\n", "png": 2}, {"images": [2], **CAPTION}),
    "upper case": ({"JPG": 1, "txt": "A cat."}, {"images": [1], **CAPTION}),
    "json with a caption": ({"webp": 3, "json": {"caption": "A cat."}}, {"images": [3], **CAPTION}),
    "json with any field": ({"webp": 3, "json": {"caption": "A cat.", "group": 1}}, {"images": [3], **CAPTION}),
    "json with a text": ({"jpg": 1, "json": {"text": "A cat."}}, {"images": [1], **CAPTION}),
    "img2dataset": ({"jpg": 1, "json": LAION}, {"images": [1], **CAPTION}),
    "txt wins": ({"jpg": 1, "json": LAION, "txt": "A dog."}, {"images": [1], "captions": ["A dog."]}),
    "several images": (
        {"10.jpg": 3, "2.jpg": 2, "1.jpg": 1, "txt": "Three."},
        {"images": [1, 2, 3], "captions": ["Three."]},
    ),
    "messages": ({"jpg": 1, "json": {"messages": TURNS}}, {"images": [1], "messages": TURNS}),
    "empty images": ({"jpg": 1, "json": {"messages": TURNS, "images": []}}, {"images": [1], "messages": TURNS}),
    "a bare list": ({"jpg": 1, "json": TURNS}, {"images": [1], "messages": TURNS}),
    "part name": ({"jpg": 1, "json": {"image": "jpg", "conversations": SHAREGPT}}, {"images": [1], "messages": TURNS}),
    "earlier path": (
        {"jpg": 1, "json": {"image": "coco/train/1.jpg", "conversations": SHAREGPT}},
        {"images": [1], "messages": TURNS},
    ),
    "named in another order": (
        {"a.jpg": 1, "b.jpg": 2, "json": {"images": ["KEY.b.jpg", "a.jpg"], "prompts": ["?"], "captions": ["!"]}},
        {"images": [2, 1], "prompts": ["?"], "captions": ["!"]},
    ),
    "inside content parts": (
        {"0.jpg": 1, "json": {"messages": PARTS}},
        {"images": [1], "prompts": ["What?"], "captions": ["0.jpg"]},
    ),
    "frames": (
        {"0.jpg": 1, "1.jpg": 2, "json": {"videos": [["0.jpg", "1.jpg"]], "prompts": ["<video>?"], "captions": ["!"]}},
        {"videos": [[1, 2]], "prompts": ["<video>?"], "captions": ["!"]},
    ),
    "unnamed frames": (
        {"0.jpg": 1, "1.jpg": 2, "json": {"video": True, "prompts": ["?"], "captions": ["!"]}},
        {"video": True, "images": [1, 2], "prompts": ["?"], "captions": ["!"]},
    ),
    "text alone": ({"txt": "A document."}, {"text": "A document."}),
    "json alone": ({"json": {"prompts": ["a"], "captions": ["b"]}}, {"prompts": ["a"], "captions": ["b"]}),
    "other parts": ({"jpg": 1, "txt": "A cat.", "cls": "3", "seg.npy": b"x"}, {"images": [1], **CAPTION}),
}  # fmt: skip


def _bytes(value: Any) -> Any:
    """Pictures in the place of their numbers."""
    return picture(value) if isinstance(value, int) else value


def _with_files(record: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A record whose numbers are image files."""

    def file(number: Any) -> Any:
        if isinstance(number, list):
            return [file(one) for one in number]
        (folder / f"{number}.jpg").write_bytes(picture(number))
        return f"{number}.jpg"

    return {name: file(value) if name in ("images", "videos") else value for name, value in record.items()}


def test_a_tar_and_a_jsonl_file_give_the_same_conversations(tmp_path: Path) -> None:
    members, lines = [], []
    for number, (parts, record) in enumerate(CASES.values()):
        key = f"folder/{number:03d}"
        text = json.dumps({"id": key, **_with_files(record, tmp_path)})
        lines.append(text)
        for part, value in parts.items():
            if isinstance(value, dict | list):
                value = json.loads(json.dumps(value).replace("KEY", f"{number:03d}"))
            members.append((f"{key}.{part}", _bytes(value)))
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    write_tar(tmp_path / "a.tar", members)
    found = [conversations(open_sources([tmp_path / f"a.{kind}"], work_dir=tmp_path)) for kind in ("tar", "jsonl")]
    for name, ours, theirs in zip(CASES, *found, strict=True):
        assert ours == theirs, name


def test_images_are_byte_ranges_and_nothing_is_copied(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [("0.jpg", picture(1)), ("0.txt", "a")])
    (source,) = open_sources([path], work_dir=tmp_path / "work")
    (row,) = source.scan(0, source.extent())
    (image,) = row.record["images"]
    assert image == MediaReference(path=str(path), offset=512, size=len(picture(1)))
    assert image.read() == picture(1)
    made = [file for file in (tmp_path / "work").rglob("*") if file.is_file()]
    assert [file.suffix for file in made] == [".tarindex"]


@given(sizes=st.lists(st.integers(0, 1500), max_size=12), step=st.integers(1, 4000))
@settings(max_examples=25, deadline=None)
def test_any_cut_into_ranges_gives_every_key_once(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], step: int
) -> None:
    folder = tmp_path_factory.mktemp("ranges")
    path = write_tar(folder / "a.tar", [(f"{n}.txt", b"x" * size) for n, size in enumerate(sizes)])
    (source,) = open_sources([path], work_dir=folder)
    end = source.extent()
    rows = [row for start in range(0, end, step) for row in source.scan(start, min(start + step, end))]
    assert [row.record["id"] for row in rows] == [str(n) for n in range(len(sizes))]
    halves = [open_sources([path], work_dir=folder, part=(n, 2)) for n in (0, 1)] if sizes else []
    again = [row for half in halves for one in half for chunk in one.chunks() for row in one.scan(*chunk)]
    assert again == (rows if sizes else [])


def test_long_names_hidden_files_and_metadata(tmp_path: Path) -> None:
    key = "dir/" + "x" * 150
    members = [("__meta__/a.txt", "no"), ("._0.txt", "no"), (f"{key}.jpg", picture(1)), (f"{key}.txt", "yes")]
    (one,) = conversations(open_sources([write_tar(tmp_path / "a.tar", members)], work_dir=tmp_path))
    assert (one.id, one.messages[1].content) == (key, "yes")


@pytest.mark.parametrize(
    ("members", "keys", "message"),
    [
        ([("0.jpg", b"x"), ("1.txt", "a")], ["0"], "has the parts jpg and no text; add a txt part"),
        ([("0.txt", "a"), ("1.txt", "b"), ("0.jpg", b"x")], ["0", "0"], "keys must be unique, and their"),
        ([("0.txt", "a"), ("0.txt", "b"), ("1.txt", "b")], ["0"], "0.txt occurs twice"),
        ([("0.caption", "a"), ("0.txt", "b"), ("1.txt", "b")], ["0"], r"0\.txt and 0\.caption have different values"),
        ([("0.json", '{"text": "a"}'), ("0.JSON", '{"text": "b"}'), ("1.txt", "b")], ["0"], r"0\.json and 0\.JSON"),
        ([("0.json", b"{"), ("1.txt", "b")], ["0"], r"bad_json: 0\.json"),
        ([("0.txt", b"\xff"), ("1.txt", "b")], ["0"], r"0\.txt is not UTF-8"),
        ([("0.wav", b"x"), ("1.txt", "b")], ["0"], "has the parts wav and no text; add a txt part"),
        ([("0.pyd", b"x"), ("0.txt", "a"), ("1.txt", "b")], ["0"], "is a pickle, which is never loaded"),
        ([("README", b"x"), ("1.txt", "b")], ["README"], "no text"),
    ],
)  # fmt: skip
def test_a_bad_key_is_one_reject(
    tmp_path: Path, members: list[tuple[str, Any]], keys: list[str], message: str
) -> None:
    (source,) = open_sources([write_tar(tmp_path / "a.tar", members)], work_dir=tmp_path)
    rows = list(source.scan(0, source.extent()))
    rejected = [str(row.reject) for row in rows if row.reject is not None]
    assert len(rejected) == len(keys)
    assert all(re.search(message, detail) for detail in rejected), rejected
    assert len(rows) - len(keys) == 1
    assert all(source.read(row.address, row.size) == row for row in rows)


def test_broken_tars_are_named(tmp_path: Path) -> None:
    whole = write_tar(tmp_path / "a.tar", [(f"{n}.txt", "x" * 700) for n in range(9)]).read_bytes()
    end = 9 * (512 + 1024)
    damaged = bytearray(whole)
    damaged[3 * 1536 + 200] ^= 1
    broken = {
        "inside": (whole[:5500], r"truncated inside 3\.txt at byte 5500"),
        "header": (whole[: 3 * 1536 + 100], "truncated inside a header at byte 4708"),
        "between": (whole[: 3 * 1536], "no end-of-archive marker after byte 4608"),
        "marker": (whole[:end], "append one: truncate -s"),
        "damaged": (bytes(damaged), "damaged header at byte 4608: its check sum is wrong"),
        "joined": (whole + whole, "concatenated tars"),
        "compressed": (gzip.compress(whole), "is compressed .gzip.; decompress it"),
        "empty": (b"", "is empty"),
        "other": (b"no tar" * 1000, "is not an uncompressed tar file"),
    }
    for name, (content, message) in broken.items():
        path = tmp_path / f"{name}.tar"
        path.write_bytes(content)
        with pytest.raises(SourceError, match=message) as caught:
            open_sources([path], work_dir=tmp_path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)
    shutil.copy(tmp_path / "compressed.tar", tmp_path / "a.tar.gz")
    with pytest.raises(SourceError, match="compressed or archived file, which cannot be read by offsets. Decompress"):
        open_sources([tmp_path / "a.tar.gz"], work_dir=tmp_path)


def test_packing_a_tar_reads_its_bytes_once(tmp_path: Path, tokenizer_dir: Path) -> None:
    """Measuring reads headers, writing reads each image once."""
    members: list[tuple[str, Any]] = []
    images = [picture(n, 420) for n in range(20)]
    for number in range(500):
        members += [(f"{number:04d}.jpg", images[number % 20]), (f"{number:04d}.txt", f"Picture {number}.")]
    path = write_tar(tmp_path / "a.tar", members)
    small = write_tar(tmp_path / "small.tar", members[:40])
    options: dict[str, Any] = {"tokenizer": tokenizer_dir, "seq_len": 4096, "workers": 1}
    pack(small, output_dir=tmp_path / "warm", **options)  # code and compiled kernels are read once
    before = _read_bytes()
    result = pack(path, output_dir=tmp_path / "out", **options)
    read = _read_bytes() - before
    assert (result.manifest.records, result.manifest.images) == (500, 500)
    assert read <= 1.2 * path.stat().st_size, read / path.stat().st_size


def test_a_second_process_does_not_read_all_headers_again(tmp_path: Path) -> None:
    members: list[tuple[str, Any]] = [(f"{number % 1999:05d}.txt", f"Text {number}.") for number in range(2000)]
    path = write_tar(tmp_path / "a.tar", members)
    (source,) = open_sources([path], work_dir=tmp_path / "work")
    rows = list(source.scan(0, source.extent()))
    assert [row.address for row in rows if row.reject is not None] == [0, rows[-1].address]  # 00000 occurs twice
    (kept,) = (tmp_path / "work" / "converted").glob("*.tarindex")
    there = pickle.loads(pickle.dumps(source))
    tar_index._tar_index.cache_clear()
    before = _read_bytes()
    assert there.read(rows[77].address, rows[77].size) == rows[77]
    assert _read_bytes() - before < 40_000 + kept.stat().st_size
    assert list(there.scan(0, there.extent())) == rows
    kept.unlink()
    tar_index._tar_index.cache_clear()
    assert list(there.scan(0, there.extent())) == rows


def _read_bytes() -> int:
    """Bytes that this process has read through system calls."""
    found = re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())
    assert found is not None
    return int(found[1])


def test_tars_pack_to_the_same_tokens_as_jsonl(tmp_path: Path, tokenizer_dir: Path) -> None:
    members, lines = [], []
    for number in range(30):
        (tmp_path / f"{number}.jpg").write_bytes(picture(number))
        members += [(f"{number:02d}.jpg", picture(number)), (f"{number:02d}.txt", "word " * (number + 1))]
        record = {"id": f"{number:02d}", "images": [f"{number}.jpg"], "captions": [("word " * (number + 1)).strip()]}
        lines.append(json.dumps(record))
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    write_tar(tmp_path / "a.tar", members)
    hashes = []
    for kind in ("tar", "jsonl"):
        result = pack(
            PackOptions(
                inputs=(str(tmp_path / f"a.{kind}"),), output_dir=tmp_path / kind, tokenizer=tokenizer_dir,
                seq_len=512, sample_class="PackedTokensSample", workers=1, shard_prefix="p",
            )
        )  # fmt: skip
        hashes.append([np.frombuffer(tar.read_bytes(), np.uint8) for tar in sorted(result.shards.glob("*.tar"))])
    for ours, theirs in zip(*hashes, strict=True):
        assert np.array_equal(ours, theirs)
