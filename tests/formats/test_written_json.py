"""The JSON part of each flavor: keys that are always present, and keys that depend on the samples."""

import io
import json
from dataclasses import replace
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from energon_packed import (
    ConfigError,
    Conversation,
    FormatError,
    MediaReference,
    Message,
    RecordError,
    StoredSample,
)
from tests.internals import codec_for, codec_of, image_count

PLAIN = StoredSample(
    conversation=Conversation(id="a", messages=(Message("user", "Hi?"), Message("assistant", "Yes."))), length=9
)
FULL = StoredSample(
    conversation=Conversation(
        id="b",
        messages=(
            Message("system", "Be brief."),
            Message("user", "<image>?"),
            Message("assistant", "No.", weight=0),
            Message("user", "And?"),
            Message("assistant", "It is."),
        ),
        images=(MediaReference(data=b"x", extension="png"),),
        patch_positions=(MediaReference(data=b"y"),),
        video=True,
        fps=2.0,
        timestamp_decimal=1,
    ),
    length=30,
)


def written(name: str, *samples: StoredSample, layout: str = "") -> dict[str, Any]:
    value: dict[str, Any] = json.loads(dict(codec_for(name, layout).write(samples))["json"])
    return value


def test_captions() -> None:
    assert written("PackedCaptioningSample", PLAIN) == {
        "images": [[]], "prompts": [["Hi?"]], "captions": [["Yes."]],
        "sample_count": 1, "ids": ["a"], "systems": [None], "lengths": [9],
    }  # fmt: skip
    assert written("PackedCaptioningSample", PLAIN, FULL) == {
        "images": [[], ["img1_0.png"]], "prompts": [["Hi?"], ["<image>?", "And?"]],
        "captions": [["Yes."], ["No.", "It is."]],
        "sample_count": 2, "ids": ["a", "b"], "systems": [None, "Be brief."], "lengths": [9, 30],
        "patch_positions": [[], ["img1_0.npy"]], "timestamp_decimal": [None, 1], "fps": [None, 2.0],
        "videos": [False, True], "weights": [None, [1, 1, 0, 1, 1]],
    }  # fmt: skip


def test_messages() -> None:
    plain = {
        "id": "a", "length": 9, "images": [],
        "messages": [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Yes."}],
    }  # fmt: skip
    full = written("PackedMultiMixQASample", PLAIN, FULL)
    assert full.keys() == {"sample_count", "samples"}
    assert (full["sample_count"], full["samples"][0]) == (2, plain)
    assert {key: value for key, value in full["samples"][1].items() if key != "messages"} == {
        "id": "b", "length": 30, "images": ["img1_0.png"], "patch_positions": ["img1_0.npy"], "video": True,
        "fps": 2.0, "timestamp_decimal": 1,
    }  # fmt: skip
    assert [message.get("weight") for message in full["samples"][1]["messages"]] == [None, None, 0, None, None]
    assert written("MultiMixQASample", PLAIN) == plain


def test_tokens_are_arrays_of_format_version_1_0() -> None:
    ids = np.array([5, 6, 7])
    samples = [
        StoredSample(Conversation(id=name, input_ids=ids, labels=ids, images=images), length=3)
        for name, images in (("a", ()), ("b", (MediaReference(data=b"x", extension="jpg"),)))
    ]
    parts = dict(codec_for("PackedTokensSample").write(samples))
    assert json.loads(parts["json"]) == {"ids": ["a", "b"], "images": [[], ["img1_0.jpg"]], "sample_count": 2}
    for name, expected in (("input_ids", [5, 6, 7] * 2), ("cu_seqlens", [0, 3, 6]), ("loss_spans", [[0, 6]])):
        content = parts[f"{name}.npy"]
        assert content[:8] == b"\x93NUMPY\x01\x00"
        array = np.load(io.BytesIO(content))
        assert (array.tolist(), array.dtype.str) == (expected, "<i4")


def test_samples_of_tokens_without_a_group_are_alone() -> None:
    ids = np.array([5, 6])
    samples = [StoredSample(Conversation(input_ids=ids, group=group), 2) for group in ("b", None, "a", None, "b")]
    assert written("PackedTokensSample", *samples)["groups"] == [0, 1, 2, 3, 0]


def test_the_weight_of_a_record_of_tokens_multiplies_the_weights_of_its_tokens() -> None:
    ids, weights = np.array([5, 6, 7]), np.array([1, 0.5, 1], dtype=np.float32)
    own = Conversation(input_ids=ids, labels=ids, loss_weights=weights, weight=2)
    codec = codec_for("PackedTokensSample")
    (sample,) = codec.read({"__key__": "a", **dict(codec.write([StoredSample(own, 3)]))})
    assert sample.conversation.loss_weights is not None
    assert sample.conversation.loss_weights.tolist() == [2, 1, 2]


@pytest.mark.parametrize("values", [{"groups": [0]}, {"groups": [0, "a"]}, {"roles": [1, None]}, {"labels": [0.5, 1]}])
def test_groups_roles_and_labels_are_values_of_each_sample(values: dict[str, Any]) -> None:
    codec = codec_for("PackedTokensSample")
    raw = dict(codec.write([StoredSample(Conversation(input_ids=np.array([5, 6])), 2)] * 2))
    raw["json"] = json.dumps({**json.loads(raw["json"]), **values}).encode()
    with pytest.raises(
        FormatError, match=f"{next(iter(values))} of the json must be a list with a value for each of 2"
    ):
        codec.read({"__key__": "a", **raw})


def test_a_column_of_another_packer_in_fortran_order_is_refused() -> None:
    codec, out = codec_for("PackedTokensSample"), io.BytesIO()
    np.save(out, np.asfortranarray(np.arange(6, dtype=np.float32).reshape(3, 2)))
    parts = dict(codec.write([StoredSample(Conversation(input_ids=np.arange(3)), 3)]))
    with pytest.raises(FormatError, match=r"columns.x.npy: a column must be an array of numbers in C order"):
        codec.read({"__key__": "a", **parts, "columns.x.npy": out.getvalue()})


def test_tokens_without_labels_are_all_targets() -> None:
    codec = codec_for("PackedTokensSample")
    parts = dict(codec.write([StoredSample(conversation=Conversation(id="a", input_ids=np.array([5, 6])), length=2)]))
    assert np.load(io.BytesIO(parts["loss_spans.npy"])).tolist() == [[0, 2]]
    (read,) = codec.read({"__key__": "k", **parts})
    assert [read.conversation.input_ids.tolist(), read.conversation.labels.tolist()] == [[5, 6], [5, 6]]


def test_parts_other_than_json_arrays_and_text_are_images() -> None:
    assert image_count(["json", "img0_0.jpg", "img0_0.npy", "input_ids.npy", "note.TXT", "img1_0.PNG"]) == 2


def test_the_layout_of_llava_onevision2() -> None:
    talk = (Message("user", "<image>?"), Message("assistant", "A"))
    sample = replace(FULL, conversation=replace(FULL.conversation, messages=talk))
    assert written("PackedCaptioningSample", sample, layout="llava-onevision2") == {
        "images": [["img0_0.png"]], "prompts": [["<image>?"]], "captions": [["A"]], "sample_count": 1,
        "patch_positions": [["img0_0.npy"]], "timestamp_decimal": [1], "fps": [2.0], "videos": [True],
        "ids": ["b"], "lengths": [30],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"json": b'{"a":1,"b":2}'}, r"k matches no known flavor: its json has the keys a, b$"),
        ({"jpg": b"x"}, r"k matches no known flavor: it has no json part$"),
    ],
)
def test_the_error_of_an_unknown_pack_describes_it(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        codec_of({"__key__": "k", **raw})


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"json": b'{"a":'}, r"k: the json part is damaged: unexpected end of data"),
        ({"json": b"[1]"}, r"k: the json part is a list, not an object"),
        ({}, r"k has no json part; is this a packed dataset\?"),
    ],
)
def test_a_json_that_cannot_be_read_is_named(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        codec_for("PackedCaptioningSample").read({"__key__": "k", **raw})


def test_errors_of_unknown_names_list_the_valid_names() -> None:
    with pytest.raises(ConfigError, match="unknown sample class 'Packed'; use one of PackedCaptioningSample, .*"):
        codec_for("Packed")
    with pytest.raises(ConfigError, match="unknown layout 'llava'; use one of llava-onevision2"):
        codec_for("PackedCaptioningSample", "llava")
    assert codec_for("LoongForge.PackedChatMixSample").sample_class == "LoongForge.PackedChatMixSample"


def test_types_that_json_lacks_become_strings() -> None:
    conversation = replace(FULL.conversation, tools=[{"name": "f", "limit": Decimal("1.50")}])
    value = written("MultiMixQASample", replace(FULL, conversation=conversation))
    assert value["tools"] == [{"name": "f", "limit": "1.50"}]


def test_unsupported_content_of_captions_is_rejected_by_name() -> None:
    codec = codec_for("PackedCaptioningSample")
    call = Message("assistant", "It.", {"tool_calls": [], "name": "f"})
    tools = [{"name": "f"}]
    for fields, message in (
        ({"input_ids": np.array([1]), "labels": np.array([1])}, "stores text, not input_ids; set `sample_class` to"),
        ({"messages": PLAIN.conversation.messages, "tools": tools}, "PackedCaptioningSample cannot store tools; set"),
        ({"messages": (Message("user", "?"), call)}, "turn 1 is assistant with tool_calls, name; Packed"),
        ({"messages": (Message("assistant", "!"),)}, "turn 0 is assistant; PackedCaptioningSample stores alternating"),
    ):
        with pytest.raises(RecordError, match=message):
            codec.check(Conversation(id="a", **fields))  # type: ignore[arg-type]
