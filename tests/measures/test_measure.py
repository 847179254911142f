"""`measure` against closed forms and against a model's own modules, rewired or not."""

import copy
import math
import random
from typing import Any

import pytest
import tests.zoo.more  # noqa: F401  (enters its families into the registry)
import timm
import torch
from tests.measures.stacks import matrices, stack, strict
from tests.zoo.families import FAMILIES
from torch import Tensor, nn
from torch.nn import functional as F

import unskip
from unskip import Cut, Decay, Learn, Scale
from unskip.measures import effective_rank

# --- Closed forms -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [1.0, 0.4, 0.0])
def test_a_stack_of_linear_branches(alpha: float) -> None:
    """All Jacobians are known matrices, equal for all tokens."""
    model = stack()
    x = torch.randn(4, 5, 6, dtype=torch.float64)
    unskip.rewire(model, Scale(stream=alpha, branch=1.5), x)
    measurement = unskip.measure(model, x)
    eye = torch.eye(6, dtype=torch.float64)
    whole, stream = eye, x
    for row, block, w in zip(measurement.sites, measurement.blocks, matrices(model), strict=True):
        assert (row.alpha, row.beta) == (alpha, 1.5)
        step = alpha * eye + 1.5 * w
        whole = step @ whole
        torch.testing.assert_close(row.branch.values, spread(w, 5))
        torch.testing.assert_close(row.sublayer.values, spread(step, 5))
        assert (row.branch.null, row.sublayer.null) == (0, 0)
        sizes = [(1.5 * F.linear(s, w)).square().mean().sqrt() / (alpha * s).square().mean().sqrt() for s in stream]
        assert row.ratio == pytest.approx(float(torch.stack(sizes).mean()))
        stream = F.linear(stream, step)
        assert block.norm == pytest.approx(float(stream.norm(dim=-1).mean()))
        assert block.cosine == pytest.approx(float(F.cosine_similarity(stream, x, dim=-1).mean()))
        assert block.carried == pytest.approx(alpha ** (block.index + 1))
        assert block.token_rank == pytest.approx(effective_rank(stream.flatten(0, 1)))
        assert block.pooled_rank == pytest.approx(effective_rank(stream.mean(1)))
    torch.testing.assert_close(measurement.network.values, spread(whole, 5), rtol=1e-8, atol=1e-10)
    assert (measurement.samples, measurement.tokens) == (4, 5)
    assert [row["ratio"] is None for row in strict(measurement)["sites"]] == [alpha == 0] * 3


def spread(matrix: Tensor, tokens: int) -> Tensor:
    """The singular values of a map that acts on every token in the same way."""
    return torch.linalg.svdvals(matrix).repeat_interleave(tokens)


def test_gradient_norms_of_a_linear_stack() -> None:
    """|J^T w| for signs w; for orthogonal maps it is the square root of the number of entries at every depth."""
    model = stack()
    with torch.no_grad():
        for w in model.parameters():
            q, _ = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64))
            w.copy_(q)
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    unskip.rewire(model, Cut(), x)
    measurement = unskip.measure(model, x)
    assert [row.gradient for row in measurement.sites] == pytest.approx([math.sqrt(30)] * 3)
    unskip.Wiring.of(model).undo()
    with torch.no_grad():
        for w in model.parameters():
            w.copy_(torch.eye(6))
    assert [row.gradient for row in unskip.measure(model, x).sites] == pytest.approx(
        [2 ** (3 - i) * math.sqrt(30) for i in range(3)]
    )


def test_echo_is_one_for_invertible_maps_of_the_first_stream() -> None:
    model = stack(depth=2, dim=4)
    measurement = unskip.measure(model, torch.randn(6, 20, 4, dtype=torch.float64))
    assert [row.echo for row in measurement.blocks] == pytest.approx([1.0, 1.0], abs=1e-3)


def test_learned_weights_of_every_channel_are_used() -> None:
    model = stack(depth=1)
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    wiring = unskip.rewire(model, Learn(start=1.0, per="channel"), x)
    (alpha,) = wiring.parameters.values()
    with torch.no_grad():
        alpha.copy_(torch.arange(1.0, 7.0))
    measurement = unskip.measure(model, x)
    expected = torch.diag(alpha.detach()) + matrices(model[0])[-1]
    torch.testing.assert_close(measurement.sites[0].sublayer.values, spread(expected, 3))
    assert measurement.sites[0].alpha == pytest.approx(3.5)


# --- The modules themselves -------------------------------------------------------------------------------------------


def test_jacobians_match_the_modules() -> None:
    family = FAMILIES["timm_vit"]
    model: Any = family.build().double()
    image = family.inputs(1).double()
    measurement = unskip.measure(model, image)
    seen: dict[str, Tensor] = {}
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(
            lambda _, args, name=name: seen.__setitem__(name, args[0].detach())
        )
        for name in ("blocks.0.attn", "blocks.0.mlp", "blocks.0", "blocks.0.norm2", "norm")
    ]
    model(image)
    for hook in hooks:
        hook.remove()
    block = model.blocks[0]
    pairs = [
        (measurement.sites[0].branch, block.attn, seen["blocks.0.attn"]),
        (measurement.sites[1].branch, block.mlp, seen["blocks.0.mlp"]),
        (measurement.sites[0].sublayer, lambda x: x + block.attn(block.norm1(x)), seen["blocks.0"]),
        (measurement.sites[1].sublayer, lambda x: x + block.mlp(block.norm2(x)), seen["blocks.0.norm2"]),
        (measurement.network, model.blocks, seen["blocks.0"]),
    ]
    for spectrum, function, x in pairs:
        jacobian = torch.autograd.functional.jacobian(function, x).reshape(x.numel(), x.numel())
        torch.testing.assert_close(spectrum.values, torch.linalg.svdvals(jacobian), rtol=1e-6, atol=1e-8)


def test_attention_matches_the_output_of_the_model() -> None:
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = BertModel(BertConfig(**sizes, vocab_size=32, attn_implementation="eager")).eval()
    ids = torch.randint(4, 32, (3, 6))
    measurement = unskip.measure(model, {"input_ids": ids}, jacobians="off")
    with torch.no_grad():
        attentions = model(input_ids=ids, output_attentions=True).attentions
    for row, p in zip(measurement.sites[::2], attentions, strict=True):
        wide = p.double()
        entropy = -(wide * wide.log()).sum(-1).mean((0, 2))
        assert row.entropy == pytest.approx(entropy.tolist(), rel=1e-5)
        assert row.self_attention == pytest.approx(wide.diagonal(dim1=-2, dim2=-1).mean((0, 2)).tolist(), rel=1e-5)
        sigma = torch.linalg.svdvals(wide)
        assert row.attention_condition == pytest.approx(
            (sigma[..., 0] / sigma[..., -1]).median(0).values.tolist(), rel=1e-3
        )
    assert all(row.branch is None and row.sublayer is None for row in measurement.sites)
    assert measurement.network is None
    assert measurement.sites[1].entropy is None


def test_value_output_with_grouped_values() -> None:
    """W_V W_O has rank 8 of 16, and its condition number uses these 8 singular values."""
    family = FAMILIES["hf_llama"]
    model = family.build()
    measurement = unskip.measure(model, family.inputs(2), jacobians="off")
    weights = {name: p.detach() for name, p in model.named_parameters()}
    value, out = weights["layers.0.self_attn.v_proj.weight"], weights["layers.0.self_attn.o_proj.weight"]
    shared = value.unflatten(0, (2, 1, 4)).expand(2, 2, 4, 16).flatten(0, 2)
    sigma = torch.linalg.svdvals((out @ shared).double())
    assert measurement.sites[0].value_output == pytest.approx(float(sigma[0] / sigma[7]), rel=1e-4)


# --- Null directions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "rule", "expected"),
    [
        # tokens x (directions that a norm removes), for branches, sub-layers and the network
        ("timm_vit", None, (0, 0, 0)),
        ("timm_vit", Cut(), (0, 10, 10)),
        ("timm_vit", {"mlp": Cut()}, (0, None, 10)),  # only the MLPs' norms are on every path of the network
        ("hf_llama", Cut(), (0, 6, 6)),
        ("hf_t5", Cut(), (0, None, None)),  # an RMSNorm of another name; 6 tokens in the encoder, 5 in the decoder
        ("hf_bert", None, (0, 0, 12)),  # post-norm: the norms between sub-layers, cut or not
        ("hf_bert", Cut(), (0, 0, 12)),
        ("timm_respost", None, (10, 0, 0)),  # the norm is at the end of the branch
        ("timm_respost", Cut(), (10, 10, 10)),
        ("hf_gpt_neox", Cut(), (12, 12, 12)),  # two norms of one stream, both inputs of the branch
        ("hf_gpt_neox", None, (12, 0, 0)),
    ],
)
def test_null_directions_are_those_that_norms_remove(name: str, rule: Any, expected: tuple[Any, ...]) -> None:
    family = FAMILIES[name]
    model = family.build()
    if rule is not None:
        unskip.rewire(model, rule, family.inputs(2))
    measurement = unskip.measure(model, family.inputs(1))
    branch, sublayer, network = expected
    for row in measurement.sites:
        assert row.branch.null == branch
        if sublayer is not None:
            assert row.sublayer.null == sublayer
    if name == "hf_t5":
        assert [row.sublayer.null for row in measurement.sites] == [6] * 4 + [5] * 6
    else:
        assert measurement.network.null == network
    spectra = [row.branch for row in measurement.sites] + [row.sublayer for row in measurement.sites]
    for spectrum in spectra:
        if spectrum.null:  # they are not exactly 0, because of the norms' eps
            assert spectrum.null_max is not None
            assert spectrum.null_max < 1e-3 * spectrum.sigma_max


# --- Rewired ----------------------------------------------------------------------------------------------------------


class ByHand(nn.Module):
    """A ViT with explicit alphas in its blocks."""

    def __init__(self, model: Any, alphas: list[float]) -> None:
        super().__init__()
        self.model, self.alphas = model, alphas

    def forward(self, image: Tensor) -> Tensor:
        m = self.model
        x = m.norm_pre(m.patch_drop(m._pos_embed(m.patch_embed(image))))
        for i, block in enumerate(m.blocks):
            x = self.alphas[2 * i] * x + block.attn(block.norm1(x))
            x = self.alphas[2 * i + 1] * x + block.mlp(block.norm2(x))
        return x


def test_a_rewired_model_is_measured_with_its_weights() -> None:
    family = FAMILIES["timm_vit"]
    model = family.build().double()
    images = family.inputs(3).double()
    wiring = unskip.rewire(model, Decay(0.5), images)
    result = unskip.measure(model, images)
    assert [row.alpha for row in result.sites] == pytest.approx(wiring.alphas)
    assert result.blocks[-1].carried == pytest.approx(wiring.effective_decay)
    with torch.no_grad():
        stream = ByHand(family.build().double(), wiring.alphas)(images)
    assert result.blocks[-1].norm == pytest.approx(float(stream.norm(dim=-1).mean()))
    jacobian = torch.autograd.functional.jacobian(
        lambda x: _blocks(model, wiring.alphas, x), _first_stream(model, images[:1])
    )
    expected = torch.linalg.svdvals(jacobian.reshape(80, 80))
    torch.testing.assert_close(result.network.values, expected, rtol=1e-6, atol=1e-8)


def _first_stream(model: Any, image: Tensor) -> Tensor:
    with torch.no_grad():
        return model._pos_embed(model.patch_embed(image))  # type: ignore[no-any-return]


def _blocks(model: Any, alphas: list[float], x: Tensor) -> Tensor:
    for i, block in enumerate(model.blocks):
        x = alphas[2 * i] * x + block.attn(block.norm1(x))
        x = alphas[2 * i + 1] * x + block.mlp(block.norm2(x))
    return x


@pytest.mark.parametrize("name", ["timm_vit", "nn_encoder_post", "hf_llama"])
def test_the_model_does_not_change(name: str) -> None:
    family = FAMILIES[name]
    model = family.build().train()
    unskip.rewire(model, Decay(0.6), family.inputs(2))
    frozen = next(model.parameters()).requires_grad_(False)
    list(model.parameters())[3].grad = torch.ones_like(list(model.parameters())[3])
    before = copy.deepcopy(model.state_dict())
    kinds = [(type(m), m.training, len(m._forward_hooks), sorted(vars(m))) for m in model.modules()]
    flags = [(p.requires_grad, p.grad is None, p._version) for p in model.parameters()]
    inputs = copy.deepcopy(family.inputs(2))
    states = torch.get_rng_state(), random.getstate()
    first = unskip.measure(model, inputs)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert [(type(m), m.training, len(m._forward_hooks), sorted(vars(m))) for m in model.modules()] == kinds
    assert [(p.requires_grad, p.grad is None, p._version) for p in model.parameters()] == flags
    assert not frozen.requires_grad
    assert str(unskip.measure(model, inputs)) == str(first)


def test_inference_mode_does_not_matter() -> None:
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", depth=1, embed_dim=24, num_heads=3, img_size=32)
    images = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        inside = unskip.measure(model, images.clone())
    assert strict(inside) == strict(unskip.measure(model, images))
    assert all(row.branch is not None and row.gradient is not None for row in inside.sites)
    assert inside.sites[0].entropy is not None


def test_a_frozen_first_stream_stays_frozen() -> None:
    """In float64 the first stream is the parameter of learned queries itself, not a copy."""

    class Queries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.queries = nn.Parameter(torch.randn(1, 3, 4), requires_grad=False)
            self.q, self.k, self.f = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            attended = (self.q(self.queries) @ self.k(x).mT).softmax(-1) @ x
            return self.queries + self.f(attended)

    model = Queries().double()
    unskip.measure(model, torch.randn(1, 5, 4, dtype=torch.float64))
    assert not model.queries.requires_grad
    assert model.queries.grad is None
