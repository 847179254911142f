"""Features of every block of a model over a set of images, in one pass.

The model runs in evaluation mode; afterwards every module is back in its previous mode.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unskip._checks import choice, kind_of
from unskip._modes import evaluating
from unskip.anatomy import Block, Blocks, Example, block_indices, find_blocks, keep_outputs, pool_tokens
from unskip.errors import BadInput
from unskip.evals._registry import Pool, TokenNorm
from unskip.training import Precision

View = tuple[Pool | Literal["tokens"], TokenNorm]
# Maps a batch of images, their indices in the set and the name of the split to the arguments of the model.
Inputs = Callable[[Tensor, Tensor, str], tuple[Tensor, ...]]
DTYPES = {"float32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_POOLS, _NORMS = ("mean", "cls", "tokens"), ("none", "layer")


@dataclass(frozen=True)
class Features:
    """Pooled features by view and block, float32 (images, dim), and the labels of the images."""

    views: dict[View, dict[int, Tensor]]
    labels: Tensor
    blocks: int  # the number of blocks of the model
    all_blocks: tuple[Block, ...] = ()
    logits: Tensor | None = None  # (images, classes), if requested

    def __getitem__(self, view: View) -> dict[int, Tensor]:
        return self.views[view]

    def __len__(self) -> int:
        return len(self.labels)


@torch.no_grad()
def extract(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    blocks: Blocks = "all",
    views: Iterable[View] = (("mean", "none"),),
    *,
    precision: Precision = "float32",
    all_blocks: Sequence[Block] = (),
    inputs: Inputs | None = None,
    split: str = "test",
    start: int = 0,
    logits: bool = False,
) -> Features:
    """Features of blocks over batches of (images, labels), such as `Feed.evaluate()`; they stay on the device.

    A view is a pool ("mean" over all tokens, "cls", the first token, or "tokens", all of them) and a norm: "none", or
    "layer", which brings tokens to mean 0 and variance 1 before pooling. `blocks` are as for `unskip.features`, or
    "middle"; `all_blocks` are the blocks found by an earlier call on the same model. `inputs` maps a batch of images,
    their indices in the set, counted from `start`, and the name of the `split` to the model's arguments; by default
    these are the images alone. With `logits` the model's output is kept too.
    """
    wanted_views = list(dict.fromkeys(views))
    for pool, norm in wanted_views:
        if pool not in _POOLS or norm not in _NORMS:
            raise BadInput(f"a view must be one of {_POOLS} and one of {_NORMS}, got {(pool, norm)!r}")
    dtype_of(precision)
    kept: dict[View, dict[int, list[Tensor]]] = {view: {} for view in wanted_views}
    labels: list[Tensor] = []
    outputs: list[Tensor] = []
    every, wanted, position = tuple(all_blocks), list[int](), start
    with evaluating(model):
        for images, part in batches:
            indices = torch.arange(position, position + len(images), device=images.device)
            arguments = (images,) if inputs is None else inputs(images, indices, split)
            position += len(images)
            if wanted_views and not every:
                # One image is enough, and faster than a batch.
                every = find_blocks(model, Example.of(tuple(each[:1] for each in arguments)), blocks)
            if wanted_views and not wanted:
                wanted = chosen_blocks(blocks, len(every))
            with keep_outputs(model, every, wanted) as tensors, autocast(images.device, precision):
                output = model(*arguments)
            if logits:
                outputs.append(logits_of(model, output))
            for index in wanted:
                # (images, tokens, dim), or (images, dim)
                tokens = pool_tokens(tensors[index], every[index].axis, None).float()
                for pool, norm in wanted_views:
                    kept[pool, norm].setdefault(index, []).append(_view(tokens, pool, norm))
            labels.append(part)
    if not labels:
        raise BadInput("there is no batch to extract features from")
    whole = {view: {index: torch.cat(parts) for index, parts in by.items()} for view, by in kept.items()}
    return Features(whole, torch.cat(labels), len(every), every, torch.cat(outputs) if logits else None)


def chosen_blocks(blocks: Blocks, count: int) -> list[int]:
    """The selected blocks of a model with `count` blocks, as indices from 0."""
    return [count // 2] if blocks == "middle" else block_indices(blocks, count)


def image_channels(model: nn.Module) -> int | None:
    """The image channels of a model: the input channels of its first convolution; None if it has none."""
    return next((each.in_channels for each in model.modules() if isinstance(each, nn.Conv2d)), None)


def _view(tokens: Tensor, pool: str, norm: TokenNorm) -> Tensor:
    if pool == "cls" and tokens.ndim == 3:
        tokens = tokens[:, 0].clone()  # a view would keep all tokens
    if norm == "layer":
        tokens = F.layer_norm(tokens, tokens.shape[-1:], eps=1e-6)
    return tokens.mean(1) if tokens.ndim == 3 and pool != "tokens" else tokens


def logits_of(model: nn.Module, output: Any) -> Tensor:
    output = getattr(output, "logits", output)  # Hugging Face models
    if not isinstance(output, Tensor) or output.ndim != 2:
        advice = "use a classifier"
        if type(model).__module__.startswith("transformers."):
            advice += " (hf:NAME builds no head; write the classifier by unskip.save and give that folder)"
        raise BadInput(f"{type(model).__name__} must return logits (images, classes), got {kind_of(output)}; {advice}")
    return output.float()


def autocast(device: torch.device, precision: str) -> contextlib.AbstractContextManager[object]:
    """Autocast for a precision by name."""
    dtype = dtype_of(precision)
    return torch.autocast(device.type, dtype) if dtype is not None else contextlib.nullcontext()


def dtype_of(precision: str) -> torch.dtype | None:
    """The autocast dtype of a precision; None for float32."""
    return DTYPES[choice("evaluate", "precision", precision, DTYPES)]
