"""Hashes of the keys and ids of a dataset: 8 bytes each in files, so that millions are compared in little memory.

Input: names, or arrays of hashes. Output: the hashes that occur too often or too rarely. `verify` then reads only the
names with these hashes again, and compares the names themselves.
"""

from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from energon_packed.arrays import common_ranges
from energon_packed.files import DiskList

UInt64 = npt.NDArray[np.uint64]
_ODD = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio: mixes the bits of a second value into a hash


def name_hashes(names: Iterable[str]) -> UInt64:
    """Hash strings: uint64 (n,), the same in every process."""
    digests = [blake2b(name.encode(errors="surrogatepass"), digest_size=8).digest() for name in names]
    return np.frombuffer(b"".join(digests), dtype="<u8").astype(np.uint64)


def with_values(hashes: UInt64, values: npt.NDArray[np.integer]) -> UInt64:
    """Combine hashes with integers: uint64 (n,), equal only if both are equal."""
    return hashes ^ (values.astype(np.uint64) + np.uint64(1)) * _ODD


def joined(arrays: Iterable[npt.NDArray[Any]], dtype: npt.DTypeLike = np.uint64) -> DiskList:
    """Concatenate arrays, by default of hashes, perhaps none."""
    out = DiskList(dtype)
    for hashes in arrays:
        out.extend(hashes)
    return out


def differing(first: UInt64, second: UInt64) -> UInt64:
    """Return the hashes that do not occur equally often in two sorted arrays, each once."""
    return np.concatenate([first[:0], *(_differing(*pair) for pair in common_ranges(first, second))])


def _differing(first: UInt64, second: UInt64) -> UInt64:
    if np.array_equal(first, second):
        return first[:0]
    counts = [np.unique(hashes, return_counts=True) for hashes in (first, second)]
    (names, times), (others, other_times) = counts
    same = np.intersect1d(names, others, assume_unique=True, return_indices=True)
    is_equal = times[same[1]] == other_times[same[2]]
    return np.setxor1d(np.union1d(names, others), same[0][is_equal], assume_unique=True)
