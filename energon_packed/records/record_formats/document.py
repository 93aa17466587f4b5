"""Records without turns in; a fully supervised text with `<image>` placeholders, or token ids with labels, out.

    Document         {"text": "..."}                         C4, FineWeb, RedPajama, The Pile, Wikipedia
                     {"content": "..."}                      The Stack, StarCoder
                     {"raw_content": "..."}                  RedPajama-V2
    Interleaved      {"texts": ["...", None, "..."],         OBELICS, MINT-1T: a text or an image at each position
                      "images": [None, "a.jpg", None]}
    SentencesImages  {"text_list": ["..."], "image_info": [{"image_name", "matched_text_index", ...}]}    mmc4
    Tokens           {"input_ids": [...], "labels": [...]}   or a mask of 0 and 1 instead of labels

Interleaved documents are joined with line breaks. In mmc4, sentences are joined with a space, and each image precedes
the sentence that it matches, as in OpenFlamingo. `image_name` is a path that starts from the image root.

Masks of Tokens: `loss_mask` (Megatron-LM), `completion_mask` (TRL), and `assistant_masks` or `assistant_mask`
(Transformers' `apply_chat_template(return_assistant_tokens_mask=True)`). `loss_weights` has the loss weight of each
token; a token with weight 0 is not a target. Padding (0 in `attention_mask`) is removed. Other fields with a value for
each token are columns (`records/columns.py`).
"""

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from energon_packed.errors import Reason, RecordError
from energon_packed.records.columns import read_columns
from energon_packed.records.fields import (
    COMMON_FIELDS,
    Record,
    is_given,
    missing_field,
    one_text,
    read_list,
    read_objects,
    read_text,
    read_tokens,
    shown,
    unsupported_field,
)
from energon_packed.records.media.fields import Media
from energon_packed.records.media.kinds import IMAGE_PLACEHOLDER
from energon_packed.records.record_formats.base import PartialConversation, RecordFormat

_FIELDS = ("text", "content", "raw_content")
_INFO = frozenset(("image_name", "image", "matched_text_index"))
_MASKS = ("loss_mask", "completion_mask", "assistant_masks", "assistant_mask")


class Document(RecordFormat):
    """Plain text."""

    key = "text"
    fields: ClassVar[frozenset[str]] = COMMON_FIELDS | set(_FIELDS)

    def matches(self, record: Record) -> bool:
        """Whether one of the fields has a value."""
        return any(record.get(name) is not None for name in _FIELDS)

    def read(self, record: Record, media: Media) -> PartialConversation:
        """Read the text."""
        # A row of OpenAssistant is a single message of a tree, not a document.
        if is_given(record.get("role")) or is_given(record.get("parent_id")):
            raise missing_field(
                "the record is one message, with a text and a role, not a conversation; join the messages of each "
                "conversation, from the first to the last, as messages"
            )
        # Alpaca repeats the record in `text`. A prompt or question may be metadata of a document (Cosmopedia).
        if is_given(record.get("instruction")):
            raise missing_field("the record has an instruction and no output; its text is not a document")
        text = one_text(record, _FIELDS)
        if text is None or not text.strip():
            raise RecordError(Reason.EMPTY, "text is empty")
        return PartialConversation(text=text)


class Interleaved(RecordFormat):
    """Documents as two lists of equal length, `texts` and `images`, with a value in one of them at each position."""

    key = "texts"
    fields: ClassVar[frozenset[str]] = COMMON_FIELDS | {"texts"}
    reads_images: ClassVar[bool] = True

    def matches(self, record: Record) -> bool:
        """Whether the value is a list of strings and nulls."""
        texts = record.get(self.key)
        return isinstance(texts, list | tuple) and all(text is None or isinstance(text, str) for text in texts)

    def read(self, record: Record, media: Media) -> PartialConversation:
        """Read the document."""
        texts, images = record[self.key], record.get("images")
        images = images if is_given(images) else [None] * len(texts)
        if not isinstance(images, list | tuple) or len(images) != len(texts):
            size = len(images) if isinstance(images, list | tuple) else 1
            raise RecordError(
                Reason.IMAGE_COUNT_MISMATCH,
                f"texts has {len(texts)} entries and images {size}; interleaved lists have one entry per position",
            )
        if is_given(record.get("image")):
            raise RecordError(Reason.IMAGE_COUNT_MISMATCH, "both images and image are in the record; use one")
        pieces = []
        for text, image in zip(texts, images, strict=True):
            if is_given(image):
                media.add_inline(image)
                pieces.append(IMAGE_PLACEHOLDER)
            if text:
                pieces.append(text)
        return _document("\n".join(pieces), self.key)


class SentencesImages(RecordFormat):
    """Documents as a list of sentences and a list of images, each with the index of a sentence."""

    key = "text_list"
    fields: ClassVar[frozenset[str]] = COMMON_FIELDS | {"text_list", "image_info"}

    def read(self, record: Record, media: Media) -> PartialConversation:
        """Read the document."""
        sentences = read_list(record[self.key], self.key)
        pieces = [[read_text(sentence, "a sentence of text_list")] for sentence in sentences]
        placed = []
        for info in read_objects(record["image_info"], "image_info") if is_given(record.get("image_info")) else []:
            media.add_unused(info, _INFO, "image_info")
            placed.append((_index(info.get("matched_text_index"), len(sentences)), info))
        # A stable sort: images of the same sentence stay in the order of the record.
        for index, info in sorted(placed, key=lambda pair: pair[0]):
            media.add_inline(info.get("image") or info.get("image_name"))
            pieces[index].insert(-1, IMAGE_PLACEHOLDER)  # before the sentence, after earlier images of it
        return _document(" ".join([piece for inner in pieces for piece in inner]), self.key)


def _index(value: Any, sentences: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < sentences:
        raise missing_field(f"matched_text_index is {value!r} for {sentences} sentences; use 0 to {sentences - 1}")
    return value


def _document(text: str, key: str) -> PartialConversation:
    # A document of images alone has no token to train on.
    if not text.replace(IMAGE_PLACEHOLDER, "").strip():
        raise RecordError(Reason.EMPTY, f"{key} has no text")
    return PartialConversation(text=text)


class Tokens(RecordFormat):
    """Token ids with labels or masks; without both, every token is supervised."""

    key = "input_ids"
    fields: ClassVar[frozenset[str]] = COMMON_FIELDS | {
        *("input_ids", "labels", "attention_mask", "loss_weights"),
        *_MASKS,
    }

    def read(self, record: Record, media: Media) -> PartialConversation:
        """Read ids and labels, int64 (L,), loss weights, float32 (L,), and columns, (L,) or (L, k)."""
        ids = read_tokens(record["input_ids"], "input_ids")
        targets = {name: read_flags(record, name, len(ids)) for name in _MASKS if is_given(record.get(name))}
        columns = read_columns(record, self.fields, len(ids))
        labels = ids
        if record.get("labels") is not None:
            labels = read_tokens(record["labels"], "labels")
            targets["labels"] = labels != -100
        # All masks and labels must agree, so it does not matter which of them is used.
        names = list(targets)
        for name in names[1:]:
            if not np.array_equal(targets[name], targets[names[0]]):
                raise unsupported_field(f"{names[0]} and {name} have different targets; keep the one that is meant")
        if names:
            labels = np.where(targets[names[0]], labels, -100)
        weights = _loss_weights(record["loss_weights"]) if is_given(record.get("loss_weights")) else None
        if is_given(record.get("attention_mask")):
            kept = read_flags(record, "attention_mask", len(ids))
            if len(labels) == len(ids):  # `Conversation` rejects other lengths, with both of them in the message
                weights = weights[kept] if weights is not None and len(weights) == len(ids) else weights
                ids, labels = ids[kept], labels[kept]
                columns = {name: column[kept] for name, column in columns.items()}
        media.unused_fields.difference_update(columns)
        return PartialConversation(input_ids=ids, labels=labels.copy(), loss_weights=weights, columns=columns or None)


def _loss_weights(value: Any) -> npt.NDArray[np.float32]:
    """Read a flat list of numbers as float32 (L,); `Conversation` checks their number and range."""
    try:
        array = np.asarray(value)
    except ValueError:
        array = np.zeros((0, 0))
    if array.ndim != 1 or array.dtype.kind not in "iuf":
        raise missing_field(f"loss_weights must be a flat list of numbers, not {shown(value)}")
    with np.errstate(over="ignore"):  # infinity is out of range
        return array.astype(np.float32)


def read_flags(record: Record, name: str, size: int, of: str = "input_ids") -> npt.NDArray[np.bool_]:
    """Read a mask of 0 and 1 as bool (L,)."""
    flags = read_tokens(record[name], name)
    if len(flags) != size:
        raise missing_field(f"{name} has {len(flags)} entries for {size} {of}")
    if ((flags != 0) & (flags != 1)).any():
        raise unsupported_field(f"{name} has numbers other than 0 and 1, which are not supported")
    return flags.astype(np.bool_)
