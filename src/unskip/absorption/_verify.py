"""A second pair of eyes: checks a verdict from the block's weights and the certificate, with nothing of the search."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from unskip.absorption._block import Block
from unskip.absorption._obstructions import CHECKS
from unskip.absorption._question import Setting, setting
from unskip.absorption._verdict import Certificate, Verdict


def verify(verdict: Verdict) -> bool:
    """Whether the verdict stands. All obstructions that it lists have to hold."""
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
    settings: dict[int, Setting] = {}
    found = []
    for each in certificates:
        check, basis = CHECKS.get(each.kind), each.data.get("basis")
        if check is not None and id(basis) not in settings:
            settings[id(basis)] = setting(verdict, basis)
        found.append(check is not None and check(settings[id(basis)], each.data))
    return found


def _replaces(verdict: Verdict) -> bool:
    """Runs block and replacement in float64 on new inputs of several sizes, and looks at what the replacement is."""
    block, other = verdict.block, verdict.weights
    if other is None or other.width != verdict.width or isinstance(other.skip, Tensor) or other.skip != 0:
        return False
    if other.activation != block.activation or other.norms != block.norms or other.gated != block.gated:
        return False
    if not _makes_up(block, other):
        return False
    allowed = {
        "as-is": (block.up_bias is not None, block.gate_bias is not None, block.down_bias is not None),
        "allowed": (True, True, True),
        "none": (False, False, False),
    }[verdict.biases]
    for may, bias in zip(allowed, (other.up_bias, other.gate_bias, other.down_bias), strict=True):
        if bias is not None and not may and bool(bias.any()):
            return False
    generator = torch.Generator().manual_seed(20260426)
    block, other = block.known(), other.known()
    ours, theirs = block.double(), other.double()
    for size in (0.1, 1.0, 10.0):
        x = size * torch.randn(64, block.inputs, generator=generator, dtype=torch.float64)
        norms = block.norms
        if "input" in norms:
            x = norms["input"](x)
        x = x.to(block.up.device)
        f, g = ours(x), theirs(x)
        seen = torch.isfinite(f)  # a LayerNorm of one channel with eps = 0 gives nothing to compare
        if not bool((f - g)[seen].norm() <= allowance(block, other, x) + 1e-30) and bool(seen.any()):
            return False
    return True


def _makes_up(block: Block, other: Block) -> bool:
    """Whether the linear maps agree up to a small share of the skip. In a coarse dtype outputs alone would not show
    that a skip was dropped: against large weights it is within their rounding."""
    phi, norms = block.phi, block.norms
    affine = "input" in norms and not phi.analytic  # then units may be affine, and the maps are not these
    if block.gated or phi.odd is None or {"pre", "out"} & norms.keys() or affine:
        return True
    half = float(phi.odd) / 2
    ours, theirs = (half * each.down.detach().double() @ each.up.detach().double() for each in (block, other))
    skip = block.matrix
    left = skip + ours - theirs
    for norm in norms.values():
        if norm.place == "input" and norm.kind != "other":
            gain = left.new_ones(block.inputs) if norm.gain is None else norm.gain.detach().to(left)
            left, skip = left * gain, skip * gain
            if norm.kind == "layernorm":
                left, skip = (each - each.mean(1, keepdim=True) for each in (left, skip))
        elif norm.place == "post" and norm.kind == "layernorm":
            left, skip = (each - each.mean(0, keepdim=True) for each in (left, skip))
    noise = 1e-12 * float(block.matrix.norm() + abs(half) * block.down.double().norm() * block.up.double().norm())
    if phi.family == "linear":  # the whole map is rebuilt, and rounded, and not only what stands for the skip
        noise += 8 * block.roundoff * abs(half) * float(other.down.double().norm() * other.up.double().norm())
    return float(left.norm()) <= 0.05 * float(skip.norm()) + noise


def allowance(block: Block, other: Block, x: Tensor) -> float:
    """How far rounding of the stored weights may move the outputs on x: a multiple of the sizes of all terms."""
    u = max(block.roundoff, 2.0**-50)
    total = 0.0
    for each in (block, other):
        inner = each.norms["pre"](x) if "pre" in each.norms else x
        hidden = inner.abs() @ each.up.double().abs().mT
        hidden = hidden + (0 if each.up_bias is None else each.up_bias.double().abs())
        if each.gate is None and math.isfinite(each.phi.at_zero):
            hidden = hidden + abs(each.phi.at_zero)  # softplus is not 0 at 0
        if each.gate is not None:
            gate = inner.abs() @ each.gate.double().abs().mT
            hidden = hidden * (1 + gate + (0 if each.gate_bias is None else each.gate_bias.double().abs()))
        spread = hidden.square() @ each.down.double().square().mT  # errors of different units add as squares
        total += float(spread.sum().sqrt()) + float((x.abs() @ each.matrix.abs().mT).norm())
        total += 0.0 if each.down_bias is None else float(each.down_bias.double().norm()) * len(x) ** 0.5
    scale = 1.0
    if "post" in block.norms:  # a norm divides by the size of what it gets
        norm = block.norms["post"]
        plain = block.double()
        before = plain.branch(x) + x @ plain.matrix.mT
        if norm.kind == "layernorm":
            before = before - before.mean(-1, keepdim=True)
        scale = float((before.square().mean(-1) + (norm.eps or 0.0)).rsqrt().max())
        scale *= 1.0 if norm.gain is None else float(norm.gain.double().abs().max())
    return 50 * u * total * scale
