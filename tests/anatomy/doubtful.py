"""Small handwritten models whose sums are not residuals, or residuals that cannot be rewired."""

from __future__ import annotations

import torch
from tests.anatomy.handmade import DIM, PreNorm, linear, mlp
from torch import Tensor, nn


class LowRank(nn.Module):
    """A sum of two linear maps, as with LoRA: not a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.a, self.b = linear(), nn.Linear(DIM, 2), nn.Linear(2, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.w(x) + self.b(self.a(x))


class Arithmetic(nn.Module):
    """Sums inside formulas: a polynomial, rotary positions, FiLM, a normalisation with an offset."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.film = linear(), nn.Linear(DIM, 2 * DIM)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        x = self.f(x)
        x = x + 0.044715 * x.pow(3)
        angle = torch.arange(5.0)[:, None].expand(5, DIM)
        x = x * angle.cos() + x.roll(DIM // 2, -1) * angle.sin()
        scale, shift = self.film(condition).chunk(2, -1)
        x = x * (1 + scale) + shift
        return x + x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class StraightThrough(nn.Module):
    """Vector quantisation: z affects its code only through an index."""

    def __init__(self) -> None:
        super().__init__()
        self.codes, self.f = nn.Embedding(16, DIM), linear()

    def forward(self, x: Tensor) -> Tensor:
        z = self.f(x)
        code = self.codes((z @ self.codes.weight.T).argmax(-1))
        return z + (code - z).detach()


class OverwrittenBranch(nn.Module):
    """The output of the apparent branch is overwritten."""

    def __init__(self) -> None:
        super().__init__()
        self.f = linear()

    def forward(self, x: Tensor) -> Tensor:
        y = self.f(x)
        y.copy_(x)
        return x + y


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros_like(x)
        for _ in range(3):
            h = torch.tanh(self.a(x) + self.b(h))
        return h


class SometimesResidual(nn.Module):
    """One line that is a residual in its first run only."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.blocks = linear(), nn.ModuleList(PreNorm() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        side = self.f(x.sin())
        for block in self.blocks:
            x = block(x + side)
        return x


class Subtraction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = linear()

    def forward(self, x: Tensor) -> Tensor:
        return x - self.f(x)


class Highway(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f, self.gate = linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        t = torch.sigmoid(self.gate(x))
        return t * torch.relu(self.f(x)) + (1 - t) * x


class BroadcastBranch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(x.mean(1, keepdim=True))


class TrainingFused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = linear()

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return torch.lerp(x, self.f(x), 0.5)
        return x + self.f(x)


class BuiltinSum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = linear()

    def forward(self, x: Tensor) -> Tensor:
        return sum([x, self.f(x)])


class Add(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


class SharedAdd(nn.Module):
    """One module adds two branches."""

    def __init__(self) -> None:
        super().__init__()
        self.add, self.f, self.g = Add(), mlp(), mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = self.add(x, self.f(x))
        return self.add(x, self.g(x))


class ForeachAdd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        torch._foreach_add_([x], [self.f(x)])
        return x


class IndexPut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return x.index_put((torch.arange(len(x)),), self.f(x), accumulate=True)


class AddInto(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = mlp().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        torch.add(x, self.f(x), out=x)
        return x
