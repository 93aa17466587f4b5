"""Tokens are made once: what measuring tokenized is what the shards hold, also after restarts and re-plans."""

from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from energon_packed import ChatEncoder, EncodedSample, PackedDataset, RecordError, normalize
from tests.internals import RecordBytes, TokenReader, chunks, tokens_size, write_tokens

FLAVOR = {"sample_class": "PackedTokensSample"}


def records(count: int = 60) -> list[Any]:
    return [{"id": f"r{n}", "prompts": ["Say it."], "captions": ["word " * (n % 23 + 1)]} for n in range(count)]


def refuse(*arguments: Any, **options: Any) -> Any:
    raise AssertionError("a text was tokenized again")


@pytest.mark.parametrize("overlong", ["drop", "truncate"])
def test_writing_tokenizes_nothing(
    build: Any, encoder: ChatEncoder, monkeypatch: pytest.MonkeyPatch, overlong: str
) -> None:
    first = build(records(), overlong=overlong, **FLAVOR)
    assert first.manifest.counters["tokenized"] == 60
    monkeypatch.setattr(ChatEncoder, "measure", refuse)
    monkeypatch.setattr(ChatEncoder, "encode", refuse)
    seq_len = 128 if overlong == "drop" else 30
    result = build(seq_len=seq_len, overlong=overlong, overwrite=True, max_packs_per_shard=2, **FLAVOR)
    assert (result.manifest.truncated > 0) is (overlong == "truncate")
    assert result.manifest.counters.items() >= {"measured": 0, "tokenized": 0, "reused": 60}.items()
    monkeypatch.undo()
    dataset = PackedDataset(result.shards, encoder)
    assert len(dataset) > 2
    stored = {sample.id: sample for pack in range(len(dataset)) for sample in dataset[pack]}
    for record in records():
        expected = encoder.encode(normalize(record))
        assert stored[record["id"]].input_ids.tolist() == expected.input_ids.tolist()[:seq_len]
        assert stored[record["id"]].labels.tolist()[1:] == expected.labels.tolist()[1:seq_len]


def test_a_lost_or_short_token_file_is_made_again(build: Any, tmp_path: Path) -> None:
    result = build(records(), **FLAVOR)
    before = {tar.name: tar.read_bytes() for tar in result.shards.glob("*.tar")}
    (tokens,) = (tmp_path / "out" / ".work").rglob("*.tokens")
    for damage in (tokens.unlink, lambda: tokens.write_bytes(tokens.read_bytes()[:-8])):
        damage()
        for tar in result.shards.glob("*.tar"):
            tar.unlink()
        assert build(**FLAVOR).manifest.counters["tokenized"] == 60
        assert {tar.name: tar.read_bytes() for tar in result.shards.glob("*.tar")} == before


def test_measuring_with_tokens_equals_measuring(encoder: ChatEncoder, demo: Any) -> None:
    count = 0
    for line in demo.jsonl.open("rb"):
        try:
            conversation = normalize(orjson.loads(line), image_root=str(demo.jsonl.parent))
        except (RecordError, orjson.JSONDecodeError):
            continue
        (expected,) = encoder.measure([conversation])
        (measured,) = encoder.measure([conversation], keep_tokens=True)
        assert (measured.length, measured.media_bytes, measured.reject) == (
            expected.length,
            expected.media_bytes,
            expected.reject,
        )
        if measured.reject is not None:
            assert measured.sample is None
            continue
        assert measured.sample is not None
        assert len(measured.sample) == expected.length
        assert expected.sample is None
        count += 1
    assert count > 100


def test_offsets_by_hand(tmp_path: Path) -> None:
    lengths = np.array([2, -1, 3, 1, 0, 4], dtype=np.int32)
    files = [tmp_path / "a.tokens", tmp_path / "b.tokens", tmp_path / "c.tokens"]
    samples = {
        row: EncodedSample(input_ids=np.arange(length) + 10 * row, labels=-np.arange(length))
        for row, length in enumerate(lengths.tolist())
        if length > 0
    }
    write_tokens(files[0], [samples[0], samples[2]])
    write_tokens(files[1], [])
    write_tokens(files[2], [samples[3], samples[5]])
    assert [file.stat().st_size for file in files] == [40, 0, 40]
    assert tokens_size(lengths[:3]) == 40
    kept = RecordBytes(files, np.array([0, 3, 3]), lengths, np.zeros, unit=chunks.TOKEN)
    rows = np.array([5, 0, 3, 2])
    refs = kept.refs(rows)
    assert list(refs.files) == [files[0], files[2]]
    with TokenReader(refs) as reader:
        for place, row in enumerate(rows.tolist()):
            found = reader.read(place, int(lengths[row]))
            assert found.input_ids.tolist() == samples[row].input_ids.tolist()
            assert found.labels.tolist() == samples[row].labels.tolist()
        with pytest.raises(OSError, match="fewer tokens than were measured"):
            reader.read(0, 40)


def test_a_changed_text_is_measured_anew(build: Any, encoder: ChatEncoder) -> None:
    build(records(), **FLAVOR)
    changed = records()
    changed[7]["captions"] = ["other " * 3]
    result = build(changed, overwrite=True, **FLAVOR)
    assert result.manifest.counters["tokenized"] == 60
    dataset = PackedDataset(result.shards, encoder)
    texts = {s.id: encoder.tokenizer.decode(s.input_ids) for pack in range(len(dataset)) for s in dataset[pack]}
    assert "other other other" in texts["r7"]
