"""Questions, problems, instructions and prompts with a single answer in; a user turn and an assistant turn out.

QuestionAnswer, with or without choices and images:

    VQAv2, TextVQA, DocVQA    {"image", "question", "answers": ["..."] or [{"answer"}], "multiple_choice_answer"}
    GSM8K                     {"question", "answer"}
    OpenOrca                  {"system_prompt", "question", "response"}
    SQuAD                     {"context", "question", "answers": {"text": [...], "answer_start": [...]}}
    RACE                      {"article", "question", "options": [...], "answer": "B"}
    ScienceQA, MMLU           {"image", "question", "hint", "choices": [...], "answer": 1}
    ARC, CommonsenseQA        {"question", "choices": {"label": [...], "text": [...]}, "answerKey": "B"}
    MedQA                     {"question", "options": {"A": "...", "B": "..."}, "answer_idx": "B", "answer": "..."}

`context`, `passage`, `article` and `hint` precede the question, after a blank line. Choices follow it as lines `A.
...`; the answer is the line of the correct choice. If several answers differ, the target is the most frequent answer,
and the first of equally frequent answers, as in VQA's accuracy; the conversation gets a note.

    GQA         GQA (cs.stanford.edu/people/dorarad/gqa)  {"question", "answer", "imageId"}; the image is imageId.jpg

    ReasonedAnswer  s1K (simplescaling/s1K)  {"question", "thinking_trajectories": ["..."], "attempt", "solution"}
                    s1K-1.1                  {"question", "deepseek_thinking_trajectory", "deepseek_attempt"}
                    medical-o1 (FreedomIntelligence/medical-o1-reasoning-SFT)  {"Question", "Complex_CoT", "Response"}

The reasoning becomes `reasoning_content` of the assistant turn, as in messages. In s1K-1.1, the traces of DeepSeek are
the targets, as for the model s1.1; Gemini's are counted as unused.

    QueryLabel  ChartQA         {"image", "query", "label": ["14"]}
    QueryCalls  xLAM            {"query", "tools": "[...]", "answers": "[{name, arguments}]"}; answers are tool calls

    Problem     MATH, NuminaMath-CoT  {"problem", "solution", "level", "type"}
                OpenMathInstruct-2    {"problem", "generated_solution", "expected_answer"}
                DeepScaleR            {"problem", "solution", "answer"}
                AIME                  {"problem", "answer"}

The solution is the target. An `answer` or `expected_answer` beside it repeats its result and is counted as unused.

    Instruction  Alpaca (tatsu-lab/alpaca)                {"instruction", "input", "output", "text"}
                 LLaMA-Factory's alpaca format            {"instruction", "input", "output", "system", "history"}
                 Dolly (databricks/databricks-dolly-15k)  {"instruction", "context", "response", "category"}
                 M3IT (MMInstruction/M3IT)                {"instruction", "inputs", "outputs", "image_base64_str"}

The user turn is the instruction, a blank line, and `input` or `context` if there is any. Alpaca's preamble ("Below is
an instruction ...") and its `text`, which contains the whole record again, are not used: the chat template replaces
them.

    PromptCompletion  TRL           {"prompt": "...", "completion": "..."}, or lists of messages
                      others        {"prompt", "response"}; {"input", "output"}
                      ms-swift      {"query", "response", "history": [[question, answer]], "system"}
                      Firefly       {"input", "target"}
                      FLAN, Aya     {"inputs", "targets"}; Natural Instructions puts a `definition` before the inputs
                      PaLM, Vertex  {"input_text", "output_text"}

In lists of messages, assistant turns of the prompt are context, not targets: TRL computes the loss on the completion.
The ratings of HelpSteer (helpfulness, correctness, coherence, complexity, verbosity) are the label, in this order.
"""

import re
from collections import Counter
from typing import Any, ClassVar

from energon_packed.errors import Reason, RecordError
from energon_packed.records.conversation import Message
from energon_packed.records.fields import (
    COMMON_FIELDS,
    OBJECT,
    Record,
    given,
    is_given,
    joined_texts,
    missing_field,
    one_text,
    read_label,
    read_text,
    unsupported_field,
)
from energon_packed.records.media.fields import Media
from energon_packed.records.media.reference import MediaReference
from energon_packed.records.record_formats.base import PartialConversation, RecordFormat, alternating, question_answer
from energon_packed.records.turns import read_history, read_messages, read_tool_calls
from energon_packed.records.unused_fields import unsupported

SEVERAL_ANSWERS = "several answers: one is the target"
_ANSWERS = ("answer", "response", "multiple_choice_answer")
_BEFORE = ("context", "passage", "article", "hint")
_CHOICES = ("choices", "options")
INDEX_FIELDS = ("answerKey", "answer_idx", "answer_index", "correct_choice_idx")
_SOLUTIONS = ("solution", "generated_solution")
_RESULT = "answer"
_OUTPUTS = ("output", "response", "outputs")
_INPUTS = ("input", "context", "inputs")
_IMAGE_ID = re.compile(r"\w+")
_REASONED = (  # question, reasoning, answer
    ("question", "thinking_trajectories", "attempt"),
    ("question", "deepseek_thinking_trajectory", "deepseek_attempt"),
    ("Question", "Complex_CoT", "Response"),
)
_REASONINGS = frozenset(reasoning for _, reasoning, _ in _REASONED)
_PAIRS = (
    ("prompt", "completion"),
    ("prompt", "response"),
    ("query", "response"),
    ("input", "output"),
    ("input", "target"),
    ("inputs", "targets"),
    ("input_text", "output_text"),
)
_RATINGS = ("helpfulness", "correctness", "coherence", "complexity", "verbosity")  # HelpSteer
_PROMPTS = frozenset(prompt for prompt, _ in _PAIRS)
_NAMES = tuple(dict.fromkeys(name for pair in _PAIRS for name in pair))


class QuestionAnswer(RecordFormat):
    """A question and its answer."""

    key = "question"
    fields: ClassVar[frozenset[str]] = COMMON_FIELDS | {
        *("question", "answers", *_ANSWERS, *_BEFORE, *_CHOICES, *INDEX_FIELDS)
    }
    images_first: ClassVar[bool] = True

    def matches(self, record: Record) -> bool:
        """Whether there is a question and any answer."""
        return record.get(self.key) is not None and bool(given(record, (*_ANSWERS, "answers", *INDEX_FIELDS)))

    def read(self, record: Record, media: Media) -> PartialConversation:
        """Read a user turn and an assistant turn."""
        question = joined_texts(record, (*_BEFORE, self.key))
        # The text before a question is not a question.
        if not (media.images or media.videos or media.audios) and not read_text(record[self.key], self.key).strip():
            raise RecordError(Reason.EMPTY, "the question is empty, and the record has no image, video or audio")
        filled = given(record, _CHOICES)
        if len(filled) > 1:
            raise unsupported(filled[1], remedy=f"it is not read beside {filled[0]}; keep one")
        if filled:
            choices = read_choices(record[filled[0]], filled[0])
            answer = right_choice(record, choices)
            question = "\n".join([question, *choices])
        else:
            answer = _answer(record, media)
        return question_answer(question, answer)


class GQA(QuestionAnswer):
    """A question about the image whose id is in `imageId`; its file has that name and the extension .jpg."""

    fields: ClassVar[frozenset[str]] = QuestionAnswer.fields | {"imageId"}

    def matches(self, record: Record) -> bool:
        """Whether the record has an image id, no image, and a question with an answer."""
        ident = record.get("imageId")  # not null, nor a path or data URL: that is an image in a wrong field
        if ident.__class__ not in (str, int) or not _IMAGE_ID.fullmatch(str(ident)):
            return False
        return not given(record, ("image", "images")) and super().matches(record)

    def read(self, record: Record, media: Media) -> PartialConversation:
        """Read a user turn with the image and an assistant turn."""
        media.images = [MediaReference.from_value(f"{record['imageId']}.jpg", media.root)]
        return super().read(record, media)


class ReasonedAnswer(RecordFormat):
    """A question, the reasoning about it, and its answer."""

    key = "question"
    fields: ClassVar[frozenset[str]] = COMMON_FIELDS.union(*_REASONED)

    def matches(self, record: Record) -> bool:
        """Whether the record has all three fields of one of the formats."""
        if _REASONINGS.isdisjoint(record):  # almost every record
            return False
        return any(all(is_given(record.get(name)) for name in names) for names in _REASONED)

    def read(self, record: Record, media: Media) -> PartialConversation:
        """Read a user turn, and an assistant turn with its reasoning."""
        names = next(names for names in _REASONED if all(is_given(record.get(name)) for name in names))
        media.unused_fields.update(
            name for name in self.fields - {*names, *COMMON_FIELDS} if is_given(record.get(name))
        )
        question, reasoning, answer = (record[name] for name in names)
        if isinstance(reasoning, list | tuple):
            if len(reasoning) > 1:
                raise unsupported(names[1], remedy=f"it has {len(reasoning)} entries; keep one")
            reasoning = reasoning[0]
        extra = {"reasoning_content": read_text(reasoning, names[1])}
        return question_answer(read_text(question, names[0]), read_text(answer, names[2]), extra)


def read_choices(value: Any, field: str) -> list[str]:
    """Make the lines `A. text` of the choices.

    Args:
        value: a list of strings, {"label": [...], "text": [...]}, or {"A": text}.
        field: name of the field, for errors.

    Raises:
        RecordError: the value has another type.
    """
    if not isinstance(value, OBJECT):
        if not isinstance(value, list | tuple):
            raise missing_field(f"{field} is {type(value).__name__}; use a list of strings")
        labels, texts = _letters(len(value)), list(value)
    elif isinstance(value.get("text"), list | tuple):
        texts, letters = list(value["text"]), value.get("label")
        labels = list(letters) if isinstance(letters, list | tuple) and letters else _letters(len(texts))
    else:
        by_label = {label: text for label, text in value.items() if text is not None}
        labels, texts = list(by_label), list(by_label.values())
    if len(labels) != len(texts):
        raise missing_field(f"{field} has {len(labels)} labels for {len(texts)} texts")
    return [
        f"{read_text(label, f'a label of {field}')}. {read_text(text, f'one of {field}')}"
        for label, text in zip(labels, texts, strict=True)
    ]


def right_choice(record: Record, choices: list[str]) -> str:
    """Find the line of the correct choice.

    Args:
        record: a record with an index from 0, a letter or the text of a choice, in `answer` or one of `INDEX_FIELDS`.
            An index may be a string (AI2D).
        choices: lines of `read_choices`.

    Raises:
        RecordError: no field refers to a choice, or two fields refer to different choices.
    """
    names = [name for name in ("answer", *INDEX_FIELDS) if record.get(name) is not None]
    indices = {name: _find(record[name], choices) for name in names}
    if not indices:
        raise missing_field(f"no answer to the choices; use answer or one of {', '.join(INDEX_FIELDS)}")
    for name, index in indices.items():
        if index is None:
            raise missing_field(
                f"{name} {repr(record[name])[:80]} is none of {len(choices)} choices; "
                "use an index from 0, a label or a text"
            )
    # MedQA has the letter and the text of the answer; they must agree.
    if len(set(indices.values())) > 1:
        raise unsupported(names[1], remedy=f"it differs from {names[0]}; keep one")
    # The target is a choice; another answer beside it would be dropped silently.
    for name in ("answers", "response", "multiple_choice_answer"):
        if record.get(name) is not None:
            raise unsupported(name, remedy="it is not read beside choices; keep answer")
    choice = choices[next(index for index in indices.values() if index is not None)]
    if not choice.partition(". ")[2].strip():
        raise RecordError(Reason.EMPTY, f"the correct choice, {choice.strip()}, is empty")
    return choice


def _find(value: Any, choices: list[str]) -> int | None:
    # In this order: an integer is an index, a string first a letter, then a text, then an index.
    if isinstance(value, int) and not isinstance(value, bool):
        return value if 0 <= value < len(choices) else None
    is_index = isinstance(value, str) and value.isdecimal() and len(value) < 10 and int(value) < len(choices)
    number = int(value) if is_index else None
    parts = [choice.split(". ", 1) for choice in choices]
    for column in (0, 1):
        matches = [index for index, part in enumerate(parts) if part[column] == value]
        # Repeated choices are ambiguous, so they do not match.
        if len(matches) != 1:
            continue
        if column and number not in (None, matches[0]):
            raise unsupported_field(
                f"Ambiguous answer {value!r}: it is the text of choice {matches[0]} but could also be an index. Give "
                "a letter, or an integer index."
            )
        return matches[0]
    return number


def _letters(count: int) -> list[str]:
    return [chr(ord("A") + index) if index < 26 else str(index + 1) for index in range(count)]


def _answer(record: Record, media: Media) -> str:
    """Read the answer, or the most frequent of several answers."""
    for name in INDEX_FIELDS:
        if is_given(record.get(name)):
            raise unsupported(name, remedy="it names one of the choices, and the record has none")
    # Text, if no choices are expected; else the index of a choice, which is not an answer.
    if isinstance(record.get("answer"), int) and (empty := [name for name in _CHOICES if name in record]):
        raise missing_field(f"answer is the index {record['answer']} of a choice, and {empty[0]} is empty")
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
        raise RecordError(Reason.EMPTY, "answers has no text")
    if len({*texts, *([] if single is None else [single])}) > 1:
        media.notes.append(SEVERAL_ANSWERS)
    # A single answer beside `answers` (VQAv2) is the choice of the annotators. most_common keeps the order of ties.
    return single if single is not None else Counter(texts).most_common(1)[0][0]


def _texts(answers: Any) -> list[str]:
    if isinstance(answers, OBJECT):
        answers = answers.get("text")
    answers = [answers] if isinstance(answers, str) else answers
    if not isinstance(answers, list | tuple):
        raise missing_field(f"answers is {type(answers).__name__}; use a list of strings")
    return [
        read_text(answer.get("answer") if isinstance(answer, OBJECT) else answer, "an answer of answers")
        for answer in answers
    ]


class QueryLabel(RecordFormat):
    """A query and its label, or a list of labels."""

    key = "query"
    fields: ClassVar[frozenset[str]] = COMMON_FIELDS | {"query", "label"}
    images_first: ClassVar[bool] = True

    def matches(self, record: Record) -> bool:
        """Whether there is a query, and a label that is a string or a list."""
        label = record.get("label")
        return isinstance(record.get("query"), str) and is_given(label) and isinstance(label, str | list | tuple)

    def read(self, record: Record, media: Media) -> PartialConversation:
        """Read a user turn and an assistant turn."""
        for name in ("response", "answer", "answers"):
            if is_given(record.get(name)):
                raise unsupported(name, remedy="it is not read beside query and label; keep one of them")
        texts = _texts(record["label"])
        if len(set(texts)) > 1:
            media.notes.append(SEVERAL_ANSWERS)
        answer = Counter(texts).most_common(1)[0][0]
        return question_answer(record["query"], answer)


class QueryCalls(RecordFormat):
    """A query, tools, and the calls that answer it."""

    key = "query"
    fields: ClassVar[frozenset[str]] = COMMON_FIELDS | {"query", "answers"}

    def matches(self, record: Record) -> bool:
        """Whether there is a query, tools and answers."""
        return all(is_given(record.get(name)) for name in ("query", "tools", "answers"))

    def read(self, record: Record, media: Media) -> PartialConversation:
        """Read a user turn and an assistant turn with tool calls."""
        calls = read_tool_calls(record["answers"], "answers")
        return question_answer(read_text(record["query"], "query"), "", {"tool_calls": calls})


class Problem(RecordFormat):
    """A problem and its solution."""

    key = "problem"
    fields: ClassVar[frozenset[str]] = COMMON_FIELDS | {"problem", *_SOLUTIONS, _RESULT}
    images_first: ClassVar[bool] = True

    def matches(self, record: Record) -> bool:
        """Whether there is a problem and a solution or an answer."""
        return is_given(record.get(self.key)) and bool(given(record, (*_SOLUTIONS, _RESULT)))

    def read(self, record: Record, media: Media) -> PartialConversation:
        """Read a user turn and an assistant turn."""
        solution = one_text(record, _SOLUTIONS)
        if solution is not None and is_given(record.get(_RESULT)):
            media.unused_fields.add(_RESULT)
        target = solution if solution is not None else read_text(record.get(_RESULT), _RESULT)
        if not target.strip():
            raise RecordError(Reason.EMPTY, "the solution is empty")
        return question_answer(read_text(record[self.key], self.key), target)


class Instruction(RecordFormat):
    """An instruction, its input and its answer."""

    key = "instruction"
    fields: ClassVar[frozenset[str]] = COMMON_FIELDS | {"instruction", "history", *_OUTPUTS, *_INPUTS}
    images_first: ClassVar[bool] = True

    def matches(self, record: Record) -> bool:
        """Whether there is an instruction and an answer."""
        return is_given(record.get(self.key)) and any(record.get(name) is not None for name in _OUTPUTS)

    def read(self, record: Record, media: Media) -> PartialConversation:
        """Read the turns of the history, a user turn and an assistant turn."""
        answer = one_text(record, _OUTPUTS)
        if answer is None:
            raise RecordError(Reason.EMPTY, f"none of {', '.join(_OUTPUTS)} has a text")
        question = joined_texts(record, (self.key, *_INPUTS))
        return PartialConversation([*read_history(record), *alternating([question, answer])])


class PromptCompletion(RecordFormat):
    """A prompt and its completion, as strings or lists of messages."""

    key = "prompt"
    fields: ClassVar[frozenset[str]] = COMMON_FIELDS | {"history", "definition", *_NAMES}
    images_first: ClassVar[bool] = True

    def matches(self, record: Record) -> bool:
        """Whether the record has both fields of a pair."""
        return _pair(record) is not None

    def read(self, record: Record, media: Media) -> PartialConversation:
        """Read the turns of the history, the prompt and the completion."""
        pair = _pair(record)
        assert pair is not None
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
        # TRL computes the loss on the completion only.
        context = [message._replace(weight=0.0) if message.role == "assistant" else message for message in prompt]
        return PartialConversation(
            [*read_history(record), *context, *completion],
            label=_ratings(record, media) if _RATINGS[0] in record else None,
        )


def _ratings(record: Record, media: Media) -> tuple[float, ...] | None:
    """Read the ratings of HelpSteer as a label; None if any of them is not a number."""
    labels = [read_label(record.get(name)) for name in _RATINGS]
    if not all(labels):
        return None
    media.unused_fields.difference_update(_RATINGS)
    return tuple([number for label in labels for number in label or ()])


def _pair(record: Record) -> tuple[str, str] | None:
    """Find the field names of prompt and completion in this record."""
    return next((pair for pair in _PAIRS if all(is_given(record.get(name)) for name in pair)), None)


def _prompt_messages(value: Any, name: str, media: Media) -> list[Message]:
    if isinstance(value, list | tuple):
        return read_messages(value, name, media)
    role = "user" if name in _PROMPTS else "assistant"
    return [Message(role, read_text(value, name))]
