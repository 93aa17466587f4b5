"""Tools and calls that a record writes twice, as Hermes' function calling sets do, reach the template once."""

import json
from typing import Any

import pytest

from energon_packed import RecordError, normalize
from tests.internals import CALLS_IN_TEXT, TOOLS_IN_TEXT

ADD = {"type": "function", "function": {"name": "add", "parameters": {"x": "int"}}}
SUB = {"type": "function", "function": {"name": "sub", "parameters": {}}}
SYSTEM = f"You call functions: <tools> {[ADD]} </tools>"  # Hermes writes them as Python does, too
CALL = '<tool_call>\n{"name": "add", "arguments": {"x": 2}}\n</tool_call>'


def record(system: str, **fields: Any) -> dict[str, Any]:
    turns = [("system", system), ("human", "2?"), ("gpt", CALL), ("tool", "<tool_response>2</tool_response>")]
    return {"conversations": [{"from": name, "value": value} for name, value in turns], **fields}


@pytest.mark.parametrize("tools", [json.dumps([ADD]), [ADD], [json.dumps(ADD)], [ADD["function"]]])
def test_tools_of_the_system_text_are_not_passed_again(tools: Any) -> None:
    conversation = normalize(record(SYSTEM, tools=tools))
    assert (conversation.tools, conversation.notes) == (None, (TOOLS_IN_TEXT,))
    assert conversation.messages[0].content == SYSTEM
    plain = normalize(record("You call functions. Do add.", tools=tools))
    assert (len(plain.tools or ()), plain.notes) == (1, ())


def test_tools_of_which_the_system_text_has_some_are_rejected() -> None:
    with pytest.raises(RecordError, match="the system text has add but not all of them") as caught:
        normalize(record(SYSTEM, tools=[ADD, SUB]))
    assert caught.value.reason.value == "unsupported_field"


def test_calls_of_the_text_are_not_passed_again() -> None:
    turns = [{"role": "user", "content": "2?"}, {"role": "assistant", "content": "So: " + CALL}]
    turns[1] |= {"tool_calls": [{"function": {"name": "add", "arguments": '{"x": 2}'}}]}  # type: ignore[dict-item]
    conversation = normalize({"messages": turns})
    assert (conversation.messages[1].extra, conversation.notes) == ({}, (CALLS_IN_TEXT,))
    assert conversation.messages[1].content == "So: " + CALL
    for other in ('{"x": 3}', "{}"):
        turns[1]["tool_calls"] = [{"function": {"name": "add", "arguments": other}}]  # type: ignore[assignment]
        with pytest.raises(RecordError, match="a turn has tool_calls and other calls as <tool_call> in its text"):
            normalize({"messages": turns})


@pytest.mark.parametrize(
    "call",
    [
        {"name": "add", "arguments": {"x": 2}},
        {"name": "add", "parameters": {"x": 2}},
        {"type": "function", "function": {"name": "add", "arguments": '{"x": 2}', "parameters": None}},
    ],
)
def test_arguments_have_one_name(call: dict[str, Any]) -> None:
    turns = [{"role": "user", "content": "2?"}, {"role": "tool_call", "content": json.dumps(call)}]
    (found,) = normalize({"messages": turns}).messages[1].extra["tool_calls"]
    assert found == {"type": "function", "function": {"name": "add", "arguments": {"x": 2}}}


def test_consecutive_turns_of_calls_become_one_turn() -> None:
    one, other = ({"role": "tool_call", "content": json.dumps({"name": name, "arguments": {}})} for name in "ab")
    turns = [{"role": "user", "content": "2?"}, one, other]
    messages = normalize({"messages": [*turns, {"role": "tool_response", "content": "2"}]}).messages
    assert [message.role for message in messages] == ["user", "assistant", "tool"]
    assert [call["function"]["name"] for call in messages[1].extra["tool_calls"]] == ["a", "b"]
    masked = normalize({"messages": [*turns[:2], {**other, "loss": False}]}).messages
    assert [message.weight for message in masked] == [1, 1, 0]


def test_numbers_over_64_bits_are_not_rounded() -> None:
    call = {"name": "add", "arguments": '{"x": 18446744073709551616}'}
    with pytest.raises(RecordError, match="arguments of add contains the number 18446744073709551616, over 64 bits"):
        normalize({"messages": [{"role": "user", "content": "2?"}, {"role": "assistant", "tool_calls": [call]}]})
    call["arguments"] = '{"x": 18446744073709551615, "id": "18446744073709551616"}'
    (found,) = normalize(
        {"messages": [{"role": "user", "content": "?"}, {"role": "gpt", "tool_calls": [call]}]}
    ).messages[1:]
    assert found.extra["tool_calls"][0]["function"]["arguments"]["x"] == 2**64 - 1


def test_masks_of_tokens() -> None:
    ids, mask = [5, 6, 7, 8], [0, 1, 1, 0]
    for name in ("loss_mask", "completion_mask", "assistant_masks", "assistant_mask"):
        found = normalize({"input_ids": ids, name: mask})
        assert found.labels is not None
        assert found.labels.tolist() == [-100, 6, 7, -100]
    padded = normalize(
        {"input_ids": ids, "attention_mask": [0, 1, 1, 1], "loss_mask": mask, "labels": [-100, 6, 7, -100]}
    )
    assert padded.input_ids is not None
    assert padded.labels is not None
    assert (padded.input_ids.tolist(), padded.labels.tolist()) == ([6, 7, 8], [6, 7, -100])
