"""PackedCaptioningSample: prompts and captions of several samples, with their images.

    {key}.json       images, prompts, captions, sample_count, ids, systems, lengths
                     and, when given: patch_positions, timestamp_decimal, fps, videos, weights (of each turn in the
                     loss, the system prompt first: 0 is context), truncate, truncated
    {key}.img{i}_{j}.{ext}   original bytes of image j of sample i
    {key}.img{i}_{j}.npy     its patch positions, when given

`prompts[i]` and `captions[i]` are the turns of sample i. A plain text, where every token is supervised, has no prompt
and one caption. The layout is that of LLaVA-OneVision-2's packed captioning data.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from energon_packed.errors import Reason, RecordError
from energon_packed.formats.codec import Codec, Part, RawPack
from energon_packed.formats.parts import (
    optional,
    read_files,
    read_images,
    read_json,
    read_object,
    write_json,
    write_media,
)
from energon_packed.formats.sample import StoredSample, byte_references, media_references
from energon_packed.records import IMAGE_PLACEHOLDER, Conversation, Message

_REMEDY = "set `sample_class` to PackedMultiMixQASample"
COLUMNS = ("ids", "systems", "lengths", "timestamp_decimal", "fps", "videos", "weights", "truncated")
"""Optional keys of the json, one entry per sample."""


class CaptioningCodec(Codec):
    """Columns of prompts and captions, one entry per sample."""

    sample_class = "PackedCaptioningSample"
    flavor_class = "PackedCaptioningSample"
    flavor_module = "energon_packed.flavors.packed_captioning"

    def matches(self, raw: RawPack) -> bool:
        """By the `captions` of the json."""
        return "captions" in read_object(raw)

    def check(self, conversation: Conversation) -> None:
        """Prompts and captions must alternate, with nothing else."""
        if conversation.input_ids is not None:
            raise RecordError(
                Reason.MISSING_FIELD,
                "PackedCaptioningSample stores text, not input_ids; set `sample_class` to PackedTokensSample",
            )
        if conversation.tools:
            raise RecordError(Reason.BAD_ROLE, f"PackedCaptioningSample cannot hold tools; {_REMEDY}")
        turns = [m for m in conversation.messages if m.role != "system"]
        for place, message in enumerate(turns):
            expected = "user" if place % 2 == 0 else "assistant"
            if message.role != expected or message.extra:
                found = f"{message.role} with {', '.join(message.extra)}" if message.extra else message.role
                raise RecordError(
                    Reason.BAD_ROLE,
                    f"turn {place} is {found}; PackedCaptioningSample holds alternating user and assistant turns; "
                    f"{_REMEDY}",
                )

    def write(self, samples: Sequence[StoredSample]) -> list[Part]:
        """Parts of one pack."""
        media, images, positions = write_media(samples)
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
        value |= optional(
            {
                "patch_positions": positions,
                "timestamp_decimal": [c.timestamp_decimal for c in conversations],
                "fps": [c.fps for c in conversations],
                "videos": [c.video for c in conversations],
                "weights": [_weights(c) for c in conversations],
            }
        )
        if samples[0].truncate is not None:
            value |= {"truncate": samples[0].truncate, "truncated": [sample.is_truncated for sample in samples]}
        return [("json", write_json(value)), *media]

    def read(self, raw: RawPack) -> list[StoredSample]:
        """The samples of one pack; absent optional keys give None."""
        return self.samples(self.fields(raw))

    def samples(self, fields: Mapping[str, Any]) -> list[StoredSample]:
        """The samples of columns as `fields` returns them."""
        return [_sample(fields, i) for i in range(fields["sample_count"])]

    def fields(self, raw: RawPack) -> dict[str, Any]:
        """The columns of a pack: `images` as StoredImage, the others as in the json."""
        value = read_json(raw)
        captions = [_turns(turns) for turns in value["captions"]]
        count = value.get("sample_count", len(captions))
        prompts = value.get("prompts") or [[""] * len(turns) for turns in captions]
        positions = value.get("patch_positions")
        return {
            "images": read_images(raw, value.get("images") or [[]] * count),
            "prompts": [_turns(turns) for turns in prompts],
            "captions": captions,
            "sample_count": count,
            "patch_positions": read_files(raw, positions) if positions else None,
            "truncate": value.get("truncate"),
            **{name: value.get(name) for name in COLUMNS},
        }

    def lengths(self, raw: RawPack) -> list[int | None]:
        """Tokens of each sample."""
        value = read_json(raw)
        return list(value.get("lengths") or [None] * len(value["captions"]))


def _sample(fields: Mapping[str, Any], i: int) -> StoredSample:
    one = {name: fields[name][i] if fields[name] else None for name in COLUMNS}
    images = fields["images"][i]
    positions = fields["patch_positions"][i] if fields["patch_positions"] else ()
    prompts, captions = list(fields["prompts"][i]), fields["captions"][i]
    if fields["lengths"] is None and prompts and not any(IMAGE_PLACEHOLDER in t for t in (*prompts, *captions)):
        prompts[0] = IMAGE_PLACEHOLDER * len(images) + prompts[0]  # other packers write no placeholders
    turns = [("user", prompts, 0), ("assistant", captions, 1)]
    ordered = sorted((2 * j + shift, role, text) for role, texts, shift in turns for j, text in enumerate(texts))
    messages = [Message(role, text) for _, role, text in ordered]
    if one["systems"] is not None:
        messages.insert(0, Message("system", one["systems"]))
    if one["weights"]:
        messages = [replace(message, weight=w) for message, w in zip(messages, one["weights"], strict=True)]
    is_text = not prompts and one["systems"] is None and len(captions) == 1
    conversation = Conversation(
        id=one["ids"],
        messages=() if is_text else tuple(messages),
        text=captions[0] if is_text else None,
        images=media_references(images),
        patch_positions=byte_references(positions),
        video=bool(one["videos"]),
        fps=one["fps"],
        timestamp_decimal=one["timestamp_decimal"],
    )
    return StoredSample(
        conversation=conversation,
        length=one["lengths"],
        truncate=fields["truncate"],
        is_truncated=bool(one["truncated"]),
        images=images,
        patch_positions=positions,
    )


def _weights(conversation: Conversation) -> list[float] | None:
    """Weight of each message; None where all are 1."""
    weights = [message.weight for message in conversation.messages]
    return weights if any(weight != 1 for weight in weights) else None


def _contents(conversation: Conversation, role: str) -> list[str]:
    return [message.content for message in conversation.messages if message.role == role]


def _turns(value: Any) -> list[str]:
    return [] if value is None else [value] if isinstance(value, str) else list(value)
