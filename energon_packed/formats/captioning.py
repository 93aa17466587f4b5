"""Codec of PackedCaptioningSample: samples of prompts, captions and images to the parts of a pack, and back.

    {key}.json       images, prompts, captions, sample_count, ids, systems, lengths
                     and, if present: patch_positions, timestamp_decimal, fps, videos (the images are frames),
                     video_files (see videos.py), audio_files (see audios.py), image_settings (of each image, or null),
                     chat_template_kwargs, objects (boxes of the text, as in records/objects.py),
                     weights (of each turn in the loss, the system prompt first: 0 is context), record_weights (of
                     each sample in the loss), truncate, truncated
    {key}.img{i}_{j}.{ext}   original bytes of image j of sample i
    {key}.img{i}_{j}.npy     its patch positions, if present
    {key}.vid{i}_{j}.{ext}   video file j of sample i
    {key}.aud{i}_{j}.{ext}   audio file j of sample i

`prompts[i]` and `captions[i]` are the turns of sample i. A plain text, whose tokens are all supervised, has no prompt
and one caption.

Packs from `offline_packing` of LLaVA-OneVision-2 and of the 1.5 examples are read as well: image names that are not
member names, empty names of .npy files, one list of images for all samples, prompts without placeholders, `fps` in
lists. Their samples have no `ids` and no `lengths`, and become the conversations that `normalize` makes of the same
records. The reader of that project needs `img{i}_{j}.jpg` for every image, which `pack --layout llava-onevision2`
writes (`third_party.py`).
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from energon_packed.errors import FormatError, Reason, RecordError
from energon_packed.files import of_type
from energon_packed.formats.codec import Codec, Part, RawPack, StoredSample
from energon_packed.formats.parts import (
    member_names,
    names_by_sample,
    optional,
    read_json,
    read_media,
    read_object,
    write_json,
    write_media,
)
from energon_packed.records import IMAGE_PLACEHOLDER, Conversation, Message, normalize

_ROLES = ("user", "assistant")  # of the turns after the system prompt, alternating
_REMEDY = "set `sample_class` to PackedMultiMixQASample"


class _Row(NamedTuple):
    """Values of a sample in the optional columns of the json; None in columns that the pack has not."""

    ids: Any
    systems: Any
    lengths: Any
    timestamp_decimal: Any
    fps: Any
    timestamps: Any
    videos: Any
    weights: Any
    record_weights: Any
    chat_template_kwargs: Any
    objects: Any
    truncated: Any


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
        for index, (role, _, extra, *_) in enumerate(turns[start:]):
            if role != _ROLES[index % 2] or extra:
                actual = f"{role} with {', '.join(extra)}" if extra else role
                raise RecordError(
                    Reason.BAD_ROLE,
                    f"turn {index} is {actual}; PackedCaptioningSample stores alternating user and assistant turns; "
                    f"{_REMEDY}",
                )

    def write(self, samples: Sequence[StoredSample]) -> list[Part]:
        """Convert the samples of one pack to its parts."""
        conversations = [sample.conversation for sample in samples]
        parts, media = write_media(conversations)
        value: dict[str, Any] = {
            "images": media["images"],
            "prompts": [[text for role, text, *_ in c.messages if role == "user"] for c in conversations],
            "captions": [
                [text for role, text, *_ in c.messages if role == "assistant"] if c.text is None else [c.text]
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
                "patch_positions": media["patch_positions"],
                "timestamp_decimal": [c.timestamp_decimal for c in conversations],
                "fps": [c.fps for c in conversations],
                "timestamps": [c.timestamps or None for c in conversations],
                "videos": [c.video for c in conversations],
                "video_files": media["video_files"],
                "audio_files": media["audio_files"],
                "image_settings": media["image_settings"],
                "chat_template_kwargs": [c.chat_template_kwargs for c in conversations],
                "objects": [c.objects for c in conversations],
                "weights": [_weights(c) for c in conversations],
                "record_weights": [None if c.weight == 1 else c.weight for c in conversations],
            }
        )
        if samples[0].truncate is not None:  # an option of the run, so all samples have the same value
            value |= {"truncate": samples[0].truncate, "truncated": [sample.is_truncated for sample in samples]}
        return [("json", write_json(value)), *parts]

    def read(self, raw: RawPack) -> list[StoredSample]:
        """Convert the parts of one pack to its samples; absent optional keys become None.

        Raises:
            FormatError: a member is missing, or the columns have different lengths.
        """
        value = read_json(raw)
        captions = [_turns(turns) for turns in value["captions"]]
        prompts = [_turns(turns) for turns in value.get("prompts") or [[""] * len(turns) for turns in captions]]
        columns = {name: of_type(value.get(name) or [None] * len(captions), list, name) for name in _Row._fields}
        for name, column in [("prompts", prompts), *columns.items()]:
            if len(column) != len(captions):
                raise FormatError(f"{raw.get('__key__')} has {len(column)} {name} for {len(captions)} captions")
        turns_of_samples = [[*asked, *answered] for asked, answered in zip(prompts, captions, strict=True)]
        names = names_by_sample(raw, value.get("images"), turns_of_samples)
        positions = _position_names(raw, value.get("patch_positions"))
        media = read_media(raw, {**value, "images": member_names(raw, names), "patch_positions": positions})
        # This package always writes both columns.
        is_third_party = value.get("ids") is None and value.get("lengths") is None
        read = _third_party_sample if is_third_party else partial(_sample, value.get("truncate"))
        samples: list[StoredSample] = []
        rows = map(_Row._make, zip(*columns.values(), strict=True))
        for asked, answered, row, own in zip(prompts, captions, rows, media, strict=True):
            try:
                samples.append(read(asked, answered, row, own))
            except RecordError as error:
                raise FormatError(f"sample {len(samples)}: {error}") from error
        return samples

    def lengths(self, raw: RawPack) -> list[int | None]:
        """Return the recorded tokens of each sample, or None for each."""
        value = read_json(raw)
        return list(value.get("lengths") or [None] * len(value["captions"]))


def _sample(
    truncate: int | None, prompts: Sequence[str], captions: Sequence[str], row: _Row, media: Mapping[str, Any]
) -> StoredSample:
    """Return a sample that this package wrote."""
    messages = [Message(role, text) for role, text in _alternating(prompts, captions)]
    if row.systems is not None:
        messages.insert(0, Message("system", row.systems))
    if row.weights:
        messages = [message._replace(weight=w) for message, w in zip(messages, row.weights, strict=True)]
    # `write` stores a plain text as a caption without a prompt or system prompt; no conversation has that form.
    is_text = not prompts and row.systems is None and len(captions) == 1
    conversation = Conversation(
        id=row.ids,
        messages=() if is_text else tuple(messages),
        text=captions[0] if is_text else None,
        weight=1.0 if row.record_weights is None else row.record_weights,
        **media,
        chat_template_kwargs=row.chat_template_kwargs,
        objects=row.objects,
        video=bool(row.videos),
        fps=row.fps,
        timestamps=bool(row.timestamps),
        timestamp_decimal=row.timestamp_decimal,
    )
    return StoredSample(conversation, row.lengths, truncate, bool(row.truncated))


def _third_party_sample(
    prompts: Sequence[str], captions: Sequence[str], row: _Row, media: Mapping[str, Any]
) -> StoredSample:
    """Return a sample of third-party columns without ids and lengths, as `normalize` converts its record.

    If placeholders and images do not match, all images are placed before the first turn, as in LLaVA-OneVision-2's
    `Qwen2VLPlugin.process_messages`.

    Raises:
        RecordError: the sample is not a record that can be used.
    """
    turns = _alternating(prompts, captions)
    images = list(media.get("images", ()))
    if images and sum(text.count(IMAGE_PLACEHOLDER) for _, text in turns) not in (0, len(images)):
        turns = [(role, text.replace(IMAGE_PLACEHOLDER, "")) for role, text in turns]
        # The line break after a removed placeholder would remain at the start of the prompt.
        turns[0] = (turns[0][0], turns[0][1].lstrip("\n"))
    fps = row.fps
    conversation = normalize(
        {
            "messages": [{"role": role, "content": text} for role, text in turns],
            "images": images,
            "patch_positions": list(media.get("patch_positions", ())),
            "fps": fps[0] if isinstance(fps, list) and fps else fps or None,
            "timestamp_decimal": row.timestamp_decimal,
        }
    )
    return StoredSample(conversation, None)


def _alternating(prompts: Sequence[str], captions: Sequence[str]) -> list[tuple[str, str]]:
    """Return (role, text) of each turn: prompt, caption, prompt, and so on."""
    if len(prompts) == len(captions):  # every sample of this package
        pairs = zip(prompts, captions, strict=True)
        return [turn for asked, answered in pairs for turn in (("user", asked), ("assistant", answered))]
    turns = [("user", prompts, 0), ("assistant", captions, 1)]
    # Sorted by position, since third-party samples may have different numbers of prompts and captions.
    ordered = sorted((2 * j + shift, role, text) for role, texts, shift in turns for j, text in enumerate(texts))
    return [(role, text) for _, role, text in ordered]


def _position_names(raw: RawPack, listed: Any) -> list[list[str]] | None:
    """Return the .npy members of each sample; None if no sample has any. An empty name means that there is no file."""
    if not any(name for names in listed or () for name in names or ()):
        return None
    # Empty names stay until the members are found: a name without a member is resolved by its position.
    members = member_names(raw, [[name or "" for name in names or ()] for names in listed], extension="npy")
    return [[name for name in names if name] for names in members]


def _weights(conversation: Conversation) -> list[float] | None:
    """Return the weight of each message; None if all weights are 1."""
    weights = [message.weight for message in conversation.messages]
    return weights if weights.count(1) < len(weights) else None


def _turns(value: Any) -> list[str]:
    return [] if value is None else [value] if isinstance(value, str) else list(value)
