"""Codecs of third-party packs: one layout is written for LLaVA-OneVision-2, and the packs of LoongForge are only read.

`pack --layout llava-onevision2` writes packs that the reader of LLaVA-OneVision-2 can load:

    {key}.json       always: images, prompts, captions, sample_count, patch_positions, timestamp_decimal;
                     if present: fps and videos; also ids and lengths, which that reader ignores
    {key}.img{i}_{j}.jpg   image j of sample i, a JPEG
    {key}.img{i}_{j}.npy   its patch positions, if present

It is a stricter PackedCaptioningSample: every image name ends in `.jpg`, every image has an entry in `patch_positions`
("" for none), every sample has as many prompts as captions. The reader has no field for a system prompt, so it becomes
the start of the first prompt, in the measured length too. Content that the reader would change or cannot store is
rejected: documents, turns that are not supervised. Source: the generated `sample_loader.py`
(`s5_convert_to_webdataset.py`), and `TaskEncoder.encode_sample` and `Qwen2VLTaskEncoder` in
`aiak_training_llm/data/multimodal` of EvolvingLMMs-Lab/LLaVA-OneVision-2.

LoongForge uses names of this package for other flavors, so its packs are recognized by their json:

    packed_multi_mix_qa   texts {prompts, captions}, media_files, media_type, _meta
                          class PackedMultiMixQASample, with other columns than here
    packed_chat_mix       messages (one object per sample, with messages and tools), media_files, media_type, _meta

A prompt or caption is a string, or a list of turns. `media_files` lists the members of each sample, such as
`s000_cat.jpg`. `_meta` has `sample_ids` and `token_lens`; the lengths are ignored, as they are of LoongForge's
tokenizer and template. Packs of videos are refused: video files are not decoded. Each sample becomes the conversation
that `normalize` makes of it. Source: `wds_pack/io/webdataset_writer.py` and the cookers of `base/task_encoder.py` of
baidu-baige/LoongForge.
"""

import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from energon_packed.errors import FormatError, Reason, RecordError
from energon_packed.formats.captioning import CaptioningCodec
from energon_packed.formats.codec import Codec, Part, RawPack, StoredSample
from energon_packed.formats.parts import optional, read_json, read_media, read_object, write_json, write_media
from energon_packed.records import IMAGE_PLACEHOLDER, Conversation, Message, normalize
from energon_packed.records.normalize import FPS_STORED, TIMESTAMPS_ADDED

SYSTEM_IN_PROMPT = "system prompt in the first prompt"
"""Note of a conversation whose system prompt is stored in the first prompt."""
_READER = "the reader of layout llava-onevision2"
_MEMBER = re.compile(r"s\d{3}_.*\.\w+")  # {sample}_{name of the file}, of LoongForge
_MESSAGE_FIELDS = ("messages", "conversations", "tools", "system")  # that `normalize` reads


class LlavaOnevision2Codec(CaptioningCodec):
    """Codec of the layout that LLaVA-OneVision-2's reader loads."""

    layout = "llava-onevision2"

    def check(self, conversation: Conversation) -> None:
        """Reject conversations that are not pairs of prompt and caption, and content that the reader would change."""
        super().check(conversation)
        if conversation.videos or conversation.audios:
            raise RecordError(
                Reason.UNSUPPORTED_MEDIA,
                f"{_READER} reads images only; omit `layout` for records with videos or audio, or store frames as "
                "`images` with `patch_positions` and `fps`",
            )
        if conversation.text is not None:
            raise RecordError(
                Reason.MISSING_FIELD, f"{_READER} reads pairs of prompt and caption only, and this is a document"
            )
        turns = [message for message in conversation.messages if message.role != "system"]
        if len(turns) % 2:
            raise RecordError(
                Reason.BAD_ROLE, f"{_READER} reads pairs of prompt and caption only; the last prompt has no caption"
            )
        if any(message.weight != 1 for message in turns if message.role == "assistant"):
            raise RecordError(
                Reason.UNSUPPORTED_FIELD,
                f"{_READER} trains on every caption, so a turn cannot have a weight; make the other turns a prompt",
            )
        for name, is_set in (
            ("settings of single images, such as max_pixels", any(image.settings for image in conversation.images)),
            ("chat_template_kwargs", conversation.chat_template_kwargs),
            ("objects with boxes", conversation.objects),
        ):
            if is_set:
                raise RecordError(Reason.UNSUPPORTED_FIELD, f"{_READER} has no {name}; omit `layout`")
        if conversation.weight != 1:
            raise RecordError(
                Reason.UNSUPPORTED_FIELD,
                f"{_READER} has no loss weights, and the record has the weight {conversation.weight:g}; omit `layout`",
            )
        if (conversation.fps or 0) > 0 and not _is_single_group([message.content for message in turns]):
            raise RecordError(
                Reason.UNSUPPORTED_FIELD,
                f"{_READER} replaces all text between the images of a record with `fps` by timestamps; put the images "
                "together in a single turn, or remove `fps`",
            )

    def fitted(self, conversation: Conversation) -> Conversation:
        """Move the system prompt to the start of the first prompt."""
        messages = conversation.messages
        if conversation.fps and conversation.images:
            notes = [note for note in conversation.notes if note != FPS_STORED]
            conversation = replace(conversation, notes=(*notes, TIMESTAMPS_ADDED))
        if messages[0].role != "system":
            return conversation
        system, first, *others = messages
        text = f"{system.content}\n\n{first.content}" if system.content else first.content
        return replace(
            conversation,
            messages=(Message("user", text), *others),
            notes=(*conversation.notes, SYSTEM_IN_PROMPT) if system.content else conversation.notes,
        )

    def write(self, samples: Sequence[StoredSample]) -> list[Part]:
        """Convert the samples of one pack to its parts."""
        conversations = [sample.conversation for sample in samples]
        parts, media = write_media(conversations)
        prompts, captions = (
            [[message.content for message in c.messages if message.role == role] for c in conversations]
            for role in ("user", "assistant")
        )
        # The reader indexes `patch_positions` and `timestamp_decimal` of every sample, so both are always written.
        value: dict[str, Any] = {
            "images": media["images"],
            "prompts": prompts,
            "captions": captions,
            "sample_count": len(samples),
            "patch_positions": [
                names or [""] * len(listed)
                for names, listed in zip(media["patch_positions"], media["images"], strict=True)
            ],
            "timestamp_decimal": [c.timestamp_decimal or 1 for c in conversations],
        }
        value |= optional(
            {
                "fps": [c.fps for c in conversations],
                "timestamps": [c.timestamps or None for c in conversations],
                "videos": [c.video for c in conversations],
            }
        )
        value |= {"ids": [c.id for c in conversations], "lengths": [sample.length for sample in samples]}
        return [("json", write_json(value)), *parts]


class LoongForgeCodec(Codec):
    """Base class of the codecs that read LoongForge's packs."""

    def write(self, samples: Sequence[StoredSample]) -> list[Part]:
        """Raise an error: these packs are only read."""
        raise FormatError(f"{self.sample_class} is read, not written; write PackedMultiMixQASample")

    @abstractmethod
    def _records(self, raw: RawPack, value: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the record of each sample, without images."""

    def read(self, raw: RawPack) -> list[StoredSample]:
        """Convert the parts of one pack to its samples.

        Raises:
            FormatError: the pack has videos, columns of different lengths, or a sample that cannot be used.
        """
        key, value = raw.get("__key__"), read_json(raw)
        # Checked before the records: a video pack has `media_files` that are not images.
        kind = str(value.get("media_type") or "").lower()
        if kind not in ("image", "text"):
            raise FormatError(
                f"{key} is a LoongForge pack of media_type {kind!r}; 'image' and 'text' are read, video files are "
                "not decoded; pack its source records with frames as images"
            )
        records = self._records(raw, value)
        files = value.get("media_files") or [[]] * len(records)
        if len(files) != len(records):
            raise FormatError(f"{key} has media_files of {len(files)} samples, but {len(records)} samples")
        media = read_media(raw, {"images": files if kind == "image" else [()] * len(records)})
        ids = (value.get("_meta") or {}).get("sample_ids") or [None] * len(records)
        samples = []
        for i, (record, name, of_sample) in enumerate(zip(records, ids, media, strict=True)):
            images = list(of_sample.get("images", ()))
            try:
                conversation = normalize({"id": name, **record, **({"images": images} if images else {})})
            except RecordError as error:
                raise FormatError(f"sample {i} of {key}: {error}") from error
            samples.append(StoredSample(conversation, length=None))
        return samples

    def lengths(self, raw: RawPack) -> list[int | None]:
        """Return None for each sample: the recorded lengths are of LoongForge's template."""
        return [None] * len(self._records(raw, read_json(raw)))

    def part_filter(self, part: str) -> bool:
        """Return whether a part is the json or a media file such as `s000_cat.jpg`."""
        return part == "json" or _MEMBER.fullmatch(part) is not None


class LoongForgeMultiMixCodec(LoongForgeCodec):
    """Codec of `packed_multi_mix_qa`: columns of prompts and captions."""

    sample_class = "LoongForge.PackedMultiMixQASample"

    def matches(self, raw: RawPack) -> bool:
        """Return whether the json has an object `texts`, and `media_files`."""
        value = read_object(raw)
        return "media_files" in value and isinstance(value.get("texts"), dict)

    def _records(self, raw: RawPack, value: Mapping[str, Any]) -> list[dict[str, Any]]:
        prompts, captions = (value["texts"].get(name) or [] for name in ("prompts", "captions"))
        if len(prompts) != len(captions):
            raise FormatError(f"{raw.get('__key__')} has {len(prompts)} prompts for {len(captions)} captions")
        records = []
        for i, (asked, answered) in enumerate(zip(map(_turns, prompts), map(_turns, captions), strict=True)):
            if len(asked) != len(answered):
                raise FormatError(
                    f"sample {i} of {raw.get('__key__')} has {len(asked)} prompts for {len(answered)} captions"
                )
            pairs = zip(asked, answered, strict=True)
            turns = [turn for user, assistant in pairs for turn in (("user", user), ("assistant", assistant))]
            records.append({"messages": [{"role": role, "content": text} for role, text in turns]})
        return records


class LoongForgeChatMixCodec(LoongForgeCodec):
    """Codec of `packed_chat_mix`: conversations with tools."""

    sample_class = "LoongForge.PackedChatMixSample"

    def matches(self, raw: RawPack) -> bool:
        """Return whether the json has `media_files`, and `messages` whose items are conversations."""
        value = read_object(raw)
        samples = value.get("messages")
        return "media_files" in value and isinstance(samples, list) and all(map(_is_conversation, samples))

    def _records(self, raw: RawPack, value: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [
            {name: sample[name] for name in _MESSAGE_FIELDS if sample.get(name) is not None}
            for sample in value["messages"]
        ]


def _is_single_group(contents: Sequence[str]) -> bool:
    """Whether all images are in a single turn, with only white space between them; also without images."""
    pictured = [content for content in contents if IMAGE_PLACEHOLDER in content]
    return len(pictured) < 2 and not any(
        between.strip() for content in pictured for between in content.split(IMAGE_PLACEHOLDER)[1:-1]
    )


def _is_conversation(value: Any) -> bool:
    return isinstance(value, dict) and ("messages" in value or "conversations" in value)


def _turns(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value)
