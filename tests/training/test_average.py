"""Averaged weights against torch's own, step by step."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from unskip.training._average import Average


def test_floats_as_in_torch_and_counters_as_in_the_model() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    mine, torchs = Average(model, 0.9), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(5):
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        mine.update_parameters(model)
        torchs.update_parameters(model)
        assert int(mine.n_averaged) == step + 1
    found, expected = mine.state_dict(), torchs.state_dict()
    assert list(found) == list(expected)
    for name, value in expected.items():
        if value.is_floating_point():
            assert torch.equal(found[name], value), name
    assert int(mine.module[1].num_batches_tracked) == 5  # type: ignore[union-attr,arg-type]
    assert not torch.equal(mine.module[0].weight, model[0].weight)  # type: ignore[union-attr,arg-type]
