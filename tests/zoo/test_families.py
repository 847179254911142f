"""Properties of rewiring, tested on all families of models."""

from __future__ import annotations

from typing import Any

import pytest
import tests.zoo.more  # noqa: F401  (registers further families)
import torch
from tests.zoo import handmade
from tests.zoo.families import FAMILIES, Expected, Family, Poison, tokens
from tests.zoo.harness import (
    additions,
    changes,
    difference,
    expected_warnings,
    gradient_difference,
    gradients,
    poisoned,
    run,
    same,
    snapshot,
)
from tests.zoo.oracle import REFERENCES, Weights, weighted
from tests.zoo.rewired import CLOSE, HALF, PARAMETERS, SOME, at, each_family, rewired, some_families, spread

import unskip
from unskip import Anneal, Cut, Decay, Keep, Learn, Scale
from unskip.errors import UnskipWarning

each_family_with_oracle = pytest.mark.parametrize("family", [PARAMETERS[f.name] for f in FAMILIES.values() if f.oracle])
some_families_with_oracle = pytest.mark.parametrize("family", [SOME[f.name] for f in FAMILIES.values() if f.oracle])
each_mode = pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])


# --- What the audit finds ---------------------------------------------------------------------------------------------


@each_family
def test_audit_finds_exactly_the_residuals(family: Family) -> None:
    model = family.build()
    before = snapshot(model)
    audit = unskip.audit(model, family.inputs(2))
    found = [Expected(s.path, s.kind, s.norm, s.runs, s.projected, s.long) for s in sorted(audit, key=lambda s: s.long)]
    assert found == list(family.sites)
    assert [s.problem for s in audit] == [None] * len(audit)
    assert (audit.unknown, audit.notes) == ((), ())
    assert changes(before, snapshot(model)) == []


@some_families
def test_audit_of_one_row_finds_the_same(family: Family) -> None:
    """With one row, tensors without a batch dimension, such as position embeddings, have the shape of the stream."""
    model = family.build()
    one, two = (unskip.audit(model, family.inputs(batch)) for batch in (1, 2))
    assert [(s.path, s.kind, s.norm, s.source) for s in one] == [(s.path, s.kind, s.norm, s.source) for s in two]


# --- Comparison with the reference ------------------------------------------------------------------------------------


@some_families
@each_mode
def test_alpha_one_is_the_original_bit_for_bit(family: Family, training: bool) -> None:
    inputs = family.inputs(2)
    original = family.build().train(training)
    model, wiring = rewired(family, Keep(), force=True)
    model.train(training)
    assert {path for path, (cls, _) in snapshot(model).items() if cls is not type(original.get_submodule(path))} == {
        site.path for site in family.sites
    }
    assert set(wiring.alphas) == set(wiring.betas) == {1.0}
    outputs, grads = gradients(model, inputs)
    reference, reference_grads = gradients(original, inputs)
    assert same(outputs, reference)
    assert same(list(grads.values()), list(reference_grads.values()))
    with torch.no_grad():
        assert same(run(model, inputs), run(original, inputs))


@some_families
def test_keep_leaves_every_class_alone(family: Family) -> None:
    model, _ = rewired(family, Keep())
    assert [type(module) for module in model.modules()] == [type(module) for module in family.build().modules()]


def assert_matches_oracle(family: Family, rule: Any, weights: Weights, training: bool) -> None:
    """Asserts equal outputs, with and without autograd, and equal gradients of a rewired model and the reference.

    Also checks the reference: with weights of 1 it must equal the forward of the library.
    """
    inputs = family.inputs(2)
    model, wiring = rewired(family, rule)
    assert wiring.alphas == pytest.approx([alpha for alpha, _ in weights])
    assert wiring.betas == pytest.approx([beta for _, beta in weights])
    model.train(training)
    outputs, grads = gradients(model, inputs)
    with torch.no_grad():
        quiet = run(model, inputs)
    original = family.build().train(training)
    plain, plain_grads = gradients(original, inputs)
    with weighted(original, family, [(1.0, 1.0)] * len(family.sites)):
        ones, ones_grads = gradients(original, inputs)
    assert difference(ones, plain) < CLOSE
    assert gradient_difference(ones_grads, plain_grads) < 10 * CLOSE
    with weighted(original, family, weights):
        reference, reference_grads = gradients(original, inputs)
    assert difference(reference, plain) > 1e-2, "the weights move nothing"
    assert difference(outputs, reference) < CLOSE
    assert difference(quiet, reference) < CLOSE
    assert gradient_difference(grads, reference_grads) < 10 * CLOSE


@each_family_with_oracle
def test_scale_matches_the_oracle(family: Family) -> None:
    assert_matches_oracle(family, HALF, spread(family, [(0.5, 0.7)] * len(family.governed)), training=True)


@some_families_with_oracle
def test_decay_matches_the_oracle(family: Family) -> None:
    last = len(family.governed) - 1
    assert_matches_oracle(
        family, Decay(0.3), spread(family, [(1 - 0.7 * i / last, 1.0) for i in range(last + 1)]), training=False
    )


@some_families_with_oracle
def test_weights_of_its_own_for_every_site_match_the_oracle(family: Family) -> None:
    weights = [(1.0, 0.8), (0.0, 1.2), *((0.4 + 0.1 * i, 1.1 - 0.05 * i) for i in range(len(family.sites)))]
    weights = weights[: len(family.sites)]
    assert_matches_oracle(family, {at(i): Scale(*weight) for i, weight in enumerate(weights)}, weights, training=True)


@each_family_with_oracle
def test_cut_matches_the_oracle(family: Family) -> None:
    assert_matches_oracle(family, Cut(), spread(family, [(0.0, 1.0)] * len(family.governed)), training=False)


@some_families_with_oracle
def test_anneal_matches_the_oracle_on_its_way(family: Family) -> None:
    inputs = family.inputs(2)
    model, wiring = rewired(family, Anneal(Keep(), Scale(0.2, 0.6), steps=10))
    for step, alpha, beta in ((0, 1.0, 1.0), (5, 0.6, 0.8), (10, 0.2, 0.6)):
        wiring.step(step)
        original = family.build()
        with weighted(original, family, spread(family, [(alpha, beta)] * len(family.governed))):
            assert difference(run(model, inputs), run(original, inputs)) < CLOSE


@some_families_with_oracle
def test_learned_weights_get_the_oracles_gradient(family: Family) -> None:
    model, wiring = rewired(family, Learn(0.6))
    inputs, names = family.inputs(2), list(wiring.parameters)
    outputs, grads = gradients(model, inputs)
    assert len(names) == len(family.governed)
    alphas = [torch.tensor(0.6, requires_grad=True) for _ in names]
    original = family.build()
    with weighted(original, family, spread(family, [(alpha, 1.0) for alpha in alphas])):  # type: ignore[misc]
        reference, reference_grads = gradients(original, inputs)
    assert difference(outputs, reference) < CLOSE
    wanted = {name: alpha.grad for name, alpha in zip(names, alphas, strict=True)}
    assert all(grad is not None and grad.abs() > 0 for grad in wanted.values())
    assert gradient_difference({name: grads.pop(name) for name in names}, wanted) < 10 * CLOSE  # type: ignore[arg-type]
    assert gradient_difference(grads, reference_grads) < 10 * CLOSE


# --- Cut removes the addition -----------------------------------------------------------------------------------------


@some_families
def test_cut_leaves_no_addition(family: Family) -> None:
    inputs = family.inputs(2)
    before = additions(family.build(), inputs)
    after = additions(rewired(family, Cut())[0], inputs)
    assert before["add"] - after["add"] == sum(family.sites[i].runs for i in family.governed)
    assert {name: n for name, n in before.items() if name != "add"} == {n: c for n, c in after.items() if n != "add"}


@some_families
def test_cut_keeps_a_nan_in_the_stream_from_the_output(family: Family) -> None:
    """The stream is NaN from the first block on, and branches are finite. Cutting any single site removes the NaN."""
    inputs = family.inputs(2)
    poisons = [family.poison] * len(family.sites) if isinstance(family.poison, Poison) else family.poison
    for index, poison in enumerate(poisons):
        model = family.build()
        with poisoned(model, poison):
            assert any(out.isnan().any() for out in run(model, inputs)), "the poison does not arrive"
        with expected_warnings(family):
            unskip.rewire(model, Cut(), inputs, where=at(index), verify=False)
        with poisoned(model, poison):
            assert all(out.isfinite().all() for out in run(model, inputs)), family.sites[index]


@pytest.mark.parametrize("name", [f.name for f in FAMILIES.values() if f.drop_path and f.core])
def test_cut_under_drop_path_warns(name: str) -> None:
    family = FAMILIES[name]
    with pytest.warns(UnskipWarning, match="drop path is on"):
        unskip.rewire(family.build(), Cut(), family.inputs(2))


# --- Single families --------------------------------------------------------------------------------------------------


@each_family
def test_every_class_with_an_addition_has_a_reference(family: Family) -> None:
    model = family.build()
    adders = [type(model.get_submodule(site.path)) for site in family.sites]
    assert family.oracle == ({f"{cls.__module__}.{cls.__qualname__}" for cls in adders} <= REFERENCES.keys())
    assert family.oracle or not family.core


@pytest.mark.parametrize(
    "arguments", [{"attend": False}, {"times": 1}, {"attend": False, "times": 0}, {"times": 2}], ids=str
)
def test_control_flow_depends_on_the_arguments_of_each_call(arguments: dict[str, Any]) -> None:
    """The example runs both steps; calls have other arguments."""
    family = FAMILIES["hand_control_flow"]
    inputs, weights = family.inputs(2), [(0.4 + 0.1 * i, 0.9 - 0.1 * i) for i in range(6)]
    model, _ = rewired(family, {at(i): Scale(*weight) for i, weight in enumerate(weights)})
    original = family.build()
    with weighted(original, family, weights):
        wanted = run(original, inputs, **arguments)
    assert difference(run(model, inputs, **arguments), wanted) < CLOSE


@pytest.mark.parametrize("rule", [Keep(), HALF, Cut(), Anneal(Keep(), HALF, steps=4)], ids=str)
def test_an_addition_in_place_still_changes_its_tensor(rule: Any) -> None:
    block = handmade.IntoStream()
    wiring = unskip.rewire(block, rule, tokens(2, handmade.WIDTH), force=True)
    wiring.step(2)
    x = tokens(2, handmade.WIDTH)
    before = x.clone()
    alpha, beta = wiring.alphas[0], wiring.betas[0]
    with torch.no_grad():
        out = block(x)
        wanted = alpha * before + beta * block.branch(before)
    assert out is x
    assert difference([x], [wanted]) < CLOSE


def test_the_example_is_not_changed() -> None:
    """The model changes its input in place."""
    block, example = handmade.IntoStream(), tokens(2, handmade.WIDTH)
    unskip.audit(block, example)
    unskip.rewire(block, HALF, example)
    assert torch.equal(example, tokens(2, handmade.WIDTH))


def test_mapping_by_kind_governs_only_that_kind() -> None:
    family = FAMILIES["timm_vit"]
    inputs = family.inputs(2)
    model, _ = rewired(family, {"attention": Cut(), "mlp": Scale(0.6, 0.8)})
    original = family.build()
    with weighted(original, family, [(0.0, 1.0), (0.6, 0.8)] * 2):
        assert difference(run(model, inputs), run(original, inputs)) < CLOSE
    model, _ = rewired(family, Scale(0.6), where="mlp")
    with weighted(original, family, [(1.0, 1.0), (0.6, 1.0)] * 2):
        assert difference(run(model, inputs), run(original, inputs)) < CLOSE


def test_a_failed_second_rewiring_keeps_the_first() -> None:
    family = FAMILIES["timm_vit"]
    inputs = family.inputs(2)
    model, wiring = rewired(family, Anneal(Keep(), Scale(0.2), steps=10))
    wiring.step(5)
    outputs = run(model, inputs)
    with pytest.raises(ZeroDivisionError):
        unskip.rewire(model, Cut(), inputs, where=lambda site: 1 / 0 > 0)
    assert same(run(model, inputs), outputs)
    wiring.step(10)
    assert wiring.alphas == [0.2] * len(family.sites)


def test_context_manager_restores_learned_weights() -> None:
    family = FAMILIES["timm_vit"]
    inputs = family.inputs(2)
    model, wiring = rewired(family, Learn(0.5))
    with torch.no_grad():
        for number, parameter in enumerate(wiring.parameters.values()):
            parameter.fill_(0.1 * (number + 1))
    learned = {name: id(parameter) for name, parameter in wiring.parameters.items()}
    with unskip.rewired(model, Cut(), inputs):
        pass
    assert wiring.alphas == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert {
        name: id(parameter) for name, parameter in wiring.parameters.items()
    } == learned  # the same tensors, because an optimizer has references to them
