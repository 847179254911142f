"""Folds a skip into the linear map that directly follows the block.

    y = A x + W_down h + b,  h = phi(W_up n(x) + b_up)        z = L y + l = (L A) x + (L W_down) h + (L b + l)

So z is one linear map of x and h concatenated, and the sum y is not computed. This is exact for every activation, with
gates and with a norm before the MLP. It takes (d + h) k products for k outputs instead of h d + d k, so it is cheaper
if k < d, as before a head or a bottleneck. It is not possible with a norm after the sum.
"""

from __future__ import annotations

import torch
from torch import nn

from unskip.absorption._block import Block
from unskip.absorption._from import block_of
from unskip.anatomy import MlpParts
from unskip.errors import BadInput


def fold(block: Block | MlpParts, after: nn.Linear) -> nn.Linear:
    """Returns the linear map that takes torch.cat([x, block.hidden(x)], -1) to after(block(x)).

    It is computed in float64 and stored in the dtype of `after`.
    """
    if not isinstance(block, Block | MlpParts):
        raise BadInput(f"fold: expected a Block or MlpParts, got {type(block).__name__}; see unskip.parts")
    block = block_of(block)
    stands = {"post", "out"} & block.norms.keys()
    if stands:
        raise BadInput(f"fold: a norm stands between the skip and the next linear map ({', '.join(sorted(stands))})")
    if not isinstance(after, nn.Linear):
        raise BadInput(f"fold: a skip folds into an nn.Linear, got {type(after).__name__}")
    if after.in_features != block.outputs:
        raise BadInput(f"fold: the block gives {block.outputs} values and the linear map takes {after.in_features}")
    with torch.no_grad():
        weight = after.weight.detach().double()
        both = torch.cat([weight @ block.matrix.to(weight), weight @ block.down.detach().to(weight)], 1)
        const = None if after.bias is None else after.bias.detach().double()
        if block.down_bias is not None:
            moved = weight @ block.down_bias.detach().to(weight)
            const = moved if const is None else const + moved
        out = nn.Linear(both.shape[1], len(both), const is not None).to(after.weight)
        out.weight.copy_(both)
        if const is not None:
            out.bias.copy_(const)
        return out
