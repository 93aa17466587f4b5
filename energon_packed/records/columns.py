"""Per-token columns: fields of a record with a value, or k values, for each of its tokens.

    logprobs, advantages, rewards, values   (n,)     float32 or float16
    teacher_ids, routed_experts             (n, k)   int32 or int16
    teacher_logprobs                        (n, k)   float32 or float16

Entry t belongs to token t, as its label does: `logprobs[t]` is the log probability of token t after the tokens before
it. Tokens without a value (padding, prompts of a trajectory, samples without the column) have `FILL`.

`read_columns` reads them from a record, `check_columns` checks the columns of a sample, and `join_columns` joins the
columns of samples.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from energon_packed.errors import BatchError
from energon_packed.records.fields import is_number, missing_field, shown, unsupported_field

Column = npt.NDArray[Any]
Columns = Mapping[str, Column]

FILL = 0
"""Value of tokens for which a record has none: padding, and samples without the column."""
NUMBERS = ("advantage", "reward")
"""Fields of a turn or of a trajectory with one number for all of its targets."""
_LARGEST = float(np.finfo(np.float32).max)
_FLOATS = frozenset(
    (
        *("logprobs", "log_probs", "old_logprobs", "old_log_probs", "ref_logprobs", "ref_log_prob", "ref_log_probs"),
        *("rollout_log_probs", "completion_logprobs", "sampling_per_token_logps", "old_per_token_logps"),
        *(
            "ref_per_token_logps",
            "inference_logprobs",
            "teacher_logprobs",
            "teacher_log_probs",
            "advantages",
            "rewards",
        ),
        *("returns", "values", "token_level_rewards", "token_level_scores", "rm_scores", "temperatures"),
        *("rl_weights", "ce_weights", "ref_kl_weights", *NUMBERS),
    )
)
_NAMES = _FLOATS | {"teacher_ids", "routed_experts", "rollout_routed_experts"}
"""Names with a known meaning: with another length, they reject the record. Those of floats never have integers."""
_OF_TOKENIZERS = frozenset(
    (
        *("token_type_ids", "mm_token_type_ids", "position_ids", "special_tokens_mask", "offset_mapping", "word_ids"),
        *("attention_mask", "cache_position", "seq_idx"),
    )
)
"""Fields that a tokenizer or a processor writes for each token; they are computed again."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
_DTYPES = {"int8": np.int16, "uint8": np.int16, "int16": np.int16, "uint16": np.int32, "float16": np.float16}
_STORED = frozenset(map(np.dtype, ("<i2", "<i4", "<f2", "<f4")))
_INT32 = np.iinfo(np.int32)


def read_columns(
    record: Mapping[str, Any], known: Iterable[str], tokens: int, response: int | None = None
) -> dict[str, Column]:
    """Read the columns among the fields of a record of tokens.

    A field is a column if it has a number, or the same number of numbers, for each token.

    Args:
        record: the record.
        known: fields with another meaning.
        tokens: tokens of the record.
        response: tokens of its last part, the response. Fields may have values for these tokens alone.

    Raises:
        RecordError: a field of `_NAMES` has another length or no numbers, an integer is over 32 bits, or a column has
            a name that a member of a tar cannot have.
    """
    columns = {}
    for name, value in record.items():
        if not isinstance(value, list | tuple | np.ndarray) or name in known or name in _OF_TOKENIZERS:
            continue
        if len(value) in (tokens, response) and len(value):
            column = _column(name, value)
        elif name in _NAMES and len(value):
            of_response = "" if response is None else f" or {response} tokens of the response"
            raise missing_field(
                f"{name} has {len(value)} entries for {tokens} tokens{of_response}; one entry per token is needed"
            )
        else:
            column = None
        if column is not None:
            columns[name] = with_prompt(column, tokens)
    return columns


def with_prompt(column: Column, tokens: int) -> Column:
    """Put `FILL` before a column of the last tokens, so that it has an entry for each of `tokens`."""
    missing = tokens - len(column)
    return np.concatenate([np.full((missing, *column.shape[1:]), FILL, column.dtype), column]) if missing else column


def _column(name: str, value: Any) -> Column | None:
    """Convert the values of a field to a column; None if they are not numbers.

    Raises:
        RecordError: as `read_columns`.
    """
    try:
        array = np.asarray(value)
    except ValueError:  # lists of different lengths
        array = np.zeros(0, dtype=object)
    if array.dtype.kind not in "iuf" or array.ndim not in (1, 2) or 0 in array.shape:
        if name in _NAMES:
            raise missing_field(
                f"{name} must have a number, or equally many numbers, for each token, not {shown(value)}"
            )
        return None
    if not _NAME.fullmatch(name):
        raise unsupported_field(
            f"the field {name!r:.80} has a value for each token, but names of columns consist of up to 64 letters, "
            "digits, _ and -; rename it with an `adapter`"
        )
    if array.dtype.name in _DTYPES:
        return array.astype(_DTYPES[array.dtype.name])
    if array.dtype.kind != "f" and name not in _FLOATS:
        if array.min() < _INT32.min or array.max() > _INT32.max:
            raise unsupported_field(
                f"{name} has the integer {array.min() if array.min() < _INT32.min else array.max()}, and columns have "
                "at most 32 bits"
            )
        return array.astype(np.int32)
    with np.errstate(over="ignore"):
        column = array.astype(np.float32)
    if (wrong := np.isinf(column) & np.isfinite(array)).any():
        raise unsupported_field(f"{name} has the number {array[wrong][0]:g}, over the range of float32")
    return column


def check_columns(columns: Columns, tokens: int) -> None:
    """Check the columns of a sample that was made in Python or read from a file.

    Raises:
        RecordError: a column has another length, dtype or shape than columns have.
    """
    for name, column in columns.items():
        if column.ndim not in (1, 2) or len(column) != tokens or column.dtype not in _STORED or 0 in column.shape:
            raise unsupported_field(
                f"the column {name} has dtype {column.dtype} and shape {column.shape} for {tokens} tokens; use "
                "float32, float16, int32 or int16, (tokens,) or (tokens, k)"
            )
        if not _NAME.fullmatch(name):
            raise unsupported_field(f"the column {name!r:.80} must be named by up to 64 letters, digits, _ and -")


def join_columns(parts: Sequence[tuple[Columns | None, int]]) -> dict[str, Column] | None:
    """Join the columns of samples, (columns or None, number of tokens) each; None if no sample has columns.

    A sample without a column has `FILL`. If dtypes of a column differ, the result has the dtype for all of them.

    Raises:
        BatchError: samples have different numbers of values per token, or integers that float32 does not represent.
    """
    if not any([columns for columns, _ in parts]):
        return None
    joined = {}
    for name in sorted({name for columns, _ in parts for name in columns or ()}):
        own = [None if columns is None else columns.get(name) for columns, _ in parts]
        found = [column for column in own if column is not None]
        shapes = {column.shape[1:] for column in found}
        if len(shapes) > 1:
            sizes = " and ".join(sorted(str(shape[0]) if shape else "1" for shape in shapes))
            raise BatchError(
                f"`{name}` must have the same number of values per token in all samples of a row, got {sizes}. Pack "
                "such records into separate datasets."
            )
        # The wider type of NumPy for int32 and float32 is float64, which no column has.
        dtype: Any = np.result_type(*{column.dtype for column in found})
        dtype = np.dtype(np.float32) if dtype == np.float64 else dtype
        values = np.full((sum(size for _, size in parts), *shapes.pop()), FILL, dtype=dtype)
        start = 0
        for column, (_, size) in zip(own, parts, strict=True):
            if column is not None:
                values[start : start + size] = column
                if column.dtype.kind == "i" and dtype.kind == "f" and (values[start : start + size] != column).any():
                    raise BatchError(
                        f"`{name}` must be floats or integers in all samples of a row: float32 does not represent its "
                        "integers."
                    )
            start += size
        joined[name] = values
    return joined


def cut_columns(columns: Columns | None, tokens: slice) -> dict[str, Column] | None:
    """Return the columns of some tokens, as views."""
    return None if columns is None else {name: column[tokens] for name, column in columns.items()}


def spread(numbers: Mapping[str, float], is_target: npt.NDArray[np.bool_]) -> dict[str, Column]:
    """Give each target of a sample the same values; other tokens have `FILL`."""
    return {name: np.where(is_target, np.float32(value), np.float32(FILL)) for name, value in numbers.items()}


def read_numbers(fields: Mapping[str, Any], label: str, names: Iterable[str] = NUMBERS) -> dict[str, float]:
    """Read the fields `names` that have a number; other values, such as objects, are not per-token values.

    Raises:
        RecordError: a number is not finite.
    """
    numbers = {}
    for name in names:
        value = fields.get(name)
        if is_number(value):
            if not abs(value) <= _LARGEST:  # also NaN, and integers that no float has
                raise unsupported_field(f"{name} of {label} is {value!r}; use a finite number")
            numbers[name] = float(value)
    return numbers
