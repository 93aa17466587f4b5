"""Plain conversations are read without looking for anything else; what comes out is the same."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_packed import PartialConversation, RecordError, RecordFormat, normalize, register_record_format
from tests.internals import RECORD_FORMATS, normalize_module

TEXT = st.sampled_from(
    ["Hi", "", " ", "<image>", "<img>a.jpg</img>", "<video>", "<audio>", "<|image_1|>", "<ImageHere>", "a\nb", "日本"]
)
ROLE = st.sampled_from(["user", "assistant", "human", "gpt", "system", "tool", "function_call", "User ", "other"])
TURN = st.fixed_dictionaries(
    {"role": ROLE | st.none(), "content": TEXT | st.none() | st.just([{"type": "text", "text": "x"}])},
    optional={"name": TEXT, "weight": st.sampled_from([0, 1]), "extra_field": TEXT},
)
SHARE = st.fixed_dictionaries({"from": ROLE, "value": TEXT})
RECORD = st.fixed_dictionaries(
    {},
    optional={
        "id": st.sampled_from([None, "a", 7]),
        "messages": st.lists(TURN | SHARE | st.none(), max_size=4) | st.none() | st.just("x"),
        "conversations": st.lists(SHARE | TURN, max_size=3),
        "images": st.sampled_from([[], ["a.jpg"]]),
        "system": TEXT,
        "source": TEXT,
    },
)


def outcome(record: Any) -> Any:
    try:
        found = normalize(record)
    except RecordError as error:
        return str(error)
    return found, found.unused_fields, found.notes


@given(record=RECORD)
@settings(max_examples=1500, deadline=None)
def test_plain_records_equal_the_result_of_their_record_format(record: dict[str, Any]) -> None:
    short = outcome(record)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(normalize_module, "plain_conversation", lambda record, shape: None)
        assert outcome(record) == short


def test_the_short_way_is_taken() -> None:
    record = {"id": 1, "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(normalize_module, "read_media", None)  # the long way cannot go on
        assert normalize(record).id == "1"
        assert (
            len(
                normalize({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}).messages
            )
            == 2
        )
        with pytest.raises(TypeError):
            normalize({**record, "source": "web"})


@pytest.mark.parametrize(
    "turn",
    [
        {"role": "assistant", "content": "Hello.", "weight": 0},
        {"role": "assistant", "content": "Hello.", "reasoning_content": "A greeting."},
        {"role": ["assistant"], "content": "Hello."},
        {"role": "assistant", "content": ["Hello."]},
        {"from": "gpt", "value": "Hello."},
        "assistant: Hello.",
    ],
)
def test_one_unusual_turn_leaves_the_record_to_its_format(turn: Any) -> None:
    record = {"messages": [{"role": "user", "content": "Hi"}, turn]}
    short = outcome(record)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(normalize_module, "plain_conversation", lambda record, shape: None)
        assert outcome(record) == short


@pytest.mark.parametrize("base", [RecordFormat, next(type(one) for one in RECORD_FORMATS if one.key == "messages")])
def test_a_custom_record_format_precedes_the_built_in_formats(base: Any) -> None:
    @register_record_format
    class Mine(base):  # type: ignore[misc]
        key = "messages"

        def read(self, record: Any, media: Any) -> PartialConversation:
            return PartialConversation(text="mine")

    try:
        assert normalize({"messages": [{"role": "user", "content": "Hi"}]}).text == "mine"
    finally:
        RECORD_FORMATS.pop(0)
