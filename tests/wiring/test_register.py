"""User-defined rules: text and JSON forms, rewire, save, and load in a process with or without the rule."""

import json
import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.anatomy import handmade as h
from tests.commands import python_in

import unskip
from unskip import Anneal, Cut, Decay, Keep, Learn, Scale, Shortcut
from unskip.errors import BadInput, LoadError
from unskip.wiring import Wiring, from_dict, parse, register
from unskip.wiring._shortcut import _RULES

X = torch.randn(2, 5, h.DIM, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def restore_registry() -> Iterator[None]:
    """Unregisters the rules that a test registered."""
    before = dict(_RULES)
    yield
    _RULES.clear()
    _RULES.update(before)


def register_lessen() -> type[Shortcut]:
    @register
    @dataclass(frozen=True)
    class Lessen(Shortcut):
        factor: float = 0.5
        from_site: int = 0
        name = "lessen"
        form = "lessen:0.5"
        numbers = ("factor",)

        def weights_at(self, count: int, runs: tuple[int, ...], step: int) -> Iterable[tuple[float, float]]:
            return [(self.factor if site >= self.from_site else 1.0, 1.0) for site in range(count)]

    return Lessen


def test_custom_rule_text_and_json_round_trip() -> None:
    kind = register_lessen()
    rule = parse("lessen:0.25,from_site=1")
    assert rule == kind(0.25, 1)
    assert type(rule.from_site) is int
    assert str(rule) == "lessen:0.25,from_site=1"
    assert parse(str(rule)) == rule
    assert str(kind()) == "lessen:0.5"
    assert from_dict(json.loads(json.dumps(rule.to_dict()))) == rule
    annealed = parse("anneal:keep>lessen:0.25@10")
    assert annealed == Anneal(Keep(), kind(0.25), 10)
    assert annealed.weights(2, step=5) == [(0.625, 1.0)] * 2


def test_rewire_with_a_custom_rule() -> None:
    register_lessen()
    model = h.Nested().eval()
    wiring = unskip.rewire(model, "lessen:0.25,from_site=1", X)
    assert wiring.alphas == [1.0, 0.25]
    assert "lessen:0.25" in str(wiring)
    got = model(X)
    with unskip.rewired(model, {lambda site: site.index == 1: Scale(0.25, 1.0)}):
        torch.testing.assert_close(model(X), got, rtol=0, atol=0)


def test_custom_learnable_rule() -> None:
    @register
    class Ramp(Shortcut):  # register makes it a frozen dataclass
        end: float = 0.5
        name = "ramp"
        form = "ramp:0.5"
        numbers = ("end",)
        learnable = True
        per = "channel"

        def weights_at(self, count: int, runs: tuple[int, ...], step: int) -> Iterable[tuple[float, float]]:
            return [(1 - (1 - self.end) * site / max(count - 1, 1), 1.0) for site in range(count)]

    model = h.Nested()
    wiring = unskip.rewire(model, "ramp:0.5", X)
    assert [tuple(p.shape) for p in wiring.parameters.values()] == [(h.DIM,), (h.DIM,)]
    assert wiring.alphas == [1.0, 0.5]
    model(X).sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in wiring.parameters.values())
    with pytest.raises(BadInput, match="fixed weights"):
        Anneal(Keep(), parse("ramp:0.5"), 5)


def test_custom_rule_that_depends_on_the_step() -> None:
    @register
    class Bump(Shortcut):
        steps: int = 8
        name = "bump"
        form = "bump:8"
        numbers = ("steps",)

        def weights_at(self, count: int, runs: tuple[int, ...], step: int) -> Iterable[tuple[float, float]]:
            return [(0.5 if 0 < step < self.steps else 1.0, 1.0)] * count  # the last weights equal the first

    wiring = unskip.rewire(h.Nested(), "bump:8", X)
    seen = []
    for step in (0, 3, 8):
        wiring.step(step)
        seen.append(wiring.alphas)
    assert seen == [[1.0, 1.0], [0.5, 0.5], [1.0, 1.0]]


PLUGIN = """
from dataclasses import dataclass
import unskip

@unskip.wiring.register
@dataclass(frozen=True)
class Fade(unskip.Shortcut):
    rate: float
    name = "fade"
    form = "fade:0.9"
    numbers = ("rate",)

    def weights_at(self, count, runs, step):
        return [(self.rate**site, 1.0) for site in range(count)]
"""

SAVE = """
import fade_rules, torch, unskip
from tests.anatomy import handmade as h
model = h.Nested()
unskip.rewire(model, "anneal:keep>fade:0.5@10", torch.randn(2, 5, h.DIM)).step(10)
unskip.save(model, "saved")
"""

LOAD = """
import unskip
from tests.anatomy import handmade as h
try:
    model = unskip.load("saved", h.Nested())
except unskip.errors.LoadError as error:
    print("refused", error)
else:
    print(unskip.Wiring.of(model).alphas)
"""


def test_loading_a_custom_rule_needs_its_module(tmp_path: Path) -> None:
    (tmp_path / "fade_rules.py").write_text(PLUGIN)
    assert python_in(tmp_path, SAVE) == (0, "", "")
    assert python_in(tmp_path, f"import fade_rules{LOAD}") == (0, "[1.0, 0.5]\n", "")
    _, refused, _ = python_in(tmp_path, LOAD)
    assert refused.startswith("refused")
    assert "'fade'" in refused
    assert "fade_rules" in refused
    assert "damaged" not in refused


def test_pickled_model_keeps_a_custom_rule() -> None:
    model = h.Nested()
    unskip.rewire(model, At(0.5), X)
    assert Wiring.of(pickle.loads(pickle.dumps(model))).alphas == [0.5, 1.0]


@dataclass(frozen=True)
class At(Shortcut):
    """Not registered: usable as a value, but not by text."""

    alpha: float
    name = "at"
    form = "at:0.5"
    numbers = ("alpha",)

    def weights_at(self, count: int, runs: tuple[int, ...], step: int) -> Iterable[tuple[float, float]]:
        return [(self.alpha, 1.0)] + [(1.0, 1.0)] * (count - 1)


def test_load_error_names_an_unregistered_rule(tmp_path: Path) -> None:
    model = h.Nested()
    unskip.rewire(model, At(0.5), X)
    unskip.save(model, tmp_path)
    with pytest.raises(LoadError, match=r"'at'.*not registered"):
        unskip.load(tmp_path, h.Nested())


def rule_class(**attributes: Any) -> type[Shortcut]:
    body = {"name": "odd", "form": "odd:1", "weights_at": lambda *_: [], "__module__": __name__, **attributes}
    return type("Odd", (Shortcut,), body)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (int, "Shortcut"),
        (rule_class(name="Odd Name"), "name"),
        (rule_class(name="a:b"), "name"),
        (rule_class(form="other:1"), "form"),
        (rule_class(numbers=("missing",)), "missing"),
        (rule_class(name="cut", form="cut"), "taken"),
        (dataclass(rule_class()), "frozen"),
    ],
)
def test_bad_rules_are_not_registered(kind: Any, message: str) -> None:
    before = dict(_RULES)
    with pytest.raises(BadInput, match=message):
        register(kind)
    assert before == _RULES


def test_redefinition_replaces_a_rule_but_a_name_clash_is_refused() -> None:
    first, second = register_lessen(), register_lessen()
    assert type(parse("lessen:0.5")) is second is not first
    with pytest.raises(BadInput, match="taken"):
        register(rule_class(name="lessen", form="lessen:1"))


@pytest.mark.parametrize(
    "pairs",
    [[(1.0, 1.0)], [(1.0, 1.0)] * 3, [(1.0,)] * 2, [(1.0, float("nan"))] * 2, [("1", 1.0)] * 2, [1.0, 0.5], 1.0],
)
def test_invalid_weights_are_refused(pairs: Any) -> None:
    kind = register(rule_class(weights_at=lambda self, count, runs, step: pairs))
    with pytest.raises(BadInput, match="weights_at"):
        kind().weights(2)


@pytest.mark.parametrize(
    "text",
    ["cut", "scale:0,1", "decay:0", "decay:0,cosine", "anneal:keep>scale:0,1@10", "anneal:cut>keep@10", "learn:0"],
)
def test_rules_that_cut(text: str) -> None:
    assert parse(text).cuts(24)


@pytest.mark.parametrize(
    "rule", [Keep(), Decay(0.6), Decay.to_product(1e-3), Scale(0.1, 0), Learn(), Anneal(Keep(), Decay(0.1), 5)], ids=str
)
def test_rules_that_do_not_cut(rule: Shortcut) -> None:
    assert not rule.cuts(24)


def test_decay_to_zero_cuts_only_with_a_site_at_the_minimum() -> None:
    rule = Decay(0.0, back=True)  # only an odd count has a site at the minimum
    assert [rule.cuts(count) for count in (1, 2, 3, 4, 5)] == [True, False, True, False, True]
    assert not Cut().cuts(0)


def test_rule_that_depends_on_the_step_must_set_steps() -> None:
    kind = register(rule_class(weights_at=lambda self, count, runs, step: [(1 / (1 + step), 1.0)] * count))
    with pytest.raises(BadInput, match="steps"):
        kind().weights(2)


@pytest.mark.parametrize("method", [None, lambda self, count, step: []])
def test_register_checks_weights_at(method: Any) -> None:
    kind = rule_class(weights_at=method) if method else type("Odd", (Shortcut,), {"name": "odd", "form": "odd:1"})
    with pytest.raises(BadInput, match="weights_at"):
        register(kind)


def test_temporary_cut_counts_as_a_cut() -> None:
    def at(self: Any, count: int, runs: tuple[int, ...], step: int) -> list[tuple[float, float]]:
        return [(0.0 if 0 < step < 4 else 1.0, 1.0)] * count

    assert register(rule_class(weights_at=at, steps=4))().cuts(2)
