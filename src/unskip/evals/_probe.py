"""Linear probes: how well a linear layer reads the class from features that stand still.

    p = softmax(W z + b),   z the feature, standardised or batch-normalised where the protocol says so

Features of several blocks are probed at once: (blocks, samples, dim), a product for all of them. The gradient of the
cross entropy is written out, (p - y)^T z / n, so a probe runs inside no_grad and keeps no graph.

    lars    LARS with momentum after a warm-up (arXiv 1708.03888), as MAE probes (arXiv 2111.06377)
    adamw   AdamW, half a cosine
    lbfgs   L2-regularised logistic regression to convergence: sum of losses + |W|^2 / (2 C), as scikit-learn has it
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from unskip.errors import BadInput
from unskip.evals._input import checked
from unskip.evals._protocols import protocol as find
from unskip.optim import schedules

_CHUNK = 2**28  # logits held at a time
_EXACT = 2**36  # up to so many products a pass the regression is solved in float64
_EPS = 1e-6


def linear_probe(
    train: Tensor,
    train_labels: Tensor,
    test: Tensor,
    test_labels: Tensor,
    protocol: str = "probe-mae-v1",
    *,
    seed: int = 0,
) -> float:
    """The accuracy on `test` of a linear layer trained on `train`, both (samples, dim), where `train` lies."""
    if isinstance(train, Tensor) and train.ndim != 2:
        raise BadInput(f"linear_probe: features must be (samples, dim), got {tuple(train.shape)}")
    return probe_all(train[None], train_labels, test[None], test_labels, protocol, seed=seed)[0]


@torch.no_grad()
def probe_all(
    train: Tensor,
    train_labels: Tensor,
    test: Tensor,
    test_labels: Tensor,
    protocol: str,
    *,
    seed: int = 0,
    changes: Mapping[str, Any] | None = None,
) -> list[float]:
    """The accuracy of each feature set of a stack (sets, samples, dim)."""
    settings = {**find(protocol, "probe").settings, **(changes or {})}
    x, labels, y, truth = checked("linear_probe", train, train_labels, test, test_labels)
    classes = int(torch.maximum(labels.max(), truth.max())) + 1
    if settings["solver"] == "lbfgs":
        weight, bias, mean, std = _regression(x, labels, classes, settings)
    else:
        weight, bias, mean, std = _descent(x, labels, classes, settings, seed)
    # W (z - mean) / std + b as one linear layer of the raw feature
    weight = weight / std[:, None]
    bias = bias - (weight * mean[:, None]).sum(2)
    right = torch.zeros(len(y), device=y.device)
    rows = max(1, _CHUNK // (len(y) * classes))
    for part, wanted in zip(y.split(rows, 1), truth.split(rows), strict=True):
        logits = torch.baddbmm(bias[:, None].to(part), part, weight.to(part).mT)
        right += (logits.argmax(2) == wanted).sum(1)
    return [float(hits) / len(truth) for hits in right]


def _descent(
    x: Tensor, labels: Tensor, classes: int, settings: Mapping[str, Any], seed: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Stochastic gradient descent: W (sets, classes, dim), b (sets, classes), and the running mean and deviation."""
    sets, count, dim = x.shape
    batch = _batch(settings, count)
    order = torch.Generator().manual_seed(seed)
    start = torch.randn(classes, dim, generator=torch.Generator().manual_seed(seed)) * settings["start"]
    weight = start.to(x).expand(sets, -1, -1).clone()
    bias = x.new_zeros(sets, classes)
    mean, variance = x.new_zeros(sets, dim), x.new_ones(sets, dim)
    optimizer = (
        torch.optim.AdamW([weight, bias], lr=settings["lr"], weight_decay=settings["weight_decay"])
        if settings["solver"] == "adamw"
        else _Lars([weight, bias], settings["momentum"], settings["trust"], settings["weight_decay"])
    )
    per_epoch = max(1, count // batch)
    total, warmup = settings["epochs"] * per_epoch, settings["warmup"] * per_epoch
    for step in range(total):
        at = step % per_epoch
        if at == 0:
            shuffled = torch.randperm(count, generator=order).to(x.device)
        rows = shuffled[at * batch : (at + 1) * batch]
        z = x.index_select(1, rows)
        if settings["batch_norm"]:
            spread, middle = torch.var_mean(z, 1, correction=0)
            z = (z - middle[:, None]) / (spread[:, None] + _EPS).sqrt()
            mean.lerp_(middle, 0.1)
            variance.lerp_(spread * len(rows) / max(1, len(rows) - 1), 0.1)
        weight.grad, bias.grad = _gradient(z, labels[rows], weight, bias)
        for group in optimizer.param_groups:
            group["lr"] = settings["lr"] * schedules.warmup_cosine(step, total=total, warmup=warmup)
        optimizer.step()
    std = (variance + _EPS).sqrt() if settings["batch_norm"] else variance
    return weight, bias, mean, std


def _batch(settings: Mapping[str, Any], count: int) -> int:
    if "batch" in settings:
        return min(int(settings["batch"]), count)
    return max(2, min(int(settings["largest_batch"]), count // int(settings["steps_per_epoch"])))


def _gradient(z: Tensor, labels: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Of the mean cross entropy, for z (sets, n, dim)."""
    error = torch.baddbmm(bias[:, None], z, weight.mT).softmax(2)
    error[:, torch.arange(len(labels), device=z.device), labels] -= 1
    error /= len(labels)
    return error.mT @ z, error.sum(1)


class _Lars:
    """LARS: the step of a matrix has a length in proportion to its own. One trust ratio for every set."""

    def __init__(self, params: list[Tensor], momentum: float, trust: float, weight_decay: float) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": params, "lr": 0.0}]
        self.momentum, self.trust, self.weight_decay = momentum, trust, weight_decay
        self.speed = [torch.zeros_like(each) for each in params]

    def step(self) -> None:
        for each, speed in zip(self.param_groups[0]["params"], self.speed, strict=True):
            change = each.grad
            if each.ndim == 3:
                change = change + self.weight_decay * each
                own, its = each.flatten(1).norm(dim=1), change.flatten(1).norm(dim=1)
                ratio = torch.where((own > 0) & (its > 0), self.trust * own / its, 1.0)
                change = change * ratio[:, None, None]
            speed.mul_(self.momentum).add_(change)
            each.sub_(speed, alpha=self.param_groups[0]["lr"])


# --- Logistic regression ----------------------------------------------------------------------------------------------


def _regression(
    x: Tensor, labels: Tensor, classes: int, settings: Mapping[str, Any]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    spread, mean = torch.var_mean(x.double(), 1, correction=0)
    std = torch.where(spread > 0, spread.sqrt(), 1.0)
    found = []
    for each, middle, deviation in zip(x, mean, std, strict=True):
        exact = each.numel() * classes <= _EXACT
        z = (each.double() - middle) / deviation
        found.append(_solve(z if exact else z.float(), labels, classes, settings))
    weight, bias = (torch.stack(parts).double() for parts in zip(*found, strict=True))
    return weight, bias, mean, std


def _solve(z: Tensor, labels: Tensor, classes: int, settings: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """argmin over W, b of mean cross entropy + |W|^2 / (2 C n)."""
    count, dim = z.shape
    ridge = 1 / (settings["c"] * count)
    packed = z.new_zeros(classes, dim + 1)  # the bias is the last column
    rows = max(1, _CHUNK // classes)
    optimizer = torch.optim.LBFGS(
        [packed],
        max_iter=settings["iterations"],
        tolerance_grad=settings["tolerance"],
        tolerance_change=1e-12,
        history_size=20,
        line_search_fn="strong_wolfe",
    )

    @torch.no_grad()  # the optimizer turns gradients on for it
    def closure() -> Tensor:
        weight, bias = packed[:, :-1], packed[:, -1]
        loss: Tensor = ridge / 2 * weight.square().sum()
        packed.grad = torch.cat([ridge * weight, torch.zeros_like(bias)[:, None]], 1)
        for part, wanted in zip(z.split(rows), labels.split(rows), strict=True):
            logs = torch.addmm(bias, part, weight.T).log_softmax(1)
            loss = loss - logs.gather(1, wanted[:, None]).sum() / count
            error = logs.exp_()
            error[torch.arange(len(wanted), device=z.device), wanted] -= 1
            packed.grad[:, :-1] += error.T @ part / count
            packed.grad[:, -1] += error.sum(0) / count
        return loss

    optimizer.step(closure)
    return packed[:, :-1], packed[:, -1]
