"""Whole models: every MLP site gets a verdict, and `apply` rewrites the sites that it can and undoes it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import timm
import torch
from tests.absorption.blocks import normal, numbers, planted
from torch import Tensor, nn

import unskip
from unskip import absorption
from unskip.absorption import _apply, _from, absorb
from unskip.anatomy._example import example_for
from unskip.anatomy._model_trace import trace_model
from unskip.errors import BadInput


class Plain(nn.Module):
    """Two blocks without norms, one of them absorbable."""

    def __init__(self, word: type[nn.Module] = nn.GELU, possible: bool = True, d: int = 6, h: int = 24) -> None:
        super().__init__()
        self.ups = nn.ModuleList(nn.Linear(d, h) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(h, d) for _ in range(2))
        self.act = word()
        self.double()
        if possible:
            block, _ = planted(d, h, "gelu" if word is nn.GELU else "relu", seed=1)
            with torch.no_grad():
                for layer, weight, bias in (
                    (self.ups[0], block.up, block.up_bias),
                    (self.downs[0], block.down, block.down_bias),
                ):
                    layer.weight.copy_(weight)
                    layer.bias.copy_(bias)

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.ups, self.downs, strict=True):
            x = x + down(self.act(up(x)))
        return x


X = normal(numbers(0), 400, 6)


def test_scan() -> None:
    scan = absorption.scan(Plain(), X)
    assert [row.status for row in scan] == ["possible", "impossible"]
    assert scan.verify()
    assert scan[1].verdict is not None
    assert scan[1].verdict.extra_width == 6
    assert all(row.bare is None for row in scan)
    assert "1 possible, 1 impossible" in str(scan)
    assert json.loads(json.dumps(scan.to_dict()))["counts"]["possible"] == 1
    with_data = absorption.scan(Plain(), data=X[:80])
    assert with_data[1].approximation is not None
    assert 0 < with_data[1].approximation.error < 1


def test_exact_rewrites_what_is_possible_and_comes_back() -> None:
    model = Plain()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    before = model(X)
    applied = absorption.apply(model, "exact", X)
    assert len(applied.done) == 1
    assert len(applied.left) == 1
    assert applied.difference is not None
    assert applied.difference < 1e-12
    assert torch.allclose(model(X), before, atol=1e-9)
    assert not torch.equal(model.ups[0].weight, state["ups.0.weight"])
    assert unskip.audit(model, X)[0] is not None
    assert applied.wiring is not None
    assert applied.wiring.alphas == [0.0, 1.0]
    assert "1 of 2" in str(applied)
    json.dumps(applied.to_dict())
    applied.undo()
    applied.undo()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(model(X), before)


def test_widen_grows_the_layers_and_comes_back() -> None:
    model = Plain(nn.ReLU, possible=False)
    before = model(X)
    applied = absorption.apply(model, "widen", X)
    assert len(applied.done) == 2
    assert torch.allclose(model(X), before, atol=1e-9)
    assert model.ups[0].weight.shape == (30, 6)
    assert (model.ups[0].out_features, model.downs[0].in_features) == (30, 30)
    assert applied.parameters[1] - applied.parameters[0] == 2 * 6 * (6 + 6 + 1)
    applied.undo()
    assert model.ups[0].weight.shape == (24, 6)
    assert torch.equal(model(X), before)


def test_approximate_fits_to_data() -> None:
    model = Plain(possible=False)
    before = model(X)
    applied = absorption.apply(model, "approximate", data=X, max_error=0.5)
    assert len(applied.done) == 2
    assert applied.difference is not None
    assert 0 < applied.difference < 0.5
    assert applied.wiring is not None
    assert applied.wiring.alphas == [0.0, 0.0]
    applied.undo()
    assert torch.equal(model(X), before)


def test_approximate_refuses_what_is_too_far() -> None:
    """Sites with an error above the threshold are not rewritten, and the model stays as it was."""
    model = Plain(possible=False)
    before = model(X)
    nothing = absorption.apply(model, "approximate", data=X, max_error=1e-4)
    assert not nothing.done
    assert all("max_error" in why for why in nothing.left.values())
    assert torch.equal(model(X), before)
    few = absorption.apply(model, "approximate", data=X[:80])  # 40 of them are used to fit 24 units
    assert not few.done
    assert all("40 inputs are too few" in why for why in few.left.values())


def test_later_sites_are_fitted_to_what_they_read_by_then(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    fit = _apply.approximate

    def kept(block: Any, inputs: Tensor, **more: Any) -> Any:
        seen.append(inputs)
        return fit(block, inputs, **more)

    monkeypatch.setattr(_apply, "approximate", kept)
    model = Plain(possible=False)
    applied = absorption.apply(model, "approximate", data=X, max_error=0.5)
    with torch.no_grad():
        first = X[:200]
        assert torch.equal(seen[0], first[: len(seen[0])])
        changed = model.downs[0](model.act(model.ups[0](first)))  # without its skip
    assert torch.allclose(seen[1], changed[: len(seen[1])])
    applied.undo()


def test_a_vision_transformer() -> None:
    model = timm.create_model("vit_tiny_patch16_224", depth=2, img_size=48, embed_dim=24, num_heads=2).eval()
    images = torch.randn(52, 3, 48, 48, generator=numbers(1))
    scan = absorption.scan(model, data=images)
    assert [row.status for row in scan] == ["impossible", "impossible"]
    for row in scan:
        assert row.verdict is not None
        assert row.verdict.certificate is not None
        assert row.verdict.certificate.kind == "growth"
        assert row.bare is not None
        assert row.bare.status == "impossible"
        assert row.bare.extra_width == 24
        assert row.bare.flip_bound is not None
        assert row.approximation is not None
        assert row.verdict.flip_bound is None  # so the table shows that of the MLP alone
        assert f"{row.bare.flip_bound:.3g} of 4.9" in str(scan)
    assert "MLP alone" in str(scan)
    assert "What you can do" in str(scan)
    assert scan.verify()
    before = model(images)
    for mode in ("exact", "widen"):
        nothing = absorption.apply(model, mode, images)
        assert not nothing.done
        assert all("approximate" in why for why in nothing.left.values())
        assert torch.equal(model(images), before)
    applied = absorption.apply(model, "approximate", data=images, max_error=3.0)
    assert len(applied.done) == 2
    assert not torch.equal(model(images), before)
    applied.undo()
    assert torch.equal(model(images), before)


def test_layer_scale_is_part_of_the_branch() -> None:
    model = timm.create_model("vit_tiny_patch16_224", depth=1, img_size=32, embed_dim=24, num_heads=2, init_values=0.5)
    part = next(unskip.parts(model.eval()).mlps())
    verdict = absorb(part)
    assert torch.allclose(verdict.block.down, 0.5 * part.down)


def test_a_rewired_model_is_asked_about_its_alpha() -> None:
    model = Plain(possible=False)
    with unskip.rewired(model, "scale:0.5,2.0", X):
        scan = absorption.scan(model, X)
        assert scan[0].verdict is not None
        assert scan[0].verdict.block.skip == 0.5
        assert torch.allclose(scan[0].verdict.block.down, 2 * model.downs[0].weight)
        with pytest.raises(BadInput, match="rewired already"):
            absorption.apply(model, "exact", X)
    with unskip.rewired(model, "cut", X):
        assert [row.status for row in absorption.scan(model, X)] == ["possible", "possible"]


def test_tied_layers_are_left_alone() -> None:
    model = Plain(possible=False)
    model.ups[1], model.downs[1] = model.ups[0], model.downs[0]
    applied = absorption.apply(model, "widen", X)
    assert not applied.done
    assert all("tied" in why for why in applied.left.values())


def test_every_module_keeps_its_mode() -> None:
    model = Plain().train()
    model.act.eval()  # like a frozen part of a model in training
    modes = [module.training for module in model.modules()]
    absorption.apply(model, "exact", X).undo()
    assert [module.training for module in model.modules()] == modes


def test_a_batch_is_read_until_there_are_inputs_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = []

    def counted(*args: Any, **more: Any) -> Any:
        recorded.append(args)
        return trace_model(*args, **more)

    monkeypatch.setattr(_from, "trace_model", counted)
    x = normal(numbers(2), 4 * _from.INPUTS, 6)
    found = _from.streams(Plain(), example_for(Plain(), x), _from.INPUTS)
    assert len(recorded) == 2  # a few samples, then as many as have 1,024 inputs
    assert torch.equal(found[0], x[: _from.CHUNK + _from.INPUTS])


def test_a_fit_uses_more_inputs_than_it_needs() -> None:
    """Half of 400 inputs are used, and half of those held out; 63 are enough for 24 units, but a fit would overfit."""
    applied = absorption.apply(
        Plain(nn.ReLU, possible=False), "approximate", data=normal(numbers(2), 400, 6), max_error=9
    )
    assert ["on 100 held-out inputs" in what for what in applied.done.values()] == [True, True]


def test_applying_what_cannot_be() -> None:
    with pytest.raises(BadInput, match="mode must be"):
        absorption.apply(Plain(), "exactly", X)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="give data="):
        absorption.apply(Plain(), "approximate", X)
    for more in ({"max_error": 0.1}, {"distil": 5}):
        with pytest.raises(BadInput, match="are for mode='approximate'"):
            absorption.apply(Plain(), "exact", X, **more)  # type: ignore[arg-type]


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Plain(possible=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).masked_fill(torch.arange(6) > 4, -torch.inf)


@pytest.mark.parametrize("mode", ["widen", "approximate"])
def test_masked_outputs_are_compared_where_they_are_finite(mode: str) -> None:
    more = {"data": X, "max_error": 9.0} if mode == "approximate" else {"example": X}
    applied = absorption.apply(Masked(), mode, **more)  # type: ignore[arg-type]
    assert applied.difference is not None
    assert 0 < applied.difference < 9


class Head(nn.Module):
    """An absorbable block that shares its first weight with a head, or whose stream is scaled by channel."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        plain = Plain()
        self.up, self.down, self.act = plain.ups[0], plain.downs[0], nn.GELU()
        self.head = nn.Linear(6, 24, bias=False).double()
        self.gain = None if tied else nn.Parameter(torch.linspace(0.5, 1.5, 6).double())
        if tied:
            self.head.weight = self.up.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.act(self.up(x)))
        return self.head((x if self.gain is None else self.gain * x) + y)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "scaled"])
@pytest.mark.parametrize("mode", ["exact", "widen", "approximate"])
def test_sites_that_must_not_be_rewritten(tied: bool, mode: str) -> None:
    model = Head(tied)
    before = model(X)
    applied = absorption.apply(model, mode, data=X)  # type: ignore[arg-type]
    assert not applied.done
    assert ("tied" if tied else "scaled") in str(applied)
    assert applied.difference == 0
    assert torch.equal(model(X), before)
    status = absorption.scan(model, X)[0].status
    assert status == ("possible" if tied else "unknown")
    if not tied:
        with pytest.raises(BadInput, match="scaled"):
            absorb(model, example=X)
