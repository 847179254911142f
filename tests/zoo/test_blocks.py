"""Blocks: features, measure, parts and audit find the same ones, and their outputs are the stream after each block.

Each model records the stream after each block in `states`, independently of unskip.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.zoo.handmade import Attention, mlp
from torch import Tensor, nn

import unskip
from unskip.errors import BadInput

WIDTH = 8
X = torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(0))


class Loop(nn.Module):
    """A list of pairs [attention, MLP]; the additions are in the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([Attention(), mlp()]) for _ in range(3))
        self.norm, self.states = nn.LayerNorm(WIDTH), list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        self.states.clear()
        for attention, feed_forward in self.layers:
            x = attention(x) + x
            x = feed_forward(x) + x
            self.states.append(x)
        return self.norm(x)


class SameClassLoop(Loop):
    """Like Loop, but both branches are in wrappers of the same class."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.Sequential(nn.LayerNorm(WIDTH), f) for f in (Attention(), mlp())]) for _ in range(3)
        )


class Flat(nn.Module):
    """Attention and MLP in one list of [norm, branch]. The last sum is not the input of a module."""

    def __init__(self) -> None:
        super().__init__()
        branches = [Attention(), mlp(), Attention(), mlp()]
        self.layers = nn.ModuleList(nn.ModuleList([nn.LayerNorm(WIDTH), branch]) for branch in branches)
        self.states = list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        self.states.clear()
        for norm, branch in self.layers:
            x = x + branch(norm(x))
            self.states.append(x)
        return x.mean(1)


class PostNormLoop(nn.Module):
    """The output of a block is the norm of its sum, which is the input of the next block."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([mlp(), nn.LayerNorm(WIDTH)]) for _ in range(3))
        self.states = list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        self.states.clear()
        for branch, norm in self.layers:
            x = norm(x + branch(x))
            self.states.append(x)
        return x


class Writes(nn.Module):
    """Each block overwrites the output of the previous one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(mlp() for _ in range(3))
        self.states = list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        self.states.clear()
        x = x.clone()
        for branch in self.layers:
            x += branch(x)
            self.states.append(x.clone())
        return x


class Wrapper(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)

    @property
    def states(self) -> list[Tensor]:
        return self.inner.states  # type: ignore[return-value]


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Loop(), Flat()

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x).mean(1) * self.right(x)

    @property
    def states(self) -> list[Tensor]:
        return [*self.left.states, *self.right.states]


CASES: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "nested list": (Loop, [f"layers.{i}" for i in range(3)]),
    "nested list of one class": (SameClassLoop, [f"layers.{i}" for i in range(3)]),
    "flat list": (Flat, [f"layers.{i}" for i in range(4)]),
    "post-norm": (PostNormLoop, [f"layers.{i}" for i in range(3)]),
    "in place": (Writes, [f"layers.{i}" for i in range(3)]),
    "wrapper": (lambda: Wrapper(Loop()), [f"inner.layers.{i}" for i in range(3)]),
    "towers": (Towers, [*(f"left.layers.{i}" for i in range(3)), *(f"right.layers.{i}" for i in range(4))]),
}


def built(case: str) -> nn.Module:
    torch.manual_seed(0)
    return CASES[case][0]().eval()


@pytest.mark.parametrize("rule", [None, "scale:0.6,0.8", "cut"])
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_features_are_the_stream_after_each_block(case: str, rule: str | None) -> None:
    model = built(case)
    if rule is not None:
        unskip.rewire(model, rule, X)
    found = unskip.features(model, X, pool=None)
    model(X)
    assert len(found) == len(model.states)
    for index, state in enumerate(model.states):
        torch.testing.assert_close(found[index], state)


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_audit_measure_and_parts_have_the_same_blocks(case: str) -> None:
    model, paths = built(case), CASES[case][1]
    audit = unskip.audit(model, X)
    assert [*audit.blocks] == paths
    assert f"{len(paths)} blocks: {paths[0]}" in str(audit)
    measured = unskip.measure(model, X, jacobians="off")
    assert [row.path for row in measured.blocks] == paths
    assert [*dict.fromkeys(site.block for site in unskip.parts(model, X).sites)] == paths
    model(X)
    norms = [float(state.norm(dim=-1).mean()) for state in model.states]
    assert [row.norm for row in measured.blocks] == pytest.approx(norms, rel=1e-5)


@torch.no_grad()
def test_blocks_can_be_given_by_the_user() -> None:
    model = built("flat list")
    pairs = unskip.features(model, X, blocks=lambda site: site.kind == "mlp", pool=None)
    model(X)
    assert list(pairs) == [0, 1]
    torch.testing.assert_close(pairs[1], model.states[3])
    some = unskip.features(model, X, blocks=["layers.2", "layers.0"], pool=None)
    torch.testing.assert_close([some[0], some[1]], [model.states[0], model.states[2]])
    assert list(unskip.features(model, X, blocks="layers.*")) == [0, 1, 2, 3]
    assert [row.path for row in unskip.measure(model, X, blocks="layers.3", jacobians="off").blocks] == ["layers.3"]
    ends = unskip.measure(model, X, blocks=lambda site: site.index == 1, jacobians="off").blocks
    assert [row.path for row in ends] == ["layers.1 up to site 1"]
    selected = unskip.measure(model, X, blocks=-1, jacobians="off").blocks
    assert [(row.index, row.path) for row in selected] == [(3, "layers.3")]


@pytest.mark.parametrize(
    ("blocks", "says"),
    [("layer.*", "layer"), (lambda site: False, "false for all 4 sites"), ("layers.0.0", "layers.0.0 of")],
)
def test_invalid_blocks_are_refused(blocks: object, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        unskip.features(built("flat list"), X, blocks=blocks)  # type: ignore[arg-type]
