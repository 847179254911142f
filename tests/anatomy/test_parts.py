"""Parts: views on the weights of every branch, against slices by hand and against the branch computed from them."""

import contextlib
import copy
import functools
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import tests.zoo.more  # noqa: F401  (enters its families into the registry)
import timm
import torch
from tests.zoo.families import FAMILIES
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

import unskip
from unskip import Anneal, Cut, Decay, Keep, Learn
from unskip.anatomy._example import Example
from unskip.anatomy._parts import AttentionParts, MlpParts, NormParts, ParallelParts, Parts, lay_open
from unskip.errors import BadInput, ForwardError

Weights = dict[str, Tensor]  # the parameters of a model by name
Views = dict[str, Tensor | None]


@functools.cache
def open_family(name: str) -> tuple[nn.Module, Parts]:
    """Shared by tests that only look."""
    model = FAMILIES[name].build()
    return model, unskip.parts(model, FAMILIES[name].inputs(2))


def flat(part: Any) -> list[AttentionParts | MlpParts]:
    return [part.attention, part.mlp] if isinstance(part, ParallelParts) else [] if part is None else [part]


# --- Slices by hand ---------------------------------------------------------------------------------------------------


def heads(weight: Tensor, count: int) -> Tensor:
    return weight.reshape(count, -1, *weight.shape[1:])


def fused(w: Weights, qkv: str, out: str, count: int = 2, bias: str | None = ".bias") -> Views:
    """q over k over v, as in timm."""
    views: Views = dict(zip("qkv", (heads(part, count) for part in w[f"{qkv}.weight"].chunk(3)), strict=True))
    if bias is not None:
        pieces = w[f"{qkv}{bias}"].chunk(3)
        views |= {f"{name}_bias": heads(piece, count) for name, piece in zip("qkv", pieces, strict=True)}
    return views | {"out": w[f"{out}.weight"], "out_bias": w.get(f"{out}.bias")}


def in_proj(w: Weights, path: str) -> Views:
    """torch.nn.MultiheadAttention."""
    renamed = {"x.weight": w[f"{path}.in_proj_weight"], "x.bias": w[f"{path}.in_proj_bias"]}
    return fused(renamed | w, "x", f"{path}.out_proj")


def separate(w: Weights, path: str, names: str, out: str, count: int = 2, groups: int = 2) -> Views:
    """A Linear each; `names` are those of q, k and v."""
    views: Views = {"out": w[f"{out}.weight"], "out_bias": w.get(f"{out}.bias")}
    for name, of, number in zip("qkv", names.split(), (count, groups, groups), strict=True):
        views[name] = heads(w[f"{path}.{of}.weight"], number)
        bias = w.get(f"{path}.{of}.bias")
        views[f"{name}_bias"] = None if bias is None else heads(bias, number)
    return views


def gpt2(w: Weights) -> Views:
    """Conv1D holds the transposed of a Linear."""
    renamed = {"x.weight": w["h.0.attn.c_attn.weight"].t(), "x.bias": w["h.0.attn.c_attn.bias"]}
    out = {"y.weight": w["h.0.attn.c_proj.weight"].t(), "y.bias": w["h.0.attn.c_proj.bias"]}
    return fused(renamed | out, "x", "y")


def interleaved(w: Weights, qkv: str, out: str, count: int = 2) -> Views:
    """For each head its q, then its k, then its v: GPT-NeoX and Bloom."""
    weight = w[f"{qkv}.weight"].unflatten(0, (count, 3, -1))
    bias = w[f"{qkv}.bias"].unflatten(0, (count, 3, -1))
    views: Views = {"out": w[f"{out}.weight"], "out_bias": w[f"{out}.bias"]}
    for index, name in enumerate("qkv"):
        views |= {name: weight[:, index], f"{name}_bias": bias[:, index]}
    return views


def mlp(w: Weights, up: str, down: str) -> Views:
    names = {"up": f"{up}.weight", "up_bias": f"{up}.bias", "down": f"{down}.weight", "down_bias": f"{down}.bias"}
    return {"gate": None, "gate_bias": None} | {view: w.get(name) for view, name in names.items()}


def packed(w: Weights, both: str, down: str, gate_first: bool) -> Views:
    """One weight for up and gate."""
    halves, biases = w[f"{both}.weight"].chunk(2), w[f"{both}.bias"].chunk(2) if f"{both}.bias" in w else (None, None)
    gate, up = (0, 1) if gate_first else (1, 0)
    return {
        "up": halves[up],
        "gate": halves[gate],
        "up_bias": biases[up],
        "gate_bias": biases[gate],
        "down": w[f"{down}.weight"],
        "down_bias": w.get(f"{down}.bias"),
    }


def gated(w: Weights, path: str, gate: str, up: str, down: str) -> Views:
    names = {"up": up, "gate": gate, "down": down}
    views: Views = {view: w[f"{path}.{name}.weight"] for view, name in names.items()}
    return views | {f"{view}_bias": w.get(f"{path}.{name}.bias") for view, name in names.items()}


def beit(w: Weights) -> Views:
    """Biases of q and v alone, put together with zeros at each call."""
    views = fused(w, "blocks.0.attn.qkv", "blocks.0.attn.proj", bias=None)
    return views | {
        "q_bias": heads(w["blocks.0.attn.q_bias"], 2),
        "k_bias": None,
        "v_bias": heads(w["blocks.0.attn.v_bias"], 2),
    }


def parallel(w: Weights) -> list[Views]:
    """timm's ParallelScalingBlock: one weight for the hidden units, then q, k and v."""
    hidden, *_ = w["blocks.0.in_proj.weight"].split([64, 48])
    hidden_bias, *_ = w["blocks.0.in_proj.bias"].split([64, 48])
    renamed = {"x.weight": w["blocks.0.in_proj.weight"][64:], "x.bias": w["blocks.0.in_proj.bias"][64:]}
    attention = fused(w | renamed, "x", "blocks.0.attn_out_proj")
    down = {"down": w["blocks.0.mlp_out_proj.weight"], "down_bias": w["blocks.0.mlp_out_proj.bias"]}
    return [attention, {"up": hidden, "up_bias": hidden_bias, "gate": None, "gate_bias": None} | down]


_T5 = "encoder.block.0.layer.{}"
_DIT = "transformer_blocks.0"
_ALBERT = "encoder.albert_layer_groups.0.albert_layers.0"
# What the first two branches of each family are, an attention and then an MLP.
LAYOUTS: dict[str, Callable[[Weights], list[Views]]] = {
    "timm_vit": lambda w: [
        fused(w, "blocks.0.attn.qkv", "blocks.0.attn.proj"),
        mlp(w, "blocks.0.mlp.fc1", "blocks.0.mlp.fc2"),
    ],
    "timm_eva02": lambda w: [beit(w), packed(w, "blocks.0.mlp.fc1", "blocks.0.mlp.fc2", gate_first=True)],
    "timm_eva02_scaled": lambda w: [beit(w), gated(w, "blocks.0.mlp", "fc1_g", "fc1_x", "fc2")],
    "timm_beit": lambda w: [beit(w), mlp(w, "blocks.0.mlp.fc1", "blocks.0.mlp.fc2")],
    "timm_parallel_scaling": parallel,
    "timm_swin": lambda w: [
        fused(w, "layers.0.blocks.0.attn.qkv", "layers.0.blocks.0.attn.proj"),
        mlp(w, "layers.0.blocks.0.mlp.fc1", "layers.0.blocks.0.mlp.fc2"),
    ],
    "nn_encoder_pre": lambda w: [
        in_proj(w, "layers.0.self_attn"),
        mlp(w, "layers.0.linear1", "layers.0.linear2"),
    ],
    "torchvision_vit": lambda w: [
        in_proj(w, "encoder.layers.encoder_layer_0.self_attention"),
        mlp(w, "encoder.layers.encoder_layer_0.mlp.0", "encoder.layers.encoder_layer_0.mlp.3"),
    ],
    "hf_bert": lambda w: [
        separate(w, "encoder.layer.0.attention.self", "query key value", "encoder.layer.0.attention.output.dense"),
        mlp(w, "encoder.layer.0.intermediate.dense", "encoder.layer.0.output.dense"),
    ],
    "hf_albert": lambda w: [
        separate(w, f"{_ALBERT}.attention", "query key value", f"{_ALBERT}.attention.dense"),
        mlp(w, f"{_ALBERT}.ffn", f"{_ALBERT}.ffn_output"),
    ],
    "hf_gpt2": lambda w: [
        gpt2(w),
        {
            "up": w["h.0.mlp.c_fc.weight"].t(),
            "up_bias": w["h.0.mlp.c_fc.bias"],
            "down": w["h.0.mlp.c_proj.weight"].t(),
            "down_bias": w["h.0.mlp.c_proj.bias"],
        },
    ],
    "hf_gpt_neox": lambda w: [
        interleaved(w, "layers.0.attention.query_key_value", "layers.0.attention.dense"),
        mlp(w, "layers.0.mlp.dense_h_to_4h", "layers.0.mlp.dense_4h_to_h"),
    ],
    "hf_bloom": lambda w: [
        interleaved(w, "h.0.self_attention.query_key_value", "h.0.self_attention.dense"),
        mlp(w, "h.0.mlp.dense_h_to_4h", "h.0.mlp.dense_4h_to_h"),
    ],
    "hf_llama": lambda w: [
        separate(w, "layers.0.self_attn", "q_proj k_proj v_proj", "layers.0.self_attn.o_proj", 4, 2),
        gated(w, "layers.0.mlp", "gate_proj", "up_proj", "down_proj"),
    ],
    "hf_gemma2": lambda w: [
        separate(w, "layers.0.self_attn", "q_proj k_proj v_proj", "layers.0.self_attn.o_proj", 2, 1),
        gated(w, "layers.0.mlp", "gate_proj", "up_proj", "down_proj"),
    ],
    "hf_cohere": lambda w: [
        separate(w, "layers.0.self_attn", "q_proj k_proj v_proj", "layers.0.self_attn.o_proj"),
        gated(w, "layers.0.mlp", "gate_proj", "up_proj", "down_proj"),
    ],
    "hf_modernbert": lambda w: [
        fused(w, "layers.0.attn.Wqkv", "layers.0.attn.Wo", bias=None),
        packed(w, "layers.0.mlp.Wi", "layers.0.mlp.Wo", gate_first=True),
    ],
    "hf_t5": lambda w: [
        separate(w, _T5.format(0) + ".SelfAttention", "q k v", _T5.format(0) + ".SelfAttention.o"),
        mlp(w, _T5.format(1) + ".DenseReluDense.wi", _T5.format(1) + ".DenseReluDense.wo"),
    ],
    "diffusers_dit": lambda w: [
        separate(w, f"{_DIT}.attn1", "to_q to_k to_v", f"{_DIT}.attn1.to_out.0"),
        mlp(w, f"{_DIT}.ff.net.0.proj", f"{_DIT}.ff.net.2"),
    ],
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_views_are_the_slices_that_the_source_uses(name: str) -> None:
    model, found = open_family(name)
    weights = {key: value.detach() for key, value in model.named_parameters()}
    branches = [branch for part in found for branch in flat(part)][:2]
    expected = LAYOUTS[name](weights)
    assert [type(branch) for branch in branches] == [AttentionParts, MlpParts]
    for branch, views in zip(branches, expected, strict=True):
        for view, by_hand in views.items():
            got = getattr(branch, view)
            if by_hand is None:
                assert got is None, view
                continue
            assert got.shape == by_hand.shape, view
            assert torch.equal(got, by_hand), view
            assert got.untyped_storage().data_ptr() == by_hand.untyped_storage().data_ptr(), view
            assert got.data_ptr() == by_hand.data_ptr(), view


@pytest.mark.parametrize("name", LAYOUTS)
def test_writing_into_a_view_is_writing_into_the_parameter(name: str) -> None:
    family = FAMILIES[name]
    model, twin = family.build(), family.build()
    branches = [branch for part in unskip.parts(model, family.inputs(1)) for branch in flat(part)][:2]
    by_hand = LAYOUTS[name]({key: value.detach() for key, value in twin.named_parameters()})
    before = run(twin, family.inputs(2))
    for branch, views in zip(branches, by_hand, strict=True):
        for view, weight in views.items():
            if weight is not None:
                getattr(branch, view).mul_(1.5)
                weight.mul_(1.5)
    after = run(model, family.inputs(2))
    assert torch.equal(after, run(twin, family.inputs(2)))
    assert not torch.allclose(after, before)


def run(model: nn.Module, inputs: Any) -> Tensor:
    with torch.no_grad():
        out = Example.of(inputs).run(model)
    out = out if isinstance(out, Tensor | tuple) else next(v for v in out.values() if isinstance(v, Tensor))
    return out if isinstance(out, Tensor) else out[0]


# --- The branch from its parts ----------------------------------------------------------------------------------------


def normalise(norm: NormParts | None, x: Tensor) -> Tensor:
    if norm is None:
        return x
    assert norm.kind != "other"
    assert norm.eps is not None
    centred = x - x.mean(-1, keepdim=True) if norm.kind == "layernorm" else x
    y = centred / (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    y = y if norm.gain is None else y * (norm.offset + norm.gain)
    return y if norm.bias is None else y + norm.bias


def attend(part: AttentionParts, x: Tensor) -> Tensor:
    """x (batch, tokens, dim), from the formulas alone."""

    def project(weight: Tensor, bias: Tensor | None) -> Tensor:
        y = torch.einsum("hed,bnd->bhne", weight, x)
        y = y if bias is None else y + bias[:, None]
        return y.repeat_interleave(part.heads // len(weight), 1)

    q, k, v = (project(*pair) for pair in ((part.q, part.q_bias), (part.k, part.k_bias), (part.v, part.v_bias)))
    scores = part.softmax_scale * torch.einsum("bhne,bhme->bhnm", q, k)
    if "mask" in part.extras:  # the masks of the families here are causal
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
    context = torch.einsum("bhnm,bhme->bnhe", scores.softmax(-1), v).flatten(-2)
    return F.linear(context, part.out, part.out_bias)


def perceive(part: MlpParts, x: Tensor) -> Tensor:
    assert part.function is not None
    up = F.linear(x, part.up, part.up_bias)
    hidden = part.function(up) if part.gate is None else part.function(F.linear(x, part.gate, part.gate_bias)) * up
    return F.linear(hidden, part.down, part.down_bias)


def branch_of(part: AttentionParts | MlpParts, x: Tensor) -> Tensor:
    norm = part.norm if part.norm is not None and part.norm.place == "pre" else None
    x = normalise(norm, x)
    y = attend(part, x) if isinstance(part, AttentionParts) else perceive(part, x)
    y = normalise(part.out_norm, y)
    return y if part.scale is None else y * part.scale


def computable(part: AttentionParts | MlpParts) -> bool:
    """Whether the parts say all there is: nothing else happens in the branch."""
    known = part.norm is None or part.norm.kind != "other"
    return known and not part.gated and not set(part.extras) - {"mask"} and not getattr(part, "cross", False)


# How many of a family's branches are nothing but their parts.
COMPUTABLE = {
    "timm_vit": 4,
    "timm_vit_layerscale_droppath": 4,
    "timm_deit3": 4,
    "timm_eva02": 2,
    "timm_parallel_scaling": 4,
    "timm_respost": 4,
    "timm_beit": 2,
    "timm_swin": 4,
    "timm_mixer": 2,
    "nn_encoder_pre": 4,
    "nn_encoder_post": 4,
    "torchvision_vit": 4,
    "hf_vit": 4,
    "hf_bert": 4,
    "hf_gpt2": 4,
    "hf_llama": 2,
    "hf_albert": 2,
    "hf_clip": 8,
    "hf_dinov2": 4,
    "hf_t5": 4,
    "hf_bloom": 2,
    "hf_gemma2": 2,
    "hf_modernbert": 2,
    "hand_control_flow": 6,
    "hand_helpers": 4,
    "hand_shared_block": 4,
}


@pytest.mark.parametrize("name", COMPUTABLE)
def test_a_branch_is_its_parts(name: str) -> None:
    family = FAMILIES[name]
    model = family.build().double()
    example = Example.of(tree_map(lambda v: v.double() if v.is_floating_point() else v, family.inputs(2)))
    opened = lay_open(model, example)
    graph = opened.dissection.graph
    count = 0
    for part, cut in zip(opened.parts, opened.dissection.cuts, strict=True):
        branches = flat(part)
        if not branches or not all(map(computable, branches)):
            continue
        assert len(cut.findings) == 1
        x = graph.values[cut.root]
        expected = graph.values[cut.findings[0].branch]
        flat_x = x.flatten(1, -2) if x.ndim == 4 else x
        got = torch.stack([branch_of(branch, flat_x) for branch in branches]).sum(0)
        # T5 and Llama normalise in float32 whatever the model's dtype.
        torch.testing.assert_close(got.reshape(expected.shape), expected, rtol=1e-5, atol=1e-5)
        count += len(branches)
    assert count == COMPUTABLE[name]


def test_the_norm_of_a_parallel_part_is_the_one_it_reads() -> None:
    _, found = open_family("hf_gpt_neox")
    assert isinstance(found[0], ParallelParts)
    assert found[0].attention.norm is not None
    assert found[0].mlp.norm is not None
    assert found[0].attention.norm.path == "layers.0.input_layernorm"
    assert found[0].mlp.norm.path == "layers.0.post_attention_layernorm"
    assert found[0].site is found.sites[0]


# --- Facts ------------------------------------------------------------------------------------------------------------

# Of the first attention: heads, key heads, head_dim, scale of the scores, what else happens.
ATTENTIONS = {
    "timm_vit": (2, 2, 8, 8**-0.5, ()),
    "timm_eva02": (2, 2, 8, 8**-0.5, ("query-key positions",)),
    "timm_swin": (2, 2, 4, 0.5, ("score bias",)),
    "timm_swinv2": (2, 2, 4, 1.0, ("query-key norm", "score scale", "score bias")),
    "hf_gpt2": (2, 2, 8, 8**-0.5, ("mask",)),
    "hf_llama": (4, 2, 4, 0.5, ("query-key positions", "mask")),
    "hf_t5": (2, 2, 8, 1.0, ("score bias",)),
    "hf_bloom": (2, 2, 8, 8**-0.5, ("score bias", "mask")),
    "hf_gemma2": (2, 1, 8, 8**-0.5, ("query-key positions", "score cap", "mask")),
    "hf_gpt_neox": (2, 2, 8, 8**-0.5, ("query-key positions", "mask")),
    "diffusers_dit": (2, 2, 8, 8**-0.5, ("input modulation", "input sum")),
}


@pytest.mark.parametrize("name", ATTENTIONS)
def test_facts_of_an_attention(name: str) -> None:
    part = next(open_family(name)[1].attentions())
    number, groups, width, scale, extras = ATTENTIONS[name]
    assert (part.heads, part.kv_heads, part.head_dim) == (number, groups, width)
    assert part.softmax_scale == pytest.approx(scale, rel=1e-6)
    assert part.extras == extras


# Of the first MLP: its activation, the norm (kind, place, eps), the norm at the branch's end, LayerScale, what else.
MLPS = {
    "timm_vit": ("gelu", ("layernorm", "pre", 1e-6), None, False, ()),
    "timm_deit3": ("gelu", ("layernorm", "pre", 1e-6), None, True, ()),
    "timm_eva02_scaled": ("silu", ("layernorm", "pre", 1e-6), None, True, ("hidden norm",)),
    "timm_respost": ("gelu", ("layernorm", "out", 1e-6), ("layernorm", 0.0), False, ()),
    "timm_mixer": ("gelu", ("layernorm", "pre", 1e-6), None, False, ("over tokens",)),
    "nn_encoder_layer_post": ("relu", ("layernorm", "post", 1e-5), None, False, ()),
    "hf_bert": ("gelu", ("layernorm", "post", 1e-12), None, False, ()),
    "hf_gpt2": ("gelu_tanh", ("layernorm", "pre", 1e-5), None, False, ()),
    "hf_clip": ("quick_gelu", ("layernorm", "pre", 1e-5), None, False, ()),
    "hf_llama": ("silu", ("rmsnorm", "pre", 1e-6), None, False, ()),
    # Named LayerNorm, but it subtracts no mean; and one that subtracts it and is written out.
    "hf_t5": ("relu", ("rmsnorm", "pre", 1e-6), None, False, ()),
    "hf_cohere": ("silu", ("layernorm", "pre", 1e-5), None, False, ()),
    # Multiplies by 1 + weight.
    "hf_gemma2": ("gelu_tanh", ("rmsnorm", "pre", 1e-6), ("rmsnorm", 1.0), False, ()),
    "diffusers_dit": ("gelu_tanh", ("layernorm", "pre", 1e-5), None, False, ("input modulation", "input sum")),
    "hand_mangled": ("gelu", ("layernorm", "pre", 1e-5), None, False, ("output factor",)),
}


@pytest.mark.parametrize("name", MLPS)
def test_facts_of_an_mlp(name: str) -> None:
    part = next(open_family(name)[1].mlps())
    activation, norm, out_norm, scaled, extras = MLPS[name]
    assert part.activation == activation
    assert part.norm is not None
    assert (part.norm.kind, part.norm.place, part.norm.eps) == pytest.approx(norm)
    assert (part.out_norm and (part.out_norm.kind, part.out_norm.offset)) == out_norm
    assert (part.scale is not None) == scaled
    assert part.extras == extras


def test_the_gate_of_a_conditioned_branch_is_told() -> None:
    _, found = open_family("diffusers_dit")
    for part in (*found.attentions(), *found.mlps()):
        assert part.gated
        assert not part.closed


def test_cross_attention_is_told() -> None:
    _, found = open_family("hf_t5")
    assert [part.cross for part in found.attentions()] == [False, False, False, True, False, True]


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "tanh", "sigmoid", "mish", "hardswish"])
def test_an_activation_is_known_by_its_values(activation: str) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(getattr(F, activation)(self.up(x)))

    (part,) = unskip.parts(Block(), torch.randn(2, 3, 4))
    assert isinstance(part, MlpParts)
    assert part.activation == activation


def test_an_activation_of_ones_own_has_no_name() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            inner = self.up(x)
            return x + self.down(inner * torch.cos(inner))

    (part,) = unskip.parts(Block(), torch.randn(2, 3, 4))
    assert isinstance(part, MlpParts)
    assert part.activation is None
    assert part.function is None


# --- What has no parts ------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Attention with a pluggable part, around which a residual is put."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.norm = nn.LayerNorm(8)
        self.q, self.k, self.v, self.o, self.extra = (nn.Linear(8, 8) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (f(h).unflatten(-1, (2, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        if self.form == "features":  # XCiT: attention among features
            out = (q.mT @ k).softmax(-1) @ v.mT
            return x + self.o(out.mT.transpose(1, 2).flatten(2))
        if self.form == "sum of products":
            scores = q @ k.mT + k @ q.mT
        else:
            scores = q @ k.mT
        out = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        if self.form == "no output":
            return x + out
        if self.form == "reversed":
            return x + self.o(out.flip(-1))
        if self.form == "more weights":
            return x + self.extra(self.o(out))
        if self.form == "linear":
            return x + self.o(((q @ k.mT) @ v).transpose(1, 2).flatten(2))
        return x + self.o(out)


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(x)


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ("features", "features"),
        ("no output", "no output projection"),
        ("reversed", "another order"),
        ("more weights", "more weights"),
        ("linear", "softmax"),
        ("sum of products", "several products"),
    ],
)
def test_an_unknown_attention_is_none_with_the_reason(form: str, reason: str) -> None:
    found = unskip.parts(Attention(form), torch.randn(2, 5, 8))
    assert list(found) == [None]
    assert reason in found.reasons[0]
    assert reason in str(found)


def test_heads_shared_in_another_order_are_refused() -> None:
    """Grouped keys that queries take in turns, not by neighbours: views would pair the wrong heads."""

    class Turns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.o = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            q = self.q(x).unflatten(-1, (4, 2)).transpose(1, 2)
            k, v = (f(x).unflatten(-1, (2, 2)).transpose(1, 2).repeat(1, 2, 1, 1) for f in (self.k, self.v))
            return x + self.o(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))

    found = unskip.parts(Turns(), torch.randn(2, 5, 8))
    assert found[0] is None
    assert "order" in found.reasons[0]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("timm_parallel_things", "2 attentions"),
        ("timm_diff_parallel", "2 attentions"),
        ("timm_resnet", "conv"),
        ("hand_decoys", "more weights"),
        ("hand_nested", "products with a weight"),
    ],
)
def test_a_family_of_another_form_has_reasons(name: str, reason: str) -> None:
    _, found = open_family(name)
    assert found[0] is None
    assert reason in found.reasons[0]
    assert len(found) == len(found.sites) == len(found.reasons)


def test_an_mlp_of_three_weights_is_none() -> None:
    found = unskip.parts(Deep(), torch.randn(2, 4))
    assert found[0] is None
    assert "3 products" in found.reasons[0]


def test_a_computed_weight_is_none() -> None:
    model = FAMILIES["timm_vit"].build()
    nn.utils.parametrizations.weight_norm(model.get_submodule("blocks.0.mlp.fc1"))
    found = unskip.parts(model, FAMILIES["timm_vit"].inputs(1))
    assert [part is None for part in found] == [False, True, False, False]
    assert "computed" in found.reasons[1]


def test_a_computed_bias_is_told() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 6, bias=False), nn.Linear(6, 4)
            self.raw = nn.Parameter(torch.randn(6))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(F.linear(x, self.up.weight, self.raw.tanh()).relu())

    (part,) = unskip.parts(Block(), torch.randn(2, 3, 4))
    assert isinstance(part, MlpParts)
    assert part.up_bias is None
    assert "computed bias" in part.extras
    assert len(part.biases) == 2


# --- Rewired, wrapped, half, meta -------------------------------------------------------------------------------------


def facts(model: nn.Module) -> list[Any]:
    return [
        [
            (name, type(m), m.training, len(m._forward_hooks), len(m._forward_pre_hooks), sorted(vars(m)))
            for name, m in model.named_modules()
        ],
        {name: (p.data_ptr(), p._version, p.requires_grad, p.grad) for name, p in model.named_parameters()},
        {name: (id(b), b.tolist()) for name, b in model.named_buffers()},
    ]


@pytest.mark.parametrize("name", ["timm_vit_layerscale_droppath", "nn_encoder_post", "hf_llama", "timm_resnet"])
@pytest.mark.parametrize("rewired", [False, True])
def test_looking_changes_nothing(name: str, rewired: bool) -> None:
    family = FAMILIES[name]
    model = family.build().train()
    next(model.parameters()).requires_grad_(False)
    if rewired:
        with pytest.warns(unskip.errors.UnskipWarning) if family.drop_path else contextlib.nullcontext():
            unskip.rewire(model, Decay(0.6) if name == "timm_resnet" else Cut(), family.inputs(2))
    before = facts(model)
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].copy()  # type: ignore[union-attr]  # noqa: NPY002
    first = unskip.parts(model, family.inputs(2))
    assert facts(model) == before
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert numpy.array_equal(numpy.random.get_state()[1], states[2])  # type: ignore[arg-type]  # noqa: NPY002
    assert [part is None for part in first] == [part is None for part in unskip.parts(model, family.inputs(2))]


def test_the_parts_of_a_rewired_model_are_those_of_the_plain_one() -> None:
    family = FAMILIES["timm_vit"]
    model = family.build()
    plain = unskip.parts(model, family.inputs(2))
    wiring = unskip.rewire(model, {"attention": Cut(), "mlp": Decay(0.6)}, family.inputs(2))
    found = unskip.parts(model, family.inputs(2))
    for before, after in zip(plain, found, strict=True):
        assert type(before) is type(after)
        for view in ("q", "out", "up", "down"):
            if hasattr(before, view):
                assert getattr(before, view).data_ptr() == getattr(after, view).data_ptr()
    assert [(p.alpha, p.beta) for part in found for p in flat(part)] == list(
        zip(wiring.alphas, wiring.betas, strict=True)
    )
    assert found[0] is not None
    assert found[0].site is wiring.sites[0]
    wiring.undo()
    assert all(p.alpha == 1 for part in unskip.parts(model, family.inputs(2)) for p in flat(part))


def test_learnt_and_annealed_weights_are_read_as_they_are_now() -> None:
    family = FAMILIES["timm_vit"]
    model = family.build()
    wiring = unskip.rewire(model, Learn(start=0.7), family.inputs(2))
    found = unskip.parts(model, family.inputs(2))
    assert [p.alpha for part in found for p in flat(part)] == pytest.approx([0.7] * 4)
    wiring.set(Anneal(Keep(), Cut(), steps=10))
    wiring.step(5)
    found = unskip.parts(model, family.inputs(2))
    assert [p.alpha for part in found for p in flat(part)] == pytest.approx(wiring.alphas)
    assert wiring.alphas == pytest.approx([0.5] * 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["timm_vit", "hf_llama", "hf_bloom", "timm_beit"])
def test_half_precision_weights_are_viewed_all_the_same(name: str, dtype: torch.dtype) -> None:
    family = FAMILIES[name]
    model = family.build().to(dtype)
    inputs = tree_map(lambda v: v.to(dtype) if v.is_floating_point() else v, family.inputs(2))
    found = unskip.parts(model, inputs)
    plain = open_family(name)[1]
    for part, same in zip(found, plain, strict=True):
        for a, b in zip(flat(part), flat(same), strict=True):
            assert type(a) is type(b)
            assert a.extras == b.extras
            if isinstance(a, MlpParts) and isinstance(b, MlpParts):
                assert a.activation == b.activation
                assert torch.equal(a.up, b.up.to(dtype))
            if isinstance(a, AttentionParts) and isinstance(b, AttentionParts):
                assert torch.equal(a.k, b.k.to(dtype))
                assert a.softmax_scale == pytest.approx(b.softmax_scale, rel=1e-2)


def test_a_model_without_values_has_parts() -> None:
    with torch.device("meta"):
        model = copy.deepcopy(FAMILIES["timm_vit"].make())
    found = unskip.parts(model.eval(), torch.empty(1, 3, 16, 16, device="meta"))
    assert [type(part) for part in found] == [AttentionParts, MlpParts] * 2
    for part in found.attentions():
        assert part.q.is_meta
        assert part.norm is not None
        assert part.norm.kind == "layernorm"


def test_a_conditioned_model_is_cut_into_samples_with_its_conditions() -> None:
    """Timesteps and labels have one axis: left as they were, one image would meet several of them."""
    family = FAMILIES["diffusers_dit"]
    model = family.build()
    assert len(unskip.parts(model, family.inputs(3))) == len(family.sites) == len(unskip.audit(model, family.inputs(3)))


def test_arguments_without_a_row_for_each_sample_are_run_whole() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    found = unskip.parts(layer, {"src": torch.randn(3, 5, 8), "src_mask": mask})
    assert isinstance(found[0], AttentionParts)
    assert found[0].extras == ("mask",)


def test_a_bad_example_is_a_clear_error() -> None:
    model = FAMILIES["timm_vit"].build()
    with pytest.raises(ForwardError, match="mapping of keyword"):
        unskip.parts(model, torch.randn(1, 5, 16, 16))
    with pytest.raises(BadInput, match="pass a tensor"):
        unskip.parts(model, "photo.png")
    assert unskip.parts(nn.Linear(4, 4), torch.randn(2, 4)).sites == ()


def test_the_table_says_what_there_is() -> None:
    text = str(open_family("hf_llama")[1])
    assert "the weights of 4 of 4 sites" in text
    assert "4 heads of 4, 2 for keys and values" in text
    assert "16 > 32 > 16, gated" in text
    assert "silu" in text
    assert repr(open_family("timm_resnet")[1]) == "<Parts of ResNet: 0 of 8 sites>"


def test_value_output_is_the_map_of_a_token_that_looks_at_itself() -> None:
    """One token: attention is the identity, so the branch is the map, biases aside."""
    for name in ("timm_vit", "hf_llama"):
        _, found = open_family(name)
        part = next(found.attentions())
        x = torch.randn(3, 1, 16, dtype=torch.float64)
        none = dict.fromkeys(("q_bias", "k_bias", "v_bias", "out_bias"))
        double = {view: getattr(part, view).double() for view in ("q", "k", "v", "out")}
        plain = AttentionParts(**{**vars(part), **none, **double, "extras": ()})
        torch.testing.assert_close(attend(plain, x), x @ part.value_output().T)


def test_talking_heads_are_none_with_the_reason() -> None:
    """A weight that mixes heads between scores and values: then no head has queries, keys and values of its own."""
    model = timm.create_model("cait_xxs24_224", depth=1, embed_dim=24, num_heads=4, img_size=32)
    parts = unskip.parts(model)
    assert parts[0] is None
    assert "talking heads" in parts.reasons[0]
    assert all(part is not None for part in parts[1:])


def test_a_learnt_bias_of_scores_is_no_mask_where_it_starts_at_zero() -> None:
    model = timm.create_model("levit_128s", img_size=64)
    part = next(unskip.parts(model, torch.randn(1, 3, 64, 64)).attentions())
    assert "score bias" in part.extras
    assert "mask" not in part.extras
    assert "value norm" in part.extras
