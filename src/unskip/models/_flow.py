"""Flow matching: interpolants between noise and data, prediction targets, and the loss.

    x_t = a_t x + s_t e,    v_t = a'_t x + s'_t e,    t from noise e at 0 to data x at 1

    linear   a = t,              s = 1 - t
    gvp      a = sin(pi t / 2),  s = cos(pi t / 2), which preserves variance 1

A network predicts the velocity v, the noise e or the data x from x_t and t. Each determines the others by the two
equations above. The score is -e / s. Ma et al., "SiT", arXiv 2401.08740; Lipman et al., arXiv 2210.02747.

    velocity   E |network(x_t, t) - v_t|^2,   t uniform, or logit-normal: sigmoid(mean + std n) (arXiv 2403.03206)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from unskip._checks import choice, number
from unskip.errors import BadInput

Interpolant = Literal["linear", "gvp"]  # between noise and data
Target = Literal["velocity", "noise", "data"]  # predicted by the model
Times = Literal["uniform", "logit-normal"]  # how training times are drawn
_MARGIN = 1e-3  # distance to times at which noise or data alone does not determine the velocity


class Path(NamedTuple):
    """a, s and their derivatives, in the shape of the times."""

    a: Tensor
    s: Tensor
    da: Tensor
    ds: Tensor


class Parts(NamedTuple):
    """Velocity, noise and data at x_t."""

    velocity: Tensor
    noise: Tensor
    data: Tensor


@dataclass(frozen=True)
class Flow:
    """An interpolant, the prediction target, and the distribution of times and labels in training."""

    interpolant: Interpolant = "linear"
    target: Target = "velocity"
    times: Times = "uniform"
    time_mean: float = 0.0  # of logit-normal times, before the sigmoid
    time_std: float = 1.0
    label_dropout: float = 0.1  # probability of dropping a label, for classifier-free guidance

    def __post_init__(self) -> None:
        for name, known in (("interpolant", Interpolant), ("target", Target), ("times", Times)):
            choice("flow", name, getattr(self, name), get_args(known))
        number("flow", "label_dropout", self.label_dropout, below=1)
        number("flow", "time_std", self.time_std, zero=False)
        if not math.isfinite(self.time_mean):
            raise BadInput(f"time_mean must be a finite number, such as 0 (median time 0.5), got {self.time_mean}")

    @property
    def ends(self) -> tuple[float, float]:
        """The first and last time at which a prediction determines the velocity."""
        first = _MARGIN if self.target == "noise" else 0.0
        return first, 1 - (_MARGIN if self.target == "data" else 0.0)

    def path(self, time: Tensor) -> Path:
        """The interpolant at given times."""
        if self.interpolant == "linear":
            one = torch.ones_like(time)
            return Path(time, 1 - time, one, -one)
        angle = math.pi / 2 * time
        return Path(angle.sin(), angle.cos(), math.pi / 2 * angle.cos(), -math.pi / 2 * angle.sin())

    def mixed(self, data: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """x_t; times are (batch,)."""
        path = self.path(_like(time, data))
        return path.a * data + path.s * noise

    def wanted(self, data: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """The training target of the network."""
        if self.target == "noise":
            return noise
        if self.target == "data":
            return data
        path = self.path(_like(time, data))
        return path.da * data + path.ds * noise

    def parts(self, x: Tensor, prediction: Tensor, time: Tensor) -> Parts:
        """Velocity, noise and data from a prediction at x_t."""
        a, s, da, ds = self.path(_like(time, x))
        if self.target == "velocity":
            det = a * ds - s * da  # -1 for linear, -pi / 2 for gvp
            return Parts(prediction, (a * prediction - da * x) / det, (ds * x - s * prediction) / det)
        if self.target == "noise":
            data = (x - s * prediction) / a
            return Parts(da * data + ds * prediction, prediction, data)
        noise = (x - a * prediction) / s
        return Parts(da * prediction + ds * noise, noise, prediction)

    def drawn_times(self, count: int, device: torch.device, generator: torch.Generator | None = None) -> Tensor:
        """(count,) random times for training, float32."""
        if self.times == "uniform":
            time = torch.rand(count, device=device, generator=generator)
        else:
            normal = torch.randn(count, device=device, generator=generator)
            time = torch.sigmoid(self.time_mean + self.time_std * normal)
        first, last = self.ends
        return first + (last - first) * time

    def loss(
        self,
        network: nn.Module,
        data: Tensor,
        labels: Tensor,
        classes: int,
        *,
        time: Tensor | None = None,
        noise: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """The mean squared error of each image, (batch,). Draws `time` and `noise` if they are None."""
        if time is None:
            time = self.drawn_times(len(data), data.device, generator)
        if noise is None:
            noise = torch.randn(data.shape, device=data.device, generator=generator)
        if self.label_dropout:
            dropped = torch.rand(len(labels), device=labels.device, generator=generator) < self.label_dropout
            labels = labels.masked_fill(dropped, classes)
        prediction = network(self.mixed(data, noise, time), time, labels)
        error: Tensor = (prediction.float() - self.wanted(data, noise, time)).square().flatten(1).mean(1)
        return error

    def baseline_loss(self, mean_square: float) -> float:
        """The loss of predicting zero, for data of this mean square."""
        if self.target != "velocity":
            return 1.0 if self.target == "noise" else mean_square
        time = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000  # quantiles of the times
        if self.times == "logit-normal":
            time = torch.sigmoid(self.time_mean + self.time_std * torch.special.ndtri(time))
        path = self.path(time)
        return float((path.da.square() * mean_square + path.ds.square()).mean())


def _like(time: Tensor, x: Tensor) -> Tensor:
    """(batch,) to (batch, 1, 1, 1)."""
    return time.to(x.dtype).reshape(-1, *[1] * (x.ndim - 1))
