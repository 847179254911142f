"""Models that `skipless_` cannot initialise are refused with the reason, and left unchanged."""

import copy
import math
import re
from typing import Any

import pytest
import timm
import torch
from tests.init.started import changed, quietly, seeded, weights
from tests.zoo.families import FAMILIES
from torch import Tensor, nn

from unskip.errors import BadInput, InitError
from unskip.init import skipless_, verify_skipless


class Computed(nn.Module):
    """An MLP with a bias that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6, bias=False), nn.Linear(6, 4)
        self.raw = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.linear(x, self.up.weight, self.raw.exp()).relu())


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("timm_parallel_things", {}, "2 attentions in one branch"),
        ("timm_resnet", {}, "conv"),
        ("hf_t5", {}, "another sequence"),
        ("timm_vit", {"where": lambda site: False}, "no site"),
    ],
)
def test_refused_models_are_unchanged_bit_for_bit(name: str, options: dict[str, Any], reason: str) -> None:
    family = FAMILIES[name]
    model = family.build()
    before = weights(model)
    with pytest.raises(InitError, match=reason):
        skipless_(model, generator=seeded(), example=family.inputs(2), **options)
    assert not changed(before, model)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("hf_llama", "nn_decoder_layer_pre") else pytest.mark.full)
        for name in sorted(FAMILIES)
    ],
)
def test_every_family_is_initialised_or_refused_with_a_reason(name: str) -> None:
    """Grouped queries, cross-attention, heads of any width, convolutions: never an exception of torch."""
    family = FAMILIES[name]
    model = family.build()
    before = weights(model)
    try:
        quietly(model, example=family.inputs(2), generator=seeded())
    except InitError:
        assert not changed(before, model)
    else:
        assert changed(before, model)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"mlp_bias": "1"}, "mlp_bias must be a finite number, got '1'"),
        ({"mlp_bias": math.nan}, "mlp_bias must be a finite number, got nan"),
        ({"self_attention": 1.5}, "self_attention must be a number in (0, 1), got 1.5"),
    ],
)
def test_a_wrong_value_is_named_with_its_function_and_its_range(options: dict[str, Any], reason: str) -> None:
    family = FAMILIES["timm_vit"]
    for function in (skipless_, verify_skipless):
        with pytest.raises(BadInput, match=re.escape(f"{function.__name__}: {reason}")):
            function(family.build(), family.inputs(2), **options)


@pytest.mark.parametrize(("width", "use"), [(8, "use 2."), (4, "use wider heads."), (16, "use 1 to 2.")])
def test_the_number_of_carrying_heads_to_use_is_named(width: int, use: str) -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=8, patch_size=4, depth=1, embed_dim=16, num_heads=2)
    model.blocks[0].attn = timm.layers.Attention(16, 2, attn_head_dim=width)
    with pytest.raises(InitError, match=re.escape(f"for a width of 16; {use}")):
        skipless_(model, torch.randn(2, 3, 8, 8), carry=3)


def test_a_computed_bias_is_refused() -> None:
    model = Computed()
    before = weights(model)
    with pytest.raises(InitError, match="bias that is computed"):
        skipless_(model, example=torch.randn(2, 3, 4))
    assert not changed(before, model)


def test_a_failed_check_is_undone() -> None:
    class Even(nn.Module):
        """Its scores are so small that attention is uniform."""

        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (f(x).unflatten(-1, (2, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
            return x + self.o(((1e-3 * (q @ k.mT)).softmax(-1) @ v).transpose(1, 2).flatten(2))

    model = Even()
    before = weights(model)
    with pytest.raises(InitError, match="self-attention"):
        skipless_(model, generator=seeded(), example=torch.randn(2, 5, 8))
    assert not changed(before, model)


def test_bad_arguments() -> None:
    model = FAMILIES["timm_vit"].build()
    for options, match in (
        ({"alpha": math.nan}, "qk_noise"),
        ({"beta": -1.0}, "qk_identity"),
        ({"c": 0.0}, "vo_gain.*above 0"),
        ({"vo_gain": 2.0, "c": 3.0}, "give one of them"),
        ({"parts": "mlp"}, "sequence"),
        ({"parts": ("mpl",)}, "parts"),
        ({"parts": ()}, "parts"),
        ({"where": "attnetion"}, "where"),
        ({"alpha": "2"}, "qk_noise"),
        ({"parts": [["mlp"]]}, "parts"),
        ({"parts": None}, "parts"),
        ({"generator": 3}, r"write torch\.Generator\(\)\.manual_seed\(3\)"),
    ):
        with pytest.raises(BadInput, match=match):
            skipless_(model, **options)  # type: ignore[arg-type]
    for options in ({"parts": "mlp"}, {"parts": ("mpl",)}, {"parts": ()}, {"where": "attnetion"}):
        with pytest.raises(BadInput, match=next(iter(options))):  # an empty check must not pass
            verify_skipless(model, **options)  # type: ignore[arg-type]


def test_sites_that_are_not_checked_are_listed() -> None:
    family = FAMILIES["timm_vit"]
    check = quietly(family.build(), generator=seeded(), example=family.inputs(2), parts=("mlp",))
    for row in check.rows:
        assert bool(row.values) == (row.site.kind == "mlp")
    assert str(check).count("not checked") == sum(row.site.kind == "attention" for row in check.rows)


class Tied(nn.Module):
    """Attention with one weight for queries and keys, or with a norm on its values."""

    def __init__(self, tied: bool, norm: bool = False) -> None:
        super().__init__()
        self.q, self.v, self.o = (nn.Linear(8, 8) for _ in range(3))
        self.k = self.q if tied else nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f.unflatten(-1, (2, 4)).transpose(1, 2) for f in (self.q(x), self.k(x), self.norm(self.v(x))))
        return x + self.o(((q @ k.mT / 2).softmax(-1) @ v).transpose(1, 2).flatten(2))


def test_one_weight_for_queries_and_keys_is_refused() -> None:
    x = torch.randn(2, 5, 8)
    quietly(Tied(tied=False), generator=seeded(), example=x)
    model = Tied(tied=True)
    before = weights(model)
    with pytest.raises(InitError, match="queries and keys"):
        skipless_(model, generator=seeded(), example=x)
    assert not changed(before, model)
    quietly(model, generator=seeded(), example=x, parts=("value-output",))


def test_a_norm_between_values_and_output_is_noted() -> None:
    x = torch.randn(2, 5, 8)
    for norm in (False, True):
        check = quietly(Tied(tied=False, norm=norm), generator=seeded(), example=x)
        assert any("more than W_V W_O (value norm)" in note for note in check.notes) == norm


def test_a_meta_model_is_refused() -> None:
    with torch.device("meta"):
        model = copy.deepcopy(FAMILIES["timm_vit"].make()).eval()
    with pytest.raises(InitError, match="meta device"):
        skipless_(model, example=torch.empty(1, 3, 16, 16, device="meta"))
