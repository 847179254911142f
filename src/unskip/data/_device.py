"""Augmentation on the device: crop, resize, flip, normalise, erase and mix a whole batch from numbers drawn before.

A crop with resizing is linear and separable, so it is two matrix products per image, out = R x C, with

    R[i, j] = tri((j + 1/2 - c_i) / max(s, 1)),   c_i = top + s (i + 1/2),   s = box / out,   tri(t) = max(0, 1 - |t|)

over the pixels j of the box, each row divided by its sum: bilinear when enlarging, antialiased when shrinking, exact
copies when s = 1. Bicubic takes the cubic kernel with a = -1/2 (Keys 1981) in place of tri. A flip reverses the rows of
C. Pixels beyond the edge are black. Nothing here waits for the device.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy
import torch
from torch import Tensor

from unskip.data._augment import Augment, Interpolation, normalisation


def shown(
    images: Tensor, boxes: Tensor, size: tuple[int, int], pad: int = 0, interpolation: Interpolation = "bilinear"
) -> Tensor:
    """What each box shows: bytes or floats (n, channels, H, W) and (n, 5) to floats (n, channels, *size).

    A box is top, left, height, width and 1 where flipped. It reaches at most `pad` pixels beyond the edge.
    """
    top, left, tall, wide, flip = boxes.float().unbind(1)
    rows = _weights(top, tall, torch.zeros_like(flip), images.shape[-2], size[0], pad, interpolation)
    columns = _weights(left, wide, flip, images.shape[-1], size[1], pad, interpolation)
    count, channels, height, width = images.shape
    # Bytes are exact in half precision, and what it rounds stays within a quarter of one step of a byte.
    kind = torch.float16 if images.is_cuda else torch.float32
    with torch.autocast(images.device.type, enabled=False):
        # Shapes: (n, channels H, W) (n, W, out) -> (n, channels, H, out), then (n, 1, out, H) from the left.
        narrow = torch.bmm(images.to(kind).reshape(count, channels * height, width), columns.to(kind).transpose(1, 2))
        out = torch.matmul(rows.to(kind)[:, None], narrow.reshape(count, channels, height, size[1])).float()
    return out.clamp_(0, 255) if interpolation == "bicubic" else out  # a cubic overshoots at edges


def _weights(
    start: Tensor, length: Tensor, flip: Tensor, pixels: int, out: int, pad: int, interpolation: Interpolation
) -> Tensor:
    """(n, out, pixels): how much of each pixel of the source goes into each of the output."""
    scale = (length / out)[:, None, None]
    places = torch.arange(out, device=start.device)[None, :, None] + 0.5
    places = torch.where(flip[:, None, None] > 0.5, out - places, places)
    # The edge's far side takes part in the sum of weights, and adds black.
    taps = torch.arange(-pad, pixels + pad, device=start.device)[None, None, :] + 0.5
    first = start[:, None, None]
    apart = ((taps - first - scale * places) / scale.clamp_min(1)).abs()
    weights = (1 - apart).clamp_min(0) if interpolation == "bilinear" else _cubic(apart)
    weights = weights * ((taps > first) & (taps < first + length[:, None, None]))
    return (weights / weights.sum(-1, keepdim=True))[..., pad : pad + pixels]


def _cubic(apart: Tensor) -> Tensor:
    """The cubic kernel of distances from 0 on, with a = -1/2."""
    near = (1.5 * apart - 2.5) * apart**2 + 1
    far = ((2.5 - 0.5 * apart) * apart - 4) * apart + 2
    return torch.where(apart < 1, near, torch.where(apart < 2, far, 0.0))


def put(values: Any, device: torch.device) -> Tensor:
    """An array of numpy's on the device."""
    value = torch.from_numpy(values)
    # From pinned memory the copy is queued, and the host does not wait for the device.
    return (value.pin_memory() if device.type == "cuda" else value).to(device, non_blocking=True)


def mean_and_std(
    channels: int, augment: Augment | None = None, device: str | torch.device = "cpu"
) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation for normalisation, each (channels, 1, 1), of values from 0 to 1."""
    mean, std = (torch.tensor(each, device=device)[:, None, None] for each in normalisation(augment, channels))
    return mean, std


def normalised(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Bytes, or floats from 0 to 255, normalised; mean and std are (channels, 1, 1)."""
    mapped = images.device.type == "cpu" and not torch.compiler.is_compiling()
    empty = _mapped(images.shape) if mapped else torch.empty_like(images, dtype=torch.float32)
    return empty.copy_(images).sub_(mean * 255).div_(std * 255)


def _mapped(shape: torch.Size) -> Tensor:
    """Floats in pages of their own, which go back to the system with the tensor. In the heap, glibc reuses few of the
    blocks that batches leave: it grew by 250 MB in an epoch with batches of 5 MB."""
    pages = mmap.mmap(-1, max(1, 4 * shape.numel()), access=mmap.ACCESS_COPY)
    return torch.from_numpy(numpy.ndarray(tuple(shape), numpy.float32, pages))


def erased(images: Tensor, boxes: Tensor) -> Tensor:
    """Normalised images with their boxes (n, 4) at the mean, which is 0."""
    return images.masked_fill(_inside(boxes, images), 0.0)


def mixed(images: Tensor, others: Tensor, table: Tensor) -> Tensor:
    """Each image with its partner; the table (n, >= 6) holds the share, the label's weight and the pasted box."""
    own = table[:, 0, None, None, None] * ~_inside(table[:, 2:6], images)
    return torch.lerp(others, images, own)


def mixed_labels(labels: Tensor, others: Tensor, table: Tensor, classes: int) -> Tensor:
    """(n, classes): the weight of every class."""
    own, every = table[:, 1, None], torch.arange(classes, device=labels.device)
    return own * (labels[:, None] == every) + (1 - own) * (others[:, None] == every)


def _inside(boxes: Tensor, images: Tensor) -> Tensor:
    """(n, 1, H, W): which pixels lie in the boxes (top, left, bottom, right), end exclusive."""
    top, left, bottom, right = boxes[:, :, None].unbind(1)
    rows = torch.arange(images.shape[-2], device=images.device)[None]
    columns = torch.arange(images.shape[-1], device=images.device)[None]
    tall, wide = (rows >= top) & (rows < bottom), (columns >= left) & (columns < right)
    return (tall[:, :, None] & wide[:, None, :])[:, None]
