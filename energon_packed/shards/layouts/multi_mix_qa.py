"""PackedMultiMixQASample and MultiMixQASample: full conversations, as records gave them.

{key}.json   packed: {"sample_count": S, "samples": [SAMPLE, ...]}, single: SAMPLE
             SAMPLE: id, length, one of messages / text / input_ids + labels, images,
             and, when given: tools, patch_positions, video, fps, timestamp_decimal, truncate, truncated
{key}.img{i}_{j}.{ext}, {key}.img{i}_{j}.npy   as in PackedCaptioningSample; i is 0 in a single sample
"""

from collections.abc import Mapping, Sequence
from typing import Any

from energon_packed.conversation import Conversation
from energon_packed.shards.layouts.base import (
    Layout,
    StoredSample,
    any_given,
    dump_json,
    media_parts,
    read_json,
    read_media,
)
from energon_packed.shards.tar import Part


def check(conversation: Conversation) -> None:
    """Every conversation fits."""


def write_packed(samples: Sequence[StoredSample], truncate: int | None) -> list[Part]:
    """Parts of one pack."""
    media, values = _values(samples, truncate)
    return [("json", dump_json({"sample_count": len(samples), "samples": values})), *media]


def write_single(samples: Sequence[StoredSample], truncate: int | None) -> list[Part]:
    """Parts of one sample."""
    media, values = _values(samples, truncate)
    return [("json", dump_json(values[0])), *media]


def read_packed(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a PackedMultiMixQASample."""
    return _fields(raw, read_json(raw)["samples"])


def read_single(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a MultiMixQASample."""
    fields = _fields(raw, [read_json(raw)])
    return {
        "sample": fields["samples"][0],
        "images": fields["images"][0],
        "patch_positions": fields["patch_positions"][0],
        "length": fields["lengths"][0],
    }


def _values(samples: Sequence[StoredSample], truncate: int | None) -> tuple[list[Part], list[dict[str, Any]]]:
    media, images, positions = media_parts(samples)
    values = []
    for sample, image_names, position_names in zip(samples, images, positions, strict=True):
        c = sample.conversation
        value: dict[str, Any] = {"id": c.id, "length": sample.length}
        if c.input_ids is not None:
            value |= {"input_ids": c.input_ids, "labels": c.labels}
        elif c.text is not None:
            value["text"] = c.text
        else:
            value["messages"] = [message.as_dict() for message in c.messages]
        value["images"] = image_names
        optional = {
            "tools": c.tools,
            "patch_positions": position_names,
            "video": c.video,
            "fps": c.fps,
            "timestamp_decimal": c.timestamp_decimal,
            "truncate": truncate,
            "truncated": sample.is_cut,
        }
        value.update({name: given for name, given in optional.items() if any_given([given])})
        values.append(value)
    return media, values


def _fields(raw: Mapping[str, Any], samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "samples": samples,
        "images": read_media(raw, [sample.get("images", []) for sample in samples]),
        "patch_positions": read_media(raw, [sample.get("patch_positions", []) for sample in samples]),
        "lengths": [sample.get("length") for sample in samples],
    }


PACKED = Layout(
    sample_class="PackedMultiMixQASample",
    loader_module="energon_packed.flavors.packed_multi_mix_qa",
    check=check,
    write=write_packed,
    read=read_packed,
)
SINGLE = Layout(
    sample_class="MultiMixQASample",
    loader_module="energon_packed.flavors.multi_mix_qa",
    check=check,
    write=write_single,
    read=read_single,
    packed=False,
)
