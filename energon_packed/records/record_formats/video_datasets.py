"""Records of video datasets in; user and assistant turns, with a video or image, out.

    KeyframeCaptions  ShareGPT4Video  {"video_path": "panda/a.mp4", "captions": [{"idx": "1", "content": "..."},
                                       {"idx": "-1", "content": "..."}], "timestamp": [...], "zip_folder": "..."}
    QuestionList      VideoChat2-IT   {"video": "a.mp4", "QA": [{"i": "...", "q": "...", "a": "..."}]}
    VideoProblem      Video-R1        {"problem", "options": ["A. ...", ...], "data_type": "video", "path": "./a.mp4",
                                       "process": "<think>...</think>", "solution": "<answer>A</answer>"}

In ShareGPT4Video, the caption with the index -1 describes the whole video and is the target; the others describe the
changes between keyframes and are not used. The `i` of VideoChat2-IT becomes the system prompt, as in its training
code. In Video-R1, options follow the problem as lines, and `process` precedes the solution, as in its supervised
training; its prompt about thinking is not part of the data and is not added.
"""

from typing import Any, ClassVar

from energon_packed.errors import Reason, RecordError
from energon_packed.records.conversation import Message
from energon_packed.records.fields import (
    COMMON_FIELDS,
    OBJECT,
    Record,
    given,
    is_given,
    missing_field,
    one_text,
    read_list,
    read_objects,
    read_text,
    unsupported_field,
)
from energon_packed.records.media.fields import Media
from energon_packed.records.media.reference import MediaReference
from energon_packed.records.media.video_fields import read_videos
from energon_packed.records.record_formats.base import PartialConversation, RecordFormat, alternating, question_answer
from energon_packed.records.record_formats.caption import PROMPTS
from energon_packed.records.unused_fields import unsupported

WHOLE_VIDEO = "captions of keyframes not used: the caption of the whole video is the target"
_CAPTION = frozenset(("idx", "content"))
_WHOLE = "-1"
_QUESTION = frozenset(("i", "q", "a"))


class KeyframeCaptions(RecordFormat):
    """Captions of keyframes and of the whole video."""

    key = "captions"
    fields: ClassVar[frozenset[str]] = COMMON_FIELDS | {"captions", "video_path", *PROMPTS}
    images_first: ClassVar[bool] = True

    def matches(self, record: Record) -> bool:
        """Whether `captions` is a list of objects with an index and a content."""
        captions = record.get(self.key)
        return isinstance(captions, list | tuple) and bool(captions) and _has_keys(captions[0], _CAPTION)

    def read(self, record: Record, media: Media) -> PartialConversation:
        """Read a user turn with the video and an assistant turn with the caption of the whole video."""
        captions = read_objects(record[self.key], self.key)
        for caption in captions:
            media.add_unused(caption, _CAPTION, "a caption")
        whole = [caption for caption in captions if str(caption.get("idx")) == _WHOLE]
        if len(whole) != 1:
            raise missing_field(f"captions has {len(whole)} entries with idx {_WHOLE}, the whole video; 1 is needed")
        if len(captions) > 1:
            media.notes.append(WHOLE_VIDEO)
        _add_videos(record, "video_path", media)
        prompt = one_text(record, PROMPTS) or ""
        return question_answer(prompt, read_text(whole[0].get("content"), "content of a caption"))


class QuestionList(RecordFormat):
    """A list of questions and answers, with an instruction."""

    key = "QA"
    fields: ClassVar[frozenset[str]] = COMMON_FIELDS | {"QA"}
    images_first: ClassVar[bool] = True

    def matches(self, record: Record) -> bool:
        """Whether `QA` is a list of objects with a question and an answer."""
        pairs = record.get(self.key)
        return isinstance(pairs, list | tuple) and bool(pairs) and _has_keys(pairs[0], _QUESTION - {"i"})

    def read(self, record: Record, media: Media) -> PartialConversation:
        """Read the instruction as system turn, then user and assistant turns."""
        texts, instructions = [], set()
        for pair in read_objects(record[self.key], self.key):
            media.add_unused(pair, _QUESTION, "an entry of QA")
            texts += [
                read_text("" if pair.get("q") is None else pair["q"], "q of QA"),
                read_text(pair.get("a"), "a of QA"),
            ]
            if is_given(pair.get("i")):
                instructions.add(read_text(pair["i"], "i of QA"))
        if len(instructions) > 1:
            raise unsupported_field("the entries of QA have different `i`; a record has one system prompt")
        return PartialConversation([*(Message("system", text) for text in instructions), *alternating(texts)])


class VideoProblem(RecordFormat):
    """A problem about a video or image, with its options, reasoning and solution."""

    key = "problem"
    fields: ClassVar[frozenset[str]] = COMMON_FIELDS | {
        *("problem", "solution", "answer", "process", "options", "path", "data_type", "problem_type")
    }
    images_first: ClassVar[bool] = True

    def matches(self, record: Record) -> bool:
        """Whether there is a problem about a video or image, with a solution or an answer."""
        if record.get("data_type") not in ("video", "image") or not is_given(record.get(self.key)):
            return False
        return is_given(record.get("solution")) or is_given(record.get("answer"))

    def read(self, record: Record, media: Media) -> PartialConversation:
        """Read a user turn and an assistant turn."""
        if record["data_type"] == "video":
            _add_videos(record, "path", media)
        elif is_given(record.get("path")):
            if media.images:
                raise unsupported("path", remedy="the record lists its images elsewhere, too; keep one of the fields")
            media.images = [MediaReference.from_value(record["path"], media.root)]
        lines = [read_text(record[self.key], self.key)]
        if is_given(record.get("options")):
            lines += [read_text(option, "an option") for option in read_list(record["options"], "options")]
        name = "solution" if is_given(record.get("solution")) else "answer"
        if name == "solution" and is_given(record.get("answer")):
            media.unused_fields.add("answer")  # repeats the result of the solution
        target = [read_text(record[field], field) for field in given(record, ("process", name))]
        return question_answer("\n".join(lines), "\n".join(target))


def _has_keys(value: Any, keys: frozenset[str]) -> bool:
    return isinstance(value, OBJECT) and value.keys() >= keys


def _add_videos(record: Record, name: str, media: Media) -> None:
    """Read the videos of a field of the format, in place of a video field.

    Raises:
        RecordError: `missing_video` if the record has no video; `unsupported_field` if both fields have videos.
    """
    if is_given(record.get(name)):
        if media.videos:
            raise unsupported(name, remedy="the record lists its videos elsewhere, too; keep one of the fields")
        media.set_videos(read_videos(record[name], name, media.root))
    elif not media.videos:
        raise RecordError(Reason.MISSING_VIDEO, f"the record has no video: neither {name} nor video or videos")
