"""Recorded lengths: a split of a dataset in, sums over the samples of each pack out, without reading a tar.

`pack` writes the length, the media and the pack of each sample to lengths.parquet, in the order of the input. They are
used only if the file has the fingerprint of packing.json, with whose sizes the tars were compared when they were
opened, and its samples and tokens of each tar. A dataset that was changed by another tool, or whose file is missing or
of another run, is read from its tars.
"""

from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from energon_packed.errors import FormatError
from energon_packed.files import disk_array
from energon_packed.loading.datasets.manifests import LoadedSplit
from energon_packed.packing.balance import Int64
from energon_packed.pipeline.output.run_reports import FINGERPRINT, open_lengths, read_lengths
from energon_packed.shards.reader import ShardReader

_MEDIA = ("num_images", "num_videos", "num_audios")


class PackSums(NamedTuple):
    """Sums over the samples of each of P packs.

    Attributes:
        tokens: int64 (P,).
        squares: int64 (P,), of the squared lengths.
        media: int64 (P,), images, videos and audio files; None if they are not known.
    """

    tokens: Int64
    squares: Int64
    media: Int64 | None


def recorded_sums(split: LoadedSplit, reader: ShardReader, multiple: int) -> PackSums | None:
    """Read the sums of all packs of a split from lengths.parquet.

    Args:
        split: the split.
        reader: of its tars.
        multiple: each sample is padded to a multiple of it.

    Returns:
        the sums; None if the file does not have the lengths of these tars.
    """
    manifest, file = split.manifest, split.path.parent / "lengths.parquet"
    if manifest is None or not file.exists():
        return None
    entries = {shard.name: number for number, shard in enumerate(manifest.shards)}
    numbers = [entries.get(tar.name) for tar in reader.tars]
    ends = np.cumsum([shard.packs for shard in manifest.shards])
    shift, is_read = np.zeros(len(ends), dtype=np.int64), np.zeros(len(ends), dtype=np.bool_)
    for place, number in enumerate(numbers):
        first, stop = reader.first(place), reader.first(place + 1)
        if number is None or manifest.shards[number].packs != stop - first:
            return None
        shift[number], is_read[number] = stop - ends[number], True
    tokens, squares, counted = (disk_array(None, len(reader), np.int64) for _ in range(3))
    found = np.zeros((2, len(ends)), dtype=np.int64)  # samples and tokens of each shard
    prefix, longest = f"{manifest.shard_prefix}_", manifest.seq_len // manifest.pad_multiple * manifest.pad_multiple
    try:
        with open_lengths(file) as table:
            if (table.schema_arrow.metadata or {}).get(FINGERPRINT) != manifest.fingerprint.encode():
                return None
            media = [name for name in _MEDIA if name in table.schema_arrow.names]
            for rows in read_lengths(table, ["pack", "length", *media]):
                packed = rows.filter(rows["pack"].is_valid())
                keys = packed["pack"].cast(pa.string())
                pack = pc.utf8_slice_codeunits(keys, len(prefix)).cast(pa.int64()).to_numpy()
                length = packed["length"].drop_null().to_numpy().astype(np.int64)
                is_key = len(length) == len(pack) and pc.all(pc.starts_with(keys, prefix), min_count=0).as_py()
                if not is_key or (len(pack) and not 0 <= pack.min() <= pack.max() < ends[-1]):
                    return None
                shard = np.searchsorted(ends, pack, side="right")
                length = np.minimum(length, longest)  # samples that were truncated
                np.add.at(found, (0, shard), 1)
                np.add.at(found, (1, shard), length)
                own = np.flatnonzero(is_read[shard])
                place = (pack + shift[shard])[own]
                padded = -(-length[own] // multiple) * multiple
                np.add.at(tokens, place, padded)
                np.add.at(squares, place, padded**2)
                for name in media:
                    np.add.at(counted, place, packed[name].fill_null(0).to_numpy()[own])
    except (FileNotFoundError, FormatError):
        return None
    expected = np.array([(shard.samples, shard.tokens) for shard in manifest.shards], dtype=np.int64).reshape(-1, 2)
    if (expected[is_read] != found[:, is_read].T).any():
        return None
    return PackSums(tokens, squares, None if manifest.extract_frames else counted)
