"""Kernels compile where nothing can be cached, as in a read-only installation of a user without a home."""

import numpy as np

from tests.internals import compiled


def test_a_function_that_cannot_be_cached_is_compiled_all_the_same() -> None:
    names: dict[str, object] = {}
    exec(compile("def total(values):\n    return values.sum()", "<no file>", "exec"), names)
    total = compiled(names["total"])  # type: ignore[type-var]
    assert total(np.arange(5)) == 10  # type: ignore[operator]
