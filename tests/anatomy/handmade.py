"""Small handwritten models, each with one difficulty for finding residuals."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DIM = 8


def linear() -> nn.Linear:
    return nn.Linear(DIM, DIM)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))


class PreNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.f = nn.LayerNorm(DIM), mlp()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(self.norm(x))


class PostNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.f = nn.LayerNorm(DIM), mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.f(x))


class OutNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.f = nn.LayerNorm(DIM), mlp()
        self.scale = nn.Parameter(torch.rand(DIM) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.norm(self.f(x))


class Sandwich(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after, self.f = nn.LayerNorm(DIM), nn.RMSNorm(DIM), mlp()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.after(self.f(self.before(x)))


class Attention(nn.Module):
    """Softmax attention written out, with a mask and a learned bias added to its logits."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = linear(), linear(), linear(), linear()
        self.bias = nn.Parameter(torch.randn(1, 5, 5))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        logits = self.q(x) @ self.k(x).transpose(-1, -2) * DIM**-0.5
        logits = logits + self.bias.expand_as(logits)
        logits = logits + mask.to(x.dtype).expand_as(logits)
        return x + self.out(logits.softmax(-1) @ self.v(x))


class LinearAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = LinearAttentionBranch()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(x)


class LinearAttentionBranch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = linear(), linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.q(x).relu() @ (self.k(x).relu().transpose(-1, -2) @ self.v(x))


class Parallel(nn.Module):
    """x + attention + mlp: two additions, one site."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn, self.f = nn.LayerNorm(DIM), nn.MultiheadAttention(DIM, 2, batch_first=True), mlp()

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.attn(h, h, h, need_weights=False)[0] + self.f(h)


class GatedAttention(nn.Module):
    """A gate on the attention's output is not a parallel MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.gate, self.out = nn.MultiheadAttention(DIM, 2, batch_first=True), linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.attn(x, x, x, need_weights=False)[0] * torch.sigmoid(self.gate(x)))


class Experts(nn.Module):
    """A softmax router weights MLPs: not attention."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(DIM, 2), nn.ModuleList([mlp(), mlp()])

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        return x + sum(weights[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


class Pooling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.pool = nn.LayerNorm(DIM), nn.AvgPool1d(3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.pool(self.norm(x).transpose(1, 2)).transpose(1, 2)


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv1d(DIM, DIM, 3, padding=1), nn.Conv1d(DIM, DIM, 1)

    def forward(self, x: Tensor) -> Tensor:
        return (x.transpose(1, 2) + self.b(self.a(x.transpose(1, 2)).relu())).transpose(1, 2)


class Projected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f, self.shortcut = mlp(), linear()

    def forward(self, x: Tensor) -> Tensor:
        y = self.f(x)
        y += self.shortcut(x)
        return y


class Sliced(nn.Module):
    """The first token attends to all: its stream is a slice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(DIM), nn.MultiheadAttention(DIM, 2, batch_first=True)
        self.out = mlp()

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x[:, :1] + self.out(self.attn(h[:, :1], h, h, need_weights=False)[0])


class SliceInPlace(nn.Module):
    """Writes into a part of the stream; the part is taken twice."""

    def __init__(self) -> None:
        super().__init__()
        self.f = mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        part = x[:, 1:]
        x[:, 1:] += self.f(part)
        return x


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = linear(), linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h = h + torch.relu(self.b(h))
        return x + self.c(h)


class Doubled(nn.Module):
    """The accidental second residual around a residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.block = PreNorm()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.block(x)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(PreNorm() for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        first = self.blocks[0](x)
        second = self.blocks[1](first)
        x = self.blocks[2](second)
        x = self.blocks[3](x + second)
        return self.blocks[4](x + first)


class ResolutionNet(nn.Module):
    """A skip over one residual at half the resolution."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv1d(DIM, DIM, 2, 2), nn.ConvTranspose1d(DIM, DIM, 2, 2)
        self.inner = nn.Conv1d(DIM, DIM, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, :4].transpose(1, 2)
        h = self.down(x).relu()
        h = h + self.inner(h).relu()
        return x + self.up(h)


class ProjectedLongSkip(nn.Module):
    """A linear map of an early state enters a later one, as in a SiT with long skips."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.skip = nn.ModuleList(PreNorm() for _ in range(3)), linear()

    def forward(self, x: Tensor) -> Tensor:
        early = self.blocks[0](x)
        x = self.blocks[1](early)
        return self.blocks[2](x + self.skip(early))


class PositionEachLayer(nn.Module):
    """A learned position embedding that is added again at every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(1, 5, DIM))
        self.blocks = nn.ModuleList(PreNorm() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x + self.position.expand_as(x))
        return x


class SideInput(nn.Module):
    """A computed side input added to queries and keys at every layer, as positions in DETR."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.ModuleList(nn.MultiheadAttention(DIM, 2, batch_first=True) for _ in range(3))

    def forward(self, x: Tensor, side: Tensor) -> Tensor:
        side = side.sin()
        for attn in self.attn:
            q = x + side
            x = x + attn(q, q, x, need_weights=False)[0]
        return x


class Latents(nn.Module):
    """The stream starts from a weight, as in a Perceiver."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(1, 3, DIM))
        self.q, self.k, self.out = linear(), linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        stream = self.latents.expand(x.shape[0], -1, -1)
        return stream + self.out(F.scaled_dot_product_attention(self.q(stream), self.k(x), x))


class InnerFunctions(nn.Module):
    """Additions in a lambda and in a comprehension."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.gs, self.h = linear(), nn.ModuleList([linear()]), linear()

    def forward(self, x: Tensor) -> Tensor:
        add = lambda y: y + self.f(y)  # noqa: E731
        y = add(x)
        y = torch.stack([y + g(y) for g in self.gs])[0]
        return [(lambda z: z + self.h(z))(y) for _ in range(1)][0]  # noqa: RUF015


class TrainingArm(nn.Module):
    """Training and evaluation run different lines for the same residual."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.g = mlp(), mlp()

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x = x + F.dropout(self.f(x), 0.5)
        else:
            x = x + self.f(x)
        return x + self.g(x)


class Loop(nn.Module):
    """Two lines of one forward add the branches of all layers."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.MultiheadAttention(DIM, 2, batch_first=True), nn.Sequential(nn.LayerNorm(DIM), mlp())])
            for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        """A docstring, so that the first statement is not the first line."""
        for attn, feed_forward in self.layers:
            x = attn(x, x, x, need_weights=False)[0] + x
            x = feed_forward(x) + x
        return x


class SameBranchLoop(nn.Module):
    """One layer that runs three times: one site."""

    def __init__(self) -> None:
        super().__init__()
        self.f = mlp()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + self.f(x)
        return x


class HelperMethod(nn.Module):
    """One line in a separate method adds two branches."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.f = nn.MultiheadAttention(DIM, 2, batch_first=True), mlp()

    def residual(self, x: Tensor, branch: Tensor) -> Tensor:
        return x + branch

    def forward(self, x: Tensor) -> Tensor:
        x = self.residual(x, self.attn(x, x, x, need_weights=False)[0])
        return self.residual(x, self.f(x))


class WritesIntoTheSum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = mlp()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        branch = self.f(x)
        x = x + branch
        x *= 2
        return x, branch


class CopiedStream(nn.Module):
    """The stream is a copy, written into a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.f = linear()

    def forward(self, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        out[:] = x
        return out + self.f(x).relu()


class OptionalBranch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = mlp()

    def forward(self, x: Tensor, on: bool = True) -> Tensor:
        return x + (self.f(x) if on else 0)


class ScaledStream(nn.Module):
    """The model has a learned scale on its stream."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.norm, self.f = nn.Parameter(torch.rand(DIM)), nn.LayerNorm(DIM), mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x + self.f(self.norm(x))


class StateSpace(nn.Module):
    """y = scan + D u inside a branch, as in Mamba: D u is part of the branch, and the block's skip is the site."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.mix, self.skip = nn.Linear(16, 16), nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        u = self.up(self.norm(x)).tanh()
        y = self.mix(u).cumsum(1) + u * self.skip
        return x + self.down(y)


class WrittenThroughOut(nn.Module):
    """The branch is written into a buffer through another view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, DIM), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        room = torch.empty_like(x)
        torch.mm(x.flatten(0, 1), self.weight, out=room.view(-1, DIM))
        return x + room.relu()
