"""Field maps and adapters: records in the user's own words, read as any other, and part of the fingerprint."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from energon_packed import Adapter, ConfigError, Conversation, FieldMap, PackOptions, RecordError, normalize, pack
from tests.internals import compute_fingerprints

ADAPTERS = """
from energon_packed import Conversation, Message

def swap(record):
    if record["skip"]:
        return None
    return {"id": record["n"], "question": record.pop("q"), "answer": record["a"]}

def build(record):
    return Conversation(id="x", messages=(Message("user", record["q"]), Message("assistant", record["a"])))

def wrong(record):
    return 5
"""


@pytest.fixture
def adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    name = f"adapters_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(ADAPTERS)
    path = list(sys.path)
    monkeypatch.chdir(tmp_path)
    yield name
    sys.path[:] = path
    sys.modules.pop(name, None)


def test_a_map_names_the_fields_of_a_flat_record() -> None:
    record = {"question": "What?", "answer": "A cat.", "pic": "a.png", "url": "u", "about": "Be brief."}
    conversation = normalize(FieldMap.parse("user=question, assistant=answer,image=pic,system=about").apply(record))
    assert [(m.role, m.content) for m in conversation.messages] == [
        ("system", "Be brief."),
        ("user", "<image>What?"),
        ("assistant", "A cat."),
    ]
    assert [image.path for image in conversation.images] == ["a.png"]
    assert conversation.unused_fields == ("url",)


def test_lists_are_several_turns_and_null_is_no_value() -> None:
    record = {"q": ["a", "b"], "a": ["x", "y"], "p": None}
    conversation = normalize(FieldMap.parse({"user": "q", "assistant": "a", "image": "p"}).apply(record))
    assert [m.content for m in conversation.messages] == ["a", "x", "b", "y"]


@pytest.mark.parametrize(
    ("text", "detail"),
    [
        ("user", "must have the form user=question"),
        ("user=q,bot=a", "unknown name 'bot' in `map`. Use system, user, assistant"),
        ("user=q", "has no assistant"),
        ("user=q,assistant=q", "repeats a name or a field"),
        (5, "`map` must have the form .*, got 5"),
    ],
)
def test_a_wrong_map_is_an_error_of_the_options(text: Any, detail: str) -> None:
    with pytest.raises(ConfigError, match=detail):
        FieldMap.parse(text)


@pytest.mark.parametrize(
    ("record", "reason", "detail"),
    [
        ({"q": "?"}, "missing_field", "`map` names a, but the record has q"),
        ({"q": ["?"], "a": ["x", "y"]}, "missing_field", "1 user turns for 2 answers"),
        ({"q": "?", "a": "x", "messages": [1]}, "unsupported_field", "a field messages beside those of `map`"),
        ({"q": "?", "a": None}, "missing_field", "the assistant message has no content"),
        ({"q": "?", "a": "x", "chosen": "y"}, "unsupported_field", "preference data is out of scope"),
        ([1], "bad_json", "must be an object"),
    ],
)
def test_records_that_the_map_does_not_fit(record: Any, reason: str, detail: str) -> None:
    with pytest.raises(RecordError) as caught:
        normalize(FieldMap.parse("user=q,assistant=a").apply(record))
    assert caught.value.reason.value == reason
    assert detail in caught.value.detail


def test_an_adapter_makes_records_and_conversations(adapters: str) -> None:
    record = {"n": 1, "q": "What?", "a": "A cat.", "skip": False}
    assert Adapter(f"{adapters}:swap").apply(record) == {"id": 1, "question": "What?", "answer": "A cat."}
    assert record["q"] == "What?"  # the function has a copy
    assert isinstance(Adapter(f"{adapters}:build").apply(record), Conversation)
    for name, given, reason, detail in (
        ("swap", {**record, "skip": True}, "dropped_by_adapter", "returned None"),
        ("swap", {}, "adapter_failed", "raised KeyError: 'skip'"),
        ("wrong", record, "adapter_failed", "returned int; return a record"),
    ):
        with pytest.raises(RecordError) as caught:
            Adapter(f"{adapters}:{name}").apply(given)
        assert caught.value.reason.value == reason
        assert detail in caught.value.detail


@pytest.mark.parametrize(
    ("name", "detail"),
    [
        ("nothing", "must have the form package.module:function"),
        ("json:none", "no function none"),
        ("no.such:f", "no.such"),
    ],
)
def test_an_adapter_that_is_not_there(name: str, detail: str) -> None:
    with pytest.raises(ConfigError, match=detail):
        _ = Adapter(name).source


def test_both_pack_and_are_in_the_fingerprint(adapters: str, tokenizer_dir: Path, tmp_path: Path) -> None:
    rows = [{"n": n, "q": f"What is {n}?", "a": f"It is {n}.", "skip": n % 4 == 0} for n in range(40)]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))

    def options(**rest: Any) -> PackOptions:
        return PackOptions(
            inputs=file, tokenizer=tokenizer_dir, seq_len=256, workers=1, output_dir=tmp_path / "out", **rest
        )

    result = pack(
        file, output_dir=tmp_path / "a", tokenizer=tokenizer_dir, seq_len=256, workers=1,
        adapter=f"{adapters}:swap",
    )  # fmt: skip
    assert (result.manifest.packed, result.manifest.rejects) == (30, {"dropped_by_adapter": 10})
    result = pack(
        file, output_dir=tmp_path / "b", tokenizer=tokenizer_dir, seq_len=256, workers=1,
        map={"user": "q", "assistant": "a", "id": "n"},
    )  # fmt: skip
    assert (result.manifest.packed, result.manifest.rejects) == (40, {})

    before = compute_fingerprints(options(adapter=f"{adapters}:swap"), [], None)
    assert before == compute_fingerprints(options(adapter=f"{adapters}:swap"), [], None)
    mapped = compute_fingerprints(options(map="user=q,assistant=a"), [], None)
    other = compute_fingerprints(options(map="user=a,assistant=q"), [], None)
    keys = [before, mapped, other, compute_fingerprints(options(adapter=f"{adapters}:build"), [], None)]
    assert len({one.measure for one in keys}) == len({one.tars for one in keys}) == 4
    Path(f"{adapters}.py").write_text(ADAPTERS + "\n# changed\n")
    del sys.modules[adapters]
    from tests.internals import mapping

    mapping._load.cache_clear()
    assert compute_fingerprints(options(adapter=f"{adapters}:swap"), [], None).tars != before.tars
