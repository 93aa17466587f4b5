"""Kinds of tokens: those of the batch that training sees."""

import json
from pathlib import Path
from typing import Any

import pytest

from energon_packed import ChatEncoder, pack
from tests.conftest import FLAVORS, Packer
from tests.internals import KINDS, ShardReader, codec_for, token_rows, view_pack


@pytest.mark.parametrize("flavor", FLAVORS)
def test_kinds_of_tokens_follow_the_labels_of_the_training_batch(
    pack_demo: Packer, encoder: ChatEncoder, flavor: str
) -> None:
    multiple = 1 if flavor == "MultiMixQASample" else 16
    options: dict[str, Any] = {"overlong": "truncate", "seq_len": 256} if flavor == FLAVORS[0] else {}
    result = pack_demo(sample_class=flavor, pad_multiple=multiple, **options)
    codec = codec_for(flavor)
    reader = ShardReader([result.shards / shard.name for shard in result.manifest.shards])
    supervised = 0
    for number in range(len(reader)):
        mapped = view_pack(reader[number], codec, encoder, multiple=multiple)
        kinds: list[list[str]] = []
        for segment in mapped.samples:
            assert segment.problem is None
            assert segment.start is not None
            assert segment.start % multiple == 0
            assert segment.runs[0][1] == 0
            kinds.append([kind for kind, _, length in segment.runs for _ in range(length)])
            assert segment.tokens == {kind: kinds[-1].count(kind) for kind in KINDS}
        expected: list[list[str]] = [[] for _ in mapped.samples]
        for row in token_rows(reader[number], encoder, codec):
            is_target = row.label >= 0 and len(expected[row.segment]) > 0
            kind = "image" if row.token == encoder.image_token_id else "supervised" if is_target else "other"
            expected[row.segment].append(kind)
        assert kinds == expected
        targets = sum(segment.count("supervised") for segment in expected)
        supervised += targets
        assert sum(sample.tokens["supervised"] for sample in mapped.samples) == targets
    assert result.manifest.supervised_tokens == supervised > 0
    if options:
        assert result.manifest.truncated > 0


def test_the_first_token_of_a_document_is_no_target(tokenizer_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "A red square."}\n')
    result = pack(tmp_path / "a.jsonl", output_dir=tmp_path / "out", seq_len=64, tokenizer=tokenizer_dir, workers=1)
    reader = ShardReader([result.shards / result.manifest.shards[0].name])
    [sample] = view_pack(reader[0], None, ChatEncoder.from_pretrained(tokenizer_dir)).samples
    assert sample.length is not None
    assert sample.tokens["supervised"] == result.manifest.supervised_tokens == sample.length - 1


def test_a_sample_that_encodes_differently_has_no_kinds(pack_demo: Packer, encoder: ChatEncoder) -> None:
    result = pack_demo(sample_class="PackedMultiMixQASample")
    codec = codec_for("PackedMultiMixQASample")
    raw = ShardReader([result.shards / result.manifest.shards[0].name])[0]
    value = json.loads(raw["json"])
    value["samples"][0]["length"] += 1
    segments = view_pack({**raw, "json": json.dumps(value).encode()}, codec, encoder).samples
    assert "tokens, but" in str(segments[0].problem)
    assert (segments[0].runs, segments[1].problem) == ((), None)
    assert not any(turn.supervised for turn in segments[0].turns)
