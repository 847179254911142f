"""Weights in a loop: one line of source adds a different branch in each iteration, each with its own weights.

for layer in self.layers:
    x = x + layer(x)        becomes     x = mix(..., alpha=pick((alpha0, alpha1, ...), counter, keys, layer))
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from unskip._words import count
from unskip.errors import RewireError
from unskip.wiring._mix import Number

if TYPE_CHECKING:
    from unskip.wiring._rewrite import Edit

COUNT, KEYS, PICK, DONE = (f"__unskip_{name}__" for name in ("count", "keys", "pick", "done"))
# From (slot, "alpha" or "beta") to the expression of that weight.
WeightExpr = Callable[[int, str], ast.expr]


class Loop:
    """The weights of all branches that one line of a loop adds, and the expression that picks the current one.

    If a loop variable identifies the branch, its weight is looked up by that variable, so branches may be skipped or
    reordered. Otherwise iterations (turns) are counted, and all of them must run.
    """

    def __init__(self, edits: list[Edit], number: int, weight: WeightExpr) -> None:
        self._weight = weight
        self._edits = sorted({edit.turn: edit for edit in edits}.values(), key=lambda edit: edit.turn or 0)
        self.turns = len(self._edits)
        variables = {edit.variable for edit in self._edits}
        self.variable = variables.pop() if len(variables) == 1 else None
        self._keys = f"__unskip_turn{number}_keys__"
        self.counters = {which: f"__unskip_turn{number}_{which}__" for which in ("alpha", "beta")}

    def start(self, receiver: str) -> dict[str, ast.expr]:
        """The variables to set at the start of the function."""
        values: dict[str, ast.expr] = {name: ast.Call(load(COUNT), [], []) for name in self.counters.values()}
        if self.variable is not None:
            constants = ast.Tuple([ast.Constant(edit.key) for edit in self._edits], ast.Load())
            values[self._keys] = ast.Call(load(KEYS), [load(receiver), constants], [])
        return values

    def weight(self, slot: int, which: str) -> ast.expr:
        weights: list[ast.expr] = [self._weight(edit.slot, which) for edit in self._edits]
        arguments: list[ast.expr] = [ast.Tuple(weights, ast.Load()), load(self.counters[which])]
        if self.variable is not None:
            arguments += [load(self._keys), load(self.variable)]
        return ast.Call(load(PICK), arguments, [])


def load(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


class Returns(ast.NodeTransformer):
    """Adds a check to every return of a function that a loop ran all of its turns."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop

    def visit_Return(self, node: ast.Return) -> ast.Return:
        value, counter = node.value or ast.Constant(None), load(self.loop.counters["alpha"])
        arguments = [value, counter, ast.Constant(self.loop.turns)]
        return ast.copy_location(ast.Return(ast.Call(load(DONE), arguments, [])), node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        return node  # its returns are its own

    def visit_Lambda(self, node: ast.Lambda) -> ast.Lambda:
        return node


def keys(receiver: nn.Module, constants: tuple[str | int, ...]) -> list[object]:
    """The value of the loop variable in each turn: a submodule for a path, otherwise the number itself."""
    return [receiver.get_submodule(key) if isinstance(key, str) else key for key in constants]


def pick(
    weights: tuple[Number, ...], counter: Iterator[int], branches: list[object] | None = None, value: object = None
) -> Number:
    """The weight of the current turn of a loop."""
    turn = next(counter)
    if turn >= len(weights):
        raise RewireError(
            f"a loop over residual branches ran more than the {count(len(weights), 'turn')} it had when the model was "
            "rewired. Undo the wiring and rewire the model as it is now."
        )
    if branches is None:
        return weights[turn]
    for weight, key in zip(weights, branches, strict=True):
        if key is value or (isinstance(key, int) and key == value):
            return weight
    raise RewireError(
        "a loop over residual branches reached one that it did not have when the model was rewired. Undo the wiring "
        "and rewire the model as it is now."
    )


def done(value: Any, counter: Iterator[int], turns: int) -> Any:
    """Returns the value after checking that a loop that only counts its turns ran all of them, or none."""
    ran = next(counter)
    if ran not in (0, turns):
        raise RewireError(
            f"a loop over residual branches ran {ran} of the {count(turns, 'turn')} it had when the model was rewired, "
            "and no loop variable identifies them. Undo the wiring and rewire the model as it is now, or loop over the "
            "modules."
        )
    return value


HELPERS: dict[str, object] = {COUNT: itertools.count, KEYS: keys, PICK: pick, DONE: done}
