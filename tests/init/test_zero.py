"""`zero_branches_`: every branch adds zero, and its weights get gradients."""

import warnings
from typing import Any

import pytest
import tests.zoo.more  # noqa: F401  (enters its families into the registry)
import torch
from tests.zoo.families import FAMILIES
from torch import Tensor, nn

import unskip
from unskip import Cut, Decay
from unskip.anatomy._example import Example
from unskip.errors import BadInput, InitError, UnskipWarning
from unskip.init import Check, verify_zero_branches, zero_branches_


def zero_branches_quietly(*args: Any, **kwargs: Any) -> Check:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnskipWarning)
        return zero_branches_(*args, **kwargs)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def changed(before: dict[str, Tensor], model: nn.Module) -> set[str]:
    return {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}


def gradients(model: nn.Module, inputs: Any) -> dict[str, float]:
    """The norm of the gradient of each parameter, for a loss that depends on all outputs."""
    model.zero_grad()
    out = Example.of(inputs).copy().run(model)
    out = out if isinstance(out, Tensor) else next(iter(out.values()))
    signs = torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
    (out * signs).sum().backward()
    return {name: 0.0 if p.grad is None else float(p.grad.norm()) for name, p in model.named_parameters()}


# The parameters of each family that become zero, by the end of their names.
LAST = {
    "timm_vit": ("attn.proj.weight", "attn.proj.bias", "mlp.fc2.weight", "mlp.fc2.bias"),
    "nn_encoder_pre": ("out_proj.weight", "out_proj.bias", "linear2.weight", "linear2.bias"),
    "nn_encoder_post": ("out_proj.weight", "out_proj.bias", "linear2.weight", "linear2.bias"),
    "hf_bert": (
        "attention.output.dense.weight",
        "attention.output.dense.bias",
        "output.dense.weight",
        "output.dense.bias",
    ),
    "hf_gpt2": ("attn.c_proj.weight", "attn.c_proj.bias", "mlp.c_proj.weight", "mlp.c_proj.bias"),
    "hf_llama": ("self_attn.o_proj.weight", "mlp.down_proj.weight"),
    "hf_t5": ("Attention.o.weight", "DenseReluDense.wo.weight"),
    "hf_gpt_neox": ("attention.dense.weight", "attention.dense.bias", "dense_4h_to_h.weight", "dense_4h_to_h.bias"),
    "timm_parallel_scaling": ("attn_out_proj.weight", "attn_out_proj.bias", "mlp_out_proj.weight", "mlp_out_proj.bias"),
    # If a branch ends in a norm, the gain of the norm becomes zero.
    "timm_respost": ("norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias"),
    "timm_swinv2": ("norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias"),
    "hf_gemma2": ("post_attention_layernorm.weight", "post_feedforward_layernorm.weight"),
    "diffusers_dit": ("attn1.to_out.0.weight", "attn1.to_out.0.bias", "ff.net.2.weight", "ff.net.2.bias"),
}


@pytest.mark.parametrize("name", LAST)
def test_branches_add_zero_and_get_gradients(name: str) -> None:
    family = FAMILIES[name]
    model = family.build()
    before = weights(model)
    check = zero_branches_quietly(model, family.inputs(2))
    assert all(row.values["largest"] == 0 and row.values["zeros"] == 1 for row in check.rows)
    assert all(row.values.get(name, 0.0) == 0 for row in check.rows for name in ("bias", "layer scale error"))
    assert len(check.rows) == len(family.sites)
    touched = changed(before, model)
    assert touched
    assert all(key.endswith(LAST[name]) for key in touched)
    graph = unskip.measure(model, family.inputs(2), jacobians="off")
    assert [row.ratio for row in graph.sites] == [0.0] * len(family.sites)
    # Weights that were set to zero get a gradient (Gemma's gain of 1 + w is zero at -1).
    found = gradients(model, family.inputs(2))
    matrices = [key for key in touched if key in found and key.endswith("weight")]
    assert matrices
    if name != "hf_t5":  # the output of T5Model depends only on the decoder
        assert all(found[key] > 0 for key in matrices)


def test_a_zero_model_is_the_norm_of_its_embedding() -> None:

    family = FAMILIES["timm_vit"]
    model: Any = family.build()
    zero_branches_quietly(model, family.inputs(2))
    x = family.inputs(2)
    with torch.no_grad():
        stream = model._pos_embed(model.patch_embed(x))
        assert torch.equal(model.forward_features(x), model.norm(stream))


def test_layer_scale_becomes_one() -> None:
    family = FAMILIES["timm_deit3"]
    model = family.build()
    with pytest.warns(UnskipWarning, match="LayerScale was set to 1"):
        check = zero_branches_(model, family.inputs(2))
    assert all((p == 1).all() for name, p in model.named_parameters() if "gamma" in name)
    assert len(check.notes) == 1
    found = gradients(model, family.inputs(2))
    assert all(found[f"blocks.{i}.{name}.weight"] > 0 for i in range(2) for name in ("attn.proj", "mlp.fc2"))


@pytest.mark.parametrize("shut", [torch.zeros(()), torch.zeros(4)])
def test_a_zero_scale_becomes_one(shut: Tensor) -> None:
    """With two zero factors neither would get a gradient. The scale is a scalar (ReZero) or a vector."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.size = nn.Linear(4, 8), nn.Linear(8, 4), nn.Parameter(shut.clone())

        def forward(self, x: Tensor) -> Tensor:
            return x + self.size * self.down(self.up(x).relu())

    model = Block()
    zero_branches_quietly(model, torch.randn(2, 3, 4))
    assert (model.size == 1).all()
    assert not model.down.weight.any()
    assert gradients(model, torch.randn(2, 3, 4))["down.weight"] > 0


def test_a_zero_gate_is_not_changed_and_gets_gradients() -> None:
    """With adaLN-zero the branch is zero already."""
    family = FAMILIES["diffusers_dit"]
    model = family.build()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".norm1.linear." in name:
                parameter.zero_()
    before = weights(model)
    with pytest.warns(UnskipWarning, match="its gate starts at zero"):
        check = zero_branches_(model, family.inputs(2))
    assert not changed(before, model)
    assert all(row.values["largest"] == 0 for row in check.rows)
    assert gradients(model, family.inputs(2))["transformer_blocks.0.norm1.linear.weight"] > 0


def test_a_computed_zero_gate_is_not_changed() -> None:
    """The tanh of a weight that is initialised to zero, as in Flamingo."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.gate = nn.Linear(4, 8), nn.Linear(8, 4), nn.Parameter(torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.gate.tanh() * self.down(self.up(x).relu())

    model = Block()
    zero_branches_quietly(model, torch.randn(2, 3, 4))
    assert model.down.weight.any()
    assert gradients(model, torch.randn(2, 3, 4))["gate"] > 0


@pytest.mark.parametrize("rule", [Decay(0.6), Cut()])
def test_before_and_after_rewire_are_the_same(rule: Any) -> None:
    family = FAMILIES["timm_vit"]
    plain, rewired = family.build(), family.build()
    zero_branches_quietly(plain, family.inputs(2))
    wiring = unskip.rewire(rewired, rule, family.inputs(2))
    alphas = wiring.alphas
    zero_branches_quietly(rewired, family.inputs(2))
    assert not changed(weights(plain), rewired)
    assert wiring.alphas == alphas
    verify_zero_branches(rewired, family.inputs(2))
    with pytest.raises(BadInput, match="not rewired"):
        unskip.Wiring.of(plain)


def test_where_selects_sites() -> None:
    family = FAMILIES["timm_vit"]
    model = family.build()
    before = weights(model)
    check = zero_branches_(model, family.inputs(2), where="mlp")
    assert changed(before, model) == {f"blocks.{i}.mlp.fc2.{kind}" for i in range(2) for kind in ("weight", "bias")}
    assert [row.site.kind for row in check.rows] == ["mlp", "mlp"]
    with pytest.raises(InitError, match="sites fail"):
        verify_zero_branches(model, family.inputs(2))
    for call in (zero_branches_, verify_zero_branches):
        with pytest.raises(InitError, match="no site"):
            call(model, family.inputs(2), where=lambda site: False)  # type: ignore[operator]
    with pytest.raises(BadInput, match="where"):
        zero_branches_(model, family.inputs(2), where="mpl")


@pytest.mark.parametrize("name", ["timm_resnet", "timm_parallel_things", "hand_nested"])
def test_refused_models_are_unchanged_bit_for_bit(name: str) -> None:
    family = FAMILIES[name]
    model = family.build()
    before = weights(model)
    with pytest.raises(InitError, match="Nothing was changed"):
        zero_branches_(model, family.inputs(2))
    assert not changed(before, model)


def test_a_branch_that_cannot_be_zero_is_restored() -> None:
    """It ends in a sigmoid, which is never zero."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(self.up(x).relu()).sigmoid()

    model = Block()
    before = weights(model)
    with pytest.raises(InitError, match=r"adds up to 0\.5"):
        zero_branches_(model, torch.randn(2, 3, 4))
    assert not changed(before, model)


def test_verify_raises_for_a_changed_model() -> None:
    family = FAMILIES["timm_vit"]
    model = family.build()
    zero_branches_quietly(model, family.inputs(2))
    assert not verify_zero_branches(model, family.inputs(2)).failed
    with torch.no_grad():
        model.get_parameter("blocks.1.mlp.fc2.bias")[3] = 0.25
    with pytest.raises(InitError, match=r"blocks\.1 \[mlp\]"):
        verify_zero_branches(model, family.inputs(2))
    found = verify_zero_branches(model, family.inputs(2), check=False)
    assert [row.values["largest"] for row in found.rows] == [0.0, 0.0, 0.0, 0.25]
    with torch.no_grad():
        model.get_parameter("blocks.0.attn.proj.bias")[0] = torch.nan
    assert len(verify_zero_branches(model, family.inputs(2), check=False).failed) >= 2


# Changes to an initialised model: family, parameter, new value, and the check that fails.
BROKEN = [
    ("timm_vit", "blocks.1.attn.proj.weight", 0.5, "no factor of the branch is 0"),
    ("timm_vit", "blocks.1.mlp.fc2.bias", 0.5, "the last bias reaches 0.5"),
    ("timm_deit3", "blocks.1.ls1.gamma", 0.5, "LayerScale is 0.5 away from 1"),
    ("timm_deit3", "blocks.1.ls2.gamma", 0.0, "the last weight and LayerScale are 0, and neither would learn"),
    ("hf_dinov2", "encoder.layer.1.layer_scale1.lambda1", 2.0, "LayerScale is 1 away from 1"),
    ("hf_vit", "layers.1.attention.o_proj.weight", 0.5, "no factor of the branch is 0"),
    ("hf_vit", "layers.1.mlp.fc2.bias", -0.5, "the last bias reaches 0.5"),
    ("hf_gpt2", "h.1.attn.c_proj.weight", 0.5, "no factor of the branch is 0"),
    ("hf_gpt2", "h.1.mlp.c_proj.bias", 0.5, "the last bias reaches 0.5"),
    ("hf_llama", "layers.1.mlp.down_proj.weight", 0.5, "no factor of the branch is 0"),
    ("timm_respost", "blocks.1.norm1.weight", 0.5, "no factor of the branch is 0"),
    ("timm_respost", "blocks.1.norm1.bias", 0.5, "the last bias reaches 0.5"),
    ("timm_respost", "blocks.1.attn.proj.weight", 0.0, "the last weight and the gain of the last norm are 0"),
    ("hf_gemma2", "layers.1.post_attention_layernorm.weight", 0.0, "no factor of the branch is 0"),
    ("hf_gemma2", "layers.1.mlp.down_proj.weight", 0.0, "the last weight and the gain of the last norm are 0"),
    ("timm_parallel_scaling", "blocks.1.mlp_out_proj.weight", 0.5, "no factor of the branch is 0"),
    ("timm_parallel_scaling", "blocks.1.attn_out_proj.bias", 0.5, "the last bias reaches 0.5"),
]


@pytest.mark.parametrize(("name", "parameter", "value", "fact"), BROKEN)
def test_changed_parameters_are_named_with_their_site(name: str, parameter: str, value: float, fact: str) -> None:
    family = FAMILIES[name]
    model = family.build()
    zero_branches_quietly(model, family.inputs(2))
    assert not verify_zero_branches(model, family.inputs(2)).failed
    with torch.no_grad():
        model.get_parameter(parameter).fill_(value)
    found = verify_zero_branches(model, family.inputs(2), check=False)
    assert len(found.failed) == 1
    assert parameter.startswith(found.failed[0].site.path + ".")
    with pytest.raises(InitError) as caught:
        found.raise_if_failed()
    assert f"1 of {len(found.rows)} sites fail ({found.failed[0].site.name})" in str(caught.value)
    assert any(fact in failure for failure in found.failed[0].failed)
    assert fact in str(caught.value)


def test_a_branch_that_is_zero_only_on_the_example_fails() -> None:
    """All its ReLU units are zero for this input, but not for others."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = model

        def forward(self, x: Tensor) -> Tensor:
            return x + self.mlp(x)

    block = Block()
    with torch.no_grad():
        block.mlp[0].bias.fill_(-100)  # type: ignore[union-attr,operator]
        block.mlp[2].bias.zero_()  # type: ignore[union-attr,operator]
    found = verify_zero_branches(block, torch.randn(2, 3, 4), check=False)
    assert found.rows[0].values["largest"] == 0
    assert found.rows[0].failed == ("no factor of the branch is 0, expected one",)


def test_a_zero_gate_before_a_zero_weight_is_refused() -> None:
    family = FAMILIES["diffusers_dit"]
    model = family.build()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".norm1.linear." in name or name == "transformer_blocks.1.ff.net.2.weight":
                parameter.zero_()
    with pytest.raises(InitError, match="last weight and a gate"):
        zero_branches_(model, family.inputs(2))


@pytest.mark.parametrize("name", ["timm_vit", "hf_gemma2", "timm_respost"])
def test_the_initialisation_is_idempotent(name: str) -> None:
    family = FAMILIES[name]
    model = family.build()
    zero_branches_quietly(model, family.inputs(2))
    before = weights(model)
    zero_branches_quietly(model, family.inputs(2))
    assert not changed(before, model)


def test_sites_without_known_parts_are_checked_on_the_example_with_a_note() -> None:
    family = FAMILIES["timm_resnet"]
    found = verify_zero_branches(family.build(), family.inputs(2), check=False)
    assert "only on the example" in found.notes[0]
    assert all(set(row.values) == {"largest"} for row in found.rows)
    with pytest.raises(BadInput, match="where"):
        verify_zero_branches(family.build(), family.inputs(2), where="mpl")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    family = FAMILIES["timm_vit"]
    model = family.build().to(dtype)
    assert all(row.values["largest"] == 0 for row in zero_branches_quietly(model, family.inputs(2).to(dtype)).rows)
