"""Packs of `pack --layout llava-onevision2` have the fields of its reader, and other content is rejected."""

import ast
import base64
import importlib.util
import json
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import yaml
from megatron.energon import DefaultTaskEncoder, Sample, SampleDecoder, WorkerConfig, get_loader, get_val_dataset
from PIL import Image

from energon_packed import (
    ChatEncoder,
    ConfigError,
    Conversation,
    MediaReference,
    Message,
    PackOptions,
    PackResult,
    get_packed_loader,
    pack,
)
from tests.internals import TIMESTAMPS_WRITTEN, PackedFolder, codec_for, load_image, make_nv_meta, verify
from tests.outside import read_packs
from tests.sources.tars import picture

KEYS = ["images", "prompts", "captions", "sample_count", "patch_positions", "timestamp_decimal"]
MODULE = "their_package.data"
LAYOUT = "llava-onevision2"
JPEG = "data:image/jpeg;base64," + base64.b64encode(picture(1)).decode()
BLEND = "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n    path: {}\n"


def turns(*texts: str) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def write_files(root: Path) -> None:
    for number, kind in enumerate(("JPEG", "PNG", "GIF", "WEBP")):
        (root / kind.lower()).write_bytes(picture(number, 56 + 28 * number, kind))
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.open(root / "jpeg").resize((28, 84)).save(root / "turned.jpg", exif=turned)
    np.save(root / "p.npy", np.add(np.indices((1, 4, 4)).reshape(3, -1).T, [7, 0, 0]))  # row by row, as its tools do


RECORDS: list[dict[str, Any]] = [
    *({"messages": turns(f"<image>\nWhat is {n}?", "A.", "And?", "No."), "images": [n]}
      for n in ("jpeg", "png", "gif", "webp", "turned.jpg")),
    {"messages": turns("<image> or <image>?", "Both."), "images": ["png", "jpeg"]},
    {"messages": turns("<image>\n<image>\nMoves?", "Yes."), "images": ["png", "png"], "fps": 2.0},
    {"messages": turns("Text.", "Only.")},
    {"messages": [{"role": "system", "content": "Be brief."}, *turns("<image>Which?", "This.")], "images": ["gif"]},
    {"messages": turns("At <image>", "p."), "images": ["jpeg"], "patch_positions": ["p.npy"], "timestamp_decimal": 2},
]  # fmt: skip
RECORDS = [{"id": f"r{i}", **record} for i, record in enumerate(RECORDS)]


@pytest.fixture(scope="module")
def vision_encoder(tokenizer_dir: Path) -> ChatEncoder:
    return ChatEncoder.from_pretrained(tokenizer_dir, image_processor="LlavaOnevision2Processor")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("source")
    write_files(root)
    (root / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    return root / "data.jsonl"


def packed(source: Path, out: Path, encoder: ChatEncoder, **options: Any) -> PackResult:
    settings: dict[str, Any] = {"seq_len": 512, "workers": 1, "shard_prefix": "x", "layout": LAYOUT}
    return pack(PackOptions(inputs=[source], output_dir=out, encoder=encoder, **{**settings, **options}))


@pytest.fixture(scope="module")
def written(source: Path, vision_encoder: ChatEncoder, tmp_path_factory: pytest.TempPathFactory) -> PackResult:
    return packed(source, tmp_path_factory.mktemp("written"), vision_encoder, dataset_module=MODULE)


def test_every_pack_has_the_fields_of_the_reader(written: PackResult, source: Path) -> None:
    records = {record["id"]: record for record in RECORDS}
    seen = set()
    for parts in read_packs(written.shards).values():
        value = parts["json"]
        assert list(value)[: len(KEYS)] == KEYS
        columns = [value[name] for name in KEYS if name != "sample_count"]
        assert [len(column) for column in columns] == [value["sample_count"]] * len(columns)
        for i, ident in enumerate(value["ids"]):
            record, names = records[ident], value["images"][i]
            seen.add(ident)
            assert names == [f"img{i}_{j}.jpg" for j in range(len(record.get("images", [])))]
            assert len(value["prompts"][i]) == len(value["captions"][i])
            for name, file in zip(names, record.get("images", []), strict=True):
                original = source.parent / file
                expected = load_image(MediaReference(path=str(original)))
                assert parts[name].startswith(b"\xff\xd8\xff")
                with Image.open(MediaReference(data=parts[name]).open()) as image:
                    assert image.format == "JPEG"
                    assert image.size == expected.size
                    difference = np.abs(np.asarray(image.convert("RGB"), int) - np.asarray(expected, int)).mean()
                assert difference < 4, file
                assert (parts[name] == original.read_bytes()) == (file == "jpeg")
            positions = [f"img{i}_{j}.npy" if "patch_positions" in record else "" for j in range(len(names))]
            assert value["patch_positions"][i] == positions
            assert all(parts[name] == (source.parent / "p.npy").read_bytes() for name in positions if name)
            assert value["timestamp_decimal"][i] == record.get("timestamp_decimal", 1)
            said = [turn["content"] for turn in record["messages"] if turn["role"] != "system"]
            system = "Be brief.\n\n" if record["messages"][0]["role"] == "system" else ""
            assert value["prompts"][i] == [system + said[0], *said[2::2]]
            assert value["captions"][i] == said[1::2]
    assert seen == set(records)
    assert written.manifest.notes == {"system prompt in the first prompt": 1, TIMESTAMPS_WRITTEN: 1}


def test_the_tars_are_the_same_with_any_workers(
    written: PackResult, source: Path, vision_encoder: ChatEncoder, tmp_path: Path
) -> None:
    again = packed(source, tmp_path / "again", vision_encoder, workers=3, max_packs_per_shard=1000)
    for tar in written.shards.glob("*.tar"):
        assert tar.read_bytes() == (again.shards / tar.name).read_bytes()


def test_keep_bytes_renames_and_converts_nothing(source: Path, vision_encoder: ChatEncoder, tmp_path: Path) -> None:
    result = packed(source, tmp_path / "kept", vision_encoder, keep_bytes=True)
    assert (result.shards / ".nv-meta" / ".info.yaml").is_file()  # the reader of the layout has Energon before 7
    records = {record["id"]: record for record in RECORDS}
    for parts in read_packs(result.shards).values():
        for ident, names in zip(parts["json"]["ids"], parts["json"]["images"], strict=True):
            files = [(source.parent / name).read_bytes() for name in records[ident].get("images", [])]
            assert [parts[name] for name in names] == files
            assert {name.rpartition(".")[2] for name in names} <= {"jpg"}


def their_package(monkeypatch: pytest.MonkeyPatch) -> type[Any]:
    """A package with a sample class of LLaVA-OneVision-2's fields."""
    from dataclasses import dataclass

    @dataclass
    class PackedCaptioningSample(Sample):
        images: Any
        prompts: Any
        captions: Any
        patch_positions: Any = None
        fps: Any = None
        timestamp_decimal: Any = None

    module = ModuleType(MODULE)
    PackedCaptioningSample.__module__ = MODULE
    module.PackedCaptioningSample = PackedCaptioningSample  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, MODULE.split(".")[0], ModuleType(MODULE.split(".")[0]))
    monkeypatch.setitem(sys.modules, MODULE, module)
    return PackedCaptioningSample


class Decoding(DefaultTaskEncoder):  # type: ignore[misc]
    decoder = SampleDecoder(image_decode="pil")


def loaded(folder: Path, task_encoder: Any, **options: Any) -> list[Any]:
    """Samples as plain Energon gives them."""

    def refuse(error: Exception, *rest: Any) -> None:
        raise error

    config = WorkerConfig(rank=0, world_size=1, num_workers=0, global_error_handler=refuse)
    settings = {"split_part": "train", "worker_config": config, "batch_size": None, "task_encoder": task_encoder}
    return list(get_loader(get_val_dataset(folder, **settings, **options)))


def test_the_written_loader_serves_another_package(written: PackResult, monkeypatch: pytest.MonkeyPatch) -> None:
    """Energon runs dataset.yaml and sample_loader.py as written, with its own decoder."""
    kind = their_package(monkeypatch)
    meta = written.shards / ".nv-meta"
    assert yaml.safe_load((meta / "dataset.yaml").read_text())["sample_type"] == {
        "__module__": MODULE,
        "__class__": "PackedCaptioningSample",
    }
    samples = loaded(written.shards, Decoding())
    assert len(samples) == written.manifest.packs
    packs = read_packs(written.shards)
    for sample in samples:
        assert isinstance(sample, kind)
        parts = packs[sample.__key__]
        value = parts["json"]
        for name in ("prompts", "captions", "timestamp_decimal"):
            assert getattr(sample, name) == value[name]
        assert sample.fps == value.get("fps")
        for images, names in zip(sample.images, value["images"], strict=True):
            sizes = [Image.open(MediaReference(data=parts[name]).open()).size for name in names]
            assert [image.size for image in images] == sizes
        for arrays, names in zip(sample.patch_positions, value["patch_positions"], strict=True):
            assert [array is not None for array in arrays] == [bool(name) for name in names]


def test_the_written_loader_is_self_contained_and_reads_bytes(written: PackResult, source: Path) -> None:
    file = written.shards / ".nv-meta" / "sample_loader.py"
    imported = {
        name
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }
    assert imported == {"io", "json", "numpy", "typing"}
    spec = importlib.util.spec_from_file_location("their_loader", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for key, parts in read_packs(written.shards).items():
        value = parts["json"]
        raw = {"__key__": key, "__restore_key__": (), **parts, "json": json.dumps(value).encode()}
        fields = module.sample_loader(raw)
        assert fields["images"] == [[parts[name] for name in names] for names in value["images"]]
        given = [array for arrays in fields["patch_positions"] for array in arrays if array is not None]
        assert [array.tolist() for array in given] == [np.load(source.parent / "p.npy").tolist()] * len(given)
        assert all(module.part_filter(part) for part in parts)


def test_loaders_of_this_package_read_the_layout(
    written: PackResult, vision_encoder: ChatEncoder, tmp_path: Path
) -> None:
    """By crude.yaml: the package that dataset.yaml names is not installed."""
    loader = get_packed_loader(written.shards, vision_encoder, epochs=1, num_workers=0)
    assert sum(batch.num_samples for batch in loader) == len(RECORDS)
    assert all(check.passed for check in verify(PackedFolder.open(written.shards), vision_encoder))
    blend = tmp_path / "blend.yaml"
    blend.write_text(BLEND.format(written.shards))
    options: dict[str, Any] = {"epochs": 1, "num_workers": 0}
    with pytest.raises(
        ConfigError, match=r"dataset\.yaml names their_package.*neither to energon-packed nor to Energon"
    ):
        get_packed_loader(blend, vision_encoder, **options)
    with pytest.raises(ConfigError, match=r"No module named 'their_package'\. A dataset\.yaml names that package"):
        get_packed_loader(blend, vision_encoder, trust_sample_loader=True, **options)
    blend.write_text(BLEND.format(written.shards) + "    dataset_config: crude.yaml\n")
    loader = get_packed_loader(blend, vision_encoder, epochs=1, num_workers=0)
    assert sum(batch.num_samples for batch in loader) == len(RECORDS)
    copy = tmp_path / "copy"
    shutil.copytree(written.shards, copy)
    names = ("dataset.yaml", "sample_loader.py", "crude.yaml", ".info.json", ".info.yaml")
    before = {name: (copy / ".nv-meta" / name).read_bytes() for name in names}
    assert yaml.safe_load(before[".info.yaml"]) == json.loads(before[".info.json"])
    (copy / ".nv-meta" / ".info.yaml").write_text("stale")
    make_nv_meta(copy)
    assert {name: (copy / ".nv-meta" / name).read_bytes() for name in names} == before


def test_an_empty_system_prompt_is_none() -> None:
    codec = codec_for("PackedCaptioningSample", LAYOUT)
    said = (Message("user", "p"), Message("assistant", "a"))
    fitted = codec.fitted(Conversation(id="a", messages=(Message("system", ""), *said)))
    assert (fitted.messages, fitted.notes) == (said, ())


@pytest.mark.parametrize(
    ("record", "reason", "message"),
    [
        ({"text": "A document."}, "missing_field", "this is a document"),
        ({"messages": turns("p", "a", "q")}, "bad_role", "the last prompt has no caption"),
        ({"messages": [*turns("p", "a", "q", "b")[:3], {"role": "assistant", "content": "b", "weight": 0}]},
         "unsupported_field", "a turn cannot have a weight"),
        ({"messages": [{"role": "tool", "content": "x"}, *turns("p", "a")]}, "bad_role", "turn 0 is tool"),
        ({"messages": turns("p", "a"), "chat_template_kwargs": {"x": 1}}, "unsupported_field",
         "has no chat_template_kwargs; omit `layout`"),
        ({"messages": turns("<image>p", "a"), "images": [{"path": JPEG, "max_pixels": 9000}]}, "unsupported_field",
         "has no settings of single images, such as max_pixels; omit `layout`"),
        ({"messages": turns("<image>p", "<bbox>"), "images": [JPEG], "objects": {"bbox": [[1, 2]]}},
         "unsupported_field", "has no objects with boxes; omit `layout`"),
    ],
)  # fmt: skip
def test_content_that_the_reader_would_lose_is_rejected(
    record: dict[str, Any], reason: str, message: str, encoder: ChatEncoder, tmp_path: Path
) -> None:
    source = tmp_path / "data.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in ({"messages": turns("p", "a")}, record)))
    result = packed(source, tmp_path / "out", encoder, max_reject_rate=1)
    assert result.manifest.rejects == {reason: 1}
    assert message in json.loads(result.rejects.read_text())["detail"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sample_class": "PackedTokensSample"}, "is a variant of PackedCaptioningSample"),
        ({"overlong": "truncate"}, "`overlong` must be 'drop' or 'error'"),
        ({"loss_on": "last"}, "`loss_on` must be 'assistant'"),
        ({"layout": None, "keep_bytes": True}, "`keep_bytes` needs a `layout`; use llava-onevision2"),
        ({"layout": None, "dataset_module": "a"}, "`dataset_module` needs a `layout`"),
        ({"dataset_module": "a; import os"}, "is not the name of a package"),
        ({"layout": "llava"}, "`layout` must be one of llava-onevision2, got 'llava'"),
    ],
)
def test_options_that_the_reader_ignores_are_refused(options: dict[str, Any], message: str, encoder: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        packed(Path("data.jsonl"), Path("out"), encoder, **options)
