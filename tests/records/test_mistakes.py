"""The same mistake has the same result in every record format: rejected, or read in one way."""

import copy
import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from energon_packed import FieldMap, RecordError, normalize
from tests.internals import open_sources
from tests.records.test_record_formats import FORMATS

MISSING = object()
# name of a format: places of its first question and of its last answer
FLAT: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "alpaca without input": (("instruction",), ("output",)),
    "alpaca of LLaMA-Factory": (("instruction",), ("output",)),
    "openorca": (("question",), ("response",)),
    "trl texts": (("prompt",), ("completion",)),
    "prompt and response": (("prompt",), ("response",)),
    "<img> in a query": (("query",), ("response",)),
    "gsm8k": (("question",), ("answer",)),
    "squad": (("question",), ("answers", "text", 0)),
    "gqa without an image": (("question",), ("answer",)),
    "cauldron": (("texts", 0, "user"), ("texts", 1, "assistant")),
    "image and caption": (("caption",), ("caption",)),
    "math": (("problem",), ("solution",)),
    "openmathinstruct-2": (("problem",), ("generated_solution",)),
    "aime": (("problem",), ("answer",)),
}
TURNS: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "a bare list": ((0, "content"), (1, "content")),
    "sharegpt": (("conversations", 0, "value"), ("conversations", 1, "value")),
    "from and value under messages": (("messages", 0, "value"), ("messages", 1, "value")),
    "speaker and text under conversation": (("conversation", 0, "text"), ("conversation", 1, "text")),
    "gemini": (("contents", 0, "parts", 0, "text"), ("contents", 1, "parts", 0, "text")),
}
MAPPED = FieldMap.parse("user=a.q,assistant=a.a")
WITH_IMAGE = ("cauldron", "image and caption", "gemini")  # an image alone may be the question
WRONG = {"true": True, "object": {"a": "x"}, "list": [["x"]], "NaN": float("nan"), "null": None, "missing": MISSING}
PLACES = {**FLAT, **TURNS, "a map": (("a", "q"), ("a", "a"))}


def record_of(name: str, place: tuple[Any, ...], value: Any) -> Any:
    """The record of a format with another value at a place."""
    record = copy.deepcopy(FORMATS[name][0]) if name != "a map" else {"a": {"q": "Hi", "a": "Hello."}}
    inner = record
    for key in place[:-1]:
        inner = inner[key]
    if value is MISSING:
        del inner[place[-1]]
    else:
        inner[place[-1]] = value
    return record


def read(name: str, place: tuple[Any, ...], value: Any) -> Any:
    record = record_of(name, place, value)
    return normalize(MAPPED.apply(record) if name == "a map" else record)


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_question_or_answer_is_rejected(name: str, kind: str) -> None:
    if (name, kind) == ("a map", "list"):
        return  # its lists are several turns
    for place in PLACES[name]:
        with pytest.raises(RecordError, match="^(missing_field|empty|bad_json|missing_image): "):
            read(name, place, WRONG[kind])


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("blank", ["", " \n"])
def test_an_empty_answer_is_rejected_and_an_empty_question_unless_a_turn_or_an_image(name: str, blank: str) -> None:
    question, answer = PLACES[name]
    with pytest.raises(RecordError, match="^(missing_field|empty): "):
        read(name, answer, blank)
    if name in WITH_IMAGE or name in TURNS or (name == "alpaca of LLaMA-Factory" and blank.strip() != blank):
        return  # of several questions, one may be empty
    with pytest.raises(RecordError, match="^(missing_field|empty): "):
        read(name, question, blank)


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize(("number", "text"), [(7, "7"), (0, "0"), (-2.5, "-2.5"), (10**400, "1" + "0" * 400)])
def test_a_number_is_its_digits(name: str, number: Any, text: str) -> None:
    for place in PLACES[name]:
        found = [message.content for message in read(name, place, number).messages]
        assert found == [message.content for message in read(name, place, text).messages]
        assert any(text in content for content in found)


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("placeholder", ["<image>", "<video>", "<audio>", "<img></img>", "<|image_1|>", "<bbox>"])
def test_a_placeholder_too_many_is_rejected(name: str, placeholder: str) -> None:
    for place in PLACES[name]:
        if placeholder == "<|image_1|>" and (name == "gemini" or (name == "<img> in a query" and "response" in place)):
            continue  # it mentions the image
        with pytest.raises(RecordError, match="^(image|video|audio)_count_mismatch|^unsupported_field: <bbox>"):
            read(name, place, f"Look: {placeholder * 3}")


def test_csv_and_json_have_the_same_rules(tmp_path: Path) -> None:
    rows = [["Hi", "7"], ["Hi", ""], ["", "Hello."], ["5", "Hello."], ["<audio>", "Hello."], ["Hi", "<image>"]]
    with (tmp_path / "a.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([["question", "answer"], *rows])
    (source,) = open_sources([tmp_path / "a.csv"], work_dir=tmp_path / "work")
    of_csv = [outcome(row.record) for row in source.scan(0, source.extent())]
    as_json = [
        {"question": q and (int(q) if q.isdecimal() else q), "answer": int(a) if a == "7" else a} for q, a in rows
    ]
    assert [kind for kind, _ in of_csv] == ["read", "missing_field", "missing_field", "read", *REJECTED]
    assert [result for kind, result in of_csv if kind == "read"] == [
        result for kind, result in map(outcome, as_json) if kind == "read"
    ]
    assert [outcome(record)[0] != "read" for record in as_json] == [kind != "read" for kind, _ in of_csv]


REJECTED = ("audio_count_mismatch", "image_count_mismatch")


def outcome(record: Any) -> tuple[str, Any]:
    try:
        return "read", normalize(record).messages
    except RecordError as error:
        return error.reason.value, None


@pytest.mark.parametrize(
    ("record", "detail"),
    [
        ({"context": "C", "question": "", "answer": "A"}, "the question is empty"),
        ({"question": " ", "choices": ["x", "y"], "answer": 1}, "the question is empty"),
        ({"question": "Q", "choices": None, "answer": 1}, "answer is the index 1 of a choice, and choices is empty"),
        ({"question": "Q", "options": [], "answer": 1}, "answer is the index 1 of a choice, and options is empty"),
        ({"question": "Q", "choices": ["x", " "], "answer": 1}, "the correct choice, B., is empty"),
        (
            {"question": "Q", "choices": {"text": ["x", "y"], "label": [None, "B"]}, "answerKey": "B"},
            "a label of choices",
        ),
        ({"instruction": "I", "output": None, "text": "Below is ..."}, "has an instruction and no output"),
        ({"query": "Q", "response": " ", "history": [["Hi", "Hello."]]}, "an answer is empty"),
        ({"contents": [{"role": "user", "parts": [{"text": "Q"}]}, {"parts": [{"text": "A"}]}]}, "has no role"),
        ({"text_list": ["a", "b"], "image_info": [{"image": "a.png", "matched_text_index": True}]}, "use 0 to 1"),
    ],
)
def test_a_mistake_that_would_change_training_is_rejected(record: Any, detail: str) -> None:
    with pytest.raises(RecordError, match=detail):
        normalize(record)


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
def test_an_array_of_one_number_is_a_value(kind: Any) -> None:
    """From a sample_loader, or a dataset in the format of torch: `len` of it is an error."""
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "a"}]
    with pytest.raises(RecordError, match="^missing_image: an image is .*2.*; use a path or bytes"):
        normalize({"messages": turns, "images": kind(2)})
