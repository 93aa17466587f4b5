"""Nothing is lost, nothing is made up: every record is in exactly one pack or in rejects.jsonl."""

import collections
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from energon_packed import ChatEncoder, PackOptions, get_packed_loader, pack
from tests.conftest import FLAVORS, Packer
from tests.internals import DemoDataset, codec_for, scan_tar


def packed_samples(folder: Path, encoder: ChatEncoder) -> dict[str, list[Any]]:
    """Encoded samples of every pack by key, read through Energon."""
    loader = get_packed_loader(folder, encoder, epochs=1, shuffle=False, num_workers=0)
    packs: dict[str, list[Any]] = {}
    for batch in loader:
        bounds = batch.cu_seqlens.tolist()
        assert len(batch.__key__) == 1
        packs[batch.__key__[0]] = [
            (name, batch.input_ids[0, start:end], batch.labels[0, start:end])
            for name, start, end in zip(batch.ids, bounds, bounds[1:], strict=False)
        ]
    return packs


@pytest.mark.parametrize("flavor", FLAVORS)
def test_every_record_is_packed_or_rejected(
    pack_demo: Packer, demo: DemoDataset, encoder: ChatEncoder, flavor: str
) -> None:
    result = pack_demo(sample_class=flavor)
    packs = packed_samples(result.shards, encoder)
    in_packs = collections.Counter(name for samples in packs.values() for name, *_ in samples)
    rejects = [json.loads(line) for line in result.rejects.open()]
    ledger = pq.read_table(result.lengths).to_pylist()

    assert len(packs) == result.manifest.packs
    assert len(ledger) == demo.records == result.manifest.records
    assert [row["row"] for row in ledger] == list(range(demo.records))
    assert in_packs == collections.Counter(row["id"] for row in ledger if row["status"] == "packed")
    left_out = [row for row in ledger if row["status"] != "packed"]
    assert [(r["row"], r["id"], r["reason"]) for r in rejects] == [(r["row"], r["id"], r["status"]) for r in left_out]
    assert all(reject["detail"] and reject["source"] == str(demo.jsonl) for reject in rejects)
    assert collections.Counter(r["reason"] for r in rejects) == result.manifest.rejects
    assert len(rejects) == demo.broken
    assert result.manifest.packed == sum(in_packs.values())


@pytest.mark.parametrize("flavor", FLAVORS)
def test_the_table_has_the_place_of_every_sample(pack_demo: Packer, encoder: ChatEncoder, flavor: str) -> None:
    result = pack_demo(sample_class=flavor, max_packs_per_shard=3, split={"train": 0.7, "val": 0.3})
    ledger = pq.read_table(result.lengths).to_pylist()
    found = {(row["shard"], row["pack"], row["sample"]): row["id"] for row in ledger if row["pack"] is not None}
    stored = {
        (shard.name, pack["__key__"], index): sample.conversation.id
        for shard in result.manifest.shards
        for pack in scan_tar(result.shards / shard.name).packs()
        for index, sample in enumerate(codec_for(flavor).read(pack))
    }
    assert len(result.manifest.shards) > 3
    assert found == stored
    places = ("pack", "sample", "shard")
    assert {row["status"] == "packed" for row in ledger if all(row[name] is None for name in places)} == {False}
    assert [row["line"] for row in ledger] == [row["row"] + 1 for row in ledger]


@pytest.mark.parametrize("flavor", FLAVORS)
def test_real_lengths_equal_recorded_lengths_and_fit(pack_demo: Packer, encoder: ChatEncoder, flavor: str) -> None:
    result = pack_demo(sample_class=flavor)
    recorded = {row["id"]: row["length"] for row in pq.read_table(result.lengths).to_pylist()}
    total = 0
    for samples in packed_samples(result.shards, encoder).values():
        assert sum(len(ids) for _, ids, _ in samples) <= 1024
        for name, ids, _ in samples:
            assert len(ids) == recorded[name]
            total += len(ids)
    assert total == result.manifest.tokens == sum(shard.tokens for shard in result.manifest.shards)


def test_flavors_hold_the_same_tokens_and_labels(pack_demo: Packer, encoder: ChatEncoder) -> None:
    by_flavor = []
    for flavor in FLAVORS:
        packs = packed_samples(pack_demo(sample_class=flavor).shards, encoder)
        by_flavor.append({name: (ids.tolist(), labels.tolist()) for p in packs.values() for name, ids, labels in p})
    assert by_flavor[0]
    assert all(samples == by_flavor[0] for samples in by_flavor[1:])


def test_short_conversations_fill_their_rows(tmp_path: Path, text_tokenizer_dir: Path) -> None:
    rng = np.random.default_rng(0)
    with (tmp_path / "a.jsonl").open("w") as out:
        for _ in range(4200):
            words = " ".join(rng.choice(["red", "kettle", "from", "the", "harbour"], rng.integers(5, 200)))
            out.write(json.dumps({"prompts": ["Repeat."], "captions": [words]}) + "\n")
    result = pack(
        PackOptions(
            inputs=(str(tmp_path / "a.jsonl"),),
            output_dir=tmp_path / "out",
            tokenizer=text_tokenizer_dir,
            seq_len=4096,
        )
    )
    assert result.manifest.packed == 4200
    assert result.manifest.utilization >= 0.99
    ids = {row["id"] for row in pq.read_table(result.lengths).to_pylist()}
    assert {"a:0", "a:4199"} <= ids  # records without an id are named by file and row
