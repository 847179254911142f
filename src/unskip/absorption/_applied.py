"""What `apply` did to a model, and the way back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from unskip._table import table
from unskip.anatomy import MlpParts, Site
from unskip.wiring import Wiring


@dataclass(frozen=True)
class Cost:
    """Of the whole model: parameters, their bytes, and the FLOPs a token takes in its MLPs and their skips."""

    parameters: int
    bytes: int
    flops: int


class Applied:
    """What was rewritten. `undo()` puts weights and skips back."""

    def __init__(self, model: nn.Module, mode: str) -> None:
        self.model = model
        self.mode = mode
        self.done: dict[int, str] = {}  # by site index: what was done
        self.left: dict[int, str] = {}  # by site index: why nothing was
        self.sites: dict[int, Site] = {}
        self.difference: float | None = None  # |outputs after - before| / |before| on the example
        self.before: Cost | None = None
        self.after: Cost | None = None
        self.wiring: Wiring | None = None
        self.back: list[Callable[[], None]] = []
        self.grown: dict[int, int] = {}  # by site index: units more

    def undo(self) -> None:
        """The model as it was. Undoing again does nothing."""
        if self.wiring is not None:
            self.wiring.undo()
            self.wiring = None
        while self.back:
            self.back.pop()()

    def to_dict(self) -> dict[str, Any]:
        return {
            "mode": self.mode,
            "done": {self.sites[index].path: what for index, what in self.done.items()},
            "left": {self.sites[index].path: why for index, why in self.left.items()},
            "difference": self.difference,
            "before": None if self.before is None else vars(self.before),
            "after": None if self.after is None else vars(self.after),
        }

    def __str__(self) -> str:
        lines: list[list[object]] = []
        for index, site in sorted(self.sites.items()):
            what = self.done.get(index) or f"left: {self.left[index]}"
            lines.append([index, site.path or "(model)", what])
        head = f"{type(self.model).__name__}: {len(self.done)} of {len(self.sites)} MLP sites rewritten ({self.mode})"
        out = [head, "", table(("site", "path", "what"), lines)]
        if self.before is not None and self.after is not None and self.difference is not None:
            out += ["", f"relative difference of the outputs: {self.difference:.3g}"]
            for name in ("parameters", "bytes", "flops"):
                out.append(f"{name}: {getattr(self.before, name):,} > {getattr(self.after, name):,}")
        return "\n".join(out)


def cost(model: nn.Module, mlps: list[MlpParts], grown: Mapping[int, int]) -> Cost:
    """`grown`: by the index of each rewritten site, how many units more it has."""
    parameters = list(model.parameters())
    flops = 0
    for part in mlps:
        units = sum(w.numel() for w in (part.up, part.gate, part.down) if w is not None)
        more = grown.get(part.site.index)  # None where the skip is still there
        units += (more or 0) * (part.up.shape[1] * (1 if part.gate is None else 2) + len(part.down))
        flops += 2 * units + (len(part.down) if more is None else 0)
    return Cost(sum(p.numel() for p in parameters), sum(p.numel() * p.element_size() for p in parameters), flops)
