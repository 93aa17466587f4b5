"""The exceptions and reject reasons of the package.

Input: a message with the value, the limit and the remedy, or the reason and detail of a reject. Output: an
exception whose text is one line. The tree:

EnergonPackedError(ValueError)
  ConfigError      an option or argument is invalid                       -> exit status 1, one line; 2 if it is
                                                                             an option of a command
  SourceError      an input file cannot be read at all                    -> exit status 1, one line
  ResourceError    memory, open files or a disk fail while data is read   -> exit status 1, one line
  RejectLimitError more records were rejected than the run allows         -> exit status 1, one line
  FormatError      files on disk do not follow the format
  DataChangedError files of a dataset changed while a loader had it open
  WorkerError      a worker process of a loader died, or does not answer; also a RuntimeError, as torch raises
  TemplateError    the supervised spans of a chat template cannot be located
  BatchError       a batch cannot be made from these samples
  IsolationError   a model does not keep the samples of a packed row apart
  EngineMismatch   two tokenizer engines return different tokens
  RecordError      ONE record cannot be used: it carries a `Reject`, and the run continues

Messages quote arguments in backticks (`seq_len`); the command line prints the option instead (--seq-len).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

# Message that torch makes of an error in a worker process: the traceback as text, which ends with the error.
_OF_WORKER = re.compile(
    r"Caught (\w+) in DataLoader worker process \d+\.\nOriginal Traceback.*^[\w.]*\b\1: (.*?)\n*\Z", re.S | re.M
)


class EnergonPackedError(ValueError):
    """Base class of all errors that a user can fix; the command line prints them in one line.

    Examples:
        >>> try:
        ...     pack_lengths([5, 3], 0)
        ... except EnergonPackedError as error:
        ...     print(error)
        `capacity` must be at least 1, got 0
    """

    def __init__(self, *args: object) -> None:
        # The DataLoader of torch, under a Trainer as well, raises the error of a worker again with this message.
        if args and isinstance(args[0], str) and (match := _OF_WORKER.match(args[0])):
            args = (match[2], *args[1:])
        super().__init__(*args)

    def at(self, place: str, remedy: str) -> "EnergonPackedError":
        """Return the same error with a place (such as a file and a pack) before its message and a remedy after it."""
        return type(self)(f"{place}: {self}; {remedy}")


class ConfigError(EnergonPackedError):
    """An option or argument has an invalid value.

    Examples:
        >>> pack_lengths([5, 3], 8, algorithm="best")
        Traceback (most recent call last):
            ...
        energon_packed.errors.ConfigError: unknown algorithm 'best'; use one of bfd, ffd, sequential, ...
    """


class SourceError(EnergonPackedError):
    """An input file or folder cannot be read at all (one bad record inside it is a `Reject`).

    Examples:
        >>> pack("none.jsonl", output_dir="out", seq_len=4096, tokenizer=tokenizer)
        Traceback (most recent call last):
            ...
        energon_packed.errors.SourceError: none.jsonl: no such file. ...
    """


class ResourceError(EnergonPackedError):
    """Memory, open files, permissions or a disk fail while data is read: no record is rejected or skipped."""


class RejectLimitError(EnergonPackedError):
    """More records were rejected than the run allows.

    Examples:
        >>> pack(data, output_dir="strict", max_failures=0, **options)
        Traceback (most recent call last):
            ...
        energon_packed.errors.RejectLimitError: 6 records were rejected (limit `max_failures` 0): ...
    """


class FormatError(EnergonPackedError):
    """A shard, index or manifest on disk does not follow the format.

    Examples:
        >>> PackingManifest.load(Path("demo-out/source"))
        Traceback (most recent call last):
            ...
        energon_packed.errors.FormatError: demo-out/source has no .nv-meta/packing.json; pass a folder ...
    """


class DataChangedError(EnergonPackedError):
    """Files of a dataset were replaced, changed or removed since a loader opened it.

    Examples:
        >>> shards = pack(data, output_dir="changed", **options).shards
        >>> dataset = PackedDataset("changed", encoder)
        >>> _ = (shards / "changed-000000.tar").write_bytes(b"")
        >>> dataset[0]
        Traceback (most recent call last):
            ...
        energon_packed.errors.DataChangedError: changed/webdataset/changed-000000.tar was replaced or ...
    """


class WorkerError(EnergonPackedError, RuntimeError):
    """A worker process of a loader died, or has not answered for longer than `timeout`."""


class TemplateError(EnergonPackedError):
    """The text of the assistant cannot be located in the output of the chat template.

    Examples:
        >>> other = ChatEncoder.from_pretrained(tokenizer).tokenizer
        >>> other.chat_template = "{{ messages | length }}"
        >>> record = {"prompts": ["2 + 2?"], "captions": ["4"]}
        >>> ChatEncoder(other).encode(normalize(record))
        Traceback (most recent call last):
            ...
        energon_packed.errors.TemplateError: the chat template does not start answers with its ...
    """


class BatchError(EnergonPackedError):
    """A padding-free batch cannot be made from these samples.

    Examples:
        >>> PaddingFreeCollator().collate([])
        Traceback (most recent call last):
            ...
        energon_packed.errors.BatchError: A batch must have at least 1 sample, got 0.
    """


class IsolationError(EnergonPackedError):
    """A model's output in one packed sample depends on the other samples of the row.

    Examples:
        >>> from transformers import OPTConfig, OPTForCausalLM
        >>> sizes = dict(vocab_size=200, hidden_size=32, num_hidden_layers=1, ffn_dim=64)
        >>> model = OPTForCausalLM(OPTConfig(**sizes, num_attention_heads=4, word_embed_proj_dim=32))
        >>> check_isolation(model)
        Traceback (most recent call last):
            ...
        energon_packed.errors.IsolationError: OPTForCausalLM with attn_implementation='sdpa' does not ...
    """


class EngineMismatch(EnergonPackedError):
    """The fast tokenizer engine returned other tokens than Hugging Face tokenizers."""


class Reason(StrEnum):
    """Reason for the rejection of a record: `reason` in rejects.jsonl, and `status` in lengths.parquet.

    Examples:
        >>> Reason.MISSING_IMAGE.value
        'missing_image'
    """

    BAD_JSON = "bad_json"
    MISSING_FIELD = "missing_field"
    BAD_ROLE = "bad_role"
    MISSING_IMAGE = "missing_image"
    CORRUPT_IMAGE = "corrupt_image"
    IMAGE_OUTSIDE_ROOT = "image_outside_root"
    IMAGE_COUNT_MISMATCH = "image_count_mismatch"
    MISSING_PATCH_POSITIONS = "missing_patch_positions"
    OVERLONG = "overlong"
    EMPTY = "empty"
    NO_SUPERVISED_TOKENS = "no_supervised_tokens"
    UNSUPPORTED_MEDIA = "unsupported_media"
    UNSUPPORTED_FIELD = "unsupported_field"
    NOT_RENDERED = "not_rendered"
    DROPPED_BY_ADAPTER = "dropped_by_adapter"
    ADAPTER_FAILED = "adapter_failed"
    NOT_SAMPLED = "not_sampled"
    # Append new reasons here: the chunk files of the restart state store the index of a reason, not its name.
    TURN_NOT_FOUND = "turn_not_found"
    MISSING_VIDEO = "missing_video"
    CORRUPT_VIDEO = "corrupt_video"
    VIDEO_COUNT_MISMATCH = "video_count_mismatch"
    UNSUPPORTED_VIDEO = "unsupported_video"
    AUDIO_COUNT_MISMATCH = "audio_count_mismatch"
    MISSING_AUDIO = "missing_audio"
    CORRUPT_AUDIO = "corrupt_audio"
    UNSUPPORTED_AUDIO = "unsupported_audio"
    OVERLONG_GROUP = "overlong_group"


REQUESTED_REJECTS = (Reason.DROPPED_BY_ADAPTER, Reason.NOT_SAMPLED)
"""Reasons that the user asked for: listed in rejects.jsonl, but not counted for `max_reject_rate` or `strict`."""
TOO_LONG = (Reason.OVERLONG, Reason.OVERLONG_GROUP)
"""Reasons of samples and groups that are longer than a row, which `overlong` is about."""


@dataclass(frozen=True, slots=True)
class Reject:
    """Reason and detail of a rejected record, as written to rejects.jsonl.

    Attributes:
        reason: counted in packing.json.
        detail: description of the problem, in one line.

    Examples:
        >>> Reject(Reason.MISSING_IMAGE, "cat.jpg: No such file or directory").detail
        'cat.jpg: No such file or directory'
    """

    reason: Reason
    detail: str

    def __str__(self) -> str:
        return f"{self.reason.value}: {self.detail}"


@dataclass(frozen=True, slots=True, kw_only=True)
class IgnoredEntries:
    """Entries of input folders that are not read, for one reason; counted in packing.json.

    Attributes:
        reason: kind of the entries, such as `media`.
        count: number of entries.
        examples: paths of some of them.
    """

    reason: str
    count: int
    examples: list[str]


class RecordError(EnergonPackedError):
    """One record cannot be used; raised by functions that handle a single record.

    Attributes:
        reject: reason and detail.

    Examples:
        >>> normalize({"id": "a"})
        Traceback (most recent call last):
            ...
        energon_packed.errors.RecordError: missing_field: no record format has the fields id
    """

    def __init__(self, reason: Reason, detail: str) -> None:
        self.reject = Reject(reason, detail)
        super().__init__(str(self.reject))

    @classmethod
    def of(cls, reject: Reject) -> "RecordError":
        """Return the exception for a reject."""
        return cls(reject.reason, reject.detail)

    @property
    def reason(self) -> Reason:
        """The reason of `reject`."""
        return self.reject.reason

    @property
    def detail(self) -> str:
        """The detail of `reject`."""
        return self.reject.detail

    def at(self, place: str, remedy: str) -> "RecordError":
        """Add the place and the remedy to the detail, as `EnergonPackedError.at` does to a message."""
        return type(self)(self.reject.reason, f"{place}: {self.reject.detail}; {remedy}")

    # By default, unpickling calls the class with `args`, here the message alone: worker processes send both parts.
    def __reduce__(self) -> tuple[type["RecordError"], tuple[Reason, str]]:
        return (type(self), (self.reject.reason, self.reject.detail))


def first_of(problems: Sequence[str], noun: str) -> str:
    """Return the first of some problems, and the number of the others: `x is missing (and 2 more faults)`."""
    more = len(problems) - 1
    return problems[0] + (f" (and {more} more {noun}{'' if more == 1 else 's'})" if more else "")
