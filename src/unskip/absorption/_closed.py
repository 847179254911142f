"""Verdicts that need no search: what the activation or a norm forbids whatever the weights are.

bounded activation, or a norm on the branch    G is bounded and F grows like A x
ELU, SELU, CELU, Mish, |z|                     no sum of their units is linear, so A would have to be 0
degree k > 1, or a gate with g(0) = 0          without hidden biases G is flat at the origin, and F moves like DF(0)
linear                                         F is one matrix; only its rank counts
any activation, width h < d                    DG has rank at most h at every point

Behind a norm n(x) equality on any open set is ruled out too. Where every unit stays in one piece of its activation both
sides are analytic in n(x), which is bounded, so A x would be bounded on a cone. The pieces of softsign have poles; but
they are rational, and on an open set A x = R(n(x)) with a rational R would make |x| = |n| sqrt(eps / (1 - |n|^2 / d))
rational in n, which it is not (with eps = 0 the right side does not change with the length of x, and the left does).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from unskip.absorption._block import Block
from unskip.absorption._problem import Problem
from unskip.absorption._verdict import Certificate, Obstruction


def direction(skip: Tensor) -> Tensor | None:
    """The axis that the skip moves most, or None where it moves nothing."""
    sizes = skip.norm(dim=0)
    if not float(sizes.max()) > 0:
        return None
    axis = torch.zeros(skip.shape[1], dtype=torch.float64, device=skip.device)
    axis[int(sizes.argmax())] = 1.0
    return axis


def _moved(problem: Problem) -> tuple[Tensor, dict[str, Tensor]] | None:
    axis = direction(problem.skip)
    if axis is None or float((problem.skip @ axis).norm()) <= 1e-9 * float(problem.block.matrix.norm()):
        return None
    where = {} if problem.basis is None else {"basis": problem.basis}
    return axis, {"direction": axis, **where}


def growth(problem: Problem) -> Obstruction | None:
    """A bounded replacement for a block that grows."""
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
    return Obstruction(sentence, Certificate("growth", found[1]))


def family(problem: Problem) -> Obstruction | None:
    """ELU-like, Mish and even activations: their units never add up to something linear."""
    block, found = problem.block, _moved(problem)
    if found is None or block.gated or block.phi.family not in ("elu", "mish", "even") or not block.phi.trusted:
        return None
    if problem.caveat is not None or (problem.domain is not None and not block.phi.analytic):
        return None
    sentence = (
        f"Units of {block.phi.name} cannot add up to a linear map, at any width, so nothing can stand for the skip."
    )
    return Obstruction(sentence, Certificate("family", found[1]))


def flat(problem: Problem) -> list[Obstruction]:
    """Gates with g(0) = 0 and activations of degree above 1, without hidden biases in the replacement."""
    block, phi = problem.block, problem.block.phi
    gate = block.gated and phi.at_zero == 0 and math.isfinite(phi.lipschitz)
    power = not block.gated and phi.family == "power"
    if not (gate or power) or problem.hidden_bias or problem.caveat is not None or not phi.trusted:
        return []
    if {"pre", "out", "input"} & block.norms.keys() or not sees_origin(problem):
        return []
    matrix = problem.skip
    if block.up_bias is not None or block.gate_bias is not None:
        inner = block.gate_bias if block.gated else block.up_bias
        if not phi.analytic and (inner is None or any(bool((inner == kink).any()) for kink in phi.kinks)):
            return []  # a kink at the origin
        point = torch.zeros(block.inputs, dtype=torch.float64, device=block.up.device)
        matrix = block.derivative(point)
        if "post" in block.norms and block.norms["post"].kind == "layernorm":
            matrix = matrix - matrix.mean(0)
        if not float(matrix.norm()) > max(1e-6, 32 * block.grain) * block.derivative_size(point):
            return []
    axis = direction(matrix)
    if axis is None:
        return []
    found = []
    if power or phi.degree is not None:
        degree = (phi.degree or 1) + (1 if gate else 0)
        sentence = (
            f"Without hidden biases the MLP is homogeneous of degree {degree}, so close to the origin it vanishes "
            "against the skip, which is of degree 1. No width helps."
        )
        found.append(Obstruction(sentence, Certificate("degree", {"direction": axis})))
    if gate:
        sentence = (
            f"The gate {phi.name} is 0 at 0, so without hidden biases the MLP has no linear part at the origin, and "
            "the block has one. No width helps."
        )
        found.append(Obstruction(sentence, Certificate("linearisation", {"direction": axis})))
    return found


def sees_origin(problem: Problem) -> bool:
    """Whether what holds on the domain holds around the origin: it lies inside, or everything is analytic."""
    if problem.domain is None or problem.block.phi.analytic:
        return True
    return bool(problem.domain.holds(torch.zeros_like(problem.domain.middle)))


def bottleneck(problem: Problem) -> Obstruction | None:
    """A replacement narrower than its input forgets directions that the block keeps."""
    block, width = problem.block, problem.width
    if block.norms or not block.phi.trusted or width >= min(block.inputs, block.outputs) or block.inputs > 1024:
        return None
    generator = torch.Generator().manual_seed(1)
    point = torch.randn(block.inputs, generator=generator, dtype=torch.float64)
    if problem.domain is not None:
        point = problem.domain.sample(1, generator)[0]
    point = point.to(block.up.device)
    jacobian = block.derivative(point)
    values = torch.linalg.svdvals(jacobian)
    scale = block.derivative_size(point)
    if not float(values[width]) > (2e-9 + 16 * block.grain) * scale:
        return None
    sentence = (
        f"At one point the block moves its output in more than {width} directions, and {width} units cannot follow."
    )
    return Obstruction(sentence, Certificate("bottleneck", {"point": point, "value": float(values[width])}))


def linear(problem: Problem) -> tuple[Block | None, float, Obstruction | None]:
    """A block without a bend is one matrix A + (c / 2) W_down W_up: the replacement and its error, or why not."""
    block = problem.block
    half = problem.odd / 2
    matrix = block.matrix + half * block.down.detach().double() @ block.up.detach().double()
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    size = problem.bulk
    width = problem.width
    if len(values) > width and float(values[width]) > max(1e-9 * size, 2 * problem.tolerance):
        sentence = f"Without a bend the block is one matrix of rank above {width}, and {width} units carry no more."
        return None, 0.0, Obstruction(sentence, Certificate("rank", {"value": float(values[width])}))
    use = min(width, len(values))
    root = values[:use].sqrt()
    up, down = matrix.new_zeros(width, block.inputs), matrix.new_zeros(block.outputs, width)
    up[:use], down[:, :use] = right[:use] * root[:, None], left[:, :use] * root / half
    lost = float(values[use:].norm()) if len(values) > use else 0.0
    const = block.down_bias
    if block.up_bias is not None:
        shift = half * block.down.detach().double() @ block.up_bias.detach().double()
        const = (shift + (0 if const is None else const.double())).to(block.down.dtype)
    if const is not None and problem.drop_constant and bool(const.any()):
        return None, 0.0, None
    made = Block(
        up.to(block.up.dtype),
        down.to(block.down.dtype),
        down_bias=None if problem.drop_constant else const,
        activation=block.activation,
        skip=0.0,
        norm=block.norm,
    )
    return made, lost, None
