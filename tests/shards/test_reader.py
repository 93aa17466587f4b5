"""Shard readers count packs by the sizes of the indexes, and read an index with the first pack of its shard."""

import os
import pickle
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest

from energon_packed import (
    ChatEncoder,
    DataChangedError,
    DataflowLoader,
    FormatError,
    MapDistributor,
    PackedDataset,
    PackingManifest,
)
from tests.conftest import Packer
from tests.internals import OpenedFiles, ShardReader, TarShardWriter, shard_reader, write_tar_index


@pytest.fixture
def tars(pack_demo: Packer, tmp_path: Path) -> list[Path]:
    shards = pack_demo(max_packs_per_shard=5).shards
    for file in shards.glob("*.tar*"):
        shutil.copy(file, tmp_path)
    return sorted(tmp_path.glob("*.tar"))


def test_an_index_is_read_with_the_first_pack_of_its_shard(tars: list[Path]) -> None:
    whole = [ShardReader(tars)[pack] for pack in range(len(ShardReader(tars)))]
    index = tars[-1].with_suffix(".tar.idx")
    offsets = np.frombuffer(index.read_bytes(), dtype="<u8")
    index.write_bytes(offsets[::-1].tobytes())  # of equal size
    reader = ShardReader(tars)
    assert len(reader) == len(whole)
    first = reader.first(len(tars) - 1)
    assert [reader[pack] for pack in range(first)] == whole[:first]
    for wrong in (offsets[::-1], offsets[:-1]):
        index.write_bytes(wrong.tobytes())
        with pytest.raises(FormatError, match=rf"{index.name} does not match {tars[-1].name} "):
            reader[first]
    index.write_bytes(offsets.tobytes())
    assert reader[first] == whole[first]


@pytest.mark.parametrize("content", [b"", b"1234", b"123456789"])
def test_an_index_that_ends_inside_an_entry_is_refused_at_opening(tars: list[Path], content: bytes) -> None:
    tars[0].with_suffix(".tar.idx").write_bytes(content)
    with pytest.raises(FormatError, match=f"has {len(content)} bytes, and must have 8 for each pack of"):
        ShardReader(tars)


def test_an_index_of_another_tar_is_named(tars: list[Path]) -> None:
    with tarfile.open(tars[0]) as tar:
        members = tar.getmembers()
    index = tars[0].with_suffix(".tar.idx")
    offsets = np.frombuffer(index.read_bytes(), dtype="<u8").copy()
    offsets[1] = next(member.offset for member in members if member.offset > offsets[1])  # the second of its members
    index.write_bytes(offsets.tobytes())
    with pytest.raises(FormatError, match=f"{index.name} does not match {tars[0].name}: pack 0 has members of .* and"):
        ShardReader(tars)[0]
    os.truncate(tars[1], int(np.fromfile(tars[1].with_suffix(".tar.idx"), dtype="<u8")[-1]) - 1)
    with pytest.raises(FormatError, match=rf"{tars[1].name}.idx does not match {tars[1].name} \("):
        ShardReader(tars)[5]


def test_a_member_that_occurs_twice_is_named(tmp_path: Path) -> None:
    with TarShardWriter(tmp_path / "a.tar") as shard:
        shard.add("a_0", [("json", b"{}"), ("json", b"[]")])
    write_tar_index(tmp_path / "a.tar", shard.rows)
    with pytest.raises(FormatError, match="a_0.json"):
        ShardReader([tmp_path / "a.tar"])[0]


def test_a_pack_that_a_reader_does_not_have_is_an_index_error(tars: list[Path]) -> None:
    reader = ShardReader(tars)
    for pack in (-1, len(reader), 10**6):
        with pytest.raises(IndexError, match=f"pack {pack} is out of range"):
            reader[pack]


def test_a_tar_that_is_overwritten_while_it_is_open_is_a_changed_tar(tars: list[Path]) -> None:
    reader = ShardReader(tars)
    assert reader[0]
    content = tars[0].read_bytes()
    with tars[0].open("r+b") as stream:  # the same file, of equal size
        stream.write(content[::-1])
    with pytest.raises(DataChangedError, match=f"{tars[0].name} was replaced or changed while .* .by its time"):
        reader[1]


def test_a_copy_of_a_tar_is_unchanged_if_packing_json_lists_its_hash(pack_demo: Packer, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(pack_demo(max_packs_per_shard=5).shards, folder)
    tars = sorted(folder.glob("*.tar"))
    digests = {folder / shard.name: shard.sha256 for shard in PackingManifest.load(folder).shards}
    listed, other = ShardReader(tars, digests), ShardReader(tars, dict.fromkeys(tars, "other"))
    os.utime(tars[0], (1, 1))
    assert listed[0]
    with pytest.raises(DataChangedError, match="was replaced or changed"):
        other[0]


def test_a_shard_that_is_replaced_before_its_first_pack_is_a_changed_shard(tars: list[Path]) -> None:
    reader = ShardReader(tars)
    for suffix in (".tar", ".tar.idx"):
        shutil.copy(tars[-1].with_suffix(suffix), tars[0].with_suffix(suffix))  # of other packs, fewer of them
    with pytest.raises(DataChangedError, match=f"{tars[0].name} was replaced or changed while it was in use"):
        reader[0]


def test_a_file_that_is_missing_has_a_remedy_for_inputs_and_datasets(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"a\.jsonl: No such file or directory; restore the file"):
        OpenedFiles([tmp_path / "a.jsonl"])


def test_only_the_indexes_used_last_are_kept(tars: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_reader, "_KEPT", 1)
    many = [tar for tar in tars for _ in range(2)]
    reader = ShardReader(many)
    expected = [ShardReader([tar])[0] for tar in many]
    for _ in range(2):
        assert [reader[reader.first(shard)] for shard in range(len(many))] == expected
    offsets = reader.offsets(0)
    tars[0].with_suffix(".tar.idx").unlink()
    assert reader.offsets(0) is offsets
    reader.offsets(len(many) - 1)
    with pytest.raises(FormatError, match="No such file"):
        reader.offsets(0)


def test_a_loader_can_be_sent_to_a_process_after_its_first_batch(pack_demo: Packer, encoder: ChatEncoder) -> None:
    data = PackedDataset(pack_demo().shards, encoder)
    distributor = MapDistributor(data)
    ids = [batch.ids for batch in DataflowLoader(distributor)]
    assert [batch.ids for batch in DataflowLoader(pickle.loads(pickle.dumps(distributor)))] == ids
