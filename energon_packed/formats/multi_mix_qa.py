"""Codecs of PackedMultiMixQASample and MultiMixQASample: full conversations to the parts of a tar key, and back.

{key}.json   {"sample_count": S, "samples": [SAMPLE, ...]} of a pack, SAMPLE of a MultiMixQASample
             SAMPLE has id, length, images, and one of
                 messages (role, content, other fields for the chat template, and weight; weight 0 is context)
                 text
                 input_ids and labels, and loss_weights (one per token) if any is not 1
             and, if present: record_weight (factor of the loss weights), tools, chat_template_kwargs,
             objects (boxes of the text, as in records/objects.py), patch_positions, video, fps,
             timestamp_decimal, video_files (see videos.py), audio_files (see audios.py), image_settings (of each
             image, or null), truncate, truncated
{key}.img{i}_{j}.{ext}, {key}.img{i}_{j}.npy, {key}.vid{i}_{j}.{ext}, {key}.aud{i}_{j}.{ext}   as in
             PackedCaptioningSample; i is 0 in a single sample
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from energon_packed.formats.codec import (
    Codec,
    Part,
    RawPack,
    StoredSample,
)
from energon_packed.formats.parts import (
    MEDIA_COLUMNS,
    has_value,
    read_json,
    read_media,
    read_object,
    write_json,
    write_media,
)
from energon_packed.records import Conversation, Message


class MultiMixCodec(Codec):
    """Codec of several conversations in one tar key."""

    sample_class = "PackedMultiMixQASample"
    flavor_class = "PackedMultiMixQASample"
    flavor_module = "energon_packed.flavors.packed_multi_mix_qa"

    def matches(self, raw: RawPack) -> bool:
        """Return whether the json has `samples`."""
        return "samples" in read_object(raw)

    def write(self, samples: Sequence[StoredSample]) -> list[Part]:
        """Convert the samples of one pack to its parts."""
        media, values = _values(samples)
        return [("json", write_json({"sample_count": len(samples), "samples": values})), *media]

    def read(self, raw: RawPack) -> list[StoredSample]:
        """Convert the parts of one pack to its samples."""
        values = self._objects(raw)
        media = read_media(raw, {name: [value.get(name) for value in values] for name in MEDIA_COLUMNS})
        return list(map(_sample, values, media))

    def lengths(self, raw: RawPack) -> list[int | None]:
        """Return the recorded tokens of each sample, or None."""
        return [sample.get("length") for sample in self._objects(raw)]

    def _objects(self, raw: RawPack) -> list[dict[str, Any]]:
        return list(read_json(raw)["samples"])


class SingleMultiMixCodec(MultiMixCodec):
    """Codec of a single conversation per tar key, for packing on the fly."""

    sample_class = "MultiMixQASample"
    flavor_class = "MultiMixQASample"
    flavor_module = "energon_packed.flavors.multi_mix_qa"
    packed = False

    def matches(self, raw: RawPack) -> bool:
        """Return whether the json has messages, text or input_ids."""
        return not {"messages", "text", "input_ids"}.isdisjoint(read_object(raw))

    def write(self, samples: Sequence[StoredSample]) -> list[Part]:
        """Convert one sample to its parts."""
        media, values = _values(samples)
        return [("json", write_json(values[0])), *media]

    def _objects(self, raw: RawPack) -> list[dict[str, Any]]:
        return [read_json(raw)]


def _values(samples: Sequence[StoredSample]) -> tuple[list[Part], list[dict[str, Any]]]:
    """Return the media parts and the SAMPLE objects."""
    parts, media = write_media([sample.conversation for sample in samples])
    values = []
    for sample, *own in zip(samples, *(media[name] for name in MEDIA_COLUMNS), strict=True):
        image_names, position_names, video_entries, audio_entries, of_images = own
        c = sample.conversation
        value: dict[str, Any] = {"id": c.id, "length": sample.length}
        if c.input_ids is not None:
            value |= {"input_ids": c.input_ids, "labels": c.labels}
            if c.loss_weights is not None:
                value["loss_weights"] = c.loss_weights
        elif c.text is not None:
            value["text"] = c.text
        else:
            value["messages"] = [_message_dict(message) for message in c.messages]
        value["images"] = image_names
        more = {
            "record_weight": None if c.weight == 1 else c.weight,
            "tools": c.tools,
            "chat_template_kwargs": c.chat_template_kwargs,
            "objects": c.objects,
            "patch_positions": position_names,
            "video": c.video,
            "fps": c.fps,
            "timestamps": c.timestamps,
            "timestamp_decimal": c.timestamp_decimal,
            "video_files": video_entries,
            "audio_files": audio_entries,
            "image_settings": of_images,
            "truncate": sample.truncate,
            "truncated": sample.is_truncated,
        }
        # Absent rather than null: most samples have none of these fields.
        value.update({name: item for name, item in more.items() if has_value([item])})
        values.append(value)
    return parts, values


def _sample(value: Mapping[str, Any], media: Mapping[str, Any]) -> StoredSample:
    conversation = Conversation(
        id=value.get("id"),
        messages=tuple([_message(message) for message in value.get("messages") or ()]),
        text=value.get("text"),
        input_ids=_array(value.get("input_ids")),
        labels=_array(value.get("labels")),
        loss_weights=None if (weights := value.get("loss_weights")) is None else np.asarray(weights, np.float32),
        weight=value.get("record_weight", 1.0),
        **media,
        tools=value.get("tools"),
        chat_template_kwargs=value.get("chat_template_kwargs"),
        objects=value.get("objects"),
        video=bool(value.get("video")),
        fps=value.get("fps"),
        timestamps=bool(value.get("timestamps")),
        timestamp_decimal=value.get("timestamp_decimal"),
    )
    return StoredSample(
        conversation=conversation,
        length=value.get("length"),
        truncate=value.get("truncate"),
        is_truncated=bool(value.get("truncated")),
    )


def _message(value: Mapping[str, Any]) -> Message:
    extra = {name: item for name, item in value.items() if name not in ("role", "content", "weight")}
    return Message(value["role"], value["content"], extra, value.get("weight", 1.0))


def _message_dict(message: Message) -> dict[str, Any]:
    # Only weights other than 1 are stored; the template must not see the field, so `as_dict` lacks it.
    weight = {} if message.weight == 1 else {"weight": message.weight}
    return message.as_dict() | weight


def _array(value: Any) -> Any:
    return None if value is None else np.asarray(value, dtype=np.int64)
