"""Public formats, as their publishers' dataset cards show them, become the turns that a person would expect."""

import base64
import re
from typing import Any

import pytest

from energon_packed import RecordError, normalize
from tests.internals import NO_PLACEHOLDER

PNG = base64.b64encode(b"png").decode()
CALL = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
HI = {"role": "user", "content": "Hi"}
HELLO = {"role": "assistant", "content": "Hello."}

# name: record, turns (role, content, or content and weight), paths of images, unused fields
FORMATS: dict[str, tuple[Any, list[tuple[Any, ...]], list[str], list[str]]] = {
    "alpaca": (
        {"instruction": "Name it.", "input": "A red fruit.", "output": "An apple.", "text": "Below is ..."},
        [("user", "Name it.\n\nA red fruit."), ("assistant", "An apple.")], [], ["text"],
    ),
    "alpaca without input": (
        {"instruction": "Give three tips.", "input": "", "output": "1. Eat."},
        [("user", "Give three tips."), ("assistant", "1. Eat.")], [], [],
    ),
    "alpaca of LLaMA-Factory": (
        {"instruction": "And you?", "input": "", "output": "Fine.", "system": "S", "history": [["Hi", "Hello."]]},
        [("system", "S"), ("user", "Hi"), ("assistant", "Hello."), ("user", "And you?"), ("assistant", "Fine.")],
        [], [],
    ),
    "dolly": (
        {"instruction": "When?", "context": "It began in 2000.", "response": "In 2000.", "category": "closed_qa"},
        [("user", "When?\n\nIt began in 2000."), ("assistant", "In 2000.")], [], ["category"],
    ),
    "openai chat": (
        {"messages": [{"role": "developer", "content": "S"}, HI, {**HELLO, "weight": 0}, HI, {**HELLO, "weight": 1}]},
        [("system", "S"), ("user", "Hi"), ("assistant", "Hello.", 0), ("user", "Hi"), ("assistant", "Hello.", 1)],
        [], [],
    ),
    "openai vision": (
        {"messages": [{"role": "user", "content": [
            {"type": "text", "text": "What? "},
            {"type": "image_url", "image_url": {"url": "file:///a.png", "detail": "low"}}]}, HELLO]},
        [("user", "What? <image>"), ("assistant", "Hello.")], ["/a.png"], ["detail"],
    ),
    "parts without a type": (
        {"messages": [{"role": "user", "content": [{"image": "a.png", "text": None}, {"text": "What?"}]}, HELLO]},
        [("user", "<image>What?"), ("assistant", "Hello.")], ["a.png"], [],
    ),
    "a bare list": ([HI, HELLO], [("user", "Hi"), ("assistant", "Hello.")], [], []),
    "sharegpt": (
        {"id": "1", "conversations": [{"from": "human", "value": "Hi"}, {"from": "chatgpt", "value": "Hello."}]},
        [("user", "Hi"), ("assistant", "Hello.")], [], [],
    ),
    "role and content under conversations": (
        {"conversations": [HI, HELLO], "source": "x"}, [("user", "Hi"), ("assistant", "Hello.")], [], ["source"],
    ),
    "from and value under messages": (
        {"messages": [{"from": "human", "value": "Hi"}, {"from": "bot", "value": "Hello."}]},
        [("user", "Hi"), ("assistant", "Hello.")], [], [],
    ),
    "speaker and text under conversation": (
        {"conversation": [{"speaker": "Human", "text": "Hi"}, {"speaker": "AI", "text": "Hello.", "turn": 1}]},
        [("user", "Hi"), ("assistant", "Hello.")], [], ["turn"],
    ),
    "the columns of a table": (
        {"messages": [{**HI, "from": None, "value": None, "name": None, "weight": None, "url": None}, HELLO]},
        [("user", "Hi"), ("assistant", "Hello.")], [], [],
    ),
    "lmsys-chat-1m": (
        {"conversation_id": "1", "model": "m", "conversation": [HI, HELLO], "turn": 1, "language": "English",
         "openai_moderation": [{}], "redacted": False},
        [("user", "Hi"), ("assistant", "Hello.")], [],
        ["conversation_id", "language", "model", "openai_moderation", "redacted", "turn"],
    ),
    "llava": (
        {"id": "0", "image": "coco/0.jpg", "conversations": [
            {"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A bus."}]},
        [("user", "<image>\nWhat?"), ("assistant", "A bus.")], ["coco/0.jpg"], [],
    ),
    "llava-onevision": (
        {"id": "0", "image": {"bytes": None, "path": "0.jpg"}, "data_source": "aokvqa", "conversations": [
            {"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A bus."}]},
        [("user", "<image>\nWhat?"), ("assistant", "A bus.")], ["0.jpg"], ["data_source"],
    ),
    "no image": (
        {"image": "", "images": [], "conversations": [HI, HELLO]},
        [("user", "Hi"), ("assistant", "Hello.")], [], [],
    ),
    "frames of a video, one <image>": (
        {"video": ["1.jpg", "2.jpg"], "conversations": [
            {"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A bus."}]},
        [("user", "<image><image>\nWhat?"), ("assistant", "A bus.")], ["1.jpg", "2.jpg"], [],
    ),
    "frames as images, one <video>": (
        {"images": ["1.jpg", "2.jpg"], "conversations": [
            {"from": "human", "value": "<video>\nWhat?"}, {"from": "gpt", "value": "A bus."}]},
        [("user", "<image><image>\nWhat?"), ("assistant", "A bus.")], ["1.jpg", "2.jpg"], [],
    ),
    "qwen-vl": (
        {"id": "0", "conversations": [
            {"from": "user", "value": "Picture 1: <img>a.jpeg</img>\nPicture 2: <img>b.jpeg</img>\nCompare."},
            {"from": "assistant", "value": "<ref>It</ref><box>(1,2),(3,4)</box>"}]},
        [("user", "<image>\n<image>\nCompare."), ("assistant", "<ref>It</ref><box>(1,2),(3,4)</box>")],
        ["a.jpeg", "b.jpeg"], [],
    ),
    "<img> in a part": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "<img>a.png</img>What?"}]}, HELLO]},
        [("user", "<image>What?"), ("assistant", "Hello.")], ["a.png"], [],
    ),
    "<img> in a query": (
        {"query": "Picture 1: <img>a.png</img>\nWhat?", "response": "A bus.", "images": [], "image": {"bytes": None}},
        [("user", "<image>\nWhat?"), ("assistant", "A bus.")], ["a.png"], [],
    ),
    "gemini": (
        {"systemInstruction": {"role": "system", "parts": [{"text": "S"}]}, "contents": [
            {"role": "user", "parts": [{"text": "What?"}, {"fileData": {"mimeType": "image/png", "fileUri": "a"}}]},
            {"role": "model", "parts": [{"text": "A bus."}]}]},
        [("system", "S"), ("user", "What?<image>"), ("assistant", "A bus.")], ["a"], [],
    ),
    "ultrachat": (
        {"prompt": "Hi", "prompt_id": "f0", "messages": [HI, HELLO]},
        [("user", "Hi"), ("assistant", "Hello.")], [], ["prompt", "prompt_id"],
    ),
    "system_prompt beside messages": (
        {"system_prompt": "S", "messages": [HI, HELLO]},
        [("system", "S"), ("user", "Hi"), ("assistant", "Hello.")], [], [],
    ),
    "instruction beside conversations": (
        {"instruction": "S", "conversations": [HI, HELLO]},
        [("system", "S"), ("user", "Hi"), ("assistant", "Hello.")], [], [],
    ),
    "openorca": (
        {"id": "niv.1", "system_prompt": "S", "question": "What?", "response": "This."},
        [("system", "S"), ("user", "What?"), ("assistant", "This.")], [], [],
    ),
    "trl texts": (
        {"prompt": "The sky is", "completion": " blue."}, [("user", "The sky is"), ("assistant", " blue.")], [], [],
    ),
    "trl lists": (
        {"prompt": [HI, HELLO, HI], "completion": [HELLO]},
        [("user", "Hi"), ("assistant", "Hello.", 0), ("user", "Hi"), ("assistant", "Hello.")], [], [],
    ),
    "prompt and response": (
        {"prompt": "Hi", "response": "Hello."}, [("user", "Hi"), ("assistant", "Hello.")], [], [],
    ),
    "ms-swift": (
        {"system": "S", "query": "And?", "response": "Then.", "history": [["Hi", "Hello."]], "images": ["a.jpg"]},
        [("system", "S"), ("user", "<image>Hi"), ("assistant", "Hello."), ("user", "And?"), ("assistant", "Then.")],
        ["a.jpg"], [],
    ),
    "gsm8k": ({"question": "1+1?", "answer": "#### 2"}, [("user", "1+1?"), ("assistant", "#### 2")], [], []),
    "squad": (
        {"id": "5", "title": "T", "context": "C", "question": "Q", "answers": {"text": ["A"], "answer_start": [5]}},
        [("user", "C\n\nQ"), ("assistant", "A")], [], ["title"],
    ),
    "vqa": (
        {"question_id": 1, "image": "a.jpg", "question": "Color?", "multiple_choice_answer": "red",
         "answers": [{"answer": "red", "answer_confidence": "yes", "answer_id": 1}], "answer_type": "other"},
        [("user", "<image>Color?"), ("assistant", "red")], ["a.jpg"], ["answer_type", "question_id"],
    ),
    "several answers": (
        {"image": "a.jpg", "question": "Word?", "answers": ["nokia", "Nokia", "Nokia", "phone"]},
        [("user", "<image>Word?"), ("assistant", "Nokia")], ["a.jpg"], [],
    ),
    "image, question and answer": (
        {"image": "a.jpg", "question": "Color?", "answer": "red"},
        [("user", "<image>Color?"), ("assistant", "red")], ["a.jpg"], [],
    ),
    "scienceqa": (
        {"image": "a.jpg", "question": "Which?", "choices": ["one", "two"], "answer": 1, "hint": "See.", "grade": "2"},
        [("user", "<image>See.\n\nWhich?\nA. one\nB. two"), ("assistant", "B. two")], ["a.jpg"], ["grade"],
    ),
    "arc": (
        {"question": "Which?", "choices": {"text": ["one", "two"], "label": ["1", "2"]}, "answerKey": "2"},
        [("user", "Which?\n1. one\n2. two"), ("assistant", "2. two")], [], [],
    ),
    "medqa": (
        {"question": "Which?", "options": {"A": "one", "B": "two"}, "answer_idx": "A", "answer": "one"},
        [("user", "Which?\nA. one\nB. two"), ("assistant", "A. one")], [], [],
    ),
    "gqa": (
        {"id": "02930152", "question": "Dark?", "answer": "yes", "fullAnswer": "Yes, it is.", "imageId": "2354786"},
        [("user", "<image>Dark?"), ("assistant", "yes")], ["2354786.jpg"], ["fullAnswer"],
    ),
    "gqa without an image": (
        {"question": "Dark?", "answer": "yes", "imageId": None},
        [("user", "Dark?"), ("assistant", "yes")], [], [],
    ),
    "gqa with an image": (
        {"image": "a.jpg", "question": "Dark?", "answer": "yes", "imageId": "2354786"},
        [("user", "<image>Dark?"), ("assistant", "yes")], ["a.jpg"], ["imageId"],
    ),
    "cauldron": (
        {"images": ["a.jpg", "b.jpg"], "texts": [
            {"user": "Q1", "assistant": "A1", "source": "s"}, {"user": "Q2", "assistant": "A2", "source": "s"}]},
        [("user", "<image><image>Q1"), ("assistant", "A1"), ("user", "Q2"), ("assistant", "A2")],
        ["a.jpg", "b.jpg"], ["source"],
    ),
    "obelics": (
        {"images": ["a.jpg", None, "b.jpg"], "texts": [None, "Between.", None], "metadata": "[]"},
        [(None, "<image>\nBetween.\n<image>")], ["a.jpg", "b.jpg"], ["metadata"],
    ),
    "mmc4": (
        {"text_list": ["One.", "Two."], "url": "u", "image_info": [
            {"image_name": "b.png", "matched_text_index": 1, "matched_sim": 0.2},
            {"image_name": "a.png", "matched_text_index": 0, "matched_sim": 0.3}]},
        [(None, "<image> One. <image> Two.")], ["a.png", "b.png"], ["matched_sim", "url"],
    ),
    "image and caption": (
        {"image": "a.jpg", "caption": "A bus."}, [("user", "<image>"), ("assistant", "A bus.")], ["a.jpg"], [],
    ),
    "textcaps": (
        {"image_id": "0f", "image_path": "train/0f.jpg", "caption_id": 0, "caption_str": "A bus.",
         "reference_strs": ["A bus.", "Bus 7."]},
        [("user", "<image>"), ("assistant", "A bus.")], ["train/0f.jpg"], ["caption_id", "reference_strs"],
    ),
    "textcaps, references alone": (
        {"image_id": "0f", "reference_strs": ["A bus.", "Bus 7."]},
        [("user", "<image>"), ("assistant", "A bus.")], ["0f.jpg"], [],
    ),
    "textcaps of lmms-lab": (
        {"question_id": "0f", "question": "Caption it.", "image": "a.jpg", "image_id": "0f", "image_path": "0f.jpg",
         "caption_str": ["A bus.", "Bus 7."]},
        [("user", "<image>Caption it."), ("assistant", "A bus.")], ["a.jpg"], ["question_id"],
    ),
    "image and text": (
        {"image": "a.jpg", "text": "A bus."}, [("user", "<image>"), ("assistant", "A bus.")], ["a.jpg"], [],
    ),
    "axolotl": (
        {"conversations": [
            {"from": "system", "value": "S", "train": False}, {"from": "human", "value": "Hi", "train": False},
            {"from": "gpt", "value": "No.", "train": False}, {"from": "human", "value": "Hi", "weight": 0},
            {"from": "gpt", "value": "Hello.", "train": True}]},
        [("system", "S", 0), ("user", "Hi", 0), ("assistant", "No.", 0), ("user", "Hi", 0),
         ("assistant", "Hello.", 1)], [], [],
    ),
    "ms-swift loss, torchtune masked, fractions": (
        {"messages": [HI, {**HELLO, "loss": False}, HI, {**HELLO, "masked": True}, HI, {**HELLO, "loss_weight": 0.25},
                      HI, {**HELLO, "loss_mask": 1}]},
        [("user", "Hi"), ("assistant", "Hello.", 0), ("user", "Hi"), ("assistant", "Hello.", 0),
         ("user", "Hi"), ("assistant", "Hello.", 0.25), ("user", "Hi"), ("assistant", "Hello.", 1)], [], [],
    ),
    "the assistant begins": ({"messages": [HELLO, HI]}, [("assistant", "Hello."), ("user", "Hi")], [], []),
    "frames without a placeholder": (
        {"messages": [HI, HELLO], "videos": [["1.jpg", "2.jpg"]], "images": ["a.jpg"]},
        [("user", "<image><image><image>Hi"), ("assistant", "Hello.")], ["a.jpg", "1.jpg", "2.jpg"], [],
    ),
    "ultrachat, first form": (
        {"id": "0", "data": ["Hi", "Hello.", "Bye", "Bye."]},
        [("user", "Hi"), ("assistant", "Hello."), ("user", "Bye"), ("assistant", "Bye.")], [], [],
    ),
    "math": (
        {"problem": "1+1?", "level": "Level 1", "type": "Algebra", "solution": "It is $2$."},
        [("user", "1+1?"), ("assistant", "It is $2$.")], [], ["level", "type"],
    ),
    "openmathinstruct-2": (
        {"problem": "1+1?", "generated_solution": "It is 2.", "expected_answer": "2", "problem_source": "math"},
        [("user", "1+1?"), ("assistant", "It is 2.")], [], ["expected_answer", "problem_source"],
    ),
    "deepscaler": (
        {"problem": "1+1?", "solution": "It is 2.", "answer": "2"},
        [("user", "1+1?"), ("assistant", "It is 2.")], [], ["answer"],
    ),
    "aime": ({"problem": "1+1?", "answer": "2"}, [("user", "1+1?"), ("assistant", "2")], [], []),
    "images of a turn": (
        {"messages": [{**HI, "images": ["a.png"]}, HELLO]},
        [("user", "<image>Hi"), ("assistant", "Hello.")], ["a.png"], [],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_formats(name: str) -> None:
    record, turns, images, unused = FORMATS[name]
    conversation = normalize(record)
    expected = [(turn[0], turn[1], turn[2] if len(turn) > 2 else 1.0) for turn in turns]
    found = [(m.role, m.content, m.weight) for m in conversation.messages] or [(None, conversation.text, 1.0)]
    assert found == expected
    assert [image.path for image in conversation.images] == images
    assert sorted(conversation.unused_fields) == unused


CALLS: dict[str, Any] = {
    "openai": {"messages": [
        HI,
        {"role": "assistant", "content": None, "tool_calls": [
            {"type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}]},
        {"role": "tool", "tool_call_id": "1", "content": "Sunny."}]},
    "openai, older": {"messages": [
        HI, {"role": "assistant", "content": "", "function_call": {
            "name": "get_weather", "arguments": '{"city": "Paris"}'}},
        {"role": "function", "name": "get_weather", "content": "Sunny."}]},
    "sharegpt": {"conversations": [
        {"from": "human", "value": "Hi"},
        {"from": "function_call", "value": '{"name": "get_weather", "arguments": {"city": "Paris"}}'},
        {"from": "observation", "value": "Sunny."}]},
    "ms-swift": {"messages": [
        HI,
        {"role": "function_call", "content": '[{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}]'},
        {"role": "function_response", "content": "Sunny."}]},
    "xlam": {"query": "Hi", "answers": '[{"name": "get_weather", "arguments": {"city": "Paris"}}]'},
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_calls_are_objects_in_the_form_of_templates(name: str) -> None:
    for tools in ({"tools": [TOOL]}, {"tools": f"[{TOOL}]".replace("'", '"')}, {"functions": [TOOL["function"]]}):
        if name == "xlam" and "functions" in tools:
            continue
        conversation = normalize({**CALLS[name], **tools})
        assert conversation.tools == [TOOL]
        assert conversation.messages[1].extra["tool_calls"] == [CALL]
        assert [m.role for m in conversation.messages] == ["user", "assistant", "tool"][: len(conversation.messages)]
        assert conversation.unused_fields == ()


def test_hermes_has_its_calls_in_the_text() -> None:
    text = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    turns = [
        ("system", "<tools></tools>"),
        ("human", "Hi"),
        ("gpt", text),
        ("tool", "<tool_response>1</tool_response>"),
    ]
    conversation = normalize({"conversations": [{"from": name, "value": value} for name, value in turns]})
    assert conversation.messages[2].content == text
    assert [m.role for m in conversation.messages] == ["system", "user", "assistant", "tool"]


REASONED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "s1K": (
        {"question": "1+1?", "thinking_trajectories": ["Hm."], "attempt": "2", "solution": "2.", "cot": None},
        ["solution"],
    ),
    "s1K-1.1": (
        {"question": "1+1?", "deepseek_thinking_trajectory": "Hm.", "deepseek_attempt": "2",
         "gemini_thinking_trajectory": "Or", "gemini_attempt": "3"},
        ["gemini_attempt", "gemini_thinking_trajectory"],
    ),
    "s1K and s1K-1.1": (
        {"question": "1+1?", "thinking_trajectories": ["Hm."], "attempt": "2",
         "deepseek_thinking_trajectory": "Or", "deepseek_attempt": "3"},
        ["deepseek_attempt", "deepseek_thinking_trajectory"],
    ),
    "medical-o1": ({"Question": "1+1?", "Complex_CoT": "Hm.", "Response": "2"}, []),
}  # fmt: skip


@pytest.mark.parametrize("name", REASONED)
def test_reasoning_beside_a_question_is_that_of_the_answer(name: str) -> None:
    record, unused = REASONED[name]
    answer = {"role": "assistant", "content": "2", "reasoning_content": "Hm."}
    expected = normalize({"messages": [{"role": "user", "content": "1+1?"}, answer]})
    assert normalize(record).messages == expected.messages
    assert sorted(normalize(record).unused_fields) == unused


def test_several_reasonings_are_rejected() -> None:
    with pytest.raises(RecordError, match="the field thinking_trajectories .* it has 2 entries; keep one"):
        normalize({"question": "1+1?", "thinking_trajectories": ["Hm.", "Or"], "attempt": "2"})


def test_an_image_id_without_an_image_is_rejected_in_any_spelling() -> None:
    for name in ("image_id", "imageId", "ImageID"):
        with pytest.raises(RecordError, match=f"{name} 5 refers to an image, but the record contains none"):
            normalize({"messages": [HI, HELLO], name: 5})


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_has_one_name(field: str) -> None:
    assert normalize({"messages": [HI, {**HELLO, field: "Hm."}]}).messages[1].extra == {"reasoning_content": "Hm."}


def test_inline_data_is_an_image() -> None:
    parts = [{"inline_data": {"mime_type": "image/png", "data": PNG}}, {"text": "What?"}]
    conversation = normalize(
        {"contents": [{"role": "user", "parts": parts}, {"role": "model", "parts": [{"text": "A"}]}]}
    )
    assert [image.data for image in conversation.images] == [b"png"]


def test_decisions_are_noted_and_do_not_count_as_content() -> None:
    placed = normalize({"messages": [HI, HELLO], "images": ["a.png"], "url": "x"})
    assert placed.notes == (NO_PLACEHOLDER,)
    assert placed == normalize({"messages": [{**HI, "content": "<image>Hi"}, HELLO], "images": ["a.png"]})
    assert normalize(FORMATS["several answers"][0]).notes == ("several answers: one is the target",)
    assert normalize(FORMATS["image, question and answer"][0]).notes == ()


@pytest.mark.parametrize(
    ("record", "hint"),
    [
        (
            {"id": "1", "Frage": "a", "Antwort": "b", "pic": "a.jpg"},
            "name the question and the answer with `map=user=FIELD,assistant=FIELD,image=pic`",
        ),
        ({"Answer": "b", "Question": "a"}, "try `map=user=Question,assistant=Answer`"),
        ({"Q": "a", "user_reply": "b", "photo": "c.png"}, "try `map=user=Q,assistant=user_reply,image=photo`"),
        # The target may be in a third field, so neither order of the first two fields is right.
        (
            {"task": "2?", "thoughts": "Hm.", "verdict": "5"},
            "fields task, thoughts, verdict; name the question and the answer with `map=user=FIELD,assistant=FIELD`",
        ),
        ({"info": {}, "annotations": [{"caption": "a"}]}, "if annotations is the list of records, write it alone"),
        ({"translation": {"en": "a", "de": "b"}}, "no record format has the fields translation"),
        ({1: "a", 2: "b"}, "no record format has the fields 1, 2"),  # of an adapter
        ({}, "the record has no fields"),
    ],
)
def test_unknown_records_get_a_hint_from_their_fields(record: Any, hint: str) -> None:
    with pytest.raises(RecordError, match=re.escape(hint)):
        normalize(record)


@pytest.mark.parametrize("field", [{"image_id": 5}, {"imgname": "5.png"}, {"photo": "a/b.JPG"}])
def test_a_picture_that_is_only_named_costs_the_record(field: Any) -> None:
    question = {"question": "What color?", "answer": "red"}
    with pytest.raises(RecordError, match="refers to an image, but the record contains none"):
        normalize({**question, **field})
    assert normalize({**question, **field, "image": "a.png"}).unused_fields == tuple(field)
    assert normalize({**question, "file_name": "notes.txt"}).unused_fields == ("file_name",)
