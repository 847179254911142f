"""SOAP and Muon on a GPU: the same trajectory as on the CPU, no synchronisation, orthogonal bases at full size."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from tests.optim.oracle import Soap
from torch import Tensor, nn

from unskip.optim import SOAP, Muon, _kernels
from unskip.optim._basis import eigenbasis, refresh
from unskip.optim._precision import exact_product, matmul_precision

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@contextlib.contextmanager
def no_synchronisation() -> Iterator[None]:
    try:
        torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def gradients(shape: tuple[int, ...], steps: int = 50, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(steps, *shape, generator=generator)
    scale = torch.logspace(0, -1.5, shape[0])[torch.randperm(shape[0], generator=generator)]
    return (noise + 0.3 * noise[:1]) * scale.view(-1, *[1] * (len(shape) - 1))


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 2e-3), ("tf32", 2e-2)])
@pytest.mark.parametrize("shape", [(48, 48), (80, 48), (48, 80), (300, 280)], ids=str)
def test_the_trajectory_matches_the_formulas(shape: tuple[int, int], precision: str, tolerance: float) -> None:
    """Tolerances are relative to the distance from the start, in norm over all entries."""
    grads = gradients(shape)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    param = nn.Parameter(weight.cuda())
    optimizer = SOAP([param], stagger=False, precision=precision)  # type: ignore[arg-type]
    oracle = Soap(weight.double().numpy())
    for step, grad in enumerate(grads):
        param.grad = grad.cuda()
        optimizer.step()
        oracle.step(grad.double().numpy())
        if not step:
            oracle.bases = [
                optimizer.state[param][f"{s}_basis"][0].double().cpu().mT.numpy() for s in ("left", "right")
            ]
    gone = np.linalg.norm(oracle.weight - weight.double().numpy())
    assert np.linalg.norm(param.detach().double().cpu().numpy() - oracle.weight) < tolerance * gone
    assert optimizer.held() == {}


@pytest.mark.parametrize("size", [768, 3072])
@pytest.mark.parametrize("kind", ["moving", "far", "zero"])
def test_bases_of_full_size_are_orthogonal(size: int, kind: str) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    scale = torch.logspace(0, -4, size, device="cuda")[:, None]
    grads = [scale * torch.randn(2, size, 768, device="cuda", generator=generator) for _ in range(11)]
    first = 0.05 * grads[0] @ grads[0].mT
    total = first if kind != "zero" else torch.zeros_like(first)
    for grad in grads[1:] if kind != "zero" else []:
        total = 0.95 * total + 0.05 * grad @ grad.mT
    basis = eigenbasis(first) if kind == "moving" else torch.eye(size, device="cuda").repeat(2, 1, 1)
    for _ in range(3):
        with matmul_precision("tf32", total.device):
            result = refresh(total, basis)
        assert not result.held.any()
        basis = result.basis
        wide = basis.double()
        assert (wide @ wide.mT - torch.eye(size, device="cuda")).abs().max() < 1e-4


def test_exact_products_are_exact() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    a, b = (torch.rand(3, 500, 500, device="cuda", generator=generator) * 2 - 1 for _ in range(2))
    truth = a.double() @ b.double()
    with matmul_precision("tf32", a.device):
        exact, rough = exact_product(a, b, torch.ones(3, device="cuda")), torch.bmm(a, b)
    assert (exact - truth).norm() < 5e-6 * truth.norm()
    assert (rough - truth).norm() > 1e-4 * truth.norm()


def model() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(4)]
    return nn.Sequential(nn.Linear(32, 64), *blocks, nn.Linear(64, 10)).cuda()


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stagger", [True, False])
def test_a_step_does_not_synchronise_with_the_host(state_dtype: str, stagger: bool) -> None:
    net = model()
    optimizer = SOAP(net.parameters(), state_dtype=state_dtype, stagger=stagger)  # type: ignore[arg-type]
    x, y = torch.randn(16, 32, device="cuda"), torch.zeros(16, dtype=torch.long, device="cuda")
    for step in range(25):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        if step == 12:
            next(net.parameters()).grad[0, 0] = torch.nan  # type: ignore[index]
        torch.cuda.synchronize()
        with (
            no_synchronisation() if step > 1 else contextlib.nullcontext()
        ):  # the first two steps build bases and stacks
            optimizer.step()
    assert list(optimizer.skipped().values()) == [1]
    assert all(torch.isfinite(param).all() for param in net.parameters())


def test_a_resumed_run_equals_an_uninterrupted_one() -> None:
    def train(net: nn.Module, optimizer: SOAP, steps: range) -> None:
        for step in steps:
            generator = torch.Generator("cuda").manual_seed(step)
            optimizer.zero_grad()
            net(torch.randn(16, 32, device="cuda", generator=generator)).square().mean().backward()
            optimizer.step()

    straight = model()
    whole = SOAP(straight.parameters())
    train(straight, whole, range(30))
    net = model()
    first = SOAP(net.parameters())
    train(net, first, range(13))
    other = model()
    other.load_state_dict(net.state_dict())
    second = SOAP(other.parameters())
    second.load_state_dict(first.state_dict())
    train(other, second, range(13, 30))
    for a, b in zip(straight.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 0.03), (torch.bfloat16, 0.15)], ids=str)
def test_muon_matches_torch(dtype: torch.dtype, tolerance: float) -> None:
    shapes = [(64, 64), (96, 40), (40, 96), (96, 40)]
    generator = torch.Generator("cuda").manual_seed(0)
    # Small weights, because in bfloat16 the updates of large ones would be lost in rounding.
    mine = [nn.Parameter(0.01 * torch.randn(s, device="cuda", generator=generator).to(dtype)) for s in shapes]
    theirs = [nn.Parameter(param.detach().clone()) for param in mine]
    first = [param.detach().clone() for param in mine]
    ours, peer = Muon(mine, lr=0.02), torch.optim.Muon(theirs, lr=0.02)
    for step in range(30):
        for a, b in zip(mine, theirs, strict=True):
            a.grad = torch.randn(a.shape, device="cuda", generator=generator).to(dtype)
            b.grad = a.grad.clone()
        with no_synchronisation() if step > 1 else contextlib.nullcontext():
            ours.step()
        peer.step()
    for a, b, c in zip(mine, theirs, first, strict=True):
        assert (a - b).norm() < tolerance * (b - c).norm()


@pytest.mark.parametrize("scale", [1e-44, 1e-38, 1e-18, 1e12])
def test_gradients_of_any_size_leave_finite_weights(scale: float) -> None:
    param = nn.Parameter(torch.randn(96, 64, device="cuda"))
    optimizer = SOAP([param])
    for grad in gradients((96, 64), steps=25):
        param.grad = (grad.double() * scale).float().cuda()
        optimizer.step()
    assert torch.isfinite(param).all()
    assert all(torch.isfinite(value).all() for value in optimizer.state[param].values())


def test_parameters_with_new_memory_are_updated() -> None:
    """Kernels use the addresses of parameters; a parameter whose data was replaced is still updated."""
    net, twin = model(), model()
    optimizers = [SOAP(net.parameters()), SOAP(twin.parameters())]
    for step in range(8):
        if step == 4:
            for param in net.parameters():
                param.data = param.data.clone()
        for one, optimizer in zip((net, twin), optimizers, strict=True):
            optimizer.zero_grad()
            x = torch.randn(16, 32, device="cuda", generator=torch.Generator("cuda").manual_seed(step))
            one(x).square().mean().backward()
            optimizer.step()
    for a, b in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)


def test_kernels_match_their_torch_implementations(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", generator=generator)

    ok, factors = torch.tensor([True, False, True], device="cuda"), draw(5, 3).abs() + 0.1
    x, y, z = (draw(3, 40, 20) for _ in range(3))
    order = torch.stack([torch.randperm(33) for _ in range(2)]).cuda()
    a, b, shift = draw(2, 33, 33), draw(2, 33, 33), draw(2)

    def everything() -> list[Tensor]:
        cleared, gradient, first, second, buffer = (t.clone() for t in (x, x, y, z.abs(), y))
        _kernels.clear(cleared, ok)
        direction = _kernels.adam(gradient, first, second, factors, 1e-8, torch.float16)
        ahead = _kernels.momentum(z.clone(), buffer, 0.95, True, torch.bfloat16)
        weights = [row.clone() for row in y]
        _kernels.move(weights, _kernels.pointers(weights, torch.float32), x, factors, 1)
        rest = [_kernels.half(x, factors[0]), *_kernels.inner(a, b), _kernels.pick(a, b, shift, order)]
        return [cleared, direction, first, second, ahead, buffer, *weights, *rest]

    fast = everything()
    monkeypatch.setattr(_kernels, "fast", lambda x: False)
    monkeypatch.setattr(_kernels, "pointers", lambda params, work: None)
    for ours, plain in zip(fast, everything(), strict=True):
        assert ours.dtype == plain.dtype
        assert (ours.double() - plain.double()).norm() < 2e-3 * plain.double().norm()
