"""Packs of text alone, which a tiny text model trains on."""

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Packer
from tests.internals import DemoDataset, make_blend, write_metadataset


@pytest.fixture(scope="session")
def text_packs(demo: DemoDataset, text_tokenizer_dir: Path, pack_demo: Packer, tmp_path_factory: Any) -> list[Path]:
    """Two folders of tokenized text, in train and val, with other keys, and their blend."""
    folder = tmp_path_factory.mktemp("text")
    lines = [line for line in demo.jsonl.read_bytes().splitlines() if b"image" not in line]
    packed = []
    for prefix, part in (("a", lines), ("b", lines[: len(lines) // 2])):
        (folder / f"{prefix}.jsonl").write_bytes(b"\n".join(part))
        options: dict[str, Any] = {"seq_len": 384, "sample_class": "PackedTokensSample", "shard_prefix": prefix}
        options |= {"tokenizer": text_tokenizer_dir, "split": {"train": 0.6, "val": 0.4}}
        packed.append(pack_demo(inputs=(str(folder / f"{prefix}.jsonl"),), **options).shards)
    blend = folder / "blend.yaml"
    write_metadataset(make_blend([(packed[0], 3), (packed[1], 1)]), blend)
    return [*packed, blend]


@pytest.fixture(scope="session")
def image_packs(demo: DemoDataset, pack_demo: Packer, tmp_path_factory: Any) -> Path:
    """A few packs with images, encoded while training."""
    folder = tmp_path_factory.mktemp("images")
    lines = [line for line in demo.jsonl.read_bytes().splitlines() if b"image" in line]
    (folder / "few.jsonl").write_bytes(b"\n".join(lines[:18]))
    return pack_demo(inputs=(str(folder / "few.jsonl"),), image_root=demo.jsonl.parent, seq_len=320).shards


@pytest.fixture(scope="session")
def short_packs(demo: DemoDataset, text_tokenizer_dir: Path, pack_demo: Packer, tmp_path_factory: Any) -> Path:
    """Tokenized text in rows so short that 2 ranks have 4 micro batches in an epoch."""
    data = tmp_path_factory.mktemp("short") / "text.jsonl"
    data.write_bytes(b"\n".join(line for line in demo.jsonl.read_bytes().splitlines() if b"image" not in line))
    options: dict[str, Any] = {"tokenizer": text_tokenizer_dir, "sample_class": "PackedTokensSample"}
    return pack_demo(inputs=(str(data),), seq_len=256, **options).shards
