"""Attention measures against closed forms for uniform attention, identity and permutation."""

import math

import pytest
import torch
from torch import Tensor

from unskip.errors import BadInput
from unskip.measures.attention import (
    attention_condition,
    attention_entropy,
    condition,
    self_attention_mass,
    value_output_condition,
)


def heads(*each: Tensor, samples: int = 3) -> Tensor:
    """(samples, heads, queries, keys) with one matrix for each head."""
    return torch.stack(each).expand(samples, -1, -1, -1)


@pytest.fixture
def known() -> Tensor:
    n = 7
    eye = torch.eye(n, dtype=torch.float64)
    return heads(torch.full((n, n), 1 / n, dtype=torch.float64), eye, eye.roll(1, 0), (eye + 1 / n) / 2)


def test_entropy(known: Tensor) -> None:
    n = 7
    near, far = (1 + 1 / n) / 2, 1 / n / 2
    mixed = -near * math.log(near) - (n - 1) * far * math.log(far)
    assert attention_entropy(known).tolist() == pytest.approx([math.log(n), 0, 0, mixed])


def test_self_attention_mass(known: Tensor) -> None:
    assert self_attention_mass(known).tolist() == pytest.approx([1 / 7, 1, 0, (1 + 1 / 7) / 2])


def test_condition_of_attention(known: Tensor) -> None:
    assert attention_condition(known).tolist() == pytest.approx([math.inf, 1, 1, 2])


def test_float32_noise_is_not_a_condition_number() -> None:
    """Equal rows are singular; after float32 rounding the condition number must still be inf."""
    row = torch.randn(40).softmax(-1)
    p = torch.nextafter(row.expand(1, 40, 40), torch.randn(1, 40, 40))
    sigma = torch.linalg.svdvals(p.double())
    assert sigma[0, -1] > 0
    assert attention_condition(p).item() == math.inf


def test_condition_against_torch() -> None:
    a = torch.randn(4, 6, 3, dtype=torch.float64)
    assert torch.allclose(condition(a), torch.linalg.cond(a))
    assert math.isnan(condition(torch.zeros(3, 3)))


def test_value_output_condition() -> None:
    value, out = torch.randn(8, 8, dtype=torch.float64), torch.randn(8, 8, dtype=torch.float64)
    assert value_output_condition(value, out).item() == pytest.approx(torch.linalg.cond(out @ value).item())
    u, _, vh = torch.linalg.svd(value)
    assert value_output_condition(3 * vh, 3 * u).item() == pytest.approx(1)
    narrow_value, narrow_out = value[:3], out[:, :3]
    sigma = torch.linalg.svdvals(narrow_out @ narrow_value)
    assert value_output_condition(narrow_value, narrow_out).item() == pytest.approx((sigma[0] / sigma[2]).item())
    assert value_output_condition(value * 0, out).isnan()
    singular = value.clone()
    singular[0] = singular[1]
    assert value_output_condition(singular, out).item() == math.inf
    with pytest.raises(BadInput, match=r"does not match value"):
        value_output_condition(value[:4], out)


def test_bad_input_is_named() -> None:
    with pytest.raises(BadInput, match=r"\(0, 1\) sums to 2"):
        attention_entropy(torch.tensor([[[0.5, 0.5], [1.0, 1.0]]]))
    with pytest.raises(BadInput, match=r"minimum -1"):
        attention_entropy(torch.tensor([[[0.5, 0.5], [2.0, -1.0]]]))
    with pytest.raises(BadInput, match=r"3 queries and 5 keys"):
        self_attention_mass(torch.rand(1, 3, 5).softmax(-1))
    with pytest.raises(BadInput, match=r"nan at \(0, 1, 0\)"):
        attention_condition(torch.tensor([[[0.5, 0.5], [math.nan, 0.5]]]))
    with pytest.raises(BadInput, match=r"heads, queries, keys"):
        attention_entropy(torch.eye(3))
