"""The effective rank of features, a soft count of the directions that they use, and its entropy.

    p_i = sigma_i / sum_j sigma_j;   rank_entropy = -sum_i p_i log p_i;   effective_rank = exp(rank_entropy)

with the singular values sigma of a feature matrix (samples, dim), minus its mean if centred. The entropy is the rho(A)
of "Residual Connections Harm Generative Representation Learning", arXiv 2404.10947; its exponential is the effective
rank of Roy & Vetterli 2007. The effective rank is between 1 and min(samples, dim), or min(samples - 1, dim) for
centred features.

Constant features have effective rank 0 and entropy -inf. A feature that varies by at most two units in the last place
of its dtype counts as constant: subtracting the mean from constant float32 features leaves rounding noise, which alone
would have full rank.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from unskip._checks import choice, finite, kind_of
from unskip.errors import BadInput
from unskip.measures._input import centred, floats


def effective_rank(x: Tensor, center: bool = True) -> float:
    """exp of the entropy of the normalised singular values of x (samples, dim); 0 if x does not vary."""
    return math.exp(rank_entropy(x, center))


def rank_entropy(x: Tensor, center: bool = True) -> float:
    """The entropy in nats of the normalised singular values of x (samples, dim); -inf if x does not vary."""
    wide = floats("rank_entropy", "x", x, "(samples, dim); see feature_matrix for tokens", 2, 2)
    sigma = _singular_values(centred(wide, x.dtype) if center else wide)
    if len(sigma) == 0:
        return -math.inf
    share = sigma / sigma.sum()
    return float(-(share * share.log()).sum()) + 0.0  # -0.0 becomes 0.0


def feature_matrix(tokens: Tensor, kind: Literal["tokens", "pooled"] = "tokens") -> Tensor:
    """(batch, tokens, dim) as (samples, dim): every token is a sample, or every image, by the mean of its tokens."""
    choice("feature_matrix", "kind", kind, ("tokens", "pooled"))
    if not isinstance(tokens, Tensor) or tokens.ndim != 3:
        raise BadInput(f"feature_matrix: tokens must be (batch, tokens, dim), got {kind_of(tokens)}")
    if kind == "tokens":
        return tokens.flatten(0, 1)
    # In half precision the sum could overflow or lose digits.
    return tokens.to(torch.promote_types(tokens.dtype, torch.float32)).mean(1)


def _singular_values(x: Tensor) -> Tensor:
    """The singular values above rounding error, in float64."""
    scale = x.abs().max()
    if scale == 0:
        return x.new_zeros(0)
    x = x / scale  # squares of huge or tiny entries stay in range
    finite("rank_entropy", "x less its mean", x)
    if len(x) > 2 * x.shape[1]:
        x = torch.linalg.qr(x, mode="r").R  # R has the same singular values, and this is as stable
    sigma: Tensor = torch.linalg.svdvals(x)
    return sigma[sigma > max(x.shape) * torch.finfo(torch.float64).eps * sigma[0]]
