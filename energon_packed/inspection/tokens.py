"""`token_rows`: a pack token by token, through the code that training uses."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from energon_packed.dataflow.collator import PaddingFreeCollator
from energon_packed.dataflow.process import encode_pack
from energon_packed.encoding import ChatEncoder
from energon_packed.flavors import load_pack
from energon_packed.formats import Codec, codec_of
from energon_packed.seqlens import segment_ids_from_cu_seqlens


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
