"""Packs with references to media: read as copied packs; a changed file is an error."""

import copy
import io
import itertools
import json
import os
import random
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from energon_packed import DataChangedError, FormatError, pack
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
    with pytest.raises(DataChangedError, match=r"img\d+_0\.\w+, an image of sample \d+ \(demo-\d+\), .*has other"):
        complete_parts(reader[0])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, text_tokenizer_dir: Path) -> Path:
    """A pack with references to images in `img`, `img/deep` and `img2`."""
    root = tmp_path_factory.mktemp("folders")
    images = [root / name for name in ("img/a.png", "img/deep/b.png", "img2/c.png", "img/d.png")]
    for number, path in enumerate(images):
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (28, 28), (number, 0, 0)).save(path)
    turns = [{"role": "user", "content": "<image>"}, {"role": "assistant", "content": "A color."}]
    records = [{"images": [str(path)], "messages": turns} for path in images]
    (root / "d.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    options: dict[str, Any] = {"tokenizer": text_tokenizer_dir, "image_processor": "Qwen2_5_VLProcessor", "workers": 1}
    pack(root / "d.jsonl", output_dir=root / "out", seq_len=512, media="reference", **options)
    return root


def _reader(folder: Path, media_root: dict[str, str] | None = None) -> ShardReader:
    return ShardReader(sorted((folder / "out" / "webdataset").glob("*.tar")), media_root=media_root)


def _colors(folder: Path, media_root: dict[str, str]) -> set[int]:
    """Red of each image of the pack in `folder`, read with moved folders."""
    parts = complete_parts(_reader(folder, media_root)[0])
    images = [content for name, content in parts.items() if name.startswith("img")]
    return {Image.open(io.BytesIO(content)).getpixel((0, 0))[0] for content in images}  # type: ignore[index]


@pytest.mark.parametrize("slash", ["", "/"])
def test_each_file_moves_with_the_innermost_folder_that_contains_it(folders: Path, tmp_path: Path, slash: str) -> None:
    root = tmp_path / "root"
    shutil.copytree(folders / "out", root / "out")
    moved = {"img": "moved", "img/deep": "x/other"}
    for number, target in enumerate(("moved/a.png", "x/other/b.png", "", "x/single.png")):
        if target:
            (root / target).parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (28, 28), (number, 0, 0)).save(root / target)
    pairs = [(f"{folders / old}{slash}", f"{root / new}{slash}") for old, new in moved.items()]
    pairs.append((str(folders / "img/d.png"), str(root / "x/single.png")))
    for order in itertools.permutations(pairs):
        assert _colors(root, dict(order)) == {0, 1, 2, 3}
    # `img2` is another folder than `img`: its image stays where it is. Nothing else is read from the old folders.
    with pytest.raises(DataChangedError, match=rf"{root / 'moved/deep/b.png'} does not exist"):
        _colors(root, dict([pairs[0], pairs[2]]))


def test_the_size_of_a_locator_has_a_limit(folders: Path) -> None:
    raw = dict(_reader(folders)[0])
    located = json.loads(raw["media.json"])
    name = next(name for name, locator in located.items() if locator)
    limit = 1 << 30
    for size, offset, error, message in (
        (limit, 0, DataChangedError, "ends before byte 1073741824"),
        (limit + 1, 0, FormatError, "a file has 1073741825 bytes from byte 0"),
        (0, (1 << 63) - 1, DataChangedError, "is not the packed image"),
        (1, (1 << 63) - 1, FormatError, "a file has 1 bytes from byte"),
        (-1, 0, FormatError, "a file has -1 bytes"),
        (1, -1, FormatError, "a file has 1 bytes from byte -1"),
    ):
        changed = located | {name: located[name] | {"size": size, "offset": offset}}
        with pytest.raises(error, match=message):
            complete_parts(raw | {"media.json": json.dumps(changed).encode()})


_FUZZ = int(os.environ.get("ENERGON_PACKED_FUZZ", "400"))
_VALUES: tuple[object, ...] = (
    None, True, False, 0, 1, -1, 1.5, 1e300, 2**31, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1, "", "x", "0" * 32, "\0",
    "a\0b", "/", ".", "..", "/dev/zero", "/dev/stdin", "/proc/self/mem", "/proc/kmsg", "FIFO", "é" * 5000, [], [1, 2],
    [0, 0], [True, 1], ["a", "b"], {}, {"a": 1}, [[]] * 100, {"file": "x", "offset": 0, "size": 1}, "../" * 50 + "etc",
)  # fmt: skip


def _mutated(rng: random.Random, content: bytes, fifo: Path) -> bytes:
    """Return a damaged media.json: other values, keys and types, or other bytes."""
    if rng.random() < 0.2:
        damaged = bytearray(content)
        damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        return bytes(damaged[: rng.choice([len(damaged), rng.randrange(len(damaged))])])
    located = json.loads(content)
    for _ in range(rng.randint(1, 3)):
        value = copy.deepcopy(rng.choice(_VALUES))  # a later round may change it
        value = str(fifo) if value == "FIFO" else value
        name = rng.choice(list(located))
        kind = rng.randrange(5)
        if kind == 0:
            located[name] = value
        elif kind == 1 and rng.random() < 0.2:
            return json.dumps(value).encode()
        elif kind == 2:
            located[rng.choice(["json", "__key__", "__media_root__", "", "media.json", "img9_9.jpg"])] = located[name]
        elif isinstance(located[name], dict):
            keys = ["file", "offset", "size", "digest", "changed", "source", "member", "unknown"]
            located[name][rng.choice(keys)] = value
    return json.dumps(located).encode()


@pytest.mark.parametrize("check", ["digest", "time"])
def test_a_damaged_media_json_is_one_line_and_allocates_no_memory(
    pack_demo: Packer, tmp_path: Path, check: str
) -> None:
    folder = pack_demo(shard_prefix="d", media="reference", media_check=check).shards
    raw = ShardReader(sorted(folder.glob("*.tar")))[0]
    expected, fifo = complete_parts(raw), tmp_path / "fifo"
    os.mkfifo(fifo)
    rng = random.Random(5)
    refused = 0
    tracemalloc.start()
    for _ in range(_FUZZ):
        content = _mutated(rng, raw["media.json"], fifo)
        try:
            parts = complete_parts({**raw, "media.json": content})
        except (FormatError, DataChangedError) as error:
            assert "\n" not in str(error)
            assert len(str(error)) < 12_000
            assert str(raw["__key__"]) in str(error)
            refused += 1
        else:
            for name, part in parts.items() if check == "digest" else ():  # times do not show another offset
                assert part == expected.get(name, part), (name, content)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert refused > _FUZZ / 3
    assert peak < 50e6


def test_a_locator_does_not_replace_a_part_of_the_tar(pack_demo: Packer) -> None:
    folder = pack_demo(shard_prefix="d", media="reference", media_check="digest").shards
    raw = ShardReader(sorted(folder.glob("*.tar")))[0]
    located = json.loads(raw["media.json"])
    located["json"] = next(iter(located.values()))
    with pytest.raises(FormatError, match=r"media\.json is damaged \('json' is in the tar"):
        complete_parts({**raw, "media.json": json.dumps(located).encode()})
