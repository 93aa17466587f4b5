"""Masks of a turn, as trainers spell them: which turns are targets, and how much they count.

weight       OpenAI fine-tuning and axolotl: 0 or 1; other numbers weigh the turn's loss
loss_weight  a number
loss         ms-swift: true or false
train        axolotl (also `training`): true or false
loss_mask    as Megatron's: 1 is a target, 0 is not
masked       torchtune: true is not a target
mask         true means trained to some writers and hidden to others, so it is rejected
"""

import math
from typing import Any

from energon_packed.errors import Reason, RecordError
from energon_packed.records.fields import Record

_NUMBERS = ("weight", "loss_weight")
_FLAGS = ("loss", "train", "training", "loss_mask")
_NEGATED = "masked"
_AMBIGUOUS = "mask"
WEIGHT_FIELDS = (*_NUMBERS, *_FLAGS, _NEGATED, _AMBIGUOUS)


def read_weight(turn: Record, role: str) -> float:
    """Weight of a turn in the loss; 1 where it says nothing.

    Args:
        turn: with any of `WEIGHT_FIELDS`.
        role: of the turn: only assistant turns can be targets.

    Raises:
        RecordError: `unsupported_field`, when the value is no mask or of unclear meaning, two masks differ, or a turn
            that is not the assistant's is to be trained.
    """
    given = {key: _weight(key, turn[key]) for key in WEIGHT_FIELDS if turn.get(key) is not None}
    if not given:
        return 1.0
    if len(set(given.values())) > 1:
        raise _unsupported(f"a turn has {' and '.join(given)}, which differ; keep weight alone")
    key, weight = next(iter(given.items()))
    if role != "assistant" and weight > 0:
        raise _unsupported(
            f"{key} is {turn[key]!r} for a {role} turn; only assistant turns are trained, write 0 or remove the field"
        )
    return weight


def _weight(key: str, value: Any) -> float:
    if key == _AMBIGUOUS:
        raise _unsupported("mask is trained to some writers and hidden to others; write weight: 1 or weight: 0")
    number = float(value) if isinstance(value, bool | int | float) else math.nan
    if key in _NUMBERS:
        if not math.isfinite(number) or number < 0:
            raise _unsupported(f"{key} of a turn is {value!r}; use a number of at least 0")
        return number
    if number not in (0.0, 1.0):
        raise _unsupported(f"{key} of a turn is {value!r}; use true or false, or weight for a number")
    return 1.0 - number if key == _NEGATED else number


def _unsupported(detail: str) -> RecordError:
    return RecordError(Reason.UNSUPPORTED_FIELD, detail)
