"""RMSNorms spelled out in operators, in a function or by torch on a CPU, count as norms like those of modules."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import unskip
from unskip.anatomy import AttentionParts, MlpParts

WIDTH = 8
EPS = 1e-5
Step = Callable[[Tensor], Tensor]


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); `inner` acts on queries and keys."""

    def __init__(self, norm: Step, inner: Step | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.norm, self.inner = norm, inner or (lambda x: x)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        q, k = self.inner(q), self.inner(k)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm(x))
        return x + self.down(F.gelu(self.up(self.norm(x))))


def inputs() -> Tensor:
    return torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(1))


def wide(x: Tensor) -> Tensor:
    """The root mean square of a float64 copy."""
    return x * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + EPS).to(x.dtype)


FORMS: dict[str, Step] = {
    "torch": lambda x: F.rms_norm(x, (x.shape[-1],), eps=EPS),
    "torch, wider": lambda x: F.rms_norm(x.double(), (x.shape[-1],), eps=EPS).type_as(x),
    "rsqrt": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS),
    "rsqrt, first": lambda x: torch.rsqrt((x * x).mean(-1, keepdim=True) + EPS) * x,
    "sqrt": lambda x: x / (x.square().mean(-1, keepdim=True) + EPS).sqrt(),
    "power": lambda x: x * (x.square().mean(-1, keepdim=True) + EPS) ** -0.5,
    "powers": lambda x: x / (x**2.0).mean(-1, keepdim=True).add(EPS) ** 0.5,
    "reciprocal": lambda x: x * (x.square().mean(-1, keepdim=True) + EPS).sqrt().reciprocal(),
    "a wider copy": wide,
}


@pytest.mark.parametrize("form", FORMS)
def test_a_norm_spelled_out_is_found(form: str) -> None:
    model, x = Block(FORMS[form]), inputs()
    assert [site.norm for site in unskip.audit(model, x)] == ["pre", "pre"]
    attention, mlp = unskip.parts(model, x)
    assert isinstance(attention, AttentionParts)
    assert isinstance(mlp, MlpParts)
    for part in (attention, mlp):
        assert part.norm is not None
        assert (part.norm.kind, part.norm.place, part.norm.gain) == ("rmsnorm", "pre", None)
        assert part.norm.eps == pytest.approx(EPS)
    assert (attention.extras, mlp.extras) == ((), ())
    assert unskip.absorption.scan(model, x).rows[0].verdict.status == "impossible"


@pytest.mark.parametrize("form", FORMS)
def test_a_norm_spelled_out_is_measured_like_a_module(form: str) -> None:
    written, module = Block(FORMS[form]), Block(nn.RMSNorm(WIDTH, eps=EPS, elementwise_affine=False))
    with unskip.rewired(written, "cut", inputs()), unskip.rewired(module, "cut", inputs()):
        got, wanted = (unskip.measure(model, inputs()) for model in (written, module))
    for one, other in zip(got.sites, wanted.sites, strict=True):
        assert one.sublayer.null == other.sublayer.null == 5  # one direction a token
        assert one.sublayer.condition == pytest.approx(other.sublayer.condition, rel=1e-3)
        assert one.branch.condition == pytest.approx(other.branch.condition, rel=1e-3)


def test_a_norm_of_queries_and_keys_is_reported() -> None:
    first, _ = unskip.parts(Block(nn.LayerNorm(WIDTH), FORMS["torch"]), inputs())
    assert isinstance(first, AttentionParts)
    assert first.extras == ("query-key norm",)


DECOYS: dict[str, Step] = {
    "no root": lambda x: x * x.square().mean(-1, keepdim=True),
    "two roots": lambda x: x / x.square().mean(-1, keepdim=True).sqrt().sqrt(),
    "grows": lambda x: x * x.square().mean(-1, keepdim=True).sqrt(),
    "grows, divided": lambda x: x / torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS),
    "another power": lambda x: x * torch.rsqrt(x.pow(4).mean(-1, keepdim=True) + EPS),
    "a power of 2": lambda x: x * torch.rsqrt(torch.pow(2.0, x).mean(-1, keepdim=True)),
    "another root": lambda x: x / x.square().mean(-1, keepdim=True).pow(0.25),
    "no square": lambda x: x * torch.rsqrt(x.abs().mean(-1, keepdim=True)),
    "over tokens": lambda x: x * torch.rsqrt(x.square().mean(1, keepdim=True) + EPS),
    "of another tensor": lambda x: x * torch.rsqrt(x.tanh().square().mean(-1, keepdim=True) + EPS),
}


@pytest.mark.parametrize("form", DECOYS)
def test_similar_formulas_are_not_norms(form: str) -> None:
    assert [site.norm for site in unskip.audit(Block(DECOYS[form]), inputs())] == ["none", "none"]
