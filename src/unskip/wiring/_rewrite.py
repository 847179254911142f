"""Rewrites additions in the source of a function and recompiles it, leaving everything else unchanged.

    x = x + self.attn(self.norm(x))     becomes     x = mix(stream=x, branch=self.attn(self.norm(x)),
                                                            alpha=self.unskip_alpha0, beta=self.unskip_beta0)

Only the expression changes: operands keep their order of evaluation; globals, defaults, closures, `super()`, private
names and decorators are the original's; line numbers still refer to the original file. If the addition is in a function
that the method calls, that function is cloned with the weights as an extra argument, and only this call uses the clone.
"""

from __future__ import annotations

import ast
import copy
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import CellType, FunctionType, MethodType
from typing import Any, Literal, TypeGuard

from unskip._source import (
    FunctionNode,
    Position,
    compile_function,
    expression_at,
    function_named,
    function_source,
    layers,
    position_of,
)
from unskip.anatomy import Hop, Unreachable
from unskip.errors import RewireError
from unskip.wiring._loops import HELPERS, Loop, Returns, WeightExpr
from unskip.wiring._mix import mix

MIX = "__unskip_mix__"
WEIGHTS = "__unskip_weights__"


@dataclass(frozen=True)
class Edit:
    """One addition to rewrite: the call expressions that lead to it, and the slot of its weights in the module."""

    hops: tuple[Hop, ...]
    side: Literal["left", "right"]
    role: Literal["mix", "more"]
    slot: int
    turn: int | None = None  # iteration of a loop, each with its own slot
    fresh: bool = False  # the sum must not share memory with the branch
    variable: str | None = None  # loop variable that identifies the branch
    key: str | int | None = None  # its value in this turn


def rewrite(function: FunctionType, edits: list[Edit], clone: bool = False) -> FunctionType:
    """The function, with its decorators, whose additions call `mix`.

    A method reads its weights from the module; a clone takes them as a keyword argument.
    """
    target = layer_at(function, edits[0].hops[0])
    source = function_source(target.__code__)
    tree = copy.deepcopy(source.node)
    slots = sorted({edit.slot for edit in edits})
    weight = _from_argument(slots) if clone else _from_module(tree)
    cells: dict[str, object] = {MIX: mix}
    replacements: dict[Position, Callable[[ast.AST], ast.AST]] = {}
    loops: list[Loop] = []
    first: dict[str, ast.expr] = {}  # variables to set at the start of the function
    for position in dict.fromkeys(edit.hops[0].position for edit in edits):
        group = [edit for edit in edits if edit.hops[0].position == position]
        group_weight = weight
        if group[0].turn is not None:
            cells |= HELPERS
            loop = Loop(group, len(first), weight)
            first |= loop.start(_receiver(tree))
            group_weight = loop.weight
            loops.append(loop)
        if len(group[0].hops) == 1:
            replacements[position] = _Addition(group[0], group_weight)
        else:
            receiver = _receiver(tree) if _is_super(expression_at(source, position)) else None
            replacements[position] = _clone_call(group, group_weight, cells, receiver)
    transformer = _Replace(tree, replacements)
    transformer.visit(tree)
    if len(transformer.done) != len(replacements):
        raise RewireError(f"{target.__qualname__}: an addition is not where it was when the model was traced")
    for loop in loops:
        if loop.variable is None:
            Returns(loop).generic_visit(tree)
    tree.body[_docstring(tree) : _docstring(tree)] = [
        ast.copy_location(ast.Assign([ast.Name(name, ast.Store())], value), tree.body[0])
        for name, value in first.items()
    ]
    if clone:
        tree.args.kwonlyargs.append(ast.arg(WEIGHTS))
        tree.args.kw_defaults.append(None)
    code = compile_function(source, ast.fix_missing_locations(tree), target.__code__, tuple(cells))
    closure = dict(zip(target.__code__.co_freevars, target.__closure__ or (), strict=True))
    closure |= {name: CellType(value) for name, value in cells.items()}
    changed = _function(target, code, tuple(closure[name] for name in code.co_freevars))
    return _rewrap(function, target, changed)


def _clone_call(edits: list[Edit], weight: WeightExpr, cells: dict[str, object], receiver: str | None) -> _Call:
    """Redirects a call to a clone whose additions call `mix`, and adds the clone to the cells.

    `receiver` is the first argument of the method if the call is super().method(...), otherwise None.
    """
    # All turns reach the same addition in the same clone, which then has one slot.
    turn = edits[0].turn
    inner = [Edit(e.hops[1:], e.side, e.role, e.slot, fresh=e.fresh) for e in edits if e.turn in (None, turn)]
    callee = function_named(inner[0].hops[0].module, inner[0].hops[0].qualname)
    clone = rewrite(callee, inner, clone=True)
    slots, name = sorted({edit.slot for edit in inner}), f"__unskip_call{len(cells)}__"
    if receiver is not None:
        cells[name] = clone  # super() always calls this function
        return _SuperCall(name, slots, weight, receiver)
    cells[name] = _Redirect(callee, clone)
    return _Call(name, slots, weight)


def layer_at(function: FunctionType, hop: Hop) -> FunctionType:
    """The undecorated function of a hop. Raises RewireError if its source is not the traced one."""
    for layer in layers(function):
        if layer.__code__.co_qualname == hop.qualname and function_source(layer.__code__).digest == hop.digest:
            return layer
    raise RewireError(
        f"{hop.module}.{hop.qualname}: its source is not the one that was rewired (another version of the library?)"
    )


def _function(like: FunctionType, code: Any, closure: tuple[CellType, ...]) -> FunctionType:
    new = FunctionType(code, like.__globals__, like.__name__, like.__defaults__, closure)
    new.__kwdefaults__ = like.__kwdefaults__
    new.__dict__.update(like.__dict__)
    new.__annotations__, new.__doc__ = like.__annotations__, like.__doc__
    new.__module__, new.__qualname__ = like.__module__, like.__qualname__
    return new


def _rewrap(function: FunctionType, old: FunctionType, new: FunctionType) -> FunctionType:
    """Copies the decorators' wrappers, with the new function in their closures instead of the old one."""
    if function is old:
        return new
    cells = []
    for cell in function.__closure__ or ():
        content = cell.cell_contents if cell != CellType() else None
        if _wraps(content, old):
            cells.append(CellType(_rewrap(content, old, new)))
        elif isinstance(content, tuple) and content == tuple(inspect.signature(old).parameters):
            cells.append(CellType((*content, WEIGHTS)))  # the argument names that a wrapper passes on
        else:
            cells.append(cell)
    wrapper = _function(function, function.__code__, tuple(cells))
    for name, value in vars(function).items():  # __wrapped__, and what torch.compile reads: _torchdynamo_orig_callable
        if _wraps(value, old):
            setattr(wrapper, name, _rewrap(value, old, new))
    return wrapper


def _wraps(value: object, function: FunctionType) -> TypeGuard[FunctionType]:
    """Whether a value is the function or one of its decorators' wrappers."""
    return isinstance(value, FunctionType) and any(layer is function for layer in layers(value))


class _Redirect:
    """Replaces the callee of a call by its clone. Raises RewireError for any callee but the original function."""

    def __init__(self, original: FunctionType, clone: FunctionType) -> None:
        self.original, self.clone = original, clone

    def __call__(self, callee: Any) -> Any:
        receiver = None
        if isinstance(callee, MethodType):
            callee, receiver = callee.__func__, callee.__self__
        elif not isinstance(callee, FunctionType):
            callee, receiver = type(callee).__call__, callee
        if callee is not self.original:
            raise RewireError(
                f"{self.original.__qualname__} was replaced by {getattr(callee, '__qualname__', callee)} after "
                "rewiring, so its addition would have no weights. Undo the wiring, make the change, and rewire."
            )
        # Not a bound method: torch.compile cannot trace its creation.
        return self.clone if receiver is None else functools.partial(self.clone, receiver)


def _receiver(tree: FunctionNode) -> str:
    return [*tree.args.posonlyargs, *tree.args.args][0].arg


def _is_super(node: ast.AST | None) -> bool:
    """super().method(...)"""
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Call(func=ast.Name(id="super"), args=[]))):
            return True
    return False


def _from_module(tree: FunctionNode) -> WeightExpr:
    receiver = _receiver(tree)

    def weight(slot: int, which: str) -> ast.expr:
        return ast.Attribute(ast.Name(receiver, ast.Load()), attribute(slot, which), ast.Load())

    return weight


def _from_argument(slots: list[int]) -> WeightExpr:
    def weight(slot: int, which: str) -> ast.expr:
        index = 2 * slots.index(slot) + (which == "beta")
        return ast.Subscript(ast.Name(WEIGHTS, ast.Load()), ast.Constant(index), ast.Load())

    return weight


def _docstring(tree: FunctionNode) -> int:
    return int(ast.get_docstring(tree, clean=False) is not None)


def attribute(slot: int, which: str) -> str:
    """The module attribute that holds a weight."""
    return f"unskip_{which}{slot}"


class _Replace(ast.NodeTransformer):
    def __init__(self, tree: FunctionNode, replacements: dict[Position, Callable[[ast.AST], ast.AST]]) -> None:
        self.tree, self.replacements = tree, replacements
        self.done: set[Position] = set()

    def visit(self, node: ast.AST) -> Any:
        node = super().generic_visit(node)
        if isinstance(node, ast.BinOp | ast.AugAssign | ast.Call):
            position = position_of(node, self.tree)
            if position in self.replacements:
                self.done.add(position)
                return ast.copy_location(self.replacements[position](node), node)
        return node


@dataclass
class _Addition:
    edit: Edit
    weight: WeightExpr

    def __call__(self, node: ast.AST) -> ast.AST:
        match node:
            case ast.BinOp(left=left, right=right):
                return self._mix(left, right, False)
            case ast.AugAssign(target=target, value=right):
                left = copy.deepcopy(target)
                left.ctx = ast.Load()
                return ast.Assign([target], self._mix(left, right, True))
            case ast.Call(func=ast.Attribute(value=left, attr=name), args=[right]):
                return self._mix(left, right, name.endswith("_"))
            case ast.Call(args=[left, right]):
                return self._mix(left, right, False)
        raise Unreachable(f"not an addition: {ast.unparse(node)}")

    def _mix(self, left: ast.expr, right: ast.expr, in_place: bool) -> ast.Call:
        names = ("stream", "branch") if self.edit.side == "left" else ("branch", "stream")
        # The first branch has already applied alpha to the stream.
        alpha = ast.Constant(1.0) if self.edit.role == "more" else self.weight(self.edit.slot, "alpha")
        keywords = [
            ast.keyword(names[0], left),
            ast.keyword(names[1], right),
            ast.keyword("alpha", alpha),
            ast.keyword("beta", self.weight(self.edit.slot, "beta")),
        ]
        if in_place:
            keywords.append(ast.keyword("into", ast.Constant(names[0])))
        elif self.edit.fresh:
            keywords.append(ast.keyword("fresh", ast.Constant(True)))
        if names[0] == "branch":
            keywords.append(ast.keyword("left", ast.Constant("branch")))
        return ast.Call(ast.Name(MIX, ast.Load()), [], keywords)


@dataclass
class _Call:
    name: str
    slots: list[int]
    weight: WeightExpr

    def __call__(self, node: ast.AST) -> ast.AST:
        assert isinstance(node, ast.Call)
        weights: list[ast.expr] = [self.weight(slot, which) for slot in self.slots for which in ("alpha", "beta")]
        keywords = [*node.keywords, ast.keyword(WEIGHTS, ast.Tuple(weights, ast.Load()))]
        return self._call(node, keywords)

    def _call(self, node: ast.Call, keywords: list[ast.keyword]) -> ast.Call:
        return ast.Call(ast.Call(ast.Name(self.name, ast.Load()), [node.func], []), node.args, keywords)


@dataclass
class _SuperCall(_Call):
    receiver: str

    def _call(self, node: ast.Call, keywords: list[ast.keyword]) -> ast.Call:
        arguments = [ast.Name(self.receiver, ast.Load()), *node.args]
        return ast.Call(ast.Name(self.name, ast.Load()), arguments, keywords)
