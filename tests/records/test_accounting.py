"""Nothing of a record is ignored: each field is used, counted by name, or rejected with a reason."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_packed import Conversation, RecordError, normalize
from tests.internals import RECORD_FORMATS

HI = {"role": "user", "content": "Hi"}
HELLO = {"role": "assistant", "content": "Hello."}
CHAT = {"messages": [HI, HELLO]}


def turn(**fields: Any) -> dict[str, Any]:
    return {"messages": [HI, {**HELLO, **fields}]}


def part(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png", **fields}]}, HELLO]}


@pytest.mark.parametrize(
    ("record", "reason", "detail"),
    [
        ({**CHAT, "preferred": "a"}, "unsupported_field", "write the answers as chosen and rejected"),
        ({**CHAT, "system": "Find <bbox>.", "objects": {}}, "unsupported_field", "<bbox> is not replaced by a box"),
        ({"text": "Find <ref-object>."}, "unsupported_field", "<ref-object> is not replaced by a box"),
        ({**CHAT, "bbox": [1, 2, 3, 4]}, "unsupported_field", "write the boxes into the text"),
        ({**CHAT, "loss": 0}, "unsupported_field", "give each turn a weight: 0 or 1"),
        ({**CHAT, "weight": 0.5}, "unsupported_field", "the field weight of the record is not supported"),
        ({**CHAT, "mask": [0, 1]}, "unsupported_field", "the field mask of the record"),
        ({**CHAT, "max_pixels": 9}, "unsupported_field", "pass min_pixels and max_pixels as options"),
        ({**CHAT, "reasoning": "Hm."}, "unsupported_field", "into the assistant turn as reasoning_content"),
        ({**CHAT, "audio": 5}, "missing_audio", "an audio file is 5"),
        ({**CHAT, "video_url": "a"}, "unsupported_field", "the field video_url of the record"),
        ({**CHAT, "pic": {"bytes": b"1"}}, "unsupported_media", "pic of the record contains an image or video"),
        ({"text": "A", "tools": [1]}, "unsupported_field", "the field tools of the record"),
        ({**CHAT, "tools": [1]}, "missing_field", "an entry of tools is int; use a JSON schema"),
        ({**CHAT, "tools": [{"description": "d"}]}, "missing_field", "a tool of tools has no name"),
        ({**CHAT, "tools": ["add"]}, "bad_json", "an entry of tools is not JSON"),
        ({**CHAT, "segmentation_mask": [1]}, "unsupported_field", "the field segmentation_mask of the record"),
        ({"input_ids": [1], "system_prompt": "S"}, "unsupported_field", "the field system_prompt of the record"),
        ({**CHAT, "tools": [1], "functions": [1]}, "unsupported_field", "both tools and functions; keep tools"),
        ({**CHAT, "system": "a", "system_prompt": "b"}, "bad_role", "system and system_prompt of the record differ"),
        ({"prompt": "a", "captions": ["b"], "image": "c"}, "unsupported_field", "likely meant as prompts"),
        (turn(weight=-1), "unsupported_field", "weight of a turn is -1; use 0, or a number from 1e-9 to 1e9"),
        (turn(weight="high"), "unsupported_field", "weight of a turn is 'high'"),
        (turn(weight=float("nan")), "unsupported_field", "weight of a turn is nan"),
        (turn(loss=0.3), "unsupported_field", "loss of a turn is 0.3; use true or false"),
        (turn(mask=True), "unsupported_field", "Use weight: 1 or weight: 0"),
        (turn(weight=1, train=False), "unsupported_field", "weight and train, which differ"),
        (turn(train_detail=[{"train": False}]), "unsupported_field", "the field train_detail of a turn"),
        (turn(audio_path="a.wav"), "unsupported_field", "the field audio_path of a turn"),
        (turn(value="Bye."), "unsupported_field", "content and value, which differ"),
        ({"messages": [{**HI, "train": True}, HELLO]}, "unsupported_field", "train is True for a user turn"),
        (turn(reasoning="a", thinking="b"), "unsupported_field", "reasoning and thinking, which differ"),
        (turn(tool_calls=[{"function": {"name": "f", "arguments": "{"}}]), "bad_json", "arguments of f is not JSON"),
        (turn(tool_calls=[{"function": {"name": "f", "arguments": "5"}}]), "bad_json", "use a JSON object"),
        (turn(tool_calls=[{"function": {"arguments": {}}}]), "missing_field", "a call of tool_calls has no name"),
        (turn(tool_calls=[{"name": "f", "result": 5}]), "unsupported_field", "the field result of a tool call"),
        (turn(tool_calls=[{"name": "f", "arguments": {"x": 1}, "parameters": {"x": 1}}]), "unsupported_field",
         "keep arguments"),
        ({"problem": "a", "solution": "b", "generated_solution": "c"}, "unsupported_field", "have different values"),
        ({"input_ids": [1, 2], "labels": [1, 2], "loss_mask": [0, 1]}, "unsupported_field", "have different targets"),
        ({"input_ids": [1, 2], "loss_mask": [0, 2]}, "unsupported_field", "has numbers other than 0 and 1"),
        ({"input_ids": [1, 2], "attention_mask": [1]}, "missing_field", "attention_mask has 1 entries for 2"),
        (turn(tool_calls=[{"name": "f"}], function_call={"name": "f"}), "unsupported_field", "keep tool_calls"),
        ({"messages": [HI, {"from": "function_call", "value": "f(x)"}]}, "bad_json", "function_call turn is not JSON"),
        (part(total_pixels=9), "unsupported_field", "the field total_pixels of a content part"),
        ({**CHAT, "images": [{"path": "a", "total_pixels": 9}]}, "unsupported_field", "total_pixels of an image"),
        ({"contents": [{"role": "model", "parts": [{"functionCall": {"name": "f"}}]}]}, "unsupported_field",
         "functionCall in a part"),
        ({"question": "Q", "choices": ["a", "b"], "answer": 2}, "missing_field", "answer 2 is none of 2 choices"),
        ({"question": "Q", "choices": ["a"], "answer": 0, "options": ["b"]}, "unsupported_field", "the field options"),
        ({"question": "Q", "answer_idx": 1}, "unsupported_field", "the record has none"),
        ({"question": "Q", "answer": "a", "response": "b"}, "unsupported_field", "have different values"),
        ({"prompt": "a", "completion": "b", "response": "c"}, "unsupported_field", "the field response of the record"),
        ({"texts": ["a", None], "images": ["b"]}, "image_count_mismatch", "texts has 2 entries and images 1"),
        ({"text_list": ["a"], "image_info": [{"matched_text_index": 1}]}, "missing_field", "use 0 to 0"),
        ({"caption": "a"}, "missing_image", "caption has neither an image nor a prompt"),
        ({"instruction": "a", "output": ""}, "empty", "none of output, response, outputs has a text"),
        ({"query": "a", "response": "b", "history": ["c"]}, "missing_field", "not a pair of question and answer"),
    ],
)  # fmt: skip
def test_unsupported_fields_are_rejected_by_name(record: Any, reason: str, detail: str) -> None:
    with pytest.raises(RecordError) as caught:
        normalize(record)
    assert (caught.value.reason.value, detail in caught.value.detail) == (reason, True), caught.value.detail
    assert "\n" not in str(caught.value)


def test_other_fields_are_counted_by_name() -> None:
    record = {**turn(source="x", name=None), "url": "u", "license": "", "score": None, "video_id": "v", "objects": []}
    assert normalize(record).unused_fields == ("license", "objects", "source", "url", "video_id")


@pytest.mark.parametrize("field", ["image", "images", "part"])
def test_fields_of_an_image_object_are_counted(field: str) -> None:
    """`rotate` is not applied, so the model sees another image than the record describes."""
    image = {"path": "a.png", "rotate": 90}
    record = part(image=image) if field == "part" else {**CHAT, field: image if field == "image" else ["b.png", image]}
    assert normalize(record).unused_fields == ("rotate",)


def test_every_record_format_declares_the_fields_that_it_reads() -> None:
    assert all(shape.fields is not None for shape in RECORD_FORMATS)


WORDS = st.text("abcdefghij", min_size=8, max_size=8).map(lambda word: f"w{word}w")
PAIRS = (("role", "content"), ("from", "value"), ("speaker", "text"), ("role", "value"))
ROLES = ("user", "human", "assistant", "gpt", "model", "system", "developer", "tool", "observation", "narrator")
FLAT = (
    *("instruction", "input", "context", "output", "response", "prompt", "completion", "query", "question", "answer"),
    *("caption", "text", "system", "system_prompt", "hint", "chosen", "reasoning", "url"),
)


@st.composite
def turns(draw: st.DrawFn) -> list[dict[str, Any]]:
    found = []
    for _ in range(draw(st.integers(1, 4))):
        role, content = draw(st.sampled_from(PAIRS))
        one: dict[str, Any] = {role: draw(st.sampled_from(ROLES)), content: draw(WORDS)}
        for name in draw(
            st.sets(st.sampled_from(("reasoning", "thinking", "weight", "loss", "audio", "source")), max_size=2)
        ):
            one[name] = draw(st.sampled_from((0, 1, None))) if name in ("weight", "loss") else draw(WORDS)
        found.append(one)
    return found


@st.composite
def records(draw: st.DrawFn) -> dict[str, Any]:
    record: dict[str, Any] = {name: draw(WORDS) for name in draw(st.sets(st.sampled_from(FLAT), max_size=5))}
    kind = draw(st.sampled_from(("flat", "messages", "conversations", "conversation", "captions", "texts", "choices")))
    if kind in ("messages", "conversations", "conversation"):
        record[kind] = draw(turns())
    elif kind == "captions":
        record.update(prompts=[draw(WORDS), draw(WORDS)], captions=[draw(WORDS), draw(WORDS)])
    elif kind == "texts":
        record["texts"] = [{"user": draw(WORDS), "assistant": draw(WORDS), "source": draw(WORDS)}]
    elif kind == "choices":
        record.update(question=draw(WORDS), choices=[draw(WORDS), draw(WORDS)], answer=draw(st.integers(0, 2)))
    if draw(st.booleans()):
        record["images"] = ["a.png"]
    return record


def given_texts(value: Any, name: str, unused: tuple[str, ...]) -> list[str]:
    """All words of a record, without those in unused fields and the names of audio files."""
    if name in unused or name == "audio":
        return []
    if isinstance(value, dict):
        return [word for key, inner in value.items() for word in given_texts(inner, key, unused)]
    if isinstance(value, list):
        return [word for inner in value for word in given_texts(inner, name, unused)]
    return [value] if isinstance(value, str) and value.startswith("w") else []


def all_text(conversation: Conversation) -> str:
    turns = [f"{m.content} {m.extra}" for m in conversation.messages]
    return " ".join([conversation.text or "", *turns, *map(all_text, conversation.members)])


@given(records())
@settings(max_examples=600, deadline=None)
def test_every_given_text_is_used_counted_or_costs_the_record(record: dict[str, Any]) -> None:
    try:
        conversation = normalize(record)
    except RecordError as error:
        assert "\n" not in str(error)
        return
    text = all_text(conversation)
    unused = conversation.unused_fields
    assert not [word for word in given_texts(record, "", unused) if word not in text]
    assert not {"chosen", "reasoning", "system", "system_prompt", "audio", "loss", "weight"} & set(unused)
    assert text.count("<image>") == len(conversation.images)


RISKY = ["system_prompt", "tools", "tool_calls", "audio", "audio_path", "loss_mask", "weight", "chosen", "history",
         "reasoning_content", "bboxes", "min_pixels", "chat_template_kwargs", "max_frames"]  # fmt: skip
SPELLINGS: dict[str, Callable[[str], str]] = {
    "Title": lambda name: name.title(),
    "UPPER": str.upper,
    "camelCase": lambda name: name[0] + name.title().replace("_", "")[1:],
    "PascalCase": lambda name: name.title().replace("_", ""),
    "kebab-case": lambda name: name.replace("_", "-"),
    "with spaces": lambda name: name.replace("_", " "),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("place", ["the record", "a turn"])
def test_fields_that_change_training_are_refused_in_every_spelling(spelling: str, place: str) -> None:
    for name in RISKY:
        spelled = SPELLINGS[spelling](name)
        if spelled == name:
            continue

        def record(field: str, value: Any) -> Any:
            return {**CHAT, field: value} if place == "the record" else turn(**{field: value})

        with pytest.raises(RecordError, match=f"unsupported_field: the field {spelled} of {place} is not supported: "):
            normalize(record(spelled, "x"))
        assert normalize(record(spelled, None)) == normalize(CHAT)


def test_metadata_in_other_spellings_is_counted() -> None:
    names = ("ID", "License", "Video_ID", "attentionMask", "Category", "Thinking", "Reasoning", "pass")
    assert normalize({**CHAT, **dict.fromkeys(names, "on")}).unused_fields == tuple(sorted(names))
