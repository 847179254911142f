"""Handwritten models with forms of residual additions that the libraries do not have."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH = 8
INPUT = 6


class Attention(nn.Module):
    """Self-attention with one head. The bias on its logits is an addition of equal shapes, but not a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        weights = (q @ k.transpose(-2, -1) * WIDTH**-0.5).softmax(dim=-1)
        return self.out(weights @ v)


def mlp(dropout: float = 0.1) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Dropout(dropout), nn.Linear(2 * WIDTH, WIDTH))


class Stack(nn.Module):
    """An embedding, blocks, and a head."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Linear(INPUT, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, **kwargs: object) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, **kwargs)
        return self.head(x)


class ControlFlow(nn.Module):
    """An `if` on an argument, and a loop in which one line adds the output of each MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlps = nn.ModuleList([mlp(), mlp()])

    def forward(self, x: Tensor, attend: bool = True, *, times: int = 2) -> Tensor:
        if attend:
            x = x + self.attention(self.norm1(x))
        for branch in self.mlps[:times]:
            x = x + branch(self.norm2(x))
        return x


class Nested(nn.Module):
    """A residual inside the branch of another; the inner one runs first."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.inner = nn.Sequential(nn.GELU(), nn.Linear(2 * WIDTH, 2 * WIDTH), nn.Dropout(0.1))
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(self.norm(x))
        h = h + self.inner(h)
        return x + self.down(h)


class Plain(nn.Module):
    """A pre-norm block of attention and MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class SharedBlock(nn.Module):
    """One block that runs twice: two sites that run twice each."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Plain()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.block(x)
        return x


class SharedBranch(nn.Module):
    """One MLP that is the branch of two sites."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mlp(self.norm(x))
        return x + self.mlp(self.norm(x))


class Spellings(nn.Module):
    """Additions that are not written as `x + f`. A branch starts with tanh, whose gradient does not need its input, so
    an addition in place may overwrite the stream.
    """

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(7))

    def forward(self, x: Tensor) -> Tensor:
        x += self.branches[0](x)
        f = self.branches[1](x)
        f += x
        x = f
        x.add_(self.branches[2](x))
        x = torch.add(x, self.branches[3](x))
        x = self.branches[4](x).add_(x)
        x = x.add(self.branches[5](x))
        holder = [x]
        holder[0] += self.branches[6](x)
        return holder[0]


class IntoStream(nn.Module):
    """Adds in place to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x += self.branch(x)
        return x


def join(stream: Tensor, branch: Tensor) -> Tensor:
    return stream + branch


def dropout_join(branch: Tensor, stream: Tensor, probability: float, training: bool) -> Tensor:
    branch = functional.dropout(branch, probability, training)
    return join(stream, branch)


class Helpers(nn.Module):
    """The additions are in functions: one that forward calls, and one that this function calls."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = mlp(0.0)

    def forward(self, x: Tensor) -> Tensor:
        x = join(x, self.attention(self.norm1(x)))
        return dropout_join(self.mlp(self.norm2(x)), x, 0.1, self.training)


class Base(nn.Module):
    """Has the addition that `Inherited` calls with super()."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attention = Attention()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.norm1(x))


class Inherited(Base):
    def __init__(self) -> None:
        super().__init__()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + self.mlp(self.norm2(x))


def halved(factor: float) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """A decorator with an argument, which changes the result."""

    def decorate(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(function)
        def wrapper(*args: object, **kwargs: object) -> Tensor:
            return factor * function(*args, **kwargs)

        return wrapper

    return decorate


class Decorated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = mlp()

    @halved(0.5)
    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Mangled(nn.Module):
    """Uses `this` instead of `self`, private names, and an addition in a method that forward calls."""

    def __init__(this) -> None:
        super().__init__()
        this.norm = nn.LayerNorm(WIDTH)
        this.mlp = mlp()

    def forward(this, x: Tensor, *, gain: float = 0.9) -> Tensor:
        return this.__residual(x, gain)

    def __residual(this, x: Tensor, gain: float) -> Tensor:
        return x + gain * this.mlp(this.norm(x))


class Decoys(nn.Module):
    """One residual among other additions: position and type embeddings, a bias on the logits, a polynomial, two summed
    branches, and a gate.
    """

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(1, 4, WIDTH))
        self.kind = nn.Embedding(2, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.bias = nn.Linear(WIDTH, 4)  # computes a bias on the logits of each token
        self.up = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.left = nn.Linear(WIDTH, WIDTH)
        self.right = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        kinds = torch.zeros(x.shape[:2], dtype=torch.long)
        x = x + self.position.expand(x.shape)
        x = x + self.kind(kinds)
        h = self.norm(x)
        q, k, v = self.qkv(h).chunk(3, dim=-1)
        logits = q @ k.transpose(-2, -1) + self.bias(h)
        attended = logits.softmax(dim=-1) @ v
        bent = attended + 0.1 * attended**3
        gated = self.up(bent) * torch.sigmoid(self.gate(bent))
        return x + (self.left(gated) + self.right(gated))
