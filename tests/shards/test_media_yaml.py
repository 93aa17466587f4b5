"""media.yaml: Energon's own loaders read referenced media, by the cooker on the page Media locations."""

import base64
import json
import shutil
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from megatron.energon import SavableDataLoader, WorkerConfig, get_loader, get_val_dataset
from megatron.energon.errors import FatalSampleError

from energon_packed import (
    ChatEncoder,
    ConfigError,
    DataChangedError,
    PackedDataset,
    PackResult,
    PaddingFreeCollator,
    get_packed_loader,
    pack,
)
from tests.conftest import FLAVORS
from tests.docs.pages import code_block
from tests.internals import ShardReader, complete_parts, make_nv_meta
from tests.processes import energon
from tests.sources.tars import picture, write_tar

CASES = [*((flavor, "files") for flavor in FLAVORS), (FLAVORS[0], "tars"), (FLAVORS[2], "base64")]
CASES += [(FLAVORS[3], "prepared")]


@pytest.fixture(scope="module")
def cooker() -> Iterator[ModuleType]:
    """The module of the page."""
    sys.modules["cooker"] = module = ModuleType("cooker")
    exec(code_block("media.md", "cooker.py"), module.__dict__)
    yield module
    del sys.modules["cooker"]


def packed(folder: Path, tokenizer: Path, source: str, **options: Any) -> PackResult:
    """Records with an image each, as files, in two folders with tars of equal names and members, or in JSON."""
    images = [(kind, picture(i, 40, format)) for i in range(6) for kind, format in KINDS]
    data = folder / "data"
    if source == "base64":
        data.mkdir()
        urls = [f"data:image/{kind};base64,{base64.b64encode(image).decode()}" for kind, image in images]
        inputs = [data / "data.jsonl"]
        inputs[0].write_text("\n".join(json.dumps({"images": [url], **_record(i)}) for i, url in enumerate(urls)))
    elif source == "files":
        data.mkdir()
        for i, (kind, image) in enumerate(images):
            (data / f"{i}.{kind}").write_bytes(image)
        records = [{"images": [f"{i}.{kind}"], **_record(i)} for i, (kind, _) in enumerate(images)]
        inputs = [data / "data.jsonl"]
        inputs[0].write_text("\n".join(map(json.dumps, records)))
    else:
        inputs = []
        for part in range(2):
            (data / f"part{part}").mkdir(parents=True, exist_ok=True)
            members: list[tuple[str, Any]] = []
            for i, (kind, image) in enumerate(images[part::2]):
                members += [(f"a/{i}.{kind}", image), (f"a/{i}.json", _record(i))]
            inputs.append(write_tar(data / f"part{part}" / "shard.tar", members))
            if source == "prepared" and part == 0:
                flags = ("--non-interactive", "--num-workers", "1", "--split-ratio", "1,0,0")
                done = energon("prepare", *flags, inputs[-1].parent)
                assert done.returncode == 0, done.stderr
    before = _listing(data)
    settings: dict[str, Any] = {
        "output_dir": folder / "out",
        "seq_len": 64,
        "tokenizer": tokenizer,
        "workers": 1,
        "shard_prefix": "p",
    }
    result = pack(inputs, **{**settings, "media": "reference", **options})
    assert _listing(data) == before
    return result


KINDS = (("jpg", "JPEG"), ("png", "PNG"))


def _record(i: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"<image>what {i}"}, {"role": "assistant", "content": "noise"}]}


def _listing(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def read(path: Path, encoder: Any) -> dict[str, Any]:
    """Samples of Energon's loader by key."""
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    dataset = get_val_dataset(path, split_part="train", worker_config=config, batch_size=None, task_encoder=encoder)
    loader: SavableDataLoader[Any] = get_loader(dataset)
    return {sample.__key__: sample for sample in loader}


@pytest.mark.parametrize(("flavor", "source"), CASES)
def test_the_cooker_of_the_page_reads_the_images_of_every_pack(
    cooker: ModuleType, tmp_path: Path, tokenizer_dir: Path, flavor: str, source: str
) -> None:
    unpacked = flavor == "MultiMixQASample"
    result = packed(tmp_path, tokenizer_dir, source, sample_class=flavor, unpacked=unpacked)
    reader = ShardReader(sorted(result.shards.glob("*.tar")))
    expected = [complete_parts(reader[pack]) for pack in range(len(reader))]
    stored = read(tmp_path / "out" / "media.yaml", cooker.Encoder())
    assert result.manifest.images == 12
    for parts in expected:
        images = {name: content for name, content in parts.items() if name.startswith("img")}
        assert stored[parts["__key__"]].media == images
    assert len(stored) == len(expected)


def test_a_rewritten_tar_is_an_error_of_the_cooker_and_of_our_loader(
    cooker: ModuleType, tmp_path: Path, tokenizer_dir: Path, encoder: ChatEncoder
) -> None:
    packed(tmp_path, tokenizer_dir, "tars")
    metadataset = tmp_path / "out" / "media.yaml"
    assert read(metadataset, cooker.Encoder())
    for tar in tmp_path.glob("data/*/shard.tar"):
        content, image = tar.read_bytes(), picture(0)
        tar.write_bytes(content.replace(image, picture(9)[: len(image)].ljust(len(image), b"\0")))
    with pytest.raises(FatalSampleError, match=r"shard\.tar changed"):
        read(metadataset, cooker.Encoder())
    with pytest.raises((DataChangedError, FatalSampleError), match="other bytes"):
        list(get_packed_loader(metadataset, encoder, epochs=1, shuffle=False, num_workers=0))


def test_our_loaders_read_media_yaml_as_the_dataset_folder(
    tmp_path: Path, tokenizer_dir: Path, encoder: ChatEncoder
) -> None:
    out = packed(tmp_path, tokenizer_dir, "tars").shards.parent
    for open_path in (
        lambda path: get_packed_loader(path, encoder, epochs=1, shuffle=False, num_workers=0),
        lambda path: [PaddingFreeCollator()(row) for row in PackedDataset(path, encoder)],
    ):
        batches, expected = [
            [(batch.ids, batch.input_ids.tolist(), batch.pixel_values.sum()) for batch in open_path(path)]
            for path in (out / "media.yaml", out)
        ]
        assert batches == expected
        assert sum(len(ids) for ids, *_ in batches) == 12


def test_media_yaml_and_its_index_are_equal_after_a_repair_and_gone_after_a_copy(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    options = {"max_packs_per_shard": 1, "split": {"train": 0.5, "val": 0.5}}
    shards = packed(tmp_path, tokenizer_dir, "tars", **options).shards
    files = [shards.parent / "media.yaml", *sorted((shards.parent / "media-index" / ".nv-meta").iterdir())]
    assert [file.name for file in files] == ["media.yaml", ".info.json", "index.sqlite"]
    assert list(yaml.safe_load(files[0].read_text())["splits"]) == ["train", "val"]
    before = [file.read_bytes() for file in files]
    shutil.rmtree(files[1].parent)
    make_nv_meta(shards)
    assert [file.read_bytes() for file in files] == before
    packed(tmp_path, tokenizer_dir, "tars", media="copy", overwrite=True, **options)
    assert not any(file.exists() for file in files)
    files[0].write_text("mine: true\n")
    (tmp_path / "data" / "part0" / "shard.tar").unlink()
    pack(
        tmp_path / "data" / "part1" / "shard.tar",
        output_dir=shards.parent,
        tokenizer=tokenizer_dir,
        seq_len=64,
        workers=1,
        overwrite=True,
    )
    assert files[0].read_text() == "mine: true\n"


def test_a_media_yaml_and_a_media_index_of_the_user_stay(tmp_path: Path, tokenizer_dir: Path) -> None:
    out = tmp_path / "packed"
    (out / "media-index").mkdir(parents=True)
    (out / "media-index" / "mine.txt").write_text("mine")
    (out / "media.yaml").write_text("# my blend")
    with pytest.raises(ConfigError, match=r"media\.yaml is not a file of energon-packed"):
        packed(tmp_path, tokenizer_dir, "files", output_dir=out)
    (out / "media.yaml").unlink()
    shutil.rmtree(tmp_path / "data")
    packed(tmp_path, tokenizer_dir, "files", output_dir=out)
    assert (out / "media-index" / "mine.txt").read_text() == "mine"


def test_tars_inside_the_output_folder_have_relative_paths(
    cooker: ModuleType, tmp_path: Path, tokenizer_dir: Path
) -> None:
    packed(tmp_path, tokenizer_dir, "tars", output_dir=tmp_path)
    tars = json.loads((tmp_path / "media-index" / ".nv-meta" / ".info.json").read_text())["shard_counts"]
    assert sorted(tars) == ["../data/part0/shard.tar", "../data/part1/shard.tar"]
    moved = tmp_path.rename(tmp_path.with_name(f"{tmp_path.name}-moved"))
    assert read(moved / "media.yaml", cooker.Encoder())


def test_a_member_that_is_packed_twice_has_one_entry(tmp_path: Path, tokenizer_dir: Path) -> None:
    packed(tmp_path, tokenizer_dir, "tars")
    sources = [{"path": str(tmp_path / "data" / "part0" / "shard.tar"), "weight": 2}]
    settings = {"output_dir": tmp_path / "twice", "seq_len": 64, "tokenizer": tokenizer_dir, "workers": 1}
    assert pack([], sources=sources, media="reference", **settings).manifest.images == 12
    index = tmp_path / "twice" / "media-index" / ".nv-meta" / "index.sqlite"
    tables = ("samples", "sample_parts")
    with closing(sqlite3.connect(index)) as connection:
        counts = [connection.execute(f"SELECT count(*) FROM {name}").fetchone() for name in tables]
    assert counts == [(6,), (6,)]
