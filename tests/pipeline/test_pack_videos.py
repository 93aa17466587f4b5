"""`pack` with video files: every stage keeps the frames that were selected, and the bytes depend on nothing else."""

import base64
import json
import os
import re
import shutil
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from megatron.energon import WorkerConfig, get_loader, get_train_dataset

from energon_packed import (
    ChatEncoder,
    ConfigError,
    DataChangedError,
    EncodedSample,
    PackedDataset,
    PackingManifest,
    PackOptions,
    PackResult,
    get_packed_loader,
    materialize,
    pack,
    verify,
)
from tests.conftest import FLAVORS
from tests.internals import ShardReader, codec_of, complete_parts, main, sniff_extension, write_dataset, write_tokenizer
from tests.pipeline.undisturbed import contents
from tests.processes import energon
from tests.videos import make_video

FIXED = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw", "second_per_grid_ts")


class Data:
    """30 records of the demo, 9 of them with generated videos, beside 4 that must be rejected."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        demo = write_dataset(folder / "data", records=34, broken=4, videos=True)
        self.jsonl, self.tokenizer = demo.jsonl, write_tokenizer(folder / "tokenizer", demo.texts, videos=True)
        self.encoder = ChatEncoder.from_pretrained(self.tokenizer)
        self._packed: dict[str, PackResult] = {}

    def options(self, output_dir: Path, **changes: Any) -> dict[str, Any]:
        settings = {"seq_len": 1024, "workers": 1, "shard_prefix": "v", "max_reject_rate": 1, "max_packs_per_shard": 2}
        return {"tokenizer": self.tokenizer, "output_dir": output_dir, **settings, **changes}

    def packed(self, **changes: Any) -> PackResult:
        """Pack once for each combination of options."""
        name = f"out-{len(self._packed)}"
        key = json.dumps(changes, sort_keys=True, default=str)
        if key not in self._packed:
            self._packed[key] = pack(self.jsonl, **self.options(self.folder / name, **changes))
        return self._packed[key]


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    return Data(tmp_path_factory.mktemp("pack-videos"))


def tars(result: PackResult) -> dict[str, bytes]:
    return {tar.name: tar.read_bytes() for tar in sorted(result.shards.glob("*.tar"))}


def stored(result: PackResult) -> list[Any]:
    """All stored samples."""
    reader = ShardReader(sorted(result.shards.glob("*.tar")))
    raws = [complete_parts(reader[index]) for index in range(len(reader))]
    return [sample for raw in raws for sample in codec_of(raw).read(raw)]


def records(data: Data) -> dict[str, dict[str, Any]]:
    found = {}
    for line in data.jsonl.read_text().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        found[record.get("id")] = record
    return found


def equal(left: EncodedSample, right: EncodedSample) -> bool:
    """Whether tokens, labels, positions and pixels are equal."""
    names = ("input_ids", "labels", "position_ids", *FIXED)
    return all(_same(getattr(left, name), getattr(right, name)) for name in names)


def _same(left: Any, right: Any) -> bool:
    if left is None or right is None:
        return left is right
    return np.array_equal(np.asarray(left), np.asarray(right))


def test_the_manifest_and_the_reports_count_videos_and_frames(data: Data) -> None:
    result = data.packed()
    manifest = result.manifest
    samples = stored(result)
    frames = [video.frames for sample in samples for video in sample.videos]
    assert (manifest.videos, manifest.frames) == (len(frames), sum(len(f.indices) for f in frames))
    assert manifest.videos >= 9
    assert manifest.format_version == 4
    table = pq.read_table(result.lengths)
    by_id = {sample.conversation.id: len(sample.videos) for sample in samples}
    assert {row["id"]: row["num_videos"] for row in table.to_pylist() if row["status"] == "packed"} == by_id
    assert {row["reason"] for row in map(json.loads, result.rejects.read_text().splitlines())} >= {"missing_video"}


def test_data_without_videos_has_no_trace_of_them(data: Data, tmp_path: Path) -> None:
    lines = [json.dumps(record) for record in records(data).values() if "video" not in json.dumps(record)]
    file = data.jsonl.with_name("images.jsonl")
    file.write_text("\n".join(lines))
    result = pack(file, **data.options(tmp_path / "out"))
    text = (result.shards / ".nv-meta" / "packing.json").read_text()
    assert (result.manifest.packed > 10, result.manifest.format_version) == (True, 1)
    assert not re.search(r'"(videos|frames|extract_frames)"', text)
    assert pq.read_table(result.lengths).column_names == ["source", "row", "id", "length", "num_images", "status"]
    assert not list(tmp_path.rglob("*.frames"))
    (chunk,) = tmp_path.glob("out/.work/measure-*/*.arrow")
    assert not [name for name in pa.ipc.open_file(chunk).schema.names if "video" in name or "frame" in name]


@pytest.mark.parametrize("flavor", FLAVORS)
def test_loaders_decode_the_frames_that_were_measured(data: Data, flavor: str) -> None:
    result = data.packed(sample_class=flavor, unpacked=flavor == "MultiMixQASample")
    expected = {}
    for line in data.jsonl.read_text().splitlines():
        with_file = re.sub(r'"(?=[^"]+\.(?:mp4|mkv|webm|avi|ts|mov|png|jpg|webp|bmp)")', f'"{data.jsonl.parent}/', line)
        try:
            record = json.loads(with_file)
        except ValueError:
            continue
        expected[record.get("id")] = record
    dataset = PackedDataset(result.shards, data.encoder)
    samples = [sample for index in range(len(dataset)) for sample in dataset[index]]
    assert sum(sample.pixel_values_videos is not None for sample in samples) >= 9
    for sample in samples:
        alone = data.encoder.encode(data.encoder.conversation(expected[sample.id]))  # type: ignore[attr-defined]
        assert equal(sample, alone), sample.id
    loader = get_packed_loader(result.shards, data.encoder, epochs=1, num_workers=0, even_ranks="off")
    by_id = {sample.id: sample for sample in samples}
    read = []
    for batch in loader:
        for sample, ident in zip(batch.split(), batch.ids, strict=True):
            read.append(ident)
            assert torch.equal(sample.input_ids[0], torch.from_numpy(by_id[ident].input_ids))
            assert _same(sample.pixel_values_videos, by_id[ident].pixel_values_videos), ident
    assert sorted(read) == sorted(by_id)
