"""Patch features of any block of any backbone: its tokens, or the keys, queries or values of its attention.

Tokens are the outputs of blocks, without class and register tokens, which come first. Images whose sides are not
multiples of the patch size are padded with the mean colour at the right and bottom.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unskip._checks import choice, kind_of
from unskip._modes import evaluating
from unskip.anatomy import Block, Blocks, Example, find_blocks, keep_outputs, patch_grid, patch_sides
from unskip.data import Normalise, preprocess_of
from unskip.errors import BadInput, UnskipError
from unskip.evals._extract import autocast, chosen_blocks, image_channels
from unskip.evals._keys import attention_inputs, project
from unskip.evals._registry import What
from unskip.optim import matmul_precision
from unskip.training import Precision


@dataclass(frozen=True)
class Patches:
    """Features of patches: (images, rows * columns, dim) by block, row by row."""

    blocks: dict[int, Tensor]
    grid: tuple[int, int]
    stride: tuple[float, float]  # height and width of a patch in pixels
    size: tuple[int, int]  # height and width of the images


@torch.no_grad()
def patches(
    model: nn.Module,
    images: Tensor,
    blocks: Blocks = -1,
    what: What = "tokens",
    *,
    precision: Precision = "float32",
    normalise: Normalise | None = None,
) -> Patches:
    """Patch features of a batch: normalised floats (n, channels, height, width), or bytes.

    Bytes are normalised by the model's preprocessing, or by `normalise`, (mean, std).
    """
    return Reader(model, images, blocks, what, normalise=normalise)(images, precision)


class Reader:
    """Computes patch features of batches of one image size; blocks and attentions are found once."""

    def __init__(
        self,
        model: nn.Module,
        images: Tensor,
        blocks: Blocks = -1,
        what: What = "tokens",
        *,
        normalise: Normalise | None = None,
        all_blocks: Sequence[Block] = (),
    ) -> None:
        choice("patches", "what", what, get_args(What))
        self.model, self.what, self.normalise = model, what, normalise
        shown = self.fitted(images[:1])
        with evaluating(model):
            try:
                self.all_blocks = tuple(all_blocks) or find_blocks(model, Example.of(shown), blocks)
            except UnskipError as error:
                raise BadInput(f"{type(model).__name__}: no blocks to take patch features from ({error})") from error
            self.wanted = chosen_blocks(blocks, len(self.all_blocks))
            if not self.wanted:
                raise BadInput(f"blocks is {blocks!r}; name at least one block, 0 to {len(self.all_blocks) - 1}")
            self.attentions = {} if what == "tokens" else attention_inputs(model, shown, self.all_blocks, self.wanted)

    @torch.no_grad()
    def __call__(self, images: Tensor, precision: Precision = "float32", exact: bool = False) -> Patches:
        """With `exact` the model computes in float32 without TF32, regardless of `precision`."""
        shown = self.fitted(images)
        with (
            contextlib.ExitStack() as stack,
            evaluating(self.model),
            keep_outputs(self.model, self.all_blocks, self.wanted) as outputs,
            matmul_precision("float32", shown.device) if exact else autocast(shown.device, precision),
        ):
            inputs = {index: stack.enter_context(each.kept()) for index, each in self.attentions.items()}
            self.model(shown)
        tensors: dict[int, Tensor] = {}
        grids: dict[int, tuple[int, int]] = {}
        for index in self.wanted:
            tokens, grids[index] = self._on_grid(outputs[index], self.all_blocks[index].axis, shown)
            tensors[index] = (tokens if self.what == "tokens" else self._projected(index, inputs, grids[index])).float()
        if len({*grids.values()}) > 1:
            raise BadInput(f"blocks have different resolutions, {sorted({*grids.values()})}; choose those of one")
        rows, columns = grids[self.wanted[0]]
        stride = (shown.shape[2] / rows, shown.shape[3] / columns)
        return Patches(tensors, (rows, columns), stride, (images.shape[2], images.shape[3]))

    def fitted(self, images: Tensor) -> Tensor:
        """Images on the device of the model, bytes normalised, sides padded to whole patches."""
        height, width = _patch_size(self.model, images)
        images = images.to(next(self.model.parameters()).device)
        if images.dtype == torch.uint8:
            images = preprocess_of(self.model, images.shape[1], self.normalise).normalised(images)
        bottom, right = -images.shape[2] % height, -images.shape[3] % width
        images = F.pad(images, (0, right, 0, bottom)) if bottom or right else images
        embed: Any = getattr(self.model, "patch_embed", None)
        size = getattr(embed, "img_size", None)
        fixed = not getattr(self.model, "dynamic_img_size", False) and getattr(embed, "strict_img_size", True)
        if size is not None and fixed and tuple(size) != tuple(images.shape[2:]):
            raise BadInput(
                f"{type(self.model).__name__} takes images of {size[0]} x {size[1]}, got {images.shape[2]} x "
                f"{images.shape[3]}; resize them, or build the model with dynamic_img_size=True"
            )
        return images

    def _on_grid(self, output: Tensor, axis: int, shown: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """The patch tokens of a block's output (images, patches, dim), and their rows and columns."""
        grid = patch_grid(self.model, output, axis, (shown.shape[2], shown.shape[3]))
        if grid is None:
            raise BadInput(
                f"{type(self.model).__name__} has no patch tokens: a block returns {tuple(output.shape)} for images of "
                f"{shown.shape[2]} x {shown.shape[3]}, which is not a grid, or a grid after a few other tokens"
            )
        prefix, rows, columns = grid
        maps = output.movedim(axis, -1)
        return (maps.flatten(1, 2) if maps.ndim == 4 else maps)[:, prefix:], (rows, columns)

    def _projected(self, index: int, inputs: dict[int, dict[int, Tensor]], grid: tuple[int, int]) -> Tensor:
        """The keys, queries or values of a block, one vector for each patch."""
        attention, count = self.attentions[index], grid[0] * grid[1]
        x = attention.read(inputs[index])
        if x.ndim != 3 or not 0 <= x.shape[1] - count <= 16:
            raise BadInput(
                f"{attention.attention.site.name}: the input of its attention is {tuple(x.shape)}, parts of the image "
                f"instead of the {count} patches of each image; use what='tokens'"
            )
        return project(attention.attention, self.what, x)[:, -count:].flatten(2)


def read_patches(
    model: nn.Module,
    batches: Iterable[Tensor],
    blocks: Blocks = "all",
    what: What = "tokens",
    *,
    precision: Precision = "float32",
    exact: bool = False,
    most: int | None = None,
    normalise: Normalise | None = None,
    all_blocks: Sequence[Block] = (),
) -> tuple[Patches, tuple[Block, ...]]:
    """Patch features of batches of images of one size, limited to the first `most` images, and the blocks."""
    reader, read, count = None, None, 0
    parts: dict[int, list[Tensor]] = {}
    for images in batches:
        images = images if most is None else images[: most - count]
        if not len(images):
            break
        reader = reader or Reader(model, images, blocks, what, normalise=normalise, all_blocks=all_blocks)
        read = reader(images, precision, exact)
        for index, tokens in read.blocks.items():
            parts.setdefault(index, []).append(tokens)
        count += len(images)
    if reader is None or read is None:
        raise BadInput("there are no images to take patch features from")
    whole = {index: torch.cat(each) for index, each in parts.items()}
    return Patches(whole, read.grid, read.stride, read.size), reader.all_blocks


def _patch_size(model: nn.Module, images: Tensor) -> tuple[int, int]:
    """Height and width of a patch. Raises BadInput if the images do not fit the model."""
    if not isinstance(images, Tensor) or images.ndim != 4 or not len(images):
        raise BadInput(f"images must be a non-empty tensor (n, channels, height, width), got {kind_of(images)}")
    name, sides = type(model).__name__, patch_sides(model)
    channels = image_channels(model)
    if sides is None or channels is None:  # an unknown patch embedding
        return 1, 1
    if channels != images.shape[1]:
        raise BadInput(f"{name} takes {channels} channels, but the images have {images.shape[1]}")
    if images.shape[2] < sides[0] or images.shape[3] < sides[1]:
        raise BadInput(
            f"images of {images.shape[2]} x {images.shape[3]} are smaller than a patch, {sides[0]} x {sides[1]}"
        )
    return sides


def chunks(count: int, size: int) -> Iterator[slice]:
    """Slices of `size` over `count`."""
    if size < 1:
        raise BadInput(f"batch is {size}; it must be 1 or more")
    for start in range(0, count, size):
        yield slice(start, min(count, start + size))
