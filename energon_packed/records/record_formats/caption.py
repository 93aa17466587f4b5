"""Images with captions, prompts or question pairs in; alternating user and assistant turns out.

    Caption      {"image": "a.jpg", "caption": "..."}     also with `prompt` or `question` for the user turn
    ImageText    {"image": "a.jpg", "text": "..."}        unless the text contains `<image>`: then it is a document
    Captions     {"images": [...], "prompts": [...], "captions": [...]}    flat, or as lists of lists
    TextCaps     {"image_path": "train/a.jpg", "image_id": "a", "caption_str": "...", "reference_strs": ["...", ...]}
    Transcription  {"audio": "a.wav", "transcription": "..."}   also `transcript`, or `sentence` (Common Voice)
    TextsImages  {"images": [...], "texts": [{"user": "...", "assistant": "...", "source": "..."}]}

Caption and ImageText are Hugging Face image folders, LAION and similar datasets. Without a prompt the user turn is the
image alone. If there are several captions (COCO, Flickr30k), the first is the target and the conversation gets a note.
TextCaps (textvqa.org/textcaps, lmms-lab/TextCaps) has one caption per record, and repeats all captions of the image in
`reference_strs`. Its images are `image_path`, or files with the name of `image_id` and the extension .jpg.
Captions is the input of LLaVA-OneVision-2's offline packer: without placeholders, images precede the first prompt, or
each prompt if `images` is a list of lists. TextsImages is the format of the Cauldron, Docmatix and FineVision.
"""

from itertools import chain
from typing import ClassVar

from energon_packed.errors import Reason, RecordError
from energon_packed.records.fields import (
    COMMON_FIELDS,
    OBJECT,
    Record,
    flatten,
    given,
    is_given,
    missing_field,
    one_text,
    read_objects,
    read_text,
)
from energon_packed.records.media.fields import Media
from energon_packed.records.media.kinds import IMAGE_PLACEHOLDER, MEDIA_KINDS, VIDEO_PLACEHOLDER
from energon_packed.records.media.reference import MediaReference
from energon_packed.records.record_formats.base import PartialConversation, RecordFormat, alternating, question_answer
from energon_packed.records.unused_fields import unsupported

SEVERAL_CAPTIONS = "several captions: the first is the target"
PROMPTS = ("prompt", "question")
_TEXT_CAPS = ("caption_str", "reference_strs")
_PAIR = ("user", "assistant")
_TRANSCRIPTS = ("transcription", "transcript", "sentence")


class Captions(RecordFormat):
    """Alternating prompts and captions."""

    key = "captions"
    fields: ClassVar[frozenset[str]] = COMMON_FIELDS | {"captions", "prompts"}
    images_first: ClassVar[bool] = True

    def read(self, record: Record, media: Media) -> PartialConversation:
        """Read user and assistant turns."""
        captions = [read_text(item, "a caption") for item in flatten(record["captions"])]
        value = record.get("prompts")
        if value is None and is_given(record.get("prompt")):
            # Rejected instead of guessed: without the prompts the captions would be trained with the wrong questions.
            raise unsupported("prompt", remedy="beside captions it is likely meant as prompts; rename it")
        prompts = [read_text(item, "a prompt") for item in flatten(value)] if value is not None else []
        if not captions:
            raise RecordError(Reason.EMPTY, "captions is an empty list")
        prompts = prompts or [""] * len(captions)  # a caption without a prompt: the user turn is the image alone
        if len(prompts) != len(captions):
            raise missing_field(
                f"{len(prompts)} prompts for {len(captions)} captions; one prompt per caption is needed"
            )
        # Placeholders are added here, not by `place_media`: only this format can assign images to several prompts.
        if not any(IMAGE_PLACEHOLDER in text for text in (*prompts, *captions)):
            for turn, count in enumerate(_images_by_turn(media, len(prompts))):
                prompts[turn] = IMAGE_PLACEHOLDER * count + prompts[turn]
            if media.videos and not any(VIDEO_PLACEHOLDER in text for text in (*prompts, *captions)):
                prompts[0] = VIDEO_PLACEHOLDER * len(media.videos) + prompts[0]
        return PartialConversation(alternating([*chain(*zip(prompts, captions, strict=True))]))


def _images_by_turn(media: Media, turns: int) -> list[int]:
    """Number of images before each prompt: all before the first, or the lengths of a list of lists."""
    if media.per_turn is None:
        return [len(media.images)]
    if len(media.per_turn) != turns:
        raise RecordError(
            Reason.IMAGE_COUNT_MISMATCH,
            f"images is a list of {len(media.per_turn)} lists for {turns} prompts; "
            "pass one list per prompt, or placeholders",
        )
    return media.per_turn


class TextsImages(RecordFormat):
    """Question and answer pairs: a list of objects with `user` and `assistant`."""

    key = "texts"
    fields: ClassVar[frozenset[str]] = COMMON_FIELDS | {"texts"}
    images_first: ClassVar[bool] = True

    def matches(self, record: Record) -> bool:
        """Whether `pairs` is a list of objects."""
        pairs = record.get(self.key)
        return isinstance(pairs, list | tuple) and bool(pairs) and isinstance(pairs[0], OBJECT)

    def read(self, record: Record, media: Media) -> PartialConversation:
        """Read user and assistant turns."""
        texts = []
        for pair in read_objects(record[self.key], self.key):
            media.add_unused(pair, frozenset(_PAIR), "an entry of texts")
            texts += [read_text(pair.get(role), f"{role} of texts") for role in _PAIR]
        return PartialConversation(alternating(texts))


class Caption(RecordFormat):
    """An image and its caption."""

    key = "caption"
    fields: ClassVar[frozenset[str]] = COMMON_FIELDS | {"caption", *PROMPTS}
    images_first: ClassVar[bool] = True

    def read(self, record: Record, media: Media) -> PartialConversation:
        """Read a user turn with the image and an assistant turn with the caption."""
        caption = record["caption"]
        # Training on all captions would repeat the image; joined captions are not a caption.
        if isinstance(caption, list | tuple) and caption:
            if len(caption) > 1:
                media.notes.append(SEVERAL_CAPTIONS)
            caption = caption[0]
        prompt = one_text(record, PROMPTS) or ""
        if not prompt and not (media.images or media.videos or media.audios):
            raise RecordError(Reason.MISSING_IMAGE, f"{self.key} has neither an image nor a prompt")
        return question_answer(prompt, read_text(caption, self.key))


class TextCaps(Caption):
    """An image, named by a path or an id, and its caption or reference captions."""

    key = "caption_str"
    fields: ClassVar[frozenset[str]] = COMMON_FIELDS | {*_TEXT_CAPS, "image_path", "image_id", *PROMPTS}

    def matches(self, record: Record) -> bool:
        """Whether one of the fields with captions has a value."""
        return is_given(record.get("caption_str")) or is_given(record.get("reference_strs"))

    def read(self, record: Record, media: Media) -> PartialConversation:
        """Read a user turn with the image and an assistant turn with the caption."""
        name = given(record, _TEXT_CAPS)[0]
        media.unused_fields.update(other for other in _TEXT_CAPS if other != name and is_given(record.get(other)))
        path = record.get("image_path") or (f"{record['image_id']}.jpg" if is_given(record.get("image_id")) else None)
        if path is not None and not media.images:
            media.images = [MediaReference.from_value(path, media.root)]
        return super().read({**record, "caption": record[name]}, media)


class ImageText(RecordFormat):
    """Images, videos or audio files, and a text without placeholders."""

    key = "image"
    fields: ClassVar[frozenset[str]] = COMMON_FIELDS | {"text"}
    images_first: ClassVar[bool] = True

    def matches(self, record: Record) -> bool:
        """Whether there are media, and a text without placeholders."""
        text = record.get("text")
        if not isinstance(text, str) or any(kind.placeholder in text for kind in MEDIA_KINDS.values()):
            return False
        names = [name for kind in MEDIA_KINDS.values() for name in kind.fields]
        return any(is_given(record.get(name)) and record[name] is not True for name in names)

    def read(self, record: Record, media: Media) -> PartialConversation:
        """Read a user turn with the media, and an assistant turn with the text."""
        return question_answer("", record["text"])


class Transcription(RecordFormat):
    """An audio file and its transcript."""

    key = "transcription"
    fields: ClassVar[frozenset[str]] = COMMON_FIELDS | {*_TRANSCRIPTS, *PROMPTS}
    images_first: ClassVar[bool] = True

    def matches(self, record: Record) -> bool:
        """Whether there is an audio file, and one of the fields with a transcript."""
        has_audio = is_given(record.get("audio")) or is_given(record.get("audios"))
        return has_audio and bool(given(record, _TRANSCRIPTS))

    def read(self, record: Record, media: Media) -> PartialConversation:
        """Read a user turn with the audio file, and an assistant turn with the transcript."""
        return question_answer(one_text(record, PROMPTS) or "", one_text(record, _TRANSCRIPTS) or "")
