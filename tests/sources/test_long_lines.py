"""The length of a line is limited while it is read, in plain and compressed files: memory does not grow with it."""

import bz2
import gzip
import lzma
import tarfile
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard

from energon_packed import SourceError
from tests.internals import csv_source, json_source, open_sources

LIMIT = 1 << 20
GOOD = b'{"text": "A text."}\n'
LONG = {
    "blank": b" " * (9 * LIMIT),
    "blank and a record": b" " * (9 * LIMIT) + GOOD.strip(),
    "one string": b'{"text": "' + b"x" * (9 * LIMIT) + b'"}',
    "without an end": b"{" * (9 * LIMIT),
    "below the limit": b" " * (LIMIT - len(GOOD) - 1) + GOOD.strip(),
}
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor().compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}


@pytest.fixture(autouse=True)
def small_limit(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(json_source, "LONGEST_RECORD", LIMIT)
    monkeypatch.setattr(csv_source, "_LARGEST_CELL", LIMIT)
    yield
    tracemalloc.stop()


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("name", LONG)
def test_a_long_line_is_one_reject(tmp_path: Path, suffix: str, name: str) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(COMPRESS[suffix](GOOD + LONG[name] + b"\n" + GOOD))
    if not suffix:
        tracemalloc.start()
    (source,) = open_sources([str(path)], work_dir=tmp_path / "work")
    rows = list(source.scan(0, source.extent()))
    if not suffix:
        assert tracemalloc.get_traced_memory()[1] < (6 if name != "below the limit" else 20) * LIMIT
        tracemalloc.stop()
    found = [row.record or str(row.reject) for row in rows]
    long = "bad_json: a line must be shorter than 1 MB; if the file is a JSON array, rename it to .json, or write one "
    expected: list[Any] = [{"text": "A text."}, f"{long}record per line", {"text": "A text."}]
    if name == "below the limit":
        expected[1] = {"text": "A text."}
    assert found == expected
    reads = [source.read(row.address, row.size) for row in rows]
    assert [row.record or str(row.reject) for row in reads] == found
    chunked = [row.address for start in range(0, source.extent(), 999_983)
               for row in source.scan(start, min(start + 999_983, source.extent()))]  # fmt: skip
    assert chunked == [row.address for row in rows]


def test_a_bomb_is_decompressed_in_small_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 KiB that become 256 MiB: blocks of 2 KiB of it, and not the whole, are in memory."""
    monkeypatch.setattr(json_source, "LONGEST_RECORD", 8 * LIMIT)
    compressor = zstandard.ZstdCompressor().compressobj()
    blocks = [compressor.compress(b" " * (8 << 20)) for _ in range(32)]
    (tmp_path / "a.jsonl.zst").write_bytes(b"".join(blocks) + compressor.flush())
    tracemalloc.start()
    (source,) = open_sources([str(tmp_path / "a.jsonl.zst")], work_dir=tmp_path / "work")
    (row,) = source.scan(0, source.extent())
    assert row.reject is not None
    assert tracemalloc.get_traced_memory()[1] < 100 << 20


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b'[{"text": "' + b"x" * (2 * LIMIT) + b'"}]', "element 0 has more than 1 MB, the limit"),
        ("a.jsonl", b'[{"text": "a"},\n {"text": "' + b"x" * (2 * LIMIT) + b'"}]', "element 1 has more than 1 MB"),
        ("a.csv", b"text\n" + b"x" * (9 * LIMIT) + b"\n", "a line must be shorter than 1 million characters"),
        ("a.csv", b'text\n"' + b"x\n" * LIMIT + b'"\n', "a cell must have at most 1 million characters"),
    ],
)
def test_arrays_and_tables_are_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SourceError, match=message):
        open_sources([str(tmp_path / name)], work_dir=tmp_path / "work")


@pytest.mark.parametrize("part", ["json", "txt"])
def test_a_part_of_a_tar_is_not_read_if_it_is_large(tmp_path: Path, part: str) -> None:
    header = tarfile.TarInfo(f"a.{part}")
    header.size = 1 << 40  # a sparse file: its content takes no space on disk
    with (tmp_path / "s.tar").open("wb") as file:
        file.write(header.tobuf())
        file.truncate(512 + header.size + (10 << 10))
    (source,) = open_sources([str(tmp_path / "s.tar")], work_dir=tmp_path / "work")
    (row,) = source.scan(0, source.extent())
    assert str(row.reject) == (
        f"bad_json: a.{part} has 1,099,512 MB; a part that is not media must be shorter than 268 MB. Split the record."
    )
