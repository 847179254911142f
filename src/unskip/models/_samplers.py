"""Samplers: solve the flow's equation from noise at t = 0 to data at t = 1.

    dx = v dt                                        euler, heun (fixed steps), dopri5 (adaptive steps)
    dx = (v - e) dt + sqrt(2 s_t) dW                 euler-maruyama: the same marginals: score = -e / s, and the drift
                                                     s_t * score = -e compensates the added noise
    v <- v_none + cfg (v_class - v_none)             classifier-free guidance (Ho & Salimans, arXiv 2207.12598)

The last step of euler-maruyama has length 0.04 and no noise, as in SiT (arXiv 2401.08740). dopri5 is an embedded pair
of orders 5 and 4 (Dormand & Prince 1980). Every sample has its own time and step size, so it does not depend on its
batch: rms(error / (tolerance (1 + |x|))) <= 1 in each accepted step, at tolerance 1e-5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from unskip._checks import choice, number, whole
from unskip.errors import BadInput
from unskip.models._conditioned import check_labels
from unskip.models._flow import Flow, Parts
from unskip.models._noise import normal

Sampler = Literal["euler", "heun", "dopri5", "euler-maruyama"]  # integrates the flow
_LAST = 0.04  # the length of the last step of euler-maruyama
_MOST = 10_000  # steps of dopri5, accepted or not

# The tableau of Dormand and Prince: times, weights of earlier stages, and the difference of both orders.
_C = (0.0, 1 / 5, 3 / 10, 4 / 5, 8 / 9, 1.0, 1.0)
_A: tuple[tuple[float, ...], ...] = (
    (),
    (1 / 5,),
    (3 / 40, 9 / 40),
    (44 / 45, -56 / 15, 32 / 9),
    (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729),
    (9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656),
    (35 / 384, 0.0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84),
)
_E = (71 / 57600, 0.0, -71 / 16695, 71 / 1920, -17253 / 339200, 22 / 525, -1 / 40)


@dataclass(frozen=True)
class Sampling:
    """The settings of a sampler; every field is valid JSON."""

    sampler: Sampler = "heun"
    steps: int = 50  # of the fixed-step samplers
    cfg: float = 1.0  # 1: conditional; 0: unconditional
    tolerance: float = 1e-5  # of dopri5, absolute and relative
    seed: int = 0

    def __post_init__(self) -> None:
        choice("sampling", "sampler", self.sampler, get_args(Sampler))
        whole("sampling", "steps", self.steps, low=1)
        number("sampling", "cfg", self.cfg)
        number("sampling", "tolerance", self.tolerance, below=1, zero=False)


class Drawn(NamedTuple):
    """Samples, and the network evaluations of each."""

    values: Tensor  # (samples, *shape), float32
    labels: Tensor
    evaluations: Tensor  # (samples,), two per velocity with guidance


def draw(
    network: nn.Module,
    labels: Tensor,
    shape: tuple[int, ...],
    classes: int,
    flow: Flow | None = None,
    sampling: Sampling | None = None,
    *,
    batch: int = 256,
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Iterator[Drawn]:
    """Draws samples with these labels, on their device. `batch` does not change the samples.

    The network is called as network(x, time, labels), in its current mode. `autocast` creates the context of the calls.
    """
    if not len(labels) or batch < 1:
        raise BadInput(f"{len(labels)} samples in batches of {batch}: both must be at least 1")
    check_labels(labels, classes)
    flow, sampling = flow or Flow(), sampling or Sampling()
    for start in range(0, len(labels), batch):
        part = labels[start : start + batch]
        indices = torch.arange(start, start + len(part), device=labels.device)
        # One context for all steps, because autocast caches cast weights until its context ends.
        with torch.no_grad(), autocast():
            field = _Field(network, part, classes, flow, sampling.cfg)
            x = normal(sampling.seed, indices, 0, shape)
            x = _SOLVERS[sampling.sampler](field, x, sampling, indices)
        bad = (~x.isfinite().flatten(1).all(1)).nonzero()
        if len(bad):
            raise BadInput(
                f"sample {int(indices[bad[0, 0]])} is not finite ({len(bad)} of {len(part)}): the model diverged, or "
                f"cfg={sampling.cfg} is too strong"
            )
        yield Drawn(x, part, field.evaluations)


class _Field:
    """The guided prediction at x_t; counts the network evaluations of each sample."""

    def __init__(self, network: nn.Module, labels: Tensor, classes: int, flow: Flow, cfg: float) -> None:
        self.network, self.labels, self.flow, self.cfg = network, labels, flow, cfg
        self.none = torch.full_like(labels, classes)
        self.guided = cfg not in (0.0, 1.0) and bool((labels != classes).any())
        self.evaluations = torch.zeros(len(labels), dtype=torch.int64, device=labels.device)

    def parts(self, x: Tensor, time: Tensor, rows: Tensor | None = None) -> Parts:
        """Predictions for x (samples, ...) at times (samples,); `rows` are the indices of the samples, None for all."""
        labels, none = (x if rows is None else x[rows] for x in (self.labels, self.none))
        if self.guided:
            both = self.network(torch.cat([x, x]), torch.cat([time, time]), torch.cat([labels, none]))
            conditional, unconditional = both.float().chunk(2)
            prediction = unconditional + self.cfg * (conditional - unconditional)
        else:
            prediction = self.network(x, time, none if self.cfg == 0 else labels).float()
        if rows is None:
            self.evaluations += 1 + self.guided
        else:
            self.evaluations[rows] += 1 + self.guided
        return self.flow.parts(x, prediction, time)

    def velocity(self, x: Tensor, time: Tensor, rows: Tensor | None = None) -> Tensor:
        return self.parts(x, time, rows).velocity


def _times(x: Tensor, time: float) -> Tensor:
    return torch.full((len(x),), time, device=x.device)


def _grid(flow: Flow, steps: int) -> list[float]:
    first, last = flow.ends
    return [first + (last - first) * index / steps for index in range(steps + 1)]


def _euler(field: _Field, x: Tensor, sampling: Sampling, indices: Tensor) -> Tensor:
    grid = _grid(field.flow, sampling.steps)
    for now, then in pairwise(grid):
        x = x + (then - now) * field.velocity(x, _times(x, now))
    return x


def _heun(field: _Field, x: Tensor, sampling: Sampling, indices: Tensor) -> Tensor:
    """Steps with the mean of the velocities at both ends, the end predicted by an Euler step."""
    grid = _grid(field.flow, sampling.steps)
    for now, then in pairwise(grid):
        step, here = then - now, field.velocity(x, _times(x, now))
        there = field.velocity(x + step * here, _times(x, then))
        x = x + step / 2 * (here + there)
    return x


def _euler_maruyama(field: _Field, x: Tensor, sampling: Sampling, indices: Tensor) -> Tensor:
    first, last = field.flow.ends
    end = last - _LAST
    for index in range(sampling.steps):
        now = first + (end - first) * index / sampling.steps
        step = (end - first) / sampling.steps
        parts, at = field.parts(x, _times(x, now)), torch.tensor(now, dtype=torch.float64)
        strength = float((2 * field.flow.path(at).s * step).sqrt())
        x = x + step * (parts.velocity - parts.noise)
        x = x + strength * normal(sampling.seed, indices, 1 + index, x.shape[1:])
    parts = field.parts(x, _times(x, end))
    return x + _LAST * (parts.velocity - parts.noise)


def _dopri5(field: _Field, x: Tensor, sampling: Sampling, indices: Tensor) -> Tensor:
    first, last = field.flow.ends
    time = torch.full((len(x),), first, dtype=torch.float64, device=x.device)
    step = torch.full_like(time, 0.01)
    per_sample = (-1, *[1] * (x.ndim - 1))
    slope = field.velocity(x, time.float())  # the last stage of a step is the first stage of the next
    x = x.clone()
    for _ in range(_MOST):
        rows = (time < last).nonzero()[:, 0]
        if not len(rows):
            return x
        at, size = time[rows], torch.minimum(step[rows], last - time[rows])
        here = x[rows]
        stages = [slope[rows]]
        for c, weights in zip(_C[1:], _A[1:], strict=True):
            direction: Tensor = sum((w * k for w, k in zip(weights, stages, strict=True) if w), torch.zeros_like(here))
            there = here + size.float().view(per_sample) * direction
            stages.append(field.velocity(there, (at + c * size).float(), rows))
        difference: Tensor = sum((e * k for e, k in zip(_E, stages, strict=True) if e), torch.zeros_like(here))
        scale = sampling.tolerance * (1 + torch.maximum(here.abs(), there.abs()))
        error = (size.float().view(per_sample) * difference / scale).flatten(1).double().square().mean(1).sqrt()
        accepted = error <= 1
        diverged = ~error.isfinite()
        if bool(diverged.any()):
            x[rows[diverged]] = torch.nan
            return x
        done = rows[accepted]
        x[done], slope[done] = there[accepted], stages[-1][accepted]
        after = at + size
        time[done] = torch.where(after >= last - 1e-12, last, after)[accepted]
        # The usual step size control, with a safety factor of 0.9.
        step[rows] = size * (0.9 * error.clamp_min(1e-10) ** -0.2).clamp(0.2, 5.0)
    raise BadInput(
        f"dopri5 did not finish in {_MOST} steps: a tolerance of {sampling.tolerance} is too small for the "
        "precision of the network; use a larger one, or heun"
    )


_SOLVERS = {"euler": _euler, "heun": _heun, "dopri5": _dopri5, "euler-maruyama": _euler_maruyama}
