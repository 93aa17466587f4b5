"""Arrays of all records are files: the same bytes as in memory, and nothing of them is left."""

import errno
import json
import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from energon_packed import pack
from tests.internals import files, placing, plan_stage, planner
from tests.pipeline.test_planning import Characters


@pytest.fixture
def all_in_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_IN_MEMORY", 1)
    for module, name, size in (
        (files, "_BLOCK", 3),
        (planner, "_BLOCK", 4),
        (plan_stage, "_BUCKET", 5),
        (placing, "_SAMPLES", 3),
    ):
        monkeypatch.setattr(module, name, size)


def texts(folder: Path, words: list[int]) -> Path:
    """Documents with these numbers of words; the second line is not a record."""
    lines = [json.dumps({"text": "word " * count}) for count in words]
    data = folder / "data.jsonl"
    data.write_text("\n".join([lines[0], "no JSON", "", *lines[1:]]) + "\n")
    return data


def test_an_array_has_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = files.disk_array(tmp_path, 1 << 18, np.int32)
    assert (array.shape, array.dtype, array.any()) == ((1 << 18,), np.int32, False)
    array[:] = np.arange(1 << 18)
    assert (array == np.arange(1 << 18)).all()
    assert isinstance(array.base.obj, mmap.mmap)
    small = files.disk_array(tmp_path, 3, np.int32)
    small[:] = 1
    assert small.base is None
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(files, "_IN_MEMORY", 1)
    assert files.disk_array(tmp_path, 0, np.int64).shape == (0,)


def test_a_killed_process_leaves_no_file(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from tests.internals import files\n"
        "files.disk_array(Path(sys.argv[1]), 1 << 20, 'i8')[:] = 1; os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == -9
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlong": "split", "sample_class": "PackedTokensSample"},
        {"overlong": "truncate", "group_by": "media", "algorithm": "window_7"},
        {"unpacked": True},
        {"algorithm": "sequential", "max_samples_per_pack": 3, "pad_multiple": 8},
    ],
    ids=str,
)
def test_the_bytes_are_those_of_arrays_in_memory(
    tmp_path: Path, options: dict[str, object], request: pytest.FixtureRequest
) -> None:
    rng = np.random.default_rng(0)
    data = texts(tmp_path, rng.integers(0, 14, 60).tolist())
    values = {
        "encoder": Characters(),
        "seq_len": 40,
        "shard_prefix": "d",
        "max_packs_per_shard": 5,
        "max_reject_rate": 1.0,
        **options,
    }

    def content(name: str) -> dict[str, bytes]:
        folder = pack(data, output_dir=tmp_path / name, workers=1, **values).shards.parent
        assert not list(folder.rglob(".*.tmp"))
        found = [file for file in folder.rglob("*") if file.is_file() and ".work" not in file.parts]
        return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(found)}

    expected = content("memory")
    request.getfixturevalue("all_in_files")
    assert content("files") == expected


def test_a_full_disk_is_an_error_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, all_in_files: None
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"No space left on device for 32 B.*measure-") as caught:
        pack(texts(tmp_path, [2, 3, 4]), output_dir=tmp_path / "out", encoder=Characters(), seq_len=40)
    assert caught.value.errno == errno.ENOSPC


@pytest.mark.parametrize("dtype", [np.int64, np.uint64, np.uint32])
def test_numbers_are_appended(all_in_files: None, monkeypatch: pytest.MonkeyPatch, dtype: type) -> None:
    """From lists and arrays, in any order; sorted again if numbers were appended."""
    monkeypatch.setattr(files, "_WAITING", 3)
    rng, expected, numbers = np.random.default_rng(0), list[int](), files.DiskList(dtype)
    assert numbers.sorted().tolist() == numbers.repeated().tolist() == []
    for size in rng.integers(0, 6, 40).tolist():
        part = rng.integers(0, 150, size)
        numbers.extend(part.astype(dtype) if size % 2 else part.tolist())
        expected += part.tolist()
        assert len(numbers) == len(expected)
    assert numbers.values.tolist() == expected
    assert isinstance(numbers.values.base.base.obj, mmap.mmap)
    assert numbers.repeated().tolist() == sorted({number for number in expected if expected.count(number) > 1})
    assert numbers.values.tolist() == sorted(expected)
    numbers.extend([0, 2])
    assert numbers.sorted().tolist() == sorted([*expected, 0, 2])
