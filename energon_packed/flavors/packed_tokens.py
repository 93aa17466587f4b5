"""PackedTokensSample: a pack tokenized offline; loading it costs a copy, not a tokenizer."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from megatron.energon import edataclass

from energon_packed.conversation import Conversation
from energon_packed.flavors.base import PackSample, references
from energon_packed.shards.layouts import tokens


@edataclass
class PackedTokensSample(PackSample):
    """S tokenized samples that share a row of T tokens.

    Attributes:
        input_ids: int32 (T,), images as runs of the image token.
        labels: int32 (T,), unshifted, -100 where not supervised.
        cu_seqlens: int32 (S+1,).
        images: bytes of the images of each sample.
        ids: names of the samples.
        patch_positions: bytes of the .npy files of each sample, or None.
    """

    input_ids: npt.NDArray[np.int32]
    labels: npt.NDArray[np.int32]
    cu_seqlens: npt.NDArray[np.int32]
    images: list[list[bytes]]
    ids: list[str | None]
    patch_positions: list[list[bytes]] | None = None

    def conversations(self) -> list[Conversation]:
        """The samples inside, in order, already tokenized."""
        bounds = self.cu_seqlens.tolist()
        return [
            Conversation(
                id=self.ids[i],
                input_ids=self.input_ids[start:end].astype(np.int64),
                labels=self.labels[start:end].astype(np.int64),
                images=references(self.images[i]),
                patch_positions=references(self.patch_positions[i]) if self.patch_positions else (),
            )
            for i, (start, end) in enumerate(pairwise(bounds))
        ]

    def expected_lengths(self) -> list[int | None]:
        """Tokens of each sample."""
        return list(np.diff(self.cu_seqlens).tolist())


def sample_loader(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a PackedTokensSample from the parts of a tar member."""
    return tokens.read(raw)


def part_filter(part: str) -> bool:
    """Which parts are read from the tar."""
    return part == "json" or part.endswith(".npy") or part.startswith("img")
