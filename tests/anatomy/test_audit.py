"""The audit as a table and as data; it leaves the model unchanged."""

from __future__ import annotations

import copy
import gc
import json
import random
import weakref

import pytest
import timm
import torch
from tests.anatomy import handmade as h
from torch import nn

import unskip
from unskip import Cut
from unskip.errors import BadInput

X = torch.randn(2, 5, h.DIM)


def vit(**options: object) -> nn.Module:
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=16, num_heads=2, depth=2, **options
    )


def test_an_audit_is_a_sequence_that_prints_and_serialises() -> None:
    audit = unskip.audit(vit())
    assert len(audit) == 4
    assert audit[1].path == "blocks.0"
    assert [site.index for site in audit[1:3]] == [1, 2]
    text = str(audit)
    assert text.splitlines()[0] == "VisionTransformer: 4 residual sites"
    assert text.count("vision_transformer.py:") == 4
    data = json.loads(json.dumps(audit.to_dict()))
    assert [site["kind"] for site in data["sites"]] == ["attention", "mlp"] * 2
    assert data["unknown"] == []


class Counting(nn.Module):
    """Has dropout and a BatchNorm, whose buffers training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.f, self.drop = nn.BatchNorm1d(5), nn.Linear(h.DIM, h.DIM), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.f(self.norm(x)))


@pytest.mark.parametrize("training", [True, False])
def test_leaves_model_random_state_and_modes_alone(training: bool) -> None:
    model = Counting().train(training)
    model.drop.eval()
    before = copy.deepcopy(model.state_dict())
    random = torch.get_rng_state()
    fastpath = torch.backends.mha.get_fastpath_enabled()
    unskip.audit(model, X)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert (model.training, model.norm.training, model.drop.training) == (training, training, False)
    assert torch.backends.mha.get_fastpath_enabled() == fastpath
    assert not any(module._forward_hooks for module in model.modules())


def test_a_failed_forward_leaves_the_modes_alone() -> None:
    model = Counting().train()
    with pytest.raises(unskip.errors.ForwardError, match=r"Counting.*evaluation mode"):
        unskip.audit(model, torch.randn(2, 5, 3))
    assert all(module.training for module in model.modules())
    assert torch.backends.mha.get_fastpath_enabled()


class NeedsLabels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = h.linear()

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        if self.training and labels is None:
            raise ValueError("labels are needed to train")
        return x + self.f(x)


def test_a_training_forward_that_cannot_run_is_noted() -> None:
    audit = unskip.audit(NeedsLabels(), X)
    assert len(audit) == 1
    assert "labels are needed to train" in audit.notes[0]


def test_meta_tensors_work() -> None:
    with torch.device("meta"):
        model = vit()
    audit = unskip.audit(model)
    assert [site.kind for site in audit] == ["attention", "mlp"] * 2
    assert {site.ratio for site in audit} == {None}


def test_a_rewired_model_keeps_its_sites() -> None:
    model = vit()
    before = unskip.audit(model)
    unskip.rewire(model, Cut())
    assert list(unskip.audit(model)) == list(before)


def test_sites_name_their_block() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(h.DIM, 2, 16, batch_first=True), 2)
    assert [site.block for site in unskip.audit(encoder)] == ["layers.0"] * 2 + ["layers.1"] * 2


def test_a_non_module_is_refused() -> None:
    with pytest.raises(BadInput, match=r"expected a torch\.nn\.Module, got str"):
        unskip.audit("vit_tiny")  # type: ignore[arg-type]


class SideEffects(nn.Module):
    """Changes buffers also in evaluation, draws from Python's generator, and overrides train()."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.merged = h.linear(), True
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("cache", None)

    def train(self, mode: bool = True) -> SideEffects:
        self.merged = not mode
        return super().train(mode)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.cache = x[:1]
        random.random()
        return x + self.f(x)


def test_side_effects_of_the_forward_are_undone() -> None:
    model = SideEffects().eval()
    state, keys, calls = random.getstate(), list(model.state_dict()), model.calls
    unskip.audit(model, X)
    assert model.calls is calls
    assert float(model.calls) == 0
    assert model.cache is None
    assert list(model.state_dict()) == keys
    assert model.merged
    assert random.getstate() == state


def test_complex_models_work() -> None:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = nn.Linear(4, 4, dtype=torch.complex64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.f(x)

    model, x = Complex(), torch.randn(2, 4, dtype=torch.complex64)
    assert unskip.rewire(model, Cut(), x).verified
    assert torch.equal(model(x), model.f(x))


def test_buffers_stay_in_their_memory() -> None:
    model = Counting().train()
    model.register_buffer("table", torch.arange(4.0))
    model.register_buffer("first", model.table[:2])  # type: ignore[index]
    model.register_buffer("one", torch.ones(()).expand(3))  # cannot be written to
    places = {name: buffer.data_ptr() for name, buffer in model.named_buffers()}
    pending = (model.f.weight.sum() * model.norm.running_var).sum()
    unskip.audit(model, X)
    assert {name: buffer.data_ptr() for name, buffer in model.named_buffers()} == places
    model.table.mul_(2)  # type: ignore[operator]
    assert model.first.tolist() == [0.0, 2.0]
    pending.backward()  # fails if the buffers had been written in place


def test_an_audit_keeps_neither_the_model_nor_its_activations() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    gone = weakref.ref(model)
    gc.collect()
    gc.disable()
    try:
        audit = unskip.audit(model, torch.randn(2, 5, 8))
        del model
        assert gone() is None
    finally:
        gc.enable()
    assert len(audit) == 2
