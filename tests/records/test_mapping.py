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

def several(record):
    return [{"question": record["q"], "answer": record["a"]}] * 2

def turns(record):
    return [{"role": "user", "content": record["q"]}, {"role": "assistant", "content": record["a"]}]
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


NESTED = [
    ("user=data.question,assistant=data.answer", {"data": {"question": "Q", "answer": "A"}}, ()),
    ("user=data.question,assistant=data.answer", {"data": {"question": "Q", "answer": "A", "url": "u"}}, ("data",)),
    ("user=q,assistant=a.0.text", {"q": "Q", "a": [{"text": "A"}, {"text": "B"}]}, ("a",)),
    ("user=data.q,assistant=data.a.b", {"data.q": "Q", "data": {"a": {"b": "A"}}}, ()),
    (
        "messages=data.turns",
        {"data": {"turns": [{"role": "user", "content": "Q"}, {"from": "gpt", "value": "A"}]}},
        (),
    ),
]


@pytest.mark.parametrize(("fields", "record", "unused"), NESTED)
def test_a_map_names_fields_in_objects_and_lists(fields: str, record: Any, unused: tuple[str, ...]) -> None:
    before = json.dumps(record)
    conversation = normalize(FieldMap.parse(fields).apply(record))
    assert [m.content for m in conversation.messages] == ["Q", "A"]
    assert conversation.unused_fields == unused
    assert json.dumps(record) == before


@pytest.mark.parametrize("question", ["", None, "  ", ["", None]])
def test_an_empty_question_is_rejected_unless_an_image_is_the_question(question: Any) -> None:
    answer = ["A", "B"] if isinstance(question, list) else "A"
    for fields, name in (("user=q,assistant=a", "q is empty"), ("assistant=a", "`map` has no user")):
        given = {"q": question, "a": answer} if "user" in fields else {"a": "A"}
        with pytest.raises(RecordError, match=f"^empty: {name}, and the record has no image, video or audio"):
            FieldMap.parse(fields).apply(given)
        assert normalize(FieldMap.parse(fields).apply({**given, "image": "a.png"})).images
    assert normalize(
        FieldMap.parse("user=q,assistant=a,image=p").apply({"q": question, "a": answer, "p": "a.png"})
    ).images


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
        ("messages=q,assistant=a", "has messages beside single turns"),
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
        ({}, "missing_field", "`map` names q, but the record has no fields"),
        ({"q": ["?"], "a": ["x", "y"]}, "missing_field", "1 user turns for 2 answers"),
        ({"q": "?", "a": "x", "messages": [1]}, "unsupported_field", "a field messages beside those of `map`"),
        ({"q": "?", "a": None}, "missing_field", "the assistant message has no content"),
        ({"q": "?", "a": "x", "chosen": "y"}, "missing_field", "a chosen answer and no rejected answer"),
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
    assert normalize(Adapter(f"{adapters}:turns").apply(record)).messages[1].content == "A cat."
    for name, given, reason, detail in (
        ("swap", {**record, "skip": True}, "dropped_by_adapter", "returned None"),
        ("swap", {}, "adapter_failed", "raised KeyError: 'skip'"),
        ("wrong", record, "adapter_failed", "returned int; return a record"),
        (
            "several",
            record,
            "adapter_failed",
            "returned a list of 2 values; return one record, or the list of its turns",
        ),
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
