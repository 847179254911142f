"""Relative step size: |w' - w| / |w| of one optimizer step, by role, at a few steps of a run.

The mean over the blocks of each role: q, k, v and out of attentions; up, gate and down of MLPs. Weights that a norm
follows can grow without a change in what the model computes, and then learn ever more slowly: this number shows it,
where the learning rate does not.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from unskip.anatomy import AttentionParts, parts
from unskip.errors import UnskipError
from unskip.training._task import Task

_MOMENTS = (0.02, 0.1, 0.3, 0.6, 0.9)  # of the run


class StepSizes:
    """Measures the steps of a task's blocks. Copies of the weights are held for the length of one step."""

    def __init__(self, task: Task, steps: int, write: Callable[[dict[str, Any]], object]) -> None:
        self.task, self.write = task, write
        self.moments = {math.floor(share * steps) for share in _MOMENTS if steps and task.sample is not None}
        self.weights: dict[str, list[Tensor]] | None = None
        self.before: dict[str, list[tuple[Tensor, Tensor]]] = {}  # by role: the weight, and a copy of it

    def hold(self, step: int) -> None:
        """Called before the optimizer's step."""
        if step in self.moments:
            self.weights = self._found() if self.weights is None else self.weights
            self.before = {role: [(view, view.clone()) for view in views] for role, views in self.weights.items()}

    def compare(self, step: int) -> None:
        """Called after it."""
        if self.before:
            sizes = {role: [_relative(*pair) for pair in pairs] for role, pairs in self.before.items()}
            means = {role: statistics.fmean(each) for role, each in sizes.items()}
            finite = {role: float(f"{mean:.4g}") for role, mean in means.items() if math.isfinite(mean)}
            self.write({"step": step + 1, "relative_step": finite})
            self.before = {}

    def _found(self) -> dict[str, list[Tensor]]:
        """Views on the trained weights of all blocks, by role; none where the model cannot be traced."""
        roles: dict[str, list[Tensor]] = {}
        try:
            branches = parts(self.task.encoder or self.task.model, self.task.sample)
        except UnskipError:  # which the look at its health says
            return roles
        for part in (*branches.attentions(), *branches.mlps()):
            names = ("q", "k", "v", "out") if isinstance(part, AttentionParts) else ("up", "gate", "down")
            trained = all(parameter.requires_grad for parameter in part.parameters)  # not those of a teacher
            for role in names if trained else ():
                view = getattr(part, role)
                if view is not None:
                    roles.setdefault(role, []).append(view)
        return roles


def _relative(now: Tensor, before: Tensor) -> float:
    with torch.no_grad():
        return float((now - before).norm() / before.norm())
