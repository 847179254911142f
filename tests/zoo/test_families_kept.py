"""Rewiring does not change weights, modules and classes, and works with copies and training tools."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tests.zoo.more  # noqa: F401  (registers further families)
import torch
from tests.zoo.families import FAMILIES, PRISTINE, Family, classes
from tests.zoo.harness import (
    changes,
    checkpointed,
    expected_warnings,
    floats,
    gradient_difference,
    gradients,
    recorded_outputs,
    run,
    same,
    snapshot,
)
from tests.zoo.rewired import CLOSE, HALF, rewired, some_families, some_families_and, spread
from torch import nn

import unskip
from unskip import Anneal, Cut, Decay, Keep, Learn, Scale, Wiring
from unskip.errors import ForwardError

# --- Unchanged weights, classes and outputs ---------------------------------------------------------------------------


@some_families_and(HALF, Cut(), Anneal(Keep(), HALF, steps=4))
def test_weights_and_modules_stay(family: Family, rule: Any) -> None:
    model = family.build()
    values = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    with expected_warnings(family):
        wiring = unskip.rewire(model, rule, family.inputs(2))
    wiring.step(2)
    state = model.state_dict()
    assert list(state) == list(values)
    assert all(torch.equal(state[name], values[name]) for name in values)
    assert [(n, id(m)) for n, m in model.named_modules()] == [(n, id(m)) for n, m in modules.items()]
    assert [(n, id(p)) for n, p in model.named_parameters()] == [(n, id(p)) for n, p in parameters.items()]
    plain = family.build()
    for path, module in modules.items():
        assert isinstance(module, type(plain.get_submodule(path)))
        assert type(module).__qualname__ == type(plain.get_submodule(path)).__qualname__
    assert str(model) == str(plain)


@some_families
def test_other_instances_and_the_classes_are_left_alone(family: Family) -> None:
    inputs, other = family.inputs(2), family.build()
    outputs, modules = run(other, inputs), snapshot(other)
    model, _ = rewired(family)
    moved = run(model, inputs)
    assert not same(moved, outputs)
    assert same(run(other, inputs), outputs)
    assert changes(modules, snapshot(other)) == []
    for cls in classes(other):
        attributes, names = PRISTINE[cls]
        # Python adds empty annotations to a class when they are read, as torch.jit did in earlier tests.
        found = {name: value for name, value in vars(cls).items() if name != "__annotations__" or name in attributes}
        assert found == attributes
        new = set(vars(sys.modules[cls.__module__])) - names
        # torch.compile adds such names to modules in earlier tests.
        assert not [name for name in new if "unskip" in name and not name.startswith("__import_")]


@some_families
def test_undo_restores_everything(family: Family) -> None:
    inputs, model = family.inputs(2), family.build()
    before, outputs, text = snapshot(model), run(model, inputs), str(model)
    with torch.no_grad():
        quiet = run(model, inputs)
    for rule in (HALF, Cut(), Learn(0.5), Anneal(Keep(), Cut(), steps=4)):
        with expected_warnings(family):
            wiring = unskip.rewire(model, rule, inputs, verify=rule is HALF)
        wiring.step(2)
        assert not same(run(model, inputs), outputs)
        wiring.undo()
        assert changes(before, snapshot(model)) == []
        assert str(model) == text
        assert same(run(model, inputs), outputs)
        with torch.no_grad():
            assert same(run(model, inputs), quiet)


@some_families
def test_context_manager_restores_everything(family: Family) -> None:
    inputs, model = family.inputs(2), family.build()
    before, outputs = snapshot(model), run(model, inputs)
    with expected_warnings(family), unskip.rewired(model, Cut(), inputs) as wiring:
        assert [alpha == 0 for alpha in wiring.alphas] == [i in family.governed for i in range(len(family.sites))]
        assert not same(run(model, inputs), outputs)
    assert changes(before, snapshot(model)) == []
    with pytest.raises(ZeroDivisionError), expected_warnings(family), unskip.rewired(model, Cut(), inputs):
        raise ZeroDivisionError
    assert changes(before, snapshot(model)) == []
    assert same(run(model, inputs), outputs)


@some_families
def test_context_manager_gives_the_wiring_back_that_was_there(family: Family) -> None:
    inputs = family.inputs(2)
    model, wiring = rewired(family)
    outputs = run(model, inputs)
    with expected_warnings(family), unskip.rewired(model, Cut(), inputs):
        assert not same(run(model, inputs), outputs)
    assert list(zip(wiring.alphas, wiring.betas, strict=True)) == spread(family, [(0.5, 0.7)] * len(family.governed))
    assert Wiring.of(model) is wiring
    assert same(run(model, inputs), outputs)


@some_families
def test_rewiring_again_replaces(family: Family) -> None:
    inputs = family.inputs(2)
    model, first = rewired(family, Scale(0.3, 0.9))
    wanted = run(model, inputs)
    model, wiring = rewired(family)
    modules = snapshot(model)
    assert not same(run(model, inputs), wanted)
    assert unskip.rewire(model, Scale(0.3, 0.9), inputs) is wiring
    assert (wiring.alphas, wiring.betas) == (first.alphas, first.betas)
    assert same(run(model, inputs), wanted)
    assert [cls for cls, _ in modules.values()] == [cls for cls, _ in snapshot(model).values()]
    wiring.undo()
    assert same(run(model, inputs), run(family.build(), inputs))


@some_families
@pytest.mark.parametrize("fault", ["example", "where", "bind"])
def test_a_rewiring_that_fails_leaves_the_model_as_it_was(
    family: Family, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, model = family.inputs(2), family.build()
    before, outputs = snapshot(model), run(model, inputs)
    options: dict[str, Any] = {"example": inputs}
    error: type[Exception] = ZeroDivisionError
    last = len(family.sites) - 1
    if fault == "example":
        options["example"], error = torch.zeros(1), ForwardError
    elif fault == "where":
        options["where"] = lambda site: 1 / (last - site.index) > 0
    else:
        # Fails at the last module, when all others are patched.
        _fail_at(monkeypatch, len({family.sites[i].path for i in family.governed}))
        options["verify"] = False
    with pytest.raises(error):
        unskip.rewire(model, HALF, **options)
    assert changes(before, snapshot(model)) == []
    assert same(run(model, inputs), outputs)


def _fail_at(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    from unskip.wiring import _wiring

    calls, bind = itertools.count(1), _wiring.bind

    def failing(module: nn.Module, patch: Any) -> None:
        bind(module, patch)
        if next(calls) == number:
            raise ZeroDivisionError

    monkeypatch.setattr(_wiring, "bind", failing)


# --- Copies -----------------------------------------------------------------------------------------------------------


@some_families_and(HALF, Learn(0.5), Anneal(Keep(), HALF, steps=4))
def test_deepcopy_is_rewired_and_independent(family: Family, rule: Any) -> None:
    inputs = family.inputs(2)
    model, wiring = rewired(family, rule)
    wiring.step(2)
    outputs, plain = run(model, inputs), run(family.build(), inputs)
    twin = copy.deepcopy(model)
    theirs = Wiring.of(twin)
    assert theirs is not wiring
    assert theirs.model is twin
    assert same(run(twin, inputs), outputs)
    theirs.set(Scale(0.1, 0.4))
    changed = run(twin, inputs)
    assert not same(changed, outputs)
    assert same(run(model, inputs), outputs)
    wiring.undo()
    assert same(run(model, inputs), plain)
    assert same(run(twin, inputs), changed)
    theirs.undo()
    assert same(run(twin, inputs), plain)
    assert not {id(module) for module in twin.modules()} & {id(module) for module in model.modules()}


@some_families_and(HALF, Cut(), Learn(0.5), Anneal(Keep(), HALF, steps=4))
def test_pickle_keeps_the_wiring(family: Family, rule: Any) -> None:
    inputs = family.inputs(2)
    model, wiring = rewired(family, rule)
    wiring.step(2)
    outputs, plain = run(model, inputs), run(family.build(), inputs)
    assert not same(outputs, plain)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for loaded in (pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)):
        assert same(run(loaded, inputs), outputs)
        theirs = Wiring.of(loaded)
        assert (theirs.alphas, theirs.betas) == (wiring.alphas, wiring.betas)
        theirs.step(3)
        if isinstance(rule, Anneal):
            assert not same(run(loaded, inputs), outputs)
        theirs.undo()
        assert same(run(loaded, inputs), plain)
    assert same(run(model, inputs), outputs)


FRESH = """
import sys
import torch
torch.set_num_threads(1)
model, inputs = torch.load(sys.argv[1], weights_only=False)
torch.save(model(**inputs) if isinstance(inputs, dict) else model(inputs), sys.argv[2])
"""


@pytest.mark.full
@pytest.mark.parametrize("name", [pytest.param("timm_vit", marks=pytest.mark.full), "hf_bert"])
def test_a_saved_model_is_rewired_in_a_fresh_process(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    inputs = family.inputs(2)
    model, _ = rewired(family, Decay(0.3))
    torch.save((model, inputs), tmp_path / "model.pt")
    subprocess.run([sys.executable, "-c", FRESH, tmp_path / "model.pt", tmp_path / "out.pt"], check=True)
    outputs = torch.load(tmp_path / "out.pt", weights_only=False)
    assert not same(run(family.build(), inputs), run(model, inputs))
    assert same(floats(outputs), run(model, inputs))


# --- Training tools ---------------------------------------------------------------------------------------------------


@some_families_and(HALF, Cut(), Learn(0.5))
def test_gradient_checkpointing_changes_no_gradient(family: Family, rule: Any) -> None:
    inputs = family.inputs(2)
    model, _ = rewired(family, rule)
    model.train()
    with recorded_outputs(model) as calls:
        outputs, grads = gradients(model, inputs)
    with checkpointed(model, family), recorded_outputs(model) as more_calls:
        checked, checked_grads = gradients(model, inputs)
    assert len(more_calls) >= len(calls) + len(family.sites), "nothing was computed twice"
    assert same(outputs, checked)
    assert gradient_difference(checked_grads, grads) < CLOSE


@some_families_and(HALF, Keep(), Scale(0.5), Scale(1.0, 0.7), Cut(), Learn(0.5), Anneal(Keep(), HALF, steps=4))
@pytest.mark.filterwarnings(
    "ignore:Mismatch dtype between input and weight:UserWarning"
)  # from a layer norm in bfloat16
def test_autocast_keeps_every_dtype(family: Family, rule: Any) -> None:
    inputs = family.inputs(2)
    original = family.build()
    model, wiring = rewired(family, rule, force=True, verify=False)
    wiring.step(2)
    seen: list[Any] = []
    for each in (original, model):
        with torch.autocast("cpu", torch.bfloat16), recorded_outputs(each) as dtypes:
            outputs, grads = gradients(each, inputs)
        seen.append(dtypes)
        assert all(tensor.isfinite().all() for tensor in (*outputs, *grads.values()))
    assert seen[0] == seen[1]
    assert any("bfloat16" in dtypes for _, dtypes in seen[0])
