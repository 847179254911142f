"""Features of every block of a model over a whole set of images, each image going through the model once.

The blocks are found once. The model is put into evaluation mode, and every module back into the mode it was in.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unskip._modes import evaluating
from unskip.anatomy import Example, block_axes, block_indices, keep_outputs, pool_tokens
from unskip.errors import BadInput
from unskip.evals._protocols import Norm, Pool

View = tuple[Pool, Norm]
Blocks = int | Iterable[int] | Literal["all", "middle"]
Precision = Literal["float32", "bf16", "fp16"]
DTYPES = {"float32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Features:
    """Pooled features by view and block, float32 (images, dim), and the labels of the images."""

    views: dict[View, dict[int, Tensor]]
    labels: Tensor
    blocks: int  # how many the model has
    axes: dict[str, int] = field(default_factory=dict)  # path of each, and the axis of features

    def __getitem__(self, view: View) -> dict[int, Tensor]:
        return self.views[view]

    def __len__(self) -> int:
        return len(self.labels)


def extract(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    blocks: Blocks = "all",
    views: Iterable[View] = (("mean", "none"),),
    *,
    precision: Precision = "float32",
    axes: Mapping[str, int] | None = None,
) -> Features:
    """Features of blocks over batches of (images, labels), such as `Feed.evaluate()` gives; they stay on the device.

    A view is a pool ("mean" over all tokens, or "cls", the first) and a norm: "none", or "layer" for tokens brought to
    mean 0 and variance 1 before they are pooled. `axes` are those of an earlier call on the same model, whose blocks
    need not be found again then.
    """
    return gathered(model, (((images,), labels) for images, labels in batches), blocks, views, precision, axes)


@torch.no_grad()
def gathered(
    model: nn.Module,
    batches: Iterable[tuple[tuple[Tensor, ...], Tensor]],
    blocks: Blocks,
    views: Iterable[View],
    precision: Precision,
    axes: Mapping[str, int] | None,
) -> Features:
    """`extract` over batches of (arguments of the model, labels)."""
    wanted_views = list(dict.fromkeys(views))
    for pool, norm in wanted_views:
        if pool not in ("mean", "cls") or norm not in ("none", "layer"):
            raise BadInput(f"a view is ('mean' | 'cls', 'none' | 'layer'), got {(pool, norm)!r}")
    _dtype(precision)
    found: dict[View, dict[int, list[Tensor]]] = {view: {} for view in wanted_views}
    labels: list[Tensor] = []
    axes = dict(axes or {})
    wanted: list[int] = []
    with evaluating(model):
        for inputs, part in batches:
            if not axes:
                # Of one image: an audit of a whole batch takes as much longer.
                axes = block_axes(model, Example.of(tuple(each[:1] for each in inputs)))
            wanted = wanted or ([len(axes) // 2] if blocks == "middle" else block_indices(blocks, len(axes)))
            with keep_outputs(model, axes, wanted) as outputs, autocast(inputs[0].device, precision):
                model(*inputs)
            for index in wanted:
                axis = list(axes.values())[index]
                tokens = pool_tokens(outputs[index], axis, None).float()  # (images, tokens, dim), or (images, dim)
                for pool, norm in wanted_views:
                    found[pool, norm].setdefault(index, []).append(_view(tokens, pool, norm))
            labels.append(part)
    if not labels:
        raise BadInput("there is no batch to take features of")
    whole = {view: {index: torch.cat(parts) for index, parts in by.items()} for view, by in found.items()}
    return Features(whole, torch.cat(labels), len(axes), axes)


def _view(tokens: Tensor, pool: Pool, norm: Norm) -> Tensor:
    if pool == "cls" and tokens.ndim == 3:
        tokens = tokens[:, 0].clone()  # a view would keep all tokens
    if norm == "layer":
        tokens = F.layer_norm(tokens, tokens.shape[-1:], eps=1e-6)
    return tokens.mean(1) if tokens.ndim == 3 else tokens


def autocast(device: torch.device, precision: str) -> contextlib.AbstractContextManager[object]:
    """Autocast for one of the names of a precision."""
    dtype = _dtype(precision)
    return torch.autocast(device.type, dtype) if dtype is not None else contextlib.nullcontext()


def _dtype(precision: str) -> torch.dtype | None:
    if precision not in DTYPES:
        raise BadInput(f"precision is {precision!r}; it can be {', '.join(DTYPES)}")
    return DTYPES[precision]
