"""Checks a rewired model on the example, against an oracle that does not rewrite source.

The oracle runs the original model and replaces each residual addition by a * x + b * f when torch dispatches it. The
rewired model with the same weights must give the same output in every module. The weights differ between sites, so that
swapped sites are detected.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from unskip._modes import quiet
from unskip.anatomy import Example, Hop, Place, Site, Unreachable, calls, is_addition, locate
from unskip.wiring._shortcut import Weight

Key = tuple[str, tuple[Hop, ...], int | None]  # path, expressions, turn of a loop
# Per module call: its class, the sum and the absolute sum of its output, and their tolerance.
Print = list[tuple[str, float, float, float]]


def probe(sites: Sequence[Site]) -> list[Weight]:
    """Weights for the check: all different, none 0 or 1."""
    return [Weight(0.35 + 0.5 * (i * 0.618 % 1), 0.45 + 0.5 * (i * 0.414 % 1)) for i in range(len(sites))]


def can_verify(model: nn.Module, example: Example) -> bool:
    """Whether there are values to compare: none of the tensors is on the meta device."""
    tensors = [*model.parameters(), *model.buffers(), *tree_leaves(example.values)]
    return not any(isinstance(tensor, Tensor) and tensor.device.type == "meta" for tensor in tensors)


def fingerprint(model: nn.Module, example: Example, training: bool, oracle: TorchDispatchMode | None = None) -> Print:
    """Runs the model and summarises the output of every module that has submodules."""
    prints: Print = []
    example = example.copy()

    def hook(module: nn.Module, arguments: object, output: object) -> None:
        if not module._modules and module is not model:
            return
        inputs = sum(_size(leaf) for leaf in _floats(arguments))
        for leaf in _floats(output):
            values = torch.view_as_real(leaf) if leaf.is_complex() else leaf
            total, size = float(values.sum(dtype=torch.float64)), _size(leaf)
            eps = torch.finfo(values.dtype).eps
            # Allow rounding: to a narrow dtype at every site, and where all but rounding cancels, as in pool(x) - x.
            slack = max(1e-3, 8 * eps) * (size + 1e-12) + 4 * eps * inputs
            prints.append((type(module).__name__, total, size, slack))

    handle = register_module_forward_hook(hook)
    try:
        with quiet(model, training):
            if oracle is None:
                example.run(model)
            else:
                with oracle:
                    example.run(model)
    finally:
        handle.remove()
    return prints


def _floats(tree: object) -> list[Tensor]:
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    return [leaf for leaf in tensors if leaf.is_floating_point() or leaf.is_complex()]


def _size(tensor: Tensor) -> float:
    """The sum of absolute values."""
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return float(torch.linalg.vector_norm(values, 1, dtype=torch.float64))


def mismatch(expected: Print, got: Print) -> str | None:
    """The first module whose output differs, as text; None if there is none."""
    if len(expected) != len(got):
        return f"{len(got)} module outputs instead of {len(expected)}"
    for i, ((name, total, size, slack), (name2, total2, size2, _)) in enumerate(zip(expected, got, strict=True)):
        pairs = ((total, total2), (size, size2))
        same = all(math.isclose(a, b, abs_tol=slack) or (math.isnan(a) and math.isnan(b)) for a, b in pairs)
        if name != name2 or not same:
            return f"output {i}, of {name}: sum {total2:.6g} instead of {total:.6g}"
    return None


class Oracle(TorchDispatchMode):
    """Replaces the additions of the sites by their weighted form while the original model runs."""

    supports_higher_order_operators = True

    def __init__(self, modules: dict[int, str], sites: Sequence[Site], weights: Sequence[Weight]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.modules = modules  # id of a module -> its path
        self.table: dict[Key, tuple[Place, Weight]] = {
            (site.path, place.hops, place.turn): (place, weight)
            for site, weight in zip(sites, weights, strict=True)
            for place in site.places
        }
        # Positions of the additions, to skip other frames early.
        self.columns = {place.hops[-1].position[2:] for site in sites for place in site.places}
        self.ups = sorted({len(place.hops) - 1 for site in sites for place in site.places} | {0})
        self.met: set[Key] = set()
        self.runs: Counter[object] = Counter()  # of each line in each call of its method
        self.alive: list[object] = []  # frames, so that no id is reused

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if is_addition(func) and len(args) > 1 and all(isinstance(a, Tensor) for a in args[:2]):
            match = self._match()
            if match is not None:
                return self._mix(match, func, args[0], args[1])
        return func(*args, **(kwargs or {}))

    def _match(self) -> tuple[Place, Weight] | None:
        frames = tuple(calls())
        if frames[0].position[2:] not in self.columns:
            return None
        self.alive.append(frames)
        for up in self.ups:
            try:
                located = locate(frames, up)
            except Unreachable:
                return None
            path, line = self.modules.get(id(located.module), "?"), (located.call, located.hops)
            for turn in (None, self.runs[line]):
                key = (path, located.hops, turn)
                if key in self.table:
                    self.runs[line] += 1
                    self.met.add(key)
                    return self.table[key]
        return None

    @staticmethod
    def _mix(match: tuple[Place, Weight], func: Any, left: Tensor, right: Tensor) -> Tensor:
        place, weight = match
        alpha = 1.0 if place.role == "more" else weight.alpha
        factors = (alpha, weight.beta) if place.side == "left" else (weight.beta, alpha)
        mixed = left * factors[0] + right * factors[1]
        return left.copy_(mixed) if func._schema.name.endswith("_") else mixed
