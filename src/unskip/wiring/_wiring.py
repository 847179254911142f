"""Wiring, the handle of a rewired model: reads, sets, steps, saves and undoes the weights of its sites.

A module with a governed site gets a subclass whose additions read `unskip_alpha<k>` and `unskip_beta<k>` from the
module: a float where all sites of a rule share the weight, a `Held` (an input of compiled graphs) where it
differs or is annealed, a parameter where it is learned. A module whose weights are all 1 is not changed.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from unskip._table import table
from unskip._words import count, some
from unskip.anatomy import PATCH, WIRING, Site, Survey, rewired_state, unwrapped
from unskip.errors import BadInput
from unskip.wiring import _caution, _dropped, _fastpath
from unskip.wiring._bind import Patch, bind, is_bound, refuse_covered, unbind
from unskip.wiring._effective_decay import band, effective_decay
from unskip.wiring._mix import Held
from unskip.wiring._rewrite import attribute
from unskip.wiring._rules import Keep
from unskip.wiring._select import Assignment, Rules, Where, assign, normalise
from unskip.wiring._shortcut import Shortcut, Weight

State = tuple[tuple[Assignment, ...], int, bool, dict[str, nn.Parameter]]
_IDENTITY = Weight(1.0, 1.0)
_NAMES = ("alpha", "beta")


class Wiring:
    """What `rewire` returns. Stored in the model: a copy of the model has its own (`Wiring.of(copy)`)."""

    def __init__(self, model: nn.Module, survey: Survey) -> None:
        self.model = model
        self.survey = survey
        self._force = False  # whether modules whose weights are all 1 are patched too
        self.verified = False
        self.at_step = 0
        self._plan: tuple[Assignment, ...] = ()
        self._rule_of: dict[int, Shortcut] = {}
        self._inputs: set[tuple[int, str]] = set()  # (site index, "alpha" or "beta") of Held weights
        self._weights = [_IDENTITY for _ in survey.sites]  # initial values at learned sites
        # Modules, not only paths: a block may be wrapped in place after rewiring.
        self._sites_at: dict[str, list[Site]] = {}
        for site in survey.sites:
            if site.problem is None:
                self._sites_at.setdefault(site.path, []).append(site)
        self._module_at = {path: model.get_submodule(path) for path in self._sites_at}
        self._slot_of = {site.index: slot for sites in self._sites_at.values() for slot, site in enumerate(sites)}

    @classmethod
    def of(cls, model: nn.Module) -> Wiring:
        """The wiring of a rewired model, also of a copy, an unpickled model, or inside torch.compile or DDP."""
        wiring = find_wiring(unwrapped(model))
        if wiring is None:
            raise BadInput(f"{type(model).__name__} is not rewired")
        return wiring

    @property
    def sites(self) -> tuple[Site, ...]:
        """All sites in execution order, projected shortcuts and long skips included."""
        return self.survey.sites

    @property
    def alphas(self) -> list[float]:
        """The current weight of the stream at each of `sites`; the mean where it is learned per channel."""
        return [self._float(site, "alpha") for site in self.sites]

    @property
    def betas(self) -> list[float]:
        """The current weight of the branch at each of `sites`."""
        return [self._float(site, "beta") for site in self.sites]

    @property
    def effective_decay(self) -> float:
        """prod_l (c_l alpha_l) ** runs_l over the governed sites: how much of the input stream reaches the output.

        c_l is the model's own factor on its stream at the time of rewiring, usually 1. Where the model adds its input
        again, a * x + b * x0, the factor a counts too.
        """
        alphas = self.alphas
        governed = [site for site in self.sites if site.index in self._rule_of]
        if not all(math.isfinite(alphas[site.index]) for site in governed):
            return math.nan  # a learned weight has diverged
        doubled = [site for site in self.sites if site.doubled and site.index not in self._rule_of]
        factors = [abs(alphas[site.index] * site.stream_factor) for site in governed]
        factors += [abs(site.branch_factor) for site in doubled]
        return effective_decay(factors, [site.runs for site in (*governed, *doubled)])

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that `Learn` added, by their names in the model."""
        learned = {}
        for site in self.sites:
            if not self._is_bound(site):
                continue
            name = attribute(self._slot_of[site.index], "alpha")
            value = self._module_at[site.path]._parameters.get(name)
            if value is not None:
                learned[f"{site.path}.{name}" if site.path else name] = value
        return learned

    def weights(self) -> dict[int, tuple[float | Tensor, float | Tensor]]:
        """The current (alpha, beta) of every site by index; a learned weight is the parameter itself."""
        return {site.index: (self._weight(site, "alpha"), self._weight(site, "beta")) for site in self.sites}

    def tensors(self) -> list[Tensor]:
        """The tensors of annealed and learned weights; all other weights are constant."""
        weights = [self._stored(site, which) for site in self.sites if self._is_bound(site) for which in _NAMES]
        weights = [w.tensor if isinstance(w, Held) and w.annealed else w for w in weights]
        return [weight for weight in weights if isinstance(weight, Tensor)]

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Context manager: runs the model without rewiring. Weights stay in the modules; only classes change."""
        for path, module in self._module_at.items():
            refuse_covered(module, path)
        bound = [(module, type(module)) for module in self._module_at.values() if is_bound(module)]
        try:
            for module, _ in bound:
                unbind(module)
            yield
        finally:
            for module, patched in bound:
                module.__class__ = patched

    def set(self, rules: Rules, where: Where = None) -> None:
        """Replaces all rules; sites that the new ones do not select are kept. A single rule without `where` applies
        to the sites that are governed now.
        """
        pairs = normalise(rules, where)
        if where is None and not isinstance(rules, Mapping) and self._plan:
            governed = [site for site in self.sites if site.index in self._rule_of]
            self._start(assign(((_any, pairs[0][1]),), governed), self._force)
        else:
            self._start(assign(pairs, self.sites), self._force)

    def _start(self, plan: tuple[Assignment, ...], force: bool) -> None:
        """Applies a plan from step 0, with warnings about cut sites. On an error the previous state is restored."""
        self._refuse_stale()
        self.refuse_replaced()
        last = {index: weight for a in plan for index, weight in a.weights(a.rule.steps or 0).items()}
        _caution.before_cut(self.model, [site for site in self.sites if last.get(site.index, _IDENTITY).alpha == 0])
        before = self._state() if find_wiring(self.model) is self else None
        try:
            self._force = force
            self._set_plan(plan, 0)
        except BaseException:
            if before is None:
                self.undo()
            else:
                self._restore(before)
            raise

    def step(self, step: int) -> None:
        """Sets annealed weights to their values at a training step. Free once the schedules have ended."""
        if not isinstance(step, Integral) or isinstance(step, bool) or step < 0:
            raise BadInput(f"step must be a whole number, 0 or more, got {step!r}")
        self._refuse_stale()
        earliest, self.at_step = min(self.at_step, int(step)), int(step)
        annealed = [a for a in self._plan if a.rule.steps is not None and earliest < a.rule.steps]
        if annealed:
            self._apply(annealed, fresh=False)

    def _state(self) -> State:
        """The state for `_restore`: plan, step, force and the learned parameter objects."""
        return self._plan, self.at_step, self._force, self.parameters

    def _restore(self, state: State) -> None:
        """Restores an earlier state with the same parameter objects, which an optimizer may reference."""
        plan, step, self._force, learned = state
        self._set_plan(plan, step)
        for full_name, parameter in learned.items():
            path, _, name = full_name.rpartition(".")
            self._module_at[path].register_parameter(name, parameter)

    def _set_plan(self, plan: tuple[Assignment, ...], step: int) -> None:
        self._plan, self.at_step = plan, step
        self._rule_of = {site.index: a.rule for a in plan for site in a.sites}
        self._inputs = {key for a in plan for key in _graph_inputs(a)}
        self._apply(plan, fresh=True)

    def _probe(self, weights: dict[int, Weight]) -> None:
        """Sets fixed weights for verification, independent of the rules."""
        for index, weight in weights.items():
            self._weights[index] = weight
        for path in self._sites_at:
            self._write(path, {i: (w, Keep()) for i, w in weights.items()})
        _fastpath.switch(self.model, {self._module_at[path] for path in self._sites_at})

    def undo(self) -> None:
        """Removes the wiring: the model has its original classes, attributes and outputs again."""
        if find_wiring(self.model) not in (None, self):
            return  # a newer wiring replaced this one
        for path, module in self._module_at.items():
            refuse_covered(module, path)
        for module in self._module_at.values():
            self._unpatch(module)
        _fastpath.switch(self.model, set())
        self._weights = [_IDENTITY for _ in self.sites]
        self._plan, self._rule_of, self._inputs = (), {}, set()
        vars(self.model).pop(WIRING, None)
        _dropped.unwatch(self.model)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able data: the rules as text and the current weights of every site."""
        return {
            "rules": [{"where": a.where, "rule": str(a.rule)} for a in self._plan],
            "step": self.at_step,
            "effective_decay": self.effective_decay,
            "verified": self.verified,
            "sites": [
                site.to_dict() | {"alpha": alpha, "beta": beta}
                for site, alpha, beta in zip(self.sites, self.alphas, self.betas, strict=True)
            ],
        }

    def __str__(self) -> str:
        header = ("site", "path", "kind", "norm", "runs", "alpha", "beta", "rule")
        rows = [
            [s.index, s.path or "(model)", s.kind, s.norm, s.runs, alpha, beta, self._rule_text(s)]
            for s, alpha, beta in zip(self.sites, self.alphas, self.betas, strict=True)
        ]
        decay = self.effective_decay
        lines = [
            f"{type(self.model).__name__}: {count(len(self._rule_of), 'governed site')} of {len(self.sites)}",
            "",
            table(header, rows),
            "",
            f"effective decay {decay:.3g}" + (f", {band(decay)}" if math.isfinite(decay) else ""),
        ]
        learned = self.parameters
        if learned:
            total = sum(p.numel() for p in learned.values())
            added = f"{count(len(learned), 'learned parameter')} added ({count(total, 'number')})"
            lines.append(f"{added}: {some([*learned])}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        rules = ", ".join(str(a.rule) for a in self._plan)
        return f"<Wiring of {type(self.model).__name__}: {rules}; {len(self._rule_of)} of {len(self.sites)} sites>"

    def _rule_text(self, site: Site) -> str:
        if site.index in self._rule_of:
            return str(self._rule_of[site.index])
        if site.projected:
            return "kept (projected)"
        return "kept (long skip)" if site.long else "kept (copy of the stream)" if site.copies else "kept"

    def _apply(self, plan: Sequence[Assignment], fresh: bool) -> None:
        """Writes weights into the modules. `fresh` also resets ungoverned sites and learned weights."""
        values = {index: (weight, a.rule) for a in plan for index, weight in a.weights(self.at_step).items()}
        if fresh:
            values = {site.index: values.get(site.index, (_IDENTITY, Keep())) for site in self.sites}
        for index, (weight, _) in values.items():
            self._weights[index] = weight
        for path in self._sites_at:
            self._write(path, values)
        _fastpath.switch(self.model, {self._module_at[path] for path in self._sites_at if not self._is_identity(path)})
        vars(self.model)[WIRING] = self
        _dropped.watch(self.model)

    def _write(self, path: str, values: dict[int, tuple[Weight, Shortcut]]) -> None:
        module, sites = self._module_at[path], self._sites_at[path]
        covered = is_bound(module) and PATCH not in vars(type(module))  # its class cannot be changed
        if self._is_identity(path) and not self._force and not covered:
            self._unpatch(module)
            return
        if not is_bound(module):
            bind(module, Patch(tuple(site.places for site in sites)))
            values = {site.index: values.get(site.index, (_IDENTITY, Keep())) for site in sites}
        for slot, site in enumerate(sites):
            if site.index in values:
                weight, rule = values[site.index]
                self._store(module, site, slot, "alpha", weight.alpha, rule)
                self._store(module, site, slot, "beta", weight.beta, rule)

    def _store(self, module: nn.Module, site: Site, slot: int, which: str, value: float, rule: Shortcut) -> None:
        name, annealed = attribute(slot, which), self.at_step < (rule.steps or 0)
        old = vars(module).get(name)
        _remove(module, name)
        if rule.learnable and which == "alpha":
            module.register_parameter(name, nn.Parameter(self._initial(site, rule, value)))
        elif (site.index, which) in self._inputs and (value != 0 or (annealed and isinstance(old, Held))):
            # 0 as a constant removes the addition, but while the rule is annealed it would give every site a graph of
            # its own. An existing tensor is filled in place, because compiled graphs read it.
            tensor = old.tensor.fill_(value) if isinstance(old, Held) else self._scalar(site, value)
            vars(module)[name] = Held(float(value), tensor, annealed)
        else:
            setattr(module, name, float(value))

    def _scalar(self, site: Site, value: float) -> Tensor:
        like = self._reference(site)
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        with torch.inference_mode(False):  # filled in place later
            return torch.full((), value, dtype=dtype, device=like.device)

    def _reference(self, site: Site) -> Tensor:
        """A parameter of the site's block, for device and dtype."""
        parameters = self.model.get_submodule(site.block).parameters()
        return next((p for p in parameters if p.is_floating_point()), torch.empty(()))

    def _initial(self, site: Site, rule: Shortcut, value: float) -> Tensor:
        like = self._reference(site)
        shape: tuple[int, ...] = ()
        if rule.per == "channel":
            shape = (site.features,) + (1,) * (site.rank - 2 if site.axis == 1 else 0)
        with torch.inference_mode(False):  # trained later
            return torch.full(shape, value, dtype=like.dtype, device=like.device)

    def _is_identity(self, path: str) -> bool:
        """Whether all weights of a module are fixed at 1."""
        for site in self._sites_at[path]:
            rule = self._rule_of.get(site.index, Keep())
            annealed = rule.steps is not None and self.at_step < rule.steps
            if self._weights[site.index] != _IDENTITY or annealed or rule.learnable:
                return False
        return True

    def _unpatch(self, module: nn.Module) -> None:
        if not is_bound(module):
            return
        for slot in range(len(type(module)._unskip_patch.slots)):  # type: ignore[attr-defined]
            for which in _NAMES:
                _remove(module, attribute(slot, which))
        unbind(module)

    def _weight(self, site: Site, which: str) -> float | Tensor:
        if not self._is_bound(site):
            return 1.0
        value = self._stored(site, which)
        return value if isinstance(value, Tensor) else value.number if isinstance(value, Held) else float(value)

    def _stored(self, site: Site, which: str) -> Any:
        return getattr(self._module_at[site.path], attribute(self._slot_of[site.index], which))

    def _float(self, site: Site, which: str) -> float:
        value = self._weight(site, which)
        if not isinstance(value, Tensor):
            return float(value)
        return float(self._weights[site.index].alpha if value.device.type == "meta" else value.detach().double().mean())

    def _is_bound(self, site: Site) -> bool:
        return site.problem is None and is_bound(self._module_at[site.path])

    def refuse_replaced(self) -> None:
        """Raises BadInput if a rewired module is no longer part of the model."""
        present = {id(module) for module in self.model.modules()}
        for path, module in self._module_at.items():
            if id(module) not in present:
                raise BadInput(
                    f"{path} was removed or replaced after {type(self.model).__name__} was rewired, so its weights "
                    "have no effect. Undo the wiring and rewire again"
                )

    def _refuse_stale(self) -> None:
        if find_wiring(self.model) not in (None, self):
            raise BadInput("this wiring was replaced by a newer one of the same model; use Wiring.of(model)")


def find_wiring(model: nn.Module) -> Wiring | None:
    """The wiring of a rewired model, or None for a plain one."""
    state = rewired_state(model)
    assert state is None or isinstance(state, Wiring)
    return state


def _any(site: Site) -> bool:  # saved folders have its name
    return True


def _graph_inputs(plan: Assignment) -> Iterator[tuple[int, str]]:
    """The weights that change over training or differ between sites, by site index and name."""
    steps = plan.rule.steps
    rows = [plan.weights(step) for step in ((0,) if steps is None else (0, 1, steps // 2, steps))]
    for which in _NAMES:
        values = {getattr(weight, which) for row in rows for weight in row.values()}
        if len(values - {0}) > 1:
            yield from ((index, which) for index in rows[0])


def _remove(module: nn.Module, name: str) -> None:
    for store in (module._parameters, vars(module)):
        store.pop(name, None)
