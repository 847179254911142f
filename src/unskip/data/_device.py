"""Augmentation of a batch on the device, by random numbers from `_augment`: crop, resize, flip, normalise, erase, mix.

A crop with resizing is linear and separable, so it is two matrix products per image, out = R x C, with

    R[i, j] = tri((j + 1/2 - c_i) / max(s, 1)),   c_i = top + s (i + 1/2),   s = box / out,   tri(t) = max(0, 1 - |t|)

over the pixels j of the box, with rows normalised to sum 1: bilinear when enlarging, antialiased when shrinking, exact
copies when s = 1. Bicubic replaces tri with the cubic kernel, a = -1/2 (Keys 1981). A flip reverses the rows of C.
Pixels beyond the edge are black. Nothing here synchronises with the device.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy
import torch
from torch import Tensor

from unskip.data._augment import Augment, Interpolation, normalisation


def crop_resize(
    images: Tensor, boxes: Tensor, size: tuple[int, int], pad: int = 0, interpolation: Interpolation = "bilinear"
) -> Tensor:
    """Crops and resizes bytes or floats (n, channels, H, W) to floats (n, channels, *size) by boxes (n, 5).

    A box is top, left, height, width, and 1 if flipped. It extends at most `pad` pixels beyond the edge.
    """
    top, left, tall, wide, flip = boxes.float().unbind(1)
    rows = _weights(top, tall, torch.zeros_like(flip), images.shape[-2], size[0], pad, interpolation)
    columns = _weights(left, wide, flip, images.shape[-1], size[1], pad, interpolation)
    count, channels, height, width = images.shape
    # Bytes are exact in float16, and its rounding error stays below a quarter of a byte step.
    dtype = torch.float16 if images.is_cuda else torch.float32
    with torch.autocast(images.device.type, enabled=False):
        # Shapes: (n, channels H, W) (n, W, out) -> (n, channels, H, out), then (n, 1, out, H) from the left.
        narrow = torch.bmm(images.to(dtype).reshape(count, channels * height, width), columns.to(dtype).transpose(1, 2))
        out = torch.matmul(rows.to(dtype)[:, None], narrow.reshape(count, channels, height, size[1])).float()
    return out.clamp_(0, 255) if interpolation == "bicubic" else out  # the cubic kernel overshoots at edges


def _weights(
    start: Tensor, length: Tensor, flip: Tensor, pixels: int, out: int, pad: int, interpolation: Interpolation
) -> Tensor:
    """(n, out, pixels): the weight of each source pixel in each output pixel."""
    scale = (length / out)[:, None, None]
    centers = torch.arange(out, device=start.device)[None, :, None] + 0.5  # of the output pixels
    centers = torch.where(flip[:, None, None] > 0.5, out - centers, centers)
    # Pixels beyond the edge count in the sum of weights and are black.
    taps = torch.arange(-pad, pixels + pad, device=start.device)[None, None, :] + 0.5
    first = start[:, None, None]
    distance = ((taps - first - scale * centers) / scale.clamp_min(1)).abs()
    weights = (1 - distance).clamp_min(0) if interpolation == "bilinear" else _cubic(distance)
    weights = weights * ((taps > first) & (taps < first + length[:, None, None]))
    return (weights / weights.sum(-1, keepdim=True))[..., pad : pad + pixels]


def _cubic(distance: Tensor) -> Tensor:
    """The cubic kernel at distances of 0 and above, with a = -1/2."""
    near = (1.5 * distance - 2.5) * distance**2 + 1
    far = ((2.5 - 0.5 * distance) * distance - 4) * distance + 2
    return torch.where(distance < 1, near, torch.where(distance < 2, far, 0.0))


def put(values: Any, device: torch.device) -> Tensor:
    """Copies a NumPy array to the device. Pinned memory makes the copy asynchronous."""
    value = torch.from_numpy(values)
    return (value.pin_memory() if device.type == "cuda" else value).to(device, non_blocking=True)


def mean_and_std(
    channels: int, augment: Augment | None = None, device: str | torch.device = "cpu"
) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation (channels, 1, 1) of pixel values in [0, 1]."""
    mean, std = (torch.tensor(stat, device=device)[:, None, None] for stat in normalisation(augment, channels))
    return mean, std


def normalised(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Normalises bytes, or floats from 0 to 255; mean and std are (channels, 1, 1)."""
    mapped = images.device.type == "cpu" and not torch.compiler.is_compiling()
    empty = _mapped(images.shape) if mapped else torch.empty_like(images, dtype=torch.float32)
    return empty.copy_(images).sub_(mean * 255).div_(std * 255)


def _mapped(shape: torch.Size) -> Tensor:
    """An uninitialised float32 tensor in an anonymous mapping, which is returned to the system with the tensor.

    glibc reuses few of the heap blocks of freed batches: the heap grew by 250 MB per epoch with batches of 5 MB.
    """
    pages = mmap.mmap(-1, max(1, 4 * shape.numel()), access=mmap.ACCESS_COPY)
    return torch.from_numpy(numpy.ndarray(tuple(shape), numpy.float32, pages))


def erased(images: Tensor, boxes: Tensor) -> Tensor:
    """Sets the boxes (n, 4) of normalised images to the mean, which is 0."""
    return images.masked_fill(_inside(boxes, images), 0.0)


def mixed(images: Tensor, others: Tensor, table: Tensor) -> Tensor:
    """Mixes each image with its partner by a table (n, >= 6): share, label weight, pasted box."""
    own = table[:, 0, None, None, None] * ~_inside(table[:, 2:6], images)
    return torch.lerp(others, images, own)


def mixed_labels(labels: Tensor, others: Tensor, table: Tensor, classes: int) -> Tensor:
    """(n, classes): the weight of each class."""
    own, index = table[:, 1, None], torch.arange(classes, device=labels.device)
    return own * (labels[:, None] == index) + (1 - own) * (others[:, None] == index)


def _inside(boxes: Tensor, images: Tensor) -> Tensor:
    """(n, 1, H, W): a mask of the boxes (top, left, bottom, right), end exclusive."""
    top, left, bottom, right = boxes[:, :, None].unbind(1)
    rows = torch.arange(images.shape[-2], device=images.device)[None]
    columns = torch.arange(images.shape[-1], device=images.device)[None]
    tall, wide = (rows >= top) & (rows < bottom), (columns >= left) & (columns < right)
    return (tall[:, :, None] & wide[:, None, :])[:, None]
