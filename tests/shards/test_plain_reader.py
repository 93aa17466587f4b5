"""Packs can be read with only `tarfile` and `json`, as the layout of captioning packs promises."""

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Packer

# --- the reader: tarfile, json, and the names that the format page gives ---------------------------------------------


def read_packs(folder: Path) -> dict[str, list[dict[str, Any]]]:
    packs: dict[str, list[dict[str, Any]]] = {}
    for shard in sorted(folder.glob("*.tar")):
        with tarfile.open(shard) as tar:
            members: dict[str, dict[str, bytes]] = {}
            for member in tar:
                key, part = member.name.split(".", 1)
                stream = tar.extractfile(member)
                assert stream is not None
                members.setdefault(key, {})[part] = stream.read()
        for key, parts in members.items():
            pack = json.loads(parts["json"])
            packs[key] = [
                {
                    "id": pack["ids"][i],
                    "prompts": pack["prompts"][i],
                    "captions": pack["captions"][i],
                    "images": [parts[name] for name in pack["images"][i]],
                    "length": pack["lengths"][i],
                }
                for i in range(pack["sample_count"])
            ]
    return packs


# ---------------------------------------------------------------------------------------------------------------------


def test_plain_reader_yields_every_sample_with_its_images(pack_demo: Packer, demo: Any) -> None:
    packs = read_packs(pack_demo(max_packs_per_shard=5).shards)
    assert list(packs) == [f"pack_{number:08d}" for number in range(len(packs))]
    records = {r["id"]: r for line in demo.jsonl.open() if (r := _parsed(line))}
    seen = 0
    for samples in packs.values():
        assert sum(sample["length"] for sample in samples) <= 1024
        for sample in samples:
            record = records[sample["id"]]
            seen += 1
            if "captions" not in record:
                continue
            captions = record["captions"]
            assert sample["captions"] == (captions[0] if isinstance(captions[0], list) else captions)
            names = record.get("images", [])
            names = names[0] if names and isinstance(names[0], list) else names
            assert sample["images"] == [(demo.jsonl.parent / name).read_bytes() for name in names]
            assert sum(prompt.count("<image>") for prompt in sample["prompts"]) == len(names)
    assert seen == demo.records - demo.broken


@pytest.mark.parametrize("keys", [{"captions", "images", "sample_count"}, {"captions", "images", "prompts"}])
def test_a_third_party_pack_loads_without_optional_keys(keys: set[str]) -> None:
    from energon_packed import PackedCaptioningSample
    from tests.internals import captioning_sample_loader as sample_loader

    value = {"captions": ["A cat.", ["A dog.", "Two."]], "images": [["img0_0.jpg"], []], "sample_count": 2}
    value["prompts"] = [["What is it?"], ["And", "How many?"]]
    raw = {"__key__": "k", "json": json.dumps({k: value[k] for k in keys}).encode(), "img0_0.jpg": b"bytes"}
    sample = PackedCaptioningSample(__key__="k", __restore_key__=(), **sample_loader(raw))
    first, second = sample.conversations()
    assert [image.data for image in first.images] == [b"bytes"]
    assert [m.content for m in second.messages if m.role == "assistant"] == ["A dog.", "Two."]
    if "prompts" in keys:  # the images stand before the first prompt
        assert first.messages[0].content == "<image>What is it?"


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        value: dict[str, Any] = json.loads(line)
    except json.JSONDecodeError:
        return None
    return value
