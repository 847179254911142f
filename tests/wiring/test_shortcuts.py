"""The rules: closed forms computed another way, exact ends, round trips, and every error with its message."""

import copy
import json
import math
import pickle
import sys
from dataclasses import FrozenInstanceError
from decimal import Decimal, localcontext
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from unskip.errors import BadInput, UnskipError
from unskip.wiring.shortcuts import (
    BAND,
    Anneal,
    Cut,
    Decay,
    Keep,
    Learn,
    Scale,
    Shortcut,
    Weight,
    band,
    effective_decay,
    from_dict,
    parse,
)

SHAPES = ("linear", "cosine", "geometric")
RULES = [
    Keep(),
    Cut(),
    Scale(0.7071, 0.7071),
    Learn(),
    Learn(0.5, "channel"),
    Decay(0.6),
    Decay(0.0, "cosine"),
    Decay(0.6, "geometric", convention="paper", until=0.25, back=True),
    Decay.to_product(5e-3, "cosine", until=0.75),
    Anneal(Keep(), Cut(), steps=10_000),
    Anneal(Decay.to_product(1e-3), Scale(0.5, 2.0), 7, "cosine"),
]

numbers = st.floats(0, 1e6)
shares = st.floats(1e-3, 1, exclude_max=True)
shapes = st.sampled_from(SHAPES)


@st.composite
def decays(draw: st.DrawFn, least: float = 0.0) -> Decay:
    shape, back = draw(shapes), draw(st.booleans())
    until = draw(st.one_of(st.none(), shares if back else st.floats(1e-3, 1)))
    low = draw(st.floats(max(least, 1e-6) if shape == "geometric" else least, 1))
    return Decay(low, shape, convention=draw(st.sampled_from(["sites", "paper"])), until=until, back=back)


@st.composite
def products(draw: st.DrawFn) -> Decay:
    rule = draw(decays())
    p = draw(st.floats(0, 1, exclude_min=True))
    return Decay.to_product(p, rule.shape, convention=rule.convention, until=rule.until, back=rule.back)


steady = st.one_of(st.just(Keep()), st.just(Cut()), st.builds(Scale, numbers, numbers), decays(), products())
rules = st.one_of(
    steady,
    st.builds(Learn, numbers, st.sampled_from(["site", "channel"])),
    st.builds(Anneal, steady, steady, st.integers(1, 10**9), st.sampled_from(["linear", "cosine"])),
)


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
def test_constant_rules_give_every_site_the_same(rule: Shortcut, weight: tuple[float, float]) -> None:
    assert rule.weights(3, runs=[1, 4, 2], step=99) == [weight] * 3
    assert all(isinstance(one, Weight) for one in rule.weights(3))
    assert rule.steps is None


def test_only_learn_is_learnable() -> None:
    assert [type(rule) for rule in RULES if rule.learnable] == [Learn, Learn]
    assert [rule.steps for rule in RULES if isinstance(rule, Anneal)] == [10_000, 7]


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
def test_geometric_falls_by_one_ratio(count: int, low: float) -> None:
    np.testing.assert_allclose(alphas(Decay(low, "geometric"), count), np.geomspace(1, low, count), rtol=1e-13)


@pytest.mark.parametrize("count", [1, 2, 24])
def test_paper_convention(count: int) -> None:
    got = alphas(Decay(0.6, convention="paper"), count)
    expected = [1 - Fraction(place * 4, 10 * count) for place in range(1, count + 1)]
    np.testing.assert_allclose(got, [float(value) for value in expected], rtol=0, atol=2e-16)
    assert got[-1] == 0.6


def test_paper_convention_of_the_other_shapes_takes_its_position() -> None:
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
def test_back_mirrors_the_way_down(shape: Any, count: int) -> None:
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


def test_never_below_the_minimum_by_rounding() -> None:
    # The middle site lies so close to `until` that the formula gives 0 there.
    assert alphas(Decay(1e-20, "cosine", until=0.5000000001), 3) == [1.0, 1e-20, 1e-20]


def test_back_with_the_paper_convention() -> None:
    np.testing.assert_allclose(alphas(Decay(0.5, convention="paper", back=True), 4), [0.75, 0.5, 0.75, 1], rtol=1e-15)


def test_back_without_a_site_at_the_minimum() -> None:
    assert alphas(Decay(0.6, back=True), 2) == [1.0, 1.0]
    np.testing.assert_allclose(alphas(Decay(0.4, back=True), 4), [1, 0.6, 0.6, 1], rtol=0, atol=2e-16)


@given(decays())
def test_one_site_alone_gets_the_minimum(rule: Decay) -> None:
    assert alphas(rule, 1) == [rule.alpha_min]


@given(decays(), st.integers(2, 200))
def test_ends_are_exact(rule: Decay, count: int) -> None:
    got = alphas(rule, count)
    if rule.convention == "sites":
        assert got[0] == 1.0
    assert got[-1] == (1.0 if rule.back else rule.alpha_min)


@given(decays(), st.integers(1, 200))
def test_falls_and_stays_within_its_bounds(rule: Decay, count: int) -> None:
    got = alphas(rule, count)
    assert rule.alpha_min is not None
    assert all(rule.alpha_min <= alpha <= 1 for alpha in got)
    turn = got.index(min(got)) if rule.back else count
    assert all(before >= after for before, after in pairwise(got[: turn + 1]))
    assert all(before <= after for before, after in pairwise(got[turn:]))


@given(shapes, st.integers(2, 100), st.floats(0.01, 0.9))
def test_falls_strictly_where_nothing_says_stay(shape: Any, count: int, low: float) -> None:
    assert all(before > after for before, after in pairwise(alphas(Decay(low, shape), count)))


def test_until_defaults() -> None:
    assert Decay(0.6).until == 1.0
    assert Decay(0.6, back=True).until == 0.5
    assert Decay(0.6, back=True) == Decay(0.6, until=0.5, back=True)


# --- Effective decay ---


@pytest.mark.parametrize(("count", "low", "paper"), [(24, 0.6, 3.6e-3), (56, 0.8, 2.4e-3), (48, 0.8, 5.7e-3)])
def test_the_papers_settings_lie_in_its_band(count: int, low: float, paper: float) -> None:
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


def test_effective_decay_at_the_edges() -> None:
    assert effective_decay([]) == 1.0
    assert effective_decay([0.6]) == 0.6
    assert effective_decay([0.5, 0.25], [3, 1]) == 0.03125
    assert effective_decay([1e-30]) == 1e-30
    assert effective_decay([1e-200, 1e-200, 1e200, 1e180]) == pytest.approx(1e-20, rel=1e-12)  # 0 halfway
    assert effective_decay([0.999], [5000]) == pytest.approx(math.exp(5000 * math.log(0.999)), rel=1e-11)
    assert effective_decay([0.6, 1.5], [2000, 2500]) == pytest.approx(
        float(exact_product([0.6, 1.5], [2000, 2500])), rel=1e-12
    )
    assert effective_decay([0.5, 0.0]) == 0.0
    assert effective_decay([0.5, 0.0], [1, 0]) == 0.5
    assert effective_decay([1e-300, 1e-300]) == 5e-324  # not 0: only a cut is 0
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
def test_to_product_finds_the_alpha_min_it_came_from(shape: Any, count: int, low: float) -> None:
    there = effective_decay(alphas(Decay(low, shape, back=True), count))
    back = Decay.to_product(there, shape, back=True).solve(count)
    assert back == pytest.approx(low, rel=1e-9)


def test_solve() -> None:
    assert Decay(0.6).solve(24) == Decay(0.6).solve(1, [5]) == 0.6
    assert Decay.to_product(0.25).solve(1) == 0.25
    assert Decay.to_product(0.25).solve(1, [2]) == 0.5
    assert Decay.to_product(0.25).solve(2, [7, 1]) == 0.25  # the first site stays at 1
    assert Decay.to_product(1.0).solve(24) == Decay.to_product(1.0, back=True).solve(2) == 1.0
    # 24 sub-layers at 0.6 end at about 3.6e-3, so the way back ends near 0.6.
    assert Decay.to_product(3.6e-3).solve(24) == pytest.approx(0.6, abs=2e-3)


def test_to_product_is_solved_for_the_sites_it_meets() -> None:
    rule = Decay.to_product(5e-3)
    assert rule.alpha_min is None
    assert rule.product == 5e-3
    assert rule == Decay(product=5e-3)
    assert rule.solve(12) < rule.solve(24) < rule.solve(48)
    assert rule.solve(12) < rule.solve(12, [2] * 12)


@pytest.mark.parametrize(
    ("rule", "count", "runs", "reachable"),
    [
        (Decay.to_product(0.5, back=True), 2, None, r"reachable is \[1, 1\], nearest 1;"),
        (Decay.to_product(0.1, back=True), 4, None, r"reachable is \[0\.111111, 1\], nearest 0\.111111;"),
        (Decay.to_product(0.5), 2, [1, 0], r"2 sites \(1 runs\).* reachable is \[1, 1\]"),
        (Decay.to_product(1e-320, "geometric", until=0.9, back=True), 3, None, r"reachable is \[\d\.\d+e-1[78]\d, 1\]"),
    ],
)
def test_to_product_out_of_reach(rule: Decay, count: int, runs: Any, reachable: str) -> None:
    with pytest.raises(BadInput, match=reachable) as error:
        rule.weights(count, runs=runs)
    assert str(error.value).startswith(f"{rule}: no alpha_min gives {count} sites")
    assert str(error.value).endswith("ask for that, or change the shape, until or back")
    with pytest.raises(BadInput, match="no alpha_min"):
        rule.solve(count, runs)


# --- Anneal ---


@given(steady, steady, st.integers(1, 1000), st.sampled_from(["linear", "cosine"]), st.integers(1, 8), st.data())
def test_anneal_has_exact_ends_and_moves_one_way(
    first: Shortcut, last: Shortcut, steps: int, shape: Any, count: int, data: st.DataObject
) -> None:
    rule = Anneal(first, last, steps, shape)
    try:
        ends = first.weights(count), last.weights(count)
    except BadInput:  # a product out of reach
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


def test_anneal_is_between_its_rules_site_by_site() -> None:
    got = alphas(Anneal(Keep(), Decay(0.6), 4), 3, step=1)
    np.testing.assert_allclose(got, [1.0, 0.95, 0.9], rtol=1e-15)


def test_anneal_begins_at_step_zero() -> None:
    assert Anneal(Keep(), Cut(), 5).weights(2) == Keep().weights(2)


def test_anneal_leaves_alone_what_does_not_change() -> None:
    rule = Anneal(Scale(0.1, 0.3), Scale(0.1, 0.3), 997)
    assert all(rule.weights(1, step=step) == [(0.1, 0.3)] for step in range(998))


def test_anneal_hands_the_runs_on() -> None:
    runs = [1, 2, 3]
    first, last = Decay.to_product(0.5), Decay.to_product(5e-3, "cosine")
    ends = alphas(first, 3, runs=runs), alphas(last, 3, runs=runs)
    assert ends != (alphas(first, 3), alphas(last, 3))
    rule = Anneal(first, last, 4)
    assert [alphas(rule, 3, runs=runs, step=step) for step in (0, 4)] == list(ends)
    np.testing.assert_allclose(alphas(rule, 3, runs=runs, step=1), 0.75 * np.array(ends[0]) + 0.25 * np.array(ends[1]))


def test_anneal_to_what_cannot_be_reached_fails_at_the_start() -> None:
    with pytest.raises(BadInput, match="no alpha_min gives 2 sites"):
        Anneal(Keep(), Decay.to_product(0.5, back=True), 10).weights(2, step=0)


# --- Text, JSON, pickle ---


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("keep", Keep()),
        ("cut", Cut()),
        ("decay:0.6", Decay(0.6)),
        ("decay:0.6,cosine", Decay(0.6, "cosine")),
        ("decay:0.6,until=0.5,back", Decay(0.6, until=0.5, back=True)),
        ("decay:0.6,paper", Decay(0.6, convention="paper")),
        (
            "decay:0.6,geometric,paper,until=0.25,back",
            Decay(0.6, "geometric", convention="paper", until=0.25, back=True),
        ),
        ("decay:product=0.005", Decay.to_product(5e-3)),
        ("decay:product=0.005,cosine,until=0.5", Decay.to_product(5e-3, "cosine", until=0.5)),
        ("scale:0.7071,0.7071", Scale(0.7071, 0.7071)),
        ("learn:1.0", Learn(1.0)),
        ("learn:1.0,channel", Learn(1.0, "channel")),
        ("anneal:keep>cut@10000", Anneal(Keep(), Cut(), 10_000)),
        ("anneal:keep>decay:0.6@10000,cosine", Anneal(Keep(), Decay(0.6), 10_000, "cosine")),
        (
            "anneal:decay:0.6,cosine,until=0.5>scale:0.5,2.0@7",
            Anneal(Decay(0.6, "cosine", until=0.5), Scale(0.5, 2), 7),
        ),
    ],
)
def test_text_forms(text: str, rule: Shortcut) -> None:
    assert parse(text) == rule
    assert str(rule) == text


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("decay:product=5e-3", Decay.to_product(5e-3)),
        ("  decay : 0.6 , cosine ", Decay(0.6, "cosine")),
        ("decay:back,until = 0.25,linear,sites,.6", Decay(0.6, until=0.25, back=True)),
        ("decay:0.6,back", Decay(0.6, back=True)),
        ("decay:alpha_min=0.6", Decay(0.6)),
        ("decay:1", Decay(1.0)),
        ("scale:branch=0.5", Scale(branch=0.5)),
        ("scale:0.5", Scale(0.5)),
        ("learn", Learn()),
        ("learn:channel", Learn(per="channel")),
        ("learn:2,site", Learn(2.0)),
        (" anneal: keep > cut @ 10_000 , linear ", Anneal(Keep(), Cut(), 10_000)),
    ],
)
def test_text_is_read_with_some_freedom(text: str, rule: Shortcut) -> None:
    assert parse(text) == rule


@given(rules)
def test_round_trips(rule: Shortcut) -> None:
    twins = [
        parse(str(rule)),
        from_dict(rule.to_dict()),
        from_dict(json.loads(json.dumps(rule.to_dict(), allow_nan=False))),
        pickle.loads(pickle.dumps(rule)),
        copy.deepcopy(rule),
        eval(repr(rule)),
    ]
    for twin in twins:
        assert type(twin) is type(rule)
        assert twin == rule
        assert hash(twin) == hash(rule)
        assert str(twin) == str(rule)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_rules_are_values(rule: Shortcut) -> None:
    assert [other for other in RULES if other == rule] == [rule]
    assert len({rule, copy.deepcopy(rule)}) == 1
    with pytest.raises(FrozenInstanceError):
        rule.steps = 3


def test_dicts() -> None:
    assert Keep().to_dict() == {"rule": "keep"}
    assert Learn().to_dict() == {"rule": "learn", "start": 1.0, "per": "site"}
    options = {"shape": "linear", "convention": "sites", "until": 1.0, "back": False}
    assert Decay(0.6).to_dict() == {"rule": "decay", "alpha_min": 0.6, **options}
    assert Decay.to_product(0.5).to_dict() == {"rule": "decay", "product": 0.5, **options}
    anneal = {"rule": "anneal", "first": {"rule": "keep"}, "last": {"rule": "cut"}, "steps": 5, "shape": "linear"}
    assert Anneal(Keep(), Cut(), 5).to_dict() == anneal
    assert from_dict({"rule": "decay", "alpha_min": 0.6}) == Decay(0.6)
    assert from_dict({"rule": "decay", "alpha_min": 1}).to_dict()["alpha_min"] == 1.0


def test_numbers_become_plain_floats() -> None:
    rule = Scale(np.float32(0.5), 2)  # type: ignore[arg-type]
    assert [type(value) for value in (rule.stream, rule.branch)] == [float, float]
    assert type(Anneal(Keep(), Cut(), np.int64(5)).steps) is int  # type: ignore[arg-type]
    assert str(Scale(-0.0, 1)) == "scale:0.0,1.0"
    assert Decay(np.float64(0.6)).weights(np.int64(2), runs=np.array([1, 2]), step=np.int64(3)) == [(1, 1), (0.6, 1)]  # type: ignore[arg-type]


# --- Bad input ---

BAD = [math.nan, math.inf, -math.inf, -0.1, True, "0.5", 1j, [0.5], 10**400, Decimal("0.5")]


@pytest.mark.parametrize("value", BAD, ids=lambda value: repr(value)[:9])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Scale, "Scale: stream must be a finite number, 0 or more, got "),
        (lambda value: Scale(1, value), "Scale: branch must be a finite number, 0 or more, got "),
        (Learn, "Learn: start must be a finite number, 0 or more, got "),
        (
            lambda value: effective_decay([0.5, value]),
            "effective_decay: every alpha must be a finite number, 0 or more, ",
        ),
        (band, "band: decay must be a finite number, 0 or more, got "),
        (Decay, "Decay (linear): alpha_min must be a number in [0, 1], got "),
        (Decay.to_product, "Decay: product must be a number in (0, 1], got "),
        (lambda value: Decay(0.6, until=value), "Decay: until must be a number in (0, 1], got "),
    ],
)
def test_numbers_out_of_bounds(make: Any, message: str, value: Any) -> None:
    with pytest.raises(BadInput) as error:
        make(value)
    assert str(error.value).startswith(message)
    assert repr(value)[:10] in str(error.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Scale(None), "Scale: stream must be a finite number, 0 or more, got None"),
        (
            lambda: Decay.to_product(None),
            "Decay: give either alpha_min or product, as in Decay(0.6), decay:0.6, decay:product=5e-3",
        ),
        (lambda: Decay(1.5), "Decay (linear): alpha_min must be a number in [0, 1], got 1.5"),
        (
            lambda: Decay(0, "geometric"),
            "Decay (geometric): alpha_min must be a number in (0, 1], got 0",
        ),
        (lambda: Decay.to_product(0), "Decay: product must be a number in (0, 1], got 0"),
        (lambda: Decay.to_product(1.01), "Decay: product must be a number in (0, 1], got 1.01"),
        (lambda: Decay(0.6, until=0), "Decay: until must be a number in (0, 1], got 0"),
        (lambda: Decay(0.6, until=1.5), "Decay: until must be a number in (0, 1], got 1.5"),
        (
            lambda: Decay(0.6, "cosin"),
            "Decay: shape must be one of linear, cosine, geometric, got 'cosin'; nearest: cosine",
        ),
        (lambda: Decay(0.6, 3), "Decay: shape must be one of linear, cosine, geometric, got 3"),
        (
            lambda: Decay(0.6, convention="site"),
            "Decay: convention must be one of sites, paper, got 'site'; nearest: sites",
        ),
        (lambda: Decay(0.6, back=1), "Decay: back must be True or False, got 1"),
        (
            lambda: Decay(0.6, until=1, back=True),
            "Decay: back=True needs until below 1, got 1.0; there is no depth left to return in",
        ),
        (
            lambda: Decay(),
            "Decay: give either alpha_min or product, as in Decay(0.6), decay:0.6, decay:product=5e-3",
        ),
        (
            lambda: Decay(0.6, product=0.1),
            "Decay: give either alpha_min or product, as in Decay(0.6), decay:0.6, decay:product=5e-3",
        ),
        (lambda: Learn(1.0, "head"), "Learn: per must be one of site, channel, got 'head'"),
        (
            lambda: Anneal("keep", Cut(), 5),
            "Anneal: first must be a rule of fixed weights such as Keep() or Cut(), got 'keep'",
        ),
        (
            lambda: Anneal(Keep(), Learn(), 5),
            "Anneal: last must be a rule of fixed weights such as Keep() or Cut(), got Learn(start=1.0, per='site')",
        ),
        (
            lambda: Anneal(Anneal(Keep(), Cut(), 5), Cut(), 5),
            "Anneal: first must be a rule of fixed weights such as Keep() or Cut(), got "
            "Anneal(first=Keep(), last=Cut(), steps=5, shape='linear')",
        ),
        (lambda: Anneal(Keep(), Cut(), 0), "Anneal: steps must be a whole number, 1 or more, got 0"),
        (lambda: Anneal(Keep(), Cut(), 1.5), "Anneal: steps must be a whole number, 1 or more, got 1.5"),
        (lambda: Anneal(Keep(), Cut(), True), "Anneal: steps must be a whole number, 1 or more, got True"),
        (
            lambda: Anneal(Keep(), Cut(), 5, "geometric"),
            "Anneal: shape must be one of linear, cosine, got 'geometric'",
        ),
        (lambda: Keep().weights(-1), "Keep: count must be a whole number, 0 or more, got -1"),
        (lambda: Keep().weights(2.0), "Keep: count must be a whole number, 0 or more, got 2.0"),
        (lambda: Cut().weights(2, step=0.5), "Cut: step must be a whole number, got 0.5"),
        (
            lambda: Cut().weights(2, runs=[1]),
            "runs: there must be one entry for each of the 2 sites, got 1",
        ),
        (lambda: Cut().weights(2, runs=[1, -1]), "runs: every entry must be a whole number, 0 or more, got -1"),
        (
            lambda: effective_decay([1, 1], [1, 1, 1]),
            "runs: there must be one entry for each of the 2 sites, got 3",
        ),
        (lambda: Decay(0.6).solve(0), "Decay.solve: count must be a whole number, 1 or more, got 0"),
    ],
)
def test_bad_arguments(make: Any, message: str) -> None:
    with pytest.raises(BadInput) as error:
        make()
    assert str(error.value) == message


NAMES = "there are: keep, decay, cut, scale, learn, anneal"
DECAY = "write decay:0.6 or decay:product=5e-3, then any of ,cosine ,geometric ,paper ,until=0.5 ,back"
ANNEAL = "write anneal:keep>cut@10000 or anneal:keep>decay:0.6@10000,cosine"
TWO_RULES = "anneal: it takes two rules with one '>' between them, neither an anneal itself, got "


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (0.6, "a shortcut as text must be a string such as 'decay:0.6', got 0.6"),
        ("dekay:0.6", f"no shortcut is called 'dekay'; nearest: decay; {NAMES}"),
        ("Keep", f"no shortcut is called 'Keep'; nearest: keep; {NAMES}"),
        ("DECAY:0.6", f"no shortcut is called 'DECAY'; nearest: decay; {NAMES}"),
        ("", f"no shortcut is called ''; {NAMES}"),
        ("rezero:1", f"no shortcut is called 'rezero'; {NAMES}"),
        ("keep:0.5", "keep: '0.5' is one number too many; write keep"),
        ("cut:", "cut: '' is neither a number nor an option; write cut"),
        ("decay", "Decay: give either alpha_min or product, as in Decay(0.6), decay:0.6, decay:product=5e-3"),
        ("decay:0.6,", f"decay: '' is neither a number nor an option; {DECAY}"),
        ("decay:0.6,cosin", f"decay: 'cosin' is neither a number nor an option; nearest: cosine; {DECAY}"),
        ("decay:0.6,untill=0.5", f"decay: 'untill=0.5' is neither a number nor an option; nearest: until; {DECAY}"),
        ("decay:0.6,until=half", f"decay: 'until=half' is neither a number nor an option; nearest: until; {DECAY}"),
        ("decay:0.6,0.7", f"decay: '0.7' is one number too many; {DECAY}"),
        ("decay:0.6,cosine,linear", f"decay: shape is given twice, the second time as 'linear'; {DECAY}"),
        ("decay:0.6,alpha_min=0.5", f"decay: alpha_min is given twice, the second time as 'alpha_min=0.5'; {DECAY}"),
        ("decay:nan", "Decay (linear): alpha_min must be a number in [0, 1], got nan"),
        ("decay:inf", "Decay (linear): alpha_min must be a number in [0, 1], got inf"),
        ("decay:-0.5", "Decay (linear): alpha_min must be a number in [0, 1], got -0.5"),
        ("scale:1,2,3", "scale: '3' is one number too many; write scale:0.7071,0.7071"),
        ("scale:a,b", "scale: 'a' is neither a number nor an option; write scale:0.7071,0.7071"),
        (
            "learn:1,chanel",
            "learn: 'chanel' is neither a number nor an option; nearest: channel; write learn:1.0 or learn:1.0,channel",
        ),
        ("anneal", f"anneal: '@' and the number of steps are missing in ''; {ANNEAL}"),
        ("anneal:keep>cut", f"anneal: '@' and the number of steps are missing in 'keep>cut'; {ANNEAL}"),
        ("anneal:keep@10", f"{TWO_RULES}'keep'; {ANNEAL}"),
        ("anneal:anneal:keep>cut@5>keep@10", f"{TWO_RULES}'anneal:keep>cut@5>keep'; {ANNEAL}"),
        ("anneal:keep>cut@1e4", f"anneal: the steps must be a whole number, got '1e4'; {ANNEAL}"),
        ("anneal:keep>cut@0", "Anneal: steps must be a whole number, 1 or more, got 0"),
        ("anneal:keep>cut@5,cosin", "Anneal: shape must be one of linear, cosine, got 'cosin'; nearest: cosine"),
        ("anneal:keep>kut@5", f"no shortcut is called 'kut'; nearest: cut; {NAMES}"),
        (
            "anneal:keep>learn:1.0@5",
            "Anneal: last must be a rule of fixed weights such as Keep() or Cut(), got Learn(start=1.0, per='site')",
        ),
    ],
)
def test_bad_text(text: Any, message: str) -> None:
    with pytest.raises(BadInput) as error:
        parse(text)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("keep", "a shortcut as a dict names its rule, as in {'rule': 'cut'}, got 'keep'"),
        ({"name": "cut"}, "a shortcut as a dict names its rule, as in {'rule': 'cut'}, got {'name': 'cut'}"),
        ({"rule": None}, "a shortcut as a dict names its rule, as in {'rule': 'cut'}, got {'rule': None}"),
        ({"rule": "scal"}, f"no shortcut is called 'scal'; nearest: scale; {NAMES}"),
        ({"rule": "keep", "alpha": 1}, "keep: unknown argument 'alpha'; it has: none"),
        (
            {"rule": "decay", "alpha_mn": 0.6},
            "decay: unknown argument 'alpha_mn'; nearest: alpha_min; "
            "it has: alpha_min, shape, convention, until, back, product",
        ),
        ({"rule": "anneal", "last": {"rule": "cut"}}, "anneal: missing first, steps"),
        ({"rule": "anneal", "first": {"rule": "kep"}}, f"no shortcut is called 'kep'; nearest: keep; {NAMES}"),
        ({"rule": "scale", "stream": {"rule": "cut"}}, "Scale: stream must be a finite number, 0 or more, got Cut()"),
        ({"rule": "decay", "alpha_min": "0.6"}, "Decay (linear): alpha_min must be a number in [0, 1], got '0.6'"),
    ],
)
def test_bad_dicts(data: Any, message: str) -> None:
    with pytest.raises(BadInput) as error:
        from_dict(data)
    assert str(error.value) == message


def test_bad_input_is_a_value_error_of_this_library() -> None:
    with pytest.raises(ValueError, match="shortcut") as error:
        parse("none")
    assert isinstance(error.value, UnskipError)


def test_the_base_is_abstract() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Shortcut()  # type: ignore[abstract]
