"""Any JSON under any field: a record is a conversation or a RecordError in one line; numbers keep their digits."""

import json
import os
import re
from typing import Any

import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from energon_packed import Conversation, RecordError, normalize
from tests.internals import _has_long_number, parse_json
from tests.pipeline.mutations import KEYS, RECORDS

EXAMPLES = min(int(os.environ.get("ENERGON_PACKED_FUZZ", "400")), 5000)
TEXTS = st.text(max_size=12) | st.sampled_from(("<image>", "<video>", "user", "assistant", "a.png", "[1]", '{"a":1}'))
SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS) | TEXTS, inner, max_size=4),
    max_leaves=12,
)


@given(
    record=st.sampled_from(RECORDS),
    more=st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4),
    alone=st.booleans(),
)
@example(record={}, more={"conversations": [{"\n": False}]}, alone=True)
@settings(max_examples=EXAMPLES)
def test_any_value_is_read_or_rejected(record: dict[str, Any], more: dict[str, Any], alone: bool) -> None:
    try:
        found = normalize(more if alone else {**record, **more}, image_root="/")
    except RecordError as error:
        assert error.detail
        assert "\n" not in error.detail
        return
    assert isinstance(found, Conversation)


@given(value=VALUES)
@settings(max_examples=EXAMPLES)
def test_json_is_parsed_as_the_standard_library_does(value: Any) -> None:
    text = json.dumps(value, allow_nan=False, ensure_ascii=False)
    try:
        parsed = parse_json(text)
    except orjson.JSONDecodeError:
        assert any(0xD800 <= ord(one) < 0xE000 for one in text)
        return
    assert parsed == value or isinstance(value, dict)
    if isinstance(value, dict):
        assert {**parsed, "id": 0} == {**value, "id": 0}
        assert str(parsed.get("id")) == str(value.get("id")) or float(parsed["id"]) == value["id"]


@pytest.mark.parametrize("text", ['{"id":1e400}', '{"n":' + "9" * 400 + "}", '{"n":12345678901234567890123' + "]" * 9])
def test_numbers_out_of_range_are_not_json(text: str) -> None:
    with pytest.raises(orjson.JSONDecodeError):
        parse_json(text)


def test_a_long_number_in_deep_nesting_is_no_json() -> None:
    text = "[" * 1020 + "1" * 30 + "]" * 1020
    try:
        json.loads(text)
    except RecursionError:
        with pytest.raises(orjson.JSONDecodeError, match="nested too deeply"):
            parse_json(text)
    else:  # Python 3.12 and later
        assert str(parse_json(text)) == text


@settings(max_examples=300)
@given(st.lists(st.sampled_from(["7", "12345678", "0" * 18, "1" * 19, "2" * 40, "a", " "]), max_size=30))
def test_long_numbers_are_found_wherever_they_are(pieces: list[str]) -> None:
    text = "".join(pieces).encode()
    assert _has_long_number(text) == (re.search(rb"[0-9]{19}", text) is not None)
