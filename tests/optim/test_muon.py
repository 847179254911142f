"""Muon against torch.optim.Muon, and AdamW inside it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.optim.trajectories import gradients, run, same, start
from torch import nn

from unskip.errors import BadInput
from unskip.optim import Muon

SHAPES = [(8, 8), (12, 5), (5, 12), (12, 5), (8, 8)]


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust", [None, "original", "match_rms_adamw", "spectral_unclamped"])
def test_fifty_steps_match_torch(nesterov: bool, adjust: Any) -> None:
    grads = [gradients(shape, seed=i, dtype=torch.float32) for i, shape in enumerate(SHAPES)]
    mine = [start(shape, torch.float32, seed=i) for i, shape in enumerate(SHAPES)]
    theirs = copy.deepcopy(mine)
    options: dict[str, Any] = {"lr": 0.02, "nesterov": nesterov, "adjust_lr_fn": adjust}
    ours = run(Muon(mine, **options), list(zip(mine, grads, strict=True)), range(50))
    torchs = run(torch.optim.Muon(theirs, **options), list(zip(theirs, grads, strict=True)), range(50))
    for a, b in zip(ours[0], torchs[0], strict=True):
        assert torch.allclose(a, b, atol=2e-3)  # the bfloat16 rounding of an update of 0.02
    for a, b in zip(ours[-1], torchs[-1], strict=True):
        assert (a - b).norm() < 0.02 * (b - start(tuple(b.shape), torch.float32)).norm()


def test_adamw_groups_match_adamw() -> None:
    shapes = [(5,), (3, 4), ()]
    grads = [gradients(shape, seed=i, dtype=torch.float32) for i, shape in enumerate(shapes)]
    mine = [start(shape, torch.float32, seed=i) for i, shape in enumerate(shapes)]
    theirs = copy.deepcopy(mine)
    group = {"params": mine, "use": "adamw", "lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.9)}
    run(Muon([group]), list(zip(mine, grads, strict=True)), range(20))
    run(
        torch.optim.AdamW(theirs, lr=0.01, weight_decay=0.1, betas=(0.8, 0.9)),
        list(zip(theirs, grads, strict=True)),
        range(20),
    )
    assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(mine, theirs, strict=True))


def test_split_parameters_and_filters_are_updated_as_matrices() -> None:
    whole, grads = start((12, 4), torch.float32), gradients((12, 4), dtype=torch.float32)
    parts = [nn.Parameter(part.clone()) for part in whole.detach().split(4)]
    conv = nn.Parameter(whole.detach().reshape(12, 2, 2).clone())
    flat = nn.Parameter(whole.detach().clone())
    run(Muon([whole], splits={whole: 3}), [(whole, grads)], range(10))
    run(Muon(parts), [(part, grads[:, 4 * i : 4 * i + 4]) for i, part in enumerate(parts)], range(10))
    assert torch.allclose(whole, torch.cat([part.detach() for part in parts]))
    run(Muon([conv]), [(conv, grads.reshape(-1, 12, 2, 2))], range(10))
    run(Muon([flat]), [(flat, grads)], range(10))
    assert torch.equal(conv.reshape(12, 4), flat)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_resumed_run_equals_an_uninterrupted_one(dtype: torch.dtype) -> None:
    shapes = [(6, 4), (4, 6), (6, 4), (5,)]
    grads = [gradients(shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]

    def fresh() -> tuple[list[nn.Parameter], Muon]:
        params = [start(shape, dtype, seed=i) for i, shape in enumerate(shapes)]
        return params, Muon([{"params": params[:3]}, {"params": params[3:], "use": "adamw"}])

    straight, whole = fresh()
    run(whole, list(zip(straight, grads, strict=True)), range(20))
    params, optimizer = fresh()
    run(optimizer, list(zip(params, grads, strict=True)), range(9))
    saved = copy.deepcopy(optimizer.state_dict())
    others, resumed = fresh()
    for param, value in zip(others, params, strict=True):
        param.data.copy_(value)
    resumed.load_state_dict(saved)
    assert same(resumed.state_dict(), saved)
    run(resumed, list(zip(others, grads, strict=True)), range(9, 20))
    assert all(torch.equal(a, b) for a, b in zip(others, straight, strict=True))
    assert same(resumed.state_dict(), whole.state_dict())


def test_a_parameter_without_a_gradient_does_not_change() -> None:
    a, b = start((4, 4), torch.float32), start((4, 4), torch.float32, seed=2)
    grads = gradients((4, 4), dtype=torch.float32)
    optimizer = Muon([a, b, start((3, 5), torch.float32)])
    run(optimizer, [(a, grads), (b, grads)], range(3))
    stacks = optimizer._stacks[0]
    run(optimizer, [(a, grads), (b, grads)], range(3))
    assert optimizer._stacks[0] is stacks  # stacked once, not in every step
    before, momentum = b.detach().clone(), optimizer.state[b]["momentum_buffer"].clone()
    b.grad = None
    run(optimizer, [(a, grads)], range(3, 6))
    assert torch.equal(b, before)
    assert torch.equal(optimizer.state[b]["momentum_buffer"], momentum)
    run(optimizer, [(a, grads), (b, grads)], range(6, 8))
    assert not torch.equal(b, before)


def test_vectors_are_refused_with_their_shape() -> None:
    with pytest.raises(BadInput, match="use='adamw'"):
        Muon([start((5,))])
    with pytest.raises(BadInput, match="use must be"):
        Muon([{"params": [start((5, 5))], "use": "sgd"}])
    with pytest.raises(BadInput, match="adjust_lr_fn"):
        Muon([start((5, 5))], adjust_lr_fn="none")  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="three numbers"):
        Muon([start((5, 5))], ns_coefficients=(1, 2))  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="adam_eps must be"):
        Muon([start((5, 5))], adam_eps=-1)
    with pytest.raises(BadInput, match="not among"):
        Muon([start((5, 5))], splits={start((6, 6)): 3})


def test_an_error_in_one_group_changes_no_group() -> None:
    param, table = start((5, 4), torch.float32), nn.Embedding(5, 3, sparse=True)
    optimizer = Muon([{"params": [param]}, {"params": list(table.parameters()), "use": "adamw"}])
    table(torch.tensor([1])).sum().backward()
    before = param.detach().clone()
    with pytest.raises(BadInput, match="sparse"):
        run(optimizer, [(param, gradients((5, 4), dtype=torch.float32))], range(1))
    assert torch.equal(param, before)
    with pytest.raises(BadInput, match="another optimizer"):
        optimizer.load_state_dict(torch.optim.AdamW([param]).state_dict())
