"""Masked turns in every flavor: stored, restored as context, and shown as such."""

import json
from typing import Any

import pytest
from click.testing import CliRunner

from energon_packed import ChatEncoder, PackedDataset
from tests.conftest import FLAVORS
from tests.internals import IGNORE_INDEX, ShardReader, cli, codec_for

HI, ASK = {"role": "user", "content": "Hi"}, {"role": "user", "content": "2 + 3?"}
HELLO, FIVE = {"role": "assistant", "content": "Hello."}, {"role": "assistant", "content": "5."}
RECORDS: list[Any] = [
    {"id": "weight", "messages": [HI, {**HELLO, "weight": 0}, ASK, FIVE]},
    {"id": "loss", "conversations": [
        {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."},
        {"from": "human", "value": "2 + 3?"}, {"from": "gpt", "value": "5.", "loss": False}]},
    {"id": "train", "messages": [{**HI, "train": False}, {**HELLO, "train": True}, ASK, {**FIVE, "train": False}]},
    {"id": "prompt", "prompt": [HI, HELLO, ASK], "completion": [FIVE]},
    {"id": "history", "query": "2 + 3?", "response": "5.", "history": [["Hi", "Hello."]]},
]  # fmt: skip
TRAINED = {
    "weight": "5.<|im_end|>",
    "loss": "Hello.<|im_end|>",
    "train": "Hello.<|im_end|>",
    "prompt": "5.<|im_end|>",
    "history": "Hello.<|im_end|>5.<|im_end|>",
}


@pytest.mark.parametrize("flavor", FLAVORS)
def test_masked_turns_are_stored_restored_and_shown(build: Any, encoder: ChatEncoder, flavor: str) -> None:
    result = build(RECORDS, sample_class=flavor)
    assert (result.manifest.sample_class, result.manifest.packed) == (flavor, len(RECORDS))

    codec, reader = codec_for(flavor), ShardReader(sorted(result.shards.glob("*.tar")))
    packs = [reader[number] for number in range(len(reader))]
    stored = {}
    for raw in packs:
        for sample in codec.read(raw):
            stored[sample.conversation.id] = sample.conversation
    for ident, text in TRAINED.items():
        targets = encoder.encode(stored[ident])
        assert encoder.tokenizer.decode(targets.input_ids[targets.labels != IGNORE_INDEX]) == text, ident

    trained = {}
    dataset = PackedDataset(result.shards, encoder)
    for number in range(len(dataset)):
        for sample in dataset[number]:
            trained[sample.id] = encoder.tokenizer.decode(sample.input_ids[sample.labels != IGNORE_INDEX])
    assert trained == TRAINED

    shown = {}
    for raw in packs:
        output = CliRunner().invoke(cli, ["inspect", str(result.shards), "--pack", raw["__key__"], "--json"]).output
        for view in json.loads(output)["samples"]:
            shown[view["id"]] = view
    for ident, text in TRAINED.items():
        green = [turn["text"] + "<|im_end|>" for turn in shown[ident]["turns"] if turn["supervised"]]
        if codec.stores_tokens:
            assert shown[ident]["supervised"] == len(encoder.tokenizer(text).input_ids)
        else:
            assert "".join(green) == text, ident
