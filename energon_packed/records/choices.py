"""Choices of a question, as lettered lines, and which of them is right."""

from typing import Any

from energon_packed.errors import Reason, RecordError
from energon_packed.records.accounting import unsupported
from energon_packed.records.fields import OBJECT, Record, read_text

INDEX_FIELDS = ("answerKey", "answer_idx", "answer_index", "correct_choice_idx")


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
