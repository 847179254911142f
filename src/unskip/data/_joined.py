"""Concatenates sets: 'a+b' has the images of a, then those of b, and the classes of both."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unskip.data._images import ImageSet, resized
from unskip.errors import BadInput


def joined(parts: Sequence[ImageSet]) -> ImageSet:
    """Concatenates sets in memory, resized to the largest height and width, and in colour if one of them is."""
    name = "+".join(part.name for part in parts)
    for part in parts:
        if part.images is None:
            raise BadInput(f"{name}: {part.name} is read from disk; only sets in memory can be joined")
    height, width = (max(part.images.shape[axis] for part in parts if part.images is not None) for axis in (2, 3))
    channels = max(part.channels for part in parts)
    images, labels, classes = [], [], list[str]()
    for part in parts:
        assert part.images is not None
        images.append(resized(part.images, (height, width)).expand(-1, channels, -1, -1))
        labels.append(part.labels + len(classes))
        classes += part.classes
    lines = [line for part in parts for line in part.report]
    return ImageSet(name, parts[0].split, tuple(classes), torch.cat(labels), torch.cat(images), tuple(lines))
