"""Codec of PackedCaptioningSample: samples of prompts, captions and images to the parts of a pack, and back.

    {key}.json       images, prompts, captions, sample_count, ids, systems, lengths
                     and, if present: patch_positions, timestamp_decimal, fps, videos (the images are frames),
                     video_files (see videos.py), weights (of each turn in the
                     loss, the system prompt first: 0 is context), record_weights (of each sample in the loss),
                     truncate, truncated
    {key}.img{i}_{j}.{ext}   original bytes of image j of sample i
    {key}.img{i}_{j}.npy     its patch positions, if present
    {key}.vid{i}_{j}.{ext}   video file j of sample i

`prompts[i]` and `captions[i]` are the turns of sample i. A plain text, whose tokens are all supervised, has no prompt
and one caption.

Packs from `offline_packing` of LLaVA-OneVision-2 and of the 1.5 examples are read as well: image names that are not
member names, empty names of .npy files, one list of images for all samples, prompts without placeholders, `fps` in
lists. Their samples have no `ids` and no `lengths`, and become the conversations that `normalize` makes of the same
records. The reader of that project needs `img{i}_{j}.jpg` for every image, which `pack --layout llava-onevision2`
writes (`third_party.py`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from energon_packed.errors import FormatError, Reason, RecordError
from energon_packed.formats.codec import (
    Codec,
    Part,
    RawPack,
    StoredSample,
    byte_references,
    media_references,
    video_references,
)
from energon_packed.formats.parts import (
    member_names,
    names_by_sample,
    optional,
    read_files,
    read_images,
    read_json,
    read_object,
    read_videos,
    write_json,
    write_media,
)
from energon_packed.records import IMAGE_PLACEHOLDER, Conversation, Message, normalize

_ROLES = ("user", "assistant")  # of the turns after the system prompt, alternating
_REMEDY = "set `sample_class` to PackedMultiMixQASample"
COLUMNS = (
    *("ids", "systems", "lengths", "timestamp_decimal", "fps", "timestamps", "videos", "weights", "record_weights"),
    "truncated",
)
"""Optional keys of the json with one entry per sample."""


class CaptioningCodec(Codec):
    """Codec of a pack as columns of prompts and captions, one entry per sample."""

    sample_class = "PackedCaptioningSample"
    flavor_class = "PackedCaptioningSample"
    flavor_module = "energon_packed.flavors.packed_captioning"

    def matches(self, raw: RawPack) -> bool:
        """Return whether the json has `captions`."""
        return "captions" in read_object(raw)

    def check(self, conversation: Conversation) -> None:
        """Reject conversations other than alternating prompts and captions."""
        if conversation.input_ids is not None:
            raise RecordError(
                Reason.MISSING_FIELD,
                "PackedCaptioningSample stores text, not input_ids; set `sample_class` to PackedTokensSample",
            )
        if conversation.tools:
            raise RecordError(Reason.BAD_ROLE, f"PackedCaptioningSample cannot store tools; {_REMEDY}")
        turns = conversation.messages
        start = 1 if turns and turns[0].role == "system" else 0
        for index, (role, _, extra, _) in enumerate(turns[start:]):
            if role != _ROLES[index % 2] or extra:
                actual = f"{role} with {', '.join(extra)}" if extra else role
                raise RecordError(
                    Reason.BAD_ROLE,
                    f"turn {index} is {actual}; PackedCaptioningSample stores alternating user and assistant turns; "
                    f"{_REMEDY}",
                )

    def write(self, samples: Sequence[StoredSample]) -> list[Part]:
        """Convert the samples of one pack to its parts."""
        media = write_media(samples)
        conversations = [sample.conversation for sample in samples]
        value: dict[str, Any] = {
            "images": media.images,
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
                "patch_positions": media.positions,
                "timestamp_decimal": [c.timestamp_decimal for c in conversations],
                "fps": [c.fps for c in conversations],
                "timestamps": [c.timestamps or None for c in conversations],
                "videos": [c.video for c in conversations],
                "video_files": media.videos,
                "weights": [_weights(c) for c in conversations],
                "record_weights": [None if c.weight == 1 else c.weight for c in conversations],
            }
        )
        if samples[0].truncate is not None:  # an option of the run, so all samples have the same value
            value |= {"truncate": samples[0].truncate, "truncated": [sample.is_truncated for sample in samples]}
        return [("json", write_json(value)), *media.parts]

    def read(self, raw: RawPack) -> list[StoredSample]:
        """Convert the parts of one pack to its samples; absent optional keys become None."""
        return self.samples(self.fields(raw))

    def samples(self, fields: Mapping[str, Any]) -> list[StoredSample]:
        """Return the samples in columns as `fields` returns them."""
        # This package always writes both columns.
        read = _third_party_sample if fields["ids"] is None and fields["lengths"] is None else _sample
        return [read(fields, i) for i in range(fields["sample_count"])]

    def fields(self, raw: RawPack) -> dict[str, Any]:
        """Return the columns of a pack: `images` as StoredImage, the other columns as in the json.

        Raises:
            FormatError: a member is missing, or the columns have different lengths.
        """
        value = read_json(raw)
        captions = [_turns(turns) for turns in value["captions"]]
        prompts = [_turns(turns) for turns in value.get("prompts") or [[""] * len(turns) for turns in captions]]
        if len(prompts) != len(captions):
            raise FormatError(f"{raw.get('__key__')} has {len(prompts)} prompts for {len(captions)} captions")
        turns_of_samples = [[*asked, *answered] for asked, answered in zip(prompts, captions, strict=True)]
        names = names_by_sample(raw, value.get("images"), turns_of_samples)
        return {
            "images": read_images(raw, member_names(raw, names)),
            "prompts": prompts,
            "captions": captions,
            "sample_count": len(captions),
            "patch_positions": _positions(raw, value.get("patch_positions")),
            "video_files": read_videos(raw, value.get("video_files")),
            "truncate": value.get("truncate"),
            **{name: value.get(name) for name in COLUMNS},
        }

    def lengths(self, raw: RawPack) -> list[int | None]:
        """Return the recorded tokens of each sample, or None for each."""
        value = read_json(raw)
        return list(value.get("lengths") or [None] * len(value["captions"]))


def _sample(fields: Mapping[str, Any], i: int) -> StoredSample:
    """Return sample i of columns that this package wrote."""
    sample = {name: fields[name][i] if fields[name] else None for name in COLUMNS}
    images = fields["images"][i]
    positions = fields["patch_positions"][i] if fields["patch_positions"] else ()
    videos = tuple(fields["video_files"][i]) if fields["video_files"] else ()
    prompts, captions = fields["prompts"][i], fields["captions"][i]
    messages = [Message(role, text) for role, text in _alternating(prompts, captions)]
    if sample["systems"] is not None:
        messages.insert(0, Message("system", sample["systems"]))
    if sample["weights"]:
        messages = [message._replace(weight=w) for message, w in zip(messages, sample["weights"], strict=True)]
    # `write` stores a plain text as a caption without a prompt or system prompt; no conversation has that form.
    is_text = not prompts and sample["systems"] is None and len(captions) == 1
    conversation = Conversation(
        id=sample["ids"],
        messages=() if is_text else tuple(messages),
        text=captions[0] if is_text else None,
        weight=1.0 if sample["record_weights"] is None else sample["record_weights"],
        images=media_references(images),
        patch_positions=byte_references(positions),
        videos=video_references(videos),
        video=bool(sample["videos"]),
        fps=sample["fps"],
        timestamps=bool(sample["timestamps"]),
        timestamp_decimal=sample["timestamp_decimal"],
    )
    return StoredSample(
        conversation=conversation,
        length=sample["lengths"],
        truncate=fields["truncate"],
        is_truncated=bool(sample["truncated"]),
        images=images,
        patch_positions=positions,
        videos=videos,
    )


def _third_party_sample(fields: Mapping[str, Any], i: int) -> StoredSample:
    """Return sample i of third-party columns without ids and lengths, as `normalize` converts its record.

    If placeholders and images do not match, all images are placed before the first turn, as in LLaVA-OneVision-2's
    `Qwen2VLPlugin.process_messages`.
    """
    images = fields["images"][i]
    positions = fields["patch_positions"][i] if fields["patch_positions"] else ()
    turns = _alternating(fields["prompts"][i], fields["captions"][i])
    if images and sum(text.count(IMAGE_PLACEHOLDER) for _, text in turns) not in (0, len(images)):
        turns = [(role, text.replace(IMAGE_PLACEHOLDER, "")) for role, text in turns]
        # The line break after a removed placeholder would remain at the start of the prompt.
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


def _alternating(prompts: Sequence[str], captions: Sequence[str]) -> list[tuple[str, str]]:
    """Return (role, text) of each turn: prompt, caption, prompt, and so on."""
    turns = [("user", prompts, 0), ("assistant", captions, 1)]
    # Sorted by position, since third-party samples may have different numbers of prompts and captions.
    ordered = sorted((2 * j + shift, role, text) for role, texts, shift in turns for j, text in enumerate(texts))
    return [(role, text) for _, role, text in ordered]


def _positions(raw: RawPack, listed: Any) -> list[tuple[bytes, ...]] | None:
    """Read the .npy files of each sample; None if no sample has any. An empty name means that there is no file."""
    if not any(name for names in listed or () for name in names or ()):
        return None
    # Empty names stay until the members are found: a name without a member is resolved by its position.
    members = member_names(raw, [[name or "" for name in names or ()] for names in listed], extension="npy")
    return read_files(raw, [[name for name in names if name] for names in members])


def _weights(conversation: Conversation) -> list[float] | None:
    """Return the weight of each message; None if all weights are 1."""
    weights = [message.weight for message in conversation.messages]
    return weights if weights.count(1) < len(weights) else None


def _turns(value: Any) -> list[str]:
    return [] if value is None else [value] if isinstance(value, str) else list(value)
