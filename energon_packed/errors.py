"""The exception tree. Every message names the value, the limit and the remedy, in one line.

EnergonPackedError(ValueError)
  ConfigError      an option or argument is wrong                         -> exit status 1, one line
  SourceError      an input file cannot be read as a whole                -> exit status 1, one line
  RejectLimitError too many records were left out                         -> exit status 1, one line
  FormatError      files on disk are not what the format says
  TemplateError    a chat template cannot give supervised spans
  BatchError       a batch cannot be made from these samples
  RecordError      ONE record is bad: it goes to rejects.jsonl with a reason and the run goes on
"""

from enum import StrEnum


class EnergonPackedError(ValueError):
    """Base of every error that a user can mend; the command line prints it in one line."""


class ConfigError(EnergonPackedError):
    """An option or argument has a value that cannot be used."""


class SourceError(EnergonPackedError):
    """An input file or folder cannot be read at all (one bad record inside it is a `RecordError`)."""


class RejectLimitError(EnergonPackedError):
    """More records were left out than the run allows."""


class FormatError(EnergonPackedError):
    """A shard, index or manifest on disk does not follow the format."""


class TemplateError(EnergonPackedError):
    """The chat template cannot tell which text the assistant wrote."""


class BatchError(EnergonPackedError):
    """A padding-free batch cannot be made from the samples given."""


class Reason(StrEnum):
    """Why a record is left out: the `reason` column of rejects.jsonl and `status` of lengths.parquet."""

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
    UNSUPPORTED_MEDIA = "unsupported_media"  # new ones come last: restart state holds their numbers


class RecordError(EnergonPackedError):
    """One record cannot be used.

    Attributes:
        reason: the `Reason` that is counted and written to rejects.jsonl.
        detail: what was found, in one line.
    """

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason.value}: {detail}")
        self.reason = reason
        self.detail = detail

    def __reduce__(self) -> tuple[type["RecordError"], tuple[Reason, str]]:
        return (type(self), (self.reason, self.detail))
