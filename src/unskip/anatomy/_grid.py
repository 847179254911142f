"""The positions of an image's patches among the tokens of a block.

Class and register tokens come first, then the patches row by row. The patch size is the kernel size of the first
convolution if that embeds non-overlapping patches; otherwise the grid has the aspect ratio of the image.
"""

from __future__ import annotations

from math import isqrt

from torch import Tensor, nn

_MAX_PREFIX = 16  # class and register tokens


def patch_sides(model: nn.Module) -> tuple[int, int] | None:
    """Patch height and width: the kernel size of the first convolution, (1, 1) if its patches overlap; None without."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            sides = (int(module.kernel_size[0]), int(module.kernel_size[1]))
            return sides if tuple(module.stride) == sides else (1, 1)
    return None


def patch_grid(model: nn.Module, output: Tensor, axis: int, image: tuple[int, int]) -> tuple[int, int, int] | None:
    """(tokens before the patches, rows, columns) of a block's output for images of size (height, width); None if its
    tokens form no grid. `axis` is the feature axis.
    """
    if output.ndim == 4:
        rows, columns = output.movedim(axis, -1).shape[1:3]
        return 0, rows, columns
    if output.ndim != 3:
        return None
    tokens, (height, width) = output.shape[1], image
    declared = getattr(model, "num_prefix_tokens", None)
    sides = patch_sides(model)
    if sides is not None:
        rows, columns = height // sides[0], width // sides[1]
        prefix = tokens - rows * columns
        if 0 <= prefix <= _MAX_PREFIX and rows * columns and (not isinstance(declared, int) or declared == prefix):
            return prefix, rows, columns
    for prefix in [declared] if isinstance(declared, int) else (0, 1):
        count = tokens - prefix
        rows = isqrt(max(count, 0) * height // width)
        columns = count // rows if rows else 0
        if min(rows, columns) > 1 and rows * columns == count and rows * width == columns * height:
            return prefix, rows, columns
    return None
