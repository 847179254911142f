"""One forward pass as a graph of plain records: tensors, what made them, and where they cross a module's boundary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn


@dataclass(eq=False)
class Call:
    """A Python frame as it stood when an operator ran: the function and the instruction it was at."""

    frame: FrameType
    instruction: int
    names: dict[str, object] = field(default_factory=dict)  # its variables that held a module or a whole number

    @property
    def code(self) -> CodeType:
        return self.frame.f_code

    @property
    def position(self) -> tuple[int | None, int | None, int | None, int | None]:
        """(line, end line, column, end column) of the expression being evaluated."""
        return list(self.code.co_positions())[self.instruction // 2]

    @property
    def receiver(self) -> object:
        """The first argument: `self` in a method, whatever it is called."""
        if not self.code.co_argcount:
            return None
        return self.frame.f_locals.get(self.code.co_varnames[0])


@dataclass(frozen=True)
class Ref:
    """A tensor among the arguments of a step: the node that holds it."""

    index: int


@dataclass(frozen=True, eq=False)
class Step:
    """How a node was computed: an operator, its arguments with a Ref for each tensor, and which of its outputs."""

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
    ancestors: int = 0  # bit set of node indices, itself included
    fixed: bool = False  # made from weights and constants alone: does not depend on the input
    shape: tuple[int, ...] = ()
    floating: bool = True
    owners: tuple[nn.Module, ...] = ()  # modules being called, innermost first
    calls: tuple[Call, ...] = ()  # Python frames, innermost first; kept for possible residuals only
    plain: bool = True  # an addition without a factor of its own
    factor: float | None = None  # of a product with a number or a weight: that number, or the weight's mean
    ratio: float | None = None  # of an addition: rms of the right operand over rms of the left
    wrote: int | None = None  # the version of a tensor that an in-place operator wrote over
    step: Step | None = None  # kept where the graph is to be computed again
    norm: int | None = None  # the last node of the written-out norm that it is of

    def __contains__(self, index: int) -> bool:
        return bool(self.ancestors >> index & 1)


class Crossing(NamedTuple):
    """A tensor that goes into a module or comes out of it."""

    module: nn.Module
    side: Literal["input", "output"]
    place: int  # among the floating tensors of that side
    call: int  # of that module, from 0 on


@dataclass(eq=False)
class Graph:
    """The nodes in execution order."""

    nodes: list[Node] = field(default_factory=list)
    moving: int = 0  # bit set of the nodes that depend on the input
    values: dict[int, Tensor] = field(default_factory=dict)  # by node, kept where the graph is to be computed again
    crossings: dict[int, list[Crossing]] = field(default_factory=dict)  # by node, kept with the values

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
        """Lets go of the Python frames, whose variables would keep the model and its activations alive."""
        for node in self.nodes:
            node.calls = ()
