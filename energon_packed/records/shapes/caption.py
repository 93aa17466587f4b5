"""One image with its text: Hugging Face image folders, LAION and what follows them.

    {"image": "a.jpg", "caption": "..."}     also with `prompt` or `question` for the user's turn
    {"image": "a.jpg", "text": "..."}        unless the text has its own `<image>`: then it is a document

Without a prompt the user's turn is the image alone. Of several captions (COCO, Flickr30k) the first is the target; the
conversation gets a note.
"""

from typing import ClassVar

from energon_packed.errors import Reason, RecordError
from energon_packed.records.conversation import IMAGE_PLACEHOLDER, Message
from energon_packed.records.fields import COMMON_FIELDS, Record, is_given, one_text, read_text
from energon_packed.records.media_fields import Media
from energon_packed.records.shapes.shape import Draft, Shape

SEVERAL_CAPTIONS = "several captions: the first is the target"
_PROMPTS = ("prompt", "question")


class Caption(Shape):
    """`caption`."""

    key = "caption"
    fields: ClassVar[frozenset[str]] = COMMON_FIELDS | {"caption", *_PROMPTS}
    images_lead: ClassVar[bool] = True

    def read(self, record: Record, media: Media) -> Draft:
        """A user turn for the image and an assistant turn with the caption."""
        caption = record[self.key]
        if isinstance(caption, list | tuple) and caption:
            if len(caption) > 1:
                media.notes.append(SEVERAL_CAPTIONS)
            caption = caption[0]
        prompt = one_text(record, _PROMPTS) or ""
        if not prompt and not (media.images or media.videos):
            raise RecordError(Reason.MISSING_IMAGE, f"{self.key} has neither an image nor a prompt")
        text = read_text(caption, self.key)
        return Draft(messages=[Message("user", prompt), Message("assistant", text)])


class ImageText(Shape):
    """`text` beside images that it does not place."""

    key = "image"
    fields: ClassVar[frozenset[str]] = COMMON_FIELDS | {"text"}
    images_lead: ClassVar[bool] = True

    def matches(self, record: Record) -> bool:
        """Whether there are images and a text without placeholders."""
        text = record.get("text")
        has_images = is_given(record.get("image")) or is_given(record.get("images"))
        return has_images and isinstance(text, str) and IMAGE_PLACEHOLDER not in text and "<video>" not in text

    def read(self, record: Record, media: Media) -> Draft:
        """A user turn for the images and an assistant turn with the text."""
        return Draft(messages=[Message("user", ""), Message("assistant", record["text"])])
