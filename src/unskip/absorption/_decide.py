"""Decides whether a block can absorb its skip.

    F(x) = A x + MLP(x)        are there weights with        MLP'(x) = F(x)  for all x of the domain ?

Paper: "Can an MLP Absorb Its Own Skip Connection?" (arXiv 2604.23705). The verdict `impossible` rules out exact
equality only, on the inputs that it names, for replacements of the given width and biases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

import torch
from torch import Tensor, nn

from unskip import _checks
from unskip.absorption import _closed
from unskip.absorption._block import Block
from unskip.absorption._construct import extra_width
from unskip.absorption._domain import Domain, as_domain
from unskip.absorption._flips import decide_by_flips
from unskip.absorption._from import block_of
from unskip.absorption._measure import compare_outputs, gap_is_negligible, linear_gap
from unskip.absorption._nearest import absorb_within, unsupported_reason
from unskip.absorption._problem import Biases, Problem, problem_of
from unskip.absorption._verdict import Certificate, Obstruction, Verdict
from unskip.absorption._verify import valid_certificates, verify
from unskip.anatomy import MlpParts
from unskip.errors import BadInput

ROUNDED = "all inputs, up to rounding that grows with the input"
MAX_WIDTH = 2**14  # the largest `width`, unless the block needs that many units
MAX_CHECKED = 200_000  # the largest number of weights for which certificates are checked before they are returned


def absorb(
    block: Block | MlpParts | nn.Module,
    width: int | None = None,
    biases: Biases = "as-is",
    example: object = None,
    domain: object = None,
    tolerance: float | None = None,
) -> Verdict:
    """Decides whether a block can absorb its skip at this width (default: its own).

    `block` is a Block, the MlpParts of a site, or a module with exactly one MLP site. `biases`: the replacement has
    the same biases as the block ("as-is"), may have all ("allowed"), or has none ("none"). `domain`: all inputs (None),
    a radius, a pair (low, high), data (n, d), or a Domain. `tolerance`: how much the weights may be changed (relative)
    to make the skip absorbable.
    """
    _checks.choice("absorb", "biases", biases, get_args(Biases))
    if width is not None:
        width = _checks.whole("absorb", "width", width, low=1)
    if tolerance is not None:  # a relative change of the weights
        tolerance = _checks.number("absorb", "tolerance", tolerance, zero=False, below=1)
    found = block_of(block, example)
    needed = found.width + 2 * (found.inputs + 1)
    if width is not None and width > max(MAX_WIDTH, 2 * needed):
        raise BadInput(f"absorb: width={width:,} is too large; a replacement needs at most {needed:,} units")
    place = as_domain(domain, found.inputs)
    with torch.no_grad():
        verdict = _checked(_absorb(found, found.width if width is None else width, biases, place))
        if tolerance is None or verdict.status == "possible":
            return verdict
        why = unsupported_reason(found, verdict.width)
        near = absorb_within(verdict, tolerance, _again) if why is None else None
        near = None if near is None else _checked(near)
        if near is not None and near.status == "possible":
            return near
        missed = f"no weights that can be absorbed were found within the tolerance of {tolerance:g}"
        missed = missed if why is None else f"tolerance= {why}"
        return replace(verdict, notes=(*verdict.notes, missed))


def _again(block: Block, like: Verdict) -> Verdict:
    """Decides the same question for other weights."""
    return _checked(_absorb(block, like.width, like.biases, like.inputs))


def _checked(verdict: Verdict) -> Verdict:
    """Returns the verdict, or an undecided one if it is `possible` and fails verification."""
    if verdict.status != "possible" or verify(verdict):
        return verdict
    why = "Not decided: a replacement was found, but its outputs do not agree closely enough with the block's."
    return _plain(verdict.block, verdict.width, verdict.biases, verdict.inputs, why)


def _absorb(block: Block, width: int, biases: Biases, domain: Domain | None) -> Verdict:
    problem, plain = problem_of(block, width, biases, domain), _plain(block, width, biases, domain)
    if not bool(block.matrix.any()) and width >= block.width and _may_keep(block, biases):
        return replace(
            plain,
            status="possible",
            reason="There is no skip: the block is its own replacement.",
            certificate=Certificate("no-skip", {}),
            error=0.0,
            flips=torch.zeros(0, dtype=torch.long),
            extra_width=0,
            domain="all inputs",
            weights=pad(replace(block, skip=0.0), width),
        )
    if {"pre", "out"} & block.norms.keys():
        return _behind_a_norm(problem, plain)
    if block.gated:
        return _impossible(problem, plain, [_closed.linearisation(problem)], _why(problem))
    family = block.phi.family
    if family in ("odd-linear", "linear") and block.extreme:
        why = "its weights are so large or so small that float64 cannot hold their squares; rescale rows and columns"
        return _undecided(problem, plain, why)
    if family == "odd-linear":
        return _class_o(problem, plain)
    if family == "linear":
        return _linear(problem, plain)
    found = [_closed.growth(problem), _closed.family(problem), _closed.linearisation(problem)]
    return _impossible(problem, plain, found, _why(problem))


def _may_keep(block: Block, biases: Biases) -> bool:
    held = [b for b in (block.up_bias, block.gate_bias, block.down_bias) if b is not None]
    return biases != "none" or not any(bool(b.any()) for b in held)


def pad(block: Block, width: int) -> Block:
    """The same block, widened with zero units."""
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


def _plain(block: Block, width: int, biases: Biases, domain: Domain | None, why: str = "") -> Verdict:
    """An undecided verdict with the reason `why`."""
    text = "all inputs" if domain is None else domain.text
    if domain is None and (block.phi.analytic or {"pre", "out"} & block.norms.keys()):
        text += ", and every open set of them"
    notes = (block.phi.note,) if block.phi.note else ()
    return Verdict("undecided", why, block, width, biases, text, inputs=domain, notes=notes)


def _impossible(problem: Problem, plain: Verdict, found: Sequence[Obstruction | None], why: str) -> Verdict:
    every = [each for each in found if each is not None]
    if every and problem.up.numel() + problem.down.numel() <= MAX_CHECKED:
        # Certificates that fail verification, because their margin is too thin, are dropped.
        stand = valid_certificates(plain, [each.certificate for each in every])
        why = why if any(stand) else "a certificate was found and failed verification: its margin is too thin"
        every = [each for each, holds in zip(every, stand, strict=True) if holds]
    if not every:
        return _undecided(problem, plain, why)
    return replace(
        plain,
        status="impossible",
        reason=every[0].sentence,
        certificate=every[0].certificate,
        obstructions=tuple(every),
        extra_width=extra_width(problem, plain.biases),
    )


def _undecided(problem: Problem, plain: Verdict, why: str) -> Verdict:
    return replace(plain, reason=f"Not decided: {why}.", extra_width=extra_width(problem, plain.biases))


def _class_o(problem: Problem, plain: Verdict) -> Verdict:
    found = decide_by_flips(problem)
    if found.built is None:
        plain = replace(plain, skip_norm=problem.skip_norm)
        return _impossible(problem, plain, found.obstructions, found.reason)
    flips = found.built.flips
    how = "spare units reproduce the skip"
    if flips is not None:
        how = f"{len(flips)} of {problem.block.width} rows change sign, which reproduces the skip up to rounding"
    return replace(
        plain,
        status="possible",
        reason=f"The block can absorb its skip: {how}.",
        certificate=Certificate("construction", {}) if flips is None else Certificate("flips", {"flips": flips}),
        error=found.error,
        flips=flips,
        extra_width=0,
        measured=found.measured,
        weights=found.built.block,
        domain=plain.domain if problem.domain is not None else ROUNDED,
    )


def _linear(problem: Problem, plain: Verdict) -> Verdict:
    block = problem.block
    if block.norms:
        return _undecided(problem, plain, "blocks with a linear activation and a norm are not handled")
    made, lost, stands = _closed.linear(problem)
    if stands is not None:
        return _impossible(problem, plain, [stands], "")
    if made is None:
        return _undecided(problem, plain, "its constant needs an output bias, which the replacement may not have")
    gap, skip = linear_gap(block, made)
    most = max(problem.rounding_tolerance(block.roundoff) / 2, 1e-12 * problem.rounding_scale)
    seen = compare_outputs(block, made, problem.domain, linear=gap)
    if lost > most or not gap_is_negligible(block, gap, skip) or not seen.holds:
        return _undecided(problem, plain, "the best replacement is not exact, but rounding may explain the difference")
    return replace(
        plain,
        status="possible",
        reason="With a linear activation the block is one matrix, and its rank is at most the width.",
        certificate=Certificate("construction", {}),
        error=float(gap.norm()) / problem.skip_norm if problem.skip_norm else 0.0,
        extra_width=0,
        measured=seen.measured,
        weights=made,
        domain=ROUNDED,
    )


def _behind_a_norm(problem: Problem, plain: Verdict) -> Verdict:
    found = _closed.growth(problem)
    why = problem.caveat or "the norm on the branch is neither a LayerNorm nor an RMSNorm, or the skip moves nothing"
    return _impossible(problem, plain, [found], why)


def _why(problem: Problem) -> str:
    block, phi = problem.block, problem.block.phi
    if not phi.trusted:
        return f"nothing is proved about the activation {phi.name!r}"
    if problem.caveat is not None:
        return problem.caveat
    if problem.domain is not None:
        return f"no result is known for {block.activation} on a bounded domain"
    if problem.hidden_bias and (block.gated or phi.family == "power"):
        return (
            "with hidden biases the linearisation argument fails, and some blocks do absorb their skip with them; "
            "which ones is not known in general"
        )
    if block.gated and phi.at_zero != 0:
        return f"the gate {phi.name} is not 0 at 0, so the linearisation argument does not apply"
    return "no obstruction applies and no construction is known"
