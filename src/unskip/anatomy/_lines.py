"""Source locations of additions. Calls and loop iterations tell apart several branches that one line adds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from torch import nn

from unskip.anatomy._find import Finding
from unskip.anatomy._graph import Graph, Node
from unskip.anatomy._locate import Located, Unreachable, locate


class Turn(NamedTuple):
    """One iteration of a loop: its number, and the loop variable that identifies its branch, if there is one."""

    number: int
    variable: str | None = None
    key: str | int | None = None


# By the node of an addition: its location, or the reason why it has none.
Where = dict[int, tuple[Located | None, str | None]]


def turns_of(graph: Graph, findings: list[Finding], where: Where) -> dict[int, Turn]:
    """The loop iteration of each addition whose line adds a different branch in every iteration.

    `for f in self.layers: x = x + f(x)` is one line but one site per layer; the same branch run again is the same site.
    A loop with one iteration could be either, so its iteration is numbered as well. A second iteration in a later
    forward is then refused and does not silently share the weights of the first.
    """
    turns: dict[int, Turn] = {}
    for calls in _lines(findings, where):
        located, _ = where[next(iter(calls.values()))[0].add.index]
        assert located is not None
        ran_once = located.targets is not None and all(len(runs) == 1 for runs in calls.values())
        if ran_once or any(len({_weights(graph, finding) for finding in runs}) > 1 for runs in calls.values()):
            variable, keys = _loop_variable(list(calls.values()), where, located)
            turns |= {
                finding.add.index: Turn(number, variable, keys[number] if variable else None)
                for runs in calls.values()
                for number, finding in enumerate(runs)
            }
    return turns


def _loop_variable(calls: list[list[Finding]], where: Where, at: Located) -> tuple[str | None, list[str | int]]:
    """A loop variable that is a different module of the branch, or else integer, in each iteration; its values."""
    paths = {id(module): path for path, module in at.module.named_modules() if path}
    variables = [[located.names if (located := where[f.add.index][0]) else {} for f in runs] for runs in calls]
    longest = max(range(len(calls)), key=lambda i: len(calls[i]))
    by_module = by_number = None
    for name in sorted(at.targets or ()):
        by_call = [[names.get(name) for names in iterations] for iterations in variables]
        values = by_call[longest]
        if any(v != values[: len(v)] for v in by_call) or len({id(value) for value in values}) < len(values):
            continue
        if all(type(value) is int for value in values):
            by_number = name, values
        elif all(id(value) in paths and _runs(value, f) for value, f in zip(values, calls[longest], strict=True)):
            by_module = name, [paths[id(value)] for value in values]
    return by_module or by_number or (None, [])  # type: ignore[return-value]


def _runs(module: object, finding: Finding) -> bool:
    """Whether a module or one of its submodules ran a part of the branch."""
    assert isinstance(module, nn.Module)
    inside = {id(child) for child in module.modules()}
    return any(id(owner) in inside for node in finding.path for owner in node.owners)


def _weights(graph: Graph, finding: Finding) -> frozenset[int]:
    """The weights that a branch uses."""
    return frozenset(parent for node in finding.path for parent in node.parents if graph.nodes[parent].op == "weight")


def locations(graph: Graph, findings: list[Finding]) -> Where:
    """The source location of each addition, or the reason why it has none.

    A helper that adds for several callers, `self.residual(x, self.attn)`, is located through the calls that tell its
    branches apart.
    """
    where = {finding.add.index: _try_locate(finding.add, 0) for finding in findings}
    for up in range(1, 4):
        mixed = _mixed(graph, findings, where)
        where |= {finding.add.index: _try_locate(finding.add, up) for finding in mixed}
    for finding in _mixed(graph, findings, where):
        where[finding.add.index] = (None, "one line adds several branches that cannot be told apart")
    return where


def _mixed(graph: Graph, findings: list[Finding], where: Where) -> list[Finding]:
    """The additions whose line adds different branches in different calls of its method."""
    mixed = []
    for calls in _lines(findings, where):
        if len({tuple(_weights(graph, finding) for finding in runs) for runs in calls.values()}) > 1:
            mixed += [finding for runs in calls.values() for finding in runs]
    return mixed


def _lines(findings: list[Finding], where: Where) -> list[dict[int, list[Finding]]]:
    """The findings grouped by source line, and for each line by the call of its method."""
    lines: dict[object, dict[int, list[Finding]]] = {}
    for finding in findings:
        located, _ = where[finding.add.index]
        if located is not None:
            calls = lines.setdefault((id(located.module), located.hops), {})
            calls.setdefault(located.call, []).append(finding)
    return list(lines.values())


def source_key(node: Node) -> tuple[object, ...]:
    """A key of an addition in the source (code, instruction, module), computed without reading the source."""
    return (node.calls[0].code, node.calls[0].instruction, *(id(owner) for owner in node.owners[:1]))


def source_line(node: Node) -> str:
    """The file name and line of an addition."""
    call = node.calls[0]
    return f"{Path(call.code.co_filename).name}:{call.position[0]}"


def partial_runs(graph: Graph, sites: Sequence[Sequence[Finding]]) -> list[str | None]:
    """For each site, given by its findings, the problem that its addition is a residual in only some of its runs.

    One pair (alpha, beta) cannot apply to all runs then.
    """
    additions = (
        n for n in graph.nodes if n.calls and n.op == "add" and len({graph.nodes[p].shape for p in n.parents[:2]}) == 1
    )
    total = Counter(source_key(node) for node in additions)
    runs = [Counter(source_key(finding.add) for finding in findings) for findings in sites]
    residual = sum(runs, Counter())
    partial = [[key for key in counts if residual[key] < total[key]] for counts in runs]
    return [
        f"a residual in {counts[keys[0]]} of its {total[keys[0]]} runs" if keys else None
        for counts, keys in zip(runs, partial, strict=True)
    ]


def _try_locate(node: Node, up: int) -> tuple[Located | None, str | None]:
    try:
        return locate(node.calls, up), None
    except Unreachable as error:
        return None, str(error)
