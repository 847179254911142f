"""From noise to images: the flow's equation solved from t = 0 to 1.

    dx = v dt                                        euler, heun (fixed steps), dopri5 (steps as its error allows)
    dx = (v - e) dt + sqrt(2 s_t) dW                 euler-maruyama: the same marginals, since score = -e / s and the
                                                     noise that is added is taken away by drift s_t * score = -e
    v <- v_none + cfg (v_class - v_none)             classifier-free guidance (Ho & Salimans, arXiv 2207.12598)

The last step of euler-maruyama has length 0.04 and no noise, as in SiT (arXiv 2401.08740). dopri5 is an embedded pair
of orders 5 and 4 (Dormand & Prince 1980). Every sample has a time and a step of its own, so its path does not depend on
its company: rms(error / (tolerance (1 + |x|))) <= 1 in each accepted step, at tolerance 1e-5.
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

Sampler = Literal["euler", "heun", "dopri5", "euler-maruyama"]  # that integrates the flow
_LAST = 0.04  # the length of the last step of euler-maruyama
_MOST = 10_000  # steps of dopri5, accepted or not

# The tableau of Dormand and Prince: times, weights of the stages before, and the difference of both orders.
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
    """How samples are made: every field goes through JSON."""

    sampler: Sampler = "heun"
    steps: int = 50  # of the fixed-step samplers
    cfg: float = 1.0  # 1: the class alone; 0: no class
    tolerance: float = 1e-5  # of dopri5, absolute and relative
    seed: int = 0

    def __post_init__(self) -> None:
        choice("sampling", "sampler", self.sampler, get_args(Sampler))
        whole("sampling", "steps", self.steps, low=1)
        number("sampling", "cfg", self.cfg)
        number("sampling", "tolerance", self.tolerance, below=1, zero=False)


class Drawn(NamedTuple):
    """Samples as the network makes them, and what each cost."""

    values: Tensor  # (samples, *shape), float32
    labels: Tensor
    evaluations: Tensor  # (samples,): of the network, two for each velocity with guidance


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
    """Samples with these labels, on their device; `batch` at a time, which changes no sample.

    The network is called as network(x, time, labels), in the mode it is in. `autocast` makes the context it runs in.
    """
    if not len(labels) or batch < 1:
        raise BadInput(f"{len(labels)} samples in batches of {batch}: ask for one or more of each")
    check_labels(labels, classes)
    flow, sampling = flow or Flow(), sampling or Sampling()
    for start in range(0, len(labels), batch):
        part = labels[start : start + batch]
        indices = torch.arange(start, start + len(part), device=labels.device)
        # One context around all steps: autocast keeps the weights it has narrowed until its context ends.
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
        """Of x (samples, ...) at times (samples,); `rows` are the indices of those samples, None for all."""
        of, none = (each if rows is None else each[rows] for each in (self.labels, self.none))
        if self.guided:
            both = self.network(torch.cat([x, x]), torch.cat([time, time]), torch.cat([of, none]))
            own, plain = both.float().chunk(2)
            prediction = plain + self.cfg * (own - plain)
        else:
            prediction = self.network(x, time, none if self.cfg == 0 else of).float()
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
    """The mean of the velocities at both ends of a step, the far one by Euler's step."""
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
    wide = (-1, *[1] * (x.ndim - 1))
    slope = field.velocity(x, time.float())  # the last stage of a step is the first of the next
    x = x.clone()
    for _ in range(_MOST):
        rows = (time < last).nonzero()[:, 0]
        if not len(rows):
            return x
        at, size = time[rows], torch.minimum(step[rows], last - time[rows])
        here = x[rows]
        stages = [slope[rows]]
        for c, weights in zip(_C[1:], _A[1:], strict=True):
            moved: Tensor = sum((w * k for w, k in zip(weights, stages, strict=True) if w), torch.zeros_like(here))
            there = here + size.float().view(wide) * moved
            stages.append(field.velocity(there, (at + c * size).float(), rows))
        wrong: Tensor = sum((e * k for e, k in zip(_E, stages, strict=True) if e), torch.zeros_like(here))
        scale = sampling.tolerance * (1 + torch.maximum(here.abs(), there.abs()))
        error = (size.float().view(wide) * wrong / scale).flatten(1).double().square().mean(1).sqrt()
        fine = error <= 1
        lost = ~error.isfinite()
        if bool(lost.any()):
            x[rows[lost]] = torch.nan
            return x
        done = rows[fine]
        x[done], slope[done] = there[fine], stages[-1][fine]
        landed = at + size
        time[done] = torch.where(landed >= last - 1e-12, last, landed)[fine]
        # A fifth to fivefold, with a little to spare.
        step[rows] = size * (0.9 * error.clamp_min(1e-10) ** -0.2).clamp(0.2, 5.0)
    raise BadInput(
        f"dopri5 took {_MOST} steps and was not at its end: a tolerance of {sampling.tolerance} is below what the "
        "network's precision allows; take a larger one, or heun"
    )


_SOLVERS = {"euler": _euler, "heun": _heun, "dopri5": _dopri5, "euler-maruyama": _euler_maruyama}
