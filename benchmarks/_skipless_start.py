"""Starts for a ViT without skips, as functions on a model and a batch of images.

    position_code_    orthogonal position embeddings, as long as the patch tokens
    whiten_patches_   patch embedding R Sigma^power, Sigma the covariance of the patches' pixels
    shaped_           skipless_ with an MLP that keeps angles: W_up = g R, b_up = bias, W_down = gain R,
                      b_down = -W_down E[phi(W_up z + bias)]
    calibrate_        W_Q W_K^T = alpha Z + b I, b solved block by block so that mean self-attention is a target
    carry_            some heads together carry each token through, the others mix tokens
    watch             token cosine, self-attention and token rank by block

In `shaped_` a bias moves GELU to where it is nearly linear, and the output bias takes out the mean: the correlation map
of the MLP has a slope near 1 at 1, so tokens neither collapse nor become chaotic with depth (deep kernel shaping, arXiv
2110.01765, written into weights). `calibrate_` can start the last heads of a block near-uniform instead.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor, nn

import unskip


def position_code_(model: nn.Module, images: Tensor, *, scale: float = 1.0, generator: torch.Generator) -> float:
    """Makes the position embeddings of a timm ViT orthogonal, `scale` times as long as patch tokens. Returns that."""
    vit: Any = model
    with torch.no_grad():
        length = scale * float(vit.patch_embed(images).norm(dim=-1).mean())
        count, dim = vit.pos_embed.shape[-2:]
        rows = _orthogonal(count, dim, generator) * math.sqrt(max(count / dim, 1.0))
        vit.pos_embed.copy_((length * rows).to(vit.pos_embed))
    return length


def whiten_patches_(model: nn.Module, images: Tensor, *, power: float = -0.25, generator: torch.Generator) -> None:
    """Fills the patch embedding of a timm ViT with R Sigma^power; tokens keep their mean length, their mean is 0."""
    vit: Any = model
    conv = vit.patch_embed.proj
    with torch.no_grad():
        before = float(vit.patch_embed(images).norm(dim=-1).mean())
        patches = nn.functional.unfold(images, conv.kernel_size, stride=conv.stride).mT.flatten(0, 1).double().cpu()
        mean = patches.mean(0)
        values, vectors = torch.linalg.eigh(torch.cov(patches.T))
        root = vectors * (values + 1e-4 * values[-1]) ** power @ vectors.T
        weight = _orthogonal(len(conv.weight), len(mean), generator) @ root
        weight *= before / float((weight @ (patches - mean).T).norm(dim=0).mean())
        conv.weight.copy_(weight.reshape(conv.weight.shape).to(conv.weight))
        if conv.bias is not None:
            conv.bias.copy_(-(weight @ mean).to(conv.bias))


def shaped_(
    model: nn.Module,
    images: Tensor,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    c: float = 9.0,
    gain: float = 9.0,
    bias: float | None = 1.5,
    generator: torch.Generator,
) -> None:
    """Initialises every branch with `skipless_`, then shapes the MLPs; with `bias` None their biases stay 0."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", unskip.errors.UnskipWarning)
        unskip.init.skipless_(model, images[:2], qk_noise=alpha, qk_identity=beta, vo_gain=c, generator=generator)
    points = torch.linspace(-8, 8, 1025, dtype=torch.float64)
    weights = (-points.square() / 2).exp()
    weights /= weights.sum()
    with torch.no_grad():
        for part in unskip.parts(model, images[:1]).mlps():
            part.down.mul_(gain)
            if bias is None:
                continue
            assert part.function is not None
            assert part.up_bias is not None
            assert part.down_bias is not None
            part.up_bias.fill_(bias)
            sizes = part.up.double().cpu().norm(dim=1)
            means = part.function(sizes[:, None] * points + bias) @ weights
            part.down_bias.copy_(-(part.down.double().cpu() @ means).to(part.down_bias))


def calibrate_(
    model: nn.Module,
    images: Tensor,
    target: float,
    *,
    alpha: float = 1.0,
    even: int = 0,
    most: float = 4.0,
    generator: torch.Generator,
) -> list[float]:
    """Solves the weight b of the identity in W_Q W_K^T = alpha Z + b I, block by block, on a batch.

    The mean over images, tokens and heads of what a token pays to itself becomes `target`, where some b up to `most`
    reaches it. The last `even` heads of each block start near-uniform instead (0.1 Z) and do not count. Returns each b.
    """
    result = []
    with torch.no_grad():
        for part in unskip.parts(model, images[:1]).attentions():
            assert part.norm is not None
            tokens = _output(model, part.norm.path, images)
            dim = tokens.shape[-1]
            noise = torch.randn(part.heads, dim, dim, generator=generator) / math.sqrt(dim)
            sharp = part.heads - even
            _fill(part, noise, [0.1] * part.heads, [0.0] * part.heads)
            low, high = 0.0, most
            for _ in range(10):
                middle = (low + high) / 2 if low > 1 else math.sqrt(max(low, 0.02) * high)
                _fill(part, noise[:sharp], [alpha] * sharp, [middle] * sharp)
                reached = float(self_attention(part, tokens)[:sharp].mean())
                low, high = (middle, high) if reached < target else (low, middle)
            result.append(middle)
    return result


def carry_(
    model: nn.Module, images: Tensor, carriers: int, *, c: float = 9.0, mix: float = 0.3, generator: torch.Generator
) -> None:
    """Sets W_V and W_O so that the first `carriers` heads of each block pass tokens on, and the others add a mixture.

    Under an attention that looks at itself only, the carriers together are c^2 R, R orthogonal: they need as many
    dimensions as the stream. The others write `mix` times as much. W_Q and W_K are those of `calibrate_`.
    """
    with torch.no_grad():
        for part in unskip.parts(model, images[:1]).attentions():
            heads, width, dim = part.v.shape
            if carriers * width < dim:
                raise ValueError(f"{part.site.name}: {carriers} heads of {width} cannot carry {dim} dimensions")
            first = carriers * width
            value = _orthogonal(first, dim, generator)
            part.v[:carriers].copy_((c * value).reshape(carriers, width, dim))
            part.out[:, :first].copy_(c * _orthogonal(dim, dim, generator) @ value.T)
            if heads > carriers:
                rest = (heads - carriers) * width
                part.v[carriers:].copy_((c * _orthogonal(rest, dim, generator)).reshape(-1, width, dim))
                part.out[:, first:].copy_(mix * c * _orthogonal(dim, rest, generator))


def _orthogonal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    tall = torch.randn(max(rows, columns), min(rows, columns), generator=generator, dtype=torch.float64)
    q = torch.linalg.qr(tall)[0]
    return q.T if rows < columns else q


def _fill(part: Any, noise: Tensor, alphas: list[float], betas: list[float]) -> None:
    """The first heads: factors of equal weight of the best approximation of rank d_head, as in `skipless_`."""
    eye = torch.eye(noise.shape[-1])
    matrices = torch.stack([a * z + b * eye for a, z, b in zip(alphas, noise, betas, strict=True)])
    u, s, v = torch.linalg.svd(matrices)
    root = s[:, : part.head_dim, None].sqrt()
    part.q[: len(noise)].copy_(u.mT[:, : part.head_dim] * root)
    part.k[: len(noise)].copy_(v[:, : part.head_dim] * root)


def self_attention(part: Any, tokens: Tensor) -> Tensor:
    """(heads,): what tokens (images, tokens, dim) pay to themselves, in the mean."""
    q, k = (torch.einsum("bnd,hed->bhne", tokens, weight.float()) for weight in (part.q, part.k))
    if part.q_bias is not None:
        q, k = q + part.q_bias.view(part.heads, 1, -1), k + part.k_bias.view(part.heads, 1, -1)
    return (part.softmax_scale * q @ k.mT).softmax(-1).diagonal(dim1=-2, dim2=-1).mean((0, 2))


def _output(model: nn.Module, path: str, images: Tensor) -> Tensor:
    """What a module gives in a forward pass."""
    held: list[Tensor] = []
    hook = model.get_submodule(path).register_forward_hook(lambda module, inputs, output: held.append(output.detach()))
    try:
        model(images)
    finally:
        hook.remove()
    return held[0].float()


def watch(model: nn.Module, parts: Any, images: Tensor) -> dict[str, list[float]]:
    """By block: mean cosine between tokens, self-attention, effective rank of an image's tokens (mean of images)."""
    vit: Any = model
    attentions = [*parts.attentions()]
    outputs: list[Tensor] = []
    inputs: list[Tensor] = []
    hooks = [block.register_forward_hook(lambda m, i, o: outputs.append(o.detach().float())) for block in vit.blocks]
    hooks += [
        model.get_submodule(part.norm.path).register_forward_hook(lambda m, i, o: inputs.append(o.detach().float()))
        for part in attentions
    ]
    try:
        with torch.no_grad():
            model(images)
    finally:
        for hook in hooks:
            hook.remove()
    result: dict[str, list[float]] = {"cosine": [], "self_attention": [], "token_rank": []}
    for tokens in outputs:
        unit = nn.functional.normalize(tokens, dim=-1)
        count = tokens.shape[1]
        others = (unit @ unit.mT).sum((1, 2)) - count  # of a token with itself it is 1
        result["cosine"].append(float(others.mean()) / (count * (count - 1)))
        result["token_rank"].append(_rank(tokens))
    with torch.no_grad():
        for part, tokens in zip(attentions, inputs, strict=True):
            result["self_attention"].append(float(self_attention(part, tokens).mean()))
    return {name: [float(f"{value:.4g}") for value in values] for name, values in result.items()}


def _rank(tokens: Tensor) -> float:
    """exp of the entropy of the singular values of each image's centred tokens, normalised to sum 1; their mean."""
    values = torch.linalg.svdvals((tokens - tokens.mean(1, keepdim=True))[:16].double().cpu())
    shares = values / values.sum(-1, keepdim=True).clamp_min(1e-300)
    return float(torch.special.entr(shares).sum(-1).exp().mean())
