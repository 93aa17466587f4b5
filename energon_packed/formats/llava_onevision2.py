"""The layout that LLaVA-OneVision-2's own reader takes, with `pack --layout llava-onevision2`.

    {key}.json       always: images, prompts, captions, sample_count, patch_positions, timestamp_decimal;
                     fps and videos when given; and ids and lengths, which its reader does not look at
    {key}.img{i}_{j}.jpg   image j of sample i, a JPEG
    {key}.img{i}_{j}.npy   its patch positions, when given

It is a PackedCaptioningSample that is stricter than ours: every image name ends in `.jpg`, every image has an entry in
`patch_positions` ("" for none), every sample has as many prompts as captions. The reader has no place for a system
prompt, so that one is the start of the first prompt, in the measured length too. What the reader would change or
cannot hold is rejected: documents, turns that are not supervised, `<video>` in the text.

Source: the generated `sample_loader.py` (`s5_convert_to_webdataset.py`), and `TaskEncoder.encode_sample` and
`Qwen2VLTaskEncoder` in `aiak_training_llm/data/multimodal` of EvolvingLMMs-Lab/LLaVA-OneVision-2.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from energon_packed.errors import Reason, RecordError
from energon_packed.formats.captioning import CaptioningCodec
from energon_packed.formats.codec import Part
from energon_packed.formats.parts import optional, write_json, write_media
from energon_packed.formats.sample import StoredSample
from energon_packed.records import Conversation, Message
from energon_packed.records.normalize import FPS_STORED

SYSTEM_IN_PROMPT = "system prompt in the first prompt"
"""Note of a conversation whose system prompt its reader finds only there."""
TIMESTAMPS_ADDED = "fps: the reader adds timestamps to the measured length"
"""Note of a conversation that its trainer makes longer (`_rewrap_vision_by_frame`); leave space in `seq_len`."""
_VIDEO = "<video>"
_READER = "the reader of layout llava-onevision2"


class LlavaOnevision2Codec(CaptioningCodec):
    """PackedCaptioningSample as LLaVA-OneVision-2's reader takes it."""

    layout = "llava-onevision2"

    def check(self, conversation: Conversation) -> None:
        """Pairs of a prompt and a supervised caption, with nothing that its reader would change."""
        super().check(conversation)
        if conversation.text is not None:
            raise RecordError(
                Reason.MISSING_FIELD, f"{_READER} takes pairs of prompt and caption only, and this is a document"
            )
        turns = [message for message in conversation.messages if message.role != "system"]
        if len(turns) % 2:
            raise RecordError(
                Reason.BAD_ROLE, f"{_READER} takes pairs of prompt and caption only; the last prompt has no caption"
            )
        if any(message.weight != 1 for message in turns if message.role == "assistant"):
            raise RecordError(
                Reason.UNSUPPORTED_FIELD,
                f"{_READER} trains on every caption, so a turn cannot have a weight; make the other turns a prompt",
            )
        if any(_VIDEO in message.content for message in conversation.messages):
            raise RecordError(
                Reason.UNSUPPORTED_MEDIA,
                f"{_READER} puts images in place of the text {_VIDEO}; remove it from the text",
            )

    def fitted(self, conversation: Conversation) -> Conversation:
        """The system prompt at the start of the first prompt."""
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
        """Parts of one pack."""
        media, images, positions = write_media(samples)
        conversations = [sample.conversation for sample in samples]
        turns = [(c, role) for role in ("user", "assistant") for c in conversations]
        texts = [[message.content for message in c.messages if message.role == role] for c, role in turns]
        value: dict[str, Any] = {
            "images": images,
            "prompts": texts[: len(samples)],
            "captions": texts[len(samples) :],
            "sample_count": len(samples),
            "patch_positions": [given or [""] * len(listed) for given, listed in zip(positions, images, strict=True)],
            "timestamp_decimal": [c.timestamp_decimal or 1 for c in conversations],
        }
        value |= optional({"fps": [c.fps for c in conversations], "videos": [c.video for c in conversations]})
        value |= {"ids": [c.id for c in conversations], "lengths": [sample.length for sample in samples]}
        return [("json", write_json(value)), *media]
