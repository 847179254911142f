"""Shared by SiT and U-ViT: sinusoidal time embeddings, labels with an extra "no label", and patches to images."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from unskip._checks import kind_of
from unskip.errors import BadInput

WAVES = 256  # size of the sinusoidal time embedding of SiT


def waves(time: Tensor, count: int) -> Tensor:
    """(batch,) to (batch, count): cosines, then sines, with wavelengths from 2 pi to 2e4 pi."""
    half = count // 2
    rates = torch.exp(torch.arange(half, device=time.device, dtype=torch.float32) * (-math.log(10_000.0) / half))
    angles = time.float()[:, None] * rates
    return torch.cat([angles.cos(), angles.sin()], 1)


def check_sizes(who: str, size: int, patch: int, width: int, depth: int, heads: int, classes: int) -> None:
    """Raises BadInput for sizes that no model can have."""
    if min(size, patch, width, depth, heads) < 1 or classes < 0:
        raise BadInput(f"{who}: size, patch, width, depth and heads must be 1 or more, and classes 0 or more")
    if size % patch:
        raise BadInput(f"{who}: patches of {patch} do not divide images of {size}; change size or patch")
    if width % heads or width % 4:
        raise BadInput(f"{who}: width is {width} with {heads} heads; it must be a multiple of 4 and of the heads")


def sized(who: str, name: str, sizes: dict[str, dict[str, int]]) -> dict[str, int]:
    """ "B/2" as the arguments of a model's builder."""
    letter, slash, patch = name.partition("/")
    if letter.upper() not in sizes or not slash or not patch.isdigit():
        raise BadInput(f"{who} has no size {name!r}; write {', '.join(sizes)}, a slash and the patch size, as in B/2")
    return {**sizes[letter.upper()], "patch": int(patch)}


def check_images(who: str, images: Tensor, channels: int, size: int) -> None:
    """Raises BadInput for images of another shape than the model's."""
    if images.shape[1:] != (channels, size, size):
        raise BadInput(f"{who}: images are {tuple(images.shape[1:])}; the model takes {(channels, size, size)}")


def check_labels(labels: Tensor, classes: int) -> None:
    """Raises BadInput for a label that is neither a class nor `classes`, which means no label. Synchronises a GPU."""
    if labels.is_floating_point() or labels.ndim != 1:
        raise BadInput(f"labels must be whole numbers (batch,), got {kind_of(labels)}")
    wrong = labels[(labels < 0) | (labels > classes)]
    if len(wrong):
        raise BadInput(
            f"label {int(wrong[0])} is out of range: the model has {classes} classes, 0 to {classes - 1}, and "
            f"{classes} means no label"
        )


def conditions(images: Tensor, time: Tensor | None, labels: Tensor | None, classes: int) -> tuple[Tensor, Tensor]:
    """The time and label of each image. The defaults are time 1 (data) and no label."""
    if time is None:
        time = images.new_ones(len(images), dtype=torch.float32)
    elif not torch.compiler.is_compiling() and (not isinstance(time, Tensor) or time.ndim != 1):
        raise BadInput(f"time must be a tensor (batch,), such as torch.full((batch,), 0.5), got {kind_of(time)}")
    if labels is None:
        labels = torch.full((len(images),), classes, device=images.device)
    elif labels.device.type == "cpu" and not torch.compiler.is_compiling():
        check_labels(labels, classes)
    return time, labels


def images_of(patches: Tensor, patch: int, channels: int) -> Tensor:
    """(batch, rows * columns, patch * patch * channels) to (batch, channels, height, width), for squares."""
    side = math.isqrt(patches.shape[1])
    split = patches.reshape(len(patches), side, side, patch, patch, channels)
    return split.permute(0, 5, 1, 3, 2, 4).reshape(len(patches), channels, side * patch, side * patch)


def mirrored(depth: int) -> dict[int, int]:
    """Maps blocks of the second half to the block of the first whose output they get: depth - 1 - l to l.

    Neighbours are excluded, because the output of one is already the input of the other.
    """
    return {depth - 1 - index: index for index in range(depth // 2) if depth - 1 - index > index + 1}


@torch.no_grad()
def xavier_(model: nn.Module) -> None:
    """Fills every linear layer and the patch embedding: Xavier uniform, biases zero."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            weight: Any = module.weight
            nn.init.xavier_uniform_(weight.view(len(weight), -1))
            if module.bias is not None:
                nn.init.zeros_(module.bias)
