"""Processor: the role that turns a Conversation into an EncodedSample. One required method: `encode`."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from energon_packed.conversation import Conversation
from energon_packed.encoding.sample import EncodedSample
from energon_packed.errors import RecordError

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Measured:
    """What planning needs to know of a sample.

    Attributes:
        length: tokens, as `encode` will give.
        media_bytes: bytes of its images and .npy files.
    """

    length: int
    media_bytes: int


class Processor(ABC):
    """Encodes conversations; the same object measures them offline and encodes them at training time.

    A subclass gives `encode`; `length` and `measure` follow from it, and are overridden only to be faster, with the
    same result: `length(c) == len(encode(c))` always.
    """

    @abstractmethod
    def encode(self, conversation: Conversation) -> EncodedSample:
        """Tokens, labels, pixels and positions of one conversation.

        Raises:
            RecordError: the conversation cannot be used; `reason` says why.
        """

    def encode_tokens(self, conversation: Conversation) -> EncodedSample:
        """Tokens and labels as `encode` gives them; pixels may be missing. Override it where that is cheaper."""
        return self.encode(conversation)

    def adopt_tokens(
        self, ids: Sequence[str | None], input_ids: Int64, labels: Int64, cu_seqlens: Sequence[int]
    ) -> list[EncodedSample]:
        """Samples of a row of text that is tokenized already; the same as `encode` of each.

        Args:
            ids: names of the S samples.
            input_ids: int64 (T,).
            labels: int64 (T,), -100 where not supervised.
            cu_seqlens: S + 1 boundaries.
        """
        return [
            self.encode(Conversation(id=ident, input_ids=input_ids[start:end], labels=labels[start:end]))
            for ident, (start, end) in zip(ids, pairwise(cu_seqlens), strict=True)
        ]

    def length(self, conversation: Conversation) -> int:
        """Tokens of the encoded conversation. Raises as `encode` does."""
        result = self.measure([conversation])[0]
        if isinstance(result, RecordError):
            raise result
        return result.length

    def measure(self, conversations: Sequence[Conversation]) -> list[Measured | RecordError]:
        """Length and media size of each conversation, or the error that leaves it out."""
        out: list[Measured | RecordError] = []
        for conversation in conversations:
            try:
                media = sum(len(m.read()) for m in (*conversation.images, *conversation.patch_positions))
                out.append(Measured(len(self.encode(conversation)), media))
            except RecordError as error:
                out.append(error)
        return out

    def measure_tokens(self, conversation: Conversation) -> tuple[Measured, EncodedSample]:
        """As `measure` of one conversation, with the tokens: for data sets that store them.

        Raises:
            RecordError: as `encode`.
        """
        media = sum(len(m.read()) for m in (*conversation.images, *conversation.patch_positions))
        encoded = self.encode_tokens(conversation)
        return Measured(len(encoded), media), encoded

    def fingerprint(self) -> str:
        """Hex digest of everything that decides lengths and tokens. Override it to allow a length cache."""
        return ""
