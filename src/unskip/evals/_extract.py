"""Features of every block of a model over a whole set of images, each image going through the model once.

The blocks are found once. The model is put into evaluation mode, and every module back into the mode it was in.
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
# From a batch of images, their places in the set and the name of the split to the arguments of the model.
Inputs = Callable[[Tensor, Tensor, str], tuple[Tensor, ...]]
DTYPES = {"float32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_POOLS, _NORMS = ("mean", "cls", "tokens"), ("none", "layer")


@dataclass(frozen=True)
class Features:
    """Pooled features by view and block, float32 (images, dim), and the labels of the images."""

    views: dict[View, dict[int, Tensor]]
    labels: Tensor
    blocks: int  # how many the model has
    all_blocks: tuple[Block, ...] = ()  # what they are
    logits: Tensor | None = None  # (images, classes), where they were asked for

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
    """Features of blocks over batches of (images, labels), such as `Feed.evaluate()` gives; they stay on the device.

    A view is a pool ("mean" over all tokens, "cls", the first, or "tokens", all of them) and a norm: "none", or "layer"
    for tokens brought to mean 0 and variance 1 before they are pooled. `blocks` are as for `unskip.features`, "middle"
    besides; `all_blocks` are those of an earlier call on the same model, which spares finding them again. `inputs`
    makes the model's arguments of a batch of images, their places in the set, from `start` on, and the name of the
    `split`; without it the images are the only one. With `logits` the model's output is kept too.
    """
    wanted_views = list(dict.fromkeys(views))
    for pool, norm in wanted_views:
        if pool not in _POOLS or norm not in _NORMS:
            raise BadInput(f"a view is one of {_POOLS} and one of {_NORMS}, got {(pool, norm)!r}")
    dtype_of(precision)
    kept: dict[View, dict[int, list[Tensor]]] = {view: {} for view in wanted_views}
    labels: list[Tensor] = []
    outputs: list[Tensor] = []
    every, wanted, position = tuple(all_blocks), list[int](), start
    with evaluating(model):
        for images, part in batches:
            places = torch.arange(position, position + len(images), device=images.device)
            given = (images,) if inputs is None else inputs(images, places, split)
            position += len(images)
            if wanted_views and not every:
                # Of one image: an audit of a whole batch takes as much longer.
                every = find_blocks(model, Example.of(tuple(each[:1] for each in given)), blocks)
            if wanted_views and not wanted:
                wanted = chosen_blocks(blocks, len(every))
            with keep_outputs(model, every, wanted) as tensors, autocast(images.device, precision):
                output = model(*given)
            if logits:
                outputs.append(logits_of(model, output))
            for index in wanted:
                tokens = pool_tokens(
                    tensors[index], every[index].axis, None
                ).float()  # (images, tokens, dim), or (images, dim)
                for pool, norm in wanted_views:
                    kept[pool, norm].setdefault(index, []).append(_view(tokens, pool, norm))
            labels.append(part)
    if not labels:
        raise BadInput("there is no batch to take features of")
    whole = {view: {index: torch.cat(parts) for index, parts in by.items()} for view, by in kept.items()}
    return Features(whole, torch.cat(labels), len(every), every, torch.cat(outputs) if logits else None)


def chosen_blocks(blocks: Blocks, count: int) -> list[int]:
    """Indices from 0 on of blocks of a model that has so many."""
    return [count // 2] if blocks == "middle" else block_indices(blocks, count)


def image_channels(model: nn.Module) -> int | None:
    """The channels of the images that a model takes, those of its first convolution; None where it has none."""
    return next((each.in_channels for each in model.modules() if isinstance(each, nn.Conv2d)), None)


def _view(tokens: Tensor, pool: str, norm: TokenNorm) -> Tensor:
    if pool == "cls" and tokens.ndim == 3:
        tokens = tokens[:, 0].clone()  # a view would keep all tokens
    if norm == "layer":
        tokens = F.layer_norm(tokens, tokens.shape[-1:], eps=1e-6)
    return tokens.mean(1) if tokens.ndim == 3 and pool != "tokens" else tokens


def logits_of(model: nn.Module, output: Any) -> Tensor:
    output = getattr(output, "logits", output)  # as models of Hugging Face have them
    if not isinstance(output, Tensor) or output.ndim != 2:
        raise BadInput(
            f"{type(model).__name__} gives no logits (images, classes) but {kind_of(output)}; take a classifier"
        )
    return output.float()


def autocast(device: torch.device, precision: str) -> contextlib.AbstractContextManager[object]:
    """Autocast for one of the names of a precision."""
    dtype = dtype_of(precision)
    return torch.autocast(device.type, dtype) if dtype is not None else contextlib.nullcontext()


def dtype_of(precision: str) -> torch.dtype | None:
    """The type that a precision computes in; None for float32."""
    return DTYPES[choice("evaluate", "precision", precision, DTYPES)]
