"""torch.compile makes one graph of a rewired model, uses its current weights, and does not recompile in every step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import tests.zoo.more  # noqa: F401  (registers further families)
import torch
from tests.zoo.families import FAMILIES
from tests.zoo.harness import difference, expected_warnings, gradient_difference, gradients, run, same
from tests.zoo.oracle import weighted
from torch import nn
from torch._dynamo.testing import CompileCounter

import unskip
from unskip import Anneal, Cut, Decay, Keep, Learn, Scale

CLOSE = 2e-6


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("timm_vit_layerscale_droppath", marks=pytest.mark.full),
        pytest.param("timm_eva02", marks=pytest.mark.full),
        "nn_encoder_post",
        "hf_llama",
        "hand_control_flow",
        pytest.param("hand_spellings", marks=pytest.mark.full),
        pytest.param("hand_helpers", marks=pytest.mark.full),
        pytest.param("hand_inherited", marks=pytest.mark.full),
    ],
)
def test_one_graph_that_equals_eager(name: str) -> None:
    family = FAMILIES[name]
    inputs, model = family.inputs(2), family.build()
    unskip.rewire(model, Decay(0.3), inputs, verify=False)
    outputs, grads = gradients(model, inputs)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    got, got_grads = gradients(compiled, inputs)
    assert difference(got, outputs) < CLOSE
    assert gradient_difference({n.removeprefix("_orig_mod."): g for n, g in got_grads.items()}, grads) < 10 * CLOSE
    assert difference(run(family.build(), inputs), outputs) > 1e-2


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(name for name in FAMILIES if not name.startswith("hand_")))
def test_a_model_that_compiles_to_one_graph_does_so_when_rewired(name: str) -> None:
    family = FAMILIES[name]
    inputs, plain, model = family.inputs(2), family.build().eval(), family.build().eval()
    try:
        with torch.no_grad():
            run(torch.compile(plain, backend="aot_eager", fullgraph=True), inputs)
    except torch._dynamo.exc.TorchDynamoException as error:
        pytest.skip(f"the original does not compile whole: {type(error).__name__}")
    for rule in (Decay(0.3), Cut()):
        torch._dynamo.reset()
        with expected_warnings(family):
            unskip.rewire(model, rule, inputs, verify=False)
        with torch.no_grad():
            expected = run(model, inputs)
            got = run(torch.compile(model, backend="aot_eager", fullgraph=True), inputs)
        assert difference(got, expected) < 10 * CLOSE


def test_a_fixed_weight_can_be_changed_after_compiling() -> None:
    family = FAMILIES["timm_vit"]
    inputs, model = family.inputs(2), family.build()
    wiring = unskip.rewire(model, Scale(0.5, 0.7), inputs)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    seen = []
    for rule in (Scale(0.5, 0.7), Scale(0.2, 0.9), Cut(), Keep()):
        wiring.set(rule)
        seen.append(run(compiled, inputs))
        original = family.build()
        with weighted(original, family, list(zip(wiring.alphas, wiring.betas, strict=True))):
            assert difference(seen[-1], run(original, inputs)) < CLOSE
    assert not any(same(a, b) for a, b in itertools.pairwise(seen))
    wiring.undo()
    assert difference(run(compiled, inputs), run(family.build(), inputs)) < CLOSE


@pytest.mark.parametrize(
    ("name", "order"),
    [("timm_vit", None), ("timm_vit", "last-first"), pytest.param("hand_control_flow", None, marks=pytest.mark.full)],
)
def test_an_anneal_compiles_once_and_again_at_its_end(name: str, order: Any) -> None:
    family = FAMILIES[name]
    inputs, model = family.inputs(2), family.build()
    wiring = unskip.rewire(model, Anneal(Keep(), Cut(), steps=20, order=order), inputs, verify=False)
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for step in range(20):
        wiring.step(step)
        out = run(compiled, inputs)
        assert difference(out, run(model, inputs)) < CLOSE
        if step == 10:
            original = family.build()
            with weighted(original, family, [*zip(wiring.alphas, wiring.betas, strict=True)]):
                assert difference(out, run(original, inputs)) < CLOSE
    assert counter.frame_count == 1
    before = counter.op_count
    for step in range(20, 25):
        wiring.step(step)
        out = run(compiled, inputs)
    assert counter.frame_count == 2
    assert counter.op_count - before < before  # the second graph has no residual additions
    original = family.build()
    with weighted(original, family, [(0.0, 1.0)] * len(family.sites)):
        assert difference(out, run(original, inputs)) < CLOSE


def test_weights_that_differ_between_sites_are_inputs_of_the_graph() -> None:
    """As constants they would lead to different kernels for each block."""
    family = FAMILIES["timm_vit"]
    inputs, model = family.inputs(2), family.build()
    wiring = unskip.rewire(model, Decay(0.3), inputs, verify=False)
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for rule in (Decay(0.3), Decay(0.7)):
        wiring.set(rule)
        assert difference(run(compiled, inputs), run(model, inputs)) < CLOSE
    assert len(graphs) == 1  # another decay needs no other graph
    numbers = {str(value) for node in graphs[0].graph.nodes for value in (*node.args, *node.kwargs.values())}
    assert not numbers & {str(alpha) for alpha in wiring.alphas if alpha != 1}


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)  # torch's own access
def test_blocks_of_equal_weights_share_one_compiled_graph() -> None:
    family = FAMILIES["timm_vit"]
    inputs = family.inputs(2)
    model = family.build()
    other = family.build()
    model.blocks = nn.Sequential(*model.blocks, *other.blocks)
    wiring = unskip.rewire(model, Anneal(Keep(), Scale(0.5), steps=8), inputs, verify=False)
    counter = CompileCounter()
    outputs = []
    for step in range(8):
        wiring.step(step)
        outputs.append(run(model, inputs))
    for block in model.blocks:
        block.compile(backend=counter, fullgraph=True)
    for step in range(8):
        wiring.step(step)
        assert difference(run(model, inputs), outputs[step]) < CLOSE
    assert len(wiring.sites) == 8
    assert counter.frame_count == 1


@pytest.mark.parametrize("rule", [Learn(0.5), Learn(0.5, per="channel")], ids=str)
def test_learned_weights_train_under_compile(rule: Any) -> None:
    family = FAMILIES["timm_vit"]
    inputs, model = family.inputs(2), family.build()
    with expected_warnings(family):
        wiring = unskip.rewire(model, rule, inputs, verify=False)
    _, grads = gradients(model, inputs)
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for _ in range(3):
        _, got = gradients(compiled, inputs)
        alphas = {name: got[f"_orig_mod.{name}"] for name in wiring.parameters}
        wanted = {name: gradients(model, inputs)[1][name] for name in wiring.parameters}
        assert gradient_difference(alphas, wanted) < 10 * CLOSE
        with torch.no_grad():
            for parameter in wiring.parameters.values():
                parameter.sub_(0.01 * parameter.sign())
    assert counter.frame_count == 1
    assert grads.keys() >= wiring.parameters.keys()
