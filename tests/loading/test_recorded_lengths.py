"""Sizes of packs from lengths.parquet: those of the tars, unless the file or a tar was changed."""

import json
import os
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from energon_packed import BalancedSampler, ChatEncoder, PackedDataset, pack
from tests.conftest import Packer
from tests.internals import arrays, files, folder_packs
from tests.pipeline.test_planning import Characters
from tests.processes import run_python

Table = Callable[[pa.Table], pa.Table]


def packed(folder: Path, **options: Any) -> Path:
    """Documents of up to 28 words in rows of 100 characters; return the shards."""
    lines = [json.dumps({"text": "word " * count}) for count in np.random.default_rng(0).integers(0, 28, 90).tolist()]
    (folder / "data.jsonl").write_text("\n".join([*lines[:5], "no JSON", *lines[5:]]) + "\n")
    values = {"encoder": Characters(), "seq_len": 100, "max_packs_per_shard": 5, "max_reject_rate": 1.0, **options}
    return pack(folder / "data.jsonl", output_dir=folder / "out", workers=1, **values).shards


def sizes(shards: Path, encoder: Any = None, **options: Any) -> list[list[float]]:
    dataset = PackedDataset(shards, encoder or Characters(), **options)
    columns: list[list[float]] = dataset.row_sizes().columns().tolist()
    assert dataset.lengths.tolist() == [sum(map(len, dataset[row])) for row in range(len(dataset))]
    return columns


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The packs whose lengths were read from a tar."""
    packs: list[int] = []
    original = folder_packs.FolderPacks.sample_lengths

    def sample_lengths(self: Any, pack: int) -> list[int]:
        packs.append(pack)
        return original(self, pack)

    monkeypatch.setattr(folder_packs.FolderPacks, "sample_lengths", sample_lengths)
    return packs


@pytest.mark.parametrize(
    "options",
    [
        {"sample_class": "PackedTokensSample"},
        {"sample_class": "PackedTokensSample", "overlong": "split"},
        {"overlong": "truncate", "pad_multiple": 8},
        {"unpacked": True},
        {"split": {"train": 0.6, "val": 0.4}, "algorithm": "sequential"},
    ],
    ids=str,
)
def test_sizes_are_those_of_the_tars(tmp_path: Path, read: list[int], options: dict[str, Any]) -> None:
    shards = packed(tmp_path, **options)
    for split in options.get("split", ["train"]):
        found = sizes(shards, split=split)
        assert not read
        assert len(found) > 8
        # Without lengths.parquet, which training does not need.
        copy = shutil.copytree(shards, tmp_path / split / "webdataset")
        assert sizes(copy, split=split) == found
        assert len(read) == 2 * len(found)  # for the sizes, and for `lengths`
        read.clear()


def test_media_are_counted(pack_demo: Packer, encoder: ChatEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """With images of one pack, the others count with the mean of their number of images, which no tar is read for."""
    shards = pack_demo().shards
    exact = PackedDataset(shards, encoder).row_sizes()
    monkeypatch.setattr(folder_packs, "_MAX_WITH_MEDIA", 3)
    packs = PackedDataset(shards, encoder)
    found, folder = packs.row_sizes(), packs._folders[0]
    media = [folder.num_media(pack) for pack in range(len(packs))]
    assert (found.patches > 0).tolist() == (exact.patches > 0).tolist() == [count > 0 for count in media]
    is_exact = found.patches == exact.patches
    assert is_exact[exact.patches > 0].sum() >= 3
    mean = found.patches[~is_exact] / np.array(media)[~is_exact]
    assert np.allclose(mean, mean.mean(), rtol=0.01)
    monkeypatch.setattr(folder_packs.FolderPacks, "num_media", None)
    assert PackedDataset(shards, encoder).row_sizes().patches.tolist() == found.patches.tolist()


def with_value(name: str, value: Any) -> Table:
    """Replace the value of the first record that was packed."""

    def changed(table: pa.Table) -> pa.Table:
        values = table[name].to_pylist()
        values[first(table)] = value
        return table.set_column(table.schema.names.index(name), name, pa.array(values))

    return changed


def first(table: pa.Table) -> int:
    return next(place for place, key in enumerate(table["pack"].to_pylist()) if key is not None)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda table: table.slice(first(table) + 1), id="records are missing"),
        pytest.param(with_value("length", 1), id="another length"),
        pytest.param(with_value("length", None), id="no length"),
        pytest.param(with_value("pack", "out_00009999"), id="an unknown pack"),
        pytest.param(with_value("pack", "other_00000001"), id="another key"),
        pytest.param(with_value("pack", "another dataset"), id="not a key"),
        pytest.param(lambda table: table.drop_columns("pack"), id="no packs"),
        pytest.param(lambda table: table.replace_schema_metadata({"fingerprint": "0"}), id="another run"),
        pytest.param(lambda table: table.replace_schema_metadata(), id="no fingerprint"),
    ],
)
def test_other_tables_are_not_used(tmp_path: Path, read: list[int], change: Table) -> None:
    shards = packed(tmp_path)
    expected = sizes(shards)
    file = shards.parent / "lengths.parquet"
    pq.write_table(change(pq.read_table(file)), file)
    assert not read
    assert sizes(shards) == expected
    assert len(read) == 2 * len(expected)


def test_damaged_files_and_other_tars_are_not_used(tmp_path: Path, read: list[int]) -> None:
    shards = packed(tmp_path)
    expected = sizes(shards)
    file, manifest = shards.parent / "lengths.parquet", shards / ".nv-meta" / "packing.json"
    content, recorded = file.read_bytes(), json.loads(manifest.read_text())
    file.write_bytes(content[:-20])
    assert sizes(shards) == expected
    file.write_bytes(content)
    for change in ({"tokens": 1}, {"name": "other.tar", "split": "val"}, {"samples": 1}):
        read.clear()
        manifest.write_text(
            json.dumps({**recorded, "shards": [{**recorded["shards"][0], **change}, *recorded["shards"][1:]]})
        )
        assert sizes(shards) == expected
        assert len(read) == 2 * len(expected), change
    manifest.unlink()  # a dataset of another packer
    assert sizes(shards) == expected


def test_memory_does_not_grow_with_the_packs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packs of a sample each; their tar and its index are holes, of which only the sizes are read."""
    shards = packed(tmp_path, max_samples_per_pack=1, max_packs_per_shard=1000)
    for module, name, size in ((files, "_IN_MEMORY", 1), (arrays, "BLOCK", 1 << 12)):
        monkeypatch.setattr(module, name, size)
    [tar], nv_meta = shards.glob("*.tar"), shards / ".nv-meta"
    recorded, info = (json.loads((nv_meta / name).read_text()) for name in ("packing.json", ".info.json"))
    peaks = []
    for count in (50_000, 50_000, 150_000):
        os.truncate(tar.with_suffix(".tar.idx"), 8 * (count + 1))
        shard = {**recorded["shards"][0], "packs": count, "samples": count, "tokens": 7 * count}
        (nv_meta / "packing.json").write_text(json.dumps({**recorded, "packs": count, "shards": [shard]}))
        (nv_meta / ".info.json").write_text(json.dumps({**info, "shard_counts": {tar.name: count}}))
        keys = [f"out_{number:08d}" for number in range(count)]
        table = {"pack": keys, "length": pa.array([7] * count, pa.int32()), "num_images": [0] * count}
        metadata = {"fingerprint": recorded["fingerprint"]}
        pq.write_table(pa.table(table, metadata=metadata), shards.parent / "lengths.parquet", row_group_size=10_000)
        del keys, table
        tracemalloc.start()
        try:
            next(iter(BalancedSampler(PackedDataset(shards, Characters()), 8, 0)))
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert peaks[2] - peaks[1] < 50_000


_ROWS_OF_A_BLEND = """
import os, resource, sys
from energon_packed import PackedDataset
from tests.internals import files
from tests.pipeline.test_planning import Characters

files._IN_MEMORY = 1
data = PackedDataset(sys.argv[1], Characters())
used = len(os.listdir("/proc/self/fd"))
resource.setrlimit(resource.RLIMIT_NOFILE, (used + 30, used + 30))
print(int(data.lengths.sum()), int(data.row_sizes().tokens.sum()))
"""


def test_descriptors_do_not_grow_with_the_datasets(tmp_path: Path) -> None:
    """Arrays of all packs are in files, of which a process may open few."""
    shards = packed(tmp_path)
    tokens = int(PackedDataset(shards, Characters()).lengths.sum())
    blend = [{"path": f"copy-{number}/webdataset", "repetitions": 1} for number in range(40)]
    for member in blend:
        copy = tmp_path / str(member["path"])
        shutil.copytree(shards.parent, copy.parent, copy_function=os.link, ignore=shutil.ignore_patterns(".work"))
    recipe = {"__module__": "megatron.energon", "__class__": "MetadatasetV2"}
    file = tmp_path / "blend.yaml"
    file.write_text(json.dumps(recipe | {"splits": {"train": {"blend_epochized": blend}}}))
    done = run_python(_ROWS_OF_A_BLEND, file)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{40 * tokens} {40 * tokens}\n", "")
