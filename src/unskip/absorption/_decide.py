"""Can a block do without its skip? `absorb` answers with a verdict, or says why it cannot.

    F(x) = A x + MLP(x)        are there weights with        MLP'(x) = F(x)  for all x ?

"Can an MLP Absorb Its Own Skip Connection?" (arXiv 2604.23705). Only exact equality is ruled out by `impossible`, on
the inputs that the verdict names, for replacements of the width and with the biases that were asked for.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import torch
from torch import Tensor, nn

from unskip._words import nearest
from unskip.absorption import _closed
from unskip.absorption._block import Block
from unskip.absorption._construct import output_errors, stored_error
from unskip.absorption._flips import cap, decide, spectral_norm
from unskip.absorption._from import block_of
from unskip.absorption._reduce import Problem, reduce
from unskip.absorption._search import search
from unskip.absorption._verdict import Biases, Certificate, Obstruction, Verdict
from unskip.absorption._verify import holding
from unskip.anatomy import MlpParts
from unskip.errors import BadInput

CHECKED = 200_000  # weights of a block whose certificates are checked before they are handed out


def absorb(
    block: Block | MlpParts | nn.Module, width: int | None = None, biases: Biases = "as-is", example: object = None
) -> Verdict:
    """Decides whether a block can swallow its skip at this width (default: its own).

    `block` is a Block, the MlpParts of a site, or a module with exactly one MLP site. `biases`: the replacement has
    those that the block has ("as-is"), may have all ("allowed"), or has none.
    """
    if biases not in get_args(Biases):
        raise BadInput(
            f"absorb: biases={biases!r}{nearest(str(biases), get_args(Biases))}; it can be {get_args(Biases)}"
        )
    if width is not None and (not isinstance(width, int) or isinstance(width, bool) or width < 1):
        raise BadInput(f"absorb: width must be a whole number above 0, got {width!r}")
    found = block if isinstance(block, Block) else block_of(block, example)
    with torch.no_grad():
        return _absorb(found, found.width if width is None else width, biases)


def _absorb(block: Block, width: int, biases: Biases) -> Verdict:
    hidden, output = allowed(block, biases)
    problem = reduce(block, width, hidden, output)
    plain = Verdict("undecided", "", block, width, biases, _domain(problem), notes=_notes(block))
    if not bool(block.matrix.any()) and width >= block.width and _may_keep(block, biases):
        grown = pad(replace(block, skip=0.0), width)
        return replace(
            plain,
            status="possible",
            reason="There is no skip: the block is its own replacement.",
            certificate=Certificate("no-skip", {}),
            error=0.0,
            exact=True,
            flips=torch.zeros(0, dtype=torch.long),
            extra_width=0,
            domain="all inputs",
            weights=grown,
        )
    norms = block.norms
    if not problem.up.shape[1]:
        return replace(plain, reason="Not decided: the norm before the block leaves nothing of its input.")
    if {"pre", "out"} & norms.keys():
        return _behind_a_norm(problem, plain)
    if block.gated:
        return _gated(problem, plain)
    family = block.phi.family
    if family in ("odd-linear", "linear") and block.extreme:
        why = "its weights are so large or so small that float64 cannot hold their squares; rescale rows and columns"
        return replace(plain, reason=f"Not decided: {why}.", extra_width=_extra(problem, plain.biases))
    if family == "odd-linear":
        return _class_o(problem, plain)
    if family == "linear":
        return _linear(problem, plain)
    found = [o for o in (_closed.growth(problem), _closed.family(problem), *_closed.flat(problem)) if o is not None]
    if found:
        return _impossible(problem, plain, found)
    return _undecided(problem, plain, _why(problem))


def allowed(block: Block, biases: Biases) -> tuple[bool, bool]:
    """Whether the replacement may have hidden biases, and output biases."""
    if biases == "as-is":
        return block.up_bias is not None or block.gate_bias is not None, block.down_bias is not None
    return (True, True) if biases == "allowed" else (False, False)


def gate_bias(block: Block, biases: Biases) -> bool:
    """Whether the replacement may have a bias in its gate."""
    return biases == "allowed" or (biases == "as-is" and block.gate_bias is not None)


def _may_keep(block: Block, biases: Biases) -> bool:
    held = [b for b in (block.up_bias, block.gate_bias, block.down_bias) if b is not None]
    return biases != "none" or not any(bool(b.any()) for b in held)


def pad(block: Block, width: int) -> Block:
    """The same block with units that add nothing."""
    more = width - block.width
    if more <= 0:
        return block

    def rows(value: Tensor | None) -> Tensor | None:
        return None if value is None else torch.cat([value.detach(), value.new_zeros(more, *value.shape[1:])])

    up = rows(block.up)
    assert up is not None
    return replace(
        block,
        up=up,
        gate=rows(block.gate),
        up_bias=rows(block.up_bias),
        gate_bias=rows(block.gate_bias),
        down=torch.cat([block.down.detach(), block.down.new_zeros(block.outputs, more)], 1),
    )


def _domain(problem: Problem) -> str:
    norms = problem.block.norms
    if "input" in norms:
        return f"what the {norms['input'].kind} before the block gives (an open ball)"
    if problem.block.phi.analytic or {"pre", "out"} & norms.keys():
        return "all inputs, and every open set of them"
    return "all inputs"


def _notes(block: Block) -> tuple[str, ...]:
    return (block.phi.note,) if block.phi.note else ()


def _impossible(problem: Problem, plain: Verdict, found: list[Obstruction]) -> Verdict:
    extra = _closed.bottleneck(problem)
    every = [*found, *([extra] if extra is not None else [])]
    if problem.up.numel() + problem.down.numel() <= CHECKED:
        # A certificate that its check does not take, for a margin that is too thin, is none.
        stand = holding(plain, [each.certificate for each in every])
        every = [each for each, holds in zip(every, stand, strict=True) if holds]
    if not every:
        why = "what speaks against it does not stand its own check with the margin that is asked for"
        return replace(plain, reason=f"Not decided: {why}.", extra_width=_extra(problem, plain.biases))
    return replace(
        plain,
        status="impossible",
        reason=every[0].sentence,
        certificate=every[0].certificate,
        obstructions=tuple(every),
        extra_width=_extra(problem, plain.biases),
    )


def _undecided(problem: Problem, plain: Verdict, why: str) -> Verdict:
    narrow = _closed.bottleneck(problem)
    if narrow is not None:
        return _impossible(problem, plain, [])
    return replace(plain, reason=f"Not decided: {why}.", extra_width=_extra(problem, plain.biases))


def _class_o(problem: Problem, plain: Verdict) -> Verdict:
    found = decide(problem)
    if found.built is not None:
        flips = found.built.flips
        if found.exact:
            how = "the weights fulfil the flip criterion exactly"
        else:
            how = "the skip is made up within the rounding of the stored weights"
        done = f"{len(flips)} of {problem.block.width} rows change sign" if flips is not None else "units are rebuilt"
        kind = "flips" if flips is not None else "construction"
        return replace(
            plain,
            status="possible",
            reason=f"The block can swallow its skip: {how}, and {done}.",
            certificate=Certificate(kind, {} if flips is None else {"flips": flips}),
            error=found.error,
            exact=found.exact,
            flips=flips,
            extra_width=0,
            measured=found.measured,
            weights=found.built.block,
            domain="all inputs" if problem.radius is None else plain.domain,
        )
    plain = replace(plain, flip_bound=found.bound)
    if found.obstructions:
        return _impossible(problem, plain, found.obstructions)
    return _undecided(problem, plain, found.why or "neither a replacement nor a proof was found")


def _linear(problem: Problem, plain: Verdict) -> Verdict:
    if problem.block.norms:
        return _undecided(problem, plain, "a block without a bend was asked about together with a norm")
    made, lost, stands = _closed.linear(problem)
    if stands is not None:
        return _impossible(problem, plain, [stands])
    if made is None:
        return _undecided(problem, plain, "its constant needs an output bias, which the replacement may not have")
    size, measured = problem.size, output_errors(problem.block, made)
    within = lost <= min(problem.tolerance, cap(problem.block.roundoff) * size) and problem.tolerance < size / 20
    whole = size + float(problem.down.norm() * problem.up.norm())
    if (lost > 1e-9 * whole and not within) or measured["float64"] > measured["explained"]:
        return _undecided(problem, plain, "the width does not carry its rank exactly, but rounding may explain that")
    stored = stored_error(problem, made)
    return replace(
        plain,
        status="possible",
        reason="Without a bend the block is one matrix, and the width carries its rank.",
        certificate=Certificate("construction", {}),
        error=spectral_norm(stored) / spectral_norm(problem.skip) if size and stored is not None else 0.0,
        extra_width=0,
        measured=measured,
        weights=made,
        domain="all inputs",
    )


def _behind_a_norm(problem: Problem, plain: Verdict) -> Verdict:
    found = _closed.growth(problem)
    if found is not None:
        return _impossible(problem, plain, [found])
    why = problem.caveat or "the norm on the branch is neither a LayerNorm nor an RMSNorm, or the skip moves nothing"
    return _undecided(problem, plain, why)


def _gated(problem: Problem, plain: Verdict) -> Verdict:
    found = _closed.flat(problem)
    if found:
        return _impossible(problem, plain, found)
    return _undecided(problem, plain, _why(problem))


def _why(problem: Problem) -> str:
    block, phi = problem.block, problem.block.phi
    if not phi.trusted:
        return f"nothing is proved about the activation {phi.name!r}"
    if problem.caveat is not None:
        return problem.caveat
    if problem.radius is not None:
        return f"on a bounded domain {block.activation} is not settled"
    if problem.hidden_bias and (block.gated or phi.family == "power"):
        return (
            "with hidden biases the degree and linearisation arguments fail, and there are blocks that do absorb "
            "their skip that way; nothing general is known"
        )
    if block.gated and phi.at_zero != 0:
        return f"the gate {phi.name} is not 0 at 0, so the linearisation argument does not apply"
    return "no obstruction applies and no construction is known"


def _extra(problem: Problem, biases: Biases) -> int | None:
    """Units more that are enough; None where none is known or none ever are.

    For large blocks the rows are taken to be in general position: their rank would cost more than the verdict.
    """
    block, phi = problem.block, problem.block.phi
    if {"pre", "out"} & block.norms.keys() or not phi.trusted:
        return None
    short = max(block.width - problem.width, 0)
    if block.gated:  # a zero row of the gate that is open
        return skip_rank(block.matrix) + short if phi.at_zero or gate_bias(block, biases) else None
    if phi.family == "power":
        return (4 if phi.name == "relu2" else 2) * skip_rank(block.matrix) + short if problem.hidden_bias else None
    if phi.family == "linear":
        return max(0, min(block.inputs, block.outputs) - problem.width)
    bent = block.up_bias is not None and bool(block.up_bias.any())
    if phi.family != "odd-linear" or (not problem.hidden_bias and (bent or not problem.output_bias)):
        return None
    rank, n = skip_rank(problem.skip), problem.up.shape[1]
    if problem.one_each:
        return rank + short
    if not problem.output_bias:  # fresh pairs make up the constant as well
        return 2 * min(rank + 1, block.outputs) + short
    small = problem.up.numel() <= CHECKED
    rows = int(torch.linalg.matrix_rank(problem.up, rtol=1e-10)) if small else min(block.width, n)
    return min(2 * rank, 2 * n - rows) + short


def skip_rank(skip: Tensor) -> int:
    """The rank of a skip; a multiple of the identity needs no decomposition."""
    o, n = skip.shape
    if o == n and bool((skip == torch.diag(skip.diagonal())).all()):
        return int((skip.diagonal() != 0).sum())
    return int(torch.linalg.matrix_rank(skip))


def absorbable_alpha(block: Block) -> float | None:
    """The one alpha other than 0 for which alpha x could be swallowed by flips, or None.

    With independent rank-ones, sum_i t_i v_i u_i^T = -(alpha / c) A has one solution, alpha t(1); it is binary for one
    alpha at most. A matrix as `block.skip` gives the direction A; any number but 0 stands for the identity.
    """
    with torch.no_grad():
        hidden, output = allowed(block, "allowed")
        problem = reduce(block, block.width, hidden, output)
        if block.gated or block.phi.family != "odd-linear" or {"pre", "out"} & block.norms.keys():
            return None
        goal = -problem.skip / problem.odd
        found = search(problem.down, problem.up, goal, float("inf"), lambda flips: False)
        if found.solution is None or found.independent is False:
            return None
        top = float(found.solution[found.solution.abs().argmax()])
        if top == 0:
            return None
        alpha = 1 / top
        flips = found.solution * alpha > 0.5
        left = (problem.down[:, flips] @ problem.up[flips] + alpha * problem.skip / problem.odd).norm()
        number = block.skip if isinstance(block.skip, float) else 1.0
        close = max(1e-9, 0.08 * math.sqrt(block.roundoff))  # 2e-5 in float32, 5e-3 in bfloat16
        return alpha * number if float(left) <= close * abs(alpha) * float(goal.norm()) else None
