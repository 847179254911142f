"""Depth: can a stack of blocks be had without any skip?

    F = F_L o ... o F_1,  F_l(x) = A_l x + MLP_l(x)        G = G_M o ... o G_1,  G_m without skips, of the same kind

Impossible at any depth M and width where G is flat at the origin and DF(0) is not (gates with g(0) = 0 and degrees
above 1, no hidden bias in G_1), or where G is bounded and F is not (bounded activations, norms on every branch). A
replacement narrower than what DF keeps at one point is impossible too. If every block is possible so is the stack. The
rest is open, and is left undecided: "Can an MLP Absorb Its Own Skip Connection?" (arXiv 2604.23705) leaves it so.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unskip.absorption._activations import KINKS
from unskip.absorption._block import Block
from unskip.absorption._closed import direction
from unskip.absorption._decide import absorb, allowed
from unskip.absorption._stack_check import same_norm, stack_obstructed, stands
from unskip.absorption._verdict import Biases, Certificate, Obstruction, Status, Verdict
from unskip.errors import BadInput


@dataclass(frozen=True, eq=False)
class StackVerdict:
    """The verdict on a stack, and those on its blocks."""

    status: Status
    reason: str
    blocks: tuple[Block, ...]
    biases: Biases
    verdicts: tuple[Verdict, ...]
    obstructions: tuple[Obstruction, ...] = ()

    @property
    def certificate(self) -> Certificate | None:
        return self.obstructions[0].certificate if self.obstructions else None

    def replacement(self) -> list[Block]:
        """The blocks without their skips."""
        if self.status != "possible":
            raise BadInput(f"stack: the verdict is {self.status}, so there is no replacement")
        return [each.replacement() for each in self.verdicts]

    def verify(self) -> bool:
        """Checks it again from the weights, and the verdicts on the blocks as well."""
        return stands(self)

    def __str__(self) -> str:
        lines = [f"stack of {len(self.blocks)}: {self.status}", f"  {self.reason}"]
        return "\n".join([*lines, *(f"  block {i}: {each.status}" for i, each in enumerate(self.verdicts))])


def stack(blocks: Sequence[Block], biases: Biases = "as-is") -> StackVerdict:
    """Decides about a composition of blocks, the first one applied first."""
    chain = tuple(blocks)
    if not chain:
        raise BadInput("stack: give at least one block")
    for first, second in itertools.pairwise(chain):
        if first.outputs != second.inputs:
            raise BadInput(f"stack: a block gives {first.outputs} values and the next takes {second.inputs}")
    verdicts = tuple(absorb(each, biases=biases) for each in chain)
    for first, second in itertools.pairwise(chain):
        if "input" in second.norms and not same_norm(first, second):
            why = "Not decided: a block reads what a norm gives, and the block before it does not end in that norm."
            return StackVerdict("undecided", why, chain, biases, verdicts)
    if all(each.status == "possible" for each in verdicts):
        return StackVerdict("possible", "Every block can swallow its skip, so the stack can.", chain, biases, verdicts)
    found = []
    axis = _flat_direction(chain, biases)
    if axis is not None:
        sentence = (
            "Without hidden biases in its first block a stack without skips is flat at the origin, at any depth and "
            "width, and this stack is not."
        )
        found.append(Obstruction(sentence, Certificate("linearisation", {"direction": axis})))
    axis = _growth_direction(chain)
    if axis is not None:
        sentence = "Every branch stays bounded and the skips grow with the input, at any depth and width."
        found.append(Obstruction(sentence, Certificate("growth", {"direction": axis})))
    point = _bottleneck_point(chain)
    if point is not None:
        width = min(each.width for each in chain)
        sentence = f"At one point the stack moves its output in more than {width} directions, its narrowest width."
        found.append(Obstruction(sentence, Certificate("bottleneck", {"point": point})))
    found = [each for each in found if stack_obstructed(chain, biases, each.certificate)]
    if found:
        return StackVerdict("impossible", found[0].sentence, chain, biases, verdicts, tuple(found))
    if len(chain) == 1:
        return StackVerdict(verdicts[0].status, verdicts[0].reason, chain, biases, verdicts, verdicts[0].obstructions)
    why = "Not decided: not every block can swallow its skip, and whether a stack could do it together is open."
    return StackVerdict("undecided", why, chain, biases, verdicts)


def _product(blocks: Sequence[Block]) -> Tensor:
    out = blocks[0].matrix
    for each in blocks[1:]:
        out = each.matrix.to(out) @ out
    return out


def _biased(block: Block) -> bool:
    biases = [block.up_bias, block.gate_bias, block.down_bias, *(norm.bias for norm in block.norms.values())]
    return any(bias is not None and bool(bias.any()) for bias in biases)


def _is_flat(block: Block) -> bool:
    """Whether the MLP vanishes faster than its input at the origin, without hidden biases."""
    phi = block.phi
    gate = block.gated and phi.at_zero == 0 and math.isfinite(phi.lipschitz)
    return phi.trusted and (gate or (not block.gated and phi.family == "power"))


def _at_origin(blocks: Sequence[Block]) -> tuple[Tensor, float] | None:
    """DF(0) and the size that its rounding is relative to; None where it cannot be had."""
    if all(_is_flat(each) and not _biased(each) for each in blocks):
        if any("post" in each.norms or "input" in each.norms for each in blocks):
            return None
        if any(not norm.eps or norm.kind == "other" for each in blocks for norm in each.norms.values()):
            return None
        size = math.prod(float(each.matrix.norm()) for each in blocks)
        return _product(blocks), size
    return _along(blocks, torch.zeros(blocks[0].inputs, dtype=torch.float64, device=blocks[0].up.device))


def _along(blocks: Sequence[Block], point: Tensor) -> tuple[Tensor, float] | None:
    """The derivative of the stack at a point, with the sizes of its factors; None with norms or at a kink."""
    if any(each.norms for each in blocks):
        return None
    total, size = torch.eye(blocks[0].inputs, dtype=torch.float64, device=point.device), 1.0
    for each in blocks:
        weight, bias = (each.up, each.up_bias) if each.gate is None else (each.gate, each.gate_bias)
        z = weight.detach().double() @ point + (0 if bias is None else bias.detach().double())
        if not each.phi.analytic and any(
            bool(((z - kink).abs() < 1e-9).any()) for kink in KINKS.get(each.phi.name, (0.0,))
        ):
            return None
        step = each.derivative(point)
        rows = float((each.up.detach().double() @ point).norm()) + 1
        gate = 1.0 if each.gate is None else 1 + float(each.gate.detach().double().norm())
        bulk = float(each.down.double().norm() * each.up.double().norm()) * gate * rows
        total, size = step @ total, size * (float(each.matrix.norm()) + bulk)
        point = each.double()(point)
    return total, size


def _flat_direction(blocks: Sequence[Block], biases: Biases) -> Tensor | None:
    first = blocks[0]
    if not _is_flat(first) or allowed(first, biases)[0] or {"post", "input"} & first.norms.keys():
        return None
    if any(norm.bias is not None or not norm.eps or norm.kind == "other" for norm in first.norms.values()):
        return None
    if not all(each.phi.trusted for each in blocks) or any("post" in each.norms for each in blocks):
        return None
    found = _at_origin(blocks)
    if found is None or not float(found[0].norm()) > 1e-8 * found[1]:
        return None
    return direction(found[0])


def _growth_direction(blocks: Sequence[Block]) -> Tensor | None:
    for each in blocks:
        norms = [each.norms[place] for place in ("pre", "out") if place in each.norms]
        bounded = each.phi.family == "bounded" and not each.gated
        if {"post", "input"} & each.norms.keys() or not each.phi.trusted or not (norms or bounded):
            return None
        if any(norm.kind == "other" for norm in norms):
            return None
    product = _product(blocks)
    if not float(product.norm()) > 1e-8 * math.prod(float(each.matrix.norm()) for each in blocks):
        return None
    return direction(product)


def _bottleneck_point(blocks: Sequence[Block]) -> Tensor | None:
    width = min(each.width for each in blocks)
    if width >= min(blocks[0].inputs, blocks[-1].outputs) or not all(each.phi.trusted for each in blocks):
        return None
    point = torch.randn(blocks[0].inputs, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    found = _along(blocks, point.to(blocks[0].up.device))
    if found is None or not float(torch.linalg.svdvals(found[0])[width]) > 2e-10 * found[1]:
        return None
    return point.to(blocks[0].up.device)
