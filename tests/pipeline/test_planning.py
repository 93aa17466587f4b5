"""The plan stage on tables of random records, against the same calculations in plain Python."""

import json
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from energon_packed import (
    Conversation,
    EncodedSample,
    Measurement,
    PackOptions,
    Processor,
    Progress,
    RecordError,
    RejectLimitError,
    pack,
    pack_lengths,
)
from tests.internals import RecordBytes, arrays, chunks, plan_stage, split_ranges, split_sample, table

OVERLONG = chunks.STATUSES.index("overlong")
COLUMNS = [
    ("length", 30), ("text_bytes", 900), ("media_bytes", 9000), ("num_images", 3), ("num_videos", 2),
    ("num_frames", 9), ("extracted_bytes", 5000), ("frames_bytes", 70), ("kind", 3),
]  # fmt: skip


class Characters(Processor):
    def encode(self, conversation: Conversation) -> EncodedSample:
        ids = np.array([ord(character) for character in str(conversation.text)])
        return EncodedSample(input_ids=ids, labels=ids)


def options_of(**values: Any) -> PackOptions:
    settings = {"inputs": ("a.jsonl",), "output_dir": Path("out"), "encoder": Characters(), "seq_len": 40, **values}
    return PackOptions(**settings)


def table_of(count: int, seed: int = 0, **columns: Any) -> Any:
    """Random records of two chunks; some are rejected."""
    rng = np.random.default_rng(seed)
    values = {name: np.zeros(count, dtype=dtype) for name, dtype in chunks.NUMERIC.items()}
    for name, limit in COLUMNS:
        values[name][:] = rng.integers(0, limit, count)
    values["length"] += 1
    values["status"][:] = rng.choice([0, 0, 0, 1], count)
    for name, column in columns.items():
        values[name] = np.asarray(column, dtype=chunks.NUMERIC[name])
    half = count // 2
    return table.RecordTable(
        **values,
        source_starts=np.array([0, count]),
        folder=Path(),
        files=[Path("a.arrow"), Path("b.arrow")],
        file_starts=np.array([0, half]),
        counts={},
    )


@given(
    st.lists(st.integers(1, 60), max_size=30),
    st.integers(1, 12),
    st.integers(1, 200),
)
@example([3, 4, 5], 10, 7)
@example([3, 5, 1], 10, 7)
@settings(max_examples=80, deadline=None)
def test_shards_are_cut_at_the_limits(sizes: list[int], max_packs: int, max_bytes: int) -> None:
    ranges = plan_stage.cut_evenly(np.array(sizes, dtype=np.int64), max_packs, max_bytes)
    assert [pack for start, stop in ranges for pack in range(start, stop)] == list(range(len(sizes)))
    for start, stop in ranges:
        assert 1 <= stop - start <= max_packs
        assert stop == start + 1 or sum(sizes[start:stop]) <= max_bytes
        shards = 0  # that the remaining packs need without the limit of bytes
        while shards * max_packs < len(sizes) - start:
            shards += 1
        packs = (len(sizes) - start) / shards
        # A shard is full, or has an even share of the remaining packs.
        assert sum(sizes[start : stop + 1]) > max_bytes or packs <= stop - start < packs + 1
    if sum(sizes) <= max_bytes and ranges:
        counts = [stop - start for start, stop in ranges]
        assert len(ranges) == shards_of(len(sizes), max_packs)
        assert max(counts) - min(counts) <= 1


def shards_of(packs: int, max_packs: int) -> int:
    return sum(1 for _ in range(0, packs, max_packs))


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"group_by": "media"},
        {"overlong": "truncate", "seq_len": 21},
        {"algorithm": "sequential", "max_samples_per_pack": 3, "seed": 5},
        {"pad_multiple": 8, "algorithm": "ffd"},
        {"unpacked": True, "algorithm": "ffd"},
    ],
    ids=str,
)
def test_packs_are_those_of_each_group_in_a_random_order(values: dict[str, Any]) -> None:
    options, records = options_of(**values), table_of(90)
    plan, _, _ = plan_stage.plan_packs(records, options)
    groups = [[row for row in range(90) if records.status[row] == 0]]
    if options.group_by == "media":
        groups = [[row for row in groups[0] if records.kind[row] == kind] for kind in (0, 1, 2)]
    single = options.unpacked
    tokens = [min(int(length), options.seq_len) for length in records.length]
    expected: list[list[int]] = []
    for group in groups:
        packed = pack_lengths(
            [tokens[row] for row in group],
            options.seq_len,
            algorithm="sequential" if single else options.algorithm,
            max_samples=1 if single else options.max_samples_per_pack,
            multiple=options.pad_multiple,
        )
        expected += [[group[place] for place in pack] for pack in packed]
    order = np.random.default_rng(options.seed).permutation(len(expected))
    assert [pack.tolist() for pack in plan] == [expected[pack] for pack in order]
    assert (plan.indices.dtype, plan.offsets.dtype) == (np.int32, np.int64)
    assert plan.tokens == sum(tokens[row] for pack in plan for row in pack)
    assert (plan.capacity, plan.overlong.tolist()) == (options.seq_len, [])


def test_a_group_without_a_record_has_no_packs() -> None:
    options = options_of(group_by="media")
    plan, _, _ = plan_stage.plan_packs(table_of(4, status=[0] * 4, kind=[2, 0, 2, 0]), options)
    assert sorted(row for pack in plan for row in pack) == [0, 1, 2, 3]
    none, pack, _ = plan_stage.plan_packs(table_of(4, status=[1] * 4), options)
    assert (none.num_packs, none.indices.tolist(), none.offsets.tolist()) == (0, [], [0])
    assert plan_stage.plan_shards(none, pack, table_of(4, status=[1] * 4), options) == []


@pytest.mark.parametrize("sample_class", ["PackedCaptioningSample", "PackedTokensSample", "MultiMixQASample"])
@pytest.mark.parametrize("media", ["copy", "reference", "frames"])
def test_sizes_of_shards_are_the_sum_of_their_members(sample_class: str, media: str) -> None:
    options = options_of(
        sample_class=sample_class,
        unpacked=sample_class == "MultiMixQASample",
        media="reference" if media == "reference" else "copy",
        extract_frames=media == "frames",
        max_packs_per_shard=7,
        max_shard_bytes=90_000,
        split={"train": 0.75, "val": 0.25},
        shard_prefix="some",
    )
    records = table_of(120)
    plan, pack, place = plan_stage.plan_packs(records, options)
    before = {name: getattr(records, name).copy() for name in chunks.NUMERIC}
    shards = plan_stage.plan_shards(plan, pack, records, options)
    assert all((getattr(records, name) == column).all() for name, column in before.items())
    tokens = sample_class == "PackedTokensSample"

    def sizes(row: int) -> tuple[int, int]:
        """Bytes of a record in a copy, and where they are written."""
        of = {name: int(getattr(records, name)[row]) for name in chunks.NUMERIC}
        stored, files = of["media_bytes"], of["num_images"] + of["num_videos"]
        if media == "frames":
            stored = of["extracted_bytes"] if of["num_videos"] else stored
            files = of["num_images"] + of["num_frames"]
        text = 4 * of["length"] + 80 if tokens else of["text_bytes"]
        copied = stored + 1024 * files + of["frames_bytes"] + text
        return copied, of["frames_bytes"] + text + 400 * files if media == "reference" else copied

    members = 4 if tokens else 1
    packs = [[sizes(int(row)) for row in pack] for pack in plan]
    copied = np.array([1024 * members + sum(size for size, _ in pack) for pack in packs])
    written = [
        1024 * (members + (media == "reference")) + sum(size for _, size in pack) for pack in packs
    ]  # references are one member more
    expected: list[tuple[int, str, int, int]] = []
    for split, (start, stop) in split_ranges(plan.num_packs, options.split).items():
        for first, last in plan_stage.cut_evenly(copied[start:stop], 7, 90_000):
            expected.append((len(expected), split, start + first, start + last))
    assert [(shard.number, shard.split, shard.first_pack) for shard in shards] == [each[:3] for each in expected]
    for shard, (number, _, first, last) in zip(shards, expected, strict=True):
        rows = [plan[pack].tolist() for pack in range(first, last)]
        assert [shard.rows[a:b].tolist() for a, b in zip(shard.offsets, shard.offsets[1:], strict=False)] == rows
        assert shard.offsets[0] == 0
        assert len(shard.rows) == sum(map(len, rows))
        assert shard.num_bytes == sum(written[first:last])
        assert shard.name("some") == f"some-{number:06d}.tar"
    assert {shard.split for shard in shards} == {"train", "val"}
    whole = plan_stage.Plan(
        status=records.status,
        entries=records,
        packs=plan,
        places=plan_stage.sample_places(pack, place, shards, options),
        shards=shards,
        utilization_ungrouped=None,
    )
    assert whole.num_bytes == sum(written)


def test_places_are_those_of_the_shards() -> None:
    options = options_of(max_packs_per_shard=6, shard_prefix="some")
    records = table_of(80)
    plan, pack, place = plan_stage.plan_packs(records, options)
    shards = plan_stage.plan_shards(plan, pack, records, options)
    places = plan_stage.sample_places(pack, place, shards, options)
    expected = {int(row): (pack, place) for pack, rows in enumerate(plan) for place, row in enumerate(rows)}
    assert {row: (pack, places.sample[row]) for row, pack in enumerate(places.pack) if pack >= 0} == expected
    assert {int(places.sample[row]) for row in range(80) if row not in expected} == {0}
    assert places.pack.dtype == places.sample.dtype == np.int32
    key, sample, shard = (column.to_pylist() for column in places.columns(np.arange(80)))
    names = {pack: each.name("some") for each in shards for pack in range(each.first_pack, plan.num_packs)}
    for row in range(80):
        pack, place = expected.get(row, (None, None))
        assert (key[row], sample[row], shard[row]) == (
            (None, None, None) if pack is None else (f"some_{pack:08d}", place, names[pack])
        )
    without = plan_stage.sample_places(np.full(3, -1), np.zeros(3), [], options)
    assert (without.pack.tolist(), len(without.shards), len(without.first_packs)) == ([-1] * 3, 0, 0)
    assert [column.to_pylist() for column in without.columns(np.arange(3))] == [[None] * 3] * 3


def test_records_without_room_are_rejected() -> None:
    records = table_of(60, length=[*range(1, 61)], num_images=[n % 4 for n in range(60)])
    status = records.status.copy()
    for values, most in (({}, None), ({}, 1), ({"pad_multiple": 16}, None), ({"overlong": "error"}, 0)):
        options = options_of(**values)
        rejects, entries = plan_stage.plan_rejects(records, options, None, None, max_images=most)
        limit = 32 if values == {"pad_multiple": 16} else 40
        expected = [
            int(old) or OVERLONG * int(length > limit or (most is not None and images > most))
            for old, length, images in zip(status, records.length, records.num_images, strict=True)
        ]
        assert rejects.status.tolist() == entries.status.tolist() == expected
        assert (records.status == status).all()
        assert entries.fragments is None
        assert (rejects.table, rejects.options, rejects.max_images, dict(rejects.details)) == (
            records, options, most, {}
        )  # fmt: skip


def test_bytes_of_frames_are_found_in_the_files_of_their_chunks() -> None:
    records = table_of(10, frames_bytes=[0, 5, 7, 0, 3, 2, 0, 0, 11, 1])
    kept = plan_stage.kept_frames(records)
    assert kept is not None
    refs = kept.refs(np.array([2, 8]))
    assert [path.name for path in refs.files] == ["a.frames", "b.frames"]
    assert (refs.offset.tolist(), refs.size.tolist()) == ([5, 2], [7, 11])
    assert plan_stage.kept_frames(table_of(10, frames_bytes=[0] * 10)) is None


class Letters(Processor):
    """Capitals are targets, vowels have the weight 0.5, `#` is a token of an image, and `%` one of a video."""

    image_token_id = ord("#")

    @property
    def rules(self) -> Any:
        rules = super().rules
        return replace(rules, media={**rules.media, "video": (ord("%"), "%")})

    def encode(self, conversation: Conversation) -> EncodedSample:
        ids = np.array([ord(letter) for letter in str(conversation.text)])
        labels = np.where((ids >= ord("A")) & (ids <= ord("Z")), ids, -100)
        weights = np.where(np.isin(ids, [ord("A"), ord("E")]), 0.5, 1).astype(np.float32)
        tokens: dict[str, Any] = {"image_token_id": ord("#"), "video_token_id": ord("%")}
        return EncodedSample(input_ids=ids, labels=labels, loss_weights=weights, **tokens)


@pytest.mark.parametrize(
    ("overlong", "sample_class"),
    [("truncate", "PackedMultiMixQASample"), ("truncate", "PackedTokensSample"), ("split", "PackedTokensSample")],
)
def test_long_records_are_cut_or_rejected_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overlong: Any, sample_class: str
) -> None:
    rng = random.Random(0)
    texts = ["B" + "".join(rng.choices("ABCDEabcde", k=rng.randint(2, 90))) for _ in range(200)]
    texts[3], texts[100], texts[120] = "a" * 69, "ABCD" * 15 + "a#a", "ABCD" * 15 + "a%a"
    texts[150] = "a" * 45 + "A" + "b" * 70  # only a split keeps the target
    texts[5], texts[160], texts[170] = "A" * 50, "B" * 95, "B" + "A" * 40  # all tokens are targets
    texts[180] = "B" * 30 + "a" + "B" * 30
    encoder = Letters()
    samples = [encoder.encode(Conversation(text=text)) for text in texts]
    data = tmp_path / "a.jsonl"
    data.write_text("".join(json.dumps({"id": f"r{n}", "text": text}) + "\n" for n, text in enumerate(texts)))
    planned: list[Any] = []
    encoded: list[Conversation] = []
    plan_rejects, encode = plan_stage.plan_rejects, Letters.encode

    def counted(self: Letters, conversation: Conversation) -> EncodedSample:
        encoded.append(conversation)
        return encode(self, conversation)

    def recorded(*arguments: Any, **named: Any) -> Any:
        planned.append((arguments[0], *plan_rejects(*arguments, **named)))
        return planned[0][1:]

    monkeypatch.setattr(plan_stage, "plan_rejects", recorded)
    monkeypatch.setattr(Letters, "encode", counted)
    pack(
        data, output_dir=tmp_path / "out", encoder=encoder, seq_len=44, pad_multiple=8, overlong=overlong,
        sample_class=sample_class, workers=1, max_reject_rate=1, split_overlap=3,
    )  # fmt: skip
    ((measured, rejects, entries),) = planned
    status, details, pieces = measured.status.tolist(), {}, []
    supervised, checksums = measured.supervised.tolist(), measured.weight_checksum.tolist()
    for row, sample in enumerate(samples):
        if status[row] or len(sample) <= 40:
            continue
        try:
            if overlong == "split":
                pieces.append(split_sample(sample, 40, 3, 0))
                pieces[-1]["record"] = row
            else:
                cut = sample.truncated(40)
                supervised[row], checksums[row] = cut.num_supervised, cut.weight_checksum
        except RecordError as error:
            status[row], details[row] = chunks.STATUSES.index(error.reject.reason), error.reject.detail
    long = sum(len(sample) > 40 for sample in samples)
    assert long > 90
    assert len(encoded) == 200 + (long if sample_class != "PackedTokensSample" else 0)  # stored tokens are read
    assert rejects.status.tolist() == status
    assert dict(rejects.details) == details
    assert sorted(details) == ([3, 120] if overlong == "split" else [3, 100, 120, 150])
    assert entries.supervised[:200].tolist() == supervised
    assert entries.weight_checksum[:200].tolist() == checksums
    assert measured.supervised is not entries.supervised
    lengths = pq.read_table(tmp_path / "out" / "lengths.parquet").to_pylist()
    cut = {"truncate": "truncated", "split": "split"}[overlong]
    names = [
        chunks.STATUSES[code] if code or len(sample) <= 40 else cut
        for code, sample in zip(status, samples, strict=True)
    ]
    assert [row["status"] for row in lengths] == [*names, *["fragment"] * sum(map(len, pieces))]
    if pieces:
        assert entries.fragments.tolist() == np.concatenate(pieces).tolist()
    else:
        assert entries.fragments is None


def test_an_encoder_that_keeps_no_tokens_cannot_cut(tmp_path: Path) -> None:
    class Silent(Characters):
        def measure(self, conversations: Any, *, keep_tokens: bool = False) -> list[Measurement]:
            return [replace(each, sample=None) for each in super().measure(conversations)]

    data = tmp_path / "a.jsonl"
    data.write_text(json.dumps({"id": "a", "text": "word " * 20}) + "\n")
    with pytest.raises(RecordError, match="its encoder keeps no tokens") as raised:
        pack(data, output_dir=tmp_path / "out", encoder=Silent(), seq_len=40, overlong="truncate", workers=1)
    assert raised.value.reject.reason == "empty"


class Stages(Progress):
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def start(self, stage: str, total: int, unit: str) -> None:
        self.calls.append((stage, total, unit))

    def advance(self, units: int, records: int = 0) -> None:
        self.calls.append((units, records))


def test_reports_and_progress_of_a_run_and_of_a_refused_run(tmp_path: Path) -> None:
    data = tmp_path / "a.jsonl"
    data.write_text("".join(json.dumps({"id": f"r{n}", "text": "w" * (30 + n)}) + "\n" for n in range(30)))
    options: dict[str, Any] = {"encoder": Characters(), "seq_len": 40, "workers": 1}
    with pytest.raises(RejectLimitError, match=rf"^19 of 30 records .* See {tmp_path / 'bad' / 'rejects.jsonl'}"):
        pack(data, output_dir=tmp_path / "bad", max_reject_rate=0.5, **options)
    refused = pq.read_table(tmp_path / "bad" / "lengths.parquet").to_pylist()
    assert [row["pack"] for row in refused] == [row["shard"] for row in refused] == [None] * 30
    assert [row["status"] for row in refused] == ["packed"] * 11 + ["overlong"] * 19
    stages = Stages()
    result = pack(data, output_dir=tmp_path / "out", max_reject_rate=1, progress=stages, group_by="media", **options)
    start = stages.calls.index(("plan", 30, "records"))
    assert stages.calls[start + 1] == (30, 30)
    assert result.utilization_ungrouped == pytest.approx(result.manifest.utilization)
    alone = pack(data, output_dir=tmp_path / "again", max_reject_rate=1, **options)
    assert alone.utilization_ungrouped is None
    lengths = pq.read_table(tmp_path / "out" / "lengths.parquet").to_pylist()
    assert sum(row["pack"] is not None for row in lengths) == result.manifest.packed


def test_stored_tokens_with_another_number_of_images_are_not_split(tmp_path: Path) -> None:
    sample = Letters().encode(Conversation(text="B" + "a" * 30 + "##" + "Ba" * 20))
    records = table_of(2, length=[len(sample)] * 2, num_images=[1, 2])
    files = [tmp_path / "a.tokens", tmp_path / "b.tokens"]
    for file in files:
        chunks.write_tokens(file, [sample])
    rows = np.arange(2)
    kept = RecordBytes(files, records.file_starts, records.length, np.zeros, unit=chunks.TOKEN)
    tokens = kept.refs(rows)
    loader = options_of(encoder=Letters()).encoder_loader
    task = plan_stage.OverlongTask(rows=rows, records=records.refs(rows), images=records.num_images, tokens=tokens)
    (first, fragments), (second, reject) = plan_stage.cut_overlong(None, loader, 40, 3, task)
    assert (first, second) == (0, 1)
    assert fragments.tolist() == split_sample(sample, 40, 3, 1).tolist()
    assert reject.detail.endswith("cannot be split between its 2 images, whose tokens are 1 runs")


def test_utilization_is_compared_with_packs_of_any_media(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    records: list[Any] = [{"text": "w" * 10}, {"text": "<image>www", "images": ["a.png"]}] * 5
    data = tmp_path / "a.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    result = pack(data, output_dir=tmp_path / "out", encoder=Characters(), seq_len=40, workers=1, group_by="media")
    assert result.manifest.utilization == pytest.approx(100 / 160)
    assert result.utilization_ungrouped == pytest.approx(100 / 120)


@pytest.mark.parametrize("block", [1, 3, 100])
def test_the_first_rejected_record_of_a_group_is_the_reason(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(arrays, "BLOCK", block)
    records = table_of(7, group=[5, 0, 5, 5, 5, 8, 8], status=[0, 0, 2, 1, 0, 0, 0], length=[3, 3, 3, 3, 3, 30, 30])
    reader = SimpleNamespace(part=None, sources=[])
    rejects, entries = plan_stage.plan_rejects(records, options_of(), reader, None)
    group = chunks.STATUSES.index("overlong_group")
    assert rejects.status.tolist() == [2, 0, 2, 1, 2, group, group]
    row = "its group has a record that is rejected, row 2 of the file"
    tokens = "its group of 2 samples has 60 tokens, more than seq_len 40; raise seq_len: groups are neither "
    tokens += "truncated nor split"
    assert rejects.details == {0: row, 4: row, 5: tokens, 6: tokens}
    assert entries.group_numbers().tolist() == [0, -1, 0, 0, 0, 5, 5]
