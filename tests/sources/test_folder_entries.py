"""Every entry of a folder is read, reported with a reason, or stops the run with one line that names it."""

import bz2
import gzip
import json
import lzma
import os
import shutil
import socket
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import orjson
import pyarrow as pa
import pyarrow.parquet
import pytest

from energon_packed import SourceConfig, SourceError
from tests.internals import IgnoredEntries, open_sources
from tests.processes import run_python
from tests.sources.test_energon import dataset
from tests.sources.test_sources import read_all

LINE = b'{"text": "A text."}\n'
STEMS = (
    "tmpl-2",
    "tmp",
    "tmp12345678",
    "cache-free",
    "_a",
    "__a",
    "a b",
    "a[0]",
    "é",
    "数据",
    "😀",
    "a\nb",
    "a\tb",
    "-a",
)
QUOTED = ("-a", "'a'", '"a"', "$a", "a%2Fb", "#a#", "a\\b", "a*", "~", "a" * 200)
FOLDERS = ("_f", "__f", "tmp", "cache-1", "a.parquet", "a.zip", "d/e/f", "/".join("d" * 40))
GZIPPED = gzip.compress(LINE)
READ = {  # name: content
    **{f"{stem}.jsonl": LINE for stem in (*STEMS, *QUOTED)},
    **{f"{stem}.JSONL": LINE for stem in ("readme", "LICENSE", "authors", "notice.txt", "x.png", "a.zip", "con")},
    **{f"{folder}/a.jsonl": LINE for folder in FOLDERS},
    **{f"part-{n:05d}-0af3.c000.ndjson": LINE for n in range(50)},
    **{"empty.jsonl": b"", "blank.jsonl": b"\n \n", "a.jsonl.gz": GZIPPED, "A.NDJSON.GZ": GZIPPED},
    **{f"a.{kind}.bz2": bz2.compress(LINE) for kind in ("jsonl", "ndjson", "json")},
    **{f"a.{kind}.xz": lzma.compress(LINE) for kind in ("jsonl", "ndjson", "json")},
}
REPORTED = {
    "hidden": (".a.jsonl", "._a.jsonl", ".gitattributes", ".DS_Store", ".0.crc", "d/.b", ".a.zip", "__MACOSX/._x"),
    "marker of Spark": ("_SUCCESS", "d/_SUCCESS", "_metadata", "_common_metadata", "_started_12", "_committed_12"),
    "checksum": ("a.crc", "a.jsonl.md5", "a.jsonl.sha256", "SHA256SUMS", "md5sums.txt", "d/a.sig"),
    "documentation": ("README", "README.md", "readme.txt", "LICENSE", "LICENSE-2.0", "a.pdf", "NOTICE", "licence.TXT"),
    "metadata": ("dataset_info.json", "dataset_infos.json", "config.json", "d/state.txt.yaml", "a.yml", "a.tar.idx"),
    "code": ("load.py", "a.pyc", "run.sh", "Makefile", "a.ipynb", "__pycache__/a.pyc"),
    "media": tuple(f"images/{n}.{end}" for n in range(10) for end in ("jpg", "PNG", "mp4", "npy")),
    "cache of datasets.map": ("cache-0123456789abcdef.arrow", "cache-0123456789abcdef_00001_of_00004.arrow"),
    "JSON beside data files": ("captions.json", "d/CAPTIONS.JSON", "Config2.json"),
    "unknown type": (
        *("a", "a.txt", "a.jsonl~", "a.jsonl.bak", "a.jsonl.tmp", "tmp12345678", "a.", "vocab.txt.gz", "a.avro", "_a"),
        *("a.exe", "n\nl", "n.\x1b[31m", "part-00000", "cache-1234", "é.dat", "a.jsonl.crdownload", "Thumbs.db"),
    ),
}


def write(path: Path, content: bytes = LINE) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def opened(path: Path | str, **options: Any) -> tuple[list[Path], dict[str, IgnoredEntries]]:
    """Paths that are read, and the entries that are not, by reason."""
    ignored: list[IgnoredEntries] = []
    work = Path(options.pop("work_dir", Path(path).parent / "work"))
    sources = open_sources([path], work_dir=work, ignored=ignored, **options)
    return [source.path for source in sources], {entries.reason: entries for entries in ignored}


def entries(folder: Path) -> int:
    """Number of entries, as `os.walk` lists them; a hidden folder is one entry."""
    count = 0
    for _, folders, files in os.walk(folder, followlinks=True):
        hidden = [name for name in folders if name.startswith(".")]
        folders[:] = [name for name in folders if name not in hidden]
        count += len(files) + len(hidden)
    return count


def test_every_entry_is_read_or_reported(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    for name, content in READ.items():
        write(folder / name, content)
    for names in REPORTED.values():
        for name in names:
            write(folder / name, b"x")
    expected = Counter({reason: len(names) for reason, names in REPORTED.items()})
    write(folder / ".git" / "a.jsonl")
    (folder / ".broken").symlink_to("nowhere")
    expected["hidden"] += 2
    os.mkfifo(folder / "pipe")
    expected["a FIFO"] += 1
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(folder / "socket"))
    expected["a socket"] += 1
    (folder / "null").symlink_to("/dev/null")
    expected["a device"] += 1
    write(tmp_path / "elsewhere" / "linked.jsonl")
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    (folder / "link.png").symlink_to(tmp_path / "elsewhere" / "linked.jsonl")
    expected["media"] += 1
    (folder / "none" / "empty").mkdir(parents=True)
    other = os.fsencode(folder) + b"/\xff.dat"
    Path(os.fsdecode(other)).touch()
    expected["unknown type"] += 1

    read, ignored = opened(folder)
    assert sorted(path.relative_to(folder).as_posix() for path in read) == sorted({*READ, "link/linked.jsonl"})
    assert {reason: found.count for reason, found in ignored.items()} == expected
    assert len(read) + sum(found.count for found in ignored.values()) == entries(folder) > 200
    names = [name for found in ignored.values() for name in found.examples]
    assert all(name.isprintable() for name in names)
    json.dumps(names).encode()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *((f"a.tar.{end}", f"a.tar.{end} ({command} a.tar.{end})")
          for end, command in (("gz", "gunzip"), ("bz2", "bunzip2"), ("xz", "unxz"), ("zst", "zstd -d --rm"))),
        ("a.tgz", "(gunzip a.tgz)"), ("b.c.txz", "(unxz b.c.txz)"), ("a.parquet.gz", "(gunzip a.parquet.gz)"),
        ("A.ZIP", "(unzip A.ZIP)"), ("my images.zip", "(unzip 'my images.zip')"), ("d/a.7z", "(7z x d/a.7z)"),
        ("a.rar", "(unrar x a.rar)"), ("a.csv.gz", "(gunzip a.csv.gz)"), ("part-00000.gz", "(gunzip part-00000.gz)"),
        ("a.jsonl.lz4", "(lz4 -d --rm a.jsonl.lz4)"), ("a.arrow.zst", "(zstd -d --rm a.arrow.zst)"),
        ("n\n.zip", "(unzip 'n\\n.zip')"),
    ],
)  # fmt: skip
def test_compressed_and_archived_data_stops_the_run_with_the_command(tmp_path: Path, name: str, message: str) -> None:
    folder = tmp_path / "data"
    write(folder / name, b"x")
    for beside in (False, True):  # alone in the folder, and next to data files
        if beside:
            write(folder / "b.jsonl")
        with pytest.raises(SourceError, match="contains compressed or archived files that are not read") as caught:
            opened(folder)
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)


def test_all_compressed_entries_are_counted_in_one_line(tmp_path: Path) -> None:
    for number in range(9):
        write(tmp_path / "data" / f"{number}.zip")
    with pytest.raises(SourceError, match=r"0\.zip \(unzip 0\.zip\), 1\.zip \(.*\), 2\.zip \(.*\) and 6 more\. Run"):
        opened(tmp_path / "data")


def test_an_archive_of_another_split_does_not_stop_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    for name in ("train.jsonl", "test.jsonl", "test.zip", "extra.jsonl"):
        write(folder / name)
    read, ignored = opened(folder, split="train")
    assert [path.name for path in read] == ["train.jsonl"]
    assert {reason: found.count for reason, found in ignored.items()} == {
        "of another split": 2,
        "name without a split": 1,
    }
    write(folder / "train-2.zip")
    with pytest.raises(SourceError, match=r"\(unzip train-2\.zip\)"):
        opened(folder, split="train")


def links(folder: Path, name: str, target: str) -> None:
    write(folder / "b.jsonl")
    (folder / "d").mkdir()
    (folder / name).symlink_to(target)


@pytest.mark.parametrize(
    ("name", "target", "message"),
    [
        (
            "a.jsonl",
            "nowhere",
            r"a\.jsonl is a link that cannot be followed: No such file or directory\. Restore it, or remove it",
        ),
        ("d/a.png", "nowhere", r"d/a\.png is a link that cannot be followed"),
        ("a", "a", r"a is a link that cannot be followed: Too many levels of symbolic links"),
        ("d/up", "..", r"d/up is a link to a folder that contains it\. Remove the link"),
        ("d/self", ".", r"d/self is a link to a folder that contains it"),
    ],
)
def test_a_link_that_cannot_be_followed_stops_the_run(tmp_path: Path, name: str, target: str, message: str) -> None:
    links(tmp_path / "data", name, target)
    with pytest.raises(SourceError, match=message) as caught:
        opened(tmp_path / "data")
    assert "\n" not in str(caught.value)


def test_links_to_the_same_records_are_refused(tmp_path: Path) -> None:
    links(tmp_path / "data", "again", "d")
    write(tmp_path / "data" / "d" / "a.jsonl")
    with pytest.raises(SourceError, match="is listed twice, so every record would be packed twice"):
        opened(tmp_path / "data")


def test_links_that_multiply_end(tmp_path: Path) -> None:
    links(tmp_path / "data", "0", "nowhere")
    (tmp_path / "data" / "0").unlink()
    for level in range(20):
        (tmp_path / str(level)).mkdir()
        for side in "ab":
            (tmp_path / str(level) / side).symlink_to(tmp_path / str(level + 1))
    (tmp_path / "20").mkdir()
    (tmp_path / "data" / "0").symlink_to(tmp_path / "0")
    with pytest.raises(SourceError, match="lead to the same folders more than 10,000 times"):
        opened(tmp_path / "data")


def test_data_named_like_a_file_is_a_file(tmp_path: Path) -> None:
    os.mkfifo(write(tmp_path / "data" / "a.jsonl").with_name("pipe.jsonl"))
    with pytest.raises(SourceError, match=r"pipe\.jsonl is a FIFO, not a regular file"):
        opened(tmp_path / "data")


@pytest.mark.parametrize(("name", "reason"), [("_temporary", "has not finished"), ("_delta_log", "a Delta table")])
def test_a_folder_whose_files_alone_do_not_define_it_is_refused(tmp_path: Path, name: str, reason: str) -> None:
    write(tmp_path / "data" / name / "0.json")
    write(tmp_path / "data" / "a.jsonl")
    with pytest.raises(SourceError, match=f"{name} is .*{reason}"):
        opened(tmp_path / "data")


@pytest.mark.parametrize("name", ["data.parquet", "data.jsonl", "data.json", "data.csv", "data.tar", "metadata.jsonl"])
@pytest.mark.parametrize("nested", [False, True])
def test_a_folder_with_the_name_of_a_file_is_a_folder(tmp_path: Path, name: str, nested: bool) -> None:
    folder = tmp_path / "in" / name if nested else tmp_path / name
    folder.mkdir(parents=True)
    for part in range(2):
        table = pa.table({"n": [part]})
        pa.parquet.write_table(table, folder / f"part-{part:05d}-0af3-c000.snappy.parquet", compression="snappy")
        write(folder / f".part-{part:05d}-0af3-c000.snappy.parquet.crc")
    write(folder / "_SUCCESS", b"")
    write(folder / "._SUCCESS.crc", b"x")
    work = tmp_path / "work"
    ignored: list[IgnoredEntries] = []
    sources = open_sources([tmp_path / "in" if nested else folder], work_dir=work, ignored=ignored)
    assert [record["n"] for record in read_all(sources)] == [0, 1]
    assert {found.reason: found.count for found in ignored} == {"hidden": 3, "marker of Spark": 1}


def test_a_file_that_another_source_reads_is_not_reported(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    for split in ("train", "test", "validation"):
        write(folder / f"{split}.jsonl", orjson.dumps({"split": split}))
    write(folder / "README.md")
    configs = [SourceConfig(path=(str(folder),), source_split=split) for split in ("train", "test")]
    ignored: list[IgnoredEntries] = []
    sources = open_sources(configs, work_dir=tmp_path / "work", ignored=ignored)
    assert [record["split"] for record in read_all(sources)] == ["train", "test"]
    found = {entries.reason: (entries.count, [Path(name).name for name in entries.examples]) for entries in ignored}
    assert found == {"documentation": (1, ["README.md"]), "of another split": (1, ["validation.jsonl"])}


def test_files_that_a_dataset_does_not_list_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    energon = tmp_path / "energon"
    shards = dataset(energon / "webdataset", [("0.txt", "A.")], "TextSample", {"text": "txt"})
    shutil.copyfile(shards / "shard-0.tar", shards / "shard-1.tar")
    saved = tmp_path / "saved"
    datasets.DatasetDict(
        {split: datasets.Dataset.from_list([{"text": split}]) for split in ("train", "test")}
    ).save_to_disk(str(saved))
    for name in ("more.arrow", "cache-0123456789abcdef.arrow"):
        shutil.copyfile(saved / "train" / "data-00000-of-00001.arrow", saved / "train" / name)
    for folder, split, name in ((energon, None, "webdataset/shard-1.tar"), (saved, "train", "train/more.arrow")):
        read, ignored = opened(folder, split=split)
        assert len(read) == 1
        assert ignored == {
            "not listed by the dataset": IgnoredEntries(
                reason="not listed by the dataset", count=1, examples=[str(folder / name)]
            )
        }
        assert f"{folder}: entries not read as input: not listed by the dataset ({name})" in caplog.text


UNLISTABLE = """
import os, sys, tempfile
from pathlib import Path
from energon_packed import SourceError
from tests.internals import open_sources
folder = Path(tempfile.mkdtemp())
folder.chmod(0o777)
for name in ("a", "b"):
    (folder / "data" / name).mkdir(parents=True)
    (folder / "data" / name / "c.jsonl").write_text("{}")
for path in (folder / "data").rglob("*"):
    path.chmod(0o755)
(folder / "data" / "b").chmod(0)
if os.getuid() == 0:
    os.setuid(65534)
try:
    open_sources([str(folder / sys.argv[1])], work_dir=folder / "work")
except SourceError as error:
    print(error)
"""


@pytest.mark.parametrize("pattern", ["data", "data/*/*.jsonl", "data/**/*.jsonl"])
def test_a_folder_that_cannot_be_listed_stops_the_run(pattern: str) -> None:
    done = run_python(UNLISTABLE, pattern)
    assert done.returncode == 0, done.stderr
    assert "data/b cannot be listed: Permission denied. Make it readable" in done.stdout
    assert done.stdout.count("\n") == 1


ROWS = [{"n": n} for n in range(60)]
LINES = "".join(f"{json.dumps(row)}\n" for row in ROWS).encode()
HALF = len(LINES) // 2


@pytest.mark.parametrize(("end", "compress"), [("bz2", bz2.compress), ("xz", lzma.compress)])
def test_bzip2_and_xz_are_read_whole_or_refused(tmp_path: Path, end: str, compress: Any) -> None:
    frames = compress(LINES[:HALF]) + (bytes(4) if end == "xz" else b"") + compress(LINES[HALF:])
    for content in (compress(LINES), frames):
        path = write(tmp_path / f"a.jsonl.{end}", content)
        assert read_all(open_sources([path], work_dir=tmp_path / "work")) == ROWS
    path = write(tmp_path / f"array.json.{end}", compress(json.dumps(ROWS).encode()))
    assert read_all(open_sources([path], work_dir=tmp_path / "work")) == ROWS
    damaged = bytearray(frames)
    damaged[len(compress(LINES[:HALF])) + 6] ^= 0xFF  # the header of the second frame
    for content in (frames[:-3], frames[: len(frames) // 3], frames + b"more", b"no " * 99, bytes(damaged), b""):
        path = write(tmp_path / f"a.jsonl.{end}", content)
        with pytest.raises(SourceError, match=rf"a\.jsonl\.{end} (cannot be decompressed: .*complete|is empty)"):
            open_sources([path], work_dir=tmp_path / "work")


def test_xz_that_needs_gigabytes_of_memory_is_refused(tmp_path: Path) -> None:
    content = bytearray(lzma.compress(LINES))
    size = 4 * (content[12] + 1)  # of the block header, after the stream header of 12 bytes
    content[16] = 36  # the property of LZMA2: a dictionary of 1 GiB
    content[12 + size - 4 : 12 + size] = zlib.crc32(content[12 : 12 + size - 4]).to_bytes(4, "little")
    path = write(tmp_path / "a.jsonl.xz", bytes(content))
    with pytest.raises(SourceError, match=r"a\.jsonl\.xz needs more than 256 MiB to decompress; decompress it: unxz"):
        open_sources([path], work_dir=tmp_path / "work")
