"""Where the patches of an image lie among the tokens of a block.

Class and register tokens come before the patches, and the patches row by row. The sides of a patch are those of the
first convolution, where it embeds patches one by one; a model that embeds them in another way has a grid of the
image's proportions.
"""

from __future__ import annotations

from math import isqrt

from torch import Tensor, nn

_MOST_PREFIX = 16  # class and register tokens


def patch_sides(model: nn.Module) -> tuple[int, int] | None:
    """Height and width of a patch: those of the first convolution, 1 x 1 where its patches overlap; None without."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            sides = (int(module.kernel_size[0]), int(module.kernel_size[1]))
            return sides if tuple(module.stride) == sides else (1, 1)
    return None


def patch_grid(model: nn.Module, output: Tensor, axis: int, image: tuple[int, int]) -> tuple[int, int, int] | None:
    """(tokens before the patches, rows, columns) of a block's output for images (height, width); None where its tokens
    are no grid. `axis` is that of the features."""
    if output.ndim == 4:
        rows, columns = output.movedim(axis, -1).shape[1:3]
        return 0, rows, columns
    if output.ndim != 3:
        return None
    tokens, (height, width) = output.shape[1], image
    said = getattr(model, "num_prefix_tokens", None)
    sides = patch_sides(model)
    if sides is not None:
        rows, columns = height // sides[0], width // sides[1]
        prefix = tokens - rows * columns
        if 0 <= prefix <= _MOST_PREFIX and rows * columns and (not isinstance(said, int) or said == prefix):
            return prefix, rows, columns
    for prefix in [said] if isinstance(said, int) else (0, 1):
        count = tokens - prefix
        rows = isqrt(max(count, 0) * height // width)
        columns = count // rows if rows else 0
        if min(rows, columns) > 1 and rows * columns == count and rows * width == columns * height:
            return prefix, rows, columns
    return None
