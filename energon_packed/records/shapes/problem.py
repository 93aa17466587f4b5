"""Problems with a solution, as sets of mathematics have them.

    MATH, NuminaMath-CoT  {"problem", "solution", "level", "type"}
    OpenMathInstruct-2    {"problem", "generated_solution", "expected_answer"}
    DeepScaleR            {"problem", "solution", "answer"}
    AIME                  {"problem", "answer"}

The solution is the target. An `answer` or `expected_answer` beside it repeats its result and is counted as not used.
"""

from typing import ClassVar

from energon_packed.errors import Reason, RecordError
from energon_packed.records.conversation import Message
from energon_packed.records.fields import COMMON_FIELDS, Record, is_given, one_text, read_text
from energon_packed.records.media_fields import Media
from energon_packed.records.shapes.shape import Draft, Shape

_SOLUTIONS = ("solution", "generated_solution")
_ANSWER = "answer"


class Problem(Shape):
    """A problem and its solution."""

    key = "problem"
    fields: ClassVar[frozenset[str]] = COMMON_FIELDS | {"problem", *_SOLUTIONS, _ANSWER}
    images_lead: ClassVar[bool] = True

    def matches(self, record: Record) -> bool:
        """Whether there is a problem and a solution or an answer."""
        return is_given(record.get(self.key)) and any(is_given(record.get(name)) for name in (*_SOLUTIONS, _ANSWER))

    def read(self, record: Record, media: Media) -> Draft:
        """One user turn and one assistant turn."""
        solution = one_text(record, _SOLUTIONS)
        if solution is not None and is_given(record.get(_ANSWER)):
            media.unused_fields.add(_ANSWER)
        target = solution if solution is not None else read_text(record.get(_ANSWER), _ANSWER)
        if not target.strip():
            raise RecordError(Reason.EMPTY, "the solution is empty")
        return Draft(messages=[Message("user", read_text(record[self.key], self.key)), Message("assistant", target)])
