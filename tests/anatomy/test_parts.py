"""Parts are views on the parameters, equal to the slices that the source uses, and they compute its branches."""

from collections.abc import Callable
from typing import Any

import pytest
import tests.zoo.more  # noqa: F401  (enters its families into the registry)
import torch
from tests.anatomy.opened import flat, open_family
from tests.zoo.families import FAMILIES
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

import unskip
from unskip.anatomy import AttentionParts, MlpParts, NormParts, ParallelParts, trace_parts
from unskip.anatomy._example import Example

Weights = dict[str, Tensor]  # the parameters of a model by name
Crops = dict[str, Tensor | None]


# --- Slices by hand ---------------------------------------------------------------------------------------------------


def heads(weight: Tensor, count: int) -> Tensor:
    return weight.reshape(count, -1, *weight.shape[1:])


def fused(w: Weights, qkv: str, out: str, count: int = 2, bias: str | None = ".bias") -> Crops:
    """q over k over v, as in timm."""
    views: Crops = dict(zip("qkv", (heads(part, count) for part in w[f"{qkv}.weight"].chunk(3)), strict=True))
    if bias is not None:
        pieces = w[f"{qkv}{bias}"].chunk(3)
        views |= {f"{name}_bias": heads(piece, count) for name, piece in zip("qkv", pieces, strict=True)}
    return views | {"out": w[f"{out}.weight"], "out_bias": w.get(f"{out}.bias")}


def in_proj(w: Weights, path: str) -> Crops:
    """torch.nn.MultiheadAttention."""
    renamed = {"x.weight": w[f"{path}.in_proj_weight"], "x.bias": w[f"{path}.in_proj_bias"]}
    return fused(renamed | w, "x", f"{path}.out_proj")


def separate(w: Weights, path: str, names: str, out: str, count: int = 2, groups: int = 2) -> Crops:
    """One Linear each; `names` are those of q, k and v."""
    views: Crops = {"out": w[f"{out}.weight"], "out_bias": w.get(f"{out}.bias")}
    for name, of, number in zip("qkv", names.split(), (count, groups, groups), strict=True):
        views[name] = heads(w[f"{path}.{of}.weight"], number)
        bias = w.get(f"{path}.{of}.bias")
        views[f"{name}_bias"] = None if bias is None else heads(bias, number)
    return views


def gpt2(w: Weights) -> Crops:
    """Conv1D stores the transpose of a Linear's weight."""
    renamed = {"x.weight": w["h.0.attn.c_attn.weight"].t(), "x.bias": w["h.0.attn.c_attn.bias"]}
    out = {"y.weight": w["h.0.attn.c_proj.weight"].t(), "y.bias": w["h.0.attn.c_proj.bias"]}
    return fused(renamed | out, "x", "y")


def interleaved(w: Weights, qkv: str, out: str, count: int = 2) -> Crops:
    """For each head its q, then its k, then its v: GPT-NeoX and Bloom."""
    weight = w[f"{qkv}.weight"].unflatten(0, (count, 3, -1))
    bias = w[f"{qkv}.bias"].unflatten(0, (count, 3, -1))
    views: Crops = {"out": w[f"{out}.weight"], "out_bias": w[f"{out}.bias"]}
    for index, name in enumerate("qkv"):
        views |= {name: weight[:, index], f"{name}_bias": bias[:, index]}
    return views


def mlp(w: Weights, up: str, down: str) -> Crops:
    names = {"up": f"{up}.weight", "up_bias": f"{up}.bias", "down": f"{down}.weight", "down_bias": f"{down}.bias"}
    return {"gate": None, "gate_bias": None} | {view: w.get(name) for view, name in names.items()}


def packed(w: Weights, both: str, down: str, gate_first: bool) -> Crops:
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


def gated(w: Weights, path: str, gate: str, up: str, down: str) -> Crops:
    names = {"up": up, "gate": gate, "down": down}
    views: Crops = {view: w[f"{path}.{name}.weight"] for view, name in names.items()}
    return views | {f"{view}_bias": w.get(f"{path}.{name}.bias") for view, name in names.items()}


def beit(w: Weights) -> Crops:
    """Biases of q and v only, concatenated with zeros in each call."""
    views = fused(w, "blocks.0.attn.qkv", "blocks.0.attn.proj", bias=None)
    return views | {
        "q_bias": heads(w["blocks.0.attn.q_bias"], 2),
        "k_bias": None,
        "v_bias": heads(w["blocks.0.attn.v_bias"], 2),
    }


def parallel(w: Weights) -> list[Crops]:
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


# The first two branches of each family, an attention and then an MLP.
LAYOUTS: dict[str, Callable[[Weights], list[Crops]]] = {
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


def apply_attention(part: AttentionParts, x: Tensor) -> Tensor:
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


def apply_mlp(part: MlpParts, x: Tensor) -> Tensor:
    assert part.function is not None
    up = F.linear(x, part.up, part.up_bias)
    hidden = part.function(up) if part.gate is None else part.function(F.linear(x, part.gate, part.gate_bias)) * up
    return F.linear(hidden, part.down, part.down_bias)


def branch_of(part: AttentionParts | MlpParts, x: Tensor) -> Tensor:
    norm = part.norm if part.norm is not None and part.norm.place == "pre" else None
    x = normalise(norm, x)
    y = apply_attention(part, x) if isinstance(part, AttentionParts) else apply_mlp(part, x)
    y = normalise(part.out_norm, y)
    return y if part.scale is None else y * part.scale


def computable(part: AttentionParts | MlpParts) -> bool:
    """Whether the parts describe the whole branch."""
    known = part.norm is None or part.norm.kind != "other"
    return known and not part.gated and not set(part.extras) - {"mask"} and not getattr(part, "cross", False)


# How many of a family's branches their parts describe entirely.
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
def test_parts_compute_the_output_of_the_branch(name: str) -> None:
    family = FAMILIES[name]
    model = family.build().double()
    example = Example.of(tree_map(lambda v: v.double() if v.is_floating_point() else v, family.inputs(2)))
    traced = trace_parts(model, example)
    graph = traced.trace.graph
    count = 0
    for part, run in zip(traced.parts, traced.trace.last_runs, strict=True):
        branches = flat(part)
        if not branches or not all(map(computable, branches)):
            continue
        assert len(run.findings) == 1
        x = graph.values[run.root]
        expected = graph.values[run.findings[0].branch]
        flat_x = x.flatten(1, -2) if x.ndim == 4 else x
        got = torch.stack([branch_of(branch, flat_x) for branch in branches]).sum(0)
        # T5 and Llama normalise in float32 whatever the model's dtype.
        torch.testing.assert_close(got.reshape(expected.shape), expected, rtol=1e-5, atol=1e-5)
        count += len(branches)
    assert count == COMPUTABLE[name]


def test_a_parallel_part_has_its_own_norm() -> None:
    _, found = open_family("hf_gpt_neox")
    assert isinstance(found[0], ParallelParts)
    assert found[0].attention.norm is not None
    assert found[0].mlp.norm is not None
    assert found[0].attention.norm.path == "layers.0.input_layernorm"
    assert found[0].mlp.norm.path == "layers.0.post_attention_layernorm"
    assert found[0].site is found.sites[0]


def test_value_output_is_the_map_of_a_token_that_attends_to_itself() -> None:
    """One token: attention is the identity, so the branch is the map, up to biases."""
    for name in ("timm_vit", "hf_llama"):
        _, found = open_family(name)
        part = next(found.attentions())
        x = torch.randn(3, 1, 16, dtype=torch.float64)
        none = dict.fromkeys(("q_bias", "k_bias", "v_bias", "out_bias"))
        double = {view: getattr(part, view).double() for view in ("q", "k", "v", "out")}
        plain = AttentionParts(**{**vars(part), **none, **double, "extras": ()})
        torch.testing.assert_close(apply_attention(plain, x), x @ part.value_output().T)


def test_parts_print_the_shapes_of_their_weights() -> None:
    family = FAMILIES["timm_vit"]
    part = unskip.parts(family.build(), family.inputs(1))[0]
    assert "q=<" in repr(part)
    assert len(repr(part)) < 1000
    assert "tensor(" not in repr(part)
