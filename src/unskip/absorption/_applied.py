"""What `apply` did to a model, weights that are put into its parameters, and the way back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from unskip._table import table
from unskip.absorption._block import Block
from unskip.anatomy import MlpParts, Site
from unskip.wiring import Wiring

Owners = dict[int, tuple[nn.Module, str]]  # by the id of a parameter: the module that holds it, and its name


class Applied:
    """What was rewritten. `undo()` puts weights and skips back."""

    def __init__(self, model: nn.Module, mode: str) -> None:
        self.model = model
        self.mode = mode
        self.done: dict[int, str] = {}  # by site index: what was done
        self.left: dict[int, str] = {}  # by site index: why nothing was
        self.sites: dict[int, Site] = {}
        self.difference: float | None = None  # |outputs after - before| / |before| on the example
        self.parameters = [sum(value.numel() for value in model.parameters())]  # before, and after
        self.wiring: Wiring | None = None
        self.back: list[Callable[[], None]] = []

    def undo(self) -> None:
        """The model as it was. Undoing again does nothing."""
        if self.wiring is not None:
            self.wiring.undo()
            self.wiring = None
        while self.back:
            self.back.pop()()

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "mode": self.mode,
            "done": self._listed(self.done),
            "left": self._listed(self.left),
            "difference": self.difference,
            "parameters": self.parameters,
        }

    def _listed(self, texts: dict[int, str]) -> list[dict[str, Any]]:  # several sites may share a path
        return [{"site": index, "path": self.sites[index].path, "what": text} for index, text in texts.items()]

    def __str__(self) -> str:
        lines: list[list[object]] = []
        for index, site in sorted(self.sites.items()):
            what = self.done.get(index) or f"left: {self.left[index]}"
            lines.append([index, site.path or "(model)", what])
        head = f"{type(self.model).__name__}: {len(self.done)} of {len(self.sites)} MLP sites rewritten ({self.mode})"
        out = [head, "", table(("site", "path", "what"), lines)]
        if self.difference is not None:
            out += ["", f"relative difference of the outputs: {self.difference:.3g}"]
            out += [f"parameters: {' > '.join(f'{count:,}' for count in self.parameters)}"]
        return "\n".join(out)


def write(part: MlpParts, made: Block, owners: Owners, out: Applied) -> str | None:
    """Writes a replacement into the weights of its site, the branch's scale taken out again; why not, where it cannot.

    What is needed to undo it is kept in `out`.
    """
    factor = part.beta * (made.down.new_ones(len(made.down)) if part.scale is None else part.scale.flatten())
    down = made.down / factor.to(made.down)[:, None]
    const = None if made.down_bias is None else made.down_bias / factor.to(made.down_bias)
    pairs = [(part.up, made.up), (part.down, down), (part.up_bias, made.up_bias), (part.down_bias, const)]
    if part.gate is not None:
        pairs += [(part.gate, made.gate), (part.gate_bias, made.gate_bias)]
    for old, new in pairs:
        if old is None and new is not None and bool(new.any()):
            return "the replacement needs a bias that the model has no place for"
    if made.width == len(part.up):
        for old, new in pairs:
            if old is not None:
                kept = old.detach().clone()
                out.back.append(lambda old=old, kept=kept: _restore(old, kept))  # type: ignore[misc]
                old.copy_(torch.zeros_like(old) if new is None else new.to(old))
        return None
    return _grow(part, pairs, owners, out)


def _restore(old: Tensor, kept: Tensor) -> None:
    with torch.no_grad():
        old.copy_(kept)


def _grow(part: MlpParts, pairs: list[tuple[Tensor | None, Tensor | None]], owners: Owners, out: Applied) -> str | None:
    """Gives plain nn.Linear layers new parameters of the greater width."""
    held = [*part.parameters, *part.biases]
    plan: list[tuple[nn.Linear, str, nn.Parameter, Tensor]] = []
    for old, new in pairs:
        if old is None or new is None:
            continue
        match = [p for p in held if p.data_ptr() == old.data_ptr() and p.shape == old.shape]
        owner = owners.get(id(match[0])) if match else None
        if owner is None or not isinstance(owner[0], nn.Linear):
            return "its weights are not those of plain nn.Linear layers, so they cannot grow"
        plan.append((owner[0], owner[1], match[0], new))
    for layer, name, old_parameter, new in plan:
        sizes = layer.in_features, layer.out_features
        out.back.append(
            lambda layer=layer, name=name, old=old_parameter, sizes=sizes: _shrink(layer, name, old, sizes)  # type: ignore[misc]
        )
        setattr(layer, name, nn.Parameter(new.to(old_parameter), requires_grad=old_parameter.requires_grad))
        layer.out_features, layer.in_features = layer.weight.shape
    return None


def _shrink(layer: nn.Linear, name: str, old: nn.Parameter, sizes: tuple[int, int]) -> None:
    setattr(layer, name, old)
    layer.in_features, layer.out_features = sizes
