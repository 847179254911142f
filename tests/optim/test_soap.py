"""Trajectories of SOAP against float64 formulas and pytorch_optimizer, for matrices, vectors and other shapes."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_optimizer import SOAP as Peer
from tests.optim.oracle import Adam, Soap
from tests.optim.trajectories import STEPS, gradients, run, start
from torch import Tensor, nn

from unskip.errors import BadInput
from unskip.optim import SOAP


def bases_of(optimizer: SOAP, param: Tensor) -> list[Any]:
    """The bases of the optimizer in the format of the oracle: eigenvectors in columns, None for the identity."""
    state = optimizer.state[param]
    return [state[f"{side}_basis"][0].double().mT.numpy() if side in state else None for side in ("left", "right")]


SHAPES = [(6, 6), (2, 2), (4, 9), (16, 3), (24, 24), (33, 20), (20, 33)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)], ids=str)
def test_fifty_steps_match_the_formulas(shape: tuple[int, int], dtype: torch.dtype, tolerance: float) -> None:
    grads = gradients(shape, dtype=dtype)
    param = start(shape, dtype)
    optimizer = SOAP([param], stagger=False)
    first = param.detach().double().numpy().copy()
    ours = run(optimizer, [(param, grads)], range(1))
    # The statistics of a tall or wide first gradient have a null space with arbitrary eigenvectors, so both use ours.
    oracle = Soap(first, bases=None)
    oracle.step(grads[0].double().numpy())
    mine = bases_of(optimizer, param)
    for basis, statistics in zip(mine, oracle.statistics, strict=True):
        rotated = basis.T @ statistics @ basis
        assert np.abs(rotated - np.diag(np.diag(rotated))).max() < 1e-5 * np.abs(rotated).max()
        assert (np.diff(np.diag(rotated)) < 1e-6 * rotated.max()).all()
    oracle.bases = mine
    ours += run(optimizer, [(param, grads)], range(1, STEPS))
    assert torch.equal(ours[0][0], torch.from_numpy(first).to(dtype)), "the first step only builds the basis"
    moved = 0.0
    for step in range(1, STEPS):
        oracle.step(grads[step].double().numpy())
        moved = max(moved, float(np.abs(oracle.weight - first).max()))
        assert np.abs(ours[step][0].double().numpy() - oracle.weight).max() < tolerance * max(moved, 1e-3), step
    assert moved > 0.02


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fifty_steps_match_pytorch_optimizer(shape: tuple[int, int]) -> None:
    grads = gradients(shape, dtype=torch.float32)
    mine, theirs = start(shape, torch.float32), start(shape, torch.float32)
    ours, peer = SOAP([mine], stagger=False), Peer([theirs])
    run(ours, [(mine, grads)], range(1))
    run(peer, [(theirs, grads)], range(1))
    peer.state[theirs]["Q"] = [torch.from_numpy(basis).float() for basis in bases_of(ours, mine)]
    a, b = run(ours, [(mine, grads)], range(1, STEPS)), run(peer, [(theirs, grads)], range(1, STEPS))
    for step, (x, y) in enumerate(zip(a, b, strict=True)):
        assert torch.allclose(x[0], y[0], atol=2e-5, rtol=0), step


def test_parameters_of_many_shapes_have_independent_trajectories() -> None:
    shapes = [(8, 5), (5, 8), (8, 5), (7,), (8, 5), (1, 4, 6), (3, 2, 2, 2), (), (1, 1, 5), (2, 9)]
    grads = [gradients(shape, seed=seed) for seed, shape in enumerate(shapes)]
    params = [start(shape, seed=seed) for seed, shape in enumerate(shapes)]
    together = copy.deepcopy(params)
    # A single matrix is refreshed in another step of the interval, so only runs without staggering are comparable.
    run(SOAP(together, stagger=False), list(zip(together, grads, strict=True)), range(STEPS))
    for param, grad, other in zip(params, grads, together, strict=True):
        run(SOAP([param], stagger=False), [(param, grad)], range(STEPS))
        assert torch.allclose(other, param, atol=1e-9), param.shape


def test_vectors_match_adam() -> None:
    shapes = [(7,), (), (1, 1, 5), (1, 6), (6, 1)]
    params = [start(shape, seed=seed) for seed, shape in enumerate(shapes)]
    grads = [gradients(shape, seed=seed) for seed, shape in enumerate(shapes)]
    oracles = [Adam(param.detach().numpy()) for param in params]
    history = run(SOAP(params), list(zip(params, grads, strict=True)), range(STEPS))
    for step in range(STEPS):
        for oracle, grad, value in zip(oracles, grads, history[step], strict=True):
            oracle.step(grad[step].numpy())
            assert np.allclose(value.numpy(), oracle.weight, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "sides"),
    [
        ({"max_dim": 8}, (False, True)),
        ({"max_dim": 4}, (False, False)),
        ({}, (True, True)),
    ],
)
def test_sides(options: dict[str, Any], sides: tuple[bool, bool]) -> None:
    param, grads = start((12, 6)), gradients((12, 6))
    optimizer = SOAP([param], stagger=False, **options)
    oracle = Soap(param.detach().numpy(), sides=sides)
    oracle.step(grads[0].numpy())
    run(optimizer, [(param, grads)], range(1))
    assert tuple(side in optimizer.state[param] for side in ("left", "right")) == sides
    oracle.bases = bases_of(optimizer, param)
    ours = run(optimizer, [(param, grads)], range(1, STEPS))
    for step in range(1, STEPS):
        oracle.step(grads[step].numpy())
    assert np.abs(ours[-1][0].numpy() - oracle.weight).max() < 1e-9


@pytest.mark.parametrize("shape", [(12, 4), (3, 5, 4)], ids=str)
def test_a_split_parameter_matches_separate_matrices(shape: tuple[int, ...]) -> None:
    whole, grads = start(shape), gradients(shape)
    parts = [nn.Parameter(part.clone()) for part in whole.detach().chunk(3)]
    run(SOAP([whole], splits={whole: 3}), [(whole, grads)], range(30))
    run(SOAP(parts), list(zip(parts, grads.chunk(3, 1), strict=True)), range(30))
    assert torch.allclose(whole, torch.cat([part.detach() for part in parts]), atol=1e-12)
    with pytest.raises(BadInput, match="no 5 equal blocks"):
        SOAP([whole], splits={whole: 5})
    with pytest.raises(BadInput, match="not among"):
        SOAP([whole], splits={start((3, 3)): 3})


def test_a_convolution_matches_a_matrix_of_filters() -> None:
    conv, grads = start((8, 3, 2, 2)), gradients((8, 3, 2, 2))
    flat = nn.Parameter(conv.detach().reshape(8, 12).clone())
    run(SOAP([conv]), [(conv, grads)], range(30))
    run(SOAP([flat]), [(flat, grads.reshape(-1, 8, 12))], range(30))
    assert torch.equal(conv.reshape(8, 12), flat)


def test_the_first_gradient_may_be_zero() -> None:
    """As with zero-initialised branches: the first gradient is zero, and the next ones are ill-conditioned."""
    grads = gradients((20, 20), steps=1, dtype=torch.float32).expand(300, -1, -1).clone()
    grads[0] = 0
    param = start((20, 20), torch.float32)
    optimizer = SOAP([param], refresh_every=2)
    run(optimizer, [(param, grads)], range(300))
    assert optimizer.held() == {}
    statistics, basis = (optimizer.state[param][name][0].double() for name in ("left", "left_basis"))
    assert torch.linalg.cond(statistics) > 1e4
    rotated = basis @ statistics @ basis.mT
    assert (rotated - rotated.diag().diag()).norm() < 0.01 * (statistics - statistics.diag().diag()).norm()
