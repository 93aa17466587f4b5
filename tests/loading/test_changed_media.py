"""Referenced images that change after packing: every loader stops; no loader yields other images or fewer samples."""

import errno
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from megatron.energon import WorkerConfig, get_loader, get_train_dataset
from megatron.energon.errors import FatalSampleError

from energon_packed import (
    ChatEncoder,
    DataChangedError,
    DataflowLoader,
    EnergonDistributor,
    MapDistributor,
    PackedDataset,
    ResourceError,
    get_packed_loader,
)
from tests.internals import streams
from tests.media import bmp, pack_media, restore, write_files, write_tar

CHANGES = int(os.environ.get("ENERGON_PACKED_MEDIA_CHANGES", "30"))  # 300 is the long form


class References(NamedTuple):
    """A dataset with 12 images in files and 12 in a tar; `source` may be changed, and is restored after each test."""

    out: Path
    source: Path
    images: list[list[bytes]]

    def file(self, number: int) -> Path:
        return self.source / "images" / f"{number:04d}.bmp"


@pytest.fixture(scope="module")
def packed(tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> References:
    root = tmp_path_factory.mktemp("references")
    jsonl = write_files(root / "source", range(12))
    write_tar(root / "source" / "tar.tar", range(100, 112))
    pack_media(root / "out", tokenizer_dir, [jsonl, root / "source" / "tar.tar"])
    shutil.copytree(root / "source", root / "backup", copy_function=shutil.copy2)
    images = _images(root / "out", ChatEncoder.from_pretrained(tokenizer_dir))
    assert sum(map(len, images)) == 24
    return References(root / "out", root / "source", images)


@pytest.fixture
def data(packed: References) -> Iterator[References]:
    yield packed
    restore(packed.source.parent / "backup", packed.source)


def _images(out: Path, encoder: ChatEncoder) -> list[list[bytes]]:
    dataset = PackedDataset(out, encoder)
    return [_images_of(dataset, pack) for pack in range(len(dataset))]


def _images_of(dataset: PackedDataset, pack: int) -> list[bytes]:
    return [image.data for sample in dataset.sample(pack).stored_samples() for image in sample.conversation.images]


def _replace(path: Path, content: bytes) -> None:
    other = path.with_name("other")
    other.write_bytes(content)
    other.replace(path)


def _rewrite_tar(data: References) -> Path:
    tar = data.source / "tar.tar"
    size = tar.stat().st_size
    write_tar(tar, list(reversed(range(100, 112))))
    assert tar.stat().st_size == size
    return tar


HARMFUL: dict[str, tuple[Callable[[References], Any], str]] = {
    "removed": (lambda data: data.file(3).unlink(), "does not exist"),
    "moved": (lambda data: data.file(3).rename(data.source / "moved.bmp"), "does not exist"),
    "truncated": (lambda data: os.truncate(data.file(3), 1000), "has 1000 bytes and ends before byte"),
    "replaced by another image of equal size": (lambda data: _replace(data.file(3), bmp(4)), "has other bytes"),
    "overwritten in place": (lambda data: data.file(3).write_bytes(bmp(4)), "has other bytes"),
    "a link to another image": (
        lambda data: (data.file(3).unlink(), data.file(3).symlink_to(data.file(4))),
        "has other bytes",
    ),
    "a folder": (lambda data: (data.file(3).unlink(), data.file(3).mkdir()), "is a folder, not a regular file"),
    "a FIFO": (lambda data: (data.file(3).unlink(), os.mkfifo(data.file(3))), "is a FIFO, not a regular file"),
    "a tar in another order": (_rewrite_tar, "has other bytes"),
    "a folder that moved": (lambda data: (data.source / "images").rename(data.source / "moved"), "does not exist"),
}
HARMLESS: dict[str, Callable[[References], Any]] = {
    "another time": lambda data: [os.utime(file, (1, 1)) for file in (data.file(3), data.source / "tar.tar")],
    "more bytes at the end": lambda data: data.file(3).open("ab").write(b"more"),
    "an equal file": lambda data: _replace(data.file(3), bmp(3)),
    "a link to an equal file": lambda data: data.file(3).symlink_to(data.file(3).rename(data.source / "moved.bmp")),
}


@pytest.mark.parametrize("name", HARMFUL)
def test_a_changed_file_is_an_error_that_names_pack_sample_file_and_change_at_every_read(
    data: References, encoder: ChatEncoder, name: str
) -> None:
    change, message = HARMFUL[name]
    dataset = PackedDataset(data.out, encoder)
    assert [_images_of(dataset, pack) for pack in range(len(dataset))] == data.images  # with the files opened
    change(data)
    paths = {"a tar in another order": data.source / "tar.tar", "a folder that moved": data.source / "images"}
    path = paths.get(name, data.file(3))
    for opened in (dataset, dataset, PackedDataset(data.out, encoder)):
        errors, unchanged = [], 0
        for pack, expected in enumerate(data.images):
            try:
                assert _images_of(opened, pack) == expected
                unchanged += 1
            except DataChangedError as error:
                errors.append(str(error))
        assert unchanged + len(errors) == len(data.images)
        ours = [error for error in errors if str(path) in error]
        assert ours, errors
        assert all("an image of sample" in error and message in error for error in ours), errors
        assert path in paths.values() or all("(r3), is not the packed image" in error for error in ours)
        assert all("Restore the file" in error and "\n" not in error for error in errors)


@pytest.mark.parametrize("name", HARMLESS)
def test_a_file_with_the_same_bytes_yields_the_packed_images(
    data: References, encoder: ChatEncoder, name: str
) -> None:
    HARMLESS[name](data)
    assert _images(data.out, encoder) == data.images


def test_files_of_an_image_do_not_take_the_place_of_open_tars(
    data: References, encoder: ChatEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    tars = [*map(str, (data.out / "webdataset").glob("*.tar"))]
    monkeypatch.setattr(streams, "_MOST_OPEN", len(tars) + 1)  # and the tar with images
    open_file, opened = os.open, []
    monkeypatch.setattr(os, "open", lambda path, *flags: opened.append(str(path)) or open_file(path, *flags))
    assert _images(data.out, encoder) == data.images
    assert [opened.count(tar) for tar in tars] == [1] * len(tars)
    assert opened.count(str(data.source / "tar.tar")) <= 1  # earlier readers may have opened it
    assert [opened.count(str(data.file(number))) for number in range(12)] == [1] * 12


def test_a_file_that_cannot_be_read_is_a_resource_error_and_not_a_changed_file(
    data: References, encoder: ChatEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = PackedDataset(data.out, encoder)
    pread, opened = os.pread, os.open

    def fails(descriptor: int, size: int, offset: int) -> bytes:
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(data.file(3)):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pread(descriptor, size, offset)

    def denied(path: Any, *arguments: Any, **options: Any) -> int:
        if str(path) == str(data.file(3)):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, *arguments, **options)

    for name, function, reason in (("pread", fails, "Input/output error"), ("open", denied, "Permission denied")):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, function)
            _replace(data.file(3), bmp(3))  # so that it is opened again
            with pytest.raises(ResourceError, match=f"0003.bmp.*{reason}"):
                for pack in range(len(dataset)):
                    dataset.sample(pack)
            with pytest.raises(ResourceError, match=f"0003.bmp.*{reason}"):
                list(get_packed_loader(data.out, encoder, epochs=1, num_workers=0, max_failures=1000))
            with pytest.raises(FatalSampleError, match=f"0003.bmp.*{reason}"):  # Energon skips other errors
                list(plain_energon(data.out, encoder, 0))
    assert _images(data.out, encoder) == data.images


def plain_energon(out: Path, encoder: ChatEncoder, workers: int) -> Any:
    """A loader without a task encoder of this package."""
    config = WorkerConfig(rank=0, world_size=1, num_workers=workers)
    return get_loader(
        get_train_dataset(
            out / "webdataset",
            split_part="train",
            worker_config=config,
            batch_size=1,
            shuffle_buffer_size=None,
            max_samples_per_sequence=None,
            repeat=False,
        )
    )


LOADERS: dict[str, Callable[[Path, ChatEncoder, int], Any]] = {
    "PackedDataset": lambda out, encoder, workers: PackedDataset(out, encoder),
    "DataflowLoader": lambda out, encoder, workers: DataflowLoader(
        MapDistributor(PackedDataset(out, encoder)), batch_size=1, num_workers=workers, max_failures=None
    ),
    "EnergonDistributor": lambda out, encoder, workers: DataflowLoader(
        EnergonDistributor(out), encoder, batch_size=1, num_workers=workers, max_failures=None
    ),
    "get_packed_loader": lambda out, encoder, workers: get_packed_loader(
        out, encoder, epochs=1, num_workers=workers, max_failures=1000
    ),
    "plain Energon": plain_energon,
}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("name", LOADERS)
def test_a_changed_file_stops_every_loader_whatever_max_failures(
    data: References, encoder: ChatEncoder, name: str, workers: int
) -> None:
    _replace(data.file(3), bmp(4))
    loader = LOADERS[name](data.out, encoder, workers)
    expected = FatalSampleError if name == "plain Energon" else DataChangedError
    with pytest.raises(expected, match=r"\(r3\), is not the packed image: .*0003.bmp has other bytes") as raised:
        for _ in loader:
            pass
    assert name in ("PackedDataset", "plain Energon") or "\n" not in str(raised.value)


def test_an_id_with_line_breaks_is_in_an_error_of_one_line(
    tokenizer_dir: Path, encoder: ChatEncoder, tmp_path: Path
) -> None:
    jsonl = write_files(tmp_path / "source", range(3))
    jsonl.write_text(jsonl.read_text().replace('"r1"', '"r1\\nDataChangedError: x"'))
    pack_media(tmp_path / "out", tokenizer_dir, [jsonl])
    (tmp_path / "source" / "images" / "0001.bmp").unlink()
    loader = DataflowLoader(MapDistributor(PackedDataset(tmp_path / "out", encoder)), batch_size=1, num_workers=1)
    with pytest.raises(DataChangedError, match=r"an image of sample 1 \(r1\\nDataChangedError: x\), is not") as raised:
        list(loader)
    assert "\n" not in str(raised.value)


def test_a_source_of_200_images_that_was_rewritten_is_an_error_in_every_pack(
    tokenizer_dir: Path, encoder: ChatEncoder, tmp_path: Path
) -> None:
    tar, numbers = tmp_path / "source.tar", range(200)
    write_tar(tar, numbers)
    size = tar.stat().st_size
    pack_media(tmp_path / "out", tokenizer_dir, [tar])
    dataset = PackedDataset(tmp_path / "out", encoder)
    assert sum(len(_images_of(dataset, pack)) for pack in range(len(dataset))) == 200
    reordered = list(reversed(numbers))
    for images in (reordered, [number + 1000 for number in numbers]):
        write_tar(tar, reordered if images is reordered else numbers, images=images)
        assert tar.stat().st_size == size
        for opened in (dataset, PackedDataset(tmp_path / "out", encoder)):
            for pack in range(len(dataset)):
                with pytest.raises(DataChangedError, match=r"source\.tar has other bytes"):
                    opened.sample(pack)
                with pytest.raises(DataChangedError, match=r"source\.tar has other bytes"):
                    opened[pack]


def _random_change(rng: random.Random, data: References) -> tuple[str, list[Path]]:
    """Change a file or two; return the kind and the files."""
    files = [*(data.file(number) for number in range(12)), data.source / "tar.tar"]
    file, other = rng.sample(files, 2)
    if rng.random() < 0.4:
        file, other = other, files[-1]
    content = bytearray(file.read_bytes())
    size = len(content)
    start, stop = sorted(rng.sample(range(size), 2))
    kind = rng.choice(
        ["flip", "swap ranges", "swap files", "truncate", "extend", "rename", "link", "link back", "folder", "fifo",
         "touch", "insert", "cut", "zeros", "same"]
    )  # fmt: skip
    if kind == "flip":
        for _ in range(rng.randint(1, 5)):
            content[rng.randrange(size)] ^= 1 << rng.randrange(8)
    elif kind == "swap ranges":
        length = min(rng.randint(1, 4096), (size - 1) // 2)
        a, b = rng.randint(0, size // 2 - length), rng.randint(size // 2, size - length)
        content[a : a + length], content[b : b + length] = content[b : b + length], content[a : a + length]
    elif kind == "truncate":
        del content[start:]
    elif kind == "extend":
        content += rng.randbytes(rng.randint(1, 5000))
    elif kind == "insert":
        content[start:start] = rng.randbytes(rng.randint(1, 600))
    elif kind == "cut":
        del content[start:stop]
    elif kind == "zeros":
        content[start:stop] = bytes(stop - start)
    if kind in ("flip", "swap ranges", "truncate", "extend", "insert", "cut", "zeros", "same"):
        if rng.random() < 0.5:
            file.write_bytes(content)
        else:
            _replace(file, bytes(content))
        return kind, [file]
    moved = data.source / "moved"
    if kind == "touch":
        os.utime(file, (rng.randint(1, 10**9),) * 2)
        return kind, [file]
    file.rename(moved)
    if kind == "swap files":
        other.rename(file)
        moved.rename(other)
        return kind, [file, other]
    if kind == "link":
        file.symlink_to(other)
    elif kind == "link back":
        file.symlink_to(moved)
    elif kind == "folder":
        file.mkdir()
    elif kind == "fifo":
        os.mkfifo(file)
    return kind, [file]


def test_random_changes_of_media_are_errors_that_name_the_file_or_yield_identical_images(
    data: References, encoder: ChatEncoder
) -> None:
    rng = random.Random(28)
    backup = data.source.parent / "backup"
    dataset = PackedDataset(data.out, encoder)  # one reader for all changes: its open files must not hide them
    counts = {"error": 0, "identical": 0}
    for _ in range(CHANGES):
        restore(backup, data.source)
        kind, files = _random_change(rng, data)
        failed = 0
        for pack, expected in enumerate(data.images):
            try:
                assert _images_of(dataset, pack) == expected, f"{kind} of {files}: other images in pack {pack}"
            except DataChangedError as error:
                assert any(str(file) in str(error) for file in files), error
                failed += 1
        counts["error" if failed else "identical"] += 1
        assert failed or kind not in ("rename", "folder", "fifo", "link", "swap files")
        assert not failed or kind not in ("touch", "same", "extend", "link back")
    print(counts)
    assert min(counts.values()) > CHANGES / 10
