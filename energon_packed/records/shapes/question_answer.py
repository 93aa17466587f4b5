"""Questions with an answer, with choices or without, with images or without.

    VQAv2, TextVQA, DocVQA    {"image", "question", "answers": ["..."] or [{"answer"}], "multiple_choice_answer"}
    GSM8K                     {"question", "answer"}
    OpenOrca                  {"system_prompt", "question", "response"}
    SQuAD                     {"context", "question", "answers": {"text": [...], "answer_start": [...]}}
    RACE                      {"article", "question", "options": [...], "answer": "B"}
    ScienceQA, MMLU           {"image", "question", "hint", "choices": [...], "answer": 1}
    ARC, CommonsenseQA        {"question", "choices": {"label": [...], "text": [...]}, "answerKey": "B"}
    MedQA                     {"question", "options": {"A": "...", "B": "..."}, "answer_idx": "B", "answer": "..."}
    ChartQA                   {"image", "query", "label": ["14"]}
    xLAM                      {"query", "tools": "[...]", "answers": "[{name, arguments}]"}

`context`, `passage`, `article` and `hint` stand before the question, with a blank line between. Choices follow it, one
a line: `A. ...`; the answer is the line of the right one. Of several answers that differ the most frequent is the
target, the first of them where several are, as VQA's accuracy does; the conversation gets a note. xLAM's answers are
tool calls.
"""

from collections import Counter
from typing import Any, ClassVar

from energon_packed.errors import Reason, RecordError
from energon_packed.records.accounting import COMMON_FIELDS, is_given, unsupported
from energon_packed.records.choices import INDEX_FIELDS, read_choices, right_choice
from energon_packed.records.conversation import Message
from energon_packed.records.fields import OBJECT, Record, joined_texts, one_text, read_text
from energon_packed.records.media_fields import Media
from energon_packed.records.shapes.shape import Draft, Shape
from energon_packed.records.tool_calls import read_tool_calls

SEVERAL_ANSWERS = "several answers: one is the target"
_ANSWERS = ("answer", "response", "multiple_choice_answer")
_BEFORE = ("context", "passage", "article", "hint")
_CHOICES = ("choices", "options")


class QuestionAnswer(Shape):
    """A question and its answer."""

    key = "question"
    fields: ClassVar[frozenset[str]] = COMMON_FIELDS | {
        *("question", "answers", *_ANSWERS, *_BEFORE, *_CHOICES, *INDEX_FIELDS)
    }
    images_lead: ClassVar[bool] = True

    def matches(self, record: Record) -> bool:
        """Whether there is a question and any answer."""
        return record.get(self.key) is not None and any(
            is_given(record.get(name)) for name in (*_ANSWERS, "answers", *INDEX_FIELDS)
        )

    def read(self, record: Record, media: Media) -> Draft:
        """One user turn and one assistant turn."""
        question = joined_texts(record, (*_BEFORE, self.key))
        given = [name for name in _CHOICES if is_given(record.get(name))]
        if len(given) > 1:
            raise unsupported(given[1], remedy=f"it is not read beside {given[0]}; keep one")
        if given:
            choices = read_choices(record[given[0]], given[0])
            answer = right_choice(record, choices)
            question = "\n".join([question, *choices])
        else:
            answer = _answer(record, media)
        return Draft(messages=[Message("user", question), Message("assistant", answer)])


class QueryLabel(Shape):
    """A query and its label: ChartQA."""

    key = "query"
    fields: ClassVar[frozenset[str]] = COMMON_FIELDS | {"query", "label"}
    images_lead: ClassVar[bool] = True

    def matches(self, record: Record) -> bool:
        """Whether there are a query and a label that is text."""
        label = record.get("label")
        return isinstance(record.get("query"), str) and is_given(label) and isinstance(label, str | list | tuple)

    def read(self, record: Record, media: Media) -> Draft:
        """One user turn and one assistant turn."""
        for name in ("response", "answer", "answers"):
            if is_given(record.get(name)):
                raise unsupported(name, remedy="it is not read beside query and label; keep one of them")
        texts = _texts(record["label"])
        if len(set(texts)) > 1:
            media.notes.append(SEVERAL_ANSWERS)
        answer = Counter(texts).most_common(1)[0][0]
        return Draft(messages=[Message("user", record["query"]), Message("assistant", answer)])


class QueryCalls(Shape):
    """A query, tools, and the calls that answer it: xlam-function-calling-60k."""

    key = "query"
    fields: ClassVar[frozenset[str]] = COMMON_FIELDS | {"query", "answers"}

    def matches(self, record: Record) -> bool:
        """Whether there are a query, tools and answers."""
        return all(is_given(record.get(name)) for name in ("query", "tools", "answers"))

    def read(self, record: Record, media: Media) -> Draft:
        """One user turn and one assistant turn with tool calls."""
        calls = read_tool_calls(record["answers"], "answers")
        return Draft(
            messages=[
                Message("user", read_text(record["query"], "query")),
                Message("assistant", "", {"tool_calls": calls}),
            ]
        )


def _answer(record: Record, media: Media) -> str:
    """The answer, or the most frequent of several."""
    for name in INDEX_FIELDS:
        if is_given(record.get(name)):
            raise unsupported(name, remedy="it names one of the choices, and the record has none")
    answers = record.get("answers")
    if isinstance(record.get("answer"), list | tuple) and not is_given(answers):
        answers, record = record["answer"], {**record, "answer": None}
    single = one_text(record, _ANSWERS)
    if not is_given(answers):
        if single is None:
            raise RecordError(Reason.EMPTY, "the answer is empty")
        return single
    texts = _texts(answers)
    if not texts:
        raise RecordError(Reason.EMPTY, "answers holds no text")
    if len({*texts, *([] if single is None else [single])}) > 1:
        media.notes.append(SEVERAL_ANSWERS)
    return single if single is not None else Counter(texts).most_common(1)[0][0]


def _texts(answers: Any) -> list[str]:
    if isinstance(answers, OBJECT):
        answers = answers.get("text")
    answers = [answers] if isinstance(answers, str) else answers
    if not isinstance(answers, list | tuple):
        raise RecordError(Reason.MISSING_FIELD, f"answers is {type(answers).__name__}; use a list of texts")
    return [
        read_text(one.get("answer") if isinstance(one, OBJECT) else one, "an answer of answers") for one in answers
    ]
