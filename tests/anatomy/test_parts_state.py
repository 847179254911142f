"""Parts of rewired, half-precision and meta models, and of models with unusual arguments."""

import contextlib
import copy
import random
from typing import Any

import numpy
import pytest
import tests.zoo.more  # noqa: F401  (enters its families into the registry)
import torch
from tests.anatomy.opened import flat, open_family
from tests.zoo.families import FAMILIES
from torch import nn
from torch.utils._pytree import tree_map

import unskip
from unskip import Anneal, Cut, Decay, Keep, Learn
from unskip.anatomy import AttentionParts, MlpParts
from unskip.errors import BadInput, ForwardError


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
def test_parts_leaves_the_model_unchanged(name: str, rewired: bool) -> None:
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


def test_learned_and_annealed_weights_have_their_current_values() -> None:
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
def test_half_precision_weights_are_viewed(name: str, dtype: torch.dtype) -> None:
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


def test_a_meta_model_has_parts() -> None:
    with torch.device("meta"):
        model = copy.deepcopy(FAMILIES["timm_vit"].make())
    found = unskip.parts(model.eval(), torch.empty(1, 3, 16, 16, device="meta"))
    assert [type(part) for part in found] == [AttentionParts, MlpParts] * 2
    for part in found.attentions():
        assert part.q.is_meta
        assert part.norm is not None
        assert part.norm.kind == "layernorm"


def test_conditions_are_sliced_with_the_samples() -> None:
    """Timesteps and labels have one axis: unsliced, one image would get several of them."""
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
