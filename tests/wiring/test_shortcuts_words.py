"""Round trips of rules through text, dicts and pickle, and the error messages for bad input."""

import copy
import json
import math
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from tests.wiring.rules import RULES, rules

from unskip.errors import BadInput, UnskipError
from unskip.wiring import Anneal, Cut, Decay, Keep, Learn, Scale, Shortcut, band, effective_decay, from_dict, parse

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
        ("anneal:keep>cut@5,cosine,last-first", Anneal(Keep(), Cut(), 5, "cosine", "last-first")),
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
def test_alternative_text_forms(text: str, rule: Shortcut) -> None:
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
def test_rules_are_immutable_values(rule: Shortcut) -> None:
    assert [other for other in RULES if other == rule] == [rule]
    assert len({rule, copy.deepcopy(rule)}) == 1
    with pytest.raises(FrozenInstanceError):
        rule.steps = 3


def test_dict_forms() -> None:
    assert Keep().to_dict() == {"rule": "keep"}
    assert Learn().to_dict() == {"rule": "learn", "start": 1.0, "per": "site"}
    options = {"shape": "linear", "convention": "sites", "until": 1.0, "back": False}
    assert Decay(0.6).to_dict() == {"rule": "decay", "alpha_min": 0.6, **options}
    assert Decay.to_product(0.5).to_dict() == {"rule": "decay", "product": 0.5, **options}
    anneal = {"rule": "anneal", "first": {"rule": "keep"}, "last": {"rule": "cut"}, "steps": 5, "shape": "linear"}
    assert Anneal(Keep(), Cut(), 5).to_dict() == anneal
    assert from_dict({"rule": "decay", "alpha_min": 0.6}) == Decay(0.6)
    assert from_dict({"rule": "decay", "alpha_min": 1}).to_dict()["alpha_min"] == 1.0


def test_numpy_numbers_become_python_numbers() -> None:
    rule = Scale(np.float32(0.5), 2)  # type: ignore[arg-type]
    assert [type(value) for value in (rule.stream, rule.branch)] == [float, float]
    assert type(Anneal(Keep(), Cut(), np.int64(5)).steps) is int  # type: ignore[arg-type]
    assert str(Scale(-0.0, 1)) == "scale:0.0,1.0"
    assert Decay(np.float64(0.6)).weights(np.int64(2), runs=np.array([1, 2]), step=np.int64(3)) == [(1, 1), (0.6, 1)]  # type: ignore[arg-type]


# --- Bad input ---

BAD = [math.nan, math.inf, -math.inf, -0.1, True, "0.5", 1j, [0.5], 10**400, Decimal("0.5")]


def refused(make: Callable[[], object], facts: tuple[str, ...]) -> None:
    """Checks that `make` raises BadInput with every fact in the message: rule, argument, allowed and given values."""
    with pytest.raises(BadInput) as error:
        make()
    missing = [fact for fact in facts if fact not in str(error.value)]
    assert not missing, str(error.value)


@pytest.mark.parametrize("value", BAD, ids=lambda value: repr(value)[:9])
@pytest.mark.parametrize(
    ("make", "facts"),
    [
        (Scale, ("Scale", "stream", "0 or more")),
        (lambda value: Scale(1, value), ("Scale", "branch", "0 or more")),
        (Learn, ("Learn", "start", "0 or more")),
        (lambda value: effective_decay([0.5, value]), ("effective_decay", "alpha", "0 or more")),
        (band, ("band", "decay", "0 or more")),
        (Decay, ("Decay", "alpha_min", "[0, 1]")),
        (Decay.to_product, ("Decay", "product", "(0, 1]")),
        (lambda value: Decay(0.6, until=value), ("Decay", "until", "(0, 1]")),
    ],
)
def test_out_of_range_numbers(make: Any, facts: tuple[str, ...], value: Any) -> None:
    refused(lambda: make(value), (*facts, repr(value)[:10]))


@pytest.mark.parametrize(
    ("make", "facts"),
    [
        (lambda: Scale(None), ("stream", "None")),
        (lambda: Decay.to_product(None), ("alpha_min", "product")),
        (lambda: Decay(), ("alpha_min", "product")),
        (lambda: Decay(0.6, product=0.1), ("alpha_min", "product")),
        (lambda: Decay(1.5), ("alpha_min", "[0, 1]", "1.5")),
        (lambda: Decay(0, "geometric"), ("geometric", "(0, 1]", "got 0")),
        (lambda: Decay.to_product(0), ("product", "(0, 1]", "got 0")),
        (lambda: Decay.to_product(1.01), ("product", "1.01")),
        (lambda: Decay(0.6, until=0), ("until", "(0, 1]", "got 0")),
        (lambda: Decay(0.6, until=1.5), ("until", "1.5")),
        (lambda: Decay(0.6, "cosin"), ("shape", "'cosin'", "nearest: cosine")),
        (lambda: Decay(0.6, 3), ("shape", "got 3")),
        (lambda: Decay(0.6, convention="site"), ("convention", "'site'", "nearest: sites")),
        (lambda: Decay(0.6, back=1), ("back", "True or False", "got 1")),
        (lambda: Decay(0.6, until=1, back=True), ("back", "until", "below 1")),
        (lambda: Learn(1.0, "head"), ("per", "site, channel", "'head'")),
        (lambda: Anneal("keep", Cut(), 5), ("first", "fixed", "'keep'")),
        (lambda: Anneal(Keep(), Learn(), 5), ("last", "fixed", "Learn")),
        (lambda: Anneal(Anneal(Keep(), Cut(), 5), Cut(), 5), ("first", "fixed", "Anneal")),
        (lambda: Anneal(Keep(), Cut(), 0), ("steps", "1 or more", "got 0")),
        (lambda: Anneal(Keep(), Cut(), 1.5), ("steps", "whole", "1.5")),
        (lambda: Anneal(Keep(), Cut(), True), ("steps", "whole", "True")),
        (lambda: Anneal(Keep(), Cut(), 5, "geometric"), ("shape", "'geometric'")),
        (lambda: Anneal(Keep(), Cut(), 5, order="last"), ("order", "last-first", "'last'")),
        (lambda: Keep().weights(-1), ("Keep", "count", "-1")),
        (lambda: Keep().weights(2.0), ("Keep", "count", "2.0")),
        (lambda: Cut().weights(2, step=0.5), ("Cut", "step", "0.5")),
        (lambda: Cut().weights(2, runs=[1]), ("runs", "2 sites", "got 1")),
        (lambda: Cut().weights(2, runs=[1, -1]), ("runs", "-1")),
        (lambda: effective_decay([1, 1], [1, 1, 1]), ("runs", "2 sites", "got 3")),
        (lambda: Decay(0.6).solve(0), ("count", "1 or more", "got 0")),
    ],
)
def test_bad_arguments(make: Any, facts: tuple[str, ...]) -> None:
    refused(make, facts)


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        (0.6, ("string", "0.6")),
        ("dekay:0.6", ("'dekay'", "nearest: decay")),
        ("Keep", ("'Keep'", "nearest: keep")),
        ("DECAY:0.6", ("'DECAY'", "nearest: decay")),
        ("", ("keep", "cut", "scale", "learn", "decay", "anneal")),
        ("rezero:1", ("'rezero'", "register")),
        ("keep:0.5", ("'0.5'", "too many", "keep")),
        ("cut:", ("''", "cut")),
        ("decay", ("alpha_min", "product")),
        ("decay:0.6,", ("''", "write decay:0.6")),
        ("decay:0.6,cosin", ("'cosin'", "nearest: cosine", "write decay:0.6")),
        ("decay:0.6,untill=0.5", ("'untill=0.5'", "nearest: until")),
        ("decay:0.6,until=half", ("'until=half'", "number")),
        ("decay:0.6,0.7", ("'0.7'", "too many")),
        ("decay:0.6,cosine,linear", ("shape", "twice", "'linear'")),
        ("decay:0.6,alpha_min=0.5", ("alpha_min", "twice")),
        ("decay:nan", ("alpha_min", "nan")),
        ("decay:inf", ("alpha_min", "inf")),
        ("decay:-0.5", ("alpha_min", "-0.5")),
        ("scale:1,2,3", ("'3'", "too many", "write scale:")),
        ("scale:a,b", ("'a'", "number")),
        ("learn:1,chanel", ("'chanel'", "nearest: channel")),
        ("anneal", ("'@'", "steps", "write anneal:")),
        ("anneal:keep>cut", ("'@'", "steps")),
        ("anneal:keep@10", ("two rules", "'>'", "'keep'")),
        ("anneal:anneal:keep>cut@5>keep@10", ("two rules", "'>'")),
        ("anneal:keep>cut@1e4", ("steps", "whole", "'1e4'")),
        ("anneal:keep>cut@0", ("steps", "1 or more", "got 0")),
        ("anneal:keep>cut@5,cosin", ("shape", "nearest: cosine")),
        ("anneal:keep>cut@5,last-first,first-last", ("'first-last'", "second")),
        ("anneal:keep>kut@5", ("'kut'", "nearest: cut")),
        ("anneal:keep>learn:1.0@5", ("last", "fixed")),
    ],
)
def test_bad_text(text: Any, facts: tuple[str, ...]) -> None:
    refused(lambda: parse(text), facts)


@pytest.mark.parametrize(
    ("data", "facts"),
    [
        ("keep", ("dict", "'keep'")),
        ({"name": "cut"}, ("'rule'", "{'name': 'cut'}")),
        ({"rule": None}, ("'rule'", "None")),
        ({"rule": "scal"}, ("'scal'", "nearest: scale")),
        ({"rule": "keep", "alpha": 1}, ("keep", "'alpha'", "none")),
        ({"rule": "decay", "alpha_mn": 0.6}, ("'alpha_mn'", "nearest: alpha_min", "product")),
        ({"rule": "anneal", "last": {"rule": "cut"}}, ("anneal", "first, steps")),
        ({"rule": "anneal", "first": {"rule": "kep"}}, ("'kep'", "nearest: keep")),
        ({"rule": "scale", "stream": {"rule": "cut"}}, ("stream", "Cut()")),
        ({"rule": "decay", "alpha_min": "0.6"}, ("alpha_min", "'0.6'")),
    ],
)
def test_bad_dicts(data: Any, facts: tuple[str, ...]) -> None:
    refused(lambda: from_dict(data), facts)


def test_bad_input_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="shortcut") as error:
        parse("none")
    assert isinstance(error.value, UnskipError)


def test_shortcut_is_abstract() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Shortcut()  # type: ignore[abstract]
