"""Verdicts on bounded domains, verdicts with a tolerance, and skips that are folded into the next linear map."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.absorption.blocks import close, generic, normal, numbers, planted
from torch import nn

from unskip.absorption import Block, Domain, Norm, absorb, approximate, fold, nearest
from unskip.errors import BadInput


def shifted(seed: int = 0, far: int = 6, d: int = 4, h: int = 12) -> Block:
    """A ReLU block in which the first `far` units have their hinges at a distance of 10 from the origin."""
    g = numbers(seed)
    up, down, bias = normal(g, h, d), normal(g, d, h), 0.1 * normal(g, h)
    bias[:far] = 10 * up[:far].norm(dim=1) * torch.where(normal(g, far) > 0, 1.0, -1.0)
    return Block(up, down, up_bias=bias, down_bias=torch.zeros(d).double(), activation="relu")


def inside(domain: Domain, count: int = 400) -> torch.Tensor:
    x = domain.sample(count, numbers(3))
    assert bool(domain.holds(x).all())
    return x


DOMAINS = {
    "ball": Domain.ball(torch.zeros(4), 5.0),
    "box": Domain.box(torch.full((4,), -2.0), torch.full((4,), 2.5)),
    "data": Domain.around(normal(numbers(1), 300, 4)),
    "norm": Domain.after(Norm("layernorm", gain=torch.tensor([1.0, 2.0, -1.0, 0.5]), bias=torch.ones(4)), 4),
}


@pytest.mark.parametrize("name", DOMAINS)
def test_hinges_outside_the_domain_are_spare_units(name: str) -> None:
    block, domain = shifted(), DOMAINS[name]
    assert absorb(block).status == "impossible"
    verdict = absorb(block, domain=domain)
    assert verdict.status == "possible"
    assert verdict.domain == domain.text
    assert verdict.verify()
    assert close(block, verdict.replacement(), inside(domain)) < 1e-11
    assert close(block, verdict.replacement(), 100 * normal(numbers(0), 50, 4)) > 1e-3  # and not outside it


@pytest.mark.parametrize("slope", [0.01, 0.2, 0.5, 3.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_affine_units_of_any_slope_take_part_in_the_sum(slope: float, seed: int) -> None:
    """The slope was rounded to float32, so that a slope of 0.01 made blocks impossible that are possible."""
    g = numbers(seed)
    up, down = normal(g, 7, 3), normal(g, 3, 7)
    reach = 2 * up.abs().sum(1)
    bias = reach * torch.tensor([1.5, -1.5, -1.2, 0.3, -0.6, 0.1, 0.8])  # three units are affine on |x| < 2
    slopes = torch.tensor([1.0, slope, slope, 1 + slope, 0, 1 + slope, 0], dtype=torch.float64)  # two units are flipped
    block = Block(
        up, down, up_bias=bias, down_bias=down[:, 0], activation=f"leaky_relu:{slope}", skip=-(down * slopes) @ up
    )
    verdict = absorb(block, width=4, domain=(-2.0, 2.0))
    assert verdict.status == "possible"
    assert verdict.verify()
    assert close(block, verdict.replacement(), inside(Domain.box(*(torch.full((3,), x) for x in (-2.0, 2.0))))) < 1e-11
    spare = absorb(replace(block, skip=1.0), domain=(-2.0, 2.0))  # three affine units replace a skip of rank 3
    assert spare.status == "possible"
    missed = absorb(replace(block, skip=block.matrix + torch.eye(3).double()), width=4, domain=(-2.0, 2.0))
    assert missed.status == "impossible"
    assert missed.verify()


def test_inputs_near_the_center_are_not_all_alike() -> None:
    """With two points only, a float32 replacement passed whose error between them was 11 times that of its block."""
    x = Domain.ball(torch.zeros(1), 30.0).sample(48, numbers(0), 0.1)
    assert float(x.abs().max()) <= 0.1 + 1e-12
    assert len(x.unique()) == 48


@pytest.mark.parametrize("name", DOMAINS)
def test_where_every_hinge_cuts_the_domain_nothing_changes(name: str) -> None:
    verdict = absorb(shifted(far=0), domain=DOMAINS[name])
    assert verdict.status == "impossible"
    assert verdict.verify()
    # The same certificate does not hold if some hinges miss the domain.
    assert not replace(verdict, block=shifted(far=2), inputs=DOMAINS[name]).verify()


def test_the_domain_of_a_norm_holds_what_it_gives() -> None:
    for kind in ("layernorm", "rmsnorm"):
        norm = Norm(kind, gain=torch.tensor([1.0, 2.0, -1.0, 0.0]), bias=torch.ones(4))  # type: ignore[arg-type]
        assert bool(Domain.after(norm, 4).holds(norm(1e3 * normal(numbers(0), 500, 4))).all())


def test_words_for_domains() -> None:
    block = shifted()
    data = normal(numbers(1), 300, 4)
    for domain, said in ((5.0, "radius 5"), ((-2.0, 2.5), "box"), (data, "300 inputs, 10% wider")):
        verdict = absorb(block, domain=domain)
        assert verdict.status == "possible"
        assert said in verdict.domain
    for wrong in (True, "ball", (1.0, -1.0), data[:, :3], -1.0, data[:1]):
        with pytest.raises(BadInput, match=r"domain|Domain"):
            absorb(block, domain=wrong)


@pytest.mark.parametrize("word", ["gelu", "tanh", "mish", "swiglu", "relu2", "elu", "relu6"])
def test_other_activations_on_a_domain(word: str) -> None:
    """Equality on a ball extends to all inputs for analytic activations; for those with kinks nothing is claimed."""
    gate = normal(numbers(2), 12, 4) if word == "swiglu" else None
    plain = generic(4, 12)
    block = Block(plain.up, plain.down, gate, activation=word)
    verdict = absorb(block, domain=3.0)
    assert verdict.status == ("undecided" if word in ("elu", "relu6") else "impossible")
    assert verdict.verify()
    away = Domain.ball(torch.full((4,), 9.0), 1.0)
    if word == "relu2":  # the argument about degrees needs the origin
        assert absorb(block, domain=away).status == "undecided"


def test_a_domain_of_data_holds_the_data() -> None:
    x = normal(numbers(4), 200, 5) @ normal(numbers(5), 5, 5) + 3
    x[:, 2] = 7.0  # a constant channel
    domain = Domain.around(x, margin=0.05)
    assert bool(domain.holds(x).all())
    assert bool((domain.reach(normal(numbers(6), 9, 5)) > 0).all())
    x[:, 1] *= 1e5  # one massive channel does not widen the others
    assert domain.reach(torch.eye(5)[:1].double()) == pytest.approx(
        Domain.around(x, 0.05).reach(torch.eye(5)[:1].double())
    )
    x[:, 1] /= 1e5
    rows, bias = normal(numbers(7), 50, 5), 10 * normal(numbers(8), 50)
    values = domain.sample(2000, numbers(9)) @ rows.mT + bias
    side, cuts = domain.side(rows, bias), domain.cuts(rows, bias)
    assert bool((values * side >= 0).all())
    assert not bool((cuts & (side != 0)).any())


# --- Tolerance --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("word", ["relu", "gelu", "softplus"])
def test_a_flip_set_beside_mirrored_units_and_a_unit_that_sees_nothing(word: str, dtype: torch.dtype) -> None:
    block, chosen = planted(word=word, seed=2)
    assert block.up_bias is not None
    one, two, blind = sorted(set(range(32)) - set(chosen.tolist()))[:3]
    up, bias = block.up.clone(), block.up_bias.clone()
    up[one], bias[one] = -up[two], -bias[two]
    up[blind], bias[blind] = 0.0, 1.5
    assert block.down_bias is not None
    stored = (each.to(dtype) for each in (up, block.down, bias, block.down_bias))
    block = replace(block, **dict(zip(("up", "down", "up_bias", "down_bias"), stored, strict=True)))  # type: ignore[arg-type]
    verdict = absorb(block)
    assert verdict.status == "possible"
    assert close(block, verdict.replacement()) < (1e-5 if dtype == torch.float32 else 1e-12)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_dead_units_carry_a_skip_of_their_rank(rank: int) -> None:
    """2 r dead units reproduce a skip of rank r with unequal singular values, and one unit fewer does not."""
    g = numbers(rank)
    left, right = (torch.linalg.qr(normal(g, 8, 8))[0][:, :rank] for _ in range(2))
    skip = left @ torch.diag(torch.logspace(0, -3, rank, dtype=torch.float64)) @ right.mT
    for dead in (2 * rank, 2 * rank - 1):
        block = replace(generic(8, 24, seed=rank), skip=skip)
        down = block.down.clone()
        down[:, :dead] = 0
        verdict = absorb(replace(block, down=down))
        assert (verdict.status == "possible") == (dead == 2 * rank)


@pytest.mark.parametrize("shift", [1e-9, 1e-7])
def test_a_near_miss_is_taken_with_a_tolerance(shift: float) -> None:
    block, chosen = planted(seed=2)
    down = block.down + shift * normal(numbers(1), *block.down.shape)
    near = replace(block, down=down)
    assert absorb(near).status == "impossible"
    missed = absorb(near, tolerance=shift / 1e3)
    assert missed.status == "impossible"
    assert "within the tolerance" in str(missed)
    verdict = absorb(near, tolerance=1e-6)
    assert verdict.status == "possible"
    assert verdict.verify()
    assert verdict.change is not None
    assert verdict.change < 10 * shift
    assert verdict.domain == "all inputs, up to the error below"
    assert verdict.flips is not None
    assert torch.equal(verdict.flips, chosen)
    assert 0 < close(near, verdict.replacement()) < 100 * shift
    assert torch.equal(nearest(near).flips, chosen)  # the same set, found without a tolerance


@pytest.mark.parametrize("word", ["gelu", "relu"])
@pytest.mark.parametrize("odd_one", ["dead", "twin", "mirrored"])
def test_a_near_miss_beside_a_unit_that_is_spare(word: str, odd_one: str) -> None:
    block, chosen = planted(word=word, seed=2)
    assert block.up_bias is not None
    units = sorted(set(range(32)) - set(chosen.tolist()))[:2]
    up, bias, down = block.up.clone(), block.up_bias.clone(), block.down.clone()
    if odd_one == "dead":
        down[:, units[0]] = 0
    else:
        sign = -1 if odd_one == "mirrored" else 1
        up[units[0]], bias[units[0]] = sign * up[units[1]], sign * bias[units[1]]
    down = down + 1e-8 * normal(numbers(1), *down.shape) * (down != 0)
    near = replace(block, up=up, up_bias=bias, down=down)
    verdict = absorb(near, tolerance=1e-6)
    assert verdict.status == "possible"
    assert verdict.verify()
    assert nearest(near).change < 1e-7
    assert 0 < close(near, verdict.replacement()) < 1e-6


def test_a_tolerance_that_has_no_effect_is_said() -> None:
    for block in (generic(word="tanh"), generic(norm=Norm("layernorm", "pre"))):
        assert "takes a plain MLP" in str(absorb(block, tolerance=1e-3))
    assert "a width of at least 32" in str(absorb(generic(), width=10, tolerance=1e-3))


def test_tolerances_that_cannot_be() -> None:
    for wrong in (0, 1, -1e-3, "small"):
        with pytest.raises(BadInput, match="tolerance"):
            absorb(generic(), tolerance=wrong)  # type: ignore[arg-type]


# --- Folding ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["gelu", "tanh", "swiglu"])
@pytest.mark.parametrize("norm", [None, Norm("layernorm", "pre")])
def test_a_skip_folds_into_the_next_linear_map(word: str, norm: Norm | None) -> None:
    gate = normal(numbers(2), 12, 4) if word == "swiglu" else None
    plain = generic(4, 12)
    block = replace(plain, gate=gate, activation=word, norm=norm, skip=0.5)
    torch.manual_seed(0)
    for bias in (True, False):
        after = nn.Linear(4, 3, bias=bias).double()
        folded = fold(block, after)
        x = normal(numbers(1), 7, 2, 4)
        assert torch.allclose(folded(torch.cat([x, block.hidden(x)], -1)), after(block(x)), atol=1e-12)
    with pytest.raises(BadInput, match="post"):
        fold(replace(plain, norm=Norm("layernorm", "post")), after)
    with pytest.raises(BadInput, match="takes 4"):
        fold(generic(5, 12), after)


def test_approximation_needs_more_inputs_than_unknowns() -> None:
    block = generic(6, 24)
    assert approximate(block, normal(numbers(0), 63, 6)).held_out == 31
    with pytest.raises(BadInput, match="62 inputs are too few"):
        approximate(block, normal(numbers(0), 62, 6))
