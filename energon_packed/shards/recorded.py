"""What packs record of themselves, read without their images."""

import io

import numpy as np

from energon_packed.shards.layouts.base import read_json
from energon_packed.shards.reader import ShardReader


def recorded_lengths(reader: ShardReader, pack: int) -> list[int | None]:
    """Tokens of each sample of a pack of any flavor; None where its packer recorded none.

    Raises:
        FormatError: the pack is damaged.
    """
    if bounds := reader.part(pack, "cu_seqlens.npy").get("cu_seqlens.npy"):
        return [int(length) for length in np.diff(np.lib.format.read_array(io.BytesIO(bounds), allow_pickle=False))]
    value = read_json(reader.part(pack, "json"))
    if value.get("lengths"):
        return [int(length) for length in value["lengths"]]
    if "captions" in value:
        return [None] * len(value["captions"])
    return [sample.get("length") for sample in value.get("samples") or [value]]
