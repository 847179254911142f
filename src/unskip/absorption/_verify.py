"""Checks a verdict from the block's weights and the certificate, with nothing of the search."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from unskip.absorption._checks import CHECKS
from unskip.absorption._measure import agree, linear_gap
from unskip.absorption._problem import SHARE, reduce
from unskip.absorption._verdict import Certificate, Verdict

SEED = 20260426  # of inputs that the search has not seen


def verify(verdict: Verdict) -> bool:
    """Whether the verdict holds. All obstructions that it lists have to."""
    listed = [each.certificate for each in verdict.obstructions]
    if verdict.status == "undecided":
        return verdict.weights is None and all(holding(verdict, listed))
    if verdict.status == "possible":
        return _replaces(verdict)
    if verdict.certificate is None:
        return False
    return all(holding(verdict, list({id(each): each for each in (verdict.certificate, *listed)}.values())))


def holding(verdict: Verdict, certificates: Sequence[Certificate]) -> list[bool]:
    """Which of the certificates hold."""
    problem = reduce(verdict.block, verdict.width, verdict.biases, verdict.inputs)
    return [each.kind in CHECKS and CHECKS[each.kind](problem, each.data) for each in certificates]


def _replaces(verdict: Verdict) -> bool:
    """Compares block and replacement on new inputs of several sizes, and looks at what the replacement is."""
    block, other = verdict.block, verdict.weights
    if other is None or other.width != verdict.width or isinstance(other.skip, Tensor) or other.skip != 0:
        return False
    if other.activation != block.activation or other.norms != block.norms or other.gated != block.gated:
        return False
    allowed = {
        "as-is": (block.up_bias is not None, block.gate_bias is not None, block.down_bias is not None),
        "allowed": (True, True, True),
        "none": (False, False, False),
    }[verdict.biases]
    for may, bias in zip(allowed, (other.up_bias, other.gate_bias, other.down_bias), strict=True):
        if bias is not None and not may and bool(bias.any()):
            return False
    return _makes_up(verdict) and agree(block, other, verdict.inputs, SEED, 4 * (verdict.tolerance or 0.0)).holds


def _makes_up(verdict: Verdict) -> bool:
    """Whether the linear maps agree up to a small share of the skip."""
    block, other = verdict.block, verdict.weights
    assert other is not None
    phi, norms = block.phi, block.norms
    affine = verdict.inputs is not None and phi.homogeneous  # the maps are not these
    if block.gated or phi.odd is None or {"pre", "out"} & norms.keys() or affine:
        return True
    left, skip = linear_gap(block, other)
    half = abs(float(phi.odd)) / 2
    size = float(block.matrix.norm() + half * block.down.double().norm() * block.up.double().norm())
    noise = (1e-12 + (verdict.tolerance or 0.0)) * size
    if phi.family == "linear":  # the whole map is rebuilt, and rounded, and not only what stands for the skip
        noise += 8 * block.roundoff * size
    return float(left.norm()) <= SHARE * float(skip.norm()) + noise
