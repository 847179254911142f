"""Position codes: position embeddings with the norm of the tokens that they are added to.

    orthogonal    rows of a random orthogonal matrix: all pairs of positions are equally far apart
    sincos        2-D sines and cosines of the column and the row of a patch, 0 for class and register tokens

Usual position embeddings have standard deviation 0.02, far below that of a token. A model without skips passes on only
the outputs of its blocks, and attention without positions cannot distinguish equal patches.

The parameter is found in a trace (`find_positions`), not by its name.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from unskip._checks import choice, number
from unskip.anatomy import Example, ModelTrace, example_for, find_positions, patch_grid, trace_model
from unskip.errors import BadInput, InitError
from unskip.init._check import RowBuilder
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
    """Fills the position embeddings of a model with a code of `scale` times the norm of its tokens on the example.

    Returns that norm, in a ViT of its patch tokens. Class and register tokens have rows of their own with "orthogonal"
    and zeros with "sincos". With more positions than dimensions the columns are orthogonal instead of the rows.
    """
    number("position_code_", "scale", scale, zero=False)
    parameter, length, waves = _found(model, example, kind)
    length *= scale
    if waves is None:
        count, dim = parameter.shape[-2:]
        code = Draw(generator).orthonormal(count, dim) * math.sqrt(max(count / dim, 1.0))
    with torch.no_grad():
        parameter.copy_((length * (code if waves is None else waves)).to(parameter))
    return length


def check_position_code(model: nn.Module, example: object, kind: PositionCode, row: RowBuilder) -> None:
    """Checks that the position embeddings are such a code, with the norm of the tokens on the example."""
    parameter, length, waves = _found(model, example, kind)
    code = parameter.detach().double().cpu().flatten(0, -2)
    count, dim = code.shape
    if waves is None:
        rank, length = min(count, dim), length * math.sqrt(max(count / dim, 1.0))
        size = float(code.norm()) / math.sqrt(rank)
        unit = (code if count <= dim else code.T) / size
        error = float((unit @ unit.T - torch.eye(rank).double()).abs().max())
    else:
        size = float(code.norm() / waves.norm())
        error = float((code / size - waves).abs().max())
    tolerance = 8 * torch.finfo(parameter.dtype).eps
    row.values["code norm"] = norm = size / length
    row.values["code error"] = error
    row.expect(abs(norm - 1) <= max(0.05, tolerance), f"the position code has {norm:.3g} times the norm of the tokens")
    row.expect(error <= max(1e-5, tolerance), f"the position embeddings are {error:.2g} from the code {kind}")


def _found(model: nn.Module, example: object, kind: PositionCode) -> tuple[nn.Parameter, float, Tensor | None]:
    """The position embeddings, the mean norm of the patch tokens on the example, and the code "sincos" at norm 1."""
    choice("position_code_", "kind", kind, get_args(PositionCode))
    whole = example_for(model, example)
    parameter, added = _embeddings(model, trace_model(model, whole))
    count, dim = parameter.shape[-2:]
    leading, prefix, rows, columns = _grid(model, added, whole, count)
    length = float(added[..., leading:, :].float().norm(dim=-1).mean())
    if not 0 < length < math.inf:
        raise InitError(
            f"{type(model).__name__}: its patch tokens have norm {length:g} on the example, so a position code has no "
            "scale. Nothing was changed; pass an example of real images."
        )
    if kind == "orthogonal":
        return parameter, length, None
    if prefix + rows * columns != count:
        raise InitError(
            f"{type(model).__name__}: {count - prefix} positions do not form a patch grid; use kind='orthogonal'"
        )
    waves = sine_cosine(rows, columns, dim) * math.sqrt(2 / dim)
    return parameter, length, nn.functional.pad(waves, (0, 0, prefix, 0))


def sine_cosine(rows: int, columns: int, dim: int) -> Tensor:
    """(rows * columns, dim): sines and cosines of the column, then of the row; dim / 4 wavelengths, 2 pi to 2e4 pi."""
    if dim % 4:
        raise BadInput(f"sine-cosine positions need a width that is a multiple of 4, got {dim}")
    rates = 10_000.0 ** -(torch.arange(dim // 4, dtype=torch.float64) / (dim // 4))
    axes = torch.meshgrid(torch.arange(rows).double(), torch.arange(columns).double(), indexing="ij")
    parts = [wave(axis.flatten()[:, None] * rates) for axis in axes[::-1] for wave in (torch.sin, torch.cos)]
    return torch.cat(parts, 1).float()


def _embeddings(model: nn.Module, trace: ModelTrace) -> tuple[nn.Parameter, Tensor]:
    """The position embeddings, and the tokens (samples, tokens, dim) to which they are added."""
    values = trace.graph.values
    names = {parameter.untyped_storage().data_ptr(): name for name, parameter in model.named_parameters()}
    weights = {names.get(values[i].untyped_storage().data_ptr()): values[of] for i, of in find_positions(trace).items()}
    found = {name: tokens for name, tokens in weights.items() if name is not None}
    if len(found) > 1:
        raise InitError(
            f"{type(model).__name__}: {' and '.join(found)} are all added to its tokens before the first block, so it "
            "is unknown which of them has its position embeddings. Nothing was changed; drop the position code."
        )
    for name, tokens in found.items():
        return model.get_parameter(name), tokens
    raise InitError(
        f"{type(model).__name__}: no position embeddings are added to its tokens before the first block (it may have "
        "rotary, relative or fixed positions, or none; or the example has one token, or contains the positions). "
        "Nothing was changed; drop the position code."
    )


def _grid(model: nn.Module, tokens: Tensor, example: Example, count: int) -> tuple[int, int, int, int]:
    """(leading, prefix, rows, columns): the class and register tokens among the tokens and among the `count`
    embeddings, and the patch grid of these.
    """
    images = [value for value in example.values if isinstance(value, Tensor) and value.ndim == 4]
    grid = patch_grid(model, tokens, -1, (images[0].shape[-2], images[0].shape[-1])) if images else None
    leading, rows, columns = grid or (0, 0, 0)
    prefixes = [leading, 1] if images else [leading]  # a class token with a row may join the patches later (ViTMAE)
    grids = [(prefix, rows, columns) for prefix in prefixes]
    squares = [(prefix, math.isqrt(max(count - prefix, 0))) for prefix in prefixes]
    grids += [(prefix, side, side) for prefix, side in squares]  # which the model resizes to its images
    found = [grid for grid in grids if grid[0] + grid[1] * grid[2] == count]
    return (leading, *(found[0] if found else (leading, 0, 0)))
