"""Relative step size: |w' - w| / |w| of one optimizer step, by role, at a few steps of a run.

Roles are q, k, v and out of attention, and up, gate and down of MLPs; each number is a mean over the blocks. Weights
followed by a norm can grow without changing what the model computes, and then learn ever more slowly: this number shows
it, the learning rate does not.
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

_MOMENTS = (0.02, 0.1, 0.3, 0.6, 0.9)  # fractions of the run


class StepSizes:
    """Measures step sizes in a task's blocks. Weights are copied only for the steps that are measured."""

    def __init__(self, task: Task, steps: int, write: Callable[[dict[str, Any]], object]) -> None:
        self.task, self.write = task, write
        self.moments = {math.floor(share * steps) for share in _MOMENTS if steps and task.sample is not None}
        self.weights: dict[str, list[Tensor]] | None = None
        self.before: dict[str, list[tuple[Tensor, Tensor]]] = {}  # by role: the weight and its copy

    def hold(self, step: int) -> None:
        """Call before the optimizer's step."""
        if step in self.moments:
            self.weights = self._trained_weights() if self.weights is None else self.weights
            self.before = {role: [(view, view.clone()) for view in views] for role, views in self.weights.items()}

    def compare(self, step: int) -> None:
        """Call after the optimizer's step."""
        if self.before:
            sizes = {role: [_relative(*pair) for pair in pairs] for role, pairs in self.before.items()}
            means = {role: statistics.fmean(values) for role, values in sizes.items()}
            finite = {role: float(f"{mean:.4g}") for role, mean in means.items() if math.isfinite(mean)}
            self.write({"step": step + 1, "relative_step": finite})
            self.before = {}

    def _trained_weights(self) -> dict[str, list[Tensor]]:
        """Views on the trained weights of all blocks, by role; empty if the model cannot be traced."""
        roles: dict[str, list[Tensor]] = {}
        try:
            branches = parts(self.task.encoder or self.task.model, self.task.sample)
        except UnskipError:  # reported by the health check
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
