"""Patch features of any block of any backbone: its tokens, or the keys, queries or values of its attention.

Tokens are the outputs of blocks. Keys, queries and values are computed from what the attention reads and from views on
its weights (`unskip.parts`), heads side by side, so the layout of the attention does not matter; a norm of queries and
keys is not applied. Class and register tokens come first and are left out. Sides that the patch does not divide are
filled up with the mean colour at the right and at the bottom.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unskip._modes import evaluating
from unskip.anatomy import AttentionParts, Example, ParallelParts, block_axes, block_indices, keep_outputs, parts
from unskip.data import mean_and_std
from unskip.errors import BadInput, UnskipError
from unskip.evals._extract import Precision, autocast

What = Literal["tokens", "keys", "queries", "values"]
_MOST_PREFIX = 16


@dataclass(frozen=True)
class Patches:
    """Features of patches: (images, rows * columns, dim) by block, row by row."""

    blocks: dict[int, Tensor]
    grid: tuple[int, int]
    stride: tuple[float, float]  # pixels of the image a patch is high and wide


@dataclass(frozen=True, eq=False)
class Look:
    """How one attention is read: the modules whose input it takes, nearest to its weights first, and its weights."""

    modules: tuple[nn.Module, ...]
    attention: AttentionParts

    @contextmanager
    def listening(self) -> Iterator[dict[int, Tensor]]:
        """While it is open, what the attention reads is kept by the place of the module that was called with it."""
        seen: dict[int, Tensor] = {}
        handles = [
            module.register_forward_pre_hook(_take(seen, place), with_kwargs=True)
            for place, module in enumerate(self.modules)
        ]
        try:
            yield seen
        finally:
            for handle in handles:
                handle.remove()

    def heard(self, seen: dict[int, Tensor]) -> Tensor:
        """(images, tokens, dim): what was kept nearest to the weights."""
        if not seen:
            raise BadInput(f"{self.attention.site.name}: what its keys are made of is not seen; take what='tokens'")
        return seen[min(seen)]


@torch.no_grad()
def patches(
    model: nn.Module,
    images: Tensor,
    blocks: int | Sequence[int] | Literal["all"] = -1,
    what: What = "tokens",
    *,
    precision: Precision = "float32",
) -> Patches:
    """Patch features of a batch: normalised floats (n, channels, height, width), or bytes."""
    reader = Reader(model, images, blocks, what)
    return reader(images, precision)


class Reader:
    """Reads the patch features of batches of one size; blocks and attentions are looked for once."""

    def __init__(self, model: nn.Module, images: Tensor, blocks: Any = -1, what: What = "tokens") -> None:
        if what not in get_args(What):
            raise BadInput(f"what is {what!r}; it can be {', '.join(get_args(What))}")
        self.model, self.what = model, what
        self.patch = _patch(model, images)
        shown = fitted(model, images[:1], self.patch)
        with evaluating(model):
            try:
                self.axes = block_axes(model, Example.of(shown))
            except UnskipError as error:
                raise BadInput(f"{type(model).__name__}: no blocks to take patch features of ({error})") from error
            self.wanted = block_indices(blocks, len(self.axes))
            if not self.wanted:
                raise BadInput(f"blocks is {blocks!r}; name one at least, of 0 to {len(self.axes) - 1}")
            self.looks = {} if what == "tokens" else looks(model, shown, list(self.axes), self.wanted)

    @torch.no_grad()
    def __call__(self, images: Tensor, precision: Precision = "float32") -> Patches:
        _patch(self.model, images)  # a set that is judged may be of another kind than the one it was made for
        shown = fitted(self.model, images, self.patch)
        with (
            ExitStack() as stack,
            evaluating(self.model),
            keep_outputs(self.model, self.axes, self.wanted) as outputs,
            autocast(shown.device, precision),
        ):
            seen = {index: stack.enter_context(look.listening()) for index, look in self.looks.items()}
            self.model(shown)
        found: dict[int, Tensor] = {}
        grid: tuple[int, int] | None = None
        for index in self.wanted:
            axis = list(self.axes.values())[index]
            tokens, here = _on_grid(self.model, outputs[index], axis, shown, self.patch)
            if self.what != "tokens":
                count, look = here[0] * here[1], self.looks[index]
                read = look.heard(seen[index])
                if len(read) != len(shown) or not 0 <= read.shape[1] - count <= _MOST_PREFIX:
                    raise BadInput(
                        f"{look.attention.site.name}: its attention reads {tuple(read.shape)}, parts of the image, and "
                        f"not {len(shown)} x {count} patches; take what='tokens'"
                    )
                tokens = project(look.attention, self.what, read)[:, -count:].flatten(2)
            found[index] = tokens.float()
            if grid is not None and grid != here:
                raise BadInput(
                    f"blocks {self.wanted}: their grids are {grid} and {here}; take blocks of one resolution"
                )
            grid = here
        assert grid is not None
        stride = (shown.shape[2] / grid[0], shown.shape[3] / grid[1])
        return Patches(found, grid, stride)


def project(attention: AttentionParts, what: str, x: Tensor) -> Tensor:
    """(images, tokens, heads, head_dim): queries, keys or values of what an attention reads (images, tokens, dim)."""
    weight, bias = {
        "queries": (attention.q, attention.q_bias),
        "keys": (attention.k, attention.k_bias),
        "values": (attention.v, attention.v_bias),
    }[what]
    out: Tensor = F.linear(x.to(weight.dtype), weight.flatten(0, 1), None if bias is None else bias.flatten())
    split: Tensor = out.unflatten(2, weight.shape[:2])
    return split


def looks(model: nn.Module, example: Tensor, names: list[str], wanted: Sequence[int]) -> dict[int, Look]:
    """For each wanted block its attention. Raises BadInput where a block has none that can be viewed."""
    every = parts(model, example)
    found: dict[int, Look] = {}
    for index in wanted:
        reason = "no attention in it"
        for place, site in enumerate(every.sites):
            if site.block != names[index]:
                continue
            part = every[place]
            attention = part.attention if isinstance(part, ParallelParts) else part
            if isinstance(attention, AttentionParts) and not attention.cross:
                found[index] = Look(_owners(model, attention), attention)
            elif place in every.reasons:
                reason = every.reasons[place]
        if index not in found:
            raise BadInput(f"{names[index]}: no keys to be had ({reason}); take what='tokens'")
    return found


def _owners(model: nn.Module, attention: AttentionParts) -> tuple[nn.Module, ...]:
    """The module that holds the weights of the keys, whose input is what the attention reads, and the one around it.

    Some take a layer's weight and never call the layer (timm's BEiT and EVA); what is around it is called.
    """
    storage = attention.k.untyped_storage().data_ptr()
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            if parameter.untyped_storage().data_ptr() == storage and parameter.ndim > 1:
                around = model.get_submodule(name.rpartition(".")[0])
                return (module, around) if isinstance(module, nn.Linear) else (module,)
    raise BadInput(f"{attention.site.name}: the weights of its keys belong to no module of the model")


def _take(seen: dict[int, Tensor], place: int) -> Any:
    """A hook that keeps what an attention reads."""

    def hook(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        values = [value for value in (*arguments, *named.values()) if isinstance(value, Tensor)]
        if not values:
            return
        seen[place] = values[min(1, len(values) - 1)] if isinstance(module, nn.MultiheadAttention) else values[0]

    return hook


def fitted(model: nn.Module, images: Tensor, patch: tuple[int, int]) -> Tensor:
    """Bytes normalised, and sides filled up to whole patches, on the device of the model."""
    where = next(model.parameters()).device
    images = images.to(where)
    if images.dtype == torch.uint8:
        mean, std = mean_and_std(images.shape[1], device=where)
        images = (images.float() / 255 - mean) / std
    down, right = -images.shape[2] % patch[0], -images.shape[3] % patch[1]
    images = F.pad(images, (0, right, 0, down)) if down or right else images
    embed: Any = getattr(model, "patch_embed", None)
    size = getattr(embed, "img_size", None)
    fixed = not getattr(model, "dynamic_img_size", False) and getattr(embed, "strict_img_size", True)
    if size is not None and fixed and tuple(size) != tuple(images.shape[2:]):
        raise BadInput(
            f"{type(model).__name__} takes images of {size[0]} x {size[1]}, and these are {images.shape[2]} x "
            f"{images.shape[3]}; resize them, or build the model with dynamic_img_size=True"
        )
    return images


def _patch(model: nn.Module, images: Tensor) -> tuple[int, int]:
    """The sides of a patch: those of the first convolution, where its steps are as wide as it is."""
    if not isinstance(images, Tensor) or images.ndim != 4 or not len(images):
        found = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
        raise BadInput(f"images are a tensor (n, channels, height, width), got {found}")
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            if module.in_channels != images.shape[1]:
                raise BadInput(
                    f"{type(model).__name__} takes {module.in_channels} channels, and the images have {images.shape[1]}"
                )
            sides = (int(module.kernel_size[0]), int(module.kernel_size[1]))
            if tuple(module.stride) != sides:
                sides = (1, 1)
            if images.shape[2] < sides[0] or images.shape[3] < sides[1]:
                raise BadInput(
                    f"images of {images.shape[2]} x {images.shape[3]} are smaller than a patch, {sides[0]} x {sides[1]}"
                )
            return sides
    raise BadInput(f"{type(model).__name__} has no patch tokens: nothing in it embeds patches of an image")


def _on_grid(
    model: nn.Module, output: Tensor, axis: int, shown: Tensor, patch: tuple[int, int]
) -> tuple[Tensor, tuple[int, int]]:
    """The patch tokens of a block's output (images, patches, dim), and their rows and columns."""
    name = type(model).__name__
    if output.ndim == 4:
        maps = output.movedim(axis, -1)
        return maps.flatten(1, 2), (maps.shape[1], maps.shape[2])
    if output.ndim != 3:
        raise BadInput(f"{name} has no patch tokens: a block gives {tuple(output.shape)}")
    rows, columns = shown.shape[2] // patch[0], shown.shape[3] // patch[1]
    prefix = output.shape[1] - rows * columns
    said = getattr(model, "num_prefix_tokens", None)
    if not 0 <= prefix <= _MOST_PREFIX or (isinstance(said, int) and said != prefix):
        raise BadInput(
            f"{name}: a block gives {output.shape[1]} tokens for a grid of {rows} x {columns} patches, which are not "
            "that grid with a few tokens before it"
        )
    return output[:, prefix:], (rows, columns)


def batches(count: int, size: int) -> Iterator[slice]:
    """Slices of `size` over `count`."""
    if size < 1:
        raise BadInput(f"batch is {size}; it is 1 or more")
    for start in range(0, count, size):
        yield slice(start, min(count, start + size))
