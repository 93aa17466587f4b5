"""Packs with references to media: read as copied packs; a changed file is an error."""

import copy
import json
import os
import random
import shutil
import tracemalloc
from pathlib import Path

import pytest

from energon_packed import DataChangedError, FormatError
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
