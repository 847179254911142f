"""Compares the speed of a DINO training step (ViT-S/16, crops of 2 x 224 px and 8 x 96 px) with the published step.

    python benchmarks/train_dino.py                          # on a GPU: batch 128
    python benchmarks/train_dino.py --small --device cpu     # smoke test at a size for a CPU

    published            crops of one size concatenated to a batch, one call of the head, a loop over pairs of crops in
                         the loss; each gradient clipped by its own norm, with a host sync, the EMA of one weight at a
                         time, and the loss read at every step
    published, foreach   the same model and loss; gradients clipped by their total norm, the EMA of all weights at once,
                         and no host sync
    ours                 `unskip.models.DINO` with the step of the recipe: the same loss without a loop over pairs

All have the same timm ViT with fused attention, drop path 0.1 and a head of 65,536 outputs; forward and loss are
compiled, with bf16 autocast, fused AdamW, and crops on the device. They alternate, and ratios are of adjacent
measurements. First, the losses for the same weights and crops are compared, in float32 and with autocast. The JSON is
written to docs/results/train-dino-gpu.json.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _ahead import compile_ahead
from _turns import Step, arguments, attention, turns, vit, write
from torch import Tensor, nn
from torch.nn import functional as F

from unskip.models import DINO

ROOT = Path(__file__).resolve().parent.parent
BASE = {"size": 224, "local": 96, "patch": 16, "dim": 384, "depth": 12, "heads": 6, "out": 65536, "hidden": 2048}
SMALL = {"size": 32, "local": 16, "patch": 8, "dim": 48, "depth": 2, "heads": 2, "out": 256, "hidden": 64}
GLOBAL, LOCAL, BOTTLENECK = 2, 8, 256  # numbers of crops, and input width of the head's last layer
MOMENTUM, CENTRE_MOMENTUM, CLIP = 0.996, 0.9, 3.0
STUDENT_TEMPERATURE, TEACHER_TEMPERATURE = 0.1, 0.04
Crops = tuple[Tensor, Tensor]  # (images, 2, 3, size, size) and (images, 8, 3, local, local)


def backbone(sizes: dict[str, int], drop_path: float) -> nn.Module:
    return vit("vit_small_patch16_224", sizes, dynamic_img_size=True, drop_path_rate=drop_path)


class Head(nn.Module):
    """The DINO head: a three-layer MLP, L2 normalisation, and a weight-normalised layer with gain 1."""

    gain: Tensor

    def __init__(self, width: int, hidden: int, out: int) -> None:
        super().__init__()
        layers = [nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU()]
        self.mlp = nn.Sequential(*layers, nn.Linear(hidden, BOTTLENECK))
        self.weight = nn.Parameter(torch.randn(out, BOTTLENECK) * 0.02)
        self.register_buffer("gain", torch.ones(out, 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.normalize(self.mlp(x), dim=-1), torch._weight_norm(self.weight, self.gain, 0))


class Published(nn.Module):
    """Student, teacher and loss as in the paper and its training script."""

    centre: Tensor

    def __init__(self, sizes: dict[str, int], drop_path: float) -> None:
        super().__init__()
        self.student = nn.ModuleDict(
            {
                "backbone": backbone(sizes, drop_path),
                "head": Head(sizes["dim"], sizes["hidden"], sizes["out"]),
            }
        )
        self.teacher = nn.ModuleDict({"backbone": backbone(sizes, 0.0), "head": copy.deepcopy(self.student["head"])})
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(False)
        self.register_buffer("centre", torch.zeros(1, sizes["out"]))

    def forward(self, crops: list[Tensor]) -> Tensor:
        wide, local = torch.cat(crops[:GLOBAL]), torch.cat(crops[GLOBAL:])
        with torch.no_grad():
            teacher_outputs = self.teacher["head"](self.teacher["backbone"](wide))
        features = torch.cat([self.student["backbone"](wide), self.student["backbone"](local)])
        student = (self.student["head"](features) / STUDENT_TEMPERATURE).chunk(GLOBAL + LOCAL)
        targets = F.softmax((teacher_outputs - self.centre) / TEACHER_TEMPERATURE, dim=-1).detach().chunk(GLOBAL)
        total: Any = 0
        pairs = 0
        for i, target in enumerate(targets):
            for j, each in enumerate(student):
                if i != j:
                    total = total + torch.sum(-target * F.log_softmax(each, dim=-1), dim=-1).mean()
                    pairs += 1
        with torch.no_grad():
            mean = teacher_outputs.sum(0, keepdim=True) / len(teacher_outputs)
            self.centre.copy_(self.centre * CENTRE_MOMENTUM + mean * (1 - CENTRE_MOMENTUM))
        loss: Tensor = total / pairs
        return loss


def ours(sizes: dict[str, int], drop_path: float) -> DINO:
    """The model of the recipe, with the teacher temperature of the published model."""
    size: dict[str, Any] = {"out": sizes["out"], "hidden": sizes["hidden"], "bottleneck": BOTTLENECK}
    times = {"student_temperature": STUDENT_TEMPERATURE, "centre_momentum": CENTRE_MOMENTUM}
    model = DINO(backbone(sizes, drop_path), **size, **times)
    model.temperature.fill_(TEACHER_TEMPERATURE)
    return model


def data(sizes: dict[str, int], batch: int, device: str) -> Crops:
    wide = torch.randn(batch, GLOBAL, 3, sizes["size"], sizes["size"], device=device)
    return wide, torch.randn(batch, LOCAL, 3, sizes["local"], sizes["local"], device=device)


def as_list(crops: Crops) -> list[Tensor]:
    """The crops as a list with one tensor per crop, as from a data loader."""
    return [each.contiguous() for kind in crops for each in kind.unbind(1)]


def loss_difference(sizes: dict[str, int], device: str) -> dict[str, float]:
    """Absolute difference of the two losses for the same weights and crops, by precision."""
    torch.manual_seed(0)
    reference, own = Published(sizes, 0.0).to(device), ours(sizes, 0.0).to(device)
    for name in ("student", "teacher"):
        tower = dict(reference.get_submodule(name).state_dict())
        tower["head.last.weight"] = tower.pop("head.weight")
        own.get_submodule(name).load_state_dict(tower)
    with torch.no_grad():
        for model in (reference, own):  # makes the teacher differ from the student
            for parameter in model.get_submodule("teacher").parameters():
                parameter.mul_(1.01)
        crops = data(sizes, 8, device)
        apart = {}
        for name, enabled in (("float32", False), ("bf16", True)):
            for model in (reference, own):
                model.centre.zero_()
            with torch.autocast(device, torch.bfloat16, enabled=enabled):
                apart[name] = abs(float(reference(as_list(crops)) - own(*crops).loss))
    return apart


def published_step(model: Published, crops: list[Tensor], mode: str, foreach: bool) -> Step:
    device = crops[0].device.type
    model.train()
    teachers = [*model.teacher.parameters()]
    weights = [*model.student.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=1e-4, weight_decay=0.04, fused=True)
    forward = torch.compile(model, mode=None if mode == "default" else mode)

    def step() -> None:
        with torch.autocast(device, torch.bfloat16):
            loss = forward(crops)
        if not foreach and not math.isfinite(loss.item()):
            raise SystemExit(f"the loss is {loss.item()}")
        optimizer.zero_grad()
        loss.backward()
        if foreach:
            nn.utils.clip_grad_norm_(weights, CLIP)
        else:
            clip_each(weights)
        optimizer.step()
        with torch.no_grad():
            if foreach:
                torch._foreach_lerp_(teachers, weights, 1 - MOMENTUM)
            else:
                for teacher, student in zip(teachers, weights, strict=True):
                    teacher.mul_(MOMENTUM).add_((1 - MOMENTUM) * student)

    return step


def clip_each(weights: list[nn.Parameter]) -> None:
    """Clips every gradient by its own norm."""
    for weight in weights:
        if weight.grad is not None:
            factor = CLIP / (weight.grad.norm() + 1e-6)
            if factor < 1:
                weight.grad.mul_(factor)


def our_step(model: DINO, crops: Crops, mode: str) -> Step:
    device = crops[0].device.type
    model.train()
    weights = [*model.student.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=1e-4, weight_decay=0.04, fused=True)
    forward = torch.compile(model, mode=None if mode == "default" else mode)

    def step() -> None:
        with torch.autocast(device, torch.bfloat16):
            loss = forward(*crops).loss
        loss.backward()
        nn.utils.clip_grad_norm_(weights, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        model.update_teacher_(MOMENTUM)

    return step


def main() -> None:
    options = arguments(__doc__, 128, 10, ROOT / "docs" / "results" / "train-dino-gpu.json")
    sizes = SMALL if options.small else BASE
    batch, steps = (8, 2) if options.small else (options.batch, options.steps)
    if options.device == "cuda" and not options.only:
        same = (f"--batch={batch}", "--steps=1", "--rounds=1", f"--mode={options.mode}")
        compile_ahead(__file__, ["published, foreach", "ours"], *same, f"--attention={options.attention}")
    apart = loss_difference(sizes, options.device)
    print(f"losses differ by {apart['float32']:.2g} in float32, {apart['bf16']:.2g} with bf16 autocast")
    assert apart["float32"] < 1e-3, "the losses differ in float32"
    assert apart["bf16"] < 0.05, "the losses differ by more than bf16 rounding"
    crops = data(sizes, batch, options.device)

    def published(foreach: bool) -> Step:
        return published_step(Published(sizes, 0.1).to(options.device), as_list(crops), options.mode, foreach)

    makers: dict[str, Callable[[], Step]] = {
        "published": partial(published, foreach=False),
        "published, foreach": partial(published, foreach=True),
        "ours": lambda: our_step(ours(sizes, 0.1).to(options.device), crops, options.mode),
    }
    chosen = {name: make for name, make in makers.items() if options.only in name}
    with attention(options.attention):
        results = turns(chosen, crops[0], steps, options.rounds)
    settings = {"batch": batch, "steps": steps, "global crops": GLOBAL, "local crops": LOCAL, **sizes}
    write(__file__, options, settings, **{"losses apart": apart, "results": results})


if __name__ == "__main__":
    main()
