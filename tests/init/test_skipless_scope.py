"""Each part of `skipless_` changes only its weights, and the result does not depend on dtype, mode and wiring."""

from typing import Any

import pytest
import torch
from tests.init.started import changed, quietly, seeded, weights
from tests.zoo.families import FAMILIES
from torch import Tensor

import unskip
from unskip import Cut
from unskip.errors import BadInput, InitError
from unskip.init import PARTS, PRESETS, skipless_, verify_skipless

# --- Single parts -----------------------------------------------------------------------------------------------------

OWN = {
    "value-output": {"attn.qkv.weight", "attn.qkv.bias", "attn.proj.weight", "attn.proj.bias", "ls1.gamma"},
    "query-key": {"attn.qkv.weight", "attn.qkv.bias"},
    "mlp": {"mlp.fc1.weight", "mlp.fc1.bias", "mlp.fc2.weight", "mlp.fc2.bias", "ls2.gamma"},
}


@pytest.mark.parametrize("part", PARTS)
def test_each_part_changes_only_its_weights(part: Any) -> None:
    family = FAMILIES["timm_vit_layerscale_droppath"]
    model = family.build()
    before = weights(model)
    quietly(model, generator=seeded(), example=family.inputs(2), parts=(part,))
    assert changed(before, model) == {f"blocks.{i}.{name}" for i in range(2) for name in OWN[part]}
    after = weights(model)
    for i in range(2):
        for kind in ("weight", "bias"):
            old, new = (w[f"blocks.{i}.attn.qkv.{kind}"].chunk(3) for w in (before, after))
            same = [bool(torch.equal(a, b)) for a, b in zip(old, new, strict=True)]
            expected = {"value-output": [True, True, False], "query-key": [False, False, True], "mlp": [True] * 3}
            assert same == expected[part]


@pytest.mark.parametrize("part", PARTS)
def test_each_part_changes_only_its_weights_in_a_parallel_block(part: Any) -> None:
    family = FAMILIES["timm_parallel_scaling"]
    model = family.build()
    before = unskip.parts(family.build(), family.inputs(1))
    quietly(model, generator=seeded(), example=family.inputs(2), parts=(part,))
    after = unskip.parts(model, family.inputs(1))
    own = {
        "value-output": {"v", "v_bias", "out", "out_bias"},
        "query-key": {"q", "k", "q_bias", "k_bias"},
        "mlp": {"up", "down", "up_bias", "down_bias"},
    }
    olds, news = ([*found.attentions(), *found.mlps()] for found in (before, after))
    for old, new in zip(olds, news, strict=True):
        for view, value in vars(old).items():
            if isinstance(value, Tensor):
                assert torch.equal(value, getattr(new, view)) == (view not in own[part]), view


def test_concatenated_biases_belong_to_their_part() -> None:
    """BEiT has a bias for q and one for v; initialising queries and keys must not change that of v."""
    family = FAMILIES["timm_beit"]
    model = family.build()
    before = weights(model)
    quietly(model, generator=seeded(), example=family.inputs(2), parts=("query-key",))
    assert changed(before, model) == {f"blocks.{i}.attn.{n}" for i in range(2) for n in ("q_bias", "qkv.weight")}


def test_where_selects_sites() -> None:
    family = FAMILIES["timm_vit"]
    model = family.build()
    before = weights(model)
    check = quietly(model, generator=seeded(), example=family.inputs(2), where=lambda site: "1" in site.path)
    assert all(name.startswith("blocks.1.") for name in changed(before, model))
    assert [row.site.path for row in check.rows] == ["blocks.1", "blocks.1"]
    with pytest.raises(InitError, match="no site to initialise"):
        skipless_(model, example=family.inputs(2), where=lambda site: False)


# --- Reproducibility --------------------------------------------------------------------------------------------------


def test_the_same_generator_gives_the_same_weights() -> None:
    one, two, three = (FAMILIES["timm_vit"].build() for _ in range(3))
    x = FAMILIES["timm_vit"].inputs(2)
    quietly(one, generator=seeded(3), example=x)
    state = torch.get_rng_state()
    quietly(two, generator=seeded(3), example=x[:1])
    assert torch.equal(torch.get_rng_state(), state)  # the global generator is not used
    quietly(three, generator=seeded(4), example=x)
    assert not changed(weights(one), two)
    assert changed(weights(one), three)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(9)
        quietly(one, example=x)
        torch.manual_seed(9)
        quietly(two, example=x)
    assert not changed(weights(one), two)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_of_other_dtypes_match_float32_up_to_rounding(dtype: torch.dtype) -> None:
    family = FAMILIES["timm_vit"]
    plain, model = family.build(), family.build().to(dtype)
    quietly(plain, generator=seeded(), example=family.inputs(2))
    quietly(model, generator=seeded(), example=family.inputs(2).to(dtype))
    for name, value in model.state_dict().items():
        if "attn" in name or "mlp" in name:
            eps = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
            torch.testing.assert_close(value.float(), plain.state_dict()[name], rtol=4 * eps, atol=4 * eps)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_the_default_dtype_does_not_matter(default: torch.dtype) -> None:
    family = FAMILIES["timm_vit"]
    plain, model = family.build(), family.build()
    inputs = family.inputs(2)
    quietly(plain, generator=seeded(), example=inputs)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(default)
        quietly(model, generator=seeded(), example=inputs)
    finally:
        torch.set_default_dtype(before)
    assert not changed(weights(plain), model)


@pytest.mark.parametrize("name", ["timm_vit", "hf_gpt2"])
def test_before_and_after_rewire_are_the_same(name: str) -> None:
    family = FAMILIES[name]
    plain, cut = family.build(), family.build()
    quietly(plain, generator=seeded(), example=family.inputs(2))
    wiring = unskip.rewire(cut, Cut(), family.inputs(2))
    quietly(cut, generator=seeded(), example=family.inputs(2))
    assert not changed(weights(plain), cut)
    assert wiring.alphas == [0.0] * len(wiring.sites)  # and it never rewires
    with pytest.raises(BadInput, match="not rewired"):
        unskip.Wiring.of(plain)
    verify_skipless(cut, family.inputs(2))


def test_requires_grad_and_modes_do_not_change() -> None:
    family = FAMILIES["timm_vit"]
    model = family.build().train()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    quietly(model, generator=seeded(), example=family.inputs(2))
    assert model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_presets_are_the_constants_of_the_paper() -> None:
    assert PRESETS["vit-base"] == {"qk_noise": 2.0, "qk_identity": 0.6, "vo_gain": 3.0}
    assert PRESETS["vit-small"]["qk_identity"] == 1.0
    model = FAMILIES["timm_vit"].build()
    quietly(model, **PRESETS["vit-small"], generator=seeded(), example=FAMILIES["timm_vit"].inputs(2))
