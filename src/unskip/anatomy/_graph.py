"""One forward pass as a graph: tensors, the operators that computed them, and the modules they enter and leave."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn


@dataclass(eq=False)
class Call:
    """A Python frame at the time when an operator ran: the function and its current instruction."""

    frame: FrameType
    instruction: int
    names: dict[str, object] = field(default_factory=dict)  # its variables that held a module or an integer

    @property
    def code(self) -> CodeType:
        return self.frame.f_code

    @property
    def position(self) -> tuple[int | None, int | None, int | None, int | None]:
        """(line, end line, column, end column) of the expression being evaluated."""
        return list(self.code.co_positions())[self.instruction // 2]

    @property
    def receiver(self) -> object:
        """The first argument: in a method, the instance."""
        if not self.code.co_argcount:
            return None
        return self.frame.f_locals.get(self.code.co_varnames[0])


@dataclass(frozen=True)
class Ref:
    """Stands for a tensor among the arguments of a step: the index of its node."""

    index: int


@dataclass(frozen=True, eq=False)
class Step:
    """How a node was computed: an operator, its arguments with a Ref for each tensor, and the index of its output."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: int
    refs: tuple[int, ...] = ()  # the nodes among the arguments, integers included


@dataclass(eq=False)
class Node:
    """One tensor version: the output of an operator, an input, or a weight."""

    index: int
    op: str  # base name of the operator; "input", "weight" or "constant" for leaves
    parents: tuple[int, ...] = ()
    ancestors: int = 0  # bit set of node indices, including its own
    fixed: bool = False  # computed from weights and constants alone: does not depend on the input
    shape: tuple[int, ...] = ()
    floating: bool = True
    owners: tuple[nn.Module, ...] = ()  # modules being called, innermost first
    calls: tuple[Call, ...] = ()  # Python frames, innermost first; kept for possible residuals only
    plain: bool = True  # an addition without the factor `alpha` of torch.add
    factor: float | None = None  # for a product with a number or a weight: that number, or the weight's mean
    ratio: float | None = None  # for an addition: rms of the right operand / rms of the left
    wrote: int | None = None  # for an in-place operator: the tensor version that it overwrote
    step: Step | None = None  # recorded only if the graph is to be replayed
    norm: int | None = None  # the last node of the norm that it is part of, if operators spell out that norm

    def __contains__(self, index: int) -> bool:
        return bool(self.ancestors >> index & 1)


class Crossing(NamedTuple):
    """A tensor that is an input or output of a module."""

    module: nn.Module
    side: Literal["input", "output"]
    place: int  # index among the floating-point tensors of that side
    call: int  # index of the module's call


@dataclass(eq=False)
class Graph:
    """The nodes in execution order."""

    nodes: list[Node] = field(default_factory=list)
    moving: int = 0  # bit set of the nodes that depend on the input
    values: dict[int, Tensor] = field(default_factory=dict)  # by node; recorded only if the graph is to be replayed
    crossings: dict[int, list[Crossing]] = field(default_factory=dict)  # by node; recorded with the values

    def add(self, op: str, parents: tuple[int, ...] = (), **facts: Any) -> Node:
        index = len(self.nodes)
        ancestors = 1 << index
        for parent in parents:
            ancestors |= self.nodes[parent].ancestors
        node = Node(index, op, parents, ancestors, **facts)
        self.nodes.append(node)
        if not node.fixed:
            self.moving |= 1 << index
        return node

    def forget_calls(self) -> None:
        """Drops the Python frames, whose variables would keep the model and its activations alive."""
        for node in self.nodes:
            node.calls = ()
