"""The singular values of a Jacobian: how a function scales small changes of its input.

    J = df/dx (outputs, inputs), flattened;  condition = sigma_max / sigma_min;  stable rank = |J|_F^2 / sigma_max^2

Small Jacobians are built and decomposed. Large ones are estimated from products with vectors: sigma_max from below with
a residual, the stable rank with a standard error, quantiles of the singular values with errors of the probes and of the
resolution, sigma_min as an upper bound and the condition number as a lower bound.

A normalisation has null directions by construction: LayerNorm removes the mean and (up to its eps) the scale of each
token, RMSNorm only the scale, so two directions or one of each token vanish for any weights. The condition number
leaves out these `null` directions. Why conditioning matters: "Cutting the Skip: Training Residual-Free Transformers",
arXiv 2510.00345. The norm of J outside a known subspace, for the stable rank: Meyer, Musco, Musco & Woodruff 2021,
"Hutch++".
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from unskip._checks import whole
from unskip.errors import BadInput
from unskip.measures._input import finite_or_none
from unskip.measures._jacobian import Function, Jacobian
from unskip.measures._lanczos import Krylov, Nodes, above_null, bidiagonalise, bound, nodes, quantile, resolved, spread

SHARES = (0.1, 0.5, 0.9)
TOGETHER = 2**17  # numbers in the vectors of one batch of products, and in all probes by default
_SAMPLES = 16  # random vectors for the stable rank


@dataclass(frozen=True, eq=False)
class Spectrum:
    """The singular values of one Jacobian, over the directions of its input.

    `quantiles` count all inputs, so they include zeros if there are fewer outputs than inputs, or null directions.
    `errors` are 95% bounds, approximately; an infinite error means that the quantile is not resolved and its value is
    only an upper bound. `resolution` is the rounding error of singular values: an exact condition number is infinite
    if sigma_min is below it.
    """

    exact: bool
    shape: tuple[int, int]
    precision: str
    values: Tensor | None = field(repr=False)  # largest first, min(outputs, inputs) of them
    sigma_max: float
    sigma_max_error: float
    sigma_min: float | None  # exact: the smallest outside of the null directions
    sigma_min_bound: float | None  # matrix-free: an upper bound of sigma_min
    null: int
    null_max: float | None  # exact: the largest singular value counted as null
    condition: float  # a lower bound if not exact
    stable_rank: float
    stable_rank_error: float
    quantiles: dict[float, float]
    errors: dict[float, float]
    resolution: float

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, without the values; non-finite numbers become None."""
        data = {name: value for name, value in vars(self).items() if name != "values"}
        for name in ("quantiles", "errors"):
            data[name] = {str(share): finite_or_none(value) for share, value in data[name].items()}
        return {name: finite_or_none(value) if isinstance(value, float) else value for name, value in data.items()} | {
            "shape": list(self.shape)
        }

    def __str__(self) -> str:
        method = "exact" if self.exact else "matrix-free"
        text = f"{self.shape[0]} x {self.shape[1]} {method} {self.precision}: sigma_max {self.sigma_max:.4g}"
        if self.exact:
            text += f", sigma_min {self.sigma_min:.3g}, condition {self.condition:.3g}"
        else:
            text += f", sigma_min <= {self.sigma_min_bound:.3g}, condition >= {self.condition:.3g}"
        text += f" outside of {self.null} null directions, stable rank {self.stable_rank:.4g}"
        text += "" if self.exact else f" ± {self.stable_rank_error:.1g}"
        return text + ", quantiles " + ", ".join(f"{share:.0%} {self._quantile(share)}" for share in self.quantiles)

    def _quantile(self, share: float) -> str:
        value, error = self.quantiles[share], self.errors[share]
        if math.isinf(error):
            return f"<= {value:.3g}"
        return f"{value:.3g}" if self.exact else f"{value:.3g} ± {error:.1g}"


def jacobian_spectrum(
    f: Function,
    x: Tensor,
    *,
    exact: bool | None = None,
    probes: int | None = None,
    steps: int = 128,
    generator: torch.Generator | None = None,
    null: int = 0,
) -> Spectrum:
    """The spectrum of the Jacobian of f at x; f maps one tensor to one tensor. Pass float64 for exact results.

    `exact` builds the Jacobian, by default if inputs and outputs are at most 4096, or 16384 on a GPU. Its memory is
    about three times 8 bytes for each entry. The matrix-free method runs `steps` products with J and with J^T from each
    of `probes` random vectors (by default enough for 131072 numbers, at most 32), and 16 more for the stable rank.
    Its memory is 8 x steps x (inputs + outputs) x probes bytes, with batches of probes limited to 131072 numbers, plus
    f's own memory for one graph and these vectors. Small quantiles of a spectrum over several decades need more steps,
    as their error shows. Without a generator the probes are the same in each call.

    `null` is the number of input directions that are null by construction; at least inputs - outputs always are.
    """
    steps = whole("jacobian_spectrum", "steps", steps, low=2)
    jacobian = Jacobian(f, x)
    outputs, inputs = jacobian.shape
    if whole("jacobian_spectrum", "null", null, low=0) > inputs:
        raise BadInput(f"jacobian_spectrum: null is {null}, but x has only {inputs} directions")
    null = max(null, inputs - outputs)
    if exact is None:
        exact = max(outputs, inputs) <= largest_built(x)
    if exact:
        return _exact(jacobian, null)
    if probes is None:
        probes = min(32, math.ceil(TOGETHER / inputs))
    else:
        probes = whole("jacobian_spectrum", "probes", probes, low=1)
    # An unusual seed, so that probes do not repeat weights that were drawn with a common one.
    seed = 20_240_410_947 if generator is None else _seed(generator)
    return _matrix_free(jacobian, null, probes, min(steps, inputs), torch.Generator().manual_seed(seed))


def largest_built(x: Tensor) -> int:
    """The largest number of inputs or outputs of a Jacobian that is built by default, on the device of x."""
    return 16384 if x.is_cuda else 4096


def _exact(jacobian: Jacobian, null: int) -> Spectrum:
    outputs, inputs = jacobian.shape
    full = jacobian.matrix(max(1, TOGETHER * 8 // max(outputs, inputs)))
    # torch's default driver on a GPU is slower at this size.
    values = torch.linalg.svdvals(full, driver="gesvd" if full.is_cuda else None).cpu()
    every = torch.cat([values, values.new_zeros(max(0, inputs - outputs))])  # one for each input
    top = float(values[0])
    resolution = _resolution(jacobian, top)
    least = float(every[inputs - null - 1]) if null < inputs else math.nan
    squares = float((values**2).sum())
    return Spectrum(
        exact=True,
        shape=jacobian.shape,
        precision=_name(jacobian),
        values=values,
        sigma_max=top,
        sigma_max_error=resolution,
        sigma_min=least,
        sigma_min_bound=None,
        null=null,
        null_max=float(every[inputs - null]) if null else 0.0,
        condition=math.nan if top == 0 or null == inputs else top / least if least > resolution else math.inf,
        stable_rank=squares / top**2 if top else math.nan,
        stable_rank_error=0.0,
        quantiles={share: float(torch.quantile(every, share)) for share in SHARES},
        errors=dict.fromkeys(SHARES, resolution),
        resolution=resolution,
    )


def _matrix_free(jacobian: Jacobian, null: int, probes: int, steps: int, generator: torch.Generator) -> Spectrum:
    outputs, inputs = jacobian.shape

    def draw(count: int) -> Tensor:
        noise = torch.randn(count, inputs, generator=generator, dtype=torch.float64)
        return noise.to(jacobian.x.device)

    close = _resolution(jacobian, 1.0)
    together = max(1, TOGETHER // max(outputs, inputs))
    first: Krylov | None = None
    ritz: list[Nodes] = []
    half: list[Nodes] = []
    for start in range(0, probes, together):
        starts = draw(min(together, probes - start))
        krylovs = bidiagonalise(jacobian.times, jacobian.transposed_times, starts, outputs, steps, 8 * close)
        first = first or krylovs[0]  # the other bases are not needed later
        ritz += [nodes(krylov, steps, close) for krylov in krylovs]
        half += [nodes(krylov, max(1, steps // 2), close) for krylov in krylovs]
    assert first is not None
    best = max(ritz, key=lambda each: float(each.values[-1]))
    top, top_error = float(best.values[-1]), float(best.residuals[-1])
    resolution = close * top

    norms = torch.cat(
        [_outside(jacobian, first, draw(min(together, _SAMPLES - at))) for at in range(0, _SAMPLES, together)]
    )
    squares = float((first.bidiagonal**2).sum() + norms.mean())
    squares_error = float(norms.std()) / math.sqrt(_SAMPLES)

    least = min(above_null(each, null, inputs) for each in ritz)
    known = top > 0 and math.isfinite(least)
    quantiles, errors = {}, {}
    for share in SHARES:
        quantiles[share], errors[share] = _quantile(ritz, half, share, inputs)
        errors[share] += resolution
    return Spectrum(
        exact=False,
        shape=jacobian.shape,
        precision=_name(jacobian),
        values=None,
        sigma_max=top,
        sigma_max_error=top_error + resolution,
        sigma_min=None,
        sigma_min_bound=least,
        null=null,
        null_max=None,
        condition=top / max(least, resolution) if known else math.nan,
        stable_rank=squares / top**2 if top else math.nan,
        stable_rank_error=2 * (squares_error + squares * top_error / top) / top**2 if top else math.nan,
        quantiles=quantiles,
        errors=errors,
        resolution=resolution,
    )


def _quantile(ritz: list[Nodes], half: list[Nodes], share: float, inputs: int) -> tuple[float, float]:
    """A quantile and its error: two standard deviations of the probes, plus the change in the second half of steps."""
    deviation = 2 * spread(share, inputs, len(ritz))
    upper = min(1.0, share + deviation)
    if not resolved(ritz, share):
        return bound(ritz, upper), math.inf
    value = quantile(ritz, share)
    low, high = quantile(ritz, max(0.0, share - deviation)), quantile(ritz, upper)
    return value, max(high - value, value - low) + abs(value - quantile(half, share))


def _outside(jacobian: Jacobian, krylov: Krylov, noise: Tensor) -> Tensor:
    """|J (I - V V^T) g|^2 for each g; J V = U B is known, so only J g is computed."""
    inside = noise @ krylov.right.mT @ krylov.bidiagonal.mT.to(noise.device) @ krylov.left
    return (jacobian.times(noise) - inside).square().sum(1).cpu()


def _resolution(jacobian: Jacobian, top: float) -> float:
    return math.sqrt(max(jacobian.shape)) * torch.finfo(jacobian.precision).eps * top


def _seed(generator: torch.Generator) -> int:
    return int(torch.randint(2**62, (), generator=generator, device=generator.device))


def _name(jacobian: Jacobian) -> str:
    return str(jacobian.precision).removeprefix("torch.")
