"""Health checks of a run; each problem has a named warning.

non-finite-loss       the loss is NaN or infinite
exploding-features    the norm of the last block's features is above 1e4 and above 100 times that of the first check
collapsed-features    the features of different samples have an effective rank close to one
flat-loss             after a fifth of the run or later, the loss has been that of a constant prediction for a tenth of
                      the run (a loss that starts above that value only passes it)
uniform-attention     most attention layers are near-uniform
collapsed-tokens      rank collapse: in half of the blocks or more, the tokens of a sample are nearly equal

A task can add its own, such as for a teacher that has the same output for every image.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from unskip._warn import warn as say
from unskip.errors import UnskipError
from unskip.measures import Measurement, measure
from unskip.training._folder import RunFolder
from unskip.training._task import Schedule, Task

COLLAPSE = (
    "If skips are cut: start from init skipless:shaped,position_code=orthogonal (in a run without weights), cut only "
    "the skips of MLPs (where mlp), or decay them (shortcut decay:product=0.001). Otherwise lower the learning rate"
)  # advice on rank collapse; a run with weights refuses init


class Watch:
    """Checks the health of a run. Its state is part of checkpoints."""

    def __init__(self, task: Task, schedule: Schedule, folder: RunFolder, first: bool = True) -> None:
        self.task, self.schedule, self.folder, self.first = task, schedule, folder, first
        self.first_norm: float | None = None
        self.looked = 0  # the step of the last checked loss
        self.flat_from: int | None = None  # the step since which the loss has been the baseline
        self.raised: list[str] = []

    def state(self) -> dict[str, Any]:
        loss = {"looked": self.looked, "flat_from": self.flat_from}
        return {"first_norm": self.first_norm, "raised": [*self.raised], **loss}

    def load(self, state: dict[str, Any]) -> None:
        self.first_norm, self.raised = state["first_norm"], list(state["raised"])
        self.looked, self.flat_from = state["looked"], state["flat_from"]

    def loss(self, done: int, value: float) -> None:
        """Checks a logged loss, which is a mean over the steps since the last one."""
        baseline, before, self.looked = self.task.baseline_loss, self.looked, done
        if baseline is None:
            return
        if abs(value - baseline) >= 0.01 * baseline:
            self.flat_from = None
            return
        self.flat_from = before if self.flat_from is None else self.flat_from
        if done >= self.schedule.steps / 5 and done - self.flat_from >= self.schedule.steps / 10:
            text = f"at step {done} the loss is {value:.4g}, the loss of a constant prediction ({baseline:.4g})"
            self.warn(done, "flat-loss", text)

    def row(self, done: int, values: dict[str, Any]) -> None:
        """Issues the task's own warnings about a logged row or an evaluation."""
        if self.task.warnings is not None:
            for name, text in self.task.warnings(values, done / self.schedule.steps):
                self.warn(done, name, f"at step {done} {text}")

    def look(self, done: int) -> None:
        """Checks features and attention on a few samples."""
        if self.task.sample is None:
            return
        try:
            with torch.no_grad():
                measurement = measure(self.task.encoder or self.task.model, self.task.sample, jacobians="off")
        except UnskipError as error:
            self.warn(done, "not-measured", f"the model's health could not be measured: {error}")
            return
        self._features(done, measurement)
        self._attention(done, measurement)
        self._tokens(done, measurement)

    def _features(self, done: int, measurement: Measurement) -> None:
        last = measurement.blocks[-1]
        if self.first_norm is None:
            self.first_norm = last.norm
        if last.norm > max(1e4, 100 * self.first_norm):
            text = f"features have norm {last.norm:.3g}, at first {self.first_norm:.3g}"
            self.warn(done, "exploding-features", text)
        if last.pooled_rank is not None and measurement.samples >= 4 and last.pooled_rank < 1.2:
            text = f"the features of {measurement.samples} samples have effective rank {last.pooled_rank:.2f}"
            self.warn(done, "collapsed-features", text)

    def _attention(self, done: int, measurement: Measurement) -> None:
        entropies = [row.entropy for row in measurement.sites if row.entropy is not None]
        largest = math.log(measurement.tokens) if measurement.tokens > 1 else math.inf
        uniform = [heads for heads in entropies if min(heads) > 0.999 * largest]
        if entropies and len(uniform) > len(entropies) / 2:
            text = f"{len(uniform)} of {len(entropies)} attention layers are near-uniform"
            self.warn(done, "uniform-attention", text)

    def _tokens(self, done: int, measurement: Measurement) -> None:
        """Logs token cosine and self-attention by block, and warns of rank collapse."""
        attention = [row.self_attention for row in measurement.sites if row.self_attention is not None]
        cosines = [row.token_cosine for row in measurement.blocks]
        means = [sum(heads) / len(heads) for heads in attention]
        if self.first:
            row = {"step": done, "token_cosine": _rounded(cosines), "self_attention": _rounded(means)}
            self.folder.append("health.jsonl", row)
        collapsed = [block.index for block in measurement.blocks if (block.token_cosine or 0) > 0.99]
        if len(collapsed) >= max(1, len(cosines) / 2):
            text = f"rank collapse: tokens of a sample are nearly equal (mean cosine above 0.99) in blocks {collapsed}"
            self.warn(done, "collapsed-tokens", f"{text}. {COLLAPSE}")

    def warn(self, done: int, name: str, text: str) -> None:
        """Logs a named warning, and issues it once; only on the first process."""
        if not self.first:
            return
        self.folder.append("warnings.jsonl", {"step": done, "warning": name, "text": text})
        if name not in self.raised:
            self.raised.append(name)
            say(f"{name}: {text}")


def _rounded(values: Sequence[float | None]) -> list[float | None]:
    return [None if value is None or not math.isfinite(value) else float(f"{value:.4g}") for value in values]
