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

Problems with a solution, as sets of mathematics have them.

    MATH, NuminaMath-CoT  {"problem", "solution", "level", "type"}
    OpenMathInstruct-2    {"problem", "generated_solution", "expected_answer"}
    DeepScaleR            {"problem", "solution", "answer"}
    AIME                  {"problem", "answer"}

The solution is the target. An `answer` or `expected_answer` beside it repeats its result and is counted as not used.

Instructions with an answer: Alpaca, Dolly and what follows them.

    Alpaca (tatsu-lab/alpaca)                {"instruction", "input", "output", "text"}
    LLaMA-Factory's alpaca format            {"instruction", "input", "output", "system", "history": [[q, a]]}
    Dolly (databricks/databricks-dolly-15k)  {"instruction", "context", "response", "category"}
    M3IT (MMInstruction/M3IT)                {"instruction", "inputs", "outputs", "image_base64_str"}

The user's turn is the instruction, a blank line, and `input` or `context` where there is one. Alpaca's own preamble
("Below is an instruction ...") and its `text`, which repeats the record inside it, are not used: the chat template
takes their place.

A prompt and what follows it, as texts or as lists of messages.

    TRL              {"prompt": "...", "completion": "..."} or {"prompt": [messages], "completion": [messages]}
    prompt/response  {"prompt", "response"}
    ms-swift         {"query", "response", "history": [[question, answer]], "system"}
    input/output     {"input", "output"}; {"input", "target"} of Firefly, {"inputs", "targets"} of FLAN and Aya,
                     {"input_text", "output_text"} of PaLM on Vertex
    definition       of a task stands before inputs, with a blank line between, as in Natural Instructions

Texts become a user turn and an assistant turn. In lists of messages, assistant turns of the prompt are context, not
targets: TRL computes the loss on the completion. `label` true or false is KTO's preference data: out of
scope.
"""

from collections import Counter
from typing import Any, ClassVar

from energon_packed.errors import Reason, RecordError
from energon_packed.records.conversation import Message
from energon_packed.records.fields import (
    COMMON_FIELDS,
    OBJECT,
    Record,
    is_given,
    joined_texts,
    one_text,
    read_text,
    unsupported,
)
from energon_packed.records.media_fields import Media
from energon_packed.records.record_formats.base import PartialConversation, RecordFormat
from energon_packed.records.turns import read_history, read_messages, read_tool_calls

SEVERAL_ANSWERS = "several answers: one is the target"
_ANSWERS = ("answer", "response", "multiple_choice_answer")
_BEFORE = ("context", "passage", "article", "hint")
_CHOICES = ("choices", "options")
INDEX_FIELDS = ("answerKey", "answer_idx", "answer_index", "correct_choice_idx")
_SOLUTIONS = ("solution", "generated_solution")
_RESULT = "answer"
_OUTPUTS = ("output", "response", "outputs")
_INPUTS = ("input", "context", "inputs")
_PAIRS = (
    ("prompt", "completion"),
    ("prompt", "response"),
    ("query", "response"),
    ("input", "output"),
    ("input", "target"),
    ("inputs", "targets"),
    ("input_text", "output_text"),
)
_PROMPTS = frozenset(prompt for prompt, _ in _PAIRS)
_NAMES = tuple(dict.fromkeys(name for pair in _PAIRS for name in pair))


class Problem(RecordFormat):
    """A problem and its solution."""

    key = "problem"
    fields: ClassVar[frozenset[str]] = COMMON_FIELDS | {"problem", *_SOLUTIONS, _RESULT}
    images_first: ClassVar[bool] = True

    def matches(self, record: Record) -> bool:
        """Whether there is a problem and a solution or an answer."""
        return is_given(record.get(self.key)) and any(is_given(record.get(name)) for name in (*_SOLUTIONS, _RESULT))

    def read(self, record: Record, media: Media) -> PartialConversation:
        """One user turn and one assistant turn."""
        solution = one_text(record, _SOLUTIONS)
        if solution is not None and is_given(record.get(_RESULT)):
            media.unused_fields.add(_RESULT)
        target = solution if solution is not None else read_text(record.get(_RESULT), _RESULT)
        if not target.strip():
            raise RecordError(Reason.EMPTY, "the solution is empty")
        return PartialConversation(
            messages=[Message("user", read_text(record[self.key], self.key)), Message("assistant", target)]
        )


class Instruction(RecordFormat):
    """One instruction, its input and its answer."""

    key = "instruction"
    fields: ClassVar[frozenset[str]] = COMMON_FIELDS | {"instruction", "history", *_OUTPUTS, *_INPUTS}
    images_first: ClassVar[bool] = True

    def matches(self, record: Record) -> bool:
        """Whether there is an instruction and an answer."""
        return is_given(record.get(self.key)) and any(record.get(name) is not None for name in _OUTPUTS)

    def read(self, record: Record, media: Media) -> PartialConversation:
        """The turns of the history, one user turn and one assistant turn."""
        answer = one_text(record, _OUTPUTS)
        if answer is None:
            raise RecordError(Reason.EMPTY, f"none of {', '.join(_OUTPUTS)} has a text")
        question = joined_texts(record, (self.key, *_INPUTS))
        return PartialConversation(
            messages=[*read_history(record), Message("user", question), Message("assistant", answer)]
        )


class PromptCompletion(RecordFormat):
    """One prompt and one completion."""

    key = "prompt"
    fields: ClassVar[frozenset[str]] = COMMON_FIELDS | {"history", "definition", *_NAMES}
    images_first: ClassVar[bool] = True

    def matches(self, record: Record) -> bool:
        """Whether one of the pairs is there."""
        return _pair(record) is not None

    def read(self, record: Record, media: Media) -> PartialConversation:
        """The turns of the history, the prompt and the completion."""
        pair = _pair(record)
        assert pair is not None
        if isinstance(record.get("label"), bool):
            raise unsupported("label", remedy="preference data is out of scope; keep the completions to learn from")
        for name in _NAMES:
            if name not in pair and is_given(record.get(name)):
                raise unsupported(
                    name, remedy=f"it is not read beside {pair[0]} and {pair[1]}; name fields with a `map`"
                )
        prompt, completion = (_prompt_messages(record[name], name, media) for name in pair)
        if is_given(record.get("definition")):
            if not isinstance(record[pair[0]], str):
                raise unsupported("definition", remedy=f"{pair[0]} is a list of messages; write it as the system turn")
            prompt = [Message("user", joined_texts(record, ("definition", pair[0])))]
        context = [message._replace(weight=0.0) if message.role == "assistant" else message for message in prompt]
        return PartialConversation(messages=[*read_history(record), *context, *completion])


def _pair(record: Record) -> tuple[str, str] | None:
    """The names of prompt and completion in this record."""
    return next((pair for pair in _PAIRS if all(is_given(record.get(name)) for name in pair)), None)


def _prompt_messages(value: Any, name: str, media: Media) -> list[Message]:
    if isinstance(value, list | tuple):
        return read_messages(value, name, media)
    role = "user" if name in _PROMPTS else "assistant"
    return [Message(role, read_text(value, name))]


def read_choices(value: Any, what: str) -> list[str]:
    """Lines `A. text`.

    Args:
        value: a list of texts, {"label": [...], "text": [...]}, or {"A": text}.
        what: the field, for errors.

    Raises:
        RecordError: the value has another form.
    """
    if not isinstance(value, OBJECT):
        if not isinstance(value, list | tuple):
            raise RecordError(Reason.MISSING_FIELD, f"{what} is {type(value).__name__}; use a list of texts")
        labels, texts = [_letter(place) for place in range(len(value))], list(value)
    elif isinstance(value.get("text"), list | tuple):
        texts = list(value["text"])
        given = value.get("label")
        labels = list(given) if isinstance(given, list | tuple) and given else [_letter(n) for n in range(len(texts))]
    else:
        pairs = [(label, text) for label, text in value.items() if text is not None]
        labels, texts = [label for label, _ in pairs], [text for _, text in pairs]
    if len(labels) != len(texts):
        raise RecordError(Reason.MISSING_FIELD, f"{what} has {len(labels)} labels for {len(texts)} texts")
    return [f"{label}. {read_text(text, f'one of {what}')}" for label, text in zip(labels, texts, strict=True)]


def right_choice(record: Record, choices: list[str]) -> str:
    """The line of the right choice.

    Args:
        record: with an index from 0, a label or the text of a choice, in `answer` or one of `INDEX_FIELDS`. An index
            may be text (AI2D).
        choices: of `read_choices`.

    Raises:
        RecordError: nothing names one of the choices, or two fields name different ones.
    """
    given = [name for name in ("answer", *INDEX_FIELDS) if record.get(name) is not None]
    found = {name: _find(record[name], choices) for name in given}
    if not found:
        raise RecordError(
            Reason.MISSING_FIELD, f"no answer to the choices; use answer or one of {', '.join(INDEX_FIELDS)}"
        )
    for name, place in found.items():
        if place is None:
            raise RecordError(
                Reason.MISSING_FIELD,
                f"{name} {repr(record[name])[:80]} is none of {len(choices)} choices; "
                "use an index from 0, a label or a text",
            )
    if len(set(found.values())) > 1:
        raise unsupported(given[1], remedy=f"it differs from {given[0]}; keep one")
    for name in ("answers", "response", "multiple_choice_answer"):
        if record.get(name) is not None:
            raise unsupported(name, remedy="it is not read beside choices; keep answer")
    return choices[next(place for place in found.values() if place is not None)]


def _find(value: Any, choices: list[str]) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return value if 0 <= value < len(choices) else None
    parts = [choice.split(". ", 1) for choice in choices]
    for column in (0, 1):
        found = [place for place, part in enumerate(parts) if part[column] == value]
        if len(found) == 1:
            return _checked(value, found[0], len(choices)) if column else found[0]
    if isinstance(value, str) and _is_index(value) and int(value) < len(choices):
        return int(value)
    return None


def _checked(value: Any, place: int, count: int) -> int:
    """The place of a text, unless it could be an index from 0 as well.

    Raises:
        RecordError: it could be both, and the two differ.
    """
    if isinstance(value, str) and _is_index(value) and int(value) < count and int(value) != place:
        raise RecordError(
            Reason.UNSUPPORTED_FIELD,
            f"the answer {value!r} is the text of choice {place} and may be the index of another; give the index as a "
            "number, or the letter",
        )
    return place


def _is_index(text: str) -> bool:
    return text.isdecimal() and len(text) < 10


def _letter(place: int) -> str:
    return chr(ord("A") + place) if place < 26 else str(place + 1)


class QuestionAnswer(RecordFormat):
    """A question and its answer."""

    key = "question"
    fields: ClassVar[frozenset[str]] = COMMON_FIELDS | {
        *("question", "answers", *_ANSWERS, *_BEFORE, *_CHOICES, *INDEX_FIELDS)
    }
    images_first: ClassVar[bool] = True

    def matches(self, record: Record) -> bool:
        """Whether there is a question and any answer."""
        return record.get(self.key) is not None and any(
            is_given(record.get(name)) for name in (*_ANSWERS, "answers", *INDEX_FIELDS)
        )

    def read(self, record: Record, media: Media) -> PartialConversation:
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
        return PartialConversation(messages=[Message("user", question), Message("assistant", answer)])


class QueryLabel(RecordFormat):
    """A query and its label: ChartQA."""

    key = "query"
    fields: ClassVar[frozenset[str]] = COMMON_FIELDS | {"query", "label"}
    images_first: ClassVar[bool] = True

    def matches(self, record: Record) -> bool:
        """Whether there are a query and a label that is text."""
        label = record.get("label")
        return isinstance(record.get("query"), str) and is_given(label) and isinstance(label, str | list | tuple)

    def read(self, record: Record, media: Media) -> PartialConversation:
        """One user turn and one assistant turn."""
        for name in ("response", "answer", "answers"):
            if is_given(record.get(name)):
                raise unsupported(name, remedy="it is not read beside query and label; keep one of them")
        texts = _texts(record["label"])
        if len(set(texts)) > 1:
            media.notes.append(SEVERAL_ANSWERS)
        answer = Counter(texts).most_common(1)[0][0]
        return PartialConversation(messages=[Message("user", record["query"]), Message("assistant", answer)])


class QueryCalls(RecordFormat):
    """A query, tools, and the calls that answer it: xlam-function-calling-60k."""

    key = "query"
    fields: ClassVar[frozenset[str]] = COMMON_FIELDS | {"query", "answers"}

    def matches(self, record: Record) -> bool:
        """Whether there are a query, tools and answers."""
        return all(is_given(record.get(name)) for name in ("query", "tools", "answers"))

    def read(self, record: Record, media: Media) -> PartialConversation:
        """One user turn and one assistant turn with tool calls."""
        calls = read_tool_calls(record["answers"], "answers")
        return PartialConversation(
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
