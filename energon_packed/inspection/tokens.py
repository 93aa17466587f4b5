"""Classify the tokens of a pack, from its raw parts and the encoder that it was packed with.

`token_runs` returns the runs of tokens of equal kind (image, video, supervised, other) of a sample. `token_rows`
returns every token with text, label and position. Both use the ids and labels that training uses, never the roles of
the turns.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from energon_packed.encoding import IGNORE_INDEX, ChatEncoder, EncodedSample, Measurement
from energon_packed.errors import EnergonPackedError
from energon_packed.formats import Codec, StoredSample, codec_of
from energon_packed.seqlens import segment_ids_from_cu_seqlens

Ids = npt.NDArray[np.int64]
KINDS = ("other", "supervised", "image", "video", "audio")
"""Kinds of tokens. Tokens of media are never supervised; timestamps between video tokens are `other`."""


def encoded_samples(samples: Sequence[StoredSample], encoder: ChatEncoder) -> list[EncodedSample | str]:
    """Encode each sample without pixels; a string is the reason why a sample cannot be encoded."""
    try:
        # `measure` reads only the headers of images, and returns the same tokens as `encode`.
        measured = encoder.measure([sample.conversation for sample in samples], keep_tokens=True)
    except EnergonPackedError as error:
        return [str(error)] * len(samples)
    return [_checked(sample, measurement) for sample, measurement in zip(samples, measured, strict=True)]


def _checked(sample: StoredSample, measured: Measurement) -> EncodedSample | str:
    if measured.sample is None:
        return str(measured.reject)
    try:
        encoded = measured.sample if sample.truncate is None else measured.sample.truncated(sample.truncate)
    except EnergonPackedError as error:
        return str(error)
    # Another length means another encoder or a damaged sample, and its labels may be shifted.
    if sample.length is not None and len(encoded) != sample.length:
        return f"it encodes to {len(encoded)} tokens, but {sample.length} are recorded"
    return encoded


def token_runs(input_ids: Ids, labels: Ids, rules: Any) -> list[tuple[str, int, int]]:
    """Return the runs of tokens of equal kind: (kind of `KINDS`, index of the first token in the sample, tokens).

    Args:
        input_ids, labels: int64 (L,).
        rules: sample or rules of an encoder, whose `image_token_id`, `video_token_id` and `audio_token_id` are used.
    """
    kinds = (labels != IGNORE_INDEX).astype(np.int8)
    kinds[:1] = 0  # the first token is never a target, as no token precedes it
    for kind, token in enumerate((rules.image_token_id, rules.video_token_id, rules.audio_token_id), start=2):
        if token is not None:
            kinds[input_ids == token] = kind
    # The sentinels -1 at both ends make the first and the last run end at an edge.
    edges = np.flatnonzero(np.diff(kinds, prepend=-1, append=-1)).tolist()
    return [(KINDS[kinds[a]], a, b - a) for a, b in pairwise(edges)]


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One token of a row.

    Attributes:
        index: index in the row.
        segment: index of its sample in the pack.
        token: token id.
        text: text of the token.
        label: label, -100 if the token is not supervised.
        position: position ids: (position,), or (text, t, h, w) with M-RoPE.
        weight: its entry of `loss_mask`; None in a pack without loss weights.
        columns: its value, or list of k values, in each column; None in a pack without columns.
    """

    index: int
    segment: int
    token: int
    text: str
    label: int
    position: tuple[int, ...]
    weight: float | None = None
    columns: Mapping[str, Any] | None = None

    @property
    def values(self) -> dict[str, Any]:
        """Loss weight, if the pack has weights, and the value in each column, by name."""
        return ({} if self.weight is None else {"weight": self.weight}) | dict(self.columns or {})


def token_rows(raw: Mapping[str, Any], encoder: ChatEncoder, codec: Codec | None = None) -> list[TokenRow]:
    """Return every token of a pack as a loader's batch of this pack alone contains it.

    Args:
        raw: parts of the pack.
        encoder: encoder of the dataset.
        codec: codec of the flavor; None detects it from the parts.

    Raises:
        ConfigError: torch or Energon is not installed.
    """
    from energon_packed.loading.process import encode_pack  # isort: skip - first, as it checks Energon
    from energon_packed.flavors import load_pack

    pack = load_pack(codec or codec_of(raw), raw)
    # Recorded lengths are not checked, so that wrong lengths can be shown.
    return sample_rows(encode_pack(pack, encoder, check_lengths=False), encoder)


def sample_rows(samples: Sequence[EncodedSample], encoder: ChatEncoder) -> list[TokenRow]:
    """Return every token of some samples as a batch of these samples alone contains it. Raises as `token_rows`."""
    from energon_packed.loading.collation.collator import PaddingFreeCollator

    batch = PaddingFreeCollator(dummy_images="never").collate(samples)  # dummy images are added for training only
    ids = batch.input_ids[0].tolist()
    positions = batch.position_ids.reshape(-1, len(ids)).T.tolist()
    segments = segment_ids_from_cu_seqlens(np.asarray(batch.cu_seqlens)).tolist()
    strings = [encoder.parts.backend.id_to_token(token) for token in ids]
    weights = [None] * len(ids) if batch.loss_weights is None else batch.loss_mask[0].tolist()
    own: list[Any] = [None] * len(ids)
    if batch.columns:
        values = zip(*[column[0].tolist() for column in batch.columns.values()], strict=True)
        own = [dict(zip(batch.columns, of_token, strict=True)) for of_token in values]
    columns = zip(segments, ids, strings, batch.labels[0].tolist(), positions, weights, own, strict=True)
    return [
        TokenRow(index, segment, token, str(string), label, tuple(position), weight, of_token)
        for index, (segment, token, string, label, position, weight, of_token) in enumerate(columns)
    ]


def heat_strips(rows: Sequence[TokenRow]) -> dict[str, tuple[float, float, list[tuple[int, int, float]]]]:
    """Group the tokens by value of the loss weight and of each column, to show them as strips.

    Of a column with several values for each token, the first of them counts.

    Returns:
        By name, the lowest and the highest finite value, and runs of equal values: (first row, rows, share of the way
        from the lowest to the highest value, 0 to 1).
    """
    strips = {}
    for name in rows[0].values if rows else ():
        own = [row.values[name] for row in rows]
        values = np.array([value[0] if isinstance(value, list) else value for value in own], dtype=np.float64)
        finite = values[np.isfinite(values)]
        low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 0.0)
        shares = np.nan_to_num((values - low) / ((high - low) or 1), posinf=1, neginf=0).clip(0, 1)
        edges = [0, *(np.flatnonzero(np.diff(shares)) + 1).tolist(), len(rows)]
        strips[name] = (low, high, [(a, b - a, float(shares[a])) for a, b in pairwise(edges)])
    return strips
