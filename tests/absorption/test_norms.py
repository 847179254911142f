"""Norms: before the branch nothing goes, after the sum a shift is free, and an input that is normed has fewer
directions."""

from __future__ import annotations

import pytest
import torch
from tests.absorption.blocks import close, generic, normal, numbers, planted

from unskip.absorption import Block, Norm, absorb


def shifted(d: int, h: int, word: str, norm: Norm, seed: int = 0) -> Block:
    """A block that fulfils the criterion only up to 1 w^T."""
    skip = torch.eye(d, dtype=torch.float64) + torch.ones(d, 1).double() @ normal(numbers(seed + 50), 1, d)
    block, _ = planted(d, h, word, skip=skip, seed=seed)
    return Block(block.up, block.down, up_bias=block.up_bias, down_bias=block.down_bias, activation=word, norm=norm)


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("place", ["pre", "out"])
@pytest.mark.parametrize("word", ["gelu", "relu", "elu", "swiglu"])
def test_behind_a_norm_it_is_impossible(kind: str, place: str, word: str) -> None:
    norm = Norm(kind, place, 1e-5)  # type: ignore[arg-type]
    gate = normal(numbers(1), 32, 8) if word == "swiglu" else None
    plain = generic()
    block = Block(plain.up, plain.down, gate, up_bias=plain.up_bias, activation=word, norm=norm)
    verdict = absorb(block)
    assert verdict.status == "impossible"
    assert verdict.certificate is not None
    assert verdict.certificate.kind == "growth"
    assert verdict.verify()
    # The claim in numbers: along the certificate's direction the branch stays put and the block runs away.
    x = verdict.certificate.data["direction"]
    far = 1e6 * x + normal(numbers(2), 8)
    assert float(block(far).norm()) > 1e5
    assert float((block(far) - far).norm()) < 1e4
    assert absorb(Block(plain.up, plain.down, gate, activation=word, norm=norm, skip=0.0)).status == "possible"
    odd = Norm("other", place)  # type: ignore[arg-type]
    assert absorb(Block(plain.up, plain.down, gate, activation=word, norm=odd)).status == "undecided"


@pytest.mark.parametrize("word", ["relu", "gelu"])
@pytest.mark.parametrize("eps", [1e-5, 0.1])
def test_after_the_sum_a_shift_is_free(word: str, eps: float) -> None:
    gain, bias = 1 + 0.1 * normal(numbers(3), 6), normal(numbers(4), 6)
    block = shifted(6, 24, word, Norm("layernorm", "post", eps, gain, bias))
    assert absorb(block.bare()).status == "impossible"
    verdict = absorb(block)
    assert verdict.status == "possible"
    assert close(block, verdict.replacement()) < 1e-10
    assert verdict.verify()
    rms = Block(block.up, block.down, up_bias=block.up_bias, down_bias=block.down_bias, activation=word)
    rms = Block(rms.up, rms.down, up_bias=rms.up_bias, down_bias=rms.down_bias, activation=word,
                norm=Norm("rmsnorm", "post", eps))  # fmt: skip
    refused = absorb(rms)
    assert refused.status == "impossible"  # RMSNorm hides nothing
    assert refused.verify()


def test_after_the_sum_a_generic_block_is_refused() -> None:
    verdict = absorb(generic(norm=Norm("layernorm", "post", 1e-12)))
    assert verdict.status == "impossible"
    assert verdict.verify()
    assert verdict.extra_width == 8  # 2 d - d; the quotient has the same number of inputs


@pytest.mark.parametrize(
    "norm",
    [
        Norm("layernorm", "post", 0.0),
        Norm("rmsnorm", "post", 0.0),
        Norm("other", "post"),
        Norm("layernorm", "post", 1e-5, torch.tensor([0.0, 1, 1, 1, 1, 1, 1, 1])),
        Norm("layernorm", "input", 0.0),
    ],
    ids=["layernorm-eps-0", "rmsnorm-eps-0", "other", "zero-gain", "sphere"],
)
def test_what_is_not_settled_is_undecided(norm: Norm) -> None:
    verdict = absorb(generic(norm=norm))
    assert verdict.status == "undecided"
    assert len(verdict.reason) > 20
    if norm.kind != "other" and norm.place == "post":  # a possible one stays possible
        block, _ = planted(8, 32, norm=norm)
        assert absorb(block).status == "possible"


@pytest.mark.parametrize("word", ["gelu", "relu"])
def test_an_input_from_a_layernorm(word: str) -> None:
    """The criterion holds on the LayerNorm's outputs only: W_S B = -A B with B its directions."""
    d, h = 6, 24
    gain, bias = 0.5 + torch.rand(d, generator=numbers(5)).double(), 0.1 * normal(numbers(6), d)
    inverse = torch.diag(1 / gain)
    hidden = inverse @ torch.ones(d, 1).double()  # what no input moves along
    skip = torch.eye(d, dtype=torch.float64) + normal(numbers(7), d, 1) @ hidden.mT
    block, _ = planted(d, h, word, skip=skip, seed=8)
    assert block.up_bias is not None
    norm = Norm("layernorm", "input", 1e-5, gain, bias)
    asked = Block(
        block.up, block.down, up_bias=0.2 * block.up_bias, down_bias=block.down_bias, activation=word, norm=norm
    )
    x = norm(normal(numbers(9), 300, d))
    assert absorb(asked.bare()).status == "impossible"
    verdict = absorb(asked)
    assert verdict.status == "possible"
    assert close(asked, verdict.replacement(), x) < 1e-10
    assert "ball" in verdict.domain
    plain = generic(d, h, word, norm=norm)
    refused = absorb(plain)
    assert refused.status in ("impossible", "undecided") if word == "relu" else refused.status == "impossible"
    assert refused.verify()


def test_bert_has_both() -> None:
    d, h = 6, 24
    before, after = Norm("layernorm", "input", 1e-12), Norm("layernorm", "post", 1e-12)
    block = shifted(d, h, "gelu", after, seed=2)
    both = Block(
        block.up, block.down, up_bias=block.up_bias, down_bias=block.down_bias, activation="gelu", norm=(before, after)
    )
    verdict = absorb(both)
    assert verdict.status == "possible"
    x = before(normal(numbers(1), 50, d))
    assert close(both, verdict.replacement(), x) < 1e-9
    refused = absorb(generic(d, h, norm=(before, after)))
    assert refused.status == "impossible"
    assert refused.verify()


def test_a_gain_with_zeros_before_the_block() -> None:
    gain = torch.tensor([0.0, 1, 2, 1, 1, 1], dtype=torch.float64)
    verdict = absorb(generic(6, 24, norm=Norm("layernorm", "input", 1e-5, gain)))
    assert verdict.status == "impossible"
    assert verdict.verify()


def test_hardswish_that_bends_beyond_its_bias() -> None:
    """It bends between -3 and 3, so on the ball a unit is straight only where its bias outdoes that as well."""
    norm = Norm("layernorm", "input")
    block, chosen = planted(4, 12, "hardswish", seed=2)
    assert block.up_bias is not None
    far = 1.2 * 2.0 * block.up.norm(dim=1)  # the ball has the radius 2: past it, and not past the bend
    asked = Block(block.up, block.down, up_bias=far, down_bias=block.down_bias, activation="hardswish", norm=norm)
    verdict = absorb(asked)
    assert verdict.status == "possible"
    assert verdict.flips is not None
    assert torch.equal(verdict.flips, chosen)
    assert verdict.verify()
