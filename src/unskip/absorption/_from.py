"""Converts the MLP sites of a model to Blocks, or gives the reason why a site cannot be converted."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unskip.absorption._activations import GATED
from unskip.absorption._block import Block
from unskip.absorption._norm import norm_of
from unskip.absorption._read import Unreadable, read_activation
from unskip.anatomy import (
    Example,
    MlpParts,
    ParallelParts,
    Parts,
    PartsTrace,
    Site,
    example_for,
    trace_model,
    trace_parts,
)
from unskip.errors import BadInput, UnskipError

CHUNK = 4  # samples that are traced at a time, or more if they have fewer than INPUTS inputs
INPUTS = 1024


@dataclass(frozen=True, eq=False)
class NoBlock:
    """The reason why a site cannot be converted to a Block."""

    reason: str


def block_of(source: object, example: object = None) -> Block:
    """Returns a Block as it is; converts MlpParts, or a module with exactly one MLP site. Raises BadInput."""
    if isinstance(source, Block | MlpParts) and example is not None:
        raise BadInput(f"absorb: example= is for a module; a {type(source).__name__} takes none")
    if isinstance(source, Block):
        return source
    if isinstance(source, nn.Module):
        traced = trace_sample(source, example_for(source, example))
        found = traced.parts
        mlps = list(found.mlps())
        if len(mlps) != 1:
            what = "; ".join(found.reasons.values())
            advice = "unskip.absorption.scan takes a whole model"
            if not mlps:
                advice = "an unskip.absorption.Block holds bare weights"
                advice = advice if what else f"it has to add the skip itself, x + mlp(x); {advice}"
            raise BadInput(
                f"absorb: {type(source).__name__} has {len(mlps)} MLP sites that can be read, not one"
                + (f" ({what})" if what else "")
                + f"; {advice}"
            )
        made = read_block(traced, mlps[0])
        if isinstance(made, NoBlock):
            raise BadInput(f"absorb: {mlps[0].site.path or type(source).__name__}: {made.reason}")
        return made
    if not isinstance(source, MlpParts):
        raise BadInput(f"absorb: expected a Block, MlpParts or a module with one MLP site, got {type(source).__name__}")
    made = from_parts(source)
    if isinstance(made, NoBlock):
        raise BadInput(f"absorb: {source.site.path or 'the site'}: {made.reason}")
    return made


def one_batch(who: str, example: object, data: object) -> object:
    """Returns the example or the data, whichever is given. Raises BadInput if both are."""
    if example is not None and data is not None:
        raise BadInput(f"{who}: give an example or data, not both; data is a batch, which serves as the example")
    return example if data is None else data


def mlp_sites(parts: Parts) -> list[tuple[Site, MlpParts | None, str]]:
    """Every site with an MLP, with its weights, or None and the reason why they cannot be read."""
    found: list[tuple[Site, MlpParts | None, str]] = []
    for index, (site, part) in enumerate(zip(parts.sites, parts, strict=True)):
        if isinstance(part, MlpParts):
            found.append((site, part, ""))
        elif isinstance(part, ParallelParts):
            found.append((site, None, "its MLP is added together with an attention"))
        elif part is None and site.kind in ("mlp", "parallel"):
            found.append((site, None, parts.reasons[index]))
    return found


def from_parts(part: MlpParts, alpha: Tensor | None = None) -> Block | NoBlock:
    """The block of a site: alpha x + beta * scale * MLP(x), with beta and the scale multiplied into W_down.

    `alpha` is needed only if it differs between channels.
    """
    if part.gated:
        return NoBlock("its branch is multiplied by something computed from the input")
    if not part.reads_stream:
        return NoBlock("its stream is scaled or changed on its way past the MLP, so the skip is not what the MLP reads")
    if part.extras or part.steps:
        return NoBlock(f"its branch does more than an MLP: {', '.join(part.extras or part.steps)}")
    if part.site.kind == "parallel":
        return NoBlock("its MLP is added together with an attention")
    if part.site.projected or part.site.doubled:
        return NoBlock("its stream is projected" if part.site.projected else "its branch already contains the stream")
    if part.curve is None:
        return NoBlock(
            "its activation is not the same function of every unit alone (as a PReLU with a slope for each channel is "
            "not); the theory is about one activation for all units"
        )
    try:
        word = read_activation(part.curve)
    except Unreadable as why:
        return NoBlock(f"its activation is {why}")
    down, bias = part.down.detach(), None if part.down_bias is None else part.down_bias.detach()
    norms = {norm.place: norm_of(norm) for norm in (part.norm, part.out_norm) if norm is not None}
    if part.scale is not None or part.beta != 1:
        if "out" in norms:
            return NoBlock("its branch is normed and then scaled")
        factor = part.beta * (down.new_ones(len(down)) if part.scale is None else part.scale.detach().flatten())
        down = down * factor.to(down)[:, None]
        bias = None if bias is None else bias * factor.to(bias)
    if part.gate is not None:
        word = next((gated for gated, plain in GATED.items() if plain == word), word)
    try:
        return Block(
            up=part.up.detach(),
            down=down,
            gate=None if part.gate is None else part.gate.detach(),
            up_bias=None if part.up_bias is None else part.up_bias.detach(),
            gate_bias=None if part.gate_bias is None else part.gate_bias.detach(),
            down_bias=bias,
            activation=word,
            skip=part.alpha if alpha is None else torch.diag(alpha.detach().flatten().double()),
            norm=tuple(norms.values()) or None,
        )
    except BadInput as error:
        return NoBlock(str(error))


def read_block(traced: PartsTrace, part: MlpParts) -> Block | NoBlock:
    """The block of a site of a traced model, with an alpha for each channel if they differ."""
    trace, index = traced.trace, part.site.index
    run = trace.last_runs[index]
    if not all(bool(trace.graph.values[node].isfinite().all()) for node in (run.stream, run.root)):
        return NoBlock("its input on the example is NaN or infinite")
    alpha = trace.weights[index][0]
    return from_parts(part, alpha if isinstance(alpha, Tensor) and alpha.numel() > 1 else None)


def trace_sample(model: nn.Module, given: Example) -> PartsTrace:
    """Traces the model on two samples of the example, so that a branch that mixes samples is detected."""
    for name, module in model.named_modules():
        if isinstance(module, nn.RReLU):
            raise BadInput(f"{name}: RReLU draws its slope at random in training; put LeakyReLU in its place")
    try:
        return trace_parts(model, given.rows(0, 2))
    except UnskipError:  # an argument without a row for each sample, such as a mask
        return trace_parts(model, given)


def count_samples(given: Example) -> int:
    """The number of samples in a batch."""
    return max((len(value) for value in given.values if isinstance(value, Tensor) and value.ndim), default=1)


def streams(model: nn.Module, given: Example, enough: int, only: int | None = None) -> dict[int, Tensor]:
    """The inputs (n, d) of every site, or of site `only`, on a batch, by site index.

    A few samples are traced at a time, until every site has `enough` inputs or the batch ends. A rewired model is
    traced as it is wired now.
    """
    samples, done, chunk = count_samples(given), 0, CHUNK
    found: dict[int, list[Tensor]] = {}
    while done < samples:
        try:
            part = given.rows(done, min(done + chunk, samples))
            done += chunk
        except UnskipError:
            part, done = given, samples
        trace = trace_model(model, part, weighted=True)
        for site, run in zip(trace.sites, trace.last_runs, strict=True):
            if site.axis == -1 and only in (None, site.index):
                value = trace.graph.values[run.stream].detach()
                found.setdefault(site.index, []).append(value.reshape(-1, value.shape[-1]))
        read = min((sum(map(len, parts)) for parts in found.values()), default=0)
        if read >= enough:
            break
        chunk = max(CHUNK, INPUTS * done // max(read, 1))
    return {index: torch.cat(parts) for index, parts in found.items()}
