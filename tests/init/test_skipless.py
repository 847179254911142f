"""The initialisation for models without skips: its promises as closed forms, and what it leaves alone."""

import copy
import json
import math
import warnings
from typing import Any

import numpy
import pytest
import tests.zoo.more  # noqa: F401  (enters its families into the registry)
import torch
from tests.zoo.families import FAMILIES
from torch import Tensor, nn

import unskip
from unskip import Cut
from unskip.errors import BadInput, InitError, UnskipWarning
from unskip.init import PARTS, PRESETS, Check, skipless_, verify_skipless

ATTENTION = ("value-output", "query-key")


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def quietly(*args: Any, **kwargs: Any) -> Check:
    """Notes of small models are not what is tested here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnskipWarning)
        return skipless_(*args, **kwargs)


def started(name: str, **options: Any) -> tuple[nn.Module, Check, unskip.anatomy.Parts]:
    family = FAMILIES[name]
    model = family.build()
    check = quietly(model, generator=seeded(), example=family.inputs(2), **options)
    return model, check, unskip.parts(model, family.inputs(2))


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def changed(before: dict[str, Tensor], model: nn.Module) -> set[str]:
    return {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}


def singular(matrix: Tensor) -> numpy.ndarray[Any, Any]:
    return numpy.linalg.svd(matrix.detach().double().numpy(), compute_uv=False)


# --- Promises ---------------------------------------------------------------------------------------------------------

WHOLE = ["timm_vit", "timm_deit3", "timm_beit", "nn_encoder_pre", "nn_encoder_post", "hf_vit", "hf_bert", "hf_gpt2"]
WHOLE += ["torchvision_vit", "hf_bloom", "hf_gpt_neox", "timm_parallel_scaling", "hf_modernbert", "hf_albert"]


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("c", [3.0, 0.5])
def test_value_output_is_a_scaled_rotation_of_the_whole_width(name: str, c: float) -> None:
    _, _, found = started(name, c=c, parts=("value-output",))
    for part in found.attentions():
        sigma = singular(part.value_output())
        numpy.testing.assert_allclose(sigma, c**2, rtol=1e-5)
        assert sigma[0] / sigma[-1] - 1 < 1e-5
        for bias in (part.v_bias, part.out_bias):
            assert bias is None or not bias.any()


def test_both_factors_share_the_scale_and_heads_are_not_rotations_of_their_own() -> None:
    _, _, found = started("timm_vit", c=3.0)
    part = next(found.attentions())
    numpy.testing.assert_allclose(singular(part.v.flatten(0, 1)), 3.0, rtol=1e-5)
    numpy.testing.assert_allclose(singular(part.out), 3.0, rtol=1e-5)
    assert len({round(float(part.value_output()[i, j]), 4) for i in range(3) for j in range(3)}) == 9


def truncated(target: numpy.ndarray[Any, Any], rank: int) -> numpy.ndarray[Any, Any]:
    u, s, v = numpy.linalg.svd(target)
    return (u[:, :rank] * s[:rank]) @ v[:rank]  # type: ignore[no-any-return]


def drawn(generator: torch.Generator, alpha: float, beta: float, dim: int) -> numpy.ndarray[Any, Any]:
    z = torch.randn(dim, dim, generator=generator, dtype=torch.float64).numpy()
    return alpha * z / math.sqrt(dim) + beta * numpy.eye(dim)


@pytest.mark.parametrize("name", ["timm_vit", "hf_gpt2", "hf_bloom", "timm_beit", "nn_encoder_pre"])
def test_query_key_is_the_best_approximation_of_its_rank(name: str) -> None:
    _, _, found = started(name, alpha=1.8, beta=1.0, parts=("query-key",))
    generator = seeded()
    for part in found.attentions():
        for q, k in zip(part.q, part.k, strict=True):
            target = drawn(generator, 1.8, 1.0, part.q.shape[2])
            numpy.testing.assert_allclose(q.T @ k, truncated(target, part.head_dim), atol=1e-4)
            numpy.testing.assert_allclose(singular(q), singular(k), rtol=1e-4)  # each has half of it
        for bias in (part.q_bias, part.k_bias):
            assert bias is None or not bias.any()


def test_shared_heads_are_alike() -> None:
    _, _, found = started("timm_vit", heads="shared", parts=("query-key",))
    generator = seeded()
    for part in found.attentions():
        target = drawn(generator, 2.0, 0.6, 16)
        for q, k in zip(part.q, part.k, strict=True):
            numpy.testing.assert_allclose(q.T @ k, truncated(target, 8), atol=1e-4)


def test_sliced_heads_add_up_to_the_whole() -> None:
    model = FAMILIES["timm_vit"].build()
    quietly(
        model,
        2.0,
        3.0,
        generator=seeded(),
        example=FAMILIES["timm_vit"].inputs(2),
        heads="sliced",
        parts=("query-key",),
    )
    generator = seeded()
    for part in unskip.parts(model, FAMILIES["timm_vit"].inputs(2)).attentions():
        target = drawn(generator, 2.0, 3.0, 16)
        numpy.testing.assert_allclose(sum(q.T @ k for q, k in zip(part.q, part.k, strict=True)), target, atol=1e-4)
        first = part.q[0].T @ part.k[0]
        numpy.testing.assert_allclose(first, truncated(target, 8), atol=1e-4)


@pytest.mark.parametrize("heads", ["independent", "shared"])
def test_grouped_queries_get_the_best_that_their_keys_allow(heads: Any) -> None:
    """Four heads of queries, two of keys: each pair stacked is one matrix of rank head_dim."""
    _, _, found = started("hf_llama", heads=heads, parts=("query-key",))
    generator = seeded()
    for part in found.attentions():
        one = drawn(generator, 2.0, 0.6, 16) if heads == "shared" else None
        for group in range(2):
            pair = [one if one is not None else drawn(generator, 2.0, 0.6, 16) for _ in range(2)]
            best = truncated(numpy.concatenate(pair), 4) if one is None else numpy.tile(truncated(one, 4), (2, 1))
            got = torch.cat([part.q[2 * group].T @ part.k[group], part.q[2 * group + 1].T @ part.k[group]])
            numpy.testing.assert_allclose(got, best, atol=1e-4)


def test_grouped_values_are_an_isometry_on_what_they_hold() -> None:
    family = FAMILIES["hf_llama"]
    model = family.build()
    with pytest.warns(UnskipWarning, match="values of 8 dimensions cannot carry a stream of 16"):
        check = skipless_(model, generator=seeded(), example=family.inputs(2), parts=("value-output",))
    part = next(unskip.parts(model, family.inputs(2)).attentions())
    numpy.testing.assert_allclose(singular(part.value_output()), [9.0] * 8 + [0.0] * 8, atol=1e-4)
    assert check.rows[0].values["rank"] == 8
    assert any("isometry on 8" in note for note in check.notes)


@pytest.mark.parametrize("name", [*WHOLE, "hf_llama", "timm_eva02", "timm_eva02_scaled", "hf_dinov2", "timm_mixer"])
def test_mlps_are_orthogonal_with_the_gain_of_their_shape(name: str) -> None:
    _, _, found = started(name, parts=("mlp",))
    assert len(list(found.mlps())) > 0
    for part in found.mlps():
        for weight in (part.up, part.gate, part.down):
            if weight is not None:
                out, into = weight.shape
                numpy.testing.assert_allclose(singular(weight), max(math.sqrt(out / into), 1), rtol=1e-5)
        for bias in (part.up_bias, part.gate_bias, part.down_bias):
            assert bias is None or not bias.any()


def test_the_directions_are_uniform() -> None:
    """The QR of a Gaussian is uniform only with its signs put right: else the trace would lean one way."""
    family = FAMILIES["timm_vit"]
    traces = []
    for seed in range(25):
        model = family.build()
        quietly(model, generator=seeded(seed), example=family.inputs(1), parts=("mlp",))
        traces += [float(part.up[:16].trace()) for part in unskip.parts(model, family.inputs(1)).mlps()]
    # Entries of the unit matrix have variance 1/64; times the gain of 2 and 16 of them: 16 * 4 / 64 = 1.
    mean = sum(traces) / len(traces)
    assert abs(mean) < 4 / math.sqrt(len(traces))
    assert sum(t * t for t in traces) / len(traces) == pytest.approx(1.0, abs=0.5)


def test_layer_scale_becomes_one_and_drop_path_is_switched_off() -> None:
    family = FAMILIES["timm_vit_layerscale_droppath"]
    model = family.build()
    with pytest.warns(UnskipWarning) as caught:
        check = skipless_(model, generator=seeded(), example=family.inputs(2))
    assert any("drop path was switched off in 2 modules" in str(w.message) for w in caught)
    assert any("drop path was switched off" in note for note in check.notes)
    assert any("drop path was switched off" in line for line in str(check).splitlines())
    scales = [p for name, p in model.named_parameters() if name.endswith("gamma")]
    assert len(scales) == 4
    assert all((scale == 1).all() for scale in scales)
    rates = [module.drop_prob for module in model.modules() if hasattr(module, "drop_prob")]
    assert rates
    assert not any(rates)
    model.train()
    x = family.inputs(2)
    assert torch.equal(model(x), model(x))  # nothing is dropped any more


def test_a_scalar_of_a_branch_is_a_scale_too() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.size = nn.Linear(4, 8), nn.Linear(8, 4), nn.Parameter(torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.size * self.down(self.up(x).relu())

    model = Block()
    skipless_(model, generator=seeded(), example=torch.randn(2, 3, 4))
    assert model.size.item() == 1


# --- Separable --------------------------------------------------------------------------------------------------------

OWN = {
    "value-output": {"attn.qkv.weight", "attn.qkv.bias", "attn.proj.weight", "attn.proj.bias", "ls1.gamma"},
    "query-key": {"attn.qkv.weight", "attn.qkv.bias"},
    "mlp": {"mlp.fc1.weight", "mlp.fc1.bias", "mlp.fc2.weight", "mlp.fc2.bias", "ls2.gamma"},
}


@pytest.mark.parametrize("part", PARTS)
def test_each_part_touches_its_own_weights_alone(part: Any) -> None:
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
def test_each_part_touches_its_own_weights_of_a_parallel_block_alone(part: Any) -> None:
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


def test_biases_put_together_belong_to_their_part() -> None:
    """BEiT stores a bias for q and one for v; queries and keys must not clear that of the values."""
    family = FAMILIES["timm_beit"]
    model = family.build()
    before = weights(model)
    quietly(model, generator=seeded(), example=family.inputs(2), parts=("query-key",))
    assert changed(before, model) == {f"blocks.{i}.attn.{n}" for i in range(2) for n in ("q_bias", "qkv.weight")}


def test_where_chooses_sites() -> None:
    family = FAMILIES["timm_vit"]
    model = family.build()
    before = weights(model)
    check = quietly(model, generator=seeded(), example=family.inputs(2), where=lambda site: "1" in site.path)
    assert all(name.startswith("blocks.1.") for name in changed(before, model))
    assert [row.site.path for row in check.rows] == ["blocks.1", "blocks.1"]
    with pytest.raises(InitError, match="no site to initialise"):
        skipless_(model, example=family.inputs(2), where=lambda site: False)


# --- The same everywhere ----------------------------------------------------------------------------------------------


def test_the_same_generator_gives_the_same_weights() -> None:
    one, two, three = (FAMILIES["timm_vit"].build() for _ in range(3))
    x = FAMILIES["timm_vit"].inputs(2)
    quietly(one, generator=seeded(3), example=x)
    state = torch.get_rng_state()
    quietly(two, generator=seeded(3), example=x[:1])
    assert torch.equal(torch.get_rng_state(), state)  # only its own generator is drawn from
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
def test_weights_are_those_of_float32_up_to_rounding(dtype: torch.dtype) -> None:
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


def test_frozen_weights_and_modes_stay_as_they_were() -> None:
    family = FAMILIES["timm_vit"]
    model = family.build().train()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    quietly(model, generator=seeded(), example=family.inputs(2))
    assert model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_presets_are_the_constants_of_the_paper() -> None:
    assert PRESETS["vit-base"] == {"alpha": 2.0, "beta": 0.6, "c": 3.0}
    assert PRESETS["vit-small"]["beta"] == 1.0
    model = FAMILIES["timm_vit"].build()
    quietly(model, **PRESETS["vit-small"], generator=seeded(), example=FAMILIES["timm_vit"].inputs(2))


# --- Refused ----------------------------------------------------------------------------------------------------------


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
        ("hf_llama", {"heads": "sliced"}, "dealt out"),
        ("timm_vit", {"where": lambda site: False}, "no site"),
    ],
)
def test_what_cannot_be_initialised_is_left_bit_for_bit(name: str, options: dict[str, Any], reason: str) -> None:
    family = FAMILIES[name]
    model = family.build()
    before = weights(model)
    with pytest.raises(InitError, match=reason):
        skipless_(model, generator=seeded(), example=family.inputs(2), **options)
    assert not changed(before, model)


def test_a_computed_bias_is_refused() -> None:
    model = Computed()
    before = weights(model)
    with pytest.raises(InitError, match="bias that is computed"):
        skipless_(model, example=torch.randn(2, 3, 4))
    assert not changed(before, model)


def test_a_broken_promise_is_undone() -> None:
    class Even(nn.Module):
        """Scores too small for attention to be anything but even."""

        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (f(x).unflatten(-1, (2, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
            return x + self.o(((1e-3 * (q @ k.mT)).softmax(-1) @ v).transpose(1, 2).flatten(2))

    model = Even()
    before = weights(model)
    with pytest.raises(InitError, match="of its attention to itself, evenly"):
        skipless_(model, generator=seeded(), example=torch.randn(2, 5, 8))
    assert not changed(before, model)


def test_bad_arguments() -> None:
    model = FAMILIES["timm_vit"].build()
    for options, match in (
        ({"alpha": math.nan}, "alpha"),
        ({"beta": -1.0}, "beta"),
        ({"c": 0.0}, "c is 0.0"),
        ({"parts": "mlp"}, "sequence"),
        ({"parts": ("mpl",)}, "parts"),
        ({"parts": ()}, "parts"),
        ({"heads": "odd"}, "heads"),
        ({"where": "attnetion"}, "where"),
        ({"alpha": "2"}, "alpha is '2'"),
        ({"parts": [["mlp"]]}, "parts"),
        ({"parts": None}, "parts"),
        ({"generator": 3}, r"write torch\.Generator\(\)\.manual_seed\(3\)"),
    ):
        with pytest.raises(BadInput, match=match):
            skipless_(model, **options)  # type: ignore[arg-type]
    for options in ({"parts": "mlp"}, {"parts": ("mpl",)}, {"parts": ()}, {"where": "attnetion"}):
        with pytest.raises(BadInput, match=next(iter(options))):  # nothing judged must not read as all is well
            verify_skipless(model, **options)  # type: ignore[arg-type]


def test_sites_without_a_promise_are_not_called_kept() -> None:
    family = FAMILIES["timm_vit"]
    check = quietly(family.build(), generator=seeded(), example=family.inputs(2), parts=("mlp",))
    for row in check.rows:
        assert bool(row.values) == (row.site.kind == "mlp")
    assert str(check).count("not judged") == sum(row.site.kind == "attention" for row in check.rows)


class Tied(nn.Module):
    """Queries and keys are made by one weight; a norm follows the values where asked."""

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
    with pytest.raises(InitError, match="queries and keys are one weight"):
        skipless_(model, generator=seeded(), example=x)
    assert not changed(before, model)
    quietly(model, generator=seeded(), example=x, parts=("value-output",))


def test_what_stands_between_values_and_output_is_told() -> None:
    x = torch.randn(2, 5, 8)
    for norm in (False, True):
        check = quietly(Tied(tied=False, norm=norm), generator=seeded(), example=x)
        assert any("more than W_V W_O (value norm)" in note for note in check.notes) == norm


def test_a_model_without_values_is_refused() -> None:
    with torch.device("meta"):
        model = copy.deepcopy(FAMILIES["timm_vit"].make()).eval()
    with pytest.raises(InitError, match="meta device"):
        skipless_(model, example=torch.empty(1, 3, 16, 16, device="meta"))


# --- Verify -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("blocks.1.attn.proj.weight", r"W_V W_O has condition"),
        ("blocks.1.attn.qkv.weight", r"W_V W_O has condition"),
        ("blocks.0.mlp.fc2.weight", r"from orthogonal"),
    ],
)
def test_verify_fails_loudly_where_a_weight_was_spoiled(name: str, reason: str) -> None:
    family = FAMILIES["timm_vit"]
    model = family.build()
    quietly(model, generator=seeded(), example=family.inputs(2))
    held = verify_skipless(model, family.inputs(2))
    assert not held.failed
    assert all(row.failed == () for row in held.rows)
    with torch.no_grad():
        model.get_parameter(name)[-1].mul_(1.01)
    with pytest.raises(InitError, match=reason):
        verify_skipless(model, family.inputs(2))
    found = verify_skipless(model, family.inputs(2), check=False)
    assert len(found.failed) == 1
    with pytest.raises(InitError, match="1 of 4 sites fail"):
        found.raise_if_failed()
    assert reason.split()[-1] in str(found)


@pytest.mark.parametrize("name", ["blocks.0.mlp.fc1.weight", "blocks.1.attn.proj.weight", "blocks.0.attn.qkv.weight"])
def test_verify_fails_on_weights_that_are_not_finite(name: str) -> None:
    family = FAMILIES["timm_vit"]
    model = family.build()
    quietly(model, generator=seeded(), example=family.inputs(2))
    with torch.no_grad():
        model.get_parameter(name)[0, 0] = torch.nan
    with pytest.raises(InitError, match="nan"):
        verify_skipless(model, family.inputs(2))


def test_verify_fails_on_a_default_model() -> None:
    family = FAMILIES["timm_vit"]
    with pytest.raises(InitError, match="sites fail"):
        verify_skipless(family.build(), family.inputs(2))
    with pytest.raises(InitError, match="no site to judge"):
        verify_skipless(family.build(), family.inputs(2), where=lambda site: False)


def test_the_self_attention_of_the_table_is_that_of_the_formula() -> None:
    model, check, found = started("timm_vit")
    part = next(found.attentions())
    tokens = torch.randn(64, 16, generator=seeded(), dtype=torch.float64)
    tokens = (tokens - tokens.mean(-1, keepdim=True)) / tokens.var(-1, keepdim=True, correction=0).add(1e-5).sqrt()
    masses = []
    for q, k in zip(part.q.double(), part.k.double(), strict=True):
        p = ((tokens @ q.T) @ (tokens @ k.T).T / math.sqrt(8)).softmax(-1)
        masses.append(float(p.diagonal().mean()))
    assert check.rows[0].values["self-attention"] == pytest.approx(sum(masses) / 2)
    assert check.rows[0].values["least"] == pytest.approx(min(masses))
    p_example = unskip.measure(model, FAMILIES["timm_vit"].inputs(2), jacobians="off").sites[0].self_attention
    assert p_example is not None
    assert check.rows[0].values["on example"] == pytest.approx(sum(p_example) / 2)
    assert check.rows[0].values["evenly"] == pytest.approx(1 / 5)


def test_a_check_is_plain_data() -> None:
    _, check, _ = started("timm_vit")
    data = json.loads(json.dumps(check.to_dict(), allow_nan=False))
    assert [row["path"] for row in data["rows"]] == ["blocks.0", "blocks.0", "blocks.1", "blocks.1"]
    assert data["rows"][0]["failed"] == []
    assert "cond(W_V W_O)" in str(check)
    assert "mlp error" in str(check)


def test_models_that_normalise_their_queries_say_that_this_is_not_judged() -> None:
    family = FAMILIES["timm_swinv2"]
    model = family.build()
    check = quietly(model, generator=seeded(), example=family.inputs(2))
    assert any("normalises or scales its queries" in note for note in check.notes)
    assert "self-attention" not in check.rows[0].values
    assert "on example" in check.rows[0].values


def test_it_brings_a_cut_model_back() -> None:
    """What it is for: without skips, random weights let nearly no direction through, and these let most."""
    from timm.models.vision_transformer import VisionTransformer

    model = VisionTransformer(img_size=16, patch_size=8, embed_dim=16, depth=2, num_heads=2, num_classes=0).eval()
    x = FAMILIES["timm_vit"].inputs(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnskipWarning)
        unskip.rewire(model, Cut(), x)
        before = unskip.measure(model, x)
        skipless_(model, generator=seeded(), example=x)
    after = unskip.measure(model, x)
    assert before.network is not None
    assert after.network is not None
    assert before.network.quantiles[0.5] < 1e-9 * before.network.sigma_max
    assert after.network.quantiles[0.5] > 1e-4 * after.network.sigma_max
