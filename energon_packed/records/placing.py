"""Places of a record's images and videos in its turns: each gets a placeholder, or the record is rejected."""

from energon_packed.errors import Reason, RecordError
from energon_packed.records.conversation import IMAGE_PLACEHOLDER
from energon_packed.records.media_fields import VIDEO_PLACEHOLDER, Media
from energon_packed.records.shapes import Draft, Shape

NO_PLACEHOLDER = "no placeholder: images stand before the first user turn"
"""Note of a conversation whose images or videos stand before the first user turn because nothing says where."""


def place_media(draft: Draft, media: Media, shape: Shape) -> None:
    """Give images and videos without any placeholder their place, and put frames in the place of each `<video>`.

    Args:
        draft: of a record; its texts are changed.
        media: of the record; its images are put in order.
        shape: of the record; says whether images without placeholders are what it means.

    Raises:
        RecordError: media are given twice, or placeholders and videos do not match.
    """
    if any("<img>" in message.content for message in draft.messages):  # of shapes that have no turns of their own
        draft.messages = [message._replace(content=media.take_tagged(message.content)) for message in draft.messages]
    if media.inline and media.images:
        raise RecordError(
            Reason.IMAGE_COUNT_MISMATCH, "images stand both in the messages and in the images field; use one"
        )
    if draft.input_ids is not None:
        if media.videos:
            raise RecordError(Reason.UNSUPPORTED_MEDIA, "a record of input_ids has videos; pass the frames as images")
        return
    if media.elsewhere and not (media.images or media.inline or media.videos):
        raise RecordError(
            Reason.UNSUPPORTED_MEDIA,
            f"{media.elsewhere[0]} names an image that the record does not hold; give its path as image, with a `map` "
            "or an `adapter`",
        )
    if not (media.images or media.has_videos):
        return
    texts = [draft.text] if draft.text is not None else [message.content for message in draft.messages]
    texts = _stand_for_frames(texts, media)
    leading = _without_placeholder(texts, media)
    if leading and draft.messages:
        first = next((place for place, message in enumerate(draft.messages) if message.role == "user"), None)
        if first is not None:
            texts[first] = leading + texts[first]
            if not shape.images_lead:
                media.notes.append(NO_PLACEHOLDER)
    if media.has_videos:
        texts = media.place(texts)
    if draft.text is not None:
        draft.text = texts[0]
    else:
        draft.messages = [
            message if message.content == text else message._replace(content=text)
            for message, text in zip(draft.messages, texts, strict=True)
        ]


def _without_placeholder(texts: list[str], media: Media) -> str:
    """Placeholders of the images, and of the videos, of which no text places any."""
    found = ""
    for placeholder, size in ((IMAGE_PLACEHOLDER, len(media.images)), (VIDEO_PLACEHOLDER, len(media.videos))):
        if not any(placeholder in text for text in texts):
            found += placeholder * size
    return found


def _stand_for_frames(texts: list[str], media: Media) -> list[str]:
    """Texts with `<video>` where one placeholder stands for the frames of a video.

    `<image>` does, where the record has videos, no images, and no `<video>`. `<video>` does, where the frames are in
    the images field.
    """
    images = sum(text.count(IMAGE_PLACEHOLDER) for text in texts)
    videos = sum(text.count(VIDEO_PLACEHOLDER) for text in texts)
    if media.videos and not media.images and not videos and images == len(media.videos):
        return [text.replace(IMAGE_PLACEHOLDER, VIDEO_PLACEHOLDER) for text in texts]
    if not media.videos and len(media.images) > 1 and videos == 1 and not images:
        media.videos, media.images = [media.images], []
        media.has_videos = media.is_video = True
    elif media.is_video and not media.videos and len(media.images) > 1 and images == 1 and not videos:
        return [text.replace(IMAGE_PLACEHOLDER, IMAGE_PLACEHOLDER * len(media.images)) for text in texts]
    return texts
