"""mix computes alpha * stream + beta * branch for every form of the weights, in place or not."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unskip.wiring._mix import Held, mix

weights = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 2))


@given(
    alpha=weights,
    beta=weights,
    tensors=st.sampled_from(["", "a", "b", "ab"]),
    into=st.sampled_from([None, "stream", "branch"]),
)
def test_mix_matches_the_formula(alpha: float, beta: float, tensors: str, into: str | None) -> None:
    generator = torch.Generator().manual_seed(3)
    stream, branch = (torch.randn(4, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    expected = alpha * stream + beta * branch
    a = torch.tensor(alpha, dtype=torch.float64) if "a" in tensors else alpha
    b = torch.tensor(beta, dtype=torch.float64) if "b" in tensors else beta
    operands = {"stream": stream.clone(), "branch": branch.clone()}
    result = mix(operands["stream"], operands["branch"], a, b, into)  # type: ignore[arg-type]
    assert torch.allclose(result, expected, rtol=1e-14, atol=1e-14)
    if into is not None:
        assert result is operands[into]
    for name, value in operands.items():
        if name != into:
            assert torch.equal(value, stream if name == "stream" else branch), name


@pytest.mark.parametrize("into", [None, "stream", "branch"])
def test_unit_weights_give_the_plain_sum_exactly(into: str | None) -> None:
    stream, branch = torch.randn(50, 7), torch.randn(50, 7)
    expected = stream + branch
    assert torch.equal(mix(stream, branch, 1.0, 1.0, into), expected)  # type: ignore[arg-type]
    assert torch.equal(mix(torch.ones(2, 2), torch.ones(2, 2), torch.tensor(1.0), 1.0), torch.full((2, 2), 2.0))


@pytest.mark.parametrize("into", [None, "stream", "branch"])
def test_a_cut_stream_is_not_read(into: str | None) -> None:
    stream = torch.full((2, 3), torch.nan)
    assert torch.equal(mix(stream, torch.ones(2, 3), 0.0, 1.0, into), torch.ones(2, 3))  # type: ignore[arg-type]


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0, torch.tensor(0.5)])
def test_result_has_the_promoted_dtype(alpha: float) -> None:
    wide, narrow = torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bfloat16)
    assert mix(wide, narrow, alpha, 1.0).dtype == torch.float32
    assert mix(narrow, wide, alpha, 1.0).dtype == torch.float32
    assert mix(narrow, narrow, alpha, 1.0).dtype == torch.bfloat16


def test_autocast_keeps_bfloat16_with_a_tensor_weight() -> None:
    narrow = torch.ones(2, 3, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert mix(narrow, narrow, torch.tensor(0.5), 1.0).dtype == torch.bfloat16


@pytest.mark.parametrize("learned", ["site", "channel"])
def test_learned_weight_gradient(learned: str) -> None:
    stream, branch = torch.randn(5, 3), torch.randn(5, 3)
    alpha = torch.full((3,) if learned == "channel" else (), 0.5, requires_grad=True)
    mix(stream, branch, alpha, 1.0).sum().backward()
    expected = stream.sum(0) if learned == "channel" else stream.sum()
    assert alpha.grad is not None
    assert torch.allclose(alpha.grad, expected)


def test_in_place_mix_keeps_gradients() -> None:
    base = torch.randn(4, 3, requires_grad=True)
    out = mix(base * 1, base * 2, 0.5, 0.7, "stream")
    out.sum().backward()
    assert base.grad is not None
    assert torch.allclose(base.grad, torch.full((4, 3), 0.5 + 1.4))


def test_annealed_weight_is_a_tensor_in_a_compiled_graph() -> None:
    alpha = Held(0.5, torch.tensor(0.5), annealed=True)
    stream, branch = torch.randn(3, 4), torch.randn(3, 4)
    expected = 0.5 * stream + branch
    assert torch.allclose(mix(stream, branch, alpha, 1.0), expected)

    def run(s: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return mix(s, b, alpha, 1.0)

    compiled = torch.compile(run, backend="eager", fullgraph=True)
    assert torch.allclose(compiled(stream, branch), expected)
    alpha.tensor.fill_(0.25)  # the graph reads the tensor
    assert torch.allclose(compiled(stream, branch), 0.25 * stream + branch)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_compiled_graph_does_not_round_the_weight(dtype: torch.dtype) -> None:
    """bfloat16 rounds 0.76 to 0.7578: the sum is computed in float32 or wider and rounded once."""
    stream, branch = torch.randn(500, dtype=dtype), torch.randn(500, dtype=dtype)
    expected = (0.76 * stream.double() + branch.double()).to(dtype)
    for into in (None, "stream", "branch"):
        torch._dynamo.reset()
        held = Held(0.76, torch.tensor(0.76), annealed=False)
        compiled = torch.compile(lambda s, b: mix(s, b, held, 1.0, into), backend="eager", fullgraph=True)  # noqa: B023
        got = compiled(stream.clone(), branch.clone())
        assert got.dtype == dtype
        assert (got == expected).double().mean() > (0.98 if dtype != torch.float64 else 0.6)
        assert torch.allclose(got, expected, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0, torch.tensor(0.5)], ids=str)
@pytest.mark.parametrize("beta", [0.5, 1.0, torch.tensor(0.5)], ids=str)
def test_result_has_the_strides_of_the_plain_sum(alpha: float, beta: float) -> None:
    """A model may take a view of the sum that requires the memory layout of the left operand."""
    plain, turned = torch.randn(2, 3, 4), torch.randn(2, 4, 3).transpose(1, 2)
    for stream, branch in ((plain, turned), (turned, plain)):
        expected = alpha * stream + beta * branch
        left = mix(stream, branch, alpha, beta)
        right = mix(stream, branch, alpha, beta, left="branch")
        assert left.stride() == (stream + branch).stride()
        assert right.stride() == (branch + stream).stride()
        assert torch.allclose(left, expected)
        assert torch.allclose(right, expected)
