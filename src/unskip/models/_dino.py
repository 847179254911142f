"""DINO: a student predicts, from each crop, the output of an EMA of itself (the teacher) on global crops.

    loss = mean over pairs of a global crop i and another crop j of  - <p_i, log q_j>
    p_i = softmax((t_i - c) / T_t),   q_j = softmax(s_j / T_s),    c <- m c + (1 - m) mean(t)

Caron et al. 2021, "Emerging Properties in Self-Supervised Vision Transformers" (arXiv 2104.14294). Instead of
subtracting the centre c, p can be balanced over the batch by Sinkhorn-Knopp, as in SwAV (arXiv 2006.09882). Both use
the batches of all processes. The cross entropy of a pair is

    log sum exp(s_j / T_s) - <p_i, s_j> / T_s

whose second term is linear in p_i and s_j, so all pairs need only the sums over i and j, minus the terms i = j.

Three numbers show collapse: the entropy of p (log(out) if every p is uniform), the entropy of the mean of p (0 if every
image gets the same entry), and the divergence of q from p (0 if there is nothing to learn).

Small models start near collapse: most of the class token is common to all images, so all have nearly one direction in
the bottleneck, and centred p is nearly uniform. Batch norm of the bottleneck (`bottleneck_norm`) removes the common
part in student and teacher.
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
    """The output of a forward pass."""

    loss: Tensor
    entropy: Tensor  # of the teacher's p, a mean over samples
    spread: Tensor  # the entropy of the mean of p over the batch
    divergence: Tensor  # KL(p, q)


class Head(nn.Module):
    """An MLP to a unit-length bottleneck, then a linear layer with unit-length rows."""

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
        """`norm` is batch norm in the MLP, `bottleneck_norm` batch norm of its output, without affine."""
        super().__init__()
        if layers < 1:
            raise BadInput(f"a head of {layers} layers; it needs at least one")
        sizes = [width, *[hidden] * (layers - 1), bottleneck]
        steps: list[nn.Module] = []
        for index, (a, b) in enumerate(pairwise(sizes)):
            steps.append(nn.Linear(a, b))
            if index < layers - 1:
                steps += [BatchNorm(b), nn.GELU()] if norm else [nn.GELU()]
        self.mlp = nn.Sequential(*steps)
        self.norm = BatchNorm(bottleneck, affine=False) if bottleneck_norm else nn.Identity()
        self.last = nn.Linear(bottleneck, out, bias=False)  # only the directions of its rows matter
        trunc_normal_(self)

    def forward(self, x: Tensor) -> Tensor:
        x = F.normalize(self.norm(self.mlp(x)), dim=-1)
        return F.linear(x, F.normalize(self.last.weight, dim=1).to(x.dtype))


class Tower(nn.Module):
    """A backbone with one vector per image, and a head."""

    def __init__(self, backbone: nn.Module, head: Head) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.head(self.backbone(images))
        return out


class DINO(nn.Module):
    """Student and teacher. Rewire both backbones equally; `update_teacher_` is the EMA step."""

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
        """`backbone` accepts images of any size that is a multiple of its patches, and returns (images, width)."""
        super().__init__()
        choice("DINO", "balance", balance, get_args(Balance))
        sizes: dict[str, int] = {"hidden": hidden, "bottleneck": bottleneck, "layers": layers}
        head = Head(width_of(backbone), out, **sizes, norm=norm, bottleneck_norm=bottleneck_norm)
        self.student = Tower(backbone, head)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        inner: Any
        for inner in self.teacher.modules():  # the teacher has no drop path, dropout or patch dropout
            for name in ("drop_prob", "prob"):
                if hasattr(inner, name):
                    setattr(inner, name, 0.0)
            if isinstance(inner, nn.Dropout):
                inner.p = 0.0
        self.out, self.student_temperature = out, student_temperature
        self.centre_momentum, self.balance = centre_momentum, balance
        self.register_buffer("centre", torch.zeros(out))
        self.register_buffer("temperature", torch.tensor(0.04))  # the teacher's, set by a schedule

    def forward(self, global_crops: Tensor, local_crops: Tensor) -> Teaching:
        """Crops (images, count, channels, height, width); in training the center is updated."""
        images, count = global_crops.shape[:2]
        with torch.no_grad():
            outputs = widened(self.teacher(global_crops.transpose(0, 1).flatten(0, 1)))  # crop by crop
            p = self.targets(outputs).unflatten(0, (count, images))
        groups = [global_crops, local_crops] if local_crops.shape[1] else [global_crops]
        logits = torch.cat(
            [widened(self.student(crops.transpose(0, 1).flatten(0, 1))).unflatten(0, (-1, images)) for crops in groups]
        )
        logits = logits / self.student_temperature  # (crops, images, out)
        normaliser = logits.logsumexp(2)
        pairs = count * (len(logits) - 1)
        if not pairs:
            raise BadInput("one global crop and no local crop: there is no pair to compare")
        all_pairs = (count * normaliser.sum(0) - (p.sum(0) * logits.sum(0)).sum(1)).mean()
        same_crop = (normaliser[:count] - (p * logits[:count]).sum(2)).sum(0).mean()
        loss = (all_pairs - same_crop) / pairs
        entropy = torch.special.entr(p).sum(2).mean()
        spread = torch.special.entr(over_processes(p.mean((0, 1)))).sum()
        if self.training and self.balance == "centre":
            self.centre.lerp_(over_processes(outputs.mean(0)), 1 - self.centre_momentum)
        return Teaching(loss, entropy, spread, (loss - entropy).detach())

    def targets(self, outputs: Tensor) -> Tensor:
        """p for the teacher's outputs (samples, out)."""
        if self.balance == "sinkhorn":
            return sinkhorn(outputs / self.temperature)
        return ((outputs - self.centre) / self.temperature).softmax(1)

    @torch.no_grad()
    def update_teacher_(self, momentum: float) -> None:
        """teacher <- m teacher + (1 - m) student."""
        teacher, student = (list[Tensor](tower.parameters()) for tower in (self.teacher, self.student))
        torch._foreach_lerp_(teacher, student, 1 - momentum)

    def last_layer(self) -> Tensor:
        """The weight that is frozen at the start of training."""
        return self.student.head.last.weight

    @torch.no_grad()
    def spread_(self, generator: torch.Generator | None = None) -> None:
        """Spreads the rows of the last layer evenly: W^T W is near (out / bottleneck) I after 20 rounds.

        Then |W z| is equal for all directions z of the bottleneck. Alternates between whitening W^T W and
        normalising rows.
        """
        weight = self.last_layer()
        out, bottleneck = weight.shape
        rows = torch.randn(out, bottleneck, generator=generator, dtype=torch.float64)
        for _ in range(20 if out >= bottleneck else 0):
            values, vectors = torch.linalg.eigh(rows.T @ rows)
            rows = F.normalize(rows @ (vectors * values.rsqrt()) @ vectors.T, dim=1)
        for tower in (self.student, self.teacher):
            tower.head.last.weight.copy_(F.normalize(rows, dim=1))


def sinkhorn(logits: Tensor, rounds: int = 3) -> Tensor:
    """exp(logits) (samples, out), scaled to rows of sum 1 and nearly equal column sums in `rounds` iterations."""
    highest = logits.max()
    if several_processes():
        torch.distributed.all_reduce(highest, torch.distributed.ReduceOp.MAX)
    q = torch.exp(logits - highest)
    for _ in range(rounds):
        q = q / over_processes(q.sum(0)).clamp_min(1e-30)
        q = q / q.sum(1, keepdim=True).clamp_min(1e-30)
    return q


def width_of(backbone: nn.Module) -> int:
    """The size of the vector that a backbone returns per image."""
    width = getattr(backbone, "num_features", None)
    if not isinstance(width, int):
        raise BadInput(f"{type(backbone).__name__} has no num_features; use a timm model")
    return width
