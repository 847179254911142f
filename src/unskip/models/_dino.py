"""DINO: a student learns to predict, from each crop, the output of an EMA of itself (the teacher) on global crops.

    loss = mean over pairs of a global crop i and another crop j of  - <p_i, log q_j>
    p_i = softmax((t_i - c) / T_t),   q_j = softmax(s_j / T_s),    c <- m c + (1 - m) mean(t)

Caron et al. 2021, "Emerging Properties in Self-Supervised Vision Transformers" (arXiv 2104.14294). Instead of the
centre c, p can be balanced over the batch by Sinkhorn and Knopp's iteration, as in SwAV (arXiv 2006.09882). Both are
over the batches of all processes. Without q being written out, the cross entropy of a pair is

    log sum exp(s_j / T_s) - <p_i, s_j> / T_s

and since it is linear in p_i and in s_j, the sum over all pairs is that of their sums, less i = j.

How a run collapses can be seen in three numbers: the entropy of p (at log(out) every p is uniform), the entropy of the
mean of p (at 0 every image is given the same entry), and the divergence of q from p (at 0 there is nothing to learn).

Small models start near such a point: what all images have in common is most of their class token, so all have nearly
one direction in the bottleneck, centred p is nearly uniform, and that is what the student learns. Batch norm of the
bottleneck (`bottleneck_norm`) takes the common part away, in student and teacher.
"""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unskip._checks import choice
from unskip.errors import BadInput
from unskip.models._processes import BatchNorm, over_processes, several_processes, widened
from unskip.models._vit import trunc_normal_

Balance = Literal["centre", "sinkhorn"]


class Teaching(NamedTuple):
    """What a forward gives."""

    loss: Tensor
    entropy: Tensor  # of the teacher's p, a mean over samples
    spread: Tensor  # the entropy of the mean of p over the batch
    divergence: Tensor  # KL(p, q)


class Head(nn.Module):
    """An MLP to a bottleneck of length 1, and from there a linear layer whose rows have length 1."""

    def __init__(
        self,
        width: int,
        out: int,
        *,
        hidden: int = 2048,
        bottleneck: int = 256,
        layers: int = 3,
        norm: bool = False,
        bottleneck_norm: bool = False,
    ) -> None:
        """`norm` is batch norm within the MLP, `bottleneck_norm` that of its end, without affine."""
        super().__init__()
        if layers < 1:
            raise BadInput(f"a head of {layers} layers; it has one at least")
        sizes = [width, *[hidden] * (layers - 1), bottleneck]
        steps: list[nn.Module] = []
        for index, (a, b) in enumerate(pairwise(sizes)):
            steps.append(nn.Linear(a, b))
            if index < layers - 1:
                steps += [BatchNorm(b), nn.GELU()] if norm else [nn.GELU()]
        self.mlp = nn.Sequential(*steps)
        self.norm = BatchNorm(bottleneck, affine=False) if bottleneck_norm else nn.Identity()
        self.last = nn.Linear(bottleneck, out, bias=False)  # only the directions of its rows count
        trunc_normal_(self)

    def forward(self, x: Tensor) -> Tensor:
        x = F.normalize(self.norm(self.mlp(x)), dim=-1)
        return F.linear(x, F.normalize(self.last.weight, dim=1).to(x.dtype))


class Tower(nn.Module):
    """A backbone that gives one vector an image, and a head."""

    def __init__(self, backbone: nn.Module, head: Head) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.head(self.backbone(images))
        return out


class DINO(nn.Module):
    """Student and teacher. Rewire both backbones alike; `update_teacher_` is the EMA step."""

    centre: Tensor
    temperature: Tensor

    def __init__(
        self,
        backbone: nn.Module,
        *,
        out: int = 65536,
        hidden: int = 2048,
        bottleneck: int = 256,
        layers: int = 3,
        norm: bool = False,
        bottleneck_norm: bool = False,
        student_temperature: float = 0.1,
        centre_momentum: float = 0.9,
        balance: Balance = "centre",
    ) -> None:
        """`backbone` takes images of any size that its patches divide and gives (images, width)."""
        super().__init__()
        choice("DINO", "balance", balance, get_args(Balance))
        sizes: dict[str, int] = {"hidden": hidden, "bottleneck": bottleneck, "layers": layers}
        head = Head(width_of(backbone), out, **sizes, norm=norm, bottleneck_norm=bottleneck_norm)
        self.student = Tower(backbone, head)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        inner: Any
        for inner in self.teacher.modules():  # drop path, dropout and patches left out are the student's
            for name in ("drop_prob", "prob"):
                if hasattr(inner, name):
                    setattr(inner, name, 0.0)
            if isinstance(inner, nn.Dropout):
                inner.p = 0.0
        self.out, self.student_temperature = out, student_temperature
        self.centre_momentum, self.balance = centre_momentum, balance
        self.register_buffer("centre", torch.zeros(out))
        self.register_buffer("temperature", torch.tensor(0.04))  # the teacher's; a schedule moves it

    def forward(self, global_crops: Tensor, local_crops: Tensor) -> Teaching:
        """Crops (images, count, channels, height, width); in training the center is updated."""
        images, count = global_crops.shape[:2]
        with torch.no_grad():
            taught = widened(self.teacher(global_crops.transpose(0, 1).flatten(0, 1)))  # crop by crop
            p = self.targets(taught).unflatten(0, (count, images))
        groups = [global_crops, local_crops] if local_crops.shape[1] else [global_crops]
        logits = torch.cat(
            [widened(self.student(each.transpose(0, 1).flatten(0, 1))).unflatten(0, (-1, images)) for each in groups]
        )
        logits = logits / self.student_temperature  # (crops, images, out)
        normaliser = logits.logsumexp(2)
        pairs = count * (len(logits) - 1)
        if not pairs:
            raise BadInput("one global crop and no local one: there is no pair to compare")
        every = (count * normaliser.sum(0) - (p.sum(0) * logits.sum(0)).sum(1)).mean()
        itself = (normaliser[:count] - (p * logits[:count]).sum(2)).sum(0).mean()
        loss = (every - itself) / pairs
        entropy = torch.special.entr(p).sum(2).mean()
        spread = torch.special.entr(over_processes(p.mean((0, 1)))).sum()
        if self.training and self.balance == "centre":
            self.centre.lerp_(over_processes(taught.mean(0)), 1 - self.centre_momentum)
        return Teaching(loss, entropy, spread, (loss - entropy).detach())

    def targets(self, taught: Tensor) -> Tensor:
        """p of the teacher's outputs (samples, out)."""
        if self.balance == "sinkhorn":
            return sinkhorn(taught / self.temperature)
        return ((taught - self.centre) / self.temperature).softmax(1)

    @torch.no_grad()
    def update_teacher_(self, momentum: float) -> None:
        """teacher <- m teacher + (1 - m) student."""
        theirs, ours = (list[Tensor](tower.parameters()) for tower in (self.teacher, self.student))
        torch._foreach_lerp_(theirs, ours, 1 - momentum)

    def last_layer(self) -> Tensor:
        """The weight that is frozen at the start of training."""
        return self.student.head.last.weight

    @torch.no_grad()
    def spread_(self, generator: torch.Generator | None = None, rounds: int = 20) -> None:
        """Spreads the rows of the last layer evenly: W^T W = (out / bottleneck) I as nearly as `rounds` bring it.

        Then every direction of the bottleneck has outputs of one size: |W z| is the same for all z.
        Rows of equal length and equal columns of W^T W are sought in turn.
        """
        weight = self.last_layer()
        out, bottleneck = weight.shape
        rows = torch.randn(out, bottleneck, generator=generator, dtype=torch.float64)
        for _ in range(rounds if out >= bottleneck else 0):
            values, vectors = torch.linalg.eigh(rows.T @ rows)
            rows = F.normalize(rows @ (vectors * values.rsqrt()) @ vectors.T, dim=1)
        for tower in (self.student, self.teacher):
            tower.head.last.weight.copy_(F.normalize(rows, dim=1))


def sinkhorn(logits: Tensor, rounds: int = 3) -> Tensor:
    """exp(logits) (samples, out) with rows of sum 1, and columns as near to equal sums as `rounds` bring them."""
    highest = logits.max()
    if several_processes():
        torch.distributed.all_reduce(highest, torch.distributed.ReduceOp.MAX)
    q = torch.exp(logits - highest)
    for _ in range(rounds):
        q = q / over_processes(q.sum(0)).clamp_min(1e-30)
        q = q / q.sum(1, keepdim=True).clamp_min(1e-30)
    return q


def width_of(backbone: nn.Module) -> int:
    """The length of the vector that a backbone gives an image."""
    width = getattr(backbone, "num_features", None)
    if not isinstance(width, int):
        raise BadInput(f"{type(backbone).__name__} has no num_features; take a model of timm")
    return width
