"""The source of a running function: its syntax tree, and the expression at a position.

Source on disk may have changed since the import, or an import hook may have rewritten it. So the tree is compiled again
and its bytecode compared with the running code before positions in it are used.
"""

from __future__ import annotations
import __future__

import ast
import copy
import functools
import hashlib
import inspect
import linecache
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType
from typing import Any

from unskip.errors import SourceError

# Line, end line, column, end column. Lines count from the function's first line, so moving a function in its file does
# not change them; columns count UTF-8 bytes, as in ast.
Position = tuple[int, int, int, int]
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
_DECORATORS = 6  # most decorators of a function that are followed
_FUTURE = functools.reduce(
    lambda a, b: a | b, (getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
)


@dataclass(frozen=True, eq=False)
class FunctionSource:
    """A function's syntax tree, its class (which mangles private names), and a digest of its text.

    It includes the module's imports, because the bytecode of a method call depends on whether the name is imported.
    """

    node: FunctionNode
    class_name: str | None
    imports: tuple[ast.stmt, ...]
    digest: str
    filename: str


def function_source(code: CodeType) -> FunctionSource:
    """Finds the source of a code object and checks that it compiles to that code. Raises SourceError."""
    return _function_source(code, code.co_filename)


@functools.lru_cache(maxsize=256)
def _function_source(code: CodeType, filename: str) -> FunctionSource:  # code objects of two files may be equal
    lines = linecache.getlines(filename)
    where = f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno})"
    if not lines:
        raise SourceError(f"{where}: its source is not available. Define the class in a file or a notebook cell.")
    if code.co_name == "<lambda>":
        raise SourceError(f"{where}: it adds in a lambda. Write it as a function.")
    tree = _parse(code.co_filename, "".join(lines))
    for node, class_name in _functions(tree):
        first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        if node.name == code.co_name and first == code.co_firstlineno:
            text = "".join(lines[first - 1 : node.end_lineno])
            digest = hashlib.sha256(text.encode()).hexdigest()[:16]
            source = FunctionSource(node, class_name, tuple(_imports(tree)), digest, code.co_filename)
            if not _same(compile_function(source, source.node, code), code):
                break
            return source
    raise SourceError(f"{where}: its source does not match the code that runs. Restart Python if the file was edited.")


@functools.lru_cache(maxsize=32)
def _parse(filename: str, text: str) -> ast.Module:
    try:
        return ast.parse(text, filename)
    except SyntaxError as error:
        raise SourceError(f"{filename}: its source cannot be parsed: {error}") from error


def _functions(tree: ast.AST, class_name: str | None = None) -> Iterator[tuple[FunctionNode, str | None]]:
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, FunctionNode):
            yield child, class_name
        yield from _functions(child, child.name if isinstance(child, ast.ClassDef) else class_name)


def _imports(tree: ast.AST) -> Iterator[ast.stmt]:
    """The imports at module level, including those inside if and try statements."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.Import) or (isinstance(child, ast.ImportFrom) and child.module != "__future__"):
            yield child
        elif not isinstance(child, FunctionNode | ast.ClassDef):
            yield from _imports(child)


def expression_at(source: FunctionSource, position: Position) -> ast.AST | None:
    """The binary operation, augmented assignment or call at a position."""
    nodes = (node for node in ast.walk(source.node) if isinstance(node, ast.BinOp | ast.AugAssign | ast.Call))
    return next((node for node in nodes if position_of(node, source.node) == position), None)


@functools.lru_cache(maxsize=1024)
def loop_targets(source: FunctionSource, position: Position) -> frozenset[str] | None:
    """The variables of the loops and comprehensions around the expression at a position; None outside any loop."""
    targets: set[str] | None = None
    for outer in ast.walk(source.node):
        inside: list[ast.AST] = []
        bound: list[ast.expr] = []
        if isinstance(outer, ast.For | ast.AsyncFor | ast.While):
            inside, bound = [*outer.body], [] if isinstance(outer, ast.While) else [outer.target]
        elif isinstance(outer, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            inside, bound = [outer], [generator.target for generator in outer.generators]
        nodes = (node for part in inside for node in ast.walk(part))
        calls = (node for node in nodes if isinstance(node, ast.BinOp | ast.AugAssign | ast.Call))
        if any(position_of(node, source.node) == position for node in calls):
            names = (node.id for target in bound for node in ast.walk(target) if isinstance(node, ast.Name))
            targets = {*(targets or ()), *names}
    return None if targets is None else frozenset(targets)


def position_of(node: ast.BinOp | ast.AugAssign | ast.Call, function: FunctionNode) -> Position:
    """The position of an expression in its function."""
    first = function.lineno
    return node.lineno - first, (node.end_lineno or 0) - first, node.col_offset, node.end_col_offset or 0


def compile_function(
    source: FunctionSource, node: FunctionNode, like: CodeType, names: tuple[str, ...] = ()
) -> CodeType:
    """Compiles a function's tree into code that can replace `like`: with the same class for private names and super(),
    free variables and __future__ flags; `names` become additional free variables.
    """
    node = copy.copy(node)
    node.decorator_list = []
    free = [name for name in (*like.co_freevars, *names) if name != "__class__"]
    body: list[ast.stmt] = [node]
    if source.class_name is not None:
        body = [ast.ClassDef(source.class_name, bases=[], keywords=[], body=body, decorator_list=[])]
    arguments = ast.arguments([], [ast.arg(name) for name in free], None, [], [], None, [])
    if source.class_name is not None and source.class_name not in free:
        body.insert(0, ast.Global([source.class_name]))  # a method that names its class reads a global
    outer = ast.FunctionDef("unskip_scope", arguments, body, [], None)
    tree = ast.fix_missing_locations(ast.Module([*source.imports, outer], []))
    module = compile(tree, source.filename, "exec", like.co_flags & _FUTURE, dont_inherit=True)
    return next(code for code in nested(module) if code.co_name == node.name and code.co_firstlineno == node.lineno)


def nested(code: CodeType) -> Iterator[CodeType]:
    """The code objects inside a code object, at any depth."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from nested(constant)


def _same(a: CodeType, b: CodeType) -> bool:
    facts = ("co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_argcount", "co_kwonlyargcount")
    if any(getattr(a, fact) != getattr(b, fact) for fact in facts) or len(a.co_consts) != len(b.co_consts):
        return False
    for x, y in zip(a.co_consts, b.co_consts, strict=True):
        if isinstance(x, CodeType) or isinstance(y, CodeType):
            if not (isinstance(x, CodeType) and isinstance(y, CodeType) and _same(x, y)):
                return False
        elif type(x) is not type(y) or repr(x) != repr(y):
            return False
    return True


def layers(function: object, depth: int = _DECORATORS) -> Iterator[FunctionType]:
    """A function and the functions that its decorators wrapped, outermost first."""
    if isinstance(function, MethodType | staticmethod | classmethod):
        function = function.__func__
    if not isinstance(function, FunctionType) or depth < 0:
        return
    yield function
    for cell in function.__closure__ or ():
        try:
            content = cell.cell_contents
        except ValueError:  # an empty cell
            continue
        if isinstance(content, FunctionType):
            yield from layers(content, depth - 1)


def names_of(owner: type, code: CodeType) -> list[str]:
    """The attributes of a class that run a code object (without those that a subclass overrides)."""
    attributes: dict[str, object] = {}
    for base in reversed(owner.__mro__):
        attributes |= vars(base)
    functions = ((name, value) for name, value in attributes.items() if isinstance(value, FunctionType))
    return [name for name, value in functions if any(layer.__code__ is code for layer in layers(value))]


def function_named(module: str, qualname: str, code: CodeType | None = None) -> FunctionType:
    """The function of a name, with its decorators. Raises SourceError.

    Imports nothing, because the name may come from a saved folder; a model's modules are imported with the model.
    """
    try:
        value: Any = sys.modules[module]
        for name in qualname.split("."):
            value = inspect.getattr_static(value, name)
        if isinstance(value, staticmethod | classmethod):
            value = value.__func__
    except KeyError as error:
        raise SourceError(f"{module}.{qualname}: its module is not in sys.modules. Import it first") from error
    except (AttributeError, ValueError) as error:
        raise SourceError(f"{module}.{qualname} cannot be found by name") from error
    if not isinstance(value, FunctionType) or (
        code is not None and all(layer.__code__ is not code for layer in layers(value))
    ):
        raise SourceError(f"{module}.{qualname} is not the function that ran")
    return value
