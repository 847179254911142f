"""Fields of parts (heads, activations, gates, scales), and the reasons for branches without parts."""

from collections.abc import Callable

import pytest
import tests.zoo.more  # noqa: F401  (enters its families into the registry)
import timm
import torch
from tests.anatomy.opened import open_family
from tests.zoo.families import FAMILIES
from torch import Tensor, nn
from torch.nn import functional as F

import unskip
from unskip.anatomy import MlpParts

# --- Facts ------------------------------------------------------------------------------------------------------------


# Of the first attention: heads, key heads, head_dim, scale of the scores, extras.
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
def test_fields_of_attention_parts(name: str) -> None:
    part = next(open_family(name)[1].attentions())
    number, groups, width, scale, extras = ATTENTIONS[name]
    assert (part.heads, part.kv_heads, part.head_dim) == (number, groups, width)
    assert part.softmax_scale == pytest.approx(scale, rel=1e-6)
    assert part.extras == extras


@pytest.mark.parametrize("name", ["hf_gpt2", "hf_llama", "hf_bloom", "hf_gpt_neox"])
def test_an_empty_cache_is_no_position_of_keys(name: str) -> None:
    model = FAMILIES[name].build()
    model.config.use_cache = True
    example = FAMILIES[name].inputs(1)
    assert model(**example).past_key_values is not None
    part = next(unskip.parts(model, example).attentions())
    assert part.extras == ATTENTIONS[name][-1]


class Queries(nn.Module):
    """One head of attention with a step on its queries and keys."""

    def __init__(self, step: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.step = step

    def forward(self, x: Tensor) -> Tensor:
        weights = (self.step(self.q(x)) @ self.step(self.k(x)).transpose(1, 2)).softmax(-1)
        return x + self.out(weights @ self.v(x))


def rotate(x: Tensor) -> Tensor:
    """Rotary positions as complex numbers, as in Llama 4's image encoder."""
    turns = torch.polar(torch.ones(3, 4), torch.arange(12.0).view(3, 4))
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (4, 2))) * turns).flatten(2)


STEPS = {
    "positions": rotate,
    "scale": lambda x: x * torch.linspace(1, 2, 8),  # of each channel, as in TimesFM
}


@pytest.mark.parametrize("step", STEPS)
def test_complex_rotary_positions_and_scales_of_channels_are_reported(step: str) -> None:
    model = Queries(STEPS[step])
    (part,) = unskip.parts(model, torch.randn(2, 3, 8)).attentions()
    assert part.extras == (f"query-key {step}",)


class Resampler(nn.Module):
    """Latents attend to a context and to themselves, as in Flamingo's resampler."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        both = torch.cat([context, x], 1)
        weights = (self.q(x) @ self.k(both).transpose(1, 2)).softmax(-1)
        return x + self.out(weights @ self.v(both))


def test_keys_of_the_stream_and_of_another_sequence_are_reported() -> None:
    (part,) = unskip.parts(Resampler(), (torch.randn(2, 3, 8), torch.randn(2, 5, 8))).attentions()
    assert part.extras == ("input concatenation",)


# Of the first MLP: its activation, the norm (kind, place, eps), the norm at the branch's end, LayerScale, extras.
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
    # Named LayerNorm without subtracting the mean; and one that subtracts it, spelled out in operators.
    "hf_t5": ("relu", ("rmsnorm", "pre", 1e-6), None, False, ()),
    "hf_cohere": ("silu", ("layernorm", "pre", 1e-5), None, False, ()),
    # Multiplies by 1 + weight.
    "hf_gemma2": ("gelu_tanh", ("rmsnorm", "pre", 1e-6), ("rmsnorm", 1.0), False, ()),
    "diffusers_dit": ("gelu_tanh", ("layernorm", "pre", 1e-5), None, False, ("input modulation", "input sum")),
    "hand_mangled": ("gelu", ("layernorm", "pre", 1e-5), None, False, ("output factor",)),
}


@pytest.mark.parametrize("name", MLPS)
def test_fields_of_mlp_parts(name: str) -> None:
    part = next(open_family(name)[1].mlps())
    activation, norm, out_norm, scaled, extras = MLPS[name]
    assert part.activation == activation
    assert part.norm is not None
    assert (part.norm.kind, part.norm.place, part.norm.eps) == pytest.approx(norm)
    assert (part.out_norm and (part.out_norm.kind, part.out_norm.offset)) == out_norm
    assert (part.scale is not None) == scaled
    assert part.extras == extras


def test_the_gate_of_a_conditioned_branch_is_reported() -> None:
    _, found = open_family("diffusers_dit")
    for part in (*found.attentions(), *found.mlps()):
        assert part.gated
        assert not part.closed


def test_cross_attention_is_reported() -> None:
    _, found = open_family("hf_t5")
    assert [part.cross for part in found.attentions()] == [False, False, False, True, False, True]


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "tanh", "sigmoid", "mish", "hardswish"])
def test_an_activation_is_recognised_by_its_values(activation: str) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(getattr(F, activation)(self.up(x)))

    (part,) = unskip.parts(Block(), torch.randn(2, 3, 4))
    assert isinstance(part, MlpParts)
    assert part.activation == activation


def test_a_custom_activation_has_no_name() -> None:
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


# --- Branches without parts -------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """A residual around attention in one of several forms."""

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
        ("more weights", "weights in a row"),
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
    """Query heads share key heads in turns, not consecutively: views would pair the wrong heads."""

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
    assert "not consecutive" in found.reasons[0]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("timm_parallel_things", "2 attentions"),
        ("timm_diff_parallel", "2 attentions"),
        ("timm_resnet", "conv"),
        ("hand_decoys", "weights in a row"),
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


def test_a_computed_bias_is_reported() -> None:
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


def test_the_table_lists_parts_and_reasons() -> None:
    text = str(open_family("hf_llama")[1])
    assert "the weights of 4 of 4 sites" in text
    assert "4 heads of 4, 2 for keys and values" in text
    assert "16 > 32 > 16, gated" in text
    assert "silu" in text
    assert repr(open_family("timm_resnet")[1]) == "<Parts of ResNet: 0 of 8 sites>"


def test_talking_heads_are_none_with_the_reason() -> None:
    """A weight mixes heads between scores and values, so no head has its own queries, keys and values."""
    model = timm.create_model("cait_xxs24_224", depth=1, embed_dim=24, num_heads=4, img_size=32)
    parts = unskip.parts(model)
    assert parts[0] is None
    assert "talking heads" in parts.reasons[0]
    assert all(part is not None for part in parts[1:])


def test_a_learned_bias_of_scores_is_not_a_mask_even_at_zero() -> None:
    model = timm.create_model("levit_128s", img_size=64)
    part = next(unskip.parts(model, torch.randn(1, 3, 64, 64)).attentions())
    assert "score bias" in part.extras
    assert "mask" not in part.extras
    assert "value norm" in part.extras
