"""Norms: with one on the branch no skip can be absorbed, and one after the sum leaves a shift free."""

from __future__ import annotations

import pytest
import torch
from tests.absorption.blocks import close, generic, normal, numbers, planted

from unskip.absorption import Block, Norm, absorb


def shifted(d: int, h: int, word: str, norm: Norm, seed: int = 0) -> Block:
    """A block that satisfies the flip criterion only up to 1 w^T."""
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
    # Checked numerically: along the certificate's direction the branch is bounded and the block is not.
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
    assert refused.status == "impossible"  # RMSNorm removes nothing
    assert refused.verify()


def test_after_the_sum_a_generic_block_is_refused() -> None:
    verdict = absorb(generic(norm=Norm("layernorm", "post", 1e-12)))
    assert verdict.status == "impossible"
    assert verdict.verify()
    assert verdict.extra_width == 8  # 2 d - d; the projected skip has the same number of inputs


@pytest.mark.parametrize(
    "norm",
    [
        Norm("layernorm", "post", 0.0),
        Norm("rmsnorm", "post", 0.0),
        Norm("other", "post"),
        Norm("layernorm", "post", 1e-5, torch.tensor([0.0, 1, 1, 1, 1, 1, 1, 1])),
    ],
    ids=["layernorm-eps-0", "rmsnorm-eps-0", "other", "zero-gain"],
)
def test_what_is_not_settled_is_undecided(norm: Norm) -> None:
    verdict = absorb(generic(norm=norm))
    assert verdict.status == "undecided"
    assert len(verdict.reason) > 20
    if norm.kind != "other":  # a block with a flip set stays possible
        block, _ = planted(8, 32, norm=norm)
        assert absorb(block).status == "possible"
