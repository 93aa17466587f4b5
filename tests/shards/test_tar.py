"""Tars are deterministic, complete or absent, and plain ustar."""

import hashlib
import tarfile
from pathlib import Path

import pytest

from energon_packed import FormatError
from tests.internals import ShardRows, TarShardWriter, as_path
from tests.storage import Store


def write(path: Path, packs: int = 3) -> ShardRows:
    with TarShardWriter(path) as shard:
        for pack in range(packs):
            shard.add(f"a_{pack:08d}", [("json", b"{}" * pack), ("img0_0.jpg", bytes(600 * pack))])
    return shard.rows


def test_equal_parts_produce_equal_bytes(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a.tar"), write(tmp_path / "b.tar")
    assert (tmp_path / "a.tar").read_bytes() == (tmp_path / "b.tar").read_bytes()
    assert first.sha256 == second.sha256
    with tarfile.open(tmp_path / "a.tar") as tar:
        for member in tar:
            assert (member.mtime, member.uid, member.gid, member.uname, member.gname) == (0, 0, 0, "", "")
            assert member.isreg()


def test_a_tar_ends_with_two_zero_blocks_also_after_a_full_record(tmp_path: Path) -> None:
    with TarShardWriter(tmp_path / "a.tar") as shard:
        shard.add("a_0", [("json", bytes(tarfile.RECORDSIZE - tarfile.BLOCKSIZE))])
    assert shard.rows.offsets[-1] == tarfile.RECORDSIZE
    assert shard.rows.size == 2 * tarfile.RECORDSIZE


def test_rows_have_the_offsets_of_all_parts(tmp_path: Path) -> None:
    rows = write(tmp_path / "a.tar")
    with tarfile.open(tmp_path / "a.tar") as tar:
        members = tar.getmembers()
        assert [(rows.keys[i] + "." + name, start, size) for i, name, start, size in rows.parts] == [
            (m.name, m.offset_data, m.size) for m in members
        ]
        assert rows.offsets == [m.offset for m in members[::2]] + [tar.offset]
    content = (tmp_path / "a.tar").read_bytes()
    assert (rows.name, rows.size, rows.sha256) == ("a.tar", len(content), hashlib.sha256(content).hexdigest())
    assert rows.size % tarfile.RECORDSIZE == 0
    assert ShardRows.from_dict(rows.as_dict()) == rows
    summary = rows.summary
    assert (summary.name, summary.size, summary.sha256, summary.packs) == (rows.name, rows.size, rows.sha256, 3)


def test_a_shard_of_a_store_is_written_in_the_staging_folder_and_uploaded(store: Store, tmp_path: Path) -> None:
    with TarShardWriter(as_path(store.url("a.tar")), tmp_path) as shard:
        shard.add("a_0", [("json", b"{}")])
        assert len(list(tmp_path.iterdir())) == 1
    assert list(tmp_path.iterdir()) == []
    content = store.client.get_object(Bucket="bucket", Key="a.tar")["Body"].read()
    assert (len(content), hashlib.sha256(content).hexdigest()) == (shard.rows.size, shard.rows.sha256)


@pytest.mark.parametrize("letter", ["x", "é", "日"])
def test_a_member_name_may_have_100_bytes(tmp_path: Path, letter: str) -> None:
    size = len(letter.encode())
    key = letter * (95 // size)
    key += "x" * (95 - len(key.encode()))
    with TarShardWriter(tmp_path / "a.tar") as shard:
        shard.add(key, [("json", b"{}")])
    with tarfile.open(tmp_path / "a.tar", encoding="utf-8") as tar:
        assert tar.getnames() == [f"{key}.json"]
    with pytest.raises(FormatError, match="exceeds 100 bytes"), TarShardWriter(tmp_path / "b.tar") as shard:
        shard.add(f"{key}x", [("json", b"{}")])
    with pytest.raises(FormatError, match="exceeds 100 bytes"), TarShardWriter(tmp_path / "c.tar") as shard:
        shard.add(letter * 60, [("json", b"{}")]) if size > 1 else shard.add("x" * 96, [("json", b"{}")])


def test_a_failed_shard_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="stop"), TarShardWriter(tmp_path / "a.tar") as shard:
        shard.add("a_0", [("json", b"{}")])
        assert not (tmp_path / "a.tar").exists()
        raise RuntimeError("stop")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("key", "message"), [("a.b", "without dots"), ("a/b", "slashes"), ("", "name"), ("x" * 99, "100 bytes")]
)
def test_bad_keys_are_refused(tmp_path: Path, key: str, message: str) -> None:
    with pytest.raises(FormatError, match=message), TarShardWriter(tmp_path / "a.tar") as shard:
        shard.add(key, [("json", b"{}")])
