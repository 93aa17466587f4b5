"""Processor: the role that turns a Conversation into an EncodedSample. One required method: `encode`.

TokenBatch: tokens of several samples end to end, and the rules that they must keep, checked on all of them at once.

This is the one place that decides whether a sample is empty, supervised, in the vocabulary, and has the image tokens
that its images need; measuring, encoding and stored tokens all pass through it.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from energon_packed.encoding.pretrained import TokenizerParts
from energon_packed.encoding.sample import IGNORE_INDEX, EncodedRow, EncodedSample, targets_per_sample
from energon_packed.encoding.vision.families import VisionFamily
from energon_packed.errors import ConfigError, Reason, RecordError, Reject
from energon_packed.records import Conversation

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Tokens of S samples.

    Attributes:
        input_ids: int64 (T,).
        labels: int64 (T,), -100 where not supervised.
        cu_seqlens: int64 (S+1,), boundaries of the samples.
    """

    input_ids: Int64
    labels: Int64
    cu_seqlens: Int64

    @classmethod
    def joined(cls, pieces: Sequence[tuple[Int64, Int64] | None]) -> "TokenBatch":
        """Samples as (input_ids, labels) end to end; None, one that was rejected before, takes no token."""
        nothing = np.zeros(0, dtype=np.int64)
        ids = [nothing if piece is None else piece[0] for piece in pieces]
        labels = [nothing if piece is None else piece[1] for piece in pieces]
        cu_seqlens = np.concatenate([[0], np.cumsum([len(one) for one in ids])]).astype(np.int64)
        return cls(np.concatenate([nothing, *ids]), np.concatenate([nothing, *labels]), cu_seqlens)

    def sample(self, number: int) -> tuple[Int64, Int64]:
        """(input_ids, labels) of one sample, int64 (L,) each."""
        part = slice(int(self.cu_seqlens[number]), int(self.cu_seqlens[number + 1]))
        return self.input_ids[part], self.labels[part]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRules:
    """What tokens must keep.

    Attributes:
        vocabulary: number of token ids; None does not check ids.
        image_token_id: token that stands for an image; None for text models.
        image_token: its text, for messages.
        reserved: tokens that text must not hold.
        reserved_texts: their texts, for messages.
    """

    vocabulary: int | None = None
    image_token_id: int | None = None
    image_token: str = ""
    reserved: tuple[int, ...] = ()
    reserved_texts: tuple[str, ...] = ()

    @classmethod
    def of(cls, tokenizer: TokenizerParts, vision: VisionFamily | None) -> "TokenRules":
        """The rules of a tokenizer and a vision family."""
        if vision is None:
            return cls(vocabulary=tokenizer.vocabulary)
        image = tokenizer.backend.token_to_id(vision.image_token)
        reserved = {tokenizer.backend.token_to_id(token) for token in vision.reserved} - {None, image}
        return cls(
            vocabulary=tokenizer.vocabulary,
            image_token_id=image,
            image_token=vision.image_token,
            reserved=tuple(sorted(reserved)),
            reserved_texts=vision.reserved,
        )

    def check(
        self, batch: TokenBatch, image_tokens: Sequence[int], *, are_ours: bool = False
    ) -> tuple[TokenBatch, dict[int, Reject]]:
        """The batch without targets at image tokens, and the samples that cannot be used.

        Args:
            batch: S samples.
            image_tokens: image tokens that each sample must have, S numbers.
            are_ours: the ids come from the tokenizer itself, so all are in the vocabulary.
        """
        rejects: dict[int, Reject] = {}
        is_empty = batch.cu_seqlens[1:] == batch.cu_seqlens[:-1]
        if is_empty.any():
            for number in np.flatnonzero(is_empty).tolist():
                rejects[number] = Reject(Reason.EMPTY, "its text gives no token")
        if self.vocabulary is not None and not are_ours:
            self._check_ids(batch, rejects)
        labels = batch.labels
        if self.image_token_id is not None:
            is_image = batch.input_ids == self.image_token_id
            found = _per_sample(is_image, batch.cu_seqlens)
            for number in np.flatnonzero(found != np.asarray(image_tokens)).tolist():
                rejects.setdefault(number, self._wrong_count(int(found[number]), image_tokens[number]))
            self._check_reserved(batch, rejects)
            if found.any():
                labels = np.where(is_image, IGNORE_INDEX, labels)
        targets = targets_per_sample(labels, batch.cu_seqlens)
        if not targets.all():
            for number in np.flatnonzero(targets == 0).tolist():
                rejects.setdefault(number, Reject(Reason.NO_SUPERVISED_TOKENS, "no token after the first is a target"))
        return TokenBatch(batch.input_ids, labels, batch.cu_seqlens), rejects

    def _check_ids(self, batch: TokenBatch, rejects: dict[int, Reject]) -> None:
        assert self.vocabulary is not None
        lowest = np.where(batch.labels == IGNORE_INDEX, 0, batch.labels).min(initial=0)
        highest = max(batch.input_ids.max(initial=0), batch.labels.max(initial=0))
        if min(lowest, batch.input_ids.min(initial=0)) >= 0 and highest < self.vocabulary:
            return
        for name, values in (("input_ids", batch.input_ids), ("labels", batch.labels)):
            wrong = (values < 0) | (values >= self.vocabulary)
            if name == "labels":
                wrong &= values != IGNORE_INDEX
            for number, place in _first_of_each(wrong, batch.cu_seqlens):
                detail = f"{name} holds {values[place]}, outside the {self.vocabulary} tokens of the tokenizer"
                rejects.setdefault(number, Reject(Reason.MISSING_FIELD, detail))

    def _check_reserved(self, batch: TokenBatch, rejects: dict[int, Reject]) -> None:
        for token in self.reserved:
            for number, _ in _first_of_each(batch.input_ids == token, batch.cu_seqlens):
                detail = f"the text holds one of the tokens {' '.join(self.reserved_texts)}"
                rejects.setdefault(number, Reject(Reason.IMAGE_COUNT_MISMATCH, detail))

    def _wrong_count(self, found: int, expected: int) -> Reject:
        detail = f"{found} {self.image_token} tokens where the images need {expected}"
        return Reject(Reason.IMAGE_COUNT_MISMATCH, detail)


def _first_of_each(flags: npt.NDArray[np.bool_], cu_seqlens: Int64) -> list[tuple[int, int]]:
    """(sample, place of its first True flag) of the samples that have one."""
    places = np.flatnonzero(flags)
    samples, first = np.unique(np.searchsorted(cu_seqlens, places, side="right") - 1, return_index=True)
    return list(zip(samples.tolist(), places[first].tolist(), strict=True))


def _per_sample(flags: npt.NDArray[np.bool_], cu_seqlens: Int64) -> Int64:
    """True flags of each sample, int64 (S,)."""
    sums = np.concatenate([[0], np.cumsum(flags)])
    return np.asarray(sums[cu_seqlens[1:]] - sums[cu_seqlens[:-1]])


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
        row = TokenBatch(input_ids, labels, np.asarray(cu_seqlens))
        # Ids were compared with the vocabulary when they were packed, by an encoder with the same fingerprint.
        batch, rejects = self.rules.check(row, [0] * len(ids), are_ours=True)
        for reject in rejects.values():
            raise RecordError.of(reject)
        return self._as_row(ids, batch)

    @property
    def rules(self) -> TokenRules:
        """What the tokens of a sample must keep."""
        return TokenRules(image_token_id=self.image_token_id)

    def _as_row(self, ids: Sequence[str | None], batch: TokenBatch) -> EncodedRow:
        """The samples of a batch without images."""
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


class StoredTokens(Processor):
    """Returns `input_ids` and `labels` as they are stored; needs no tokenizer."""

    def encode(self, conversation: Conversation) -> EncodedSample:
        """The tokens of a conversation that has them.

        Raises:
            ConfigError: it is text or has images, which a ChatEncoder must encode.
            RecordError: no token after the first is a target.
        """
        ids, labels = conversation.input_ids, conversation.labels
        if ids is None or conversation.images:
            raise ConfigError(
                f"sample {conversation.id} has {'text' if ids is None else 'images'}, which an encoder must turn into "
                "tokens and pixels: pass ChatEncoder.from_pretrained(...)"
            )
        return self.encode_row([conversation.id], ids, ids if labels is None else labels, [0, len(ids)])[0]
