"""Blocks whose rank-one terms are too many to write out: subsampled problems and normal equations."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.absorption.blocks import close, normal, numbers, planted

from unskip.absorption import Block, _search, absorb

D, H = 64, 256  # with MAX_DENSE lowered


@pytest.fixture(autouse=True)
def _nothing_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_search, "MAX_DENSE", 1000)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_planted(dtype: torch.dtype) -> None:
    block, chosen = planted(D, H, "gelu", dtype=dtype)
    verdict = absorb(block)
    assert verdict.flips is not None
    assert torch.equal(verdict.flips, chosen)
    assert verdict.verify()
    assert close(block, verdict.replacement()) < {torch.float64: 1e-10, torch.float32: 1e-5}.get(dtype, 0.1)


@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("heavy", [False, True])
def test_generic(scale: float, heavy: bool) -> None:
    g = numbers(0)
    up, down = scale * normal(g, H, D), scale * normal(g, D, H)
    if heavy:
        up = up * torch.exp(normal(g, H, 1))
        up[:, :4] *= 20
        down[:4] *= 20
    verdict = absorb(Block(up, down, activation="relu"))
    assert verdict.status == "impossible"
    assert verdict.verify()


def test_a_near_miss() -> None:
    block, chosen = planted(D, H, "gelu")
    down = block.down.clone()
    down[0, chosen[0]] += 1e-6
    verdict = absorb(replace(block, down=down))
    assert verdict.status == "impossible"
    assert verdict.verify()


@pytest.mark.parametrize("rank", [1, 32])
def test_other_skips(rank: int) -> None:
    g = numbers(1)
    skip = normal(g, 48, rank) @ normal(g, rank, D)
    block, chosen = planted(h=H, word="relu", skip=skip)
    verdict = absorb(block)
    assert verdict.flips is not None
    assert torch.equal(verdict.flips, chosen)
    refused = absorb(Block(normal(g, H, D), normal(g, 48, H), activation="relu", skip=skip))
    assert refused.status == "impossible"
    assert refused.verify()


@pytest.mark.parametrize(("d", "h"), [(6, 300), (3, 700)])
def test_a_box_that_is_missed_by_little(d: int, h: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With more units than equations t exists, but not in [0, 1]. Y is normal to a face of the set of all flips."""
    monkeypatch.setattr(_search, "MAX_DENSE", 10**7)
    g = numbers(0)
    joint, rows, normal_to = normal(g, d, h), normal(g, h, d) * torch.exp(normal(g, h, 1)), normal(g, d, d)
    chosen = (joint * (normal_to @ rows.mT)).sum(0) > 0
    reached = joint[:, chosen] @ rows[chosen]
    away = 1e-3 * float(reached.norm())
    goal = reached + away * normal_to / normal_to.norm()
    dual = _search.search(_search.full_equation(joint, rows, goal, away / 10), lambda flips: False)
    assert dual is not None
    assert away / 10 < dual.bound <= away * (1 + 1e-9)
    matrix = dual.matrix
    g_k = torch.einsum("ik,ij,kj->k", joint, matrix, rows)
    bound = (matrix * goal).sum() - g_k.clamp(min=0).sum()
    assert float(bound) == pytest.approx(dual.bound, rel=1e-6)
    # A goal inside the box is not ruled out, and the search ends.
    inside = joint @ (0.5 + 0.4 * torch.cos(torch.arange(h).double()))[:, None].mul(rows)
    assert _search.search(_search.full_equation(joint, rows, inside, 1e-9), lambda flips: False) is None
