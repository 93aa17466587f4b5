import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_packed import seqlens


def test_golden() -> None:
    cu = seqlens.cu_seqlens_from_lengths([3, 2, 4])
    assert (cu.tolist(), cu.dtype) == ([0, 3, 5, 9], np.int32)
    assert seqlens.position_ids_from_cu_seqlens(cu).tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 3]
    assert seqlens.segment_ids_from_cu_seqlens(cu).tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 2]
    assert seqlens.round_up(np.array([1, 4, 5]), 4).tolist() == [4, 4, 8]


@given(st.lists(st.integers(1, 50), max_size=20))
def test_lengths_round_trip(lengths: list[int]) -> None:
    cu = seqlens.cu_seqlens_from_lengths(lengths)
    assert seqlens.lengths_from_cu_seqlens(cu).tolist() == lengths
    assert len(seqlens.position_ids_from_cu_seqlens(cu)) == sum(lengths)


def test_lengths_and_positions_are_int64_whatever_the_boundaries_are() -> None:
    for dtype in (np.int32, np.uint32, np.int64):
        bounds = np.array([0, 3, 5], dtype=dtype)
        found = (
            seqlens.lengths_from_cu_seqlens(bounds),
            seqlens.position_ids_from_cu_seqlens(bounds),
            seqlens.segment_ids_from_cu_seqlens(bounds),
            seqlens.round_up(bounds, 4),
        )
        assert [one.dtype for one in found] == [np.int64] * 4


def test_any_integer_dtype_and_the_longest_row() -> None:
    assert seqlens.cu_seqlens_from_lengths([2**31 - 2, 1])[-1] == 2**31 - 1
    for dtype in (np.uint8, np.int32, np.uint64):
        lengths = np.array([200, 3], dtype=dtype)
        assert seqlens.cu_seqlens_from_lengths(lengths).tolist() == [0, 200, 203]


def test_errors_name_the_value() -> None:
    with pytest.raises(ValueError, match="`lengths` must be at least 1, got 0"):
        seqlens.cu_seqlens_from_lengths([1, 0])
    with pytest.raises(ValueError, match="the sum of `lengths` must be at most 2147483647"):
        seqlens.cu_seqlens_from_lengths([2**30, 2**30])
    with pytest.raises(ValueError, match="`multiple` must be at least 1, got 0"):
        seqlens.round_up(np.array([1]), 0)
