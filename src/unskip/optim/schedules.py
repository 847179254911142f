"""Learning-rate and weight-decay schedules as plain functions of the step.

Each returns a factor (or a value, for `cosine`) and keeps no state, so a run resumes by knowing its step:

    lr(t) = lr * warmup_cosine(t, total=10_000, warmup=500)

Steps count from 0: the first step of a warm-up over w steps has the factor 1 / w, and step w - 1 has 1. After the last
step the factor stays where it is. `functools.partial` makes one of them the argument of torch's LambdaLR.
"""

from __future__ import annotations

import math

import torch

from unskip.errors import BadInput


def constant(step: int, *, warmup: int = 0) -> float:
    """1, after a linear warm-up."""
    return _warm(step, warmup)


def warmup_cosine(step: int, *, total: int, warmup: int = 0, floor: float = 0.0) -> float:
    """A linear warm-up, then half a cosine from 1 down to `floor` at the last step."""
    step = _within("warmup_cosine", step, total)
    warm = _warm(step, warmup)
    if step < warmup:
        return warm
    return cosine(step - warmup, total=total - warmup, start=1.0, end=floor)


def warmup_linear(step: int, *, total: int, warmup: int = 0, floor: float = 0.0) -> float:
    """A linear warm-up, then a straight line from 1 down to `floor` at the last step."""
    step = _within("warmup_linear", step, total)
    warm = _warm(step, warmup)
    if step < warmup:
        return warm
    return 1 + (floor - 1) * _progress(step - warmup, total - warmup)


def warmup_stable_decay(step: int, *, total: int, warmup: int = 0, decay: int, floor: float = 0.0) -> float:
    """A linear warm-up, then 1, then over the last `decay` steps a straight line down to `floor`."""
    if decay < 0 or warmup + decay > total:
        raise BadInput(f"warmup_stable_decay: warmup {warmup} and decay {decay} do not fit into {total} steps")
    warm = _warm(step, warmup)
    if decay == 0 or step < total - decay:
        return warm
    return 1 + (floor - 1) * min(step - (total - decay) + 1, decay) / decay


def cosine(step: int, *, total: int, start: float, end: float) -> float:
    """Half a cosine from `start` at the first step to `end` at the last: DINO's weight decay, for instance."""
    step = _within("cosine", step, total)
    return end + (start - end) * (1 + math.cos(math.pi * _progress(step, total))) / 2


def apply(optimizer: torch.optim.Optimizer, *, lr: float | None = None, weight_decay: float | None = None) -> None:
    """Sets each group's rate to `lr` times the one it began with, and the decay of the groups that have any."""
    for group in optimizer.param_groups:
        if lr is not None:
            group.setdefault("initial_lr", group["lr"])
            group["lr"] = group["initial_lr"] * lr
        if weight_decay is not None and group.setdefault("initial_weight_decay", group["weight_decay"]):
            group["weight_decay"] = weight_decay


def _within(who: str, step: int, total: int) -> int:
    """The step, or the last one after it: a warm-up that takes all of a run ends where it is, too."""
    if total < 1:
        raise BadInput(f"{who}: total must be 1 step or more, got {total}")
    return min(step, total - 1)


def _warm(step: int, warmup: int) -> float:
    if step < 0 or warmup < 0:
        raise BadInput(f"step and warmup count from 0, got {step} and {warmup}")
    return min((step + 1) / warmup, 1.0) if warmup else 1.0


def _progress(step: int, total: int) -> float:
    """From 0 at the first of `total` steps to 1 at the last."""
    if step < 0:
        raise BadInput(f"steps count from 0, got {step}")
    return step / (total - 1) if total > 1 else 1.0
