"""Rules as text, dicts and pickles, there and back; what does not read is refused in words."""

import copy
import json
import math
import pickle
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
