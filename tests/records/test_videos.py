"""Records with video files: each format, as its project writes it, has its videos at the right places of the text."""

import base64
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from energon_packed import Conversation, MediaReference, RecordError, VideoReference, normalize
from tests.docs.record_pages import PAGE, PUBLISHED
from tests.internals import VIDEO, is_video_content
from tests.videos import COMBINATIONS, make_video

USER, ANSWER = {"role": "user", "content": "What?"}, {"role": "assistant", "content": "A bus."}
HUMAN, GPT = {"from": "human", "value": "<video>\nWhat?"}, {"from": "gpt", "value": "A bus."}
MP4 = b"\0\0\0\x1cftypisom"
MP4_URL = "data:video/mp4;base64," + base64.b64encode(MP4).decode()


def part(**fields: Any) -> dict[str, Any]:
    """Return a record with a content part of type video, and a text."""
    content = [{"type": "video", **fields}, {"type": "text", "text": "What?"}]
    return {"messages": [{"role": "user", "content": content}, ANSWER]}


# name: record, turns, files, images, unused fields
FORMATS: dict[str, tuple[Any, list[tuple[str, str]], list[Any], list[str], list[str]]] = {
    # lmms-lab/LLaVA-Video-178K: 0_30_s_academic_v0_1
    "LLaVA-Video": (
        {
            "id": "v_0",
            "data_source": "0_30_s_academic_v0_1",
            "video": "academic_source/v_0.mp4",
            "conversations": [{"from": "human", "value": "<image>\nWhat?"}, GPT],
        },
        [("user", "<video>\nWhat?"), ("assistant", "A bus.")],
        ["academic_source/v_0.mp4"],
        [],
        ["data_source"],
    ),
    # ShareGPT4Video/ShareGPT4Video: sharegpt4video_40k.jsonl
    "ShareGPT4Video": (
        {
            "video_id": "j5J",
            "video_path": "panda/j5J.mp4",
            "timestamp": ["00:00:00.0", "00:00:05.6"],
            "keyframe": [0, 168],
            "zip_folder": "panda_videos_1.zip",
            "captions": [{"idx": "1", "content": "A bus comes."}, {"idx": "-1", "content": "A bus comes and stops."}],
        },
        [("user", "<video>"), ("assistant", "A bus comes and stops.")],
        ["panda/j5J.mp4"],
        [],
        ["keyframe", "timestamp", "video_id", "zip_folder"],
    ),
    # tencent/Penguin-Recap-V, made of ShareGPT4Video
    "a list of one video": (
        {"video": ["./ShareGPT4Video/a.mp4"], "conversations": [HUMAN, GPT]},
        [("user", "<video>\nWhat?"), ("assistant", "A bus.")],
        ["./ShareGPT4Video/a.mp4"],
        [],
        [],
    ),
    # ms-swift, docs/source_en/Customization/Custom-dataset.md: pre-training and supervised fine-tuning
    "ms-swift, pre-training": (
        {
            "messages": [{"role": "assistant", "content": "<image>is an elephant, <video>is a lion running"}],
            "images": ["/xxx/x.jpg"],
            "videos": ["/xxx/x.mp4"],
        },
        [("assistant", "<image>is an elephant, <video>is a lion running")],
        ["/xxx/x.mp4"],
        ["/xxx/x.jpg"],
        [],
    ),
    "ms-swift": (
        {
            "messages": [
                {"role": "system", "content": "You are a helpful and harmless assistant."},
                {"role": "user", "content": "<image>What is in the image, <video>What is in the video?"},
                ANSWER,
            ],
            "images": ["/xxx/x.jpg"],
            "videos": ["/xxx/x.mp4"],
        },
        [
            ("system", "You are a helpful and harmless assistant."),
            ("user", "<image>What is in the image, <video>What is in the video?"),
            ("assistant", "A bus."),
        ],
        ["/xxx/x.mp4"],
        ["/xxx/x.jpg"],
        [],
    ),
    "ms-swift, query and response": (
        {"query": "<video>What?", "response": "A bus.", "videos": ["a.mp4"], "images": [], "audios": []},
        [("user", "<video>What?"), ("assistant", "A bus.")],
        ["a.mp4"],
        [],
        [],
    ),
    "ms-swift 2, tags with paths": (
        {"query": "<video>a.mp4</video> or <video>b.webm</video>?", "response": "A bus."},
        [("user", "<video> or <video>?"), ("assistant", "A bus.")],
        ["a.mp4", "b.webm"],
        [],
        [],
    ),
    # LLaMA-Factory: data/mllm_video_demo.json, and the alpaca format of data/README.md
    "LLaMA-Factory, sharegpt": (
        {
            "messages": [
                {"content": "<video>Why is this video funny?", "role": "user"},
                {"content": "A baby is reading.", "role": "assistant"},
            ],
            "videos": ["mllm_demo_data/1.mp4"],
        },
        [("user", "<video>Why is this video funny?"), ("assistant", "A baby is reading.")],
        ["mllm_demo_data/1.mp4"],
        [],
        [],
    ),
    "LLaMA-Factory, alpaca": (
        {"instruction": "What happens?", "input": "", "output": "A bus stops.", "videos": ["1.avi"]},
        [("user", "<video>What happens?"), ("assistant", "A bus stops.")],
        ["1.avi"],
        [],
        [],
    ),
    # zjysteven/lmms-finetune, docs/dataset.md
    "lmms-finetune": (
        {
            "system_prompt": "S",
            "video": ["bm_teaser.mp4", "bm_show.mp4"],
            "image": "bm.jpg",
            "conversations": [
                {"from": "human", "value": "<video><video>What are these videos about?"},
                {"from": "gpt", "value": "A."},
                {"from": "human", "value": "<image>What does this image show?"},
                {"from": "gpt", "value": "B."},
            ],
        },
        [
            ("system", "S"),
            ("user", "<video><video>What are these videos about?"),
            ("assistant", "A."),
            ("user", "<image>What does this image show?"),
            ("assistant", "B."),
        ],
        ["bm_teaser.mp4", "bm_show.mp4"],
        ["bm.jpg"],
        [],
    ),
    # OpenGVLab/InternVL, internvl_chat: a record without `<video>` gets it before its first turn
    "InternVL": (
        {"id": 0, "video": "k400/a.mkv", "conversations": [{"from": "human", "value": "What?"}, GPT]},
        [("user", "<video>What?"), ("assistant", "A bus.")],
        ["k400/a.mkv"],
        [],
        [],
    ),
    # OpenGVLab/VideoChat2-IT: video/reasoning/next_qa/train.json and video/caption/textvr/train.json
    "VideoChat2-IT": (
        {
            "video": "NExTVideo/1164/3238737531.mp4",
            "QA": [
                {"i": "Choose one.", "q": "How?\nOptions:\n(A) a\n(B) b", "a": "Answer: (A) a"},
                {"i": "Choose one.", "q": "Why?", "a": "Answer: (B) b"},
            ],
        },
        [
            ("system", "Choose one."),
            ("user", "<video>How?\nOptions:\n(A) a\n(B) b"),
            ("assistant", "Answer: (A) a"),
            ("user", "Why?"),
            ("assistant", "Answer: (B) b"),
        ],
        ["NExTVideo/1164/3238737531.mp4"],
        [],
        [],
    ),
    "VideoChat2-IT, caption": (
        {"video": "videos/a.mp4", "QA": [{"q": "", "a": "A bus."}], "start": 0.0, "end": None},
        [("user", "<video>"), ("assistant", "A bus.")],
        ["videos/a.mp4"],
        [],
        ["start"],
    ),
    # Video-R1/Video-R1-data: Video-R1-COT-165k.json, and an image of it
    "Video-R1": (
        {
            "problem_id": 2,
            "problem": "What appears?",
            "data_type": "video",
            "problem_type": "multiple choice",
            "options": ["A. A notification", "B. A command"],
            "process": "<think>It is known.</think>",
            "solution": "<answer>A</answer>",
            "path": "./LLaVA-Video-178K/v.mp4",
            "data_source": "LLaVA-Video-178K",
        },
        [
            ("user", "<video>What appears?\nA. A notification\nB. A command"),
            ("assistant", "<think>It is known.</think>\n<answer>A</answer>"),
        ],
        ["./LLaVA-Video-178K/v.mp4"],
        [],
        ["data_source", "problem_id"],
    ),
    "Video-R1, image": (
        {
            "problem": "1+1?",
            "data_type": "image",
            "problem_type": "numerical",
            "options": [],
            "solution": "<answer>2</answer>",
            "path": "./Math/a.png",
        },
        [("user", "<image>1+1?"), ("assistant", "<answer>2</answer>")],
        [],
        ["./Math/a.png"],
        [],
    ),
    # EasyVideoR1, README
    "EasyVideoR1": (
        {
            "problem": "Color?",
            "answer": "B",
            "videos": ["a.mp4"],
            "data_type": "video",
            "problem_type": "multiple choice",
            "options": ["A. red", "B. blue"],
        },
        [("user", "<video>Color?\nA. red\nB. blue"), ("assistant", "B")],
        ["a.mp4"],
        [],
        [],
    ),
    # LongVideo-Reason as AReaL reads it: `videos` is one path
    "LongVideo-Reason": (
        {"problem": "Why?", "answer": "B", "videos": "a.mp4"},
        [("user", "<video>Why?"), ("assistant", "B")],
        ["a.mp4"],
        [],
        [],
    ),
    # QwenLM/Qwen2.5-VL, qwen-vl-utils/README.md
    "Qwen-VL part": (
        part(video="file:///path/to/video1.mp4"),
        [("user", "<video>What?"), ("assistant", "A bus.")],
        ["/path/to/video1.mp4"],
        [],
        [],
    ),
    "Qwen-VL part without a type": (
        {"messages": [{"role": "user", "content": [{"video": "a.mp4", "text": None}, {"text": "What?"}]}, ANSWER]},
        [("user", "<video>What?"), ("assistant", "A bus.")],
        ["a.mp4"],
        [],
        [],
    ),
    # Transformers, docs/source/en/chat_templating_multimodal.md
    "Transformers part, path": (
        part(path="a.mp4"),
        [("user", "<video>What?"), ("assistant", "A bus.")],
        ["a.mp4"],
        [],
        [],
    ),
    # vLLM, docs/features/multimodal_inputs.md
    "OpenAI video_url": (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "What? "},
                        {"type": "video_url", "video_url": {"url": "file:///a.mp4"}},
                    ],
                },
                ANSWER,
            ]
        },
        [("user", "What? <video>"), ("assistant", "A bus.")],
        ["/a.mp4"],
        [],
        [],
    ),
    "OpenAI video_url, data": (
        {"messages": [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": MP4_URL}}]}, ANSWER]},
        [("user", "<video>"), ("assistant", "A bus.")],
        [MP4],
        [],
        [],
    ),
    "Gemini": (
        {
            "contents": [
                {
                    "role": "user",
                    "parts": [{"fileData": {"mimeType": "video/mp4", "fileUri": "a.mp4"}}, {"text": "What?"}],
                },
                {"role": "model", "parts": [{"text": "A bus."}]},
            ]
        },
        [("user", "<video>What?"), ("assistant", "A bus.")],
        ["a.mp4"],
        [],
        [],
    ),
    # `datasets`: a column of the Video feature, and videofolder
    "datasets, bytes": (
        {"video": {"bytes": MP4, "path": "a.mp4"}, "caption": "A bus."},
        [("user", "<video>"), ("assistant", "A bus.")],
        [MP4],
        [],
        [],
    ),
    "datasets, path": (
        {"video": {"bytes": None, "path": "a.mp4"}, "caption": "A bus."},
        [("user", "<video>"), ("assistant", "A bus.")],
        ["a.mp4"],
        [],
        [],
    ),
    "datasets, list of bytes": (
        {"videos": [{"bytes": MP4, "path": None}, {"bytes": None, "path": "b.ts"}], "messages": [USER, ANSWER]},
        [("user", "<video><video>What?"), ("assistant", "A bus.")],
        [MP4, "b.ts"],
        [],
        [],
    ),
    "bytes": (
        {"video": MP4, "text": "A bus."},
        [("user", "<video>"), ("assistant", "A bus.")],
        [MP4],
        [],
        [],
    ),
    "WebVid": (
        {"video": "00001_00050/1.mp4", "caption": "A bus.", "video_duration": 12, "video_url": "https://x.org/1.mp4"},
        [("user", "<video>"), ("assistant", "A bus.")],
        ["00001_00050/1.mp4"],
        [],
        ["video_duration", "video_url"],
    ),
    "captions": (
        {"videos": ["a.mp4", "b.mp4"], "prompts": ["One?", "<video>Two?<video>"], "captions": ["1", "2"]},
        [("user", "One?"), ("assistant", "1"), ("user", "<video>Two?<video>"), ("assistant", "2")],
        ["a.mp4", "b.mp4"],
        [],
        [],
    ),
    "question and answer": (
        {"video": "a.webm", "question": "What?", "answer": "A bus."},
        [("user", "<video>What?"), ("assistant", "A bus.")],
        ["a.webm"],
        [],
        [],
    ),
    "files and frames": (
        {
            "videos": ["a.mp4", ["1.jpg", "2.jpg"], ["b.mp4"]],
            "images": ["c.png"],
            "messages": [{"role": "user", "content": "<video><image><video><video>"}, ANSWER],
        },
        [("user", "<video><image><image><image><video>"), ("assistant", "A bus.")],
        ["a.mp4", "b.mp4"],
        ["c.png", "1.jpg", "2.jpg"],
        [],
    ),
    "videos of a turn": (
        {"messages": [{**USER, "videos": ["a.mp4"], "images": ["b.png"]}, ANSWER]},
        [("user", "<image><video>What?"), ("assistant", "A bus.")],
        ["a.mp4"],
        ["b.png"],
        [],
    ),
    "parts whose files are in the field": (
        {**part(), "videos": ["a.mp4"]},
        [("user", "<video>What?"), ("assistant", "A bus.")],
        ["a.mp4"],
        [],
        [],
    ),
    "image parts, and videos of the field": (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "<video>"}],
                },
                ANSWER,
            ],
            "videos": ["a.mp4"],
        },
        [("user", "<image><video>"), ("assistant", "A bus.")],
        ["a.mp4"],
        ["a.png"],
        [],
    ),
    "an animated GIF is a video in a video field": (
        {"video": "tgif/a.gif", "conversations": [HUMAN, GPT]},
        [("user", "<video>\nWhat?"), ("assistant", "A bus.")],
        ["tgif/a.gif"],
        [],
        [],
    ),
    "and an image in an image field": (
        {"image": "a.gif", "caption": "A bus."},
        [("user", "<image>"), ("assistant", "A bus.")],
        [],
        ["a.gif"],
        [],
    ),
    "a name without an extension": (
        {"video": "videos/0001", "conversations": [HUMAN, GPT]},
        [("user", "<video>\nWhat?"), ("assistant", "A bus.")],
        ["videos/0001"],
        [],
        [],
    ),
    "a document": ({"text": "See <video>.", "videos": ["a.mp4"]}, [("", "See <video>.")], ["a.mp4"], [], []),
}


def shown(references: Sequence[MediaReference | None]) -> list[Any]:
    return [None if file is None else file.data if file.path is None else file.path for file in references]


def turns(conversation: Conversation) -> list[tuple[str, str]]:
    if conversation.text is not None:
        return [("", conversation.text)]
    return [(message.role, message.content) for message in conversation.messages]


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_has_its_videos_at_their_places(name: str) -> None:
    record, expected, files, images, unused = FORMATS[name]
    conversation = normalize(record)
    assert turns(conversation) == expected
    assert shown([video.file for video in conversation.videos]) == files
    assert shown(conversation.images) == images
    assert sorted(conversation.unused_fields) == unused
    assert conversation.kind == ("video" if files else "image" if images else "text")


def test_frames_of_a_field_and_images_of_parts_are_in_the_order_of_the_text() -> None:
    images = [
        {"type": "image", "image": "a.png"},
        {"type": "text", "text": "<video>"},
        {"type": "image", "image": "b.png"},
    ]
    record = {"messages": [{"role": "user", "content": images}, ANSWER], "videos": [["1.png", "2.png"]]}
    conversation = normalize(record)
    assert turns(conversation)[0] == ("user", "<image><image><image><image>")
    assert shown(conversation.images) == ["a.png", "1.png", "2.png", "b.png"]
    # The image of a tag has no second placeholder for the frame: the frame is not lost.
    tagged = {"role": "assistant", "content": "<img>a.png</img>", "image": "b.png"}
    with pytest.raises(RecordError, match="2 <image> placeholders for 3 images"):
        normalize({"messages": [{"role": "user", "content": "<video>"}, tagged], "videos": [["1.png"]]})


def test_the_column_of_the_datasets_library(tmp_path: Path) -> None:
    """Oracle: the storage of the Video feature of `datasets`."""
    import pyarrow as pa
    from datasets import Features, Value, Video
    from datasets.table import table_cast

    data = make_video(tmp_path / "a.mp4", frames=3).read_bytes()
    schema = Features({"video": Video(decode=False), "caption": Value("string")}).arrow_schema
    rows = [{"video": {"bytes": data, "path": "a.mp4"}, "caption": "A."},
            {"video": {"bytes": None, "path": "b.mp4"}, "caption": "B."}]  # fmt: skip
    table = table_cast(pa.Table.from_pylist(rows), schema)
    found = [shown([video.file for video in normalize(row).videos]) for row in table.to_pylist()]
    assert found == [[data], ["b.mp4"]]


def test_tokens_with_video_files() -> None:
    conversation = normalize({"input_ids": [1, 2, 3], "videos": ["a.mp4"], "images": ["b.png"]})
    assert conversation.input_ids is not None
    assert conversation.input_ids.tolist() == [1, 2, 3]
    assert [shown([video.file for video in conversation.videos]), shown(conversation.images)] == [["a.mp4"], ["b.png"]]


@pytest.mark.parametrize(
    ("fields", "settings"),
    [
        # The examples of qwen-vl-utils/README.md, and nulls as in the columns of a table.
        ({"fps": 2.0, "resized_height": None, "video_start": None}, {"fps": 2.0}),
        (
            {"nframes": 12, "min_pixels": 50176, "max_pixels": 50176 * 2},
            {"num_frames": 12, "min_pixels": 50176, "max_pixels": 100352},
        ),
        (
            {"fps": 1, "min_frames": 4, "max_frames": 768, "total_pixels": 20480 * 784},
            {"fps": 1.0, "min_frames": 4, "max_frames": 768, "total_pixels": 16056320},
        ),
        ({"num_frames": 8.0, "nframes": 8}, {"num_frames": 8}),
        ({"video_start": 0.0}, {}),
    ],
)
def test_settings_of_a_video_have_the_names_of_processors(fields: Any, settings: Any) -> None:
    in_part = normalize(part(video="a.mp4", **fields)).videos
    in_object = normalize({"videos": [{"path": "a.mp4", **fields}], "messages": [USER, ANSWER]}).videos
    in_url = normalize(part(video_url={"url": "a.mp4"}, **fields)).videos
    assert [video.settings for video in (*in_part, *in_object, *in_url)] == [settings] * 3


def test_settings_belong_to_one_video() -> None:
    content = [{"type": "video", "video": "a.mp4", "fps": 1}, {"type": "video", "video": "b.mp4", "num_frames": 4}]
    videos = normalize({"messages": [{"role": "user", "content": content}, ANSWER]}).videos
    assert [video.settings for video in videos] == [{"fps": 1.0}, {"num_frames": 4}]


@pytest.mark.parametrize("fields", [{"fps": 29.97}, {"fps": [29.97]}])
def test_fps_of_a_record_is_not_a_setting(fields: Any) -> None:
    conversation = normalize({"video": "a.mp4", "conversations": [HUMAN, GPT], **fields})
    assert conversation.videos[0].settings == {}
    assert conversation.fps == 29.97
    assert conversation.notes == ("fps beside a video file, not used to sample frames",)


def test_a_reference_stays_as_it_is() -> None:
    video = VideoReference(file=MediaReference(path="a.tar", offset=512, size=9), settings={"fps": 1.0})
    assert normalize({"video": video, "caption": "A."}).videos == (video,)
    with_settings = normalize({"videos": [{"video": video, "max_frames": 4}], "caption": "A."}).videos
    assert with_settings == (VideoReference(file=video.file, settings={"fps": 1.0, "max_frames": 4}),)
    alone = normalize({"video": MediaReference(path="a.tar", offset=512, size=9), "caption": "A."})
    assert alone.videos == (VideoReference(file=MediaReference(path="a.tar", offset=512, size=9)),)


CUT = "is not supported for a video file: the frames of the whole file are sampled; cut the clip"


@pytest.mark.parametrize(
    ("record", "reason", "detail"),
    [
        (
            part(video="a.mp4", video_start=1.0, video_end=2.0),
            "unsupported_field",
            f"video_start of a content part of type video {CUT}",
        ),
        (
            part(video="a.mp4", video_end="00:00:05"),
            "unsupported_field",
            f"video_end of a content part of type video {CUT}",
        ),
        (
            part(video="a.mp4", resized_height=280, resized_width=280),
            "unsupported_field",
            "resized_height of a content part of type video is not supported for a video file: write min_pixels",
        ),
        (part(video="a.mp4", do_sample_frames=False), "unsupported_field", "do_sample_frames of a content part"),
        (part(video="a.mp4", fps=0), "unsupported_field", "fps of a video must be a number above 0, not 0"),
        (part(video="a.mp4", fps="2"), "unsupported_field", "fps of a video must be a number above 0, not '2'"),
        (part(video="a.mp4", fps=float("nan")), "unsupported_field", "fps of a video must be a number above 0"),
        (part(video="a.mp4", fps=10**400), "unsupported_field", "fps of a video must be a number above 0, not 1000"),
        (part(video=[None]), "missing_image", "an image is None"),
        ({"videos": ["1.jpg", None], "conversations": [HUMAN, GPT]}, "missing_image", "an image is None"),
        ({"videos": ["a.mp4", None], "conversations": [HUMAN, GPT]}, "unsupported_media", "in one list"),
        (part(video="a.mp4", max_frames=True), "unsupported_field", "max_frames of a video must be a number"),
        (part(video="a.mp4", nframes=8.5), "unsupported_field", "nframes of a video must be a whole number, not 8.5"),
        (
            part(video="a.mp4", nframes=8, num_frames=4),
            "unsupported_field",
            "num_frames and nframes of a video differ: 4 and 8",
        ),
        (
            part(video="a.mp4", fps=1, nframes=4),
            "unsupported_field",
            "fps and num_frames of a video exclude each other",
        ),
        (part(video="a.mp4", masks=[1]), "unsupported_field", "the field masks of a content part of type video"),
        (
            part(video=["1.png"], min_pixels=5),
            "unsupported_field",
            "the field min_pixels of a content part of type video",
        ),
        (part(video=""), "missing_video", "a content part of type video has no video; use a file or frames"),
        (
            {"messages": [{"role": "user", "content": [{"video": "a.mp4"}, {"type": "video"}]}, ANSWER]},
            "missing_video",
            "a content part of type video has no video; use a file or frames",
        ),
        (part(video=["a.mp4", "1.png"]), "unsupported_media", "has video files and images in one list"),
        (part(video="https://x.org/a.mp4?b=c"), "unsupported_media", "is remote; download it and pass a path"),
        (part(video="data:video/mp4,abc"), "missing_video", "is not a base64 data URL"),
        (part(video="data:video/mp4;base64,@"), "corrupt_video", "data:video/mp4"),
        (part(video={"path": {"path": {"path": "a"}}}), "missing_video", "a video is nested in several objects"),
        (part(video={"id": 1}), "unsupported_media", "video of a content part is dict; pass a list of frames, or a"),
        (
            {**part(video="a.mp4"), "videos": ["b.mp4"]},
            "video_count_mismatch",
            "videos are both in the messages and",
        ),
        (
            {"video": "a.mp4", "start": 3.5, "end": 8, "QA": [{"q": "?", "a": "!"}]},
            "unsupported_field",
            f"start of the record {CUT}",
        ),
        (
            {"video": "a.mp4", "video_end": 8, "conversations": [HUMAN, GPT]},
            "unsupported_field",
            f"video_end of the record {CUT}",
        ),
        (part(video="a.mp4") | {"end": 8}, "unsupported_field", f"end of the record {CUT}"),
        (
            {"video": "a.mp4", "clip": [0, 5.5], "conversations": [HUMAN, GPT]},
            "unsupported_field",
            f"clip of the record {CUT}",
        ),
        (
            {"videos": [{"path": "a.mp4", "start_time": 2}], "caption": "A."},
            "unsupported_field",
            f"start_time of a video {CUT}",
        ),
        (
            {"videos": [{"path": "a.mp4", "mask": 2}], "caption": "A."},
            "unsupported_field",
            "the field mask of a video",
        ),
        (
            {"video": "a.mp4", "max_pixels": 9, "caption": "A."},
            "unsupported_field",
            "write it into the content part or object of the video",
        ),
        (
            {"video": "a.mp4", "nframes": 9, "caption": "A."},
            "unsupported_field",
            "the field nframes of the record is not supported for a video file: write it into",
        ),
        (
            {"video": "a.mp4", "audio": "a.wav", "audios": ["a.wav"], "conversations": [HUMAN, GPT]},
            "audio_count_mismatch",
            "both audio and audios are in the record; use one",
        ),
        (
            {
                "messages": [{"role": "user", "content": [{"type": "audio", "audio": "a.wav"}]}, ANSWER],
                "video": "a.mp4",
                "audios": ["b.wav"],
            },
            "audio_count_mismatch",
            "audio files are both in the messages and in the audios field; use one",
        ),
        (
            {"video": "a.jpg", "conversations": [HUMAN, GPT]},
            "unsupported_media",
            "video is the image 'a.jpg'; pass a list of frames, or a video file",
        ),
        (
            {"videos": ["a.mp4", "1.jpg"], "conversations": [HUMAN, GPT]},
            "unsupported_media",
            "videos has video files and images in one list",
        ),
        ({"videos": ["a.mp4", ["b.mp4", "1.jpg"]], "conversations": [HUMAN, GPT]}, "unsupported_media", "in one list"),
        ({"videos": ["a.mp4", []], "conversations": [HUMAN, GPT]}, "unsupported_media", "none of them empty"),
        (
            {"video": "a.mp4", "videos": ["b.mp4"], "conversations": [HUMAN, GPT]},
            "unsupported_media",
            "both video and",
        ),
        (
            {"videos": ["a.mp4", "b.mp4"], "conversations": [HUMAN, GPT]},
            "video_count_mismatch",
            "1 <video> placeholders for 2 videos",
        ),
        (
            {"video": "a.mp4", "conversations": [{"from": "human", "value": "<image><image>"}, GPT]},
            "image_count_mismatch",
            "2 <image> placeholders for 0",
        ),
        (
            {"messages": [{"role": "user", "content": [{"video": "a.mp4"}, "<video>"]}, ANSWER]},
            "video_count_mismatch",
            "2 <video> placeholders for 1 videos",
        ),
        (
            {"video_path": "a.mp4", "conversations": [HUMAN, GPT]},
            "unsupported_media",
            "video_path is not supported; read it with `map=video=video_path`",
        ),
        (
            {"clip_path": "a.mp4", "conversations": [{"from": "human", "value": "Hi"}, GPT]},
            "unsupported_media",
            "refers to a video, but the record contains none. Read it with `map=videos=clip_path`",
        ),
        (
            {"messages": [{**USER, "clip": "a.mp4"}, ANSWER]},
            "unsupported_media",
            "Rename the field to `video` with an",
        ),
        ({"clip": "a.mp4", "part": "b.mkv", "messages": [USER, ANSWER]}, "unsupported_media", "List the videos as"),
        (
            {"messages": [{**USER, "videos": ["1.png"]}, ANSWER]},
            "unsupported_field",
            "the field videos of a turn is not",
        ),
        ({"messages": [{**USER, "video": True}, ANSWER]}, "unsupported_field", "the field video of a turn is not"),
        (
            {"messages": [{**USER, "content": "<video>?", "videos": ["a.mp4", "b.mp4"]}, ANSWER]},
            "video_count_mismatch",
            "a turn has videos with 2 videos for 1 <video>",
        ),
        (
            {"messages": [{**USER, "video": "a.mp4", "start": 2}, ANSWER]},
            "unsupported_field",
            f"start of a turn {CUT}",
        ),
        (
            {"captions": [{"idx": "-1", "content": "A."}], "video_path": "a.mp4", "end": 8},
            "unsupported_field",
            f"end of the record {CUT}",
        ),
        (
            {"problem": "?", "solution": "!", "data_type": "video", "path": "a.mp4", "start_time": 5},
            "unsupported_field",
            f"start_time of the record {CUT}",
        ),
        (
            {"captions": [{"idx": "1", "content": "A."}], "video_path": "a.mp4"},
            "missing_field",
            "captions has 0 entries with idx -1",
        ),
        ({"captions": [{"idx": "-1", "content": "A."}]}, "missing_video", "neither video_path nor video or videos"),
        (
            {"captions": [{"idx": "-1", "content": "A."}], "video_path": "a.mp4", "video": "b.mp4"},
            "unsupported_field",
            "the record lists its videos elsewhere, too",
        ),
        (
            {"video": "a.mp4", "QA": [{"i": "A", "q": "?", "a": "!"}, {"i": "B", "q": "?", "a": "!"}]},
            "unsupported_field",
            "have different `i`",
        ),
        ({"problem": "?", "solution": "!", "data_type": "video"}, "missing_video", "neither path nor video or videos"),
        (
            {"problem": "?", "solution": "!", "data_type": "image", "path": "a.png", "images": ["b.png"]},
            "unsupported_field",
            "lists its images elsewhere",
        ),
    ],
)
def test_rejects(record: Any, reason: str, detail: str) -> None:
    with pytest.raises(RecordError) as caught:
        normalize(record)
    assert detail in str(caught.value)
    assert caught.value.reason.value == reason


def test_fields_that_only_look_like_a_clip_are_metadata() -> None:
    about = {"start": "Monday", "clip": {"id": 1}, "end": None, "clips": [[0.0, 5.5]], "video_metadata": {"fps": 30}}
    conversation = normalize({"video": "a.mp4", "caption": "A.", **about})
    assert conversation.unused_fields == ("clip", "clips", "start", "video_metadata")
    # Without a video file, they are metadata of something else.
    assert normalize({"messages": [USER, ANSWER], "start": 3.5}).unused_fields == ("start",)
    assert normalize({"videos": [["1.png"]], "messages": [USER, ANSWER], "start": 3.5}).kind == "video"


@given(data=st.data())
def test_a_record_with_n_videos_has_n_videos_at_their_places(data: st.DataObject) -> None:
    """Whatever the mixture of texts, images and videos: each placeholder gets the medium of its position."""
    kinds = data.draw(st.lists(st.sampled_from(["text", "image", "video", "frames"]), max_size=8))
    names = [f"{index}.{'jpg' if kind == 'image' else 'mp4'}" for index, kind in enumerate(kinds)]
    frames = {name: [f"{name}-{frame}.jpg" for frame in range(2)] for name in names}
    tags = {"text": "words ", "image": "<image>", "video": "<video>", "frames": "<video>"}
    text = "".join([tags[kind] for kind in kinds]) + "What?"
    pairs = list(zip(kinds, names, strict=True))
    videos = [name if kind == "video" else frames[name] for kind, name in pairs if kind in ("video", "frames")]
    images = [name for kind, name in pairs if kind == "image"]
    found = normalize({"messages": [{**USER, "content": text}, ANSWER], "images": images, "videos": videos or None})
    listed = {"image": {name: [name] for name in names}, "frames": frames}
    ordered = [item for kind, name in pairs if kind in listed for item in listed[kind][name]]
    assert shown(found.images) == ordered
    assert shown([video.file for video in found.videos]) == [name for kind, name in pairs if kind == "video"]
    expected = "".join(["<image><image>" if kind == "frames" else tags[kind] for kind in kinds]) + "What?"
    assert found.messages[0].content == expected


def test_the_content_of_real_files_is_recognized(tmp_path: Path) -> None:
    """Oracle: files that FFmpeg writes, in every container; and images of every type that Pillow writes."""
    for extension in {extension for _, extension in COMBINATIONS}:
        codec = next(codec for codec, other in COMBINATIONS if other == extension)
        file = make_video(tmp_path / f"a.{extension}", codec=codec, frames=3)
        assert is_video_content(file.read_bytes()), extension
        assert file.suffix in VIDEO.suffixes
        found = normalize({"videos": [file.read_bytes()], "caption": "A."})
        assert found.kind == "video", extension
        assert len(found.videos) == 1, extension
    pixels = Image.fromarray(np.zeros((8, 8, 3), dtype=np.uint8))
    Image.init()
    for kind in {"PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "AVIF"} & set(Image.SAVE):  # no AVIF before Pillow 11.3
        out = io.BytesIO()
        pixels.save(out, kind)
        assert not is_video_content(out.getvalue()), kind
        found = normalize({"videos": [[out.getvalue()]], "caption": "A."})
        assert (len(found.videos), len(found.images)) == (0, 1)


@pytest.mark.parametrize(("page", "count"), [(PAGE, 11), (PUBLISHED, 16)], ids=["page", "published"])
def test_the_records_of_the_page_have_videos(page: Path, count: int) -> None:
    """The section "Video files" of docs/my-data.md and of published.md."""
    text = page.read_text(encoding="utf-8").partition("\n## Video files\n")[2].partition("\n## ")[0]
    records = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    found = [normalize(record) for record in records]
    assert all(conversation.videos for conversation in found)
    assert len(found) == count
    assert [len(conversation.videos) for conversation in found].count(2) == (page == PUBLISHED)


@pytest.mark.parametrize("place", [188, 196])
def test_an_image_with_a_byte_of_a_transport_stream_is_an_image(place: int) -> None:
    frame = bytearray(b"GIF8G" + bytes(600))
    frame[place] = 0x47
    turns = [{"role": "user", "content": "<video>"}, {"role": "assistant", "content": "A dot."}]
    conversation = normalize({"videos": [bytes(frame), bytes(frame)], "messages": turns})
    assert (len(conversation.images), len(conversation.videos)) == (2, 0)
