"""A second pair of eyes on a stack: every hypothesis of its theorems again, and the numbers from the weights alone.

Derivatives are carried through the stack as vectors, with the sizes of all that was added up beside them, and have to
agree with difference quotients of the stack itself. The verdicts on the single blocks are checked as well.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unskip.absorption._activations import KINKS
from unskip.absorption._block import Block
from unskip.absorption._verdict import Biases, Certificate
from unskip.absorption._verify import allowance

if TYPE_CHECKING:
    from unskip.absorption._stack import StackVerdict

SMALL = 1e-10  # of the sizes that were added up: what rounding may explain


def stands(verdict: StackVerdict) -> bool:
    """Whether the verdict stands, and those on its blocks with it."""
    blocks, verdicts = verdict.blocks, verdict.verdicts
    if len(blocks) != len(verdicts) or any(a.outputs != b.inputs for a, b in itertools.pairwise(blocks)):
        return False
    for block, each in zip(blocks, verdicts, strict=True):
        if each.block is not block or each.biases != verdict.biases or each.width != block.width or not each.verify():
            return False
    if verdict.status == "possible":
        return not verdict.obstructions and all(each.status == "possible" for each in verdicts) and _replaced(verdict)
    if verdict.status == "undecided":
        return not verdict.obstructions
    return bool(verdict.obstructions) and all(_obstructs(verdict, each.certificate) for each in verdict.obstructions)


def _obstructs(verdict: StackVerdict, certificate: Certificate) -> bool:
    if len(verdict.blocks) == 1 and any(certificate is each.certificate for each in verdict.verdicts[0].obstructions):
        return verdict.verdicts[0].status == "impossible"  # and that one has been checked
    return stack_obstructed(verdict.blocks, verdict.biases, certificate)


def stack_obstructed(blocks: Sequence[Block], biases: Biases, certificate: Certificate) -> bool:
    """Whether a certificate on a composition holds."""
    check = {"linearisation": _linearisation, "growth": _growth, "bottleneck": _bottleneck}.get(certificate.kind)
    if check is None or not all(each.phi.trusted for each in blocks):
        return False
    for place, each in enumerate(blocks):
        for norm in each.norms.values():
            if norm.kind == "other" or norm.place == "post" or (place and norm.place == "input"):
                return False
    return check(blocks, biases, certificate)


def _replaced(verdict: StackVerdict) -> bool:
    """Every block against its replacement on what the stack really sends it."""
    blocks = [each.known().double() for each in verdict.blocks]
    for first, second in itertools.pairwise(verdict.blocks):
        if "input" in second.norms and not same_norm(first, second):
            return False  # what it reads is not what its verdict is about
    generator = torch.Generator().manual_seed(20260427)
    for size in (0.1, 1.0, 10.0):
        x = size * torch.randn(64, blocks[0].inputs, generator=generator, dtype=torch.float64)
        x = x.to(blocks[0].up.device)
        x = blocks[0].norms["input"](x) if "input" in blocks[0].norms else x
        for ours, kept, each in zip(blocks, verdict.blocks, verdict.verdicts, strict=True):
            x = x.to(ours.up.device)
            other = each.replacement().known()
            f, g = ours(x), other.double()(x)
            seen = torch.isfinite(f)
            if bool(seen.any()) and not bool((f - g)[seen].norm() <= allowance(kept.known(), other, x) + 1e-30):
                return False
            x = f
    return True


def same_norm(first: Block, second: Block) -> bool:
    """Whether the norm that `second` reads is the one at the end of `first`."""
    one, two = first.norms.get("post"), second.norms.get("input")
    if one is None or two is None or one.kind != two.kind or one.eps != two.eps:
        return False
    for a, b in ((one.gain, two.gain), (one.bias, two.bias)):
        if (a is None) != (b is None) or (a is not None and b is not None and not torch.equal(a, b.to(a))):
            return False
    return True


def _linearisation(blocks: Sequence[Block], biases: Biases, certificate: Certificate) -> bool:
    """G_1 is flat at the origin, so G is; F is not."""
    first = blocks[0]
    phi = first.phi
    gate = first.gated and phi.at_zero == 0 and math.isfinite(phi.lipschitz)
    if not gate and (first.gated or phi.family != "power"):
        return False
    hidden = first.up_bias is not None or first.gate_bias is not None
    if biases == "allowed" or (biases == "as-is" and hidden):
        return False
    if any(norm.bias is not None or norm.place == "input" for norm in first.norms.values()):
        return False
    if any(not norm.eps for each in blocks for norm in each.norms.values()):  # no derivative at the origin
        return False
    axis = certificate.data["direction"].double()
    origin = torch.zeros_like(axis)
    found = _pushed(blocks, origin, axis[:, None])
    if found is None or not float(found[0].norm()) > SMALL * float(found[1].norm()):
        return False
    # Behind a norm the stack bends within sqrt(eps) of the origin.
    return _agrees(blocks, origin, axis, found[0][:, 0], (1e-3, 1e-4, 1e-5, 1e-6, 1e-8, 1e-10))


def _growth(blocks: Sequence[Block], biases: Biases, certificate: Certificate) -> bool:
    """Every branch is bounded, so F grows like the product of the skips and G does not grow at all."""
    for each in blocks:
        normed = {"pre", "out"} & each.norms.keys()
        if "input" in each.norms or not (normed or (each.phi.family == "bounded" and not each.gated)):
            return False
    axis = certificate.data["direction"].double()
    value, size = axis, axis.abs()
    for each in blocks:
        skip = each.matrix.to(axis)
        value, size = skip @ value, skip.abs() @ size
    if not float(value.norm()) > SMALL * float(size.norm()):
        return False
    return _agrees(blocks, axis, axis, value, (1e4, 1e6, 1e8, 1e10, 1e12))


def _bottleneck(blocks: Sequence[Block], biases: Biases, certificate: Certificate) -> bool:
    """At one point DF has a rank above the narrowest width, which bounds that of DG everywhere."""
    if any(each.norms for each in blocks):
        return False
    point = certificate.data["point"].double()
    eye = torch.eye(len(point), dtype=torch.float64, device=point.device)
    found = _pushed(blocks, point, eye)
    if found is None:
        return False
    width, values = min(each.width for each in blocks), torch.linalg.svdvals(found[0])
    if len(values) <= width or not float(values[width]) > SMALL * float(found[1].norm()):
        return False
    axis = eye[int(found[0].norm(dim=0).argmax())]
    return _agrees(blocks, point, axis, found[0] @ axis, (1e-3, 1e-4, 1e-5, 1e-6))


def _run(blocks: Sequence[Block], x: Tensor) -> Tensor:
    for each in blocks:
        x = each.double()(x.to(each.up.device))
    return x


def _agrees(blocks: Sequence[Block], point: Tensor, axis: Tensor, slope: Tensor, steps: Sequence[float]) -> bool:
    """Whether some difference quotient of the stack along the axis is the slope, to a hundredth."""
    start, off = _run(blocks, point), math.inf
    for step in steps:
        quotient = (_run(blocks, point + step * axis) - start) / step
        off = min(off, float((quotient - slope).norm()))
    return off <= 1e-2 * float(slope.norm())


def _pushed(blocks: Sequence[Block], point: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor] | None:
    """DF(point) on the columns of `vectors`, and the sizes of its terms; None at a kink or behind a norm."""
    sizes = vectors.abs()
    for each in blocks:
        point, vectors, sizes = (value.to(each.up.device) for value in (point, vectors, sizes))
        skip, up, down = each.matrix, each.up.detach().double(), each.down.detach().double()
        moved, bulk = skip @ vectors, skip.abs() @ sizes
        vanishes = each.gated or each.phi.family == "power"  # at 0 without biases: a product of two small things
        if not (vanishes and _silent(each) and not bool(point.any()) and (each.phi.at_zero == 0)):
            if each.norms:
                return None
            gate = up if each.gate is None else each.gate.detach().double()
            z = gate @ point + _bias(each.up_bias if each.gate is None else each.gate_bias, gate)
            bends = gate.any(dim=1)
            if not each.phi.analytic:
                kinks = torch.tensor(KINKS.get(each.phi.name, (0.0,)), dtype=torch.float64).to(z.device)
                if bool(((z[bends, None] - kinks).abs() < 1e-9).any()):
                    return None
            with torch.enable_grad():
                z = z.detach().requires_grad_()
                value = each.phi.function(z)
                (slope,) = torch.autograd.grad(value.sum(), z)
            value = value.detach()
            if each.gate is None:
                parts = [(slope, up)]
            else:
                parts = [(slope * (up @ point + _bias(each.up_bias, up)), gate), (value, up)]
            for factor, rows in parts:
                moved = moved + down @ (factor[:, None] * (rows @ vectors))
                bulk = bulk + down.abs() @ (factor.abs()[:, None] * (rows.abs() @ sizes))
        point, vectors, sizes = each.double()(point), moved, bulk
    return vectors, sizes


def _silent(block: Block) -> bool:
    """Whether no bias moves the origin."""
    held = [block.up_bias, block.gate_bias, block.down_bias, *(norm.bias for norm in block.norms.values())]
    return not any(bias is not None and bool(bias.any()) for bias in held)


def _bias(bias: Tensor | None, like: Tensor) -> Tensor:
    return like.new_zeros(len(like)) if bias is None else bias.detach().to(like)
