"""The weights of each rule against closed forms, and their product, the effective decay."""

import math
import sys
from decimal import Decimal, localcontext
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.wiring.rules import RULES, SHAPES, decays, orders, shapes, shares, steady

from unskip.errors import BadInput
from unskip.wiring import BAND, Anneal, Cut, Decay, Keep, Learn, Scale, Shortcut, Weight, band, effective_decay


def alphas(rule: Shortcut, count: int, **options: Any) -> list[float]:
    weights = rule.weights(count, **options)
    assert [weight.beta for weight in weights] == [1.0] * count
    return [weight.alpha for weight in weights]


def exact_product(values: list[float], runs: list[int]) -> Decimal:
    with localcontext() as context:
        context.prec = 60
        product = Decimal(1)
        for value, run in zip(values, runs, strict=True):
            product *= Decimal(value) ** run if run else 1
        return product


# --- The constant rules ---


@pytest.mark.parametrize(
    ("rule", "weight"),
    [
        (Keep(), (1.0, 1.0)),
        (Cut(), (0.0, 1.0)),
        (Scale(), (1.0, 1.0)),
        (Scale(stream=0.7071, branch=0.25), (0.7071, 0.25)),
        (Scale(3, 2.5), (3.0, 2.5)),
        (Learn(), (1.0, 1.0)),
        (Learn(start=1.5, per="channel"), (1.5, 1.0)),
    ],
)
def test_constant_rules_give_all_sites_the_same_weights(rule: Shortcut, weight: tuple[float, float]) -> None:
    assert rule.weights(3, runs=[1, 4, 2], step=99) == [weight] * 3
    assert all(isinstance(one, Weight) for one in rule.weights(3))
    assert rule.steps is None


def test_only_learn_is_learnable() -> None:
    assert [type(rule) for rule in RULES if rule.learnable] == [Learn, Learn]
    assert [rule.steps for rule in RULES if isinstance(rule, Anneal)] == [10_000, 7, 12]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_no_sites_no_weights(rule: Shortcut) -> None:
    assert rule.weights(0) == rule.weights(0, runs=[], step=3) == []


# --- Decay: closed forms ---


@pytest.mark.parametrize("count", [2, 3, 24, 57])
@pytest.mark.parametrize("low", [0.0, 0.1, 0.6, 1.0])
def test_linear_is_evenly_spaced(count: int, low: float) -> None:
    np.testing.assert_allclose(alphas(Decay(low), count), np.linspace(1, low, count), rtol=0, atol=4e-16)


@pytest.mark.parametrize("count", [2, 3, 24, 57])
@pytest.mark.parametrize("low", [0.0, 0.1, 0.6, 1.0])
def test_cosine_is_half_a_cosine(count: int, low: float) -> None:
    expected = low + (1 - low) * (1 + np.cos(np.linspace(0, np.pi, count))) / 2
    np.testing.assert_allclose(alphas(Decay(low, "cosine"), count), expected, rtol=0, atol=4e-16)


@pytest.mark.parametrize("count", [2, 3, 24, 57])
@pytest.mark.parametrize("low", [1e-5, 0.1, 0.6, 1.0])
def test_geometric_has_a_constant_ratio(count: int, low: float) -> None:
    np.testing.assert_allclose(alphas(Decay(low, "geometric"), count), np.geomspace(1, low, count), rtol=1e-13)


@pytest.mark.parametrize("count", [1, 2, 24])
def test_paper_convention(count: int) -> None:
    got = alphas(Decay(0.6, convention="paper"), count)
    expected = [1 - Fraction(place * 4, 10 * count) for place in range(1, count + 1)]
    np.testing.assert_allclose(got, [float(value) for value in expected], rtol=0, atol=2e-16)
    assert got[-1] == 0.6


def test_paper_convention_of_the_other_shapes() -> None:
    places = np.arange(1, 6) / 5
    geometric, cosine = (alphas(Decay(0.5, shape, convention="paper"), 5) for shape in ("geometric", "cosine"))
    np.testing.assert_allclose(geometric, 0.5**places, rtol=1e-15)
    np.testing.assert_allclose(cosine, 0.75 + 0.25 * np.cos(np.pi * places), rtol=0, atol=4e-16)


def test_until_reaches_the_minimum_early_and_stays() -> None:
    got = alphas(Decay(0.6, until=0.5), 9)
    np.testing.assert_allclose(got[:5], [1, 0.9, 0.8, 0.7, 0.6], rtol=0, atol=2e-16)
    assert got[4:] == [0.6] * 5


def test_until_between_two_sites() -> None:
    # Four sites lie at 0, 1/3, 2/3, 1 of the depth; the minimum is due at 1/2.
    np.testing.assert_allclose(alphas(Decay(0.4, until=0.5), 4), [1, 0.6, 0.4, 0.4], rtol=0, atol=2e-16)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", [3, 9, 57])
def test_back_mirrors_the_descent(shape: Any, count: int) -> None:
    got = alphas(Decay(0.3, shape, back=True), count)
    half = count // 2
    assert got == got[::-1]
    assert got[: half + 1] == alphas(Decay(0.3, shape), half + 1)
    assert got[half] == 0.3
    assert got[-1] == 1.0


def test_back_after_a_late_minimum() -> None:
    got = alphas(Decay(0.2, until=0.8, back=True), 6)
    np.testing.assert_allclose(got, [1, 0.8, 0.6, 0.4, 0.2, 1], rtol=0, atol=3e-16)
    assert got[4] == 0.2


def test_back_after_an_early_minimum() -> None:
    got = alphas(Decay(0.4, until=0.25, back=True), 9)
    np.testing.assert_allclose(got, [1, 0.7, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1], rtol=0, atol=3e-16)


@pytest.mark.parametrize("shape", SHAPES)
def test_until_at_the_first_site(shape: Any) -> None:
    assert alphas(Decay(0.3, shape, until=5e-324), 3) == [1.0, 0.3, 0.3]


def test_rounding_never_goes_below_the_minimum() -> None:
    # The middle site lies so close to `until` that the formula gives 0 there.
    assert alphas(Decay(1e-20, "cosine", until=0.5000000001), 3) == [1.0, 1e-20, 1e-20]


def test_back_with_the_paper_convention() -> None:
    np.testing.assert_allclose(alphas(Decay(0.5, convention="paper", back=True), 4), [0.75, 0.5, 0.75, 1], rtol=1e-15)


def test_back_without_a_site_at_the_minimum() -> None:
    assert alphas(Decay(0.6, back=True), 2) == [1.0, 1.0]
    np.testing.assert_allclose(alphas(Decay(0.4, back=True), 4), [1, 0.6, 0.6, 1], rtol=0, atol=2e-16)


@given(decays())
def test_single_site_gets_the_minimum(rule: Decay) -> None:
    assert alphas(rule, 1) == [rule.alpha_min]


@given(decays(), st.integers(2, 200))
def test_ends_are_exact(rule: Decay, count: int) -> None:
    got = alphas(rule, count)
    if rule.convention == "sites":
        assert got[0] == 1.0
    assert got[-1] == (1.0 if rule.back else rule.alpha_min)


@given(decays(), st.integers(1, 200))
def test_decay_is_bounded_and_piecewise_monotonic(rule: Decay, count: int) -> None:
    got = alphas(rule, count)
    assert rule.alpha_min is not None
    assert all(rule.alpha_min <= alpha <= 1 for alpha in got)
    turn = got.index(min(got)) if rule.back else count
    assert all(before >= after for before, after in pairwise(got[: turn + 1]))
    assert all(before <= after for before, after in pairwise(got[turn:]))


@given(shapes, st.integers(2, 100), st.floats(0.01, 0.9))
def test_decay_falls_strictly_without_until(shape: Any, count: int, low: float) -> None:
    assert all(before > after for before, after in pairwise(alphas(Decay(low, shape), count)))


def test_until_defaults() -> None:
    assert Decay(0.6).until == 1.0
    assert Decay(0.6, back=True).until == 0.5
    assert Decay(0.6, back=True) == Decay(0.6, until=0.5, back=True)


# --- Effective decay ---


@pytest.mark.parametrize(("count", "low", "paper"), [(24, 0.6, 3.6e-3), (56, 0.8, 2.4e-3), (48, 0.8, 5.7e-3)])
def test_paper_settings_lie_in_the_band(count: int, low: float, paper: float) -> None:
    got = effective_decay(alphas(Decay(low), count))
    assert got == pytest.approx(paper, rel=0.02)
    assert got == pytest.approx(np.prod(np.linspace(1, low, count)), rel=1e-12)
    assert band(got) == "in the paper's band [1e-3, 1e-2)"


@given(st.lists(st.tuples(st.floats(1e-3, 2), st.integers(0, 40)), max_size=60))
def test_effective_decay_is_the_product(pairs: list[tuple[float, int]]) -> None:
    values, runs = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    expected = exact_product(values, runs)
    assume(Decimal("1e-300") < expected < Decimal("1e300"))
    assert effective_decay(values, runs) == pytest.approx(float(expected), rel=1e-12)


def test_effective_decay_edge_cases() -> None:
    assert effective_decay([]) == 1.0
    assert effective_decay([0.6]) == 0.6
    assert effective_decay([0.5, 0.25], [3, 1]) == 0.03125
    assert effective_decay([1e-30]) == 1e-30
    assert effective_decay([1e-200, 1e-200, 1e200, 1e180]) == pytest.approx(1e-20, rel=1e-12)  # underflows midway
    assert effective_decay([0.999], [5000]) == pytest.approx(math.exp(5000 * math.log(0.999)), rel=1e-11)
    assert effective_decay([0.6, 1.5], [2000, 2500]) == pytest.approx(
        float(exact_product([0.6, 1.5], [2000, 2500])), rel=1e-12
    )
    assert effective_decay([0.5, 0.0]) == 0.0
    assert effective_decay([0.5, 0.0], [1, 0]) == 0.5
    assert effective_decay([1e-300, 1e-300]) == 5e-324  # only a cut gives 0
    assert effective_decay([1e300, 1e300]) == sys.float_info.max


def test_effective_decay_of_generators_and_numpy() -> None:
    assert effective_decay(iter([0.5, 0.5]), iter([1, 2])) == 0.125
    assert effective_decay(np.array([0.5, 0.25]), np.array([2, 1])) == 0.0625
    assert effective_decay(np.array([0.5], dtype=np.float32)) == 0.5


@pytest.mark.parametrize(
    ("decay", "place"),
    [(0, "below"), (9.99e-4, "below"), (1e-3, "in"), (9.99e-3, "in"), (1e-2, "above"), (1.0, "above"), (7, "above")],
)
def test_band(decay: float, place: str) -> None:
    assert band(decay) == f"{place} the paper's band [1e-3, 1e-2)"
    assert BAND == (1e-3, 1e-2)


# --- Decay.to_product ---


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("convention", ["sites", "paper"])
@pytest.mark.parametrize("count", [1, 2, 3, 12, 24, 57])
@pytest.mark.parametrize("p", [1e-30, 1e-3, 5e-3, 0.5, 0.999999, 1.0])
def test_to_product_hits_its_target(shape: Any, convention: Any, count: int, p: float) -> None:
    got = alphas(Decay.to_product(p, shape, convention=convention), count)
    assert float(exact_product(got, [1] * count)) == pytest.approx(p, rel=1e-12)


@given(shapes, st.sampled_from(["sites", "paper"]), shares, st.data())
def test_to_product_with_runs(shape: Any, convention: Any, until: float, data: st.DataObject) -> None:
    runs = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=60))
    p = data.draw(st.floats(1e-12, 1))
    rule = Decay.to_product(p, shape, convention=convention, until=until)
    got = alphas(rule, len(runs), runs=runs)
    assert effective_decay(got, runs) == pytest.approx(p, rel=1e-12)
    assert got[-1] == rule.solve(len(runs), runs)
    if convention == "sites" and len(runs) > 1:
        assert got[0] == 1.0


@given(shapes, st.integers(3, 60), st.floats(0.05, 1))
def test_to_product_recovers_alpha_min(shape: Any, count: int, low: float) -> None:
    there = effective_decay(alphas(Decay(low, shape, back=True), count))
    back = Decay.to_product(there, shape, back=True).solve(count)
    assert back == pytest.approx(low, rel=1e-9)


def test_solve() -> None:
    assert Decay(0.6).solve(24) == Decay(0.6).solve(1, [5]) == 0.6
    assert Decay.to_product(0.25).solve(1) == 0.25
    assert Decay.to_product(0.25).solve(1, [2]) == 0.5
    assert Decay.to_product(0.25).solve(2, [7, 1]) == 0.25  # the first site stays at 1
    assert Decay.to_product(1.0).solve(24) == Decay.to_product(1.0, back=True).solve(2) == 1.0
    # A decay to 0.6 over 24 sites has a product of about 3.6e-3.
    assert Decay.to_product(3.6e-3).solve(24) == pytest.approx(0.6, abs=2e-3)


def test_to_product_depends_on_the_sites() -> None:
    rule = Decay.to_product(5e-3)
    assert rule.alpha_min is None
    assert rule.product == 5e-3
    assert rule == Decay(product=5e-3)
    assert rule.solve(12) < rule.solve(24) < rule.solve(48)
    assert rule.solve(12) < rule.solve(12, [2] * 12)


@pytest.mark.parametrize(
    ("rule", "count", "runs", "reachable"),
    [
        (Decay.to_product(0.5, back=True), 2, None, r"\[1, 1\], nearest 1;"),
        (Decay.to_product(0.1, back=True), 4, None, r"\[0\.111111, 1\], nearest 0\.111111;"),
        (Decay.to_product(0.5), 2, [1, 0], r"2 sites \(1 runs\).* \[1, 1\]"),
        (Decay.to_product(1e-320, "geometric", until=0.9, back=True), 3, None, r"reachable is \[\d\.\d+e-1[78]\d, 1\]"),
    ],
)
def test_unreachable_product_is_refused(rule: Decay, count: int, runs: Any, reachable: str) -> None:
    with pytest.raises(BadInput, match=reachable) as error:
        rule.weights(count, runs=runs)
    assert str(error.value).startswith(f"{rule}: no alpha_min gives {count} sites")
    assert str(error.value).endswith("choose that, or change the shape, until or back")
    with pytest.raises(BadInput, match="no alpha_min"):
        rule.solve(count, runs)


# --- Anneal ---


@given(
    steady, steady, st.integers(1, 1000), st.sampled_from(["linear", "cosine"]), orders, st.integers(1, 8), st.data()
)
def test_anneal_is_monotonic_with_exact_ends(
    first: Shortcut, last: Shortcut, steps: int, shape: Any, order: Any, count: int, data: st.DataObject
) -> None:
    rule = Anneal(first, last, steps, shape, order)
    try:
        ends = first.weights(count), last.weights(count)
    except BadInput:  # an unreachable product
        assume(False)
    early, late = sorted(data.draw(st.tuples(st.integers(-5, steps + 5), st.integers(-5, steps + 5))))
    at = [rule.weights(count, step=step) for step in (-3, 0, early, late, steps, steps + 3)]
    assert at[0] == at[1] == ends[0]
    assert at[4] == at[5] == ends[1]
    for site in range(count):
        for part in (0, 1):
            way = [weights[site][part] for weights in at]
            assert way in (sorted(way), sorted(way, reverse=True))


def test_anneal_linear_closed_form() -> None:
    rule = Anneal(Scale(1.0, 0.5), Scale(0.0, 1.5), steps=8)
    for step in range(9):
        assert rule.weights(2, step=step) == [(1 - step / 8, 0.5 + step / 8)] * 2


def test_anneal_cosine_closed_form() -> None:
    rule = Anneal(Keep(), Cut(), 10, "cosine")
    got = [rule.weights(1, step=step)[0].alpha for step in range(11)]
    np.testing.assert_allclose(got, (1 + np.cos(np.pi * np.arange(11) / 10)) / 2, rtol=0, atol=3e-16)


def test_anneal_site_order() -> None:
    for step in range(13):
        done = np.clip(3 * step / 12 - np.arange(3), 0, 1)
        np.testing.assert_allclose(alphas(Anneal(Keep(), Cut(), 12, order="first-last"), 3, step=step), 1 - done)
        np.testing.assert_allclose(alphas(Anneal(Keep(), Cut(), 12, order="last-first"), 3, step=step), 1 - done[::-1])


def test_anneal_interpolates_each_site() -> None:
    got = alphas(Anneal(Keep(), Decay(0.6), 4), 3, step=1)
    np.testing.assert_allclose(got, [1.0, 0.95, 0.9], rtol=1e-15)


def test_anneal_begins_at_step_zero() -> None:
    assert Anneal(Keep(), Cut(), 5).weights(2) == Keep().weights(2)


def test_anneal_between_equal_rules_is_constant() -> None:
    rule = Anneal(Scale(0.1, 0.3), Scale(0.1, 0.3), 997)
    assert all(rule.weights(1, step=step) == [(0.1, 0.3)] for step in range(998))


def test_anneal_passes_runs_to_its_rules() -> None:
    runs = [1, 2, 3]
    first, last = Decay.to_product(0.5), Decay.to_product(5e-3, "cosine")
    ends = alphas(first, 3, runs=runs), alphas(last, 3, runs=runs)
    assert ends != (alphas(first, 3), alphas(last, 3))
    rule = Anneal(first, last, 4)
    assert [alphas(rule, 3, runs=runs, step=step) for step in (0, 4)] == list(ends)
    np.testing.assert_allclose(alphas(rule, 3, runs=runs, step=1), 0.75 * np.array(ends[0]) + 0.25 * np.array(ends[1]))


def test_anneal_to_an_unreachable_product_fails_at_step_zero() -> None:
    with pytest.raises(BadInput, match="no alpha_min gives 2 sites"):
        Anneal(Keep(), Decay.to_product(0.5, back=True), 10).weights(2, step=0)
