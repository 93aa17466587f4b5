"""Failures of the machine (memory, open files, disks, permissions) stop a run; they never count as damaged data."""

import errno
import gzip
import io
import json
import logging
import os
import resource
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest
from PIL import Image

from energon_packed import (
    ChatEncoder,
    DataflowConfig,
    DataflowLoader,
    MapDistributor,
    MediaReference,
    PackedDataset,
    RecordError,
    ResourceError,
    get_packed_loader,
    get_raw_loader,
    pack,
)
from tests.conftest import Packer
from tests.internals import (
    NOTICE,
    PackedFolder,
    announced,
    atomic_path,
    check_patch_positions,
    images,
    load_image,
    media,
    open_sources,
    open_tar,
    read_header,
    read_metadataset,
    read_split,
    verify,
)
from tests.processes import run_python
from tests.sources.tars import picture, write_tar
from tests.sources.test_energon import dataset

STOPPING = [
    errno.EMFILE, errno.ENFILE, errno.EIO, errno.ESTALE, errno.ENOSPC, errno.ENOMEM, errno.EACCES, errno.EPERM,
    errno.ETIMEDOUT, errno.EBUSY,
]  # fmt: skip
ABSENT = [errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EISDIR]
READERS: list[Callable[[MediaReference], Any]] = [
    MediaReference.read,
    read_header,
    load_image,
    lambda reference: check_patch_positions([reference], [1]),
]


@contextmanager
def no_more_files() -> Iterator[None]:
    """Allow this process no further open file, as `ulimit -n` does."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    next_file = os.dup(0)
    os.close(next_file)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next_file, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextmanager
def little_memory(more: int) -> Iterator[None]:
    """Allow this process `more` bytes of address space, as `ulimit -v` does."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def saved(folder: Path) -> dict[str, Path]:
    """A file of every kind that is read."""
    table = pa.table({"text": ["Once upon a time."] * 3})
    np.save(folder / "a.npy", np.zeros((1, 3), dtype=np.int64))
    (folder / "a.jpg").write_bytes(picture(1))
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "Once."}\n'))
    (folder / "a.csv").write_text("text\nOnce\n")
    pa.feather.write_feather(table, folder / "a.feather")
    pa.parquet.write_table(table, folder / "a.parquet")
    write_tar(folder / "a.tar", [("0.jpg", picture(1)), ("0.txt", "Once.")])
    return {path.name: path for path in folder.iterdir()}


@pytest.mark.parametrize("number", range(len(READERS)))
def test_an_image_that_cannot_be_opened_without_more_files_is_not_missing(tmp_path: Path, number: int) -> None:
    reference = MediaReference(path=str(saved(tmp_path)["a.npy" if number == 3 else "a.jpg"]))
    READERS[number](reference)
    with no_more_files(), pytest.raises(ResourceError, match=r"a\.\w+: Too many open files; .* ulimit -n"):
        READERS[number](reference)


@pytest.mark.parametrize("name", ["a.tar", "a.parquet", "a.feather", "a.csv", "a.jsonl.gz"])
def test_an_input_that_cannot_be_opened_without_more_files_is_not_damaged(tmp_path: Path, name: str) -> None:
    path = saved(tmp_path)[name]
    (tmp_path / "work" / "converted").mkdir(parents=True)
    with no_more_files(), pytest.raises((ResourceError, OSError), match="Too many open files") as caught:
        for source in open_sources([path], work_dir=tmp_path / "work"):
            list(source.scan(0, source.extent()))
    text = str(caught.value)
    assert "not" not in text.replace(str(tmp_path), "") or isinstance(caught.value, OSError)


def test_memory_that_runs_out_does_not_reject_the_image(tmp_path: Path) -> None:
    for name in ("a.png", "a.bmp"):
        # 108 MB: the C library reserves 64 MiB for a thread, which the limit counts and a smaller file could use.
        Image.new("RGB", (6_000, 6_000)).save(tmp_path / name, compress_level=1)
        Image.new("RGB", (1, 1)).save(tmp_path / f"small-{name}")
    # A new process: this one may have freed memory, which the limit does not count.
    done = run_python(
        """
import sys
from pathlib import Path
import pytest
from energon_packed import MediaReference, ResourceError
from tests.internals import load_image
from tests.test_system import little_memory

png, bmp, *small = (
    MediaReference(path=str(Path(sys.argv[1]) / name)) for name in ("a.png", "a.bmp", "small-a.png", "small-a.bmp")
)
for reference in small:
    load_image(reference)  # imports the decoders
with little_memory(30 << 20), pytest.raises(ResourceError, match="a.png: memory ran out; use fewer processes"):
    load_image(png)
with little_memory(30 << 20), pytest.raises(ResourceError, match="a.bmp: memory ran out"):
    bmp.read()
assert load_image(png).size == (6_000, 6_000)  # last: its freed memory is not in the limit
""",
        tmp_path,
    )
    assert done.returncode == 0, done.stderr


def test_a_decoder_without_memory_does_not_reject_the_image_and_a_damaged_size_does(tmp_path: Path) -> None:
    """Pillow has one error for both (TIFF: error -9), or reports a lack of memory as damaged data."""
    black = Image.new("RGB", (4_000, 4_000))
    black.save(tmp_path / "a.tif", compression="tiff_lzw", strip_size=1 << 30)
    black.resize((2_000, 2_000)).save(tmp_path / "a.jp2", num_resolutions=1)
    black.save(tmp_path / "a.jpg", progressive=True)
    # A TIFF of 40 x 50 pixels in tiles of 65536 x 32768: tags of two or four bytes, and its tile of 100 bytes.
    tags = {256: 40, 257: 50, 258: 8, 259: 5, 262: 1, 277: 1, 322: 1 << 16, 323: 1 << 15, 324: 8, 325: 100}
    entries = b"".join([struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items()])
    directory = struct.pack("<H", len(tags)) + entries + bytes(4)
    (tmp_path / "damaged.tif").write_bytes(b"II*\0" + struct.pack("<I", 108) + bytes(100) + directory)
    done = run_python(
        """
import ctypes
import sys
from pathlib import Path
import pytest
from PIL import Image
from energon_packed import MediaReference, RecordError, ResourceError
from tests.internals import load_image
from tests.test_system import little_memory

Image.core.set_blocks_max(8)  # Pillow keeps the memory of an image for the next one, so that only the decoder fails
malloc = ctypes.CDLL(None).malloc
malloc.argtypes, malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
folder = Path(sys.argv[1])
for name in ("a.jp2", "a.tif", "a.jpg"):
    reference = MediaReference(path=str(folder / name))
    Image.new("RGB", (4_000, 4_000))
    with little_memory(0):
        while malloc(1 << 20):  # nor may a decoder find memory that this process has freed
            pass
    with little_memory(5 << 20), pytest.raises(ResourceError, match=f"{name}: memory ran out; use fewer processes"):
        load_image(reference)
    assert load_image(reference).size in ((4_000, 4_000), (2_000, 2_000))
with pytest.raises(RecordError, match="-9|out of memory"):
    load_image(MediaReference(path=str(folder / "damaged.tif")))
""",
        tmp_path,
    )
    assert done.returncode == 0, done.stderr


def fails(function: Callable[..., Any], error: Exception, name: str = ".jpg") -> Callable[..., Any]:
    def call(path: Any, *args: Any) -> Any:
        if str(path).endswith(name):
            raise error
        return function(path, *args)

    return call


class Failing(io.FileIO):
    """A file that opens, and whose disk then fails."""

    number = errno.EIO

    def __init__(self, path: Any, without_links: str | None = None) -> None:
        super().__init__(path)

    def readinto(self, buffer: Any) -> int:
        raise OSError(self.number, os.strerror(self.number))

    def read(self, size: int | None = -1) -> bytes:
        raise OSError(self.number, os.strerror(self.number))


@pytest.mark.parametrize("number", STOPPING)
@pytest.mark.parametrize("when", ["open", "read"])
def test_failures_of_the_machine_are_not_failures_of_an_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, when: str
) -> None:
    path = str(saved(tmp_path)["a.jpg"])
    error = OSError(number, os.strerror(number), path)
    monkeypatch.setattr(Failing, "number", number)
    monkeypatch.setattr(media, "open_regular", fails(open, error) if when == "open" else Failing)
    for function in READERS:
        with pytest.raises(ResourceError, match=f"a.jpg: {os.strerror(number)}; "):
            function(MediaReference(path=path))


@pytest.mark.parametrize("number", ABSENT)
def test_a_file_that_is_absent_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(media, "open_regular", fails(open, OSError(number, os.strerror(number))))
    with pytest.raises(RecordError, match=os.strerror(number)) as caught:
        MediaReference(path=str(tmp_path / "a.jpg")).read()
    assert caught.value.reason.value == "missing_image"


def test_a_seek_that_damaged_data_asks_for_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow seeks where a damaged header points to; the kernel refuses positions before the start with EINVAL."""
    monkeypatch.setattr(Image, "open", fails(open, OSError(errno.EINVAL, "Invalid argument"), ""))
    with pytest.raises(RecordError, match="corrupt_image"):
        read_header(MediaReference(path=str(saved(tmp_path)["a.jpg"])))


def test_a_png_chunk_that_claims_more_than_the_file_has_needs_no_memory(tmp_path: Path) -> None:
    out = io.BytesIO()
    Image.new("RGB", (40, 40)).save(out, "PNG")
    data = bytearray(out.getvalue())
    place = data.index(b"IDAT") - 4
    data[place : place + 4] = (0x7FFFFFFF).to_bytes(4, "big")
    (tmp_path / "a.png").write_bytes(data)
    with little_memory(300 << 20):
        header = read_header(MediaReference(path=str(tmp_path / "a.png")))
    assert (header.width, header.height, header.decoded) == (40, 40, True)


def test_a_disk_that_fails_inside_a_tar_is_not_a_damaged_tar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path)["a.tar"]

    def pread(*args: int) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pread", pread)
    with pytest.raises(ResourceError, match="a.tar: Input/output error; check the disk"), open_tar(path) as tar:
        list(tar)


def test_a_disk_that_fails_inside_a_tar_does_not_choose_another_field(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An alternative of a field map applies if a part or key is missing, not if it cannot be read."""
    members = [("0.json", {"text": "From json."}), ("0.txt", "From txt.")]
    folder = dataset(tmp_path / "energon", members, "TextSample", {"text": "json[text],txt"})
    (source,) = open_sources([folder], work_dir=tmp_path / "work")
    assert [row.record["text"] for row in source.scan(0, source.extent())] == ["From json."]
    read = os.pread

    def pread(descriptor: int, size: int, at: int) -> bytes:
        if size != 512:  # a content
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(descriptor, size, at)

    monkeypatch.setattr(os, "pread", pread)
    with pytest.raises(ResourceError, match="shard-0.tar: Input/output error; check the disk"):
        list(source.scan(0, source.extent()))


ADAPTER = """
def read(record):
    if record["text"] == "no file":
        open("/nowhere/x")
    open(__file__).close()
    return record
"""


def test_an_adapter_without_more_files_does_not_reject_records(
    tmp_path: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "adapter_of_files.py").write_text(ADAPTER)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "data.jsonl").write_text('{"text": "Once upon a time."}\n{"text": "no file"}\n')
    options = {"adapter": "adapter_of_files:read", "tokenizer": tokenizer_dir, "seq_len": 64, "max_reject_rate": 1}

    def run(name: str) -> dict[str, int]:
        return pack(tmp_path / "data.jsonl", output_dir=tmp_path / name, workers=1, **options).manifest.rejects

    assert run("a") == {"adapter_failed": 1}
    monkeypatch.setitem(sys.modules["adapter_of_files"].__dict__, "open", fails(open, OSError(24, "Too many"), ".py"))
    with pytest.raises(ResourceError, match="adapter_of_files:read: Too many; this process may open"):
        run("b")
    monkeypatch.delitem(sys.modules, "adapter_of_files")


def conversations(folder: Path, count: int = 4) -> Path:
    for number in range(count):
        (folder / f"{number}.jpg").write_bytes(picture(number))
    records = [{"id": f"r{n}", "images": [f"{n}.jpg"], "captions": ["c"]} for n in range(count)]
    (folder / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder / "data.jsonl"


@pytest.mark.parametrize(("workers", "opened"), [(1, 0), (1, 2), (1, 4), (1, 6), (2, 0)])
def test_a_run_stops_and_continues_when_the_machine_works_again(
    tmp_path: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch, opened: int, workers: int
) -> None:
    """The disk fails after some files, while measuring or writing."""
    options = {"tokenizer": tokenizer_dir, "seq_len": 256, "workers": workers, "max_reject_rate": 1}
    data = conversations(tmp_path)
    calls = []

    def stale(path: Any, without_links: str | None = None) -> Any:
        calls.append(path)
        if len(calls) > opened:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return open(path, "rb")

    with monkeypatch.context() as patch:
        patch.setattr(media, "open_regular", stale)
        with pytest.raises(ResourceError, match=r"\d.jpg: Stale file handle; check the disk or the file server"):
            pack(data, output_dir=tmp_path / "out", **options)
    result = pack(data, output_dir=tmp_path / "out", **options)
    assert (result.manifest.packed, result.manifest.rejects) == (4, {})


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("streaming", [True, False])
def test_a_loader_of_records_does_not_skip_failures_of_the_machine(
    tmp_path: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch, num_workers: int, streaming: bool
) -> None:
    config = DataflowConfig(
        dataset_path=[str(conversations(tmp_path))],
        packing_length=256,
        processor_config=tokenizer_dir,
        streaming=streaming,
        workers=1,
    )
    loader = get_raw_loader(config, num_workers=num_workers, max_failures=None)
    monkeypatch.setattr(media, "open_regular", fails(open, OSError(errno.EIO, os.strerror(errno.EIO))))
    with pytest.raises(ResourceError, match="jpg: Input/output error; check the disk") as caught:
        list(loader)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loader_of_packs_does_not_skip_failures_of_the_machine(
    pack_demo: Packer, encoder: ChatEncoder, monkeypatch: pytest.MonkeyPatch, num_workers: int
) -> None:
    shards = pack_demo().shards

    def refused(*args: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(images.Image, "open", refused)
    loader = get_packed_loader(shards, encoder, epochs=1, num_workers=num_workers, max_failures=None)
    with pytest.raises(ResourceError, match="memory ran out; use fewer processes") as caught:
        list(loader)
    assert "\n" not in str(caught.value)
    dataset = PackedDataset(shards, encoder)
    with pytest.raises(ResourceError, match="memory ran out"):
        list(DataflowLoader(MapDistributor(dataset), num_workers=num_workers, max_failures=None))


@pytest.mark.parametrize("processes", [1, 2])
def test_verify_does_not_report_a_lack_of_memory_as_damage(
    pack_demo: Packer, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    folder = PackedFolder.open(pack_demo().shards)
    assert not [check for check in verify(folder, None, processes=processes) if check.passed is False]

    def refused(*args: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(images.Image, "open", refused)
    with pytest.raises(ResourceError, match="memory ran out; use fewer processes"):
        list(verify(folder, None, processes=processes))


def test_a_shard_that_cannot_be_opened_without_more_files_is_not_damaged(
    pack_demo: Packer, encoder: ChatEncoder
) -> None:
    for file in (r"\.tar\.idx", r"\.tar"):
        dataset = PackedDataset(pack_demo().shards, encoder)
        if file == r"\.tar":
            dataset.reader.offsets(0)  # the index is read by now
        with no_more_files(), pytest.raises(ResourceError, match=rf"{file}: Too many open files; .* ulimit -n"):
            dataset[0]
        assert len(dataset[0])


def test_files_of_a_dataset_that_cannot_be_opened_without_more_files_are_not_invalid(
    pack_demo: Packer, tmp_path: Path
) -> None:
    folder = pack_demo().shards
    blend = tmp_path / "blend.yaml"
    blend.write_text("{}")
    for read, path in ((read_split, folder), (read_metadataset, blend)):
        with no_more_files(), pytest.raises(ResourceError, match=r"\.yaml: Too many open files; .* ulimit -n"):
            read(path)


def test_an_error_of_a_file_is_not_its_own_cause(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="disk is full") as raised, atomic_path(tmp_path / "f") as temporary:
        raise OSError(errno.ENOSPC, "disk is full", str(tmp_path / "other"))
    assert raised.value.__cause__ is not raised.value
    assert temporary.parent == tmp_path


def test_a_step_is_logged_only_if_it_is_long(caplog: pytest.LogCaptureFixture) -> None:
    def timers() -> list[threading.Timer]:
        threads = threading.enumerate()  # pytest-timeout has a timer, too
        return [each for each in threads if isinstance(each, threading.Timer) and NOTICE in each.args]

    caplog.set_level(NOTICE, logger="energon_packed")
    with announced("loading A", after=0):
        for timer in timers():
            timer.join()
    assert [record.getMessage() for record in caplog.records] == ["loading A ..."]
    with announced("loading B", after=3600):
        waiting = timers()
    for timer in waiting:
        timer.join()  # a timer that was not cancelled would last an hour
    assert len(waiting) == 1
    assert len(caplog.records) == 1
    caplog.set_level(logging.WARNING, logger="energon_packed")
    with announced("loading C", after=3600):
        assert not timers()
