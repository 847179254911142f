"""Replay: a part of a recorded graph as a function of one tensor, its values and its derivative."""

from collections.abc import Callable
from typing import Any

import pytest
import tests.zoo.more  # noqa: F401  (enters its families into the registry)
import torch
from tests.zoo.families import FAMILIES
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from unskip.anatomy._example import Example
from unskip.anatomy._graph import Graph
from unskip.anatomy._model_trace import trace_model
from unskip.anatomy._replay import ReplayError, replay
from unskip.anatomy._trace import record


def traced(model: nn.Module, x: Tensor) -> Graph:
    return record(model.eval(), Example.of(x), training=False, keep=True)


def ends(graph: Graph) -> tuple[int, int]:
    return next(node.index for node in graph.nodes if node.op == "input"), len(graph.nodes) - 1


def whole(model: nn.Module, x: Tensor, dtype: torch.dtype | None = None) -> Callable[[Tensor], Tensor]:
    graph = traced(model, x)
    return replay(graph, *ends(graph), dtype)


class Fun(nn.Module):
    """A function as a module, with one weight that it may use."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


def in_place(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    y.mul_(2).add_(1)
    y += x
    return y.sin()


def in_place_of_view(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    y.view(-1).mul_(3)
    return y + x


def several_outputs(x: Tensor, w: Tensor) -> Tensor:
    a, b = (x @ w).chunk(2, dim=-1)
    values, indices = b.max(dim=-1, keepdim=True)
    return (a * values + b.gather(-1, indices)).cumsum(-1)


def integers(x: Tensor, w: Tensor) -> Tensor:
    order = torch.arange(x.shape[-1]).flip(0)
    return (x[..., order] @ w).masked_fill(torch.eye(4).bool(), 0.5)


def cast(x: Tensor, w: Tensor) -> Tensor:
    return ((x @ w).to(torch.float32).softmax(-1, dtype=torch.float32)).to(x.dtype) * x.float()


def twice(x: Tensor, w: Tensor) -> Tensor:
    y = x.t()
    return (y @ w) * (x.t() @ w) + x


def constant(x: Tensor, w: Tensor) -> Tensor:
    return torch.cat([x, torch.zeros_like(x), torch.full((4, 4), 2.0)]) @ (w + 1)


def spelled_out(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    return torch.where(y > 0, y, 0.1 * y) * (x < 0.3)


FUNCTIONS = [spelled_out, in_place, several_outputs, integers, cast, twice, constant]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_values_match_at_the_recorded_and_another_point(function: Any) -> None:
    model = Fun(function)
    x, other = torch.randn(4, 4), torch.randn(4, 4)
    again = whole(model, x)
    with torch.no_grad():
        assert torch.equal(again(x), model(x))
        assert torch.equal(again(other), model(other))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_derivative_is_that_of_the_module(function: Any) -> None:
    model = Fun(function)
    x = torch.randn(4, 4)
    again = whole(model, x, torch.float64)
    model.double()
    jacobian = torch.autograd.functional.jacobian
    if function is cast:  # the module itself rounds to float32 inside, the replay does not
        torch.testing.assert_close(jacobian(again, x.double()), jacobian(model, x.double()), rtol=1e-4, atol=1e-5)
    else:
        torch.testing.assert_close(jacobian(again, x.double()), jacobian(model, x.double()))


def test_replay_can_be_batched() -> None:
    model = Fun(several_outputs)
    x = torch.randn(4, 4)
    again = whole(model, x)
    batch = torch.randn(3, 4, 4)
    torch.testing.assert_close(torch.func.vmap(again)(batch), torch.stack([model(b) for b in batch]))
    rows = torch.func.vmap(torch.func.vjp(again, x)[1])(torch.eye(8).reshape(8, 4, 2))[0]
    expected = torch.autograd.functional.jacobian(model, x).reshape(8, 4, 4)
    torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-5)


def test_in_place_leaves_the_recorded_and_the_given_tensors_alone() -> None:
    model = Fun(in_place)
    x = torch.randn(4, 4)
    graph = traced(model, x)
    before = {index: value.clone() for index, value in graph.values.items()}
    given = torch.randn(4, 4)
    kept = given.clone()
    replay(graph, *ends(graph))(given)
    assert torch.equal(given, kept)
    assert all(torch.equal(graph.values[index], value) for index, value in before.items())


def test_overwritten_values_are_kept() -> None:
    model = Fun(in_place)
    x = torch.randn(4, 4)
    graph = traced(model, x)
    product = next(node for node in graph.nodes if node.op == "mm")
    assert torch.equal(graph.values[product.index], x @ model.weight)


def test_a_write_through_another_view_is_replayed_or_refused() -> None:
    model = Fun(in_place_of_view)
    x = torch.randn(4, 4)
    with pytest.raises(ReplayError, match="in place"):
        whole(model, x)


def test_dtype_applies_to_all_tensors() -> None:
    seen: dict[int, Tensor] = {}
    x = torch.randn(4, 4)
    graph = traced(Fun(cast), x)
    out = replay(graph, *ends(graph), torch.float64, keep=seen)(x)
    assert out.dtype == torch.float64
    assert {value.dtype for value in seen.values()} == {torch.float64}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_replayed_in_float64(dtype: torch.dtype) -> None:
    model = FAMILIES["timm_vit"].build()
    x = FAMILIES["timm_vit"].inputs(1)
    rounded = model.to(dtype)
    graph = traced(rounded, x.to(dtype))
    wide = model.double()  # the same rounded weights
    got = replay(graph, *ends(graph), torch.float64)(x.to(dtype))
    torch.testing.assert_close(got, wide(x.to(dtype).double()))


@pytest.mark.parametrize("name", ["timm_vit", "nn_encoder_pre", "hf_llama", "hf_t5", "timm_swin", "hf_bloom"])
def test_every_branch_of_a_family_is_replayed(name: str) -> None:
    family = FAMILIES[name]
    example = Example.of(tree_map(lambda v: v, family.inputs(1)))
    found = trace_model(family.build(), example)
    for run in found.last_runs:
        for finding in run.findings:
            recorded = found.graph.values[finding.branch]
            got = replay(found.graph, run.root, finding.branch)(found.graph.values[run.root])
            assert torch.equal(got, recorded)


def test_the_branch_of_a_real_block_has_the_derivative_of_its_modules() -> None:
    family = FAMILIES["timm_vit"]
    model = family.build().double()
    found = trace_model(model, Example.of(family.inputs(1).double()))
    for run, names in zip(found.last_runs, [("norm1", "attn"), ("norm2", "mlp")] * 2, strict=True):
        block: Any = model.get_submodule(f"blocks.{found.last_runs.index(run) // 2}")
        x = found.graph.values[run.root]
        function = replay(found.graph, run.root, run.findings[0].branch)

        def branch(value: Tensor, block: Any = block, names: tuple[str, str] = names) -> Tensor:
            return getattr(block, names[1])(getattr(block, names[0])(value))  # type: ignore[no-any-return]

        jacobian = torch.autograd.functional.jacobian
        torch.testing.assert_close(jacobian(function, x), jacobian(branch, x))


def test_a_target_that_does_not_depend_on_the_source_is_refused() -> None:
    graph = traced(Fun(twice), torch.randn(4, 4))
    start, end = ends(graph)
    with pytest.raises(ReplayError, match="does not depend"):
        replay(graph, end, start)


def test_weights_of_a_wiring_are_in_the_replayed_sum() -> None:
    import unskip

    family = FAMILIES["timm_vit"]
    model = family.build().double()
    unskip.rewire(model, unskip.Scale(stream=0.3, branch=2.0), family.inputs(1).double())
    found = trace_model(model, Example.of(family.inputs(1).double()), weighted=True)
    run = found.last_runs[0]
    x = torch.randn_like(found.graph.values[run.root])
    whole_sum = replay(found.graph, run.root, run.add.index)(x)
    branch = replay(found.graph, run.root, run.findings[0].branch)(x)
    torch.testing.assert_close(whole_sum, 0.3 * x + 2.0 * branch)
    with torch.no_grad():
        out = model(family.inputs(1).double())
    torch.testing.assert_close(found.graph.values[len(found.graph.nodes) - 1], out)
