"""Position codes: embeddings of positions that are as long as the tokens they are added to.

    orthogonal    rows of a random orthogonal matrix: every two positions differ alike
    sincos        2-D sines and cosines of the column and the row of a patch, 0 for class and register tokens

A usual start has position embeddings of standard deviation 0.02, a small part of a token. A model without skips passes
on only what its blocks compute, and attention without positions cannot tell equal patches apart.

The parameter is found in a trace, not by its name: what does not depend on the input and is added, row by row, to the
tokens before the first block.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from unskip._checks import choice, number
from unskip.anatomy import Example, ModelTrace, example_for, patch_grid, trace_model
from unskip.errors import BadInput, InitError
from unskip.init._draw import Draw

PositionCode = Literal["orthogonal", "sincos"]  # of `position_code_`


def position_code_(
    model: nn.Module,
    example: object = None,
    *,
    kind: PositionCode = "orthogonal",
    scale: float = 1.0,
    generator: torch.Generator | None = None,
) -> float:
    """Fills the position embeddings of a ViT with a code, `scale` times as long as its patch tokens on the example.

    Returns that length. With "orthogonal" class and register tokens have rows of their own, with "sincos" theirs are 0.
    More positions than dimensions cannot all be orthogonal: then the columns are.
    """
    choice("position_code_", "kind", kind, get_args(PositionCode))
    number("position_code_", "scale", scale, zero=False)
    draw = Draw(generator)
    whole = example_for(model, example)
    parameter, added = _embeddings(model, trace_model(model, whole))
    count, dim = parameter.shape[-2:]
    prefix, rows, columns = _grid(model, added, whole, count)
    length = scale * float(added[..., prefix:, :].float().norm(dim=-1).mean())
    if kind == "orthogonal":
        code = draw.orthonormal(count, dim) * math.sqrt(max(count / dim, 1.0))
    elif prefix + rows * columns == count:
        code = nn.functional.pad(sine_cosine(rows, columns, dim) * math.sqrt(2 / dim), (0, 0, prefix, 0))
    else:
        raise InitError(
            f"{type(model).__name__}: {count - prefix} positions are no grid of patches; take kind='orthogonal'"
        )
    with torch.no_grad():
        parameter.copy_((length * code).to(parameter))
    return length


def sine_cosine(rows: int, columns: int, dim: int) -> Tensor:
    """(rows * columns, dim): sines and cosines of the column, then of the row, at dim / 4 wave lengths from 2 pi to
    2e4 pi."""
    if dim % 4:
        raise BadInput(f"positions take a width that is a multiple of 4, got {dim}")
    rates = 10_000.0 ** -(torch.arange(dim // 4, dtype=torch.float64) / (dim // 4))
    places = torch.meshgrid(torch.arange(rows).double(), torch.arange(columns).double(), indexing="ij")
    parts = [wave(axis.flatten()[:, None] * rates) for axis in places[::-1] for wave in (torch.sin, torch.cos)]
    return torch.cat(parts, 1).float()


def _embeddings(model: nn.Module, trace: ModelTrace) -> tuple[nn.Parameter, Tensor]:
    """The position embeddings, and the tokens (samples, tokens, dim) that they are added to."""
    nodes, values = trace.graph.nodes, trace.graph.values
    own = {parameter.untyped_storage().data_ptr(): parameter for parameter in model.parameters()}
    first = min((run.root for site, runs in zip(trace.sites, trace.runs, strict=True) for run in runs[:1]), default=0)
    for node in nodes[: first + 1]:
        if node.op != "add" or len(node.parents) != 2 or node.index not in nodes[first]:
            continue
        for fixed, moving in (node.parents, node.parents[::-1]):
            shape = nodes[moving].shape
            if not nodes[fixed].fixed or nodes[moving].fixed or nodes[fixed].shape[-2:] != shape[-2:] or len(shape) < 3:
                continue
            leaves = [leaf for leaf in nodes[: fixed + 1] if leaf.op == "weight" and leaf.index in nodes[fixed]]
            parameters = [own.get(values[leaf.index].untyped_storage().data_ptr()) for leaf in leaves]
            tables = [each for each in parameters if each is not None and each.ndim > 1 and each.shape[-1] == shape[-1]]
            if len(tables) == 1 and tables[0].numel() == math.prod(tables[0].shape[-2:]):
                return tables[0], values[moving]
    raise InitError(
        f"{type(model).__name__}: no position embeddings are added to its tokens before the first block (it may have "
        "rotary or relative positions, or none). Nothing was changed; leave the position code out."
    )


def _grid(model: nn.Module, tokens: Tensor, example: Example, count: int) -> tuple[int, int, int]:
    """Class and register tokens before the patches, rows and columns of the patches, for `count` embeddings."""
    images = [value for value in example.values if isinstance(value, Tensor) and value.ndim == 4]
    seen = patch_grid(model, tokens, -1, (images[0].shape[-2], images[0].shape[-1])) if images else None
    prefix, rows, columns = seen or (0, 0, 0)
    if prefix + rows * columns != count:  # embeddings of a square that the model fits to its images
        rows = columns = math.isqrt(count - prefix)
    return prefix, rows, columns
