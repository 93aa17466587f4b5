"""Groups of samples: whole and in one row, in order, or rejected whole; from records to batches."""

import dataclasses
import hashlib
import itertools
import json
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from energon_packed import (
    BatchError,
    ChatEncoder,
    ConfigError,
    Conversation,
    DataflowConfig,
    DataflowLoader,
    EncodedSample,
    MapDistributor,
    Message,
    MixtureDistributor,
    PackedDataset,
    PackedIterableDataset,
    PackOptions,
    PackResult,
    PaddingFreeCollator,
    Reason,
    RecordError,
    RejectLimitError,
    SimpleBatcher,
    get_packed_loader,
    get_raw_loader,
    normalize,
    pack,
    plan_in_memory,
)
from tests.internals import (
    PackedFolder,
    TarShardWriter,
    check_order,
    cli,
    codec_for,
    dry_run,
    measure_stage,
    plan_stage,
    scan_tar,
    verify,
)

Records = list[dict[str, Any]]
WORDS = ["pack", "row", "token", "image", "model", "loss", "gradient", "worker", "shard", "record"]


def words(rng: random.Random, most: int) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(1, most)))


def single(rng: random.Random, ident: str, most: int = 20, **more: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": words(rng, 5)}, {"role": "assistant", "content": words(rng, most)}]
    return {"id": ident, "messages": turns, **more}


def several(rng: random.Random, ident: str, most: int = 20, roles: Sequence[str] = ("chosen", "rejected")) -> Any:
    return {"id": ident, "prompt": words(rng, 5), "several": {role: words(rng, most) for role in roles}}


def adapted(record: Mapping[str, Any]) -> Any:
    """The adapter of these tests: a record with `several` is a group of answers."""
    if "several" not in record:
        return record
    media: dict[str, Any] = {}
    if "image" in record:
        files = {name: record[name] for name in ("image", "patch_positions") if name in record}
        own = normalize({"text": "<image>", **files})
        media = {"images": own.images, "patch_positions": own.patch_positions}
    prompt = Message("user", ("<image>" if media else "") + record["prompt"])
    members = [
        Conversation(messages=(prompt, Message("assistant", text)), role=role, label=(float(place),), **media)
        for place, (role, text) in enumerate(record["several"].items())
    ]
    return Conversation(id=record.get("id"), members=tuple(members))


ADAPTER = f"{__name__}:adapted"


@pytest.fixture
def grouped(tmp_path: Path, text_tokenizer_dir: Path) -> Callable[..., PackResult]:
    """Packs records, with the adapter above."""

    def run(records: Records, name: str = "out", **options: Any) -> PackResult:
        data = tmp_path / f"{name}.jsonl"
        lines = "".join(f"{json.dumps(record)}\n" for record in records)
        if not data.exists() or data.read_text() != lines:
            data.write_text(lines)
        chosen = {"tokenizer": text_tokenizer_dir, "seq_len": 256, "workers": 1, "max_reject_rate": 1} | options
        return pack(data, output_dir=tmp_path / name, adapter=ADAPTER, shard_prefix="g", **chosen)

    return run


def stored(result: PackResult) -> Iterator[tuple[str, list[Any]]]:
    """Key and samples of each pack."""
    codec = codec_for(result.manifest.sample_class)
    for tar in sorted(result.shards.glob("*.tar")):
        for raw in scan_tar(tar).packs():
            yield raw["__key__"], codec.read(raw)


def contents(result: PackResult) -> dict[str, str]:
    """Digest of every file that a run must write in the same way, whatever its workers."""
    files = [*result.shards.rglob("*.tar"), *result.shards.rglob("*.idx"), result.lengths, result.rejects]
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def check_groups(result: PackResult, records: Records) -> None:
    """Every group is whole and in one row, in order, or rejected whole; every other record is packed or rejected."""
    rejects = [json.loads(line) for line in result.rejects.read_text().splitlines()]
    rejected = {line["row"] for line in rejects}
    assert len(rejected) == len(rejects)
    packs = list(stored(result))
    place = {sample.conversation.id: (key, at) for key, samples in packs for at, sample in enumerate(samples)}
    of_sample = {sample.conversation.id: sample.conversation.group for _, samples in packs for sample in samples}
    assert len(place) == sum(len(samples) for _, samples in packs) == result.manifest.packed
    groups: dict[Any, list[list[str]]] = defaultdict(list)  # ids of the samples of each record of a group
    rows: dict[Any, list[int]] = defaultdict(list)
    expected = 0
    for row, record in enumerate(records):
        key = ("key", record["pair"]) if record.get("pair") is not None else ("row", row)
        ids = [f"{record['id']}#{n}" for n in range(len(record["several"]))] if "several" in record else [record["id"]]
        groups[key].append(ids)
        rows[key].append(row)
        expected += 0 if row in rejected else len(ids)
    packed_groups = 0
    for key, members in groups.items():
        names = [name for ids in members for name in ids]
        if key[0] == "key" or len(names) > 1:
            assert len({row in rejected for row in rows[key]}) == 1, key
        if rows[key][0] in rejected or not set(names) & set(place):
            assert not set(names) & set(place)
            continue
        pack_key, first = place[names[0]]
        assert [place[name] for name in names] == [(pack_key, first + n) for n in range(len(names))]
        if len(names) > 1:
            packed_groups += 1
            assert len({of_sample[name] for name in names}) == 1
        neighbors = [own for name, own in of_sample.items() if place[name][0] == pack_key and name not in names]
        assert of_sample[names[0]] is None or of_sample[names[0]] not in neighbors
    assert result.manifest.groups == packed_groups
    assert result.manifest.records == len(records)


@settings(deadline=None, max_examples=12, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 10**6),
    algorithm=st.sampled_from(["bfd", "ffd", "sequential", "window_5"]),
    multiple=st.sampled_from([1, 16]),
    max_samples=st.none() | st.integers(1, 4),
    overlong=st.sampled_from(["drop", "truncate", "split"]),
    group_by=st.sampled_from(["none", "media"]),
)
def test_groups_are_whole_in_one_row_or_rejected_whole(
    grouped: Callable[..., PackResult],
    seed: int,
    algorithm: str,
    multiple: int,
    max_samples: int | None,
    overlong: str,
    group_by: str,
) -> None:
    rng = random.Random(seed)
    records: Records = []
    for row in range(40):
        kind = rng.randrange(4)
        if kind == 0:
            records.append(
                several(rng, f"m{row}", rng.choice([5, 20]), rng.choice([("a", "b"), ("a",), ("a", "b", "c")]))
            )
        elif kind == 1:
            records.append(single(rng, f"s{row}", rng.choice([5, 30])))
        else:
            records.append(single(rng, f"k{row}", rng.choice([3, 12]), pair=rng.randrange(6)))
    if rng.random() < 0.5:
        del records[rng.randrange(40)]["id"]
        records = [{"id": f"x{row}", **record} for row, record in enumerate(records)]
    if rng.random() < 0.5:
        broken = next(record for record in records if record.get("pair") is not None)
        broken["messages"] = [{"role": "user", "content": "no answer"}, {"role": "nobody", "content": "x"}]
    options = {"algorithm": algorithm, "pad_multiple": multiple, "max_samples_per_pack": max_samples}
    try:
        result = grouped(
            records, f"out{seed}", seq_len=320, group_field="pair", overlong=overlong, group_by=group_by, seed=seed,
            overwrite=True,
            **options,
        )  # fmt: skip
    except RejectLimitError:
        return
    if overlong == "split":
        assert not any(
            "#" in str(s.conversation.id) and str(s.conversation.id)[0] == "s" for _, p in stored(result) for s in p
        )
    check_groups(result, records)
    for _, samples in stored(result):
        lengths = np.array([-(-sample.length // multiple) * multiple for sample in samples])
        assert lengths.sum() <= 320
        assert len(samples) <= (max_samples or 999)


def mixed(count: int = 60) -> Records:
    rng = random.Random(1)
    records = [several(rng, f"m{row}") if row % 3 == 0 else single(rng, f"s{row}") for row in range(count)]
    records += [single(rng, f"k{row}", pair=row // 2, role=("good", "bad")[row % 2], label=row) for row in range(20)]
    return records


def test_workers_and_later_runs_write_the_same_bytes(grouped: Callable[..., PackResult]) -> None:
    options: dict[str, Any] = {"group_field": "pair", "max_packs_per_shard": 4}
    first = grouped(mixed(), **options)
    expected = contents(first)
    assert first.manifest.sample_class == "PackedTokensSample"
    assert first.manifest.unused_fields == {}
    assert contents(grouped(mixed(), workers=2, resume=False, **options)) == expected
    tars = sorted(first.shards.glob("*.tar"))
    assert len(tars) > 2
    tars[1].unlink()
    again = grouped(mixed(), **options)
    assert contents(again) == expected
    assert (again.manifest.counters["shards_written"], again.manifest.counters["reused"]) == (1, 80)
    for tokens in (first.shards.parent / ".work").glob("measure-*/*.tokens"):
        tokens.write_bytes(b"")
    tars[0].unlink()
    assert contents(grouped(mixed(), **options)) == expected


def test_an_interrupted_run_continues_to_the_same_bytes(
    grouped: Callable[..., PackResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"group_field": "pair", "max_packs_per_shard": 3}
    expected = contents(grouped(mixed(), "whole", **options))
    written = []

    def stop(self: Any, key: str, parts: Any) -> None:
        written.append(key)
        if len(written) == 8:
            raise KeyboardInterrupt
        add(self, key, parts)

    add = TarShardWriter.add
    with monkeypatch.context() as patched:
        patched.setattr(TarShardWriter, "add", stop)
        with pytest.raises(KeyboardInterrupt):
            grouped(mixed(), "other", **options)
    result = grouped(mixed(), "other", **options)
    assert result.manifest.counters["shards_reused"] == 2
    found = contents(result)
    same = {name for name, digest in found.items() if expected.get(name) == digest}
    assert {name for name in found if name.endswith((".tar", ".idx"))} <= same


def test_groups_after_plain_records_are_stored_as_tokens(
    grouped: Callable[..., PackResult], tmp_path: Path, text_tokenizer_dir: Path
) -> None:
    """`auto` knows of groups when the records are read: the tokens of chunks without groups are added then."""
    rng = random.Random(0)
    for name, made in (("a", single), ("b", several)):
        lines = [json.dumps(made(rng, f"{name}{row}")) for row in range(300)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    options: dict[str, Any] = {"tokenizer": text_tokenizer_dir, "seq_len": 512, "adapter": ADAPTER, "workers": 1}
    chosen = pack(files, output_dir=tmp_path / "auto", shard_prefix="g", **options)
    named = pack(files, output_dir=tmp_path / "named", shard_prefix="g", sample_class="PackedTokensSample", **options)
    files_of = [contents(result) for result in (chosen, named)]
    assert pq.read_table(chosen.lengths).equals(pq.read_table(named.lengths))
    for found in files_of:
        del found["lengths.parquet"]  # with the fingerprint of the options in its metadata
    assert files_of[0] == files_of[1]
    assert (chosen.manifest.sample_class, chosen.manifest.groups) == ("PackedTokensSample", 300)
    plain = pack(files[0], output_dir=tmp_path / "plain", **options)
    assert plain.manifest.sample_class == "PackedCaptioningSample"
    assert not list((tmp_path / "plain").rglob("*.tokens"))


def test_records_of_groups_are_tokenized_once(
    grouped: Callable[..., PackResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, measure = [], measure_stage.Measurer._measure

    def noted(self: Any, encoder: Any, records: Any, *, keep_tokens: bool) -> None:
        kept.append(keep_tokens)
        measure(self, encoder, records, keep_tokens=keep_tokens)

    monkeypatch.setattr(measure_stage.Measurer, "_measure", noted)
    grouped([several(random.Random(row), f"m{row}") for row in range(5)])
    assert kept == [True]


def labeled(record: Mapping[str, Any]) -> Conversation:
    return dataclasses.replace(normalize({"id": record["id"], "messages": record["messages"]}), label=(record["n"],))


@pytest.mark.parametrize("streaming", [True, False, None])
def test_labels_without_groups(tmp_path: Path, text_tokenizer_dir: Path, streaming: bool | None) -> None:
    data = tmp_path / "d.jsonl"
    records = [single(random.Random(row), f"s{row}", n=float(row)) for row in range(12)]
    data.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    options: dict[str, Any] = {"tokenizer": text_tokenizer_dir, "seq_len": 256, "adapter": f"{__name__}:labeled"}
    if streaming is None:
        result = pack(data, output_dir=tmp_path / "out", workers=1, **options)
        assert (result.manifest.sample_class, result.manifest.groups) == ("PackedTokensSample", 0)
        encoder = ChatEncoder.from_pretrained(text_tokenizer_dir)
        batches = list(get_packed_loader(result.shards, encoder, num_workers=0, epochs=1))
    else:
        config = DataflowConfig(inputs=[str(data)], streaming=streaming, **options)
        batches = list(get_raw_loader(config, num_workers=0))
    found = {}
    for batch in batches:
        assert batch.groups is None
        found |= dict(zip(batch.ids, batch.sample_labels.tolist(), strict=True))
    assert found == {f"s{row}": float(row) for row in range(12)}


def test_members_are_encoded_as_records_of_their_own(
    grouped: Callable[..., PackResult], text_tokenizer_dir: Path
) -> None:
    encoder = ChatEncoder.from_pretrained(text_tokenizer_dir)
    records = mixed()
    result = grouped(records, group_field="pair")
    samples = {s.id: s for batch in PackedDataset(result.shards, encoder) for s in batch}
    for record in records:
        conversation = adapted(record)
        members = conversation.members if isinstance(conversation, Conversation) else (normalize(record),)
        for number, member in enumerate(members):
            name = record["id"] if len(members) == 1 else f"{record['id']}#{number}"
            own = encoder.encode(member)
            assert samples[name].input_ids.tolist() == own.input_ids.tolist()
            assert samples[name].labels.tolist()[1:] == own.labels.tolist()[1:]
            if len(members) > 1:
                assert (samples[name].role, samples[name].label) == (member.role, member.label)
    assert samples["k3"].role == "bad"
    assert samples["k3"].label == (3.0,)
    assert samples["s1"].role is samples["s1"].label is None


def test_batches_number_the_groups_of_all_their_packs(
    grouped: Callable[..., PackResult], text_tokenizer_dir: Path
) -> None:
    encoder = ChatEncoder.from_pretrained(text_tokenizer_dir)
    result = grouped(mixed(), group_field="pair")
    loaders = [
        get_packed_loader(result.shards, encoder, micro_batch_size=2, num_workers=0, epochs=1),
        DataflowLoader(MapDistributor(PackedDataset(result.shards)), encoder, SimpleBatcher(2), num_workers=2),
    ]
    for loader in loaders:
        seen = 0
        for batch in loader:
            seen += len(batch.ids)
            if batch.groups is None:
                assert {name[0] for name in batch.ids} == {"s"}
                assert (batch.roles, batch.sample_labels) == ([], None)
                continue
            assert batch.groups.dtype == torch.int32
            assert batch.sample_labels.shape == (len(batch.ids),)
            groups: dict[str, set[int]] = defaultdict(set)
            for name, group in zip(batch.ids, batch.groups.tolist(), strict=True):
                key = f"pair{int(name[1:]) // 2}" if name[0] == "k" else name.split("#")[0]
                groups[key].add(group)
            assert all(len(own) == 1 for own in groups.values())
            assert len({own.pop() for own in groups.values()}) == len(groups)
            first = list(dict.fromkeys(batch.groups.tolist()))
            assert first == list(range(len(first)))
            for name, role, label in zip(batch.ids, batch.roles, batch.sample_labels.tolist(), strict=True):
                if name[0] == "s":
                    assert role is None
                    assert np.isnan(label)
                elif "#" in name:
                    assert (role, label) == (("chosen", "rejected")[int(label)], float(name.split("#")[1]))
            check_split(batch)
        assert seen == result.manifest.packed


def check_split(batch: Any) -> None:
    joined = PaddingFreeCollator().collate(batch.split())
    moved = batch.to("cpu").without_targets()
    for other in (joined, moved):
        assert torch.equal(other.groups, batch.groups)
        assert torch.equal(other.sample_labels.nan_to_num(-1), batch.sample_labels.nan_to_num(-1))
        assert other.roles == batch.roles


def sample(name: str, **more: Any) -> EncodedSample:
    return EncodedSample(id=name, input_ids=np.array([5, 6]), labels=np.array([-100, 6]), **more)


def test_samples_of_a_collator() -> None:
    collate = PaddingFreeCollator().collate
    plain = collate([sample("a"), sample("b")])
    assert (plain.groups, plain.roles, plain.sample_labels) == (None, [], None)
    batch = collate([sample("a", group="x"), sample("b"), sample("c", group="x", label=(1.0, 2.0))])
    assert batch.groups is not None
    assert batch.groups.tolist() == [0, 1, 0]
    assert batch.sample_labels is not None
    assert batch.sample_labels[2].tolist() == [1.0, 2.0]
    assert bool(batch.sample_labels[:2].isnan().all())
    with pytest.raises(ValueError, match=r"must have the same number of values, got 1 and 2\. Write lists"):
        collate([sample("a", label=(1.0,)), sample("b", label=(1.0, 2.0))])


def test_items_with_equal_keys_are_different_groups() -> None:
    items = [[sample(f"{n}{role}", group="pair", role=role) for role in "ab"] for n in range(4)]
    (batch,) = list(DataflowLoader(MapDistributor(items, shuffle=False), packer=SimpleBatcher(4), num_workers=0))
    assert batch.groups is not None
    assert batch.groups.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_planned_rows_have_groups(tmp_path: Path, text_tokenizer_dir: Path) -> None:
    data = tmp_path / "d.jsonl"
    data.write_text("".join(f"{json.dumps(record)}\n" for record in mixed()))
    options: dict[str, Any] = {"inputs": [str(data)], "tokenizer": text_tokenizer_dir, "seq_len": 256}
    options |= {"adapter": ADAPTER, "group_field": "pair", "streaming": False}
    dataset = plan_in_memory(DataflowConfig(**options))
    names = [name for row in range(len(dataset)) for name in dataset.ids(row)]
    assert len(names) == len(set(names)) == 40 + 2 * 20 + 20
    for row in range(len(dataset)):
        samples = dataset[row]
        assert [own.id for own in samples] == dataset.ids(row)
        assert sum(map(len, samples)) == dataset.lengths[row] <= 256
        places: dict[str, list[int]] = defaultdict(list)
        for place, own in enumerate(samples):
            if own.group is not None:
                places[own.group].append(place)
        assert all(len(own) == 2 and own[1] == own[0] + 1 for own in places.values())
        assert [own.role for own in samples if own.id[0] == "k"] == ["good", "bad"] * (
            sum(own.id[0] == "k" for own in samples) // 2
        )
    with pytest.raises(
        ConfigError, match=r"`max_samples_per_pack` must be None with groups .* got 3: a packer counts"
    ):
        plan_in_memory(DataflowConfig(**options, max_samples_per_pack=3))
    streamed = PackedIterableDataset(DataflowConfig(**options | {"streaming": True}, strict=True), num_workers=0)
    with pytest.raises(RejectLimitError, match=r"its samples must share a row.* set `streaming` to false"):
        list(streamed)


def test_a_group_with_a_bad_sample_is_left_out_whole(
    grouped: Callable[..., PackResult], text_tokenizer_dir: Path
) -> None:
    class Picky(ChatEncoder):
        def encode_row(self, *_: Any, **__: Any) -> Any:
            raise RecordError(Reason.UNSUPPORTED_FIELD, "row by row")

        def encode_many(self, conversations: Sequence[Conversation]) -> Any:
            bad = RecordError(Reason.UNSUPPORTED_MEDIA, "bad").reject
            results = super().encode_many(conversations)
            return [bad if own.id == "m3#1" else r for own, r in zip(conversations, results, strict=True)]

    result = grouped(mixed(), group_field="pair")
    encoder = Picky.from_pretrained(text_tokenizer_dir)
    loader = get_packed_loader(result.shards, encoder, num_workers=0, epochs=1, max_failures=2)
    names = [name for batch in loader for name in batch.ids]
    assert "m3#0" not in names
    assert len(names) == result.manifest.packed - 2
    with pytest.raises(BatchError, match="sample m3#0 is left out, as sample m3#1 of its group cannot be used"):
        list(get_packed_loader(result.shards, encoder, num_workers=0, epochs=1, max_failures=1))


@pytest.mark.parametrize(
    ("records", "options", "message"),
    [
        ([several(random.Random(0), "m")], {"sample_class": "PackedMultiMixQASample"},
         "the record has several samples, which PackedMultiMixQASample does not store; set `sample_class` to"),
        ([single(random.Random(0), "k", pair=1)], {"sample_class": "PackedCaptioningSample"},
         "the record has a group, which PackedCaptioningSample does not store; set `sample_class` to"),
        ([single(random.Random(0), "k", pair=[1])], {}, "pair of the record is [1]; the key of a group is"),
        ([single(random.Random(0), "k", pair=1, label="good")], {}, "label of the record is 'good'; use a number, or"),
        ([single(random.Random(0), "k", pair=1, role=2)], {}, "role of the record is 2; the role of a sample in its"),
        ([several(random.Random(0), "m", 200)], {}, "more than seq_len 256; raise seq_len: groups are neither"),
        ([several(random.Random(0), "m")], {"max_samples_per_pack": 1}, "its group has 2 samples, more than max_samp"),
        ([{"id": "v", "prompt": "p", "several": {"a": "x", "b": " "}}], {}, "every assistant turn is empty"),
    ],
)  # fmt: skip
def test_groups_that_cannot_be_packed(
    grouped: Callable[..., PackResult], records: Records, options: dict[str, Any], message: str
) -> None:
    for overlong in ("drop", "truncate"):
        filler = {"id": "f", "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
        result = grouped([*records, filler], overlong, group_field="pair", overlong=overlong, **options)
        (line,) = result.rejects.read_text().splitlines()
        assert message in json.loads(line)["detail"], line
        is_long = message.startswith(("more than seq_len", "its group has"))
        assert (json.loads(line)["reason"] == "overlong_group") == is_long


def test_a_rejected_record_rejects_its_group_with_its_reason(grouped: Callable[..., PackResult]) -> None:
    rng = random.Random(0)
    records = [single(rng, f"k{row}", pair=row // 3) for row in range(9)]
    records[4]["messages"][1]["role"] = "nobody"
    result = grouped(records, group_field="pair")
    lines = {line["id"]: line for line in map(json.loads, result.rejects.read_text().splitlines())}
    assert {name: line["reason"] for name, line in lines.items()} == dict.fromkeys(("k3", "k4", "k5"), "bad_role")
    assert lines["k5"]["detail"] == "its group has a record that is rejected, row 4 of the file"
    assert result.manifest.rejects == {"bad_role": 3}


def test_packs_are_packed_again_with_their_groups(
    grouped: Callable[..., PackResult], tmp_path: Path, text_tokenizer_dir: Path
) -> None:
    first = grouped(mixed(), group_field="pair")
    options: dict[str, Any] = {"tokenizer": text_tokenizer_dir, "seq_len": 1024, "workers": 1}
    again = pack(first.shards, output_dir=tmp_path / "again", **options)
    assert (again.manifest.sample_class, again.manifest.groups) == ("PackedTokensSample", first.manifest.groups)
    assert again.manifest.packed == first.manifest.packed
    assert again.manifest.packs < first.manifest.packs

    def pairs(result: PackResult) -> set[tuple[Any, ...]]:
        found = defaultdict(list)
        for key, samples in stored(result):
            for own in samples:
                found[key, own.conversation.group].append((own.conversation.id, own.conversation.role))
        return {tuple(own) for own in found.values() if len(own) > 1 and own[0][1]}

    assert pairs(again) == pairs(first)


def test_split_documents_are_no_groups(grouped: Callable[..., PackResult]) -> None:
    rng = random.Random(0)
    documents = [{"id": f"d{row}", "text": " ".join(rng.choices(WORDS, k=150 + row))} for row in range(6)]
    result = grouped([*mixed(30), *documents], group_field="pair", overlong="split", max_reject_rate=0)
    rows = defaultdict(set)
    for key, samples in stored(result):
        for own in samples:
            rows[own.conversation.id.split("#")[0]].add(key)
    assert all(len(rows[document["id"]]) > 1 for document in documents)
    assert all(len(rows[record["id"]]) == 1 for record in mixed(30))
    assert result.manifest.groups == 20
    assert not any(check.passed is False for check in verify(PackedFolder.open(result.shards), None))


def test_a_dry_run_plans_groups(grouped: Callable[..., PackResult], tmp_path: Path, text_tokenizer_dir: Path) -> None:
    result = grouped(mixed(), group_field="pair")
    options: dict[str, Any] = {"tokenizer": text_tokenizer_dir, "seq_len": 256, "workers": 1, "adapter": ADAPTER}
    made = PackOptions(
        inputs=[str(tmp_path / "out.jsonl")], output_dir=tmp_path / "dry", group_field="pair", **options
    )
    planned = dry_run(made)
    assert (planned.packs, planned.tokens) == (result.manifest.packs, result.manifest.tokens)
    assert [role for role, _ in planned.example] == ["user", "assistant"]


def test_a_field_without_the_option_is_unused(grouped: Callable[..., PackResult]) -> None:
    rng = random.Random(0)
    result = grouped([single(rng, f"k{row}", group=row // 2) for row in range(10)])
    assert result.manifest.unused_fields == {"group": 10}
    assert result.manifest.groups == 0
    assert "groups" not in json.loads((result.shards / ".nv-meta/packing.json").read_bytes())
    assert "group" not in pq.read_schema(result.lengths).names


def test_runs_that_may_not_see_whole_groups_are_refused(
    grouped: Callable[..., PackResult], tmp_path: Path, text_tokenizer_dir: Path
) -> None:
    rng = random.Random(0)
    records = [single(rng, f"k{row}", pair=row // 2) for row in range(10)]
    with pytest.raises(ConfigError, match=r"`part` must be None if several records are a group: a group"):
        grouped(records, group_field="pair", part=(0, 2))
    source = {"path": str(tmp_path / "out.jsonl"), "weight": 1.5}
    options: dict[str, Any] = {"tokenizer": text_tokenizer_dir, "seq_len": 256, "workers": 1, "group_field": "pair"}
    with pytest.raises(ConfigError, match=r"the weight of .* must be an integer if several records are a group"):
        pack(sources=[source], output_dir=tmp_path / "half", **options)
    twice = pack(sources=[source | {"weight": 2}], output_dir=tmp_path / "twice", **options)
    assert (twice.manifest.groups, twice.manifest.packed) == (10, 20)


def test_groups_of_two_sources_are_different_groups(
    tmp_path: Path, text_tokenizer_dir: Path, grouped: Callable[..., PackResult]
) -> None:
    rng = random.Random(0)
    sources = []
    for name in "ab":
        records = [several(rng, f"{name}m"), *[single(rng, f"{name}{n}", pair="k", role=f"r{n}") for n in range(2)]]
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
        sources.append({"path": str(tmp_path / f"{name}.jsonl"), "adapter": ADAPTER})
    options: dict[str, Any] = {"tokenizer": text_tokenizer_dir, "seq_len": 1024, "group_field": "pair", "workers": 1}
    result = pack(sources=sources, output_dir=tmp_path / "out", **options)
    ((_, samples),) = stored(result)
    groups: dict[Any, list[Any]] = defaultdict(list)
    for sample in samples:
        groups[sample.conversation.group].append((sample.conversation.id, sample.conversation.role))
    expected = [
        pair
        for name in "ab"
        for pair in (
            [(f"{name}0", "r0"), (f"{name}1", "r1")],
            [(f"{name}m#0", "chosen"), (f"{name}m#1", "rejected")],
        )
    ]
    assert sorted(groups.values()) == expected
    assert result.manifest.groups == 4


def test_a_group_is_among_the_packs_of_its_media(tmp_path: Path, tokenizer_dir: Path, grouped: Any) -> None:
    rng = random.Random(0)
    Image.new("RGB", (56, 56)).save(tmp_path / "a.png")
    picture = {"images": [str(tmp_path / "a.png")]}
    pairs = [[f"{n}{role}" for role in "xy"] for n in range(3)]
    records = [
        single(rng, ident, pair=ident[0], role=ident[1]) | (picture if ident[1] == "x" else {})
        for pair in pairs
        for ident in pair
    ]
    records += [single(rng, f"text{n}") for n in range(4)]
    result = grouped(
        records, tokenizer=tokenizer_dir, seq_len=512, group_by="media", group_field="pair", image_root="/"
    )
    found = sorted([sorted(own.conversation.id for own in samples) for _, samples in stored(result)])
    assert found == [sorted(itertools.chain(*pairs)), [f"text{n}" for n in range(4)]]


def test_members_keep_their_images(
    tmp_path: Path, tokenizer_dir: Path, grouped: Callable[..., PackResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rng = random.Random(0)
    records = []
    for row in range(6):
        Image.new("RGB", (56 + 28 * row, 56), (40 * row, 0, 0)).save(tmp_path / f"{row}.png")
        np.save(tmp_path / f"{row}.npy", np.indices((1, 4, 4 + 2 * row)).reshape(3, -1).T)
        media = {"image": str(tmp_path / f"{row}.png"), "patch_positions": [str(tmp_path / f"{row}.npy")]}
        records.append(several(rng, f"m{row}") | (media if row % 2 else {}))
    result = grouped(records, tokenizer=tokenizer_dir, seq_len=512, group_by="media")
    encoder = ChatEncoder.from_pretrained(tokenizer_dir)
    found = {own.id: own for row in PackedDataset(result.shards, encoder) for own in row}
    assert len(found) == 12
    for record in records:
        for number, member in enumerate(adapted(record).members):
            own, expected = found[f"{record['id']}#{number}"], encoder.encode(member)
            assert own.input_ids.tolist() == expected.input_ids.tolist()
            assert own.num_images == expected.num_images
            if expected.pixel_values is not None:
                assert torch.equal(own.pixel_values, expected.pixel_values)
    for _, samples in stored(result):
        assert len({bool(own.conversation.images) for own in samples}) == 1
        for own in samples:
            row = int(own.conversation.id[1])  # of m3#0
            files = [(tmp_path / f"{row}.npy").read_bytes()] if row % 2 else []
            assert [file.data for file in own.conversation.patch_positions] == files
    assert not any(check.passed is False for check in verify(PackedFolder.open(result.shards), None))


def test_verify_finds_a_group_in_two_rows(grouped: Callable[..., PackResult], monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)
    records = [several(rng, f"m{row}", 12) for row in range(30)]
    result = grouped(records, "good")
    checks = {check.name: check for check in verify(PackedFolder.open(result.shards), None)}
    assert not any(check.passed is False for check in checks.values())
    assert checks["groups are whole, each in one row"].summary == "30 groups"
    planned = plan_stage._plan_group
    with monkeypatch.context() as patched:
        patched.setattr(
            plan_stage, "_plan_group", lambda lengths, options, units, table: planned(lengths, options, None, table)
        )
        torn = grouped(records, "torn")
    checks = {check.name: check for check in verify(PackedFolder.open(torn.shards), None)}
    assert checks["groups are whole, each in one row"].passed is False
    assert any("apart from others" in problem for problem in checks["groups are whole, each in one row"].problems)


def test_inspect_shows_the_samples_of_a_group_in_order(grouped: Callable[..., PackResult]) -> None:
    result = grouped([several(random.Random(0), "m0")])
    shown = CliRunner().invoke(cli, ["inspect", str(result.shards)])
    lines = [line for line in shown.output.splitlines() if line.startswith("── ")]
    assert ["group 0, chosen, label 0" in lines[0], "group 0, rejected, label 1" in lines[1]] == [True, True]
    as_json = CliRunner().invoke(cli, ["inspect", str(result.shards), "--pack", "g_00000000", "--json"])
    samples = json.loads(as_json.output.splitlines()[-1])["samples"]
    assert [(own["group"], own["role"], own["label"]) for own in samples] == [
        ("0", "chosen", [0.0]),
        ("0", "rejected", [1.0]),
    ]


@pytest.mark.parametrize("kind", ["balance", "mixture"])
def test_ranks_log_and_resume_whole_groups(
    grouped: Callable[..., PackResult], text_tokenizer_dir: Path, tmp_path: Path, kind: str
) -> None:
    encoder = ChatEncoder.from_pretrained(text_tokenizer_dir)
    folders = [grouped(mixed(), name, group_field="pair").shards for name in ("a", "b")]

    def loader(rank: int, **log: Any) -> DataflowLoader:
        packs = [PackedDataset(folder) for folder in folders]
        if kind == "balance":
            distributor: Any = MapDistributor(packs[0], balance="attention")
        else:
            distributor = MixtureDistributor([MapDistributor(own) for own in packs], [1, 1])
        return DataflowLoader(distributor, encoder, batch_size=2, rank=rank, world_size=2, num_workers=0, **log)

    def whole(batch: Any) -> list[str]:
        """The ids of a batch, whose groups are whole; none of a row that only fills a step."""
        counts = Counter([] if batch.groups is None else batch.groups.tolist())
        for place, name in enumerate(batch.ids):
            if name is not None and name[0] != "s":
                assert counts[int(batch.groups[place])] == 2
        return [name for name in batch.ids if name is not None]

    seen: list[str] = []
    for rank in range(2):
        expected = [whole(batch) for batch in loader(rank, order_log=tmp_path / "log")]
        seen += [name for ids in expected for name in ids]
        first = loader(rank)
        iterator = iter(first)
        head = [whole(next(iterator)) for _ in range(2)]
        second = loader(rank)
        second.load_state_dict(first.state_dict())
        assert head + [whole(batch) for batch in second] == expected
    assert set(Counter(seen).values()) == {1 if kind == "balance" else 2}  # both datasets have the same records
    assert len(set(seen)) == 100
    assert check_order(tmp_path / "log").problems == []


def test_samples_with_a_label_need_no_target(grouped: Callable[..., PackResult], text_tokenizer_dir: Path) -> None:
    question = {"role": "user", "content": "Is it good?"}
    records: Records = [{"id": "a", "messages": [question], "label": 1}, {"id": "b", "messages": [question]}]
    result = grouped(records)
    assert result.manifest.packed == 1
    assert json.loads(result.rejects.read_text())["reason"] == "no_supervised_tokens"
    encoder = ChatEncoder.from_pretrained(text_tokenizer_dir)
    (batch,) = get_packed_loader(result.shards, encoder, epochs=1, num_workers=0)
    assert (batch.ids, batch.sample_labels.tolist(), set(batch.labels[0].tolist())) == (["a"], [1.0], {-100})
    assert not any(check.passed is False for check in verify(PackedFolder.open(result.shards), encoder))
