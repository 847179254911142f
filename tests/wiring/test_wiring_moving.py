"""Learned and annealed weights."""

from __future__ import annotations

import pytest
import torch
from tests.anatomy import handmade as h
from tests.wiring.folders import IMAGES, X
from torch import nn

import unskip
from unskip import Anneal, Cut, Decay, Keep, Learn


@pytest.mark.parametrize("per", ["site", "channel"])
def test_learn_adds_trainable_parameters(vit: nn.Module, per: str) -> None:
    keys = set(vit.state_dict())
    wiring = unskip.rewire(vit, Learn(0.5, per=per))  # type: ignore[arg-type]
    assert len(wiring.parameters) == 6
    assert set(vit.state_dict()) - keys == set(wiring.parameters)
    assert {tuple(p.shape) for p in wiring.parameters.values()} == ({()} if per == "site" else {(16,)})
    assert wiring.alphas == [0.5] * 6
    vit.train()
    vit.head.weight.data.normal_()
    optimizer = torch.optim.SGD(wiring.parameters.values(), lr=0.1)
    vit(IMAGES).square().sum().backward()
    optimizer.step()
    assert all(alpha != 0.5 for alpha in wiring.alphas)
    assert f"6 learned parameters added ({6 if per == 'site' else 96} numbers): " in str(wiring)
    wiring.undo()
    assert set(vit.state_dict()) == keys


def test_learn_per_channel_broadcasts_over_positions() -> None:
    model = h.Convolution()
    wiring = unskip.rewire(model, Learn(0.5, per="channel"), X)
    (alpha,) = wiring.parameters.values()
    assert tuple(alpha.shape) == (h.DIM, 1)
    with torch.no_grad():
        alpha.copy_(torch.arange(h.DIM)[:, None])
    maps = X.transpose(1, 2)
    expected = torch.arange(h.DIM)[:, None] * maps + model.b(model.a(maps).relu())
    assert torch.allclose(model(X), expected.transpose(1, 2), atol=1e-5)


def test_anneal_follows_the_step_and_ends_exactly(vit: nn.Module) -> None:
    unskip.rewire(vit, Decay(0.6))
    decayed = vit(IMAGES)
    wiring = unskip.rewire(vit, Anneal(Keep(), Decay(0.6), steps=10))
    assert wiring.alphas == [1.0] * 6
    seen = []
    for step in (0, 5, 10):
        wiring.step(step)
        seen.append(wiring.alphas[-1])
    assert seen == pytest.approx([1.0, 0.8, 0.6], abs=1e-7)
    assert seen[-1] == 0.6
    assert torch.equal(vit(IMAGES), decayed)
    wiring.step(5)
    assert wiring.alphas[-1] == pytest.approx(0.8)


def test_step_computes_only_rules_in_progress_and_each_once(vit: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    wiring = unskip.rewire(vit, {"attention": Anneal(Keep(), Cut(), steps=4), "mlp": Anneal(Keep(), Cut(), steps=8)})
    asked = []
    weights = Anneal.weights
    monkeypatch.setattr(Anneal, "weights", lambda rule, *a, **k: asked.append(rule.steps) or weights(rule, *a, **k))
    seen = []
    for step in (1, 4, 6, 8, 9, 2):
        asked.clear()
        wiring.step(step)
        seen.append((list(asked), wiring.alphas[:2]))
    assert [rules for rules, _ in seen] == [[4, 8], [4, 8], [8], [8], [], [4, 8]]
    alphas = [[0.75, 0.875], [0.0, 0.5], [0.0, 0.25], [0.0, 0.0], [0.0, 0.0], [0.5, 0.75]]
    assert [weights for _, weights in seen] == alphas


def test_annealed_weights_follow_the_dtype_but_are_not_in_the_state_dict(vit: nn.Module) -> None:
    keys = list(vit.state_dict())
    wiring = unskip.rewire(vit, Anneal(Keep(), Cut(), steps=10))
    wiring.step(5)
    vit.double()
    assert {weight.dtype for weight in wiring.tensors()} == {torch.float64}
    assert vit(IMAGES.double()).dtype == torch.float64
    assert list(vit.state_dict()) == keys
    wiring.undo()
    assert not [name for module in vit.modules() for name in vars(module) if "unskip" in name]


@pytest.mark.parametrize("cast", ["half", "bfloat16"])
def test_narrow_dtypes_do_not_round_the_weights(vit: nn.Module, cast: str) -> None:
    wiring = unskip.rewire(vit, Anneal(Keep(), Decay(0.3), steps=10))
    wiring.step(7)
    before = wiring.alphas
    getattr(vit, cast)()
    assert wiring.alphas == before
    assert {weight.dtype for weight in wiring.tensors()} == {torch.float32}
    assert vit.to("meta") is vit  # the weights follow the device
    assert {weight.device.type for weight in wiring.tensors()} == {"meta"}


def test_rewired_restores_learned_weights(vit: nn.Module) -> None:
    wiring = unskip.rewire(vit, Learn(0.5))
    before = wiring.parameters
    with torch.no_grad():
        for i, parameter in enumerate(before.values()):
            parameter.fill_(0.1 * i)
    learned = wiring.alphas
    with unskip.rewired(vit, Cut()):
        assert wiring.parameters == {}
    assert wiring.alphas == learned
    assert all(wiring.parameters[name] is parameter for name, parameter in before.items())


def test_anneal_from_cut_does_not_read_the_stream() -> None:
    model = h.PreNorm()
    wiring = unskip.rewire(model, Anneal(Cut(), Keep(), steps=4), X)
    assert wiring.alphas == [0.0]
    assert isinstance(model.unskip_alpha0, float)
    wiring.step(2)
    assert wiring.alphas == [0.5]


def test_anneal_to_a_product_is_solved_for_its_sites() -> None:
    model = nn.Sequential(h.PreNorm(), h.PreNorm(), h.PreNorm())
    wiring = unskip.rewire(model, Anneal(Keep(), Decay.to_product(1e-8, back=True), steps=10), X)
    wiring.step(10)
    assert wiring.effective_decay == pytest.approx(1e-8)


def test_str_with_a_nan_weight(vit: nn.Module) -> None:
    wiring = unskip.rewire(vit, Learn())
    with torch.no_grad():
        next(iter(wiring.parameters.values())).fill_(float("nan"))
    assert "effective decay nan" in str(wiring)


def test_rewire_in_inference_mode_allows_training(vit: nn.Module) -> None:
    with torch.inference_mode():
        wiring = unskip.rewire(vit, Learn(0.5))
    vit.train()(IMAGES).sum().backward()
    assert all(p.grad is not None for p in wiring.parameters.values())
    with torch.inference_mode():
        wiring.set(Anneal(Keep(), Cut(), steps=10))
    wiring.step(5)
    assert wiring.alphas == [0.5] * 6
