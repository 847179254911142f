"""EMA weights match torch, do not average annealed shortcuts, and can be swapped in and out."""

from __future__ import annotations

import timm
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import unskip
from unskip import Anneal, Cut, Keep
from unskip.training._ema import EMA


def trained(model: nn.Module, steps: int, *averages: object) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(steps):
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        for each in averages:
            each.update() if isinstance(each, EMA) else each.update_parameters(model)  # type: ignore[attr-defined]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))


def test_averages_match_torch_and_counters_are_copied() -> None:
    model = network()
    mine, torchs = EMA(model, 0.9), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    trained(model, 5, mine, torchs)
    result, expected = mine.state_dict(), torchs.state_dict()
    assert list(result) == list(expected)
    for name, value in expected.items():
        if value.is_floating_point():
            assert torch.equal(result[name], value), name
    assert int(result["n_averaged"]) == int(result["module.1.num_batches_tracked"]) == 5


def test_swap_in_restores_the_weights() -> None:
    model = network()
    mine = EMA(model, 0.9)
    trained(model, 3, mine)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with mine.swapped_in():
        assert torch.equal(model[0].weight, mine.state_dict()["module.0.weight"])
        assert not torch.equal(model[0].weight, before["0.weight"])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    again = EMA(model, 0.9)
    again.load_state_dict(mine.state_dict())
    trained(model, 2, mine, again)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in mine.state_dict().items())


def test_annealed_shortcuts_are_not_averaged() -> None:
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=16, depth=1, embed_dim=24, num_heads=2)
    images = torch.randn(2, 3, 32, 32)
    wiring = unskip.rewire(model, Anneal(Keep(), Cut(), steps=4), images)
    mine = EMA(model, 0.99)
    for step in range(6):
        wiring.step(step)
        mine.update()
    expected = model.eval()(images)  # no weight changed, so each average equals its weight
    with mine.swapped_in():
        torch.testing.assert_close(model(images), expected)
