"""Verdicts and errors for unusual weights, dtypes and domains, and counterexamples to the rule of `test_sound.py`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.absorption.blocks import CLASS_O, errors, generic, normal, numbers, planted

import unskip
from unskip.absorption import Block, Norm, absorb
from unskip.errors import BadInput


@pytest.mark.parametrize("word", [*CLASS_O, "tanh", "elu", "mish", "relu2", "identity"])
@pytest.mark.parametrize("norm", [None, Norm("layernorm", "post")])
def test_rows_of_zeros_with_a_bias(word: str, norm: Norm | None) -> None:
    block = Block(
        torch.zeros(6, 3).double(), normal(numbers(0), 3, 6), up_bias=normal(numbers(1), 6), activation=word, norm=norm
    )
    for biases in ("as-is", "allowed", "none"):
        assert absorb(block, biases=biases).verify()  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_weights_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(BadInput, match=r"float8.*bfloat16"):
        Block(torch.ones(4, 2).to(dtype), torch.ones(2, 4).to(dtype), activation="relu")


def test_too_few_inputs_are_refused() -> None:
    block = generic(6, 24)
    for count in (1, 7, 40):
        with pytest.raises(BadInput, match=str(count)):
            unskip.absorption.approximate(block, normal(numbers(0), count, 6))
    with pytest.raises(BadInput, match="the same"):
        unskip.absorption.approximate(block, torch.ones(500, 6))


def test_a_replacement_that_only_float64_holds_is_named() -> None:
    """d spare units are enough, but split rows keep their biases, which costs digits in float32."""
    g = numbers(0)
    up, down = 0.3 * normal(g, 24, 8), 0.2 * normal(g, 8, 24)
    down[:, :8] = 0
    biases = {"up_bias": torch.full((24,), 0.1), "down_bias": torch.zeros(8)}
    block = Block(up.float(), down.float(), **biases, activation="gelu")
    verdict = absorb(block)
    assert verdict.status == "undecided"
    assert "stored in float32" in verdict.reason
    assert absorb(block.double()).status == "possible"
    block = replace(block, down=torch.cat([torch.zeros(8, 16), block.down[:, 16:]], 1))  # 2 d spare units
    assert absorb(block).status == "possible"


def test_a_linear_replacement_that_its_dtype_does_not_hold_is_not_possible() -> None:
    block = Block(
        *(300 * torch.ones(3, 3).half() for _ in range(2)), up_bias=300 * torch.ones(3).half(), activation="identity"
    )
    assert absorb(block, biases="allowed").status == "undecided"


def test_what_cannot_be_measured_is_not_possible() -> None:
    """The block overflows float16 on inputs of every size, so no replacement can be compared with it."""
    g = numbers(0)
    up, down, bias = ((2e4 * normal(g, *shape)).half() for shape in ((6, 3), (3, 6), (6,)))
    block = Block(up, down, up_bias=bias, down_bias=torch.zeros(3).half(), activation="relu", skip=1e4)
    assert absorb(block, width=12).status == "undecided"
    assert absorb(block.double(), width=12).status == "possible"
    with pytest.raises(BadInput, match="float16"):
        unskip.absorption.widen(block)


@pytest.mark.parametrize(("radius", "status"), [(1e2, "possible"), (1e7, "undecided")])
def test_a_wide_domain_is_measured_near_its_center_too(radius: float, status: str) -> None:
    """A unit that is affine on a wide domain has a large bias, which costs digits where the inputs are small."""
    g = numbers(0)
    up, down = normal(g, 8, 3), normal(g, 3, 8)
    up[5:] = 0
    zeros = torch.zeros(11).double()
    block = Block(up, down, up_bias=zeros[:8], down_bias=zeros[:3], activation="relu")
    verdict = absorb(block, domain=radius)
    assert verdict.status == status
    if verdict.status == "possible":
        x = 0.01 * normal(g, 200, 3)
        terms = x.abs().sum(1) + (x.abs() @ up.abs().mT @ down.abs().mT).norm(dim=1)
        assert bool(((block(x) - verdict.replacement()(x)).norm(dim=1) <= 1e-10 * terms).all())


@pytest.mark.parametrize("seed", range(3))
def test_coarse_replacements_keep_the_rule_near_the_center_of_a_domain(seed: int) -> None:
    g = numbers(seed)
    up, down, skip = (normal(g, *shape).half() for shape in ((3, 5), (5, 3), (5, 5)))
    down[:, 1:] = 0
    block = Block(up, down / 16, activation="softplus:100", skip=8 * skip)
    verdict = absorb(block, width=11, domain=32.0)
    if verdict.status == "possible":
        found = errors(block, verdict.replacement(), 1e-6 * normal(g, 4096, 5))
        assert found is None or found[0] <= 4 * found[1]


def test_a_possible_is_checked_before_it_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    from unskip.absorption import _decide

    monkeypatch.setattr(_decide, "verify", lambda verdict: False)
    block, _ = planted()
    assert absorb(block).status == "undecided"
    assert absorb(replace(block, skip=0.0)).status == "undecided"


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("stored", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float64)])
def test_weights_of_two_dtypes_are_asked_like_the_same_numbers_in_one(
    stored: tuple[torch.dtype, torch.dtype], seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    up, down = torch.randn(9, 3, generator=draw).double(), torch.randn(3, 9, generator=draw).double()
    down[:, :3] = -torch.linalg.inv(up[:3])
    mixed = Block(up.to(stored[0]), down.to(stored[1]))
    assert {unskip.absorb(each).status for each in (mixed, mixed.double())} != {"possible", "impossible"}


@pytest.mark.parametrize(
    ("seed", "size", "share", "dtype"),
    [(24, 3, 1 / 32, torch.bfloat16), (0, 20, 1 / 64, torch.float16), (0, 3000, 2e-4, torch.float32)],
)
def test_an_oblique_direction_of_the_skip_is_not_dropped(
    seed: int, size: float, share: float, dtype: torch.dtype
) -> None:
    """All rows are orthogonal to (1, -1, 0), along which the skip is small, so these units cannot reproduce it."""
    draw = torch.Generator().manual_seed(seed)
    rows, other = normal(draw, 3, 2), normal(draw, 2, 3)
    inverse = torch.linalg.pinv(rows)
    columns = -inverse + size * (other - other @ rows @ inverse)
    up = rows @ torch.tensor([[0.5, 0.5, 0], [0, 0, 1]], dtype=torch.float64)
    down = torch.tensor([[1, 0], [1, 0], [0, 1.0]], dtype=torch.float64) @ columns
    skip = torch.tensor([[1 + share, 1 - share, 0], [1 - share, 1 + share, 0], [0, 0, 2]], dtype=torch.float64) / 2
    bias = torch.randn(3, generator=draw).to(dtype)
    block = Block(up.to(dtype), down.to(dtype), up_bias=bias, down_bias=torch.zeros(3).to(dtype), skip=skip.to(dtype))
    assert absorb(block).status != "possible"


@pytest.mark.parametrize("seed", range(5))
def test_large_units_of_other_channels_do_not_pay_for_an_error(seed: int) -> None:
    """In three channels there are large units that cancel; in the fourth 1e-4 of the skip is missing."""
    draw = torch.Generator().manual_seed(seed)
    rows, other = normal(draw, 5, 3), normal(draw, 3, 5)
    inverse = torch.linalg.pinv(rows)
    columns = -inverse + 1000 * (other - other @ rows @ inverse)
    up, down = torch.zeros(8, 4, dtype=torch.float64), torch.zeros(4, 8, dtype=torch.float64)
    up[:5, :3], down[:3, :5], up[5, 3], down[3, 5] = rows, columns, 1, -(1 - 1e-4)
    up[6:], down[:, 6:] = normal(draw, 2, 4), normal(draw, 4, 2)
    biases = {"up_bias": normal(draw, 8).float(), "down_bias": torch.zeros(4)}
    assert absorb(Block(up.float(), down.float(), **biases, activation="gelu")).status != "possible"


@pytest.mark.parametrize("seed", [716, 920])
def test_large_biases_keep_the_rule_at_every_size(seed: int) -> None:
    """The error is largest for inputs whose terms are about as large as the biases, between two measured sizes."""
    g = numbers(seed)
    up, down, skip = (normal(g, 9, 3) / 8).bfloat16().double(), normal(g, 3, 9) / 16, normal(g, 3, 3)
    down[:, :5] = -skip @ torch.linalg.pinv(up[:5])
    bias, const = 2e4 * normal(g, 9), torch.zeros(3)
    held = [value.bfloat16() for value in (up, down, skip, bias, const)]
    block = Block(*held[:2], skip=held[2], up_bias=held[3], down_bias=held[4], activation="relu")
    verdict = absorb(block)
    for size in (3e2, 1e3, 1e4):
        found = errors(block, verdict.replacement(), size * normal(g, 4096, 3)) if verdict.weights is not None else None
        assert found is None or found[0] <= 4 * found[1]


def test_softplus_overflows_no_sooner_than_torch_does() -> None:
    z = torch.tensor([-6e4, -1e3, 1e3, 6e4]).half()
    block = Block(torch.ones(1, 1).half(), torch.ones(1, 1).half(), activation="softplus:100", skip=0.0)
    assert torch.equal(block(z[:, None])[:, 0], torch.nn.functional.softplus(z, beta=100.0))


def test_a_constant_that_rounds_keeps_the_rule_between_powers_of_a_hundred() -> None:
    up = torch.tensor(
        [
            [-2.5, 1, -2.5],
            [-3, -2.5, -2],
            [0.5, 0, -2.5],
            [-0.5, 0, 2.5],
            [-2, -0.5, 2],
            [-1.5, 3, -2.5],
            [0.5, 0, -2.5],
        ]
    )
    down = torch.tensor([[0, 2, -1.5, 2, -1.5, -0.5, 1.5], [0, 0, -1, 0.5, -1, -2, 0.5]])
    bias, skip = torch.tensor([2.5, 1.5, -65.5, 1.5, -2, -0.5, -65.5]), torch.tensor([[0, 0, 0], [0.25, 0, -1.25]])
    held = {"up_bias": bias.bfloat16(), "down_bias": torch.zeros(2).bfloat16(), "skip": skip, "activation": "relu"}
    block = Block(up.bfloat16(), down.bfloat16(), **held)  # type: ignore[arg-type]
    verdict = absorb(block, width=6)
    found = (
        errors(block, verdict.replacement(), 0.1 * normal(numbers(0), 4096, 3)) if verdict.weights is not None else None
    )
    assert found is None or found[0] <= 4 * found[1]
