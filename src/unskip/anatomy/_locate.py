"""From the Python frames of an addition to the place in a module's source where it stands.

The addition may stand in the module's own method, in a function that the method calls (`dropout_add(...)`), in an
inherited method reached by `super()`, or in the `__call__` of a helper object such as an attention processor. A place
is therefore a chain: the method of a module, then the calls that lead from it to the addition.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any, Literal

from torch import nn

from unskip._source import (
    FunctionSource,
    Position,
    expression_at,
    function_named,
    function_source,
    layers,
    loop_targets,
    names_of,
)
from unskip.anatomy._graph import Call
from unskip.anatomy._trace import MODULE_CALL
from unskip.errors import SourceError

# What the target of += may be made of: anything else is computed, and would be computed twice.
_TARGET = (ast.Name, ast.Attribute, ast.Subscript, ast.Slice, ast.Tuple, ast.Constant, ast.UnaryOp, ast.unaryop)
_DEPTH = 6  # functions between a module and an addition: more are not followed


@dataclass(frozen=True)
class Hop:
    """An expression in a function: a call that leads on, or, last, the addition itself."""

    module: str  # import name of the function's module
    qualname: str
    digest: str  # of the function's source
    position: Position


@dataclass(frozen=True)
class Place:
    """Where an addition stands, and on which side its stream is. Plain data: it can be saved and found again."""

    hops: tuple[Hop, ...]  # the first is a method of the module that is rewired
    side: Literal["left", "right"]
    role: Literal["mix", "more"]
    turn: int | None = None  # of one line that adds several branches in a loop: which turn of the loop
    fresh: bool = False  # the model writes into the sum, so that it must not share memory with the branch
    variable: str | None = None  # of the loop, that tells its branches apart in any order
    key: str | int | None = None  # what it is in this turn: the path of a module in the one that adds, or a number


class Unreachable(Exception):
    """An addition that cannot be rewired, with the reason."""


@dataclass(frozen=True)
class Located:
    """The module that an addition belongs to and the chain of expressions down to it."""

    module: nn.Module
    hops: tuple[Hop, ...]
    expression: str
    source: str  # file and line
    call: int  # tells one call of the module's method from another
    targets: frozenset[str] | None  # variables of the loops around the first expression; None where there is none
    names: dict[str, object]  # modules and whole numbers that the method's variables held


def locate(calls: tuple[Call, ...], up: int = 0) -> Located:
    """Follows the frames of an addition, innermost first, up to the method of a module. Raises Unreachable.

    `up` goes on to the method that called that one, and so forth: where a helper method adds for several callers, the
    calls tell its additions apart.
    """
    hops: list[Hop] = []
    text = line = ""
    index = 0
    position = calls[0].position
    while len(hops) < _DEPTH:
        inner, index = index, _enclosing(calls, index)
        code = calls[index].code
        source, node, place = _expression(code, position)
        if not hops:
            check_addition(node, code)
            text, line = " ".join(ast.unparse(node).split()), f"{code.co_filename}:{position[0]}"
        elif not isinstance(node, ast.Call):
            raise Unreachable(f"{code.co_qualname} reaches {hops[0].qualname} by something other than a plain call")
        module_name = calls[index].frame.f_globals.get("__name__", "")
        hops.insert(0, Hop(module_name, code.co_qualname, source.digest, place))
        receiver = calls[index].receiver
        if code is MODULE_CALL:
            raise Unreachable(
                f"{hops[1].qualname} is a module that adds for several others, and cannot tell them apart"
            )
        if isinstance(receiver, nn.Module) and names_of(type(receiver), code) and len(hops) > up:
            names = {name: value for call in reversed(calls[inner : index + 1]) for name, value in call.names.items()}
            targets = loop_targets(source, place)
            return Located(receiver, tuple(hops), text, line, id(calls[index].frame), targets, names)
        function = _imported(module_name, code)
        wrappers = {layer.__code__ for layer in layers(function)}
        index += 1
        while index < len(calls) and calls[index].code in wrappers:
            index += 1
        if index >= len(calls):
            raise Unreachable(f"{code.co_qualname} is not called from a module's method")
        position = calls[index].position
    raise Unreachable(f"more than {_DEPTH} calls lie between the module and the addition")


def _imported(module: str, code: CodeType) -> FunctionType:
    try:
        return function_named(module, code.co_qualname, code)
    except SourceError as error:
        raise Unreachable(str(error)) from error


def _expression(code: CodeType, position: Any) -> tuple[FunctionSource, ast.AST, Position]:
    try:
        source = function_source(code)
    except SourceError as error:
        raise Unreachable(str(error)) from error
    if None in position:
        raise Unreachable("Python runs without column positions (-X no_debug_ranges)")
    line, end_line, column, end_column = position
    place = (line - source.node.lineno, end_line - source.node.lineno, column, end_column)
    node = expression_at(source, place)
    if node is None:
        raise Unreachable(f"{code.co_qualname}, line {line}: the addition is not written as one")
    return source, node, place


def _enclosing(calls: tuple[Call, ...], index: int) -> int:
    """A comprehension, lambda or inner function is rewritten as part of the function it stands in."""
    while _is_inner(code := calls[index].code):
        outer = next((i for i in range(index + 1, len(calls)) if code in calls[i].code.co_consts), None)
        if outer is None:
            raise Unreachable(f"{code.co_qualname} runs outside the function it was defined in")
        index = outer
    return index


def _is_inner(code: CodeType) -> bool:
    """Whether a code object stands in the body of a function, not in that of a class which does."""
    _, local, name = code.co_qualname.rpartition("<locals>.")
    return bool(local) and all(part.startswith("<") for part in name.split(".")[:-1])


def check_addition(node: ast.AST, code: CodeType) -> None:
    """Raises Unreachable for an expression that is no addition, or one that cannot be rewritten."""
    match node:
        case ast.BinOp(op=ast.Add()):
            return
        case ast.AugAssign(op=ast.Add(), target=target):
            if all(isinstance(part, (*_TARGET, ast.expr_context)) for part in ast.walk(target)):
                return
            raise Unreachable(f"`{ast.unparse(target)} +=` computes its target, which would run twice")
        case ast.Call(func=ast.Attribute(attr="add" | "add_"), keywords=[], args=[_] | [_, _]):
            return
        case ast.Call(func=ast.Name(id="add"), keywords=[], args=[_, _]):
            return
    raise Unreachable(
        f"{code.co_qualname}: the sum is made inside `{ast.unparse(node)[:60]}`, not by an addition in the source"
    )
