"""Residual sites: every `stream + branch` of a model, in execution order, with what is known about each.

The model runs on the example twice, in evaluation and in training mode, under a recorder that leaves it as it was: an
addition that only training reaches is seen too. `_find` tells residuals from other additions, `_describe` says what
they are, `_locate` says where they stand in the source.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from unskip.anatomy._describe import Kind, NormPlace, is_cross, kind_of, norm_of
from unskip.anatomy._example import Example
from unskip.anatomy._find import Doubt, Finding, find
from unskip.anatomy._graph import Graph, Node
from unskip.anatomy._guard import refuse_wrapped
from unskip.anatomy._lines import Turn, locations, turns_of
from unskip.anatomy._locate import Located, Place
from unskip.anatomy._trace import record
from unskip.anatomy._units import units
from unskip.anatomy._walk import channel_axis, consumers, own_factor, sum_factors
from unskip.anatomy._written import mark_norms
from unskip.errors import ForwardError


@dataclass(frozen=True)
class Site:
    """One residual addition, `stream + branch`. `index` counts all sites of the model in execution order."""

    index: int
    path: str  # of the module that adds; "" is the model itself
    kind: Kind
    norm: NormPlace
    projected: bool  # a linear map, pooling or slicing lies on the stream
    long: bool  # reaches over other residuals, as in a U-Net
    doubled: bool  # the branch carries the stream already: x + (x + f(x))
    runs: int  # in one forward: more than one where layers are shared
    branch: tuple[str, ...]  # paths of the branch's modules, in execution order
    block: str  # path of the repeated unit the site is in
    expression: str
    source: str  # file and line
    axis: int  # of the features: -1, or 1 in a map made by a convolution
    features: int
    rank: int  # dimensions of the stream, the batch included
    ratio: float | None  # rms(branch) / rms(stream) on the example; None without values (meta tensors)
    problem: str | None = None  # why it cannot be rewired
    copies: bool = False  # the branch is a gated or shifted copy of the stream itself, as token smear is: no block's
    cross: bool = False  # an attention whose values come from another sequence
    stream_factor: float = 1.0  # that the model itself has on the stream or the sum, on the example: alpha comes on top
    branch_factor: float = 1.0  # that it has on the branch or the sum: LayerScale, ReZero (a mean over channels)
    places: tuple[Place, ...] = field(default=(), repr=False)

    @property
    def regular(self) -> bool:
        """Whether it is a block's own residual: no long skip, and no copy of the stream."""
        return not self.long and not self.copies

    @property
    def name(self) -> str:
        """The path and kind, for messages."""
        return f"{self.path or '(model)'} [{self.kind}]"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, without the places in the source."""
        return {key: value for key, value in vars(self).items() if key != "places"}


def named(sites: Sequence[Site]) -> str:
    """The first few sites by name, for messages."""
    names = [site.name for site in sites]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


@dataclass(frozen=True)
class Unknown:
    """An addition that may be a residual and could not be decided."""

    path: str
    source: str
    reason: str


@dataclass(frozen=True)
class Survey:
    """All that was found in a model."""

    sites: tuple[Site, ...]
    unknown: tuple[Unknown, ...]
    notes: tuple[str, ...]


@dataclass(eq=False)
class _Draft:
    """A site while its executions are gathered."""

    graph: Graph
    module: nn.Module | None
    located: Located | None
    turn: Turn | None
    problem: str | None
    findings: list[Finding] = field(default_factory=list)
    more: list[tuple[Finding, Located | None, Turn | None]] = field(default_factory=list)
    twins: list[Place] = field(default_factory=list)


def survey(model: nn.Module, example: Example) -> Survey:
    """The residual sites of a plain model, from its forward on the example in evaluation and in training mode."""
    refuse_wrapped(model)
    names = _names(model)
    graph = _run(model, example, training=False)
    drafts, unknown = _gather(graph, names)
    notes = []
    try:
        training = _run(model, example, training=True)
    except ForwardError as error:
        notes.append(
            f"the training forward was not traced ({error.__cause__}); additions that only training reaches are not "
            "seen"
        )
    else:
        others, doubts = _gather(training, names)
        unknown = [*unknown, *_pair(drafts, others, names), *(d for d in doubts if d not in unknown)]
        training.forget_calls()
    if not drafts and not unknown:
        notes.append(
            "no tensor is added to what was computed from it: the model has no residual, or combines its streams in "
            "another way (concatenation, attention over depth)"
        )
    sites = _sites(model, graph, drafts, names)
    graph.forget_calls()
    return Survey(sites, tuple(unknown), tuple(notes))


def sites_in(graph: Graph, model: nn.Module) -> tuple[tuple[Site, ...], list[list[tuple[Finding, ...]]]]:
    """The sites of a recorded forward and where each ran in it: by site, for each run, its branches in order."""
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
    """The findings of one forward, grouped into sites."""
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
                draft.problem = "its branches are added by different modules"
            continue
        key = (id(located.module), located.hops, turn and turn.number) if located else _execution(finding.add)
        module = located.module if located else next(iter(finding.add.owners), None)
        draft = drafts.setdefault(key, _Draft(graph, module, located, turn, problem))
        draft.findings.append(finding)
        draft_of[finding.add.index] = draft
    _check_runs(graph, drafts.values())
    drifting = [key for key, draft in drafts.items() if draft.problem and draft.findings[0].projected]
    doubts += [Doubt(drafts[key].findings[0].add, drafts.pop(key).problem or "") for key in drifting]
    unknown = [Unknown(_name(d.node, names), _line(d.node), d.reason) for d in doubts]
    return list(drafts.values()), list(dict.fromkeys(unknown))


def _execution(node: Node) -> tuple[object, ...]:
    """What tells one addition in the source from another, without reading the source."""
    return (node.calls[0].code, node.calls[0].instruction, *(id(owner) for owner in node.owners[:1]))


def _check_runs(graph: Graph, drafts: Collection[_Draft]) -> None:
    """An addition that is a residual in some of its runs and not in others cannot be weighed by one pair of numbers."""
    additions = (
        n for n in graph.nodes if n.calls and n.op == "add" and len({graph.nodes[p].shape for p in n.parents[:2]}) == 1
    )
    total = Counter(_execution(node) for node in additions)
    residual = Counter(_execution(finding.add) for draft in drafts for finding in draft.findings)
    for draft in drafts:
        mine = Counter(_execution(finding.add) for finding in draft.findings)
        for execution, count in mine.items():
            if residual[execution] < total[execution]:
                draft.problem = draft.problem or f"a residual in {count} of its {total[execution]} runs"


def _pair(drafts: list[_Draft], others: list[_Draft], names: dict[int, str]) -> list[Unknown]:
    """Matches the additions of training with those of evaluation, module by module; returns what has no match."""
    unmatched = []
    for module in {id(d.module): d.module for d in others}.values():
        ours = [d for d in drafts if d.module is module]
        theirs = [d for d in others if d.module is module]
        new = [d for d in theirs if _hops(d) not in {_hops(o) for o in ours}]
        if not new:
            continue
        if len(ours) == len(theirs):
            for our, their in zip(ours, theirs, strict=True):
                if their in new:
                    our.problem = our.problem or their.problem
                    our.twins.extend(_places(their))
        else:
            reason = "runs only in training, and has no counterpart in evaluation"
            unmatched += [Unknown(names.get(id(module), "?"), _line(d.findings[0].add), reason) for d in new]
    return unmatched


def _hops(draft: _Draft) -> object:
    return (
        (draft.located.hops, draft.turn and draft.turn.number) if draft.located else _execution(draft.findings[0].add)
    )


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
    after = sum_factors(graph.nodes, readers, roots, sums)
    found = [_site(index, draft, names, readers, roots, after) for index, draft in enumerate(drafts)]
    blocks = units(model, [(site.path, site.branch, site.kind) for site in found])
    return tuple(replace(site, block=block) for site, block in zip(found, blocks, strict=True))


def _site(
    index: int,
    draft: _Draft,
    names: dict[int, str],
    readers: list[list[int]],
    roots: list[int],
    after: dict[int, float],
) -> Site:
    first, graph = draft.findings[0], draft.graph
    path = names.get(id(draft.module), "")
    problem = draft.problem
    if problem is None and id(draft.module) not in names:
        problem = f"{type(draft.module).__name__} adds it, which is not a submodule of the model"
    if problem is None and "forward" in vars(draft.module):
        problem = "its module holds a forward of its own (self.forward = ...), which a new class does not change"
    branches = _branches(draft, first)
    steps = sorted({n.index: n for each in branches for n in each.path}.values(), key=lambda n: n.index)
    kinds = {kind_of(graph, each.path) for each in branches}
    kind: Kind = "other" if first.copies else "parallel" if {"attention", "mlp"} <= kinds else kind_of(graph, steps)
    assert draft.module is not None
    shape = first.add.shape
    axis = channel_axis(graph.nodes, first.path, shape)
    factor = after[branches[-1].add.index]
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
        source=_short(draft.located.source) if draft.located else _line(first.add),
        axis=axis,
        features=shape[axis],
        rank=len(shape),
        ratio=ratio,
        problem=problem,
        copies=first.copies,
        cross=kind == "attention" and is_cross(graph, first.root, steps),
        stream_factor=factor * own_factor(graph.nodes, first.stream, first.root),
        branch_factor=factor * own_factor(graph.nodes, first.branch),
        places=tuple(dict.fromkeys([*_places(draft), *draft.twins])),
    )


def _branches(draft: _Draft, first: Finding) -> list[Finding]:
    """The branches of one run of a site, in order."""
    return [first, *(more for more, _, _ in draft.more if more.first is first)]


def _branch(steps: list[Node], path: str, names: dict[int, str]) -> tuple[str, ...]:
    """The outermost modules that ran the branch and do not hold the addition themselves."""
    found: dict[str, None] = {}
    for node in steps:
        owners = [names[id(owner)] for owner in node.owners if id(owner) in names]
        outside = [name for name in owners if name and name != path and not path.startswith(name + ".")]
        if outside:
            found[outside[-1]] = None
    return tuple(found)


def _name(node: Node, names: dict[int, str]) -> str:
    return next((names[id(owner)] for owner in node.owners if id(owner) in names), "?")


def _line(node: Node) -> str:
    call = node.calls[0]
    return _short(f"{call.code.co_filename}:{call.position[0]}")


def _short(source: str) -> str:
    return Path(source).name
