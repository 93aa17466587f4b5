"""Bins of histograms."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.internals import even_bins, histogram_svg, integer_bins, log_integer_bins


def test_bins_of_integers_contain_whole_numbers_of_integers() -> None:
    for values in ([3], [0, 1, 2, 7], list(range(60))):
        edges = integer_bins(values)
        assert np.diff(edges).tolist() == [1] * (max(values) - min(values) + 1)
        counts, _ = np.histogram(values, edges)
        assert counts.tolist() == [values.count(n) for n in range(min(values), max(values) + 1)]
    for values in ([5, 700, 64], [1, 1000]):
        widths = np.diff(integer_bins(values))
        assert set(widths.tolist()) == {widths[0]}
        assert widths[0].is_integer()
        assert len(widths) <= 60
    for values in ([7], [1, 2, 3], [1, 90, 4000], list(range(1, 3000))):
        edges = log_integer_bins(values)
        counts, _ = np.histogram(values, edges)
        assert counts.sum() == len(values)
        assert ((edges % 1) == 0.5).all()
        assert (np.diff(edges) >= 1).all()


def test_equal_values_get_a_bin_around_them() -> None:
    for value in (0.0, 0.25, 100.0):
        low, high = even_bins([value, value])
        assert low < value < high


@pytest.mark.parametrize(
    ("values", "bins", "labels"),
    [
        ([20_000] * 9, log_integer_bins, ["20,000"]),
        ([0] * 9, integer_bins, ["0"]),
        ([97.25] * 9, even_bins, ["97.25"]),
        ([100.0] * 9, even_bins, ["100"]),
        ([3, 5, 5], integer_bins, ["3", "4", "5"]),
        ([0, 1], integer_bins, ["0", "1"]),
    ],
)
def test_each_value_is_on_the_axis_once(values: list[int], bins: Callable[..., Any], labels: list[str]) -> None:
    text = histogram_svg(values, bins(values), "x", "y", log=bins is log_integer_bins)
    axis = text[text.index('id="matplotlib.axis_1"') : text.index('id="matplotlib.axis_2"')]
    assert re.findall(r"<text[^>]*>([^<]*)</text>", axis) == [*labels, "x"]


def test_equal_counts_of_neighboring_integers_are_separate_bars() -> None:
    values = [0, 0, 1, 1, 2]
    assert histogram_svg(values, integer_bins(values), "x", "y").count("fill: var(--accent)") == 3
