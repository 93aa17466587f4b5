"""Kernels run as Python for small inputs, as machine code for large inputs, with the same result, cached or not."""

import subprocess
import sys
from unittest.mock import patch

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from energon_packed import pack_lengths
from tests.internals import compile_now, compiled, kernels

KERNELS = ("descending_order", "best_fit", "first_fit", "next_fit", "group_by_pack", "join_runs", "group_runs_by_pack")


def test_a_function_that_cannot_be_cached_is_compiled_all_the_same() -> None:
    names: dict[str, object] = {}
    exec(compile("def total(values):\n    return values.sum()", "<no file>", "exec"), names)
    total = compiled(names["total"])  # type: ignore[type-var]
    compile_now()
    assert total(np.arange(5)) == 10  # type: ignore[operator]


@given(
    lengths=st.lists(st.integers(1, 300), max_size=150),
    capacity=st.integers(1, 9000),
    algorithm=st.sampled_from(["bfd", "ffd", "sequential", "window_7"]),
    max_samples=st.none() | st.integers(1, 9),
    size=st.integers(0, 3),
)
def test_python_and_machine_code_plan_the_same_packs(
    lengths: list[int], capacity: int, algorithm: str, max_samples: int | None, size: int
) -> None:
    compile_now()
    groups = np.arange(len(lengths)) // size if size else None
    fast = pack_lengths(lengths, capacity, algorithm=algorithm, max_samples=max_samples, groups=groups)
    with patch.multiple(kernels, **{name: getattr(kernels, name).__wrapped__ for name in KERNELS}):
        slow = pack_lengths(lengths, capacity, algorithm=algorithm, max_samples=max_samples, groups=groups)
    for name in ("indices", "offsets", "overlong"):
        ours, theirs = getattr(fast, name), getattr(slow, name)
        assert ours.dtype == theirs.dtype
        assert ours.tolist() == theirs.tolist()


def test_numba_is_imported_for_many_samples_only() -> None:
    code = (
        "import sys; from energon_packed import pack_lengths\n"
        "pack_lengths([100] * 1000, 4096); assert 'numba' not in sys.modules\n"
        "pack_lengths([100] * 200_000, 4096); assert 'numba' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-W", "error::RuntimeWarning", "-c", code], check=True)
