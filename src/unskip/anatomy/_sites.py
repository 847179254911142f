"""Residual sites: every `stream + branch` of a model, in execution order, with its properties.

The model is traced on the example in eval and in training mode, so additions that run only in training are found too.
`_find` detects residuals, `_describe` classifies them, `_locate` finds them in the source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from unskip._words import some
from unskip.anatomy._describe import Kind, NormPlace, is_cross, kind_of, norm_of
from unskip.anatomy._example import Example
from unskip.anatomy._find import Doubt, Finding, find
from unskip.anatomy._graph import Graph, Node
from unskip.anatomy._guard import refuse_wrapped
from unskip.anatomy._lines import Turn, locations, partial_runs, source_key, source_line, turns_of
from unskip.anatomy._locate import Located, Place
from unskip.anatomy._trace import record
from unskip.anatomy._units import holds, units
from unskip.anatomy._walk import channel_axis, consumers, own_factor, sum_factors
from unskip.anatomy._written import mark_norms
from unskip.errors import ForwardError


@dataclass(frozen=True)
class Site:
    """One residual addition, `stream + branch`. `index` counts all sites of the model in execution order."""

    index: int
    path: str  # of the module whose forward adds; "" is the model itself
    kind: Kind
    norm: NormPlace
    projected: bool  # the stream passes a linear map, pooling or slicing
    long: bool  # spans other residuals, as in a U-Net
    doubled: bool  # the branch already contains the stream: x + (x + f(x))
    runs: int  # executions per forward: more than one if layers are shared
    branch: tuple[str, ...]  # paths of the branch's modules, in execution order
    block: str  # path of the block that contains the site
    expression: str
    source: str  # file and line
    axis: int  # of the features: -1, or 1 in a convolutional feature map
    features: int
    rank: int  # number of dimensions of the stream, including the batch
    ratio: float | None  # rms(branch) / rms(stream) on the example; None for meta tensors
    problem: str | None = None  # why it cannot be rewired
    copies: bool = False  # the branch is a gated or shifted copy of the stream (token smearing), so of no block
    cross: bool = False  # cross-attention: the values come from another sequence
    stream_factor: float = 1.0  # the model's own factor on the stream or the sum; alpha multiplies it
    branch_factor: float = 1.0  # the model's own factor on the branch or the sum: LayerScale, ReZero (channel mean)
    places: tuple[Place, ...] = field(default=(), repr=False)

    @property
    def regular(self) -> bool:
        """Whether it is an ordinary residual of a block: neither a long skip nor a copy of the stream."""
        return not self.long and not self.copies

    @property
    def name(self) -> str:
        """The path and kind, for messages."""
        return f"{self.path or '(model)'} [{self.kind}]"

    def to_dict(self) -> dict[str, Any]:
        """JSON-serialisable fields, without the source places."""
        return {key: value for key, value in vars(self).items() if key != "places"}


def named(sites: Sequence[Site]) -> str:
    """The first few sites by name, for messages."""
    return some([site.name for site in sites])


@dataclass(frozen=True)
class Unknown:
    """An addition that may be a residual but could not be classified."""

    path: str
    source: str
    reason: str


@dataclass(frozen=True)
class Survey:
    """All sites of a model, with unknown additions and notes."""

    sites: tuple[Site, ...]
    unknown: tuple[Unknown, ...]
    notes: tuple[str, ...]


@dataclass(eq=False)
class _Draft:
    """A site under construction: collects its executions."""

    graph: Graph
    module: nn.Module | None
    key: object  # identifies the addition within the module
    located: Located | None
    turn: Turn | None
    problem: str | None
    findings: list[Finding] = field(default_factory=list)
    more: list[tuple[Finding, Located | None, Turn | None]] = field(default_factory=list)
    training_places: list[Place] = field(default_factory=list)


def survey(model: nn.Module, example: Example) -> Survey:
    """Finds the residual sites of a plain model by tracing it in eval and in training mode."""
    refuse_wrapped(model)
    names = _names(model)
    graph = _run(model, example, training=False)
    drafts, unknown = _gather(graph, names)
    notes = []
    try:
        training = _run(model, example, training=True)
    except ForwardError as error:
        notes.append(
            f"the training forward was not traced ({error.__cause__}); additions that run only in training are not "
            "listed"
        )
    else:
        in_training, doubts = _gather(training, names)
        unknown = [*unknown, *_pair(drafts, in_training, names), *(d for d in doubts if d not in unknown)]
        training.forget_calls()
    if not drafts and not unknown:
        notes.append(
            "no tensor is added to a function of itself: the model has no residual, or combines its streams in another "
            "way (concatenation, attention over depth)"
        )
    sites = _sites(model, graph, drafts, names)
    graph.forget_calls()
    return Survey(sites, tuple(unknown), tuple(notes))


def sites_in(graph: Graph, model: nn.Module) -> tuple[tuple[Site, ...], list[list[tuple[Finding, ...]]]]:
    """The sites of a recorded forward, and for each site its runs as tuples of branches in order."""
    names = _names(model)
    drafts, _ = _gather(graph, names)
    runs = [[tuple(_branches(draft, first)) for first in draft.findings] for draft in drafts]
    return _sites(model, graph, drafts, names), runs


def _names(model: nn.Module) -> dict[int, str]:
    return {id(module): name for name, module in model.named_modules()}


def _run(model: nn.Module, example: Example, training: bool) -> Graph:
    try:
        return mark_norms(record(model, example, training))
    except Exception as error:
        mode = "training" if training else "evaluation"
        raise ForwardError(
            f"{type(model).__name__}: its forward failed on the example in {mode} mode: {type(error).__name__}: "
            f"{error}. Pass example= a tensor, a tuple of arguments or a mapping of keyword arguments that the model "
            "takes."
        ) from error


def _gather(graph: Graph, names: dict[int, str]) -> tuple[list[_Draft], list[Unknown]]:
    """Groups the findings of one forward into sites."""
    findings, doubts = find(graph)
    where = locations(graph, findings)
    turns = turns_of(graph, findings, where)
    drafts: dict[Any, _Draft] = {}
    draft_of: dict[int, _Draft] = {}
    for finding in findings:
        located, problem = where[finding.add.index]
        turn = turns.get(finding.add.index)
        if finding.first is not None:
            draft = draft_of[finding.first.add.index]
            draft.more.append((finding, located, turn))
            draft.problem = draft.problem or problem
            if located and draft.located and located.module is not draft.located.module:
                draft.problem = "its branches are added in different modules"
            continue
        key = (located.hops, turn and turn.number) if located else source_key(finding.add)
        module = located.module if located else next(iter(finding.add.owners), None)
        draft = drafts.setdefault((id(module), key), _Draft(graph, module, key, located, turn, problem))
        draft.findings.append(finding)
        draft_of[finding.add.index] = draft
    for draft, problem in zip(drafts.values(), partial_runs(graph, [d.findings for d in drafts.values()]), strict=True):
        draft.problem = draft.problem or problem
    rejected = [draft for draft in drafts.values() if draft.problem and draft.findings[0].projected]
    doubts += [Doubt(draft.findings[0].add, draft.problem or "") for draft in rejected]
    unknown = [Unknown(_name(d.node, names), source_line(d.node), d.reason) for d in doubts]
    return [draft for draft in drafts.values() if draft not in rejected], list(dict.fromkeys(unknown))


def _pair(in_eval: list[_Draft], in_training: list[_Draft], names: dict[int, str]) -> list[Unknown]:
    """Matches the additions of training with those of evaluation, module by module; returns those without a match."""
    unmatched = []
    for module in {id(d.module): d.module for d in in_training}.values():
        evals = [d for d in in_eval if d.module is module]
        trains = [d for d in in_training if d.module is module]
        new = [d for d in trains if d.key not in {e.key for e in evals}]
        if not new:
            continue
        if len(evals) == len(trains):
            for draft, match in zip(evals, trains, strict=True):
                if match in new:
                    draft.problem = draft.problem or match.problem
                    draft.training_places.extend(_places(match))
        else:
            reason = "runs only in training, and has no counterpart in evaluation"
            unmatched += [Unknown(names.get(id(module), "?"), source_line(d.findings[0].add), reason) for d in new]
    return unmatched


def _places(draft: _Draft) -> list[Place]:
    adds = [(draft.findings[0], draft.located, draft.turn), *draft.more]
    places = []
    for finding, at, turn in adds:
        if at is not None:
            number, variable, key = turn or (None, None, None)
            places.append(Place(at.hops, finding.side, finding.role, number, finding.overwritten, variable, key))
    return list(dict.fromkeys(places))


def _sites(model: nn.Module, graph: Graph, drafts: list[_Draft], names: dict[int, str]) -> tuple[Site, ...]:
    readers = consumers(graph)
    roots = sorted({finding.root for draft in drafts for finding in draft.findings})
    sums = [_branches(draft, draft.findings[0])[-1].add.index for draft in drafts]
    factors = sum_factors(graph.nodes, readers, roots, sums)
    sites = [_site(index, d, names, readers, roots, factors[sums[index]]) for index, d in enumerate(drafts)]
    blocks = units(model, [(site.path, site.branch, site.kind) for site in sites])
    return tuple(replace(site, block=block) for site, block in zip(sites, blocks, strict=True))


def _site(
    index: int, draft: _Draft, names: dict[int, str], readers: list[list[int]], roots: list[int], factor: float
) -> Site:
    first, graph = draft.findings[0], draft.graph
    path = names.get(id(draft.module), "")
    problem = draft.problem
    if problem is None and id(draft.module) not in names:
        problem = f"it is added in {type(draft.module).__name__}, which is not a submodule of the model"
    if problem is None and "forward" in vars(draft.module):
        problem = "its module overrides forward on the instance (self.forward = ...), which rewiring cannot change"
    branches = _branches(draft, first)
    steps = sorted({n.index: n for branch in branches for n in branch.path}.values(), key=lambda n: n.index)
    kinds = {kind_of(graph, branch.path) for branch in branches}
    kind: Kind = "other" if first.copies else "parallel" if {"attention", "mlp"} <= kinds else kind_of(graph, steps)
    assert draft.module is not None
    shape = first.add.shape
    axis = channel_axis(graph.nodes, first.path, graph.nodes[first.root].shape if first.projected else shape)
    ratio = first.add.ratio
    if ratio is not None and first.side == "right":
        ratio = 1 / ratio if ratio else float("inf")
    return Site(
        index=index,
        path=path,
        kind=kind,
        norm=norm_of(graph, readers, first, steps, None if draft.turn is not None else draft.module, roots),
        projected=first.projected,
        long=first.long,
        doubled=first.doubled,
        runs=len(draft.findings),
        branch=_branch(steps, path, names),
        block=path,
        expression=draft.located.expression if draft.located else "",
        source=Path(draft.located.source).name if draft.located else source_line(first.add),
        axis=axis,
        features=shape[axis],
        rank=len(shape),
        ratio=ratio,
        problem=problem,
        copies=first.copies,
        cross=kind == "attention" and is_cross(graph, first.root, steps),
        stream_factor=factor * own_factor(graph.nodes, first.stream, first.root),
        branch_factor=factor * own_factor(graph.nodes, first.branch),
        places=tuple(dict.fromkeys([*_places(draft), *draft.training_places])),
    )


def _branches(draft: _Draft, first: Finding) -> list[Finding]:
    """The branches of one run of a site, in order."""
    return [first, *(more for more, _, _ in draft.more if more.first is first)]


def _branch(steps: list[Node], path: str, names: dict[int, str]) -> tuple[str, ...]:
    """The outermost modules that ran the branch and do not contain the addition."""
    modules: dict[str, None] = {}
    for node in steps:
        owners = [names[id(owner)] for owner in node.owners if id(owner) in names]
        outside = [name for name in owners if not holds(name, path)]
        if outside:
            modules[outside[-1]] = None
    return tuple(modules)


def _name(node: Node, names: dict[int, str]) -> str:
    return next((names[id(owner)] for owner in node.owners if id(owner) in names), "?")
