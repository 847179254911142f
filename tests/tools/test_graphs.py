"""torch.compile, torch.export, torch.fx and ONNX capture the rewired model as one graph; TorchScript is refused."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from tests.zoo.families import FAMILIES, Family
from tests.zoo.harness import difference, expected_warnings, floats, gradient_difference, gradients, run
from torch import Tensor, nn

import unskip
from unskip import Anneal, Cut, Decay, Keep, Learn
from unskip.errors import RewireError

CLOSE = 1e-5


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (inputs if isinstance(inputs, tuple) else (inputs,)), {}


def rewired(family: Family, rule: Any) -> nn.Module:
    model = family.build()
    with expected_warnings(family):
        unskip.rewire(model, rule, family.inputs(2), verify=False)
    return model


# --- Compile ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "timm_vit",
        pytest.param("hf_llama", marks=pytest.mark.full),
        pytest.param("torchvision_vit", marks=pytest.mark.full),
    ],
)
def test_inductor_makes_one_graph_that_equals_eager(name: str) -> None:
    family = FAMILIES[name]
    inputs, model = family.inputs(2), rewired(family, Decay(0.3))
    with torch.no_grad():
        eager = run(model, inputs)
        assert difference(run(torch.compile(model, fullgraph=True), inputs), eager) < CLOSE
        assert difference(run(family.build(), inputs), eager) > 1e-2


@pytest.mark.full
@pytest.mark.parametrize("rule", [Decay(0.3), Cut()], ids=str)
@pytest.mark.parametrize("name", ["timm_vit", "hf_llama", "torchvision_vit"])
def test_training_with_inductor_matches_eager(name: str, rule: Any) -> None:
    family = FAMILIES[name]
    inputs, model = family.inputs(2), rewired(family, rule)
    outputs, grads = gradients(model, inputs)
    got, got_grads = gradients(torch.compile(model, fullgraph=True), inputs)
    assert difference(got, outputs) < CLOSE
    assert gradient_difference({n.removeprefix("_orig_mod."): g for n, g in got_grads.items()}, grads) < CLOSE


AOT = """
    timm_vit timm_vit_layerscale_droppath timm_deit3 timm_eva02 timm_parallel_scaling timm_parallel_things
    nn_encoder_pre nn_encoder_post nn_decoder_pre nn_decoder_post torchvision_vit
    hf_vit hf_bert hf_gpt2 hf_llama hf_albert
""".split()


@pytest.mark.full
@pytest.mark.parametrize("rule", [Decay(0.3), Cut()], ids=str)
@pytest.mark.parametrize("name", AOT)
def test_aot_makes_one_graph_that_equals_eager(name: str, rule: Any) -> None:
    family = FAMILIES[name]
    inputs, model = family.inputs(2), rewired(family, rule)
    outputs, grads = gradients(model, inputs)
    got, got_grads = gradients(torch.compile(model, backend="aot_eager", fullgraph=True), inputs)
    assert difference(got, outputs) < CLOSE
    assert gradient_difference({n.removeprefix("_orig_mod."): g for n, g in got_grads.items()}, grads) < CLOSE
    assert difference(run(family.build(), inputs), outputs) > 1e-2


# --- Export -----------------------------------------------------------------------------------------------------------


def export(family: Family, model: nn.Module, strict: bool = False) -> torch.export.ExportedProgram:
    args, kwargs = arguments(family.inputs(2))
    return torch.export.export(model, args, kwargs, strict=strict)


def sums(program: torch.export.ExportedProgram) -> int:
    """The number of additions of two floating-point tensors of equal shape, like residual additions."""

    def is_sum(node: Any) -> bool:
        values = [getattr(argument, "meta", {}).get("val") for argument in node.args[:2]]
        return (
            all(isinstance(v, Tensor) and v.is_floating_point() for v in values) and values[0].shape == values[1].shape
        )

    targets = (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)
    return sum(node.target in targets and is_sum(node) for node in program.graph.nodes)


# transformers has its list of collected outputs in a global variable, also for the plain model.
@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects:UserWarning")
@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
@pytest.mark.parametrize("name", ["timm_vit", "hf_bert"])
def test_an_exported_model_matches_the_rewired_one(name: str, strict: bool) -> None:
    family = FAMILIES[name]
    inputs, model = family.inputs(2), rewired(family, Decay(0.3))
    args, kwargs = arguments(inputs)
    got = floats(export(family, model, strict).module()(*args, **kwargs))
    eager = run(model, inputs)
    assert difference(got, eager) < CLOSE
    assert difference(run(family.build(), inputs), eager) > 1e-2


@pytest.mark.parametrize("name", ["timm_vit", "hf_bert", "hf_llama"])
def test_a_cut_model_exports_without_its_residual_additions(name: str) -> None:
    family = FAMILIES[name]
    inputs, model = family.inputs(2), rewired(family, Cut())
    args, kwargs = arguments(inputs)
    plain, cut = export(family, family.build()), export(family, model)
    assert sums(plain) - sums(cut) == len(family.sites) > 0
    assert sums(export(family, rewired(family, Decay(0.3)))) == sums(plain)
    assert difference(floats(cut.module()(*args, **kwargs)), run(model, inputs)) < CLOSE


def test_an_exported_program_can_be_saved_and_loaded() -> None:
    family = FAMILIES["timm_vit"]
    inputs, model = family.inputs(2), rewired(family, Decay(0.3))
    file = io.BytesIO()
    torch.export.save(export(family, model), file)
    file.seek(0)
    assert difference(floats(torch.export.load(file).module()(inputs)), run(model, inputs)) < CLOSE


def test_an_annealed_weight_is_exported_with_its_current_value() -> None:
    family = FAMILIES["timm_vit"]
    inputs, model = family.inputs(2), family.build()
    wiring = unskip.rewire(model, Anneal(Keep(), Cut(), steps=10), inputs)
    wiring.step(5)
    half = run(model, inputs)
    program = export(family, model)
    wiring.step(10)
    assert difference(floats(program.module()(inputs)), half) < CLOSE
    assert difference(run(model, inputs), half) > 1e-2


# --- torch.fx and TorchScript -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [Decay(0.3), Cut(), Learn(0.5)], ids=str)
def test_feature_extractors_of_torchvision_match_the_rewired_model(rule: Any) -> None:
    from torchvision.models.feature_extraction import create_feature_extractor

    family = FAMILIES["torchvision_vit"]
    inputs, model = family.inputs(2), rewired(family, rule)
    extractor = create_feature_extractor(model, ["heads"])
    assert difference(floats(extractor(inputs)), run(model, inputs)) < CLOSE
    assert difference(run(family.build(), inputs), run(model, inputs)) > 1e-2


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is:FutureWarning")
def test_scripting_a_rewired_model_is_refused() -> None:
    # TorchScript reads the source file, so it would silently give the plain model.
    family = FAMILIES["timm_vit"]
    model = rewired(family, Cut())
    with pytest.raises(RewireError, match="Block is rewired"):
        torch.jit.script(model)
    unskip.Wiring.of(model).undo()
    inputs = family.inputs(2)
    assert difference(floats(torch.jit.script(model)(inputs)), run(model, inputs)) < CLOSE


# --- ONNX -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [Decay(0.3), Cut()], ids=str)
@pytest.mark.parametrize("name", ["timm_vit", pytest.param("hf_bert", marks=pytest.mark.full)])
def test_onnx_runtime_matches_the_rewired_model(name: str, rule: Any) -> None:
    pytest.importorskip("onnxscript", reason="torch.onnx.export needs onnxscript")
    runtime = pytest.importorskip("onnxruntime", reason="runs the exported model")
    family = FAMILIES[name]
    inputs, model = family.inputs(2), rewired(family, rule)
    args, kwargs = arguments(inputs)
    program = torch.onnx.export(model, args, kwargs=kwargs, dynamo=True, verbose=False)
    assert program is not None
    session = runtime.InferenceSession(program.model_proto.SerializeToString(), providers=["CPUExecutionProvider"])
    feed = {
        port.name: value.numpy() for port, value in zip(session.get_inputs(), [*args, *kwargs.values()], strict=True)
    }
    eager = run(model, inputs)
    assert difference([torch.from_numpy(value) for value in session.run(None, feed)], eager) < CLOSE
    assert difference(run(family.build(), inputs), eager) > 1e-2
