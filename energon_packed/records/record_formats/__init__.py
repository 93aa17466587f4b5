"""Record formats: a raw record in, a PartialConversation out, made by the first format of RECORD_FORMATS that matches.

base.py has the base classes RecordFormat and GroupFormat; messages.py, caption.py, question_answer.py,
video_datasets.py, speech.py, document.py and trajectory.py have the formats of samples, preference.py and retrieval.py
of groups.
To add a record format, write a subclass of `RecordFormat` with `@register_record_format`.
"""

import re

from energon_packed.records.fields import OBJECT, Record, given, key_names, missing_field
from energon_packed.records.media.unlisted import refers_to_media
from energon_packed.records.record_formats.base import PartialConversation, RecordFormat
from energon_packed.records.record_formats.caption import (
    Caption,
    Captions,
    ImageText,
    TextCaps,
    TextsImages,
    Transcription,
)
from energon_packed.records.record_formats.document import Document, Interleaved, SentencesImages, Tokens
from energon_packed.records.record_formats.messages import Alternating, Contents, Messages, ShareGPT, Transcript
from energon_packed.records.record_formats.preference import Comparison, Members, Pair, Ranking
from energon_packed.records.record_formats.question_answer import (
    GQA,
    Instruction,
    Problem,
    PromptCompletion,
    QueryCalls,
    QueryLabel,
    QuestionAnswer,
    ReasonedAnswer,
)
from energon_packed.records.record_formats.retrieval import Embedding, Reranker, SentencePair
from energon_packed.records.record_formats.speech import LhotseCut, NeMoManifest
from energon_packed.records.record_formats.trajectory import Branch, CompletionIds, Responses, Rollout
from energon_packed.records.record_formats.video_datasets import KeyframeCaptions, QuestionList, VideoProblem

# Names of string fields that are metadata, so that the suggested `map` does not contain them.
_NO_TEXT = re.compile(
    r"(?:.*_)?(?:id|key|name|url|path|file|hash|state|status|source|type|kind|lang|language|category|domain|date|model|"
    r"timestamp|license|split|version)"
)
_BOXES = ("objects", "bboxes", "bbox", "bounding_boxes", "polygons")
# Names of a question and of its answer, from which a `map` is suggested.
_QUESTION = re.compile(r"(?i:(?:.*_)?(?:q|question|query|prompt|instruction|input|problem|user|human|request)s?)")
_ANSWER = re.compile(r"(?i:(?:.*_)?(?:a|answer|response|output|completion|assistant|reply|target|solution)s?)")
# The order decides records that match several formats: groups come first, since their records also have turns, then
# explicit turns, a plain document last.
# pair               {"prompt", "chosen", "rejected"}, {"messages", "rejected_response"}            TRL, ms-swift
# comparison         {"prompt", "response_1", "response_2", "preference_strength"}                  HelpSteer2, SHP
# ranking            {"instruction", "completions": [{"response", "overall_score"}]}                UltraFeedback
# embedding          {"query" or "anchor", "positive" or "pos", "negative" or "neg"}                BGE, MS MARCO
# reranker           {"query", "documents", "labels"}
# sentence_pair      {"sentence1", "sentence2", "score"}, {"premise", "hypothesis", "label"}        STS, NLI
# messages           {"messages": [{"role", "content": "... <image> ..." or typed parts}], "images": [...]}
# sharegpt           {"conversations" or "conversation": [{"from", "value"}], "images": [...]}
# contents           {"contents": [{"role", "parts": [{"text"}, {"inline_data"}]}]}                 Gemini
# audio_filepath     {"audio_filepath", "offset", "duration", "text"}                               NeMo
# cut                {"type": "MonoCut", "start", "duration", "recording", "supervisions"}          Lhotse
# keyframe_captions  {"video_path", "captions": [{"idx", "content"}]}                              ShareGPT4Video
# captions           {"images": [...], "prompts": [...], "captions": [...]}  flat or list of lists, several turns
# completion_ids     {"prompt_ids", "completion_ids", "completion_mask"}                              TRL, verifiers
# responses          {"prompts", "responses", "response_mask", "attention_mask"}                     verl
# response_length    {"tokens", "response_length", "loss_mask"}                                      slime
# token_ids          {"token_ids", "mask"}                                                           prime-rl
# tokens             {"input_ids": [...], "labels": [...] or "loss_mask": [...]}
# instruction        {"instruction", "input" or "context", "output" or "response"}                  Alpaca, Dolly
# question_list      {"video", "QA": [{"i", "q", "a"}]}                                            VideoChat2-IT
# video_problem      {"problem", "options", "data_type", "path", "process", "solution"}            Video-R1
# problem            {"problem", "solution" or "generated_solution" or "answer"}                    NuminaMath
# reasoned_answer    {"question", "thinking_trajectories", "attempt"}                               s1K, medical-o1
# question_answer    {"question", "answer", "imageId"}                                              GQA
#                    {"query", "tools", "answers"} (xLAM), {"question", "answer", "choices"}        VQA, ScienceQA
#                    {"query", "label"}                                                             ChartQA
# prompt_completion  {"prompt", "completion" or "response"}, {"query", "response", "history"}       TRL, ms-swift
# texts_images       {"images": [...], "texts": [{"user", "assistant"}]}                            the Cauldron
# alternating        {"data": ["question", "answer", ...]}                                          UltraChat
# interleaved        {"texts": ["...", None], "images": [None, "a.jpg"]}, {"text_list", "image_info"}  OBELICS, mmc4
# caption            {"image", "caption"}, {"image", "text"}, {"image_path", "caption_str"}          TextCaps
# transcription      {"audio", "transcription" or "transcript" or "sentence"}                        audiofolder
# transcript         {"system", "chat": "USER: ... ASSISTANT: ..."}                                 Glaive
# document           {"text" or "content": "..."}                            every token supervised
# members            {"members": [{"role", "label", ...}]}                   groups of other forms, from an adapter
RECORD_FORMATS: list[RecordFormat] = [
    Pair(),
    Comparison(),
    Ranking(),
    Embedding(),
    Reranker(),
    SentencePair(),
    Messages(),
    ShareGPT(),
    Contents(),
    NeMoManifest(),
    LhotseCut(),
    KeyframeCaptions(),
    Captions(),
    CompletionIds(),
    Responses(),
    Rollout(),
    Branch(),
    Tokens(),
    Instruction(),
    QuestionList(),
    VideoProblem(),
    Problem(),
    QueryCalls(),
    ReasonedAnswer(),
    GQA(),
    QuestionAnswer(),
    PromptCompletion(),
    QueryLabel(),
    TextsImages(),
    Alternating(),
    Interleaved(),
    SentencesImages(),
    Caption(),
    TextCaps(),
    Transcription(),
    ImageText(),
    Transcript(),
    Document(),
    Members(),
]

_MARKS = frozenset(name for record_format in RECORD_FORMATS for name in record_format.marks or ())


def register_record_format(record_format: type[RecordFormat]) -> type[RecordFormat]:
    """Class decorator that registers a custom record format; it is tried before the built-in formats."""
    RECORD_FORMATS.insert(0, record_format())
    return record_format


def find_record_format(record: Record) -> RecordFormat:
    """Find the first record format that matches.

    Raises:
        RecordError: `missing_field` if no format matches.
    """
    has_marks = not _MARKS.isdisjoint(record)  # one test for all formats of groups: almost no record is a group
    for record_format in RECORD_FORMATS:
        if (has_marks or record_format.marks is None) and record_format.matches(record):
            return record_format
    names = key_names(record)
    raise missing_field(
        f"no record format has the fields {names}{_hint(record)}" if names else "the record has no fields"
    )


def _hint(record: Record) -> str:
    """Suggest a remedy: a list of records in the record, or fields that a `map` can name."""
    record = {str(name): value for name, value in record.items()}  # an adapter may return other names
    # Records of a known format without their question or answer.
    for name, value in record.items():
        is_empty = value is None or (isinstance(value, str) and not value)
        if is_empty and (_QUESTION.fullmatch(name) or _ANSWER.fullmatch(name)):
            return f"; {name} is {'null' if value is None else 'empty'}"
    if hint := _boxes_hint(record):
        return hint
    lists = [
        name for name, value in record.items() if isinstance(value, list) and value and isinstance(value[0], OBJECT)
    ]
    if lists:
        return f"; if {' or '.join(lists)} is the list of records, write it alone to a file"
    strings = {
        name: value for name, value in record.items() if isinstance(value, str) and not _NO_TEXT.fullmatch(name)
    }
    images = [name for name, value in strings.items() if refers_to_media(name, value)]
    # A list may be several turns.
    texts = [name for name in strings if name not in images]
    texts += [name for name, value in record.items() if isinstance(value, list | tuple) and value]
    users, assistants = ([name for name in texts if pattern.fullmatch(name)] for pattern in (_QUESTION, _ANSWER))
    image = f",image={images[0]}" if len(images) == 1 else ""
    if len(texts) < 2:
        return ""
    # A wrong map would train on questions, so it is suggested only if each text has one possible meaning.
    if len(texts) == 2 and len(users) == len(assistants) == 1:
        return f"; try `map=user={users[0]},assistant={assistants[0]}{image}`"
    return f"; name the question and the answer with `map=user=FIELD,assistant=FIELD{image}`"


def _boxes_hint(record: Record) -> str:
    """Write an adapter for images with boxes or polygons (LVIS), whose answer is the JSON of them; "" for others."""
    image, boxes = (next(iter(given(record, names)), None) for names in (("images", "image"), _BOXES))
    if image is None or boxes is None:
        return ""
    return (
        f"; to train on {boxes}, convert the coordinates to those of the model in an adapter, such as --adapter "
        "boxes:answer with this line in boxes.py: def answer(record): import json; return "
        f'{{"{image}": record["{image}"], "question": "List the objects.", "answer": json.dumps(record["{boxes}"])}}'
    )


__all__ = ["RECORD_FORMATS", "PartialConversation", "RecordFormat", "find_record_format", "register_record_format"]
