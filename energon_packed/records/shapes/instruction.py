"""Instructions with an answer: Alpaca, Dolly and what follows them.

    Alpaca (tatsu-lab/alpaca)                {"instruction", "input", "output", "text"}
    LLaMA-Factory's alpaca format            {"instruction", "input", "output", "system", "history": [[q, a]]}
    Dolly (databricks/databricks-dolly-15k)  {"instruction", "context", "response", "category"}
    M3IT (MMInstruction/M3IT)                {"instruction", "inputs", "outputs", "image_base64_str"}

The user's turn is the instruction, a blank line, and `input` or `context` where there is one. Alpaca's own preamble
("Below is an instruction ...") and its `text`, which repeats the record inside it, are not used: the chat template
takes their place.
"""

from typing import ClassVar

from energon_packed.errors import Reason, RecordError
from energon_packed.records.conversation import Message
from energon_packed.records.fields import COMMON_FIELDS, Record, is_given, joined_texts, one_text
from energon_packed.records.media_fields import Media
from energon_packed.records.shapes.shape import Draft, Shape
from energon_packed.records.turns import read_history

_ANSWERS = ("output", "response", "outputs")
_INPUTS = ("input", "context", "inputs")


class Instruction(Shape):
    """One instruction, its input and its answer."""

    key = "instruction"
    fields: ClassVar[frozenset[str]] = COMMON_FIELDS | {"instruction", "history", *_ANSWERS, *_INPUTS}
    images_lead: ClassVar[bool] = True

    def matches(self, record: Record) -> bool:
        """Whether there is an instruction and an answer."""
        return is_given(record.get(self.key)) and any(record.get(name) is not None for name in _ANSWERS)

    def read(self, record: Record, media: Media) -> Draft:
        """The turns of the history, one user turn and one assistant turn."""
        answer = one_text(record, _ANSWERS)
        if answer is None:
            raise RecordError(Reason.EMPTY, f"none of {', '.join(_ANSWERS)} has a text")
        question = joined_texts(record, (self.key, *_INPUTS))
        return Draft(messages=[*read_history(record), Message("user", question), Message("assistant", answer)])
