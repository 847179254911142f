"""Intervals of means and differences against scipy, and against Newcombe's published example."""

import math

import pytest
from scipy import stats

from unskip.report._intervals import difference, of_mean

SEEDS = [[0.81, 0.83, 0.82], [0.70, 0.74, 0.71, 0.77], [0.5, 0.9]]


@pytest.mark.parametrize("values", SEEDS)
def test_mean(values: list[float]) -> None:
    expected = stats.t.interval(0.95, len(values) - 1, loc=sum(values) / len(values), scale=stats.sem(values))
    assert of_mean(values) == pytest.approx(expected, abs=2e-4)
    assert of_mean(values[:1]) is None


@pytest.mark.parametrize("size", [20, 40, 400])
def test_many_seeds(size: int) -> None:
    values = [math.sin(place) for place in range(size)]
    expected = stats.t.interval(0.95, size - 1, loc=sum(values) / size, scale=stats.sem(values))
    assert of_mean(values) == pytest.approx(expected, rel=2e-3)


def test_difference_over_seeds() -> None:
    result = difference(SEEDS[0], SEEDS[1])
    assert result is not None
    assert result.interval is not None
    expected = stats.ttest_ind(SEEDS[1], SEEDS[0], equal_var=False).confidence_interval(0.95)
    assert result.value == pytest.approx(sum(SEEDS[1]) / 4 - sum(SEEDS[0]) / 3)
    # Degrees of freedom are rounded down, so the interval is never narrower, and only a little wider.
    assert result.interval[0] <= expected.low + 1e-4
    assert result.interval[1] >= expected.high - 1e-4
    assert result.interval == pytest.approx((expected.low, expected.high), abs=0.01)


def test_difference_of_two_runs() -> None:
    """56 of 70 minus 48 of 80: the interval in table II (a) of Newcombe (1998) is 0.0524 to 0.3339."""
    wilson = tuple((each.low, each.high) for each in (
        stats.binomtest(48, 80).proportion_ci(method="wilson"), stats.binomtest(56, 70).proportion_ci(method="wilson")
    ))  # fmt: skip
    result = difference([48 / 80], [56 / 70], wilson)  # type: ignore[arg-type]
    assert result is not None
    assert result.interval == pytest.approx((0.0524, 0.3339), abs=1e-4)
    assert result.method == "Newcombe"


def test_no_interval() -> None:
    assert difference([], [1.0]) is None
    assert difference([1.0], [2.0, 3.0]) == (1.5, None, "")
    assert difference([1.0, 1.0], [2.0, 2.0]) == (1.0, (1.0, 1.0), "Welch")
