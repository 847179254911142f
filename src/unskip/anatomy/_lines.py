"""Which line of the source adds what: the calls and the turns of a loop that tell one branch of a line from another."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from unskip.anatomy._find import Finding
from unskip.anatomy._graph import Graph, Node
from unskip.anatomy._locate import Located, Unreachable, locate


class Turn(NamedTuple):
    """A turn of a loop: its number, and the loop variable by which its branch is known, where there is one."""

    number: int
    variable: str | None = None
    key: str | int | None = None


# By the node of an addition: where it stands, or why that cannot be said.
Where = dict[int, tuple[Located | None, str | None]]


def turns_of(graph: Graph, findings: list[Finding], where: Where) -> dict[int, Turn]:
    """Which turn of a loop an addition ran in, where one line adds other branches in every turn.

    `for f in self.layers: x = x + f(x)` is one line but as many sites as layers; the same branch again is the same
    site. A loop that had one turn does not tell which of the two it is, so its turn is counted too: a second one that
    comes later is refused, and does not share the weight of the first.
    """
    turns: dict[int, Turn] = {}
    for calls in _lines(findings, where):
        located, _ = where[next(iter(calls.values()))[0].add.index]
        assert located is not None
        once = located.targets is not None and all(len(runs) == 1 for runs in calls.values())
        if once or any(len({_weights(graph, finding) for finding in runs}) > 1 for runs in calls.values()):
            variable, keys = _known_by(list(calls.values()), where, located)
            turns |= {
                finding.add.index: Turn(number, variable, keys[number] if variable else None)
                for runs in calls.values()
                for number, finding in enumerate(runs)
            }
    return turns


def _known_by(calls: list[list[Finding]], where: Where, at: Located) -> tuple[str | None, list[str | int]]:
    """The loop variable that is another module of the branch, or else another number, in every turn, and its values."""
    inside = {id(module): path for path, module in at.module.named_modules() if path}
    held = [[located.names if (located := where[f.add.index][0]) else {} for f in runs] for runs in calls]
    longest = max(range(len(calls)), key=lambda i: len(calls[i]))
    lists: dict[bool, tuple[str, list[str | int]]] = {}  # by whether it is a number
    for name in sorted(at.targets or ()):
        turns = [[names.get(name) for names in each] for each in held]
        values = turns[longest]
        if any(each != values[: len(each)] for each in turns) or len({id(value) for value in values}) < len(values):
            continue
        if all(type(value) is int for value in values):
            lists[True] = name, values  # type: ignore[assignment]
        elif all(id(value) in inside and _runs(value, f) for value, f in zip(values, calls[longest], strict=True)):
            lists[False] = name, [inside[id(value)] for value in values]
    return lists.get(False) or lists.get(True) or (None, [])


def _runs(module: object, finding: Finding) -> bool:
    """Whether a module, or one in a list of modules, ran a part of the branch."""
    assert isinstance(module, nn.Module)
    inside = {id(each) for each in module.modules()}
    return any(id(owner) in inside for node in finding.path for owner in node.owners)


def _weights(graph: Graph, finding: Finding) -> frozenset[int]:
    """The weights that a branch was computed with."""
    return frozenset(parent for node in finding.path for parent in node.parents if graph.nodes[parent].op == "weight")


def locations(graph: Graph, findings: list[Finding]) -> Where:
    """Where each addition stands, or why that cannot be said.

    A helper that adds for several callers, `self.residual(x, self.attn)`, is followed up to the calls that tell its
    branches apart.
    """
    where = {finding.add.index: _try_locate(finding.add, 0) for finding in findings}
    for up in range(1, 4):
        mixed = _mixed(graph, findings, where)
        where |= {finding.add.index: _try_locate(finding.add, up) for finding in mixed}
    for finding in _mixed(graph, findings, where):
        where[finding.add.index] = (None, "one line adds several branches, in a way that does not tell them apart")
    return where


def _mixed(graph: Graph, findings: list[Finding], where: Where) -> list[Finding]:
    """The additions whose line adds one thing in one call of its method and another in the next."""
    mixed = []
    for calls in _lines(findings, where):
        if len({tuple(_weights(graph, finding) for finding in runs) for runs in calls.values()}) > 1:
            mixed += [finding for runs in calls.values() for finding in runs]
    return mixed


def _lines(findings: list[Finding], where: Where) -> list[dict[int, list[Finding]]]:
    """The findings by the line that adds them, and of each line by the call of its method."""
    lines: dict[object, dict[int, list[Finding]]] = {}
    for finding in findings:
        located, _ = where[finding.add.index]
        if located is not None:
            calls = lines.setdefault((id(located.module), located.hops), {})
            calls.setdefault(located.call, []).append(finding)
    return list(lines.values())


def _try_locate(node: Node, up: int) -> tuple[Located | None, str | None]:
    try:
        return locate(node.calls, up), None
    except Unreachable as error:
        return None, str(error)
