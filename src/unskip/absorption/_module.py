"""An MLP that is trained with a skip and computes the same function without one.

It trains x + W_down phi(W_up x + b) with `hidden - dim` units. `absorbed()` uses the other `dim` units for mirrored
rows, which represent the skip: the same function at width `hidden`, without a constraint on training. (Splits need
`dim` independent rows. Training keeps them independent in practice, and this is checked.) Splits lose more digits than
bfloat16 and float16 allow. With `pairs`, 2 `dim` units are used for the pairs phi(x_i) - phi(-x_i), which lose none.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from unskip import _checks
from unskip.absorption._activations import resolve
from unskip.absorption._block import Block
from unskip.absorption._decide import absorb
from unskip.absorption._measure import SPLIT_TOLERANCE, compare_outputs
from unskip.errors import BadInput


class _Activation(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        return resolve(self.name)[0].function(x)

    def extra_repr(self) -> str:
        return self.name


class AbsorbableMLP(nn.Module):
    """x + MLP(x) in training; `absorbed()` returns an equal plain MLP of `hidden` units."""

    def __init__(self, dim: int, hidden: int, activation: str = "gelu", bias: bool = True, pairs: bool = False) -> None:
        super().__init__()
        phi, gated = resolve(activation)
        if gated or phi.family != "odd-linear":
            raise BadInput(
                f"AbsorbableMLP: {activation!r} has no linear odd part, so its skip cannot be absorbed; "
                "use relu, gelu, silu or another of that class"
            )
        dim = _checks.whole("AbsorbableMLP", "dim", dim, low=1)
        spent = 2 * dim if pairs else dim
        if _checks.whole("AbsorbableMLP", "hidden", hidden) < spent + dim:
            least = f"{3 if pairs else 2} * dim = {spent + dim}"
            raise BadInput(f"AbsorbableMLP: hidden must be at least {least}, got {hidden}")
        self.hidden = hidden
        self.pairs = pairs
        self.activation = activation
        self.up = nn.Linear(dim, hidden - spent, bias=bias)
        self.act = _Activation(activation)
        self.down = nn.Linear(hidden - spent, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """x + W_down act(W_up x), with x (..., dim)."""
        branch: Tensor = self.down(self.act(self.up(x)))
        return x + branch

    def block(self) -> Block:
        """The weights as a block."""
        return Block(
            self.up.weight.detach(),
            self.down.weight.detach(),
            up_bias=None if self.up.bias is None else self.up.bias.detach(),
            down_bias=None if self.down.bias is None else self.down.bias.detach(),
            activation=self.activation,
        )

    def absorbed(self) -> nn.Sequential:
        """The same function as Linear, activation, Linear, without a skip."""
        block = self.block()
        stored = absorb(block, width=self.hidden)
        if stored.status == "possible":
            return plain(stored.replacement())
        verdict = absorb(block.double(), width=self.hidden)
        if verdict.status != "possible":
            raise BadInput(f"AbsorbableMLP: {verdict.reason} The rows of its `up` layer have to span the input")
        made = verdict.replacement().stored_as(block)
        seen = compare_outputs(block, made, tolerance=SPLIT_TOLERANCE)
        if not seen.holds:
            raise BadInput(
                f"AbsorbableMLP: stored as {block.dtype} its outputs would differ by {seen.measured['stored']:.2g}, "
                "far more than the module loses by computing in that dtype; call .float() or .double() first"
                + ("" if self.pairs else ", or train it with pairs=True")
            )
        return plain(made)


def plain(block: Block) -> nn.Sequential:
    """Converts a block without skip, gate and norms to modules."""
    biased = block.up_bias is not None
    up = nn.Linear(block.inputs, block.width, bias=biased, dtype=block.up.dtype, device=block.up.device)
    constant = block.down_bias is not None
    down = nn.Linear(block.width, block.outputs, bias=constant, dtype=block.down.dtype, device=block.up.device)
    with torch.no_grad():
        up.weight.copy_(block.up)
        down.weight.copy_(block.down)
        if block.up_bias is not None:
            up.bias.copy_(block.up_bias)
        if block.down_bias is not None:
            down.bias.copy_(block.down_bias)
    return nn.Sequential(up, _Activation(block.activation), down)
