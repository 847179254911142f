"""One line in a loop adds several branches: iterations may be skipped or reordered, and too many are refused.

The expected outputs are computed by hand, without unskip.
"""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import unskip
from unskip import Decay
from unskip.errors import RewireError

WIDTH = 8
X = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(0))
EVERY = (0, 1, 2, 3)


def pairs() -> nn.ModuleList:
    return nn.ModuleList(nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]) for _ in EVERY)


class ByModule(nn.Module):
    """Layer drop: the loop runs over a selection of the modules."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = pairs()

    def forward(self, x: Tensor, order: tuple[int, ...] = EVERY) -> Tensor:
        for first, second in [self.layers[index] for index in order]:
            x = first(x).relu() + x
            x = x + second(x).tanh()
        return x


class ByList(ByModule):
    """The loop variable is a list of modules, with a counter."""

    def forward(self, x: Tensor, order: tuple[int, ...] = EVERY) -> Tensor:
        for _, layer in enumerate([self.layers[index] for index in order]):
            x = layer[0](x).relu() + x
            x = x + layer[1](x).tanh()
        return x


class ByNumber(ByModule):
    """Only the loop counter identifies the branch."""

    def forward(self, x: Tensor, order: tuple[int, ...] = EVERY) -> Tensor:
        for index in order:
            x = self.layers[index][0](x).relu() + x
            x = x + self.layers[index][1](x).tanh()
        return x


class ByNothing(ByModule):
    """No loop variable identifies the branch."""

    def forward(self, x: Tensor, order: tuple[int, ...] = EVERY) -> Tensor:
        left = [self.layers[index] for index in order]
        while left:
            first, second = left.pop(0)
            x = first(x).relu() + x
            x = x + second(x).tanh()
        return x


def by_hand(model: nn.Module, alphas: list[float], order: tuple[int, ...]) -> Tensor:
    x = X
    for index in order:
        first, second = model.layers[index]
        x = alphas[2 * index] * x + first(x).relu()
        x = alphas[2 * index + 1] * x + second(x).tanh()
    return x


def built(cls: type[ByModule]) -> tuple[nn.Module, list[float]]:
    torch.manual_seed(0)
    model = cls()
    alphas = unskip.rewire(model, Decay(0.5), X).alphas
    assert len(set(alphas)) == 8
    return model, alphas


@pytest.mark.parametrize("cls", [ByModule, ByList, ByNumber])
def test_each_branch_keeps_its_weight_in_any_order(cls: type[ByModule]) -> None:
    model, alphas = built(cls)
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for order in (EVERY, (1, 3), (3, 2, 0), (2, 2, 1), ()):
            torch.testing.assert_close(each(X, order), by_hand(each, alphas, order))


@pytest.mark.parametrize("cls", [ByModule, ByList, ByNumber, ByNothing])
def test_more_iterations_than_in_the_example_are_refused(cls: type[ByModule]) -> None:
    model, _ = built(cls)
    with pytest.raises(RewireError, match="more than the 4 turns"):
        model(X, (0, 1, 2, 3, 0))


def test_fewer_iterations_are_refused_if_branches_cannot_be_identified() -> None:
    model, alphas = built(ByNothing)
    torch.testing.assert_close(model(X), by_hand(model, alphas, EVERY))
    torch.testing.assert_close(model(X, ()), X)
    with pytest.raises(RewireError, match="2 of the 4 turns"):
        model(X, (1, 3))


def test_a_branch_that_did_not_run_in_the_example_is_refused() -> None:
    torch.manual_seed(0)
    model = ByModule()
    unskip.rewire(model, Decay(0.5), (X, (0, 1)))
    with pytest.raises(RewireError, match="did not have"):
        model(X, (0, 2))


def test_loops_compile_to_one_graph() -> None:
    model, alphas = built(ByModule)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(X, (1, 3)), by_hand(model, alphas, (1, 3)))


def test_a_loaded_wiring_identifies_the_branches(tmp_path: Path) -> None:
    model, alphas = built(ByModule)
    unskip.save(model, tmp_path / "saved")
    loaded = unskip.load(tmp_path / "saved", model=ByModule())
    torch.testing.assert_close(loaded(X, (2, 0)), by_hand(model, alphas, (2, 0)))
