"""Processor: the role that turns a Conversation into an EncodedSample. One required method: `encode`."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from energon_packed.encoding.sample import EncodedRow, EncodedSample
from energon_packed.encoding.token_batch import TokenBatch, TokenRules
from energon_packed.errors import RecordError, Reject
from energon_packed.records import Conversation

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Measurement:
    """What planning needs to know of a sample.

    Attributes:
        length: tokens, as `encode` will give; -1 when it is rejected.
        media_bytes: bytes of its images and .npy files.
        reject: why it cannot be used, or None.
        sample: its tokens and labels, where they were asked for; pixels may be missing.
        supervised: targets among the tokens, as `targets_per_sample` counts them; -1 when unknown.
        decoded: images whose pixels were decoded; the others were checked by header and structure.
    """

    length: int
    media_bytes: int = 0
    reject: Reject | None = None
    sample: EncodedSample | None = None
    supervised: int = -1
    decoded: int = 0

    @classmethod
    def rejected(cls, reject: Reject) -> "Measurement":
        """Of a sample that cannot be used."""
        return cls(-1, 0, reject)


class Processor(ABC):
    """Encodes conversations; the same object measures them offline and encodes them at training time.

    A subclass implements `encode`; the other methods follow from it, and are overridden only to be faster, with the
    same result: `length(c) == len(encode(c))` always.

    Attributes:
        image_token_id: token that stands for image features, or None.
    """

    image_token_id: int | None = None

    @property
    def dummy(self) -> EncodedSample | None:
        """A minimal sample of one image without a target, for rows without images; None without a vision family."""
        return None

    @abstractmethod
    def encode(self, conversation: Conversation) -> EncodedSample:
        """Tokens, labels, pixels and positions of one conversation.

        Raises:
            RecordError: the conversation cannot be used; `reason` and `detail` say why.
        """

    def encode_many(self, conversations: Sequence[Conversation]) -> list[EncodedSample | Reject]:
        """As `encode` of each conversation, or why it cannot be used."""
        return [self._encode(conversation) for conversation in conversations]

    def measure(self, conversations: Sequence[Conversation], *, keep_tokens: bool = False) -> list[Measurement]:
        """Length and media size of each conversation, or why it is rejected.

        Args:
            conversations: S conversations.
            keep_tokens: return the tokens as well, for datasets that store them.
        """
        return [self._measure(conversation, keep_tokens) for conversation in conversations]

    def encode_row(
        self, ids: Sequence[str | None], input_ids: Int64, labels: Int64, cu_seqlens: npt.ArrayLike
    ) -> EncodedRow:
        """Samples of a row of stored tokens without images: the tokens pass through.

        Args:
            ids: names of the S samples.
            input_ids: int64 (T,).
            labels: int64 (T,), -100 where not supervised.
            cu_seqlens: (S+1,), boundaries.

        Raises:
            RecordError: a sample has no token, or no target after the first token.
        """
        rules = TokenRules(image_token_id=self.image_token_id)
        batch, rejects = rules.check(TokenBatch(input_ids, labels, np.asarray(cu_seqlens)), [0] * len(ids))
        for reject in rejects.values():
            raise RecordError.of(reject)
        return EncodedRow(
            ids=ids,
            input_ids=batch.input_ids,
            labels=batch.labels,
            cu_seqlens=batch.cu_seqlens,
            image_token_id=self.image_token_id,
            dummy=self.dummy,
        )

    def length(self, conversation: Conversation) -> int:
        """Tokens of the encoded conversation. Raises as `encode` does."""
        measured = self.measure([conversation])[0]
        if measured.reject is not None:
            raise RecordError.of(measured.reject)
        return measured.length

    def fingerprint(self) -> str:
        """Hex digest of everything that decides lengths and tokens; "" (the default) disables the length cache."""
        return ""

    def has_fingerprint(self, recorded: str) -> bool:
        """Whether data with the fingerprint `recorded` was packed with the tokens and lengths of this encoder."""
        return recorded == self.fingerprint()

    def _encode(self, conversation: Conversation) -> EncodedSample | Reject:
        try:
            return self.encode(conversation)
        except RecordError as error:
            return error.reject

    def _measure(self, conversation: Conversation, keep_tokens: bool) -> Measurement:
        try:
            media = sum(len(m.read()) for m in (*conversation.images, *conversation.patch_positions))
            sample = self.encode(conversation)
        except RecordError as error:
            return Measurement.rejected(error.reject)
        return Measurement(
            len(sample),
            media,
            sample=sample if keep_tokens else None,
            supervised=sample.num_supervised,
            decoded=0 if sample.pixel_values is None and sample.vision_inputs is None else len(conversation.images),
        )
