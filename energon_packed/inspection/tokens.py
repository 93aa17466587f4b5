"""`token_rows`: a pack token by token, through the code that training uses.

Which tokens of a pack are image, supervised and other: told by the ids and labels that training sees.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from energon_packed.encoding import IGNORE_INDEX, ChatEncoder, EncodedSample, Measurement
from energon_packed.errors import EnergonPackedError
from energon_packed.flavors import load_pack
from energon_packed.formats import Codec, StoredSample, codec_of
from energon_packed.loading.collator import PaddingFreeCollator
from energon_packed.loading.process import encode_pack
from energon_packed.seqlens import round_up, segment_ids_from_cu_seqlens

KINDS = ("other", "supervised", "image")
"""Kinds of tokens; an image token is never a target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One sample of a row.

    Attributes:
        id: its name, or None.
        start, length: place in the row, and tokens.
        medium: `text`, `image` or `video`: what the sample holds.
        runs: (kind, first token in the row, tokens) of runs of one kind; none where the kinds are unknown.
        tokens: tokens of each kind; empty where the kinds are unknown.
        problem: why the kinds are unknown although there is an encoder, or None.
    """

    id: str | None
    start: int
    length: int
    medium: str
    runs: Sequence[tuple[str, int, int]] = ()
    tokens: Mapping[str, int] = field(default_factory=dict)
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedPack:
    """One row of the packing map: its key and samples."""

    key: str
    segments: Sequence[Segment]

    @property
    def supervised(self) -> int | None:
        """Targets of the pack; None where the kinds of a sample are unknown."""
        if not all(segment.tokens for segment in self.segments):
            return None
        return sum(segment.tokens["supervised"] for segment in self.segments)


def map_pack(raw: Mapping[str, Any], codec: Codec, encoder: ChatEncoder | None, *, multiple: int = 1) -> MappedPack:
    """Where each sample of a pack lies in its row, and the kinds of its tokens.

    Args:
        raw: parts of the pack.
        codec: of the flavor.
        encoder: the one that it was packed with; None leaves the kinds open.
        multiple: samples begin at multiples of this many tokens, as `pad_multiple` planned them.

    Raises:
        FormatError: the parts are damaged.
    """
    samples = codec.read(raw)
    found = _encoded(samples, encoder) if encoder is not None else [None] * len(samples)
    segments, start = [], 0
    for sample, encoded in zip(samples, found, strict=True):
        segments.append(_segment(sample, encoded, start))
        start += int(round_up(np.array([segments[-1].length]), multiple)[0])
    return MappedPack(key=str(raw["__key__"]), segments=segments)


def _encoded(samples: Sequence[StoredSample], encoder: ChatEncoder) -> list[EncodedSample | str]:
    """Tokens and labels of each sample, without pixels, or why there are none."""
    try:
        measured = encoder.measure([sample.conversation for sample in samples], keep_tokens=True)
    except EnergonPackedError as error:
        return [str(error)] * len(samples)
    return [_checked(sample, one) for sample, one in zip(samples, measured, strict=True)]


def _checked(sample: StoredSample, measured: Measurement) -> EncodedSample | str:
    if measured.sample is None:
        return str(measured.reject)
    try:
        encoded = measured.sample if sample.truncate is None else measured.sample.truncated(sample.truncate)
    except EnergonPackedError as error:
        return str(error)
    if sample.length is not None and len(encoded) != sample.length:
        return f"it encodes to {len(encoded)} tokens, but {sample.length} are recorded"
    return encoded


def _segment(sample: StoredSample, encoded: EncodedSample | str | None, start: int) -> Segment:
    conversation = sample.conversation
    if not isinstance(encoded, EncodedSample):
        return Segment(
            id=conversation.id, start=start, length=sample.length or 0, medium=conversation.kind, problem=encoded
        )
    kinds = token_kinds(encoded)
    edges = np.flatnonzero(np.diff(kinds, prepend=-1, append=-1))
    runs = [(KINDS[kinds[a]], start + int(a), int(b - a)) for a, b in pairwise(edges)]
    tokens = dict(zip(KINDS, np.bincount(kinds, minlength=len(KINDS)).tolist(), strict=True))
    return Segment(
        id=conversation.id, start=start, length=len(encoded), medium=conversation.kind, runs=runs, tokens=tokens
    )


def token_kinds(sample: EncodedSample) -> npt.NDArray[np.int8]:
    """Kind of each token, int8 (L,), index into `KINDS`; the first token is no target, as nothing predicts it."""
    kinds: npt.NDArray[np.int8] = (sample.labels != IGNORE_INDEX).astype(np.int8)
    kinds[:1] = 0
    if sample.image_token_id is not None:
        kinds[sample.input_ids == sample.image_token_id] = KINDS.index("image")
    return kinds


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One token of a row.

    Attributes:
        index: place in the row.
        segment: which sample it belongs to.
        token: its id.
        text: its text.
        label: its label, -100 where not supervised.
        position: what the model counts in: one number, or (text, t, h, w) with M-RoPE.
    """

    index: int
    segment: int
    token: int
    text: str
    label: int
    position: tuple[int, ...]


def token_rows(raw: Mapping[str, Any], encoder: ChatEncoder, codec: Codec | None = None) -> list[TokenRow]:
    """Every token of a pack, as the loader's batch of this pack alone has it.

    Args:
        raw: parts of the pack.
        encoder: the one that it was packed with.
        codec: of the flavor; None finds it by the parts.
    """
    pack = load_pack(codec or codec_of(raw), raw)
    batch = PaddingFreeCollator(dummy_images="never").collate(encode_pack(pack, encoder, check_lengths=False))
    ids = batch.input_ids[0].tolist()
    positions = batch.position_ids.reshape(-1, len(ids)).T.tolist()
    segments = segment_ids_from_cu_seqlens(np.asarray(batch.cu_seqlens)).tolist()
    texts = [encoder.parts.backend.id_to_token(number) for number in ids]
    columns = zip(segments, ids, texts, batch.labels[0].tolist(), positions, strict=True)
    return [
        TokenRow(index, segment, token, str(text), label, tuple(position))
        for index, (segment, token, text, label, position) in enumerate(columns)
    ]
