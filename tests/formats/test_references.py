"""Packs with references to media: read as copied packs; a changed file is an error."""

import shutil
from pathlib import Path

import pytest

from energon_packed import DataChangedError
from tests.conftest import Packer
from tests.internals import DemoDataset, ShardReader, complete_parts


def _packs(folder: Path) -> list[dict[str, object]]:
    reader = ShardReader(sorted((folder / "webdataset").glob("*.tar")))
    packs = [complete_parts(reader[pack]) for pack in range(len(reader))]
    return [
        {name: part for name, part in pack.items() if name not in ("__folder__", "__media_root__")} for pack in packs
    ]


@pytest.mark.parametrize("check", ["digest", "time"])
@pytest.mark.parametrize("sample_class", ["PackedCaptioningSample", "PackedMultiMixQASample", "PackedTokensSample"])
def test_referenced_packs_have_the_parts_of_copied_packs_in_their_order(
    pack_demo: Packer, sample_class: str, check: str
) -> None:
    copied = pack_demo(sample_class=sample_class, shard_prefix="d")
    referenced = pack_demo(sample_class=sample_class, shard_prefix="d", media="reference", media_check=check)
    expected, actual = _packs(copied.shards.parent), _packs(referenced.shards.parent)
    assert [list(pack.items()) for pack in actual] == [list(pack.items()) for pack in expected]
    assert referenced.bytes < copied.bytes / 5
    assert referenced.manifest.fingerprint == copied.manifest.fingerprint
    assert (referenced.seconds.get("digest", 0) > 0) == (check == "digest")
    assert "digest" not in copied.seconds


def test_a_changed_file_is_an_error_that_names_pack_sample_and_file(
    pack_demo: Packer, demo: DemoDataset, tmp_path: Path
) -> None:
    images = tmp_path / "images"
    shutil.copytree(demo.jsonl.parent / "images", images)
    shutil.copy(demo.jsonl, tmp_path / "data.jsonl")
    result = pack_demo(inputs=[tmp_path / "data.jsonl"], media="reference")
    for image in images.iterdir():
        image.write_bytes(image.read_bytes()[::-1])
    reader = ShardReader(sorted(result.shards.glob("*.tar")))
    with pytest.raises(DataChangedError, match=r"img\d+_0\.\w+, an image of sample \d+, is not .*has other bytes"):
        complete_parts(reader[0])
