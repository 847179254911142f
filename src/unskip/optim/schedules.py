"""Learning-rate and weight-decay schedules as plain functions of the step.

Each returns a factor (or a value, for `cosine`) without state, so a run resumes from its step number:

    lr(t) = lr * warmup_cosine(t, total=10_000, warmup=500)

Steps count from 0: in a warm-up over w steps, step 0 has the factor 1 / w and step w - 1 has 1. After the last step the
factor is constant. Use `functools.partial` to pass a schedule to torch's LambdaLR.
"""

from __future__ import annotations

import math

import torch

from unskip.errors import BadInput


def warmup_cosine(step: int, *, total: int, warmup: int = 0, floor: float = 0.0) -> float:
    """A linear warm-up, then half a cosine from 1 down to `floor` at the last step."""
    if warmup < 0:
        raise BadInput(f"warmup_cosine: warmup must be 0 steps or more, got {warmup}")
    step = _within("warmup_cosine", step, total)
    if step < warmup:
        return (step + 1) / warmup
    return cosine(step - warmup, total=total - warmup, start=1.0, end=floor)


def cosine(step: int, *, total: int, start: float, end: float) -> float:
    """Half a cosine from `start` at the first step to `end` at the last, for example for DINO's weight decay."""
    step = _within("cosine", step, total)
    progress = step / (total - 1) if total > 1 else 1.0
    return end + (start - end) * (1 + math.cos(math.pi * progress)) / 2


def apply(optimizer: torch.optim.Optimizer, *, lr: float | None = None, weight_decay: float | None = None) -> None:
    """Sets each group's rate to `lr` times its initial rate, and the weight decay of groups that decay."""
    for group in optimizer.param_groups:
        if lr is not None:
            group.setdefault("initial_lr", group["lr"])
            group["lr"] = group["initial_lr"] * lr
        if weight_decay is not None and group.setdefault("initial_weight_decay", group["weight_decay"]):
            group["weight_decay"] = weight_decay


def _within(who: str, step: int, total: int) -> int:
    """The step, at most total - 1."""
    if total < 1 or step < 0:
        raise BadInput(f"{who}: total must be 1 step or more and steps count from 0, got step {step} of {total}")
    return min(step, total - 1)
