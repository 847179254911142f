"""SimCLR: contrastive learning of two views of an image against the views of all other images.

    loss = - mean_i log( exp(<z_i, z_i'> / T) / sum over k != i of exp(<z_i, z_k> / T) ),   z of length 1

Chen et al. 2020, "A Simple Framework for Contrastive Learning of Visual Representations" (arXiv 2002.05709); the loss
is InfoNCE (arXiv 1807.03748) over the crops of all processes. For random views it is log(2 n - 1).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unskip.models._dino import width_of
from unskip.models._processes import BatchNorm, several_processes, widened


class Contrast(NamedTuple):
    """The output of a forward pass."""

    loss: Tensor
    aligned: Tensor  # the mean cosine of the two views of an image
    apart: Tensor  # the mean cosine of views of different images


class SimCLR(nn.Module):
    """A backbone and a projection to the unit sphere."""

    def __init__(
        self,
        backbone: nn.Module,
        *,
        hidden: int = 2048,
        out: int = 128,
        temperature: float = 0.2,
        norm: bool = True,
    ) -> None:
        """`norm` adds batch norm to the projection, as in SimCLR, which separates images from the first step on."""
        super().__init__()
        width = width_of(backbone)
        self.backbone, self.temperature = backbone, temperature
        layers = [nn.Linear(width, hidden), BatchNorm(hidden), nn.GELU(), nn.Linear(hidden, out)]
        layers.append(BatchNorm(out, affine=False))
        self.head = nn.Sequential(*(layer for layer in layers if norm or not isinstance(layer, BatchNorm)))

    def forward(self, views: Tensor) -> Contrast:
        """Views (images, 2, channels, height, width)."""
        z = F.normalize(widened(self.head(self.backbone(views.transpose(0, 1).flatten(0, 1)))), dim=1)
        one, two = z.chunk(2)
        return contrast(one, two, self.temperature)


def contrast(one: Tensor, two: Tensor, temperature: float) -> Contrast:
    """InfoNCE of two views (images, dim), unit vectors, in both directions."""
    gathered = [_all_processes(view) for view in (one, two)]
    count, rank = len(one), torch.distributed.get_rank() if several_processes() else 0
    own = torch.arange(count, device=one.device) + rank * count
    total = len(gathered[0])
    z = torch.cat(gathered)
    losses, aligned, apart = [], [], []
    for view, local in enumerate((one, two)):
        cosines = local @ z.T
        scores = cosines / temperature
        itself = torch.arange(2 * total, device=one.device) == (own + view * total)[:, None]
        scores = scores.masked_fill(itself, -torch.inf)
        positive = own + (1 - view) * total
        losses.append(F.cross_entropy(scores, positive))
        near = cosines.detach().gather(1, positive[:, None]).mean()
        others = (cosines.detach().sum() - count * (1 + near)) / max(1, count * (2 * total - 2))
        aligned.append(near)
        apart.append(others)
    return Contrast(torch.stack(losses).mean(), torch.stack(aligned).mean(), torch.stack(apart).mean())


def _all_processes(z: Tensor) -> Tensor:
    """The rows of all processes, in their order, with gradients."""
    gathered: Tensor = _Gather.apply(z) if several_processes() else z
    return gathered


class _Gather(torch.autograd.Function):
    """all_gather along rows. Its gradient is the sum over processes of the gradients of the local rows."""

    @staticmethod
    def forward(context: Any, z: Tensor) -> Tensor:
        context.rows = len(z)
        parts = [torch.empty_like(z) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(parts, z.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        total = gradient.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(total)
        own: Tensor = total.split(context.rows)[torch.distributed.get_rank()]
        return own
