"""Rewrites the MLP sites of a model without their skips, and takes it back.

    exact         sites whose verdict is possible: the same weights with some rows turned around
    widen         sites without a norm on the branch: exact, with more units
    approximate   any site, norms included: the same width, fitted to what the site reads

The skip itself is cut by `rewire`, so the model's own code runs with alpha = 0 there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from unskip._modes import evaluating
from unskip._table import table
from unskip._words import nearest
from unskip.absorption._approximate import approximate
from unskip.absorption._block import Block
from unskip.absorption._decide import absorb
from unskip.absorption._from import NoBlock, opened, read_block, streams
from unskip.absorption._widen import widen
from unskip.anatomy import Example, MlpParts, Site, example_for
from unskip.errors import BadInput, RewireError, UnskipError
from unskip.wiring import Cut, Wiring, find_wiring, rewire

Mode = Literal["exact", "widen", "approximate"]
_CHANGED = 1e-2  # of the outputs: above the rounding of a deep model, far below what another function differs by
_CHANGED_HALF = 1e-1
BEHIND = "its MLP reads a norm, so no exact replacement exists; mode='approximate' can be used on data"


@dataclass(frozen=True)
class Cost:
    """Of the whole model: parameters, their bytes, and the FLOPs a token takes in its MLPs and their skips."""

    parameters: int
    bytes: int
    flops: int


class Applied:
    """What was rewritten. `undo()` puts weights and skips back."""

    def __init__(self, model: nn.Module, mode: Mode) -> None:
        self.model = model
        self.mode = mode
        self.done: dict[int, str] = {}  # by site index: what was done
        self.left: dict[int, str] = {}  # by site index: why nothing was
        self.sites: dict[int, Site] = {}
        self.difference: float | None = None  # |outputs after - before| / |before| on the example
        self.before: Cost | None = None
        self.after: Cost | None = None
        self.wiring: Wiring | None = None
        self._back: list[Callable[[], None]] = []
        self._grown: dict[int, int] = {}  # by site index: units more

    def undo(self) -> None:
        """The model as it was. Undoing again does nothing."""
        if self.wiring is not None:
            self.wiring.undo()
            self.wiring = None
        while self._back:
            self._back.pop()()

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


def apply(
    model: nn.Module,
    mode: Mode = "exact",
    example: object = None,
    data: object = None,
    where: Callable[[Site], bool] | None = None,
) -> Applied:
    """Rewrites the MLP sites that it may, in place, and reports. `data` is a batch; mode="approximate" needs it.

    If anything fails the model is left as it was.
    """
    if mode not in get_args(Mode):
        raise BadInput(f"apply: no mode {mode!r}{nearest(str(mode), get_args(Mode))}; it can be {get_args(Mode)}")
    if mode == "approximate" and data is None:
        raise BadInput("apply: mode='approximate' fits to inputs; give data=, a batch that the model takes")
    if find_wiring(model) is not None:
        raise BadInput(f"apply: {type(model).__name__} is rewired already; undo its wiring first")
    given = example_for(model, data if data is not None else example)
    out = Applied(model, mode)
    before = _outputs(model, given)
    laid = opened(model, given)
    read = streams(model, given) if mode == "approximate" else {}
    mlps = list(laid.parts.mlps())
    used = Counter(id(weight) for part in mlps for weight in {*part.parameters, *part.biases})
    places = [(module, name, id(value)) for module in model.modules() for name, value in module._parameters.items()]
    held = Counter(place for _, _, place in places)  # an embedding or a head may hold a weight as well
    tied = {place for place in used if used[place] > 1 or held[place] > 1}
    out.before = _cost(model, mlps, {})
    owners = {place: (module, name) for module, name, place in places}
    try:
        with torch.no_grad():
            for part in mlps:
                site = part.site
                if where is not None and not where(site):
                    continue
                out.sites[site.index] = site
                block = read_block(laid, part)
                why = block.reason if isinstance(block, NoBlock) else None
                if isinstance(block, Block):
                    why = _rewrite(part, block, mode, read.get(site.index), tied, owners, out)
                if why:
                    out.left[site.index] = why
        if out.done:
            picked = set(out.done)
            out.wiring = rewire(model, Cut(), given, where=lambda site: site.index in picked)
        after = _outputs(model, given)
        gap = sum(float((a - b).square().sum()) for a, b in zip(after, before, strict=True))
        size = sum(float(b.square().sum()) for b in before)
        out.difference = (gap / size) ** 0.5 if size else 0.0
        if mode != "approximate" and out.difference > _most(model):
            raise RewireError(
                f"apply: the rewritten model's outputs differ by {out.difference:.2g} of their size on the example, so "
                "some branch does what its weights do not show; nothing was changed. where= leaves sites out"
            )
        out.after = _cost(model, mlps, out._grown)
    except BaseException:
        out.undo()
        raise
    return out


def _outputs(model: nn.Module, example: Example) -> list[Tensor]:
    with evaluating(model), torch.no_grad():
        leaves = tree_leaves(example.copy().run(model))
    return [leaf.detach().double() for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _most(model: nn.Module) -> float:
    """What rounding may change in the outputs, relative."""
    half = any(weight.is_floating_point() and weight.element_size() < 4 for weight in model.parameters())
    return _CHANGED_HALF if half else _CHANGED


Owners = dict[int, tuple[nn.Module, str]]


def _rewrite(
    part: MlpParts, block: Block, mode: Mode, stream: Tensor | None, tied: set[int], owners: Owners, out: Applied
) -> str | None:
    """Writes the replacement of one site into the model; why not, where it cannot."""
    if part.site.problem is not None:
        return part.site.problem
    if part.site.runs > 1 or any(id(weight) in tied for weight in (*part.parameters, *part.biases)):
        return "its weights are tied to those of another run, site or module"
    behind = {"pre", "out"} & block.norms.keys()
    if behind and mode != "approximate":
        return BEHIND
    factor = part.beta * (block.down.new_ones(len(block.down)) if part.scale is None else part.scale.flatten())
    if not bool((factor != 0).all()):
        return "its branch is scaled by zero"
    try:
        if mode == "exact":
            verdict = absorb(block)
            if verdict.status != "possible":
                return verdict.reason
            made, said = verdict.replacement(), f"exact, relative error {verdict.error:.2g}"
        elif mode == "widen":
            wide = widen(block)
            made, said = wide.block, f"{wide.extra} more units"
        else:
            if stream is None:
                return "what it reads could not be seen"
            near = approximate(block.bare() if "post" in block.norms else block, stream)
            made, said = near.block, f"{near.step}, error {near.error:.3g}"
    except UnskipError as error:
        return str(error)
    down = made.down / factor.to(made.down)[:, None]
    const = None if made.down_bias is None else made.down_bias / factor.to(made.down_bias)
    why = _write(part, made, down, const, owners, out)
    if why is None:
        out.done[part.site.index] = said
        out._grown[part.site.index] = made.width - block.width
    return why


def _write(part: MlpParts, made: Block, down: Tensor, const: Tensor | None, owners: Owners, out: Applied) -> str | None:
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
                out._back.append(lambda old=old, kept=kept: _restore(old, kept))  # type: ignore[misc]
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
        out._back.append(
            lambda layer=layer, name=name, old=old_parameter, sizes=sizes: _shrink(layer, name, old, sizes)  # type: ignore[misc]
        )
        setattr(layer, name, nn.Parameter(new.to(old_parameter), requires_grad=old_parameter.requires_grad))
        layer.out_features, layer.in_features = layer.weight.shape
    return None


def _shrink(layer: nn.Linear, name: str, old: nn.Parameter, sizes: tuple[int, int]) -> None:
    setattr(layer, name, old)
    layer.in_features, layer.out_features = sizes


def _cost(model: nn.Module, mlps: list[MlpParts], grown: Mapping[int, int]) -> Cost:
    """`grown`: by the index of each rewritten site, how many units more it has."""
    parameters = list(model.parameters())
    flops = 0
    for part in mlps:
        units = sum(w.numel() for w in (part.up, part.gate, part.down) if w is not None)
        more = grown.get(part.site.index)  # None where the skip is still there
        units += (more or 0) * (part.up.shape[1] * (1 if part.gate is None else 2) + len(part.down))
        flops += 2 * units + (len(part.down) if more is None else 0)
    return Cost(sum(p.numel() for p in parameters), sum(p.numel() * p.element_size() for p in parameters), flops)
