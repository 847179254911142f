"""Verdicts that need no search: they follow from the activation or a norm, for any weights.

F is the block and G a replacement without a skip:

bounded activation, or a norm on the branch    G is bounded and F grows like A x
ELU, SELU, CELU, Mish, |z|                     no sum of their units is linear, so A would have to be 0
ReLU^2, z^2, or a gate with g(0) = 0           without hidden biases G has derivative 0 at the origin, and F has A
linear                                         F is one matrix; only its rank counts

With a norm n(x) on the branch, equality is ruled out on every open set too. Where no unit crosses a kink of its
activation, both sides are analytic in n(x), which is bounded, so A x would be bounded on a cone. The pieces of softsign
have poles, but they are rational: A x = R(n(x)) on an open set with a rational R would make
|x| = |n| sqrt(eps / (1 - |n|^2 / d)) rational in n, which it is not (with eps = 0 the right side does not depend on the
norm of x, and the left side does).
"""

from __future__ import annotations

import torch
from torch import Tensor

from unskip.absorption._block import Block
from unskip.absorption._construct import new_row_norms
from unskip.absorption._problem import Problem
from unskip.absorption._verdict import Certificate, Obstruction


def _moved(problem: Problem) -> dict[str, Tensor] | None:
    """The axis on which the skip acts most strongly, as the data of a certificate, or None if the skip is zero."""
    sizes = problem.skip.norm(dim=0)
    if float(sizes.max()) <= 1e-9 * problem.raw_skip_norm:
        return None
    axis = torch.zeros_like(sizes)
    axis[int(sizes.argmax())] = 1.0
    return {"direction": axis}


def growth(problem: Problem) -> Obstruction | None:
    """Obstruction: the replacement is bounded and the block is not."""
    block = problem.block
    norms = [block.norms[place] for place in ("pre", "out") if place in block.norms]
    bounded = block.phi.family == "bounded" and not block.gated
    found = _moved(problem)
    if found is None or not block.phi.trusted or any(norm.kind == "other" for norm in norms):
        return None
    if not (norms or bounded) or ("post" in block.norms and problem.caveat is not None):
        return None
    if problem.domain is not None and (problem.caveat or not (norms or block.phi.analytic)):
        return None
    if norms:
        sentence = (
            "Behind a norm the MLP stays bounded, and the skip grows with the input: no weights of this form reproduce "
            "the block on any open set of inputs. This says nothing about finite data or about approximation."
        )
    else:
        sentence = f"{block.phi.name} is bounded, so the MLP stays bounded, and the skip grows with the input."
    return Obstruction(sentence, Certificate("growth", found))


def family(problem: Problem) -> Obstruction | None:
    """Obstruction for ELU-like, Mish and even activations: no sum of their units is linear."""
    block, found = problem.block, _moved(problem)
    if found is None or block.gated or block.phi.family not in ("elu", "mish", "even") or not block.phi.trusted:
        return None
    if problem.caveat is not None or (problem.domain is not None and not block.phi.analytic):
        return None
    sentence = (
        f"Units of {block.phi.name} cannot add up to a linear map, at any width, so they cannot reproduce the skip."
    )
    return Obstruction(sentence, Certificate("family", found))


def linearisation(problem: Problem) -> Obstruction | None:
    """Obstruction for gates with g(0) = 0, ReLU^2 and z^2 without hidden biases: no linear part at the origin."""
    block, phi, found = problem.block, problem.block.phi, _moved(problem)
    applies = phi.at_zero == 0 if block.gated else phi.family == "power"
    if found is None or not applies or problem.caveat is not None or not phi.trusted:
        return None
    if problem.hidden_bias or block.up_bias is not None or block.gate_bias is not None:
        return None
    domain = problem.domain
    if domain is not None and not phi.analytic and not bool(domain.holds(torch.zeros_like(domain.center))):
        return None  # equality on the domain says nothing about the origin
    what = f"The gate {phi.name} is 0 at 0, so" if block.gated else f"{phi.name} is of degree 2, so"
    sentence = (
        f"{what} without hidden biases the MLP has no linear part at the origin, and the skip is one. No width helps."
    )
    return Obstruction(sentence, Certificate("linearisation", found))


def linear(problem: Problem) -> tuple[Block | None, float, Obstruction | None]:
    """With a linear activation the block is one matrix, A + (c / 2) W_down W_up.

    Returns the replacement and its error, or the obstruction.
    """
    block = problem.block
    half = problem.odd / 2
    matrix = block.matrix + half * block.down.detach().double() @ block.up.detach().double()
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    size = problem.rounding_scale
    width = problem.width
    if len(values) > width and float(values[width]) > max(1e-9 * size, 2 * problem.tolerance):
        sentence = f"The activation is linear, and the block is a matrix of rank above {width}, the number of units."
        return None, 0.0, Obstruction(sentence, Certificate("rank", {"value": float(values[width])}))
    use = min(width, int((values > 1e-13 * values[0]).sum()))  # smaller ones are rounding
    root = new_row_norms(block, values[:use], right[:use])
    lines, columns = right[:use] * root[:, None], left[:, :use] * (values[:use] / root)
    lost = float(values[use:].norm()) if len(values) > use else 0.0
    if width >= min(matrix.shape):  # without a factorisation rounding is least
        eye, wide = torch.eye(min(matrix.shape)).to(matrix), block.inputs > block.outputs
        use, lines, columns = len(eye), matrix if wide else eye, eye if wide else matrix
    up, down = matrix.new_zeros(width, block.inputs), matrix.new_zeros(block.outputs, width)
    up[:use], down[:, :use] = lines, columns / half
    const = block.down_bias
    if block.up_bias is not None:
        shift = half * block.down.detach().double() @ block.up_bias.detach().double()
        const = (shift + (0 if const is None else const.double())).to(block.down.dtype)
    if const is not None and problem.no_output_bias and bool(const.any()):
        return None, 0.0, None
    up, down = up.to(block.up.dtype), down.to(block.down.dtype)
    if not all(bool(torch.isfinite(each).all()) for each in (up, down, const) if each is not None):
        return None, 0.0, None  # the weights overflow their dtype
    made = Block(
        up,
        down,
        down_bias=None if problem.no_output_bias else const,
        activation=block.activation,
        skip=0.0,
        norm=block.norm,
    )
    return made, lost, None
