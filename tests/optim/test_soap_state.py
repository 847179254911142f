"""The state of SOAP: exact resume, memory, and checks; and use with gradient scalers, schedulers and clipping."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from pytorch_optimizer import SOAP as Peer
from tests.optim.trajectories import STEPS, gradients, run, same, start
from torch import Tensor, nn

from unskip.errors import BadInput
from unskip.optim import SOAP

# --- State ------------------------------------------------------------------------------------------------------------

SET = [(6, 4), (4, 6), (6, 4), (5,), (1, 3, 4), (12, 4), ()]


@pytest.mark.parametrize(
    ("dtype", "state_dtype", "way"),
    [
        (torch.float64, "float32", "memory"),
        (torch.float32, "bfloat16", "pickle"),
        (torch.float32, "float32", "deepcopy"),
        (torch.bfloat16, "float32", "file"),
        (torch.bfloat16, "bfloat16", "memory"),
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one(
    dtype: torch.dtype, state_dtype: Any, way: str, tmp_path: Any
) -> None:
    def fresh() -> tuple[list[nn.Parameter], SOAP]:
        params = [start(shape, dtype, seed) for seed, shape in enumerate(SET)]
        return params, SOAP(params, state_dtype=state_dtype, splits={params[5]: 3})

    grads = [gradients(shape, seed=seed, dtype=dtype) for seed, shape in enumerate(SET)]
    straight, whole = fresh()
    run(whole, list(zip(straight, grads, strict=True)), range(40))
    params, optimizer = fresh()
    run(optimizer, list(zip(params, grads, strict=True)), range(17))
    if way in ("pickle", "deepcopy"):
        pair = (params, optimizer)
        params, optimizer = pickle.loads(pickle.dumps(pair)) if way == "pickle" else copy.deepcopy(pair)
    else:
        saved, values = optimizer.state_dict(), [param.detach().clone() for param in params]
        if way == "file":
            torch.save(saved, tmp_path / "state.pt")
            saved = torch.load(tmp_path / "state.pt", weights_only=True)
        kept = copy.deepcopy(saved)
        params, optimizer = fresh()
        for param, value in zip(params, values, strict=True):
            param.data.copy_(value)
        optimizer.load_state_dict(saved)
        assert same(optimizer.state_dict(), kept)
    run(optimizer, list(zip(params, grads, strict=True)), range(17, 40))
    assert all(torch.equal(a, b) for a, b in zip(params, straight, strict=True))
    assert same(optimizer.state_dict(), whole.state_dict())


def test_a_loaded_state_is_a_copy() -> None:
    param, grads = start((5, 4)), gradients((5, 4))
    optimizer = SOAP([param])
    run(optimizer, [(param, grads)], range(5))
    saved = optimizer.state_dict()
    kept = copy.deepcopy(saved)
    twin = nn.Parameter(param.detach().clone())
    other = SOAP([twin])
    other.load_state_dict(saved)
    run(other, [(twin, grads)], range(5, 10))
    assert same(optimizer.state_dict(), kept)


def test_a_state_that_does_not_fit_is_refused() -> None:
    param, grads = start((5, 4)), gradients((5, 4))
    optimizer, adam = SOAP([param]), torch.optim.AdamW([param])
    run(adam, [(param, grads)], range(2))
    with pytest.raises(BadInput, match="another optimizer"):
        optimizer.load_state_dict(adam.state_dict())
    run(optimizer, [(param, grads)], range(2))
    with pytest.raises(BadInput, match=r"shape \(6, 4\).*the same groups"):
        SOAP([start((6, 4))]).load_state_dict(optimizer.state_dict())


def test_the_state_is_float32_and_not_larger_than_that_of_pytorch_optimizer() -> None:
    param, twin = start((48, 32), torch.float32), start((48, 32), torch.float32)
    grads = gradients((48, 32), dtype=torch.float32)
    sizes = {}
    for name in ("float32", "bfloat16"):
        optimizer = SOAP([param], state_dtype=name)  # type: ignore[arg-type]
        run(optimizer, [(param, grads)], range(3))
        sizes[name] = sum(t.numel() * t.element_size() for t in optimizer.state[param].values() if t.ndim)
    peer = Peer([twin])
    run(peer, [(twin, grads)], range(3))
    held = [
        peer.state[twin]["exp_avg"],
        peer.state[twin]["exp_avg_sq"],
        *peer.state[twin]["GG"],
        *peer.state[twin]["Q"],
    ]
    assert sizes["float32"] == sum(t.numel() * t.element_size() for t in held)
    assert sizes["bfloat16"] < 0.6 * sizes["float32"]


def test_a_bfloat16_state_gives_nearly_the_same_weights() -> None:
    shape = (24, 24)
    full, half, grads = start(shape, torch.float32), start(shape, torch.float32), gradients(shape, dtype=torch.float32)
    first = full.detach().clone()
    run(SOAP([full]), [(full, grads)], range(STEPS))
    run(SOAP([half], state_dtype="bfloat16"), [(half, grads)], range(STEPS))
    assert (full - half).norm() < 0.1 * (full - first).norm()


# --- With clipping, scalers and schedulers ----------------------------------------------------------------------------


def small_model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3)).double()


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 6, generator=generator, dtype=torch.float64), torch.randint(3, (8,), generator=generator)


def test_clipping_and_accumulation() -> None:
    """Two accumulated half batches, clipped, match the whole batch."""
    models = [small_model(), small_model()]
    # The larger side has no basis here: its statistics have a null space, whose eigenvectors depend on rounding.
    optimizers = [SOAP(model.parameters(), lr=0.01, max_dim=6) for model in models]
    for step in range(15):
        x, y = batch(step)
        for model, optimizer, parts in zip(models, optimizers, (1, 2), strict=True):
            optimizer.zero_grad()
            for i in range(parts):
                size = 8 // parts
                rows = slice(i * size, (i + 1) * size)
                (nn.functional.cross_entropy(model(x[rows]), y[rows]) / parts).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-7)


def test_grad_scaler_steps_and_skips() -> None:
    model = small_model().float()
    optimizer = SOAP(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    for step in range(6):
        x, y = (t.float() if t.is_floating_point() else t for t in batch(step))
        optimizer.zero_grad()
        scaler.scale(nn.functional.cross_entropy(model(x), y)).backward()
        if step == 3:
            next(model.parameters()).grad[0, 0] = torch.inf  # type: ignore[index]
            before = [param.detach().clone() for param in model.parameters()]
        scaler.step(optimizer)
        if step == 3:
            assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
        scaler.update()
    assert optimizer.skipped() == {}  # the scaler skipped the step, not the optimizer
    assert {float(state["step"]) for state in optimizer.state.values()} == {4}


def test_schedulers_and_tensor_rates() -> None:
    model, twin = small_model(), small_model()
    a = SOAP(model.parameters(), lr=0.01)
    b = SOAP(twin.parameters(), lr=torch.tensor(0.01, dtype=torch.float64))
    schedule = torch.optim.lr_scheduler.LambdaLR(a, lambda step: 0.5**step)
    for step in range(6):
        for one, optimizer in ((model, a), (twin, b)):
            x, y = batch(step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(one(x), y).backward()
            optimizer.step()
        schedule.step()
        b.param_groups[0]["lr"].mul_(0.5)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(p, q, atol=1e-12)


def test_a_rehearsed_refresh_changes_nothing() -> None:
    params = [start((6, 4)), start((4, 6), seed=2), start((5,), seed=3)]
    optimizer = SOAP(params, refresh_every=3)
    run(optimizer, [(param, gradients(tuple(param.shape))) for param in params], range(5))
    before = copy.deepcopy(optimizer.state_dict())
    (part,) = optimizer._by_device[0]
    for chunks in part.schedule:
        part._refresh(chunks, write=False)
    assert any(part.schedule)
    after = optimizer.state_dict()
    for key, entry in before["state"].items():
        for name, value in entry.items():
            assert torch.equal(after["state"][key][name], value), name
