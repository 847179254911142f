"""The report of `apply`, and how replacement weights are written into a model and restored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from unskip._table import table
from unskip.absorption._block import Block
from unskip.anatomy import MlpParts, Site
from unskip.wiring import Wiring

Owners = dict[int, tuple[nn.Module, str]]  # id of a parameter: (module, name in it)


class Applied:
    """The rewritten sites of a model. `undo()` restores weights and skips."""

    def __init__(self, model: nn.Module, mode: str) -> None:
        self.model = model
        self.mode = mode
        self.done: dict[int, str] = {}  # site index: how it was rewritten
        self.left: dict[int, str] = {}  # site index: why it was not
        self.sites: dict[int, Site] = {}
        self.difference: float | None = None  # |outputs after - before| / |before| on the example
        self.parameters = [sum(value.numel() for value in model.parameters())]  # before, after
        self.wiring: Wiring | None = None
        self._undo_steps: list[Callable[[], None]] = []

    def undo(self) -> None:
        """Restores the model. A second call has no effect."""
        if self.wiring is not None:
            self.wiring.undo()
            self.wiring = None
        while self._undo_steps:
            self._undo_steps.pop()()

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "mode": self.mode,
            "done": self._listed(self.done),
            "left": self._listed(self.left),
            "difference": self.difference,
            "parameters": self.parameters,
        }

    def _listed(self, texts: dict[int, str]) -> list[dict[str, Any]]:  # a list, since sites may share a path
        return [{"site": index, "path": self.sites[index].path, "what": text} for index, text in texts.items()]

    def __str__(self) -> str:
        rows: list[list[object]] = []
        for index, site in sorted(self.sites.items()):
            text = self.done.get(index) or f"left: {self.left[index]}"
            rows.append([index, site.path or "(model)", text])
        head = f"{type(self.model).__name__}: {len(self.done)} of {len(self.sites)} MLP sites rewritten ({self.mode})"
        lines = [head, "", table(("site", "path", "what"), rows)]
        if self.difference is not None:
            lines += ["", f"relative difference of the outputs: {self.difference:.3g}"]
            lines += [f"parameters: {' > '.join(f'{count:,}' for count in self.parameters)}"]
        return "\n".join(lines)


def write(part: MlpParts, block: Block, owners: Owners, out: Applied) -> str | None:
    """Writes a replacement into the weights of its site, or returns the reason why it cannot.

    W_down is divided by the scale of the branch. The undo steps are appended to `out`.
    """
    factor = part.beta * (block.down.new_ones(len(block.down)) if part.scale is None else part.scale.flatten())
    down = block.down / factor.to(block.down)[:, None]
    const = None if block.down_bias is None else block.down_bias / factor.to(block.down_bias)
    pairs = [(part.up, block.up), (part.down, down), (part.up_bias, block.up_bias), (part.down_bias, const)]
    if part.gate is not None:
        pairs += [(part.gate, block.gate), (part.gate_bias, block.gate_bias)]
    for old, new in pairs:
        if old is None and new is not None and bool(new.any()):
            return "the replacement needs a bias that the model's layers do not have"
    if block.width == len(part.up):
        for old, new in pairs:
            if old is not None:
                saved = old.detach().clone()
                out._undo_steps.append(lambda old=old, saved=saved: _restore(old, saved))  # type: ignore[misc]
                old.copy_(torch.zeros_like(old) if new is None else new.to(old))
        return None
    return _grow(part, pairs, owners, out)


def _restore(old: Tensor, saved: Tensor) -> None:
    with torch.no_grad():
        old.copy_(saved)


def _grow(part: MlpParts, pairs: list[tuple[Tensor | None, Tensor | None]], owners: Owners, out: Applied) -> str | None:
    """Gives plain nn.Linear layers new parameters of the greater width."""
    parameters = [*part.parameters, *part.biases]
    plan: list[tuple[nn.Linear, str, nn.Parameter, Tensor]] = []
    for old, new in pairs:
        if old is None or new is None:
            continue
        match = [p for p in parameters if p.data_ptr() == old.data_ptr() and p.shape == old.shape]
        owner = owners.get(id(match[0])) if match else None
        if owner is None or not isinstance(owner[0], nn.Linear):
            return "its weights are not in plain nn.Linear layers, so they cannot be widened"
        plan.append((owner[0], owner[1], match[0], new))
    for layer, name, old_parameter, new in plan:
        sizes = layer.in_features, layer.out_features
        out._undo_steps.append(
            lambda layer=layer, name=name, old=old_parameter, sizes=sizes: _shrink(layer, name, old, sizes)  # type: ignore[misc]
        )
        setattr(layer, name, nn.Parameter(new.to(old_parameter), requires_grad=old_parameter.requires_grad))
        layer.out_features, layer.in_features = layer.weight.shape
    return None


def _shrink(layer: nn.Linear, name: str, old: nn.Parameter, sizes: tuple[int, int]) -> None:
    setattr(layer, name, old)
    layer.in_features, layer.out_features = sizes
