"""Linear probes: the accuracy of a linear layer on frozen features.

    p = softmax(W z + b),   z the feature, standardised or batch-normalised if the protocol says so

All blocks are probed at once, with batched products over features (blocks, samples, dim). The gradient of the cross
entropy is explicit, (p - y)^T z / n, so probes run under no_grad. On a GPU an epoch is one CUDA graph, captured once
and replayed.

    lars    LARS with momentum and warm-up (arXiv 1708.03888), as in MAE's probe (arXiv 2111.06377)
    adamw   AdamW (arXiv 1711.05101) with a cosine schedule
    lbfgs   L2-regularised logistic regression to convergence: sum of losses + |W|^2 / (2 C), as in scikit-learn
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from unskip._checks import kind_of
from unskip.errors import BadInput
from unskip.evals._input import checked, full_precision
from unskip.evals._logistic import regression
from unskip.evals._registry import protocol as find
from unskip.evals._registry import register
from unskip.evals._replay import replayed
from unskip.evals._split import Split
from unskip.optim import schedules

_CHUNK = 2**28  # logits at a time
_EPS = 1e-6
_NAMES = {"lars": "probe_mae", "adamw": "probe_decayed", "lbfgs": "probe_lbfgs"}  # accuracy names by solver


def linear_probe(
    train: Tensor,
    train_labels: Tensor,
    test: Tensor,
    test_labels: Tensor,
    protocol: str = "probe-mae-v1",
    *,
    seed: int = 0,
    changes: Mapping[str, Any] | None = None,
) -> float:
    """The accuracy on `test` of a linear layer trained on `train`, both (samples, dim), on the device of `train`.

    `changes` overrides settings of the protocol; record them with the number.
    """
    for each in (train, test):
        if not isinstance(each, Tensor) or each.ndim != 2:
            raise BadInput(f"linear_probe: features must be (samples, dim), got {kind_of(each)}")
    settings = find(protocol, evaluate_probe).settings_with(changes)
    return probe_all(train[None], train_labels, test[None], test_labels, settings, seed)[0]


@register(
    "probe-mae-v1",
    needs="features",
    about="Batch norm without affine, then a linear layer by LARS: MAE, arXiv 2111.06377. Features are cached, so "
    "images are not augmented; smaller sets use smaller batches, to keep ImageNet's number of steps per epoch.",
    fractions=("probe_mae",),
    pool="cls",
    norm="layer",
    batched=True,
    fixed=("solver",),
    positive=("epochs", "steps_per_epoch", "largest_batch", "lr"),
    solver="lars",
    epochs=90,
    warmup=10,
    steps_per_epoch=78,  # 1.28 million images in batches of 16384
    largest_batch=16384,
    lr=6.4,  # 0.1 * 16384 / 256
    momentum=0.9,
    trust=0.001,
    weight_decay=0.0,
    batch_norm=True,
    start=0.01,
)
@register(
    "probe-decayed-v1",
    needs="features",
    about="A linear layer by AdamW at 1e-2, cosine, 200 epochs, on the mean of all tokens without a norm, as in the "
    "released code of arXiv 2404.10947; its batch size and weight decay are unknown, so these are our choice.",
    fractions=("probe_decayed",),
    batched=True,
    fixed=("solver",),
    positive=("epochs", "batch", "lr"),
    solver="adamw",
    epochs=200,
    warmup=0,
    batch=1024,
    lr=1e-2,
    weight_decay=0.0,
    batch_norm=False,
    start=0.01,
)
@register(
    "probe-lbfgs-v1",
    needs="features",
    about="Logistic regression on standardised features, C = 1 on the sum of losses, by L-BFGS: no seed, and fast.",
    fractions=("probe_lbfgs",),
    batched=True,
    fixed=("solver", "standardise"),
    positive=("c",),
    solver="lbfgs",
    standardise=True,
    c=1.0,
    iterations=1000,
    tolerance=1e-6,
)
def evaluate_probe(train: Split, test: Split, **settings: Any) -> list[dict[str, float]]:
    """The accuracy for features (blocks, n, dim); the probes of all blocks are trained at once."""
    name = _NAMES[settings["solver"]]
    accuracies = probe_all(train.features, train.labels, test.features, test.labels, settings, train.options.seed)
    return [{name: accuracy} for accuracy in accuracies]


@full_precision
@torch.no_grad()
def probe_all(
    train: Tensor, train_labels: Tensor, test: Tensor, test_labels: Tensor, settings: Mapping[str, Any], seed: int = 0
) -> list[float]:
    """The accuracy of each feature set of a stack (sets, samples, dim)."""
    x, labels, y, truth = checked("linear_probe", train, train_labels, test, test_labels)
    classes = int(torch.maximum(labels.max(), truth.max())) + 1
    if settings["solver"] == "lbfgs":
        weight, bias, mean, std = regression(x, labels, classes, settings, _CHUNK)
    else:
        weight, bias, mean, std = _descent(x, labels, classes, settings, seed)
    # W (z - mean) / std + b as one linear layer of the raw feature
    weight = weight / std[:, None]
    bias = bias - (weight * mean[:, None]).sum(2)
    correct = torch.zeros(len(y), device=y.device)
    rows = max(1, _CHUNK // (len(y) * classes))
    for part, wanted in zip(y.split(rows, 1), truth.split(rows), strict=True):
        logits = torch.baddbmm(bias[:, None].to(part), part, weight.to(part).mT)
        correct += (logits.argmax(2) == wanted).sum(1)
    return [float(hits) / len(truth) for hits in correct]


def _descent(
    x: Tensor, labels: Tensor, classes: int, settings: Mapping[str, Any], seed: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Stochastic gradient descent: W (sets, classes, dim), b (sets, classes), running mean and standard deviation."""
    sets, count, dim = x.shape
    batch = _batch(settings, count)
    if batch > count:
        raise BadInput(f"linear_probe: batch norm needs at least {batch} training samples, got {count}")
    order = torch.Generator().manual_seed(seed)
    start = torch.randn(classes, dim, generator=torch.Generator().manual_seed(seed)) * settings["start"]
    weight = start.to(x).expand(sets, -1, -1).clone()
    bias = x.new_zeros(sets, classes)
    mean, variance = x.new_zeros(sets, dim), x.new_ones(sets, dim)
    optimizer = _OPTIMIZERS[settings["solver"]]([weight, bias], settings)
    per_epoch = max(1, count // batch)
    total, warmup = settings["epochs"] * per_epoch, settings["warmup"] * per_epoch
    factors = [schedules.warmup_cosine(step, total=total, warmup=warmup) for step in range(total)]
    rates = optimizer.rates(torch.tensor(factors, dtype=torch.float64) * settings["lr"]).to(x)  # (steps, ...)
    # A CUDA graph reads its inputs from fixed tensors, so every epoch copies into these.
    rows = torch.zeros(per_epoch, batch, dtype=torch.int64, device=x.device)
    epoch_rates = torch.zeros_like(rates[:per_epoch])

    def epoch() -> None:
        for chosen, rate in zip(rows, epoch_rates, strict=True):
            z = x.index_select(1, chosen)
            if settings["batch_norm"]:
                batch_variance, batch_mean = torch.var_mean(z, 1, correction=0)
                z = (z - batch_mean[:, None]) / (batch_variance[:, None] + _EPS).sqrt()
                mean.lerp_(batch_mean, 0.1)
                variance.lerp_(batch_variance * (batch / max(1, batch - 1)), 0.1)
            optimizer.step(_gradient(z, labels[chosen], weight, bias), rate)

    run_epoch = replayed(epoch, [weight, bias, mean, variance, *optimizer.state])
    for first in range(0, total, per_epoch):
        rows.copy_(torch.randperm(count, generator=order)[: rows.numel()].view_as(rows))
        epoch_rates.copy_(rates[first : first + per_epoch])
        run_epoch()
    std = (variance + _EPS).sqrt() if settings["batch_norm"] else variance
    return weight, bias, mean, std


def _batch(settings: Mapping[str, Any], count: int) -> int:
    if "batch" in settings:
        return min(int(settings["batch"]), count)
    return max(2, min(int(settings["largest_batch"]), count // int(settings["steps_per_epoch"])))


def _gradient(z: Tensor, labels: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of the mean cross entropy, for z (sets, n, dim)."""
    error = torch.baddbmm(bias[:, None], z, weight.mT).softmax(2)
    index = labels.expand(len(z), -1)[..., None]
    error.scatter_add_(2, index, error.new_full(index.shape, -1.0))
    error /= len(labels)
    return error.mT @ z, error.sum(1)


class _Lars:
    """LARS: the update of a matrix is proportional to its norm. Every set has its own trust ratio."""

    def __init__(self, params: list[Tensor], settings: Mapping[str, Any]) -> None:
        self.params, self.settings = params, settings
        self.state = [torch.zeros_like(each) for each in params]

    def rates(self, lr: Tensor) -> Tensor:
        """The learning rate of every step."""
        return lr

    def step(self, gradients: tuple[Tensor, ...], rate: Tensor) -> None:
        for param, update, velocity in zip(self.params, gradients, self.state, strict=True):
            if param.ndim == 3:
                update = update + self.settings["weight_decay"] * param
                size, change = param.flatten(1).norm(dim=1), update.flatten(1).norm(dim=1)
                trust = self.settings["trust"] * size / change
                trust = torch.where((size > 0) & (change > 0), trust, torch.ones_like(size))
                update = update * trust[:, None, None]
            velocity.mul_(self.settings["momentum"]).add_(update)
            param.sub_(rate * velocity)


class _AdamW:
    """AdamW with torch's betas (0.9, 0.999) and eps 1e-8; `rates` includes weight decay and bias corrections."""

    def __init__(self, params: list[Tensor], settings: Mapping[str, Any]) -> None:
        self.params, self.weight_decay = params, settings["weight_decay"]
        self.moments = [(torch.zeros_like(each), torch.zeros_like(each)) for each in params]
        self.state = [moment for pair in self.moments for moment in pair]

    def rates(self, lr: Tensor) -> Tensor:
        """(steps, 3): bias-corrected learning rate, root of the second moment's correction, and weight decay factor."""
        step = torch.arange(1, len(lr) + 1, dtype=lr.dtype)
        return torch.stack([lr / (1 - 0.9**step), (1 - 0.999**step).sqrt(), 1 - lr * self.weight_decay], 1)

    def step(self, gradients: tuple[Tensor, ...], rate: Tensor) -> None:
        lr, root, decay = rate.unbind()
        for param, gradient, (first, second) in zip(self.params, gradients, self.moments, strict=True):
            first.lerp_(gradient, 0.1)
            second.lerp_(gradient * gradient, 0.001)
            param.mul_(decay).sub_(lr * first / (second.sqrt() / root + 1e-8))


_OPTIMIZERS: dict[str, Any] = {"lars": _Lars, "adamw": _AdamW}
