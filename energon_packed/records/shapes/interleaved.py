"""Documents with images between their texts; every text token is supervised.

    OBELICS, MINT-1T  {"texts": ["...", None, "..."], "images": [None, "a.jpg", None]}    one of the two at each place
    mmc4              {"text_list": ["..."], "image_info": [{"image_name", "matched_text_index", ...}]}

OBELICS: texts and images are joined with a line break. mmc4: sentences are joined with a space, and each image stands
before the sentence that it matches, as OpenFlamingo reads it. `image_name` is a path from the image root.
"""

from typing import Any, ClassVar

from energon_packed.errors import Reason, RecordError
from energon_packed.records.conversation import IMAGE_PLACEHOLDER
from energon_packed.records.fields import COMMON_FIELDS, Record, is_given, read_objects, read_text, unused_fields
from energon_packed.records.media_fields import Media
from energon_packed.records.shapes.shape import Draft, Shape

_INFO = frozenset(("image_name", "image", "matched_text_index"))


class Interleaved(Shape):
    """Two lists, `texts` and `images`, with a value in one of them at each place."""

    key = "texts"
    fields: ClassVar[frozenset[str]] = COMMON_FIELDS | {"texts"}
    reads_images: ClassVar[bool] = True

    def matches(self, record: Record) -> bool:
        """Whether `texts` is a list of texts."""
        texts = record.get(self.key)
        return isinstance(texts, list | tuple) and all(text is None or isinstance(text, str) for text in texts)

    def read(self, record: Record, media: Media) -> Draft:
        """The document."""
        texts, images = record[self.key], record.get("images")
        images = images if is_given(images) else [None] * len(texts)
        if not isinstance(images, list | tuple) or len(images) != len(texts):
            size = len(images) if isinstance(images, list | tuple) else 1
            raise RecordError(
                Reason.IMAGE_COUNT_MISMATCH,
                f"texts has {len(texts)} entries and images {size}; interleaved lists have one entry per place",
            )
        if is_given(record.get("image")):
            raise RecordError(Reason.IMAGE_COUNT_MISMATCH, "both images and image are given; use one")
        pieces = []
        for text, image in zip(texts, images, strict=True):
            if is_given(image):
                media.add_inline(image)
                pieces.append(IMAGE_PLACEHOLDER)
            if text:
                pieces.append(text)
        return _document("\n".join(pieces), self.key)


class SentencesImages(Shape):
    """Sentences, and images that match one each."""

    key = "text_list"
    fields: ClassVar[frozenset[str]] = COMMON_FIELDS | {"text_list", "image_info"}

    def read(self, record: Record, media: Media) -> Draft:
        """The document."""
        sentences = record[self.key]
        if not isinstance(sentences, list | tuple):
            raise RecordError(Reason.MISSING_FIELD, f"text_list must be a list, not {type(sentences).__name__}")
        pieces = [[read_text(sentence, "a sentence of text_list")] for sentence in sentences]
        placed = []
        for info in read_objects(record["image_info"], "image_info") if is_given(record.get("image_info")) else []:
            media.unused_fields.update(unused_fields(info, _INFO, "image_info"))
            placed.append((_index(info.get("matched_text_index"), len(sentences)), info))
        for index, info in sorted(placed, key=lambda pair: pair[0]):
            media.add_inline(info.get("image") or info.get("image_name"))
            pieces[index].insert(-1, IMAGE_PLACEHOLDER)
        return _document(" ".join([piece for inner in pieces for piece in inner]), self.key)


def _index(value: Any, sentences: int) -> int:
    if not isinstance(value, int) or not 0 <= value < sentences:
        raise RecordError(
            Reason.MISSING_FIELD,
            f"matched_text_index is {value!r} for {sentences} sentences; use 0 to {sentences - 1}",
        )
    return value


def _document(text: str, key: str) -> Draft:
    if not text.replace(IMAGE_PLACEHOLDER, "").strip():
        raise RecordError(Reason.EMPTY, f"{key} holds no text")
    return Draft(text=text)
