"""SOAP with non-finite gradients, parameters that get gradients only at times, and bad options."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.optim.trajectories import gradients, run, same, start
from torch import nn

from unskip.errors import BadInput
from unskip.optim import SOAP, Muon, _kernels


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e30])
@pytest.mark.parametrize("shape", [(5, 4), (6,)], ids=str)
def test_non_finite_gradients_are_masked_and_counted(value: float, shape: tuple[int, ...]) -> None:
    good, bad = start(shape), start(shape, seed=2)
    grads = gradients(shape)
    optimizer = SOAP([("good", good), ("bad", bad)])
    run(optimizer, [(good, grads), (bad, grads)], range(7))
    kept = {name: tensor.clone() for name, tensor in optimizer.state[bad].items()}
    weight, other = bad.detach().clone(), good.detach().clone()
    broken = grads.clone()
    broken[7].view(-1)[2] = value
    run(optimizer, [(good, grads), (bad, broken)], range(7, 8))
    assert torch.equal(bad, weight)
    assert not torch.equal(good, other)
    assert torch.equal(optimizer.state[bad]["step"], kept["step"])
    for name in ("exp_avg", "exp_avg_sq"):
        # a refresh in this step may have rotated the moments together with their basis
        if name in kept and len(shape) == 1:
            assert torch.equal(optimizer.state[bad][name], kept[name])
    assert optimizer.skipped() == {"bad": 1}
    run(optimizer, [(good, grads), (bad, grads)], range(8, 12))
    assert torch.isfinite(bad).all()
    assert optimizer.skipped() == {"bad": 1}


@pytest.mark.parametrize("scale", [1e-44, 1e-38, 1e-30, 1e-18, 1e12])
def test_gradients_of_any_size_leave_finite_weights(scale: float) -> None:
    param, grads = start((6, 5), torch.float32), (gradients((6, 5)) * scale).float()
    optimizer = SOAP([param])
    run(optimizer, [(param, grads)], range(25))
    assert torch.isfinite(param).all()
    assert all(torch.isfinite(value).all() for value in optimizer.state[param].values())
    assert optimizer.skipped() == {}


@pytest.mark.parametrize("vectors", [torch.full((4, 4), torch.nan), torch.ones(4, 4)], ids=["nan", "alike"])
def test_a_failed_eigendecomposition_leaves_the_identity(
    monkeypatch: pytest.MonkeyPatch, vectors: torch.Tensor
) -> None:
    param, grads = start((4, 4), torch.float32), gradients((4, 4)).float()
    optimizer = SOAP([param])
    with monkeypatch.context() as patched:
        patched.setattr(torch.linalg, "eigh", lambda x: (torch.ones(4), vectors.expand_as(x)))
        run(optimizer, [(param, grads)], range(1))
    assert torch.equal(optimizer.state[param]["left_basis"], torch.eye(4)[None])
    run(optimizer, [(param, grads)], range(1, 30))
    basis = optimizer.state[param]["left_basis"]
    assert torch.allclose(basis @ basis.mT, torch.eye(4), atol=1e-4)
    assert not torch.equal(basis, torch.eye(4)[None])
    assert torch.isfinite(param).all()


def test_an_embedding_with_unused_tokens_trains() -> None:
    """Its first gradient has mostly zero rows, for which the eigensolver may not converge in float32."""
    torch.manual_seed(0)
    embedding, head = nn.Embedding(256, 32), nn.Linear(32, 256, bias=False)
    optimizer = SOAP([*embedding.parameters(), *head.parameters()], lr=0.05)
    ids = torch.randint(80, (400,)) * 3
    losses = []
    for _ in range(20):
        loss = nn.functional.cross_entropy(head(embedding(ids)), ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    basis = optimizer.state[embedding.weight]["left_basis"][0]
    assert torch.allclose(basis @ basis.T, torch.eye(256), atol=1e-4)
    assert optimizer.skipped() == {}


def test_a_direction_stays_within_float16() -> None:
    """After a refresh the second moment may be zero where the first is not; in float16 this must not overflow."""
    gradient, first, second = torch.zeros(1, 2, 2), torch.ones(1, 2, 2), torch.zeros(1, 2, 2)
    factors = torch.tensor([0.0, 0.0, -1.0, 1.0, 1.0])[:, None]
    direction = _kernels.adam(gradient, first, second, factors, 1e-8, torch.float16)
    assert torch.equal(direction, torch.full((1, 2, 2), 65504, dtype=torch.float16))


def test_a_masked_step_has_no_effect() -> None:
    """Without refreshes, a run with one bad gradient equals the run without that step."""
    grads = gradients((5, 4), steps=20)
    broken = torch.cat([grads[:9], torch.full((1, 5, 4), torch.nan, dtype=torch.float64), grads[9:]])
    one, other = start((5, 4)), start((5, 4))
    run(SOAP([one], refresh_every=1000), [(one, grads)], range(20))
    run(SOAP([other], refresh_every=1000), [(other, broken)], range(21))
    assert torch.allclose(one, other, atol=1e-12)


def test_an_error_in_one_group_changes_no_other_group() -> None:
    param, table = start((5, 4)), nn.Embedding(5, 3, sparse=True)
    grads = gradients((5, 4))
    optimizer = SOAP([{"params": [param]}, {"params": list(table.parameters())}])
    run(optimizer, [(param, grads)], range(3))
    before, state = param.detach().clone(), copy.deepcopy(optimizer.state_dict())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(BadInput, match="sparse"):
        run(optimizer, [(param, grads)], range(3, 4))
    assert torch.equal(param, before)
    assert same(optimizer.state_dict(), state)


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_steps_without_a_gradient_have_no_effect(state_dtype: Any) -> None:
    """While a parameter of the same shape is updated in all steps. Without refreshes."""
    paused, twin, other = (start((6, 4), torch.float32, seed) for seed in (1, 1, 2))
    grads = gradients((6, 4), dtype=torch.float32)
    options: dict[str, Any] = {"refresh_every": 1000, "stagger": False, "state_dtype": state_dtype}
    optimizer = SOAP([other, paused], splits={other: 2, paused: 2}, **options)
    alone = SOAP([twin], splits={twin: 2}, **options)
    for step in range(20):
        other.grad, paused.grad = grads[step].clone(), grads[step // 2].clone() if step % 2 else None
        optimizer.step()
    run(alone, [(twin, grads)], range(10))
    assert same(optimizer.state[paused], alone.state[twin])
    assert torch.equal(paused, twin)


def test_the_refresh_interval_may_change_in_training() -> None:
    param, grads = start((5, 4)), gradients((5, 4))
    optimizer = SOAP([param], refresh_every=5, stagger=False)
    bases = []
    for step in range(50):
        run(optimizer, [(param, grads)], range(step, step + 1))
        optimizer.param_groups[0]["refresh_every"] = 5 if step < 20 else 12
        bases.append(optimizer.state[param]["right_basis"].clone())
    changed = [step for step in range(1, 50) if not torch.equal(bases[step], bases[step - 1])]
    assert changed == [5, 10, 15, 20, 24, 36, 48]


def test_parameters_may_get_their_first_gradient_late_or_miss_some() -> None:
    early, late, paused = start((5, 4)), start((5, 4), seed=2), start((3,), seed=3)
    grads, short = gradients((5, 4)), gradients((3,))
    optimizer = SOAP([early, late, paused])
    for step in range(30):
        early.grad = grads[step].clone()
        late.grad = grads[step].clone() if step >= 12 else None
        paused.grad = short[step].clone() if step % 2 else None
        before = [param.detach().clone() for param in (early, late, paused)]
        optimizer.step()
        moved = [not torch.equal(a, b) for a, b in zip((early, late, paused), before, strict=True)]
        assert moved == [step >= 1, step >= 13, step % 2 == 1 and step >= 3], step
    assert [float(optimizer.state[p]["step"]) for p in (early, late, paused)] == [29, 17, 14]
    assert optimizer.skipped() == {}


@pytest.mark.parametrize(
    "options",
    [
        {"lr": -1.0},
        {"betas": (0.9, 1.0)},
        {"betas": 0.9},
        {"refresh_every": 0},
        {"precision": "bf16"},
        {"state_dtype": "float16"},
        {"weight_decay": float("nan")},
    ],
    ids=str,
)
def test_wrong_options_are_named(options: dict[str, Any]) -> None:
    for params in ([start((2, 2))], [{"params": [start((2, 2))], **options}]):
        with pytest.raises(BadInput, match=f"{next(iter(options))} must be"):
            SOAP(params, **options)


@pytest.mark.parametrize("kind", [SOAP, Muon])
def test_sharded_parameters_are_refused(kind: Any) -> None:
    param: Any = start((4, 4))
    param.device_mesh = None  # an attribute of DTensor
    with pytest.raises(BadInput, match="no whole matrix on any rank"):
        kind([param])


def test_complex_parameters_are_refused() -> None:
    with pytest.raises(BadInput, match="complex64"):
        SOAP([torch.zeros(3, dtype=torch.complex64, requires_grad=True)])
