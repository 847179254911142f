"""Locates an addition in the source of a module, from the Python frames in which it ran.

The addition may be in the module's method, in a function that the method calls (`dropout_add(...)`), in an inherited
method called through `super()`, or in the `__call__` of a helper object such as an attention processor. A place is
therefore a chain: the method of a module, then the calls from it to the addition.
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

# The syntax allowed in the target of +=. Anything else is computed, and would be computed twice.
_TARGET = (ast.Name, ast.Attribute, ast.Subscript, ast.Slice, ast.Tuple, ast.Constant, ast.UnaryOp, ast.unaryop)
_DEPTH = 6  # most functions between a module and an addition


@dataclass(frozen=True)
class Hop:
    """An expression in a function: a call on the way to the addition or, in the last hop, the addition."""

    module: str  # import name of the function's module
    qualname: str
    digest: str  # of the function's source
    position: Position


@dataclass(frozen=True)
class Place:
    """The location of an addition and the side of its stream. Plain data that can be saved and loaded."""

    hops: tuple[Hop, ...]  # the first is a method of the module that is rewired
    side: Literal["left", "right"]
    role: Literal["mix", "more"]
    turn: int | None = None  # number of the loop iteration, if one line adds several branches in a loop
    fresh: bool = False  # the model writes into the sum, so it must not share memory with the branch
    variable: str | None = None  # the loop variable that identifies the branch whatever the order
    key: str | int | None = None  # its value: the path of a module relative to the one that adds, or an integer


class Unreachable(Exception):
    """An addition that cannot be rewired, with the reason."""


@dataclass(frozen=True)
class Located:
    """The module that an addition belongs to, and the chain of expressions from its method to the addition."""

    module: nn.Module
    hops: tuple[Hop, ...]
    expression: str
    source: str  # file and line
    call: int  # id of the call of the module's method
    targets: frozenset[str] | None  # variables of the loops around the first expression; None without a loop
    names: dict[str, object]  # the method's variables that held a module or an integer


def locate(calls: tuple[Call, ...], up: int = 0) -> Located:
    """Follows the frames of an addition, innermost first, up to the method of a module. Raises Unreachable.

    `up` continues through that many callers, which tell apart the additions of a helper method with several callers.
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
            raise Unreachable(f"{code.co_qualname} does not reach {hops[0].qualname} by a plain call")
        module_name = calls[index].frame.f_globals.get("__name__", "")
        hops.insert(0, Hop(module_name, code.co_qualname, source.digest, place))
        receiver = calls[index].receiver
        if code is MODULE_CALL:
            raise Unreachable(
                f"{hops[1].qualname} is a module that adds for several others, which it cannot tell apart"
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
    raise Unreachable(f"more than {_DEPTH} calls between the module and the addition")


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
        raise Unreachable(f"{code.co_qualname}, line {line}: the addition is not a single expression")
    return source, node, place


def _enclosing(calls: tuple[Call, ...], index: int) -> int:
    """The frame of the outermost function: comprehensions, lambdas and inner functions are rewritten as part of it."""
    while _is_inner(code := calls[index].code):
        outer = next((i for i in range(index + 1, len(calls)) if code in calls[i].code.co_consts), None)
        if outer is None:
            raise Unreachable(f"{code.co_qualname} runs outside the function that defines it")
        index = outer
    return index


def _is_inner(code: CodeType) -> bool:
    """Whether a code object is defined directly in a function, not in a class in the function."""
    _, local, name = code.co_qualname.rpartition("<locals>.")
    return bool(local) and all(part.startswith("<") for part in name.split(".")[:-1])


def check_addition(node: ast.AST, code: CodeType) -> None:
    """Raises Unreachable for an expression that is not an addition or cannot be rewritten."""
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
        f"{code.co_qualname}: the sum is computed inside `{ast.unparse(node)[:60]}`, not by an addition in the source"
    )
