"""Values and output: W_V W_O = gain^2 R, with R orthogonal over the whole width, not per head.

From "Cutting the Skip: Training Residual-Free Transformers" (arXiv 2510.00345), where gain is c. If the heads have
fewer dimensions than the stream, W_V W_O is a partial isometry.

    carrying heads    the first heads alone are gain^2 R: with self-attention near 1 they pass every token on
    mixing heads      the others write `mix` times as much

Carrying heads are not from the paper. A head cannot both pass tokens on and mix them; with heads * d_head above the
width there is room for heads of both kinds.
"""

from __future__ import annotations

from torch import Tensor

from unskip.anatomy import AttentionParts, Parts, named
from unskip.errors import InitError
from unskip.init._draw import Draw


def value_output_(part: AttentionParts, gain: float, draw: Draw) -> None:
    """Fills W_V and W_O of one attention; their biases become 0 and its LayerScale 1."""
    groups, width, columns = part.v.shape
    inner, rows = groups * width, part.out.shape[0]
    value = draw.orthogonal(inner, columns)
    if inner >= columns:
        out = draw.orthogonal(rows, columns) @ value.T  # so that out @ value is the first factor
    else:
        out = draw.orthogonal(rows, inner)
    part.v.copy_((gain * value).reshape(part.v.shape))
    share = part.heads // groups  # heads that share a value split its output evenly
    out = out.reshape(rows, groups, 1, width).expand(rows, groups, share, width) / share
    part.out.copy_((gain * out).reshape(part.out.shape))
    for bias in (part.v_bias, part.out_bias):
        if bias is not None:
            bias.zero_()
    if part.scale is not None:
        part.scale.fill_(1)  # it would undo the scale of the last weight


def carry_(part: AttentionParts, carry: int, gain: float, mix: float, draw: Draw) -> None:
    """Fills W_V and W_O again: the first `carry` heads pass tokens on, the others add a mixture."""
    (v, out, size), *others = split(part, carry, gain, mix)
    value = draw.orthonormal(v.shape[0] * v.shape[1], v.shape[2])
    v.copy_((gain * value).reshape(v.shape))
    out.copy_(size * draw.orthonormal(len(out), len(out)) @ value.T)
    for v, out, size in others:
        inner = v.shape[0] * v.shape[1]
        v.copy_((gain * draw.orthonormal(inner, v.shape[2])).reshape(v.shape))
        out.copy_(size * draw.orthonormal(len(out), inner))


def split(part: AttentionParts, carry: int, gain: float, mix: float) -> list[tuple[Tensor, Tensor, float]]:
    """W_V, W_O and the size of W_O: of the carrying heads, then of the others if there are any."""
    first = carry * part.v.shape[1]
    blocks = [(part.v[:carry], part.out[:, :first], gain)]
    return [*blocks, (part.v[carry:], part.out[:, first:], mix * gain)] if carry < part.heads else blocks


def refuse_to_carry(chosen: Parts, carry: int) -> None:
    """Raises InitError if `carry` heads cannot carry the stream."""
    for part in chosen.attentions():
        heads, width, dim = part.v.shape
        if heads != part.heads or dim != len(part.out):
            raise InitError(f"{named([part.site])}: heads that share values, or change the width, cannot carry tokens")
        least = -(-dim // width)
        if not least <= carry <= heads:
            counts = f"{least} to {heads}" if least < heads else f"{heads}"
            use = f"use {counts}" if least <= heads else "use wider heads"
            raise InitError(
                f"{named([part.site])}: carry is {carry}, with {heads} heads of {width} for a width of {dim}; {use}. "
                "Nothing was changed."
            )
