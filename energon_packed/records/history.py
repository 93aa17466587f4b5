"""`history`: earlier turns, as LLaMA-Factory and ms-swift write them: `[["question", "answer"], ...]`."""

from energon_packed.errors import Reason, RecordError
from energon_packed.records.accounting import is_given
from energon_packed.records.conversation import Message
from energon_packed.records.fields import Record, read_text


def read_history(record: Record) -> list[Message]:
    """User and assistant turns; none without a history. Their answers are targets, as in both trainers.

    Raises:
        RecordError: the history is not a list of pairs of texts.
    """
    history = record.get("history")
    if not is_given(history):
        return []
    if not isinstance(history, list | tuple):
        raise RecordError(Reason.MISSING_FIELD, f"history must be a list of pairs, not {type(history).__name__}")
    messages = []
    for pair in history:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise RecordError(Reason.MISSING_FIELD, "an entry of history is not a pair of question and answer")
        messages += [
            Message("user", read_text(pair[0], "a question of history")),
            Message("assistant", read_text(pair[1], "an answer of history")),
        ]
    return messages
