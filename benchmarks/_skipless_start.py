"""Initialisations that the classifier studies try besides `unskip.init`, and token statistics by block.

whiten_patches_   patch embedding R Sigma^power, Sigma the covariance of the patches' pixels
paired_           half of an MLP's units pass tokens on: phi(z) - phi(-z) = z for GELU, SiLU and ReLU
shifted_          a quarter of them do, with a bias where GELU is nearly linear
watch             token cosine, self-attention, token rank and kurtosis by block
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def whiten_patches_(model: nn.Module, images: Tensor, *, power: float = -0.25, generator: torch.Generator) -> None:
    """Sets the patch embedding of a timm ViT to R Sigma^power. Tokens get mean 0 and keep their mean norm."""
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


def paired_(part: Any, up: float, gain: float, mix: float, *, generator: torch.Generator) -> None:
    """Initialises an MLP: 2 * width mirrored units compute up gain Q R x exactly; the others' output is `mix` times it.

        W_up = [up R; -up R; S],  W_down = [gain Q, -gain Q, mix up gain T],  R, Q, S, T orthogonal

    The output bias removes the mean of the other units.
    """
    first, last, others = _drawn(part, 2 * part.up.shape[1], generator)
    columns = mix * up * gain * _orthogonal(part.up.shape[1], len(others), generator)
    _fill(part, [up * first, -up * first, others], [gain * last, -gain * last, columns])


def shifted_(part: Any, shift: float, mix: float, *, generator: torch.Generator) -> None:
    """Initialises an MLP: `width` units with a bias of `shift`, where GELU is nearly linear, compute Q R x; the others
    are as in `paired_`. Half as many units pass tokens on.

        W_up = [R; S],  W_down = [Q, mix T],  b = [shift, 0]
    """
    first, last, others = _drawn(part, part.up.shape[1], generator)
    _fill(part, [first, others], [last, mix * _orthogonal(part.up.shape[1], len(others), generator)], shift)


def _drawn(part: Any, carrying: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """R, Q and S of `paired_`; `carrying` units pass tokens on."""
    hidden, width = part.up.shape
    rest = hidden - carrying
    first, last = _orthogonal(width, width, generator), _orthogonal(width, width, generator)
    return first, last, max(rest / width, 1) ** 0.5 * _orthogonal(rest, width, generator)


def _fill(part: Any, up: list[Tensor], down: list[Tensor], shift: float = 0.0) -> None:
    """Writes W_up, W_down, the bias of the first rows, and the output bias that removes the mean."""
    from unskip.anatomy import mean_output

    with torch.no_grad():
        part.up.copy_(torch.cat(up).to(part.up))
        part.down.copy_(torch.cat(down, 1).to(part.down))
        part.up_bias.zero_()
        part.up_bias[: len(up[0])] = shift
        part.down_bias.zero_()
        part.down_bias.copy_(-mean_output(part).to(part.down_bias))


def _orthogonal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    tall = torch.randn(max(rows, columns), min(rows, columns), generator=generator, dtype=torch.float64)
    q = torch.linalg.qr(tall)[0]
    return q.T if rows < columns else q


def self_attention(part: Any, tokens: Tensor) -> Tensor:
    """(heads,): mean attention of tokens (images, tokens, dim) to themselves."""
    q, k = (torch.einsum("bnd,hed->bhne", tokens, weight.float()) for weight in (part.q, part.k))
    if part.q_bias is not None:
        q, k = q + part.q_bias.view(part.heads, 1, -1), k + part.k_bias.view(part.heads, 1, -1)
    return (part.softmax_scale * q @ k.mT).softmax(-1).diagonal(dim1=-2, dim2=-1).mean((0, 2))


def watch(model: nn.Module, parts: Any, images: Tensor) -> dict[str, list[float]]:
    """By block: mean cosine between tokens, self-attention, effective rank of each image's tokens (mean over images),
    and excess kurtosis of the token entries."""
    from unskip.measures import excess_kurtosis

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
    result: dict[str, list[float]] = {"cosine": [], "self_attention": [], "token_rank": [], "kurtosis": []}
    for tokens in outputs:
        unit = nn.functional.normalize(tokens, dim=-1)
        count = tokens.shape[1]
        others = (unit @ unit.mT).sum((1, 2)) - count  # without the cosine 1 of each token with itself
        result["cosine"].append(float(others.mean()) / (count * (count - 1)))
        result["token_rank"].append(_rank(tokens))
        result["kurtosis"].append(excess_kurtosis(tokens))
    with torch.no_grad():
        for part, tokens in zip(attentions, inputs, strict=True):
            result["self_attention"].append(float(self_attention(part, tokens).mean()))
    return {name: [float(f"{value:.4g}") for value in values] for name, values in result.items()}


def _rank(tokens: Tensor) -> float:
    """Effective rank of each image's centred tokens (exp of the entropy of their normalised singular values), mean."""
    values = torch.linalg.svdvals((tokens - tokens.mean(1, keepdim=True))[:16].double().cpu())
    shares = values / values.sum(-1, keepdim=True).clamp_min(1e-300)
    return float(torch.special.entr(shares).sum(-1).exp().mean())
