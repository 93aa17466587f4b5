"""Lines of speech manifests in; an audio file, or a part of it, as the question, and its transcript as the answer out.

    NeMoManifest   {"audio_filepath": "a.wav", "offset": 1.5, "duration": 2.0, "text": "..."}
    LhotseCut      {"type": "MonoCut", "start": 1.5, "duration": 2.0, "channel": 0, "recording": {"sources": [...]},
                   "supervisions": [{"text": "..."}]}

A manifest of NeMo may also have a question, as `context`, `prompt` or `question`, and the answer as `answer`; paths
start from its folder. A cut of Lhotse is read as `cut.load_audio()` reads it: effects and mixtures are refused.
"""

from typing import Any, ClassVar

from energon_packed.errors import Reason, RecordError
from energon_packed.records.fields import (
    COMMON_FIELDS,
    OBJECT,
    Record,
    given,
    is_given,
    missing_field,
    one_text,
    read_objects,
    read_text,
    shown,
    unsupported_field,
)
from energon_packed.records.media.audio import read_audio
from energon_packed.records.media.fields import Media
from energon_packed.records.record_formats.base import PartialConversation, RecordFormat, question_answer
from energon_packed.records.unused_fields import unsupported

_NAMES = ("audio_filepath", "audio_filename")
_PART = ("offset", "duration")
_QUESTIONS = ("context", "prompt", "question")
_ANSWERS = ("text", "answer")
_NORMALIZED = "normalized_text"
_CUTS = ("MonoCut", "MultiCut", "MixedCut", "PaddingCut")
_SUPERVISION = frozenset(
    (
        *("id", "recording_id", "start", "duration", "channel", "text", "language", "speaker", "gender", "custom"),
        "alignment",
    )
)


class NeMoManifest(RecordFormat):
    """A part of an audio file and its transcript, or a question about it and the answer."""

    key = "audio_filepath"
    fields: ClassVar[frozenset[str]] = COMMON_FIELDS.union(_NAMES, _PART, _QUESTIONS, _ANSWERS, (_NORMALIZED,))
    images_first: ClassVar[bool] = True

    def matches(self, record: Record) -> bool:
        """Whether there is the path of an audio file."""
        return bool(given(record, _NAMES))

    def read(self, record: Record, media: Media) -> PartialConversation:
        """Read a user turn with the audio file, and an assistant turn."""
        if is_given(record.get("text_filepath")):
            raise unsupported("text_filepath", remedy="write the transcript as text")
        if media.audios:
            raise RecordError(Reason.AUDIO_COUNT_MISMATCH, "both audio and audio_filepath are in the record; use one")
        part = {name: record.get(name) for name in _PART}
        media.audios = [read_audio({"path": one_text(record, _NAMES), **part}, media.root)]
        answer = one_text(record, _ANSWERS)
        if answer is None:
            answer = one_text(record, (_NORMALIZED,))
        elif is_given(record.get(_NORMALIZED)):
            media.unused_fields.add(_NORMALIZED)
        if answer is None:
            raise RecordError(Reason.EMPTY, "the transcript is empty")
        return question_answer(one_text(record, _QUESTIONS) or "", answer)


class LhotseCut(RecordFormat):
    """A cut with its recording and a supervision."""

    key = "cut"
    fields: ClassVar[frozenset[str]] = COMMON_FIELDS | {
        *("type", "start", "duration", "channel", "recording", "supervisions", "features", "tracks"),
    }
    images_first: ClassVar[bool] = True

    def matches(self, record: Record) -> bool:
        """Whether the type is a type of cuts."""
        return record.get("type") in _CUTS and any(
            name in record for name in ("supervisions", "tracks", "num_samples")
        )

    def read(self, record: Record, media: Media) -> PartialConversation:
        """Read a user turn with a part of the recording, and an assistant turn with the text of the supervision."""
        if record["type"] != "MonoCut":
            raise unsupported_field(f"a {record['type']} is not supported; save its audio with cuts.save_audios()")
        supervisions = record["supervisions"]
        if not is_given(supervisions):
            raise RecordError(Reason.EMPTY, "the cut has no supervision")
        if len(read_objects(supervisions, "supervisions")) > 1:
            raise unsupported_field(
                f"the cut has {len(supervisions)} supervisions; write a cut for each: cuts.trim_to_supervisions()"
            )
        media.add_unused(supervisions[0], _SUPERVISION, "a supervision")
        path = _source(record.get("recording"), record.get("channel"))
        part = {"offset": record.get("start"), "duration": record.get("duration")}
        media.audios = [read_audio({"path": path, **part}, media.root)]
        return question_answer("", read_text(supervisions[0].get("text"), "text of the supervision"))


def _source(recording: Any, channel: Any) -> Any:
    """Return the path of the file with a channel of a recording.

    Raises:
        RecordError: the recording is not a file, has effects, or the file has other channels, too.
    """
    if not isinstance(recording, OBJECT):
        raise missing_field("the cut has no recording; write cuts of recordings, and not of features alone")
    if is_given(recording.get("transforms")):
        raise unsupported_field(
            f"the recording has transforms, {shown(recording['transforms'])}; save its audio with cuts.save_audios()"
        )
    for source in read_objects(recording.get("sources"), "sources of the recording"):
        channels = source.get("channels")
        if not isinstance(channels, list | tuple) or channel not in channels:
            continue
        if len(channels) > 1:
            raise unsupported_field(
                f"the cut has channel {shown(channel)} of {len(channels)} channels of its file, and channels are "
                "averaged; save its audio with cuts.save_audios()"
            )
        if source.get("type") not in ("file", "url"):
            raise RecordError(
                Reason.UNSUPPORTED_MEDIA,
                f"the source {shown(source.get('source'))} is a {shown(source.get('type'))}, which is not run; save "
                "its audio with cuts.save_audios()",
            )
        return source.get("source")
    raise missing_field(f"no source of the recording has channel {shown(channel)}")
