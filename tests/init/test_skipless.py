"""`skipless_`: the initialised weights against closed forms."""

import math
import warnings
from typing import Any

import numpy
import pytest
import torch
from tests.init.started import quietly, seeded, started
from tests.zoo.families import FAMILIES
from torch import Tensor, nn

import unskip
from unskip import Cut
from unskip.anatomy import AttentionParts
from unskip.errors import BadInput, UnskipWarning
from unskip.init import skipless_


def singular(matrix: Tensor) -> numpy.ndarray[Any, Any]:
    return numpy.linalg.svd(matrix.detach().double().numpy(), compute_uv=False)


WHOLE = ["timm_vit", "timm_beit", "nn_encoder_post", "hf_gpt2", "torchvision_vit", "timm_parallel_scaling", "hf_albert"]
# Families with the same layout as one of those above.
ALIKE = ["timm_deit3", "nn_encoder_pre", "hf_vit", "hf_bert", "hf_bloom", "hf_gpt_neox", "hf_modernbert"]
FULL = [pytest.param(name, marks=pytest.mark.full) for name in ALIKE]


@pytest.mark.parametrize("name", [*WHOLE, *FULL])
def test_value_output_is_a_scaled_rotation_of_the_whole_width(name: str) -> None:
    c = 0.5 if name == "timm_vit" else 3.0
    _, _, found = started(name, c=c, parts=("value-output",))
    for part in found.attentions():
        sigma = singular(part.value_output())
        numpy.testing.assert_allclose(sigma, c**2, rtol=1e-5)
        assert sigma[0] / sigma[-1] - 1 < 1e-5
        for bias in (part.v_bias, part.out_bias):
            assert bias is None or not bias.any()


def test_values_and_outputs_share_the_scale_and_single_heads_are_not_rotations() -> None:
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
            numpy.testing.assert_allclose(singular(q), singular(k), rtol=1e-4)  # q and k have equal singular values
        for bias in (part.q_bias, part.k_bias):
            assert bias is None or not bias.any()


def test_grouped_queries_are_the_best_approximation_for_shared_keys() -> None:
    """Four query heads and two key heads: the two query heads of a key head stack to one matrix of rank head_dim."""
    _, _, found = started("hf_llama", parts=("query-key",))
    generator = seeded()
    for part in found.attentions():
        for group in range(2):
            best = truncated(numpy.concatenate([drawn(generator, 2.0, 0.6, 16) for _ in range(2)]), 4)
            got = torch.cat([part.q[2 * group].T @ part.k[group], part.q[2 * group + 1].T @ part.k[group]])
            numpy.testing.assert_allclose(got, best, atol=1e-4)


def test_grouped_values_are_an_isometry_on_their_row_space() -> None:
    family = FAMILIES["hf_llama"]
    model = family.build()
    with pytest.warns(UnskipWarning, match="8 dimensions.*16"):
        check = skipless_(model, generator=seeded(), example=family.inputs(2), parts=("value-output",))
    part = next(unskip.parts(model, family.inputs(2)).attentions())
    numpy.testing.assert_allclose(singular(part.value_output()), [9.0] * 8 + [0.0] * 8, atol=1e-4)
    assert check.rows[0].values["rank"] == 8
    assert any("isometry on 8" in note for note in check.notes)


@pytest.mark.parametrize(
    "name", [*WHOLE, *FULL, "hf_llama", "timm_eva02", "timm_eva02_scaled", "hf_dinov2", "timm_mixer"]
)
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
    """The Q of a Gaussian matrix is uniform only after its signs are corrected; otherwise the trace is biased."""
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
    assert torch.equal(model(x), model(x))  # no drop path


def test_a_scalar_factor_on_a_branch_is_set_to_one() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.size = nn.Linear(4, 8), nn.Linear(8, 4), nn.Parameter(torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.size * self.down(self.up(x).relu())

    model = Block()
    skipless_(model, generator=seeded(), example=torch.randn(2, 3, 4))
    assert model.size.item() == 1


class Wide(nn.Module):
    """Attention with a head, or all heads together, wider than the stream."""

    def __init__(self, dim: int, heads: int, width: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv = nn.LayerNorm(dim), nn.Linear(dim, 3 * heads * width, bias=False)
        self.out = nn.Linear(heads * width, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize(("dim", "heads", "width"), [(8, 2, 16), (8, 4, 4), (8, 1, 8)])
def test_heads_wider_than_the_stream(dim: int, heads: int, width: int) -> None:
    model = Wide(dim, heads, width)
    x = torch.randn(2, 6, dim, generator=seeded())
    check = skipless_(model, x, qk_noise=1.8, qk_identity=1.0, generator=seeded())
    assert not check.failed
    found = unskip.parts(model, x)[0]
    assert isinstance(found, AttentionParts)
    torch.testing.assert_close(
        found.value_output() @ found.value_output().T, 81 * torch.eye(dim).double(), atol=1e-4, rtol=0
    )
    draw = seeded()
    torch.randn(heads * width, dim, generator=draw, dtype=torch.float64)  # W_V and W_O are drawn first
    torch.randn(dim, dim, generator=draw, dtype=torch.float64)
    target = drawn(draw, 1.8, 1.0, dim)
    product = (found.q[0].T @ found.k[0]).double().detach().numpy()
    if width >= dim:
        numpy.testing.assert_allclose(product, target, atol=1e-5)
    assert (found.q.abs().amax(-1) > 0).all()  # all dimensions of a head are used
    assert (found.k.abs().amax(-1) > 0).all()


def test_constants_have_a_name_and_the_symbol_of_the_paper() -> None:
    one, other = Wide(8, 2, 4), Wide(8, 2, 4)
    x = torch.randn(2, 6, 8, generator=seeded())
    skipless_(one, x, alpha=1.5, beta=0.9, c=2.0, generator=seeded())
    skipless_(other, x, qk_noise=1.5, qk_identity=0.9, vo_gain=2.0, generator=seeded())
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(BadInput, match="example"):
        skipless_(one, 2.0)  # the second argument is the example, as in other functions


def test_rank_of_a_cut_model_with_and_without_the_initialisation() -> None:
    """Without skips, default weights pass almost no direction to the output, and these pass most."""
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


def test_attention_of_one_token_is_not_near_uniform() -> None:
    """A Swin has one token in its last stage for small images, and equal tokens in all for images of one colour."""
    timm = pytest.importorskip("timm")
    shape = {"img_size": 32, "embed_dim": 16, "depths": (1, 1, 1, 1), "num_heads": (2, 2, 2, 2), "num_classes": 3}
    model = timm.create_model("swin_tiny_patch4_window7_224", **shape)
    for stage, noted in ((2, True), (3, False)):
        check = quietly(model, torch.ones(2, 3, 32, 32), where=lambda site, n=stage: f"layers.{n}" in site.path)
        assert any("near-uniform" in note for note in check.notes) == noted
