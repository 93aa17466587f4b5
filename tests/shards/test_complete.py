"""A dataset with fewer shards, packs or bytes than any of its files declares is refused when it is opened."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from energon_packed import FormatError, PackedDataset, get_packed_loader
from tests.canary import copied, packed_texts

Change = Callable[[Path], object]


@pytest.fixture(scope="module")
def dataset(text_tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed_texts(tmp_path_factory.mktemp("complete"), text_tokenizer_dir, max_packs_per_shard=1)


def cut(name: str, *, by: int) -> Change:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-by])


def edited(name: str, change: Callable[[dict[str, Any]], object]) -> Change:
    """A YAML or JSON file of `.nv-meta` with other content."""

    def edit(folder: Path) -> None:
        file = folder / ".nv-meta" / name
        value = yaml.safe_load(file.read_text())
        change(value)
        file.write_text(json.dumps(value) if name.endswith("json") else yaml.safe_dump(value))

    return edit


REMEDY = "copy the complete folder again or pack it again"
CHANGES = {
    "tar": (cut("s-000001.tar", by=1024), r"s-000001\.tar has \d+ bytes, and \d+ by packing\.json; "),
    "no tar": (lambda folder: (folder / "s-000001.tar").unlink(), r"s-000001\.tar: No such file or directory; "),
    "idx": (
        cut("s-000000.tar.idx", by=8),
        r"s-000000\.tar\.idx has 8 bytes, and 16 by the 1 packs of \.info\.json; ",
    ),
    "split": (
        edited("split.yaml", lambda value: value["split_parts"]["train"].pop()),
        r"split\.yaml does not have s-\d+\.tar in split 'train', one of 1 shards that packing\.json lists there; ",
    ),
    "info": (
        edited(".info.json", lambda value: value["shard_counts"].update({"s-000001.tar": 0})),
        r"\.info\.json counts 0 packs in s-000001\.tar, packing\.json 1; ",
    ),
    "manifest": (
        edited("packing.json", lambda value: value["shards"][0].update(packs=2)),
        r"\.info\.json counts 1 packs in s-000000\.tar, packing\.json 2; ",
    ),
}


@pytest.mark.parametrize("load", [PackedDataset, get_packed_loader])
@pytest.mark.parametrize("name", CHANGES)
def test_a_shorter_dataset_is_refused(
    dataset: Path, tmp_path: Path, name: str, load: Callable[[Path], object]
) -> None:
    change, message = CHANGES[name]
    folder = copied(dataset, tmp_path / "out")
    load(folder)
    change(folder)
    with pytest.raises(FormatError, match=message + REMEDY):
        load(folder)


def test_a_shard_that_is_excluded_may_be_missing(dataset: Path, tmp_path: Path) -> None:
    folder = copied(dataset, tmp_path / "out")
    packs = len(PackedDataset(folder))
    edited("split.yaml", lambda value: value.update(exclude=["s-000001.tar"]))(folder)
    (folder / "s-000001.tar").unlink()
    assert len(PackedDataset(folder)) == packs - 1


def test_the_packs_of_an_earlier_info_file_are_compared(dataset: Path, tmp_path: Path) -> None:
    """Energon before version 7 writes `.info.yaml`, which is read if there is no `.info.json`."""
    folder = copied(dataset, tmp_path / "out")
    meta = folder / ".nv-meta"
    counts = json.loads((meta / ".info.json").read_text())["shard_counts"]
    earlier = yaml.safe_dump({"shard_counts": counts | {"s-000001.tar": 3}})
    (meta / ".info.yaml").write_text(earlier)
    PackedDataset(folder)
    (meta / ".info.json").unlink()
    with pytest.raises(FormatError, match=r"counts 3 packs in s-000001\.tar, packing\.json 1; "):
        PackedDataset(folder)
