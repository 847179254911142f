"""Weights inside a loop: one line adds another branch in every turn, and each branch has weights of its own.

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
# A weight of a slot as an expression, from (slot, "alpha" | "beta").
Weighs = Callable[[int, str], ast.expr]


class Loop:
    """A line that adds another branch in every turn of a loop: the weights of all, of which one is picked.

    Where a variable of the loop tells the branches apart, a branch keeps its weight when others are left out or come in
    another order. Where none does, turns are counted, and all of them have to run.
    """

    def __init__(self, edits: list[Edit], place: int, weight: Weighs) -> None:
        self._weight = weight
        self._edits = sorted({edit.turn: edit for edit in edits}.values(), key=lambda edit: edit.turn or 0)
        known = {edit.variable for edit in self._edits}
        self.variable = known.pop() if len(known) == 1 else None
        self._keys = f"__unskip_turn{place}_keys__"
        self.counters = {which: f"__unskip_turn{place}_{which}__" for which in ("alpha", "beta")}

    @property
    def turns(self) -> int:
        return len(self._edits)

    def start(self, receiver: str) -> dict[str, ast.expr]:
        """The variables to set where the function begins."""
        made: dict[str, ast.expr] = {n: ast.Call(load(COUNT), [], []) for n in self.counters.values()}
        if self.variable is not None:
            known = ast.Tuple([ast.Constant(edit.key) for edit in self._edits], ast.Load())
            made[self._keys] = ast.Call(load(KEYS), [load(receiver), known], [])
        return made

    def weight(self, slot: int, which: str) -> ast.expr:
        every: list[ast.expr] = [self._weight(edit.slot, which) for edit in self._edits]
        arguments: list[ast.expr] = [ast.Tuple(every, ast.Load()), load(self.counters[which])]
        if self.variable is not None:
            arguments += [load(self._keys), load(self.variable)]
        return ast.Call(load(PICK), arguments, [])


def load(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


class Returns(ast.NodeTransformer):
    """Checks where a function returns that a loop ran all of its turns."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop

    def visit_Return(self, node: ast.Return) -> ast.Return:
        arguments = [
            node.value or ast.Constant(None),
            load(self.loop.counters["alpha"]),
            ast.Constant(self.loop.turns),
        ]
        return ast.copy_location(ast.Return(ast.Call(load(DONE), arguments, [])), node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        return node  # its returns are not those of the loop

    def visit_Lambda(self, node: ast.Lambda) -> ast.Lambda:
        return node


def keys(receiver: nn.Module, known: tuple[str | int, ...]) -> list[object]:
    """What the variable of a loop is in each turn."""
    return [receiver.get_submodule(key) if isinstance(key, str) else key for key in known]


def pick(
    weights: tuple[Number, ...], counter: Iterator[int], known: list[object] | None = None, value: object = None
) -> Number:
    """The weight of this turn of a loop."""
    turn = next(counter)
    if turn >= len(weights):
        raise RewireError(
            f"a loop over residual branches ran more than the {count(len(weights), 'turn')} it had when the model was "
            "rewired. Undo the wiring and rewire the model as it is now."
        )
    if known is None:
        return weights[turn]
    for weight, key in zip(weights, known, strict=True):
        if key is value or (isinstance(key, int) and key == value):
            return weight
    raise RewireError(
        "a loop over residual branches came to one that it did not have when the model was rewired. Undo the wiring "
        "and rewire the model as it is now."
    )


def done(value: Any, counter: Iterator[int], turns: int) -> Any:
    """What a function returns, once a loop that only counts its turns ran them all, or none."""
    ran = next(counter)
    if ran not in (0, turns):
        raise RewireError(
            f"a loop over residual branches ran {ran} of the {count(turns, 'turn')} it had when the model was rewired, "
            "and nothing tells which. Undo the wiring and rewire the model as it is now, or loop over the modules."
        )
    return value


HELPERS: dict[str, object] = {COUNT: itertools.count, KEYS: keys, PICK: pick, DONE: done}
