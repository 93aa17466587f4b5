"""Rollouts of reinforcement learning in; the token ids of prompt and response, with their columns, out.

    CompletionIds  {"prompt_ids": [...], "completion_ids": [...], "completion_mask": [...]}          TRL, verifiers
    Responses      {"prompts": [...], "responses": [...], "response_mask", "attention_mask"}         verl
    Rollout        {"tokens": [...], "response_length": 3, "loss_mask": [...]}                       slime
    Branch         {"token_ids": [...], "mask": [...]}                                               prime-rl

Masks are of the response, or of all tokens; 1 is a target. Without a mask, the whole response is a target. Padding
(0 in `attention_mask`, of all tokens) is removed. Other fields with a value for each token, or for each token of the
response, are columns; `advantage` and `reward` with one number are columns with this number at all targets.
"""

from abc import abstractmethod
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from energon_packed.records.columns import NUMBERS, read_columns, read_numbers, spread
from energon_packed.records.fields import (
    COMMON_FIELDS,
    Record,
    is_given,
    missing_field,
    read_tokens,
    shown,
    unsupported_field,
)
from energon_packed.records.media.fields import Media
from energon_packed.records.record_formats.base import PartialConversation, RecordFormat
from energon_packed.records.record_formats.document import read_flags

Int64 = npt.NDArray[np.int64]
_NUMBERS = (*NUMBERS, "advantages", "rewards")


class _Trajectory(RecordFormat):
    """Base class: a subclass reads the tokens and the size of the prompt.

    Attributes:
        lists: fields with token ids.
        masks: fields with masks of the response, or of all tokens.
    """

    lists: ClassVar[tuple[str, ...]]
    masks: ClassVar[tuple[str, ...]]

    def matches(self, record: Record) -> bool:
        """Whether the fields have token ids, and not strings or turns."""
        return all(_is_ids(record.get(name)) for name in self.lists)

    @abstractmethod
    def tokens(self, record: Record) -> tuple[Int64, int]:
        """Read (ids, tokens of the prompt); ids are int64 (L,)."""

    def read(self, record: Record, media: Media) -> PartialConversation:
        """Read ids and labels, int64 (L,), and columns, (L,) or (L, k)."""
        ids, prompt = self.tokens(record)
        response = len(ids) - prompt
        is_target = np.arange(len(ids)) >= prompt
        for name in self.masks:
            if is_given(record.get(name)):
                size = len(ids) if len(record[name]) == len(ids) else response
                is_target[len(ids) - size :] &= read_flags(record, name, size, "tokens of the response")
        numbers = read_numbers(record, "the record", _NUMBERS)
        known = (self.fields or frozenset()) | numbers.keys()
        columns = read_columns(record, known, len(ids), response) | spread(numbers, is_target)
        media.unused_fields.difference_update(columns)
        labels = np.where(is_target, ids, -100)
        if is_given(record.get("attention_mask")):
            kept = read_flags(record, "attention_mask", len(ids), "tokens of prompt and response")
            ids, labels = ids[kept], labels[kept]
            columns = {name: column[kept] for name, column in columns.items()}
        return PartialConversation(input_ids=ids, labels=labels, columns=columns or None)


def _is_ids(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.ndim == 1 and value.dtype.kind in "iu"
    return isinstance(value, list | tuple) and (not value or (isinstance(value[0], int) and value[0] is not True))


class CompletionIds(_Trajectory):
    """Prompt and completion of TRL's GRPOTrainer and of a step of verifiers."""

    key = "completion_ids"
    lists = ("prompt_ids", "completion_ids")
    masks = ("completion_mask", "tool_mask", "env_mask")
    fields: ClassVar[frozenset[str]] = COMMON_FIELDS | {*lists, *masks, "prompt_mask", "attention_mask"}

    def tokens(self, record: Record) -> tuple[Int64, int]:
        """Read the ids of both, without padding of the prompt.

        Raises:
            RecordError: `prompt_mask` has a 0 after a 1. In TRL, 0 is padding on the left; in verifiers, all are 0.
        """
        prompt, completion = (read_tokens(record[name], name) for name in self.lists)
        if is_given(record.get("prompt_mask")):
            flags = read_flags(record, "prompt_mask", len(prompt), "prompt_ids")
            if (flags[1:] < flags[:-1]).any():
                raise unsupported_field(
                    "prompt_mask has a 0 after a 1, and padding of a prompt is on its left; write other padding as 0 "
                    "in attention_mask, of prompt and completion"
                )
            prompt = prompt[flags] if flags.any() else prompt
        return np.concatenate([prompt, completion]), len(prompt)


class Responses(_Trajectory):
    """Rows of verl's DataProto: prompts padded on the left, responses padded on the right."""

    key = "responses"
    lists = ("prompts", "responses")
    masks = ("response_mask", "loss_mask")
    fields: ClassVar[frozenset[str]] = COMMON_FIELDS | {*lists, *masks, "input_ids", "attention_mask"}

    def tokens(self, record: Record) -> tuple[Int64, int]:
        """Read the ids of both.

        Raises:
            RecordError: `input_ids` are other ids than both.
        """
        prompt, response = (read_tokens(record[name], name) for name in self.lists)
        ids = np.concatenate([prompt, response])
        both = read_tokens(record["input_ids"], "input_ids") if is_given(record.get("input_ids")) else ids
        if not np.array_equal(both, ids):
            raise unsupported_field("input_ids are not prompts and then responses; keep the ids that are meant")
        return ids, len(prompt)


class Rollout(_Trajectory):
    """Samples of slime: all tokens, of which the last `response_length` are the response."""

    key = "response_length"
    lists = ("tokens",)
    masks = ("loss_mask",)
    fields: ClassVar[frozenset[str]] = COMMON_FIELDS | {
        *lists,
        *masks,
        *("response_length", "attention_mask", "remove_sample", "train_metadata"),
    }

    def matches(self, record: Record) -> bool:
        """Whether the record has tokens and the size of the response."""
        return record.get(self.key) is not None and super().matches(record)

    def tokens(self, record: Record) -> tuple[Int64, int]:
        """Read the ids.

        Raises:
            RecordError: `response_length` is not a number of tokens of the record.
        """
        ids, size = read_tokens(record["tokens"], "tokens"), record[self.key]
        if not isinstance(size, int | np.integer) or isinstance(size, bool) or not 0 <= size <= len(ids):
            raise missing_field(f"response_length is {shown(size)} for {len(ids)} tokens; use 0 to {len(ids)}")
        return ids, len(ids) - int(size)

    def read(self, record: Record, media: Media) -> PartialConversation:
        """Read as other trajectories; `remove_sample` removes all targets."""
        draft = super().read(record, media)
        if record.get("remove_sample") and draft.labels is not None:
            draft.labels[:] = -100
        return draft


class Branch(_Trajectory):
    """Training samples of prime-rl: all tokens with a mask."""

    key = "token_ids"
    lists = ("token_ids",)
    masks = ("mask",)
    fields: ClassVar[frozenset[str]] = COMMON_FIELDS | {*lists, *masks, "attention_mask"}

    def matches(self, record: Record) -> bool:
        """Whether the record has token ids and their mask."""
        return is_given(record.get("mask")) and super().matches(record)

    def tokens(self, record: Record) -> tuple[Int64, int]:
        """Read the ids; only the mask separates prompt and response."""
        return read_tokens(record["token_ids"], "token_ids"), 0
