"""In inference the encoder layers of torch.nn use one fused kernel, which includes the residual additions.

A layer with weights other than 1 must not use that kernel, and all other layers must still use it.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.zoo.families import FAMILIES, tokens
from tests.zoo.harness import difference
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import unskip
from unskip import Anneal, Cut, Keep, Scale, Wiring

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")

X = tokens(3, 16, length=6)
LENGTHS = torch.tensor([6, 4, 2])
PADDED = torch.arange(6) >= LENGTHS[:, None]  # (batch, tokens), True for padding
RULES = [Scale(0.5, 0.7), Cut(), Scale(0.5), Scale(1.0, 0.7), Anneal(Keep(), Scale(0.2, 0.6), steps=10)]

each_order = pytest.mark.parametrize("name", ["nn_encoder_pre", "nn_encoder_post"])
each_rule = pytest.mark.parametrize("rule", RULES, ids=str)
each_mask = pytest.mark.parametrize("mask", [None, PADDED], ids=["whole", "padded"])


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


class Fused(TorchDispatchMode):
    """Counts calls of the fused kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._schema.name == "aten::_transformer_encoder_layer_fwd"
        return func(*args, **(kwargs or {}))


def fused(model: nn.Module, mask: Tensor | None = None) -> int:
    with Fused() as counter:
        model(X, src_key_padding_mask=mask)
    return counter.count


def flags(model: nn.Module) -> list[object]:
    encoders = [m.use_nested_tensor for m in model.modules() if isinstance(m, nn.TransformerEncoder)]
    return encoders + [m.activation_relu_or_gelu for m in model.modules() if isinstance(m, nn.TransformerEncoderLayer)]


def attend(layer: Any, x: Tensor, mask: Tensor | None) -> Tensor:
    """Multi-head attention from the weights alone."""
    batch, count, width = x.shape
    heads = layer.self_attn.num_heads
    qkv = x @ layer.self_attn.in_proj_weight.T + layer.self_attn.in_proj_bias
    q, k, v = (y.view(batch, count, heads, width // heads).transpose(1, 2) for y in qkv.chunk(3, dim=-1))
    logits = q @ k.transpose(-2, -1) / (width // heads) ** 0.5
    if mask is not None:
        logits = logits.masked_fill(mask[:, None, None, :], -torch.inf)
    attended = (logits.softmax(dim=-1) @ v).transpose(1, 2).reshape(x.shape)
    return attended @ layer.self_attn.out_proj.weight.T + layer.self_attn.out_proj.bias


def feed(layer: Any, x: Tensor) -> Tensor:
    hidden = functional.gelu(x @ layer.linear1.weight.T + layer.linear1.bias)
    return hidden @ layer.linear2.weight.T + layer.linear2.bias


def reference(model: Any, weights: list[tuple[float, float]], mask: Tensor | None) -> Tensor:
    x, each = X, iter(weights)
    for layer in model.layers:
        (a1, b1), (a2, b2) = next(each), next(each)
        if layer.norm_first:
            x = a1 * x + b1 * attend(layer, layer.norm1(x), mask)
            x = a2 * x + b2 * feed(layer, layer.norm2(x))
        else:
            x = layer.norm1(a1 * x + b1 * attend(layer, x, mask))
            x = layer.norm2(a2 * x + b2 * feed(layer, x))
    return model.norm(x)


def valid(x: Tensor, mask: Tensor | None) -> list[Tensor]:
    return [x] if mask is None else [x[~mask]]


@each_order
@each_mask
def test_the_reference_with_weights_of_one_matches_the_fused_kernel(name: str, mask: Tensor | None) -> None:
    model = FAMILIES[name].build()
    assert fused(model, mask) == 2
    out = model(X, src_key_padding_mask=mask)
    assert difference(valid(out, mask), valid(reference(model, [(1.0, 1.0)] * 4, mask), mask)) < 2e-6


@each_order
@each_rule
@each_mask
def test_weighted_layers_match_the_reference(name: str, rule: Any, mask: Tensor | None) -> None:
    model = FAMILIES[name].build()
    plain = model(X, src_key_padding_mask=mask)
    wiring = unskip.rewire(model, rule, X)
    wiring.step(5)
    assert fused(model, mask) == 0
    out = model(X, src_key_padding_mask=mask)
    wanted = reference(model, list(zip(wiring.alphas, wiring.betas, strict=True)), mask)
    assert difference(valid(out, mask), valid(wanted, mask)) < 2e-6
    assert difference(valid(plain, mask), valid(wanted, mask)) > 1e-2


@each_order
@each_rule
@each_mask
def test_undo_restores_the_fast_path(name: str, rule: Any, mask: Tensor | None) -> None:
    model = FAMILIES[name].build()
    before, plain = flags(model), model(X, src_key_padding_mask=mask)
    wiring = unskip.rewire(model, rule, X)
    assert flags(model) != before
    wiring.undo()
    assert flags(model) == before
    assert fused(model, mask) == 2
    assert torch.equal(model(X, src_key_padding_mask=mask), plain)


@each_order
@each_mask
@pytest.mark.parametrize("force", [False, True])
def test_keep_leaves_the_fast_path_on(name: str, mask: Tensor | None, force: bool) -> None:
    model = FAMILIES[name].build()
    before, plain = flags(model), model(X, src_key_padding_mask=mask)
    wiring = unskip.rewire(model, Keep(), X, force=force)
    assert flags(model) == before
    assert fused(model, mask) == 2
    assert torch.equal(model(X, src_key_padding_mask=mask), plain)
    wiring.set(Scale(0.5))
    assert fused(model, mask) == 0
    wiring.set(Keep())
    assert flags(model) == before
    assert torch.equal(model(X, src_key_padding_mask=mask), plain)


@each_order
@each_mask
def test_an_anneal_leaves_the_fast_path_and_returns_to_it_at_one(name: str, mask: Tensor | None) -> None:
    model = FAMILIES[name].build()
    plain = model(X, src_key_padding_mask=mask)
    wiring = unskip.rewire(model, Anneal(Scale(0.2), Keep(), steps=4), X)
    assert fused(model, mask) == 0
    wiring.step(4)
    assert fused(model, mask) == 2
    assert torch.equal(model(X, src_key_padding_mask=mask), plain)


@each_order
@each_mask
def test_only_the_weighted_layer_leaves_the_fast_path(name: str, mask: Tensor | None) -> None:
    model = FAMILIES[name].build()
    unskip.rewire(model, Scale(0.5, 0.7), X, where=lambda site: site.path == "layers.1")
    assert fused(model, mask) == 1
    out = model(X, src_key_padding_mask=mask)
    wanted = reference(model, [(1.0, 1.0)] * 2 + [(0.5, 0.7)] * 2, mask)
    assert difference(valid(out, mask), valid(wanted, mask)) < 2e-6


@each_order
def test_copies_leave_the_fast_path_and_return_to_it_after_undo(name: str) -> None:
    model = FAMILIES[name].build()
    before, plain = flags(model), model(X)
    unskip.rewire(model, Scale(0.5, 0.7), X)
    out = model(X)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert fused(other, PADDED) == 0
        assert torch.equal(other(X), out)
        Wiring.of(other).undo()
        assert flags(other) == before
        assert torch.equal(other(X), plain)
    assert fused(model) == 0


@pytest.mark.parametrize("name", ["nn_encoder_layer_pre", "nn_encoder_layer_post"])
def test_a_single_layer(name: str) -> None:
    model = FAMILIES[name].build()
    before, plain = flags(model), model(X)
    assert fused(model) == 1
    with unskip.rewired(model, Scale(0.5, 0.7), X):
        assert fused(model) == 0
        assert difference([model(X)], [plain]) > 1e-2
    assert flags(model) == before
    assert fused(model) == 1
    assert torch.equal(model(X), plain)
