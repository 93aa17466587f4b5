"""Fields that nothing reads, and notes on records: counted in every run, reused chunks included."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from energon_packed import (
    ChatEncoder,
    Conversation,
    EncodedSample,
    FormatError,
    Measurement,
    Message,
    PackingManifest,
    PackResult,
    Processor,
    RejectLimitError,
    pack,
)
from tests.internals import cli, count_strings, index_stage, most_common, result_table
from tests.internals import reader as reader_module
from tests.printed import invoke, printed_json

TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
MESSAGES = tuple(Message(**turn) for turn in TURNS)
CONVERSATION = Conversation(text="hello")


@pytest.fixture
def names_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    """`normalize` names the fields beside `messages` and `id`, whatever it knows of them."""
    known: Callable[..., Conversation] = reader_module.normalize

    def normalize(record: Any, **options: Any) -> Conversation:
        unused = tuple(name for name in record if name not in ("messages", "id"))
        return replace(known({"messages": record["messages"]}, **options), unused_fields=unused)

    monkeypatch.setattr(reader_module, "normalize", normalize)


def shown(result: PackResult) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(result_table(result, 1, {"world_size": 1, "micro_batch_size": 1, "num_workers": 0}))
    return captured.get()


@pytest.mark.usefixtures("names_fields")
def test_unused_fields_are_counted_printed_and_stored(build: Any) -> None:
    records: list[Any] = [{"messages": TURNS, "url": "u", "source": "s"}] * 3
    records += [{"messages": TURNS, "url": "u", "\x1b[31m": 1}, "{broken"]
    first = build(records)
    assert list(first.manifest.unused_fields.items())[:2] == [("url", 4), ("source", 3)]
    assert PackingManifest.load(first.shards).unused_fields == first.manifest.unused_fields
    table = shown(first)
    assert "fields not used" in table
    assert "url" in table
    assert "\x1b[31m" not in table
    again = build(records, seq_len=300, overwrite=True)
    assert again.manifest.counters["reused"] == 5
    assert again.manifest.unused_fields == first.manifest.unused_fields


def test_rejected_records_are_not_counted(build: Any) -> None:
    kept = {"messages": TURNS, "url": "u", "image": None}
    lost = {"messages": TURNS, "url": "u", "source": "s", "images": ["none.png"]}
    found = build([kept, lost]).manifest
    assert found.rejects == {"missing_image": 1}
    assert found.unused_fields == {"url": 1}
    assert found.notes == {"image field is null or empty: read without an image": 1}


@pytest.mark.usefixtures("names_fields")
def test_long_lists_are_cut_with_a_count(build: Any) -> None:
    table = shown(build([{"messages": TURNS, **{f"field{n}": n for n in range(25)}}]))
    assert table.count("field") == 10 + 1  # and the title
    assert "15 more" in table
    assert count_strings([replace(CONVERSATION, unused_fields=("\ud83d", "a", "a"))])["unused_fields"] == {
        "?": 1,
        "a": 1,
    }
    many = most_common({f"f{n:03d}": 1 for n in range(300)} | {"most": 2})  # type: ignore[arg-type]
    assert next(iter(many.items())) == ("most", 2)
    assert (len(many), many["(others)"]) == (201, 101)


def test_a_manifest_has_every_field(build: Any) -> None:
    result = build([{"messages": TURNS}])
    file: Path = result.shards / ".nv-meta" / "packing.json"
    whole = json.loads(file.read_text())
    assert whole["format_version"] == 1
    for name in whole.keys() - {"format_version"}:
        file.write_text(json.dumps({key: value for key, value in whole.items() if key != name}))
        with pytest.raises(FormatError, match=f"is not a packing manifest: it has no field '{name}'. Copy it"):
            PackingManifest.load(result.shards)
    for name in ("sources", "shards"):
        (entry,) = whole[name]
        file.write_text(json.dumps(whole | {name: [dict(list(entry.items())[:-1])]}))
        with pytest.raises(FormatError, match=rf"{name}\[0\] has no field '{list(entry)[-1]}'"):
            PackingManifest.load(result.shards)


def test_sources_are_counted_one_by_one_up_to_a_limit(
    build: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = []
    for number, records in enumerate([2, 0, 3, 1]):
        inputs.append(tmp_path / f"{number}.jsonl")
        inputs[-1].write_text("".join(json.dumps({"messages": TURNS}) + "\n" for _ in range(records)) + "{broken\n")
    manifest = build(inputs=inputs).manifest
    length = manifest.tokens // 6
    expected = [([str(path)], n + 1, n, n * length) for path, n in zip(inputs, [2, 0, 3, 1], strict=True)]
    assert [(one.path, one.records, one.packed, one.tokens) for one in manifest.sources] == expected
    assert PackingManifest.load(tmp_path / "out").sources == manifest.sources
    monkeypatch.setattr(index_stage, "_MAX_SOURCES", 2)
    cut = build(inputs=inputs, overwrite=True, resume=False).manifest
    assert [(one.path, one.records, one.packed, one.tokens) for one in cut.sources] == [
        *expected[:2],
        (["(others)"], 6, 4, 4 * length),
    ]


def test_supervised_tokens_of_a_processor_of_ones_own(
    encoder: ChatEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Own(Processor):
        def encode(self, conversation: Conversation) -> EncodedSample:
            return encoder.encode(conversation)

    data = tmp_path / "own.jsonl"
    data.write_text("".join(json.dumps({"messages": TURNS}) + "\n" for _ in range(3)))
    options: dict[str, Any] = {"output_dir": tmp_path / "own", "seq_len": 256, "workers": 1}
    manifest = pack(data, encoder=Own(), **options).manifest
    assert manifest.supervised_tokens == 3 * encoder.encode(Conversation(messages=MESSAGES)).num_supervised
    assert manifest.template_fingerprint == ""

    def silent(self: Own, conversations: Any, *, keep_tokens: bool = False) -> list[Measurement]:
        return [Measurement(len(self.encode(one))) for one in conversations]

    monkeypatch.setattr(Own, "measure", silent)
    assert pack(data, encoder=Own(), overwrite=True, **options).manifest.supervised_tokens is None


def test_records_that_are_not_sampled_do_not_count_in_the_reject_rate(build: Any, tmp_path: Path) -> None:
    good = "".join(json.dumps({"text": f"Text {number}."}) + "\n" for number in range(60))
    (tmp_path / "some.jsonl").write_text(good)
    (tmp_path / "all.jsonl").write_text("{broken\n" + good[: good.index("\n") + 1])
    sources = [{"path": str(tmp_path / "some.jsonl"), "weight": 0.25}, str(tmp_path / "all.jsonl")]
    manifest = build(inputs=[], sources=sources).manifest
    counts = dict(manifest.rejects)
    assert counts.pop("bad_json") == 1
    assert counts == {"not_sampled": 60 - (manifest.packed - 1)}
    considered = manifest.packed + 1
    assert considered < 50
    build(inputs=[], sources=sources, max_reject_rate=1 / considered, overwrite=True)
    message = rf"^1 of {considered} records \({1 / considered:.1%}\) were rejected .*: 1 x bad_json, e.g. line 1 of"
    with pytest.raises(RejectLimitError, match=message):
        build(inputs=[], sources=sources, max_reject_rate=1 / considered - 1e-6, overwrite=True)


def test_folder_entries_that_are_not_read_are_printed_and_stored(
    build: Any, tmp_path: Path, tokenizer_dir: Path
) -> None:
    folder = tmp_path / "in"
    (folder / "images").mkdir(parents=True)
    (folder / "a.jsonl").write_text(json.dumps({"messages": TURNS}) + "\n")
    alone = build(inputs=[folder])
    file = alone.shards / ".nv-meta" / "packing.json"
    assert json.loads(file.read_text())["ignored_entries"] == []
    assert "not read" not in shown(alone)
    for name in ("README.md", "b.avro", *(f"images/{n}.png" for n in range(20))):
        (folder / name).touch()
    expected = [
        {"reason": "documentation", "count": 1, "examples": [str(folder / "README.md")]},
        {"reason": "unknown type", "count": 1, "examples": [str(folder / "b.avro")]},
        {"reason": "media", "count": 20, "examples": [str(folder / f"images/{n}.png") for n in (0, 1, 10, 11, 12)]},
    ]
    result = build(inputs=[folder], overwrite=True)
    assert json.loads(file.read_text())["ignored_entries"] == expected
    assert PackingManifest.load(result.shards).ignored_entries == result.manifest.ignored_entries
    assert (result.manifest.shards, result.manifest.fingerprint) == (alone.manifest.shards, alone.manifest.fingerprint)
    for part in ("not read as input", "entries", "media", "20"):
        assert part in shown(result)
    line = "not read as input: 1 x documentation; 1 x unknown type; 20 x media"
    settings = ["--tokenizer", str(tokenizer_dir)]
    assert line in invoke("lengths", folder, *settings).output
    dry_run = [str(folder), *settings, "-o", str(tmp_path / "new"), "--seq-len", "512", "--dry-run"]
    assert line in invoke("pack", *dry_run).output
    for command in (["pack", *dry_run], ["lengths", str(folder), *settings]):
        assert printed_json(cli, [*command, "--json"])["ignored_entries"] == expected


def test_records_are_counted_over_all_batches_and_files(build: Any, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0.5}]
    files = []
    for name, count in (("a", 300), ("b", 5)):  # a batch has 256 records
        files.append(tmp_path / f"{name}.jsonl")
        files[-1].write_text(f"{json.dumps({'messages': turns})}\n" * count)
    options = {"inputs": tuple(map(str, files))}
    first, second = build(**options).manifest, build(**options, max_samples_per_pack=2, overwrite=True).manifest
    assert first.notes == second.notes == {"loss weights other than 0 and 1": 305}
    names = ("measured", "tokenized", "reused")
    assert [first.counters[name] for name in names] == [305, 305, 0]
    assert [second.counters[name] for name in names] == [0, 0, 305]


def test_tokens_that_are_truncated_are_counted(build: Any, encoder: ChatEncoder) -> None:
    texts = ["a", "word " * 40, "word " * 50]
    lengths = [encoder.length(Conversation(text=text)) for text in texts]
    manifest = build(
        [{"text": text} for text in texts], seq_len=32, overlong="truncate", max_packs_per_shard=1
    ).manifest
    assert (manifest.truncated, manifest.tokens_cut) == (2, sum(lengths) - lengths[0] - 64)
    assert sorted(shard.tokens for shard in manifest.shards) == [lengths[0], 32, 32]
    assert manifest.tokens == manifest.sources[0].tokens == lengths[0] + 64
