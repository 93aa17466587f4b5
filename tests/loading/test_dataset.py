"""PackedDataset: the packs that the loader gives, by number, in any process and any order."""

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from energon_packed import (
    ChatEncoder,
    ConfigError,
    FormatError,
    PackedDataset,
    PackOptions,
    PaddingFreeCollator,
    get_packed_loader,
    pack,
)
from tests.conftest import FLAVORS
from tests.internals import streams


def same(left: Any, right: Any) -> bool:
    return all(
        a.id == b.id
        and np.array_equal(a.input_ids, b.input_ids)
        and np.array_equal(a.labels, b.labels)
        and (a.pixel_values is None) == (b.pixel_values is None)
        and (a.pixel_values is None or torch.equal(a.pixel_values, b.pixel_values))
        and (a.position_ids is None) == (b.position_ids is None)
        and (a.position_ids is None or np.array_equal(a.position_ids, b.position_ids))
        for a, b in zip(left, right, strict=True)
    )


@pytest.mark.parametrize("flavor", FLAVORS)
def test_packs_are_those_of_the_loader(pack_demo: Any, encoder: ChatEncoder, flavor: str) -> None:
    out = pack_demo(sample_class=flavor, max_packs_per_shard=3).shards.parent
    dataset = PackedDataset(out, encoder)
    loader = get_packed_loader(out, encoder, epochs=1, num_workers=0, shuffle=False)
    batches = list(loader)
    assert len(dataset) == len(batches)
    collator = PaddingFreeCollator()
    for index, batch in enumerate(batches):
        ours = collator.collate(dataset[index])
        assert ours.ids == batch.ids
        for name in ("input_ids", "labels", "position_ids", "cu_seqlens", "pixel_values", "image_grid_thw"):
            left, right = getattr(ours, name), getattr(batch, name)
            assert left is right is None or torch.equal(left, right), name
    assert dataset.lengths.tolist() == [batch.num_tokens for batch in batches]


def test_any_order_negative_numbers_and_the_end(pack_demo: Any, encoder: ChatEncoder) -> None:
    dataset = PackedDataset(pack_demo(max_packs_per_shard=3).shards, encoder)
    last = len(dataset) - 1
    backwards = [dataset[index] for index in range(last, -1, -1)]
    assert all(same(dataset[index], backwards[last - index]) for index in range(len(dataset)))
    assert same(dataset[-1], dataset[last])
    for index in (len(dataset), -len(dataset) - 1):
        with pytest.raises(IndexError, match=f"Pack index {index} is out of range for a dataset of {len(dataset)}"):
            dataset[index]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_data_loader_workers(pack_demo: Any, encoder: ChatEncoder, method: str) -> None:
    dataset = PackedDataset(pack_demo(max_packs_per_shard=3).shards, encoder)
    expected = [dataset[index] for index in range(len(dataset))]  # the parent has its shards open
    workers = 2 if method == "fork" else 1  # a spawned one imports everything anew
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=2, num_workers=workers, multiprocessing_context=method, collate_fn=PaddingFreeCollator()
    )
    batches = list(loader)
    assert sum(batch["input_ids"].shape[1] for batch in batches) == dataset.lengths.sum()
    for number, batch in enumerate(batches):
        samples = [sample.input_ids for inside in expected[2 * number : 2 * number + 2] for sample in inside]
        assert np.array_equal(batch["input_ids"][0].numpy(), np.concatenate(samples))


def test_it_can_be_pickled_and_few_shards_are_open(
    pack_demo: Any, encoder: ChatEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "_MOST_OPEN", 2)
    dataset = PackedDataset(pack_demo(max_packs_per_shard=1).shards, encoder)
    assert len(dataset.reader.tars) > 3
    expected = [dataset[index] for index in range(len(dataset))]
    assert len(streams._open) == 2
    copied = pickle.loads(pickle.dumps(dataset.reader))
    assert [copied[i]["__key__"] for i in range(len(copied))] == [f"pack_{i:08d}" for i in range(len(dataset))]
    assert same(dataset[0], expected[0])


def test_tokens_need_no_encoder(text_tokenizer_dir: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": f"story {'of stones ' * n}"}) + "\n" for n in range(1, 40)))
    options = {"output_dir": tmp_path / "out", "sample_class": "PackedTokensSample", "seq_len": 256, "workers": 1}
    result = pack(PackOptions(inputs=(str(data),), tokenizer=text_tokenizer_dir, **options))
    plain = PackedDataset(result.shards)
    encoded = PackedDataset(result.shards, ChatEncoder.from_pretrained(text_tokenizer_dir))
    assert all(same(plain[index], encoded[index]) for index in range(len(plain)))


def test_missing_parts_of_a_dataset_raise(pack_demo: Any, encoder: ChatEncoder, tmp_path: Path) -> None:
    shards = pack_demo(max_packs_per_shard=3).shards
    with pytest.raises(ConfigError, match=r"stores PackedCaptioningSample with images, which needs an encoder"):
        PackedDataset(shards)
    with pytest.raises(
        ConfigError, match="has no packs in split 'val'; it has train. Pass one of .* or pack again with"
    ):
        PackedDataset(shards, encoder, split="val")
    with pytest.raises(FormatError, match="does not exist"):
        PackedDataset(tmp_path / "nowhere", encoder)
    copy = tmp_path / "copy"
    shutil.copytree(shards, copy)
    first = sorted(copy.glob("*.tar"))[0]
    content = first.read_bytes()
    first.write_bytes(content[: len(content) // 2])
    with pytest.raises(FormatError, match=rf"{first.name} has {len(content) // 2} bytes, and {len(content)} by pack"):
        PackedDataset(copy, encoder)
    first.write_bytes(content[:512] + bytes(512) + content[1024:])
    assert PackedDataset(copy, encoder)
    first.write_bytes(b"\xff" * 1024 + content[1024:])
    with pytest.raises(FormatError, match=first.name):
        PackedDataset(copy, encoder)[0]
    first.with_suffix(".tar.idx").unlink()
    with pytest.raises(FormatError, match="No such file"):
        PackedDataset(copy, encoder)
