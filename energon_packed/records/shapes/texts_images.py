"""Question and answer pairs about the images of a record: the Cauldron, Docmatix, FineVision.

    {"images": [...], "texts": [{"user": "...", "assistant": "...", "source": "..."}]}

Images stand before the first user turn unless a text places them with `<image>`.
"""

from typing import ClassVar

from energon_packed.records.conversation import Message
from energon_packed.records.fields import COMMON_FIELDS, OBJECT, Record, read_objects, read_text, unused_fields
from energon_packed.records.media_fields import Media
from energon_packed.records.shapes.shape import Draft, Shape

_PAIR = frozenset(("user", "assistant"))


class TextsImages(Shape):
    """A list of objects with `user` and `assistant`."""

    key = "texts"
    fields: ClassVar[frozenset[str]] = COMMON_FIELDS | {"texts"}
    images_lead: ClassVar[bool] = True

    def matches(self, record: Record) -> bool:
        """Whether `texts` is a list of objects."""
        texts = record.get(self.key)
        return isinstance(texts, list | tuple) and bool(texts) and isinstance(texts[0], OBJECT)

    def read(self, record: Record, media: Media) -> Draft:
        """User and assistant turns."""
        messages = []
        for pair in read_objects(record[self.key], self.key):
            media.unused_fields.update(unused_fields(pair, _PAIR, "an entry of texts"))
            messages += [
                Message(role, read_text(pair.get(role), f"{role} of texts")) for role in ("user", "assistant")
            ]
        return Draft(messages=messages)
