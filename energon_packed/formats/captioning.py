"""PackedCaptioningSample: prompts and captions of several samples, with their images.

    {key}.json       images, prompts, captions, sample_count, ids, systems, lengths
                     and, when given: patch_positions, timestamp_decimal, fps, videos, weights (of each turn in the
                     loss, the system prompt first: 0 is context), truncate, truncated
    {key}.img{i}_{j}.{ext}   original bytes of image j of sample i
    {key}.img{i}_{j}.npy     its patch positions, when given

`prompts[i]` and `captions[i]` are the turns of sample i. A plain text, where every token is supervised, has no prompt
and one caption.

What `offline_packing` of LLaVA-OneVision-2 and the 1.5 examples write is read, too: other image names than the members
have, empty names of .npy files, one list of images for all samples, prompts without placeholders, `fps` in lists. Its
samples have no `ids` and no `lengths`, and become the conversations that `normalize` makes of the same records. The
reader of that project needs `img{i}_{j}.jpg` for every image, which `pack --layout llava-onevision2` writes
(`llava_onevision2.py`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from energon_packed.errors import FormatError, Reason, RecordError
from energon_packed.formats.codec import Codec, Part, RawPack, StoredSample, byte_references, media_references
from energon_packed.formats.parts import (
    member_names,
    names_by_sample,
    optional,
    read_files,
    read_images,
    read_json,
    read_object,
    write_json,
    write_media,
)
from energon_packed.records import IMAGE_PLACEHOLDER, Conversation, Message, normalize

_IN_TURN = ("user", "assistant")
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
        turns = conversation.messages
        start = 1 if turns and turns[0].role == "system" else 0
        for place, (role, _, extra, _) in enumerate(turns[start:]):
            if role != _IN_TURN[place % 2] or extra:
                found = f"{role} with {', '.join(extra)}" if extra else role
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
            "prompts": [[text for role, text, _, _ in c.messages if role == "user"] for c in conversations],
            "captions": [
                [text for role, text, _, _ in c.messages if role == "assistant"] if c.text is None else [c.text]
                for c in conversations
            ],
            "sample_count": len(samples),
            "ids": [c.id for c in conversations],
            "systems": [
                c.messages[0].content if c.messages and c.messages[0].role == "system" else None for c in conversations
            ],
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
        read = _foreign_sample if fields["ids"] is None and fields["lengths"] is None else _sample
        return [read(fields, i) for i in range(fields["sample_count"])]

    def fields(self, raw: RawPack) -> dict[str, Any]:
        """The columns of a pack: `images` as StoredImage, the others as in the json.

        Raises:
            FormatError: a member is missing, or columns have different numbers of samples.
        """
        value = read_json(raw)
        captions = [_turns(turns) for turns in value["captions"]]
        prompts = [_turns(turns) for turns in value.get("prompts") or [[""] * len(turns) for turns in captions]]
        if len(prompts) != len(captions):
            raise FormatError(f"{raw.get('__key__')} has {len(prompts)} prompts for {len(captions)} captions")
        texts = [[*turns, *answers] for turns, answers in zip(prompts, captions, strict=True)]
        names = names_by_sample(raw, value.get("images"), texts)
        return {
            "images": read_images(raw, member_names(raw, names)),
            "prompts": prompts,
            "captions": captions,
            "sample_count": len(captions),
            "patch_positions": _positions(raw, value.get("patch_positions")),
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
    prompts, captions = fields["prompts"][i], fields["captions"][i]
    messages = [Message(role, text) for role, text in _in_turn(prompts, captions)]
    if one["systems"] is not None:
        messages.insert(0, Message("system", one["systems"]))
    if one["weights"]:
        messages = [message._replace(weight=w) for message, w in zip(messages, one["weights"], strict=True)]
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


def _foreign_sample(fields: Mapping[str, Any], i: int) -> StoredSample:
    """A sample of a packer that records neither ids nor lengths: what `normalize` makes of its record.

    Where placeholders and images do not match, all images stand before the first turn, as in LLaVA-OneVision-2's
    `Qwen2VLPlugin.process_messages`.
    """
    images = fields["images"][i]
    positions = fields["patch_positions"][i] if fields["patch_positions"] else ()
    turns = _in_turn(fields["prompts"][i], fields["captions"][i])
    if images and sum(text.count(IMAGE_PLACEHOLDER) for _, text in turns) not in (0, len(images)):
        turns = [(role, text.replace(IMAGE_PLACEHOLDER, "")) for role, text in turns]
        turns[0] = (turns[0][0], turns[0][1].lstrip("\n"))
    fps = fields["fps"][i] if fields["fps"] else None
    record = {
        "messages": [{"role": role, "content": text} for role, text in turns],
        "images": list(media_references(images)),
        "patch_positions": list(byte_references(positions)),
        "fps": fps[0] if isinstance(fps, list) and fps else fps or None,
        "timestamp_decimal": fields["timestamp_decimal"][i] if fields["timestamp_decimal"] else None,
    }
    try:
        conversation = normalize(record)
    except RecordError as error:
        raise FormatError(f"sample {i}: {error}") from error
    return StoredSample(conversation=conversation, length=None, images=images, patch_positions=positions)


def _in_turn(prompts: Sequence[str], captions: Sequence[str]) -> list[tuple[str, str]]:
    """(role, text) of each turn: prompt, caption, prompt, and so on."""
    turns = [("user", prompts, 0), ("assistant", captions, 1)]
    ordered = sorted((2 * j + shift, role, text) for role, texts, shift in turns for j, text in enumerate(texts))
    return [(role, text) for _, role, text in ordered]


def _positions(raw: RawPack, listed: Any) -> list[tuple[bytes, ...]] | None:
    """Bytes of the .npy files of each sample, or None; an empty name is none."""
    names = [[name for name in (one or ()) if name] for one in listed or ()]
    if not any(names):
        return None
    where = member_names(raw, [[name or "" for name in one or ()] for one in listed], extension="npy")
    return read_files(raw, [[name for name in one if name] for one in where])


def _weights(conversation: Conversation) -> list[float] | None:
    """Weight of each message; None where all are 1."""
    weights = [message.weight for message in conversation.messages]
    return weights if weights.count(1) < len(weights) else None


def _turns(value: Any) -> list[str]:
    return [] if value is None else [value] if isinstance(value, str) else list(value)
