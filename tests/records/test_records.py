"""Every record shape becomes the conversation that a person would expect, or is rejected by name."""

from typing import Any

import numpy as np
import pytest

from energon_packed import RecordError, normalize
from tests.internals import NO_IMAGE

USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hello."}
VIDEO_TURNS = [{"from": "human", "value": "<video>What?"}, {"from": "gpt", "value": "It runs."}]


def turns(record: Any) -> list[tuple[str, str]]:
    return [(m.role, m.content) for m in normalize(record).messages]


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (
            {"images": ["a.png", "b.png"], "prompts": ["What?", "And?"], "captions": ["A cat.", "A dog."]},
            [("user", "<image><image>What?"), ("assistant", "A cat."), ("user", "And?"), ("assistant", "A dog.")],
        ),
        (
            {"images": [["a.png"]], "prompts": [["What?", "And <image>?"]], "captions": [["A cat.", "A dog."]]},
            [("user", "What?"), ("assistant", "A cat."), ("user", "And <image>?"), ("assistant", "A dog.")],
        ),
        ({"images": ["a.png"], "captions": ["A cat."]}, [("user", "<image>"), ("assistant", "A cat.")]),
        ({"prompts": "Hi", "captions": "Hello.", "images": []}, [("user", "Hi"), ("assistant", "Hello.")]),
        (
            {"messages": [{"role": "user", "content": "See <image>."}, ANSWER], "images": ["a.png"]},
            [("user", "See <image>."), ("assistant", "Hello.")],
        ),
        (
            {"messages": [USER, ANSWER], "system": "Be brief."},
            [("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello.")],
        ),
        (
            {
                "conversations": [
                    {"from": "system", "value": "S"},
                    {"from": "human", "value": "<image>\nHi"},
                    {"from": "gpt", "value": "A"},
                    {"from": "tool", "value": "T"},
                    {"from": "assistant", "value": "B"},
                ],
                "image": "a.png",
            },
            [("system", "S"), ("user", "<image>\nHi"), ("assistant", "A"), ("tool", "T"), ("assistant", "B")],
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "text", "text": "See "},
                            {"type": "image", "image": "a.png", "text": None},
                            {"type": "image_url", "image_url": {"url": "file:///b.png"}},
                            {"type": "video", "video": ["c.png", "d.png"]},
                        ],
                    },
                    ANSWER,
                ]
            },
            [("user", "See <image><image><image><image>"), ("assistant", "Hello.")],
        ),
    ],
)
def test_each_record_format_becomes_the_expected_turns(record: Any, expected: list[tuple[str, str]]) -> None:
    assert turns(record) == expected


def test_media_are_in_the_order_of_their_placeholders() -> None:
    parts = [{"type": "image", "image": "b.png"}, {"type": "image_url", "image_url": "a.png"}]
    conversation = normalize({"messages": [{"role": "user", "content": parts}, ANSWER]})
    assert [image.path for image in conversation.images] == ["b.png", "a.png"]
    assert conversation.kind == "image"


def test_typed_parts_may_take_their_images_from_the_list() -> None:
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}, ANSWER]
    conversation = normalize({"messages": messages, "images": [{"bytes": b"123", "path": "a.png"}]})
    assert [image.data for image in conversation.images] == [b"123"]


def test_text_and_tokens() -> None:
    assert normalize({"text": "Once."}).text == "Once."
    tokens = normalize({"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]})
    assert tokens.labels is not None
    assert tokens.labels.tolist() == [-100, 6, 7]
    assert normalize({"input_ids": np.array([5, 6])}).labels.tolist() == [5, 6]  # type: ignore[union-attr]


def test_fields_that_a_table_leaves_empty_are_not_there() -> None:
    record = {"images": [], "image": "a.png", "prompts": "q", "captions": "c", "tools": [], "fps": None}
    assert [image.path for image in normalize(record).images] == ["a.png"]
    message = {**USER, "tool_calls": [], "name": None}
    assert normalize({"messages": [message, ANSWER]}).messages[0].extra == {}


@pytest.mark.parametrize(
    ("fields", "contents", "media"),
    [
        ({"video": ["1", "2"]}, ["<image><image>What?", "It runs."], ["1", "2"]),
        (
            {"videos": [["1", "2", "3"]], "audios": [], "image": None},
            ["<image>" * 3 + "What?", "It runs."],
            list("123"),
        ),
    ],
)
def test_videos_are_lists_of_frames(fields: Any, contents: list[str], media: list[str]) -> None:
    conversation = normalize({"conversations": VIDEO_TURNS, **fields})
    assert [message.content for message in conversation.messages] == contents
    assert [image.path for image in conversation.images] == media
    assert conversation.kind == "video"


def test_images_and_videos_keep_the_order_of_their_placeholders() -> None:
    messages = [{"role": "user", "content": "<video> or <image> or <video>?"}, ANSWER]
    conversation = normalize({"messages": messages, "images": ["a"], "videos": [["1", "2"], ["3"]]})
    assert [image.path for image in conversation.images] == ["1", "2", "a", "3"]
    assert conversation.messages[0].content == "<image><image> or <image> or <image>?"
    assert normalize({"text": "<video>", "videos": [["1"]]}).text == "<image>"
    assert normalize({"prompts": ["q"], "captions": ["c"], "videos": [["1"]]}).messages[0].content == "<image>q"


def test_video_may_be_a_flag_of_frames() -> None:
    stored = {
        "messages": [{"role": "user", "content": "<image><image>?"}, ANSWER],
        "images": ["a", "b"],
        "video": True,
        "fps": [2.0],
    }
    assert (normalize(stored).kind, normalize(stored).fps) == ("video", 2.0)
    part = {"messages": [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "?"}]}, ANSWER]}
    conversation = normalize({**part, "videos": [["a", "b"]]})
    assert conversation.messages[0].content == "<image><image>?"
    assert [image.path for image in conversation.images] == ["a", "b"]


PLACEHOLDERS = {
    "image_count_mismatch": (
        *("<image>", "<img></img>", "<img> </img>", "<image_placeholder>", "<ImageHere>"),
        *("<image_00>", "<image 1>", "<image1>", "<|image_1|>"),
    ),
    "video_count_mismatch": ("<video>", "<video></video>", "<video_1>", "<|video_1|>"),
    "audio_count_mismatch": ("<audio>", "<audio></audio>", "<audio>a</audio>", "<audio_1>", "<|audio_1|>"),
}
PLACES = (
    lambda text: {"messages": [{"role": "user", "content": text}, ANSWER]},
    lambda text: {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": f"`{text}`"}]},
    lambda text: {"messages": [USER, ANSWER], "system": text},
    lambda text: {"messages": [{"role": "user", "content": [{"type": "text", "text": text}]}, ANSWER], "images": []},
    lambda text: {"question": text, "answer": "a", "videos": [], "audios": []},
    lambda text: {"instruction": "Hi", "input": text, "output": "Hello."},
    lambda text: {"text": f"A tag: {text}"},
    lambda text: {"texts": [text, "b"], "images": [None, None]},
)


@pytest.mark.parametrize(
    ("reason", "placeholder"), [(key, text) for key in PLACEHOLDERS for text in PLACEHOLDERS[key]]
)
def test_a_placeholder_without_its_medium_rejects_the_record_in_every_place(reason: str, placeholder: str) -> None:
    for record in PLACES:
        with pytest.raises(RecordError, match=reason):
            normalize(record(f"{placeholder} What?"))
    # Another kind of medium changes nothing.
    media = {"images": ["a.png"]} if reason != "image_count_mismatch" else {}
    with pytest.raises(RecordError, match=reason):
        normalize({"messages": [{"role": "user", "content": placeholder}, ANSWER], **media})


def test_text_about_media_is_text() -> None:
    for text in (
        "<video controls>",
        "<audio src='a.wav'>",
        "<img src='a.png'>",
        "&lt;image&gt;",
        "\\<image\\>",
        "<imagery>",
    ):
        assert normalize({"messages": [{"role": "user", "content": text}, ANSWER]}).messages[0].content == text
    # A reference to an image that has a placeholder.
    mention = "<image> <image> Compare <image 1> and <image 2>."
    record = {"messages": [{"role": "user", "content": mention}, ANSWER], "images": ["a.png", "b.png"]}
    assert normalize(record).messages[0].content == mention


def test_a_placeholder_that_is_not_read_is_not_moved_to_the_start() -> None:
    record = {"messages": [{"role": "user", "content": "See <|image_1|>."}, ANSWER], "images": ["a.png"]}
    with pytest.raises(RecordError, match=r"<\|image_1\|> is not read as a placeholder; write <image> instead"):
        normalize(record)


def test_lists_of_images_belong_to_their_prompts() -> None:
    record = {"images": [["1", "2"], [], ["3"]], "prompts": [["a"], ["b"], ["c"]], "captions": [["x"], ["y"], ["z"]]}
    assert turns(record)[::2] == [("user", "<image><image>a"), ("user", "b"), ("user", "<image>c")]
    assert turns({**record, "images": [["1", "2"]]})[0] == ("user", "<image><image>a")


def test_sharegpt_tool_data() -> None:
    turns = [("human", "Sunny?"), ("function_call", '{"name": "f"}'), ("observation", "yes"), ("gpt", "Yes.")]
    record = {"conversations": [{"from": f, "value": v} for f, v in turns], "tools": '[{"name": "f"}]'}
    conversation = normalize(record)
    assert [m.role for m in conversation.messages] == ["user", "assistant", "tool", "assistant"]
    assert conversation.tools == [{"type": "function", "function": {"name": "f"}}]


def test_tools_calls_and_metadata_are_kept() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    record = {"id": 7, "messages": [USER, call], "tools": [{"name": "f"}], "fps": 2, "timestamp_decimal": 1}
    conversation = normalize(record)
    tool = {"type": "function", "function": {"name": "f"}}
    assert (conversation.id, conversation.tools, conversation.fps) == ("7", [tool], 2.0)
    assert conversation.timestamp_decimal == 1
    assert conversation.messages[1].as_dict() == {**call, "content": ""}


@pytest.mark.parametrize(
    ("record", "reason", "detail"),
    [
        ([1], "bad_json", "must be an object, not list"),
        ({"question": "?"}, "missing_field", "no record format has the fields question"),
        ({"question": "?", "answer": None}, "missing_field", "has the fields question; answer is null"),
        ({"question": "", "answer": ""}, "missing_field", "has the fields question, answer; question is empty"),
        ({"messages": [{"content": "x"}]}, "missing_field", "a message has no role"),
        ({"messages": [{"role": "user"}]}, "missing_field", "the user message has no content"),
        ({"messages": ["x"]}, "missing_field", "an entry of messages is str"),
        ({"messages": [{"role": "user", "content": True}]}, "missing_field", "must be text, not bool"),
        (
            {"messages": [{"role": "user", "content": [{"type": "audio"}]}]},
            "missing_audio",
            "a content part of type audio has no file",
        ),
        ({"conversations": [{"from": "human"}]}, "missing_field", "the user message has no content"),
        ({"prompts": ["a", "b"], "captions": ["c"]}, "missing_field", "2 prompts for 1 captions"),
        ({"input_ids": [1, 2], "labels": [1]}, "missing_field", "labels has 1 entries for 2 input_ids"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "missing_field", "loss_mask has 1 entries"),
        ({"input_ids": ["a"]}, "missing_field", "flat list of integers"),
        ({"input_ids": [[1], [2, 3]]}, "missing_field", "flat list"),
        ({"messages": [USER], "tools": "f"}, "missing_field", "tools is not a JSON list"),
        ({"messages": [USER], "tools": {"f": 1}}, "missing_field", "tools must be a list"),
        (
            {"captions": ["c"], "images": ["a"], "image": "b"},
            "image_count_mismatch",
            "both images and image are in the record",
        ),
        ({"messages": [USER], "fps": 1e30}, "missing_field", "fps must be a number"),
        ({"messages": [USER], "fps": "fast"}, "missing_field", "fps must be a number"),
        ({"messages": [USER], "timestamp_decimal": float("nan")}, "missing_field", "must be a number, not nan"),
        ({"captions": ["c"], "images": ["data:image/png;base64,é"]}, "corrupt_image", "data:image"),
        ({"captions": ["c"], "images": ["file://[abc/x.png"]}, "missing_image", "Invalid IPv6"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, "bad_role", "role 'narrator'; use one of user, human"),
        ({"conversations": [{"from": "alien", "value": "x"}]}, "bad_role", "from 'alien'"),
        ({"messages": [USER, {"role": "system", "content": "x"}]}, "bad_role", "message 1 is a system message"),
        (
            {"messages": [{"role": "system", "content": "a"}, USER], "system": "b"},
            "bad_role",
            "another system message",
        ),
        (
            {"messages": [{"role": "user", "content": "<image>"}]},
            "image_count_mismatch",
            "1 <image> placeholders for 0",
        ),
        ({"messages": [ANSWER], "images": ["a"]}, "image_count_mismatch", "0 <image> placeholders for 1"),
        (
            {
                "messages": [{"role": "user", "content": [{"type": "image", "image": "a"}]}, ANSWER],
                "images": ["b"],
            },
            "image_count_mismatch",
            "both in the messages and in the images field",
        ),
        ({"messages": None, "source": "x"}, "missing_field", "no record format has the fields source"),
        ({"text": "a", "system": "b"}, "bad_role", "a text record has a system field"),
        ({"conversations": VIDEO_TURNS, "videos": [["a.png"], []]}, "unsupported_media", "none of them empty"),
        ({"conversations": VIDEO_TURNS, "videos": [[["a.png"]]]}, "unsupported_media", "a list of frames for each"),
        (
            {"conversations": VIDEO_TURNS, "videos": [["a"], ["b"]]},
            "video_count_mismatch",
            "1 <video> placeholders for 2",
        ),
        ({"messages": [USER, ANSWER], "audios": [5]}, "missing_audio", "an audio file is 5; use a path or bytes"),
        (
            {"messages": [USER, ANSWER], "frames": ["a.png"]},
            "unsupported_media",
            "frames is not supported; rename it",
        ),
        (
            {"messages": [USER, ANSWER], "img": "a.png"},
            "unsupported_media",
            "refers to an image, but the record contains none. Read it with `map=images=img`",
        ),
        ({"input_ids": [1, 2], "videos": [["a"]]}, "unsupported_media", "a record of input_ids has videos"),
        (
            {"captions": ["c", "d"], "prompts": ["a", "b"], "images": [["1"], ["2"], ["3"]]},
            "image_count_mismatch",
            "a list of 3 lists for 2 prompts",
        ),
        ({"conversations": VIDEO_TURNS, "videos": []}, "video_count_mismatch", "1 <video> placeholders for 0 videos"),
        ({"conversations": VIDEO_TURNS, "video": None}, "video_count_mismatch", "1 <video> placeholders for 0 videos"),
        (
            {"messages": [USER, ANSWER], "system": "<video>", "videos": [["a"], ["b"]]},
            "video_count_mismatch",
            "1 <video> placeholders for 2",
        ),
        ({"messages": [USER, ANSWER], "video": 5}, "unsupported_media", "video is int; pass a list of frames"),
        ({"text": "  "}, "empty", "text is empty"),
        ({"messages": []}, "empty", "messages is an empty list"),
        ({"captions": []}, "empty", "captions is an empty list"),
        ({"input_ids": []}, "empty", "no message, text or token"),
        ({"messages": [USER, {"role": "assistant", "content": " "}]}, "empty", "every assistant turn is empty"),
        ({"captions": ["c"], "images": ["https://x.org/a.png"]}, "unsupported_media", "is remote"),
        ({"captions": ["c"], "images": [None]}, "missing_image", "an image is None"),
        (
            {"captions": ["c"], "images": [{"src": "a.jpg"}]},
            "missing_image",
            "an image is {'src': 'a.jpg'}, which has no",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "video"}]}, ANSWER]},
            "missing_video",
            "a content part of type video has no video",
        ),
        ({"captions": ["c"], "images": ["data:image/png;base64,@@"]}, "corrupt_image", "data:image"),
        (
            {"captions": ["c"], "images": ["a"], "patch_positions": ["a.npy", "b.npy"]},
            "missing_patch_positions",
            "2 patch_positions for 1 images",
        ),
    ],
)
def test_rejects(record: Any, reason: str, detail: str) -> None:
    with pytest.raises(RecordError) as caught:
        normalize(record)
    assert caught.value.reason.value == reason
    assert detail in caught.value.detail
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [b"", {"bytes": b"", "path": None}])
def test_an_empty_file_is_an_image_that_is_damaged(value: object) -> None:
    record = {"image": value, "question": "What is it?", "answer": "A cat."}
    (image,) = normalize(record).images
    assert image.data == b""  # rejected as corrupt_image when it is measured


@pytest.mark.parametrize(
    ("value", "notes"),
    [
        (None, (NO_IMAGE,)),
        ("", (NO_IMAGE,)),
        ({"bytes": None, "path": None}, (NO_IMAGE,)),
        ([], ()),
    ],
)
def test_a_record_with_an_image_field_without_a_value_is_text_with_a_note(value: object, notes: tuple[str]) -> None:
    conversation = normalize({"image": value, "question": "What is it?", "answer": "A cat."})
    assert (conversation.images, conversation.notes) == ((), notes)


def test_a_null_image_field_beside_an_image_in_the_messages_has_no_note() -> None:
    parts = [{"type": "image", "image": "a.jpg"}, {"type": "text", "text": "What is it?"}]
    turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": "A cat."}]
    conversation = normalize({"image": None, "messages": turns})
    assert (len(conversation.images), conversation.notes) == (1, ())


def test_an_empty_video_file_is_a_video_that_is_damaged() -> None:
    (video,) = normalize({"video": b"", "question": "What moves?", "answer": "A cat."}).videos
    assert video.file.data == b""  # rejected as corrupt_video when it is measured
    with pytest.raises(RecordError, match="video is dict"):
        normalize({"video": {"bytes": b"", "path": None}, "question": "What moves?", "answer": "A cat."})


def test_a_record_of_no_known_format_may_have_arrays() -> None:
    with pytest.raises(RecordError, match="no record format has the fields question, z"):
        normalize({"question": np.array(["a", "b"]), "z": np.zeros(3)})
