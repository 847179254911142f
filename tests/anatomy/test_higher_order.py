"""Operators that take functions: flex attention is one node of a branch; others are refused."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention

import unskip
from unskip import Scale
from unskip.errors import ForwardError

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
WIDTH, TOKENS = 32, 16


class Flex(nn.Module):
    def __init__(self, compiled: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attend = torch.compile(flex_attention, backend="eager", fullgraph=True) if compiled else flex_attention

    def heads(self, x: Tensor) -> list[Tensor]:
        return [part.unflatten(-1, (2, 16)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1)]

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.attend(*self.heads(x)).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled by the model"])
def test_flex_attention_is_the_attention_of_a_site(compiled: bool) -> None:
    model, x = Flex(compiled), torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    (site,) = unskip.audit(model, x)
    assert (site.kind, site.norm, site.problem) == ("attention", "pre", None)
    wiring = unskip.rewire(model, Scale(0.5, 2.0), x)
    assert wiring.verified
    model.attend = flex_attention  # torch.compile needs a C++ compiler
    with torch.no_grad():
        branch = F.scaled_dot_product_attention(*model.heads(x)).transpose(1, 2).flatten(2)
        assert torch.allclose(model(x), 0.5 * x + 2 * model.out(branch), atol=1e-5)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x + self.f(x), lambda x: x - self.f(x), (x,))


def test_other_higher_order_operators_are_refused() -> None:
    with pytest.raises(ForwardError, match=r"cond"):
        unskip.audit(Branches(), torch.ones(2, WIDTH))
