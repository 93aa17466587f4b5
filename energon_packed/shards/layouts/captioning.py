"""PackedCaptioningSample: prompts and captions of several samples, with their images.

    {key}.json       images, prompts, captions, sample_count, ids, systems, lengths
                     and, when given: patch_positions, timestamp_decimal, fps, truncate, truncated
    {key}.img{i}_{j}.{ext}   original bytes of image j of sample i
    {key}.img{i}_{j}.npy     its patch positions, when given

`prompts[i]` and `captions[i]` are the turns of sample i. A plain text, where every token is supervised, has no prompt
and one caption. This is the layout of LLaVA-OneVision-2's packed captioning data, so its readers can read it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from energon_packed.conversation import Conversation
from energon_packed.errors import Reason, RecordError
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

_REMEDY = "use --sample-class PackedMultiMixQASample"


def check(conversation: Conversation) -> None:
    """Prompts and captions must take turns, with nothing that they cannot hold."""
    if conversation.input_ids is not None:
        raise RecordError(
            Reason.MISSING_FIELD,
            "PackedCaptioningSample stores text, not input_ids; use --sample-class PackedTokensSample",
        )
    if conversation.tools:
        raise RecordError(Reason.BAD_ROLE, f"PackedCaptioningSample has no place for tools; {_REMEDY}")
    turns = [m for m in conversation.messages if m.role != "system"]
    for place, message in enumerate(turns):
        expected = "user" if place % 2 == 0 else "assistant"
        if message.role != expected or message.extra:
            found = f"{message.role} with {', '.join(message.extra)}" if message.extra else message.role
            raise RecordError(
                Reason.BAD_ROLE,
                f"turn {place} is {found}; PackedCaptioningSample holds user and assistant in turn; {_REMEDY}",
            )


def write(samples: Sequence[StoredSample], truncate: int | None) -> list[Part]:
    """Parts of one pack."""
    media, images, positions = media_parts(samples)
    conversations = [sample.conversation for sample in samples]
    value: dict[str, Any] = {
        "images": images,
        "prompts": [_contents(c, "user") for c in conversations],
        "captions": [_contents(c, "assistant") if c.text is None else [c.text] for c in conversations],
        "sample_count": len(samples),
        "ids": [c.id for c in conversations],
        "systems": [next(iter(_contents(c, "system")), None) for c in conversations],
        "lengths": [sample.length for sample in samples],
    }
    optional: dict[str, list[Any]] = {
        "patch_positions": positions,
        "timestamp_decimal": [c.timestamp_decimal for c in conversations],
        "fps": [c.fps for c in conversations],
        "videos": [c.video for c in conversations],
    }
    value.update({name: values for name, values in optional.items() if any_given(values)})
    if truncate is not None:
        value |= {"truncate": truncate, "truncated": [sample.is_cut for sample in samples]}
    return [("json", dump_json(value)), *media]


def read(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a PackedCaptioningSample; absent optional keys give None."""
    value = read_json(raw)
    captions = [_turns(turns) for turns in value["captions"]]
    count = value.get("sample_count", len(captions))
    prompts = value.get("prompts") or [[""] * len(turns) for turns in captions]
    return {
        "images": read_media(raw, value.get("images") or [[] for _ in range(count)]),
        "prompts": [_turns(turns) for turns in prompts],
        "captions": captions,
        "sample_count": count,
        "ids": value.get("ids"),
        "systems": value.get("systems"),
        "lengths": value.get("lengths"),
        "patch_positions": read_media(raw, value["patch_positions"]) if value.get("patch_positions") else None,
        "timestamp_decimal": value.get("timestamp_decimal"),
        "fps": value.get("fps"),
        "videos": value.get("videos"),
        "truncate": value.get("truncate"),
        "truncated": value.get("truncated"),
    }


def _contents(conversation: Conversation, role: str) -> list[str]:
    return [message.content for message in conversation.messages if message.role == role]


def _turns(value: Any) -> list[str]:
    return [] if value is None else [value] if isinstance(value, str) else list(value)


PACKED = Layout(
    sample_class="PackedCaptioningSample",
    loader_module="energon_packed.flavors.packed_captioning",
    check=check,
    write=write,
    read=read,
)
