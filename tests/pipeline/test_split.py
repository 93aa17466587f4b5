"""`overlong='split'`: long documents and token records as fragments, in `pack`, planned and streamed data."""

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from energon_packed import (
    ChatEncoder,
    ConfigError,
    DataflowConfig,
    DataflowLoader,
    EncodedSample,
    IterableDistributor,
    PackedDataset,
    PoolPacker,
    RejectLimitError,
    get_raw_loader,
    normalize,
    plan_in_memory,
)
from tests.internals import JsonlSource, PackedFolder, check_order, raw_records, verify
from tests.loading.flows import check_every_step

IGNORE_INDEX = -100
WORDS = ["pack", "row", "token", "image", "model", "loss", "gradient", "worker", "shard", "record"]


def records(count: int = 20, longest: int = 300) -> list[dict[str, Any]]:
    rng = random.Random(0)
    documents = [
        {"id": f"d{n}", "text": " ".join(rng.choices(WORDS, k=rng.randint(1, longest)))} for n in range(count)
    ]
    chat = {"id": "chat", "prompts": ["word " * 100], "captions": ["word " * 100]}
    ids = [65 + n % 20 for n in range(200)]
    tokens = {"id": "tokens", "input_ids": ids, "labels": [-100] * 90 + ids[90:]}
    return [*documents, chat, tokens]


def joined(samples: list[EncodedSample], overlap: int = 1) -> dict[str, tuple[list[int], list[int]]]:
    """Tokens and targets of each record, from its fragments in their order."""
    parts: dict[str, list[tuple[int, EncodedSample]]] = {}
    for sample in samples:
        name, _, number = str(sample.id).partition("#")
        parts.setdefault(name, []).append((int(number or -1), sample))
    whole: dict[str, tuple[list[int], list[int]]] = {}
    for name, numbered in parts.items():
        numbers = [number for number, _ in sorted(numbered, key=lambda item: item[0])]
        assert numbers in ([-1], list(range(len(numbers))))
        ids: list[int] = []
        labels: list[int] = []
        for number, sample in sorted(numbered, key=lambda item: item[0]):
            context = overlap if number > 0 else 0
            ids += sample.input_ids.tolist()[context:]
            labels += sample.labels.tolist()[context:]
        whole[name] = ids, labels
    return whole


def expected(encoder: ChatEncoder, count: int = 20) -> dict[str, tuple[list[int], list[int]]]:
    encoded = {record["id"]: encoder.encode(normalize(record)) for record in records(count) if "text" in record}
    return {name: (sample.input_ids.tolist(), sample.labels.tolist()) for name, sample in encoded.items()}


@pytest.mark.parametrize("overlap", [1, 3])
def test_fragments_of_packed_documents_join_to_the_documents(
    build: Any, encoder: ChatEncoder, tmp_path: Path, overlap: int
) -> None:
    result = build(records(), seq_len=64, overlong="split", split_overlap=overlap, max_reject_rate=0.5)
    dataset = PackedDataset(result.shards, encoder)
    rows = [dataset[pack] for pack in range(len(dataset))]
    assert all(sum(map(len, row)) <= 64 for row in rows)
    whole = joined([sample for row in rows for sample in row], overlap)
    for name, (ids, labels) in expected(encoder).items():
        assert whole[name][0] == ids
        assert whole[name][1][1:] == labels[1:]  # nothing predicts the first token
    # The first fragment of the token record has no target, and is left out.
    ids = records()[-1]["input_ids"]
    assert whole["tokens"][0] == ids[-len(whole["tokens"][0]) :]
    assert whole["tokens"][1][-110:] == ids[-110:]
    assert len(whole["tokens"][0]) < 200
    assert "chat" not in whole

    manifest = result.manifest
    assert manifest.rejects == {"overlong": 1}
    assert manifest.records == manifest.packed - manifest.fragments + manifest.records_split + 1
    lengths = pq.read_table(tmp_path / "out" / "lengths.parquet").to_pylist()
    statuses = Counter(row["status"] for row in lengths)
    assert statuses["fragment"] == manifest.fragments
    assert statuses["split"] == manifest.records_split
    places = {(row["pack"], row["sample"]): row["id"] for row in lengths if row["pack"] is not None}
    assert places == {
        (f"out_{pack:08d}", index): sample.id for pack, row in enumerate(rows) for index, sample in enumerate(row)
    }
    packed = {row["id"]: row["length"] for row in lengths if row["status"] in ("packed", "fragment")}
    assert packed == {sample.id: len(sample) for row in rows for sample in row}
    (reject,) = map(json.loads, (tmp_path / "out" / "rejects.jsonl").read_text().splitlines())
    assert reject["detail"].endswith("conversations are not split: raise seq_len, or set overlong to truncate")
    report = verify(PackedFolder.open(result.shards), encoder)
    assert [check.name for check in report if not check.passed] == []


def test_places_of_fragments_are_those_of_the_packs_in_every_chunk(
    build: Any, encoder: ChatEncoder, tmp_path: Path
) -> None:
    """Fragments of token records, whose targets are read, end after the fragments of text, which need no reading."""
    inputs = [tmp_path / f"{name}.jsonl" for name in "abc"]
    for path in inputs:
        ids = [65 + n % 20 for n in range(150)]
        mixed: list[dict[str, Any]] = []
        for number in range(3):
            name = f"{path.stem}{number}"
            mixed.append({"id": f"t{name}", "input_ids": ids, "labels": [*ids[:60], *[-100] * 5, *ids[65:]]})
            mixed.append({"id": f"s{name}", "text": "word"})
            mixed.append({"id": f"d{name}", "text": " ".join(WORDS * (9 + number))})
        path.write_text("".join(json.dumps(record) + "\n" for record in mixed))
    result = build(inputs=inputs, seq_len=64, overlong="split")
    dataset = PackedDataset(result.shards, encoder)
    rows = [dataset[pack] for pack in range(len(dataset))]
    lengths = pq.read_table(result.lengths).to_pylist()
    places = {(row["pack"], row["sample"]): (row["id"], row["length"]) for row in lengths if row["pack"] is not None}
    assert places == {
        (f"out_{pack:08d}", index): (sample.id, len(sample))
        for pack, row in enumerate(rows)
        for index, sample in enumerate(row)
    }
    assert {row["source"] for row in lengths if row["status"] == "fragment"} == set(map(str, inputs))
    for row in lengths:  # a fragment has the source, row and line of its record
        name = row["id"].partition("#")[0]
        assert (row["source"], row["row"]) == (str(tmp_path / f"{name[1]}.jsonl"), row["line"] - 1)
        assert row["row"] == 3 * int(name[2]) + "tsd".index(name[0])
    whole = joined([sample for row in rows for sample in row])
    assert len(whole) == 27
    assert all(whole[name][0] == ids for name in whole if name.startswith("t"))


def test_documents_are_split_between_their_images(build: Any, tokenizer_dir: Path, demo: Any, tmp_path: Path) -> None:
    paths = sorted(str(path) for path in (demo.jsonl.parent / "images").iterdir())
    images = [path for path in paths if Path(path).stat().st_size > 1000][:3]
    record = {"id": "doc", "text": " ".join(["word " * 60 + "<image>"] * 3) + " word" * 60, "images": images}
    small: dict[str, Any] = {"max_pixels": 56 * 56}
    result = build([record], seq_len=150, overlong="split", image_root=demo.jsonl.parent, **small)
    encoder = ChatEncoder.from_pretrained(tokenizer_dir, **small)
    dataset = PackedDataset(result.shards, encoder)
    stored = {str(sample.id): sample for row in range(len(dataset)) for sample in dataset[row]}
    assert len(stored) > 1
    assert result.manifest.images == sum(sample.num_images for sample in stored.values()) == 3
    whole = encoder.encode(normalize(record, image_root=str(demo.jsonl.parent)))
    assert joined(list(stored.values()))["doc"][0] == whole.input_ids.tolist()
    assert torch.equal(pixels_of([stored[name] for name in sorted(stored)]), pixels_of([whole]))
    # The same fragments without shards: sliced from the encoded document.
    config = config_of(
        tmp_path, tokenizer_dir, streaming=False, records=[record], seq_len=150, image_root=demo.jsonl.parent, **small
    )
    planned = plan_in_memory(config)
    for sample in (sample for row in range(len(planned)) for sample in planned[row]):
        other = stored[str(sample.id)]
        assert sample.input_ids.tolist() == other.input_ids.tolist()
        assert sample.num_images == other.num_images
        assert torch.equal(pixels_of([sample]), pixels_of([other]))
        assert sample.position_ids is not None
        assert other.position_ids is not None
        assert sample.position_ids.tolist() == other.position_ids.tolist()


def pixels_of(samples: list[EncodedSample]) -> torch.Tensor:
    pixels = [sample.pixel_values for sample in samples if sample.pixel_values is not None]
    return torch.cat(pixels) if pixels else torch.zeros(0)


def test_another_seq_len_tokenizes_nothing_and_several_runs_write_the_same_bytes(build: Any, tmp_path: Path) -> None:
    build(records(), seq_len=64, overlong="split")
    second = build(seq_len=50, overlong="split", overwrite=True)
    assert second.manifest.counters["tokenized"] == 0
    tars = {tar.name: tar.read_bytes() for tar in second.shards.glob("*.tar")}
    other = build(seq_len=50, overlong="split", output_dir=tmp_path / "again" / "out", workers=2)
    assert {tar.name: tar.read_bytes() for tar in other.shards.glob("*.tar")} == tars


def test_a_document_is_read_once_per_shard_however_many_fragments_it_has(
    build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: Counter[int] = Counter()
    read_record = JsonlSource.read

    def counted(source: JsonlSource, address: int, size: int) -> Any:
        read[address] += 1
        return read_record(source, address, size)

    monkeypatch.setattr(JsonlSource, "read", counted)
    result = build(records(count=3, longest=2000), seq_len=64, overlong="split", max_packs_per_shard=20)
    shards = len(list(result.shards.glob("*.tar")))
    assert result.manifest.fragments > 3 * shards
    assert shards > 1
    assert max(read.values()) <= shards  # the plan stage reads the stored tokens


def test_without_a_long_record_split_packs_as_drop_does(build: Any, tmp_path: Path) -> None:
    short = records(longest=20)[:-2]
    tokens = {"sample_class": "PackedTokensSample"}
    dropped = build(short, output_dir=tmp_path / "a" / "out", **tokens)
    split = build(output_dir=tmp_path / "b" / "out", overlong="split")
    read = [{tar.name: tar.read_bytes() for tar in run.shards.glob("*.tar")} for run in (dropped, split)]
    assert read[0] == read[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"sample_class": "PackedCaptioningSample"},
            "`sample_class` must be PackedTokensSample with `overlong` 'split'",
        ),
        ({"layout": "llava-onevision2"}, "`sample_class` must be PackedTokensSample"),
        ({"split_overlap": 64}, "`split_overlap` must be smaller than a row of 64 tokens, got 64"),
        ({"split_overlap": 0}, "`split_overlap` must be at least 1, got 0"),
    ],
)
def test_options_that_cannot_be_split_are_refused(build: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(records(), seq_len=64, overlong="split", **options)


def config_of(tmp_path: Path, tokenizer_dir: Path, *, records: list[Any], **options: Any) -> DataflowConfig:
    file = tmp_path / "raw.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    settings: dict[str, Any] = {"overlong": "split", "max_reject_rate": 0.5, "work_dir": tmp_path, "workers": 1}
    return DataflowConfig(inputs=(str(file),), tokenizer=tokenizer_dir, **{**settings, "seq_len": 64, **options})


def test_planned_rows_have_the_fragments_of_pack(
    build: Any, encoder: ChatEncoder, tokenizer_dir: Path, tmp_path: Path
) -> None:
    result = build(records(), seq_len=64, overlong="split")
    dataset = PackedDataset(result.shards, encoder)
    stored = {sample.id: sample for pack in range(len(dataset)) for sample in dataset[pack]}
    planned = plan_in_memory(config_of(tmp_path, tokenizer_dir, streaming=False, records=records()))
    assert planned.rejects.counts == {"overlong": 1}
    seen = set()
    for row in range(len(planned)):
        assert planned.ids(row) == [sample.id for sample in planned[row]]
        for sample in planned[row]:
            assert sample.input_ids.tolist() == stored[sample.id].input_ids.tolist()
            assert sample.labels.tolist()[1:] == stored[sample.id].labels.tolist()[1:]
            seen.add(sample.id)
    assert seen == set(stored)


@pytest.mark.parametrize("limit", [1 << 26, 1])
def test_a_planned_document_is_encoded_once_for_its_fragments(
    tokenizer_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    documents = [{"id": f"d{n}", "text": " ".join(WORDS * 200)} for n in range(3)]
    planned = plan_in_memory(config_of(tmp_path, tokenizer_dir, streaming=False, records=documents))
    monkeypatch.setattr(raw_records, "_KEPT_BYTES", limit)
    encoded: list[int] = []
    encode_many = ChatEncoder.encode_many

    def counted(encoder: ChatEncoder, conversations: Any) -> Any:
        encoded.append(len(conversations))
        return encode_many(encoder, conversations)

    monkeypatch.setattr(ChatEncoder, "encode_many", counted)
    of_document: dict[str, list[int]] = {}
    for row in range(len(planned)):
        for ident in planned.ids(row):
            of_document.setdefault(str(ident).partition("#")[0], []).append(row)
    rows = [row for found in of_document.values() for row in found]
    assert len(rows) > 60
    for row in rows:  # document by document
        assert [sample.id for sample in planned[row]] == planned.ids(row)
    # Within the limit, the last document is kept alone: a row with the ends of several documents encodes them again.
    assert sum(encoded) == 3 if limit > 1 else 3 < sum(encoded) < len(rows) / 2


@pytest.mark.parametrize("num_workers", [0, 2])
def test_streams_yield_every_fragment_and_resume_between_them(
    encoder: ChatEncoder, tokenizer_dir: Path, tmp_path: Path, num_workers: int
) -> None:
    config = config_of(tmp_path, tokenizer_dir, records=records(5), streaming=True, packing_strategy="pool_4")

    def loader() -> DataflowLoader:
        return get_raw_loader(config, num_workers=num_workers, order_log=tmp_path / "order")

    batches = list(loader())
    report = check_order(tmp_path / "order")
    assert report.problems == []
    assert report.complete == [0]
    samples = [sample for batch in batches for sample in samples_of(batch)]
    check_every_step(
        lambda: get_raw_loader(config, num_workers=num_workers), lambda step: num_workers == 0 or step % 3 == 0
    )
    whole = joined(samples)
    for name, (ids, labels) in expected(encoder, count=5).items():
        assert whole[name][0] == ids
        assert whole[name][1][1:] == labels[1:]


def samples_of(batch: Any) -> list[EncodedSample]:
    bounds = batch.cu_seqlens.tolist()
    ids, labels = batch.input_ids.flatten().numpy(), batch.labels.flatten().numpy().copy()
    samples = []
    for index, ident in enumerate(batch.ids):
        tokens = slice(bounds[index], bounds[index + 1])
        samples.append(EncodedSample(id=ident, input_ids=ids[tokens], labels=labels[tokens].astype(np.int64)))
    return samples


def test_error_and_strict_name_the_conversation(build: Any) -> None:
    with pytest.raises(RejectLimitError, match="conversations are not split"):
        build(records(), seq_len=64, overlong="split", strict=True)


@pytest.mark.parametrize("as_records", [True, False])
def test_only_documents_and_token_records_of_any_distributor_are_split(encoder: ChatEncoder, as_records: bool) -> None:
    conversation = {"id": "chat", "prompts": ["word " * 40], "captions": ["word " * 40]}
    document = {"id": "doc", "text": "word " * 90}
    tokens = {"id": "tokens", "input_ids": [65] * 90}
    items = [conversation, document, tokens]
    loader = DataflowLoader(
        IterableDistributor(items if as_records else [normalize(item) for item in items]),
        encoder,
        PoolPacker(64, overlong="split"),
        num_workers=0,
    )
    names = {str(name).split("#")[0] for batch in loader for name in batch.ids}
    assert names == {"doc", "tokens"}
    assert loader.failures.counts == {"overlong": 1}


def test_a_pack_of_one_sample_is_not_split(encoder: ChatEncoder) -> None:
    packs = [[encoder.encode(normalize({"id": f"{n}", "text": "word " * n}))] for n in (90, 10)]
    loader = DataflowLoader(IterableDistributor(packs), encoder, PoolPacker(64, overlong="split"), num_workers=0)
    assert [batch.ids for batch in loader] == [["10"]]
    assert loader.failures.counts == {"overlong": 1}


def test_a_pack_of_several_samples_is_not_truncated(encoder: ChatEncoder) -> None:
    long, short = (encoder.encode(normalize({"id": f"{n}", "text": "word " * n})) for n in (90, 10))
    loader = DataflowLoader(
        IterableDistributor([[long, short], [long], [short]]), encoder, PoolPacker(64, overlong="truncate")
    )
    assert [(batch.ids, batch.num_tokens) for batch in loader] == [(["90"], 64), (["10"], len(short))]
    assert loader.failures.counts == {"overlong": 1}
