"""SOAP's trajectory: against float64 formulas, against pytorch_optimizer, and what it does with odd parameters."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pytorch_optimizer import SOAP as Peer
from tests.optim.oracle import Adam, Soap
from torch import Tensor, nn

from unskip.errors import BadInput
from unskip.optim import SOAP

STEPS = 50


def gradients(shape: tuple[int, ...], steps: int = STEPS, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Noise with a spectrum on both sides, and a part that stays: (steps, *shape)."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(steps, *shape, generator=generator, dtype=torch.float64)
    for axis, size in enumerate(shape):
        scale = torch.logspace(0, -1.5, size, dtype=torch.float64)[torch.randperm(size, generator=generator)]
        noise = noise * scale.view([-1 if i == axis else 1 for i in range(len(shape))])
    return (noise + 0.3 * noise[:1]).to(dtype)


def start(shape: tuple[int, ...], dtype: torch.dtype = torch.float64, seed: int = 1) -> nn.Parameter:
    return nn.Parameter(
        torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
    )


def run(optimizer: torch.optim.Optimizer, pairs: list[tuple[nn.Parameter, Tensor]], steps: range) -> list[list[Tensor]]:
    """The parameters after every step."""
    history = []
    for step in steps:
        for param, grads in pairs:
            param.grad = grads[step].clone()
        optimizer.step()
        history.append([param.detach().clone() for param, _ in pairs])
    return history


def bases_of(optimizer: SOAP, param: Tensor) -> list[Any]:
    """The optimizer's bases as the oracle wants them: vectors in columns, None for the identity."""
    state = optimizer.state[param]
    return [state[f"{side}_basis"][0].double().mT.numpy() if side in state else None for side in ("left", "right")]


SHAPES = [(6, 6), (2, 2), (9, 4), (4, 9), (16, 3), (3, 16), (24, 24), (33, 20), (20, 33), (64, 8)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)], ids=str)
def test_fifty_steps_follow_the_formulas(shape: tuple[int, int], dtype: torch.dtype, tolerance: float) -> None:
    grads = gradients(shape, dtype=dtype)
    param = start(shape, dtype)
    optimizer = SOAP([param], stagger=False)
    first = param.detach().double().numpy().copy()
    ours = run(optimizer, [(param, grads)], range(1))
    # A tall or wide first gradient has a null space, where eigenvectors are a matter of choice: both start from ours.
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


def test_square_matrices_need_no_help_with_the_first_basis() -> None:
    grads, param = gradients((12, 12)), start((12, 12))
    oracle = Soap(param.detach().numpy())
    ours = run(SOAP([param], stagger=False), [(param, grads)], range(STEPS))
    for step in range(STEPS):
        oracle.step(grads[step].numpy())
        assert np.abs(ours[step][0].numpy() - oracle.weight).max() < 1e-9, step


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fifty_steps_follow_pytorch_optimizer(shape: tuple[int, int]) -> None:
    grads = gradients(shape, dtype=torch.float32)
    mine, theirs = start(shape, torch.float32), start(shape, torch.float32)
    ours, peer = SOAP([mine], stagger=False), Peer([theirs])
    run(ours, [(mine, grads)], range(1))
    run(peer, [(theirs, grads)], range(1))
    peer.state[theirs]["Q"] = [torch.from_numpy(basis).float() for basis in bases_of(ours, mine)]
    a, b = run(ours, [(mine, grads)], range(1, STEPS)), run(peer, [(theirs, grads)], range(1, STEPS))
    for step, (x, y) in enumerate(zip(a, b, strict=True)):
        assert torch.allclose(x[0], y[0], atol=2e-5, rtol=0), step


def test_many_shapes_at_once_are_each_their_own_trajectory() -> None:
    shapes = [(8, 5), (5, 8), (8, 5), (7,), (8, 5), (1, 4, 6), (3, 2, 2, 2), (), (1, 1, 5), (2, 9)]
    grads = [gradients(shape, seed=seed) for seed, shape in enumerate(shapes)]
    params = [start(shape, seed=seed) for seed, shape in enumerate(shapes)]
    together = copy.deepcopy(params)
    # Alone, a matrix is refreshed in another step of the interval, so only unstaggered runs compare.
    run(SOAP(together, stagger=False), list(zip(together, grads, strict=True)), range(STEPS))
    for param, grad, other in zip(params, grads, together, strict=True):
        run(SOAP([param], stagger=False), [(param, grad)], range(STEPS))
        assert torch.allclose(other, param, atol=1e-9), param.shape


def test_vectors_are_adam() -> None:
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
        ({"one_sided": True}, (False, True)),
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


def test_a_split_parameter_is_as_many_matrices() -> None:
    whole, grads = start((12, 4)), gradients((12, 4))
    parts = [nn.Parameter(part.clone()) for part in whole.detach().split(4)]
    run(SOAP([whole], splits={whole: 3}), [(whole, grads)], range(30))
    run(SOAP(parts), [(part, grads[:, 4 * i : 4 * i + 4]) for i, part in enumerate(parts)], range(30))
    assert torch.allclose(whole, torch.cat([part.detach() for part in parts]), atol=1e-12)
    with pytest.raises(BadInput, match="no 5 equal blocks"):
        SOAP([whole], splits={whole: 5})
    with pytest.raises(BadInput, match="not among"):
        SOAP([whole], splits={start((3, 3)): 3})


def test_a_stack_of_matrices_is_as_many_matrices() -> None:
    whole, grads = start((3, 5, 4)), gradients((3, 5, 4))
    parts = [nn.Parameter(part.clone()) for part in whole.detach()]
    run(SOAP([whole], splits={whole: 3}), [(whole, grads)], range(30))
    run(SOAP(parts), [(part, grads[:, i]) for i, part in enumerate(parts)], range(30))
    assert torch.allclose(whole, torch.stack([part.detach() for part in parts]), atol=1e-12)


def test_a_convolution_is_a_matrix_of_its_filters() -> None:
    conv, grads = start((8, 3, 2, 2)), gradients((8, 3, 2, 2))
    flat = nn.Parameter(conv.detach().reshape(8, 12).clone())
    run(SOAP([conv]), [(conv, grads)], range(30))
    run(SOAP([flat]), [(flat, grads.reshape(-1, 8, 12))], range(30))
    assert torch.equal(conv.reshape(8, 12), flat)


@settings(max_examples=20)
@given(st.integers(0, 10_000), st.floats(1e-12, 1e12))
def test_the_update_does_not_depend_on_the_scale_of_the_gradient(seed: int, scale: float) -> None:
    grads = gradients((5, 5), steps=14, seed=seed)
    one, other = start((5, 5)), start((5, 5))
    run(SOAP([one], eps=0.0), [(one, grads)], range(14))
    run(SOAP([other], eps=0.0), [(other, grads * scale)], range(14))
    assert torch.allclose(one, other, atol=1e-6)


def test_a_rotated_problem_has_a_rotated_trajectory() -> None:
    generator = torch.Generator().manual_seed(3)
    u, v = (torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64)).Q for n in (6, 6))
    grads, plain = gradients((6, 6)), start((6, 6))
    turned = nn.Parameter(u @ plain.detach() @ v)
    run(SOAP([plain]), [(plain, grads)], range(STEPS))
    run(SOAP([turned]), [(turned, u @ grads @ v)], range(STEPS))
    assert torch.allclose(u @ plain @ v, turned, atol=1e-8)


def test_a_dead_parameter_stays_where_it_is() -> None:
    param = start((6, 4), torch.float32)
    before = param.detach().clone()
    run(SOAP([param], weight_decay=0.0), [(param, torch.zeros(25, 6, 4))], range(25))
    assert torch.equal(param, before)


def test_a_basis_can_begin_from_a_gradient_of_zero() -> None:
    """As under zero-initialised branches: the first gradient is nothing, the next ones are ill-conditioned."""
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


# --- Faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e30])
@pytest.mark.parametrize("shape", [(5, 4), (6,)], ids=str)
def test_a_gradient_that_is_not_finite_is_masked_and_counted(value: float, shape: tuple[int, ...]) -> None:
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
        # a refresh in the same step may have turned the moments with their basis
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


def test_a_masked_step_never_happened() -> None:
    """Without refreshes, a run with one bad gradient equals the run without that step."""
    grads = gradients((5, 4), steps=20)
    broken = torch.cat([grads[:9], torch.full((1, 5, 4), torch.nan, dtype=torch.float64), grads[9:]])
    one, other = start((5, 4)), start((5, 4))
    run(SOAP([one], refresh_every=1000), [(one, grads)], range(20))
    run(SOAP([other], refresh_every=1000), [(other, broken)], range(21))
    assert torch.allclose(one, other, atol=1e-12)


def test_check_raises_at_once_and_changes_nothing() -> None:
    param = start((5, 4))
    grads = gradients((5, 4))
    optimizer = SOAP([("blocks.0.weight", param)], check=True)
    run(optimizer, [(param, grads)], range(3))
    before, state = param.detach().clone(), copy.deepcopy(optimizer.state_dict())
    param.grad = grads[3] * torch.nan
    with pytest.raises(BadInput, match=r"blocks\.0\.weight is not finite"):
        optimizer.step()
    assert torch.equal(param, before)
    assert same(optimizer.state_dict(), state)


@pytest.mark.parametrize("check", [True, False])
def test_a_refusal_in_one_group_leaves_the_others_alone(check: bool) -> None:
    """With `check` the second group has a gradient that is not finite, without it a sparse one."""
    param, table = start((5, 4)), nn.Embedding(5, 3, sparse=not check)
    grads = gradients((5, 4))
    optimizer = SOAP([{"params": [param]}, {"params": list(table.parameters())}], check=check)
    run(optimizer, [(param, grads)], range(3))
    before, state = param.detach().clone(), copy.deepcopy(optimizer.state_dict())
    (table(torch.tensor([1])).sum() * (torch.nan if check else 1)).backward()
    with pytest.raises(BadInput, match="not finite" if check else "sparse"):
        run(optimizer, [(param, grads)], range(3, 4))
    assert torch.equal(param, before)
    assert same(optimizer.state_dict(), state)


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_a_pause_changes_nothing(state_dtype: Any) -> None:
    """Beside one of its shape that goes on: without refreshes, steps without a gradient never happened."""
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


def test_the_interval_may_change_on_the_way() -> None:
    param, grads = start((5, 4)), gradients((5, 4))
    optimizer = SOAP([param], refresh_every=5, stagger=False)
    bases = []
    for step in range(50):
        run(optimizer, [(param, grads)], range(step, step + 1))
        optimizer.param_groups[0]["refresh_every"] = 5 if step < 20 else 12
        bases.append(optimizer.state[param]["right_basis"].clone())
    changed = [step for step in range(1, 50) if not torch.equal(bases[step], bases[step - 1])]
    assert changed == [5, 10, 15, 20, 24, 36, 48]


def test_a_parameter_may_come_late_or_pause() -> None:
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
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr must be"),
        ({"betas": (0.9, 1.0)}, "betas must be"),
        ({"betas": 0.9}, "betas must be two"),
        ({"refresh_every": 0}, "refresh_every must be"),
        ({"precision": "bf16"}, "it can be 'tf32'"),
        ({"state_dtype": "float16"}, "it can be 'float32'"),
        ({"weight_decay": float("nan")}, "weight_decay must be"),
        ({"shampoo_beta": 2}, "shampoo_beta must be"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        SOAP([start((2, 2))], **options)
    with pytest.raises(BadInput, match=message):
        SOAP([{"params": [start((2, 2))], **options}])


def test_what_cannot_be_optimized_is_refused() -> None:
    with pytest.raises(BadInput, match="cannot be optimized"):
        SOAP([torch.zeros(3, dtype=torch.complex64, requires_grad=True)])
    table = nn.Embedding(5, 3, sparse=True)
    optimizer = SOAP(table.parameters())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(BadInput, match="sparse=False"):
        optimizer.step()


# --- State ------------------------------------------------------------------------------------------------------------


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


SET = [(6, 4), (4, 6), (6, 4), (5,), (1, 3, 4), (12, 4), ()]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("way", ["memory", "file", "pickle", "deepcopy"])
def test_a_resumed_run_is_the_uninterrupted_one(dtype: torch.dtype, state_dtype: Any, way: str, tmp_path: Any) -> None:
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


def test_what_a_hook_makes_of_a_state_is_loaded() -> None:
    param, grads = start((5, 4), torch.bfloat16), gradients((5, 4), dtype=torch.bfloat16)
    optimizer = SOAP([param])
    run(optimizer, [(param, grads)], range(3))

    def forget(_: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        state = copy.deepcopy(state)
        state["state"][0]["exp_avg"].zero_()
        return state

    other = SOAP([param])
    other.register_load_state_dict_pre_hook(forget)
    other.load_state_dict(optimizer.state_dict())
    assert not other.state[param]["exp_avg"].any()
    assert torch.equal(other.state[param]["left"], optimizer.state[param]["left"])


def test_a_state_that_does_not_fit_is_refused() -> None:
    param, grads = start((5, 4)), gradients((5, 4))
    optimizer, adam = SOAP([param]), torch.optim.AdamW([param])
    run(adam, [(param, grads)], range(2))
    with pytest.raises(BadInput, match="another optimizer; load one that SOAP saved"):
        optimizer.load_state_dict(adam.state_dict())
    run(optimizer, [(param, grads)], range(2))
    with pytest.raises(BadInput, match=r"shape \(6, 4\).*the same groups"):
        SOAP([start((6, 4))]).load_state_dict(optimizer.state_dict())


def test_state_is_float32_and_no_more_than_the_peer_holds() -> None:
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


def test_a_bfloat16_state_follows_the_float32_one() -> None:
    shape = (24, 24)
    full, half, grads = start(shape, torch.float32), start(shape, torch.float32), gradients(shape, dtype=torch.float32)
    first = full.detach().clone()
    run(SOAP([full]), [(full, grads)], range(STEPS))
    run(SOAP([half], state_dtype="bfloat16"), [(half, grads)], range(STEPS))
    assert (full - half).norm() < 0.1 * (full - first).norm()


def test_parameters_of_low_precision_have_states_that_do_not() -> None:
    param, grads = start((6, 4), torch.bfloat16), gradients((6, 4), dtype=torch.bfloat16)
    optimizer = SOAP([param])
    run(optimizer, [(param, grads)], range(12))
    assert {t.dtype for t in optimizer.state[param].values() if t.ndim} == {torch.float32}


# --- Company ----------------------------------------------------------------------------------------------------------


def small_model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3)).double()


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 6, generator=generator, dtype=torch.float64), torch.randint(3, (8,), generator=generator)


def test_clipping_and_accumulation() -> None:
    """Two half batches, clipped, give what the whole batch gives."""
    models = [small_model(), small_model()]
    # One-sided: the larger side of a small gradient has a null space, whose eigenvectors rounding decides.
    optimizers = [SOAP(model.parameters(), lr=0.01, one_sided=True) for model in models]
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
    assert optimizer.skipped() == {}  # the scaler left that step out itself
    assert {float(state["step"]) for state in optimizer.state.values()} == {4}


def test_a_closure_is_called_with_gradients_on() -> None:
    model = small_model()
    optimizer = SOAP(model.parameters())
    x, y = batch(0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(30)]
    assert losses[-1] < losses[0]


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


def test_the_users_precision_is_left_alone() -> None:
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    try:
        for value in ("ieee", "tf32"):
            settings.fp32_precision = value
            param = start((3, 3))
            run(SOAP([param]), [(param, gradients((3, 3)))], range(3))
            assert settings.fp32_precision == value
    finally:
        settings.fp32_precision = before


def test_autocast_does_not_reach_inside() -> None:
    plain, cast = start((6, 5), torch.float32), start((6, 5), torch.float32)
    grads = gradients((6, 5), dtype=torch.float32)
    run(SOAP([plain]), [(plain, grads)], range(12))
    with torch.autocast("cpu", torch.bfloat16):
        run(SOAP([cast]), [(cast, grads)], range(12))
    assert torch.equal(plain, cast)


def test_a_rehearsed_refresh_leaves_no_trace() -> None:
    params = [start((6, 4)), start((4, 6), seed=2), start((5,), seed=3)]
    optimizer = SOAP(params, refresh_every=3)
    run(optimizer, [(param, gradients(tuple(param.shape))) for param in params], range(5))
    before = copy.deepcopy(optimizer.state_dict())
    (team,) = optimizer._teams[0]
    for lots in team.calendar:
        team._refresh(lots, write=False)
    assert any(team.calendar)
    after = optimizer.state_dict()
    for key, entry in before["state"].items():
        for name, value in entry.items():
            assert torch.equal(after["state"][key][name], value), name
